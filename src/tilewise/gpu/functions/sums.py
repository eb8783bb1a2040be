"""Gradients of the numbers that a score function reads: what a tile of scores adds to them.

A tile's terms are summed where they are of one number, and one atomic addition adds the sum: for loads that
change along rows, columns or diagonals, that is one for each of these. Atomic additions come in any order, so
that the last bits of float32 sums differ from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(1 << 62)


@triton.jit
def times(g, slope):
    """g * slope; 0 where g is, as at hidden keys, whatever the slope there."""
    return tl.where(g == 0.0, 0.0, g * slope)


@triton.jit
def add_one(total, term, place, wrong):
    """Add a number at a place, or a few at theirs."""
    tl.atomic_add(total + place, term, mask=wrong == 0, sem="relaxed")


@triton.jit
def add_each(total, terms, place, wrong):
    """Add many numbers, each at its place; as their sum where that is one place, as behind a clamp."""
    adds = (wrong == 0) & (terms != 0.0)
    first = tl.min(tl.where(adds, place, NOWHERE), None)
    last = tl.max(tl.where(adds, place, -1), None)
    if first == last:
        tl.atomic_add(total + first, tl.sum(tl.where(adds, terms, 0.0), None), sem="relaxed")
    elif first < last:
        tl.atomic_add(total + place, terms, mask=adds, sem="relaxed")


# ---- sums of diagonals


@triton.jit
def rotated(tile):
    """Row m of a tile rotated by m: column c holds what was in column (m - c) mod N."""
    m = tl.arange(0, tile.shape[0])[:, None]
    c = tl.arange(0, tile.shape[1])[None, :]
    return tl.gather(tile, (m - c) & (tile.shape[1] - 1), 1)


@triton.jit
def diagonal_sums(tile, n: tl.constexpr):
    """(sums [N], m - column of each) of N diagonals of a tile that is `rotated`: the n-th N of them."""
    N: tl.constexpr = tile.shape[1]
    m = tl.arange(0, tile.shape[0])[:, None]
    c = tl.arange(0, N)
    is_here = (m - c[None, :] + N) // N == n
    return tl.sum(tl.where(is_here, tile, 0.0), 0), c + (n - 1) * N
