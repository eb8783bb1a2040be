"""Kernels for AVX-512 and AMX on any x86-64 machine with AVX2: `pytest --emulate amx tests/cpu/llvm`.

Vectors of 64 bytes are no trouble to LLVM, which takes two registers for each. What the machine lacks are
the instructions that kernels name: calls of them become calls of the functions below, which do what Intel's
manual says. A kernel's tile registers lie on its stack. A product of tiles whose shapes do not fit stops
the process, as the instruction does.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from tilewise.cpu.host import compile as kernels

NAMED = re.compile(r'@"llvm\.x86\.(?:avx512\.mask\.|avx512bf16\.)?(\w+)[\w.]*"\(')
TILES = re.compile(r'@"soft\.((?:tile|tdp|ldtile|sttile)\w*)"\(')

VECTORS = """
declare <16 x float> @llvm.floor.v16f32(<16 x float>)
declare <16 x float> @llvm.fabs.v16f32(<16 x float>)
declare <16 x float> @llvm.copysign.v16f32(<16 x float>, <16 x float>)
declare <16 x float> @llvm.maxnum.v16f32(<16 x float>, <16 x float>)
declare <16 x float> @llvm.minnum.v16f32(<16 x float>, <16 x float>)
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @llvm.trap()

; x - floor(x), 0 of an infinity; NaN if another way than FLOOR of numerics.py is asked for
define internal <16 x float> @"soft.reduce"(
  <16 x float> %x, i32 %way, <16 x float> %source, i16 %mask, i32 %rounding
) {
  %down = call <16 x float> @llvm.floor.v16f32(<16 x float> %x)
  %rest = fsub <16 x float> %x, %down
  %size = call <16 x float> @llvm.fabs.v16f32(<16 x float> %x)
  %infinite = fcmp oeq <16 x float> %size, splat (float 0x7FF0000000000000)
  %finite = select <16 x i1> %infinite, <16 x float> zeroinitializer, <16 x float> %rest
  %known = icmp eq i32 %way, 9
  %found = select i1 %known, <16 x float> %finite, <16 x float> splat (float 0x7FF8000000000000)
  ret <16 x float> %found
}

; x 2^floor(y), in two steps as one may have no float32 for the power
define internal <16 x float> @"soft.scalef"(
  <16 x float> %x, <16 x float> %y, <16 x float> %source, i16 %mask, i32 %rounding
) {
  %down = call <16 x float> @llvm.floor.v16f32(<16 x float> %y)
  %low = call <16 x float> @llvm.maxnum.v16f32(<16 x float> %down, <16 x float> splat (float -252.0))
  %near = call <16 x float> @llvm.minnum.v16f32(<16 x float> %low, <16 x float> splat (float 254.0))
  %n = fptosi <16 x float> %near to <16 x i32>
  %half = ashr <16 x i32> %n, splat (i32 1)
  %other = sub <16 x i32> %n, %half
  %half_biased = add <16 x i32> %half, splat (i32 127)
  %other_biased = add <16 x i32> %other, splat (i32 127)
  %half_bits = shl <16 x i32> %half_biased, splat (i32 23)
  %other_bits = shl <16 x i32> %other_biased, splat (i32 23)
  %half_power = bitcast <16 x i32> %half_bits to <16 x float>
  %other_power = bitcast <16 x i32> %other_bits to <16 x float>
  %once = fmul <16 x float> %x, %half_power
  %twice = fmul <16 x float> %once, %other_power
  %is_nan = fcmp uno <16 x float> %y, %y
  %found = select <16 x i1> %is_nan, <16 x float> %y, <16 x float> %twice
  ret <16 x float> %found
}

; 0 for what is too small for a normal number
define internal <16 x float> @"soft.flushed"(<16 x float> %x) {
  %size = call <16 x float> @llvm.fabs.v16f32(<16 x float> %x)
  %small = fcmp olt <16 x float> %size, splat (float 0x3810000000000000)
  %zero = call <16 x float> @llvm.copysign.v16f32(<16 x float> zeroinitializer, <16 x float> %x)
  %found = select <16 x i1> %small, <16 x float> %zero, <16 x float> %x
  ret <16 x float> %found
}

