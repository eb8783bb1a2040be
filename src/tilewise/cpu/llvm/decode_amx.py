"""Decoding in tile registers: `decode.py` with other products, for bfloat16 and several rows a key head.

Keys and values are read where they lie. What comes next is asked for in all steps of a block, so that the
memory is never idle: half of the keys during the scores, half during the softmax, the values during the
products with them. Products and sums:

    s_t = k q_t, 32 keys at a time; scaled when the options are applied                  [32, rows]
    w   = p, rounded, as words (p, 0) for even columns and (0, p) for odd ones           [2 rows, BLOCK_K]
    acc = c acc + w v, 16 keys and 32 columns at a time                                  [rows, head_dim_v]

As v is not turned into pairs of keys, a word of it is two columns of one key, and one of them has weight 0.
An infinite value so makes its neighbour NaN: where there is a NaN, the call is done again in vectors.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewise.cpu.llvm.amx import (
    ROW,
    ROWS,
    TILE,
    clear_tile,
    copy_rows,
    load_tile,
    multiply_tiles,
    rounded_words,
    store_tile,
    tile_registers,
    words,
)
from tilewise.cpu.llvm.arguments import Config
from tilewise.cpu.llvm.compile import Target
from tilewise.cpu.llvm.control import either, loop, when
from tilewise.cpu.llvm.decode import Block, DecodeKernel
from tilewise.cpu.llvm.memory import L1, Ptr, Rows, prefetch, prefetch_row
from tilewise.cpu.llvm.numerics import LOG2_E, exp2_avx512
from tilewise.cpu.llvm.tiles import BLOCK_K, Head, Scratch, build_kernel, round_up, transpose_rows
from tilewise.cpu.llvm.vector import Value, Var, any_lane, as_int, deinterleaved, fma, interleaved

DEGREE = 4  # of 2^f: off by 5e-6, as in the forward
S, Q, W, PV = 0, 2, 3, 4  # tile registers: two of s and of w v, one of each small factor
KV = 6  # two of k or v


class AmxDecodeKernel(DecodeKernel):
    """The steps that differ."""

    block_k = BLOCK_K

    def facts(self) -> dict[str, int]:
        return {**super().facts(), "cuts": 1}

    def reserve(self, scratch: Scratch) -> list[tuple[int, int]]:
        shape = self.shape
        self.parts = -(-self.rows // ROWS)  # tiles of rows
        self.width = 1 << (min(self.rows, ROWS) - 1).bit_length()  # columns of a tile of scores
        self.half = min(self.rows, ROWS // 2)  # rows of a product with v: each takes two of a tile
        self.k, self.v = scratch.rows(TILE, shape.pad, "i16"), scratch.rows(self.block_k, shape.pad_v, "i16")
        self.s_t = [scratch.rows(TILE, self.width) for _ in range(self.parts)]
        self.raw_q = scratch.rows(self.parts * ROWS, shape.pad, "i16")
        self.raw_q_t = scratch.rows(shape.pad // 2, self.parts * ROWS)
        self.w = scratch.rows(2 * round_up(self.rows, self.half), self.block_k, "i32")
        self.pv = scratch.rows(ROWS, TILE)
        return [(shape.pad // 2, self.parts * self.width), *self.sums_areas()]

    def run(self) -> None:
        narrow, low = 4 * self.width, 2 * self.half
        widths = [narrow, narrow, narrow, ROW, ROW, ROW, ROW, ROW]
        heights = [ROWS, ROWS, ROWS, low, low, low, ROWS, ROWS]
        with tile_registers(self.scratch, widths, heights):
            super().run()

    def load_queries(self, head: Head, rows: Value) -> None:
        """q as it is, in pairs."""
        shape = self.shape
        copy_rows(self.raw_q, self.query_rows(head, "q"), rows, self.parts * ROWS, self.config.head_dim)
        transpose_rows(shape, self.raw_q_t, words(self.raw_q), self.parts * ROWS, shape.pad // 2)
        for c in loop(0, shape.pad // 2):
            for part in range(self.parts):
                self.q[c, part * self.width].store(self.raw_q_t[c, part * ROWS].load(self.width))

    def score(self, head: Head, block: Block) -> None:
        row, later = self.sources(head, "k", block)
        for j in loop(0, block.n, TILE):

            def whole(j: Value = j) -> None:
                ahead = [later(j + r) for r in range(0, TILE, 2)]
                self.score_tile(Rows(row(j).as_kind("i16"), self.args.k_n), j, ahead)

            def copied(j: Value = j) -> None:
                copy_rows(self.k, lambda r: row(j + r), block.n - j, TILE, self.config.head_dim)
                for r in loop(0, TILE, 2):
                    prefetch_row(later(j + r), self.config.head_dim, L1)
                self.score_tile(self.k, j, [])

            self.take(block.n - j < TILE, self.config.head_dim, whole, copied)

    def take(self, are_few: Value, dim: int, whole: Callable[[], None], copied: Callable[[], None]) -> None:
        """Use keys where they lie, or a copy: of the last few, of pages, of rows to be padded."""
        if self.config.is_paged or dim % TILE:
            copied()
            return
        with either(are_few) as (few, all_there):
            with few:
                copied()
            with all_there:
                whole()

    def score_tile(self, k: Rows, j: Value, ahead: list[Ptr]) -> None:
        """s of the 32 keys from j on; `ahead` are every second row to ask for meanwhile."""
        shape, lanes, width = self.shape, self.shape.lanes, self.width
        for part, s_t in enumerate(self.s_t):
            for i in range(2):
                clear_tile(S + i)
            for c in range(0, shape.pad, TILE):
                load_tile(Q, self.q, c // 2, part * width)
                for i in range(2):
                    load_tile(KV + i, k, i * ROWS, c)
                    multiply_tiles(S + i, KV + i, Q)
                    for row in ahead[i * ROWS // 2 : (i + 1) * ROWS // 2] if part == 0 else []:
                        prefetch(row[c], L1)
            for i in range(2):
                store_tile(S + i, s_t, i * ROWS, 0)
            for i in range(0, TILE, lanes):
                keys = [s_t.at(i, 0)[0, x].load(lanes) for x in range(0, lanes * width, lanes)]
                for r, s in enumerate(deinterleaved(keys)):
                    self.p.at(part * ROWS + r, j)[0, i].store(s)

    def weigh_row(self, head: Head, r: Value, block: Block) -> None:
        super().weigh_row(head, r, block)
        _, later = self.sources(head, "k", block)
        share = 2 * -(-self.block_k // (2 * self.rows))  # of the keys that are asked for with each row
        for j in loop(r * share, (r + 1) * share, 2):
            prefetch_row(later(j + 1), self.config.head_dim, L1)

    def with_options(self, s: Value, head: Head, i: Value, key: Value) -> tuple[Value, Value | None]:
        return super().with_options(s * self.args.vector("q_factor", self.shape), head, i, key)

    def sum_weights(self, r: Value, block: Block, m: Value, l: Var) -> None:
        lanes, even = self.shape.lanes, r // self.half * self.half + r
        for j in loop(0, self.whole(block.n), lanes):
            p = exp2_avx512((self.p[r, j].load(lanes) - m) * LOG2_E, DEGREE)
            word = rounded_words(p)
            self.w[even, j].store(word)
            self.w[even + self.half, j].store(word << 16)
            l.set(l + p)

    def add_values(self, head: Head, block: Block) -> None:
        row, later = self.sources(head, "v", block)

        def copied() -> None:
            copy_rows(self.v, row, block.n, self.whole(block.n), self.config.head_dim_v)
            self.add_rows(self.v, block.n, later)

        def whole() -> None:
            self.add_rows(Rows(row(as_int(0)).as_kind("i16"), self.args.v_n), block.n, later)

        self.take(block.n < self.block_k, self.config.head_dim_v, whole, copied)

    def add_rows(self, v: Rows, n: Value, later: Callable[[Value], Ptr]) -> None:
        """acc = c acc + w v, and what is to be asked for meanwhile."""
        pad = self.shape.pad_v
        by_twos = pad // (2 * TILE) * 2 * TILE
        share = -(-self.block_k * TILE // pad)  # of the values: asked for with 32 columns
        for first in range(0, self.rows, self.half):
            for start, stop, count in ((0, by_twos, 2), (by_twos, pad, 1)):
                for c in loop(start, stop, count * TILE) if start < stop else []:
                    self.add_columns(first, c, count, v, n)
                    r0 = c // TILE * share
                    for r in loop(r0, r0 + count * share) if first == 0 else []:
                        prefetch_row(later(r), self.config.head_dim_v, L1)

    def add_columns(self, first: int, c: Value, count: int, v: Rows, n: Value) -> None:
        """The same for `half` rows from `first` on and 32 columns, once or twice."""
        lanes, half = self.shape.lanes, self.half
        for i in range(count):
            clear_tile(PV + i)
        for j in loop(0, n, ROWS):
            load_tile(W, self.w, 2 * first, j)
            for i in range(count):
                load_tile(KV + i, v, j, c + i * TILE)
                multiply_tiles(PV + i, W, KV + i)
        for i in range(count):
            store_tile(PV + i, self.pv, 0, i * lanes)
        for r in range(min(half, self.rows - first)):
            correction = self.correction.at(first, 0)[r, 0].load(lanes)
            for i in range(count):
                even, odd = (self.pv[r + of, i * lanes].load(lanes) for of in (0, half))
                for x, sums in enumerate(interleaved(even, odd)):
                    acc = self.acc.at(first, c)[r, i * TILE + x * lanes]
                    acc.store(fma(acc.load(lanes), correction, sums))

    def store_partial(self, item: Value, rows: Value) -> None:
        super().store_partial(item, rows)
        total = Var(self.shape.constant(0.0))
        for r in loop(0, rows):
            for c in loop(0, self.shape.pad_v, self.shape.lanes):
                total.set(self.acc[r, c].load(self.shape.lanes) * 0.0 + total)
        with when(any_lane(total.equals(0.0) ^ 1)):
            self.args.not_cut.store(as_int(1))


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """See `build_kernel`."""
    return build_kernel(AmxDecodeKernel, config, target)
