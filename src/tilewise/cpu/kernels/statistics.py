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

from collections.abc import Sequence

from tilewise.cpu.dsl.control import claim, loop, when
from tilewise.cpu.dsl.numerics import FLOAT32_DEGREE
from tilewise.cpu.dsl.vector import Operand, Value, Var, maximum, minimum
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.host.compile import Target
from tilewise.cpu.kernels.common.scores import Scores, TileScores
from tilewise.cpu.kernels.common.statistics_sums import Sums, Tile
from tilewise.cpu.kernels.common.tiles import (
    INF,
    Arguments,
    Head,
    KeyBlocks,
    Scratch,
    Shape,
    build_kernel,
    fitting,
    load_rows,
    narrowed,
    outer_sums,
    round_up,
    transpose_rows,
)


class StatisticsKernel:
    """The kernel's steps, in the order in which they run."""

    name = "statistics"
    key_blocks: KeyBlocks = ((128, 128),)

    def __init__(self, shape: Shape, args: Arguments) -> None:
        shape.exp_degree = max(shape.exp_degree, FLOAT32_DEGREE)  # of 16-bit inputs too: weights stay float32
        self.shape, self.args, self.wanted = shape, args, set(shape.config.statistics)
        self.key_group = shape.rows  # keys whose scores are computed together
        self.scratch = scratch = Scratch(shape, args.thread_scratch())
        self.reserve(scratch)
        self.sums = Sums(shape, args, scratch)
        self.scores = Scores(shape, scratch)
        self.narrow = narrowed(self, 2) if shape.vectors == 3 else None
        self.tile_bytes = Tile(shape, scratch.base, 0).scratch.bytes

    def facts(self) -> dict[str, int]:
        return {"tile_bytes": self.tile_bytes}

    def reserve(self, scratch: Scratch) -> None:
        """Room for one block of keys, and for queries coming in."""
        shape = self.shape
        self.k = scratch.rows(shape.block_k, shape.pad)
        self.rows = scratch.rows(round_up(shape.block_q, shape.rows), shape.pad)

    def run(self) -> None:
        args = self.args
        for item in claim(args.counter, args.items):
            batch_head, part = item // args.splits, item % args.splits
            head = Head(self.shape, args, batch_head // args.num_heads, batch_head % args.num_heads)
            for before in loop(part, args.chunks, args.splits):
                self.visit(head, part, args.chunks - 1 - before)  # late queries may see most: longest first

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
            self.load_queries(head, tile)
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
        return Tile(self.shape, base, q0 + t * self.shape.block_q)

    def load_queries(self, head: Head, tile: Tile) -> None:
        """q_t, scaled."""
        shape, n = self.shape, head.seqlen_q - tile.q0
        load_rows(shape, self.rows, head.query_rows("q", tile.q0), n, shape.block_q, shape.config.head_dim)
        factor = self.args.vector("q_factor", shape)
        transpose_rows(shape, tile.q_t, self.rows, shape.block_q, shape.pad, factor)

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        count = (n + (self.key_group - 1)) & -self.key_group
        load_rows(self.shape, self.k, head.key_rows("k", j0), n, count, self.shape.config.head_dim)

    def reduce(self, head: Head, tile: Tile, chunk: Value, j0: Value) -> None:
        """Take the keys of one block that the tile can see into its statistics."""
        shape, sums = self.shape, self.sums.narrowed(self.shape)
        k0, k1 = head.key_range(tile.q0, minimum(tile.q0 + shape.block_q, head.seqlen_q))
        first, n = maximum(0, k0 - j0) & -self.key_group, minimum(k1 - j0, shape.block_k)
        first, n = self.scores.visible(head, tile.q0, shape.block_q, j0, first, n)
        with when(first < n):
            self.scores.load(head, tile.q0, j0, n)
            scores = self.scores.at(head, tile.q0, j0)
            highest = self.score_keys(tile, scores, first, n)
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

    def score_keys(self, tile: Tile, scores: TileScores, first: Value, n: Value) -> Sequence[Operand]:
        """s_t = k q_t with every option, into p_t; their maximum over keys."""
        shape, rows, p_t = self.shape, self.shape.rows, self.sums.p_t
        highest = [Var(shape.constant(-INF)) for _ in shape.columns()]
        for j in loop(first, n, rows):
            s = outer_sums(shape, rows, shape.vectors, shape.config.head_dim, self.k.at(j, 0), tile.q_t)
            scores.apply(s, j)
            for r in range(rows):
                for v, c in enumerate(shape.columns()):
                    p_t.at(j, c)[r, 0].store(s[r][v])
                    highest[v].set(maximum(highest[v], s[r][v]))
        return highest


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """See `build_kernel`."""
    return build_kernel(StatisticsKernel, config, target)
