"""A small language of vectors: Python operators that write LLVM IR.

A kernel is an ordinary Python function that runs once, while the IR is built. Its `for` over `loop(...)`
and its `with when(...)` become loops and branches of the machine code; `+ - * <` on values become
instructions; what must survive an iteration lives in a `Var`:

    total = Var(number(0.0))
    for i in loop(0, n):
        total.set(total + x[i].load())

Python numbers stay Python numbers until they meet a value, so constants fold by themselves. A `Ptr` knows
how its elements are stored: bfloat16 and float16 are read into and written from float32, and a bool is
read as 0 or 1.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir

F32, F64, F16 = ir.FloatType(), ir.DoubleType(), ir.HalfType()
I64, I32, I16, I8, I1 = (ir.IntType(bits) for bits in (64, 32, 16, 8, 1))
ADDRESS = ir.PointerType()
STORED = {"f64": F64, "f32": F32, "f16": F16, "bf16": I16, "i64": I64, "i32": I32, "bool": I8, "ptr": ADDRESS}
BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "bool": 1, "ptr": 8}


@dataclass(frozen=True)
class FloatFormat:
    """What the exponential and the logarithm need to know about a floating-point type."""

    bits: Any
    mantissa: int
    bias: int
    log_terms: int


FORMATS = {F32: FloatFormat(I32, 23, 127, 6), F64: FloatFormat(I64, 52, 1023, 12)}


class Emitter:
    """The function under construction."""

    def __init__(self, name: str) -> None:
        self.module = ir.Module(name)
        self.function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [ADDRESS]), name)
        self.entry = self.function.append_basic_block("entry")
        self.builder = ir.IRBuilder(self.function.append_basic_block("body"))
        self.intrinsics: dict[str, ir.Function] = {}

    def intrinsic(self, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
        if name not in self.intrinsics:
            signature = ir.FunctionType(result, [a.type for a in args])
            self.intrinsics[name] = ir.Function(self.module, signature, name)
        return self.builder.call(self.intrinsics[name], args)

    def on_entry(self) -> Any:
        """A context that writes where the function starts, outside every loop."""
        return self.builder.goto_block(self.entry)

    def finish(self) -> str:
        self.builder.ret_void()
        with self.builder.goto_block(self.entry):
            self.builder.branch(self.function.blocks[1])
        return str(self.module)


_emitters: list[Emitter] = []


@contextmanager
def function(name: str) -> Iterator[Emitter]:
    """Build `void name(char* arguments)`; everything below writes into the innermost open function."""
    _emitters.append(Emitter(name))
    try:
        yield _emitters[-1]
    finally:
        _emitters.pop()


def _b() -> ir.IRBuilder:
    return _emitters[-1].builder


class Operand:
    """Operators shared by `Value` and `Var`. Comparisons give masks; `//` and `%` want operands >= 0."""

    @property
    def ir(self) -> ir.Value:
        raise NotImplementedError

    @property
    def type(self) -> ir.Type:
        return self.ir.type

    def __add__(self, other: Any) -> Value:
        return _binary("add", self, other)

    def __sub__(self, other: Any) -> Value:
        return _binary("sub", self, other)

    def __mul__(self, other: Any) -> Value:
        return _binary("mul", self, other)

    def __rsub__(self, other: Any) -> Value:
        return _binary("sub", _like(other, self), self)

    __radd__, __rmul__ = __add__, __mul__

    def __rtruediv__(self, other: Any) -> Value:
        return _binary("div", _like(other, self), self)

    def __truediv__(self, other: Any) -> Value:
        return _binary("div", self, other)

    def __floordiv__(self, other: Any) -> Value:
        return _binary("udiv", self, other)

    def __mod__(self, other: Any) -> Value:
        return _binary("urem", self, other)

    def __and__(self, other: Any) -> Value:
        return _binary("and_", self, other)

    def __or__(self, other: Any) -> Value:
        return _binary("or_", self, other)

    def __lshift__(self, other: Any) -> Value:
        return _binary("shl", self, other)

    def __rshift__(self, other: Any) -> Value:
        return _binary("lshr", self, other)

    def __neg__(self) -> Value:
        return _like(0 if not _is_float(self.type) else -0.0, self) - self

    def __lt__(self, other: Any) -> Value:
        return _compare("<", self, other)

    def __le__(self, other: Any) -> Value:
        return _compare("<=", self, other)

    def __gt__(self, other: Any) -> Value:
        return _compare(">", self, other)

    def __ge__(self, other: Any) -> Value:
        return _compare(">=", self, other)

    def equals(self, other: Any) -> Value:
        return _compare("==", self, other)


class Value(Operand):
    """A number or a vector in a register."""

    def __init__(self, value: ir.Value) -> None:
        self._ir = value

    @property
    def ir(self) -> ir.Value:
        return self._ir


class Var(Operand):
    """A register that can be set again: what a loop or a branch changes. (LLVM's SROA removes the memory.)"""

    def __init__(self, initial: Operand | int) -> None:
        initial = _int(initial)
        with _emitters[-1].on_entry():
            self.slot = _b().alloca(initial.type)
        self.set(initial)

    @property
    def ir(self) -> ir.Value:
        return _b().load(self.slot, typ=self.slot.allocated_type)

    @property
    def type(self) -> ir.Type:
        return self.slot.allocated_type

    def set(self, value: Any) -> None:
        _b().store(_like(value, self).ir, self.slot)


Scalar = Operand | int


def _element(type_: ir.Type) -> ir.Type:
    return type_.element if isinstance(type_, ir.VectorType) else type_


def _is_float(type_: ir.Type) -> bool:
    return _element(type_) in (F32, F64, F16)


def _constant(x: float | int | Sequence[float], type_: ir.Type) -> Value:
    if isinstance(type_, ir.VectorType) and not isinstance(x, (list, tuple)):
        x = [x] * type_.count
    return Value(ir.Constant(type_, x))


def _int(x: Operand | int) -> Operand:
    return Value(ir.Constant(I64, x)) if isinstance(x, int) else x


def _like(x: Any, other: Operand) -> Operand:
    """x as an operand of other's type: constants convert, a scalar beside a vector is broadcast."""
    if isinstance(x, (int, float)):
        return _constant(float(x) if _is_float(other.type) else int(x), other.type)
    if isinstance(other.type, ir.VectorType) and not isinstance(x.type, ir.VectorType):
        return splat(x, other.type.count)
    return x


def _binary(op: str, a: Operand, b: Any) -> Value:
    b = _like(b, a)
    a = _like(a, b)
    name = "f" + op if _is_float(a.type) else op
    return Value(getattr(_b(), name)(a.ir, b.ir))


def _compare(op: str, a: Operand, b: Any) -> Value:
    b = _like(b, a)
    a = _like(a, b)
    compare = _b().fcmp_ordered if _is_float(a.type) else _b().icmp_signed
    return Value(compare(op, a.ir, b.ir))


def number(x: float, kind: str = "f32", lanes: int | None = None) -> Value:
    """A constant of the compute type, or a vector of it."""
    return _constant(x, STORED[kind] if lanes is None else ir.VectorType(STORED[kind], lanes))


def splat(x: Operand, lanes: int) -> Value:
    """A vector with the number x in every lane."""
    type_ = ir.VectorType(x.type, lanes)
    undefined = ir.Constant(type_, ir.Undefined)
    one = _b().insert_element(undefined, x.ir, ir.Constant(I32, 0))
    return Value(_b().shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)))


