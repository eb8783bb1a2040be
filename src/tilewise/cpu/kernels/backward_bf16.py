"""The backward in bfloat16: its step of a tile of queries and some keys.

A tile of queries is made of parts of 32; a part meets the keys that it sees, its P and dS are rounded to
bfloat16 and stay until the tile's sums over queries are due. dS is kept twice, as either factor.

    for each part:  s_t = k q_t;  dp_t = v do_t (dropout as in `backward.py`)      [block_k, 32]
                    p, ds = rows of p_t, ds_t                                      [block_k, block_q]
                    ds_right = pairs of ds_t;  dq_t += k_t ds_right                [block_k / 2, block_q]
    dv += p dos;  dk += ds qs
"""

from __future__ import annotations

from dataclasses import replace

from tilewise.cpu.dsl.bf16_products import TILE, cut, paired, rounded, words
from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.vector import Operand, Value, maximum, minimum, select
from tilewise.cpu.kernels.backward import BackwardKernel
from tilewise.cpu.kernels.common.dropout import TileDropout
from tilewise.cpu.kernels.common.products import at
from tilewise.cpu.kernels.common.scores import Scores, TileScores, through
from tilewise.cpu.kernels.common.tiles import Head, KeyBlocks, Scratch, Shape, round_up


class BFloat16BackwardKernel(BackwardKernel):
    """The kernel in bfloat16, or in terms of it."""

    # By terms, from 1: P and dS, in so many terms, stay near.
    key_blocks: KeyBlocks = (0, 0), (128, 256), (128, 128), (32, 64)

    def reserve(self, scratch: Scratch) -> None:
        super().reserve(scratch)
        shape = self.shape
        vectors = TILE // shape.lanes
        self.part = part = Shape(replace(shape.config, vectors=vectors), shape.target, self.key_blocks)
        self.s_t, self.dp_t = (scratch.rows(TILE, TILE) for _ in range(2))
        self.dbias_t = scratch.rows(shape.block_k if self.config.dbias_kind else 0, TILE)
        self.scores = Scores(part, scratch, with_slopes=True)
        self.scale, self.rest = self.products.scales(self.scores.has_options)

    def step(self, head: Head, q0: Value, j0: Value, j: Value, end: Value) -> None:
        shape = self.shape
        q_begin, q_end = head.query_range(j0 + j, j0 + j + end)
        first = maximum(0, q_begin - q0) & -TILE
        last = round_up(minimum(q_end - q0, shape.block_q), TILE)
        for c in loop(first, last, TILE):
            k0, k1 = head.key_range(q0 + c, minimum(q0 + c + TILE, head.seqlen_q))
            a = maximum(0, k0 - (j0 + j)) & -TILE
            b = minimum(end, k1 - (j0 + j))
            self.weigh(head, q0, j0, j, c, a, b)
            self.hide_rest(c, a, b, end)
            self.add_query_gradients(c, self.part.vectors, j, (a, b))
        with when(first < last):
            self.add_key_gradients((first, last), j, end)

    def weigh(self, head: Head, q0: Value, j0: Value, j: Value, c: Value, a: Value, b: Value) -> None:
        """p, ds for the part at c and the keys j0 + j + [a, b), and 0 up to a multiple of 32."""
        self.scores.load(head, q0 + c, j0 + j, b)
        scores = self.scores.at(head, q0 + c, j0 + j)
        dropout = self.dropout.at(self.part, head, q0 + c, j0 + j) if self.dropout else None
        for r in loop(a, round_up(b, TILE), TILE):
            for sums, keys, queries, depth in (
                (self.s_t, self.k, self.q_t, self.config.head_dim),
                (self.dp_t, self.v, self.do_t, self.config.head_dim_v),
            ):
                a_rows, b_rows, vectors = at(keys, j + r, 0), at(queries, 0, c), self.part.vectors
                self.products.multiply(sums, a_rows, b_rows, (0, depth), vectors)
            self.round_tile(scores, dropout, r, c)
        if self.config.dbias_kind:
            self.scores.add_gradient(head, self.dbias_t, q0 + c, j0 + j, a, b)

    def round_tile(self, scores: TileScores, dropout: TileDropout | None, first: Value, c: Value) -> None:
        """p = exp(s_t - shift) factor, ds = p (dp_t - delta) of 32 keys, in the products' forms."""
        part, lanes, columns = self.part, self.part.lanes, self.part.columns()
        statistics = (self.lse, self.factor, self.delta)
        lse, factor, delta = ([area.at(0, c)[0, x].load(lanes) for x in columns] for area in statistics)
        for r in loop(first, first + TILE, part.rows):
            s_t, dp_t = (area.at(r % TILE, 0) for area in (self.s_t, self.dp_t))
            scores.finish(s_t, r, self.scale)
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
                for area, low, high in zip(self.ds_right, *ds_terms):
                    is_exact = area is not self.ds_right[-1]
                    for v, x in enumerate(columns):
                        area.at(r // 2, c)[i // 2, x].store(paired(low[v], high[v], is_exact))

    def weight(self, s: Operand, shift: Operand, factor: Operand) -> Value:
        """factor * exp(s - shift)."""
        below = s - shift if self.rest is None else s * self.rest - shift
        return self.products.power(below) * factor

    def keep_bias_gradient(self, r: Value, k: int, ds: list[Value]) -> None:
        """dbias is ds between the derivatives of score function and softcap, which ds gets here."""
        for v, x in enumerate(self.part.columns()):
            ds[v] = through(self.scores.function_slope, ds[v], r + k, x)
            if self.config.dbias_kind:
                self.dbias_t.at(r, 0)[k, x].store(ds[v])
            ds[v] = through(self.scores.cap_slope, ds[v], r + k, x)

    def hide_rest(self, c: Value, a: Value, b: Value, end: Value) -> None:
        """p = ds = 0 for the keys of [0, end) that the part at c does not see, though others do."""
        zero = self.shape.constant(0.0)
        all_end, seen_end = (round_up(x, TILE) for x in (end, b))
        for start, stop in ((0, minimum(a, all_end)), (maximum(0, seen_end), all_end)):
            for r in loop(start, stop):
                for rows in (*self.p, *self.ds):
                    for x in range(0, TILE // 2, self.shape.lanes):
                        words(rows).at(r, c // 2)[0, x].store(zero)
