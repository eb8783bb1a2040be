"""Keys on their way to those who need them, and their gradients on the way back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.kept import kept_on_device
from tilewise.core.signature import compute_dtype
from tilewise.distributed import peer_memory
from tilewise.distributed.layout import Layout, numbers_in
from tilewise.distributed.parts import Totals
from tilewise.distributed.peer_memory import GRADIENTS, KEYS, PeerMemory, copy_beside, stream_of
from tilewise.distributed.ranks import Ranks, to_device
from tilewise.distributed.schedule import Message, Range, Rules, Step, num_rows, traffic

Rows = tuple[Tensor, ...]  # keys and values, or their gradients: (tokens, batch, KV heads, dim)
KeyTotals = tuple[Totals, Totals]  # of keys, of values


@dataclass
class Transfer:
    """Rows on their way. `wait` completes them; until then their tensors are kept."""

    result: Rows = ()
    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[Any, Tensor]] = field(default_factory=list)  # from a peer, or a tensor in its memory
    after: list[Callable[[], None]] = field(default_factory=list)  # what is done when all is here
    works: list[Any] = field(default_factory=list)

    def wait(self) -> Rows:
        """What arrived; on a GPU the current stream waits, not the host."""
        while self.works:  # which transfers that were started together share
            self.works.pop().wait()
        for finish in self.after:
            finish()
        self.receives, self.after, self.sends = [], [], []  # what these keep may be freed
        return self.result


def make_wire(
    ranks: Ranks,
    steps: tuple[Step, ...],
    own: Rows,
    make_reach: Callable[[], Reach],
    most_heads: int,
    is_backward: bool,
) -> Wire:
    """How keys come to a rank and gradients of them go back, in one direction of a call.

    Steps are numbered as in the schedule. All ranks make the same calls in the same order.

    Args:
        own: the rank's keys and values.
        most_heads: KV heads of the rank of the group that has most.
    """
    if len(steps) > 1 and peer_memory.can_read(ranks, own[0].device):
        reach = make_reach()
        wanted = [(KEYS, reach.most_published, own[0].dtype)]
        wanted += [(GRADIENTS, reach.most_arriving, compute_dtype(own[0].dtype))] if is_backward else []
        numbers = [t.shape[1] * most_heads * t.shape[3] for t in own]  # of a row
        found = [
            peer_memory.memory_of(ranks, own[0].device, purpose, [rows * n * dtype.itemsize for n in numbers])
            for purpose, rows, dtype in wanted
        ]
        memories = [memory for memory in found if memory is not None]
        if len(memories) == len(found):
            return Reads(ranks, steps, reach, memories, own)
    return Messages(ranks, steps, own)


class Messages:
    """By messages, which any group has."""

    def __init__(self, ranks: Ranks, steps: tuple[Step, ...], own: Rows) -> None:
        """own: the rank's keys and values."""
        self.ranks, self.steps, self.device = ranks, steps, own[0].device
        self.own = tuple(t.contiguous() for t in own) if len(steps) > 1 else ()

    def bring_keys(self, number: int) -> Transfer:
        """What brings a step's keys and values, (step.keys, batch, KV heads, dim) each."""
        step = self.steps[number]
        transfer = Transfer(tuple([_new_rows(t, step.keys) for t in self.own]))
        transfer.sends = _outgoing(step.sends, self.own)
        for message, target in itertools.product(step.receives, transfer.result):
            if len(message.rows) == 1:
                rows = _slice(target, message.rows[0])
            else:
                rows = _new_rows(target, num_rows(message.rows))
                transfer.after.append(functools.partial(_put, target, message.rows, rows))
            transfer.receives.append((message.peer, rows))
        return transfer

    def return_gradients(self, number: int, theirs: Rows, totals: KeyTotals) -> Transfer:
        """Gradients of a step's keys to whom they belong; totals grow by what comes from others.

        Those that arrive are added in the order of the schedule: the same sum in every run.
        """
        step = self.steps[number]
        theirs = tuple(t.contiguous() for t in theirs)
        transfer = Transfer(sends=_outgoing(step.receives, theirs))
        for message, (t, total) in itertools.product(step.sends, list(zip(theirs, totals, strict=True))):
            rows = _new_rows(t, num_rows(message.rows))
            transfer.receives.append((message.peer, rows))
            transfer.after.append(functools.partial(_add, total, message.rows, rows))
        return transfer

    def start(self, transfers: Sequence[Transfer]) -> None:
        """Start transfers at once, beside what the current stream does next.

        On a GPU they are one kernel, so that none waits for the end of another's.
        """
        sends = [message for transfer in transfers for message in transfer.sends]
        receives = [message for transfer in transfers for message in transfer.receives]
        works = self.ranks.exchange(sends, receives)
        for transfer in transfers:
            transfer.works = works
        self.ranks.let_messages_begin(self.device)


