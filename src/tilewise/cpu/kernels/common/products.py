"""Products of two matrices, the step that kernels of tiles are written over.

    out[height, vectors] = or += the sum over k of a[:, k] b[k, :]

A kernel says what it multiplies; how factors lie in memory, and which numbers they have, is said here:

                        products by                                     left factor    right factor
    Products            multiply-adds: a number of a, a vector of b     rows           rows
    BFloat16Products    dot products of pairs, or tile registers        rows           rows of pairs
    CutProducts         the same of each number's terms                 several matrices of these

`dsl.bf16_products` has the instructions of the last two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

from tilewise.cpu.dsl.bf16_products import (
    LANES,
    LARGEST,
    SMALLEST,
    TILE,
    cut,
    dot_sums,
    pair_rows,
    paired,
    rounded,
    tile_sums,
    words,
)
from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.lanes import any_lane
from tilewise.cpu.dsl.memory import Ptr, Rows
from tilewise.cpu.dsl.numerics import LOG2_E, exp, exp2
from tilewise.cpu.dsl.vector import Operand, Scalar, Value, Var, absolute, as_int, fma, maximum, minimum
from tilewise.cpu.kernels.common.sums import add_to
from tilewise.cpu.kernels.common.tiles import (
    Arguments,
    Grid,
    Scratch,
    Shape,
    lane_chunks,
    load_rows,
    outer_sums,
    transpose_rows,
)

DEGREES = {"bf16": 4, "f16": 4, "f32": 5}  # of 2^f; 4 is off by 5e-6, 5 by 8e-8
Matrix = list[Rows]  # the matrices whose sum a factor is: one but where numbers are cut
Source = Callable[[Value], Ptr]


class Products:
    """Of vectors in the compute type. A left factor may as well be the transpose of rows."""

    def __init__(self, shape: Shape, args: Arguments, scratch: Scratch) -> None:
        self.shape, self.args = shape, args
        self.height = shape.rows  # of a product
        self.step = shape.lanes  # of the queries that products are summed over, or have as columns
        # What queries are multiplied by when they come in, and what their products are still to be.
        self.q_factor: Operand | None = args.vector("q_factor", shape)
        self.scale: Operand | None = None

    def scales(self, has_options: bool) -> tuple[Operand | None, Operand | None]:
        """What products are to be multiplied by to be scores, and what scores are to be in the exponent.

        Scores without options leave the scale to the exponential.
        """
        return (self.scale, None) if has_options else (None, self.scale)

    def left(self, scratch: Scratch, rows: int, width: int) -> Matrix:
        return [scratch.rows(rows, width)]

    def right(self, scratch: Scratch, depth: int, width: int) -> Matrix:
        return [scratch.rows(depth, width)]

    def over(self, area: Rows, scratch: Scratch, depth: int) -> Matrix:
        """A right factor that takes the place of sums, row by row from the first on."""
        return [area]

    def left_t(self, scratch: Scratch, rows: int, width: int) -> Matrix:
        """A left factor for `take_t`."""
        return [scratch.rows(width, rows).T]

    def transposed(self, a: Matrix, scratch: Scratch, rows: int) -> Matrix:
        """Room for the transpose of a left factor of so many rows, as a left factor: see `flip`."""
        return [a[0].T]

    def paired(self, a: Matrix, scratch: Scratch, rows: int) -> Matrix:
        """Room for a left factor of so many rows as a right factor: see `pair`."""
        return a

    def take(
        self, a: Matrix, source: Source, n: Scalar, count: Scalar, dim: int, factor: Operand | None = None
    ) -> None:
        """A left factor: a[r, :dim] = source(r), 0 beyond; rows from n to count repeat the last one.

        `factor`: what numbers that are cut are multiplied by before.
        """
        load_rows(self.shape, a[0], source, n, count, dim)

    def take_t(self, a_t: Matrix, source: Source, n: Scalar, dim: int) -> None:
        """A left factor: a_t[:dim, r] = source(r) for r < n."""
        load_rows(self.shape, a_t[0].T, source, n, n, dim)

    def flip(self, a_t: Matrix, a: Matrix, count: Scalar) -> None:
        """The transpose of so many rows of a left factor, as a left factor."""

    def pair(self, b: Matrix, a: Matrix, count: Scalar) -> None:
        """So many rows of a left factor, as a right factor."""

    def turn(self, b: Matrix, a: Matrix, count: Scalar, factor: Operand | None = None) -> None:
        """The transpose of a left factor of so many rows, as a right one.

        `factor`: what numbers that are not cut are multiplied by.
        """
        transpose_rows(self.shape, b[0], a[0], count, a[0].stride, factor)

    def take_queries(self, q_t: Matrix, q: Matrix, source: Source, n: Scalar, count: Scalar) -> None:
        """Queries as a left factor, and transposed as a right one; the factor goes into what scores see."""
        self.take(q, source, n, count, self.shape.config.head_dim, self.q_factor)
        self.turn(q_t, q, count, self.q_factor)

    def put(self, b: Matrix, j: Value, c: int, rows: Sequence[Operand]) -> None:
        """Vectors of an even number of rows from j on, as part of a right factor."""
        for r, x in enumerate(rows):
            b[0].at(j, c)[r, 0].store(x)

    def multiply(self, out: Rows, a: Matrix, b: Matrix, k: tuple[Scalar, Scalar], vectors: int) -> None:
        """out[height, vectors] = the sum over [k0, k1) of a[:, k] b[k, :]."""
        for r, row in enumerate(self._sums(a, b, k, vectors)):
            for v, total in enumerate(row):
                out[r, v * self.shape.lanes].store(total)

    def add(
        self, out: Rows, a: Matrix, b: Matrix, k: tuple[Scalar, Scalar], vectors: int,
        correction: Sequence[Operand] = (),
    ) -> None:  # fmt: skip
        """out = correction * out + the sum; one for each vector, or none.

        The sum starts from 0, as float32 rounds less in two levels of sums; not so that of bfloat16.
        """
        for r, row in enumerate(self._sums(a, b, k, vectors)):
            for v, total in enumerate(row):
                _fold(out[r, v * self.shape.lanes], total, correction[v : v + 1])

    def add_rows(self, out: Rows, a: Matrix, b: Matrix, k: tuple[Scalar, Scalar], count: Scalar) -> None:
        """out[:count] += a[:count, k] b[k, :], in all columns of out; up to 4 vectors of them at a time."""
        shape, most = self.shape, 4 if self.shape.rows == 8 else 3
        for c, chunks, vectors in lane_chunks(shape, out.stride, most):
            height, width = 4 if vectors > 3 else shape.rows, vectors * shape.lanes
            for r in loop(0, count, height):
                for column in loop(c, c + chunks * width, width):
                    a_rows, b_rows = a[0].at(r, k[0]), b[0].at(k[0], column)
                    sums = outer_sums(shape, height, vectors, k[1] - k[0], a_rows, b_rows)
                    add_to(shape, out.at(r, column), sums)

    def _sums(self, a: Matrix, b: Matrix, k: tuple[Scalar, Scalar], vectors: int) -> Grid:
        first, end = k
        return outer_sums(self.shape, self.height, vectors, end - first, a[0].at(0, first), b[0].at(first, 0))

    def power(self, x: Operand) -> Value:
        """e^x."""
        return exp(x, self.shape.exp_degree)


class BFloat16Products(Products):
    """Of bfloat16, with float32 sums. Nothing is rounded but the weights, so the scale comes after products.

    The transpose of pairs are rows and that of rows are pairs, in words of two numbers.
    """

    def __init__(self, shape: Shape, args: Arguments, scratch: Scratch) -> None:
        super().__init__(shape, args, scratch)
        self.height = self.step = TILE
        self.q_factor, self.scale = None, self.q_factor
        width = max(shape.pad, shape.pad_v)
        self.rows = self.left(scratch, TILE, width)  # that come in to be transposed
        self.pairs = scratch.rows(TILE // 2, width)

    def left(self, scratch: Scratch, rows: int, width: int) -> Matrix:
        return [scratch.rows(rows, width, "i16") for _ in range(self.shape.config.terms)]

    def right(self, scratch: Scratch, depth: int, width: int) -> Matrix:
        return [scratch.rows(depth // 2, width) for _ in range(self.shape.config.terms)]

    def over(self, area: Rows, scratch: Scratch, depth: int) -> Matrix:
        more = range(1, self.shape.config.terms)
        return [area, *(scratch.rows(depth // 2, area.stride) for _ in more)]

    def left_t(self, scratch: Scratch, rows: int, width: int) -> Matrix:
        return self.left(scratch, rows, width)

    def transposed(self, a: Matrix, scratch: Scratch, rows: int) -> Matrix:
        return self.left(scratch, a[0].stride, rows)

    def paired(self, a: Matrix, scratch: Scratch, rows: int) -> Matrix:
        return self.right(scratch, rows, a[0].stride)

    def take_t(self, a_t: Matrix, source: Source, n: Scalar, dim: int) -> None:
        width = self.shape.pad if dim == self.shape.config.head_dim else self.shape.pad_v
        rows = [Rows(part.ptr, width) for part in self.rows]
        for j in loop(0, n, TILE):
            self.take(rows, lambda r, first=j: source(first + r), n - j, TILE, dim)  # type: ignore[misc]
            self.flip(at(a_t, 0, j), rows, TILE)

    def flip(self, a_t: Matrix, a: Matrix, count: Scalar) -> None:
        for part_t, part in zip(a_t, a):
            pairs = Rows(self.pairs.ptr, part.stride)
            for j in loop(0, count, TILE):
                pair_rows(pairs, part.at(j, 0), TILE)
                transpose_rows(self.shape, words(part_t.at(0, j)), pairs, TILE // 2, part.stride)

    def pair(self, b: Matrix, a: Matrix, count: Scalar) -> None:
        for pairs, rows in zip(b, a):
            pair_rows(pairs, rows, count)

    def turn(self, b: Matrix, a: Matrix, count: Scalar, factor: Operand | None = None) -> None:
        for part_t, part in zip(b, a):
            transpose_rows(self.shape, part_t, words(part), count, part.stride // 2)

    def put(self, b: Matrix, j: Value, c: int, rows: Sequence[Operand]) -> None:
        for r in range(0, len(rows), 2):
            for part, (low, high) in zip(b, cut(rows[r : r + 2], len(b))):
                pairs = paired(low, high, is_exact=part is not b[-1])
                part.at(j // 2, c)[r // 2, 0].store(pairs)

    def multiply(self, out: Rows, a: Matrix, b: Matrix, k: tuple[Scalar, Scalar], vectors: int) -> None:
        self._product(out, a, b, k, vectors, adds=False)

    def add(
        self, out: Rows, a: Matrix, b: Matrix, k: tuple[Scalar, Scalar], vectors: int,
        correction: Sequence[Operand] = (),
    ) -> None:  # fmt: skip
        lanes = self.shape.lanes
        if correction:
            with when(any_of(c < 1.0 for c in correction)):
                for r in loop(0, TILE):
                    for v, factor in enumerate(correction):
                        cell = out[r, v * lanes]
                        cell.store(cell.load(lanes) * factor)
        self._product(out, a, b, k, vectors, adds=True)

    def add_rows(self, out: Rows, a: Matrix, b: Matrix, k: tuple[Scalar, Scalar], count: Scalar) -> None:
        for r in loop(0, count, TILE):
            for c in loop(0, out.stride, TILE):
                self.add(out.at(r, c), at(a, r, 0), at(b, 0, c), k, TILE // self.shape.lanes)

    def _product(
        self, out: Rows, a: Matrix, b: Matrix, k: tuple[Scalar, Scalar], vectors: int, adds: bool
    ) -> None:
        if self.shape.target.isa == "amx":
            tile_sums(out, a, b, k, vectors, adds)
        else:
            dot_sums(self.shape.lanes, out, a, b, k, vectors, adds)

    def power(self, x: Operand) -> Value:
        return exp2(x * LOG2_E, self.degree)

    @property
    def degree(self) -> int:
        """Of the exponential's polynomial."""
        config = self.shape.config
        has_sums = not {"row_max"} >= set(config.statistics)  # of many weights
        return DEGREES["f32" if has_sums else config.kind]


