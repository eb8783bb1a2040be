"""Runs a schedule: while keys of one step are computed with, those of the next are on their way.

Forward: out and lse of each step's keys are merged in float32, rounded once at the end.
Backward: the same keys travel again. The gradient of keys of others goes back to its owner, in the tensors'
dtype, while the next step is computed; the owner adds up in float32. Half of the rank's own work is kept for
the end, when the last of them travel. Both directions hold two steps' keys at most, besides what ranks that
read each other's memory publish in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.core.problem import Options
from tilewise.distributed.heads import Kind, Swap, exchange
from tilewise.distributed.parts import (
    Extras,
    Origin,
    Part,
    Totals,
    attend,
    differentiate,
    parts_of,
    tile,
    wide,
)
from tilewise.distributed.ranks import Ranks
from tilewise.distributed.schedule import Step
from tilewise.distributed.wire import Reach, Wire, make_wire


@dataclass(frozen=True)
class Work:
    """What a rank has to do in a call, without its tensors."""

    ranks: Ranks
    steps: tuple[Step, ...]
    backward_steps: tuple[Step, ...]
    options: Options  # its window is the schedule's
    backend: str | None
    packs: bool  # blocks of several documents share a call
    origin: Origin
    make_reach: Callable[[], Reach]  # of these schedules
    most_heads: int  # KV heads, of the rank of the group that has most

    def wire(self, key: Tensor, value: Tensor, is_backward: bool) -> Wire:
        """For one direction; key and value are the rank's own."""
        steps, own = self.backward_steps if is_backward else self.steps, _swapped((key, value))
        return make_wire(self.ranks, steps, own, self.make_reach, self.most_heads, is_backward)

    def parts(self, step: Step, device: torch.device) -> tuple[Part, ...]:
        return parts_of(step, self.packs, device)


