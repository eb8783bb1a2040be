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
from tilewise.core.signature import Signature
from tilewise.core.statistics import GROUP, Aux, Measured, new_measured
from tilewise.core.torch_private import own_dtypes
from tilewise.tiled.tiles import (
    NEG_INF,
    Tiles,
    add_reduced,
    in_input_dtypes,
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


def plan(problem: AttentionProblem, signature: Signature) -> StatisticsPlan:
    return StatisticsPlan(problem, signature.aux)


def measure(
    problem: AttentionProblem, inputs: Inputs, lse: Tensor, residual: Tensor | None, aux: Aux
) -> Measured:
    """The statistics of a call whose lse is known. Deterministic."""
    found = new_measured(aux, problem, inputs)
    is_walked = any(t is not None for t in found._replace(rows=None))
    for segment in segments(problem, inputs):
        tiles = Tiles(problem, inputs, segment)
        if found.rows is not None:
            _measure_rows(tiles, lse, residual, aux, found.rows)
        first = aux.first_visited(tiles.visibility.seqlen_q)
        for i0, i1 in tiles.query_tiles() if is_walked else ():
            if i1 > first:
                _measure_tile(tiles, i0, i1, tiles.row_shift(lse, residual, i0, i1), aux, found)
    return found


def _measure_tile(
    tiles: Tiles, i0: int, i1: int, shift: tuple[Tensor, Tensor], aux: Aux, found: Measured
) -> None:
    """Reduce the tiles of scores of the queries [i0, i1)."""
    q = tiles.query(i0, i1)  # [n, group * block_q, head_dim], scaled
    row_max = q.new_full((*q.shape[:2], 1), NEG_INF)
    distance = torch.zeros_like(row_max)
    total = _sink_weights(tiles, i0, i1, shift)
    entropy = torch.special.entr(total)
    needs_total = aux.entropy or aux.expected_distance or aux.top_k > 0
    best = None
    for j0, j1 in tiles.key_tiles(i0, i1):
        s = tiles.scores(q, i0, i1, j0, j1).s
        if aux.needs_row_max:
            row_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
        if aux.top_k:
            best = _largest(best, s, j0, aux.top_k)
        p = weights(s, *shift)
        if needs_total:
            total += p.sum(-1, keepdim=True)
        if aux.entropy:
            entropy += torch.special.entr(p).sum(-1, keepdim=True)
        by_head = tiles.per_head(p, i0, i1)
        if aux.expected_distance:
            distance += tiles.fold((by_head * _distance(tiles, i0, i1, j0, j1)).sum(-1, keepdim=True))
        if found.column_sum is not None:
            first = max(0, aux.first_row(tiles.visibility.seqlen_q) - i0)
            _columns(tiles, found.column_sum, aux, j0, j1).add_(_of_keys(by_head[:, :, first:], tiles, aux))
        if found.block_sum is not None:
            _blocks(tiles, found.block_sum, aux, i0, i1, j0, j1).add_(
                _block_sums(by_head, aux.block_sum, i0, _key_start(tiles) + j0)
            )
    total.masked_fill_(total == 0, 1.0)  # no key is visible: all sums are 0
    entropy = entropy.div_(total).add_(total.log())
    rows = {"row_max": row_max, "entropy": entropy, "expected_distance": distance.div_(total)}
    for name, t in rows.items():
        target = getattr(found, name)
        if target is not None:
            tiles.store_lse(target, i0, i1, t)
    if best is not None:
        _store_best(tiles, found, i0, i1, best, weights(best.scores.clone(), *shift).div_(total))


def _sink_weights(tiles: Tiles, i0: int, i1: int, shift: tuple[Tensor, Tensor]) -> Tensor:
    """Each folded row's weight of its sink, 0 without sinks [n, group * block_q, 1]."""
    if tiles.inputs.sinks is None:
        return torch.zeros_like(shift[0])
    return weights(tiles.sink_column(i0, i1).clone(), *shift)


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


def _store_best(tiles: Tiles, found: Measured, i0: int, i1: int, best: _Best, p: Tensor) -> None:
    count = best.keys.shape[-1]
    keys = (best.keys + _key_start(tiles)).masked_fill_(best.scores == NEG_INF, -1)
    for target, t in ((found.top_weights, p), (found.top_keys, keys)):
        assert target is not None
        rows = tiles.segment.rows_q
        batch = tiles.segment.sequences
        part = target[None, :, rows] if tiles.problem.is_packed else target[batch.start : batch.stop]
        part[:, :, i0:i1, :count] = tiles.per_head(t, i0, i1)


def _measure_rows(tiles: Tiles, lse: Tensor, residual: Tensor | None, aux: Aux, found: Tensor) -> None:
    """The whole rows of P that were asked for."""
    batch, seqlen_q, start = tiles.segment.sequences, tiles.visibility.seqlen_q, _key_start(tiles)
    for n, i in _present_rows(aux, seqlen_q):
        q, shift = tiles.query(i, i + 1), tiles.row_shift(lse, residual, i, i + 1)
        total = tiles.per_head(_sink_weights(tiles, i, i + 1, shift), i, i + 1)[:, :, 0]
        row = found[batch.start : batch.stop, :, n]
        for j0, j1 in tiles.key_tiles(i, i + 1):
            s = tiles.scores(q, i, i + 1, j0, j1).s
            p = tiles.per_head(weights(s, *shift), i, i + 1)[:, :, 0]
            row[..., start + j0 : start + j1] = p
            total += p.sum(-1, keepdim=True)
        row /= total.masked_fill(total == 0, 1.0)


def _present_rows(aux: Aux, seqlen_q: int) -> Iterator[tuple[int, int]]:
    """(place in `rows`, query) of the rows that a sequence has."""
    for n, row in enumerate(aux.rows or ()):
        i = row + seqlen_q if row < 0 else row
        if 0 <= i < seqlen_q:
            yield n, i


def _key_start(tiles: Tiles) -> int:
    """Where a segment's first key stands in tensors that have a place for every key of a batch entry."""
    return 0 if tiles.problem.has_packed_keys else tiles.segment.rows_k.start


def _distance(tiles: Tiles, i0: int, i1: int, j0: int, j1: int) -> Tensor:
    """How far each key is from each query's causal position [block_q, block_k]."""
    return tiles.visibility.relative_position(i0, i1, j0, j1, tiles.inputs.query.device).abs()


def _of_keys(by_head: Tensor, tiles: Tiles, aux: Aux) -> Tensor:
    """(batch, heads, rows, keys) summed over rows, and over groups if wanted."""
    total = by_head.sum(2)
    if aux.column_sum == GROUP:
        total = total.unflatten(1, (tiles.problem.num_kv_heads, tiles.problem.group_size)).sum(2)
    return total


def _columns(tiles: Tiles, t: Tensor, aux: Aux, j0: int, j1: int) -> Tensor:
    """The keys [j0, j1) of column sums or their gradient, as a view (batch, heads, keys)."""
    start, batch = tiles.segment.rows_k.start, tiles.segment.sequences
    part = t[None] if tiles.problem.has_packed_keys else t[batch.start : batch.stop]
    return part[:, :, start + j0 : start + j1]


def _blocks(tiles: Tiles, t: Tensor, aux: Aux, i0: int, i1: int, j0: int, j1: int) -> Tensor:
    """The blocks that a tile touches, as a view (batch, heads, blocks of queries, blocks of keys)."""
    batch, size, start = tiles.segment.sequences, aux.block_sum, _key_start(tiles)
    rows = slice(i0 // size, (i1 - 1) // size + 1)
    return t[batch.start : batch.stop, :, rows, (start + j0) // size : (start + j1 - 1) // size + 1]


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
    for segment in segments(problem, inputs):
        tiles = Tiles(problem, inputs, segment)
        dk_sum = tiles.new_key_sum(problem.head_dim)
        first = aux.first_visited(tiles.visibility.seqlen_q) if grads.rows is None else 0
        for i0, i1 in tiles.query_tiles():
            if i1 <= first:
                continue
            shift = tiles.row_shift(lse, residual, i0, i1)
            dq_tile = _backward_tile(tiles, i0, i1, shift, aux, grads, dk_sum, found)
            tiles.store_rows(found.query, i0, i1, dq_tile)
        tiles.store_key_rows(found.key, dk_sum)
    return in_input_dtypes(found, inputs)


def _backward_tile(
    tiles: Tiles,
    i0: int,
    i1: int,
    shift: tuple[Tensor, Tensor],
    aux: Aux,
    grads: Measured,
    dk_sum: Tensor,
    found: Gradients,
) -> Tensor:
    """Add one query tile's part to dk_sum and found's bias, sinks and captured floats; return its dq."""
    q = tiles.query(i0, i1)
    dq, delta = torch.zeros_like(q), q.new_zeros((*q.shape[:2], 1))
    entropy = None if grads.entropy is None else tiles.fold(tiles.lse_rows(grads.entropy)[:, :, i0:i1, None])
    if found.sinks is not None:
        p_sink = weights(tiles.sink_column(i0, i1).clone(), *shift)
        weighted_sink = torch.zeros_like(p_sink) if entropy is None else entropy * torch.special.entr(p_sink)
        delta += weighted_sink
    for j0, j1 in tiles.key_tiles(i0, i1):
        s = tiles.scores(q, i0, i1, j0, j1).s
        pg = _weighted(tiles, i0, i1, j0, j1, weights(s, *shift), aux, grads, entropy)
        delta += pg.sum(-1, keepdim=True)
    for j0, j1 in tiles.key_tiles(i0, i1):
        s, tanh, function = tiles.scores(q, i0, i1, j0, j1)
        p = weights(s, *shift)
        ds = _weighted(tiles, i0, i1, j0, j1, p, aux, grads, entropy).sub_(p.mul_(delta))
        if function is not None:
            ds = function.backward(ds, found.captured_floats)
        if found.bias is not None:
            add_reduced(tiles.score_rows(found.bias, i0, i1, j0, j1), tiles.per_head(ds, i0, i1))
        if tanh is not None:
            ds = (1 - tanh * tanh).mul_(ds)
        dq.baddbmm_(ds, tiles.key(j0, j1))
        dk_sum[:, j0:j1].baddbmm_(ds.mT, q)  # q carries the scale
    if found.sinks is not None:
        tiles.add_sinks(found.sinks, weighted_sink - p_sink * delta)
    return dq.mul_(tiles.problem.scale)


def _weighted(
    tiles: Tiles,
    i0: int,
    i1: int,
    j0: int,
    j1: int,
    p: Tensor,
    aux: Aux,
    grads: Measured,
    entropy: Tensor | None,
) -> Tensor:
    """P G of one tile [n, group * block_q, block_k]; `entropy` is that statistic's gradient, folded."""
    batch, start = tiles.segment.sequences, _key_start(tiles)
    by_head = tiles.per_head(p, i0, i1)
    g = torch.zeros_like(by_head)
    if grads.expected_distance is not None:
        of_rows = tiles.lse_rows(grads.expected_distance)[:, :, i0:i1, None]
        g += of_rows * _distance(tiles, i0, i1, j0, j1)
    if grads.column_sum is not None:
        columns = _columns(tiles, grads.column_sum, aux, j0, j1)[:, :, None]
        if aux.column_sum == GROUP:
            columns = columns.repeat_interleave(tiles.problem.group_size, 1)
        g[:, :, max(0, aux.first_row(tiles.visibility.seqlen_q) - i0) :] += columns
    if grads.block_sum is not None:
        of_blocks = grads.block_sum[batch.start : batch.stop]
        for dim, first, last in ((2, i0, i1), (3, start + j0, start + j1)):
            at = torch.arange(first, last, device=p.device) // aux.block_sum
            of_blocks = of_blocks.index_select(dim, at)
        g += of_blocks
    if grads.rows is not None:
        for n, i in _present_rows(aux, tiles.visibility.seqlen_q):
            if i0 <= i < i1:
                g[:, :, i - i0] += grads.rows[batch.start : batch.stop, :, n, start + j0 : start + j1]
    pg = g.view_as(p).mul_(p)
    return pg if entropy is None else pg.addcmul_(entropy, torch.special.entr(p))
