"""Tile configurations: frozen data with their own validity rule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """How one backend cuts a problem.

    `block_q` x `block_k` is the tile of the score matrix; `batch_chunk` batch entries share one pass.
    """

    block_q: int
    block_k: int
    batch_chunk: int = 1

    def is_valid(self) -> bool:
        return min(self.block_q, self.block_k, self.batch_chunk) >= 1

    def score_bytes(self, num_heads: int, element_size: int) -> int:
        """Bytes of one score tile over all heads of a batch chunk: the largest temporary there is."""
        return self.batch_chunk * num_heads * self.block_q * self.block_k * element_size
