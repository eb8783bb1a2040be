"""Formulas in the place of operations that no kernel has: every backend prints them in the operations it has.

Each is as exact in float64 as in float32. Constants are of polynomials that meet a function at Chebyshev
points. Two operations are for formulas: `fmod`, whose rest is exact, and `absolute_power`, |a| to the power
b, which may be NaN where |a| is 1 or b is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.core.functions.expression import FLOAT, Graph
from tilewise.core.functions.operations import methods as methods  # which stand-ins have
from tilewise.core.functions.proxy import Proxy, Recorder

MOST_POWER = 16  # a product of so many is printed as that
LARGE = 2.0**28  # of which the square and one more is, but for rounding, the square
BITS = 6  # of whole exponents: of larger ones only the powers of 0, 1, -1 and even numbers are right

_ERROR = (  # erf(x) / x, by x^2 from 0 to 1
    1.1283791670955126, -0.3761263890318375, 0.11283791670954879, -0.026866170645076792,
    0.0052239776248180145, -0.000854832698083379, 0.0001205533111164271, -1.4925595266831182e-05,
    1.6461000484121368e-06, -1.6350312701054695e-07, 1.4659775274047436e-08, -1.1372848856791674e-09,
    5.957176147748911e-11,
)  # fmt: skip
_SCALED = (  # (1 + 2 x) e^(x^2) erfc(x), by (x - 3) / (x + 3) from -1 to 1
    1.2530080582697296, -0.1356211061245812, -0.04756229435341897, 0.12964515870276264, -0.11927366341681594,
    0.06830802734392144, -0.023770514890662273, 0.002529391816799663, 0.0018886900908332905,
    -0.0007798322772742547, -0.00010515828085467254, 0.00012509937435915822, 4.944031214882928e-06,
    -2.0100627664406107e-05, -7.186149396303622e-07, 3.472520280065519e-06, 3.3649033965298255e-07,
    -6.167709493550964e-07, -1.2038713923616526e-07, 1.0195717375790894e-07, 2.7779061599708634e-08,
    -1.3361953304404018e-08, -3.169592039553522e-09, 9.948820947537195e-10,
)  # fmt: skip
_ARC = (  # (atan(x) / x - 1) / x^2, by x^2 from 0 to tan(pi / 8)^2
    -0.3333333333333333, 0.1999999999999552, -0.14285714284666542, 0.11111111015256361, -0.09090904578123903,
    0.07692183190826087, -0.06664511447381948, 0.0585814891280221, -0.0508544973794026, 0.03923165829558719,
    -0.01917688711906226,
)  # fmt: skip


def formulas(graph: Graph) -> dict[int, int]:
    """Of each node that kernels don't print, a new node of the graph that computes the same."""
    recorder, found, n = Recorder(graph=graph), {}, 0
    while n < len(graph.nodes):
        formula = _formula(graph, n)
        if formula is not None:
            kind = graph.nodes[n].kind
            args = [Proxy(recorder, graph.cast(a, kind)) for a in graph.nodes[n].args]
            found[n] = graph.cast(recorder.number(formula(*args)), kind)
        n += 1
    return found


def _formula(graph: Graph, n: int) -> Callable[..., Any] | None:
    op, args, kind, _ = graph.nodes[n]
    if op != "pow":
        return _FORMULAS.get(op) if kind == FLOAT else None
    exponent = graph.value(args[1])
    if exponent is None or abs(exponent) > MOST_POWER or exponent != exponent:
        return _power if kind == FLOAT else _whole_power
    if exponent == 0.5 or exponent == int(exponent):
        return None
    return _power_and_root if exponent * 2 == int(exponent * 2) else _power


def _series(terms: Sequence[float], x: Any) -> Any:
    """The polynomial with these coefficients, constant first."""
    found: Any = terms[-1]
    for term in reversed(terms[:-1]):
        found = found * x + term
    return found


def _scaled_complement(x: Any) -> Any:
    """e^(x^2) erfc(x) of x from 0 on."""
    return _series(_SCALED, 1 - 6 / (x + 3)) / (1 + 2 * x)


def _exp_of_square(x: Any, sign: int) -> Any:
    """e^(sign x^2) of x from 0 on, as exact as if x^2 were not rounded: that of a few digits of x is not."""
    x = torch.where(x > 30, 30.0, x)
    few = torch.round(x * 64) * (1 / 64)
    return torch.exp(sign * (few * few)) * torch.exp(sign * ((x - few) * (x + few)))


def _erf(x: Any) -> Any:
    size = abs(x)
    far = 1 - torch.exp(-x * x) * _scaled_complement(size)
    return torch.where(size < 1, x * _series(_ERROR, x * x), torch.where(x < 0, -far, far))


def _erfc(x: Any) -> Any:
    size = abs(x)
    tail = _exp_of_square(size, -1) * _scaled_complement(size)
    return torch.where(x < 0, 2 - tail, tail)


