"""Statistics of the weights, tile by tile in PyTorch operations: every option, any device, O(N) memory.

A second walk over Q K^T, when lse is known: each tile of weights P = exp(S - lse) is formed once, reduced
into what was asked for, and forgotten. The values are not needed. What belongs to one row is divided by that
row's sum Z of weights, which is 1 but for the error of the forward's lse:

    entropy = sum_j entr(P_ij) / Z + log Z

Backward: with G_ij the gradient of the statistics by P_ij (the entropy -sum P log P has -log P there, as the
rest vanishes under the softmax), one row of the scores has

    delta = sum_j P G,    dS = P G - P delta

and dQ, dK, dbias and dsinks follow as in attention. Two walks: the first for delta, the second for dS.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.plan import Results
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.statistics import GROUP, Aux, Measured, new_measured
from tilewise.core.torch_private import own_dtypes
from tilewise.tiled.tiles import (
    NEG_INF,
    QueryTile,
    Shift,
    Tiles,
    in_own_dtypes,
    new_gradients,
    segments,
    weights,
)


class StatisticsPlan(NamedTuple):
    """Serves every request on any device; tiles are cut anew in every call."""

    problem: AttentionProblem
    aux: Aux

    def run(self, inputs: Inputs, results: Results | None = None, *_: Tensor | None) -> Measured:
        assert results is not None and results.lse is not None
        with own_dtypes(self.problem.device_type):
            return measure(self.problem, inputs, results.lse, results.residual, self.aux)


def measure(
    problem: AttentionProblem, inputs: Inputs, lse: Tensor, residual: Tensor | None, aux: Aux
) -> Measured:
    """The statistics of a call whose lse is known. Deterministic."""
    found = new_measured(aux, problem, inputs)
    is_walked = any(t is not None for t in found._replace(rows=None))
    for tiles in segments(problem, inputs):
        if found.rows is not None:
            _measure_rows(tiles, lse, residual, aux, found.rows)
        first = aux.first_visited(tiles.visibility.seqlen_q)
        for rows in tiles.query_tiles() if is_walked else ():
            if rows.i1 > first:
                _measure_tile(rows, rows.shift(lse, residual), aux, found)
    return found


def _measure_tile(rows: QueryTile, shift: Shift, aux: Aux, found: Measured) -> None:
    """Reduce the scores of a query tile."""
    row_max = rows.q.new_full((*rows.q.shape[:2], 1), NEG_INF)
    distance = torch.zeros_like(row_max)
    total = rows.sink_weights(shift)
    entropy = torch.special.entr(total)
    needs_total = aux.entropy or aux.expected_distance or aux.top_k > 0
    best = None
    for j0, j1 in rows.key_tiles():
        s = rows.scores(j0, j1).s
        if aux.needs_row_max:
            row_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
        if aux.top_k:
            best = _largest(best, s, j0, aux.top_k)
        p = weights(s, *shift)
        if needs_total:
            total += p.sum(-1, keepdim=True)
        if aux.entropy:
            entropy += torch.special.entr(p).sum(-1, keepdim=True)
        by_head = rows.per_head(p)
        if aux.expected_distance:
            distance += rows.tiles.fold((by_head * rows.distance(j0, j1)).sum(-1, keepdim=True))
        if found.column_sum is not None:
            first = max(0, aux.first_row(rows.visibility.seqlen_q) - rows.i0)
            column_sum = by_head[:, :, first:].sum(2)
            if aux.column_sum == GROUP:
                column_sum = column_sum.unflatten(1, (-1, rows.problem.group_size)).sum(2)
            _columns(rows.tiles, found.column_sum, j0, j1).add_(column_sum)
        if found.block_sum is not None:
            sums = _block_sums(by_head, aux.block_sum, rows.i0, rows.tiles.key_start + j0)
            _blocks(rows, found.block_sum, aux.block_sum, j0, j1).add_(sums)
    total.masked_fill_(total == 0, 1.0)  # no key is visible: all sums are 0
    entropy = entropy.div_(total).add_(total.log())
    columns = {"row_max": row_max, "entropy": entropy, "expected_distance": distance.div_(total)}
    for name, t in columns.items():
        target = getattr(found, name)
        if target is not None:
            rows.store_lse(target, t)
    if best is not None:
        _store_best(rows, found, best, weights(best.scores.clone(), *shift).div_(total))


class _Best(NamedTuple):
    """The largest scores so far and their keys, [n, group * block_q, up to k], largest first."""

    scores: Tensor
    keys: Tensor


def _largest(best: _Best | None, s: Tensor, j0: int, k: int) -> _Best:
    """The k largest of `best` and a tile of scores; of equal ones, those of lower keys."""
    keys = torch.arange(j0, j0 + s.shape[-1], device=s.device).expand_as(s)
    at = _first_largest(s, k)
    tile = _Best(s.gather(-1, at), keys.gather(-1, at))
    if best is None:
        return tile
    scores, keys = (torch.cat(both, -1) for both in zip(best, tile))
    at = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    return _Best(scores.gather(-1, at), keys.gather(-1, at))


def _first_largest(s: Tensor, k: int) -> Tensor:
    """Indices of the k largest scores, largest first, of equal ones the first. `topk` promises no order, so
    it gives only the k-th largest score; NaN counts as infinity."""
    if s.shape[-1] <= k:
        return s.sort(dim=-1, descending=True, stable=True).indices
    s = s.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=NEG_INF)
    least = s.topk(k, -1).values[..., -1:]
    larger, equal = s > least, s == least
    wanted = k - larger.sum(-1, keepdim=True)
    chosen = larger | (equal & (equal.cumsum(-1) <= wanted))
    at = chosen.nonzero()[:, -1].view(*s.shape[:-1], k)  # ascending keys
    order = s.gather(-1, at).sort(dim=-1, descending=True, stable=True).indices
    return at.gather(-1, order)


def _store_best(rows: QueryTile, found: Measured, best: _Best, p: Tensor) -> None:
    count, tiles = best.keys.shape[-1], rows.tiles
    keys = (best.keys + tiles.key_start).masked_fill_(best.scores == NEG_INF, -1)
    for target, t in ((found.top_weights, p), (found.top_keys, keys)):
        assert target is not None
        part = target[None, :, tiles.segment.rows_q] if rows.problem.is_packed else tiles.entries(target)
        part[:, :, rows.i0 : rows.i1, :count] = rows.per_head(t)


def _measure_rows(tiles: Tiles, lse: Tensor, residual: Tensor | None, aux: Aux, found: Tensor) -> None:
    """The whole rows of P that were asked for."""
    start = tiles.key_start
    for n, i in _present_rows(aux, tiles.visibility.seqlen_q):
        query = QueryTile(tiles, i, i + 1)
        shift = query.shift(lse, residual)
        total = query.per_head(query.sink_weights(shift))[:, :, 0]
        row = tiles.entries(found)[:, :, n]
        for j0, j1 in query.key_tiles():
            p = query.per_head(weights(query.scores(j0, j1).s, *shift))[:, :, 0]
            row[..., start + j0 : start + j1] = p
            total += p.sum(-1, keepdim=True)
        row /= total.masked_fill(total == 0, 1.0)


def _present_rows(aux: Aux, seqlen_q: int) -> Iterator[tuple[int, int]]:
    """(place in `rows`, query) of the rows that a sequence has."""
    for n, row in enumerate(aux.rows or ()):
        i = row + seqlen_q if row < 0 else row
        if 0 <= i < seqlen_q:
            yield n, i


def _columns(tiles: Tiles, t: Tensor, j0: int, j1: int) -> Tensor:
    """The keys [j0, j1) of column sums or their gradient, as a view (batch, heads, keys)."""
    start = tiles.segment.rows_k.start
    part = t[None] if tiles.problem.has_packed_keys else tiles.entries(t)
    return part[:, :, start + j0 : start + j1]


def _blocks(rows: QueryTile, t: Tensor, size: int, j0: int, j1: int) -> Tensor:
    """The blocks that a tile touches, as a view (batch, heads, blocks of queries, blocks of keys)."""
    start = rows.tiles.key_start
    of_queries = slice(rows.i0 // size, (rows.i1 - 1) // size + 1)
    return rows.tiles.entries(t)[:, :, of_queries, (start + j0) // size : (start + j1 - 1) // size + 1]


def _block_sums(by_head: Tensor, size: int, i: int, j: int) -> Tensor:
    """Sums over blocks of a tile whose first query is i and first key j."""
    for dim, start in ((3, j), (2, i)):
        cuts = _cuts(start, start + by_head.shape[dim], size)
        by_head = torch.stack([part.sum(dim) for part in by_head.split(cuts, dim)], dim)
    return by_head


def _cuts(start: int, stop: int, size: int) -> list[int]:
    """Lengths of the parts of [start, stop) that lie in one block each."""
    bounds = [start, *range((start // size + 1) * size, stop, size), stop]
    return [b - a for a, b in itertools.pairwise(bounds)]


def backward(
    problem: AttentionProblem,
    inputs: Inputs,
    lse: Tensor,
    residual: Tensor | None,
    aux: Aux,
    grads: Measured,
) -> Gradients:
    """Gradients by the inputs, from those by the statistics. Values have none. Deterministic.

    grads: of what is differentiable; None is 0.
    """
    found = new_gradients(problem, inputs)
    for tiles in segments(problem, inputs):
        dk_sum = tiles.new_key_sum(problem.head_dim)
        first = aux.first_visited(tiles.visibility.seqlen_q) if grads.rows is None else 0
        for rows in tiles.query_tiles():
            if rows.i1 > first:
                dq_tile = _backward_tile(rows, rows.shift(lse, residual), aux, grads, dk_sum, found)
                rows.store(found.query, dq_tile)
        tiles.store_key_rows(found.key, dk_sum)
    return in_own_dtypes(problem, found, inputs)


def _backward_tile(
    rows: QueryTile, shift: Shift, aux: Aux, grads: Measured, dk_sum: Tensor, found: Gradients
) -> Tensor:
    """Add one query tile's part to dk_sum and found's bias, sinks and captured floats; return its dq."""
    q = rows.q
    dq, delta = torch.zeros_like(q), q.new_zeros((*q.shape[:2], 1))
    entropy = None if grads.entropy is None else rows.fold_lse(grads.entropy)
    if found.sinks is not None:
        p_sink = rows.sink_weights(shift)
        weighted_sink = torch.zeros_like(p_sink) if entropy is None else entropy * torch.special.entr(p_sink)
        delta += weighted_sink
    for j0, j1 in rows.key_tiles():
        pg = _weighted(rows, j0, j1, weights(rows.scores(j0, j1).s, *shift), aux, grads, entropy)
        delta += pg.sum(-1, keepdim=True)
    for j0, j1 in rows.key_tiles():
        s, tanh, function = rows.scores(j0, j1)
        p = weights(s, *shift)
        ds = _weighted(rows, j0, j1, p, aux, grads, entropy).sub_(p.mul_(delta))
        if function is not None:
            ds = function.backward(ds, found.captured_floats)
        if found.bias is not None:
            rows.add_bias(found.bias, ds, j0, j1)
        if tanh is not None:
            ds = (1 - tanh * tanh).mul_(ds)
        dq.baddbmm_(ds, rows.tiles.key(j0, j1))
        dk_sum[:, j0:j1].baddbmm_(ds.mT, q)  # q carries the scale
    if found.sinks is not None:
        rows.add_sinks(found.sinks, weighted_sink - p_sink * delta)
    return dq.mul_(rows.problem.scale)


def _weighted(
    rows: QueryTile, j0: int, j1: int, p: Tensor, aux: Aux, grads: Measured, entropy: Tensor | None
) -> Tensor:
    """P G of one tile [n, group * block_q, block_k]; `entropy` is that statistic's gradient, folded."""
    tiles, i0, i1 = rows.tiles, rows.i0, rows.i1
    k0, k1 = tiles.key_start + j0, tiles.key_start + j1
    by_head = rows.per_head(p)
    g = torch.zeros_like(by_head)
    if grads.expected_distance is not None:
        of_rows = tiles.lse_rows(grads.expected_distance)[:, :, i0:i1, None]
        g += of_rows * rows.distance(j0, j1)
    if grads.column_sum is not None:
        columns = _columns(tiles, grads.column_sum, j0, j1)[:, :, None]
        if aux.column_sum == GROUP:
            columns = columns.repeat_interleave(rows.problem.group_size, 1)
        g[:, :, max(0, aux.first_row(rows.visibility.seqlen_q) - i0) :] += columns
    if grads.block_sum is not None:
        of_blocks = tiles.entries(grads.block_sum)
        for dim, first, last in ((2, i0, i1), (3, k0, k1)):
            at = torch.arange(first, last, device=p.device) // aux.block_sum
            of_blocks = of_blocks.index_select(dim, at)
        g += of_blocks
    if grads.rows is not None:
        for n, i in _present_rows(aux, rows.visibility.seqlen_q):
            if i0 <= i < i1:
                g[:, :, i - i0] += tiles.entries(grads.rows)[:, :, n, k0:k1]
    pg = g.view_as(p).mul_(p)
    return pg if entropy is None else pg.addcmul_(entropy, torch.special.entr(p))