class FarEnds(NamedTuple):
    """Where what a step sends and receives lies elsewhere, in the order of its messages."""

    receives: tuple[tuple[Range, ...], ...]  # rows of what the sender has published of its own keys
    sends: tuple[tuple[Range, ...], ...]  # rows of the receiver's keys in its step


class Reach(NamedTuple):
    """What ranks that read each other's memory know of each other."""

    published: Range  # of the rank's own keys: all that others read
    steps: tuple[FarEnds, ...]  # of the steps behind the first
    most_published: int  # rows, of the rank that has most
    most_arriving: int  # rows of a step, likewise


@functools.lru_cache(maxsize=128)
def reach_of(layout: Layout, rank: int, rules: Rules, method: str) -> Reach:
    """For the schedules of `make_schedule`."""
    of_all = [traffic(layout, r, rules, method) for r in range(layout.world)]
    published = [_span([m for step in steps for m in step.sends]) for steps in of_all]

    def sent(peer: int, number: int) -> tuple[Range, ...]:
        first, _ = published[peer]
        return tuple((a - first, b - first) for a, b in _of(of_all[peer][number].sends, rank))

    steps = [
        FarEnds(
            tuple(sent(message.peer, n) for message in step.receives),
            tuple(_of(of_all[message.peer][n].receives, rank) for message in step.sends),
        )
        for n, step in enumerate(of_all[rank])
    ]
    most_arriving = max((step.keys for steps in of_all for step in steps), default=0)
    return Reach(published[rank], tuple(steps), max(b - a for a, b in published), most_arriving)


def _of(messages: tuple[Message, ...], peer: int) -> tuple[Range, ...]:
    """The rows of the message to or from a peer."""
    return next(message.rows for message in messages if message.peer == peer)


def _span(messages: Sequence[Message]) -> Range:
    """From the first row of messages to their last."""
    rows = [row for message in messages for row in message.rows]
    return (min(a for a, _ in rows), max(b for _, b in rows)) if rows else (0, 0)