def run(
    works: tuple[Work, ...],
    swap: Swap | None,
    inputs: tuple[Tensor, Tensor, Tensor],
    given: Sequence[tuple[Extras, Tensor | None]],
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """out (batch, tokens of the rank, heads, dim) and, if wanted, lse (batch, heads, tokens of the rank).

    Differentiable.

    Args:
        works: what is to be done with each group of heads of `swap`; one, where that is None.
        inputs: query, key and value, (batch, tokens of the rank, heads, dim).
        given: extras and sinks (heads,) of each group.
    """
    rest = [t for extras, sinks in given for t in (*extras, sinks)]
    return SequenceParallel.apply(works, swap, wants_lse, *inputs, *rest)  # type: ignore[no-any-return]


PER_GROUP = len(Extras._fields) + 1  # tensors: extras and sinks


class SequenceParallel(torch.autograd.Function):
    """Attention whose keys are spread over ranks; with a swap their heads are exchanged for tokens before."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, works: tuple[Work, ...], swap: Swap | None, wants_lse: bool, query: Tensor, key: Tensor,
        value: Tensor, *rest: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        kept: list[tuple[Tensor, ...]] = []

        def compute(number: int, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            q, k, v = found if len(found) == 3 else (*found, *kept[-1][1:3])
            *extras, sinks = rest[number * PER_GROUP :][:PER_GROUP]
            out, lse = _forward(works[number], q, k, v, Extras(*extras), sinks)
            kept.append((q, k, v, out, lse))
            return (out, _by_token(lse)) if wants_lse else (out,)

        results = [Kind(False, value.shape[-1], query.dtype), Kind(False, 1, wide(query.dtype))][
            : 1 + wants_lse
        ]
        out, *lse = exchange(swap, (query, key, value), (False, True, True), results, compute)
        ctx.call = works, swap, [Kind(i > 0, t.shape[-1], t.dtype) for i, t in enumerate((query, key, value))]
        ctx.save_for_backward(*itertools.chain(*kept), *rest)
        return out, _by_head(lse[0]) if lse else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        works, swap, results = ctx.call
        saved, rest = ctx.saved_tensors[: 5 * len(works)], ctx.saved_tensors[5 * len(works) :]
        done: list[Backward] = []
        others: list[Tensor | None] = []

        def compute(number: int, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            q, k, v, out, lse = saved[number * 5 :][:5]
            *extras, sinks = rest[number * PER_GROUP :][:PER_GROUP]
            needs = ctx.needs_input_grad[-len(rest) + number * PER_GROUP :][:PER_GROUP]
            group = None if swap is None else swap.groups[number]
            dkeys = done[-1].dkeys if group is not None and not group.brings_keys else None
            done.append(backward := Backward(works[number], q, k, v, Extras(*extras), needs[1], dkeys))
            dout, dlse = found[0], _by_head(found[1]) if len(found) > 1 else None
            backward.run((out, lse), dout, dlse)
            dsinks = None
            if sinks is not None and needs[-1]:
                delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)
                delta = delta if dlse is None else delta - dlse
                dsinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
            bias, dbias = extras[1], backward.dbias
            dbias = None if bias is None or dbias is None else dbias.to(bias.dtype)
            others.extend((None, dbias, None, backward.dcaptured, None, None, None, dsinks))
            totals = backward.dquery, *(backward.dkeys if group is None or group.returns_keys else ())
            return tuple(total.finish()[0].contiguous() for total in totals)

        given = (dout,) if dlse is None else (dout, _by_token(dlse))
        grads = exchange(swap, given, (False,) * len(given), results, compute)
        return None, None, None, *grads, *others


def _by_token(lse: Tensor) -> Tensor:
    """(batch, heads, tokens) as (batch, tokens, heads, 1)."""
    return lse.transpose(1, 2)[..., None]


def _by_head(lse: Tensor) -> Tensor:
    return lse[..., 0].transpose(1, 2)


def _swapped(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(batch, tokens, ...) as (tokens, batch, ...), and back."""
    return tuple(t.transpose(0, 1) for t in tensors)


def _forward(
    work: Work, query: Tensor, key: Tensor, value: Tensor, extras: Extras, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out, in query's dtype, and lse."""
    steps = work.steps
    wire = work.wire(key, value, is_backward=False)
    total = Totals(query, value.shape[-1], has_lse=True)
    arriving = None
    for number, step in enumerate(steps):
        if arriving is not None:
            key, value = _swapped(arriving.wait())
        if number + 1 < len(steps):
            wire.start([arriving := wire.bring_keys(number + 1)])
        for part in work.parts(step, query.device):
            found = attend(part, query, key, value, extras, work.options, work.backend, work.origin)
            total.add(part.block.q0, *found)
    if sinks is not None:  # a key whose value is 0
        nothing = value.new_zeros(value.shape[-1]).expand(*query.shape[:-1], -1)
        total.add(0, nothing, sinks.to(total.wide)[:, None].expand(len(query), -1, query.shape[1]))
    out, lse = total.finish()
    assert lse is not None
    return out, lse


class Backward:
    """The gradients of one call on one rank."""

    def __init__(
        self,
        work: Work,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        extras: Extras,
        needs_bias: bool,
        dkeys: tuple[Totals, Totals] | None = None,
    ) -> None:
        """dkeys: what gradients of keys and values are added to, if others have come before."""
        self.work, self.query, self.key, self.value, self.extras = work, query, key, value, extras
        self.dquery = Totals(query, query.shape[-1])
        self.dkeys = dkeys or (Totals(key, key.shape[-1]), Totals(value, value.shape[-1]))
        bias = extras.bias
        self.dbias = (
            torch.zeros_like(bias, dtype=wide(query.dtype)) if bias is not None and needs_bias else None
        )
        self.dcaptured: Tensor | None = None

    def run(self, results: tuple[Tensor, Tensor], dout: Tensor, dlse: Tensor | None) -> None:
        """Add up the gradients."""
        work, steps = self.work, self.work.backward_steps
        wire = work.wire(self.key, self.value, is_backward=True)
        arriving = returning = None
        for number, step in enumerate(steps):
            key, value, totals = self.key, self.value, self.dkeys
            if not step.is_own:
                assert arriving is not None
                key, value = _swapped(arriving.wait())
                totals = Totals(key, key.shape[-1]), Totals(value, value.shape[-1])
            started = [] if returning is None else [returning]
            if number + 1 < len(steps) and not steps[number + 1].is_own:
                started.append(arriving := wire.bring_keys(number + 1))
            if started:
                wire.start(started)
            for part in work.parts(step, self.query.device):
                self._add(part, key, value, totals, results, dout, dlse)
            if returning is not None:
                returning.wait()
                returning = None
            if not step.is_own:
                theirs = _swapped(tuple(total.finish()[0] for total in totals))
                returning = wire.return_gradients(number, theirs, self.dkeys)
                del theirs, totals

    def _add(
        self,
        part: Part,
        key: Tensor,
        value: Tensor,
        totals: tuple[Totals, Totals],
        results: tuple[Tensor, Tensor],
        dout: Tensor,
        dlse: Tensor | None,
    ) -> None:
        work, block, needs_bias = self.work, part.block, self.dbias is not None
        grads = differentiate(
            part, self.query, key, value, self.extras, work.options, work.backend, work.origin,
            results, dout, dlse, needs_bias,
        )  # fmt: skip
        self.dquery.add(block.q0, grads.query)
        for total, found in zip(totals, (grads.key, grads.value), strict=True):
            total.add(block.k0, found)
        if grads.captured_floats is not None:
            before = self.dcaptured
            self.dcaptured = grads.captured_floats if before is None else before + grads.captured_floats
        if self.dbias is not None:
            assert grads.bias is not None
            target = tile(self.dbias, block)
            target += grads.bias.sum_to_size(target.shape)
