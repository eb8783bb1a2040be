"""Ulysses: an all-to-all after which a rank has all tokens of its group, and some of the heads.

A rank's heads go in two groups, if their number allows it: while attention of one is computed, heads of the
other come, and results of the one before go back.

Source: Jacobs et al., DeepSpeed Ulysses (2023). KV heads that are fewer than ranks go to several of them;
their gradients are summed.
"""

from __future__ import annotations

import abc
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.distributed import peer_memory
from tilewise.distributed.layout import Layout
from tilewise.distributed.parts import wide
from tilewise.distributed.peer_memory import HEADS, PeerMemory, copy_beside, stream_of
from tilewise.distributed.ranks import Ranks
from tilewise.distributed.schedule import Range
from tilewise.distributed.wire import Fetch, Transfer, count_rows, fetch, row_index, transfer_of

MAX_MESSAGES = 4  # of a tensor from one rank; more ranges of rows are packed into one message
GROUPS = 2  # of a rank's heads: more hide more of the exchanges, but attention of few heads is slower

Heads = tuple[slice, ...]  # of each rank


class HeadGroup(NamedTuple):
    """Heads that are computed together."""

    queries: Heads
    keys: Heads
    brings_keys: bool  # or has those of the group before
    returns_keys: bool  # gradients of them, or leaves them to the group behind

    def of(self, is_key: bool) -> Heads:
        return self.keys if is_key else self.queries


class Kind(NamedTuple):
    """Of a tensor (batch, tokens, heads, dim)."""

    is_key: bool  # its heads are KV heads
    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Swap:
    """The ranks that exchange tokens for heads, and the order of their tokens."""

    ranks: Ranks
    rows: tuple[tuple[Range, ...], ...]  # of each rank: where its tokens are in the group's order
    joins: bool  # tensors that are alike travel as one, and arrive as slices of one
    most: tuple[int, int]  # tokens of a rank, and of such a group, where they are most
    groups: tuple[HeadGroup, ...]

    @property
    def length(self) -> int:
        return max((r[-1][1] for r in self.rows if r), default=0)