def iota(lanes: int) -> Value:
    """[0, 1, 2, ...] as 32-bit integers."""
    return _constant(list(range(lanes)), ir.VectorType(I32, lanes))


def int32(x: Scalar) -> Value:
    """A 64-bit integer as a 32-bit one, for comparisons in lanes."""
    return Value(_b().trunc(_int(x).ir, I32))


def to_float(x: Operand, kind: str) -> Value:
    """Signed integers as floating-point numbers."""
    target = STORED[kind]
    type_ = ir.VectorType(target, x.type.count) if isinstance(x.type, ir.VectorType) else target
    return Value(_b().sitofp(x.ir, type_))


def as_kind(x: Operand, kind: str) -> Value:
    """A floating-point value as float64 or float32."""
    target = STORED[kind]
    if _element(x.type) == target:
        return Value(x.ir)
    type_ = ir.VectorType(target, x.type.count) if isinstance(x.type, ir.VectorType) else target
    return Value(_b().fpext(x.ir, type_) if target == F64 else _b().fptrunc(x.ir, type_))


def select(condition: Operand, a: Any, b: Any) -> Value:
    """Lane by lane, a where condition, else b."""
    if isinstance(a, Operand):
        b = _like(b, a)
        a = _like(a, b)
    else:
        a = _like(a, b)
    return Value(_b().select(condition.ir, a.ir, b.ir))


