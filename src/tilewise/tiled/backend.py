"""Tiled attention in PyTorch operations: every option, any device, O(N) memory. The readable fallback.

Forward, for each tile of queries (FlashAttention-2's order; Dao 2023, section 3.1):

    m, l, acc = -inf, 0, 0
    for each visible tile of keys:
        s     = scale * q k^T (+ softcap, bias, ALiBi, mask)    [block_q, block_k]
        m_new = max(m, rowmax(s)),  c = exp(m - m_new),  p = exp(s - m_new)
        l     = c * l + rowsum(p),  acc = c * acc + p v
    out = acc / l,  lse = m + log(l),  residual = m + log(l) - lse (what rounding leaves out)

Backward, the same walk, recomputing p = exp(s - lse - residual) (section 3.2): delta = rowsum(dO * O) - dlse,
dP = dO V^T, dS = P * (dP - delta), dV += P^T dO, dQ += dS K, dK += dS^T Q. What a tile holds is in `tiles`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.plan import FunctionPlan, Plan, Results, Saves
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.signature import Request, Signature, in_order
from tilewise.core.torch_private import own_dtypes
from tilewise.tiled import fp8, statistics
from tilewise.tiled.tiles import (
    NEG_INF,
    QueryTile,
    Shift,
    in_own_dtypes,
    new_gradients,
    segments,
    weights,
)


def plan(problem: AttentionProblem, signature: Signature) -> Plan:
    """Every problem is served; tiles are cut anew in every call."""
    if signature.direction == "statistics":
        return statistics.StatisticsPlan(problem, signature.aux)  # type: ignore[return-value]
    if signature.direction == "backward":
        return FunctionPlan(problem, _backward_call)
    return FunctionPlan(problem, functools.partial(_forward_call, request=signature.request))


def saves(problem: AttentionProblem) -> Saves:
    return Saves(residual=True)


def _forward_call(problem: AttentionProblem, inputs: Inputs, request: Request) -> Results:
    with own_dtypes(problem.device_type):
        out, *statistics = forward(problem, inputs, request.residual)
    return Results(in_order(out, request.order), *statistics)


def _backward_call(
    problem: AttentionProblem, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    assert results.out is not None and results.lse is not None
    with own_dtypes(problem.device_type):
        return backward(problem, inputs, results.out, results.lse, dout, dlse, results.residual)


class OnlineSoftmaxStep(NamedTuple):
    """State after one tile, and what the tile contributed."""

    m: Tensor  # running maximum [..., block_q, 1]
    l: Tensor  # running sum of exponentials [..., block_q, 1]
    acc: Tensor  # running output, not normalized [..., block_q, head_dim_v]
    m_tile: Tensor  # this tile's row maximum
    correction: Tensor  # exp(m_old - m): what the old sums are worth under the new maximum
    p: Tensor  # this tile's exponentials [..., block_q, block_k]


def online_softmax_step(
    s: Tensor, v: Tensor, m: Tensor, l: Tensor, acc: Tensor, keep: Tensor | None = None
) -> OnlineSoftmaxStep:
    """Fold one tile of scores and values into the running softmax.

    Args:
        s: scores [n, block_q, block_k]; -inf where a key is not visible. Overwritten with p.
        v: values [n, block_k, head_dim_v].
        m, l, acc: the state so far; start from -inf, 0, 0. acc is updated in place.
        keep: dropout factor, 0 or 1 / (1 - rate(dropout_p)), shaped like s. It multiplies what reaches acc;
            the softmax denominator is that of the undropped weights.

    A row that has seen only -inf keeps m = -inf and l = 0. NaN and +inf propagate.
    """
    m_tile = s.amax(-1, keepdim=True)
    m_new = torch.maximum(m, m_tile)
    m_finite = m_new.masked_fill(m_new == NEG_INF, 0.0)  # exp(-inf - -inf) would be NaN
    correction = torch.exp(m - m_finite)
    p = s.sub_(m_finite).exp_()
    l = l * correction + p.sum(-1, keepdim=True)
    acc.mul_(correction).baddbmm_(p if keep is None else p * keep, v)
    return OnlineSoftmaxStep(m_new, l, acc, m_tile, correction, p)


def log_sum_exp(m: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    """lse = m + log(l), and what rounding has left out of that sum; 0 where lse is not finite."""
    log_l = torch.log(l)
    lse = m + log_l
    part = lse - m
    residual = (m - (lse - part)) + (log_l - part)
    return lse, residual.masked_fill_(~lse.isfinite(), 0.0)


def recompute_step(
    s: Tensor, v: Tensor, shift: Tensor, do: Tensor, dv: Tensor, keep: Tensor | None = None,
    factor: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """First half of one backward tile: P = exp(S - shift) factor, dV += P^T dO, dP = dO V^T. Returns (p, dp).

    Args:
        s: scores [n, block_q, block_k]. Overwritten with p.
        v: values [n, block_k, head_dim_v].
        shift: [n, block_q, 1], finite: lse, or with a factor what `shift_and_factor` gives.
        do: gradient of the output [n, block_q, head_dim_v].
        dv: [n, block_k, head_dim_v], added to in place.
        keep: dropout factor, as in `online_softmax_step`; dp carries it.
        factor: [n, block_q, 1], or 1 where the shift is lse.
    """
    p = weights(s, shift, factor)
    dv.baddbmm_((p if keep is None else p * keep).mT, do)
    dp = torch.bmm(do, v.mT)
    if keep is not None:
        dp *= keep
    return p, dp


def gradient_step(
    p: Tensor,
    dp: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    dq: Tensor,
    dk: Tensor,
    tanh: Tensor | None = None,
    before: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Second half of one backward tile: dS = P * (dP - delta), dQ += dS K, dK += dS^T Q. Returns ds, of the
    scores before a score function.

    Args:
        p, dp: of `recompute_step`. dp is overwritten with ds.
        delta: rowsum(dO * O) - dlse [n, block_q, 1].
        q, k: [n, block_q, head_dim], [n, block_k, head_dim].
        dq, dk: shaped like q and k, added to in place.
        tanh: of the softcapped scores; the scores before the cap have the gradient ds * (1 - tanh^2).
        before: from the gradient of the scores to that before a score function.
    """
    ds = dp.sub_(delta).mul_(p)
    if before is not None:
        ds = before(ds)
    ds_uncapped = ds if tanh is None else (1 - tanh * tanh).mul_(ds)
    dq.baddbmm_(ds_uncapped, k)
    dk.baddbmm_(ds_uncapped.mT, q)
    return ds


