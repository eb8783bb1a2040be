"""Attention of a few queries to a few keys, forward and backward: calls of which every microsecond counts.

All keys of a head are at hand at once: nothing is split or merged, and the backward takes the softmax again,
which is faster than to keep out and lse for it. For each key head, with the rows of `decode.py`:

    q (scaled), k as float32;  s = k q                                              [rows, KEYS]
    for each row:  m = max(s);  l = sum(exp(s - m));  p = exp(s - m) / l
    forward:   out = p v;  lse = m + log(l)
    backward:  dp = v do;  ds = p * (dp - (rowsum(p * dp) - dlse))
               dq = ds k;  dv = p^T do;  dk = ds^T q
"""

from __future__ import annotations

from tilewise.cpu.dsl.control import claim, loop
from tilewise.cpu.dsl.lanes import across, first_lane
from tilewise.cpu.dsl.numerics import log_sum_exp
from tilewise.cpu.dsl.vector import Value, Var, as_int, fma, maximum, select, splat
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.host.compile import Target
from tilewise.cpu.host.configs import SHORT_KEYS
from tilewise.cpu.kernels.backward import fill_zero
from tilewise.cpu.kernels.decode_backward import HEIGHT, DecodeBackwardKernel
from tilewise.cpu.kernels.splits import Block
from tilewise.cpu.kernels.tiles import (
    INF,
    Arguments,
    Head,
    Scratch,
    Shape,
    build_kernel,
    lane_chunks,
    load_rows,
    outer_sums,
    round_up,
    store_rows,
)


class ShortKernel(DecodeBackwardKernel):
    """The kernel's steps, in the order in which they run."""

    name = "short"

    def __init__(self, shape: Shape, args: Arguments) -> None:
        self.shape, self.args, self.config = shape, args, shape.config
        self.scratch = scratch = Scratch(shape, args.thread_scratch())
        self.rows = rows = self.config.rows
        self.size_tiles()
        self.tile_k = self.depth
        self.block_k = keys = round_up(SHORT_KEYS, max(shape.lanes, HEIGHT))
        self.p, self.dp = (scratch.rows(round_up(rows, shape.lanes), keys) for _ in range(2))
        self.q, self.dq = (scratch.rows(rows, shape.pad) for _ in range(2))
        self.do, self.out = (scratch.rows(rows, shape.pad_v) for _ in range(2))
        self.q_grouped, self.do_grouped = (
            scratch.rows(self.row_groups, width * self.group) for width in (shape.pad, shape.pad_v)
        )
        self.k_area, self.dk = (scratch.rows(keys, shape.pad) for _ in range(2))
        self.v_area, self.dv = (scratch.rows(keys, shape.pad_v) for _ in range(2))

    def facts(self) -> dict[str, int]:
        return {"key_block": SHORT_KEYS, "tile_bytes": 0, "block_q": self.rows, "item_heads": 1}

    def run(self) -> None:
        args = self.args
        attend = self.differentiate if self.config.short == "backward" else self.attend_keys
        for item in claim(args.counter, args.items):
            batch, kv_head = item // args.num_kv_heads, item % args.num_kv_heads
            head = Head(self.shape, args, batch, kv_head * args.group)
            rows = head.seqlen_q * args.group
            self.load(head, rows)
            attend(head, rows)

    def load(self, head: Head, rows: Value) -> None:
        """q, k and v as float32; s = k q."""
        shape, config, n = self.shape, self.config, head.seqlen_k
        load_rows(shape, self.q, self.query_rows(head, "q"), rows, self.rows, config.head_dim)
        self.k = self.take(head, "k", self.k_area, config.head_dim, 0, n)
        self.v = self.take(head, "v", self.v_area, config.head_dim_v, 0, n)
        self.group_rows(self.q_grouped, self.q, self.args.vector("q_factor", shape))
        self.multiply_rows(self.q_grouped, self.k, self.p, n)

    def softmax(self, head: Head, r: Value) -> tuple[Value, Value]:
        """p of row r, which is 0 where nothing is visible; m and l."""
        shape, n = self.shape, head.seqlen_k
        block = Block(0, n, n, as_int(0))
        m = across(self.finish_scores(head, r, block, shape.constant(-INF)), maximum)
        total = Var(shape.constant(0.0))
        self.sum_weights(r, block, select(m.equals(-INF), 0.0, m), total)
        l = across(total, lambda a, b: a + b)
        inverse = select(l.equals(0.0), 0.0, 1.0 / l)
        for j in loop(0, n, shape.lanes):
            self.p[r, j].store(self.p[r, j].load(shape.lanes) * inverse)
        return m, l

    def attend_keys(self, head: Head, rows: Value) -> None:
        """out = p v and lse."""
        shape, n = self.shape, head.seqlen_k
        for row in loop(0, rows):
            own, i = self.query_of(head, row)
            m, l = self.softmax(own, row)
            lse, residual = log_sum_exp(m, l)
            own.store_lse(i, first_lane(lse), first_lane(residual))
        for c, count, vectors in lane_chunks(shape, shape.pad_v, self.vectors):
            for column in loop(c, c + count * vectors * shape.lanes, vectors * shape.lanes):
                for r in range(0, self.rows, self.tile):
                    sums = outer_sums(shape, self.tile, vectors, n, self.p.at(r, 0), self.v.at(0, column))
                    for k, total in enumerate(sums):
                        for x, out in enumerate(total):
                            self.out.at(r, column)[k, x * shape.lanes].store(out)
        store_rows(shape, self.query_rows(head, "out"), self.out, rows, self.config.head_dim_v)

    def differentiate(self, head: Head, rows: Value) -> None:
        """dq, dk and dv."""
        shape, n = self.shape, head.seqlen_k
        load_rows(shape, self.do, self.query_rows(head, "do"), rows, self.rows, self.config.head_dim_v)
        self.group_rows(self.do_grouped, self.do)
        self.multiply_rows(self.do_grouped, self.v, self.dp, n)
        fill_zero(shape, self.dq, self.rows)
        fill_zero(shape, self.p.at(rows, 0), self.rows - rows)  # weights of rows that are not there
        fill_zero(shape, self.dp.at(rows, 0), self.rows - rows)
        for r in loop(0, rows):
            own, i = self.query_of(head, r)
            self.softmax(own, r)
            self.differentiate_scores(own, i, r)
        self.add_query_gradients(n)
        self.store_key_gradients(head, 0, n)
        self.store_dq(head, rows)

    def differentiate_scores(self, head: Head, i: Value, r: Value) -> None:
        """ds = p * (dp - delta) of row r, in the place of dp."""
        shape, lanes = self.shape, self.shape.lanes
        total = Var(shape.constant(0.0))
        for j in loop(0, head.seqlen_k, lanes):
            p = self.p[r, j].load(lanes)
            dp = select(p.equals(0.0), 0.0, self.dp[r, j].load(lanes))  # not visible, or as good as that
            self.dp[r, j].store(dp)
            total.set(fma(p, dp, total))
        delta = across(total, lambda a, b: a + b) - splat(head.statistic("dlse", i).load(), lanes)
        for j in loop(0, head.seqlen_k, lanes):
            self.dp[r, j].store(self.p[r, j].load(lanes) * (self.dp[r, j].load(lanes) - delta))


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """See `build_kernel`."""
    return build_kernel(ShortKernel, config, target)
