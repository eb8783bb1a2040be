"""Gradients of attention of a few queries to many keys: the backward of `decode.py`, at the speed of memory.

The head dimension stands in lanes, and an item holds all queries that share its keys (the rows), so dk and dv
of a block are final when they are written. A work item is one split of the keys, for key heads side by side:

    q, do of all rows; delta = rowsum(do * out) - dlse; dq = 0                         [rows, head_dim]
    for each block of keys that the mask shows, and each head:  k, v as float32        [block_k, head_dim]
        for each few keys:  s = k q, dp = v do of all rows                              [rows, block_k]
        for each row:       p = exp(s (with options) - lse) exp(-residual);  ds = p * (dp - delta)
                            (all its keys here: p and ds balanced, as in `backward.py`)
        dq += ds k;  dv = p^T do;  dk = ds^T q
    dq of the head += dq, after the previous split has added its own

The scores are summed as in the forward, so that its lse fits them to the last bit, and dq in the order of the
splits, which depend on the problem alone: the same bits on any number of threads (see `backward.py`).
"""

from __future__ import annotations

from operator import add

from tilewise.cpu.dsl.control import claim, loop, when
from tilewise.cpu.dsl.lanes import across
from tilewise.cpu.dsl.memory import Rows, prefetch_row
from tilewise.cpu.dsl.numerics import exp, exp_of_difference
from tilewise.cpu.dsl.vector import (
    Scalar,
    Value,
    Var,
    as_int,
    count_from,
    fma,
    int32,
    maximum,
    minimum,
    select,
    splat,
)
from tilewise.cpu.kernels.common.splits import ITEM_HEADS, Block
from tilewise.cpu.kernels.common.sums import add_in_turn, add_to, fill_zero, sum_bytes
from tilewise.cpu.kernels.common.tiles import (
    INF,
    Head,
    Scratch,
    lane_chunks,
    load_rows,
    outer_sums,
    round_up,
    store_rows,
)
from tilewise.cpu.kernels.decode import DecodeKernel

SPLIT_KEYS = 512  # at most
HEIGHT = 4  # keys whose dk or dv is summed at once


