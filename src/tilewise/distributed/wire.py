"""Keys on their way to those who need them, and their gradients on the way back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.distributed.ranks import Ranks
from tilewise.distributed.schedule import Message, Range, Step


class Transfer:
    """Messages of one step. `wait` completes them; until then their tensors are kept."""

    def __init__(
        self,
        ranks: Ranks,
        sends: list[tuple[int, Tensor]],
        receives: list[tuple[int, Tensor]],
        result: Tensor,
        arrive: Callable[[], None],
    ) -> None:
        self.result, self.arrive, self.kept = result, arrive, (sends, receives)
        self.works = ranks.exchange(sends, receives)

    def wait(self) -> Tensor:
        """What arrived; on a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        self.arrive()
        self.works, self.kept = [], ([], [])
        return self.result


def send_keys(ranks: Ranks, step: Step, own: Tensor) -> Transfer:
    """Start what brings this step's keys: own (rows, ...) -> (step.keys, ...)."""
    arriving = own.new_empty((step.keys, *own.shape[1:]))
    packed: list[tuple[Message, Tensor]] = []
    receives = []
    for message in step.receives:
        if len(message.rows) == 1:
            target = _slice(arriving, message.rows[0])
        else:
            target = own.new_empty((_count(message.rows), *own.shape[1:]))
            packed.append((message, target))
        receives.append((message.peer, target))

    def unpack() -> None:
        for message, rows in packed:
            arriving.index_copy_(0, _index(message.rows, own.device), rows)

    return Transfer(ranks, _outgoing(step.sends, own), receives, arriving, unpack)


def return_gradients(ranks: Ranks, step: Step, theirs: Tensor, own: Tensor) -> Transfer:
    """Start the way back: gradients of this step's keys to whom they belong; what arrives is added to own."""
    incoming = [(m, own.new_empty((_count(m.rows), *own.shape[1:]))) for m in step.sends]

    def add() -> None:
        for message, rows in incoming:  # in the order of the schedule: the same sum in every run
            if len(message.rows) == 1:
                _slice(own, message.rows[0]).add_(rows)
            else:
                own.index_add_(0, _index(message.rows, own.device), rows)

    receives = [(message.peer, rows) for message, rows in incoming]
    return Transfer(ranks, _outgoing(step.receives, theirs), receives, own, add)


def _outgoing(messages: tuple[Message, ...], rows: Tensor) -> list[tuple[int, Tensor]]:
    return [
        (m.peer, _slice(rows, m.rows[0]) if len(m.rows) == 1 else rows[_index(m.rows, rows.device)])
        for m in messages
    ]


def _slice(t: Tensor, rows: Range) -> Tensor:
    return t[rows[0] : rows[1]]


def _count(rows: tuple[Range, ...]) -> int:
    return sum(b - a for a, b in rows)


@functools.lru_cache(maxsize=1024)
def _index(rows: tuple[Range, ...], device: Any) -> Tensor:
    return torch.cat([torch.arange(a, b) for a, b in rows]).to(device)
