"""A problem cut into segments and tiles, for attention in PyTorch operations: tensors as tiles see them.

The query heads that share one key head are folded into the rows of a tile, so grouped-query attention
needs neither a copy of the keys nor a sum over heads afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.dropout import keep_mask, rate
from tilewise.core.functions.expression import decode
from tilewise.core.mask import TileKind, Visibility
from tilewise.core.problem import AttentionProblem, Gradients, Inputs, spans
from tilewise.tiled import fp8
from tilewise.tiled.config import tiled_plan
from tilewise.tiled.functions import FunctionTile, SegmentFunctions

NEG_INF = float("-inf")
SHIFT = 3  # below lse: about where the scores of some hundred keys are


class Segment(NamedTuple):
    """Batch entries that share one visibility: a chunk of a dense batch, or one ragged sequence."""

    sequences: range  # batch entries
    rows_q: slice  # rows of a packed query; all rows otherwise
    rows_k: slice
    visibility: Visibility


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


class ScoreTile(NamedTuple):
    """A tile of scores with every option; -inf where not visible."""

    s: Tensor  # [n, group * block_q, block_k]
    tanh: Tensor | None  # of the softcapped scores
    function: FunctionTile | None  # the mask and score functions, at the scores before them


class Tiles:
    """Cuts one segment into tiles: folded queries, key and value tiles, scores with every option."""

    def __init__(self, problem: AttentionProblem, inputs: Inputs, segment: Segment) -> None:
        self.problem, self.inputs, self.segment = problem, inputs, segment
        self.visibility = segment.visibility
        self.config = tiled_plan(problem)
        self.query_rows = self.rows(inputs.query)
        self.key_view = None if problem.is_paged else self.key_rows(inputs.key)
        self.value_view = None if problem.is_paged else self.key_rows(inputs.value)
        self.functions = None
        if problem.functions is not None:
            lengths = self.visibility.seqlen_q, self.visibility.seqlen_k
            self.functions = SegmentFunctions(problem, inputs, segment.sequences, lengths)
        if problem.is_8_bit:
            self.rounded = self._rounded()
            self.query_rows, self.key_view, self.value_view = self.rounded[:3]

    def query_tiles(self) -> Iterator[tuple[int, int]]:
        seqlen_q, step = self.visibility.seqlen_q, self.config.block_q
        for i0 in range(0, seqlen_q, step):
            yield i0, min(i0 + step, seqlen_q)

    def key_tiles(self, i0: int, i1: int) -> Iterator[tuple[int, int]]:
        """Key tiles that the queries [i0, i1) can see; the first starts at the first visible key.

        With functions, the others start where the map of tiles has them.
        """
        k0, k1 = self.visibility.key_range(i0, i1)
        step = self.config.block_k
        if self.functions is not None:
            yield from self.functions.visible_tiles(i0, k0, k1)
            return
        first = k0 // step * step if self.problem.is_8_bit else k0  # no tile has keys of two scales
        for j0 in range(first, k1, step):
            yield max(j0, k0), min(j0 + step, k1)

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

    def new_key_sum(self, dim: int) -> Tensor:
        """[n, seqlen_k, dim] of zeros, for what the tiles add up by keys: see `store_key_rows`."""
        n = len(self.segment.sequences) * self.problem.num_kv_heads
        like, dtype = self.inputs.query, self.problem.compute_dtype
        return like.new_zeros((n, self.visibility.seqlen_k, dim), dtype=dtype)

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

    def store_rows(self, t: Tensor, i0: int, i1: int, tile: Tensor) -> None:
        """Write a folded tile into the rows [i0, i1) of what `rows` gives of a query-shaped tensor."""
        rows = self.rows(t)[:, :, i0:i1]
        rows.copy_(tile.view(rows.shape))

    def store_lse(self, t: Tensor, i0: int, i1: int, tile: Tensor) -> None:
        """Write a folded column [n, group * block_q, 1] into the rows [i0, i1) of a tensor like lse."""
        self.lse_rows(t)[:, :, i0:i1] = self.per_head(tile, i0, i1)[..., 0]

    def add_sinks(self, total: Tensor, tile: Tensor) -> None:
        """Add up what belongs to each folded row's sink [n, group * block_q, 1]."""
        total += tile.view(len(self.segment.sequences), self.problem.num_heads, -1).sum((0, 2))

    def lse_rows(self, t: Tensor) -> Tensor:
        """This segment's part of lse, as a view (batch, heads, seqlen_q)."""
        if self.problem.is_packed:
            return t[None, :, self.segment.rows_q]
        return t[self.segment.sequences.start : self.segment.sequences.stop]

    def row_shift(self, lse: Tensor, residual: Tensor | None, i0: int, i1: int) -> tuple[Tensor, Tensor]:
        """`shift_and_factor` of each row, folded like the scores."""

        def folded(t: Tensor) -> Tensor:
            return self.fold(self.lse_rows(t)[:, :, i0:i1, None])

        return shift_and_factor(folded(lse), None if residual is None else folded(residual))

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

    def value_scale(self, j0: int) -> Tensor:
        """Of 8-bit values: that of the tile from j0 on [n, 1, 1]."""
        return self.rounded.value_scale[:, :, j0 // self.rounded.block_rows].reshape(-1, 1, 1)

    def _rounded(self) -> fp8.Operands:
        """The segment's rows in 8 bits."""
        problem, inputs, query = self.problem, self.inputs, self.query_rows
        if problem.is_in_blocks:
            return fp8.operands_in_blocks(problem, inputs, self.segment)
        key, value, seqlen_k = self.key_view, self.value_view, self.visibility.seqlen_k
        if key is not None and value is not None:
            return fp8.operands(problem.precision, query, key, value)
        key = self._gather_pages(inputs.key, inputs.key_scale, 0, seqlen_k)
        value = self._gather_pages(inputs.value, None, 0, seqlen_k)
        if inputs.value_scale is None:
            return fp8.operands(problem.precision, query, key, value)
        size = problem.page_size or 1
        pages = inputs.page_table[self.segment.sequences.start, : -(-seqlen_k // size)]  # type: ignore[index]
        scale = inputs.value_scale[pages.long()]
        return fp8.operands_of_pages(problem.precision, query, key, value, scale, size)

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

    def scores(self, q: Tensor, i0: int, i1: int, j0: int, j1: int) -> ScoreTile:
        """The score tile of a folded query tile."""
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
        function = None if self.functions is None else self.functions.at(by_head, (i0, i1, j0, j1))
        if self.visibility.tile_kind(i0, i1, j0, j1) is TileKind.EDGE:
            by_head.masked_fill_(~self.visibility.tile_mask(i0, i1, j0, j1, s.device), NEG_INF)
        if inputs.mask is not None:
            by_head.masked_fill_(~self.score_rows(inputs.mask, i0, i1, j0, j1), NEG_INF)
        if function is not None:
            function.check_indices(by_head)
        return ScoreTile(s, tanh, function)

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
        """Dropout factor 0 or 1 / (1 - rate(dropout_p)), folded like the scores; None without dropout."""
        problem, seed = self.problem, self.inputs.dropout_seed
        if problem.dropout_p == 0 or seed is None:
            return None
        kept = keep_mask(seed, problem.dropout_p, self.segment.sequences, problem.num_heads, i0, i1, j0, j1)
        return self.fold(kept) / (1 - rate(problem.dropout_p))


def shift_and_factor(lse: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What `weights` takes: exp(s - shift) * factor = exp(s - lse - residual).

    A shift among the scores, not above them as lse is, leaves differences small, which rounds them less. In a
    row without keys (lse = -inf) it is finite: scores are -inf there, and weights 0.
    """
    lse = lse.masked_fill(lse == NEG_INF, 0.0)
    shift = torch.floor(lse) - SHIFT
    exponent = (shift - lse).masked_fill_(lse.isinf(), 0.0)
    if residual is not None:
        exponent -= residual
    return shift, exponent.exp_()


def weights(s: Tensor, shift: Tensor, factor: Tensor | float) -> Tensor:
    """exp(s - shift) * factor, in the place of s: see `shift_and_factor`.

    s - shift is exact where both are huge; what float32 does not hold of lse there is in the factor.
    """
    return s.sub_(shift).exp_().mul_(factor)


def add_reduced(total: Tensor, tile: Tensor) -> None:
    """total += tile, summed over the dimensions in which total is broadcast."""
    dims = [d for d in range(tile.ndim) if total.shape[d] == 1 and tile.shape[d] != 1]
    total += tile.sum(dims, keepdim=True) if dims else tile


def new_gradients(problem: AttentionProblem, inputs: Inputs, of_all_captured: bool = False) -> Gradients:
    """Zeros, to which tiles add: for query, key and value in their dtypes, for bias and sinks in the scores'.

    For captured floats in float64, if one of them wants a gradient, or `of_all_captured`.
    """
    floats = inputs.captured_floats
    wants = of_all_captured or (problem.functions is not None and decode(problem.functions).wants_grad)
    query, key, value = (t.new_zeros(t.shape) for t in inputs[:3])
    bias, sinks = (
        None if t is None else torch.zeros_like(t, dtype=problem.compute_dtype)
        for t in (inputs.bias, inputs.sinks)
    )
    captured = torch.zeros_like(floats, dtype=torch.float64) if floats is not None and wants else None
    return Gradients(query, key, value, bias, sinks, captured)


def in_input_dtypes(gradients: Gradients, inputs: Inputs) -> Gradients:
    """Each in the dtype of its input."""
    pairs = zip(gradients._fields, gradients)
    return Gradients(*(g if g is None else g.to(getattr(inputs, name).dtype) for name, g in pairs))  # type: ignore[arg-type]
