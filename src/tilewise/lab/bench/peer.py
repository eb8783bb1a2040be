"""The interface of a peer, and how a case becomes a call to be timed.

A peer prepares a case outside the timing (layout, masks, compilation, page tables) and returns the call
to be timed. One that does not serve a case raises `Refusal`, and its reason is shown in the results.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.mask import Visibility
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.inputs.data import DATA
from tilewise.lab.bench.inputs.masks import MASKS
from tilewise.lab.bench.inputs.options import CaseOption


@dataclass(frozen=True)
class Prepared:
    call: Callable[[], Any]  # the timed region
    results: Callable[[], dict[str, Tensor]]  # one more call: canonical "out", and gradients if any
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    detail: str | None = None  # what served the case, where the peer chooses


class Peer(ABC):
    name: str
    limit: float | None = None  # how far out may be off, of its norm; None: as the dtype says

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
    others: Sequence[Tensor] = (),
) -> Prepared:
    """Time `attend(query, key, value)`, or its gradients alone with the forward done beforehand.

    `others`: tensors that `attend` reads and whose gradients are timed too.
    """
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
        return torch.autograd.grad(out, (*leaves, *others), dout, retain_graph=True)

    return Prepared(backward, lambda: _named(out, backward()[:3], canonical), context)


def prepare_statistics(
    case: Case,
    inputs: Sequence[Tensor],
    attend: Callable[..., tuple[Tensor, Any]],
    canonical: Callable[[Tensor], Tensor],
    named: Callable[[Any], dict[str, Tensor]],
) -> Prepared:
    """Time a forward that gives its output and statistics; `named` says which tensors the latter are."""

    def call() -> tuple[Tensor, Any]:
        return attend(*inputs)

    def results() -> dict[str, Tensor]:
        out, found = call()
        return {"out": canonical(out), **named(found)}

    return Prepared(call, results)


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


class Pages(NamedTuple):
    """A cache cut into pages that lie in random order."""

    key: Tensor  # (num_pages, page_size, num_kv_heads, head_dim)
    value: Tensor
    table: Tensor  # (batch, pages a sequence) int32
    lengths: Tensor  # (batch,) int32


class Data:
    """The tensors of one case in the layout (batch, seqlen, heads, dim), or packed (total, heads, dim)."""

    def __init__(self, case: Case, device: str, seed: int) -> None:
        self.case, self.device = case, device
        self.seed = zlib.crc32(f"{seed} {case.name}".encode())
        generator = torch.Generator(device).manual_seed(self.seed)

        def normal(length: int, heads: int, dim: int) -> Tensor:
            rows = (sum(case.lengths),) if case.kind == "varlen" else (case.batch, length)
            return torch.randn(
                *rows, heads, dim, dtype=case.torch_dtype, device=device, generator=generator
            )  # never zeros: they are faster than real data

        self.query = normal(case.seqlen_q, case.num_heads, case.head_dim)
        self.key = normal(case.seqlen_k, case.num_kv_heads, case.head_dim)
        self.value = normal(case.seqlen_k, case.num_kv_heads, case.head_dim_v)
        DATA[case.data](self.query, self.key)
        self.dout = (
            None if case.direction == "forward" else normal(case.seqlen_q, case.num_heads, case.head_dim_v)
        )
        self.option = CaseOption(case, device, self.seed)
        self._placed: dict[tuple[str, str], Tensor] = {}

    def placed(self, name: str, layout: str) -> Tensor:
        """A tensor as a (batch, heads, seqlen, dim) view of memory in `layout`, "bshd" or "bhsd".

        Packed tensors have one layout and come as they are. Copies are shared between peers.
        """
        t = getattr(self, name)
        if self.case.kind == "varlen":
            return t
        if layout == "bshd":
            return t.transpose(1, 2)
        if (name, layout) not in self._placed:
            self._placed[name, layout] = t.transpose(1, 2).contiguous()
        return self._placed[name, layout]

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Where each packed document starts, and the end: (documents + 1,) int32."""
        return torch.tensor(
            [0, *itertools.accumulate(self.case.lengths)], dtype=torch.int32, device=self.device
        )

    @functools.cached_property
    def pages(self) -> Pages:
        """Keys and values again, in pages of `case.page_size`; every page but the last is full."""
        case = self.case
        assert case.page_size is not None
        per_sequence = -(-case.seqlen_k // case.page_size)
        order = list(range(case.batch * per_sequence))
        random.Random(self.seed).shuffle(order)
        table = torch.tensor(order, device=self.device).view(case.batch, per_sequence)
        key, value = (self._cut(t, table) for t in (self.key, self.value))
        lengths = torch.full((case.batch,), case.seqlen_k, dtype=torch.int32, device=self.device)
        return Pages(key, value, table.int(), lengths)

    def _cut(self, t: Tensor, table: Tensor) -> Tensor:
        """A pool of pages, filled by one copy: there may be thousands."""
        size = self.case.page_size or 1
        rows = table.shape[1] * size
        padded = torch.nn.functional.pad(t, (0, 0, 0, 0, 0, rows - t.shape[1]))
        pages = padded.unflatten(1, (-1, size)).flatten(0, 1)
        pool = torch.empty_like(pages)
        pool[table.flatten()] = pages
        return pool

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """Bool (batch or 1, 1, seqlen_q or 1, seqlen_k), True = attend; None if every key is visible.

        Of causal calls and windows, for peers without; made in blocks of rows, as positions fill the memory.
        """
        case = self.case
        if case.mask:
            return MASKS[case.mask](case, self.device).dense(case, self.device)
        left, right = case.reach
        if left is None and (right is None or case.seqlen_q == 1):
            return None
        mask = torch.empty(case.seqlen_q, case.seqlen_k, dtype=torch.bool, device=self.device)
        visibility = Visibility(case.seqlen_q, case.seqlen_k, left, right)
        for start in range(0, case.seqlen_q, 256):
            end = min(start + 256, case.seqlen_q)
            mask[start:end] = visibility.tile_mask(start, end, 0, case.seqlen_k, self.device)
        return mask[None, None]
