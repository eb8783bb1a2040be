"""Ulysses: an all-to-all after which a rank has all tokens of its group, and some of the heads.

Source: Jacobs et al., DeepSpeed Ulysses (2023). Heads of a tensor may go to several ranks, as KV heads do
that are fewer than ranks; their gradients are summed.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.core.kept import kept_on_device
from tilewise.distributed import peer_memory
from tilewise.distributed.layout import Layout
from tilewise.distributed.parts import wide
from tilewise.distributed.peer_memory import KEYS, PeerMemory, stream_of
from tilewise.distributed.ranks import Ranks, to_device
from tilewise.distributed.schedule import Range, num_rows
from tilewise.distributed.wire import row_index
from tilewise.gpu.launch.launch_plan import HAS_TRITON

MOST_SOURCES = 16  # ranks whose tokens one launch takes
MAX_MESSAGES = 4  # of a tensor from one rank; more ranges of rows are packed into one message


@dataclass(frozen=True)
class Swap:
    """The ranks that exchange tokens for heads, and the order of their tokens."""

    ranks: Ranks
    rows: tuple[tuple[Range, ...], ...]  # of each rank: where its tokens are in the group's order
    joins: bool  # tensors that are alike travel as one message, and arrive as slices of one
    most: tuple[int, int]  # tokens of a rank, and of such a group, where they are most

    @property
    def length(self) -> int:
        return max((r[-1][1] for r in self.rows if r), default=0)


@functools.lru_cache(maxsize=128)
def heads_of(world: int, num_heads: int, num_kv_heads: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The query heads and the KV heads of each rank."""
    heads, group = num_heads // world, num_heads // num_kv_heads
    queries = tuple(slice(rank * heads, (rank + 1) * heads) for rank in range(world))
    return queries, tuple(slice(q.start // group, (q.stop - 1) // group + 1) for q in queries)


def swap_of(ranks: Ranks, layout: Layout, first: int) -> Swap:
    """For members that are ranks `first`, `first + 1`, ... of a layout.

    If there are others, what arrives goes on to them, as whole tensors.
    """
    world = ranks.world
    return Swap(ranks, _rows(layout, first, world), world == layout.world, _most(layout, world))


@functools.lru_cache(maxsize=128)
def _most(layout: Layout, world: int) -> tuple[int, int]:
    lengths = [layout.length(rank) for rank in range(layout.world)]
    return max(lengths), max(sum(lengths[first : first + world]) for first in range(0, layout.world, world))


@functools.lru_cache(maxsize=128)
def _rows(layout: Layout, first: int, world: int) -> tuple[tuple[Range, ...], ...]:
    pieces = sorted((p, member) for member in range(world) for p in layout.pieces[first + member])
    rows: list[list[Range]] = [[] for _ in range(world)]
    end = 0
    for piece, member in pieces:
        start, end = end, end + piece.stop - piece.start
        if rows[member] and rows[member][-1][1] == start:
            rows[member][-1] = rows[member][-1][0], end
        else:
            rows[member].append((start, end))
    return tuple(map(tuple, rows))


Heads = tuple[tuple[slice, ...], ...]  # of each tensor, for each rank
Group = tuple[tuple[Tensor, ...], Heads]


def tokens_to_heads(swap: Swap, tensors: tuple[Tensor, ...], heads: Heads) -> tuple[Tensor, ...]:
    """(batch, tokens of the rank, heads, dim) -> (batch, tokens of the group, heads of the rank, dim)."""
    return _Exchange.apply(swap, heads, _scatter, _gather, *tensors)  # type: ignore[no-any-return]


def heads_to_tokens(swap: Swap, tensors: tuple[Tensor, ...], heads: Heads) -> tuple[Tensor, ...]:
    """(batch, tokens of the group, heads of the rank, dim) -> (batch, tokens of the rank, heads, dim)."""
    return _Exchange.apply(swap, heads, _gather, _scatter, *tensors)  # type: ignore[no-any-return]


class _Exchange(torch.autograd.Function):
    """One way forward, the other way backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, swap: Swap, heads: Heads, there: Any, back: Any, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.call = swap, heads, back
        return there(swap, heads, tensors)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        swap, heads, back = ctx.call
        return None, None, None, None, *back(swap, heads, grads)


def _scatter(swap: Swap, heads: Heads, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Each tensor's heads to their ranks. What arrives is received where it belongs; what stays is put there
    meanwhile."""
    if (memory := _memory_for(swap, tensors, swap.most[0])) is not None:
        return _scatter_by_reading(memory, swap, tensors, heads)
    me, rows, groups = swap.ranks.rank, swap.rows, _groups(swap, tensors, heads)
    sends, receives, scattered, staying, results = [], [], [], [], []
    for joined, h in groups:
        by_token = [t.transpose(0, 1) for t in joined]
        places = _places(h, me)
        result = by_token[0].new_empty(
            (swap.length, *by_token[0].shape[1:2], places[-1].stop, joined[0].shape[-1])
        )
        for rank, ranges in enumerate(rows):
            mine = [t[:, :, own[rank]] for t, own in zip(by_token, h, strict=True)]
            if rank == me:
                staying += [(result[:, :, p], ranges, t) for p, t in zip(places, mine, strict=True)]
                continue
            chunk = torch.cat(mine, 2) if len(mine) > 1 else mine[0].contiguous()
            sends += [(rank, m) for m in _chunk_messages(chunk, rows[me])]
            if len(ranges) > MAX_MESSAGES:
                chunk = result.new_empty((num_rows(ranges), *result.shape[1:]))
                scattered.append((result, ranges, chunk))
                receives.append((rank, chunk))
            else:
                receives += [(rank, result[a:b]) for a, b in ranges]
        results += [result[:, :, p] for p in places]
    works = swap.ranks.exchange(sends, receives)
    for result, ranges, chunk in staying:
        _put(result, ranges, chunk)
    for work in works:
        work.wait()
    for result, ranges, chunk in scattered:
        _put(result, ranges, chunk)
    return tuple(t.transpose(0, 1) for t in results)


def _gather(swap: Swap, heads: Heads, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The way back. A head that comes from several ranks is their sum."""
    if (memory := _memory_for(swap, tensors, swap.most[1])) is not None:
        return _gather_by_reading(memory, swap, tensors, heads)
    me, rows = swap.ranks.rank, swap.rows
    sends, receives, arriving, staying, results = [], [], [], [], []
    for joined, h in _groups(swap, tensors, heads):
        by_token = [t.transpose(0, 1) for t in joined]
        t = torch.cat(by_token, 2) if len(by_token) > 1 else by_token[0].contiguous()
        targets = []
        for own in h:
            is_shared = sum(s.stop - s.start for s in own) > own[-1].stop
            shape = (t.shape[1], num_rows(rows[me]), own[-1].stop, t.shape[-1])
            results.append(t.new_zeros(shape) if is_shared else t.new_empty(shape))
            targets.append((results[-1].transpose(0, 1), own, is_shared))
        for rank, ranges in enumerate(rows):
            places = _places(h, rank)
            parts = [
                (x[:, :, own[rank]], p, shared) for (x, own, shared), p in zip(targets, places, strict=True)
            ]
            if rank == me:
                staying += [(part, t[:, :, p], is_shared) for part, p, is_shared in parts]
                continue
            chunk = t.new_empty((num_rows(rows[me]), t.shape[1], places[-1].stop, t.shape[-1]))
            receives += [(rank, m) for m in _chunk_messages(chunk, rows[me])]
            if len(ranges) > MAX_MESSAGES:
                sends.append((rank, t[row_index(ranges, t.device)]))
            else:
                sends += [(rank, t[a:b]) for a, b in ranges]
            arriving += [(part, chunk[:, :, p], is_shared) for part, p, is_shared in parts]
    works = swap.ranks.exchange(sends, receives)
    for target, t, is_shared in staying:
        for part, chunk in _taken(target, rows[me], t):
            part.add_(chunk) if is_shared else part.copy_(chunk)
    for work in works:
        work.wait()
    for target, chunk, is_shared in arriving:
        target.add_(chunk) if is_shared else target.copy_(chunk)
    return tuple(results)


def _memory_for(swap: Swap, tensors: tuple[Tensor, ...], most: int) -> PeerMemory | None:
    """With a slot for each tensor, of so many tokens."""
    sizes = [most * t.shape[0] * t.shape[2] * t.shape[3] * t.dtype.itemsize for t in tensors]
    return peer_memory.memory_of(swap.ranks, tensors[0].device, KEYS, sizes)


def _scatter_by_reading(
    memory: PeerMemory, swap: Swap, tensors: tuple[Tensor, ...], heads: Heads
) -> tuple[Tensor, ...]:
    """Each rank reads its heads of all tokens."""
    memory.publish([t.transpose(0, 1) for t in tensors], stream_of(memory.device))
    places = _tokens_of_all(swap.rows, memory.device)
    results = []
    for slot, (t, own) in enumerate(zip(tensors, heads, strict=True)):
        mine = own[swap.ranks.rank]
        sources = [
            memory.read(peer, slot, (num_rows(rows), t.shape[0], *t.shape[2:]), t.dtype)[:, :, mine]
            for peer, rows in zip(swap.ranks.peers, swap.rows, strict=True)
        ]
        result = t.new_empty((swap.length, *sources[0].shape[1:]))
        _take(result[:, None], sources, places)
        results.append(result.transpose(0, 1))
    return tuple(results)


def _gather_by_reading(
    memory: PeerMemory, swap: Swap, tensors: tuple[Tensor, ...], heads: Heads
) -> tuple[Tensor, ...]:
    """The way back: each rank reads its tokens of all heads; one that several ranks have is their sum."""
    memory.publish([t.transpose(0, 1) for t in tensors], stream_of(memory.device))
    world, ranges = swap.ranks.world, swap.rows[swap.ranks.rank]
    places = _own_tokens_of_all(ranges, world, memory.device)
    results = []
    for slot, (t, own) in enumerate(zip(tensors, heads, strict=True)):
        shape = t.shape[1], t.shape[0], *t.shape[2:]
        sources = [memory.read(peer, slot, shape, t.dtype) for peer in swap.ranks.peers]
        each = t.new_empty((t.shape[0], num_rows(ranges), world * t.shape[2], t.shape[3]))
        _take(each.unflatten(2, (world, -1)).permute(1, 2, 0, 3, 4), sources, places)
        if (count := own[-1].stop) < each.shape[2]:
            each = each.unflatten(2, (count, -1)).sum(3, dtype=wide(t.dtype)).to(t.dtype)
        results.append(each)
    return tuple(results)


def _take(target: Tensor, sources: list[Tensor], places: tuple[Tensor, Tensor]) -> None:
    """target[i, c] = sources[which[i, c]][row[i, c]], each (batch, heads, dim); places: which and row."""
    which, row = places
    if target.is_cuda and HAS_TRITON and len(sources) <= MOST_SOURCES:
        from tilewise.gpu.launch.take import take

        take(target, sources, which, row)
        return
    for number, source in enumerate(sources):
        is_of = which == number
        target[is_of] = source[row[is_of]]


@kept_on_device(32)
def _tokens_of_all(rows: tuple[tuple[Range, ...], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Whose each token of a group is, and which of that rank's: (tokens, 1) int32."""
    which = torch.empty(max((r[-1][1] for r in rows if r), default=0), 1, dtype=torch.int32, device="cpu")
    row = torch.empty_like(which)
    for rank, ranges in enumerate(rows):
        seen = 0
        for a, b in ranges:
            which[a:b] = rank
            row[a:b, 0] = torch.arange(seen, seen + b - a, device="cpu")
            seen += b - a
    return to_device(which, device), to_device(row, device)


@kept_on_device(32)
def _own_tokens_of_all(ranges: tuple[Range, ...], world: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each rank's results those for a rank's tokens: (tokens, ranks) int32."""
    own = [torch.arange(a, b, dtype=torch.int32, device="cpu") for a, b in ranges]
    row = torch.cat([torch.empty(0, dtype=torch.int32, device="cpu"), *own])[:, None]
    which = torch.arange(world, dtype=torch.int32, device="cpu")
    return to_device(which, device).expand(len(row), -1), to_device(row, device).expand(-1, world)


def _groups(swap: Swap, tensors: tuple[Tensor, ...], heads: Heads) -> list[Group]:
    """Tensors that travel as one, side by side along their heads: messages are few where all are alike."""
    if swap.joins and len({(t.dtype, t.shape[-1]) for t in tensors}) == 1:
        return [(tensors, heads)]
    return [((t,), (h,)) for t, h in zip(tensors, heads, strict=True)]


def _places(heads: Heads, rank: int) -> list[slice]:
    """Where a rank's heads of each tensor are, one tensor's behind another's."""
    ends = itertools.accumulate((own[rank].stop - own[rank].start for own in heads), initial=0)
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _chunk_messages(chunk: Tensor, ranges: tuple[Range, ...]) -> list[Tensor]:
    """A rank's tokens, one behind the other, as the messages that the ranges they belong to make."""
    if len(ranges) > MAX_MESSAGES or len(ranges) == 1:
        return [chunk]
    return list(chunk.split([b - a for a, b in ranges])) if ranges else []


def _put(target: Tensor, ranges: tuple[Range, ...], chunk: Tensor) -> None:
    if len(ranges) > MAX_MESSAGES:
        target.index_copy_(0, row_index(ranges, target.device), chunk)
        return
    for rows, part in zip(ranges, _chunk_messages(chunk, ranges), strict=True):
        target[slice(*rows)].copy_(part)


def _taken(target: Tensor, ranges: tuple[Range, ...], source: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(rows of target, rows of source): target has what lies in these ranges of source, without gaps."""
    if len(ranges) > MAX_MESSAGES:
        return [(target, source[row_index(ranges, source.device)])]
    parts = _chunk_messages(target, ranges)
    return [(part, source[a:b]) for part, (a, b) in zip(parts, ranges, strict=True)]
