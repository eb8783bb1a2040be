"""What the kernels share: arguments, rows in and out, the micro-kernel, where a head's rows are.

Queries stand in vector lanes. A tile of scores is kept transposed, s[key, query], so that a row of K or V
is read as it lies in memory, one broadcast number at a time; the softmax over keys runs down the rows of s
without a horizontal step; and a mask is a comparison of lanes. Only q enters and out leaves transposed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

from tilewise.cpu.dsl.control import either, loop, when
from tilewise.cpu.dsl.lanes import transpose
from tilewise.cpu.dsl.memory import Ptr, Rows
from tilewise.cpu.dsl.vector import (
    BYTES,
    Emitter,
    Operand,
    Scalar,
    Value,
    Var,
    as_kind,
    fma,
    maximum,
    minimum,
    number,
    splat,
)
from tilewise.cpu.host.arguments import (
    COUNTER,
    FLOATS,
    NOT_CUT,
    POINTERS,
    SLOTS,
    WORD,
    WRONG_INDEX,
    Config,
    Target,
)

BF16_STEP = 32  # rows, columns and terms that a product of bfloat16 takes at a time
LONG_SUM = 64  # products that one chain sums at most in float32, where their number is known
INF = math.inf
KeyBlocks = tuple[tuple[int, int], ...]  # by terms, from 0: keys of a block, head sizes under 128 and over
Grid = list[list[Var]]  # accumulators [rows][vectors]


class Shape:
    """The sizes of one kernel, all known while it is built."""

    def __init__(self, config: Config, target: Target, key_blocks: KeyBlocks) -> None:
        self.config, self.target = config, target
        self.kind = "f64" if config.kind == "f64" else "f32"  # compute type
        self.item = 8 if self.kind == "f64" else 4
        self.lanes = target.vector_bytes // self.item
        self.rows = target.rows
        self.vectors = config.vectors
        self.block_q = self.lanes * config.vectors  # queries of a tile
        step = BF16_STEP if config.terms else max(self.lanes, self.rows)
        self.pad, self.pad_v = round_up(config.head_dim, step), round_up(config.head_dim_v, step)
        sizes = key_blocks[min(config.terms, len(key_blocks) - 1)]
        self.block_k = config.key_block or sizes[self.pad_v >= 128]
        self.exp_degree = {"f64": 11, "f32": 6}.get(config.kind, 4)

    def constant(self, x: float) -> Value:
        return number(x, self.kind, self.lanes)

    def kind_of(self, name: str) -> str:
        """The type in memory of q, k, v, out, do, dq, dk or dv."""
        return self.kind if name in self.config.wide else self.config.kind

    @property
    def width(self) -> int:
        """Queries of a tile that are computed: block_q, or fewer in a copy of `fitting`."""
        return self.vectors * self.lanes

    def columns(self) -> list[int]:
        """Where each vector of a tile's queries starts."""
        return [v * self.lanes for v in range(self.vectors)]


def round_up(x: Any, step: int) -> Any:
    """An integer, Python's or the machine code's, up to a multiple of a power of two."""
    return (x + (step - 1)) & -step


class Arguments:
    """The argument block; every field is one 64-bit word, read once on entry."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.block = Ptr(emitter.function.args[0], "i64")
        self.values: dict[str, Value] = {}

    def __getattr__(self, name: str) -> Value:
        values = self.__dict__["values"]
        if name not in values:
            kind = "f64" if name in FLOATS else "ptr" if name in POINTERS else "i64"
            with self.emitter.on_entry():
                values[name] = self.block[WORD[name]].as_kind(kind).load()
        return values[name]

    def ptr(self, name: str, kind: str) -> Ptr:
        assert name in POINTERS
        return Ptr(getattr(self, name).raw, kind)

    def vector(self, name: str, shape: Shape) -> Value:
        """A floating-point argument in every lane, in the compute type."""
        with self.emitter.on_entry():
            return splat(as_kind(getattr(self, name), shape.kind), shape.lanes)

    @property
    def counter(self) -> Ptr:
        return self.block[COUNTER]

    @property
    def not_cut(self) -> Ptr:
        return self.block[NOT_CUT]

    @property
    def wrong_index(self) -> Ptr:
        return self.block[WRONG_INDEX]

    def thread_scratch(self) -> Ptr:
        """This thread's own part of the scratch memory."""
        slot = self.block[SLOTS].fetch_add(1)
        return self.ptr("scratch", "bool")[slot * self.scratch_bytes]


class Scratch:
    """Hands out aligned areas of a block of memory, at offsets known while the kernel is built."""

    def __init__(self, shape: Shape, base: Ptr) -> None:
        self.shape, self.base, self.bytes = shape, base, 0

    def rows(self, count: int, width: int, kind: str = "") -> Rows:
        kind, offset = kind or self.shape.kind, self.bytes
        self.bytes = round_up(offset + count * width * BYTES[kind], 64)
        return Rows(self.base[offset].as_kind(kind), width)


