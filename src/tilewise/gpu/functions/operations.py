"""What generated mask and score functions are made of, where Triton's own operations are not PyTorch's; what
kernels do about indices that are out of range."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.core.device_errors import INDEX
from tilewise.gpu.launch.exact import LOG2E

INDEX_FLAG = tl.constexpr(INDEX)


@triton.jit
def tanh(x, IS_ACCURATE: tl.constexpr):
    """tanh in float32. IS_ACCURATE: relative error near 1e-7 for small x too, by Cephes' polynomial."""
    y = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    y = tl.where(x < 0, -y, y)
    if IS_ACCURATE:
        z = x * x
        series = -5.70498872745e-3 * z + 2.06390887954e-2
        series = series * z - 5.37397155531e-2
        series = series * z + 1.33314422036e-1
        series = series * z - 3.33332819422e-1
        y = tl.where(tl.abs(x) < 0.625, series * z * x + x, y)
    return y


@triton.jit
def floor_quotient(a, b):
    """a // b of integers, rounded down; of 0 as of 1."""
    b = tl.where(b == 0, 1, b)
    quotient = a // b  # rounded towards zero
    rest = a - quotient * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)


@triton.jit
def remainder(a, b):
    """a - floor_quotient(a, b) * b, of the sign of b."""
    b = tl.where(b == 0, 1, b)
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def shifted_left(a, b):
    """a << b of 64 bits; 0 for a b that is no number of bits."""
    is_outside = (b < 0) | (b > 63)
    return tl.where(is_outside, 0, a << tl.where(is_outside, 0, b))


@triton.jit
def shifted_right(a, b):
    """a >> b of 64 bits; the sign for a b that is no number of bits."""
    return a >> tl.where((b < 0) | (b > 63), 63, b)


@triton.jit
def exact_tanh(x):
    return tanh(x, True)


@triton.jit
def expm1(x):
    """e^x - 1 = (1 + e^x) tanh(x / 2)."""
    return tl.where(x > 80.0, tl.exp(x), (1.0 + tl.exp(x)) * tanh(x * 0.5, True))


@triton.jit
def log1p(x):
    """log(1 + x), and what is lost of x in the sum."""
    total = 1.0 + x
    lost = (x - (total - 1.0)) / total
    return tl.log(total) + tl.where(tl.abs(lost) < 1.0, lost, 0.0)


@triton.jit
def absolute_power(a, b):
    """|a|^b: float64 keeps the digits that float32 loses of b log|a|."""
    return tl.exp(tl.cast(b, tl.float64) * tl.log(tl.abs(tl.cast(a, tl.float64)))).to(tl.float32)


@triton.jit
def log10(x):
    """Exact of powers of 10 too."""
    return (tl.log(tl.cast(x, tl.float64)) * 0.43429448190325176).to(tl.float32)


@triton.jit
def fmod(a, b):
    """The exact rest of a / b, of the sign of a: each step takes 51 bits from the quotient of 277 at most."""
    rest, by = tl.abs(tl.cast(a, tl.float64)), tl.abs(tl.cast(b, tl.float64))
    inverse = 1.0 / by
    x = rest
    for _ in tl.static_range(6):
        x = tl.fma(-tl.floor(x * inverse), by, x)
    x = tl.where(x < 0, x + by, x)
    x = tl.where(x >= by, x - by, x)
    x = tl.where(by == float("inf"), rest + rest * 0.0, x)  # NaN of an infinite rest
    return tl.where(a < 0, -x, x).to(tl.float32)


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_to_even(x):
    up = tl.floor(x + 0.5)
    is_tied_to_odd = (up - x == 0.5) & (up - 2.0 * tl.floor(up * 0.5) != 0.0)
    rounded = tl.where(is_tied_to_odd, up - 1.0, up)
    return tl.where(tl.abs(x) < 4194304.0, rounded, x)


@triton.jit
def whole_number(x):
    """x towards zero as an integer; 0 for what is none."""
    limit = 4.0e18
    inside = tl.where(x == x, tl.minimum(tl.maximum(x, -limit), limit), 0.0)
    return inside.to(tl.int64)


@triton.jit
def smaller(a, b):
    """NaN where either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def poisoned(s, wrong, i, seq, captured):
    """NaN in the place of visible scores that functions have read out of range for, which is reported."""
    is_bad = (wrong != 0) & (s != float("-inf")) & (i < seq.seqlen_q)  # a bit, interpreted too
    tl.store(captured.errors + INDEX_FLAG + is_bad.to(tl.int32) * 0, 1, mask=is_bad)
    return tl.where(is_bad, float("nan"), s)