class Reads:
    """As `Messages`, by reading where it lies, which GPUs of one host can."""

    def __init__(
        self,
        ranks: Ranks,
        steps: tuple[Step, ...],
        reach: Reach,
        memories: Sequence[PeerMemory],
        own: Rows,
    ) -> None:
        """own: the rank's keys and values. memories: for them, and in a backward for gradients."""
        self.ranks, self.steps, self.reach, self.own = ranks, steps, reach, own
        self.keys, self.gradients = memories[0], memories[-1]
        self.stream = stream_of(own[0].device)
        self.keys.publish([_slice(t, reach.published) for t in own], self.stream)

    def bring_keys(self, number: int) -> Transfer:
        step, far = self.steps[number], self.reach.steps[number - 1].receives
        transfer = Transfer(tuple([_new_rows(t, step.keys) for t in self.own]))
        rank, world = self.ranks.rank, self.ranks.world
        pairs = zip(step.receives, far, strict=True)
        # Ranks begin with different ones.
        for message, there in sorted(pairs, key=lambda pair: (pair[0].peer - rank) % world):
            for slot, target in enumerate(transfer.result):
                self._read(transfer, self.keys, message.peer, slot, there, target, message.rows)
        return transfer

    def return_gradients(self, number: int, theirs: Rows, totals: KeyTotals) -> Transfer:
        step, far = self.steps[number], self.reach.steps[number - 1].sends
        self.gradients.publish(theirs, self.stream)
        there = {message.peer: rows for message, rows in zip(step.sends, far, strict=True)}
        transfer, additions = Transfer(), []
        for message, (slot, t) in itertools.product(step.sends, enumerate(theirs)):
            first, end = message.rows[0][0], message.rows[-1][1]
            rows = _new_rows(t, end - first)
            if len(message.rows) > 1:
                rows.zero_()  # what lies between
            here = tuple((a - first, b - first) for a, b in message.rows)
            self._read(transfer, self.gradients, message.peer, slot, there[message.peer], rows, here)
            additions.append(functools.partial(_add, totals[slot], ((first, end),), rows))
        transfer.after += additions  # once all that was packed is in its place
        return transfer

    def start(self, transfers: Sequence[Transfer]) -> None:
        works = copy_beside([read for transfer in transfers for read in transfer.receives], self.stream)
        for transfer in transfers:
            transfer.works = works

    def _read(
        self,
        transfer: Transfer,
        memory: PeerMemory,
        peer: int,
        slot: int,
        there: tuple[Range, ...],
        target: Tensor,
        here: tuple[Range, ...],
    ) -> None:
        """Let a transfer bring rows of what a peer has published in a slot, as rows of target."""
        shape = there[-1][1], *target.shape[1:]
        source = memory.read(self.ranks.peers[peer], slot, shape, target.dtype)
        pairs = _in_step(here, there)
        if len(pairs) <= max(MOST_COPIES, num_rows(there) * target[:1].nbytes // LONG):
            transfer.receives += [(_slice(source, c), _slice(target, a)) for a, c in pairs]
            return
        first, end = there[0][0], there[-1][1]
        rows = _new_rows(target, end - first)

        def unpack() -> None:
            index = row_index(tuple((c - first, d - first) for c, d in there), target.device)
            _put(target, here, rows[index])

        transfer.receives.append((source[first:end], rows))
        transfer.after.append(unpack)


Wire = Messages | Reads
MOST_COPIES = 8  # for a message of short ranges: where it has more, all between them is read too, by one
LONG = 1 << 20  # bytes


def _put(target: Tensor, places: tuple[Range, ...], rows: Tensor) -> None:
    target.index_copy_(0, row_index(places, target.device), rows)


def _add(total: Totals, places: tuple[Range, ...], rows: Tensor) -> None:
    """Gradients of some of a rank's keys, or values, from a rank that has used them."""
    if len(places) == 1:
        total.add(places[0][0], rows.transpose(0, 1))
    else:
        total.add_at(row_index(places, rows.device), rows.transpose(0, 1))


def _outgoing(messages: tuple[Message, ...], tensors: Rows) -> list[tuple[int, Tensor]]:
    return [(m.peer, rows_of(t, m.rows)) for m in messages for t in tensors]


@functools.lru_cache(maxsize=1024)
def _in_step(here: tuple[Range, ...], there: tuple[Range, ...]) -> list[tuple[Range, Range]]:
    """Ranges of equal lengths, of two lists that have as many rows in all."""
    pairs, left, right = [], list(here[::-1]), list(there[::-1])
    while left:
        (a, b), (c, d) = left.pop(), right.pop()
        count = min(b - a, d - c)
        pairs.append(((a, a + count), (c, c + count)))
        if a + count < b:
            left.append((a + count, b))
        if c + count < d:
            right.append((c + count, d))
    return pairs


def _new_rows(t: Tensor, count: int) -> Tensor:
    """(count, ...) like t."""
    return torch.empty((count, *t.shape[1:]), dtype=t.dtype, device=t.device)


def _slice(t: Tensor, rows: Range) -> Tensor:
    return t if rows == (0, t.shape[0]) else t[rows[0] : rows[1]]


def rows_of(t: Tensor, rows: tuple[Range, ...]) -> Tensor:
    """Some rows, one behind the other: a view if they are one range."""
    return _slice(t, rows[0]) if len(rows) == 1 else t[row_index(rows, t.device)]


@kept_on_device(1024)
def row_index(rows: tuple[Range, ...], device: Any) -> Tensor:
    """int64 (rows,): ranges of rows, one behind the other."""
    return to_device(numbers_in(rows), device)
