"""Functions of a score function, for any number, as PyTorch has them: of vectors and of single numbers.

exp and tanh are computed in the type of their argument; the others in float64, so that float32 is as exact
as it can be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from tilewise.cpu.dsl.control import loop
from tilewise.cpu.dsl.numerics import FORMATS, LN_2, exp, exp_parts, horner, log, polynomial, tanh
from tilewise.cpu.dsl.vector import (
    F32,
    F64,
    I64,
    Operand,
    Value,
    Var,
    absolute,
    as_kind,
    bitcast,
    converted,
    element_of,
    float_function,
    fma,
    like,
    minimum,
    select,
)

DEGREE_F64 = 11  # of exp
HIGHEST = {F32: 88.8, F64: 709.8}  # exp of more is infinite
QUARTER_TURN = (1.5707963267948966, 6.123233995736766e-17)  # pi / 2, and what a float64 lacks of it
QUARTER = (math.pi / 4) ** 2


def elementary(name: str, x: Operand, degree: int) -> Value:
    """A function of `FUNCTIONS` that has no formula. `degree`: of the exponential in x's type."""
    if name in _INTRINSICS:
        return float_function(_INTRINSICS[name], x)
    if name == "exp":
        return exp_of_any(x, degree)
    if name == "tanh":
        return Value(tanh(x, degree)[0].raw)
    return converted(_IN_FLOAT64[name](as_kind(x, "f64")), x.type)


_INTRINSICS = {"sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "roundeven"}


def exp_of_any(x: Operand, degree: int) -> Value:
    """e^x; infinite where it is too large, 0 where it is no normal number."""
    highest = HIGHEST[element_of(x.type)]
    x = select(x > highest, highest, x)
    is_high = x > highest / 2
    shift = 32 * math.log(2)
    return exp(select(is_high, x - shift, x), degree) * select(is_high, like(2.0**32, x), 1.0)


def _expm1(x: Operand) -> Value:
    """2^n (2^f - 1) + (2^n - 1); beyond 40, e^x."""
    limited = select(x.equals(x), minimum(x, 40.0), x)
    power, fraction = exp_parts(limited, DEGREE_F64)
    return select(x > 40.0, exp_of_any(x, DEGREE_F64), fma(power, fraction, power - 1.0))


def _log(x: Operand) -> Value:
    found = select(x.equals(math.inf), x, log(x)[0])
    found = select(x.equals(0.0), -math.inf, found)
    return select(x < 0.0, math.nan, found)


def _log1p(x: Operand) -> Value:
    """log(1 + x), and what is lost of x in the sum."""
    total = x + 1.0
    lost = (x - (total - 1.0)) / total
    return _log(total) + select(absolute(lost) < 1.0, lost, 0.0)


def _turned(shift: int, x: Operand) -> Value:
    """sin of x + shift quarter turns: a polynomial of what x is beyond the nearest quarter turn.

    NaN from 2^51 on, where quarter turns are no longer counted exactly.
    """
    magic = 1.5 * 2.0 ** FORMATS[F64].mantissa
    shifted = fma(x, 1 / QUARTER_TURN[0], magic)
    turns = shifted - magic
    rest = fma(-1.0 * turns, QUARTER_TURN[0], x)
    rest = fma(-1.0 * turns, QUARTER_TURN[1], rest)
    square = rest * rest
    sine = rest * horner(_SINE, square)
    cosine = horner(_COSINE, square)
    quadrant = bitcast(shifted, I64) + shift
    is_cosine, is_negative = (quadrant & 1).equals(1), (quadrant & 2).equals(2)
    size = select(is_cosine, cosine, sine)
    return select(absolute(x) < 2.0**51, select(is_negative, -size, size), math.nan)


def _sine_rest(t: float) -> float:
    x = math.sqrt(t)
    return math.sin(x) / x if x else 1.0


_SINE = polynomial(_sine_rest, 0.0, QUARTER, 7)
_COSINE = polynomial(lambda t: math.cos(math.sqrt(t)), 0.0, QUARTER, 8)
_IN_FLOAT64: dict[str, Callable[[Operand], Value]] = {
    "exp2": lambda x: exp_of_any(x * LN_2, DEGREE_F64), "expm1": _expm1, "log": _log, "log1p": _log1p,
    "log2": lambda x: _log(x) / LN_2, "log10": lambda x: _log(x) / math.log(10),
    "sin": partial(_turned, 0), "cos": partial(_turned, 1),
}  # fmt: skip


def absolute_power(a: Operand, b: Operand) -> Value:
    """|a|^b, with what rounding leaves out of log|a| and of b log|a|."""
    x, y = absolute(as_kind(a, "f64")), as_kind(b, "f64")
    found, left_out = _log(x), log(x)[1]
    power = y * found
    rest = fma(y, found, -power) + y * left_out
    e = exp_of_any(power, DEGREE_F64)
    e = select((e < math.inf) & (absolute(rest) < 1.0), fma(e, rest, e), e)
    return converted(e, a.type)


def fmod(a: Operand, b: Operand) -> Value:
    """The exact rest of a / b, of the sign of a. Of float64 NaN where the quotient is infinite.

    Each step takes 52 bits from the quotient, which has 277 at most, or 2098.
    """
    is_short = element_of(a.type) == F32
    first, by = (absolute(as_kind(x, "f64")) for x in (a, b))
    rest = Var(first)
    for _ in loop(0, 6 if is_short else 41):
        x = Value(rest.raw)
        rest.set(fma(-1.0 * float_function("floor", x / by), by, x))
    found = select(by.equals(math.inf), first + first * 0.0, Value(rest.raw))  # NaN of an infinite a
    return float_function("copysign", converted(found, a.type), a)


def nan_minimum(a: Operand, b: Operand) -> Value:
    """min(a, b); NaN where either is."""
    return select(a.equals(a), select((b < a) | is_nan(b), b, a), a)


def nan_maximum(a: Operand, b: Operand) -> Value:
    return select(a.equals(a), select((b > a) | is_nan(b), b, a), a)


def is_nan(x: Operand) -> Value:
    return x.equals(x) ^ 1