class DecodeBackwardKernel(DecodeKernel):
    """The kernel's steps, in the order in which they run."""

    def facts(self) -> dict[str, int]:
        return {
            "key_block": SPLIT_KEYS,
            "block_q": self.rows,
            "sum_bytes": sum_bytes(self.shape, self.rows),
            "item_heads": ITEM_HEADS,
        }

    def reserve(self, scratch: Scratch) -> list[tuple[int, int]]:
        shape, rows = self.shape, self.rows
        self.size_tiles()
        keys = round_up(self.block_k, HEIGHT)
        self.k_area, self.dk = (scratch.rows(keys, shape.pad) for _ in range(2))
        self.v_area, self.dv = (scratch.rows(keys, shape.pad_v) for _ in range(2))
        self.out = scratch.rows(rows, shape.pad_v)
        self.p, self.dp = (scratch.rows(round_up(rows, shape.lanes), self.block_k) for _ in range(2))
        self.cap_slope = scratch.rows(1, self.block_k if self.config.has_softcap else 0)
        self.reserve_options(scratch)
        grouped = [(self.row_groups, width * self.group) for width in (shape.pad, shape.pad_v)]
        statistics = [(rows, shape.lanes)] * 3
        plain = [(rows, width) for width in (shape.pad, shape.pad_v, shape.pad)]
        return grouped + plain + statistics

    def select_head(self, h: Scalar) -> None:
        """From here on it is about key head h of the item."""
        areas = (area.at(h * count, 0) for area, count in self.state)
        (
            self.q_grouped, self.do_grouped, self.q, self.do, self.dq, self.lse, self.factor, self.delta,
        ) = areas  # fmt: skip

    def run(self) -> None:
        args = self.args
        owners = args.items // args.splits
        for item in claim(args.counter, args.items):
            split, first = item // owners, item % owners * args.item_heads
            batch, kv_head = first // args.num_kv_heads, first % args.num_kv_heads
            head = Head(self.shape, args, batch, kv_head * args.group)
            k0, k1 = head.key_range(0, head.seqlen_q)
            begin = maximum(k0, split * args.split_keys)
            end = minimum(k1, (split + 1) * args.split_keys)
            with when(begin < end):
                for _, head in self.each_head(batch, kv_head):
                    self.start(head, head.seqlen_q * args.group)
                for j0 in loop(begin, end, self.block_k):
                    for h, head in self.each_head(batch, kv_head):
                        self.visit_seen(head, Block(j0, minimum(end - j0, self.block_k), end, h))
                place, is_last = split - k0 // args.split_keys, split.equals((k1 - 1) // args.split_keys)
                for _, head in self.each_head(batch, kv_head):
                    self.hand_over_dq(head, place, is_last)

    def start(self, head: Head, rows: Value) -> None:
        """q and do, also in the order of the products of a vector; the rows' statistics; dq = 0."""
        shape, config, args = self.shape, self.config, self.args
        load_rows(shape, self.q, self.query_rows(head, "q"), rows, self.rows, config.head_dim)
        load_rows(shape, self.do, self.query_rows(head, "do"), rows, self.rows, config.head_dim_v)
        self.group_rows(self.q_grouped, self.q, args.vector("q_factor", shape))
        self.group_rows(self.do_grouped, self.do)
        fill_zero(shape, self.dq, self.rows)
        load_rows(shape, self.out, self.query_rows(head, "out"), rows, self.rows, config.head_dim_v)
        for r in loop(0, self.rows):
            self.load_statistics(head, r, rows)

    def query_of(self, head: Head, r: Value) -> tuple[Head, Value]:
        """The query head of row r and its query; rows past the end are like the last."""
        r = minimum(r, head.seqlen_q * self.args.group - 1)
        return self.query_head(head, r), r % head.seqlen_q

    def load_statistics(self, head: Head, r: Value, rows: Value) -> None:
        """lse, exp(-residual), delta = rowsum(do * out) - dlse of row r. Rows past the end get p = 0."""
        shape = self.shape
        own, i = self.query_of(head, r)
        total = Var(shape.constant(0.0))
        for c in loop(0, shape.pad_v, shape.lanes):
            total.set(fma(self.do[r, c].load(shape.lanes), self.out[r, c].load(shape.lanes), total))
        delta = across(total, add) - own.statistic("dlse", i).splat(shape.lanes)
        self.delta[r, 0].store(delta)
        if self.config.has_sinks:
            own.statistic("delta", i).store(self.delta[r, 0].load())
        residual = own.statistic("lse_residual", i).splat(shape.lanes)
        self.factor[r, 0].store(exp(-residual, shape.exp_degree))
        lse = own.statistic("lse", i).load()
        is_empty = lse.equals(-INF) | (r >= rows)  # no weights: p = exp(s - inf) = 0
        self.lse[r, 0].store(splat(select(is_empty, INF, lse), shape.lanes))

    def visit(self, head: Head, block: Block) -> None:
        """One block of keys against all rows."""
        config, n = self.config, block.n
        for name, dim in (("k", config.head_dim), ("v", config.head_dim_v)):
            _, later = self.sources(head, name, block)
            for j in loop(0, n):
                prefetch_row(later(j), dim)
        self.k = self.take(head, "k", self.k_area, config.head_dim, block.j0, n)
        self.v = self.take(head, "v", self.v_area, config.head_dim_v, block.j0, n)
        self.multiply_rows(self.q_grouped, self.k, self.p, n)
        self.multiply_rows(self.do_grouped, self.v, self.dp, n)
        for r in loop(0, self.rows):
            self.weigh_row(head, r, block)
        self.add_query_gradients(n)
        self.store_key_gradients(head, block.j0, n)

    def take(self, head: Head, name: str, area: Rows, dim: int, j0: Scalar, n: Scalar) -> Rows:
        """n keys or values where they lie, or as float32 and padded in `area`."""
        row = head.key_rows(name, j0)
        if self.config.kind == self.shape.kind and dim == area.stride and not self.config.page_size:
            return Rows(row(as_int(0)), getattr(self.args, f"{name}_n"))
        load_rows(self.shape, area, row, n, n, dim)
        return area

    def multiply_rows(self, factor: Rows, rows: Rows, products: Rows, n: Value) -> None:
        """products[r, j] = factor[r] rows[j] for all rows and the first n keys."""
        for j in loop(0, n, self.tile_k):
            keys = [rows[minimum(j + key, n - 1), 0] for key in range(self.tile_k)]
            self.multiply(factor, keys, products.at(0, j), [])

    def weigh_row(self, head: Head, r: Value, block: Block) -> None:
        """p = exp(s - lse) exp(-residual) and ds = p * (dp - delta) of row r, 0 where not visible."""
        shape = self.shape
        own, i = self.query_of(head, r)
        k0, k1 = own.key_range(i, i + 1)
        begin, end = (int32(k - block.j0, shape.lanes) for k in (k0, k1))
        statistics = (self.lse, self.factor, self.delta)
        lse, factor, delta = (area[r, 0].load(shape.lanes) for area in statistics)
        p_sum, ds_sum = (Var(shape.constant(0.0)) for _ in range(2))
        bias = self.load_option("bias", own, i, block)
        for j in loop(0, round_up(block.n, shape.lanes), shape.lanes):
            key = count_from(j, shape.lanes)
            is_visible = (key >= begin) & (key < end)
            distance = key - int32(i + own.offset - block.j0)
            if self.seen is not None:
                is_visible = is_visible & (self.seen[r, j].load(shape.lanes) > 0.0)
            added = None if bias is None else bias[0, j].load(shape.lanes)
            s, slope = self.with_options(self.p[r, j].load(shape.lanes), distance, self.slope_of(own), added)
            p = exp_of_difference(select(is_visible, s, -INF), lse, shape.exp_degree, factor)
            ds = select(is_visible, p * (self.dp[r, j].load(shape.lanes) - delta), 0.0)
            self.p[r, j].store(p)
            self.dp[r, j].store(ds)
            p_sum.set(p_sum + p)
            ds_sum.set(ds_sum + ds)
            if slope is not None:
                self.cap_slope[0, j].store(select(is_visible, slope, 0.0))
        if not self.config.is_partial:
            keys = (k0 - block.j0, k1 - block.j0)
            with when((k0 >= block.j0) & (k1 <= block.j0 + block.n)):
                self.balance(own, i, r, keys, across(p_sum, add), across(ds_sum, add))
        if self.config.has_softcap:
            for j in loop(0, round_up(block.n, shape.lanes), shape.lanes):
                ds = self.dp[r, j].load(shape.lanes)
                self.dp[r, j].store(ds * self.cap_slope[0, j].load(shape.lanes))

    def balance(
        self, own: Head, i: Value, r: Value, keys: tuple[Value, Value], p_sum: Value, ds_sum: Value
    ) -> None:
        """Row r's p by its sum, and ds without what its sum has beyond dlse, as in `backward.py`."""
        shape = self.shape
        statistics = (self.lse, self.factor, self.delta)
        lse, correction, delta = (area[r, 0].load(shape.lanes) for area in statistics)
        dlse = own.statistic("dlse", i).splat(shape.lanes)
        sink = shape.constant(0.0)
        if self.config.has_sinks:
            sink = exp(own.sink() - lse, shape.exp_degree, correction)
        total = p_sum + sink
        factor = select(total > 0.0, 1.0 / total, 1.0)
        excess = (ds_sum - sink * delta) * factor - dlse
        first, last = (int32(k, shape.lanes) for k in keys)
        for j in loop(keys[0] & -shape.lanes, keys[1], shape.lanes):
            key = count_from(j, shape.lanes)
            p, ds = (area[r, j].load(shape.lanes) * factor for area in (self.p, self.dp))
            self.p[r, j].store(p)
            self.dp[r, j].store(select((key >= first) & (key < last), fma(-p, excess, ds), 0.0))

    def add_query_gradients(self, n: Value) -> None:
        """dq += ds k."""
        shape = self.shape
        for c, count, vectors in lane_chunks(shape, shape.pad, self.vectors):
            for column in loop(c, c + count * vectors * shape.lanes, vectors * shape.lanes):
                for r in range(0, self.rows, self.tile):
                    part = outer_sums(shape, self.tile, vectors, n, self.dp.at(r, 0), self.k.at(0, column))
                    add_to(shape, self.dq.at(r, column), part)

    def store_key_gradients(self, head: Head, j0: Scalar, n: Value) -> None:
        """dv = p^T do, dk = scale * ds^T q."""
        shape, config, scale = self.shape, self.config, self.args.vector("scale", self.shape)
        most = 4 if shape.rows == 8 else 3
        for name, weights, rows, area, dim, factor in (
            ("dv", self.p, self.do, self.dv, config.head_dim_v, shape.constant(1.0)),
            ("dk", self.dp, self.q, self.dk, config.head_dim, scale),
        ):
            for c, count, vectors in lane_chunks(shape, area.stride, most):
                for j in loop(0, n, HEIGHT):
                    for column in loop(c, c + count * vectors * shape.lanes, vectors * shape.lanes):
                        a, b = weights.at(0, j).T, rows.at(0, column)
                        for r, sums in enumerate(outer_sums(shape, HEIGHT, vectors, self.rows, a, b)):
                            for x, total in enumerate(sums):
                                area.at(j, column)[r, x * shape.lanes].store(total * factor)
            store_rows(shape, head.key_rows(name, j0), area, n, dim)

    def hand_over_dq(self, head: Head, place: Value, is_last: Value) -> None:
        """Add dq to the head's sums when `place` splits have."""
        owner = head.batch * self.args.num_kv_heads + head.kv_head
        rows = head.seqlen_q * self.args.group
        add_in_turn(self, self.query_rows(head, "dq"), owner, rows, place, is_last)
