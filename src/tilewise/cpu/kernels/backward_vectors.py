"""The backward in vectors: its step of a tile of queries and some keys.

    s_t  = k q_t (+ options);  p_t = exp(s_t - shift) factor                  [BLOCK_K, block_q]
    (no other keys to see: p_t /= its sums over keys)
    dp_t = v do_t;             ds_t = p_t * (dp_t - delta)                   [BLOCK_K, block_q]
    (no other keys to see: ds_t -= p_t * (what its sums over keys have beyond dlse))

Where lse counts keys that the call does not have (`is_partial`), no sums are known, and none is corrected.
The shift is an integer near the scores: s - shift is small and hardly rounded, and the factor has the rest.
"""

from __future__ import annotations

from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.memory import Rows
from tilewise.cpu.dsl.numerics import FORMATS, exp
from tilewise.cpu.dsl.vector import Operand, Value, Var, absolute, element_of, fma, minimum, select
from tilewise.cpu.host.arguments import BLOCK_K
from tilewise.cpu.kernels.backward import BackwardKernel
from tilewise.cpu.kernels.common.scores import Scores, through
from tilewise.cpu.kernels.common.tiles import Head, KeyBlocks, Scratch, outer_sums

BELOW = 3.0  # lse by which scores are shifted: about where those of some twenty keys are