def column_chunks(start: int, stop: int, lanes: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) into (column, width) with widths that are powers of two up to `lanes`."""
    while start < stop:
        width = lanes
        while start % width or start + width > stop:
            width //= 2
        yield start, width
        start += width


def load_rows(
    shape: Shape, dst: Rows, source: Callable[[Value], Ptr], n: Scalar, count: Scalar, dim: int
) -> None:
    """dst[r, :dim] = source(r), with zeros up to dst's width; rows from n to count repeat the last one.

    Rows of 16 bits stay as stored, others get the compute type. A repeated row is as finite as the row
    itself, so a weight of 0 times it brings in no NaN of its own.
    """
    is_raw = dst.ptr.kind == "i16"
    lanes = BF16_STEP if is_raw else shape.lanes
    for r in loop(0, count):
        row = source(minimum(r, n - 1))
        row = row.as_kind("i16") if is_raw else row
        for c, width in column_chunks(0, dim, lanes):
            x = row[c].load(width)
            dst[r, c].store(x if is_raw else as_kind(x, shape.kind))
        for c, width in column_chunks(dim, dst.stride, lanes):
            dst[r, c].store(number(0, "i16", width) if is_raw else number(0.0, shape.kind, width))


def load_score_row(shape: Shape, dst: Rows, row: Ptr, step: Value, n: Value) -> None:
    """dst[0, :n] = a row of a mask or a bias; `step`: 1, or 0 where all keys have the same number."""
    vectors_end = (n & -shape.lanes) * step
    for j in loop(0, vectors_end, shape.lanes):
        dst[0, j].store(as_kind(row[j].load(shape.lanes), shape.kind))
    for j in loop(vectors_end, n):
        dst[0, j].store(as_kind(row[j * step].load(), shape.kind))


def store_rows(shape: Shape, target: Callable[[Value], Any], src: Rows, n: Scalar, dim: int) -> None:
    """target(r)[:dim] = src[r] for r < n, rounded to the stored type."""
    for r in loop(0, n):
        row = target(r)
        for c, width in column_chunks(0, dim, shape.lanes):
            row[c].store(src[r, c].load(width))


def transpose_rows(
    shape: Shape, dst: Rows, src: Rows, count: Scalar, width: Scalar, factor: Operand | None = None
) -> None:
    """dst[c, r] = src[r, c] * factor for r < count, c < width; both multiples of the lanes."""
    lanes = shape.lanes
    for r in loop(0, count, lanes):
        for c in loop(0, width, lanes):
            square = transpose([src.at(r, c)[i, 0].load(lanes) for i in range(lanes)])
            for i, row in enumerate(square):
                dst.at(c, r)[i, 0].store(row if factor is None else row * factor)


def outer_sums(shape: Shape, rows: int, vectors: int, n: Scalar, a: Rows, b: Rows) -> Grid:
    """The micro-kernel: acc[r][v] = sum over k < n of a[r, k], one number, times b[k, v], one vector.

    rows x vectors accumulators stay in registers; a step loads `vectors` vectors and broadcasts `rows`
    numbers for rows * vectors multiply-adds. Every matrix product of every kernel is this loop.
    """
    if isinstance(n, int) and n > LONG_SUM and shape.config.kind == "f32":
        half = round_up(n // 2, 2)  # one sum of so many products would be rounded twice as coarsely
        first = outer_sums(shape, rows, vectors, half, a, b)
        return added(first, outer_sums(shape, rows, vectors, n - half, a.at(0, half), b.at(half, 0)))
    return _chained_sums(shape, rows, vectors, n, a, b)


def added(x: Grid, y: Grid) -> Grid:
    for x_row, y_row in zip(x, y):
        for total, term in zip(x_row, y_row):
            total.set(total + term)
    return x


def _chained_sums(shape: Shape, rows: int, vectors: int, n: Scalar, a: Rows, b: Rows) -> Grid:
    acc = [[Var(shape.constant(0.0)) for _ in range(vectors)] for _ in range(rows)]
    unroll = 2 if isinstance(n, int) and n % 2 == 0 else 1
    for k0 in loop(0, n, unroll):
        for k in (k0, k0 + 1)[:unroll]:
            b_k = [b[k, 0][v * shape.lanes].load(shape.lanes) for v in range(vectors)]
            for r in range(rows):
                a_rk = a[r, k].splat(shape.lanes)
                for v in range(vectors):
                    acc[r][v].set(fma(a_rk, b_k[v], acc[r][v]))
    return acc


def lane_chunks(shape: Shape, width: int, most: int) -> list[tuple[int, int, int]]:
    """Cut `width` columns into (first column, chunks, vectors a chunk) of like sizes, at most `most` vectors.

    One vector left over would wait for its own multiply-adds, so 5 vectors are 3 and 2.
    """
    vectors = width // shape.lanes
    count = -(-vectors // most)
    small, larger = divmod(vectors, count)
    chunks = [(0, larger, small + 1), (larger * (small + 1) * shape.lanes, count - larger, small)]
    return [chunk for chunk in chunks if chunk[1]]


class Head:
    """One head of one sequence: where its rows are, and which keys its queries see.

    Query i sees the keys j of [i + offset - left, i + offset + right] that exist (`tilewise.core.mask`).
    """

    def __init__(self, shape: Shape, args: Arguments, batch: Value, head: Value) -> None:
        self.shape, self.args, self.batch, self.head = shape, args, batch, head
        self.kv_head = head // args.group
        span = args.ptr("spans", "i64")[batch * args.span_stride]
        self.q_row0, self.seqlen_q, self.k_row0, self.seqlen_k = (span[i].load() for i in range(4))
        self.offset = self.seqlen_k - self.seqlen_q

    def query_rows(self, name: str, q0: Scalar) -> Callable[[Scalar], Ptr]:
        """Rows of q, out, do or dq from query q0 on, as a function of i: the address of row q0 + i."""
        args, step = self.args, getattr(self.args, f"{name}_n")
        base = self.batch * getattr(args, f"{name}_b") + self.head * getattr(args, f"{name}_h")
        first = args.ptr(name, self.shape.kind_of(name))[base + (self.q_row0 + q0) * step]
        return lambda i: first[step * i]

    def key_rows(self, name: str, j0: Scalar) -> Callable[[Scalar], Ptr]:
        """Rows of k, v, dk or dv from key j0 on, as a function of j; by the page table if there is one."""
        args, step = self.args, getattr(self.args, f"{name}_n")
        base = args.ptr(name, self.shape.kind_of(name))[self.kv_head * getattr(args, f"{name}_h")]
        batch_step, first_row = getattr(args, f"{name}_b"), self.k_row0 + j0
        page_size = self.shape.config.page_size
        if not page_size:
            first = base[self.batch * batch_step + first_row * step]
            return lambda j: first[step * j]
        table = args.ptr("page_table", "i32")[self.batch * args.page_b]

        def row(j: Scalar) -> Ptr:
            page = table[(first_row + j) // page_size].load()  # of a power of two, a shift
            return base[page * batch_step + (first_row + j) % page_size * step]

        return row

    def statistic(self, name: str, i: Scalar) -> Ptr:
        """Query i's entry of lse, its residual, dlse or delta."""
        row = self.batch * self.args.lse_b + self.head * self.args.lse_h + self.q_row0 + i
        return self.args.ptr(name, self.shape.kind)[row]

    def store_lse(self, i: Scalar, lse: Value, residual: Value) -> None:
        """Query i's log-sum-exp, and where it is wanted what a float32 (float64) does not hold of it."""
        self.statistic("lse", i).store(lse)
        residuals = self.statistic("lse_residual", i)
        with when(self.args.ptr("lse_residual", self.shape.kind).is_given):
            residuals.store(residual)

    def sink(self) -> Value:
        """The head's sink logit in every lane."""
        return self.args.ptr("sinks", self.shape.kind)[self.head].splat(self.shape.lanes)

    def negative_slope(self) -> Value:
        """ALiBi's slope, to be added per unit of distance."""
        slope = self.args.ptr("slopes", self.shape.kind)[self.batch * self.args.slopes_b + self.head]
        return -1.0 * slope.load()

    def score_row(self, name: str, kind: str, i: Scalar, j: Scalar) -> Ptr:
        """Where (query i, key j) stands in mask, bias or dbias."""
        args = self.args
        row = self.batch * getattr(args, f"{name}_b") + self.head * getattr(args, f"{name}_h")
        key = self.k_row0 * args.score_k0 + j
        return args.ptr(name, kind)[row + getattr(args, f"{name}_i") * i + getattr(args, f"{name}_j") * key]

    def key_range(self, q0: Scalar, q1: Scalar) -> tuple[Value, Value]:
        """The keys [k0, k1) that at least one of the queries [q0, q1) may see."""
        k0 = maximum(0, self.offset + q0 - self.args.left)
        k1 = minimum(self.seqlen_k, self.offset + q1 + self.args.right)
        return k0, k1

    def query_range(self, k0: Scalar, k1: Scalar) -> tuple[Value, Value]:
        """The queries [q0, q1) that may see at least one of the keys [k0, k1)."""
        q0 = maximum(0, -self.offset + k0 - self.args.right)
        q1 = minimum(self.seqlen_q, -self.offset + k1 + self.args.left)
        return q0, q1


def fitting(kernel: Any, head: Head, q0: Scalar) -> Iterator[Any]:
    """The kernel for the tile at q0: itself or, in a branch, a copy that leaves no vector of queries empty.

    Areas keep their width.
    """
    shape = kernel.shape
    if shape.config.vectors != 3 or shape.vectors == 1:
        yield kernel
        return
    narrow = copy.copy(kernel)
    narrow.shape, narrow.scores = copy.copy(shape), copy.copy(kernel.scores)
    narrow.shape.vectors, narrow.scores.shape = shape.vectors - 1, narrow.shape
    with either(q0 + narrow.shape.width < head.seqlen_q) as (all_vectors, fewer):
        with all_vectors:
            yield kernel
        with fewer:
            yield from fitting(narrow, head, q0)
