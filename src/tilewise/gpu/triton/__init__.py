"""Attention in plain Triton, for any GPU that Triton targets: every option, forward and backward."""
