"""Dropout in the kernels: Philox in 64-bit lanes, the mask of `tilewise.core.dropout` bit for bit.

A counter (key // 4, query, sequence * heads + head, 0) gives four words, one for each of four keys. Queries
stand in lanes; what depends on keys and heads alone stays scalar, which leaves 16 of the 20 products. A word
is the low half of a 64-bit lane, as multiplication wants it, and nobody clears the high half. float32 lanes
are twice as many: even and odd queries are computed apart, and their words then interleaved.
"""

from __future__ import annotations

import functools
import operator

import llvmlite.ir as ir

from tilewise.core.dropout import KEY_A, KEY_B, LOW32, ROUND_A, ROUND_B, ROUNDS
from tilewise.cpu.dsl.vector import I32, I64, Operand, Scalar, Value, as_int, builder, splat
from tilewise.cpu.kernels.tiles import Arguments, Head, Shape

GROUP = 4  # keys that share a counter
Counter = tuple[Operand, Operand, Operand, Operand]


class Dropout:
    """The generator of one kernel, with its keys for each round."""

    def __init__(self, shape: Shape, args: Arguments) -> None:
        self.args = args
        self.inverse_keep = args.vector("inverse_keep", shape)  # what a weight that survives counts
        with args.emitter.on_entry():
            seed = args.seed
            self.keys = [(seed + i * KEY_A, (seed >> 32) + i * KEY_B) for i in range(ROUNDS)]

    def at(self, shape: Shape, head: Head, q0: Scalar, j0: Scalar) -> TileDropout:
        return TileDropout(self, shape, head, q0, j0)

    def words(self, counters: list[Counter]) -> list[Counter]:
        """Four words for each counter; the counters go abreast, as each alone is one long chain."""
        for key_a, key_b in self.keys:
            counters = [_round(counter, key_a, key_b) for counter in counters]
        return counters


class TileDropout:
    """Which weights survive of a tile of queries from q0 on, and keys from j0 on (a multiple of 4)."""

    def __init__(self, dropout: Dropout, shape: Shape, head: Head, q0: Scalar, j0: Scalar) -> None:
        args = dropout.args
        self.dropout, self.shape, self.j0 = dropout, shape, j0
        self.head = head.batch * args.num_heads + head.head
        self.parts = 1 if shape.kind == "f64" else 2  # vectors of 64-bit lanes for a vector of queries
        count = shape.lanes // self.parts
        self.queries = [
            splat(as_int(q0), count) + _lane_numbers(column + part, count, self.parts)
            for column in shape.columns()
            for part in range(self.parts)
        ]
        self.threshold = args.threshold

    def kept(self, j: Value, count: int) -> list[list[Value]]:
        """Masks [count][vectors] of the keys j0 + j + [0, count); j and count are multiples of 4."""
        masks = []
        for first in range(0, count, GROUP):
            group, zero = (self.j0 + (j + first)) // GROUP, as_int(0)
            words = self.dropout.words([(group, query, self.head, zero) for query in self.queries])
            for key in range(GROUP):
                parts = [counter[key] for counter in words]
                masks.append(
                    [self._compare(parts[v : v + self.parts]) for v in range(0, len(parts), self.parts)]
                )
        return masks

    def _compare(self, parts: list[Operand]) -> Value:
        """Whether the words of a vector of queries reach the threshold."""
        if len(parts) == 1:
            word, limit = parts[0] & LOW32, self.threshold
        else:
            word, limit = _interleaved(*parts), Value(builder().trunc(self.threshold.raw, I32))
        return Value(builder().icmp_unsigned(">=", word.raw, splat(limit, self.shape.lanes).raw))


def _round(counter: Counter, key_a: Operand, key_b: Operand) -> Counter:
    c0, c1, c2, c3 = counter
    a, b = (c0 & LOW32) * ROUND_A, (c2 & LOW32) * ROUND_B
    return _xor(b >> 32, c1, key_a), b, _xor(a >> 32, c3, key_b), a


def _xor(*words: Operand) -> Operand:
    """Scalars among themselves first."""
    return functools.reduce(operator.xor, sorted(words, key=lambda x: isinstance(x.type, ir.VectorType)))


def _lane_numbers(first: int, count: int, step: int) -> Value:
    numbers = list(range(first, first + count * step, step))
    return Value(ir.Constant(ir.VectorType(I64, count), numbers))


def _interleaved(even: Operand, odd: Operand) -> Value:
    """The low halves of 64-bit lanes, in turns from either: 32-bit lanes."""
    lanes = 2 * even.type.count
    halves = [builder().bitcast(x.raw, ir.VectorType(I32, lanes)) for x in (even, odd)]
    order = [lane if lane % 2 == 0 else lanes + lane - 1 for lane in range(lanes)]
    return Value(builder().shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, lanes), order)))
