"""The backward with products of bfloat16: `backward.py` with other factors, sums and weights.

A tile of queries is made of parts of 32; a part meets the keys that it sees, its P and dS are rounded to
bfloat16 and stay until the tile's sums over queries are due. dS is kept twice, as either factor. With float32
and float16 each factor is several matrices, the numbers' terms (`CutBackwardKernel`):

    q_t, do_t: pairs of q^T, do^T; qs, dos: pairs of q, do    [head_dim / 2, block_q], [block_q / 2, head_dim]
    k, v, k_t: rows of k, v, k^T                              [key_block, head_dim], [head_dim, key_block]
    for each part:  s_t = k q_t;  dp_t = v do_t (dropout as in `backward.py`)      [BLOCK_K, 32]
                    p, ds = rows of p_t, ds_t                                      [BLOCK_K, block_q]
                    ds_pairs = pairs of ds_t;  dq_t += k_t ds_pairs                [BLOCK_K / 2, block_q]
    dv += p dos;  dk += ds qs
"""

from __future__ import annotations

from dataclasses import replace

from tilewise.cpu.dsl.bf16_products import (
    LANES,
    TILE,
    cut,
    pair_rows,
    paired,
    product_of,
    rounded,
    row_taker,
    tile_registers,
    words,
)
from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.memory import Rows
from tilewise.cpu.dsl.numerics import LOG2_E, exp, exp2, exp_avx512, product
from tilewise.cpu.dsl.vector import Operand, Scalar, Value, absolute, fma, like, maximum, minimum, select
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.host.compile import Target
from tilewise.cpu.kernels.backward import BackwardKernel
from tilewise.cpu.kernels.common.dropout import TileDropout
from tilewise.cpu.kernels.common.scores import Scores, TileScores
from tilewise.cpu.kernels.common.sums import fill_zero
from tilewise.cpu.kernels.common.tiles import (
    INF,
    Head,
    Scratch,
    Shape,
    build_kernel,
    load_rows,
    transpose_rows,
)
from tilewise.cpu.kernels.forward_bf16 import DEGREES, finish_scores, score_unit


