"""The oracle: attention as the formula reads, with every N x N matrix stored, in float64.

Nothing here is shared with the backends (masks and positions are written out again), so an error in
the tile arithmetic cannot hide. Use it to test; it needs O(seqlen_q * seqlen_k) memory.
"""

from tilewise.reference.formula import ReferenceGradients, attention, attention_backward
from tilewise.reference.statistics import attention_statistics

__all__ = ["ReferenceGradients", "attention", "attention_backward", "attention_statistics"]
