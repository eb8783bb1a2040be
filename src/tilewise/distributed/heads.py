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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.distributed import peer_memory
from tilewise.distributed.layout import Layout
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
def head_groups(world: int, num_heads: int, num_kv_heads: int, may_share: bool) -> tuple[HeadGroup, ...]:
    """The heads of each rank. may_share: several groups may have the same KV head."""
    own, own_kv, per_key = num_heads // world, num_kv_heads // world, num_heads // num_kv_heads
    shares = own_kv <= 1
    splits = own_kv if not shares else own if may_share else 1
    count = GROUPS if splits % GROUPS == 0 else 1
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

    If there are others, what arrives goes on to them, as whole tensors.
    """
    joins = ranks.world == layout.world
    groups = head_groups(ranks.world, num_heads, num_kv_heads, joins)
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
        of_groups = [group.of(is_key) for group in swap.groups]
        new = tensors[0].new_zeros if _is_shared(of_groups[0]) else tensors[0].new_empty
        totals.append(new((batch, tokens, of_groups[-1][-1].stop, dim), dtype=dtype))
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


def _is_shared(heads: Heads) -> bool:
    """Whether several ranks have the same."""
    return any(a.stop > b.start for a, b in itertools.pairwise(heads))


class _Lot(NamedTuple):
    """Tensors that travel as one, side by side along their heads: (tokens, batch, heads, dim) each."""

    tensors: Sequence[Tensor]
    heads: Sequence[Heads]  # which of each tensor a group has

    def of(self, rank: int) -> tuple[Tensor, ...]:
        """A rank's heads of each tensor."""
        return tuple([t[:, :, own[rank]] for t, own in zip(self.tensors, self.heads, strict=True)])

    @property
    def widths(self) -> list[int]:
        """Heads of each tensor: ranks have as many."""
        return [own[0].stop - own[0].start for own in self.heads]

    @property
    def row_bytes(self) -> int:
        _, batch, _, dim = self.tensors[0].shape
        return batch * sum(self.widths) * dim * self.tensors[0].dtype.itemsize

    def new(self, tokens: int) -> Tensor:
        """Room for a rank's heads of all tensors, side by side."""
        _, batch, _, dim = self.tensors[0].shape
        return self.tensors[0].new_empty((tokens, batch, sum(self.widths), dim))

    def split(self, joined: Tensor) -> tuple[Tensor, ...]:
        """Such room as that for each tensor."""
        return joined.split(self.widths, 2)

    def put(self, rank: int, found: Sequence[Tensor], ranges: tuple[Range, ...] | None = None) -> None:
        """A rank's heads of results: all or some rows of them, added where other ranks have the same."""
        for target, t, own in zip(self.of(rank), found, self.heads, strict=True):
            for part, chunk in [(target, t)] if ranges is None else _taken(target, ranges, t):
                part.add_(chunk) if _is_shared(own) else part.copy_(chunk)


Place = tuple[int, int]  # of a lot: its group of heads, and which of them it is


class _Wire(abc.ABC):
    """How heads come to a rank and results go back. All ranks make the same calls in the same order."""

    def __init__(self, swap: Swap, brought: list[list[_Lot]], returned: list[list[_Lot]]) -> None:
        """brought, returned: what travels, and where results go, of each group of heads."""
        self.swap, self.brought, self.returned = swap, brought, returned
        self.me, self.rows = swap.ranks.rank, swap.rows
        self.device = brought[0][0].tensors[0].device
        self.leaving: dict[Place, Tensor] = {}
        world = swap.ranks.world
        self.others = [(self.me + distance) % world for distance in range(1, world)]

    def bring(self, number: int) -> Transfer:
        """Tensors of a group of heads, (batch, tokens of all ranks, heads, dim) each.

        What arrives is received where it belongs; what stays is put there at once.
        """
        result: list[Tensor] = []
        fetches = []
        for n, lot in enumerate(self.brought[number]):
            target = lot.new(self.swap.length)
            for part, own in zip(lot.split(target), lot.of(self.me), strict=True):
                _put(part, self.rows[self.me], own)
                result.append(part.transpose(0, 1))
            fetches += [self._bring((number, n), lot, rank, target) for rank in self.others]
        return transfer_of(tuple(result), fetches)

    def give_back(self, number: int, found: tuple[Tensor, ...]) -> Transfer:
        """Results of a group of heads to those whose tokens they are."""
        by_token, fetches = [t.transpose(0, 1) for t in found], []
        for n, lot in enumerate(self.returned[number]):
            tensors, by_token = by_token[: len(lot.tensors)], by_token[len(lot.tensors) :]
            lot.put(self.me, tensors, self.rows[self.me])
            self._leave((number, n), tensors)
            fetches += [self._give_back((number, n), lot, rank) for rank in self.others]
        return transfer_of((), fetches)

    @abc.abstractmethod
    def _bring(self, place: Place, lot: _Lot, rank: int, target: Tensor) -> Fetch:
        """A rank's tokens of a lot, into those of all."""

    @abc.abstractmethod
    def _leave(self, place: Place, results: Sequence[Tensor]) -> None:
        """Results for the tokens of all ranks, which others take theirs of."""

    @abc.abstractmethod
    def _give_back(self, place: Place, lot: _Lot, rank: int) -> Fetch:
        """This rank's tokens of what another has found."""

    @abc.abstractmethod
    def start(self, transfer: Transfer) -> None:
        """Start it beside what the current stream does next."""


