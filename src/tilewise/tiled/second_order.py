"""Tangents and second derivatives of attention, tile by tile, in PyTorch operations on any device.

With tangents marked by a dot, f the softcap and Z the dropout factor, one row i reads

    a = scale * q k^T,  S = f(a) + bias,  S. = f'(a) a. + bias.,  P = exp(S - lse) exp(-residual)
    lse. = sum_j P S. (+ p_sink sink.),   O. = (Z P (S. - lse.)) V + (Z P) V.

The backward is the transpose of that map, so for its cotangents (dO, dlse) and the tangents the scalar
<tangents, backward(dO, dlse)> equals <dO, O.> + <dlse, lse.>. Its gradient is the second derivative.
With c = Z (dO V^T), e = Z (dO V.^T), delta = rowsum(dO * O) - dlse and r = sum_j P (c S. + e):

    w  = c S. + e - c lse. - delta S.,   W = r - lse. (delta + rowsum(dO * O))
    gS = P (w - W),   gS. = P (c - delta)

Two walks over the visible keys: the first for lse., O. and r, the second for the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.tiled.functions import FunctionTile
from tilewise.tiled.tiles import QueryTile, Shift, Tiles, in_own_dtypes, new_gradients, segments, weights


class _Rows(NamedTuple):
    """One query tile, and what is constant over its key tiles."""

    own: QueryTile
    dot: QueryTile  # of the tangents
    shift: Shift
    do: Tensor | None  # [n, group * block_q, head_dim_v]; None: tangents only

    def sink_tangent(self) -> Tensor:
        """Each row's weight of its sink, times the sink's tangent [n, group * block_q, 1]."""
        if self.dot.inputs.sinks is None:
            return torch.zeros_like(self.shift[0])
        return self.own.sink_weights(self.shift) * self.dot.sinks()


class _Tile(NamedTuple):
    """One tile's weights and tangents; all [n, group * block_q, block_k]."""

    p: Tensor
    s_dot: Tensor
    a_dot: Tensor
    slope: Tensor | None  # f'(a); None is 1
    curvature: Tensor | None  # f''(a); None is 0
    keep: Tensor | None
    function: FunctionTile | None


