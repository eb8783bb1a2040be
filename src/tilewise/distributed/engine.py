"""Runs a schedule: while keys of one step are computed with, those of the next are on their way.

Forward: out and lse of each step's keys are merged in float32, rounded once at the end.
Backward: the same keys travel again. The gradient of keys of others is summed in float32 and goes back to its
owner while the next step is computed. Both directions hold two steps' keys at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.core.merge import merge_into
from tilewise.core.problem import Options
from tilewise.distributed import wire
from tilewise.distributed.parts import NEG_INF, Extras, Part, attend, differentiate, parts_of, tile
from tilewise.distributed.ranks import Ranks
from tilewise.distributed.schedule import Step


@dataclass(frozen=True)
class Work:
    """What a rank has to do in a call, without its tensors."""

    ranks: Ranks
    steps: tuple[Step, ...]
    options: Options  # its window is the schedule's
    backend: str | None
    packs: bool  # blocks of several documents share a call

    def parts(self, step: Step, device: torch.device) -> tuple[Part, ...]:
        return parts_of(step.blocks, self.packs, device)


def run(
    work: Work, query: Tensor, key: Tensor, value: Tensor, extras: Extras, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries over the keys of all ranks. Differentiable.

    Args:
        query: (batch, tokens of the rank, heads, head_dim); key, value: likewise, with their heads.
        sinks: (heads,).
    """
    return SequenceParallel.apply(work, query, key, value, *extras, sinks)  # type: ignore[no-any-return]


class SequenceParallel(torch.autograd.Function):
    """Attention whose keys are spread over ranks."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, work: Work, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        extras, sinks = Extras(*rest[:3]), rest[3]
        out, lse = _forward(work, query, key, value, extras)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = out.to(lse.dtype) * _rows(torch.exp(lse - total))
            lse = total
        out = out.to(query.dtype)
        ctx.work = work
        ctx.save_for_backward(query, key, value, *rest, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if dout is None and dlse is None:
            return (None,) * 8
        query, key, value, mask, bias, slopes, sinks, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        needs_bias = bias is not None and ctx.needs_input_grad[5]
        backward = Backward(ctx.work, query, key, value, Extras(mask, bias, slopes), needs_bias)
        dq, dk, dv, dbias = backward.run((out, lse), dout, dlse)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[7]:
            delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)
            delta = delta if dlse is None else delta - dlse
            dsinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)
        return None, dq, dk, dv, None, dbias, None, dsinks


def _rows(t: Tensor) -> Tensor:
    """(batch, heads, tokens) beside (batch, tokens, heads, dim)."""
    return t.transpose(1, 2)[..., None]


def _packed_keys(key: Tensor, value: Tensor) -> Tensor:
    """(tokens, batch, kv heads, head_dim + head_dim_v): rows of tokens are contiguous, as messages want."""
    return torch.cat((key, value), -1).transpose(0, 1).contiguous()


def _keys_and_values(packed: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views (batch, tokens, kv heads, dim)."""
    rows = packed.transpose(0, 1)
    return rows[..., :head_dim], rows[..., head_dim:]


