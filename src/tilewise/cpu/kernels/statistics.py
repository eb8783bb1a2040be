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
caller adds up: no atomics, and the same bits each time on as many threads.

Queries stand in lanes, as everywhere. A tile's sums of rows have one entry a lane; the sums of a block's
columns have a vector of lanes a key, which is folded once all tiles have seen the block. Of the k largest
scores each lane has a sorted list, in which a larger score moves the smaller ones down: keys ascend, so of
equal scores the lower key is met first and stays in front.
"""

from __future__ import annotations

from typing import Any

from tilewise.cpu.dsl.control import claim, loop, when
from tilewise.cpu.dsl.lanes import any_lane, fold_sums
from tilewise.cpu.dsl.numerics import FLOAT32_DEGREE, exp, log
from tilewise.cpu.dsl.vector import (
    F32,
    F64,
    Operand,
    Scalar,
    Value,
    Var,
    absolute,
    as_int,
    as_kind,
    bitcast,
    fma,
    int32,
    maximum,
    minimum,
    number,
    select,
    splat,
)
from tilewise.cpu.kernels.common.dropout import GROUP
from tilewise.cpu.kernels.common.sums import add_row, fill_zero
from tilewise.cpu.kernels.common.tiles import INF, Arguments, Head, KeyBlocks, Scratch, Shape, round_up
from tilewise.cpu.kernels.forward import ForwardKernel, Tile, weighted

OF_ROWS = ("row_max", "entropy", "expected_distance")
OF_TOTALS = {"entropy", "expected_distance", "top_k"}  # what is divided by the sum of a row's weights


class StatisticsTile(Tile):
    """One tile of queries, whose lse is known."""

    def reserve(self, shape: Shape) -> None:
        config, scratch = shape.config, self.scratch
        self.lse, self.residual = (scratch.rows(1, shape.block_q) for _ in range(2))
        self.counted = scratch.rows(1, shape.block_q)  # 1, or 0 where column sums leave a query out
        names = [name for name in OF_ROWS if name in config.statistics]
        self.found = {name: scratch.rows(1, shape.block_q) for name in (*names, "total")}
        self.best, self.best_keys = (scratch.rows(config.top_k, shape.block_q) for _ in range(2))


class StatisticsKernel(ForwardKernel):
    """The steps that differ from the forward's, in the order in which they run."""

    key_blocks: KeyBlocks = ((128, 128),)
    make_tile = StatisticsTile
    part: Value  # of the head, which has column sums of its own
    chunk: Value  # of queries, of which neighbours have block sums of their own

    def __init__(self, shape: Shape, args: Arguments) -> None:
        shape.exp_degree = max(shape.exp_degree, FLOAT32_DEGREE)  # of 16-bit inputs too: weights stay float32
        self.wanted = set(shape.config.statistics)
        self.needs_total = bool(OF_TOTALS & self.wanted)
        self.needs_weights = self.needs_total or bool({"column_sum", "block_sum"} & self.wanted)
        super().__init__(shape, args)

    def reserve(self, scratch: Scratch) -> None:
        shape = self.shape
        self.load_k = shape.block_k
        self.k = self.products.left(scratch, self.load_k, shape.pad)
        self.s_t = scratch.rows(shape.block_k, shape.block_q)  # a tile's scores, and then its weights
        self.columns = scratch.rows(shape.block_k, shape.lanes)  # of one block of keys, to be folded
        self.folded = scratch.rows(1, shape.block_k)
        self.row_sums = scratch.rows(1, shape.block_q)  # over keys of one block of `block_sum`

    def visit_items(self) -> None:
        args = self.args
        for item in claim(args.counter, args.items):
            head, self.part = self.head_of(item // args.splits), item % args.splits
            for before in loop(self.part, args.chunks, args.splits):
                self.chunk = args.chunks - 1 - before  # late queries may see most: first
                q0, q1 = self.queries(self.chunk)
                unasked = maximum(0, head.seqlen_q - args.visited_rows - q0) // self.shape.block_q
                self.visit(head, q0 + unasked * self.shape.block_q, q1)

    def start(self, head: Head, tile: Any) -> None:
        """lse, which is infinite beyond the last query, so that weights are 0 there; nothing found yet."""
        shape, kind = self.shape, self.shape.kind
        self.load_queries(head, tile)
        for c in shape.columns():
            for area, x in ((tile.lse, INF), (tile.residual, 0.0), (tile.counted, 0.0)):
                area[0, c].store(shape.constant(x))
            for name, area in tile.found.items():
                area[0, c].store(shape.constant(-INF if name == "row_max" else 0.0))
            for i in loop(0, shape.config.top_k) if shape.config.top_k else ():
                tile.best[i, c].store(shape.constant(-INF))
        count = minimum(head.seqlen_q - tile.q0, shape.block_q)
        for i in loop(0, count):
            lse, residual = (head.statistic(name, tile.q0 + i).load() for name in ("lse", "lse_residual"))
            is_hidden = lse.equals(-INF)  # its scores are -inf, its weights 0
            tile.lse[0, i].store(select(is_hidden, 0.0, lse))
            tile.residual[0, i].store(select(is_hidden, 0.0, residual))
        first = head.seqlen_q - self.args.last_rows
        for i in loop(maximum(0, first - tile.q0), count):
            tile.counted[0, i].store(number(1.0, kind))

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        products, source = self.products, head.key_rows("k", j0)
        products.take(self.k, source, n, round_up(n, products.height), self.shape.config.head_dim)
        if "column_sum" in self.wanted:
            fill_zero(self.shape, self.columns, self.shape.block_k)

    def attend_block(self, head: Head, tile: Any, j0: Value, j: Scalar, keys: tuple[Value, Value]) -> None:
        """Take some keys of one block into the tile's statistics."""
        shape, products = self.shape, self.products
        self.scores.load(head, tile.q0, j0, keys[1])
        scores = self.scores.at(head, tile.q0, j0)
        highest = scores.of_keys(products, self.k, tile.q_t, self.s_t, keys, products.scale)
        if "row_max" in self.wanted:
            for x, c in zip(highest, shape.columns()):
                cell = tile.found["row_max"][0, c]
                cell.store(maximum(cell.load(shape.lanes), x))
        if "top_k" in self.wanted:
            self.rank(head, tile, j0, *keys)
        if self.needs_weights:
            self.sum_weights(tile, scores.position, j0, *keys)
        if "block_sum" in self.wanted:
            self.sum_blocks(head, tile, j0, *keys)

    def first_key(self, head: Head, j0: Scalar) -> Value:
        """The number of key j0 in tensors that have a place for every key of a batch entry."""
        return head.k_row0 * self.args.score_k0 + j0

    def rank(self, head: Head, tile: StatisticsTile, j0: Value, first: Value, n: Value) -> None:
        """Take the scores of the keys j0 + [first, n) into the lists of the k largest."""
        shape, k = self.shape, self.shape.config.top_k
        for c in shape.columns():
            last = tile.best[k - 1, c]
            least = Var(last.load(shape.lanes))
            for j in loop(first, n, GROUP):  # what is beyond n is hidden: -inf
                s = [self.s_t.at(j, c)[r, 0].load(shape.lanes) for r in range(GROUP)]
                largest = maximum(maximum(s[0], s[1]), maximum(s[2], s[3]))
                with when(any_lane(largest > least)):
                    for r in loop(j, j + GROUP):
                        score = self.s_t[r, c].load(shape.lanes)
                        with when(any_lane(score > least)):
                            self._insert(tile, c, score, self.first_key(head, j0 + r))
                            least.set(last.load(shape.lanes))

    def _insert(self, tile: StatisticsTile, c: int, score: Value, key: Value) -> None:
        """Put a key's score where it belongs in each lane's list; the last one falls out."""
        shape = self.shape
        moved = Var(score)
        moved_key = Var(self._as_number(splat(key if shape.item == 8 else int32(key), shape.lanes)))
        for i in loop(0, shape.config.top_k):
            pairs = ((tile.best[i, c], moved), (tile.best_keys[i, c], moved_key))
            is_larger = score > pairs[0][0].load(shape.lanes)
            for cell, above in pairs:
                here = cell.load(shape.lanes)
                cell.store(select(is_larger, above, here))
                above.set(select(is_larger, here, above))

    def _as_number(self, keys: Operand) -> Value:
        """The bits of integers as those of the compute type, in which they are only moved."""
        return bitcast(keys, F64 if self.shape.item == 8 else F32)

    def sum_weights(
        self, tile: StatisticsTile, positions: list[Value], j0: Value, first: Value, n: Value
    ) -> None:
        """p_t = exp(s_t - lse), and what is summed of them. `positions` of the queries among the keys."""
        shape, wanted = self.shape, self.wanted
        for v, c in enumerate(shape.columns()):
            lse, residual, counted = (
                area[0, c].load(shape.lanes) for area in (tile.lse, tile.residual, tile.counted)
            )
            sums = {name: Var(shape.constant(0.0)) for name in tile.found if name != "row_max"}
            position = as_kind(positions[v], shape.kind)
            for j in loop(first, n, GROUP):  # what is beyond n is hidden: p = 0
                cells = [self.s_t.at(j, c)[r, 0] for r in range(GROUP)]
                below = [(cell.load(shape.lanes) - lse) - residual for cell in cells]
                p = [exp(x, shape.exp_degree) for x in below]
                if self.needs_total:
                    sums["total"].set(sums["total"] + ((p[0] + p[1]) + (p[2] + p[3])))
                for r, (x, p_r) in enumerate(zip(below, p)):
                    if "entropy" in wanted:
                        sums["entropy"].set(weighted(p_r, x, sums["entropy"]))
                    if "expected_distance" in wanted:
                        key = as_kind(int32(j0 + j + r), shape.kind)
                        distance = absolute(position - key)
                        sums["expected_distance"].set(fma(p_r, distance, sums["expected_distance"]))
                    if "column_sum" in wanted:
                        cell = self.columns.at(j, 0)[r, 0]
                        cell.store(fma(p_r, counted, cell.load(shape.lanes)))
                    if "block_sum" in wanted:
                        cells[r].store(p_r)
            for name, of_block in sums.items():
                cell = tile.found[name][0, c]
                cell.store(cell.load(shape.lanes) + of_block)

    def sum_blocks(self, head: Head, tile: StatisticsTile, j0: Value, first: Value, n: Value) -> None:
        """Add the weights of the keys j0 + [first, n) to the blocks of `block_sum` that they lie in."""
        shape, args, size, q0 = self.shape, self.args, self.args.block_size, as_int(tile.q0)
        start, count = self.first_key(head, j0), minimum(head.seqlen_q - q0, shape.block_q)
        target = args.ptr("block_sum", shape.kind)[self.chunk % args.block_parts * args.block_p]
        target = target[head.batch * args.block_b + head.head * args.block_h]
        for block in loop((start + first) // size, (start + n - 1) // size + 1):
            sums = [Var(shape.constant(0.0)) for _ in shape.columns()]
            begin, end = maximum(first, block * size - start), minimum(n, (block + 1) * size - start)
            for j in loop(begin, end):
                for total, c in zip(sums, shape.columns()):
                    total.set(total + self.s_t[j, c].load(shape.lanes))
            for total, c in zip(sums, shape.columns()):
                self.row_sums[0, c].store(total)
            for row in loop(q0 // size, (q0 + count - 1) // size + 1):
                total = Var(number(0.0, shape.kind))
                for i in loop(maximum(0, row * size - q0), minimum(count, (row + 1) * size - q0)):
                    total.set(total + self.row_sums[0, i].load())
                cell = target[row * args.block_i + block]
                cell.store(cell.load() + total)

    def leave_keys(self, head: Head, j0: Value, n: Value) -> None:
        """Add a block's sums over all tiles of a chunk to this part's column sums in memory."""
        if "column_sum" not in self.wanted:
            return
        args, lanes = self.args, self.shape.lanes
        for j in loop(0, n, lanes):
            keys = [self.columns.at(j, 0)[r, 0].load(lanes) for r in range(lanes)]
            self.folded[0, j].store(fold_sums(keys))
        row = self.part * args.column_p + head.batch * args.column_b + head.head * args.column_h
        target = args.ptr("column_sum", self.shape.kind)[row + head.k_row0 + j0]
        add_row(self.shape, target, self.folded, 0, n)

    def finish(self, head: Head, tile: Any) -> None:
        """Row statistics into memory. A query that saw no key has maximum -inf, the rest 0, and keys -1."""
        shape, n = self.shape, minimum(head.seqlen_q - tile.q0, self.shape.block_q)
        if self.needs_total:
            for c in shape.columns():
                self._divide(head, tile, c)
        for i in loop(0, n):
            for name in OF_ROWS:
                if name in self.wanted:
                    head.statistic(name, tile.q0 + i).store(tile.found[name][0, i].load())
        if "top_k" in self.wanted:
            self._store_best(head, tile, n)

    def _divide(self, head: Head, tile: StatisticsTile, c: int) -> None:
        """What belongs to a row is divided by the sum of its weights, that of its sink included."""
        shape, lanes = self.shape, self.shape.lanes
        total, lse, residual = (
            area[0, c].load(lanes) for area in (tile.found["total"], tile.lse, tile.residual)
        )
        entropy = tile.found["entropy"][0, c].load(lanes) if "entropy" in self.wanted else None
        if shape.config.has_sinks:
            below = (head.sink() - lse) - residual
            p = exp(below, shape.exp_degree)
            total = total + p
            entropy = None if entropy is None else weighted(p, below, entropy)
        total = select(total.equals(0.0), 1.0, total)
        if entropy is not None:
            tile.found["entropy"][0, c].store(maximum(0.0, log(total)[0] - entropy / total))
        if "expected_distance" in self.wanted:
            cell = tile.found["expected_distance"][0, c]
            cell.store(cell.load(lanes) / total)
        if "top_k" in self.wanted:
            for i in loop(0, shape.config.top_k):
                score = tile.best[i, c].load(lanes)
                none = self._as_number(splat(as_int(-1) if shape.item == 8 else int32(-1), lanes))
                key = tile.best_keys[i, c]
                key.store(select(score.equals(-INF), none, key.load(lanes)))
                tile.best[i, c].store(exp((score - lse) - residual, shape.exp_degree) / total)

    def _store_best(self, head: Head, tile: StatisticsTile, n: Value) -> None:
        args, k = self.args, self.shape.config.top_k
        row = head.batch * args.lse_b + head.head * args.lse_h + head.q_row0 + tile.q0
        weights = args.ptr("top_weights", self.shape.kind)[row * k]
        keys = args.ptr("top_keys", "i64")[row * k]
        stored = "i64" if self.shape.item == 8 else "i32"
        for i in loop(0, n):
            for r in loop(0, k):
                weights[i * k + r].store(tile.best[r, i].load())
                keys[i * k + r].store(tile.best_keys[r, i].as_kind(stored).load())
