"""Results of parts put together: few passes over memory, sums in float32, one rounding.

Parts wait until there are six, or more than three's memory, or nothing comes after them. Where the first has
all rows and the right dtype, the others are added to it in place, in their rows only: what a single part
gives is never copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.merge import merge_into
from tilewise.gpu.launch.launch_plan import HAS_TRITON

NEG_INF = float("-inf")
MOST = 6  # that wait: as many as one launch takes
MOST_WHOLE = 3  # or as many rows of them as so many whole ones have


class Rows(NamedTuple):
    """Rows [start, start + tokens) of a result."""

    start: int
    out: Tensor  # (batch, tokens, heads, dim)
    lse: Tensor | None  # (batch, heads, tokens)

    @property
    def stop(self) -> int:
        return self.start + self.out.shape[1]


class Totals:
    """out and lse over disjoint keys, merged; or, without lse, gradients, added."""

    def __init__(self, like: Tensor, dim: int, has_lse: bool = False) -> None:
        """like: (batch, tokens, heads, any). Results have this dtype, unless `finish` is told another."""
        batch, tokens, heads, _ = like.shape
        self.like, self.shape, self.has_lse = like, (batch, tokens, heads, dim), has_lse
        self.wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.waiting: list[Rows] = []

    def add(self, start: int, out: Tensor, lse: Tensor | None = None) -> None:
        """Rows from `start` on; the tensors may be written to."""
        rows = sum(part.out.shape[1] for part in self.waiting) + out.shape[1]
        if len(self.waiting) == MOST or (self.waiting and rows > MOST_WHOLE * self.shape[1]):
            self._put_together(self.wide)
        self.waiting.append(Rows(start, out, lse))

    def add_at(self, index: Tensor, out: Tensor) -> None:
        """Gradients of rows that do not follow each other: index (tokens,)."""
        self._put_together(self.wide)
        self.waiting[0].out.index_add_(1, index, out.to(self.wide))

    def finish(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """(out, lse). Rows that no part has are 0, their lse -inf."""
        return self._put_together(dtype or self.like.dtype)

    def _put_together(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        first = self.waiting[0] if self.waiting else None
        is_whole = first is not None and first.out.shape[1] == self.shape[1]
        if first is None or len(self.waiting) > 1 or not is_whole or first.out.dtype != dtype:
            is_served = self.like.is_cuda and self.wide == torch.float32 and HAS_TRITON
            put = self._by_kernel if is_served and self.waiting else self._by_pytorch
            first = Rows(0, *put(dtype, is_whole))
            self.waiting = [first]
        return first.out, first.lse

    def _by_kernel(self, dtype: torch.dtype, is_whole: bool) -> tuple[Tensor, Tensor | None]:
        from tilewise.gpu.launch.combine import Operand, combine

        if is_whole and self.waiting[0].out.dtype == dtype:
            (_, target, lse), *others = self.waiting
            start, stop = min(p.start for p in others), max(p.stop for p in others)
        else:
            target = self.like.new_empty(self.shape, dtype=dtype)
            lse, (start, stop) = self._new_lse(), (0, self.shape[1])
        combine(target, lse, tuple(Operand(*p) for p in self.waiting), start, stop)
        return target, lse

    def _by_pytorch(self, dtype: torch.dtype, is_whole: bool) -> tuple[Tensor, Tensor | None]:
        parts = self.waiting
        if is_whole:
            (_, out, lse), *parts = parts
            out = out.to(self.wide)
        else:
            out, lse = self.like.new_zeros(self.shape, dtype=self.wide), self._new_lse()
        for part in parts:
            rows = slice(part.start, part.stop)
            if lse is None or part.lse is None:
                out[:, rows] += part.out
            else:
                merge_into(out[:, rows], lse[..., rows], part.out, part.lse)
        return out.to(dtype), lse

    def _new_lse(self) -> Tensor | None:
        batch, tokens, heads, _ = self.shape
        return self.like.new_full((batch, heads, tokens), NEG_INF, dtype=self.wide) if self.has_lse else None
