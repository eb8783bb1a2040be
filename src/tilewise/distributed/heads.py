"""Ulysses: an all-to-all after which a rank has all tokens of its group, and some of the heads.

Source: Jacobs et al., DeepSpeed Ulysses (2023). Heads of a tensor may go to several ranks, as key heads do
that are fewer than ranks; their gradients are summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.distributed.layout import Layout
from tilewise.distributed.ranks import Ranks


@dataclass(frozen=True)
class Swap:
    """The ranks that exchange tokens for heads, and the order of their tokens."""

    ranks: Ranks
    lengths: tuple[int, ...]  # tokens of each rank
    tokens: tuple[Any, ...]  # of each rank: where its tokens are in the group's order

    @staticmethod
    def of(ranks: Ranks, layout: Layout, first: int) -> Swap:
        """For members that are ranks `first`, `first + 1`, ... of a layout."""
        tokens = [layout.tokens(first + n) for n in range(ranks.world)]
        order = torch.cat(tokens).argsort().argsort()
        lengths = tuple(len(t) for t in tokens)
        return Swap(ranks, lengths, tuple(order.split(lengths)))

    def heads_of(self, rank: int, num_heads: int, num_kv_heads: int) -> tuple[slice, slice]:
        """The query heads and the key heads of a rank."""
        heads, group = num_heads // self.ranks.world, num_heads // num_kv_heads
        q = slice(rank * heads, (rank + 1) * heads)
        return q, slice(q.start // group, (q.stop - 1) // group + 1)

    def heads(self, num_heads: int, num_kv_heads: int, of_keys: bool) -> tuple[slice, ...]:
        both = (self.heads_of(r, num_heads, num_kv_heads) for r in range(self.ranks.world))
        return tuple(pair[of_keys] for pair in both)


Heads = tuple[tuple[slice, ...], ...]  # of each tensor, for each rank


def tokens_to_heads(swap: Swap, tensors: tuple[Tensor, ...], heads: Heads) -> tuple[Tensor, ...]:
    """(batch, tokens of the rank, heads, dim) -> (batch, tokens of the group, heads of the rank, dim)."""
    return _Scatter.apply(swap, heads, *tensors)  # type: ignore[no-any-return]


def heads_to_tokens(swap: Swap, tensors: tuple[Tensor, ...], heads: Heads) -> tuple[Tensor, ...]:
    """(batch, tokens of the group, heads of the rank, dim) -> (batch, tokens of the rank, heads, dim)."""
    return _Gather.apply(swap, heads, *tensors)  # type: ignore[no-any-return]


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, swap: Swap, heads: Heads, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.call = swap, heads
        return _scatter(swap, heads, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        swap, heads = ctx.call
        return None, None, *_gather(swap, heads, grads)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, swap: Swap, heads: Heads, *tensors: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.call = swap, heads
        return _gather(swap, heads, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        swap, heads = ctx.call
        return None, None, *_scatter(swap, heads, grads)


def _scatter(swap: Swap, heads: Heads, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """All tensors in one message to each rank: rows (tokens, batch, heads of all tensors * dim)."""
    world, own = swap.ranks.world, swap.lengths[swap.ranks.rank]
    rows = [
        torch.cat([t[:, :, h[rank]].flatten(2) for t, h in zip(tensors, heads)], -1).transpose(0, 1)
        for rank in range(world)
    ]
    arrived = rows[0].new_empty((sum(swap.lengths), *rows[0].shape[1:]))
    _all_to_all(swap.ranks, arrived, torch.cat(rows), list(swap.lengths), [own] * world)
    ordered = torch.empty_like(arrived)
    ordered[torch.cat(swap.tokens).to(arrived.device)] = arrived
    return _split(ordered, [(h[swap.ranks.rank], t.shape[-1]) for t, h in zip(tensors, heads)])


def _gather(swap: Swap, heads: Heads, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The way back. A head that comes from several ranks is their sum."""
    world, own = swap.ranks.world, swap.lengths[swap.ranks.rank]
    rows = torch.cat([t.flatten(2) for t in tensors], -1).transpose(0, 1)
    sent = rows[torch.cat(swap.tokens).to(rows.device)]
    arrived = sent.new_empty((world * own, *sent.shape[1:]))
    _all_to_all(swap.ranks, arrived, sent, [own] * world, list(swap.lengths))
    chunks = [
        _split(chunk, [(h[rank], t.shape[-1]) for t, h in zip(tensors, heads)])
        for rank, chunk in enumerate(arrived.split(own) if own else [arrived] * world)
    ]
    results = []
    for n, (t, h) in enumerate(zip(tensors, heads)):
        result = t.new_zeros((t.shape[0], own, h[-1].stop, t.shape[-1]))
        for rank in range(world):
            result[:, :, h[rank]] += chunks[rank][n]
        results.append(result)
    return tuple(results)


def _split(rows: Tensor, kinds: list[tuple[slice, int]]) -> tuple[Tensor, ...]:
    """Rows (tokens, batch, all) as tensors (batch, tokens, heads, dim), without a copy."""
    sizes = [(h.stop - h.start) * dim for h, dim in kinds]
    parts = rows.transpose(0, 1).split(sizes, -1)
    return tuple(part.unflatten(-1, (-1, dim)) for part, (_, dim) in zip(parts, kinds))


def _all_to_all(ranks: Ranks, out: Tensor, rows: Tensor, arriving: list[int], leaving: list[int]) -> None:
    incoming, outgoing = out.split(arriving), rows.contiguous().split(leaving)
    sends = [(r, t) for r, t in enumerate(outgoing) if r != ranks.rank and len(t)]
    receives = [(r, t) for r, t in enumerate(incoming) if r != ranks.rank and len(t)]
    works = ranks.exchange(sends, receives)
    incoming[ranks.rank].copy_(outgoing[ranks.rank])
    for work in works:
        work.wait()
