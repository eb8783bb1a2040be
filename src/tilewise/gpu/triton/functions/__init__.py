"""Mask and score functions in the Triton kernels."""