class BFloat16BackwardKernel(BackwardKernel):
    """The steps that differ."""

    key_blocks = (64, 64), (128, 256), (128, 128), (32, 64)  # P and dS, in so many terms, stay near
    q_factor: Operand | None = None  # of q before it is stored

    def reserve(self, scratch: Scratch) -> None:
        shape, block_q = self.shape, self.shape.block_q
        self.product = product_of(shape.target)
        self.key_group = TILE
        self.wide = TILE // shape.lanes  # vectors
        self.part = part = Shape(replace(shape.config, vectors=self.wide), shape.target, self.key_blocks)

        def matrices(rows: int, width: int, kind: str = "") -> list[Rows]:
            return [scratch.rows(rows, width, kind) for _ in range(shape.config.terms)]

        self.k, self.v = (matrices(self.key_block, width, "i16") for width in (shape.pad, shape.pad_v))
        self.k_t = matrices(shape.pad, self.key_block, "i16")
        self.k_pairs = scratch.rows(TILE // 2, shape.pad)
        self.q, self.do = (matrices(block_q, width, "i16") for width in (shape.pad, shape.pad_v))
        self.q_t, self.do_t = (matrices(width // 2, block_q) for width in (shape.pad, shape.pad_v))
        self.qs, self.dos = (matrices(block_q // 2, width) for width in (shape.pad, shape.pad_v))
        self.out, self.do_rows = (scratch.rows(shape.lanes, shape.pad_v) for _ in range(2))
        self.s_t, self.dp_t = (scratch.rows(TILE, TILE) for _ in range(2))
        self.dbias_t = scratch.rows(shape.block_k if self.config.dbias_kind else 0, TILE)
        self.p, self.ds = (matrices(shape.block_k, block_q, "i16") for _ in range(2))
        self.ds_pairs = matrices(shape.block_k // 2, block_q)
        self.scores = Scores(part, scratch, with_slopes=True)
        self.scale = self.args.vector("q_factor", part)
        self.take_rows = row_taker(shape, scratch, self.args.not_cut)

    def run(self) -> None:
        with tile_registers(self.scratch):
            super().run()

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        shape, config = self.shape, self.config
        count = (n + (TILE - 1)) & -TILE
        self.take_rows(self.k, head.key_rows("k", j0), n, count, config.head_dim)
        self.take_rows(self.v, head.key_rows("v", j0), n, count, config.head_dim_v)
        for j in loop(0, count, TILE):
            for k, k_t in zip(self.k, self.k_t):
                pair_rows(self.k_pairs, k.at(j, 0), TILE)
                transpose_rows(shape, words(k_t.at(0, j)), self.k_pairs, TILE // 2, shape.pad)
        for area in (self.dk, self.dv):
            fill_zero(shape, area, count)

    def load_queries(self, head: Head, q0: Value) -> Scalar:
        shape, config = self.shape, self.config
        n = head.seqlen_q - q0
        count = (minimum(n, shape.block_q) + (TILE - 1)) & -TILE
        for parts, name, dim, factor, turned, pairs in (
            (self.q, "q", config.head_dim, self.q_factor, self.q_t, self.qs),
            (self.do, "do", config.head_dim_v, None, self.do_t, self.dos),
        ):
            self.take_rows(parts, head.query_rows(name, q0), n, count, dim, factor)
            for rows, rows_t, row_pairs in zip(parts, turned, pairs):
                transpose_rows(shape, rows_t, words(rows), count, rows.stride // 2)
                pair_rows(row_pairs, rows, count)
        for i in loop(0, count, shape.lanes):
            for rows, name in ((self.out, "out"), (self.do_rows, "do")):
                load_rows(shape, rows, head.query_rows(name, q0 + i), n - i, shape.lanes, config.head_dim_v)
            self.store_delta(i, self.out, self.do_rows)
        return count

    def step(self, head: Head, q0: Value, j0: Value, j: Value, end: Value) -> None:
        shape = self.shape
        q_begin, q_end = head.query_range(j0 + j, j0 + j + end)
        first = maximum(0, q_begin - q0) & -TILE
        last = (minimum(q_end - q0, shape.block_q) + (TILE - 1)) & -TILE
        for c in loop(first, last, TILE):
            k0, k1 = head.key_range(q0 + c, minimum(q0 + c + TILE, head.seqlen_q))
            a = maximum(0, k0 - (j0 + j)) & -TILE
            b = minimum(end, k1 - (j0 + j))
            self.weigh(head, q0, j0, j, c, a, b)
            self.hide_rest(c, a, b, end)
            for d in loop(0, shape.pad, TILE):
                self.add_sums(self.dq_t.at(d, c), at(self.k_t, d, j), at(self.ds_pairs, 0, c), (a, b))
        with when(first < last):
            self.add_over_queries((first, last), j, end)

    def weigh(self, head: Head, q0: Value, j0: Value, j: Value, c: Value, a: Value, b: Value) -> None:
        """p, ds for the part at c and the keys j0 + j + [a, b), and 0 up to a multiple of 32."""
        shape = self.shape
        self.scores.load(head, q0 + c, j0 + j, b)
        scores = self.scores.at(head, q0 + c, j0 + j)
        dropout = self.dropout.at(self.part, head, q0 + c, j0 + j) if self.dropout else None
        for r in loop(a, (b + (TILE - 1)) & -TILE, TILE):
            self.product(self.s_t, at(self.k, j + r, 0), at(self.q_t, 0, c), (0, shape.pad), self.wide, False)
            self.product(
                self.dp_t, at(self.v, j + r, 0), at(self.do_t, 0, c), (0, shape.pad_v), self.wide, False
            )
            self.round_tile(scores, dropout, r, c)
        if self.config.dbias_kind:
            self.scores.add_gradient(head, self.dbias_t, q0 + c, j0 + j, a, b)

    def round_tile(self, scores: TileScores, dropout: TileDropout | None, first: Value, c: Value) -> None:
        """p = exp(s_t - lse) exp(-residual), ds = p (dp_t - delta) of 32 keys, in the products' forms."""
        part, lanes, columns = self.part, self.part.lanes, self.part.columns()
        statistics = (self.lse, self.factor, self.delta)
        lse, factor, delta = ([area.at(0, c)[0, x].load(lanes) for x in columns] for area in statistics)
        for r in loop(first, first + TILE, part.rows):
            s_t, dp_t = (area.at(r % TILE, 0) for area in (self.s_t, self.dp_t))
            finish_scores(part, scores, s_t, r, self.scale)
            kept = dropout and dropout.kept(r, part.rows)
            for i in range(0, part.rows, 2):
                ds_terms = []
                for k in (i, i + 1):
                    s = [s_t[k, x].load(lanes) for x in columns]
                    dp = [dp_t[k, x].load(lanes) for x in columns]
                    p = [self.weight(*x) for x in zip(s, lse, factor)]
                    if self.dropout and kept:
                        dp = [select(z, x * self.dropout.inverse_keep, 0.0) for z, x in zip(kept[k], dp)]
                    ds = [w * (x - y) for w, x, y in zip(p, dp, delta)]
                    self.keep_bias_gradient(r, k, ds)
                    if kept:
                        p = [select(z, x, 0.0) for z, x in zip(kept[k], p)]
                    ds_terms.append(list(cut(ds, len(self.ds))))
                    for areas, parts in ((self.p, cut(p, len(self.p))), (self.ds, ds_terms[-1])):
                        for area, term in zip(areas, parts):
                            for x, low, high in zip(columns[::2], term[::2], term[1::2]):
                                area.at(r, c)[k, x].store(rounded(low, high))
                for area, low, high in zip(self.ds_pairs, *ds_terms):
                    is_exact = area is not self.ds_pairs[-1]
                    for v, x in enumerate(columns):
                        area.at(r // 2, c)[i // 2, x].store(paired(low[v], high[v], is_exact))

    def weight(self, s: Value, lse: Value, factor: Value) -> Value:
        """factor * exp(s - lse), s without its scale if there are no options."""
        scale = self.shape.constant(1.0) if self.scores.has_options else self.scale
        return exp2(fma(s, scale, -lse) * LOG2_E, DEGREES[self.config.kind]) * factor

    def shift_and_factor(self, lse: Value, residual: Value) -> tuple[Value, Value]:
        return lse, exp(-residual, self.shape.exp_degree)

    def keep_bias_gradient(self, r: Value, k: int, ds: list[Value]) -> None:
        """dbias is ds between the derivatives of score function and softcap, which ds gets here."""
        for v, x in enumerate(self.part.columns()):
            ds[v] = self.scores.before_function(ds[v], r + k, x)
            if self.config.dbias_kind:
                self.dbias_t.at(r, 0)[k, x].store(ds[v])
            ds[v] = self.scores.before_cap(ds[v], r + k, x)

    def hide_rest(self, c: Value, a: Value, b: Value, end: Value) -> None:
        """p = ds = 0 for the keys of [0, end) that the part at c does not see, though others do."""
        zero = self.shape.constant(0.0)
        all_end, seen_end = ((x + (TILE - 1)) & -TILE for x in (end, b))
        for start, stop in ((0, minimum(a, all_end)), (maximum(0, seen_end), all_end)):
            for r in loop(start, stop):
                for rows in (*self.p, *self.ds):
                    for x in range(0, TILE // 2, self.shape.lanes):
                        words(rows).at(r, c // 2)[0, x].store(zero)

    def add_over_queries(self, queries: tuple[Value, Value], j: Value, end: Value) -> None:
        """dv += p dos; dk += ds qs, over the queries that see some of these keys."""
        for weights, pairs, gradient in ((self.p, self.dos, self.dv), (self.ds, self.qs, self.dk)):
            for r in loop(0, end, TILE):
                for c in loop(0, gradient.stride, TILE):
                    self.add_sums(gradient.at(j + r, c), at(weights, r, 0), at(pairs, 0, c), queries)

    def add_sums(self, target: Rows, a: list[Rows], b: list[Rows], k: tuple[Value, Value]) -> None:
        self.product(target, a, b, k, self.wide, True)


class CutBackwardKernel(BFloat16BackwardKernel):
    """float32 and float16, whose numbers are cut into three and two of bfloat16: see `CutForwardKernel`.

    q is scaled before it is cut here too, so that scores are the forward's to the last bit, however large;
    dk = ds (scale q) then wants no scale but their unit, with a softcap the softcap.
    """

    def key_bytes(self) -> int:
        shape = self.shape
        stored = 2 * shape.config.terms * (2 * shape.pad + shape.pad_v)  # K, V and K^T
        return stored + shape.item * (shape.pad + shape.pad_v)

    def reserve(self, scratch: Scratch) -> None:
        super().reserve(scratch)
        self.sums = scratch.rows(TILE, TILE)
        self.unit = score_unit(self.config)
        self.q_factor, self.scale = self.scale * (1 / self.unit), self.shape.constant(1.0)

    def weight(self, s: Value, lse: Value, factor: Value) -> Value:
        """factor * exp(s - lse), in units of log 2 factor * 2^(s - lse / log 2)."""
        degree = DEGREES[self.config.kind]
        power = exp_avx512(s - lse, degree) if self.unit == 1.0 else exp2(s - lse * LOG2_E, degree)
        return power * factor

    def shift_and_factor(self, lse: Value, residual: Value) -> tuple[Value, Value]:
        """Also what rounding has left out of lse / log 2, if that is the unit."""
        if self.unit == 1.0:
            return super().shift_and_factor(lse, residual)
        high, low = product(lse, LOG2_E)
        low = select(absolute(high) < INF, fma(residual, like(LOG2_E, residual), low), 0.0)
        return lse, exp2(-low, DEGREES[self.config.kind])

    def dk_scale(self) -> Value:
        return self.args.vector("softcap", self.shape) if self.config.has_softcap else self.scale * self.unit

    def add_sums(self, target: Rows, a: list[Rows], b: list[Rows], k: tuple[Value, Value]) -> None:
        """Sums of a block start from 0: float32 rounds less in two levels of sums."""
        self.product(self.sums, a, b, k, self.wide, False)
        for r in loop(0, TILE):
            for c in (0, LANES):
                cell = target[r, c]
                cell.store(cell.load(LANES) + self.sums[r, c].load(LANES))


def at(parts: list[Rows], row: Scalar, column: Scalar) -> list[Rows]:
    """All terms of a matrix, seen from another corner."""
    return [part.at(row, column) for part in parts]


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """See `build_kernel`."""
    return build_kernel(BFloat16BackwardKernel if config.terms == 1 else CutBackwardKernel, config, target)
