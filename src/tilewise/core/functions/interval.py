"""Interval arithmetic: of an expression's value on ranges of b, h, i and j, the least and the greatest.

All ranges are computed at once, as tensors that broadcast. An interval is (low, high): int64 of integers,
float64 of floats, bool of booleans, of which low is "always true" and high "sometimes true". A float whose
ends are NaN may be anything, NaN included; comparisons with it are never certain.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.functions.evaluate import Buffers, range_extremes
from tilewise.core.functions.expression import BOOL, FLOAT, INT, Functions, Graph

Interval = tuple[Tensor, Tensor]
LOWEST, HIGHEST = -(1 << 63), (1 << 63) - 1  # integers, and the ends of those that nothing is known of
LARGE = 1 << 62  # float64 tells whether 64 bits hold what is less
ROUNDING = 1e-6  # of float32, for each operation
EXACT = 1 << 24  # integers up to here are floats of 32 bits
MOST = torch.finfo(torch.float32).max
MAX_PLACES = 64  # of a tensor, that a load of ranges in several dimensions may read, however many tiles
MAX_GATHERED = 1 << 22  # numbers, of all ranges of a load


class Blocks(NamedTuple):
    """Ranges of positions, single ones if `first is last`, and what is known of all without asking a GPU."""

    first: Tensor
    last: Tensor
    end: int  # all are below
    widest: int  # no range has more positions


class Ranges(NamedTuple):
    """First and last b, h, i and j of some tiles, int64, each in a dimension of its own."""

    b: Blocks
    h: Blocks
    i: Blocks
    j: Blocks

    @classmethod
    def whole(cls, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> Ranges:
        """The only tile of a problem."""
        sizes = (batch, heads, seqlen_q, seqlen_k)
        first, *last = (torch.tensor(n, device="cpu") for n in (0, *(n - 1 for n in sizes)))
        return cls(*(Blocks(first, n, size, size) for n, size in zip(last, sizes)))


class Intervals:
    """The intervals of a graph's nodes. `buffers`: None where captured numbers may be anything.

    Attributes:
        may_be_outside: where an index of a load that was computed may be out of range.
    """

    def __init__(self, graph: Graph, functions: Functions, buffers: Buffers | None, ranges: Ranges) -> None:
        self.graph, self.functions, self.buffers, self.ranges = graph, functions, buffers, ranges
        self.device = ranges.i.first.device
        self.places = [] if buffers is None else buffers.places(functions.tensors)
        self.known: dict[int, Interval] = {}
        self.may_be_outside = torch.zeros((), dtype=torch.bool, device=self.device)

    def __call__(self, root: int) -> Interval:
        for n in self.graph.reachable([root]):
            if n not in self.known:
                self.known[n] = self._compute(n)
        return self.known[root]

    def _compute(self, n: int) -> Interval:
        node = self.graph.nodes[n]
        args = [self.known[a] for a in node.args]
        kinds = [self.graph.nodes[a].kind for a in node.args]
        if node.op == "const":
            if node.kind == FLOAT and math.isfinite(node.value):
                return self._rounded(node.value)
            value = torch.full((), node.value, dtype=_DTYPES[node.kind], device=self.device)
            return value, value
        if node.op == "load":
            return self._load(n)
        if node.op in ("b", "h", "i", "j"):
            span: Blocks = getattr(self.ranges, node.op)
            return span.first, span.last
        if node.op in (BOOL, INT, FLOAT):
            return _cast(args[0], kinds[0], node.op)
        if node.op == "where":
            extreme = self._extreme(n)
            x, y = (_cast(side, kind, node.kind) for side, kind in zip(args[1:], kinds[1:]))
            return _where(args[0], x, y) if extreme is None else _BOTH[extreme](x, y)
        if node.op in ("lt", "le", "eq", "ne"):
            if FLOAT in kinds:
                args = [_cast(x, kind, FLOAT) for x, kind in zip(args, kinds)]
            return _COMPARISONS[node.op](*args)
        if node.kind == BOOL:
            return _LOGIC[node.op](*args)
        args = [_cast(x, kind, node.kind) for x, kind in zip(args, kinds)]
        if node.kind == FLOAT:
            return _widened(*_FLOATS[node.op](*args)) if node.op in _FLOATS else self._anything(FLOAT)
        if node.op not in _INTEGERS:
            return self._anything(INT)
        return _INTEGERS[node.op](*args)

    def _rounded(self, value: float) -> Interval:
        """A constant as it is in scores of float64, and of float32, where it may be infinite."""
        single = torch.tensor(value, dtype=torch.float32, device="cpu").item()
        ends = sorted({value, single})
        found = [torch.full((), x, dtype=torch.float64, device=self.device) for x in ends]
        return found[0], found[-1]

    def _extreme(self, n: int) -> str | None:
        """Which of minimum and maximum where(x < y, ...) of the same x and y is, if any."""
        condition, *sides = self.graph.nodes[n].args
        op, args = self.graph.nodes[condition][:2]
        is_one = op in ("lt", "le") and sorted(sides) == sorted(args) and self.graph.nodes[n].kind != BOOL
        if not is_one:
            return None
        return "minimum" if sides == [*args] else "maximum"

    def _anything(self, kind: str) -> Interval:
        ends = {FLOAT: (torch.nan, torch.nan), INT: (LOWEST, HIGHEST), BOOL: (False, True)}[kind]
        low, high = (torch.full((), x, dtype=_DTYPES[kind], device=self.device) for x in ends)
        return low, high

    def _load(self, n: int) -> Interval:
        """The least and the greatest of all numbers that the ranges of the indices reach."""
        node = self.graph.nodes[n]
        kind = self.functions.tensors[node.value].kind
        if self.buffers is None:
            return self._anything(kind)
        buffer = self.buffers.floats if kind == FLOAT else self.buffers.integers
        begin, shape = self.places[node.value]
        size = torch.Size(shape).numel()
        if buffer is None or size == 0:
            self.may_be_outside = torch.ones_like(self.may_be_outside)
            return self._anything(kind)
        table = buffer.detach()[begin : begin + size].view(shape)
        indices, is_wrong = [self.known[a] for a in node.args], None
        if n in self.functions.guarded:
            wrong = [(low < -extent) | (high >= extent) for (low, high), extent in zip(indices, shape)]
            is_wrong = functools.reduce(torch.logical_or, wrong)
            self.may_be_outside = self.may_be_outside | is_wrong
            indices = [_index(x, extent) for x, extent in zip(indices, shape)]
        names = (self.graph.nodes[a].op for a in node.args)
        spans: list[Blocks | None] = [getattr(self.ranges, name, None) for name in names]
        found = _least_and_greatest(table, indices, [span and span.widest for span in spans])
        ends = _cast(found, INT, BOOL) if kind == BOOL else tuple(t.to(_DTYPES[kind]) for t in found)
        if is_wrong is not None:  # which number is read then, no two backends agree on
            ends = tuple(torch.where(is_wrong, any_, t) for any_, t in zip(self._anything(kind), ends))
        return ends[0], ends[1]


def _index(index: Interval, size: int) -> Interval:
    """The places that indices read, negative ones counted from the end, wrong ones put to an end."""
    low, high = index
    if low is high:
        place = torch.where(low < 0, low + size, low).clamp(0, size - 1)
        return place, place
    crosses = (low < 0) & (high >= 0)
    first = torch.where(crosses, 0, torch.where(low < 0, low + size, low))
    last = torch.where(crosses, size - 1, torch.where(high < 0, high + size, high))
    return first.clamp(0, size - 1), last.clamp(0, size - 1)


def _least_and_greatest(table: Tensor, indices: list[Interval], widths: list[int | None]) -> Interval:
    """Of table at ranges of indices, one pair for each dimension; their greatest widths, where known."""
    runs, ranged = {}, {}
    for n, ((low, high), width, size) in enumerate(zip(indices, widths, table.shape, strict=True)):
        if low is not high and width is None:
            runs[n], width = _runs(low, high, size)
        if low is not high and width != 1:
            ranged[n] = width or 1
    if not ranged:
        number = table[tuple(low for low, _ in indices)] if indices else table
        return number, number
    steps, tiles = math.prod(ranged.values()), torch.broadcast_tensors(*(low for low, _ in indices))[0]
    most = MAX_GATHERED if len(ranged) == 1 else max(MAX_GATHERED, MAX_PLACES * tiles.numel())
    if steps * tiles.numel() <= most:
        return _gathered(table, indices, ranged)
    if len(ranged) == 1:
        (axis,) = ranged
        others = [low for n, (low, _) in enumerate(indices) if n != axis]
        known = runs.get(axis) or [1 << n for n in range(ranged[axis].bit_length())]
        return range_extremes(table.movedim(axis, -1), others, *indices[axis], known)
    return table.amin(), table.amax()


def _gathered(table: Tensor, indices: list[Interval], widths: dict[int, int]) -> Interval:
    """By every number that a range reaches; widths: of the dimensions that have ranges."""
    places = []
    for n, (low, high) in enumerate(indices):
        low, high = (x.view(*x.shape, *(1 for _ in widths)) for x in (low, high))
        if n in widths:
            step = torch.arange(widths[n], device=low.device)
            after = [1 for axis in widths if axis > n]
            low = torch.minimum(low + step.view(-1, *after), high)
        places.append(low)
    return torch.aminmax(table[tuple(places)].flatten(-len(widths)), dim=-1)


def _runs(low: Tensor, high: Tensor, size: int) -> tuple[list[int], int]:
    """(the powers of 2 that are the longest to fit some range, the width of the widest), of a tensor's size.

    A GPU is waited for once; not while a graph is captured or a call only compiled, where they may be all.
    """
    if low.is_meta or (low.is_cuda and torch.cuda.is_current_stream_capturing()):
        return [1 << n for n in range(size.bit_length())], size
    widths = (high - low + 1).flatten()
    exponents = torch.frexp(widths.double())[1] - 1
    found = torch.zeros(65, dtype=torch.int64, device=low.device)
    found[exponents.long()] = 1
    found[-1] = widths.amax() if len(widths) else 0
    *is_found, widest = found.tolist()
    return [1 << n for n, is_longest in enumerate(is_found) if is_longest], widest


_DTYPES = {BOOL: torch.bool, INT: torch.int64, FLOAT: torch.float64}


def _cast(x: Interval, kind: str, to: str) -> Interval:
    low, high = x
    if kind == to:
        return x
    if to == BOOL:
        is_zero = (low == 0) & (high == 0)
        return (low > 0) | (high < 0), ~is_zero
    if kind == FLOAT:
        return _if((low >= -LARGE) & (high <= LARGE), low.long(), high.long())
    if kind == INT and to == FLOAT:
        low, high = low.double(), high.double()
        slack = [torch.where(t.abs() > EXACT, t.abs() * ROUNDING, 0.0) for t in (low, high)]
        return low - slack[0], high + slack[1]
    return low.to(_DTYPES[to]), high.to(_DTYPES[to])


def _where(condition: Interval, x: Interval, y: Interval) -> Interval:
    always, sometimes = condition
    low = torch.where(always, x[0], torch.where(sometimes, torch.minimum(x[0], y[0]), y[0]))
    return low, torch.where(always, x[1], torch.where(sometimes, torch.maximum(x[1], y[1]), y[1]))


def _widened(low: Tensor, high: Tensor) -> Interval:
    """With what float32 may round; anything at all where an end is no number."""
    unknown = low.isnan() | high.isnan() | ((low == -torch.inf) & (high == torch.inf))  # as of inf - inf
    low, high = low - low.abs() * ROUNDING - 1e-38, high + high.abs() * ROUNDING + 1e-38
    low, high = torch.where(low < -MOST, -torch.inf, low), torch.where(high > MOST, torch.inf, high)
    return torch.where(unknown, torch.nan, low), torch.where(unknown, torch.nan, high)


def _equal(x: Interval, y: Interval) -> Interval:
    is_point = (x[0] == x[1]) & (y[0] == y[1])
    return is_point & (x[0] == y[0]), ~((x[1] < y[0]) | (y[1] < x[0]))


def _not(x: Interval) -> Interval:
    return ~x[1], ~x[0]


def _xor(x: Interval, y: Interval) -> Interval:
    is_known = (x[0] == x[1]) & (y[0] == y[1])
    return is_known & (x[0] != y[0]), ~is_known | (x[0] != y[0])


def _corners(op: Callable[[Tensor, Tensor], Tensor], x: Interval, y: Interval) -> Interval:
    """Of an operation that is monotonic in both operands, one way or the other."""
    found = [op(a, b) for a in x for b in y]
    low, high = found[0], found[0]
    for other in found[1:]:
        low, high = torch.minimum(low, other), torch.maximum(high, other)
    return low, high


def _if(is_known: Tensor, low: Tensor, high: Tensor) -> Interval:
    """Of integers: any number where it is not known."""
    return torch.where(is_known, low, LOWEST), torch.where(is_known, high, HIGHEST)


def _held(op: str) -> Callable[..., Interval]:
    """Of integers: any number where 64 bits may not hold it."""

    def found(*operands: Interval) -> Interval:
        low, high = _BOTH[op](*((a.double(), b.double()) for a, b in operands))
        return _if((low >= -LARGE) & (high <= LARGE), *_BOTH[op](*operands))

    return found


def _shift(op: str) -> Callable[[Interval, Interval], Interval]:
    """As a product with a power of 2, or its quotient; by other than 0 to 62 bits any number, or a sign."""

    def found(x: Interval, y: Interval) -> Interval:
        by = tuple(torch.ones_like(s) << s.clamp(0, 62) for s in y)
        low, high = _INTEGERS["mul" if op == "shl" else "floordiv"](x, by)
        is_outside = (y[0] < 0) | (y[1] > 62)
        ends = (LOWEST, HIGHEST) if op == "shl" else (x[0].clamp(max=-1), x[1].clamp(min=0))
        return torch.where(is_outside, ends[0], low), torch.where(is_outside, ends[1], high)

    return found


def _abs(x: Interval) -> Interval:
    low, high = x
    crosses = (low <= 0) & (high >= 0)
    a, b = low.abs(), high.abs()
    return torch.where(crosses, 0, torch.minimum(a, b)), torch.maximum(a, b)


def _floordiv(x: Interval, y: Interval) -> Interval:
    """Of integers; where the divisor may be 0, which counts as 1, the quotient is not larger than x."""
    may_overflow = (x[0] == LOWEST) & (y[0] <= -1) & (y[1] >= -1)
    low, high = _corners(lambda a, b: a // torch.where((b == 0) | may_overflow, 1, b), x, y)
    largest = torch.maximum(x[0].clamp(min=-HIGHEST).abs(), x[1].abs())
    crosses = (y[0] <= 0) & (y[1] >= 0)
    low, high = torch.where(crosses, torch.minimum(x[0], -largest), low), torch.where(crosses, largest, high)
    return _if(~may_overflow, low, high)


def _mod(x: Interval, y: Interval) -> Interval:
    """Of integers: 0 to y - 1, or less where x stays between two multiples of one y."""
    by = y[0].clamp(min=1)
    is_same = (y[0] == y[1]) & (y[0] > 0) & (x[0] // by == x[1] // by)
    low, high = y[0].clamp(max=-1) + 1, y[1].clamp(min=1) - 1
    return torch.where(is_same, x[0] % by, low), torch.where(is_same, x[1] % by, high)


def _bits(op: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Interval, Interval], Interval]:
    """Bitwise operations: exact of single numbers; of numbers from 0 on, below the next power of 2."""

    def found(x: Interval, y: Interval) -> Interval:
        is_point = (x[0] == x[1]) & (y[0] == y[1])
        exact = op(x[0], y[0])
        bound = torch.maximum(x[1], y[1]).clamp(min=0)
        for shift in (1, 2, 4, 8, 16, 32):
            bound = bound | bound >> shift
        is_positive = (x[0] >= 0) & (y[0] >= 0)
        low, high = _if(is_positive, torch.zeros_like(bound), bound)
        return torch.where(is_point, exact, low), torch.where(is_point, exact, high)

    return found


def _grown(function: Callable[[Tensor], Tensor]) -> Callable[[Interval], Interval]:
    """Of a function that never decreases."""
    return lambda x: (function(x[0]), function(x[1]))


def _div(x: Interval, y: Interval) -> Interval:
    low, high = _corners(torch.div, x, y)
    crosses = (y[0] <= 0) & (y[1] >= 0)
    return torch.where(crosses, torch.nan, low), torch.where(crosses, torch.nan, high)


def _one(x: Interval) -> Interval:
    """Of sin and cos."""
    unknown = ~(x[0].isfinite() & x[1].isfinite())
    return torch.where(unknown, torch.nan, -1.0), torch.where(unknown, torch.nan, 1.0)


_COMPARISONS: dict[str, Callable[[Interval, Interval], Interval]] = {
    "lt": lambda x, y: (x[1] < y[0], ~(x[0] >= y[1])),
    "le": lambda x, y: (x[1] <= y[0], ~(x[0] > y[1])),
    "eq": _equal,
    "ne": lambda x, y: _not(_equal(x, y)),
}
_LOGIC: dict[str, Callable[..., Interval]] = {
    "and": lambda x, y: (x[0] & y[0], x[1] & y[1]),
    "or": lambda x, y: (x[0] | y[0], x[1] | y[1]),
    "xor": _xor,
    "not": _not,
}
_BOTH: dict[str, Callable[..., Interval]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": lambda x, y: _corners(torch.mul, x, y),
    "neg": lambda x: (-x[1], -x[0]),
    "abs": _abs,
    "minimum": lambda x, y: (torch.minimum(x[0], y[0]), torch.minimum(x[1], y[1])),
    "maximum": lambda x, y: (torch.maximum(x[0], y[0]), torch.maximum(x[1], y[1])),
}
_INTEGERS: dict[str, Callable[..., Interval]] = _BOTH | {
    "floordiv": _floordiv, "mod": _mod, "and": _bits(torch.bitwise_and), "or": _bits(torch.bitwise_or),
    "xor": _bits(torch.bitwise_xor), "not": _not,
    "shl": _shift("shl"), "shr": _shift("shr"),
    **{op: _held(op) for op in ("add", "sub", "mul", "neg", "abs")},
}  # fmt: skip
_FLOATS: dict[str, Callable[..., Interval]] = _BOTH | {
    "div": _div, "sin": _one, "cos": _one,
    **{name: _grown(getattr(torch, name)) for name in (
        "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sqrt", "erf", "atan", "asinh",
        "sinh", "floor", "ceil", "round", "trunc",
    )},
}  # fmt: skip