class _Messages(_Wire):
    """By messages, which any group has."""

    def _bring(self, place: Place, lot: _Lot, rank: int, target: Tensor) -> Fetch:
        ranges, mine = self.rows[rank], _joined(lot.of(rank))
        sends = [(rank, m) for m in _chunk_messages(mine, self.rows[self.me])]
        if len(ranges) <= MAX_MESSAGES:
            return Fetch([(rank, target[a:b]) for a, b in ranges], sends=sends)
        chunk = lot.new(count_rows(ranges))
        return Fetch([(rank, chunk)], functools.partial(_put, target, ranges, chunk), sends)

    def _leave(self, place: Place, results: Sequence[Tensor]) -> None:
        self.leaving[place] = _joined(results)

    def _give_back(self, place: Place, lot: _Lot, rank: int) -> Fetch:
        ranges, leaving = self.rows[rank], self.leaving[place]
        is_packed = len(ranges) > MAX_MESSAGES
        theirs = (
            [leaving[row_index(ranges, leaving.device)]] if is_packed else [leaving[a:b] for a, b in ranges]
        )
        chunk = lot.new(count_rows(self.rows[self.me]))
        receives = [(rank, m) for m in _chunk_messages(chunk, self.rows[self.me])]
        put = functools.partial(lot.put, rank, lot.split(chunk))
        return Fetch(receives, put, [(rank, m) for m in theirs])

    def start(self, transfer: Transfer) -> None:
        transfer.works = self.swap.ranks.exchange(transfer.sends, transfer.receives)
        self.swap.ranks.let_messages_begin(self.device)


class _Reads(_Wire):
    """By reading where it lies, which GPUs of one host can: what each rank wants is packed for it."""

    def __init__(
        self, swap: Swap, brought: list[list[_Lot]], returned: list[list[_Lot]], memory: PeerMemory
    ) -> None:
        """memory: with a slot for each rank of each lot that is brought, and for each that is returned."""
        super().__init__(swap, brought, returned)
        self.memory, self.stream, world = memory, stream_of(memory.device), swap.ranks.world
        self.slots = {place: world * n for n, place in enumerate(_places(brought))}
        first = world * len(self.slots)
        self.back = {place: first + n for n, place in enumerate(_places(returned))}
        lots = itertools.product(itertools.chain(*brought), range(world))
        memory.publish([() if rank == self.me else lot.of(rank) for lot, rank in lots], self.stream)

    def _bring(self, place: Place, lot: _Lot, rank: int, target: Tensor) -> Fetch:
        count = count_rows(self.rows[rank])
        theirs = self._read(rank, self.slots[place] + self.me, (count, *target.shape[1:]), target.dtype)
        return fetch(theirs, ((0, count),), target, self.rows[rank])

    def _leave(self, place: Place, results: Sequence[Tensor]) -> None:
        self.memory.publish([results], self.stream, self.back[place])

    def _give_back(self, place: Place, lot: _Lot, rank: int) -> Fetch:
        ranges = self.rows[self.me]
        chunk = lot.new(count_rows(ranges))
        theirs = self._read(rank, self.back[place], (self.swap.length, *chunk.shape[1:]), chunk.dtype)
        copies, unpack = fetch(theirs, ranges, chunk, ((0, len(chunk)),))[:2]

        def put() -> None:
            unpack()
            lot.put(rank, lot.split(chunk))

        return Fetch(copies, put)

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
    sizes = [one * lot.row_bytes for lot in itertools.chain(*brought) for _ in range(swap.ranks.world)]
    sizes += [all_ * lot.row_bytes for lot in itertools.chain(*returned)]
    memory = peer_memory.memory_of(swap.ranks, tensors[0].device, HEADS, sizes)
    return _Messages(swap, brought, returned) if memory is None else _Reads(swap, brought, returned, memory)


def _lots(swap: Swap, tensors: Sequence[tuple[Tensor, Heads]]) -> list[_Lot]:
    """Of (batch, tokens, heads, dim): few where all are alike."""
    given = [(t.transpose(0, 1), heads) for t, heads in tensors]
    if swap.joins and len({(t.dtype, t.shape[-1]) for t, _ in given}) == 1:
        return [_Lot([t for t, _ in given], [heads for _, heads in given])]
    return [_Lot([t], [heads]) for t, heads in given]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors), 2) if len(tensors) > 1 else tensors[0].contiguous()


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
