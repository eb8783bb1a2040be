"""What the backward does where all keys of a tile of queries, or all queries of some keys, are at hand.

The sums over a row's keys are known then. So what rounding has put into them is taken out of p and ds; and
gradients that nobody else adds to are written at once, as rows, without scratch and without transposing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.memory import Rows
from tilewise.cpu.dsl.numerics import exp
from tilewise.cpu.dsl.vector import Operand, Value, Var, fma, like, minimum, select
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.kernels.dropout import Dropout
from tilewise.cpu.kernels.tiles import Arguments, Head, Shape, store_products


class WholeRows:
    """A part of `BackwardKernel`, whose areas these are."""

    shape: Shape
    args: Arguments
    config: Config
    dropout: Dropout | None
    lse: Rows
    factor: Rows
    delta: Rows
    dlse: Rows
    norm: Rows
    dq: Rows
    dk: Rows
    dv: Rows
    p_t: Any
    ds_t: Any
    kept_t: Any
    k: Any
    q: Any
    do: Any
    dk_scale: Callable[[], Value]

    def sees_only(self, head: Head, q0: Value, first: Value, count: Value) -> Value:
        """Whether no query of the tile sees other keys than first + [0, count)."""
        k0, k1 = head.key_range(q0, minimum(q0 + self.shape.block_q, head.seqlen_q))
        return (k0 < k1) & (k0 >= first) & (k1 <= first + count)

    def sees_one_tile(self, head: Head, j0: Value) -> Value:
        """Whether one tile of queries sees all keys of the item from j0 on, and no other sees any of them."""
        args, block_q = self.args, self.shape.block_q
        end = minimum(j0 + args.split_keys, head.seqlen_k)
        q0, q1 = head.query_range(j0, end)
        t = q0 // block_q
        k0, k1 = head.key_range(t * block_q, minimum((t + 1) * block_q, head.seqlen_q))
        is_one = (q0 < q1) & t.equals((q1 - 1) // block_q) & args.group.equals(1)
        return is_one & (k0 <= j0) & (k1 >= end)

    def sink_weight(self, head: Head, lse: Operand, factor: Operand) -> Value:
        """What a sink takes of the weights of some queries."""
        if not self.config.has_sinks:
            return self.shape.constant(0.0)
        return exp(head.sink() - lse, self.shape.exp_degree, factor)

    def normalize(self, totals: list[Var], end: Value) -> None:
        """p_t by its sums: the rounding of a large lse, which counts in all of a row, is divided out."""
        lanes, columns = self.shape.lanes, self.shape.columns()
        factors = [select(total > 0.0, like(1.0, total) / total, 1.0) for total in totals]
        for r in loop(0, end):
            for c, factor in zip(columns, factors):
                cell = self.p_t[r, c]
                cell.store(cell.load(lanes) * factor)
        for c, factor in zip(columns, factors):
            self.norm[0, c].store(factor)

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

    def write_query_gradients(self, head: Head, q0: Value, j: Value, end: Value) -> None:
        """dq = scale * ds k: head dimensions in lanes."""
        shape, scale = self.shape, self.args.vector("scale", self.shape)
        target, rows = head.query_rows("dq", q0), minimum(head.seqlen_q - q0, shape.width)
        ds_t, k, dim = self.ds_t, self.k.at(j, 0), self.config.head_dim
        store_products(shape, target, rows, end, ds_t, k, self.dq, dim, scaled(scale))

    def write_key_gradients(self, head: Head, q0: Value, j0: Value, j: Value, end: Value) -> None:
        """dv = p_t do and dk = scale * ds_t q, where no other queries see these keys."""
        shape, config = self.shape, self.config
        inverse_keep = self.dropout.inverse_keep if self.dropout else shape.constant(1.0)
        queries = minimum(head.seqlen_q - q0, shape.width)
        for name, weights, rows, area, dim, factor in (
            ("dv", self.kept_t, self.do, self.dv, config.head_dim_v, inverse_keep),
            ("dk", self.ds_t, self.q, self.dk, config.head_dim, self.dk_scale()),
        ):
            target, own = head.key_rows(name, j0 + j), area.at(j, 0)
            store_products(shape, target, end, queries, weights.T, rows, own, dim, scaled(factor))


def scaled(factor: Operand) -> Callable[[Value, Value], Value]:
    """What `store_products` does to each sum."""
    return lambda i, x: x * factor