@functools.lru_cache(maxsize=128)
def head_groups(world: int, num_heads: int, num_kv_heads: int, most: int = GROUPS) -> tuple[HeadGroup, ...]:
    """The heads of each of so many ranks, in at most so many groups."""
    own, own_kv, per_key = num_heads // world, num_kv_heads // world, num_heads // num_kv_heads
    shares = own_kv <= 1  # groups share the rank's only KV head
    count = most if (own if shares else own_kv) % most == 0 else 1
    groups = []
    for number in range(count):
        firsts = [rank * own + number * own // count for rank in range(world)]
        queries = tuple(slice(first, first + own // count) for first in firsts)
        keys = tuple(slice(q.start // per_key, (q.stop - 1) // per_key + 1) for q in queries)
        is_first, is_last = number == 0, number == count - 1
        groups.append(HeadGroup(queries, keys, is_first or not shares, is_last or not shares))
    return tuple(groups)


def swap_of(ranks: Ranks, layout: Layout, first: int, num_heads: int, num_kv_heads: int) -> Swap:
    """For members that are ranks `first`, `first + 1`, ... of a layout.

    If there are others, what arrives goes on to them: as whole tensors, and all heads at once.
    """
    joins = ranks.world == layout.world
    groups = head_groups(ranks.world, num_heads, num_kv_heads, GROUPS if joins else 1)
    return Swap(ranks, _rows(layout, first, ranks.world), joins, _most(layout, ranks.world), groups)


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


def exchange(
    swap: Swap | None,
    tensors: Sequence[Tensor],
    are_keys: Sequence[bool],
    results: Sequence[Kind],
    compute: Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...]],
) -> tuple[Tensor, ...]:
    """What `compute` finds with the tokens of all ranks and this rank's heads, for its tokens and all heads.

    Args:
        swap: None: the rank has all heads of its tokens, and nothing is exchanged.
        tensors: (batch, tokens of the rank, heads, dim).
        are_keys: which of them have KV heads.
        results: what `compute` gives. A KV head that several ranks have is their sum.
        compute: called with the number of each group of heads, and its (batch, tokens of all ranks, heads of
            the group, dim): without KV heads where the group before had the same. Results are given likewise,
            those of KV heads by the last group that has them.
    """
    if swap is None:
        return compute(0, tuple(tensors))
    batch, tokens = tensors[0].shape[0], count_rows(swap.rows[swap.ranks.rank])
    totals = []
    for is_key, dim, dtype in results:
        heads = swap.groups[-1].of(is_key)[-1].stop
        totals.append(tensors[0].new_empty((batch, tokens, heads, dim), dtype=dtype))
    wire = _make_wire(swap, tensors, are_keys, results, totals)
    wire.start(arriving := wire.bring(0))
    returning = []
    for number in range(len(swap.groups)):
        arrived = arriving.wait()
        if number + 1 < len(swap.groups):
            wire.start(arriving := wire.bring(number + 1))
        returning.append(wire.give_back(number, compute(number, arrived)))
        wire.start(returning[-1])
    for transfer in returning:
        transfer.wait()
    return tuple(totals)


class _Lot(NamedTuple):
    """Tensors that travel as one, side by side along their heads: (tokens, batch, heads, dim) each."""

    tensors: Sequence[Tensor]
    heads: Sequence[Heads]  # which of each tensor a group has

    @property
    def widths(self) -> list[int]:
        """Heads of each tensor: ranks have as many."""
        return [own[0].stop - own[0].start for own in self.heads]

    @property
    def row(self) -> tuple[int, int, int]:
        """The shape of a token of all tensors."""
        _, batch, _, dim = self.tensors[0].shape
        return batch, sum(self.widths), dim

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def new(self, *tokens: int) -> Tensor:
        """Room for (*tokens, batch, heads, dim)."""
        return self.tensors[0].new_empty((*tokens, *self.row))

    def pack(self, target: Tensor) -> None:
        """What each rank has of the tensors: (ranks, tokens, batch, heads, dim)."""
        for t, own, part in self._of_all(target):
            part.copy_(_by_rank(t, own))

    def unpack(self, source: Tensor) -> None:
        """The way back. A head that several ranks have is their sum."""
        for t, own, part in self._of_all(source):
            found = part if part.shape[1] == 1 else part.sum(1, keepdim=True, dtype=wide(t.dtype))
            _by_rank(t, own).copy_(found)

    def _of_all(self, packed: Tensor) -> list[tuple[Tensor, Heads, Tensor]]:
        """Each tensor, its heads, and its part of what is packed: (ranks, ranks that share, tokens, ...)."""
        parts = packed.split(self.widths, -2)
        return [
            (t, own, part.unflatten(0, (-1, _sharing(own))))
            for t, own, part in zip(self.tensors, self.heads, parts, strict=True)
        ]


def _sharing(heads: Heads) -> int:
    """How many ranks have the same; each of them has one then."""
    return len(heads) // heads[-1].stop if len(heads) > 1 and heads[0] == heads[1] else 1


def _by_rank(t: Tensor, heads: Heads) -> Tensor:
    """(tokens, batch, all heads, dim) as (ranks, 1, tokens, batch, heads of a rank, dim).

    Ranks that share a head are one.
    """
    each = t.unflatten(2, (len(heads) // _sharing(heads), -1))
    return each[:, :, :, heads[0]].permute(2, 0, 1, 3, 4)[:, None]


Place = tuple[int, int]  # of a lot: its group of heads, and which of them it is


class _Wire(abc.ABC):
    """How heads come to a rank and results go back. All ranks make the same calls in the same order."""

    def __init__(self, swap: Swap, brought: list[list[_Lot]], returned: list[list[_Lot]]) -> None:
        """brought, returned: what travels, and where results go, of each group of heads."""
        self.swap, self.brought, self.returned = swap, brought, returned
        self.me, self.world, self.rows = swap.ranks.rank, swap.ranks.world, swap.rows
        self.tokens = count_rows(self.rows[self.me])
        self.others = [(self.me + distance) % self.world for distance in range(1, self.world)]

    def bring(self, number: int) -> Transfer:
        """Tensors of a group of heads, (batch, tokens of all ranks, heads, dim) each.

        What arrives is received where it belongs; what stays is put there at once.
        """
        result: list[Tensor] = []
        fetches = []
        for n, lot in enumerate(self.brought[number]):
            packed, target = self._packed((number, n), lot), lot.new(self.swap.length)
            _put(target, self.rows[self.me], packed[self.me])
            fetches += [self._bring((number, n), packed, rank, target) for rank in self.others]
            result += [t.transpose(0, 1) for t in target.split(lot.widths, 2)]
        return transfer_of(tuple(result), fetches)

    def give_back(self, number: int, found: tuple[Tensor, ...]) -> Transfer:
        """Results of a group of heads to those whose tokens they are."""
        by_token, fetches, chunks = [t.transpose(0, 1) for t in found], [], []
        for n, lot in enumerate(self.returned[number]):
            tensors, by_token = by_token[: len(lot.tensors)], by_token[len(lot.tensors) :]
            joined, chunk = self._joined((number, n), lot, tensors), lot.new(self.world, self.tokens)
            for part, own in _taken(chunk[self.me], self.rows[self.me], joined):
                part.copy_(own)
            fetches += [self._give_back((number, n), joined, rank, chunk[rank]) for rank in self.others]
            chunks.append((lot, chunk))

        def unpack() -> None:
            for lot, chunk in chunks:
                lot.unpack(chunk)

        return transfer_of((), fetches, unpack)

    @abc.abstractmethod
    def _packed(self, place: Place, lot: _Lot) -> Tensor:
        """What each rank wants of a lot: (ranks, tokens, batch, heads, dim)."""

    @abc.abstractmethod
    def _bring(self, place: Place, packed: Tensor, rank: int, target: Tensor) -> Fetch:
        """A rank's tokens of a lot, into those of all."""

    @abc.abstractmethod
    def _joined(self, place: Place, lot: _Lot, results: Sequence[Tensor]) -> Tensor:
        """Results for the tokens of all ranks, which others take theirs of: (tokens, batch, heads, dim)."""

    @abc.abstractmethod
    def _give_back(self, place: Place, joined: Tensor, rank: int, chunk: Tensor) -> Fetch:
        """This rank's tokens of what another has found."""

    @abc.abstractmethod
    def start(self, transfer: Transfer) -> None:
        """Start it beside what the current stream does next."""


class _Messages(_Wire):
    """By messages, which any group has."""

    def _packed(self, place: Place, lot: _Lot) -> Tensor:
        packed = lot.new(self.world, self.tokens)
        lot.pack(packed)
        return packed

    def _bring(self, place: Place, packed: Tensor, rank: int, target: Tensor) -> Fetch:
        ranges = self.rows[rank]
        sends = [(rank, m) for m in _chunk_messages(packed[rank], self.rows[self.me])]
        if len(ranges) <= MAX_MESSAGES:
            return Fetch([(rank, target[a:b]) for a, b in ranges], sends=sends)
        chunk = target.new_empty((count_rows(ranges), *target.shape[1:]))
        return Fetch([(rank, chunk)], functools.partial(_put, target, ranges, chunk), sends)

    def _joined(self, place: Place, lot: _Lot, results: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(results), 2) if len(results) > 1 else results[0].contiguous()

    def _give_back(self, place: Place, joined: Tensor, rank: int, chunk: Tensor) -> Fetch:
        ranges = self.rows[rank]
        is_packed = len(ranges) > MAX_MESSAGES
        theirs = [joined[row_index(ranges, joined.device)]] if is_packed else [joined[a:b] for a, b in ranges]
        receives = [(rank, m) for m in _chunk_messages(chunk, self.rows[self.me])]
        return Fetch(receives, sends=[(rank, m) for m in theirs])

    def start(self, transfer: Transfer) -> None:
        transfer.works = self.swap.ranks.exchange(transfer.sends, transfer.receives)
        self.swap.ranks.let_messages_begin(self.brought[0][0].tensors[0].device)


class _Reads(_Wire):
    """By reading where it lies, which GPUs of one host can: what each rank wants is packed for it."""

    def __init__(
        self, swap: Swap, brought: list[list[_Lot]], returned: list[list[_Lot]], memory: PeerMemory
    ) -> None:
        """memory: with a slot for each lot that is brought, and for each that is returned."""
        super().__init__(swap, brought, returned)
        self.memory, self.stream = memory, stream_of(memory.device)
        self.packed = dict(zip(_places(brought), itertools.count(), strict=False))
        self.back = dict(zip(_places(returned), itertools.count(len(self.packed)), strict=False))
        memory.begin(self.stream)
        for place in self.packed:
            lot = brought[place[0]][place[1]]
            lot.pack(self._packed(place, lot))
        memory.show()

    def _packed(self, place: Place, lot: _Lot) -> Tensor:
        return self._read(self.me, self.packed[place], (self.world, self.tokens, *lot.row), lot.dtype)

    def _bring(self, place: Place, packed: Tensor, rank: int, target: Tensor) -> Fetch:
        count = count_rows(self.rows[rank])
        shape = self.world, count, *target.shape[1:]
        theirs = self._read(rank, self.packed[place], shape, target.dtype)[self.me]
        return fetch(theirs, ((0, count),), target, self.rows[rank])

    def _joined(self, place: Place, lot: _Lot, results: Sequence[Tensor]) -> Tensor:
        joined = self._read(self.me, self.back[place], (self.swap.length, *lot.row), lot.dtype)
        for part, t in zip(joined.split(lot.widths, 2), results, strict=True):
            part.copy_(t)
        self.memory.show()
        return joined

    def _give_back(self, place: Place, joined: Tensor, rank: int, chunk: Tensor) -> Fetch:
        theirs = self._read(rank, self.back[place], joined.shape, joined.dtype)
        return fetch(theirs, self.rows[self.me], chunk, ((0, self.tokens),))

    def _read(self, rank: int, slot: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.memory.read(self.swap.ranks.peers[rank], slot, shape, dtype)

    def start(self, transfer: Transfer) -> None:
        transfer.works = copy_beside(transfer.receives, self.stream)


def _places(lots: list[list[_Lot]]) -> list[Place]:
    return [(number, n) for number, of_group in enumerate(lots) for n in range(len(of_group))]


def _make_wire(
    swap: Swap,
    tensors: Sequence[Tensor],
    are_keys: Sequence[bool],
    results: Sequence[Kind],
    totals: Sequence[Tensor],
) -> _Wire:
    brought, returned = [], []
    for group in swap.groups:
        given = zip(tensors, are_keys, strict=True)
        brought.append(_lots(swap, [(t, group.of(k)) for t, k in given if group.brings_keys or not k]))
        wanted = zip(totals, results, strict=True)
        of_group = [(t, group.of(k.is_key)) for t, k in wanted if group.returns_keys or not k.is_key]
        returned.append(_lots(swap, of_group))
    one, all_ = swap.most
    rows = [(one * swap.ranks.world, lot) for lot in itertools.chain(*brought)]
    rows += [(all_, lot) for lot in itertools.chain(*returned)]
    sizes = [count * math.prod(lot.row) * lot.dtype.itemsize for count, lot in rows]
    memory = peer_memory.memory_of(swap.ranks, tensors[0].device, HEADS, sizes)
    return _Messages(swap, brought, returned) if memory is None else _Reads(swap, brought, returned, memory)


def _lots(swap: Swap, tensors: Sequence[tuple[Tensor, Heads]]) -> list[_Lot]:
    """Of (batch, tokens, heads, dim): few where all are alike."""
    given = [(t.transpose(0, 1), heads) for t, heads in tensors]
    if swap.joins and len({(t.dtype, t.shape[-1]) for t, _ in given}) == 1:
        return [_Lot([t for t, _ in given], [heads for _, heads in given])]
    return [_Lot([t], [heads]) for t, heads in given]


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
