"""The forward in bfloat16 where one block has all keys: P is transposed instead of V, and out comes as rows.

v   : pairs of v                                                             [block_k / 2, head_dim_v]
p   : rows of p                                                              [block_q, block_k]
out = p v / l
"""

from __future__ import annotations

from tilewise.cpu.dsl.bf16_products import LANES, TILE, pair_rows, words
from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.memory import Rows
from tilewise.cpu.dsl.numerics import quotient
from tilewise.cpu.dsl.vector import Value, minimum
from tilewise.cpu.kernels.common.products import BFloat16Products, Matrix, at
from tilewise.cpu.kernels.common.tiles import Head, Scratch, column_chunks, transpose_rows
from tilewise.cpu.kernels.forward import ForwardKernel, Tile


class OneBlockForwardKernel(ForwardKernel):
    """The steps that differ."""

    products: BFloat16Products

    def reserve(self, scratch: Scratch) -> None:
        self.sharing = self.sharing._replace(converting=24, l2_share=0)
        super().reserve(scratch)
        shape, products = self.shape, self.products
        self.v = products.right(scratch, shape.block_k, shape.pad_v)
        self.p = products.left(scratch, TILE, shape.block_k)
        self.out = scratch.rows(TILE, shape.pad_v)
        self.divisor, self.inverse = (scratch.rows(1, shape.block_q) for _ in range(2))

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        shape, config, products = self.shape, self.shape.config, self.products
        rows = [Rows(part.ptr, shape.pad_v) for part in products.rows]
        for j in loop(0, n, TILE):
            products.take(at(self.k, j, 0), head.key_rows("k", j0 + j), n - j, TILE, config.head_dim)
            products.take(rows, head.key_rows("v", j0 + j), n - j, TILE, config.head_dim_v)
            for pairs, v in zip(self.v, rows):
                pair_rows(pairs.at(j // 2, 0), v, TILE)

    def add_values(
        self, head: Head, tile: Tile, v_t: Matrix, correction: list[Value], first: Value, n: Value
    ) -> None:
        """out = p v / l."""
        shape, dim = self.shape, self.shape.config.head_dim_v
        height = (n + (TILE - 1)) // TILE * LANES
        for p, p_t in zip(self.p, self.p_t):
            transpose_rows(shape, words(p), p_t, height, shape.block_q)
        for c in loop(0, shape.pad_v, 2 * LANES):
            v = at(self.v, 0, c)
            self.products.multiply(self.out.at(0, c), self.p, v, (first, n), TILE // shape.lanes)
        for column in shape.columns():
            for area, x in zip((self.divisor, self.inverse), self.divide(tile, column)):
                area[0, column].store(x)
        target = head.query_rows("out", tile.q0)
        for i in loop(0, minimum(head.seqlen_q - tile.q0, shape.block_q)):
            row = target(i)
            for column, width in column_chunks(0, dim, shape.lanes):
                l, inverse = (area[0, i].splat(width) for area in (self.divisor, self.inverse))
                row[column].store(quotient(self.out[i, column].load(width), l, inverse))

    def write_out(self, head: Head, tile: Tile, n: Value) -> None:
        """0 if the tile sees no key."""
        k0, k1 = head.key_range(tile.q0, minimum(tile.q0 + self.shape.block_q, head.seqlen_q))
        with when(k0 >= k1):
            super().write_out(head, tile, n)
