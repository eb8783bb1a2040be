"""The forward with products of bfloat16: `forward.py` with other factors, sums and weights.

K, and Q and V transposed, stay bfloat16; P is rounded to it; sums and the softmax are float32. With
float32 and float16 each of these is several matrices, the numbers' terms (`CutForwardKernel`):

    q_t   : pairs of q^T, not scaled                                             [head_dim / 2, block_q]
    k, v_t: rows of k and of v^T                        [BLOCK_K, head_dim], [head_dim_v, BLOCK_K]
    s_t   = k q_t, 32 keys at a time; the scale comes with the exponential
    p_t   : pairs of p^T                                                         [BLOCK_K / 2, block_q]
    acc_t = c acc_t, where some c is not 1;  acc_t += v_t p_t, into what is stored
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from tilewise.cpu.dsl.bf16_products import (
    LANES,
    TILE,
    cut,
    pair_rows,
    paired,
    product_of,
    row_taker,
    tile_registers,
    words,
)
from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.lanes import any_lane
from tilewise.cpu.dsl.memory import Rows
from tilewise.cpu.dsl.numerics import LN_2, LOG2_E, exp2, exp_avx512, quotient
from tilewise.cpu.dsl.vector import Operand, Value, Var, fma, maximum, minimum, select
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.host.compile import Target
from tilewise.cpu.kernels.common.dropout import GROUP, TileDropout
from tilewise.cpu.kernels.common.scores import TileScores, has_options
from tilewise.cpu.kernels.common.tiles import (
    INF,
    Grid,
    Head,
    Scratch,
    Shape,
    build_kernel,
    column_chunks,
    transpose_rows,
)
from tilewise.cpu.kernels.forward import ForwardKernel, Sums, Tile, weighted

DEGREES = {"bf16": 4, "f16": 4, "f32": 5}  # of 2^f; 4 is off by 5e-6, 5 by 8e-8


class BFloat16ForwardKernel(ForwardKernel):
    """The steps that differ."""

    # Of large heads acc comes and goes less often; of small ones P and s_t stay in L1.
    key_blocks = (128, 128), (128, 256), (64, 128), (64, 256)
    most_tiles = 32
    converting = 60
    key_share = 4  # part of the L2 cache for K and V of a block: a quarter
    q_factor: Operand | None = None  # of q before it is stored

    def reserve(self, scratch: Scratch) -> None:
        shape = self.shape
        self.product = product_of(shape.target)
        self.key_group = TILE
        key_bytes = (
            shape.target.l2_bytes // self.key_share
        )  # K and V of a block that all tiles of an item go through
        each = range(shape.config.terms)
        blocks = max(1, key_bytes // (2 * len(each) * shape.block_k * (shape.pad + shape.pad_v)))
        self.load_k = blocks * shape.block_k
        self.all_k = [scratch.rows(self.load_k, shape.pad, "i16") for _ in each]
        self.all_v_t = [scratch.rows(blocks * shape.pad_v, shape.block_k, "i16") for _ in each]
        self.v = [scratch.rows(TILE, shape.pad_v, "i16") for _ in each]
        self.v_pairs = scratch.rows(TILE // 2, shape.pad_v)
        self.s_t = scratch.rows(shape.block_k, shape.block_q)
        self.p_t = [self.s_t, *(scratch.rows(shape.block_k // 2, shape.block_q) for _ in each[1:])]
        self.q = [scratch.rows(shape.block_q, shape.pad, "i16") for _ in each]
        self.scale = self.args.vector("q_factor", shape)
        self.take_rows = row_taker(shape, scratch, self.args.not_cut)

    def run(self) -> None:
        with tile_registers(self.scratch):
            super().run()

    def load_queries(self, head: Head, tile: Tile) -> None:
        shape = self.shape
        n, dim = head.seqlen_q - tile.q0, shape.config.head_dim
        self.take_rows(self.q, head.query_rows("q", tile.q0), n, shape.block_q, dim, self.q_factor)
        for q_t, q in zip(self.query_pieces(tile), self.q):
            transpose_rows(shape, q_t, words(q), shape.block_q, shape.pad // 2)

    def query_pieces(self, tile: Tile) -> list[Rows]:
        shape = self.shape
        return [tile.q_t.at(n * shape.pad // 2, 0) for n in range(shape.config.terms)]

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        shape, config = self.shape, self.shape.config
        count = (n + (TILE - 1)) & -TILE
        for j in loop(0, count, TILE):
            k = [part.at(j, 0) for part in self.all_k]
            self.take_rows(k, head.key_rows("k", j0 + j), n - j, TILE, config.head_dim)
            self.take_rows(self.v, head.key_rows("v", j0 + j), n - j, TILE, config.head_dim_v)
            block, column = j // shape.block_k * shape.pad_v, j % shape.block_k
            for all_v_t, v in zip(self.all_v_t, self.v):
                pair_rows(self.v_pairs, v, TILE)
                v_t = words(all_v_t.at(block, column))
                transpose_rows(shape, v_t, self.v_pairs, TILE // 2, shape.pad_v)

    def attend(self, head: Head, tile: Tile, j0: Value) -> None:
        shape = self.shape
        k0, k1 = head.key_range(tile.q0, minimum(tile.q0 + shape.block_q, head.seqlen_q))
        first, last = maximum(0, k0 - j0) & -shape.block_k, minimum(k1 - j0, self.load_k)
        for j in loop(first, last, shape.block_k):
            self.k = [part.at(j, 0) for part in self.all_k]
            self.v_t = [part.at(j // shape.block_k * shape.pad_v, 0) for part in self.all_v_t]
            super().attend(head, tile, j0 + j)

    def score_keys(self, head: Head, tile: Tile, j0: Value, first: Value, n: Value) -> Sequence[Operand]:
        """s_t = k q_t, with every option if there are some; their maximum over keys."""
        shape = self.shape
        self.scores.load(head, tile.q0, j0, n)
        scores = self.scores.at(head, tile.q0, j0)
        highest = [Var(shape.constant(-INF)) for _ in shape.columns()]
        scale, q_t = self.scale, self.query_pieces(tile)
        for j in loop(first, n, TILE):
            k = [part.at(j, 0) for part in self.k]
            self.product(self.s_t.at(j, 0), k, q_t, (0, shape.pad), shape.vectors, False)
            for r in loop(j, j + TILE, shape.rows):
                finish_scores(shape, scores, self.s_t.at(r, 0), r, scale)
                for i in range(shape.rows):
                    for v, c in enumerate(shape.columns()):
                        highest[v].set(maximum(highest[v], self.s_t.at(r, 0)[i, c].load(shape.lanes)))
        if self.scores.has_options:
            scale = shape.constant(1.0)
        return [x * scale for x in highest]

    def weigh(self, m: list[Value], dropout: TileDropout | None, first: Value, n: Value) -> Sums:
        """p_t = exp(s_t - m), in pairs of keys, and its sums over keys; then p_t = 0 where dropped."""
        shape = self.shape
        scale = shape.constant(1.0) if self.scores.has_options else self.scale
        l, e = self.new_sums()
        for j in loop(first, (n + (TILE - 1)) & -TILE, 4):
            kept = dropout and dropout.kept(j, GROUP)
            for i in (0, 2):
                for v, c in enumerate(shape.columns()):
                    s = (self.s_t.at(j, 0)[i + r, c].load(shape.lanes) for r in range(2))
                    below = [fma(x, scale, -m[v]) for x in s]
                    low, high = map(self.power, below)
                    l[v].set(l[v] + (low + high))
                    if self.has_entropy:
                        e[v].set(weighted(high, below[1], weighted(low, below[0], e[v])))
                    if kept:
                        low, high = (select(kept[i + r][v], p, 0.0) for r, p in enumerate((low, high)))
                    for p_t, (x, y) in zip(self.p_t, cut((low, high), len(self.p_t))):
                        pairs = paired(x, y, is_exact=p_t is not self.p_t[-1])
                        p_t.at(j // 2, 0)[i // 2, c].store(pairs)
        return l, e

    @property
    def degree(self) -> int:
        """Of the exponential's polynomial."""
        return DEGREES["f32" if self.has_entropy else self.shape.config.kind]

    def power(self, x: Operand) -> Value:
        """exp(x)."""
        return exp2(x * LOG2_E, self.degree)

    def add_values(self, head: Head, tile: Tile, correction: list[Value], first: Value, n: Value) -> None:
        shape = self.shape
        with when(any_of(c < 1.0 for c in correction)):
            for d in loop(0, shape.pad_v):
                for v, c in enumerate(shape.columns()):
                    acc = tile.acc_t[d, c]
                    acc.store(acc.load(shape.lanes) * correction[v])
        for d in loop(0, shape.pad_v, TILE):
            v_t = [part.at(d, 0) for part in self.v_t]
            self.product(tile.acc_t.at(d, 0), v_t, self.p_t, (first, n), shape.vectors, True)