def _forward(work: Work, query: Tensor, key: Tensor, value: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
    """out, in lse's dtype or query's, and lse, without sinks."""
    steps, head_dim = work.steps, key.shape[-1]
    is_single = len(steps) == 1 and len(work.parts(steps[0], query.device)) == 1
    own = _packed_keys(key, value) if len(steps) > 1 else key
    total = _Total(query, value.shape[-1])
    arriving = None
    for number, step in enumerate(steps):
        if arriving is not None:
            key, value = _keys_and_values(arriving.wait(), head_dim)
        if number + 1 < len(steps):
            arriving = wire.send_keys(work.ranks, steps[number + 1], own)
        for part in work.parts(step, query.device):
            found = attend(part, query, key, value, extras, work.options, work.backend)
            if is_single and found[0].shape[1] == query.shape[1]:
                return found
            total.add(part, *found)
    return total.out, total.lse


class _Total:
    """out and lse of the keys so far, in float32 (float64)."""

    def __init__(self, query: Tensor, head_dim_v: int) -> None:
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        batch, tokens, heads, _ = query.shape
        self.out = query.new_zeros((batch, tokens, heads, head_dim_v), dtype=dtype)
        self.lse = query.new_full((batch, heads, tokens), NEG_INF, dtype=dtype)
        self.is_empty = True

    def add(self, part: Part, out: Tensor, lse: Tensor) -> None:
        rows = slice(part.block.q0, part.block.q1)
        if self.is_empty and out.shape[1] == self.out.shape[1]:
            self.out.copy_(out)
            self.lse.copy_(lse)
        else:
            merge_into(self.out[:, rows], self.lse[..., rows], out, lse)
        self.is_empty = False


class Backward:
    """The gradients of one call on one rank."""

    def __init__(
        self, work: Work, query: Tensor, key: Tensor, value: Tensor, extras: Extras, needs_bias: bool
    ) -> None:
        self.work, self.query, self.key, self.value, self.extras = work, query, key, value, extras
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.dquery = torch.zeros_like(query, dtype=dtype, memory_format=torch.contiguous_format)
        self.dkeys = self._zeros(key.shape[1], dtype)
        bias = extras.bias
        self.dbias = torch.zeros_like(bias, dtype=dtype) if bias is not None and needs_bias else None

    def _zeros(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Gradients of packed keys."""
        batch, _, heads, head_dim = self.key.shape
        return self.key.new_zeros((rows, batch, heads, head_dim + self.value.shape[-1]), dtype=dtype)

    def run(
        self, results: tuple[Tensor, Tensor], dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of query, key, value and bias, each in its tensor's dtype."""
        work, head_dim = self.work, self.key.shape[-1]
        key, value, steps, ranks = self.key, self.value, work.steps, work.ranks
        own = _packed_keys(key, value) if len(steps) > 1 else key
        arriving = returning = None
        for number, step in enumerate(steps):
            if arriving is not None:
                key, value = _keys_and_values(arriving.wait(), head_dim)
            if number + 1 < len(steps):
                arriving = wire.send_keys(ranks, steps[number + 1], own)
            dkeys = self.dkeys if number == 0 else self._zeros(step.keys, self.dkeys.dtype)
            for part in work.parts(step, key.device):
                self._add(part, key, value, dkeys, results, dout, dlse)
            if returning is not None:
                returning.wait()
            if number > 0:
                returning = wire.return_gradients(ranks, step, dkeys, self.dkeys)
        if returning is not None:
            returning.wait()
        dkey, dvalue = _keys_and_values(self.dkeys, head_dim)
        bias, dbias = self.extras.bias, self.dbias
        return (
            self.dquery.to(self.query.dtype),
            dkey.to(key.dtype).contiguous(),
            dvalue.to(key.dtype).contiguous(),
            None if bias is None or dbias is None else dbias.to(bias.dtype),
        )

    def _add(
        self,
        part: Part,
        key: Tensor,
        value: Tensor,
        dkeys: Tensor,
        results: tuple[Tensor, Tensor],
        dout: Tensor,
        dlse: Tensor | None,
    ) -> None:
        work, block, needs_bias = self.work, part.block, self.dbias is not None
        grads = differentiate(
            part, self.query, key, value, self.extras, work.options, work.backend,
            results, dout, dlse, needs_bias,
        )  # fmt: skip
        self.dquery[:, block.q0 : block.q1] += grads.query
        dkey, dvalue = _keys_and_values(dkeys[block.k0 : block.k1], key.shape[-1])
        dkey += grads.key
        dvalue += grads.value
        if self.dbias is not None:
            assert grads.bias is not None
            target = tile(self.dbias, block)
            target += grads.bias.sum_to_size(target.shape)
