"""The forward's products in tile registers: `forward.py` with other factors, sums and weights.

K, and Q and V turned around, stay bfloat16; P is rounded to it; sums and the softmax are float32:

    q_t   : pairs of q^T, not scaled                                             [head_dim / 2, block_q]
    k, v_t: rows of k and of v^T                        [BLOCK_K, head_dim], [head_dim_v, BLOCK_K]
    s_t   = k q_t, 32 keys at a time; the scale comes with the exponential
    p_t   : pairs of p^T                                                         [BLOCK_K / 2, block_q]
    acc_t = c acc_t, where some c is not 1;  acc_t += v_t p_t, into what is stored
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

from tilewise.cpu.llvm.amx import TILE, copy_rows, pair_rows, paired, tile_registers, tile_sums, words
from tilewise.cpu.llvm.control import either, loop, when
from tilewise.cpu.llvm.dropout import GROUP, TileDropout
from tilewise.cpu.llvm.forward import ForwardKernel, Tile
from tilewise.cpu.llvm.memory import Rows
from tilewise.cpu.llvm.numerics import exp2_avx512
from tilewise.cpu.llvm.scores import TileScores
from tilewise.cpu.llvm.tiles import INF, Grid, Head, Scratch, Shape, transpose_rows
from tilewise.cpu.llvm.vector import Operand, Value, Var, absolute, any_lane, fma, maximum, minimum, select

LOG2_E = 1 / math.log(2)
DEGREE = 4
FAR = 1 << 16  # a scaled maximum beyond which one multiply-add would blur exp(s - m): its terms are 2^-24 off


class AmxForwardKernel(ForwardKernel):
    """The steps that differ."""

    most_tiles = 32  # turning V around costs as much as 60 queries

    def reserve(self, scratch: Scratch) -> None:
        shape = self.shape
        self.key_group = TILE
        key_bytes = shape.target.l2_bytes // 4  # K and V of a block that all tiles of an item go through
        blocks = max(1, key_bytes // (2 * shape.block_k * (shape.pad + shape.pad_v)))
        self.load_k = blocks * shape.block_k
        self.all_k = scratch.rows(self.load_k, shape.pad, "i16")
        self.all_v_t = scratch.rows(blocks * shape.pad_v, shape.block_k, "i16")
        self.v = scratch.rows(TILE, shape.pad_v, "i16")
        self.v_pairs = scratch.rows(TILE // 2, shape.pad_v)
        self.s_t = scratch.rows(shape.block_k, shape.block_q)
        self.p_t = self.s_t
        self.q = scratch.rows(shape.block_q, shape.pad, "i16")

    def run(self) -> None:
        with tile_registers(self.scratch):
            super().run()

    def load_queries(self, head: Head, tile: Tile) -> None:
        shape = self.shape
        n, dim = head.seqlen_q - tile.q0, shape.config.head_dim
        copy_rows(self.q, head.query_rows("q", tile.q0), n, shape.block_q, dim)
        transpose_rows(shape, tile.q_t, words(self.q), shape.block_q, shape.pad // 2)

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        shape, config = self.shape, self.shape.config
        count = (n + (TILE - 1)) & -TILE
        copy_rows(self.all_k, head.key_rows("k", j0), n, count, config.head_dim)
        for j in loop(0, count, TILE):
            copy_rows(self.v, head.key_rows("v", j0 + j), n - j, TILE, config.head_dim_v)
            pair_rows(self.v_pairs, self.v, TILE)
            block, column = j // shape.block_k * shape.pad_v, j % shape.block_k
            transpose_rows(shape, words(self.all_v_t.at(block, column)), self.v_pairs, TILE // 2, shape.pad_v)

    def attend(self, head: Head, tile: Tile, j0: Value) -> None:
        shape = self.shape
        k0, k1 = head.key_range(tile.q0, minimum(tile.q0 + shape.block_q, head.seqlen_q))
        first, last = maximum(0, k0 - j0) & -shape.block_k, minimum(k1 - j0, self.load_k)
        for j in loop(first, last, shape.block_k):
            self.k = self.all_k.at(j, 0)
            self.v_t = self.all_v_t.at(j // shape.block_k * shape.pad_v, 0)
            super().attend(head, tile, j0 + j)

    def score_keys(self, head: Head, tile: Tile, j0: Value, first: Value, n: Value) -> Sequence[Operand]:
        """s_t = k q_t, with every option if there are some; the new running maximum."""
        shape = self.shape
        self.scores.load(head, tile.q0, j0, n)
        scores = self.scores.at(head, tile.q0, j0)
        highest = [Var(shape.constant(-INF)) for _ in shape.columns()]
        scale = self.args.vector("q_factor", shape)
        for j in loop(first, n, TILE):
            tile_sums(self.s_t.at(j, 0), self.k.at(j, 0), tile.q_t, (0, shape.pad), shape.vectors, False)
            for r in loop(j, j + TILE, shape.rows):
                finish_scores(shape, scores, self.s_t.at(r, 0), r, scale)
                for i in range(shape.rows):
                    for v, c in enumerate(shape.columns()):
                        highest[v].set(maximum(highest[v], self.s_t.at(r, 0)[i, c].load(shape.lanes)))
        if self.scores.has_options:
            scale = shape.constant(1.0)
        return [maximum(tile.m[0, c].load(shape.lanes), x * scale) for c, x in zip(shape.columns(), highest)]

    def weigh(self, m: list[Value], dropout: TileDropout | None, first: Value, n: Value) -> list[Var]:
        """p_t = exp(s_t - m) and the block's sums over keys."""
        shape = self.shape
        l = [Var(shape.constant(0.0)) for _ in m]
        if self.scores.has_options:
            self.sum_weights(lambda s, v: (s - m[v]) * LOG2_E, l, dropout, first, n)
            return l
        scale = self.args.vector("q_factor", shape)
        factor, log2_m = scale * LOG2_E, [x * -LOG2_E for x in m]
        with either(any_of(absolute(x) > FAR for x in m)) as (far, near):
            with far:
                self.sum_weights(lambda s, v: (s * scale - m[v]) * LOG2_E, l, dropout, first, n)
            with near:
                self.sum_weights(lambda s, v: fma(s, factor, log2_m[v]), l, dropout, first, n)
        return l

    def sum_weights(
        self,
        exponent: Callable[[Value, int], Value],
        l: list[Var],
        dropout: TileDropout | None,
        first: Value,
        n: Value,
    ) -> None:
        """p_t = 2 ** exponent(s_t), in pairs of keys; l += p_t, and then p_t = 0 where dropped."""
        shape = self.shape
        for j in loop(first, (n + (TILE - 1)) & -TILE, 4):
            kept = dropout and dropout.kept(j, GROUP)
            for i in (0, 2):
                for v, c in enumerate(shape.columns()):
                    s = (self.s_t.at(j, 0)[i + r, c].load(shape.lanes) for r in range(2))
                    low, high = (exp2_avx512(exponent(x, v), DEGREE) for x in s)
                    l[v].set(l[v] + (low + high))
                    if kept:
                        low, high = (select(kept[i + r][v], p, 0.0) for r, p in enumerate((low, high)))
                    self.p_t.at(j // 2, 0)[i // 2, c].store(paired(low, high))

    def add_values(self, tile: Tile, correction: list[Value], first: Value, n: Value) -> None:
        shape = self.shape
        with when(any_of(c < 1.0 for c in correction)):
            for d in loop(0, shape.pad_v):
                for v, c in enumerate(shape.columns()):
                    acc = tile.acc_t[d, c]
                    acc.store(acc.load(shape.lanes) * correction[v])
        for d in loop(0, shape.pad_v, TILE):
            tile_sums(tile.acc_t.at(d, 0), self.v_t.at(d, 0), self.p_t, (first, n), shape.vectors, True)


def finish_scores(
    shape: Shape, scores: TileScores, s_t: Rows, j: Value, scale: Value, slope_of_cap: Rows | None = None
) -> None:
    """Products of the keys [j, j + rows) at s_t -> scores with their options, in place.

    Without options they stay products, and the scale is left to the exponential.
    """
    if scores.scores.has_options:
        s = _variables(shape, s_t, scale)
        scores.apply(s, j, slope_of_cap)
        _store(s_t, s)
    else:
        with when(scores.is_edge(j)):
            s = _variables(shape, s_t, shape.constant(1.0))
            scores.hide(s, j)
            _store(s_t, s)


def any_of(masks: Iterable[Value]) -> Value:
    """Whether some lane of some mask is set."""
    return functools.reduce(lambda a, b: a | b, (any_lane(mask) for mask in masks))


def _variables(shape: Shape, rows: Rows, factor: Value) -> Grid:
    cells = [[rows[r, c].load(shape.lanes) for c in shape.columns()] for r in range(shape.rows)]
    return [[Var(x * factor) for x in row] for row in cells]


def _store(rows: Rows, grid: Grid) -> None:
    for r, row in enumerate(grid):
        for v, x in enumerate(row):
            rows[r, v * x.type.count].store(x)
