"""Ulysses: an all-to-all after which a rank has all tokens of its group, and some of the heads.

Source: Jacobs et al., DeepSpeed Ulysses (2023). Heads of a tensor may go to several ranks, as KV heads do
that are fewer than ranks; their gradients are summed, in float32.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.core.kept import kept_on_device
from tilewise.distributed import peer_memory, schedule
from tilewise.distributed.layout import Layout, joined, num_tokens, numbers_in
from tilewise.distributed.peer_memory import KEYS, stream_of
from tilewise.distributed.ranks import Ranks, to_device
from tilewise.distributed.schedule import Range, num_rows
from tilewise.distributed.wire import rows_of
from tilewise.gpu.launch.launch_plan import HAS_TRITON


class Swap(NamedTuple):
    """The ranks that exchange tokens for heads, and the order of their tokens."""

    ranks: Ranks
    rows: tuple[tuple[Range, ...], ...]  # of each rank: where its tokens are in the group's order
    most: tuple[int, int]  # tokens of a rank, and of such a group, where they are most


@functools.lru_cache(maxsize=128)
def heads_of(world: int, num_heads: int, num_kv_heads: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The query heads and the KV heads of each rank."""
    heads, group = num_heads // world, num_heads // num_kv_heads
    queries = tuple(slice(rank * heads, (rank + 1) * heads) for rank in range(world))
    return queries, tuple(slice(q.start // group, (q.stop - 1) // group + 1) for q in queries)


def swap_of(ranks: Ranks, layout: Layout, first: int) -> Swap:
    """For members that are ranks `first`, `first + 1`, ... of a layout."""
    return Swap(ranks, *_rows_and_most(layout, first, ranks.world))


@functools.lru_cache(maxsize=128)
def _rows_and_most(
    layout: Layout, first: int, world: int
) -> tuple[tuple[tuple[Range, ...], ...], tuple[int, int]]:
    groups = joined(layout, world)
    whole, members = groups.pieces[first // world], layout.pieces[first : first + world]
    most, most_of_group = (max(map(num_tokens, each.pieces)) for each in (layout, groups))
    return tuple(schedule.rows_of(whole, own) for own in members), (most, most_of_group)


Heads = tuple[tuple[slice, ...], ...]  # of each tensor, for each rank


class Exchange(NamedTuple):
    """How query, key and value become some heads of all tokens, and gradients of these come back."""

    swap: Swap
    heads: Heads

    @property
    def shares_keys(self) -> bool:
        """Whether KV heads go to several ranks, whose gradients are added."""
        keys = self.heads[1]
        return keys[-1].stop < sum(own.stop - own.start for own in keys)

    def there(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(batch, tokens of the rank, heads, dim) -> (batch, tokens of the group, heads of the rank, dim)."""
        (ranks, rows, most), by_token = self.swap, [t.transpose(0, 1) for t in tensors]
        lengths = [num_rows(ranges) for ranges in rows]
        shapes = [[(length, *t.shape[1:]) for length in lengths] for t in by_token]
        parts = _published(ranks, by_token, most[0], shapes)
        if parts is not None:
            pairs = zip(parts, self.heads, strict=True)
            parts = [[t[:, :, own[ranks.rank]] for t in of_all] for of_all, own in pairs]
        else:
            sent = [[t[:, :, theirs] for theirs in h] for t, h in zip(by_token, self.heads, strict=True)]
            parts = _by_messages(ranks, sent, lengths)
        return tuple(_in_order(rows, of_all).transpose(0, 1) for of_all in parts)

    def back(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The reverse. A head that several ranks have is their sum."""
        (ranks, rows, most), by_token = self.swap, [g.transpose(0, 1) for g in grads]
        ranges = rows[ranks.rank]
        parts = _published(ranks, by_token, most[1], [[t.shape] * ranks.world for t in by_token])
        if parts is None:
            sent = [[rows_of(t, theirs) for theirs in rows] for t in by_token]
            length = num_rows(ranges)
            parts, ranges = _by_messages(ranks, sent, [length] * ranks.world), ((0, length),)
        results = []
        for of_all, own in zip(parts, self.heads, strict=True):
            result = _side_by_side(ranges, of_all)
            if (count := own[-1].stop) < result.shape[2]:
                result = result.unflatten(2, (count, -1)).sum(3)
            results.append(result)
        return tuple(results)


def heads_to_tokens(swap: Swap, t: Tensor, heads: tuple[slice, ...]) -> Tensor:
    """(batch, tokens of the group, heads of the rank, dim) -> (batch, tokens of the rank, heads, dim)."""
    return _ToTokens.apply(Exchange(swap, (heads,)), t)  # type: ignore[no-any-return]


class _ToTokens(torch.autograd.Function):
    """Forward what an exchange does to gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, t: Tensor) -> Tensor:  # type: ignore[override]
        ctx.exchange = exchange
        return exchange.back((t,))[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return None, *ctx.exchange.there((g,))


def _published(ranks: Ranks, tensors: list[Tensor], most: int, shapes: Any) -> list[list[Tensor]] | None:
    """Each tensor of all ranks, of these shapes, where it lies in their memory; None where no rank reads.

    most: the tokens of the rank that has most.
    """
    device = tensors[0].device
    sizes = [most * math.prod(t.shape[1:]) * t.dtype.itemsize for t in tensors]
    memory = peer_memory.memory_of(ranks, device, KEYS, sizes)
    if memory is None:
        return None
    memory.publish(tensors, stream_of(device))
    return [
        [memory.read(peer, slot, shape, t.dtype) for peer, shape in zip(ranks.peers, shapes[slot])]
        for slot, t in enumerate(tensors)
    ]


def _by_messages(ranks: Ranks, sent: list[list[Tensor]], lengths: list[int]) -> list[list[Tensor]]:
    """What all ranks send to this one of each tensor. Those that are alike travel as one message.

    Args:
        sent: of each tensor what each rank gets, (tokens, batch, heads, dim).
        lengths: the tokens that come from each rank.
    """
    is_one = len({(parts[0].dtype, parts[0].shape[-1]) for parts in sent}) == 1
    sends, receives, found = [], [], []
    for group in [sent] if is_one else [[parts] for parts in sent]:
        own = [parts[ranks.rank] for parts in group]
        heads = [t.shape[2] for t in own]
        arriving = []
        for rank, (length, *theirs) in enumerate(zip(lengths, *group, strict=True)):
            if rank == ranks.rank:
                arriving.append(own)
                continue
            sends.append((rank, torch.cat(theirs, 2) if len(theirs) > 1 else theirs[0].contiguous()))
            message = own[0].new_empty((length, own[0].shape[1], sum(heads), own[0].shape[3]))
            receives.append((rank, message))
            arriving.append(message.split(heads, 2))
        found += [list(of_all) for of_all in zip(*arriving, strict=True)]
    for work in ranks.exchange(sends, receives):
        work.wait()
    return found


def _in_order(rows: tuple[tuple[Range, ...], ...], parts: list[Tensor]) -> Tensor:
    """All tokens of a group, from those of each rank (tokens, batch, heads, dim)."""
    which, row, place = _tokens_of_all(rows, parts[0].device)
    if (take := _kernel(parts)) is None:
        return torch.cat(parts)[place]
    result = parts[0].new_empty((len(place), *parts[0].shape[1:]))
    take(result[:, None], parts, which, row)
    return result


def _side_by_side(ranges: tuple[Range, ...], parts: list[Tensor]) -> Tensor:
    """(batch, tokens in these ranges, heads of all ranks, dim), from (tokens, batch, heads, dim) of each."""
    if (take := _kernel(parts)) is None:
        return torch.cat([rows_of(part, ranges).transpose(0, 1) for part in parts], 2)
    world, (_, batch, count, dim) = len(parts), parts[0].shape
    result = parts[0].new_empty((batch, num_rows(ranges), world * count, dim))
    by_rank = result.unflatten(2, (world, count)).permute(1, 2, 0, 3, 4)
    take(by_rank, parts, *_own_tokens_of_all(ranges, world, result.device))
    return result


def _kernel(parts: list[Tensor]) -> Callable[..., None] | None:
    """What puts them together in one launch, if they are alike but for their lengths."""
    if not (parts[0].is_cuda and HAS_TRITON and len({t.stride() for t in parts}) == 1):
        return None
    from tilewise.gpu.launch.take import MOST, take

    return take if len(parts) <= MOST else None


@kept_on_device(32)
def _tokens_of_all(
    rows: tuple[tuple[Range, ...], ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token of a group: whose it is, and which of that rank's, (tokens, 1) int32; and which, where
    all ranks' are one behind the other, (tokens,) int64."""
    lengths = torch.tensor([num_rows(ranges) for ranges in rows], device="cpu")
    tokens = numbers_in(itertools.chain(*rows))
    place = torch.empty_like(tokens)
    place[tokens] = torch.arange(len(tokens), device="cpu")
    which = torch.arange(len(rows), device="cpu").repeat_interleave(lengths)[place]
    row = place - (lengths.cumsum(0) - lengths)[which]
    which, row = (t.int()[:, None] for t in (which, row))
    return to_device(which, device), to_device(row, device), to_device(place, device)


@kept_on_device(32)
def _own_tokens_of_all(ranges: tuple[Range, ...], world: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each rank's results those for a rank's tokens: whose, and which row, (tokens, ranks) int32."""
    row = numbers_in(ranges).int()[:, None]
    which = torch.arange(world, dtype=torch.int32, device="cpu")
    return to_device(which, device).expand(len(row), -1), to_device(row, device).expand(-1, world)