def _erfcx(x: Any) -> Any:
    size = abs(x)
    found = _scaled_complement(size)
    return torch.where(x < 0, 2 * _exp_of_square(size, 1) - found, found)


def _atan(x: Any) -> Any:
    """Of what is left of x beyond 0, a quarter or half of a right angle, whichever is near."""
    size = abs(x)
    is_steep, is_middle = size > math.sqrt(2) + 1, size > math.sqrt(2) - 1
    rest = torch.where(is_steep, -1.0, torch.where(is_middle, size - 1, size))
    rest = rest / torch.where(is_steep, size, torch.where(is_middle, size + 1, 1.0))
    square = rest * rest
    near = torch.where(is_steep, math.pi / 2, torch.where(is_middle, math.pi / 4, 0.0))
    angle = near + (rest + rest * square * _series(_ARC, square))
    return torch.where(x < 0, -angle, angle)


def _asinh(x: Any) -> Any:
    size = abs(x)
    square = torch.where(size > LARGE, 0.0, size * size)
    near = torch.log1p(size + square / (1 + torch.sqrt(1 + square)))
    found = torch.where(size > LARGE, torch.log(size) + math.log(2), near)
    return torch.where(x < 0, -found, found)


def _acosh(x: Any) -> Any:
    near = torch.log1p((x - 1) + torch.sqrt((x - 1) * (x + 1)))
    return torch.where(x < 1, math.nan, torch.where(x > LARGE, torch.log(x) + math.log(2), near))


def _atanh(x: Any) -> Any:
    size = abs(x)
    found = 0.5 * torch.log1p(2 * size / (1 - size))
    return torch.where(x < 0, -found, found)


def _sinh(x: Any) -> Any:
    size, half = abs(x), torch.exp(abs(x) * 0.5)
    far = torch.where(x < 0, -half, half) * (0.5 * half)
    return torch.where(size > 30, far, (torch.expm1(x) - torch.expm1(-x)) * 0.5)


def _cosh(x: Any) -> Any:
    """Not by e^|x|, which may be too large where half of it is not."""
    half = torch.exp(abs(x) * 0.5)
    return torch.where(abs(x) > 30, half * (0.5 * half), (torch.exp(x) + torch.exp(-x)) * 0.5)


def _is_short(rest: Any, b: Any) -> Any:
    """Whether a rest of the sign of the dividend has not that of b."""
    return (rest != 0) & ((rest < 0) ^ (b < 0))


def _mod(a: Any, b: Any) -> Any:
    rest = torch.fmod(a, b)
    return torch.where(_is_short(rest, b), rest + b, rest)


def _floordiv(a: Any, b: Any) -> Any:
    rest = torch.fmod(a, b)
    quotient = (a - rest) / b
    quotient = torch.where(_is_short(rest, b), quotient - 1, quotient)
    floor = torch.floor(quotient)
    return torch.where(b == 0, a / b, torch.where(quotient - floor > 0.5, floor + 1, floor))


def _power(a: Any, b: Any) -> Any:
    size = torch.where((abs(a) == 1) | (b == 0), 1.0, a.recorder.add("absolute_power", a, b))
    half = b * 0.5
    is_whole, is_even = torch.floor(b) == b, torch.floor(half) == half
    signed = torch.where(is_even, size, -size)
    signed = torch.where(is_whole | (a == -math.inf), torch.where(is_whole, signed, size), math.nan)
    return torch.where(a < 0, signed, size)


def _power_and_root(a: Any, b: Any) -> Any:
    exponent = a.recorder.graph.value(b.node)
    found = a ** int(abs(exponent) - 0.5) * torch.sqrt(a)
    return found if exponent > 0 else 1 / found


def _whole_power(a: Any, b: Any) -> Any:
    """Of integers, as of 64 bits; of negative exponents 0 but for 1 and -1, as in PyTorch."""
    found: Any = 1
    base = a
    constant = a.recorder.graph.value(a.node)
    for bit in range(BITS):
        found = torch.where((b >> bit) & 1 == 1, base * found, found)
        wrapped = 0 if constant is None else (constant ** (2 << bit) + (1 << 63)) % (1 << 64) - (1 << 63)
        base = base * base if constant is None else wrapped
    found = torch.where(b >> BITS > 0, base * found, found)
    inverse = torch.where(a == 1, 1, torch.where(a == -1, 1 - 2 * (b & 1), 0))
    return torch.where(b < 0, inverse, found)


_FORMULAS: dict[str, Callable[..., Any]] = {
    "erf": _erf, "erfc": _erfc, "erfcx": _erfcx, "atan": _atan, "mod": _mod, "floordiv": _floordiv,
    "asin": lambda x: _atan(x / torch.sqrt((1 - x) * (1 + x))),
    "acos": lambda x: 2 * _atan(torch.sqrt((1 - x) / (1 + x))),
    "asinh": _asinh, "acosh": _acosh, "atanh": _atanh, "sinh": _sinh, "cosh": _cosh,
}  # fmt: skip