class CutForwardKernel(BFloat16ForwardKernel):
    """float32 and float16, whose numbers are cut into three and two of bfloat16.

    Products are as exact as in float32, of which rounding them takes none: q is scaled before it is cut, and
    the weights are exponentials of differences. Six (three) products at the tile registers' speed take half
    as long as one in vectors.
    """

    key_share = 8  # as fast as a quarter, and less memory
    converting = 24

    def reserve(self, scratch: Scratch) -> None:
        super().reserve(scratch)
        shape = self.shape
        self.pv = scratch.rows(TILE, shape.block_q)
        self.unit = score_unit(shape.config)
        self.q_factor, self.scale = self.scale * (1 / self.unit), shape.constant(1.0)

    def power(self, x: Operand) -> Value:
        """exp(x), of x in its unit."""
        exp = exp_avx512 if self.unit == 1.0 else exp2
        return exp(x, self.degree)

    def add_values(self, head: Head, tile: Tile, correction: list[Value], first: Value, n: Value) -> None:
        """Each block's sum starts from 0: float32 rounds less in two levels of sums."""
        shape = self.shape
        for d in loop(0, shape.pad_v, TILE):
            self.product(
                self.pv, [part.at(d, 0) for part in self.v_t], self.p_t, (first, n), shape.vectors, False
            )
            for r in loop(0, TILE):
                for v, c in enumerate(shape.columns()):
                    acc = tile.acc_t.at(d, 0)[r, c]
                    acc.store(fma(acc.load(shape.lanes), correction[v], self.pv[r, c].load(shape.lanes)))


