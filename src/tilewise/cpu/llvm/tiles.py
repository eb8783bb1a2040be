"""What the kernels share: arguments, rows in and out, the micro-kernel, one tile of scores.

Queries stand in vector lanes. A tile of scores is kept transposed, s[key, query], so that a row of K or V
is read as it lies in memory, one broadcast number at a time; the softmax over keys runs down the rows of s
without a horizontal step; and a mask is a comparison of lanes. Only q enters and out leaves transposed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

from tilewise.cpu.llvm.arguments import COUNTER, FLOATS, POINTERS, SLOTS, WORD, Config
from tilewise.cpu.llvm.compile import Target
from tilewise.cpu.llvm.control import either, loop, when
from tilewise.cpu.llvm.memory import Ptr, Rows
from tilewise.cpu.llvm.numerics import tanh
from tilewise.cpu.llvm.vector import (
    BYTES,
    Emitter,
    Operand,
    Scalar,
    Value,
    Var,
    absolute,
    as_kind,
    fma,
    fold_sums,
    int32,
    iota,
    maximum,
    minimum,
    number,
    select,
    splat,
    to_float,
    transpose,
)

BLOCK_K = 64  # keys converted and scored together; 32 to 128 measure alike
AMX_BLOCK_K = (128, 256)  # of head sizes below 128, and above: acc, larger there, comes and goes less often
INF = math.inf
Grid = list[list[Var]]  # accumulators [rows][vectors]


class Shape:
    """The sizes of one kernel, all known while it is built."""

    def __init__(self, config: Config, target: Target) -> None:
        self.config, self.target = config, target
        self.kind = "f64" if config.kind == "f64" else "f32"  # compute type
        self.item = 8 if self.kind == "f64" else 4
        self.lanes = target.vector_bytes // self.item
        self.rows = target.rows
        self.vectors = config.vectors
        self.block_q = self.lanes * config.vectors  # queries of a tile
        step = 2 * self.lanes if config.has_amx else max(self.lanes, self.rows)
        self.pad, self.pad_v = round_up(config.head_dim, step), round_up(config.head_dim_v, step)
        self.block_k = AMX_BLOCK_K[self.pad_v >= 128] if config.has_amx else BLOCK_K
        self.exp_degree = {"f64": 13, "f32": 6}.get(config.kind, 5)

    def constant(self, x: float) -> Value:
        return number(x, self.kind, self.lanes)

    @property
    def width(self) -> int:
        """Queries of a tile that are computed: block_q, or fewer in a kernel that is `narrowed`."""
        return self.vectors * self.lanes

    def columns(self) -> list[int]:
        """Where each vector of a tile's queries starts."""
        return [v * self.lanes for v in range(self.vectors)]


