"""Matrix products in Intel's tile registers (AMX): float32 sums of products of bfloat16.

A tile register is 16 rows of 64 bytes. One instruction adds a[16, 32] b[32, 16] to c[16, 16]:

    c[i, n] += sum over p < 16 of  a[i, 2p] b[2p, n] + a[i, 2p + 1] b[2p + 1, n]

A left factor is stored as rows along the summed axis; a right factor as rows of *pairs*, two rows of the matrix
interleaved, so that word (p, n) holds b[2p, n] and b[2p + 1, n]. Words move like float32 here, because a
transposed matrix of words is what changes one kind into the other: rows of x are, transposed as words,
the pairs of x^T; and the pairs of x are, transposed, the rows of x^T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llvmlite.ir as ir

from tilewise.cpu.llvm.control import loop
from tilewise.cpu.llvm.memory import Ptr, Rows
from tilewise.cpu.llvm.tiles import Scratch, Shape, pieces
from tilewise.cpu.llvm.vector import F32, I8, I16, I32, I64, Operand, Scalar, Value, Var, builder, emitter, minimum

TILE = 32  # keys or queries that a product takes at once: two tile registers each way
ROW, ROWS = 64, 16  # bytes of a tile's row, rows of a tile
LANES = 16
C, A, B = 0, 4, 6  # tile registers: four sums, two left and two right factors
VOID = ir.VoidType()


class _BFloat(ir.Type):
    """LLVM's bfloat, which only the conversion's signature needs."""

    def _to_string(self) -> str:
        return "bfloat"


@contextmanager
def tile_registers(scratch: Scratch) -> Iterator[None]:
    """Configure this thread's eight tile registers, all of full size; release them at the end."""
    config = scratch.rows(1, 64, "bool").ptr
    palette = [1] + [0] * 15
    row_bytes = [ROW, 0] * 8 + [0] * 16
    rows = [ROWS] * 8 + [0] * 8
    bytes_ = ir.Constant(ir.VectorType(I8, 64), palette + row_bytes + rows)
    config.store(Value(bytes_))
    emitter().intrinsic("llvm.x86.ldtilecfg", VOID, config.address)
    yield
    emitter().intrinsic("llvm.x86.tilerelease", VOID)


class Products:
    """out[32, 16 columns] = a b or out += a b, many in a row: `start`, any number of `add`, `finish`.

    The counterpart of `outer_sums`: a is rows of bfloat16, b rows of pairs. The sums of one column of tiles go
    into two registers, those of the next into the other two, and are stored only when the next column's
    multiplications are under way: a register that waits to be stored holds up whatever writes it.
    """

    def __init__(self, scratch: Scratch) -> None:
        self.nowhere = scratch.rows(2 * ROWS, ROW, "bool")  # takes what the registers held before the start

    def start(self) -> None:
        self.waiting = [Var(Value(self.nowhere[ROWS * i, 0].address)) for i in range(2)]
        self.stride = Var(ROW)

    def add(self, out: Rows, a: Rows, b: Rows, k: tuple[Scalar, Scalar], columns: int, adds: bool) -> None:
        """Sums over [k[0], k[1]), in steps of 32. What is added to must not be the product before."""
        cells = [[(r, c) for r in range(2)] for c in range(columns)]
        if columns % 2:  # the registers' halves must alternate
            cells = [[(r, c)] for c in range(columns) for r in range(2)]
        for part, column in enumerate(cells):
            half = part % 2
            registers = [C + 2 * half + i for i in range(len(column))]
            for register, (r, c) in zip(registers, column):
                if adds:
                    _load(register, out, ROWS * r, LANES * c)
                else:
                    emitter().intrinsic("llvm.x86.tilezero", VOID, _number(register))
            for step in steps(*k):
                _load(B + half, b, step // 2, LANES * column[0][1])
                for i, (register, (r, _)) in enumerate(zip(registers, column)):
                    _load(A + i, a, ROWS * r, step)
                    factors = (_number(x) for x in (register, A + i, B + half))
                    emitter().intrinsic("llvm.x86.tdpbf16ps", VOID, *factors)
            self._store(half ^ 1, len(column))
            for place, (r, c) in zip(self.waiting, column):
                place.set(Value(out[ROWS * r, LANES * c].address))
            self.stride.set(out.stride * out.ptr.item)

    def finish(self, columns: int) -> None:
        self._store(1, 1 if columns % 2 else 2)

    def _store(self, half: int, count: int) -> None:
        for i, place in enumerate(self.waiting[:count]):
            register = _number(C + 2 * half + i)
            emitter().intrinsic("llvm.x86.tilestored64", VOID, register, place.raw, self.stride.raw)


def steps(start: Scalar, stop: Scalar) -> Iterator[Any]:
    """Where the 32 products of each step begin; written out one by one where they are few and known."""
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= 8 * TILE:
        yield from range(start, stop, TILE)
    else:
        yield from loop(start, stop, TILE)


def _load(register: int, rows: Rows, r: Scalar, c: Scalar) -> None:
    stride = ir.Constant(I64, rows.stride * rows.ptr.item)
    emitter().intrinsic("llvm.x86.tileloadd64", VOID, _number(register), rows[r, c].address, stride)


def _number(register: int) -> ir.Constant:
    return ir.Constant(I8, register)


def words(rows: Rows) -> Rows:
    """Rows of 16-bit numbers as rows of words of two."""
    return Rows(rows.ptr.as_kind("f32"), rows.stride // 2)


def copy_rows(dst: Rows, source: Callable[[Value], Ptr], n: Scalar, count: Scalar, dim: int) -> None:
    """dst[r, :dim] = source(r) as it is stored, with zeros up to dst's width; rows from n on repeat the last."""
    for r in loop(0, count):
        row = source(minimum(r, n - 1)).as_kind("i16")
        for c, width in pieces(0, dim, 2 * LANES):
            dst[r, c].store(row[c].load(width))
        for c, width in pieces(dim, dst.stride, 2 * LANES):
            dst[r, c].store(Value(ir.Constant(ir.VectorType(I16, width), [0] * width)))


def pair_rows(dst: Rows, src: Rows, count: Scalar) -> None:
    """dst[p, c] = (src[2p, c], src[2p + 1, c]) for 2p < count: the pairs of src, from its rows."""
    wide = ir.VectorType(I32, LANES)
    for r in loop(0, count, 2):
        for c in range(0, src.stride, LANES):
            low, high = (Value(builder().zext(src[r + i, c].load(LANES).raw, wide)) for i in range(2))
            pair = builder().bitcast((low | (high << 16)).raw, ir.VectorType(F32, LANES))
            dst[r // 2, c].store(Value(pair))


def rounded(low: Operand, high: Operand) -> Value:
    """Two float32 vectors as 32 bfloat16 numbers, low's first, rounded to nearest even."""
    result = ir.VectorType(_BFloat(), 2 * LANES)
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    both = emitter().intrinsic(name, result, high.raw, low.raw)
    return Value(builder().bitcast(both, ir.VectorType(I16, 2 * LANES)))


def paired(low: Operand, high: Operand) -> Value:
    """Two float32 vectors as 16 pairs of bfloat16: lane by lane, (low, high)."""
    both = rounded(low, high)
    order = [x for lane in range(LANES) for x in (lane, lane + LANES)]
    mixed = builder().shuffle_vector(both.raw, both.raw, ir.Constant(ir.VectorType(I32, 2 * LANES), order))
    return Value(builder().bitcast(mixed, ir.VectorType(F32, LANES)))
