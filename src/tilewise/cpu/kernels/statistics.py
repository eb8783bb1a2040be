"""Statistics of the weights on the CPU: a second pass over Q K^T, when lse is known, that forgets each tile.

A work item is one head and some of its chunks of `tiles` tiles of queries. For each block of keys:

    s_t = k q_t (+ softcap, bias, ALiBi, mask)                        [block_k, block_q]
    p_t = exp(s_t - lse)
    row_max = max(row_max, max over keys of s_t)
    total  += sum over keys of p_t                                    1 at last, but for the error of lse
    entropy += sum over keys of p_t (lse - s_t)                       at last: entropy / total + log total
    column_sum[j] += sum over the last queries of p_t[j]

Items of one head have column sums of their own, which the caller adds up: no atomics, and the same bits each
time on as many threads.
"""

from __future__ import annotations

from typing import Any

from tilewise.cpu.dsl.control import claim, loop, when
from tilewise.cpu.dsl.lanes import fold_sums
from tilewise.cpu.dsl.memory import Ptr
from tilewise.cpu.dsl.numerics import FLOAT32_DEGREE, exp, log
from tilewise.cpu.dsl.vector import Scalar, Value, Var, fma, maximum, minimum, number, select
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.host.compile import Target
from tilewise.cpu.kernels.dropout import GROUP
from tilewise.cpu.kernels.forward import ForwardKernel, Tile
from tilewise.cpu.kernels.tiles import INF, Arguments, Head, Scratch, Shape, build_kernel, fitting


class StatisticsTile(Tile):
    """One tile of queries: m and l of its forward, and what else belongs to a query, one entry a lane."""

    def __init__(self, shape: Shape, base: Ptr, q0: Scalar) -> None:
        super().__init__(shape, base, q0)
        self.lse, self.residual, self.entropy = (self.scratch.rows(1, shape.block_q) for _ in range(3))
        self.counted = self.scratch.rows(1, shape.block_q)  # 1, or 0 where column sums leave a query out


