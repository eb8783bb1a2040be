"""Attention of a few queries to many keys, at the speed of memory.

With few queries, query lanes would stay empty: here the head dimension stands in lanes, and the queries of
all heads that share a key head (the rows) read each key once. A work item is one split of the keys, for one
key head or for several whose keys lie side by side (`splits.py`):

    for each block of keys, and each head of the item:                          k, v where they lie
        mask and mask function are looked at first: a block that they hide is not read
        for each few keys:  s = k q of all rows                                 [rows, BLOCK_K]
        for each row:
            s     with softcap, bias, ALiBi, functions, visibility
            m_new = max(m, max(s));  c = exp(m - m_new);  p = exp(s - m_new)
            l     = c l + sum(p)
        for each few columns:  acc = c acc + p v of all rows                    [rows, head_dim_v]

A vector of products s holds `depth` columns of each of `group` rows, so that one load of 4 numbers of k
serves 4 rows and a sum over 4 lanes is all that remains:

    q:  row 0: c c+1 c+2 c+3 | row 1: c c+1 c+2 c+3 | row 2 ...        k:  c c+1 c+2 c+3 | c c+1 c+2 c+3 | ...

Where a processor multiplies pairs of bfloat16, a column is such a pair, and nothing of k is converted.

While a block is used, the same rows of the next head, or of the next block, are on their way.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise.cpu.dsl.bf16_products import DOT_SETS, dot, pairs_at
from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.lanes import across, any_lane, fold_sums, lanes_of, repeated
from tilewise.cpu.dsl.memory import Ptr, Rows, prefetch, prefetch_row
from tilewise.cpu.dsl.numerics import exp
from tilewise.cpu.dsl.vector import (
    BYTES,
    Operand,
    Value,
    Var,
    as_int,
    count_from,
    fma,
    int32,
    maximum,
    minimum,
    select,
)
from tilewise.cpu.host.arguments import BLOCK_K
from tilewise.cpu.kernels.common.functions import KernelFunctions, RowFunctions
from tilewise.cpu.kernels.common.splits import Block, SplitKernel
from tilewise.cpu.kernels.common.tiles import (
    INF,
    Grid,
    Head,
    Scratch,
    added,
    lane_chunks,
    load_rows,
    load_score_row,
    round_up,
)

PAIRS = 16  # of a cache line
LONG_DOT = 40  # products that one lane sums at most of a float32 score
BLOCK_BYTES = 8 << 10  # of K, and of V: more than 12 rows that lie 4 KB apart do not stay in L1


class DecodeKernel(SplitKernel):
    """The kernel's steps, in the order in which they run."""

    has_pairs = False  # of bfloat16, for columns of q and k

    def reserve(self, scratch: Scratch) -> list[tuple[int, int]]:
        shape, lanes = self.shape, self.shape.lanes
        self.size_tiles()
        is_whole = self.config.head_dim == shape.pad
        multiplies_pairs = self.config.kind == "bf16" and shape.target.isa in DOT_SETS
        self.has_pairs = multiplies_pairs and is_whole and shape.pad % (2 * PAIRS) == 0
        reads_k = self.has_pairs or self.depth == lanes or self.config.kind == shape.kind
        self.copies_k = not (is_whole and reads_k)
        self.copies_v = self.config.head_dim_v != shape.pad_v
        self.k = scratch.rows(self.tile_k, shape.pad)
        self.v = scratch.rows(self.block_k * self.copies_v, shape.pad_v)
        self.raw_q = scratch.rows(self.rows, shape.pad)
        self.p = scratch.rows(round_up(self.rows, lanes), self.block_k)  # s until the exponential is taken
        self.m_rows = self.rows  # all lanes of m are alike
        m = l = (self.rows, lanes)
        self.reserve_options(scratch)
        return [(self.row_groups, shape.pad * self.group), (self.rows, shape.pad_v), m, l]

    def reserve_options(self, scratch: Scratch) -> None:
        self.functions = KernelFunctions(self.shape, scratch, lane="j") if self.config.functions else None
        options = {"mask": self.config.has_mask, "bias": bool(self.config.bias_kind)}
        self.options = {name: scratch.rows(1, self.block_k) for name, used in options.items() if used}
        has_function = self.functions is not None and self.functions.mask is not None
        hides = has_function or self.config.has_mask
        self.seen = scratch.rows(self.rows, self.block_k) if hides else None  # 1 where these show a key

    def load_option(self, name: str, head: Head, i: Value, block: Block) -> Rows | None:
        """The block's part of query i's row of mask or bias; None without."""
        if name not in self.options:
            return None
        kind = "bool" if name == "mask" else self.config.bias_kind
        row, step = head.score_row(name, kind, i, block.j0), getattr(self.args, f"{name}_j")
        load_score_row(self.shape, self.options[name], row, step, block.n)
        return self.options[name]

    def size_tiles(self) -> None:
        """How many rows, keys and columns are handled at once."""
        shape, lanes = self.shape, self.shape.lanes
        # Scores: a vector holds `depth` products of `group` rows; sums of `groups` x `tile_k` vectors.
        sums = 2 * shape.target.rows
        self.depth = max(min(4, lanes), lanes // self.rows)
        self.group = lanes // self.depth
        self.row_groups = -(-self.rows // self.group)
        self.groups = min(self.row_groups, sums // self.depth)
        self.tile_k = self.depth * max(1, min(8, sums // self.groups) // self.depth)
        step = max(lanes, self.tile_k)  # a block is whole tiles of keys and whole vectors of scores
        row_bytes = max(shape.pad, shape.pad_v) * BYTES[self.config.kind]
        self.block_k = block_k = max(step, min(BLOCK_K, BLOCK_BYTES // row_bytes // step * step))
        assert block_k % self.tile_k == block_k % lanes == 0
        # Values: sums of `tile` rows x `vectors` vectors.
        self.tile = min(4, self.rows)
        self.vectors = min(8, sums // self.tile)

    def visit_blocks(self, batch: Value, part: Value, begin: Value, end: Value) -> None:
        for j0 in loop(begin, end, self.block_k):
            for h, head in self.each_head(batch, part):
                self.visit_seen(head, Block(j0, minimum(end - j0, self.block_k), end, h))

    def visit_seen(self, head: Head, block: Block) -> None:
        """Visit the block, unless mask or mask function hide it."""
        if self.seen is None:
            self.visit(head, block)
        else:
            with when(self.look(head, block, self.seen)):
                self.visit(head, block)

    def visit(self, head: Head, block: Block) -> None:
        self.score(head, block)
        for r in loop(0, self.rows_of(head)):
            self.weigh_row(self.query_head(head, r), r, block)
        self.add_values(head, block)

    def look(self, head: Head, block: Block, seen: Rows) -> Value:
        """Which keys of a block mask and mask function show to each row; whether they show any at all."""
        lanes, function = self.shape.lanes, None
        any_seen = Var(self.shape.constant(0.0))
        for r in loop(0, self.rows_of(head)):
            own, i = self.query_head(head, r), r % head.seqlen_q
            k0, k1 = (int32(k, lanes) for k in own.key_range(i, i + 1))
            mask = self.load_option("mask", own, i, block)
            if self.functions is not None and self.functions.mask is not None:
                function = RowFunctions(self.functions, self.shape, own, i)
            for j in loop(0, round_up(block.n, lanes), lanes):
                key = count_from(block.j0 + j, lanes)
                visible = (key >= k0) & (key < k1)
                if mask is not None:
                    visible = visible & (mask[0, j].load(lanes) > 0.0)
                if function is not None:
                    visible = function.visible(key, visible)
                ones = select(visible, self.shape.constant(1.0), 0.0)
                seen[r, j].store(ones)
                any_seen.set(maximum(any_seen, ones))
        return any_lane(any_seen > 0.0)

    def load_queries(self, head: Head, rows: Value) -> None:
        """q, scaled but where it is in pairs, in the order of the products of a vector."""
        if self.has_pairs:
            row, count = self.query_rows(head, "q"), self.row_groups * self.group
            own = [row(minimum(as_int(i), rows - 1)).as_kind("f32") for i in range(count)]
            self.group_columns(self.q, own, self.shape.pad // 2)
            return
        load_rows(self.shape, self.raw_q, self.query_rows(head, "q"), rows, self.rows, self.config.head_dim)
        self.group_rows(self.q, self.raw_q, self.args.vector("q_factor", self.shape))

    def group_rows(self, grouped: Rows, rows: Rows, factor: Operand | None = None) -> None:
        """Rows (times a factor) in the order of the products of a vector; the last one fills up its group."""
        own = [rows[min(i, self.rows - 1), 0] for i in range(self.row_groups * self.group)]
        self.group_columns(grouped, own, rows.stride, factor)

    def group_columns(
        self, grouped: Rows, rows: list[Ptr], count: int, factor: Operand | None = None
    ) -> None:
        """`depth` of so many columns of each of `group` rows side by side, and so on."""
        for i, row in enumerate(rows):
            corner = grouped.at(i // self.group, i % self.group * self.depth)
            for c in loop(0, count, self.depth):
                x = self.columns_at(row[c])
                x = x if factor is None else x * lanes_of(factor, 0, self.depth)
                corner[0, c * self.group].store(x)

    def columns_at(self, source: Ptr) -> Value:
        """`depth` columns of a row."""
        return pairs_at(source, self.depth) if self.has_pairs else source.load(self.depth)

    def sources(self, head: Head, name: str, block: Block) -> tuple[Callable, Callable]:
        """Rows of k or v of the block as a function of j; the row to ask for while row j is used.

        That one belongs to the item's next part, or to its first head and the next block.
        """
        args, row = self.args, head.key_rows(name, block.j0)
        step = getattr(args, f"{name}_h")
        is_last = (block.head + 1).equals(args.item_heads)
        next_head = (head.head + args.part_heads) // args.group - head.kv_head  # 0 for more parts of this one
        to_head = step * select(is_last, 1 - args.item_heads // args.parts, next_head)
        if self.config.page_size:
            from_start = head.key_rows(name, 0)
            j1 = block.j0 + select(is_last, as_int(self.block_k), 0)
            return row, lambda j: from_start(minimum(j1 + j, block.end - 1))[to_head]
        ahead = maximum(minimum(block.end - block.j0 - self.block_k, self.block_k), 0)
        delta = to_head + select(is_last, ahead, 0) * getattr(args, f"{name}_n")
        return row, lambda j: row(j)[delta]

    def score(self, head: Head, block: Block) -> None:
        """s = k q for one block of keys: each tile of keys serves all rows before the next one is read."""
        n, config, shape = block.n, self.config, self.shape
        row, later = self.sources(head, "k", block)
        for j in loop(0, n, self.tile_k):
            keys = [minimum(j + key, n - 1) for key in range(self.tile_k)]
            ahead = [later(key) for key in keys]
            if self.copies_k:
                rest = head.key_rows("k", block.j0 + j)
                load_rows(shape, self.k, rest, n - j, self.tile_k, config.head_dim)
                for later_row in ahead:
                    prefetch_row(later_row, config.head_dim)
            k = [self.k[key, 0] if self.copies_k else row(keys[key]) for key in range(self.tile_k)]
            if self.has_pairs:
                k, ahead = ([x.as_kind("f32") for x in rows] for rows in (k, ahead))
            self.multiply(self.q, k, self.p.at(0, j), [] if self.copies_k else ahead)

    def multiply(self, q: Rows, k: list[Ptr], s: Rows, ahead: list[Ptr]) -> None:
        """s = k q of all rows and `tile_k` keys; `ahead` are rows to ask for meanwhile."""
        depth, line, pad = self.depth, 64 // k[0].item, q.stride // self.group >> self.has_pairs
        columns = range(0, pad, line if pad % line == 0 else self.shape.lanes)
        for first in range(0, self.row_groups, self.groups):
            groups = range(first, min(first + self.groups, self.row_groups))
            dots = self.dots(groups, q, k, columns, [] if first else ahead)
            for g, sums in zip(groups, dots):
                for key in range(0, self.tile_k, depth):
                    folded = fold_sums(sums[key : key + depth])
                    if self.has_pairs:
                        folded = folded * self.args.vector("q_factor", self.shape)
                    for i in range(min(self.group, self.rows - g * self.group)):
                        s[g * self.group + i, key].store(lanes_of(folded, i * depth, depth))

    def dots(self, groups: range, q: Rows, k: list[Ptr], columns: range, ahead: list[Ptr]) -> Grid:
        """Sums of `depth` products side by side, over some columns; long ones are sums of two halves."""
        if self.config.kind == "f32" and columns.stop - columns.start > self.depth * LONG_DOT:
            cut = columns[len(columns) // 2]
            first = self.dots(groups, q, k, range(columns.start, cut, columns.step), ahead)
            return added(first, self.dots(groups, q, k, range(cut, columns.stop, columns.step), ahead))
        shape, lanes, group = self.shape, self.shape.lanes, self.group
        dots = [[Var(shape.constant(0.0)) for _ in k] for _ in groups]
        for c in loop(columns.start, columns.stop, columns.step):
            for row in ahead:
                prefetch(row[c])
            for d in range(0, columns.step, self.depth):
                q_d = [q[g, c * group + d * group].load(lanes) for g in groups]
                for key, row in enumerate(k):
                    k_d = repeated(self.columns_at(row[c][d]), group)
                    for factor, sums in zip(q_d, dots):
                        total = sums[key]
                        total.set(dot(total, k_d, factor) if self.has_pairs else fma(k_d, factor, total))
        return dots

    def weigh_row(self, head: Head, r: Value, block: Block) -> None:
        """p = exp(s - m), with the options and -inf where not visible; l, m and the correction of row r."""
        shape = self.shape
        m_old = self.m[r, 0].load(shape.lanes)
        m_new = across(self.finish_scores(head, r, block, m_old), maximum)
        m_finite = select(m_new.equals(-INF), 0.0, m_new)  # exp(-inf - -inf) would be NaN
        correction = exp(m_old - m_finite, shape.exp_degree)
        l = Var(self.l[r, 0].load(shape.lanes) * correction)
        for j in loop(0, block.n, shape.lanes):
            p = exp(self.p[r, j].load(shape.lanes) - m_finite, shape.exp_degree)
            self.p[r, j].store(p)
            l.set(l + p)
        self.m[r, 0].store(m_new)
        self.l[r, 0].store(l)
        self.correction[r, 0].store(correction)

    def finish_scores(self, head: Head, r: Value, block: Block, m: Value) -> Operand:
        """The options, and -inf where not visible, for a row of products; the running maximum in lanes."""
        lanes, i = self.shape.lanes, r % head.seqlen_q
        k0, k1 = (int32(k, lanes) for k in head.key_range(i, i + 1))
        largest, function, bias = Var(m), None, self.load_option("bias", head, i, block)
        if self.functions is not None and self.functions.score is not None:
            function = RowFunctions(self.functions, self.shape, head, i)
        for j in loop(0, round_up(block.n, lanes), lanes):
            key = count_from(block.j0 + j, lanes)
            distance = key - int32(i + head.offset)
            added = None if bias is None else bias[0, j].load(lanes)
            s, _ = self.with_options(self.p[r, j].load(lanes), distance, self.slope_of(head), added)
            is_visible = (key >= k0) & (key < k1)
            if self.seen is not None:
                is_visible = is_visible & (self.seen[r, j].load(lanes) > 0.0)
            if function is not None:
                s = function.score(s, key, is_visible)
            s = select(is_visible, s, -INF)
            self.p[r, j].store(s)
            largest.set(maximum(largest, s))
        return largest

    def add_values(self, head: Head, block: Block) -> None:
        """acc = correction * acc + p v, a few columns of v at a time for all rows."""
        shape, config = self.shape, self.config
        row, later = self.sources(head, "v", block)
        if self.copies_v:
            load_rows(shape, self.v, row, block.n, block.n, config.head_dim_v)
        for first, count, vectors in lane_chunks(shape, shape.pad_v, self.vectors):
            width = vectors * shape.lanes
            for column in loop(first, first + count * width, width):
                for r in range(0, self.rows, self.tile):
                    self.add_tile(r, column, vectors, block.n, row, later)

    def add_tile(self, r: int, column: Value, vectors: int, n: Value, row: Callable, later: Callable) -> None:
        """acc[r + [0, tile), column + vectors], and this tile's share of what is to be asked for."""
        shape, lanes = self.shape, self.shape.lanes
        columns = [x * lanes for x in range(vectors)]
        p_rows = self.p.at(r, 0)
        item = BYTES[self.config.kind]
        lines = range(0, vectors * lanes, 64 // item)[r // self.tile :: self.rows // self.tile]
        pv = [[Var(shape.constant(0.0)) for _ in columns] for _ in range(self.tile)]
        for k in loop(0, n):
            source = self.v[k, column] if self.copies_v else row(k)[column]
            v = [source[c].load(lanes) for c in columns]
            for c in lines:
                prefetch(later(k)[column][c])
            for i, sums in enumerate(pv):
                p = p_rows[i, k].splat(lanes)
                for v_c, total in zip(v, sums):
                    total.set(fma(p, v_c, total))
        for i, sums in enumerate(pv):
            correction = self.correction.at(r, 0)[i, 0].load(lanes)
            for c, total in zip(columns, sums):
                acc = self.acc.at(r, column)[i, c]
                acc.store(fma(acc.load(lanes), correction, total))

    def statistics(self, r: Value) -> tuple[Value, Value]:
        m, l = (area[r, 0].load(self.shape.lanes) for area in (self.m, self.l))
        return m, across(l, lambda a, b: a + b)