class CutProducts(BFloat16Products):
    """float32 and float16, whose numbers are cut into three and two of bfloat16.

    Products are as exact as in float32, of which rounding them takes none: q is scaled before it is cut, and
    the weights are exponentials of differences. Six (three) products at the tile registers' speed take half
    as long as one in vectors. Forward and backward have the same scores to the last bit, however large.
    """

    def __init__(self, shape: Shape, args: Arguments, scratch: Scratch) -> None:
        super().__init__(shape, args, scratch)
        self.q_factor, self.scale = self.scale, None
        self.wide = scratch.rows(TILE, max(shape.pad, shape.pad_v))
        self.sums = scratch.rows(TILE, TILE)

    def take(
        self, a: Matrix, source: Source, n: Scalar, count: Scalar, dim: int, factor: Operand | None = None
    ) -> None:
        """The terms of source(r) * factor, through 32 rows of float32.

        `not_cut` becomes 1 where the largest number of 32 rows is too large, or too small and not 0.
        """
        shape, rows = self.shape, Rows(self.wide.ptr, a[0].stride)
        for r0 in loop(0, count, TILE):
            largest = Var(shape.constant(0.0))
            height = minimum(TILE, count - r0)
            load_rows(shape, rows, lambda r, first=r0: source(first + r), n - r0, height, dim)  # type: ignore[misc]
            for r in loop(0, height):
                for c in range(0, rows.stride, 2 * LANES):
                    both = [rows[r, c + i].load(LANES) for i in (0, LANES)]
                    both = both if factor is None else [x * factor for x in both]
                    for x in both:
                        largest.set(maximum(absolute(x), largest))
                    for part, term in zip(a, cut(both, len(a))):
                        part[r0 + r, c].store(rounded(*term))
            is_small = any_lane(largest > 0.0) ^ any_lane(largest >= SMALLEST)
            with when(is_small | any_lane(largest >= LARGEST)):
                self.args.not_cut.store(as_int(1))

    def add(
        self, out: Rows, a: Matrix, b: Matrix, k: tuple[Scalar, Scalar], vectors: int,
        correction: Sequence[Operand] = (),
    ) -> None:  # fmt: skip
        lanes = self.shape.lanes
        self.multiply(self.sums, a, b, k, vectors)
        for r in loop(0, TILE):
            for v in range(vectors):
                total = self.sums[r, v * lanes].load(lanes)
                _fold(out[r, v * lanes], total, correction[v : v + 1])

    def power(self, x: Operand) -> Value:
        return exp(x, self.degree)


def products_of(shape: Shape, args: Arguments, scratch: Scratch) -> Products:
    """The products of a kernel's `Config.terms`."""
    classes: tuple[type[Products], ...] = Products, BFloat16Products, CutProducts
    return classes[min(shape.config.terms, 2)](shape, args, scratch)


def at(matrix: Matrix, row: Scalar, column: Scalar) -> Matrix:
    """All terms of a matrix, seen from another corner."""
    return [part.at(row, column) for part in matrix]


def _fold(cell: Ptr, total: Operand, correction: Sequence[Operand]) -> None:
    """cell = correction * cell + total."""
    old = cell.load(total.type.count)
    cell.store(fma(old, correction[0], total) if correction else old + total)


def any_of(masks: Iterable[Value]) -> Value:
    """Whether some lane of some mask is set."""
    return functools.reduce(lambda a, b: a | b, (any_lane(mask) for mask in masks))
