"""PyTorch's operations of booleans, integers and floats, and casts between them, on numbers and vectors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import llvmlite.ir as ir

from tilewise.core.functions.expression import COMPARISONS
from tilewise.cpu.dsl.elementary import absolute_power, elementary, fmod, nan_maximum, nan_minimum
from tilewise.cpu.dsl.vector import (
    I32,
    Operand,
    Value,
    absolute,
    as_kind,
    builder,
    converted,
    is_float,
    like,
    maximum,
    minimum,
    select,
)


def is_invertible(constant: Any) -> bool:
    """Whether 1 / constant is a float32."""
    return constant is not None and 1e-30 < abs(constant) < 1e30


def floor_quotient(a: Operand, b: Operand, is_constant: bool) -> Value:
    """a // b of integers, b not 0. Of 32-bit vectors, which no processor divides, in float64: exact."""
    is_short = isinstance(a.type, ir.VectorType) and a.type.element == I32
    if is_short and not is_constant:
        quotient = as_kind(a, "f64") / as_kind(b, "f64")
        return Value(builder().fptosi(elementary("floor", quotient, 0).raw, a.type))
    is_minus_1 = b.equals(-1)  # by which a processor stops at the least number, and PyTorch negates it
    found = Value(builder().sdiv(a.raw, select(is_minus_1, 1, b).raw))
    found = select(is_minus_1, -a, found)
    rest = a - found * b
    is_negative = rest < 0
    is_off = (is_negative ^ (b < 0)) & converted(rest, is_negative.type)
    return found - converted(is_off, a.type)


def power(x: Operand, exponent: Any) -> Value:
    """x to a power that is half or a whole number."""
    if exponent == 0.5:
        return elementary("sqrt", x, 0)
    found = Value(like(1, x).raw)
    for _ in range(abs(int(exponent))):
        found = found * x
    return found if exponent >= 0 else 1.0 / found


def _absolute(x: Operand) -> Value:
    return absolute(x) if is_float(x.type) else select(x < 0, -x, x)


def _shifted(name: str, a: Operand, b: Operand) -> Value:
    """By less than 0 or more than 63 bits no bit is left, but the sign to the right, as in PyTorch."""
    is_outside = (b < 0) | (b > 63)
    found = Value(getattr(builder(), name)(a.raw, select(is_outside, 63, b).raw))
    return select(is_outside, 0, found) if name == "shl" else found


def _compared(op: str, a: Operand, b: Operand) -> Value:
    compare = builder().icmp_signed
    if is_float(a.type):
        compare = builder().fcmp_unordered if op == "!=" else builder().fcmp_ordered
    return Value(compare(op, a.raw, b.raw))


def _minimum(a: Operand, b: Operand) -> Value:
    return (nan_minimum if is_float(a.type) else minimum)(a, b)


def _maximum(a: Operand, b: Operand) -> Value:
    return (nan_maximum if is_float(a.type) else maximum)(a, b)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "abs": _absolute,
    "fmod": fmod, "absolute_power": absolute_power,
    "minimum": _minimum, "maximum": _maximum,
    **{name: partial(_compared, op) for name, op in zip(COMPARISONS, ("<", "<=", "==", "!="))},
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": lambda a: a ^ -1,
    "shl": partial(_shifted, "shl"), "shr": partial(_shifted, "ashr"), "where": select,
}  # fmt: skip
