"""Tiled attention in PyTorch operations: every option, any device, O(N) memory. The readable fallback.

Forward, for each tile of queries (FlashAttention-2's order; Dao 2023, section 3.1):

    m, l, acc = -inf, 0, 0
    for each visible tile of keys:
        s     = scale * q k^T (+ softcap, bias, ALiBi, mask)    [block_q, block_k]
        m_new = max(m, rowmax(s)),  c = exp(m - m_new),  p = exp(s - m_new)
        l     = c * l + rowsum(p),  acc = c * acc + p v
    out = acc / l,  lse = m + log(l)

Backward, the same walk, recomputing p from the saved lse (section 3.2): delta = rowsum(dO * O) - dlse,
dP = dO V^T, dS = P * (dP - delta), dV += P^T dO, dQ += dS K, dK += dS^T Q.

The query heads that share one key head are folded into the rows of a tile, so grouped-query attention
needs neither a copy of the keys nor a sum over heads afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import fp8
from tilewise.dropout import keep_mask
from tilewise.mask import TileKind, Visibility
from tilewise.plan import tiled_plan
from tilewise.problem import AttentionProblem, Gradients, Inputs, spans

NEG_INF = float("-inf")


def supports(problem: AttentionProblem) -> str | None:
    """Every problem is served."""
    return None


class OnlineSoftmaxStep(NamedTuple):
    """State after one tile, and what the tile contributed."""

    m: Tensor  # running maximum [..., block_q, 1]
    l: Tensor  # running sum of exponentials [..., block_q, 1]
    acc: Tensor  # running output, not normalized [..., block_q, head_dim_v]
    m_tile: Tensor  # this tile's row maximum
    correction: Tensor  # exp(m_old - m): what the old sums are worth under the new maximum
    p: Tensor  # this tile's exponentials [..., block_q, block_k]


def online_softmax_step(
    s: Tensor, v: Tensor, m: Tensor, l: Tensor, acc: Tensor, keep: Tensor | None = None,
    round_weights: Callable[[Tensor], Tensor] | None = None,
) -> OnlineSoftmaxStep:  # fmt: skip
    """Fold one tile of scores and values into the running softmax.

    Args:
        s: scores [n, block_q, block_k]; -inf where a key is not visible. Overwritten with p.
        v: values [n, block_k, head_dim_v].
        m, l, acc: the state so far; start from -inf, 0, 0. acc is updated in place.
        keep: dropout factor, 0 or 1 / (1 - dropout_p), shaped like s. It multiplies what reaches acc;
            the softmax denominator is that of the undropped weights.
        round_weights: what weights go through before they are multiplied by v.

    A row that has seen only -inf keeps m = -inf and l = 0. NaN and +inf propagate.
    """
    m_tile = s.amax(-1, keepdim=True)
    m_new = torch.maximum(m, m_tile)
    m_finite = m_new.masked_fill(m_new == NEG_INF, 0.0)  # exp(-inf - -inf) would be NaN
    correction = torch.exp(m - m_finite)
    p = s.sub_(m_finite).exp_()
    l = l * correction + p.sum(-1, keepdim=True)
    weights = p if keep is None else p * keep
    acc.mul_(correction).baddbmm_(weights if round_weights is None else round_weights(weights), v)
    return OnlineSoftmaxStep(m_new, l, acc, m_tile, correction, p)


def recompute_step(
    s: Tensor, v: Tensor, lse: Tensor, do: Tensor, dv: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """First half of one backward tile: P = exp(S - lse), dV += P^T dO, dP = dO V^T. Returns (p, dp).

    Args:
        s: scores [n, block_q, block_k]. Overwritten with p.
        v: values [n, block_k, head_dim_v].
        lse: [n, block_q, 1], finite: 0 stands for a row whose scores are all -inf.
        do: gradient of the output [n, block_q, head_dim_v].
        dv: [n, block_k, head_dim_v], added to in place.
        keep: dropout factor, as in `online_softmax_step`; dp carries it.
    """
    p = s.sub_(lse).exp_()
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
) -> Tensor:
    """Second half of one backward tile: dS = P * (dP - delta), dQ += dS K, dK += dS^T Q. Returns ds.

    Args:
        p, dp: of `recompute_step`. dp is overwritten with ds.
        delta: rowsum(dO * O) - dlse [n, block_q, 1].
        q, k: [n, block_q, head_dim], [n, block_k, head_dim].
        dq, dk: shaped like q and k, added to in place.
        tanh: of the softcapped scores; the scores before the cap have the gradient ds * (1 - tanh^2).
    """
    ds = dp.sub_(delta).mul_(p)
    ds_uncapped = ds if tanh is None else (1 - tanh * tanh).mul_(ds)
    dq.baddbmm_(ds_uncapped, k)
    dk.baddbmm_(ds_uncapped.mT, q)
    return ds


class Segment(NamedTuple):
    """Batch entries that share one visibility: a chunk of a dense batch, or one ragged sequence."""

    sequences: range  # batch entries
    rows_q: slice  # rows of a packed query; all rows otherwise
    rows_k: slice
    visibility: Visibility


def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out, contiguous, query's shape with head_dim_v; lse (batch, heads, seqlen_q), packed (heads, total)."""
    query = inputs.query
    out = query.new_empty((*query.shape[:-1], problem.head_dim_v))
    lse_shape = (query.shape[1], query.shape[0]) if problem.is_packed else _lse_shape(problem)
    lse = query.new_empty(lse_shape, dtype=problem.compute_dtype)
    for segment in segments(problem, inputs):
        tiles = Tiles(problem, inputs, segment)
        out_rows, lse_rows = tiles.rows(out), tiles.lse_rows(lse)
        for i0, i1 in tiles.query_tiles():
            tile_out, tile_lse = _forward_tile(tiles, i0, i1)
            out_rows[:, :, i0:i1] = tile_out.view(out_rows[:, :, i0:i1].shape)
            lse_rows[:, :, i0:i1] = tile_lse.view(lse_rows[:, :, i0:i1].shape)
    return out, lse