; rounded to the nearest bfloat16, an even one of two
define internal <16 x i16> @"soft.cvtneps2bf16"(<16 x float> %x) {
  %normal = call <16 x float> @"soft.flushed"(<16 x float> %x)
  %bits = bitcast <16 x float> %normal to <16 x i32>
  %upper = lshr <16 x i32> %bits, splat (i32 16)
  %odd = and <16 x i32> %upper, splat (i32 1)
  %half = add <16 x i32> %odd, splat (i32 32767)
  %sum = add <16 x i32> %bits, %half
  %near = lshr <16 x i32> %sum, splat (i32 16)
  %quiet = or <16 x i32> %upper, splat (i32 64)
  %is_nan = fcmp uno <16 x float> %x, %x
  %found = select <16 x i1> %is_nan, <16 x i32> %quiet, <16 x i32> %near
  %words = trunc <16 x i32> %found to <16 x i16>
  ret <16 x i16> %words
}

define internal <32 x i16> @"soft.cvtne2ps2bf16"(<16 x float> %high, <16 x float> %low) {
  %a = call <16 x i16> @"soft.cvtneps2bf16"(<16 x float> %low)
  %b = call <16 x i16> @"soft.cvtneps2bf16"(<16 x float> %high)
  %both = shufflevector <16 x i16> %a, <16 x i16> %b, <32 x i32> <ORDER>
  ret <32 x i16> %both
}

; sum + x y of one number of each pair: the first with a shift of 16, the second of 0
define internal <16 x float> @"soft.add"(<16 x float> %sum, <16 x i32> %x, <16 x i32> %y, <16 x i32> %shift) {
  %x_shifted = shl <16 x i32> %x, %shift
  %y_shifted = shl <16 x i32> %y, %shift
  %x_bits = and <16 x i32> %x_shifted, splat (i32 -65536)
  %y_bits = and <16 x i32> %y_shifted, splat (i32 -65536)
  %a = bitcast <16 x i32> %x_bits to <16 x float>
  %b = bitcast <16 x i32> %y_bits to <16 x float>
  %c = call <16 x float> @"soft.flushed"(<16 x float> %a)
  %d = call <16 x float> @"soft.flushed"(<16 x float> %b)
  %total = call <16 x float> @llvm.fma.v16f32(<16 x float> %c, <16 x float> %d, <16 x float> %sum)
  %found = call <16 x float> @"soft.flushed"(<16 x float> %total)
  ret <16 x float> %found
}

; the second products of the pairs first
define internal <16 x float> @"soft.dpbf16ps"(<16 x float> %sum, <32 x i16> %x, <32 x i16> %y) {
  %a = bitcast <32 x i16> %x to <16 x i32>
  %b = bitcast <32 x i16> %y to <16 x i32>
  %once = call <16 x float> @"soft.add"(
    <16 x float> %sum, <16 x i32> %a, <16 x i32> %b, <16 x i32> zeroinitializer)
  %twice = call <16 x float> @"soft.add"(
    <16 x float> %once, <16 x i32> %a, <16 x i32> %b, <16 x i32> splat (i32 16))
  ret <16 x float> %twice
}
""".replace("ORDER", ", ".join(f"i32 {n}" for n in range(32)))

# %state: 64 bytes of configuration, then eight tiles of 16 rows of 64 bytes. The configuration has each
# tile's bytes a row from byte 16 on, 16 bits each, and its rows from byte 48 on.
AMX = """
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define internal i64 @"soft.rows"(ptr %state, i8 %tile) {
  %n = zext i8 %tile to i64
  %at = add i64 %n, 48
  %place = getelementptr i8, ptr %state, i64 %at
  %rows = load i8, ptr %place
  %found = zext i8 %rows to i64
  ret i64 %found
}

