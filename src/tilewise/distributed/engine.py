"""Runs a schedule: while keys of one step are computed with, those of the next are on their way.

Forward: out and lse of each block, in float32, are merged and rounded once at the end. Rows that one block
alone decides, as most do with windows, are rounded by it.
Backward: the same keys travel again. The gradient of keys of others goes back to its owner, in float32, while
the next step is computed; the owner adds up all shares and rounds once. Half of the rank's own work is kept
for the end, when the last of them travel. Both directions hold two steps' keys at most, besides what ranks
that read each other's memory publish in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.core.plan import Results
from tilewise.core.problem import Gradients, Inputs, Options
from tilewise.distributed.heads import Exchange
from tilewise.distributed.parts import (
    Origin,
    Part,
    Shard,
    Totals,
    attend,
    differentiate,
    parts_of,
    tile,
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
    packs: bool  # blocks may share a call
    origin: Origin
    make_reach: Callable[[], Reach]  # of these schedules
    most_heads: int  # KV heads, of the rank of the group that has most
    exchange: Exchange | None  # of heads for tokens, before all else

    def wire(self, key: Tensor, value: Tensor, is_backward: bool) -> Wire:
        """For one direction; key and value are the rank's own."""
        steps, own = self.backward_steps if is_backward else self.steps, _swapped((key, value))
        return make_wire(self.ranks, steps, own, self.make_reach, self.most_heads, is_backward)

    def shard(self, inputs: Inputs) -> Shard:
        return Shard(inputs, self.options, self.backend, self.origin)


def run(work: Work, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries over the keys of all ranks. Differentiable.

    inputs: query, key and value (batch, tokens of the rank, heads, dim); after an exchange out and lse are of
        this rank's heads, as all else of the inputs. A mask and a bias have columns for all tokens.
    """
    return SequenceParallel.apply(work, *inputs)  # type: ignore[no-any-return]


class SequenceParallel(torch.autograd.Function):
    """Attention whose keys are spread over ranks."""

    @staticmethod
    def forward(ctx: Any, work: Work, *inputs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        own = Inputs(*inputs)
        if work.exchange is not None:
            query, key, value = work.exchange.there(own[:3])
            own = own._replace(query=query, key=key, value=value)
        out, lse = _forward(work, own)
        ctx.work = work
        ctx.save_for_backward(*own, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        with torch.no_grad():
            grads = SequenceParallel._gradients(ctx, dout, dlse)
        if not torch.is_grad_enabled():
            return grads
        leaves = [None if g is None else g.detach().requires_grad_() for g in grads]
        return Once.apply(*leaves)  # type: ignore[no-any-return]

    @staticmethod
    def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * (1 + len(Inputs._fields))
        *tensors, out, lse = ctx.saved_tensors
        inputs, needs = Inputs(*tensors), Inputs(*ctx.needs_input_grad[1:])
        dout = torch.zeros_like(out) if dout is None else dout
        backward = Backward(ctx.work, inputs, Results(out, lse), dout, dlse, bool(needs.bias))
        grads = backward.run()
        if inputs.sinks is not None and needs.sinks:
            delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)
            delta = delta if dlse is None else delta - dlse
            # where lse is -inf the sink is, too, and has no weight
            log_p = inputs.sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -math.inf, math.inf)
            dsinks = -(torch.exp(log_p) * delta).sum((0, 2))
            grads = grads._replace(sinks=dsinks.to(inputs.sinks.dtype))
        return None, *Inputs(**grads._asdict())


class Once(torch.autograd.Function):
    """Gradients as they are, which refuse to be differentiated: also those of a constant gradient of out."""

    @staticmethod
    def forward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return tuple(None if g is None else g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError("second derivatives are not served over several ranks")


def _swapped(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(batch, tokens, ...) as (tokens, batch, ...), and back."""
    return tuple(t.transpose(0, 1) for t in tensors)


def _forward(work: Work, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out, in query's dtype, and lse."""
    steps, shard = work.steps, work.shard(inputs)
    query, key, value, sinks = *inputs[:3], inputs.sinks
    wire = work.wire(key, value, is_backward=False)
    total = Totals(query, value.shape[-1], has_lse=True)
    arriving = None
    for number, step in enumerate(steps):
        if arriving is not None:
            key, value = _swapped(arriving.wait())
        if number + 1 < len(steps):
            wire.start([arriving := wire.bring_keys(number + 1)])
        for part in parts_of(step, work.packs, query.shape[1], query.device):
            is_final = part.block.is_alone and sinks is None
            total.add(part.block.q0, *attend(part, shard, key, value, is_final))
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
        inputs: Inputs,
        results: Results,
        dout: Tensor,
        dlse: Tensor | None,
        needs_bias: bool,
    ) -> None:
        self.work, self.shard = work, work.shard(inputs)
        self.key, self.value, self.bias = inputs.key, inputs.value, inputs.bias if needs_bias else None
        self.given = results, dout, dlse, needs_bias
        self.dquery, *dkeys = (Totals(t, t.shape[-1]) for t in inputs[:3])
        self.dkeys = dkeys[0], dkeys[1]
        self.dbias = None if self.bias is None else torch.zeros_like(self.bias, dtype=self.dquery.wide)
        self.dcaptured: Tensor | None = None

    def run(self) -> Gradients:
        """Each gradient in its tensor's dtype; none of the sinks."""
        work, steps, exchange = self.work, self.work.backward_steps, self.work.exchange
        is_shared = exchange is not None and exchange.shares_keys
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
            parts = parts_of(step, work.packs, self.shard.inputs.query.shape[1], key.device)
            is_all = len(parts) == len(steps) == 1 and not is_shared
            for part in parts:
                self._add(part, key, value, totals, is_all)
            if returning is not None:
                returning.wait()
                returning = None
            if not step.is_own:
                theirs = _swapped(tuple(total.finish(is_wide=True)[0] for total in totals))
                returning = wire.return_gradients(number, theirs, self.dkeys)
                del theirs, totals
        grads = self.dquery.finish()[0], *(total.finish(is_shared)[0] for total in self.dkeys)
        grads = grads if exchange is None else exchange.back(grads)
        dq, dk, dv = (g.to(self.key.dtype).contiguous() for g in grads)
        dbias = None if self.dbias is None or self.bias is None else self.dbias.to(self.bias.dtype)
        captured = self.shard.inputs.captured_floats
        if self.dcaptured is None and captured is not None:  # of a rank without tokens
            self.dcaptured = torch.zeros_like(captured)
        return Gradients(dq, dk, dv, dbias, captured_floats=self.dcaptured)

    def _add(
        self, part: Part, key: Tensor, value: Tensor, totals: tuple[Totals, Totals], is_all: bool
    ) -> None:
        block, grads = part.block, differentiate(part, self.shard, key, value, *self.given, is_all)
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
