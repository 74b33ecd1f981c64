"""Decoding on a CPU: compiled kernels, and a transformer whose decoding step is one call."""
