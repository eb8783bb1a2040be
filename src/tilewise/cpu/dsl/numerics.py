"""exp, tanh and log in vectors, from multiply-adds: no library calls, the same bits on every machine."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir

from tilewise.cpu.dsl.vector import (
    F32,
    F64,
    I32,
    I64,
    Operand,
    Value,
    absolute,
    bitcast,
    converted,
    element_of,
    emitter,
    float_function,
    fma,
    like,
    maximum,
    select,
)


@dataclass(frozen=True)
class FloatFormat:
    """What the exponential and the logarithm need to know about a floating-point type."""

    bits: Any
    mantissa: int
    bias: int
    log_terms: int


LOG2_E = 1 / math.log(2)
LN_2 = math.log(2)
LN_2_LOW = 2.3190468138462996e-17  # what a float64 lacks of it
FLOOR = 9  # of `vreduceps`: towards -inf, silently
SMALL = 0.625  # tanh of less is a polynomial
AVX512_LANES = 16
FLOAT32_DEGREE = 6  # of exp in full float32
FORMATS = {F32: FloatFormat(I32, 23, 127, 6), F64: FloatFormat(I64, 52, 1023, 12)}


def exp_parts(x: Operand, degree: int, unit: float = LN_2) -> tuple[Value, Value]:
    """(2^n, 2^f - 1) with x / unit = n + f and |f| <= 1/2; n stops where 2^n is exactly 0.

    Adding 1.5 * 2^mantissa + bias rounds x / unit to an integer and leaves n + bias in the low bits, where
    a shift turns it into the floating-point number 2^n. The polynomial is off by 5e-9 (degree 6), 7e-6
    (degree 4), 4e-17 (degree 11). NaN stays NaN.
    """
    f = FORMATS[element_of(x.type)]
    magic = 1.5 * 2.0**f.mantissa + f.bias
    x = maximum(-f.bias * unit, x)
    shifted = fma(x, 1 / unit, magic)
    fraction = fma(x, 1 / unit, magic - shifted)
    power = bitcast(bitcast(shifted, f.bits) << f.mantissa, element_of(x.type))
    series = horner(polynomial(_power_rest, -0.5, 0.5, degree - 1), fraction)
    return power, series * fraction


def _power_rest(f: float) -> float:
    """(2^f - 1) / f."""
    return math.expm1(f * math.log(2)) / f if f else math.log(2)


def exp(x: Operand, degree: int, factor: Operand | float = 1.0) -> Value:
    """factor * e^x for x below 87 (709); exactly 0 below -87.7 (-708.7), NaN for NaN."""
    power, fraction = exp_parts(x, degree)
    return power * (fraction + 1.0 if isinstance(factor, float) else fma(fraction, factor, factor))


def exp_of_difference(x: Operand, y: Operand, degree: int, factor: Operand) -> Value:
    """factor * e^(x - y) as if x - y were not rounded, which counts most where y is a large lse."""
    high, low = exact_sum(x, -y)  # low: NaN where x or y is infinite
    power = exp(high, degree, factor)
    return fma(power, select(low.equals(low), low, 0.0), power)


def exp2(x: Operand, degree: int) -> Value:
    """2^x: 1 at 0 exactly, 0 at -inf and far below, NaN for NaN. With AVX-512 `degree` + 2 instructions."""
    if x.type.count < AVX512_LANES:
        power, fraction = exp_parts(x, degree, unit=1.0)
        return fma(power, fraction, power)
    # 2^f 2^floor(x). The polynomial meets 2^f at Chebyshev points that include both ends of [0, 1], so that
    # x to the left and right of an integer agree.
    f = _avx512("reduce", x, ir.Constant(I32, FLOOR))  # x - floor(x)
    series = horner(polynomial(lambda t: 2.0**t, 0.0, 1.0, degree), f)
    return _avx512("scalef", series, x.raw)


def _avx512(name: str, x: Operand, y: ir.Value) -> Value:
    """An instruction for two vectors, or for one in a way said by a number."""
    mask, current_rounding = ir.Constant(ir.IntType(x.type.count), -1), ir.Constant(I32, 4)
    arguments = (x.raw, y, like(0.0, x).raw, mask, current_rounding)
    return Value(emitter().intrinsic(f"llvm.x86.avx512.mask.{name}.ps.512", x.type, *arguments))


def polynomial(f: Callable[[float], float], start: float, end: float, degree: int) -> list[float]:
    """Coefficients, constant first, of the polynomial that equals f at degree + 1 points of [start, end]."""
    steps = (0.5 - 0.5 * math.cos(math.pi * k / degree) for k in range(degree + 1))
    points = [start + (end - start) * step for step in steps]
    slopes = [f(x) for x in points]  # Newton's divided differences, in place
    for order in range(1, degree + 1):
        for k in range(degree, order - 1, -1):
            slopes[k] = (slopes[k] - slopes[k - 1]) / (points[k] - points[k - order])
    terms = [0.0] * (degree + 1)
    for slope, point in zip(reversed(slopes), reversed(points)):
        terms = [slope - point * terms[0]] + [a - point * b for a, b in itertools.pairwise(terms)]
    return terms


def horner(terms: Sequence[float], x: Operand) -> Value:
    """The polynomial with these coefficients, constant first."""
    series = Value(like(terms[-1], x).raw)
    for term in reversed(terms[:-1]):
        series = fma(series, x, term)
    return series


def tanh(x: Operand, degree: int) -> tuple[Value, Value]:
    """tanh(x) and its derivative 1 - tanh(x)^2, neither of which cancels: with e = exp(2|x|) - 1,

    tanh|x| = e / (e + 2) and 1 - tanh^2 = h (2 - h), h = 2 / (e + 2). One degree more than exp, because
    e = 2^n (2^f - 1) + (2^n - 1) keeps fewer digits of 2^f - 1 than of 2^f. In full float32 |x| to the left
    of `SMALL` takes an odd polynomial, to the right it is 1 - 2 / (e + 2), rounded little more than once.
    """
    limit = 20.0  # tanh is 1 to the last bit from there on
    size = absolute(x)
    power, fraction = exp_parts(select(size > limit, limit, size) * 2.0, degree + 1)
    e = fma(power, fraction, power - 1.0)
    half = 2.0 / (e + 2.0)
    slope = half * (2.0 - half)
    if degree != FLOAT32_DEGREE:
        return float_function("copysign", e / (e + 2.0), x), slope
    square = x * x
    near = fma(x * square, horner(polynomial(_tanh_rest, 0.0, SMALL**2, 5), square), Value(x.raw))
    is_near, near_slope = size < SMALL, fma(-1.0 * near, near, 1.0)
    return select(is_near, near, float_function("copysign", 1.0 - half, x)), select(
        is_near, near_slope, slope
    )


def _tanh_rest(t: float) -> float:
    """(tanh(x) / x - 1) / x^2 as a function of x^2."""
    x = math.sqrt(t)
    return (math.tanh(x) / x - 1.0) / t if x else -1 / 3


def log(x: Operand) -> tuple[Value, Value]:
    """ln(x) for normal x > 0, and what rounding has left out of it. NaN stays NaN.

    ln 2 times the exponent, plus 2 atanh((m - 1) / (m + 1)) of the mantissa m.
    """
    f = FORMATS[element_of(x.type)]
    bits = bitcast(x, f.bits)
    low = (1 << f.mantissa) - 1
    mantissa = bitcast((bits & low) | (f.bias << f.mantissa), element_of(x.type))  # in [1, 2)
    is_high = mantissa > math.sqrt(2)
    mantissa = select(is_high, mantissa * 0.5, mantissa)
    exponent = converted((bits >> f.mantissa) - f.bias, x.type)
    exponent = select(is_high, exponent + 1.0, exponent)
    t = (mantissa - 1.0) / (mantissa + 1.0)  # |t| < 0.172
    square = t * t
    rest = horner([2 / (2 * k + 1) for k in range(f.log_terms)], square) * t
    found = fma(exponent, LN_2, rest)
    # Few digits of ln 2 times the exponent are exact, and so is what that lacks of their sum.
    digits = 2.0 ** (f.mantissa - 12)
    few = math.floor(LN_2 * digits) / digits
    left_out = fma(exponent, LN_2 - few + LN_2_LOW, (exponent * few - found) + rest)
    return select(x.equals(x), found, x), left_out


def log_sum_exp(m: Operand, l: Operand) -> tuple[Value, Value]:
    """lse = m + ln(l), and what rounding has left out of it; (m, 0) where l is 0.

    Their sum is right to the last bit of ln(l), which lse alone loses beside a large m.
    """
    (log_l, log_low), is_empty = log(l), l.equals(0.0)
    lse, rest = exact_sum(m, log_l)
    residual = rest + log_low
    residual = select(residual.equals(residual), residual, 0.0)  # NaN where lse is infinite, or NaN itself
    return select(is_empty, m, lse), select(is_empty, 0.0, residual)


def exact_sum(x: Operand, y: Operand) -> tuple[Value, Value]:
    """x + y, and what rounding has left out of it."""
    total = x + y
    part = total - x
    return total, (x - (total - part)) + (y - part)


def quotient(x: Operand, y: Operand, inverse: Operand | float) -> Value:
    """x / y to the last bit or nearly, from inverse = 1 / y: a correction costs less than a division."""
    q = x * inverse
    rest = fma(-1.0 * q, y, x)
    return fma(select(rest.equals(rest), rest, 0.0), inverse, q)  # an infinite x leaves no rest