class StatisticsKernel(ForwardKernel):
    """The forward's steps up to the scores, and those of the statistics."""

    name = "statistics"
    make_tile = StatisticsTile

    def __init__(self, shape: Shape, args: Arguments) -> None:
        shape.exp_degree = max(shape.exp_degree, FLOAT32_DEGREE)  # of 16-bit inputs too: weights stay float32
        self.wanted = shape.config.statistics
        super().__init__(shape, args)

    def reserve(self, scratch: Scratch) -> None:
        shape = self.shape
        self.k = scratch.rows(shape.block_k, shape.pad)
        self.p_t = scratch.rows(shape.block_k + shape.lanes, shape.block_q)  # s_t at first
        self.columns = scratch.rows(1, shape.block_k + shape.lanes)  # column sums of one block of keys

    def run(self) -> None:
        args = self.args
        for item in claim(args.counter, args.items):
            batch_head, part = item // args.splits, item % args.splits
            head = Head(self.shape, args, batch_head // args.num_heads, batch_head % args.num_heads)
            for chunk in loop(part, args.chunks, args.splits):
                self.visit(head, part, chunk * args.tiles * self.shape.block_q)

    def visit(self, head: Head, part: Value, q0: Value) -> None:
        """The chunk of queries from q0 on, but for tiles that nothing is asked about."""
        shape, args, block_q = self.shape, self.args, self.shape.block_q
        skipped = maximum(0, head.seqlen_q - args.visited_rows - q0) // block_q
        q1 = minimum(head.seqlen_q, q0 + args.tiles * block_q)
        q0 = q0 + skipped * block_q
        tiles = (maximum(0, q1 - q0) + (block_q - 1)) // block_q
        for t in loop(0, tiles):
            self.start(head, self.tile(q0, t))
        k0, k1 = head.key_range(q0, q1)
        with when(q0 < q1):
            for j0 in loop(k0 & -shape.block_k, k1, shape.block_k):
                n = minimum(k1 - j0, shape.block_k)
                self.load_keys(head, j0, n)
                for c in loop(0, shape.block_k + shape.lanes, shape.lanes):
                    self.columns[0, c].store(shape.constant(0.0))
                for t in loop(0, tiles):
                    tile = self.tile(q0, t)
                    for kernel in fitting(self, head, tile.q0):
                        kernel.attend(head, tile, j0)
                if "column_sum" in self.wanted:
                    self.add_columns(head, part, j0, n)
        for t in loop(0, tiles):
            self.finish(head, self.tile(q0, t))

    def start(self, head: Head, tile: Any) -> None:
        """q_t; lse, which is infinite beyond the last query, so that weights are 0 there."""
        shape, args = self.shape, self.args
        self.load_queries(head, tile)
        starts = ((tile.lse, INF), (tile.residual, 0.0), (tile.counted, 0.0), (tile.m, -INF), (tile.l, 0.0))
        for c in shape.columns():
            for area, x in (*starts, (tile.entropy, 0.0)):
                area[0, c].store(shape.constant(x))
        first = head.seqlen_q - args.last_rows
        count = minimum(head.seqlen_q - tile.q0, shape.block_q)
        for i in loop(0, count):
            lse = head.statistic("lse", tile.q0 + i).load()
            is_hidden = lse.equals(-INF)
            tile.lse[0, i].store(select(is_hidden, 0.0, lse))  # its scores are -inf, its weights 0
            tile.residual[0, i].store(
                select(is_hidden, 0.0, head.statistic("lse_residual", tile.q0 + i).load())
            )
        for i in loop(maximum(0, first - tile.q0), count):
            tile.counted[0, i].store(number(1.0, shape.kind))

    def attend(self, head: Head, tile: Any, j0: Value) -> None:
        """Take the keys of one block that the tile can see into its statistics."""
        shape = self.shape
        k0, k1 = head.key_range(tile.q0, minimum(tile.q0 + shape.block_q, head.seqlen_q))
        first, n = maximum(0, k0 - j0) & -shape.rows, minimum(k1 - j0, shape.block_k)
        first, n = self.scores.visible(head, tile.q0, shape.block_q, j0, first, n)
        with when(first < n):
            for c, m in zip(shape.columns(), self.score_keys(head, tile, j0, first, n)):
                tile.m[0, c].store(m)
            if {"entropy", "column_sum"} & set(self.wanted):
                self.sum_weights(tile, first, n)
            if "column_sum" in self.wanted:
                self.sum_columns(first, n)

    def sum_weights(self, tile: StatisticsTile, first: Value, n: Value) -> None:
        """p_t = exp(s_t - lse), its sums over keys, and the entropy's; then 0 where queries do not count."""
        shape = self.shape
        for c in shape.columns():
            lse, residual, counted = (
                area[0, c].load(shape.lanes) for area in (tile.lse, tile.residual, tile.counted)
            )
            total, entropy = Var(shape.constant(0.0)), Var(shape.constant(0.0))
            for j in loop(first, n, GROUP):  # what is beyond n is hidden: p = 0
                cells = [self.p_t.at(j, c)[r, 0] for r in range(GROUP)]
                below = [(cell.load(shape.lanes) - lse) - residual for cell in cells]
                p = [exp(x, shape.exp_degree) for x in below]
                total.set(total + ((p[0] + p[1]) + (p[2] + p[3])))
                if "entropy" in self.wanted:
                    for x, p_r in zip(below, p):
                        entropy.set(fma(p_r, -1.0 * select(x.equals(-INF), 0.0, x), entropy))
                if "column_sum" in self.wanted:
                    for cell, p_r in zip(cells, p):
                        cell.store(p_r * counted)
            for area, of_block in ((tile.l, total), (tile.entropy, entropy)):
                area[0, c].store(area[0, c].load(shape.lanes) + of_block)

    def sum_columns(self, first: Value, n: Value) -> None:
        """columns += p_t summed over queries; a vector of keys at a time, from zeros beyond the last."""
        shape, lanes = self.shape, self.shape.lanes
        stop = first + ((n - first + (lanes - 1)) & -lanes)
        for j in loop((n + (GROUP - 1)) & -GROUP, stop):
            for c in shape.columns():
                self.p_t[j, c].store(shape.constant(0.0))
        for j in loop(first, stop, lanes):
            keys = [[self.p_t.at(j, c)[r, 0].load(lanes) for c in shape.columns()] for r in range(lanes)]
            sums = fold_sums([sum(of_key[1:], of_key[0]) for of_key in keys])
            self.columns[0, j].store(self.columns[0, j].load(lanes) + sums)

    def add_columns(self, head: Head, part: Value, j0: Value, n: Value) -> None:
        """Add the block's sums to this part's column sums in memory."""
        args, lanes = self.args, self.shape.lanes
        row = part * args.column_p + head.batch * args.column_b + head.head * args.column_h
        target = args.ptr("column_sum", self.shape.kind)[row + head.k_row0 + j0]
        for j in loop(0, n & -lanes, lanes):
            target[j].store(target[j].load(lanes) + self.columns[0, j].load(lanes))
        for j in loop(n & -lanes, n):
            target[j].store(target[j].load() + self.columns[0, j].load())

    def finish(self, head: Head, tile: Any) -> None:
        """Row statistics into memory. A query that saw no key has maximum -inf and entropy 0."""
        shape, n = self.shape, minimum(head.seqlen_q - tile.q0, self.shape.block_q)
        if "entropy" in self.wanted:
            for c in shape.columns():
                self.finish_entropy(head, tile, c)
        for name, area in (("row_max", tile.m), ("entropy", tile.entropy)):
            if name in self.wanted:
                for i in loop(0, n):
                    head.statistic(name, tile.q0 + i).store(area[0, i].load())

    def finish_entropy(self, head: Head, tile: StatisticsTile, c: int) -> None:
        shape = self.shape
        total, entropy = (area[0, c].load(shape.lanes) for area in (tile.l, tile.entropy))
        if shape.config.has_sinks:
            lse, residual = (area[0, c].load(shape.lanes) for area in (tile.lse, tile.residual))
            below = (head.sink() - lse) - residual
            p = exp(below, shape.exp_degree)
            total = total + p
            entropy = fma(p, -1.0 * select(below.equals(-INF), 0.0, below), entropy)
        total = select(total.equals(0.0), 1.0, total)
        tile.entropy[0, c].store(entropy / total + log(total)[0])


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """See `build_kernel`."""
    return build_kernel(StatisticsKernel, config, target)