def minimum(a: Scalar, b: Scalar) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    a, b = (_int(a), b) if isinstance(b, Operand) else (a, _int(b))
    return select(a < b, a, b)  # type: ignore[operator]


def maximum(a: Any, b: Any) -> Any:
    """max(a, b); when either is NaN the answer is b (one instruction on x86, which rules the same)."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    a = a if isinstance(a, Operand) else _like(a, b)
    return select(a > b, a, b)


def absolute(x: Operand) -> Value:
    return Value(_emitters[-1].intrinsic(f"llvm.fabs.{_suffix(x.type)}", x.type, x.ir))


def fma(a: Operand, b: Operand, c: Operand) -> Value:
    """a * b + c, rounded once."""
    a, b = _like(a, c), _like(b, c)
    return Value(_emitters[-1].intrinsic(f"llvm.fma.{_suffix(c.type)}", c.type, a.ir, b.ir, c.ir))


def _suffix(type_: ir.Type) -> str:
    scalar = "f64" if _element(type_) == F64 else "f32"
    return f"v{type_.count}{scalar}" if isinstance(type_, ir.VectorType) else scalar


def _bitcast(x: Operand, element: ir.Type) -> Value:
    vector = isinstance(x.type, ir.VectorType)
    return Value(_b().bitcast(x.ir, ir.VectorType(element, x.type.count) if vector else element))


def _exp_parts(x: Operand, degree: int) -> tuple[Value, Value]:
    """(2^n, 2^f - 1) with x / ln 2 = n + f and |f| <= 1/2; n stops where 2^n is exactly 0.

    Adding 1.5 * 2^mantissa + bias rounds x / ln 2 to an integer and leaves n + bias in the low bits, where
    a shift turns it into the floating-point number 2^n. The polynomial is Taylor's: its remainder is
    below 1.2e-7 (degree 6), 2.5e-6 (degree 5), 4e-18 (degree 13). NaN stays NaN.
    """
    f = FORMATS[_element(x.type)]
    magic, log2_e = _like(1.5 * 2.0**f.mantissa + f.bias, x), _like(1 / math.log(2), x)
    x = maximum(_like(-f.bias * math.log(2), x), x)
    shifted = fma(x, log2_e, magic)
    fraction = fma(x, log2_e, magic - shifted)
    power = _bitcast(_bitcast(shifted, f.bits) << f.mantissa, _element(x.type))
    series = _like(math.log(2) ** degree / math.factorial(degree), x)
    for k in range(degree - 1, 0, -1):
        series = fma(series, fraction, _like(math.log(2) ** k / math.factorial(k), x))
    return power, series * fraction


def exp(x: Operand, degree: int) -> Value:
    """e^x for x below 87 (709); exactly 0 below -87.7 (-708.7), NaN for NaN."""
    power, fraction = _exp_parts(x, degree)
    return power * (fraction + 1.0)


def tanh(x: Operand, degree: int) -> Value:
    """tanh(x) = e / (e + 2) with e = exp(2x) - 1 = 2^n (2^f - 1) + (2^n - 1), exact near 0 too."""
    limit = 20.0  # tanh is 1 to the last bit from there on
    y = maximum(_like(-limit, x), x)
    y = select(y > limit, limit, y)
    power, fraction = _exp_parts(y * 2.0, degree)
    e = fma(power, fraction, power - 1.0)
    return e / (e + 2.0)


def log(x: Operand) -> Value:
    """ln(x) for normal x > 0: ln 2 times the exponent, plus 2 atanh((m - 1) / (m + 1)). NaN stays NaN."""
    f = FORMATS[_element(x.type)]
    bits = _bitcast(x, f.bits)
    low = (1 << f.mantissa) - 1
    mantissa = _bitcast((bits & low) | (f.bias << f.mantissa), _element(x.type))  # in [1, 2)
    is_high = mantissa > math.sqrt(2)
    mantissa = select(is_high, mantissa * 0.5, mantissa)
    exponent = (bits >> f.mantissa) - f.bias
    exponent = Value(_b().sitofp(exponent.ir, x.type))
    exponent = select(is_high, exponent + 1.0, exponent)
    t = (mantissa - 1.0) / (mantissa + 1.0)  # |t| < 0.172
    square = t * t
    series = _like(2 / (2 * f.log_terms - 1), x)
    for k in range(f.log_terms - 2, -1, -1):
        series = fma(series, square, _like(2 / (2 * k + 1), x))
    return select(x.equals(x), fma(series, t, exponent * math.log(2)), x)


def transpose(rows: Sequence[Operand]) -> list[Value]:
    """n vectors of n lanes: out[c][r] = rows[r][c]. Swaps off-diagonal blocks of 1, 2, 4, ... lanes."""
    n, size = len(rows), 1
    current = [Value(r.ir) for r in rows]
    while size < n:
        low = [c if not c & size else n + c - size for c in range(n)]
        high = [c + size if not c & size else n + c for c in range(n)]
        swapped = list(current)
        for r in range(n):
            if not r & size:
                a, b = current[r], current[r + size]
                swapped[r], swapped[r + size] = _shuffle(a, b, low), _shuffle(a, b, high)
        current, size = swapped, 2 * size
    return current


def _shuffle(a: Operand, b: Operand, lanes: list[int]) -> Value:
    return Value(_b().shuffle_vector(a.ir, b.ir, ir.Constant(ir.VectorType(I32, len(lanes)), lanes)))


def lanes_of(x: Operand, first: int, count: int) -> Value:
    """Some adjacent lanes of a vector, as a shorter vector."""
    return _shuffle(x, x, list(range(first, first + count)))


def fold_sums(vectors: Sequence[Operand]) -> Value:
    """n vectors of n lanes -> one vector whose lane r is the sum over vectors[r]."""
    level = [Value(v.ir) for v in vectors]
    n = len(level)
    while len(level) > 1:
        even, odd = list(range(0, 2 * n, 2)), list(range(1, 2 * n, 2))
        level = [_shuffle(a, b, even) + _shuffle(a, b, odd) for a, b in zip(level[::2], level[1::2])]
    return level[0]


def across(x: Operand, combine: Any) -> Value:
    """All lanes combined in a fixed tree; the answer stands in every lane."""
    n, size = x.type.count, 1
    result = Value(x.ir)
    while size < n:
        result = combine(result, _shuffle(result, result, [c ^ size for c in range(n)]))
        size *= 2
    return result


def extract(x: Operand, lane: int) -> Value:
    return Value(_b().extract_element(x.ir, ir.Constant(I32, lane)))


def any_lane(mask: Operand) -> Value:
    bits = ir.IntType(mask.type.count)
    return Value(_b().icmp_unsigned("!=", _b().bitcast(mask.ir, bits), ir.Constant(bits, 0)))


class Ptr:
    """The address of an element stored as `kind`; `p[i]` is the address of the i-th one after it."""

    def __init__(self, address: ir.Value, kind: str) -> None:
        self.address, self.kind = address, kind

    def __getitem__(self, index: Scalar) -> Ptr:
        if isinstance(index, int) and index == 0:
            return self
        offset = _int(index).ir
        return Ptr(_b().gep(self.address, [offset], source_etype=STORED[self.kind], inbounds=True), self.kind)

    @property
    def item(self) -> int:
        """Bytes of one element."""
        return BYTES[self.kind]

    def as_kind(self, kind: str) -> Ptr:
        return Ptr(self.address, kind)

    def load(self, lanes: int | None = None) -> Value:
        """One element (lanes=None) or a vector of consecutive ones, in the compute type."""
        element = STORED[self.kind]
        type_ = element if lanes is None else ir.VectorType(element, lanes)
        raw = _b().load(self.address, typ=type_, align=BYTES[self.kind])
        vector = (lambda t: t) if lanes is None else (lambda t: ir.VectorType(t, lanes))
        if self.kind == "f16":
            return Value(_b().fpext(raw, vector(F32)))
        if self.kind == "bf16":
            return _bitcast(Value(_b().zext(raw, vector(I32))) << 16, F32)
        if self.kind == "i32":
            return Value(_b().sext(raw, vector(I64)))
        if self.kind == "bool":
            return Value(_b().uitofp(raw, vector(F32)))
        return Value(raw)

    def store(self, value: Operand) -> None:
        """Store a number or a vector, rounded to nearest even in the stored kind."""
        lanes = value.type.count if isinstance(value.type, ir.VectorType) else None
        vector = (lambda t: t) if lanes is None else (lambda t: ir.VectorType(t, lanes))
        raw = value.ir
        if self.kind == "f16":
            raw = _b().fptrunc(raw, vector(F16))
        elif self.kind == "bf16":
            bits = _bitcast(value, I32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            quiet_nan = _like(0x7FC0, rounded)
            raw = _b().trunc(select(value.equals(value), rounded, quiet_nan).ir, vector(I16))
        _b().store(raw, self.address, align=BYTES[self.kind])

    def splat(self, lanes: int) -> Value:
        return splat(self.load(), lanes)

    def fetch_add(self, amount: Scalar, ordering: str = "monotonic") -> Value:
        """Atomically add to an integer; the value before."""
        return Value(_b().atomic_rmw("add", self.address, _int(amount).ir, ordering))

    def load_acquire(self) -> Value:
        return Value(_b().load_atomic(self.address, "acquire", BYTES[self.kind], typ=STORED[self.kind]))

    def store_release(self, value: Operand) -> None:
        _b().atomic_rmw("xchg", self.address, value.ir, "release")


class Rows:
    """A matrix in memory: `rows[r, c]` is the address of its element, `.T` the same memory transposed."""

    def __init__(self, ptr: Ptr, stride: int, step: int = 1) -> None:
        self.ptr, self.stride, self.step = ptr, stride, step

    def __getitem__(self, index: tuple[Scalar, Scalar]) -> Ptr:
        ptr = self.ptr
        constants = [x * s for x, s in zip(index, (self.stride, self.step)) if isinstance(x, int)]
        for x, s in zip(index, (self.stride, self.step)):
            ptr = ptr if isinstance(x, int) else ptr[x * s if s != 1 else x]
        return ptr[sum(constants)]  # last: a constant offset costs nothing in an x86 address

    def at(self, row: Scalar, column: Scalar) -> Rows:
        """The same matrix seen from another corner."""
        return Rows(self[row, column], self.stride, self.step)

    @property
    def T(self) -> Rows:
        return Rows(self.ptr, self.step, self.stride)


def prefetch(ptr: Ptr) -> None:
    """Ask for a line that will be read soon; any address is safe."""
    read, keep, data = (ir.Constant(I32, x) for x in (0, 2, 1))
    _emitters[-1].intrinsic("llvm.prefetch.p0", ir.VoidType(), ptr.address, read, keep, data)


def loop(start: Scalar, stop: Scalar, step: int = 1) -> Iterator[Value]:
    """for i in range(start, stop, step), in the machine code. No break, no continue."""
    b, make_block = _b(), _b().append_basic_block
    body, done = make_block("loop"), make_block("done")
    first, end = _int(start), _int(stop).ir
    index = Var(first)
    if isinstance(start, int) and isinstance(stop, int) and start < stop:
        b.branch(body)
    else:
        b.cbranch(b.icmp_signed("<", first.ir, end), body, done)
    b.position_at_end(body)
    current = Value(index.ir)
    yield current
    following = current + step
    index.set(following)
    b.cbranch(b.icmp_signed("<", following.ir, end), body, done)
    b.position_at_end(done)


def wait_until(counter: Ptr, value: Operand) -> None:
    """Wait until the integer reaches value, letting other threads run; see what its writer wrote before."""
    b = _b()
    again, done = b.append_basic_block("wait"), b.append_basic_block("done")
    b.branch(again)
    b.position_at_end(again)
    is_early = counter.load_acquire() < value
    if os.name == "posix":
        _emitters[-1].intrinsic("sched_yield", I32)
    b.cbranch(is_early.ir, again, done)
    b.position_at_end(done)


def claim(counter: Ptr, total: Operand) -> Iterator[Value]:
    """Each index below total goes to exactly one of the threads that run this."""
    b = _b()
    ask, work, done = (b.append_basic_block(name) for name in ("ask", "work", "done"))
    b.branch(ask)
    b.position_at_end(ask)
    item = counter.fetch_add(1)
    b.cbranch((item < total).ir, work, done)
    b.position_at_end(work)
    yield item
    b.branch(ask)
    b.position_at_end(done)


@contextmanager
def when(condition: Operand) -> Iterator[None]:
    """if condition: ..."""
    with _b().if_then(condition.ir):
        yield


@contextmanager
def either(condition: Operand) -> Iterator[tuple[Any, Any]]:
    """if condition: ... else: ...; `with either(c) as (then, otherwise): with then: ... with otherwise: ...`"""
    with _b().if_else(condition.ir) as branches:
        yield branches
