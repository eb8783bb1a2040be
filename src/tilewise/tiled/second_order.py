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

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.tiled.functions import FunctionTile
from tilewise.tiled.tiles import Tiles, add_reduced, in_input_dtypes, new_gradients, segments, weights


class _Rows(NamedTuple):
    """What is constant over the key tiles of one query tile; all [n, group * block_q, ...]."""

    i0: int
    i1: int
    q: Tensor  # scaled
    q_dot: Tensor  # scaled
    shift: tuple[Tensor, Tensor]  # what `weights` takes
    p_sink: Tensor | None
    sink_dot: Tensor | None
    do: Tensor | None  # None: tangents only


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
    for segment in segments(problem, inputs):
        tiles, dots = Tiles(problem, inputs, segment), Tiles(problem, _with(inputs, tangents), segment)
        for i0, i1 in tiles.query_tiles():
            rows = _rows(tiles, dots, i0, i1, tiles.row_shift(lse, residual, i0, i1), None)
            row_lse_dot, row_out_dot, _ = _tangent_walk(tiles, dots, rows, tiles.rows(out))
            tiles.store_rows(out_dot, i0, i1, row_out_dot)
            tiles.store_lse(lse_dot, i0, i1, row_lse_dot)
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
    for segment in segments(problem, inputs):
        tiles, dots = Tiles(problem, inputs, segment), Tiles(problem, _with(inputs, tangents), segment)
        gk, gv = tiles.new_key_sum(problem.head_dim), tiles.new_key_sum(problem.head_dim_v)
        for i0, i1 in tiles.query_tiles():
            do = tiles.fold(tiles.rows(dout)[:, :, i0:i1])
            rows = _rows(tiles, dots, i0, i1, tiles.row_shift(lse, residual, i0, i1), do)
            lse_dot, out_dot, r = _tangent_walk(tiles, dots, rows, tiles.rows(out))
            tiles.store_rows(dout_dot, i0, i1, out_dot)
            tiles.store_lse(dlse_dot, i0, i1, lse_dot)
            u = (do * tiles.fold(tiles.rows(out)[:, :, i0:i1])).sum(-1, keepdim=True)
            delta = u if dlse is None else u - tiles.fold(tiles.lse_rows(dlse)[:, :, i0:i1, None])
            total = r - lse_dot * (delta + u)
            gq = _gradient_walk(tiles, dots, rows, lse_dot, delta, total, gk, gv, grads)
            tiles.store_rows(grads.query, i0, i1, gq)
            if grads.sinks is not None and rows.p_sink is not None and rows.sink_dot is not None:
                tiles.add_sinks(grads.sinks, -rows.p_sink * (delta * rows.sink_dot + total))
        tiles.store_key_rows(grads.key, gk)
        tiles.store_key_rows(grads.value, gv)
    return dout_dot, dlse_dot, in_input_dtypes(grads, inputs)


def _with(inputs: Inputs, tangents: Gradients) -> Inputs:
    """The tangents in the places of what they belong to, so that the same tile code cuts them."""
    return inputs._replace(**tangents._asdict())


def _rows(
    tiles: Tiles, dots: Tiles, i0: int, i1: int, shift: tuple[Tensor, Tensor], do: Tensor | None
) -> _Rows:
    p_sink = sink_dot = None
    if tiles.inputs.sinks is not None:
        p_sink = weights(tiles.sink_column(i0, i1).clone(), *shift)
        sink_dot = torch.zeros_like(p_sink) if dots.inputs.sinks is None else dots.sink_column(i0, i1)
    return _Rows(i0, i1, tiles.query(i0, i1), dots.query(i0, i1), shift, p_sink, sink_dot, do)


