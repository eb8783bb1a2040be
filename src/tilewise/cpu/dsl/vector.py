"""A small language of vectors: Python operators that write LLVM IR.

A kernel is an ordinary Python function that runs once, while the IR is built. Its `for` over `loop(...)`
and its `with when(...)` (`control.py`) become loops and branches of the machine code; `+ - * <` on values
become instructions; what must survive an iteration lives in a `Var`:

    total = Var(number(0.0))
    for i in loop(0, n):
        total.set(total + x[i].load())

Python numbers stay Python numbers until they meet a value, so constants fold by themselves. `memory.py`
has pointers and matrices, `lanes.py` what moves lanes about, `numerics.py` the exponential and its relatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.ir as ir

F32, F64, F16 = ir.FloatType(), ir.DoubleType(), ir.HalfType()
I64, I32, I16, I8, I1 = (ir.IntType(bits) for bits in (64, 32, 16, 8, 1))
ADDRESS = ir.PointerType()
STORED = {
    "f64": F64, "f32": F32, "f16": F16, "bf16": I16,
    "i64": I64, "i32": I32, "i16": I16, "u16": I16, "u8": I8, "bool": I8, "ptr": ADDRESS,
}  # fmt: skip
BYTES = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2,
    "i64": 8, "i32": 4, "i16": 2, "u16": 2, "u8": 1, "bool": 1, "ptr": 8,
}  # fmt: skip


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


def emitter() -> Emitter:
    return _emitters[-1]


def builder() -> ir.IRBuilder:
    return _emitters[-1].builder


def _operator(op: str, is_turned: bool = False) -> Callable[[Operand, Any], Value]:
    """An instruction of two operands as a method; is_turned: of the one on the right."""

    def compute(self: Operand, other: Any) -> Value:
        return _binary(op, other, self) if is_turned else _binary(op, self, other)

    return compute


def _comparison(op: str) -> Callable[[Operand, Any], Value]:
    return lambda self, other: _compare(op, self, other)


class Operand:
    """Operators shared by `Value` and `Var`. Comparisons give masks; `//` and `%` want operands >= 0."""

    @property
    def raw(self) -> ir.Value:
        raise NotImplementedError

    @property
    def type(self) -> ir.Type:
        return self.raw.type

    __add__ = __radd__ = _operator("add")
    __mul__ = __rmul__ = _operator("mul")
    __sub__, __rsub__ = _operator("sub"), _operator("sub", is_turned=True)
    __truediv__, __rtruediv__ = _operator("div"), _operator("div", is_turned=True)
    __floordiv__, __mod__ = _operator("udiv"), _operator("urem")
    __and__, __or__, __xor__ = _operator("and_"), _operator("or_"), _operator("xor")
    __lshift__, __rshift__ = _operator("shl"), _operator("lshr")
    __lt__, __le__, __gt__, __ge__ = (_comparison(op) for op in ("<", "<=", ">", ">="))
    equals = _comparison("==")

    def __neg__(self) -> Value:
        return (-0.0 if is_float(self.type) else 0) - self


class Value(Operand):
    """A number or a vector in a register."""

    def __init__(self, value: ir.Value) -> None:
        self._raw = value

    @property
    def raw(self) -> ir.Value:
        return self._raw


class Var(Operand):
    """A register that can be set again: what a loop or a branch changes. (LLVM's SROA removes the memory.)"""

    def __init__(self, initial: Operand | int) -> None:
        initial = as_int(initial)
        with emitter().on_entry():
            self.slot = builder().alloca(initial.type)
        self.set(initial)

    @property
    def raw(self) -> ir.Value:
        return builder().load(self.slot, typ=self.slot.allocated_type)

    @property
    def type(self) -> ir.Type:
        return self.slot.allocated_type

    def set(self, value: Any) -> None:
        builder().store(like(value, self).raw, self.slot)


Scalar = Operand | int


def element_of(type_: ir.Type) -> ir.Type:
    return type_.element if isinstance(type_, ir.VectorType) else type_


def of_lanes(type_: ir.Type, element: ir.Type) -> ir.Type:
    """A type of as many lanes as another, or a single number like it."""
    return ir.VectorType(element, type_.count) if isinstance(type_, ir.VectorType) else element


def is_float(type_: ir.Type) -> bool:
    return element_of(type_) in (F32, F64, F16)


def _constant(x: Any, type_: ir.Type) -> Value:
    """One object for a constant, so that its text is made once: kernels have thousands of zeros."""
    return _same_constant(type_, repr(x), x)  # 0.0 equals -0.0, their texts differ


@functools.lru_cache(1024)
def _same_constant(type_: ir.Type, text: str, x: Any) -> Value:
    if isinstance(type_, ir.VectorType) and not isinstance(x, tuple):
        x = (x,) * type_.count
    return Value(ir.Constant(type_, x))


def as_int(x: Operand | int) -> Operand:
    return _constant(x, I64) if isinstance(x, int) else x


def like(x: Any, other: Operand) -> Operand:
    """x as an operand of other's type: constants convert, a scalar beside a vector is broadcast."""
    if isinstance(x, (int, float)):
        return _constant(float(x) if is_float(other.type) else int(x), other.type)
    if isinstance(other.type, ir.VectorType) and not isinstance(x.type, ir.VectorType):
        return splat(x, other.type.count)
    return x


def _alike(a: Any, b: Any) -> tuple[Operand, Operand]:
    """Two of which at least one is an operand, as operands of one type."""
    a = a if isinstance(a, Operand) else like(a, b)
    b = like(b, a)
    return like(a, b), b


def _binary(op: str, a: Any, b: Any) -> Value:
    a, b = _alike(a, b)
    name = "f" + op if is_float(a.type) else op
    return Value(getattr(builder(), name)(a.raw, b.raw))


def _compare(op: str, a: Operand, b: Any) -> Value:
    a, b = _alike(a, b)
    compare = builder().fcmp_ordered if is_float(a.type) else builder().icmp_signed
    return Value(compare(op, a.raw, b.raw))


def number(x: float, kind: str = "f32", lanes: int | None = None) -> Value:
    """A constant of the compute type, or a vector of it."""
    return _constant(x, STORED[kind] if lanes is None else ir.VectorType(STORED[kind], lanes))


def splat(x: Operand, lanes: int) -> Value:
    """A vector with the number x in every lane."""
    type_ = ir.VectorType(x.type, lanes)
    undefined = ir.Constant(type_, ir.Undefined)
    one = builder().insert_element(undefined, x.raw, ir.Constant(I32, 0))
    return Value(builder().shuffle_vector(one, undefined, constants([0] * lanes).raw))


def constants(numbers: Sequence[int], element: ir.Type = I32) -> Value:
    """A vector of integers."""
    return _constant(tuple(numbers), ir.VectorType(element, len(numbers)))


def int32(x: Scalar, lanes: int | None = None) -> Value:
    """A 64-bit integer as a 32-bit one, for comparisons in lanes; or a vector with it in every lane."""
    short = Value(builder().trunc(as_int(x).raw, I32))
    return short if lanes is None else splat(short, lanes)


def count_from(first: Scalar, lanes: int, width: int = 1) -> Value:
    """first, first + 1, ..., each `width` times, as 32-bit integers."""
    return int32(first, lanes) + constants([lane // width for lane in range(lanes)])


def converted(x: Operand, type_: ir.Type) -> Value:
    """A number or vector as another type of as many lanes: a float, an integer, or a bool of 1 bit."""
    if x.type == type_:
        return Value(x.raw)
    was, element, b = element_of(x.type), element_of(type_), builder()
    if element == I1:
        compared = b.fcmp_unordered if is_float(was) else b.icmp_signed
        return Value(compared("!=", x.raw, like(0, x).raw))
    if is_float(was) and is_float(element):
        return Value((b.fpext if element == F64 else b.fptrunc)(x.raw, type_))
    if is_float(element):
        return Value((b.uitofp if was == I1 else b.sitofp)(x.raw, type_))
    if is_float(was):
        limit = 2.0**62  # what is beyond has no integer in PyTorch either
        x = select(x.equals(x), maximum(-limit, minimum(x, limit)), 0.0)
        return Value(b.fptosi(x.raw, type_))
    if was == I1:
        return Value(b.zext(x.raw, type_))
    return Value((b.trunc if was.width > element.width else b.sext)(x.raw, type_))


def as_kind(x: Operand, kind: str) -> Value:
    """A floating-point value or a signed integer as float64 or float32."""
    return converted(x, of_lanes(x.type, STORED[kind]))


def select(condition: Operand, a: Any, b: Any) -> Value:
    """Lane by lane, a where condition, else b."""
    a, b = _alike(a, b)
    return Value(builder().select(condition.raw, a.raw, b.raw))


def minimum(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    a, b = _alike(a, b)
    return select(a < b, a, b)


def maximum(a: Any, b: Any) -> Any:
    """max(a, b); when either is NaN the answer is b (one instruction on x86, which rules the same)."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    a, b = _alike(a, b)
    return select(a > b, a, b)


def absolute(x: Operand) -> Value:
    return float_function("fabs", x)


def fma(a: Operand, b: Any, c: Any) -> Value:
    """a * b + c, rounded once."""
    a, c = _alike(a, c)
    return float_function("fma", a, like(b, c), c)


def float_function(name: str, *operands: Operand) -> Value:
    """LLVM's function of that name, of operands of one floating-point type."""
    type_ = operands[0].type
    scalar = "f64" if element_of(type_) == F64 else "f32"
    suffix = f"v{type_.count}{scalar}" if isinstance(type_, ir.VectorType) else scalar
    return Value(emitter().intrinsic(f"llvm.{name}.{suffix}", type_, *(x.raw for x in operands)))


def bitcast(x: Operand, element: ir.Type) -> Value:
    return Value(builder().bitcast(x.raw, of_lanes(x.type, element)))
