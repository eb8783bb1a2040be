"""Mask and score functions: traced into an expression, which each backend prints in its own operations."""