define internal i64 @"soft.row_bytes"(ptr %state, i8 %tile) {
  %n = zext i8 %tile to i64
  %twice = shl i64 %n, 1
  %at = add i64 %twice, 16
  %place = getelementptr i8, ptr %state, i64 %at
  %bytes = load i8, ptr %place
  %found = zext i8 %bytes to i64
  ret i64 %found
}

define internal ptr @"soft.row"(ptr %state, i8 %tile, i64 %row) {
  %n = zext i8 %tile to i64
  %before = shl i64 %n, 4
  %rows = add i64 %before, %row
  %bytes = shl i64 %rows, 6
  %at = add i64 %bytes, 64
  %place = getelementptr i8, ptr %state, i64 %at
  ret ptr %place
}

define internal void @"soft.ldtilecfg"(ptr %state, ptr %from) {
  call void @llvm.memset.p0.i64(ptr %state, i8 0, i64 8256, i1 false)
  call void @llvm.memcpy.p0.p0.i64(ptr %state, ptr %from, i64 64, i1 false)
  ret void
}

define internal void @"soft.sttilecfg"(ptr %state, ptr %to) {
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %state, i64 64, i1 false)
  ret void
}

define internal void @"soft.tilezero"(ptr %state, i8 %tile) {
  %place = call ptr @"soft.row"(ptr %state, i8 %tile, i64 0)
  call void @llvm.memset.p0.i64(ptr %place, i8 0, i64 1024, i1 false)
  ret void
}

; a tile's rows from or to memory
define internal void @"soft.move"(ptr %state, i8 %tile, ptr %memory, i64 %stride, i1 %is_load) {
entry:
  %rows = call i64 @"soft.rows"(ptr %state, i8 %tile)
  %bytes = call i64 @"soft.row_bytes"(ptr %state, i8 %tile)
  br label %next
next:
  %r = phi i64 [ 0, %entry ], [ %after, %next ]
  %row = call ptr @"soft.row"(ptr %state, i8 %tile, i64 %r)
  %offset = mul i64 %r, %stride
  %place = getelementptr i8, ptr %memory, i64 %offset
  %from = select i1 %is_load, ptr %place, ptr %row
  %to = select i1 %is_load, ptr %row, ptr %place
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  %after = add i64 %r, 1
  %more = icmp ult i64 %after, %rows
  br i1 %more, label %next, label %done
done:
  ret void
}

define internal void @"soft.tileloadd64"(ptr %state, i8 %tile, ptr %memory, i64 %stride) {
  call void @"soft.tilezero"(ptr %state, i8 %tile)
  call void @"soft.move"(ptr %state, i8 %tile, ptr %memory, i64 %stride, i1 true)
  ret void
}

define internal void @"soft.tilestored64"(ptr %state, i8 %tile, ptr %memory, i64 %stride) {
  call void @"soft.move"(ptr %state, i8 %tile, ptr %memory, i64 %stride, i1 false)
  ret void
}

