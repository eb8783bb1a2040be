"""Values of an expression's nodes at one point of a kernel, printed as machine code where they are asked for.

Lanes hold queries, or keys where queries are few; the other one is a number. A node is computed as seldom as
it may be. Numbers by themselves are 64 bits wide, in vectors integers are 32 bits wide where those hold every
value (`core.functions.interval`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.ir as ir

from tilewise.core.functions.captured import wide_integers
from tilewise.core.functions.expression import BOOL, FLOAT, FUNCTIONS, INT, Functions, Graph
from tilewise.core.functions.operations.elementary import formulas
from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.elementary import elementary
from tilewise.cpu.dsl.lanes import across, any_lane, first_lane
from tilewise.cpu.dsl.memory import Ptr
from tilewise.cpu.dsl.numerics import quotient
from tilewise.cpu.dsl.operations import OPERATIONS, floor_quotient, is_invertible, power
from tilewise.cpu.dsl.vector import (
    I1,
    I32,
    I64,
    STORED,
    Operand,
    Value,
    as_kind,
    builder,
    converted,
    emitter,
    like,
    select,
    splat,
)
from tilewise.cpu.host.arguments import DIMENSION_BITS, INDEX_BITS
from tilewise.cpu.kernels.common.tiles import Head, Scratch, Shape

Known = dict[tuple[Any, ...], Operand]
LANE, LINE = "lane", "line"
_NUMBERS: dict[str, Callable[[Any], Any]] = {BOOL: lambda x: int(bool(x)), INT: int, FLOAT: float}


class Expression:
    """What a kernel computes of its functions: the nodes that `roots` need. `lane`: "i" or "j", in lanes."""

    def __init__(
        self, shape: Shape, scratch: Scratch, functions: Functions, graph: Graph, roots: list[int], lane: str
    ) -> None:
        self.functions, self.graph, self.formulas = functions, graph, formulas(graph)
        self.order = self.graph.reachable(roots)
        self.levels = levels_of(graph, lane)  # of each node, which of LANE and LINE it depends on
        self.wide = wide_integers(graph, functions)
        self.places = scratch.rows(1, shape.lanes, "i64")  # of the numbers that a vector of loads reads
        self.terms = scratch.rows(1, shape.lanes)  # what is added to these
        self.needed = functools.cache(self._needed)  # which goes with the kernel's builder

    def _needed(self, root: int) -> list[int]:
        """What a node is computed from, and itself."""
        return [n for n in self.graph.reachable([root]) if self.graph.nodes[n].op != "const"]


def levels_of(graph: Graph, lane: str) -> list[frozenset[str]]:
    """Of each node, which of LANE and LINE it depends on; `lane`: "i" or "j", which is in lanes."""
    leaves = {"i": [LINE], "j": [LINE], "score": [LANE, LINE]} | {lane: [LANE]}
    levels: list[frozenset[str]] = []
    for node in graph.nodes:
        levels.append(frozenset(leaves.get(node.op, ())).union(*(levels[a] for a in node.args)))
    return levels


class Wrong(NamedTuple):
    """Where the index of a load is out of range: for one line r and one vector v; None: for all."""

    load: int
    dimension: int
    r: int | None
    v: int | None
    given: Operand
    found: Operand

    def word(self, where: Value) -> Value:
        """What the host is told; `where`: which lanes it is about."""
        index = self.given
        if self.v is not None:
            bits = builder().bitcast(where.raw, ir.IntType(where.type.count))
            no = ir.Constant(I1, 0)
            lane = emitter().intrinsic("llvm.cttz.i64", I64, builder().zext(bits, I64), no)
            index = Value(builder().extract_element(index.raw, builder().trunc(lane, I32)))
        place = ((self.load + 1) << DIMENSION_BITS | self.dimension) << INDEX_BITS
        return (index & ((1 << INDEX_BITS) - 1)) | place


class Scope:
    """Values of nodes that are known at one point of the kernel, and the way to more.

    A value is a number where it is the same in all lanes, else a vector. r counts lines, v vectors.

    Args:
        head: whose functions they are.
        indices: of i and j, the vectors of the one in lanes and the numbers of the other.
        known: values of an outer scope, which this one adds to.
        wrong: takes the loads whose indices may be out of range.
    """

    def __init__(
        self, owner: Expression, shape: Shape, head: Head, indices: dict[str, list[Value]], known: Known,
        wrong: list[Wrong],
    ) -> None:  # fmt: skip
        self.owner, self.shape, self.head, self.indices = owner, shape, head, indices
        self.graph, self.levels = owner.graph, owner.levels
        self.known, self.wrong = known, wrong
        self.scores: dict[tuple[int, int], Value] = {}

    def inner(self, **indices: list[Value]) -> Scope:
        """The same point where more is known, or in a branch: what is computed is of no use behind it."""
        known = dict(self.known)
        return Scope(self.owner, self.shape, self.head, self.indices | indices, known, [])

    def compute_early(self, later: str, vectors: int) -> None:
        """All that does not depend on what is known later: LANE or LINE."""
        for n in self.owner.order:
            if later not in self.levels[n] and self.graph.nodes[n].op != "const":
                for v in range(vectors) if LANE in self.levels[n] else (0,):
                    self.at(n, 0, v)

    def at(self, n: int, r: int, v: int) -> Operand:
        """The value of a node."""
        for m in self.owner.needed(n):
            place = self._place(m, r, v)
            if place not in self.known:
                self.known[place] = self._compute(m, r, v)
        return self.known[self._place(n, r, v)]

    def _place(self, n: int, r: int, v: int) -> tuple[int, int | None, int | None]:
        return n, (r if LINE in self.levels[n] else None), (v if LANE in self.levels[n] else None)

    def vector(self, n: int, r: int, v: int, kind: str) -> Value:
        """The value of a node as a vector of a kind, BOOL or FLOAT."""
        return self._operand(n, r, v, kind, True, 32)

    def _operand(self, n: int, r: int, v: int, kind: str, is_vector: bool, bits: int) -> Value:
        type_ = self._type(kind, is_vector, bits)
        constant = self.graph.value(n)
        if constant is not None:
            return Value(like(_NUMBERS[kind](constant), Value(ir.Constant(type_, ir.Undefined))).raw)
        place = (*self._place(n, r, v), kind, is_vector, bits)
        if place not in self.known:
            x = converted(self.at(n, r, v), self._type(kind, LANE in self.levels[n], bits))
            x = splat(x, self.shape.lanes) if is_vector and not isinstance(x.type, ir.VectorType) else x
            self.known[place] = x
        return Value(self.known[place].raw)

    def _type(self, kind: str, is_vector: bool, bits: int) -> ir.Type:
        element = {BOOL: I1, INT: ir.IntType(bits), FLOAT: STORED[self.shape.kind]}[kind]
        return ir.VectorType(element, self.shape.lanes) if is_vector else element

    def _bits(self, n: int, is_vector: bool) -> int:
        """Of the integers that a node is computed in: enough for its arguments too."""
        node = self.graph.nodes[n]
        is_wide = node.op in ("shl", "shr") or any(m in self.owner.wide for m in (n, *node.args))
        return 64 if is_wide or not is_vector else 32

    def _compute(self, n: int, r: int, v: int) -> Operand:
        node, is_vector, head = self.graph.nodes[n], LANE in self.levels[n], self.head
        match node.op:
            case "score":
                return self.scores[r, v]
            case "b":
                return head.batch
            case "h":
                return head.head
            case "i" | "j":
                return self.indices[node.op][v if is_vector else r]
            case "load":
                return self._load(n, r, v)
            case "is_wrong":
                return self._is_wrong(node.args[0], r, v)
        if n in self.owner.formulas:
            found: Operand = self._operand(self.owner.formulas[n], r, v, node.kind, is_vector, 64)
            return self._narrowed(found, n, is_vector)
        bits = self._bits(n, is_vector)
        kinds = zip(node.args, self.graph.argument_kinds(n))
        args = [self._operand(a, r, v, kind, is_vector, bits) for a, kind in kinds]
        if node.op in (BOOL, INT, FLOAT):
            found = args[0]
        elif node.op == "pow":
            found = power(args[0], self.graph.value(node.args[1]))
        elif node.op in FUNCTIONS:
            found = elementary(node.op, args[0], self.shape.exp_degree)
        elif node.op in ("floordiv", "mod", "div"):
            found = self._quotient(n, args)
        else:
            found = OPERATIONS[node.op](*args)
        return self._narrowed(found, n, is_vector)

    def _narrowed(self, x: Operand, n: int, is_vector: bool) -> Operand:
        """A node's integers, in vectors, as wide as its own values need."""
        if self.graph.nodes[n].kind != INT or not is_vector:
            return x
        bits = 64 if n in self.owner.wide else 32
        return converted(x, self._type(INT, True, bits))

    def _quotient(self, n: int, args: list[Value]) -> Operand:
        node = self.graph.nodes[n]
        a, b = args
        constant = self.graph.value(node.args[1])
        if node.op == "div":
            return quotient(a, b, 1 / constant) if is_invertible(constant) else a / b
        if constant is None:
            b = select(b.equals(0), 1, b)
        if isinstance(constant, int) and constant > 0 and constant & (constant - 1) == 0:
            if node.op == "mod":
                return a & (constant - 1)
            return Value(builder().ashr(a.raw, like(constant.bit_length() - 1, a).raw))
        found = floor_quotient(a, b, constant is not None)
        return found if node.op == "floordiv" else a - found * b

    def _load(self, n: int, r: int, v: int) -> Operand:
        """A captured number, or those of a vector of places."""
        kind, is_vector = self.owner.functions.tensors[self.graph.nodes[n].value].kind, LANE in self.levels[n]
        name, stored = ("captured_floats", self.shape.kind) if kind == FLOAT else ("captured_integers", "i64")
        source, place = self.head.args.ptr(name, stored), self._position(n, r, v)
        found = self._gathered(source, place) if is_vector else source[place].load()
        return converted(found, self._type(BOOL, is_vector, 64)) if kind == BOOL else found

    def add_at(self, n: int, r: int, v: int, terms: Value, total: Ptr) -> None:
        """Add a vector of terms to the numbers that load n reads, in the order of the lanes."""
        place = self._position(n, r, v)
        if LANE not in self.levels[n]:
            cell = total[place]
            cell.store(cell.load() + as_kind(first_lane(across(terms, operator.add)), "f64"))
            return
        self.owner.places[0, 0].store(place)
        self.owner.terms[0, 0].store(terms)
        for lane in loop(0, self.shape.lanes):
            cell = total[self.owner.places[0, lane].load()]
            cell.store(cell.load() + as_kind(self.owner.terms[0, lane].load(), "f64"))

    def _position(self, n: int, r: int, v: int) -> Operand:
        """Where in its buffer load n reads."""
        node = self.graph.nodes[n]
        begin, sizes = self._layout(node.value)
        place: Operand = begin
        for axis, (argument, size) in enumerate(zip(node.args, sizes)):
            at = ("index", n, axis, *self._place(argument, r, v)[1:])
            if at not in self.known:  # an index that several scores share is looked at once
                self.known[at] = self._index(n, axis, r, v, size)
            index: Operand = self.known[at]
            for later in sizes[axis + 1 :]:
                index = index * later
            place = index + place
        return place

    def _index(self, n: int, axis: int, r: int, v: int, size: Value) -> Operand:
        """An index of load n, counted from the start of its axis; 0 if it is wrong."""
        argument = self.graph.nodes[n].args[axis]
        given: Operand = self._operand(argument, r, v, INT, LANE in self.levels[argument], 64)
        index = select(given < 0, given + size, given)
        wrong = (index < 0) | (index >= size)
        place = self._place(argument, r, v)[1:]
        self.known["wrong", n, axis, *place] = wrong
        self.wrong.append(Wrong(n, axis, *place, given, wrong))
        return select(wrong, 0, index)

    def _is_wrong(self, n: int, r: int, v: int) -> Operand:
        """Whether an index of load n, which is known, is out of range."""
        found = []
        for axis, argument in enumerate(self.graph.nodes[n].args):
            one = self.known["wrong", n, axis, *self._place(argument, r, v)[1:]]
            is_whole = LANE in self.levels[argument] or LANE not in self.levels[n]
            found.append(one if is_whole else splat(one, self.shape.lanes))
        return functools.reduce(operator.or_, found)

    def _layout(self, tensor: int) -> tuple[Value, list[Value]]:
        """Where a captured tensor begins in its buffer, and its sizes."""
        tensors = self.owner.functions.tensors
        first = sum(1 + t.ndim for t in tensors[:tensor])
        layout = self.head.args.ptr("captured_layout", "i64")
        numbers = [layout[first + n].load() for n in range(1 + tensors[tensor].ndim)]
        return numbers[0], numbers[1:]

    def _gathered(self, source: Ptr, place: Operand) -> Value:
        """A vector of loads, one by one: places go through memory, from where single ones are read again."""
        lanes = self.shape.lanes
        self.owner.places[0, 0].store(place)
        type_ = ir.VectorType(STORED[source.kind], lanes)
        found: ir.Value = ir.Constant(type_, ir.Undefined)
        for lane in range(lanes):
            number = source[self.owner.places[0, lane].load()].load()
            found = builder().insert_element(found, number.raw, ir.Constant(I32, lane))
        return Value(found)


def any_of(wrong: list[Wrong]) -> Value | None:
    """Whether one of them is, as one bit."""
    bits = [Value(load.found.raw) if load.v is None else any_lane(load.found) for load in wrong]
    return functools.reduce(operator.or_, bits) if bits else None


def report(head: Head, load: Wrong, visible: Value) -> None:
    """Tell the host of a load that is wrong for a visible score; `visible`: of each lane."""
    found = load.found if load.v is not None else splat(load.found, visible.type.count)
    where = found & visible
    with when(any_lane(where)):
        head.args.wrong_index.store(load.word(where))
