"""Arithmetic in two floats, high + low, for Triton kernels of every backend: about 46 bits.

A compiler may fuse products into sums. Here it does no harm: the only products that are added are those of
halves of a float32's bits, which are exact, fused or not.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(3.4028234e38)  # finite float32


@triton.jit
def upper_half(x):
    """x with the upper 12 of its 24 bits."""
    return (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)


@triton.jit
def two_sum(a, b):
    """(a + b rounded, what rounding took). Knuth, The Art of Computer Programming 4.2.2."""
    s = a + b
    b_in_s = s - a
    return s, (a - (s - b_in_s)) + (b - b_in_s)


@triton.jit
def two_product(x, y):
    """(high, low): x * y, to 2^-46 of it. Dekker (1971)."""
    x1, y1 = upper_half(x), upper_half(y)
    x2, y2 = x - x1, y - y1
    high, low = two_sum(x1 * y1, x1 * y2)
    high, lower = two_sum(high, x2 * y1)
    return high, (low + lower) + x2 * y2


@triton.jit
def shift_and_low(lse, residual, scale, ahead=0.0):
    """(shift, low) such that exp(scale * s - lse - residual) = exp2((s - shift) * scale * log2(e) - low).

    Of a finite lse: lse + residual is scale * shift + low * log(2), and low is log2(e) * `ahead` but for a
    few units in the last place of lse. So nothing is lost, however large that is.
    """
    shift = tl.minimum(tl.maximum((lse - ahead) / scale, -LARGEST), LARGEST)
    high, low = two_product(shift, scale)
    return shift, (((lse - high) - low) + residual) * LOG2E