def jvp(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    tangents: Gradients,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tangents of out and lse. O(N) memory."""
    out_dot, lse_dot = torch.empty_like(out), torch.empty_like(lse)
    for tiles, dots in _both(problem, inputs, tangents):
        for own, dot in zip(tiles.query_tiles(), dots.query_tiles(), strict=True):
            rows = _Rows(own, dot, own.shift(lse, residual), None)
            row_lse_dot, row_out_dot, _ = _tangent_walk(rows, out)
            own.store(out_dot, row_out_dot)
            own.store_lse(lse_dot, row_lse_dot)
    return out_dot, lse_dot


def double_backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    tangents: Gradients,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Gradients]:
    """Gradients of <tangents, backward(dout, dlse)> by dout, dlse and the inputs, in the dtypes of these.

    O(N) memory; contiguous.
    """
    dout_dot, dlse_dot = torch.empty_like(out), torch.empty_like(lse)
    grads = new_gradients(problem, inputs, of_all_captured=True)
    for tiles, dots in _both(problem, inputs, tangents):
        gk, gv = tiles.new_key_sum(problem.head_dim), tiles.new_key_sum(problem.head_dim_v)
        for own, dot in zip(tiles.query_tiles(), dots.query_tiles(), strict=True):
            do = own.fold(dout)
            rows = _Rows(own, dot, own.shift(lse, residual), do)
            lse_dot, out_dot, r = _tangent_walk(rows, out)
            own.store(dout_dot, out_dot)
            own.store_lse(dlse_dot, lse_dot)
            u = (do * own.fold(out)).sum(-1, keepdim=True)
            delta = u if dlse is None else u - own.fold_lse(dlse)
            total = r - lse_dot * (delta + u)
            own.store(grads.query, _gradient_walk(rows, lse_dot, delta, total, gk, gv, grads))
            if grads.sinks is not None:
                of_sinks = delta * rows.sink_tangent() + total * own.sink_weights(rows.shift)
                own.add_sinks(grads.sinks, -of_sinks)
        tiles.store_key_rows(grads.key, gk)
        tiles.store_key_rows(grads.value, gv)
    return dout_dot, dlse_dot, in_own_dtypes(problem, grads, inputs)


def _both(problem: AttentionProblem, inputs: Inputs, tangents: Gradients) -> Iterator[tuple[Tiles, Tiles]]:
    """Each segment, and that of the tangents in the places of what they belong to."""
    dots = inputs._replace(**tangents._asdict())
    return zip(segments(problem, inputs), segments(problem, dots), strict=True)


def _tile(rows: _Rows, j0: int, j1: int) -> _Tile:
    own, dot = rows.own, rows.dot
    s, tanh, function = own.scores(j0, j1)
    p = weights(s, *rows.shift)
    a_dot = torch.bmm(dot.q, own.tiles.key(j0, j1).mT).baddbmm_(own.q, dot.tiles.key(j0, j1).mT)
    slope = curvature = None
    s_dot = a_dot
    if tanh is not None:
        slope = 1 - tanh * tanh
        curvature = -2 / own.problem.softcap * tanh * slope
        s_dot = slope * a_dot
    if dot.inputs.bias is not None:
        s_dot = s_dot.clone()
        own.per_head(s_dot).add_(dot.part(dot.inputs.bias, j0, j1))
    if function is not None:
        s_dot = function.tangent(p, s_dot, dot.inputs.captured_floats)
    return _Tile(p, s_dot, a_dot, slope, curvature, own.keep(j0, j1), function)


def _tangent_walk(rows: _Rows, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First walk: lse. [n, rows, 1], O. [n, rows, head_dim_v] and, with dO, r [n, rows, 1]."""
    own, lse_dot = rows.own, rows.sink_tangent()
    acc = own.q.new_zeros((*own.q.shape[:2], own.problem.head_dim_v))
    r = torch.zeros_like(lse_dot)
    for j0, j1 in own.key_tiles():
        t = _tile(rows, j0, j1)
        v, v_dot = own.tiles.value(j0, j1), rows.dot.tiles.value(j0, j1)
        lse_dot += (t.p * t.s_dot).sum(-1, keepdim=True)
        kept = t.p if t.keep is None else t.p * t.keep
        acc.baddbmm_(kept * t.s_dot, v).baddbmm_(kept, v_dot)
        if rows.do is not None:
            c, e = torch.bmm(rows.do, v.mT), torch.bmm(rows.do, v_dot.mT)
            r += (kept * (c * t.s_dot + e)).sum(-1, keepdim=True)
    acc -= lse_dot * own.fold(out)
    return lse_dot, acc, r


def _gradient_walk(
    rows: _Rows, lse_dot: Tensor, delta: Tensor, total: Tensor, gk: Tensor, gv: Tensor, grads: Gradients
) -> Tensor:
    """Second walk: add this query tile's part to gk, gv and grads' bias and captured floats; return its query
    gradient."""
    own, dot, do = rows.own, rows.dot, rows.do
    assert do is not None
    gq = torch.zeros_like(own.q)
    for j0, j1 in own.key_tiles():
        t = _tile(rows, j0, j1)
        k, k_dot = own.tiles.key(j0, j1), dot.tiles.key(j0, j1)
        c, e = torch.bmm(do, own.tiles.value(j0, j1).mT), torch.bmm(do, dot.tiles.value(j0, j1).mT)
        kept = t.p
        if t.keep is not None:
            c, e, kept = c * t.keep, e * t.keep, t.p * t.keep
        gs = t.p * (c * (t.s_dot - lse_dot) + e - delta * t.s_dot - total)
        ga_dot = t.p * (c - delta)
        if t.function is not None:
            gs, ga_dot = t.function.second_backward(gs, ga_dot, grads.captured_floats)
        if grads.bias is not None:
            own.add_bias(grads.bias, gs, j0, j1)
        if t.slope is not None and t.curvature is not None:
            gs = gs * t.slope + ga_dot * t.curvature * t.a_dot
            ga_dot = ga_dot * t.slope
        gq.baddbmm_(gs, k).baddbmm_(ga_dot, k_dot)
        gk[:, j0:j1].baddbmm_(gs.mT, own.q).baddbmm_(ga_dot.mT, dot.q)  # both carry the scale
        gv[:, j0:j1].baddbmm_((kept * (t.s_dot - lse_dot)).mT, do)
    return gq.mul_(own.problem.scale)
