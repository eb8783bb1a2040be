"""How the PyTorch backend cuts a problem into tiles, cached on the problem."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tilewise.core.fp8 import BLOCK_ROWS
from tilewise.core.problem import AttentionProblem
from tilewise.tiled.fp8 import tile_rows

# A score tile over all heads stays near this size, so that it is still in cache when exp and PV read it.
# Measured on 2 cores with 1 MB of L2 each and 32 MB of L3.
SCORE_TILE_BYTES = 4 << 20


@dataclass(frozen=True)
class TileConfig:
    """`block_q` x `block_k` is the tile of the score matrix; `batch_chunk` batch entries share one pass."""

    block_q: int
    block_k: int
    batch_chunk: int = 1


@functools.lru_cache(maxsize=4096)
def tiled_plan(problem: AttentionProblem) -> TileConfig:
    """Tiles large enough that an operation's overhead does not matter."""
    if problem.is_8_bit:
        block_q, block_k = BLOCK_ROWS, tile_rows(problem)
    else:
        block_q, block_k = min(256, max(1, problem.seqlen_q)), min(512, max(1, problem.seqlen_k))
    one_entry = max(1, problem.num_heads * block_q * block_k * problem.compute_dtype.itemsize)
    return TileConfig(block_q, block_k, max(1, SCORE_TILE_BYTES // one_entry))
