"""Decoding in tile registers: `decode.py` with other products, for bfloat16 and several rows a key head.

Keys are read where they lie; only values are turned into pairs on their way. What comes next is asked for in
all steps of a block, so that the memory is never idle: half of the keys during the scores, half during the
softmax, the values during the products with them. Products and sums:

    s_t = k q_t, 32 keys at a time; scaled when the options are applied                  [32, rows]
    w   = rows of p, rounded;  v_pairs: pairs of v of the block     [rows, BLOCK_K], [BLOCK_K / 2, head_dim_v]
    acc = c acc + w v, 32 columns at a time                                              [rows, 32]
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
    pair_rows,
    rounded,
    store_tile,
    tile_registers,
    words,
)
from tilewise.cpu.llvm.arguments import Config
from tilewise.cpu.llvm.compile import Target
from tilewise.cpu.llvm.control import either, loop
from tilewise.cpu.llvm.decode import Block, DecodeKernel
from tilewise.cpu.llvm.memory import L1, Ptr, Rows, prefetch, prefetch_row
from tilewise.cpu.llvm.numerics import LOG2_E, exp2_avx512
from tilewise.cpu.llvm.tiles import BLOCK_K, Head, Scratch, build_kernel, transpose_rows
from tilewise.cpu.llvm.vector import Value, Var, deinterleaved, fma

DEGREE = 4  # of 2^f: off by 5e-6, as in the forward
S, K, Q, W, V, PV = 0, 2, 3, 4, 5, 6  # tile registers: two of s, of w v, and one of each factor


class AmxDecodeKernel(DecodeKernel):
    """The steps that differ."""

    weight_step = 2
    block_k = BLOCK_K

    def reserve(self, scratch: Scratch) -> list[tuple[int, int]]:
        shape = self.shape
        self.parts = -(-self.rows // ROWS)  # tiles of rows
        self.width = 1 << (min(self.rows, ROWS) - 1).bit_length()  # columns of a tile of scores
        self.k, self.v = (scratch.rows(TILE, pad, "i16") for pad in (shape.pad, shape.pad_v))
        self.v_pairs = scratch.rows(self.block_k // 2, shape.pad_v)
        self.s_t = [scratch.rows(TILE, self.width) for _ in range(self.parts)]
        self.raw_q = scratch.rows(self.parts * ROWS, shape.pad, "i16")
        self.raw_q_t = scratch.rows(shape.pad // 2, self.parts * ROWS)
        self.w = scratch.rows(self.parts * ROWS, self.block_k, "i16")
        self.pv = scratch.rows(ROWS, TILE)
        return [(shape.pad // 2, self.parts * self.width), *self.sums_areas()]

    def run(self) -> None:
        narrow, low = 4 * self.width, min(self.rows, ROWS)
        widths = [narrow, narrow, ROW, narrow, ROW, ROW, ROW, ROW]
        heights = [ROWS, ROWS, ROWS, ROWS, low, ROWS, low, low]
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

            self.take(block, j, self.config.head_dim, whole, copied)

    def take(
        self, block: Block, j: Value, dim: int, whole: Callable[[], None], copied: Callable[[], None]
    ) -> None:
        """Use 32 keys from j on where they lie, or a copy: of the last, of pages, of rows to be padded."""
        if self.config.is_paged or dim % TILE:
            copied()
            return
        with either(block.n - j < TILE) as (few, all_there):
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
                    load_tile(K, k, i * ROWS, c)
                    multiply_tiles(S + i, K, Q)
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
        lanes = self.shape.lanes
        for j in loop(0, self.whole(block.n), 2 * lanes):
            scores = [self.p.at(r, j)[0, x].load(lanes) for x in (0, lanes)]
            low, high = (exp2_avx512((s - m) * LOG2_E, DEGREE) for s in scores)
            self.w[r, j].store(rounded(low, high))
            l.set(l + (low + high))

    def add_values(self, head: Head, block: Block) -> None:
        row, later = self.sources(head, "v", block)
        for j in loop(0, block.n, TILE):
            pairs = self.v_pairs.at(j // 2, 0)

            def whole(j: Value = j, pairs: Rows = pairs) -> None:
                for r in loop(0, TILE, 2):
                    pair_rows(pairs.at(r // 2, 0), Rows(row(j + r).as_kind("i16"), self.args.v_n), 2)

            def copied(j: Value = j, pairs: Rows = pairs) -> None:
                copy_rows(self.v, lambda r: row(j + r), block.n - j, TILE, self.config.head_dim_v)
                pair_rows(pairs, self.v, TILE)

            self.take(block, j, self.config.head_dim_v, whole, copied)
        share = -(-self.block_k * TILE // self.shape.pad_v)  # of the values: asked for with 32 columns
        for part in range(self.parts):
            for c in loop(0, self.shape.pad_v, TILE):
                self.add_columns(part * ROWS, c, block.n)
                first = c // TILE * share
                for r in loop(first, first + share) if part == 0 else []:
                    prefetch_row(later(r), self.config.head_dim_v, L1)

    def add_columns(self, first: int, c: Value, n: Value) -> None:
        """acc = c acc + w v, 16 rows from `first` on and 32 columns."""
        lanes = self.shape.lanes
        for i in range(2):
            clear_tile(PV + i)
        for j in loop(0, n, TILE):
            load_tile(W, self.w, first, j)
            for i in range(2):
                load_tile(V, self.v_pairs, j // 2, c + i * lanes)
                multiply_tiles(PV + i, W, V)
        for i in range(2):
            store_tile(PV + i, self.pv, 0, i * lanes)
        for r in range(min(ROWS, self.rows - first)):
            correction = self.correction.at(first, 0)[r, 0].load(lanes)
            for i in (0, lanes):
                acc = self.acc.at(first, c)[r, i]
                acc.store(fma(acc.load(lanes), correction, self.pv[r, i].load(lanes)))


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """See `build_kernel`."""
    return build_kernel(AmxDecodeKernel, config, target)
