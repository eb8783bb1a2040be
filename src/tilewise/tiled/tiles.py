"""A problem cut into segments and tiles, for attention in PyTorch operations: tensors as tiles see them.

The query heads that share one key head are folded into the rows of a tile, so grouped-query attention
needs neither a copy of the keys nor a sum over heads afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.dropout import keep_mask, rate
from tilewise.core.fp8 import BLOCK_ROWS
from tilewise.core.functions.expression import decode
from tilewise.core.mask import TileKind
from tilewise.core.problem import AttentionProblem, Gradients, Inputs, spans
from tilewise.tiled.functions import FunctionTile, SegmentFunctions
from tilewise.tiled.segment import (
    Operands,
    Segment,
    operands,
    operands_in_blocks,
    operands_of_pages,
    tile_rows,
)

NEG_INF = float("-inf")
SHIFT = 3  # below lse: about where the scores of some hundred keys are
# A score tile over all heads stays near this size, so that it is still in cache when exp and PV read it.
# Measured on 2 cores with 1 MB of L2 each and 32 MB of L3.
SCORE_TILE_BYTES = 4 << 20


Shift = tuple[Tensor, Tensor]  # of each row: what `weights` takes


@dataclass(frozen=True)
class TileConfig:
    """`block_q` x `block_k` is the tile of the score matrix; `batch_chunk` batch entries share one pass."""

    block_q: int
    block_k: int
    batch_chunk: int = 1


@functools.lru_cache(maxsize=4096)
def tiled_plan(problem: AttentionProblem) -> TileConfig:
    """Tiles large enough that an operation's overhead does not matter."""
    if problem.is_8_bit:
        block_q, block_k = BLOCK_ROWS, tile_rows(problem)
    else:
        block_q, block_k = min(256, max(1, problem.seqlen_q)), min(512, max(1, problem.seqlen_k))
    one_entry = max(1, problem.num_heads * block_q * block_k * problem.compute_dtype.itemsize)
    return TileConfig(block_q, block_k, max(1, SCORE_TILE_BYTES // one_entry))


def segments(problem: AttentionProblem, inputs: Inputs) -> Iterator[Tiles]:
    """Ragged problems: a segment for each sequence. Dense: chunks of the batch that keep a tile in cache."""
    if problem.num_heads == 0:
        return
    if problem.is_packed or problem.is_cached:
        for n, span in enumerate(spans(problem, inputs)):
            visibility = problem.visibility(span.q1 - span.q0, span.k1 - span.k0)
            rows_q, rows_k = slice(span.q0, span.q1), slice(span.k0, span.k1)
            yield Tiles(problem, inputs, Segment(range(n, n + 1), rows_q, rows_k, visibility))
        return
    step = tiled_plan(problem).batch_chunk
    rows_q, rows_k = slice(0, problem.seqlen_q), slice(0, problem.seqlen_k)
    for b0 in range(0, problem.batch, step):
        sequences = range(b0, min(b0 + step, problem.batch))
        yield Tiles(problem, inputs, Segment(sequences, rows_q, rows_k, problem.visibility()))


class ScoreTile(NamedTuple):
    """A tile of scores with every option; -inf where not visible."""

    s: Tensor  # [n, group * block_q, block_k]
    tanh: Tensor | None  # of the softcapped scores
    function: FunctionTile | None  # the mask and score functions, at the scores before them


class Tiles:
    """Cuts one segment into tiles of queries, keys and values."""

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
            blocks = self.config.block_q, self.config.block_k
            self.functions = SegmentFunctions(problem, inputs, segment.sequences, lengths, blocks)
        if problem.is_8_bit:
            self.rounded = self._rounded()
            self.query_rows, self.key_view, self.value_view = self.rounded[:3]

    def query_tiles(self) -> Iterator[QueryTile]:
        seqlen_q, step = self.visibility.seqlen_q, self.config.block_q
        for i0 in range(0, seqlen_q, step):
            yield QueryTile(self, i0, min(i0 + step, seqlen_q))

    def rows(self, t: Tensor) -> Tensor:
        """This segment's part of a query-shaped tensor, as a view (batch, heads, seqlen_q, dim)."""
        return self._slice(t, self.segment.rows_q, self.problem.is_packed)

    def key_rows(self, t: Tensor) -> Tensor:
        """This segment's part of a key-shaped tensor, as a view (batch, kv heads, seqlen_k, dim)."""
        return self._slice(t, self.segment.rows_k, self.problem.has_packed_keys)

    def _slice(self, t: Tensor, rows: slice, is_packed: bool) -> Tensor:
        if is_packed:
            return t[rows].transpose(0, 1)[None]
        return self.entries(t)[:, rows].transpose(1, 2)

    def entries(self, t: Tensor) -> Tensor:
        """This segment's batch entries of a tensor that begins with them."""
        return t[self.segment.sequences.start : self.segment.sequences.stop]

    @property
    def key_start(self) -> int:
        """Where the first key stands in tensors that have a place for every key of a batch entry."""
        return 0 if self.problem.has_packed_keys else self.segment.rows_k.start

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

    def lse_rows(self, t: Tensor) -> Tensor:
        """This segment's part of lse, as a view (batch, heads, seqlen_q)."""
        if self.problem.is_packed:
            return t[None, :, self.segment.rows_q]
        return self.entries(t)

    def fold(self, t: Tensor) -> Tensor:
        """(batch, heads, rows, dim) -> [batch * kv heads, group * rows, dim] in the compute dtype."""
        n = t.shape[0] * self.problem.num_kv_heads
        return t.to(self.problem.compute_dtype).reshape(n, self.problem.group_size * t.shape[2], t.shape[3])

    def key(self, j0: int, j1: int) -> Tensor:
        inputs = self.inputs
        return self._key_tile(inputs.key, self.key_view, inputs.key_scale, j0, j1)  # [n, block_k, head_dim]

    def value(self, j0: int, j1: int) -> Tensor:
        inputs = self.inputs
        return self._key_tile(inputs.value, self.value_view, inputs.value_scale, j0, j1)  # [..., head_dim_v]

    def value_scale(self, j0: int) -> Tensor:
        """Of 8-bit values: that of the tile from j0 on [n, 1, 1]."""
        return self.rounded.value_scale[:, :, j0 // self.rounded.block_rows].reshape(-1, 1, 1)

    def _rounded(self) -> Operands:
        """The segment's rows in 8 bits."""
        problem, inputs, query = self.problem, self.inputs, self.query_rows
        if problem.is_in_blocks:
            return operands_in_blocks(problem, inputs, self.segment)
        key, value, seqlen_k = self.key_view, self.value_view, self.visibility.seqlen_k
        if key is None or value is None:
            key = self._gather_pages(inputs.key, inputs.key_scale, 0, seqlen_k)
            value = self._gather_pages(inputs.value, None, 0, seqlen_k)
        if inputs.value_scale is None:
            return operands(problem.precision, query, key, value)
        size = problem.page_size or 1
        pages = inputs.page_table[self.segment.sequences.start, : -(-seqlen_k // size)]  # type: ignore[index]
        scale = inputs.value_scale[pages.long()]
        return operands_of_pages(problem.precision, query, key, value, scale, size)

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


class QueryTile:
    """Queries [i0, i1) of a segment, and their scores; what is theirs is folded [n, group * block_q, ...]."""

    def __init__(self, tiles: Tiles, i0: int, i1: int) -> None:
        self.tiles, self.i0, self.i1 = tiles, i0, i1
        self.problem, self.inputs, self.visibility = tiles.problem, tiles.inputs, tiles.visibility

    @functools.cached_property
    def q(self) -> Tensor:
        """The queries, times the softmax scale."""
        return self.tiles.fold(self.tiles.query_rows[:, :, self.i0 : self.i1]) * self.problem.scale

    def fold(self, t: Tensor) -> Tensor:
        """The tile's part of a query-shaped tensor."""
        return self.tiles.fold(self.tiles.rows(t)[:, :, self.i0 : self.i1])

    def fold_lse(self, t: Tensor) -> Tensor:
        """The tile's part of a tensor like lse, as a column [n, group * block_q, 1]."""
        return self.tiles.fold(self.tiles.lse_rows(t)[:, :, self.i0 : self.i1, None])

    def per_head(self, t: Tensor) -> Tensor:
        """[batch * kv heads, group * rows, cols] -> the same memory as (batch, heads, rows, cols)."""
        sequences = len(self.tiles.segment.sequences)
        return t.view(sequences, self.problem.num_heads, self.i1 - self.i0, t.shape[-1])

    def store(self, t: Tensor, tile: Tensor) -> None:
        """Write a folded tile into a query-shaped tensor."""
        rows = self.tiles.rows(t)[:, :, self.i0 : self.i1]
        rows.copy_(tile.reshape(rows.shape))

    def store_lse(self, t: Tensor, column: Tensor) -> None:
        """Write a folded column into a tensor like lse."""
        self.tiles.lse_rows(t)[:, :, self.i0 : self.i1] = self.per_head(column)[..., 0]

    def shift(self, lse: Tensor, residual: Tensor | None) -> Shift:
        """`shift_and_factor` of each row."""
        return shift_and_factor(self.fold_lse(lse), None if residual is None else self.fold_lse(residual))

    def initial_statistics(self) -> tuple[Tensor, Tensor]:
        """m = -inf and l = 0; with sinks, the state after a key of logit `sink` and value 0."""
        if self.inputs.sinks is None:
            m = self.q.new_full((*self.q.shape[:2], 1), NEG_INF)
            return m, torch.zeros_like(m)
        return self.sinks(), torch.ones_like(self.q[..., :1])

    def sinks(self) -> Tensor:
        """Each row's sink logit [n, group * block_q, 1]."""
        sinks = self.inputs.sinks.to(self.problem.compute_dtype)  # type: ignore[union-attr]
        shape = len(self.tiles.segment.sequences), -1, self.i1 - self.i0, 1
        return self.tiles.fold(sinks[None, :, None, None].expand(shape))

    def sink_weights(self, shift: Shift) -> Tensor:
        """Each row's weight of its sink, 0 without sinks [n, group * block_q, 1]."""
        if self.inputs.sinks is None:
            return torch.zeros_like(shift[0])
        return weights(self.sinks().clone(), *shift)

    def add_sinks(self, total: Tensor, column: Tensor) -> None:
        """Add up by heads what belongs to each row's sink [n, group * block_q, 1]."""
        total += self.per_head(column)[..., 0].sum((0, 2))

    def key_tiles(self) -> Iterator[tuple[int, int]]:
        """Key tiles that the queries can see; the first starts at the first visible key.

        With functions, the others start where the map of tiles has them.
        """
        k0, k1 = self.visibility.key_range(self.i0, self.i1)
        if self.tiles.functions is not None:
            yield from self.tiles.functions.visible_tiles(self.i0, k0, k1)
            return
        step = self.tiles.config.block_k
        first = k0 // step * step if self.problem.is_8_bit else k0  # no tile has keys of two scales
        for j0 in range(first, k1, step):
            yield max(j0, k0), min(j0 + step, k1)

    def scores(self, j0: int, j1: int) -> ScoreTile:
        """Those of the keys [j0, j1)."""
        inputs, softcap, tile = self.inputs, self.problem.softcap, (self.i0, self.i1, j0, j1)
        s = torch.bmm(self.q, self.tiles.key(j0, j1).mT)  # [n, group * block_q, block_k]
        tanh = None
        if softcap > 0:
            tanh = torch.tanh(s / softcap)
            s = softcap * tanh
        by_head = self.per_head(s)
        if inputs.bias is not None:
            by_head += self.part(inputs.bias, j0, j1)
        if inputs.alibi_slopes is not None:
            by_head -= self._alibi(inputs.alibi_slopes, j0, j1)
        functions = self.tiles.functions
        function = None if functions is None else FunctionTile(functions, by_head, tile)
        if self.visibility.tile_kind(*tile) is TileKind.EDGE:
            by_head.masked_fill_(~self.visibility.tile_mask(*tile, s.device), NEG_INF)
        if inputs.mask is not None:
            by_head.masked_fill_(~self.part(inputs.mask, j0, j1), NEG_INF)
        if function is not None:
            function.check_indices(by_head)
        return ScoreTile(s, tanh, function)

    def _alibi(self, slopes: Tensor, j0: int, j1: int) -> Tensor:
        slopes = slopes.to(self.problem.compute_dtype)
        if slopes.ndim == 2:
            slopes = self.tiles.entries(slopes)
        return slopes[..., None, None] * self.distance(j0, j1)

    def distance(self, j0: int, j1: int) -> Tensor:
        """How far each key is from each query's causal position [block_q, block_k]."""
        device = self.inputs.query.device
        return self.visibility.relative_position(self.i0, self.i1, j0, j1, device).abs()

    def add_bias(self, total: Tensor, tile: Tensor, j0: int, j1: int) -> None:
        """Add a folded tile to what is shaped like the bias, summed where that is broadcast."""
        part = self.part(total, j0, j1)
        part += self.per_head(tile).sum_to_size(part.shape)

    def part(self, t: Tensor, j0: int, j1: int) -> Tensor:
        """The part of a mask or bias that broadcasts to (batch, heads, seqlen_q, seqlen_k)."""
        if t.shape[0] > 1:
            t = self.tiles.entries(t)
        if t.shape[2] > 1:
            t = t[:, :, self.i0 : self.i1]
        start = self.tiles.key_start
        return t[..., start + j0 : start + j1] if t.shape[3] > 1 else t

    def keep(self, j0: int, j1: int) -> Tensor | None:
        """Dropout factor 0 or 1 / (1 - rate(dropout_p)), folded like the scores; None without dropout."""
        problem, seed = self.problem, self.inputs.dropout_seed
        if problem.dropout_p == 0 or seed is None:
            return None
        rows = self.tiles.segment.sequences, problem.num_heads, self.i0, self.i1
        kept = keep_mask(seed, problem.dropout_p, *rows, j0, j1)
        return self.tiles.fold(kept) / (1 - rate(problem.dropout_p))


def shift_and_factor(lse: Tensor, residual: Tensor | None = None) -> Shift:
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


def new_gradients(problem: AttentionProblem, inputs: Inputs, of_all_captured: bool = False) -> Gradients:
    """Zeros, to which tiles add: for query, key and value in their gradients' dtypes, for bias and sinks in
    the scores'.

    For captured floats in float64, if one of them wants a gradient, or `of_all_captured`.
    """
    floats = inputs.captured_floats
    wants = of_all_captured or (problem.functions is not None and decode(problem.functions).wants_grad)
    query, key, value = (t.new_zeros(t.shape, dtype=problem.gradient_dtype(t.dtype)) for t in inputs[:3])
    bias, sinks = (
        None if t is None else torch.zeros_like(t, dtype=problem.compute_dtype)
        for t in (inputs.bias, inputs.sinks)
    )
    captured = torch.zeros_like(floats, dtype=torch.float64) if floats is not None and wants else None
    return Gradients(query, key, value, bias, sinks, captured)


def in_own_dtypes(problem: AttentionProblem, gradients: Gradients, inputs: Inputs) -> Gradients:
    """Each in the dtype of its input, or that of scores if the problem asks for it."""
    found = {name: g for name, g in gradients._asdict().items() if g is not None}
    dtypes = {name: problem.gradient_dtype(getattr(inputs, name).dtype) for name in found}
    return gradients._replace(**{name: g.to(dtypes[name]) for name, g in found.items()})
