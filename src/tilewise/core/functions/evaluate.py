"""An expression in PyTorch operations, element by element of tensors that broadcast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.functions.expression import (
    BOOL,
    FLOAT,
    FUNCTIONS,
    INT,
    OPERATORS,
    Captured,
    Functions,
    Graph,
)
from tilewise.core.signature import contiguous_strides


class Buffers(NamedTuple):
    """The captured tensors of a call, one behind the other, as kernels read them.

    `layout` is on the CPU: of each tensor, in order, where it begins in its buffer and its shape.
    """

    floats: Tensor | None  # (elements,), of the scores' dtype
    integers: Tensor | None  # (elements,) int64, of integers and booleans
    layout: Tensor | None  # (numbers,) int64

    def places(self, tensors: Iterable[Captured]) -> list[tuple[int, tuple[int, ...]]]:
        """Of each captured tensor, where it begins and its shape."""
        numbers = [] if self.layout is None else self.layout.tolist()
        places, at = [], 0
        for t in tensors:
            places.append((numbers[at], tuple(numbers[at + 1 : at + 1 + t.ndim])))
            at += 1 + t.ndim
        return places


class Values(NamedTuple):
    """What the leaves of an expression are: tensors that broadcast to one shape."""

    score: Tensor | None
    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    dtype: torch.dtype  # of scores
    dot_score: Tensor | None = None


class Evaluator:
    """Evaluates nodes of one graph at some values, each node once."""

    def __init__(
        self, graph: Graph, functions: Functions, buffers: Buffers, values: Values,
        dot_floats: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.functions, self.values = graph, functions, values
        self.buffers, self.dot_floats = buffers, dot_floats
        self.places = buffers.places(functions.tensors)
        self.known: dict[int, Any] = {}
        self.positions: dict[int, tuple[Tensor, Tensor | None]] = {}

    def __call__(self, root: int) -> Tensor:
        for n in self.graph.reachable([root]):
            if n not in self.known:
                self.known[n] = self._compute(n)
        return self._tensor(root)

    def _tensor(self, n: int) -> Tensor:
        found, kind = self.known[n], self.graph.nodes[n].kind
        if isinstance(found, Tensor):
            return found
        return torch.full((), found, dtype=self._dtype(kind), device=self.values.i.device)

    def _compute(self, n: int) -> Any:
        node = self.graph.nodes[n]
        if node.op == "const":
            return node.value
        if node.op in ("load", "dot_load"):
            return self._load(n)
        if node.op == "is_wrong":
            return self.is_wrong(node.args[0])
        if not node.args:
            return getattr(self.values, node.op)
        if node.op in (BOOL, INT, FLOAT):
            return self._tensor(node.args[0]).to(self._dtype(node.op))
        if node.op == "where":
            condition, x, y = (self._tensor(a) for a in node.args)
            return torch.where(condition, x, y).to(self._dtype(node.kind))
        args = [self.known[a] for a in node.args]
        if not any(isinstance(a, Tensor) for a in args):
            args[0] = self._tensor(node.args[0])
        kinds = {self.graph.nodes[a].kind for a in node.args}
        if FLOAT in kinds or node.kind == FLOAT:  # a float without dimensions gives way to integers with
            args = [a.to(self.values.dtype) if isinstance(a, Tensor) else a for a in args]
        elif node.op in ARITHMETIC:
            args = [a.long() if isinstance(a, Tensor) else int(a) for a in args]
            if node.op in ("floordiv", "mod"):
                args[1] = _divisor(args[1])
        return OPERATIONS[node.op](*args)

    def _dtype(self, kind: str) -> torch.dtype:
        return {BOOL: torch.bool, INT: torch.int64, FLOAT: self.values.dtype}[kind]

    def _load(self, n: int) -> Tensor:
        node = self.graph.nodes[n]
        kind = self.functions.tensors[node.value].kind
        buffer = self.buffers.floats if kind == FLOAT else self.buffers.integers
        if node.op == "dot_load":
            buffer = self.dot_floats
        assert buffer is not None
        found = buffer[self.position(n)]
        return found.bool() if kind == BOOL else found

    def position(self, n: int) -> Tensor:
        """Where in its buffer a load reads; a place of its own tensor, even where an index is wrong."""
        return self._position(n)[0]

    def is_wrong(self, n: int) -> Tensor | None:
        """Where an index of a load is out of range."""
        return self._position(n)[1]

    def _position(self, n: int) -> tuple[Tensor, Tensor | None]:
        if n not in self.positions:
            node = self.graph.nodes[n]
            for argument in node.args:
                self(argument)
            begin, shape = self.places[node.value]
            position: Any = begin
            wrong = None
            for argument, size, step in zip(node.args, shape, contiguous_strides(shape)):
                index = self._tensor(argument).long()
                index = torch.where(index < 0, index + size, index)
                is_outside = (index < 0) | (index >= size)
                wrong = is_outside if wrong is None else wrong | is_outside
                position = position + index.clamp(0, max(0, size - 1)) * step
            if not isinstance(position, Tensor):
                position = torch.full((), position, dtype=torch.int64, device=self.values.i.device)
            self.positions[n] = position, wrong
        return self.positions[n]


def times(g: Tensor, slope: Tensor) -> Tensor:
    """g * slope; 0 where g is, as at hidden keys, whatever the slope there."""
    return torch.where(g == 0, 0.0, g * slope)


def add_at(total: Tensor, position: Tensor, terms: Tensor) -> None:
    """total[position] += terms, which position broadcasts to; the same bits in every run."""
    position = position.view((1,) * (terms.ndim - position.ndim) + position.shape)
    shared = [d for d in range(terms.ndim) if position.shape[d] == 1 != terms.shape[d]]
    terms = terms.sum(shared, keepdim=True, dtype=total.dtype) if shared else terms.to(total.dtype)
    total.index_put_((position.expand(terms.shape),), terms, accumulate=True)


def minimum_of(a: Any, b: Any) -> Tensor:
    return a.clamp(max=b) if isinstance(a, Tensor) else b.clamp(max=a)


def maximum_of(a: Any, b: Any) -> Tensor:
    return a.clamp(min=b) if isinstance(a, Tensor) else b.clamp(min=a)


def fmod_of(a: Any, b: Any) -> Tensor:
    return torch.fmod(a if isinstance(a, Tensor) else torch.full_like(b, a), b)


def range_extremes(
    table: Tensor, others: list[Tensor], first: Tensor, last: Tensor, runs: list[int]
) -> tuple[Tensor, Tensor]:
    """Of table[*others, first : last + 1], by the extremes of runs of 1, 2, 4, ... numbers.

    A range is covered by the longest run that fits, from its start and from its end; `runs` are those.
    """
    least = greatest = table
    widths = last - first + 1
    shape = torch.broadcast_tensors(first, *others)[0].shape  # broadcast_shapes imports SymPy
    low = torch.zeros(shape, dtype=table.dtype, device=table.device)
    high, run = low.clone(), 1
    while run <= runs[-1]:
        if run in runs:
            fits = (widths >= run) & (widths < 2 * run)
            ends = [
                (*others, x.clamp(max=least.shape[-1] - 1)) for x in (first, (last - run + 1).clamp(min=0))
            ]
            low = torch.where(fits, torch.minimum(least[ends[0]], least[ends[1]]), low)
            high = torch.where(fits, torch.maximum(greatest[ends[0]], greatest[ends[1]]), high)
        if least.shape[-1] > run:
            least = torch.minimum(least[..., :-run], least[..., run:])
            greatest = torch.maximum(greatest[..., :-run], greatest[..., run:])
        run *= 2
    return low, high


def _divisor(b: Any) -> Any:
    """An integer divisor; 1 in the place of 0, which would end the program where no key is visible too."""
    return torch.where(b == 0, 1, b) if isinstance(b, Tensor) else b


OPERATIONS = OPERATORS | {"minimum": minimum_of, "maximum": maximum_of, "fmod": fmod_of}
OPERATIONS |= {name: getattr(torch.special if name == "erfcx" else torch, name) for name in FUNCTIONS}
ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod", "pow", "neg", "abs", "minimum", "maximum")