def _forward_tile(tiles: Tiles, i0: int, i1: int) -> tuple[Tensor, Tensor]:
    q = tiles.query(i0, i1)  # [n, group * block_q, head_dim], scaled
    m, l = tiles.initial_statistics(i0, i1)
    acc = q.new_zeros((*q.shape[:2], tiles.problem.head_dim_v))
    for j0, j1 in tiles.key_tiles(i0, i1):
        s, _ = tiles.scores(q, i0, i1, j0, j1)
        keep = tiles.keep(i0, i1, j0, j1)
        m, l, acc, *_ = online_softmax_step(s, tiles.value(j0, j1), m, l, acc, keep, tiles.round_weights)
    lse = m + torch.log(l)
    acc /= l.masked_fill(l == 0, 1.0)
    return acc, lse


def backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """Gradients by recomputation from lse; each has the dtype of its input. Deterministic."""
    dq, dk, dv = (t.new_zeros(t.shape) for t in (inputs.query, inputs.key, inputs.value))
    bias, sinks, dtype = inputs.bias, inputs.sinks, problem.compute_dtype
    dbias = None if bias is None else torch.zeros_like(bias, dtype=dtype)
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=dtype)
    for segment in segments(problem, inputs):
        tiles = Tiles(problem, inputs, segment)
        n, seqlen_k = len(segment.sequences) * problem.num_kv_heads, segment.visibility.seqlen_k
        dk_sum = dq.new_zeros((n, seqlen_k, problem.head_dim), dtype=dtype)
        dv_sum = dq.new_zeros((n, seqlen_k, problem.head_dim_v), dtype=dtype)
        dq_rows, out_rows, do_rows = tiles.rows(dq), tiles.rows(out), tiles.rows(dout)
        lse_rows, dlse_rows = tiles.lse_rows(lse), None if dlse is None else tiles.lse_rows(dlse)
        for i0, i1 in tiles.query_tiles():
            do = tiles.fold(do_rows[:, :, i0:i1])  # [n, group * block_q, head_dim_v]
            delta = (do * tiles.fold(out_rows[:, :, i0:i1])).sum(-1, keepdim=True)
            if dlse_rows is not None:
                delta -= tiles.fold(dlse_rows[:, :, i0:i1, None])
            row_lse = tiles.fold(lse_rows[:, :, i0:i1, None])
            dq_tile = _backward_tile(tiles, i0, i1, do, delta, row_lse, dk_sum, dv_sum, dbias)
            dq_rows[:, :, i0:i1] = dq_tile.view(dq_rows[:, :, i0:i1].shape)
            if dsinks is not None:
                p_sink = torch.exp(tiles.sink_column(i0, i1) - row_lse)
                per_head = (p_sink * delta).view(len(segment.sequences), problem.num_heads, -1)
                dsinks -= per_head.sum((0, 2))
        tiles.store_key_rows(dk, dk_sum)
        tiles.store_key_rows(dv, dv_sum)
    return Gradients(
        dq,
        dk,
        dv,
        None if dbias is None or bias is None else dbias.to(bias.dtype),
        None if dsinks is None or sinks is None else dsinks.to(sinks.dtype),
    )


