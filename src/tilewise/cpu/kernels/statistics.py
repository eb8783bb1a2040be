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

from tilewise.cpu.dsl.control import claim, loop, when
from tilewise.cpu.dsl.numerics import FLOAT32_DEGREE
from tilewise.cpu.dsl.vector import Value, maximum, minimum
from tilewise.cpu.kernels.common.products import products_of
from tilewise.cpu.kernels.common.scores import Scores
from tilewise.cpu.kernels.common.statistics_sums import Sums, Tile
from tilewise.cpu.kernels.common.tiles import (
    Arguments,
    Head,
    KeyBlocks,
    Scratch,
    Shape,
    fitting,
    narrowed,
)


class StatisticsKernel:
    """The kernel's steps, in the order in which they run."""

    key_blocks: KeyBlocks = ((128, 128),)

    def __init__(self, shape: Shape, args: Arguments) -> None:
        shape.exp_degree = max(shape.exp_degree, FLOAT32_DEGREE)  # of 16-bit inputs too: weights stay float32
        self.shape, self.args, self.wanted = shape, args, set(shape.config.statistics)
        self.scratch = scratch = Scratch(shape, args.thread_scratch())
        self.products = products = products_of(shape, args, scratch)
        self.k = products.left(scratch, shape.block_k, shape.pad)
        self.q = products.left(scratch, shape.block_q, shape.pad)
        self.sums = Sums(shape, args, scratch)
        self.scores = Scores(shape, scratch)
        self.narrow = narrowed(self, 2) if shape.vectors == 3 else None
        self.tile_bytes = Tile(products, shape, scratch.base, 0).scratch.bytes

    def facts(self) -> dict[str, int]:
        return {"tile_bytes": self.tile_bytes}

    def run(self) -> None:
        args = self.args
        with self.products.registers(self.scratch):
            for item in claim(args.counter, args.items):
                batch_head, part = item // args.splits, item % args.splits
                head = Head(self.shape, args, batch_head // args.num_heads, batch_head % args.num_heads)
                for before in loop(part, args.chunks, args.splits):
                    self.visit(head, part, args.chunks - 1 - before)  # late queries may see most: first

    def visit(self, head: Head, part: Value, chunk: Value) -> None:
        """A chunk of queries, but for tiles that nothing is asked about."""
        shape, args, block_q = self.shape, self.args, self.shape.block_q
        q0 = chunk * args.tiles * block_q
        skipped = maximum(0, head.seqlen_q - args.visited_rows - q0) // block_q
        q1 = minimum(head.seqlen_q, q0 + args.tiles * block_q)
        q0 = q0 + skipped * block_q
        tiles = (maximum(0, q1 - q0) + (block_q - 1)) // block_q
        for t in loop(0, tiles):
            tile = self.tile(q0, t)
            source, n = head.query_rows("q", tile.q0), head.seqlen_q - tile.q0
            self.products.take_queries(tile.q_t, self.q, source, n, block_q)
            self.sums.start(head, tile)
        k0, k1 = head.key_range(q0, q1)
        with when(q0 < q1):
            for j0 in loop(k0 & -shape.block_k, k1, shape.block_k):
                n = minimum(k1 - j0, shape.block_k)
                self.load_keys(head, j0, n)
                self.sums.clear_columns()
                for t in loop(0, tiles):
                    tile = self.tile(q0, t)
                    for kernel in fitting(self, head, tile.q0):
                        kernel.reduce(head, tile, chunk, j0)
                if "column_sum" in self.wanted:
                    self.sums.add_columns(head, part, j0, n)
        for t in loop(0, tiles):
            self.sums.finish(head, self.tile(q0, t))

    def tile(self, q0: Value, t: Value) -> Tile:
        base = self.scratch.base[self.scratch.bytes][t * self.tile_bytes]
        return Tile(self.products, self.shape, base, q0 + t * self.shape.block_q)

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        height = self.products.height
        count = (n + (height - 1)) & -height
        self.products.take(self.k, head.key_rows("k", j0), n, count, self.shape.config.head_dim)

    def reduce(self, head: Head, tile: Tile, chunk: Value, j0: Value) -> None:
        """Take the keys of one block that the tile can see into its statistics."""
        shape, sums = self.shape, self.sums.narrowed(self.shape)
        k0, k1 = head.key_range(tile.q0, minimum(tile.q0 + shape.block_q, head.seqlen_q))
        first, n = maximum(0, k0 - j0) & -self.products.height, minimum(k1 - j0, shape.block_k)
        first, n = self.scores.visible(head, tile.q0, shape.block_q, j0, first, n)
        with when(first < n):
            self.scores.load(head, tile.q0, j0, n)
            scores = self.scores.at(head, tile.q0, j0)
            products = self.products
            highest = scores.of_keys(products, self.k, tile.q_t, sums.p_t, (first, n), products.scale)
            if "row_max" in self.wanted:
                for x, c in zip(highest, shape.columns()):
                    cell = tile.found["row_max"][0, c]
                    cell.store(maximum(cell.load(shape.lanes), x))
            if "top_k" in self.wanted:
                sums.rank(head, tile, j0, first, n)
            if sums.needs_weights:
                sums.weigh(tile, scores.position, j0, first, n)
            if "block_sum" in self.wanted:
                sums.sum_blocks(head, tile, chunk, j0, first, n)