def _tile(tiles: Tiles, dots: Tiles, rows: _Rows, j0: int, j1: int) -> _Tile:
    i0, i1 = rows.i0, rows.i1
    s, tanh, function = tiles.scores(rows.q, i0, i1, j0, j1)
    p = weights(s, *rows.shift)
    a_dot = torch.bmm(rows.q_dot, tiles.key(j0, j1).mT).baddbmm_(rows.q, dots.key(j0, j1).mT)
    slope = curvature = None
    s_dot = a_dot
    if tanh is not None:
        slope = 1 - tanh * tanh
        curvature = -2 / tiles.problem.softcap * tanh * slope
        s_dot = slope * a_dot
    if dots.inputs.bias is not None:
        s_dot = s_dot.clone()
        tiles.per_head(s_dot, i0, i1).add_(dots.score_rows(dots.inputs.bias, i0, i1, j0, j1))
    if function is not None:
        s_dot = function.tangent(p, s_dot, dots.inputs.captured_floats)
    return _Tile(p, s_dot, a_dot, slope, curvature, tiles.keep(i0, i1, j0, j1), function)


def _tangent_walk(tiles: Tiles, dots: Tiles, rows: _Rows, out_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First walk: lse. [n, rows, 1], O. [n, rows, head_dim_v] and, with dO, r [n, rows, 1]."""
    lse_dot = torch.zeros_like(rows.shift[0])
    if rows.p_sink is not None and rows.sink_dot is not None:
        lse_dot += rows.p_sink * rows.sink_dot
    acc = rows.q.new_zeros((*rows.q.shape[:2], tiles.problem.head_dim_v))
    r = torch.zeros_like(lse_dot)
    for j0, j1 in tiles.key_tiles(rows.i0, rows.i1):
        t = _tile(tiles, dots, rows, j0, j1)
        v, v_dot = tiles.value(j0, j1), dots.value(j0, j1)
        lse_dot += (t.p * t.s_dot).sum(-1, keepdim=True)
        kept = t.p if t.keep is None else t.p * t.keep
        acc.baddbmm_(kept * t.s_dot, v).baddbmm_(kept, v_dot)
        if rows.do is not None:
            c, e = torch.bmm(rows.do, v.mT), torch.bmm(rows.do, v_dot.mT)
            r += (kept * (c * t.s_dot + e)).sum(-1, keepdim=True)
    acc -= lse_dot * tiles.fold(out_rows[:, :, rows.i0 : rows.i1])
    return lse_dot, acc, r


def _gradient_walk(
    tiles: Tiles,
    dots: Tiles,
    rows: _Rows,
    lse_dot: Tensor,
    delta: Tensor,
    total: Tensor,
    gk: Tensor,
    gv: Tensor,
    grads: Gradients,
) -> Tensor:
    """Second walk: add this query tile's part to gk, gv and grads' bias and captured floats; return its query
    gradient."""
    assert rows.do is not None
    gq = torch.zeros_like(rows.q)
    for j0, j1 in tiles.key_tiles(rows.i0, rows.i1):
        t = _tile(tiles, dots, rows, j0, j1)
        k, k_dot = tiles.key(j0, j1), dots.key(j0, j1)
        c, e = torch.bmm(rows.do, tiles.value(j0, j1).mT), torch.bmm(rows.do, dots.value(j0, j1).mT)
        kept = t.p
        if t.keep is not None:
            c, e, kept = c * t.keep, e * t.keep, t.p * t.keep
        gs = t.p * (c * (t.s_dot - lse_dot) + e - delta * t.s_dot - total)
        ga_dot = t.p * (c - delta)
        if t.function is not None:
            gs, ga_dot = t.function.second_backward(gs, ga_dot, grads.captured_floats)
        if grads.bias is not None:
            add_reduced(
                tiles.score_rows(grads.bias, rows.i0, rows.i1, j0, j1), tiles.per_head(gs, rows.i0, rows.i1)
            )
        if t.slope is not None and t.curvature is not None:
            gs = gs * t.slope + ga_dot * t.curvature * t.a_dot
            ga_dot = ga_dot * t.slope
        gq.baddbmm_(gs, k).baddbmm_(ga_dot, k_dot)
        gk[:, j0:j1].baddbmm_(gs.mT, rows.q).baddbmm_(ga_dot.mT, rows.q_dot)  # both carry the scale
        gv[:, j0:j1].baddbmm_((kept * (t.s_dot - lse_dot)).mT, rows.do)
    return gq.mul_(tiles.problem.scale)