class OneBlockForwardKernel(BFloat16ForwardKernel):
    """All keys are in one block: P is transposed instead of V, and out comes as rows.

    v   : pairs of v                                                             [block_k / 2, head_dim_v]
    p   : rows of p                                                              [block_q, block_k]
    out = p v / l
    """

    converting = 24

    def reserve(self, scratch: Scratch) -> None:
        super().reserve(scratch)
        shape = self.shape
        self.load_k = shape.block_k
        self.pairs = [scratch.rows(shape.block_k // 2, shape.pad_v) for _ in self.v]
        self.p = [scratch.rows(TILE, shape.block_k, "i16") for _ in self.v]
        self.out = scratch.rows(TILE, shape.pad_v)
        self.divisor, self.inverse = (scratch.rows(1, shape.block_q) for _ in range(2))

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        config = self.shape.config
        for j in loop(0, n, TILE):
            k = [part.at(j, 0) for part in self.all_k]
            self.take_rows(k, head.key_rows("k", j0 + j), n - j, TILE, config.head_dim)
            self.take_rows(self.v, head.key_rows("v", j0 + j), n - j, TILE, config.head_dim_v)
            for pairs, v in zip(self.pairs, self.v):
                pair_rows(pairs.at(j // 2, 0), v, TILE)

    def add_values(self, head: Head, tile: Tile, correction: list[Value], first: Value, n: Value) -> None:
        """out = p v / l."""
        shape, dim = self.shape, self.shape.config.head_dim_v
        height = (n + (TILE - 1)) // TILE * LANES
        for p, p_t in zip(self.p, self.p_t):
            transpose_rows(shape, words(p), p_t, height, shape.block_q)
        for c in loop(0, shape.pad_v, 2 * LANES):
            v = [pairs.at(0, c) for pairs in self.pairs]
            self.product(self.out.at(0, c), self.p, v, (first, n), TILE // shape.lanes, False)
        for column in shape.columns():
            for area, x in zip((self.divisor, self.inverse), self.divide(tile, column)):
                area[0, column].store(x)
        target = head.query_rows("out", tile.q0)
        for i in loop(0, minimum(head.seqlen_q - tile.q0, shape.block_q)):
            row = target(i)
            for column, width in column_chunks(0, dim, shape.lanes):
                l, inverse = (area[0, i].splat(width) for area in (self.divisor, self.inverse))
                row[column].store(quotient(self.out[i, column].load(width), l, inverse))

    def write_out(self, head: Head, tile: Tile, n: Value) -> None:
        """0 if the tile sees no key."""
        k0, k1 = head.key_range(tile.q0, minimum(tile.q0 + self.shape.block_q, head.seqlen_q))
        with when(k0 >= k1):
            super().write_out(head, tile, n)


class OneBlockCutForwardKernel(OneBlockForwardKernel, CutForwardKernel):
    """Of float32 and float16."""


def score_unit(config: Config) -> float:
    """Of scores that are made of terms: log 2 where they need nothing else, as 2^x is cheaper than e^x."""
    return 1.0 if has_options(config) or config.has_sinks else LN_2


def finish_scores(shape: Shape, scores: TileScores, s_t: Rows, j: Value, scale: Value) -> None:
    """Products of the keys [j, j + rows) at s_t -> scores with their options, in place.

    Without options they stay products, and the scale is left to the exponential.
    """
    if scores.scores.has_options:
        s = _variables(shape, s_t, scale)
        scores.apply(s, j)
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


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """See `build_kernel`."""
    among, alone = (
        (BFloat16ForwardKernel, OneBlockForwardKernel)
        if config.terms == 1
        else (CutForwardKernel, OneBlockCutForwardKernel)
    )
    return build_kernel(alone if config.key_block else among, config, target)
