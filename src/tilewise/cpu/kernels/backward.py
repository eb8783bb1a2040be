"""Backward attention on the CPU, by recomputation of P from lse; five matrix products, no second pass.

A work item is one key head and one block of keys; its K, V, dK, dV stay in the thread's scratch while the
queries that see it go by, those of every query head that shares the key head. Where sequences or heads share
a bias whose gradient is wanted, an item takes the same block of all of them in turn, and adds up.

    k, v converted; dk, dv = 0                                               [key_block, head_dim]
    for each tile of queries:  q_t, do_t transposed; delta = rowsum(do * out) - dlse
        for each 64 keys:
            s_t  = k q_t (+ options);  p_t = exp(s_t - shift) factor          [BLOCK_K, block_q]
            (no other keys to see: p_t /= its sums over keys)
            dp_t = v do_t;             ds_t = p_t * (dp_t - delta)           [BLOCK_K, block_q]
            (no other keys to see: ds_t -= p_t * (what its sums over keys have beyond dlse))
            (dropout: dp_t = 0 in ds_t, and then p_t = 0, where dropped; the rest counts inverse_keep)
            dq_t += k^T ds_t                                                 [head_dim, block_q]
            dv   += p_t do;            dk += ds_t q                          [BLOCK_K, head_dim]
        dq of the tile += dq_t, after the previous block of keys has added its own

Where lse counts keys that the call does not have (`is_partial`), no sums are known, and none is corrected.

The residual is what rounding left out of lse: all of log(sum) where scores are huge. The shift is an integer
near the scores: s - shift is small and hardly rounded, and factor = exp(shift - lse - residual) has the rest.

Each tile of queries has a ticket counter, and the items add to its dq in the order of their keys: the sums
are the same, bit for bit, on any number of threads. An item waits only for items with a smaller index,
which other threads already hold or have finished, so the wait ends. Sums in float32 stand in dq itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tilewise.cpu.dsl.control import claim, loop, when
from tilewise.cpu.dsl.lanes import fold_sums
from tilewise.cpu.dsl.memory import Rows
from tilewise.cpu.dsl.numerics import FORMATS, exp
from tilewise.cpu.dsl.vector import (
    Operand,
    Scalar,
    Value,
    Var,
    absolute,
    element_of,
    fma,
    like,
    maximum,
    minimum,
    select,
)
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.host.compile import Target
from tilewise.cpu.kernels.common.dropout import Dropout
from tilewise.cpu.kernels.common.scores import Scores
from tilewise.cpu.kernels.common.sums import add_in_turn, add_to, fill_zero, scale_rows, sum_bytes
from tilewise.cpu.kernels.common.tiles import (
    BLOCK_K,
    INF,
    Arguments,
    Head,
    KeyBlocks,
    Scratch,
    Shape,
    build_kernel,
    fitting,
    lane_chunks,
    load_rows,
    narrowed,
    outer_sums,
    round_up,
    store_rows,
    transpose_rows,
)

BELOW = 3.0  # lse by which scores are shifted: about where those of some twenty keys are


class BackwardKernel:
    """The kernel's steps, in the order in which they run."""

    name = "backward"
    key_blocks: KeyBlocks = ((BLOCK_K, BLOCK_K),)
    max_key_block = 512  # shares each tile's loads and transposes: 3-6% faster than 256
    k: Any  # Rows; with tile registers, lists of their terms
    v: Any
    q: Any
    do: Any
    q_t: Any
    do_t: Any

    def __init__(self, shape: Shape, args: Arguments) -> None:
        self.shape, self.args, self.config = shape, args, shape.config
        self.key_group = shape.rows  # keys whose scores are computed together
        keys = shape.target.l2_bytes // 2 // self.key_bytes() // BLOCK_K * BLOCK_K  # half of L2
        self.key_block = min(self.max_key_block, max(BLOCK_K, keys))
        self.scratch = scratch = Scratch(shape, args.thread_scratch())
        self.dk, self.dv = (scratch.rows(self.key_block, width) for width in (shape.pad, shape.pad_v))
        self.dq = scratch.rows(round_up(shape.block_q, shape.rows), shape.pad)
        self.dq_t = scratch.rows(shape.pad, shape.block_q)
        statistics = (scratch.rows(1, shape.block_q) for _ in range(5))
        self.lse, self.factor, self.delta, self.dlse, self.norm = statistics
        self.reserve(scratch)
        self.dropout = Dropout(shape, args) if self.config.has_dropout else None
        self.narrow = narrowed(self, 2) if shape.vectors == 3 else None

    def facts(self) -> dict[str, int]:
        shape = self.shape
        return {"key_block": self.key_block, "sum_bytes": sum_bytes(shape, shape.block_q)}

    def key_bytes(self) -> int:
        """Of K, V, dK and dV, for each key of a block."""
        return 2 * (self.shape.pad + self.shape.pad_v) * self.shape.item

    def reserve(self, scratch: Scratch) -> None:
        """Room for the factors and for what comes of a block of keys and a tile of queries."""
        shape = self.shape
        self.k, self.v = (scratch.rows(self.key_block, width) for width in (shape.pad, shape.pad_v))
        self.p_t, self.ds_t = (scratch.rows(BLOCK_K, shape.block_q) for _ in range(2))
        self.kept_t = scratch.rows(BLOCK_K, shape.block_q) if self.config.has_dropout else self.p_t
        self.q = scratch.rows(shape.block_q, shape.pad)
        self.do, self.out = (scratch.rows(shape.block_q, shape.pad_v) for _ in range(2))
        self.q_t, self.do_t = (scratch.rows(width, shape.block_q) for width in (shape.pad, shape.pad_v))
        self.scores = Scores(shape, scratch, with_slopes=True)

    def run(self) -> None:
        args = self.args
        owners = args.items // args.splits  # splits: blocks of keys of a head
        for item in claim(args.counter, args.items):
            block, owner = item // owners, item % owners  # neighbours are different heads
            for s in loop(0, args.sharing):
                batch = owner // args.own_heads + s // args.shared_heads
                kv_head = owner % args.own_heads + s % args.shared_heads
                self.attend_keys(batch, kv_head, block)

    def attend_keys(self, batch: Value, kv_head: Value, block: Value) -> None:
        """One block of keys of one key head against all queries that see some of it."""
        args, block_q = self.args, self.shape.block_q
        keys = Head(self.shape, args, batch, kv_head * args.group)
        j0 = block * args.split_keys
        n = minimum(args.split_keys, keys.seqlen_k - j0)
        with when(n > 0):
            self.load_keys(keys, j0, n)
            q0, q1 = keys.query_range(j0, j0 + n)
            for g in loop(0, args.group):
                head = Head(self.shape, args, batch, kv_head * args.group + g)
                for t in loop(q0 // block_q, (maximum(0, q1) + (block_q - 1)) // block_q):
                    self.attend(head, t, block, j0, n)
            self.store_keys(keys, j0, n)

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        shape, config = self.shape, self.config
        count = (n + (shape.rows - 1)) & -shape.rows
        load_rows(shape, self.k, head.key_rows("k", j0), n, count, config.head_dim)
        load_rows(shape, self.v, head.key_rows("v", j0), n, count, config.head_dim_v)
        for area in (self.dk, self.dv):
            fill_zero(shape, area, count)

    def attend(self, head: Head, t: Value, block: Value, j0: Value, n: Value) -> None:
        """One tile of queries against the item's keys."""
        block_q, block_k, q0 = self.shape.block_q, self.shape.block_k, t * self.shape.block_q
        k0, k1 = head.key_range(q0, minimum(q0 + block_q, head.seqlen_q))
        first, last = maximum(0, k0 - j0) & -self.key_group, minimum(k1 - j0, n)
        split = self.args.split_keys
        for place, is_last in self.tickets(head, q0, block, (k0 // split, (k1 - 1) // split)):
            fill_zero(self.shape, self.dq_t, self.shape.pad)
            begin, end = self.scores.visible(head, q0, block_q, j0, first, last)
            with when(begin < end):
                self.load_statistics(head, q0, self.load_queries(head, q0))
            for j in loop(first, last, block_k):
                begin, end = self.scores.visible(head, q0, block_q, j0 + j, 0, minimum(last - j, block_k))
                with when(begin < end):
                    for kernel in fitting(self, head, q0):
                        kernel.step(head, q0, j0, j, end)
            self.hand_over_dq(head, t, place, is_last)

    def tickets(
        self, head: Head, q0: Value, block: Value, blocks: tuple[Value, Value]
    ) -> Iterator[tuple[Value, Value]]:
        """How many blocks of keys add to the tile's dq before this one, and whether it is the last; nothing
        if the functions hide all of it."""
        functions = self.scores.functions
        if functions is None or not functions.has_map:
            yield block - blocks[0], block.equals(blocks[1])
            return
        is_visited, place, is_last = functions.ticket(head, q0, block, blocks)
        with when(is_visited):
            yield place, is_last

    def step(self, head: Head, q0: Value, j0: Value, j: Value, end: Value) -> None:
        """The tile of queries from q0 on against the keys j0 + j + [0, end)."""
        self.weights(head, q0, j0, j, end)
        self.score_gradients(head, q0, j0, j, end)
        self.add_query_gradients(j, end)
        self.add_key_gradients(j, end)

    def sees_only(self, head: Head, q0: Value, first: Value, count: Value) -> Value:
        """Whether no query of the tile sees other keys than first + [0, count)."""
        k0, k1 = head.key_range(q0, minimum(q0 + self.shape.block_q, head.seqlen_q))
        return (k0 < k1) & (k0 >= first) & (k1 <= first + count)

    def load_queries(self, head: Head, q0: Value) -> Scalar:
        """q, do as rows and transposed; rowsum(do * out). How many rows that are, repeated ones included."""
        shape, config, args = self.shape, self.config, self.args
        n, block_q = head.seqlen_q - q0, shape.block_q
        load_rows(shape, self.q, head.query_rows("q", q0), n, block_q, config.head_dim)
        load_rows(shape, self.do, head.query_rows("do", q0), n, block_q, config.head_dim_v)
        load_rows(shape, self.out, head.query_rows("out", q0), n, block_q, config.head_dim_v)
        transpose_rows(shape, self.q_t, self.q, block_q, shape.pad, args.vector("q_factor", shape))
        transpose_rows(shape, self.do_t, self.do, block_q, shape.pad_v)
        for i in loop(0, block_q, shape.lanes):
            self.store_delta(i, self.out.at(i, 0), self.do.at(i, 0))
        return block_q

    def store_delta(self, i: Value, out: Rows, do: Rows) -> None:
        """delta = rowsum(do * out) of as many queries as there are lanes, from i on."""
        shape = self.shape
        sums = [Var(shape.constant(0.0)) for _ in range(shape.lanes)]
        for c in loop(0, shape.pad_v, shape.lanes):
            for r, total in enumerate(sums):
                x, y = (rows.at(0, c)[r, 0].load(shape.lanes) for rows in (out, do))
                total.set(fma(x, y, total))
        self.delta[0, i].store(fold_sums(sums))

    def load_statistics(self, head: Head, q0: Value, count: Scalar) -> None:
        """shift, factor, delta = rowsum(do * out) - dlse. Lanes past the end get p = 0."""
        config, n = self.config, head.seqlen_q - q0
        for i in loop(0, count):
            row = minimum(q0 + i, head.seqlen_q - 1)
            lse = head.statistic("lse", row).load()
            dlse = head.statistic("dlse", row).load()
            delta = self.delta[0, i].load() - dlse
            self.dlse[0, i].store(dlse)
            self.delta[0, i].store(delta)
            if config.has_sinks:
                head.statistic("delta", row).store(delta)
            self.factor[0, i].store(head.statistic("lse_residual", row).load())
            lse = select(lse.equals(-INF), INF, lse)  # no weights: p = exp(s - inf) = 0
            self.lse[0, i].store(select(i < n, lse, INF))
        for i in loop(0, count, self.shape.lanes):
            lse, residual = (area[0, i].load(self.shape.lanes) for area in (self.lse, self.factor))
            shift, factor = self.shift_and_factor(lse, residual)
            self.lse[0, i].store(shift)
            self.factor[0, i].store(factor)

    def shift_and_factor(self, lse: Value, residual: Value) -> tuple[Value, Value]:
        """exp(s - shift) * factor = exp(s - lse - residual); a shift of +inf makes that 0."""
        mantissa = FORMATS[element_of(lse.type)].mantissa
        magic = like(1.5 * 2.0**mantissa, lse)  # rounds to an integer what is added to it and taken off again
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
            k = self.k.at(j + r0, 0)
            s = outer_sums(shape, shape.rows, shape.vectors, self.config.head_dim, k, self.q_t)
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
        factors = [select(total > 0.0, like(1.0, total) / total, 1.0) for total in totals]
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
            v_rows = self.v.at(j + r0, 0)
            dp = outer_sums(shape, shape.rows, shape.vectors, self.config.head_dim_v, v_rows, self.do_t)
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
        if self.scores.function_slope is not None:
            self.change_ds(self.scores.before_function, end)
        if self.config.dbias_kind:
            self.scores.add_gradient(head, self.ds_t, q0, j0 + j, 0, end)
        if self.scores.cap_slope is not None:
            self.change_ds(self.scores.before_cap, end)

    def change_ds(self, change: Callable[[Value, Scalar, Scalar], Value], end: Value) -> None:
        """ds_t[r, c] = change(ds_t[r, c], r, c)."""
        for r in loop(0, end):
            for c in self.shape.columns():
                ds = self.ds_t[r, c]
                ds.store(change(ds.load(self.shape.lanes), r, c))

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

    def add_query_gradients(self, j: Value, end: Value) -> None:
        """dq_t += k^T ds_t."""
        shape = self.shape
        for d in loop(0, round_up(self.config.head_dim, shape.rows), shape.rows):
            k_t = self.k.at(j, d).T
            part = outer_sums(shape, shape.rows, shape.vectors, end, k_t, self.ds_t)  # [rows, block_q]
            add_to(shape, self.dq_t.at(d, 0), part)

    def add_key_gradients(self, j: Value, end: Value) -> None:
        """dv += p_t do and dk += ds_t q: head dimensions in lanes, up to 4 vectors of them at a time."""
        shape = self.shape
        most = 4 if shape.rows == 8 else 3
        for weights, rows, gradient in ((self.kept_t, self.do, self.dv), (self.ds_t, self.q, self.dk)):
            for c, count, vectors in lane_chunks(shape, gradient.stride, most):
                height = 4 if vectors > 3 else shape.rows
                for r0 in loop(0, end, height):
                    for column in loop(c, c + count * vectors * shape.lanes, vectors * shape.lanes):
                        a, b = weights.at(r0, 0), rows.at(0, column)
                        part = outer_sums(shape, height, vectors, shape.width, a, b)  # [height, lanes]
                        add_to(shape, gradient.at(j + r0, column), part)

    def hand_over_dq(self, head: Head, t: Value, place: Value, is_last: Value) -> None:
        """dq_t as rows, added to the tile's sum when `place` blocks of keys have."""
        shape, args, q0 = self.shape, self.args, t * self.shape.block_q
        transpose_rows(shape, self.dq, self.dq_t, shape.pad, shape.block_q)
        tile = (head.batch * args.num_heads + head.head) * args.tiles + t
        n = minimum(head.seqlen_q - q0, shape.block_q)
        add_in_turn(self, head.query_rows("dq", q0), tile, n, place, is_last)

    def dk_scale(self) -> Value:
        """What ds q is still to be multiplied by."""
        return self.args.vector("scale", self.shape)

    def store_keys(self, head: Head, j0: Value, n: Value) -> None:
        shape, config = self.shape, self.config
        scale_rows(shape, self.dk, n, self.dk_scale())
        if self.dropout is not None:
            scale_rows(shape, self.dv, n, self.dropout.inverse_keep)
        store_rows(shape, head.key_rows("dk", j0), self.dk, n, config.head_dim)
        store_rows(shape, head.key_rows("dv", j0), self.dv, n, config.head_dim_v)


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """See `build_kernel`."""
    return build_kernel(BackwardKernel, config, target)