def _backward_tile(
    tiles: Tiles,
    i0: int,
    i1: int,
    do: Tensor,
    delta: Tensor,
    lse: Tensor,
    dk_sum: Tensor,
    dv_sum: Tensor,
    dbias: Tensor | None,
) -> Tensor:
    """Add one query tile's part to dk_sum, dv_sum and dbias; return its dq."""
    q = tiles.query(i0, i1)  # [n, group * block_q, head_dim], scaled
    dq = torch.zeros_like(q)
    lse = lse.masked_fill(lse == NEG_INF, 0.0)  # such a row has s = -inf everywhere, so p = 0
    for j0, j1 in tiles.key_tiles(i0, i1):
        k, v = tiles.key(j0, j1), tiles.value(j0, j1)
        s, tanh = tiles.scores(q, i0, i1, j0, j1)
        keep = tiles.keep(i0, i1, j0, j1)
        p, dp = recompute_step(s, v, lse, do, dv_sum[:, j0:j1], keep)
        ds = gradient_step(p, dp, delta, q, k, dq, dk_sum[:, j0:j1], tanh)  # q carries the scale
        if dbias is not None:
            add_reduced(tiles.score_rows(dbias, i0, i1, j0, j1), tiles.per_head(ds, i0, i1))
    return dq.mul_(tiles.problem.scale)