def forward(problem: AttentionProblem, inputs: Inputs, saves: bool = False) -> tuple[Tensor, ...]:
    """out, contiguous, of query's shape with head_dim_v; lse (batch, heads, seqlen_q), packed (heads, total).

    Where it `saves` for a backward, also what rounding has left out of lse.
    """
    query = inputs.query
    out = query.new_empty((*query.shape[:-1], problem.head_dim_v), dtype=problem.out_dtype)
    dense, packed = (problem.batch, problem.num_heads, problem.seqlen_q), (query.shape[1], query.shape[0])
    lse_shape = packed if problem.is_packed else dense
    statistics = [query.new_empty(lse_shape, dtype=problem.compute_dtype) for _ in range(1 + saves)]
    for tiles in segments(problem, inputs):
        for rows in tiles.query_tiles():
            acc, *columns = _forward_tile(rows)
            rows.store(out, acc)
            for t, column in zip(statistics, columns):
                rows.store_lse(t, column)
    return out, *statistics


def _forward_tile(rows: QueryTile) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse and its residual."""
    m, l, acc = fp8.softmax_sums(rows) if rows.problem.is_8_bit else _softmax_sums(rows)
    acc /= l.masked_fill(l == 0, 1.0)
    return acc, *log_sum_exp(m, l)


def _softmax_sums(rows: QueryTile) -> tuple[Tensor, Tensor, Tensor]:
    m, l = rows.initial_statistics()
    acc = rows.q.new_zeros((*rows.q.shape[:2], rows.problem.head_dim_v))
    for j0, j1 in rows.key_tiles():
        s, keep = rows.scores(j0, j1).s, rows.keep(j0, j1)
        m, l, acc, *_ = online_softmax_step(s, rows.tiles.value(j0, j1), m, l, acc, keep)
    return m, l, acc


def backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    residual: Tensor | None = None,
) -> Gradients:
    """Gradients by recomputation from lse; see `in_own_dtypes`. Deterministic.

    residual: what rounding has left out of lse; None: not known, as of an lse that was merged.
    """
    grads = new_gradients(problem, inputs)
    for tiles in segments(problem, inputs):
        dk_sum, dv_sum = tiles.new_key_sum(problem.head_dim), tiles.new_key_sum(problem.head_dim_v)
        for rows in tiles.query_tiles():
            do, shift = rows.fold(dout), rows.shift(lse, residual)
            delta = (do * rows.fold(out)).sum(-1, keepdim=True)
            if dlse is not None:
                delta -= rows.fold_lse(dlse)
            rows.store(grads.query, _backward_tile(rows, do, delta, shift, dk_sum, dv_sum, grads))
            if grads.sinks is not None:
                rows.add_sinks(grads.sinks, -rows.sink_weights(shift) * delta)
        tiles.store_key_rows(grads.key, dk_sum)
        tiles.store_key_rows(grads.value, dv_sum)
    return in_own_dtypes(problem, grads, inputs)


def _backward_tile(
    rows: QueryTile, do: Tensor, delta: Tensor, shift: Shift, dk_sum: Tensor, dv_sum: Tensor, grads: Gradients
) -> Tensor:
    """Add one query tile's part to dk_sum, dv_sum and grads' bias and captured floats; return its dq."""
    dq = torch.zeros_like(rows.q)
    for j0, j1 in rows.key_tiles():
        k, v = rows.tiles.key(j0, j1), rows.tiles.value(j0, j1)
        s, tanh, function = rows.scores(j0, j1)
        p, dp = recompute_step(s, v, shift[0], do, dv_sum[:, j0:j1], rows.keep(j0, j1), shift[1])
        before = (
            None if function is None else functools.partial(function.backward, total=grads.captured_floats)
        )
        # q carries the scale
        ds = gradient_step(p, dp, delta, rows.q, k, dq, dk_sum[:, j0:j1], tanh, before)
        if grads.bias is not None:
            rows.add_bias(grads.bias, ds, j0, j1)
    return dq.mul_(rows.problem.scale)
