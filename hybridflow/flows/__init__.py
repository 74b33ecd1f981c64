"""Algorithms as dataflow graphs: one short file each, which reads like its paper. No torch."""