def round_up(x: int, step: int) -> int:
    return -(-x // step) * step


class Arguments:
    """The argument block; every field is one 64-bit word, read once on entry."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self.block = Ptr(emitter.function.args[0], "i64")
        self.values: dict[str, Value] = {}

    def __getattr__(self, name: str) -> Value:
        values = self.__dict__["values"]
        if name not in values:
            kind = "f64" if name in FLOATS else "i64"
            with self.emitter.on_entry():
                values[name] = self.block[WORD[name]].as_kind(kind).load()
        return values[name]

    def ptr(self, name: str, kind: str) -> Ptr:
        assert name in POINTERS
        if name not in self.values:
            with self.emitter.on_entry():
                self.values[name] = self.block[WORD[name]].as_kind("ptr").load()
        return Ptr(self.values[name].raw, kind)

    def vector(self, name: str, shape: Shape) -> Value:
        """A floating-point argument in every lane, in the compute type."""
        with self.emitter.on_entry():
            return splat(as_kind(getattr(self, name), shape.kind), shape.lanes)

    @property
    def counter(self) -> Ptr:
        return self.block[COUNTER]

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


def pieces(start: int, stop: int, lanes: int) -> Iterator[tuple[int, int]]:
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

    A repeated row is as finite as the row itself, so a weight of 0 times it brings in no NaN of its own.
    """
    for r in loop(0, count):
        row = source(minimum(r, n - 1))
        for c, width in pieces(0, dim, shape.lanes):
            dst[r, c].store(as_kind(row[c].load(width), shape.kind))
        for c, width in pieces(dim, dst.stride, shape.lanes):
            dst[r, c].store(number(0.0, shape.kind, width))


def store_rows(shape: Shape, target: Callable[[Value], Ptr], src: Rows, n: Scalar, dim: int) -> None:
    """target(r)[:dim] = src[r] for r < n, rounded to the stored type."""
    for r in loop(0, n):
        row = target(r)
        for c, width in pieces(0, dim, shape.lanes):
            row[c].store(src[r, c].load(width))


def add_at(cell: Ptr, term: Ptr, lanes: int | None) -> None:
    """cell += term, in the type of the term."""
    total = as_kind(cell.load(lanes), term.kind) + term.load(lanes)
    cell.store(as_kind(total, "f64" if cell.kind == "f64" else "f32"))


def transpose_rows(
    shape: Shape, dst: Rows, src: Rows, count: int, width: Scalar, factor: Operand | None = None
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

    Query i sees the keys j of [i + offset - left, i + offset + right] that exist (`tilewise.mask`).
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
        first = args.ptr(name, self.shape.config.kind)[base + (self.q_row0 + q0) * step]
        return lambda i: first[step * i]

    def key_rows(self, name: str, j0: Scalar) -> Callable[[Scalar], Ptr]:
        """Rows of k, v, dk or dv from key j0 on, as a function of j; by the page table if there is one."""
        args, step = self.args, getattr(self.args, f"{name}_n")
        base = args.ptr(name, self.shape.config.kind)[self.kv_head * getattr(args, f"{name}_h")]
        batch_step, first_row = getattr(args, f"{name}_b"), self.k_row0 + j0
        if not self.shape.config.is_paged:
            first = base[self.batch * batch_step + first_row * step]
            return lambda j: first[step * j]
        table = args.ptr("page_table", "i32")[self.batch * args.page_b]

        def row(j: Scalar) -> Ptr:
            page = table[(first_row + j) // args.page_size].load()
            return base[page * batch_step + (first_row + j) % args.page_size * step]

        return row

    def statistic(self, name: str, i: Scalar) -> Ptr:
        """Query i's entry of lse or dlse."""
        row = self.batch * self.args.lse_b + self.head * self.args.lse_h + self.q_row0 + i
        return self.args.ptr(name, self.shape.kind)[row]

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
        row = row + getattr(args, f"{name}_i") * i + self.k_row0 * args.score_k0 + j
        return args.ptr(name, kind)[row]

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


def narrowed(kernel: Any, vectors: int) -> Any:
    """The same kernel for a tile whose queries fill only its first vectors; areas keep their width."""
    narrow = copy.copy(kernel)
    narrow.shape, narrow.scores = copy.copy(kernel.shape), copy.copy(kernel.scores)
    narrow.shape.vectors, narrow.scores.shape = vectors, narrow.shape
    return narrow


def share_of(part: Value, parts: Value, count: int) -> tuple[Value, Value]:
    """Where the share of one of so many parts of [0, count) begins and ends."""
    size = (count + (parts - 1)) // parts
    return size * part, minimum(size * (part + 1), count)


class Scores:
    """Mask and bias beside a score tile: the parts of it that come from memory."""

    def __init__(self, shape: Shape, scratch: Scratch) -> None:
        self.shape, self.config = shape, shape.config
        config = self.config
        self.has_options = bool(config.has_softcap or config.has_alibi or config.has_mask or config.bias_kind)
        areas = {"mask": self.config.has_mask, "bias": bool(self.config.bias_kind)}
        self.areas = {
            name: scratch.rows(shape.block_k, shape.block_q) for name, used in areas.items() if used
        }
        self.by_query = scratch.rows(shape.block_q, shape.block_k) if self.areas else None

    def load(self, head: Head, q0: Scalar, j0: Value, n: Value) -> None:
        """Bring this tile's part of mask and bias into scratch, transposed like the scores."""
        for name, area in self.areas.items():
            kind = "bool" if name == "mask" else self.config.bias_kind

            def source(i: Scalar, name: str = name, kind: str = kind) -> Ptr:
                return head.score_row(name, kind, q0 + i, j0)

            with either(getattr(head.args, f"{name}_i").equals(0)) as (one_row, own_rows):
                with one_row:
                    self._spread(area, source(0), n)
                with own_rows:
                    self._turn(area, source, head.seqlen_q - q0, n)

    def _spread(self, area: Rows, row: Ptr, n: Value) -> None:
        """area[j, :] = row[j]: all queries have the same row."""
        shape = self.shape
        for j in loop(0, n):
            x = splat(as_kind(row[j].load(), shape.kind), shape.lanes)
            for c in shape.columns():
                area[j, c].store(x)

    def _turn(self, area: Rows, source: Callable[[Scalar], Ptr], n_q: Value, n: Value) -> None:
        """area[j, i] = source(i)[j]."""
        shape, rows = self.shape, self.by_query
        assert rows is not None
        lanes = shape.lanes
        with either(n < shape.block_k) as (part, whole):
            with part:
                for i in loop(0, shape.block_q):
                    row = source(minimum(i, n_q - 1))
                    for j in loop(0, n):
                        rows[i, j].store(as_kind(row[j].load(), shape.kind))
                transpose_rows(shape, area, rows, shape.block_q, shape.block_k)
            with whole:
                for i in loop(0, shape.block_q, lanes):
                    first = [source(minimum(i + r, n_q - 1)) for r in range(lanes)]
                    for j in loop(0, shape.block_k, lanes):
                        square = transpose([as_kind(row[j].load(lanes), shape.kind) for row in first])
                        for r, column in enumerate(square):
                            area.at(j, i)[r, 0].store(column)

    def add_gradient(self, head: Head, ds_t: Rows, q0: Value, j0: Value, begin: Value, end: Value) -> None:
        """dbias[q0:, j0 + begin : j0 + end] += ds, turned back; where queries share a row, their sum."""
        shape, rows, lanes = self.shape, self.by_query, self.shape.lanes
        assert rows is not None
        with either(head.args.dbias_i.equals(0)) as (one_row, own_rows):
            with one_row:
                for j in loop(0, shape.block_k, lanes):
                    keys = [[ds_t.at(j, c)[r, 0].load(lanes) for c in shape.columns()] for r in range(lanes)]
                    rows[0, j].store(fold_sums([sum(of_key[1:], of_key[0]) for of_key in keys]))
                self._add_row(head.score_row("dbias", self.config.dbias_kind, q0, j0), rows, begin, end)
            with own_rows:
                transpose_rows(shape, rows, ds_t, shape.block_k, shape.block_q)
                for i in loop(0, minimum(shape.block_q, head.seqlen_q - q0)):
                    row = head.score_row("dbias", self.config.dbias_kind, q0 + i, j0)
                    self._add_row(row, rows.at(i, 0), begin, end)

    def _add_row(self, row: Ptr, terms: Rows, begin: Value, end: Value) -> None:
        shape = self.shape
        with either(end - begin < shape.block_k) as (part, whole):
            with part:
                for j in loop(begin, end):
                    add_at(row[j], terms[0, j], None)
            with whole:
                for c, width in pieces(0, shape.block_k, shape.lanes):
                    add_at(row[c], terms[0, c], width)

    def at(self, head: Head, q0: Scalar, j0: Value) -> TileScores:
        return TileScores(self, head, q0, j0)


class TileScores:
    """Applies the options to rows of one score tile."""

    def __init__(self, scores: Scores, head: Head, q0: Scalar, j0: Value) -> None:
        self.scores, self.shape, self.config = scores, scores.shape, scores.config
        shape, args = self.shape, head.args
        self.head, self.j0 = head, j0
        first = q0 + head.offset  # the position of the tile's first query among the keys
        self.first = first
        last_key = head.seqlen_k - 1
        lane = [iota(shape.lanes) + c for c in shape.columns()]
        self.lane_lo = [x + int32(first - args.left) for x in lane]
        self.lane_hi = [
            minimum(x + int32(first + args.right), splat(int32(last_key), shape.lanes)) for x in lane
        ]
        self.inner_lo = first + (shape.block_q - 1) - args.left  # keys [inner_lo, inner_hi] are seen by all
        self.inner_hi = minimum(first + args.right, last_key)
        self.position = [x + int32(first) for x in lane]
        if self.config.has_softcap:
            self.softcap = args.vector("softcap", shape)
        if self.config.has_alibi:
            self.slope = splat(head.negative_slope(), shape.lanes)

    def apply(self, s: Grid, j: Value, slope_of_cap: Rows | None = None) -> None:
        """Products q k of keys j0 + [j, j + rows) -> scores, in place; -inf where not visible.

        With a softcap, `slope_of_cap[j, :]` (if given) gets 1 - tanh^2, the derivative of the cap.
        """
        shape, config, j_key = self.shape, self.config, self.j0 + j
        for r, row in enumerate(s):
            for v, x in enumerate(row):
                if config.has_softcap:
                    t, slope = tanh(x, shape.exp_degree)
                    if slope_of_cap is not None:
                        slope_of_cap.at(j, v * shape.lanes)[r, 0].store(slope)
                    x.set(t * self.softcap)
                if "bias" in self.scores.areas:
                    x.set(x + self._option("bias", j, r, v))
                if config.has_alibi:
                    distance = to_float(self.position[v] - int32(j_key + r), shape.kind)
                    x.set(fma(absolute(distance), self.slope, x))
                if config.has_mask:
                    x.set(select(self._option("mask", j, r, v) > 0.0, x, -INF))
        with when(self.is_edge(j)):
            self.hide(s, j)

    def is_edge(self, j: Value) -> Value:
        """Whether some query does not see all of the keys j0 + [j, j + rows)."""
        j_key = self.j0 + j
        return (j_key < self.inner_lo) | (j_key + (self.shape.rows - 1) > self.inner_hi)

    def hide(self, s: Grid, j: Value) -> None:
        """-inf where a query does not see one of the keys j0 + [j, j + rows)."""
        for r, row in enumerate(s):
            for v, x in enumerate(row):
                key = splat(int32(self.j0 + j + r), self.shape.lanes)
                is_visible = (key >= self.lane_lo[v]) & (key <= self.lane_hi[v])
                x.set(select(is_visible, x, -INF))

    def _option(self, name: str, j: Value, r: int, v: int) -> Value:
        shape = self.shape
        return self.scores.areas[name].at(j, v * shape.lanes)[r, 0].load(shape.lanes)
