"""Launch plans: the tile configuration of a problem, cached on the problem."""

from __future__ import annotations

import functools

from tilewise.problem import AttentionProblem
from tilewise.tuning import TileConfig

# A score tile over all heads stays near this size, so that it is still in cache when exp and PV read it.
# Measured on 2 cores with 1 MB of L2 each and 32 MB of L3.
SCORE_TILE_BYTES = 4 << 20


@functools.lru_cache(maxsize=4096)
def tiled_plan(problem: AttentionProblem) -> TileConfig:
    """Tiles for the PyTorch backend: large enough that an operation's overhead does not matter."""
    block_q = min(256, max(1, problem.seqlen_q))
    block_k = min(512, max(1, problem.seqlen_k))
    one_entry = max(1, problem.num_heads * block_q * block_k * problem.compute_dtype.itemsize)
    return TileConfig(block_q, block_k, max(1, SCORE_TILE_BYTES // one_entry))
