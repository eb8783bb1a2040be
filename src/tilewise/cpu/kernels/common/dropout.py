"""Dropout in the kernels: Philox in 64-bit lanes, the mask of `tilewise.core.dropout` bit for bit.

A word is the low half of a 64-bit lane, as multiplication wants it, and nobody clears the high half. A call
of the generator serves 4 x 4 weights of a square of 16 queries and keys. Keys come four at a time, so half of
its bytes are used: those of keys 2b and 2b + 1, or of 2b + 8 and 2b + 9. Calls stand in lanes, for queries
2a and both b of the four keys; words of even and odd queries are then interleaved, and give 32-bit lanes.
"""

from __future__ import annotations

import functools
import operator

import llvmlite.ir as ir

from tilewise.core.dropout import KEY_A, KEY_B, LOW32, ROUND_A, ROUND_B, ROUNDS
from tilewise.cpu.dsl.lanes import shuffled
from tilewise.cpu.dsl.vector import I32, I64, Operand, Scalar, Value, as_int, builder, constants, int32, splat
from tilewise.cpu.kernels.common.tiles import Arguments, Head, Shape

GROUP = 4  # keys that are served together
Counter = tuple[Operand, Operand, Operand, Operand]


class Dropout:
    """The generator of one kernel."""

    def __init__(self, shape: Shape, args: Arguments) -> None:
        self.args = args
        self.inverse_keep = args.vector("inverse_keep", shape)  # what a weight that survives counts

    def at(self, shape: Shape, head: Head, q0: Scalar, j0: Scalar) -> TileDropout:
        return TileDropout(self, shape, head, q0, j0)


class TileDropout:
    """Which weights survive of a tile of queries from q0 on, and keys from j0 on (a multiple of 4).

    A call that is part of a larger one adds what its first query and key are there, multiples of 16.
    """

    def __init__(self, dropout: Dropout, shape: Shape, head: Head, q0: Scalar, j0: Scalar) -> None:
        args, self.shape = dropout.args, shape
        q0, self.j0 = q0 + args.drop_q, j0 + args.drop_k
        self.lanes = shape.target.vector_bytes // 8
        self.is_square = shape.lanes % 16 == 0 or shape.block_q % 16 == 0  # q0 is a multiple of 16
        group = 4 if self.is_square else shape.lanes // 2  # calls that stand together, first for the first b
        queries = [q for q in range(0, shape.width, 2) if not (self.is_square and q & 8)]
        self.calls = [
            (b, query)
            for first in range(0, len(queries), group)
            for b in (0, 1)
            for query in queries[first : first + group]
        ]
        self.vectors = [self.calls[n : n + self.lanes] for n in range(0, len(self.calls), self.lanes)]
        first = splat(as_int(q0), self.lanes)
        numbers = [first + constants([q for _, q in calls], I64) for calls in self.vectors]
        self.rows = [q // 16 * 4 + q % 8 // 2 for q in numbers]
        self.shifts = [self._shift(q0, column) for column in shape.columns()]
        number = args.drop_head + head.batch * args.drop_heads + head.head
        low, high = args.seed & LOW32, (args.seed >> 32) ^ number
        self.head = low, high
        self.limit = int32(args.threshold, shape.lanes)

    def kept(self, j: Value, count: int) -> list[list[Value]]:
        """Masks [count][vectors] of the keys j0 + j + [0, count); j and count are multiples of 4."""
        masks = []
        for first in range(0, count, GROUP):
            key = self.j0 + (j + first)
            call, far = key // 16 * 4 + key % 8 // 2, int32(key // 8 % 2 * 8, self.shape.lanes)
            words = _words(
                [
                    (call + constants([b for b, _ in calls], I64), row, *self.head)
                    for calls, row in zip(self.vectors, self.rows)
                ]
            )
            for k in range(GROUP):
                b, odd = divmod(k, 2)
                pairs = [_interleaved(counter[odd], counter[2 + odd]) for counter in words]
                masks.append(
                    [
                        self._survives(pairs, b, c, shift - far)
                        for c, shift in zip(self.shape.columns(), self.shifts)
                    ]
                )
        return masks

    def _survives(self, pairs: list[Value], b: int, column: int, shift: Value) -> Value:
        """Of a vector of queries: whether its bytes, shifted to the top of their words, reach the limit."""
        queries = range(column, column + self.shape.lanes)
        places = [self.calls.index((b, q & (~9 if self.is_square else ~1))) for q in queries]
        (source,) = {place // self.lanes for place in places}
        order = [place % self.lanes * 2 + q % 2 for place, q in zip(places, queries)]
        word = shuffled(pairs[source], pairs[source], order) << shift
        return Value(builder().icmp_unsigned(">=", word.raw, self.limit.raw))

    def _shift(self, q0: Scalar, column: int) -> Value:
        """What moves the bytes of a vector of queries, for keys below 8 modulo 16, to the top."""
        count = self.shape.lanes
        if self.is_square:
            return constants([24 - 2 * (column + lane & 8) for lane in range(count)])
        return 24 - ((int32(q0, count) + constants(range(column, column + count))) & 8) * 2


def _words(counters: list[Counter]) -> list[Counter]:
    """Four words for each counter; the counters go abreast, as each alone is one long chain."""
    for i in range(ROUNDS):
        key_a, key_b = as_int(i * KEY_A & LOW32), as_int(i * KEY_B & LOW32)
        counters = [_round(counter, key_a, key_b) for counter in counters]
    return counters


def _round(counter: Counter, key_a: Operand, key_b: Operand) -> Counter:
    c0, c1, c2, c3 = counter
    a, b = (c0 & LOW32) * ROUND_A, (c2 & LOW32) * ROUND_B
    return _xor(b >> 32, c1, key_a), b, _xor(a >> 32, c3, key_b), a


def _xor(*words: Operand) -> Operand:
    """Scalars among themselves first."""
    return functools.reduce(operator.xor, sorted(words, key=lambda x: isinstance(x.type, ir.VectorType)))


def _interleaved(even: Operand, odd: Operand) -> Value:
    """The low halves of 64-bit lanes, in turns from either: 32-bit lanes."""
    lanes = 2 * even.type.count
    a, b = (Value(builder().bitcast(x.raw, ir.VectorType(I32, lanes))) for x in (even, odd))
    return shuffled(a, b, [lane if lane % 2 == 0 else lanes + lane - 1 for lane in range(lanes)])