class Tiles:
    """Cuts one segment into tiles: folded queries, key and value tiles, scores with every option."""

    def __init__(self, problem: AttentionProblem, inputs: Inputs, segment: Segment) -> None:
        self.problem, self.inputs, self.segment = problem, inputs, segment
        self.visibility = segment.visibility
        self.config = tiled_plan(problem)
        self.query_rows = self.rows(inputs.query)
        self.key_view = None if problem.is_paged else self.key_rows(inputs.key)
        self.value_view = None if problem.is_paged else self.key_rows(inputs.value)
        self.round_weights = None
        if problem.precision == "fp8":
            views: Any = self.query_rows, self.key_view, self.value_view
            self.query_rows, self.key_view, self.value_view = fp8.rounded_operands(*views)
            self.round_weights = fp8.round_weights

    def query_tiles(self) -> Iterator[tuple[int, int]]:
        seqlen_q, step = self.visibility.seqlen_q, self.config.block_q
        for i0 in range(0, seqlen_q, step):
            yield i0, min(i0 + step, seqlen_q)

    def key_tiles(self, i0: int, i1: int) -> Iterator[tuple[int, int]]:
        """Key tiles that the queries [i0, i1) can see; the first starts at the first visible key."""
        k0, k1 = self.visibility.key_range(i0, i1)
        for j0 in range(k0, k1, self.config.block_k):
            yield j0, min(j0 + self.config.block_k, k1)

    def rows(self, t: Tensor) -> Tensor:
        """This segment's part of a query-shaped tensor, as a view (batch, heads, seqlen_q, dim)."""
        return self._slice(t, self.segment.rows_q, self.problem.is_packed)

    def key_rows(self, t: Tensor) -> Tensor:
        """This segment's part of a key-shaped tensor, as a view (batch, kv heads, seqlen_k, dim)."""
        return self._slice(t, self.segment.rows_k, self.problem.has_packed_keys)

    def _slice(self, t: Tensor, rows: slice, is_packed: bool) -> Tensor:
        if is_packed:
            return t[rows].transpose(0, 1)[None]
        batch = self.segment.sequences
        return t[batch.start : batch.stop, rows].transpose(1, 2)

    def store_key_rows(self, t: Tensor, total: Tensor) -> None:
        """Write [n, seqlen_k, dim] into this segment's part of a key-shaped tensor; add it to its pages."""
        if not self.problem.is_paged:
            rows = self.key_rows(t)
            rows.copy_(total.view(rows.shape))
            return
        size, n = self.problem.page_size or 1, self.segment.sequences.start
        position = torch.arange(self.segment.rows_k.start, self.segment.rows_k.stop, device=t.device)
        page = self.inputs.page_table[n, position // size].long()  # type: ignore[index]
        # Sequences may share pages, so gradients add up.
        t.index_put_((page, position % size), total.transpose(0, 1).to(t.dtype), accumulate=True)

    def lse_rows(self, t: Tensor) -> Tensor:
        """This segment's part of lse, as a view (batch, heads, seqlen_q)."""
        if self.problem.is_packed:
            return t[None, :, self.segment.rows_q]
        return t[self.segment.sequences.start : self.segment.sequences.stop]

    def fold(self, t: Tensor) -> Tensor:
        """(batch, heads, rows, dim) -> [batch * kv heads, group * rows, dim] in the compute dtype."""
        n = t.shape[0] * self.problem.num_kv_heads
        return t.to(self.problem.compute_dtype).reshape(n, self.problem.group_size * t.shape[2], t.shape[3])

    def per_head(self, t: Tensor, i0: int, i1: int) -> Tensor:
        """[batch * kv heads, group * rows, cols] -> the same memory as (batch, heads, rows, cols)."""
        return t.view(len(self.segment.sequences), self.problem.num_heads, i1 - i0, t.shape[-1])

    def query(self, i0: int, i1: int) -> Tensor:
        """The folded query tile, times the softmax scale."""
        return self.fold(self.query_rows[:, :, i0:i1]) * self.problem.scale

    def key(self, j0: int, j1: int) -> Tensor:
        inputs = self.inputs
        return self._key_tile(inputs.key, self.key_view, inputs.key_scale, j0, j1)  # [n, block_k, head_dim]

    def value(self, j0: int, j1: int) -> Tensor:
        inputs = self.inputs
        return self._key_tile(inputs.value, self.value_view, inputs.value_scale, j0, j1)  # [..., head_dim_v]

    def _key_tile(self, pages: Tensor, view: Tensor | None, scale: Tensor | None, j0: int, j1: int) -> Tensor:
        tile = self._gather_pages(pages, scale, j0, j1) if view is None else view[:, :, j0:j1]
        n = tile.shape[0] * tile.shape[1]
        return tile.to(self.problem.compute_dtype).reshape(n, tile.shape[2], tile.shape[3])

    def _gather_pages(self, pages: Tensor, scale: Tensor | None, j0: int, j1: int) -> Tensor:
        size, start = self.problem.page_size or 1, self.segment.rows_k.start
        first, last = (j0 + start) // size, (j1 + start - 1) // size + 1
        table = self.inputs.page_table[self.segment.sequences.start, first:last]  # type: ignore[index]
        tile = pages[table.long()]
        if scale is not None:
            tile = tile.to(scale.dtype) * scale[table.long(), None, :, None]
        tile = tile.flatten(0, 1)  # [pages * page_size, kv heads, dim]
        skip = j0 + start - first * size
        return tile[skip : skip + j1 - j0].transpose(0, 1)[None]

    def initial_statistics(self, i0: int, i1: int) -> tuple[Tensor, Tensor]:
        """m = -inf and l = 0; with sinks, the state after a key of logit `sink` and value 0."""
        n = len(self.segment.sequences) * self.problem.num_kv_heads
        shape = (n, self.problem.group_size * (i1 - i0), 1)
        like = self.inputs.query
        if self.inputs.sinks is None:
            m = like.new_full(shape, NEG_INF, dtype=self.problem.compute_dtype)
            return m, torch.zeros_like(m)
        m = self.sink_column(i0, i1)
        return m, torch.ones_like(m)

    def sink_column(self, i0: int, i1: int) -> Tensor:
        """Each folded row's sink logit [n, group * block_q, 1]."""
        sinks = self.inputs.sinks.to(self.problem.compute_dtype)  # type: ignore[union-attr]
        return self.fold(sinks[None, :, None, None].expand(len(self.segment.sequences), -1, i1 - i0, 1))

    def scores(self, q: Tensor, i0: int, i1: int, j0: int, j1: int) -> tuple[Tensor, Tensor | None]:
        """The score tile with every option applied, -inf where not visible; and tanh if softcapped."""
        problem, inputs = self.problem, self.inputs
        s = torch.bmm(q, self.key(j0, j1).mT)  # [n, group * block_q, block_k]
        tanh = None
        if problem.softcap > 0:
            tanh = torch.tanh(s / problem.softcap)
            s = problem.softcap * tanh
        by_head = self.per_head(s, i0, i1)
        if inputs.bias is not None:
            by_head += self.score_rows(inputs.bias, i0, i1, j0, j1)
        if inputs.alibi_slopes is not None:
            by_head -= self._alibi(i0, i1, j0, j1)
        if self.visibility.tile_kind(i0, i1, j0, j1) is TileKind.EDGE:
            by_head.masked_fill_(~self.visibility.tile_mask(i0, i1, j0, j1, s.device), NEG_INF)
        if inputs.mask is not None:
            by_head.masked_fill_(~self.score_rows(inputs.mask, i0, i1, j0, j1), NEG_INF)
        return s, tanh

    def _alibi(self, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        slopes = self.inputs.alibi_slopes.to(self.problem.compute_dtype)  # type: ignore[union-attr]
        if slopes.ndim == 2:
            slopes = slopes[self.segment.sequences.start : self.segment.sequences.stop]
        distance = self.visibility.relative_position(i0, i1, j0, j1, slopes.device).abs()
        return slopes[..., None, None] * distance

    def score_rows(self, t: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """The tile's part of a mask or bias that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
        start = self.segment.rows_k.start if not self.problem.has_packed_keys else 0
        if t.shape[0] > 1:
            t = t[self.segment.sequences.start : self.segment.sequences.stop]
        if t.shape[2] > 1:
            t = t[:, :, i0:i1]
        return t[..., start + j0 : start + j1] if t.shape[3] > 1 else t

    def keep(self, i0: int, i1: int, j0: int, j1: int) -> Tensor | None:
        """Dropout factor 0 or 1 / (1 - dropout_p), folded like the scores; None without dropout."""
        problem, seed = self.problem, self.inputs.dropout_seed
        if problem.dropout_p == 0 or seed is None:
            return None
        kept = keep_mask(seed, problem.dropout_p, self.segment.sequences, problem.num_heads, i0, i1, j0, j1)
        return self.fold(kept) / (1 - problem.dropout_p)


def _lse_shape(problem: AttentionProblem) -> tuple[int, int, int]:
    return problem.batch, problem.num_heads, problem.seqlen_q


def segments(problem: AttentionProblem, inputs: Inputs) -> Iterator[Segment]:
    """Ragged problems: one segment a sequence. Dense: chunks of the batch that keep a tile in cache."""
    if problem.num_heads == 0:
        return
    if problem.is_packed or problem.is_cached:
        for n, span in enumerate(spans(problem, inputs)):
            visibility = problem.visibility(span.q1 - span.q0, span.k1 - span.k0)
            rows_q, rows_k = slice(span.q0, span.q1), slice(span.k0, span.k1)
            yield Segment(range(n, n + 1), rows_q, rows_k, visibility)
        return
    step = tiled_plan(problem).batch_chunk
    rows_q, rows_k = slice(0, problem.seqlen_q), slice(0, problem.seqlen_k)
    for b0 in range(0, problem.batch, step):
        sequences = range(b0, min(b0 + step, problem.batch))
        yield Segment(sequences, rows_q, rows_k, problem.visibility())


def add_reduced(total: Tensor, tile: Tensor) -> None:
    """total += tile, summed over the dimensions in which total is broadcast."""
    dims = [d for d in range(tile.ndim) if total.shape[d] == 1 and tile.shape[d] != 1]
    total += tile.sum(dims, keepdim=True) if dims else tile
