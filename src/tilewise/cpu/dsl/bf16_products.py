"""Matrix products of bfloat16 with float32 sums: by AMX's tiles, or by the dot products of AVX-512 and NEON.

A tile register is 16 rows of 64 bytes. One instruction (`tdpbf16ps`) adds a[16, 32] b[32, 16] to c[16, 16]:

    c[i, n] += sum over p < 16 of  a[i, 2p] b[2p, n] + a[i, 2p + 1] b[2p + 1, n]

The dot product (`vdpbf16ps`, `bfdot`) adds one term of that sum, of one pair of a and 16 (4) pairs of b, to a
vector.

A left factor is stored as rows along the summed axis; a right factor as rows of *pairs*, two rows of the
matrix interleaved, so that word (p, n) holds b[2p, n] and b[2p + 1, n]. Transposing words turns one kind
into the other: rows of x become the pairs of x^T, and the pairs of x become the rows of x^T. For that,
words move as float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.ir as ir

from tilewise.cpu.dsl.control import loop
from tilewise.cpu.dsl.lanes import concatenated, shuffled
from tilewise.cpu.dsl.memory import Ptr, Rows
from tilewise.cpu.dsl.vector import (
    BYTES,
    F32,
    I8,
    I16,
    I32,
    Operand,
    Scalar,
    Value,
    Var,
    as_int,
    bitcast,
    builder,
    emitter,
    number,
)
from tilewise.cpu.kernels.common.tiles import BF16_STEP, Scratch

TILE = BF16_STEP  # keys or queries that a product takes at once: two tile registers each way
ROW, ROWS = 64, 16  # bytes of a tile's row, rows of a tile
LANES = 16  # words of a tile's row; memory is moved by as many, whatever vectors the processor has
HEIGHT, WIDTH = 8, 2  # rows and vectors of sums that dot products keep in registers
C, A, B = 0, 4, 6  # tile registers: four sums, two left and two right factors
# Which terms of a and b are multiplied, so that each product loads one of them anew. What is left out is of
# either sign and small beside a rounding of the number itself: of three terms the middle one times the last,
# 2^-25 of a product where float32 rounds at 2^-24; of two the last by itself, 2^-16 where float16 has 2^-11.
TERMS = {
    1: ((0, 0),),
    2: ((1, 0), (0, 0), (0, 1)),
    3: ((2, 0), (1, 0), (1, 1), (0, 1), (0, 0), (0, 2)),
}
# Where cutting works: terms of smaller numbers, and their products, come near 2^-126, below which the tile
# unit reads and writes 0; sums of products of larger ones may be infinite, and then NaN in terms.
SMALLEST, LARGEST = 2.0**-80, 2.0**59
VOID = ir.VoidType()


class _BFloat(ir.Type):
    """LLVM's bfloat, which only the signatures of intrinsics need."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()
DOT_SETS = ("avx512_bf16", "neon_bf16")  # instruction sets with a dot product and no tiles
DOTS = {16: "llvm.x86.avx512bf16.dpbf16ps.512", 4: "llvm.aarch64.neon.bfdot.v4f32.v8bf16"}  # by lanes


@contextmanager
def tile_registers(
    scratch: Scratch, widths: Sequence[int] = (ROW,) * 8, heights: Sequence[int] = (ROWS,) * 8
) -> Iterator[None]:
    """Give this thread eight tile registers, of full size or as said; at the end, whatever it had before.

    PyTorch keeps its own configuration between calls in places, and counts on finding it. Nothing to do
    where the instruction set has no tiles, or products are in the compute type.
    """
    if scratch.shape.target.isa != "amx" or not scratch.shape.config.terms:
        yield
        return
    mine, before = (scratch.rows(1, 64, "bool").ptr for _ in range(2))
    palette = [1] + [0] * 15
    row_bytes = [byte for width in widths for byte in (width, 0)] + [0] * 16
    mine.store(Value(ir.Constant(ir.VectorType(I8, 64), [*palette, *row_bytes, *heights, *[0] * 8])))
    emitter().intrinsic("llvm.x86.sttilecfg", VOID, before.address)
    emitter().intrinsic("llvm.x86.ldtilecfg", VOID, mine.address)
    yield
    emitter().intrinsic("llvm.x86.ldtilecfg", VOID, before.address)


