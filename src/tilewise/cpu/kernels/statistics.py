"""Statistics of the weights on the CPU: a second pass over Q K^T, when lse is known, that forgets each tile.

A work item is one head and some of its chunks of `tiles` tiles of queries. For each block of keys:

    s_t = k q_t (+ softcap, bias, ALiBi, mask)                        [block_k, block_q]
    row_max = max(row_max, max over keys of s_t)
    best    = the k largest of best and s_t, of each query
    p_t = exp(s_t - lse)
    total   += sum over keys of p_t                                   1 at last, but for the error of lse
    entropy += sum over keys of p_t (s_t - lse)                       at last: log total - entropy / total
    expected_distance += sum over keys of p_t |i - j|                 at last: over total
    column_sum[j] += sum over the last queries of p_t[j]
    block_sum[i // size, j // size] += p_t[j, i]

Items of one head have column sums of their own, and so have neighbouring chunks their block sums, which the
caller adds up: no atomics, and the same bits each time on as many threads. `statistics_sums` has the sums.
"""

from __future__ import annotations

from typing import Any

from tilewise.cpu.dsl.control import claim, loop
from tilewise.cpu.dsl.numerics import FLOAT32_DEGREE
from tilewise.cpu.dsl.vector import Scalar, Value, maximum
from tilewise.cpu.kernels.common.statistics_sums import StatisticsTile, Sums
from tilewise.cpu.kernels.common.tiles import Arguments, Head, KeyBlocks, Scratch, Shape, round_up
from tilewise.cpu.kernels.forward import ForwardKernel


class StatisticsKernel(ForwardKernel):
    """The steps that differ from the forward's, in the order in which they run."""

    key_blocks: KeyBlocks = ((128, 128),)
    make_tile = StatisticsTile

    def __init__(self, shape: Shape, args: Arguments) -> None:
        shape.exp_degree = max(shape.exp_degree, FLOAT32_DEGREE)  # of 16-bit inputs too: weights stay float32
        self.wanted = set(shape.config.statistics)
        super().__init__(shape, args)

    def reserve(self, scratch: Scratch) -> None:
        self.load_k = self.shape.block_k
        self.k = self.products.left(scratch, self.load_k, self.shape.pad)
        self.sums = Sums(self.shape, self.args, scratch)

    def visit_items(self) -> None:
        args = self.args
        for item in claim(args.counter, args.items):
            head, self.sums.part = self.head_of(item // args.splits), item % args.splits
            for before in loop(self.sums.part, args.chunks, args.splits):
                self.sums.chunk = args.chunks - 1 - before  # late queries may see most: first
                q0, q1 = self.queries(self.sums.chunk)
                unasked = maximum(0, head.seqlen_q - args.visited_rows - q0) // self.shape.block_q
                self.visit(head, q0 + unasked * self.shape.block_q, q1)

    def start(self, head: Head, tile: Any) -> None:
        self.load_queries(head, tile)
        self.sums.start(head, tile)

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        products, source = self.products, head.key_rows("k", j0)
        products.take(self.k, source, n, round_up(n, products.height), self.shape.config.head_dim)
        self.sums.clear_columns()

    def leave_keys(self, head: Head, j0: Value, n: Value) -> None:
        if "column_sum" in self.wanted:
            self.sums.add_columns(head, j0, n)

    def attend_block(self, head: Head, tile: Any, j0: Value, j: Scalar, keys: tuple[Value, Value]) -> None:
        """Take some keys of one block into the tile's statistics."""
        shape, sums, products = self.shape, self.sums.narrowed(self.shape), self.products
        self.scores.load(head, tile.q0, j0, keys[1])
        scores = self.scores.at(head, tile.q0, j0)
        highest = scores.of_keys(products, self.k, tile.q_t, sums.p_t, keys, products.scale)
        if "row_max" in self.wanted:
            for x, c in zip(highest, shape.columns()):
                cell = tile.found["row_max"][0, c]
                cell.store(maximum(cell.load(shape.lanes), x))
        if "top_k" in self.wanted:
            sums.rank(head, tile, j0, *keys)
        if sums.needs_weights:
            sums.weigh(tile, scores.position, j0, *keys)
        if "block_sum" in self.wanted:
            sums.sum_blocks(head, tile, j0, *keys)

    def finish(self, head: Head, tile: Any) -> None:
        self.sums.finish(head, tile)
