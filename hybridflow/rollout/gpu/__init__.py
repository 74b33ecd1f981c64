"""Generating on CUDA: a page-major cache, Triton kernels, and decoding as captured graphs."""