; c += a b. First and second products of the pairs are summed apart, from 0.
define internal void @"soft.tdpbf16ps"(ptr %state, i8 %c, i8 %a, i8 %b) {
entry:
  %rows = call i64 @"soft.rows"(ptr %state, i8 %c)
  %rows_a = call i64 @"soft.rows"(ptr %state, i8 %a)
  %rows_b = call i64 @"soft.rows"(ptr %state, i8 %b)
  %bytes_a = call i64 @"soft.row_bytes"(ptr %state, i8 %a)
  %bytes_b = call i64 @"soft.row_bytes"(ptr %state, i8 %b)
  %bytes_c = call i64 @"soft.row_bytes"(ptr %state, i8 %c)
  %terms = lshr i64 %bytes_a, 2
  %same_rows = icmp eq i64 %rows, %rows_a
  %same_terms = icmp eq i64 %terms, %rows_b
  %same_bytes = icmp eq i64 %bytes_b, %bytes_c
  %two = and i1 %same_rows, %same_terms
  %fit = and i1 %two, %same_bytes
  br i1 %fit, label %next, label %wrong
wrong:
  call void @llvm.trap()
  unreachable
next:
  %r = phi i64 [ 0, %entry ], [ %after, %summed ]
  %row = call ptr @"soft.row"(ptr %state, i8 %c, i64 %r)
  %left = call ptr @"soft.row"(ptr %state, i8 %a, i64 %r)
  br label %term
term:
  %k = phi i64 [ 0, %next ], [ %k_after, %term ]
  %even = phi <16 x float> [ zeroinitializer, %next ], [ %evens, %term ]
  %odd = phi <16 x float> [ zeroinitializer, %next ], [ %odds, %term ]
  %word = getelementptr i32, ptr %left, i64 %k
  %x = load i32, ptr %word, align 1
  %first = insertelement <16 x i32> poison, i32 %x, i32 0
  %xs = shufflevector <16 x i32> %first, <16 x i32> poison, <16 x i32> zeroinitializer
  %right = call ptr @"soft.row"(ptr %state, i8 %b, i64 %k)
  %ys = load <16 x i32>, ptr %right, align 1
  %evens = call <16 x float> @"soft.add"(
    <16 x float> %even, <16 x i32> %xs, <16 x i32> %ys, <16 x i32> splat (i32 16))
  %odds = call <16 x float> @"soft.add"(
    <16 x float> %odd, <16 x i32> %xs, <16 x i32> %ys, <16 x i32> zeroinitializer)
  %k_after = add i64 %k, 1
  %more_terms = icmp ult i64 %k_after, %terms
  br i1 %more_terms, label %term, label %summed
summed:
  %start = load <16 x float>, ptr %row, align 1
  %both = fadd <16 x float> %evens, %odds
  %total = fadd <16 x float> %start, %both
  %normal = call <16 x float> @"soft.flushed"(<16 x float> %total)
  store <16 x float> %normal, ptr %row, align 1
  %after = add i64 %r, 1
  %more = icmp ult i64 %after, %rows
  br i1 %more, label %next, label %done
done:
  ret void
}
"""
TILES_OF_A_KERNEL = """entry:
  %soft.state = alloca [8256 x i8], align 64
  call void @llvm.memset.p0.i64(ptr %soft.state, i8 0, i64 8256, i1 false)
"""


def in_software(ir_text: str) -> str:
    """A kernel whose named instructions are functions of its own."""
    text = NAMED.sub(r'@"soft.\1"(', ir_text).replace("bfloat", "i16")
    if TILES.search(text):
        head, entry, body = text.partition("entry:\n")
        assert entry and "\nentry:\n" not in body  # one function
        body = TILES.sub(r'@"soft.\1"(ptr %soft.state, ', body)
        text = head + TILES_OF_A_KERNEL + body + VECTORS + AMX
    else:
        text += VECTORS
    lines, declared = [], set()
    for line in text.splitlines():
        if line.startswith("declare "):
            name = line.partition("@")[2].partition("(")[0].strip('"')
            if name in declared or name.startswith("soft."):
                continue
            declared.add(name)
        lines.append(line)
    return "\n".join(lines)


def install(isa: str) -> None:
    """Make `isa` the widest instruction set of this machine."""
    native, find, generate = kernels.target("avx2"), kernels._x86_targets, kernels.generate
    sources = [*kernels.kernel_sources(), Path(__file__)]  # kernels on disk are made from this file too
    assert isinstance(native, kernels.Target), native
    emulated = replace(native, isa=isa, vector_bytes=64, rows=8)

    def generate_emulated(ir_text: str, machine: kernels.Target, triple: str | None = None) -> bytes:
        is_emulated = (machine.isa, machine.cpu) == (isa, native.cpu)
        return generate(in_software(ir_text) if is_emulated else ir_text, machine, triple)

    kernels._x86_targets = lambda name, has: [emulated, *find(name, has)]
    kernels.generate = generate_emulated
    kernels.kernel_sources = lambda: sources
    kernels._sources_hash.cache_clear()
    kernels.target.cache_clear()