def tile_sums(
    out: Rows, a: Sequence[Rows], b: Sequence[Rows], k: tuple[Scalar, Scalar], columns: int, adds: bool
) -> None:
    """out[32, 16 columns] = or += the sum over k of a[:, k] b[k, :], 32 of them a step; 1 or 2 columns.

    The counterpart of `outer_sums`: a is rows of bfloat16, b rows of pairs, both in as many terms as their
    numbers were cut into. 2 x 2 tiles of sums stay in registers while four loads, from the first-level cache,
    feed four multiplications of 16 cycles each; with more terms, 14 loads feed 24.
    """
    sums = [(C + 2 * r + c, ROWS * r, LANES * c) for r in range(2) for c in range(columns)]
    for register, r, c in sums:
        if adds:
            load_tile(register, out, r, c)
        else:
            clear_tile(register)
    for step in _steps(*k):
        held: tuple[Rows | None, Rows | None] = None, None
        for left, right in ((a[i], b[j]) for i, j in TERMS[len(a)]):
            for r in range(2):
                if held[0] is not left:
                    load_tile(A + r, left, ROWS * r, step)
                for c in range(columns):
                    if r == 0 and held[1] is not right:
                        load_tile(B + c, right, step // 2, LANES * c)
                    multiply_tiles(C + 2 * r + c, A + r, B + c)
            held = left, right
    for register, r, c in sums:
        store_tile(register, out, r, c)


def dot_sums(
    lanes: int,
    out: Rows, a: Sequence[Rows], b: Sequence[Rows], k: tuple[Scalar, Scalar], columns: int, adds: bool,
) -> None:  # fmt: skip
    """The same in vectors: one instruction adds to each lane's sum the products of a pair of a and of b."""
    for first in range(0, columns, WIDTH):
        at = [lanes * c for c in range(first, min(first + WIDTH, columns))]
        for r0 in loop(0, TILE, HEIGHT):
            cells = [[out.at(r0, 0)[r, c] for c in at] for r in range(HEIGHT)]
            zero = number(0.0, lanes=lanes)
            sums = [[Var(cell.load(lanes) if adds else zero) for cell in row] for row in cells]
            for i, j in TERMS[len(a)]:
                left, right = words(a[i]).at(r0, 0), b[j]
                for p in loop(k[0] // 2, (k[1] + 1) // 2):
                    pairs = [right[p, c].load(lanes) for c in at]
                    for r, row in enumerate(sums):
                        x = left[r, p].splat(lanes)
                        for total, y in zip(row, pairs):
                            total.set(dot(total, x, y))
            for out_row, totals in zip(cells, sums):
                for cell, total in zip(out_row, totals):
                    cell.store(total)


def dot(total: Operand, x: Operand, y: Operand) -> Value:
    """total + x y, in each lane the two products of a pair."""
    lanes = total.type.count
    pairs = (builder().bitcast(z.raw, ir.VectorType(BFLOAT, 2 * lanes)) for z in (x, y))
    return Value(emitter().intrinsic(DOTS[lanes], total.type, total.raw, *pairs))


def _steps(start: Scalar, stop: Scalar) -> Iterator[Any]:
    """Where the 32 products of each step begin; written out one by one where they are few and known."""
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= 8 * TILE:
        yield from range(start, stop, TILE)
    else:
        yield from loop(start, stop, TILE)


def clear_tile(register: int) -> None:
    emitter().intrinsic("llvm.x86.tilezero", VOID, _number(register))


def load_tile(register: int, rows: Rows, r: Scalar, c: Scalar) -> None:
    emitter().intrinsic("llvm.x86.tileloadd64", VOID, _number(register), rows[r, c].address, _stride(rows))


def store_tile(register: int, rows: Rows, r: Scalar, c: Scalar) -> None:
    emitter().intrinsic("llvm.x86.tilestored64", VOID, _number(register), rows[r, c].address, _stride(rows))


def multiply_tiles(c: int, a: int, b: int) -> None:
    """c += a b; b in pairs."""
    emitter().intrinsic("llvm.x86.tdpbf16ps", VOID, *(_number(register) for register in (c, a, b)))


def _stride(rows: Rows) -> ir.Value:
    return as_int(rows.stride * rows.ptr.item).raw


def _number(register: int) -> ir.Constant:
    return ir.Constant(I8, register)


def pairs_at(source: Ptr, lanes: int) -> Value:
    """So many pairs as words, from where the first number lies, which need not be where a word may."""
    return Value(builder().load(source.address, typ=ir.VectorType(F32, lanes), align=BYTES["bf16"]))


def words(rows: Rows) -> Rows:
    """Rows of 16-bit numbers as rows of words of two."""
    return Rows(rows.ptr.as_kind("f32"), rows.stride // 2)


def pair_rows(dst: Rows, src: Rows, count: Scalar) -> None:
    """dst[p, c] = (src[2p, c], src[2p + 1, c]) for 2p < count: the pairs of src, from its rows."""
    for r in loop(0, count, 2):
        for c in range(0, dst.stride, LANES):
            low, high = (src[r + i, c].as_kind("u16").load(LANES) for i in range(2))
            pair = bitcast(low | (high << 16), F32)
            dst[r // 2, c].store(pair)


def cut(numbers: Sequence[Operand], count: int) -> Iterator[list[Operand]]:
    """float32 vectors as sums of `count` terms that bfloat16 holds; the last is yet to be rounded to it.

    8 bits each: three terms are a float32 to its last bit, two more than a float16. The first is cut off
    towards zero, so that it is finite where the number is; the next is rounded, so that what is left has
    either sign. An infinity leaves a NaN.
    """
    rest = list(numbers)
    for n in range(count - 1):
        bits = [bitcast(x, I32) + (0x8000 if n else 0) for x in rest]
        term = [bitcast(x & -0x10000, F32) for x in bits]
        yield list(term)
        rest = [x - head for x, head in zip(rest, term)]
    yield rest


def rounded(low: Operand, high: Operand) -> Value:
    """Two float32 vectors as twice as many bfloat16 numbers, low's first, rounded to nearest even."""
    count = 2 * low.type.count
    bfloats = ir.VectorType(BFLOAT, count)
    if count == 32:
        both = emitter().intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", bfloats, high.raw, low.raw)
    else:
        both = builder().fptrunc(concatenated(low, high).raw, bfloats)
    return Value(builder().bitcast(both, ir.VectorType(I16, count)))


def rounded_words(x: Operand) -> Value:
    """A float32 vector rounded to bfloat16, a number in the low half of each word."""
    half = emitter().intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(BFLOAT, LANES), x.raw)
    bits = builder().bitcast(half, ir.VectorType(I16, LANES))
    return Value(builder().zext(bits, ir.VectorType(I32, LANES)))


def paired(low: Operand, high: Operand, is_exact: bool = False) -> Value:
    """Two float32 vectors as pairs of bfloat16: lane by lane, (low, high). Exact: they are bfloat16."""
    if is_exact:
        return bitcast((bitcast(low, I32) >> 16) | bitcast(high, I32), F32)
    both, lanes = rounded(low, high), low.type.count
    order = [x for lane in range(lanes) for x in (lane, lane + lanes)]
    return Value(builder().bitcast(shuffled(both, both, order).raw, low.type))
