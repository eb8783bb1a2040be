"""Mask and score functions in Triton, for the kernels of every GPU backend."""
