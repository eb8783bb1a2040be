"""Decoding in tile registers: `decode.py` with other products and another softmax, for bfloat16.

Keys and values are read where they lie, one key head after the other. A tile of scores has keys as rows and
rows as columns, and the softmax takes it as it is stored: a vector holds 16 // width keys of `width` rows, so
that one instruction serves all rows, and sums over keys are sums of vectors.

    s_t = k q_t, 32 keys at a time                                               [block_k, width]
    s_t = scaled, with the options
    where a score is far above m:  m = max(s_t), and l and acc follow
    p   = exp(s_t - m) and l, of all rows in lanes
    w   = p^T, rounded, as words (p, 0) for even columns and (0, p) for odd ones [2 rows, block_k]
    acc += w v, 16 keys and 64 or 128 columns at a time                          [2 rows, head_dim_v / 2]

As v is not turned into pairs of keys, a word of it is two columns of one key, and one of them has weight 0.
An infinite value so makes its neighbour NaN: where there is a NaN, the call is done again in vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewise.cpu.dsl.bf16_products import (
    ROW,
    ROWS,
    TILE,
    clear_tile,
    load_tile,
    multiply_tiles,
    rounded_words,
    store_tile,
    tile_registers,
    words,
)
from tilewise.cpu.dsl.control import either, loop, when
from tilewise.cpu.dsl.lanes import across, any_lane, deinterleaved, interleaved, repeated
from tilewise.cpu.dsl.memory import L1, Ptr, Rows, prefetch_row
from tilewise.cpu.dsl.numerics import LOG2_E, exp2
from tilewise.cpu.dsl.vector import (
    I32,
    Operand,
    Scalar,
    Value,
    Var,
    as_int,
    bitcast,
    count_from,
    int32,
    maximum,
    minimum,
    select,
)
from tilewise.cpu.host.arguments import BLOCK_K
from tilewise.cpu.kernels.common.splits import Block, SplitKernel
from tilewise.cpu.kernels.common.tiles import INF, Head, Scratch, load_rows, round_up

SLACK = 8.0  # scores may be so far above the m that weights count from: they are rounded all the same
DEGREE = 4  # of 2^f: off by 5e-6, as in the forward
FEW = 4  # rows whose softmax takes so little that small blocks, which memory likes, cost nothing
ASKED = 2 << 10  # bytes of keys and values to ask for at each of 16 keys
S, Q, W, ACC = 0, 2, 3, 4  # tile registers; S + 1 is one of s for few rows, else of k or v


class AmxDecodeKernel(SplitKernel):
    """The kernel's steps."""

    def facts(self) -> dict[str, int]:
        return {**super().facts(), "cuts": 1}

    def reserve(self, scratch: Scratch) -> list[tuple[int, int]]:
        shape = self.shape
        self.is_few = self.rows <= FEW
        self.block_k = BLOCK_K // 2 if self.is_few and shape.pad > BLOCK_K else BLOCK_K
        # a block starts at a multiple of its length, so that it lies in one page
        self.lies_in_rows = self.config.page_size % self.block_k == 0 and not self.config.has_leftpad
        self.s_tiles, self.acc_tiles, self.kv = (2, 2, 6) if self.is_few else (1, 4, 1)
        self.row_tiles = -(-self.rows // ROWS)  # tiles of rows
        self.width = 1 << (min(self.rows, ROWS) - 1).bit_length()  # columns of a tile of scores
        self.half = min(self.rows, ROWS // 2)  # rows of a product with v: each takes two of a tile
        self.k, self.v = scratch.rows(TILE, shape.pad, "i16"), scratch.rows(self.block_k, shape.pad_v, "i16")
        self.scores = [scratch.rows(2 * self.block_k, self.width) for _ in range(self.row_tiles)]
        self.raw_q = scratch.rows(self.row_tiles * self.width, shape.pad, "i16")
        self.acc_rows = round_up(self.rows, self.half)
        self.w = scratch.rows(2 * self.acc_rows, self.block_k, "i32")
        self.m_rows = self.row_tiles  # with the rows of a tile in lanes, from left to right again and again
        lanes = (self.row_tiles, shape.lanes)
        return [(self.row_tiles * shape.pad // 2, self.width), (self.acc_rows, shape.pad_v), *[lanes] * 4]

    def select_head(self, h: Scalar) -> None:
        areas = (area.at(h * count, 0) for area, count in self.state)
        self.q, self.acc, self.m, self.l, self.position, self.slope = areas
        self.sums = Rows(self.acc.ptr, self.shape.pad_v // 2)  # acc, its rows like those of w

    def run(self) -> None:
        narrow, low = 4 * self.width, 2 * self.half
        widths = [narrow, narrow if self.is_few else ROW, narrow, ROW, ROW, ROW, ROW, ROW]
        heights = [ROWS, ROWS, ROWS, low, low, low, *[ROWS if self.is_few else low] * 2]
        with tile_registers(self.scratch, widths, heights):
            super().run()

    def load_queries(self, head: Head, rows: Value) -> None:
        """q as it is, in pairs; which query a row is, and its slope."""
        lanes, count = self.shape.lanes, self.row_tiles * self.width
        load_rows(self.shape, self.raw_q, self.query_rows(head, "q"), rows, count, self.config.head_dim)
        for c in loop(0, self.shape.pad // 2, lanes):
            for part in range(self.row_tiles):
                columns = [words(self.raw_q).at(0, c)[part * self.width + r, 0] for r in range(self.width)]
                pairs = interleaved([x.load(lanes) for x in columns])
                for i, x in enumerate(pairs):
                    self.q.at(c, 0)[part * self.shape.pad // 2, i * lanes].store(x)
        for r in loop(0, count):
            self.position[0, r].store(int32(r % head.seqlen_q + head.offset))
            if self.config.has_alibi:
                self.slope[0, r].store(self.query_head(head, minimum(r, rows - 1)).negative_slope())

    def visit_blocks(self, batch: Value, part: Value, begin: Value, end: Value) -> None:
        """Block by block, head by head. The next scores come between the softmax and the products with v."""
        heads = self.args.item_heads
        steps = (maximum(end - begin, 0) + (self.block_k - 1)) // self.block_k * heads

        def select(step: Value) -> tuple[Head, Block]:
            j0, h = begin + step // heads * self.block_k, step % heads
            self.select_head(h)
            self.s_t = [area.at((step & 1) * self.block_k, 0) for area in self.scores]
            head = self.head_of_part(batch, part + h)
            return head, Block(j0, minimum(end - j0, self.block_k), end, h)

        for step in loop(-1, steps):
            with when(step >= 0):
                later, after = select(step + 1)
                head, block = select(step)
                rows = self.rows_ahead(later, "k", after), self.rows_ahead(head, "v", block)
                self.ahead = list(zip(rows, (self.config.head_dim, self.config.head_dim_v)))
                self.weigh(head, block)
            with when(step + 1 < steps):
                self.score(*select(step + 1))
            with when(step >= 0):
                self.add_values(*select(step))

    def rows_ahead(self, head: Head, name: str, block: Block) -> Callable[[Scalar], Ptr]:
        """Rows of a block that may not be there; of pages, whose table ends, at most the last one."""
        row = head.key_rows(name, block.j0)
        if not self.config.page_size:
            return row
        return lambda j: row(minimum(j, block.end - 1 - block.j0))

    def score(self, head: Head, block: Block) -> None:
        """s of keys where they lie, or of a copy: of the last few, of small pages, of rows to be padded."""
        row = head.key_rows("k", block.j0)
        for j in loop(0, block.n, TILE):
            if not self.lies_in_rows or self.config.head_dim % TILE:
                self.score_copied(row, j, block.n)
                continue
            with either(block.n - j < TILE) as (few, all_there):
                with few:
                    self.score_copied(row, j, block.n)
                with all_there:
                    self.score_tile(Rows(row(j).as_kind("i16"), self.args.k_n), j)

    def score_copied(self, row: Callable[[Scalar], Ptr], j: Value, n: Value) -> None:
        load_rows(self.shape, self.k, lambda r: row(j + r), n - j, TILE, self.config.head_dim)
        self.score_tile(self.k, j)

    def score_tile(self, k: Rows, j: Value) -> None:
        """s of the 32 keys from j on."""
        for part, s_t in enumerate(self.s_t):
            for r in range(0, TILE, self.s_tiles * ROWS):
                tiles = [(S + i, r + i * ROWS) for i in range(self.s_tiles)]
                for tile, _ in tiles:
                    clear_tile(tile)
                for c in range(0, self.shape.pad, TILE):
                    load_tile(Q, self.q, (part * self.shape.pad + c) // 2, 0)
                    for tile, row in tiles:
                        load_tile(self.kv, k, row, c)
                        multiply_tiles(tile, self.kv, Q)
                for tile, row in tiles:
                    store_tile(tile, s_t.at(j, 0), row, 0)

    def weigh(self, head: Head, block: Block) -> None:
        """p = exp(s - m) of all rows, rounded, for the products with v; l and m."""
        lanes, width = self.shape.lanes, self.width
        for part, s_t in enumerate(self.s_t):
            m_old = self.m[part, 0].load(lanes)
            m_new = across(self.finish_tile(head, block, part, m_old), maximum, width)
            with when(any_lane(m_new > m_old + SLACK)):
                self.rescale(part, m_old, m_new)
            m = self.m[part, 0].load(lanes)
            m_finite = select(m.equals(-INF), 0.0, m)  # exp(-inf - -inf) would be NaN
            l = Var(self.l[part, 0].load(lanes))
            for j in loop(0, round_up(block.n, self.shape.lanes), ROWS):
                self.ask(part, 1, j)
                scores = [s.load(lanes) - m_finite for s in self.vectors_of(s_t, j)]
                p = [exp2(s * LOG2_E, DEGREE) for s in scores]
                l.set(l + combined(p, lambda a, b: a + b))
                for r, weights in enumerate(deinterleaved(p)[: self.rows - part * ROWS], part * ROWS):
                    word, even = rounded_words(weights), r // self.half * self.half + r
                    self.w.at(0, j)[even, 0].store(word)
                    self.w.at(0, j)[even + self.half, 0].store(word << 16)
            self.l[part, 0].store(l)

    def rescale(self, part: int, m_old: Value, m_new: Value) -> None:
        """Weights count from m_new from here on: l and acc follow."""
        lanes = self.shape.lanes
        m_finite = select(m_new.equals(-INF), 0.0, m_new)
        correction = exp2((m_old - m_finite) * LOG2_E, DEGREE)
        self.correction[part, 0].store(correction)
        self.m[part, 0].store(m_new)
        self.l[part, 0].store(self.l[part, 0].load(lanes) * correction)
        for i in loop(0, 2 * min(ROWS, self.acc_rows - part * ROWS)):
            r = i // (2 * self.half) * self.half + i % self.half
            factor = self.correction[part, r].splat(lanes)
            for c in loop(0, self.shape.pad_v // 2, lanes):
                cell = self.sums[part * 2 * ROWS + i, c]
                cell.store(cell.load(lanes) * factor)

    def ask(self, part: int, which: int, j: Value) -> None:
        """Ask for some of the next keys, or values, at each step of the softmax: memory is never idle."""
        if part == 0 and self.lies_in_rows:
            row, dim = self.ahead[which]
            count = max(1, ASKED // (2 * (self.config.head_dim + self.config.head_dim_v)))
            for r in loop(0, count):
                prefetch_row(row(j // ROWS * count + r), dim, L1)

    def vectors_of(self, s_t: Rows, j: Value) -> list[Ptr]:
        """16 keys of a tile of scores, from j on."""
        return [s_t.at(j, 0)[0, x * self.shape.lanes] for x in range(self.width)]

    def finish_tile(self, head: Head, block: Block, part: int, m: Value) -> Operand:
        """The options, and -inf where not visible, for products q k; the largest score and m, in lanes."""
        args, lanes = self.args, self.shape.lanes
        keys = lanes // self.width  # of a vector
        position, slope = (
            repeated(area[part, 0].load(self.width), keys) for area in (self.position, self.slope)
        )
        position = bitcast(position, I32)
        first, last = position - int32(args.left), position + int32(args.right)
        last = minimum(last, int32(head.seqlen_k - 1, lanes))
        largest = Var(m)
        for j in loop(0, round_up(block.n, self.shape.lanes), ROWS):
            self.ask(part, 0, j)
            scores = []
            for x, cell in enumerate(self.vectors_of(self.s_t[part], j)):
                key = count_from(block.j0 + j + x * keys, lanes, self.width)
                s = cell.load(lanes) * args.vector("q_factor", self.shape)
                s, _ = self.with_options(s, key - position, slope)
                s = select((key >= first) & (key <= last), s, -INF)
                cell.store(s)
                scores.append(s)
            largest.set(maximum(largest, combined(scores, maximum)))
        return largest

    def add_values(self, head: Head, block: Block) -> None:
        """acc += w v, of v as it lies but for its last few rows, or of a copy."""
        row, dim, pad = head.key_rows("v", block.j0), self.config.head_dim_v, self.shape.pad_v
        if not self.lies_in_rows or dim % TILE:
            load_rows(self.shape, self.v, row, block.n, round_up(block.n, self.shape.lanes), dim)
            v, n = self.v, round_up(block.n, self.shape.lanes)
        else:
            v, n = Rows(row(as_int(0)).as_kind("i16"), self.args.v_n), block.n & -ROWS
            with when(n < block.n):
                load_rows(self.shape, self.v, lambda r: row(n + r), block.n - n, ROWS, dim)
        rest, most = pad % (self.acc_tiles * TILE), self.acc_tiles
        for first in range(0, self.rows, self.half):
            for start, stop, count in ((0, pad - rest, most), (pad - rest, pad, rest // TILE)):
                for c in loop(start, stop, count * TILE) if start < stop else []:
                    self.add_columns(first, c, count, v, n, block.n)

    def add_columns(self, first: int, c: Value, count: int, v: Rows, n: Value, end: Value) -> None:
        """The same for `half` rows from `first` on and `count` times 32 columns; from n on of the copy."""

        def add(rows: Rows, j: Value, row: Scalar) -> None:
            load_tile(W, self.w, 2 * first, j)
            for i in range(count):
                load_tile(self.kv, rows, row, c + i * TILE)
                multiply_tiles(ACC + i, W, self.kv)

        for i in range(count):
            load_tile(ACC + i, self.sums, 2 * first, c // 2 + i * ROWS)
        for j in loop(0, n, ROWS):
            add(v, j, j)
        with when(n < end):
            add(self.v, n, 0)
        for i in range(count):
            store_tile(ACC + i, self.sums, 2 * first, c // 2 + i * ROWS)

    def statistics(self, r: Value) -> tuple[Value, Value]:
        return self.m[0, r].splat(self.shape.lanes), self.l[0, r].splat(self.shape.lanes)

    def store_sums(self, partial: Rows, r: Value) -> None:
        """acc of row r, its columns in their order again."""
        row, lanes = r // self.half * self.half + r, self.shape.lanes
        for c in loop(0, self.shape.pad_v // 2, lanes):
            pair = interleaved([self.sums[row + of, c].load(lanes) for of in (0, self.half)])
            for x, sums in enumerate(pair):
                partial[0, 2 * c + x * lanes].store(sums)

    def store_partial(self, item: Value, rows: Value) -> None:
        lanes = self.shape.lanes
        for part in range(self.row_tiles):
            l = self.l[part, 0]
            l.store(across(l.load(lanes), lambda a, b: a + b, self.width))
        super().store_partial(item, rows)
        total = Var(self.shape.constant(0.0))
        for r in loop(0, rows):
            for c in loop(0, self.shape.pad_v, lanes):
                total.set(self.partial(item, r)[0, c].load(lanes) * 0.0 + total)
        with when(any_lane(total.equals(0.0) ^ 1)):
            self.args.not_cut.store(as_int(1))


def combined(values: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """All values in one, in a tree."""
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + list(values[2 * len(pairs) :])
    return values[0]