class VectorBackwardKernel(BackwardKernel):
    """The kernel in the compute type."""

    key_blocks: KeyBlocks = ((BLOCK_K, BLOCK_K),)

    def reserve(self, scratch: Scratch) -> None:
        super().reserve(scratch)
        shape = self.shape
        self.ds_t, self.kept_t = self.ds[0], self.p[0]
        self.p_t = scratch.rows(BLOCK_K, shape.block_q) if self.config.has_dropout else self.kept_t
        self.scores = Scores(shape, scratch, with_slopes=True)

    def step(self, head: Head, q0: Value, j0: Value, j: Value, end: Value) -> None:
        """The tile of queries from q0 on against the keys j0 + j + [0, end)."""
        self.weights(head, q0, j0, j, end)
        self.score_gradients(head, q0, j0, j, end)
        self.add_query_gradients(0, self.shape.vectors, j, (0, end))
        self.add_key_gradients((0, self.shape.width), j, end)

    def sees_only(self, head: Head, q0: Value, first: Value, count: Value) -> Value:
        """Whether no query of the tile sees other keys than first + [0, count)."""
        k0, k1 = head.key_range(q0, minimum(q0 + self.shape.block_q, head.seqlen_q))
        return (k0 < k1) & (k0 >= first) & (k1 <= first + count)

    def shift_and_factor(self, lse: Value, residual: Value) -> tuple[Value, Value]:
        """exp(s - shift) * factor = exp(s - lse - residual); a shift of +inf makes that 0."""
        mantissa = FORMATS[element_of(lse.type)].mantissa
        magic = 1.5 * 2.0**mantissa  # rounds to an integer what is added to it and taken off again
        is_small = absolute(lse) < 2.0 ** (mantissa - 1)
        shift = select(is_small, (lse + magic) - magic - BELOW, lse)
        return shift, exp(select(is_small, shift - lse, 0.0) - residual, self.shape.exp_degree)

    def weights(self, head: Head, q0: Value, j0: Value, j: Value, end: Value) -> None:
        """p_t = exp(s_t - shift) factor, keys j0 + j + [0, end), 0 up to a multiple of the rows."""
        shape = self.shape
        self.scores.load(head, q0, j0 + j, end)
        scores = self.scores.at(head, q0, j0 + j)
        lse = [self.lse[0, c].load(shape.lanes) for c in shape.columns()]
        factor = [self.factor[0, c].load(shape.lanes) for c in shape.columns()]
        totals = [Var(self.sink_weight(head, *x)) for x in zip(lse, factor)]
        for r0 in loop(0, end, shape.rows):
            k, q_t = self.k[0].at(j + r0, 0), self.q_t[0]
            s = outer_sums(shape, shape.rows, shape.vectors, self.config.head_dim, k, q_t)
            scores.apply(s, r0)
            for r in range(shape.rows):
                for v, c in enumerate(shape.columns()):
                    p = exp(s[r][v] - lse[v], shape.exp_degree, factor[v])
                    self.p_t.at(r0, c)[r, 0].store(p)
                    totals[v].set(totals[v] + p)
        if not self.config.is_partial:
            with when(self.sees_only(head, q0, j0 + j, end)):
                self.normalize(totals, end)

    def sink_weight(self, head: Head, lse: Operand, factor: Operand) -> Value:
        """What a sink takes of the weights of some queries."""
        if not self.config.has_sinks:
            return self.shape.constant(0.0)
        return exp(head.sink() - lse, self.shape.exp_degree, factor)

    def normalize(self, totals: list[Var], end: Value) -> None:
        """p_t by its sums: the rounding of a large lse, which counts in all of a row, is divided out."""
        lanes, columns = self.shape.lanes, self.shape.columns()
        factors = [select(total > 0.0, 1.0 / total, 1.0) for total in totals]
        for r in loop(0, end):
            for c, factor in zip(columns, factors):
                cell = self.p_t[r, c]
                cell.store(cell.load(lanes) * factor)
        for c, factor in zip(columns, factors):
            self.norm[0, c].store(factor)

    def score_gradients(self, head: Head, q0: Value, j0: Value, j: Value, end: Value) -> None:
        """ds_t = p_t * (v do_t - delta); dbias is ds before the softcap's derivative."""
        shape = self.shape
        delta = [self.delta[0, c].load(shape.lanes) for c in shape.columns()]
        dropout = self.dropout.at(shape, head, q0, j0 + j) if self.dropout else None
        for r0 in loop(0, end, shape.rows):
            kept = dropout and dropout.kept(r0, shape.rows)
            v_rows, do_t = self.v[0].at(j + r0, 0), self.do_t[0]
            dp = outer_sums(shape, shape.rows, shape.vectors, self.config.head_dim_v, v_rows, do_t)
            for r in range(shape.rows):
                for v, c in enumerate(shape.columns()):
                    p = self.p_t.at(r0, c)[r, 0].load(shape.lanes)
                    dp_rv: Operand = dp[r][v]
                    if self.dropout and kept:
                        self.kept_t.at(r0, c)[r, 0].store(select(kept[r][v], p, 0.0))
                        dp_rv = select(kept[r][v], dp_rv * self.dropout.inverse_keep, 0.0)
                    self.ds_t.at(r0, c)[r, 0].store(p * (dp_rv - delta[v]))
        if not self.config.is_partial:
            self.balance(head, q0, j0 + j, end)
        functions = self.scores.functions
        if functions is not None and functions.load_slopes:
            functions.at(shape, head, q0, j0 + j).add_captured(self.ds_t, end)
        self.change_ds(self.scores.function_slope, end)
        if self.config.dbias_kind:
            self.scores.add_gradient(head, self.ds_t, q0, j0 + j, 0, end)
        self.change_ds(self.scores.cap_slope, end)

    def change_ds(self, slopes: Rows | None, end: Value) -> None:
        """ds_t `through` slopes, if there are any."""
        for r in loop(0, end) if slopes is not None else ():
            for c in self.shape.columns():
                ds = self.ds_t[r, c]
                ds.store(through(slopes, ds.load(self.shape.lanes), r, c))

    def balance(self, head: Head, q0: Value, j0: Value, end: Value) -> None:
        """Where the tile sees no keys but j0 + [0, end): ds_t as if delta were the sum of p_t dp_t.

        A row of ds adds up to dlse (and what its sink takes of delta). What it has beyond that is rounding
        in dp and delta, which is large beside ds where few keys have all weight: p_t times it is taken off.
        """
        shape, lanes, columns = self.shape, self.shape.lanes, self.shape.columns()
        with when(self.sees_only(head, q0, j0, end)):
            excess = [Var(-self.row_sum(head, c)) for c in columns]
            whole = end & -shape.rows  # rows from `end` on may hold the NaN of a key that nobody sees
            for r0 in loop(0, whole, shape.rows):
                for c, x in zip(columns, excess):
                    ds = [self.ds_t.at(r0, c)[r, 0].load(lanes) for r in range(shape.rows)]
                    x.set(x + sum(ds[1:], ds[0]))
            for r in loop(whole, end):
                for c, x in zip(columns, excess):
                    x.set(x + self.ds_t[r, c].load(lanes))
            for r in loop(0, end):
                for c, x in zip(columns, excess):
                    cell, p = self.ds_t[r, c], self.p_t[r, c].load(lanes)
                    cell.store(fma(-p, x, cell.load(lanes)))

    def row_sum(self, head: Head, c: int) -> Value:
        """What rows of ds add up to, of the queries from c on."""
        statistics = (self.lse, self.factor, self.delta, self.dlse, self.norm)
        lse, factor, delta, dlse, norm = (area[0, c].load(self.shape.lanes) for area in statistics)
        sink = self.sink_weight(head, lse, factor)
        return fma(sink * norm, delta, dlse) if self.config.has_sinks else dlse
