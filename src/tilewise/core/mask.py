"""Which keys a query may see: the only mask arithmetic in the library.

Every backend asks this module the same three questions: which keys a tile of queries can reach
(`key_range`), whether a tile of the score matrix needs a mask at all (`tile_kind`), and if it does,
which of its entries are visible (`tile_mask`). Causal masking is a window whose right edge is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class TileKind(Enum):
    """How much of a score tile is visible: nothing (skip it), all of it (no mask), or a part."""

    EMPTY = "empty"
    FULL = "full"
    EDGE = "edge"


@dataclass(frozen=True)
class Visibility:
    """Query `i` sees key `j` when `i + offset - left <= j <= i + offset + right` and `0 <= j < seqlen_k`.

    `offset = seqlen_k - seqlen_q` aligns the last query with the last key (bottom-right), as flash-attn
    does. `None` for `left` or `right` means unbounded on that side.

    Example:
        >>> Visibility(seqlen_q=2, seqlen_k=4, left=None, right=0).tile_mask(0, 2, 0, 4).int().tolist()
        [[1, 1, 1, 0], [1, 1, 1, 1]]
    """

    seqlen_q: int
    seqlen_k: int
    left: int | None = None
    right: int | None = None

    @property
    def offset(self) -> int:
        return self.seqlen_k - self.seqlen_q

    def key_range(self, q0: int, q1: int) -> tuple[int, int]:
        """The keys [k0, k1) that at least one of the queries [q0, q1) may see; empty when k0 >= k1."""
        k0 = 0 if self.left is None else max(0, q0 + self.offset - self.left)
        k1 = self.seqlen_k if self.right is None else min(self.seqlen_k, q1 + self.offset + self.right)
        return k0, max(k0, k1)

    def query_range(self, k0: int, k1: int) -> tuple[int, int]:
        """The queries [q0, q1) that may see at least one of the keys [k0, k1); empty when q0 >= q1."""
        q0 = 0 if self.right is None else max(0, k0 - self.offset - self.right)
        q1 = self.seqlen_q if self.left is None else min(self.seqlen_q, k1 - self.offset + self.left)
        return q0, max(q0, q1)

    def tile_kind(self, q0: int, q1: int, k0: int, k1: int) -> TileKind:
        """Classify the score tile of queries [q0, q1) against keys [k0, k1)."""
        lo, hi = self.key_range(q0, q1)
        if q0 >= q1 or max(lo, k0) >= min(hi, k1):
            return TileKind.EMPTY
        left_edge = 0 if self.left is None else q1 - 1 + self.offset - self.left
        right_edge = self.seqlen_k if self.right is None else q0 + self.offset + self.right + 1
        return TileKind.FULL if left_edge <= k0 and k1 <= min(right_edge, self.seqlen_k) else TileKind.EDGE

    def tile_mask(
        self, q0: int, q1: int, k0: int, k1: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Boolean [q1 - q0, k1 - k0], True where the query sees the key."""
        distance = self.relative_position(q0, q1, k0, k1, device)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            visible &= distance >= -self.left
        if self.right is not None:
            visible &= distance <= self.right
        return visible

    def relative_position(
        self, q0: int, q1: int, k0: int, k1: int, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Integer [q1 - q0, k1 - k0]: key position minus aligned query position, `j - (i + offset)`."""
        query_position = torch.arange(q0 + self.offset, q1 + self.offset, device=device)
        return torch.arange(k0, k1, device=device)[None, :] - query_position[:, None]

    def visible_pairs(self) -> int:
        """How many (query, key) pairs are visible: the work that is left after masking."""
        rows, keys = self.seqlen_q, self.seqlen_k
        before_last = rows * keys
        if self.right is not None:
            before_last = _sum_clamped(self.offset + self.right + 1, rows, keys)
        return before_last - (0 if self.left is None else _sum_clamped(self.offset - self.left, rows, keys))


def _sum_clamped(start: int, count: int, most: int) -> int:
    """The sum of x clamped to [0, most] over x = start, start + 1, ..., start + count - 1."""

    def below(x: int) -> int:
        inside = max(0, min(x - 1, most))
        return inside * (inside + 1) // 2 + max(0, x - 1 - most) * most

    return below(start + count) - below(start)
