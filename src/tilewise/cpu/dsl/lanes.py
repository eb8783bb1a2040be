"""Lanes of vectors that change places, and what is combined across them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llvmlite.ir as ir

from tilewise.cpu.dsl.vector import I32, Operand, Value, builder, constants


def transpose(rows: Sequence[Operand]) -> list[Value]:
    """n vectors of n lanes: out[c][r] = rows[r][c]. Swaps off-diagonal blocks of 1, 2, 4, ... lanes."""
    n, size = len(rows), 1
    current = [Value(r.raw) for r in rows]
    while size < n:
        low = [c if not c & size else n + c - size for c in range(n)]
        high = [c + size if not c & size else n + c for c in range(n)]
        swapped = list(current)
        for r in range(n):
            if not r & size:
                a, b = current[r], current[r + size]
                swapped[r], swapped[r + size] = shuffled(a, b, low), shuffled(a, b, high)
        current, size = swapped, 2 * size
    return current


def shuffled(a: Operand, b: Operand, lanes: list[int]) -> Value:
    """Some lanes of two vectors, which are counted through both."""
    return Value(builder().shuffle_vector(a.raw, b.raw, constants(lanes).raw))


def lanes_of(x: Operand, first: int, count: int) -> Value:
    """Some adjacent lanes of a vector, as a shorter vector."""
    return shuffled(x, x, list(range(first, first + count)))


def concatenated(low: Operand, high: Operand) -> Value:
    """The lanes of one vector, and then those of another."""
    return shuffled(low, high, list(range(2 * low.type.count)))


def first_lane(x: Operand) -> Value:
    """The first lane of a vector, as a number."""
    return Value(builder().extract_element(x.raw, ir.Constant(I32, 0)))


def repeated(x: Operand, times: int) -> Value:
    """A vector's lanes, several times over."""
    return shuffled(x, x, [*range(x.type.count)] * times) if times > 1 else Value(x.raw)


def fold_sums(vectors: Sequence[Operand]) -> Value:
    """n vectors of groups of n lanes -> one: lane r of a group is the sum over that group of vectors[r]."""
    level = [Value(v.raw) for v in vectors]
    n, lanes = len(level), level[0].type.count
    groups = [[*range(g, g + n), *range(lanes + g, lanes + g + n)] for g in range(0, lanes, n)]  # of a pair
    even, odd = ([lane for group in groups for lane in group[start::2]] for start in (0, 1))
    while len(level) > 1:
        level = [shuffled(a, b, even) + shuffled(a, b, odd) for a, b in zip(level[::2], level[1::2])]
    return level[0]


def deinterleaved(vectors: Sequence[Operand]) -> list[Value]:
    """n vectors with the rows of a matrix of n columns, one row after the other -> its columns."""
    if len(vectors) == 1:
        return [Value(vectors[0].raw)]
    lanes = vectors[0].type.count
    pairs = list(zip(vectors[::2], vectors[1::2]))
    even, odd = (
        deinterleaved([shuffled(a, b, list(range(start, 2 * lanes, 2))) for a, b in pairs])
        for start in (0, 1)
    )
    return [column for both in zip(even, odd) for column in both]


def interleaved(columns: Sequence[Operand]) -> list[Value]:
    """The columns of a matrix -> its rows, one after the other, in as many vectors."""
    if len(columns) == 1:
        return [Value(columns[0].raw)]
    lanes = columns[0].type.count
    order = [lane for pair in zip(range(lanes), range(lanes, 2 * lanes)) for lane in pair]
    pairs = zip(interleaved(columns[::2]), interleaved(columns[1::2]))
    return [shuffled(a, b, half) for a, b in pairs for half in (order[:lanes], order[lanes:])]


def across(x: Operand, combine: Any, size: int = 1) -> Value:
    """All lanes that are `size` apart, combined in a fixed tree; the answer stands in every one of them."""
    n = x.type.count
    result = Value(x.raw)
    while size < n:
        result = combine(result, shuffled(result, result, [c ^ size for c in range(n)]))
        size *= 2
    return result


def any_lane(mask: Operand) -> Value:
    bits = ir.IntType(mask.type.count)
    return Value(builder().icmp_unsigned("!=", builder().bitcast(mask.raw, bits), ir.Constant(bits, 0)))
