"""Statistics of the weights with products of bfloat16: `statistics.py` with other scores.

K, and Q turned around, stay bfloat16; sums and weights are float32. q_t holds pairs as they are, not scaled:
the scale comes after the products.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.cpu.dsl.bf16_products import TILE, copy_rows, product_of, tile_registers, words
from tilewise.cpu.dsl.control import loop
from tilewise.cpu.dsl.vector import Operand, Value, Var, maximum
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.host.compile import Target
from tilewise.cpu.kernels.common.scores import TileScores
from tilewise.cpu.kernels.common.statistics_sums import Tile
from tilewise.cpu.kernels.common.tiles import INF, Head, Scratch, build_kernel, transpose_rows
from tilewise.cpu.kernels.statistics import StatisticsKernel


class BFloat16StatisticsKernel(StatisticsKernel):
    """The steps that differ."""

    def reserve(self, scratch: Scratch) -> None:
        shape = self.shape
        self.key_group, self.product = TILE, product_of(shape.target)
        self.k = scratch.rows(shape.block_k, shape.pad, "i16")
        self.rows = scratch.rows(shape.block_q, shape.pad, "i16")
        self.scale = self.args.vector("q_factor", shape)

    def run(self) -> None:
        with tile_registers(self.scratch):
            super().run()

    def load_queries(self, head: Head, tile: Tile) -> None:
        shape, n = self.shape, head.seqlen_q - tile.q0
        copy_rows(self.rows, head.query_rows("q", tile.q0), n, shape.block_q, shape.config.head_dim)
        transpose_rows(shape, tile.q_t, words(self.rows), shape.block_q, shape.pad // 2)

    def load_keys(self, head: Head, j0: Value, n: Value) -> None:
        count = (n + (TILE - 1)) & -TILE
        copy_rows(self.k, head.key_rows("k", j0), n, count, self.shape.config.head_dim)

    def score_keys(self, tile: Tile, scores: TileScores, first: Value, n: Value) -> Sequence[Operand]:
        shape, p_t = self.shape, self.sums.p_t
        highest = [Var(shape.constant(-INF)) for _ in shape.columns()]
        for j0 in loop(first, n, TILE):
            self.product(p_t.at(j0, 0), [self.k.at(j0, 0)], [tile.q_t], (0, shape.pad), shape.vectors, False)
            for j in loop(j0, j0 + TILE, shape.rows):
                cells = [[p_t.at(j, c)[r, 0] for c in shape.columns()] for r in range(shape.rows)]
                s = [[Var(cell.load(shape.lanes) * self.scale) for cell in row] for row in cells]
                scores.apply(s, j)
                for row, of_row in zip(cells, s):
                    for v, (cell, x) in enumerate(zip(row, of_row)):
                        cell.store(x)
                        highest[v].set(maximum(highest[v], x))
        return highest


def build(config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """See `build_kernel`."""
    return build_kernel(BFloat16StatisticsKernel, config, target)
