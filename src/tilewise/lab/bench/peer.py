"""The interface of a peer, and how a case becomes a call to be timed.

A peer prepares a case outside the timing (layout, masks, compilation, page tables) and returns the call
to be timed. One that does not serve a case raises `Refusal`, and its reason is shown in the results.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.inputs import Data


@dataclass(frozen=True)
class Prepared:
    """A case, ready to be timed."""

    call: Callable[[], Any]  # the timed region
    results: Callable[[], dict[str, Tensor]]  # one more call: canonical "out", and gradients if any
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    detail: str | None = None  # what served the case, where the peer chooses


class Peer(ABC):
    """One implementation of attention."""

    name: str

    def unavailable(self, device: str) -> str | None:
        """Why this peer cannot run at all here, or None."""
        return None

    def layouts(self, case: Case) -> tuple[str, ...]:
        """Memory layouts worth trying; the faster one is timed."""
        return ("bshd",)

    @abstractmethod
    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        """Set up everything that is not attention itself.

        Raises:
            Refusal: the peer does not serve the case.
        """


def prepare_call(
    case: Case,
    tensors: Sequence[Tensor],
    dout: Tensor | None,
    attend: Callable[..., Tensor],
    canonical: Callable[[Tensor], Tensor],
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Prepared:
    """Time `attend(query, key, value)`, or its gradients alone with the forward done beforehand."""
    if case.direction == "forward":

        def call() -> Tensor:
            return attend(*tensors)

        return Prepared(call, lambda: {"out": canonical(call())}, context)

    leaves = [t.detach().requires_grad_() for t in tensors]
    if case.direction == "forward+backward":

        def both() -> tuple[Tensor, tuple[Tensor, ...]]:
            out = attend(*leaves)
            return out, torch.autograd.grad(out, leaves, dout)

        return Prepared(both, lambda: _named(*both(), canonical), context)

    with context():
        out = attend(*leaves)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return Prepared(backward, lambda: _named(out, backward(), canonical), context)


def _named(
    out: Tensor, gradients: Sequence[Tensor], canonical: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    return {
        name: canonical(t.detach())
        for name, t in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True)
    }


def as_is(t: Tensor) -> Tensor:
    return t


def from_bhsd(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


def dense_tensors(data: Data, layout: str) -> tuple[list[Tensor], Tensor | None]:
    """query, key, value and dout as (batch, heads, seqlen, dim)."""
    tensors = [data.placed(name, layout) for name in ("query", "key", "value")]
    return tensors, None if data.dout is None else data.placed("dout", layout)
