"""Memory as kernels see it: addresses that know how their elements are stored, and matrices of them.

bfloat16 and float16 are read into and written from float32; a bool is read as 0 or 1.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir

from tilewise.cpu.dsl.vector import (
    BYTES,
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    STORED,
    Operand,
    Scalar,
    Value,
    as_int,
    bitcast,
    builder,
    converted,
    emitter,
    of_lanes,
    select,
    splat,
)

# How kinds are read that are not computed in.
WIDENED = {
    "f16": ("fpext", F32), "bf16": ("zext", I32), "bool": ("uitofp", F32),
    "i32": ("sext", I64), "u16": ("zext", I32), "u8": ("zext", I64),
}  # fmt: skip


class Ptr:
    """The address of an element stored as `kind`; `p[i]` is the address of the i-th one after it."""

    def __init__(self, address: ir.Value, kind: str) -> None:
        self.address, self.kind = address, kind

    def __getitem__(self, index: Scalar) -> Ptr:
        if isinstance(index, int) and index == 0:
            return self
        offset = as_int(index).raw
        return Ptr(
            builder().gep(self.address, [offset], source_etype=STORED[self.kind], inbounds=True), self.kind
        )

    @property
    def item(self) -> int:
        """Bytes of one element."""
        return BYTES[self.kind]

    @property
    def is_given(self) -> Value:
        """Whether the address is not 0."""
        return Value(
            builder().icmp_unsigned("!=", builder().ptrtoint(self.address, I64), ir.Constant(I64, 0))
        )

    def as_kind(self, kind: str) -> Ptr:
        return Ptr(self.address, kind)

    def load(self, lanes: int | None = None) -> Value:
        """One element (lanes=None) or a vector of consecutive ones, in the compute type."""
        element = STORED[self.kind]
        type_ = element if lanes is None else ir.VectorType(element, lanes)
        x = Value(builder().load(self.address, typ=type_, align=BYTES[self.kind]))
        if self.kind not in WIDENED:
            return x
        cast, wide = WIDENED[self.kind]
        x = Value(getattr(builder(), cast)(x.raw, of_lanes(type_, wide)))
        return bitcast(x << 16, F32) if self.kind == "bf16" else x

    def load_bytes(self, count: int) -> Value:
        """A vector of bytes as they are."""
        return Value(builder().load(self.address, typ=ir.VectorType(I8, count), align=1))

    def store(self, value: Operand) -> None:
        """Store a number or a vector, rounded to nearest even in the stored kind."""
        if self.kind == "f16":
            value = converted(value, of_lanes(value.type, F16))
        elif self.kind == "bf16":
            bits = bitcast(value, I32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            bits = select(value.equals(value), rounded, 0x7FC0)  # a quiet NaN
            value = converted(bits, of_lanes(value.type, I16))
        builder().store(value.raw, self.address, align=BYTES[self.kind])

    def splat(self, lanes: int) -> Value:
        return splat(self.load(), lanes)

    def fetch_add(self, amount: Scalar, ordering: str = "monotonic") -> Value:
        """Atomically add to an integer; the value before."""
        return Value(builder().atomic_rmw("add", self.address, as_int(amount).raw, ordering))

    def load_acquire(self) -> Value:
        return Value(builder().load_atomic(self.address, "acquire", BYTES[self.kind], typ=STORED[self.kind]))

    def store_release(self, value: Operand | int) -> None:
        builder().atomic_rmw("xchg", self.address, as_int(value).raw, "release")


class Halves:
    """A float32 in two places of 16 bits: the upper half of its bits in one, the lower in the other."""

    def __init__(self, upper: Ptr, lower: Ptr) -> None:
        self.places = upper.as_kind("u16"), lower.as_kind("u16")

    def __getitem__(self, index: Scalar) -> Halves:
        return Halves(*(place[index] for place in self.places))

    def load(self, lanes: int) -> Value:
        upper, lower = (place.load(lanes) for place in self.places)
        return bitcast((upper << 16) | lower, F32)

    def store(self, value: Operand) -> None:
        bits = bitcast(value, I32)
        for place, half in zip(self.places, (bits >> 16, bits)):
            place.store(converted(half, of_lanes(bits.type, I16)))


class Rows:
    """A matrix in memory: `rows[r, c]` is the address of its element, `.T` the same memory transposed."""

    def __init__(self, ptr: Ptr, stride: Any, step: Any = 1) -> None:  # stride and step: int or integer value
        self.ptr, self.stride, self.step = ptr, stride, step

    def __getitem__(self, index: tuple[Scalar, Scalar]) -> Ptr:
        ptr = self.ptr
        constant = 0
        for x, s in zip(index, (self.stride, self.step)):
            if isinstance(x, int) and (x == 0 or isinstance(s, int)):
                constant += x * s if x else 0
            else:
                ptr = ptr[x if isinstance(s, int) and s == 1 else s * x if isinstance(x, int) else x * s]
        return ptr[constant]  # last: a constant offset costs nothing in an x86 address

    def at(self, row: Scalar, column: Scalar) -> Rows:
        """The same matrix seen from another corner."""
        return Rows(self[row, column], self.stride, self.step)

    @property
    def T(self) -> Rows:
        return Rows(self.ptr, self.step, self.stride)


L1, L2 = 3, 2  # the cache that a line is asked into


def prefetch(ptr: Ptr, cache: int = L2) -> None:
    """Ask for a line that will be read soon; any address is safe."""
    read, keep, data = (ir.Constant(I32, x) for x in (0, cache, 1))
    emitter().intrinsic("llvm.prefetch.p0", ir.VoidType(), ptr.address, read, keep, data)


def prefetch_row(row: Ptr, dim: int, cache: int = L2) -> None:
    """Ask for a row of `dim` elements."""
    for c in range(0, dim, 64 // row.item):
        prefetch(row[c], cache)
