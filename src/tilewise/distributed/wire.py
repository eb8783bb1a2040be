"""Keys on their way to those who need them, and their gradients on the way back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.distributed.ranks import Ranks
from tilewise.distributed.schedule import Message, Range, Step
from tilewise.distributed.totals import Totals

Rows = tuple[Tensor, ...]  # keys and values, or their gradients: (tokens, batch, KV heads, dim), contiguous


class Transfer:
    """Messages that `start` sends on their way. `wait` completes them; until then their tensors are kept."""

    def __init__(
        self,
        sends: list[tuple[int, Tensor]],
        receives: list[tuple[int, Tensor]],
        result: Rows,
        arrive: Callable[[], None],
    ) -> None:
        self.sends, self.receives, self.result, self.arrive = sends, receives, result, arrive
        self.works: list[Any] = []

    def wait(self) -> Rows:
        """What arrived; on a GPU the current stream waits, not the host."""
        while self.works:  # which transfers that were started together share
            self.works.pop().wait()
        self.arrive()
        self.sends, self.receives, self.arrive = [], [], _nothing  # what these keep may be freed
        return self.result


def _nothing() -> None:
    pass


def start(ranks: Ranks, transfers: Sequence[Transfer]) -> None:
    """Start transfers at once: on a GPU they are one kernel, so that none waits for the end of another's.

    All ranks give them in the same order.
    """
    sends = [message for transfer in transfers for message in transfer.sends]
    works = ranks.exchange(sends, [message for transfer in transfers for message in transfer.receives])
    for transfer in transfers:
        transfer.works = works


def send_keys(step: Step, own: Rows) -> Transfer:
    """What brings this step's keys and values: own (rows, ...) each -> (step.keys, ...) each."""
    arriving = tuple([_new_rows(t, step.keys) for t in own])
    packed: list[tuple[Message, Tensor, Tensor]] = []
    receives = []
    for message in step.receives:
        for target in arriving:
            if len(message.rows) == 1:
                rows = _slice(target, message.rows[0])
            else:
                rows = _new_rows(target, _count(message.rows))
                packed.append((message, target, rows))
            receives.append((message.peer, rows))

    def unpack() -> None:
        for message, target, rows in packed:
            target.index_copy_(0, row_index(message.rows, target.device), rows)

    return Transfer(_outgoing(step.sends, own), receives, arriving, unpack)


def return_gradients(step: Step, theirs: Rows, totals: tuple[Totals, Totals]) -> Transfer:
    """The way back: gradients of this step's keys to whom they belong; what arrives is added up."""
    incoming = [
        (message, total, _new_rows(t, _count(message.rows)))
        for message, (total, t) in itertools.product(step.sends, zip(totals, theirs, strict=True))
    ]

    def add() -> None:
        for message, total, rows in incoming:  # in the order of the schedule: the same sum in every run
            if len(message.rows) == 1:
                total.add(message.rows[0][0], rows.transpose(0, 1))
            else:
                total.add_at(row_index(message.rows, rows.device), rows.transpose(0, 1))

    receives = [(message.peer, rows) for message, _, rows in incoming]
    return Transfer(_outgoing(step.receives, theirs), receives, theirs, add)


def _outgoing(messages: tuple[Message, ...], tensors: Rows) -> list[tuple[int, Tensor]]:
    return [
        (m.peer, _slice(t, m.rows[0]) if len(m.rows) == 1 else t[row_index(m.rows, t.device)])
        for m in messages
        for t in tensors
    ]


def _new_rows(t: Tensor, count: int) -> Tensor:
    """(count, ...) like t."""
    return torch.empty((count, *t.shape[1:]), dtype=t.dtype, device=t.device)


def _slice(t: Tensor, rows: Range) -> Tensor:
    return t if rows == (0, t.shape[0]) else t[rows[0] : rows[1]]


def _count(rows: tuple[Range, ...]) -> int:
    return sum(b - a for a, b in rows)


@functools.lru_cache(maxsize=1024)
def row_index(rows: tuple[Range, ...], device: Any) -> Tensor:
    """int64 (rows,): ranges of rows, one behind the other."""
    ranges = [torch.arange(a, b, device="cpu") for a, b in rows]
    return torch.cat(ranges).to(device) if ranges else torch.empty(0, dtype=torch.int64, device=device)
