"""Mask and score functions in the kernels: an expression, printed where a tile's scores are finished.

A node is computed as seldom as it may be. What depends on neither query nor key is one number a tile; what
depends on the query alone, a vector for each vector of queries, once a tile; what depends on the key alone,
one number a key. Only the rest is computed for each score. Numbers by themselves are 64 bits wide, in vectors
integers are 32 bits wide where those hold every value (`core.functions.widths`).

An index out of range reads some place of its tensor. If the score is visible, the host is told.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import llvmlite.ir as ir

from tilewise.core.functions.derivative import derivative
from tilewise.core.functions.expression import BOOL, FLOAT, FUNCTIONS, INT, LOGIC, Graph, decode
from tilewise.core.functions.tile_map import EMPTY, FULL
from tilewise.core.functions.widths import wide_integers
from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.elementary import elementary
from tilewise.cpu.dsl.lanes import any_lane
from tilewise.cpu.dsl.memory import Ptr, Rows
from tilewise.cpu.dsl.numerics import quotient
from tilewise.cpu.dsl.operations import OPERATIONS, converted, floor_quotient, is_invertible, power
from tilewise.cpu.dsl.vector import (
    I1,
    I32,
    I64,
    STORED,
    Operand,
    Scalar,
    Value,
    Var,
    as_int,
    builder,
    emitter,
    int32,
    iota,
    like,
    maximum,
    minimum,
    select,
    splat,
)
from tilewise.cpu.host.arguments import DIMENSION_BITS, INDEX_BITS
from tilewise.cpu.kernels.tiles import INF, Grid, Head, Scratch, Shape

Known = dict[tuple[Any, ...], Operand]


class Wrong(NamedTuple):
    """Where the index of a load is out of range: for one key r and one vector v of queries; None: for all."""

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


class KernelFunctions:
    """The functions of one kernel: their expression, and which tiles they leave empty, full or partial."""

    def __init__(self, shape: Shape, scratch: Scratch, with_slope: bool) -> None:
        self.functions = decode(shape.config.functions)
        self.graph, self.slope = self.functions.graph, None
        if with_slope and self.functions.score is not None:
            self.graph, slope, _ = derivative(self.functions)
            self.slope = self.graph.const(0.0) if slope is None else slope
        self.mask, self.score = self.functions.mask, self.functions.score
        self.has_map = bool(self.functions.hiding)
        roots = [n for n in (self.mask, self.score, self.slope) if n is not None]
        self.order = self.graph.reachable(roots)
        self.levels = _levels(self.graph)
        self.wide = wide_integers(self.graph, self.functions)
        self.places = scratch.rows(1, shape.lanes, "i64")  # of the numbers that a vector of loads reads
        self.slopes: Rows | None = None
        if self.slope is not None and self.graph.value(self.slope) != 1.0:
            self.slopes = scratch.rows(shape.block_k, shape.block_q)

    @functools.cache  # noqa: B019 - it goes with the kernel's builder
    def needed(self, root: int) -> list[int]:
        """What a node is computed from, and itself."""
        return [n for n in self.graph.reachable([root]) if self.graph.nodes[n].op != "const"]

    def map_row(self, head: Head, q0: Scalar) -> Ptr:
        """The kinds of the tiles that queries from q0 on are in."""
        args = head.args
        row = head.batch * args.map_b + head.head * args.map_h + as_int(q0) // args.map_q * args.map_i
        return args.ptr("tile_map", "u8")[row]

    def visible(self, head: Head, q0: Scalar, j0: Scalar, first: Scalar, n: Scalar) -> tuple[Value, Value]:
        """The keys j0 + [first, n) without those at both ends that are in empty tiles; none: n <= first."""
        args, row = head.args, self.map_row(head, q0)
        size = as_int(1) << args.map_k
        begin, end = Var(as_int(n)), Var(minimum(as_int(first), as_int(n)))
        start, stop = as_int(j0) + first, as_int(j0) + maximum(as_int(first), as_int(n))
        for c in loop(start >> args.map_k, (stop + (size - 1)) >> args.map_k):
            with when(row[c].load() > EMPTY):
                key = (c << args.map_k) - j0
                begin.set(minimum(begin, maximum(as_int(first), key)))
                end.set(minimum(as_int(n), key + size))
        return Value(begin.raw), Value(end.raw)

    def ticket(self, head: Head, q0: Scalar, block: Value, blocks: tuple[Value, Value]) -> tuple[Value, ...]:
        """Of the first to last `blocks` of keys, as `visits` counts them: whether this one is visited by the
        tile of queries at q0, how many before it are, and whether none behind it is."""
        args = head.args
        row = (
            head.batch * args.visits_b + head.head * args.visits_h + as_int(q0) // args.map_q * args.visits_i
        )
        visits = args.ptr("visits", "u8")[row]
        before, behind = Var(as_int(0)), Var(as_int(0))
        for total, start, stop in ((before, blocks[0], block), (behind, block + 1, blocks[1] + 1)):
            for n in loop(start, stop):
                total.set(total + visits[n].load())
        return visits[block].load() > 0, Value(before.raw), behind.equals(0)

    def at(self, shape: Shape, head: Head, q0: Scalar, j0: Scalar) -> TileFunctions:
        return TileFunctions(self, shape, head, q0, j0)


def _levels(graph: Graph) -> list[frozenset[str]]:
    """Of each node, which of i and j it depends on; a score is of both."""
    leaves = {"i": "i", "j": "j", "score": "ij"}
    levels: list[frozenset[str]] = []
    for node in graph.nodes:
        levels.append(frozenset(leaves.get(node.op, "")).union(*(levels[a] for a in node.args)))
    return levels


class TileFunctions:
    """The functions at a tile of queries from q0 on, and keys from j0 on."""

    def __init__(self, owner: KernelFunctions, shape: Shape, head: Head, q0: Scalar, j0: Scalar) -> None:
        self.owner, self.shape, self.head, self.j0 = owner, shape, head, j0
        self.row = owner.map_row(head, q0) if owner.has_map else None
        self.queries = [iota(shape.lanes) + (int32(as_int(q0) + c)) for c in shape.columns()]
        self.last_query = int32(head.seqlen_q - 1)
        self.tile = Scope(self, {}, [])
        for n in owner.order:
            if "j" not in owner.levels[n] and owner.graph.nodes[n].op != "const":
                for v in range(shape.vectors) if "i" in owner.levels[n] else (0,):
                    self.tile.at(n, 0, v)
        self.any_wrong = _any(self.tile.wrong)

    def kind(self, j: Scalar) -> Value:
        """EMPTY, PARTIAL or FULL: of the tile of the key j0 + j."""
        assert self.row is not None
        return self.row[(as_int(self.j0) + j) >> self.head.args.map_k].load()

    def is_partial(self, j: Scalar) -> Value:
        return self.kind(j) < FULL

    def scope(self, j: Scalar) -> Scope:
        """To compute the functions of the keys from j0 + j on; those behind the last repeat it."""
        keys = [
            minimum(as_int(self.j0) + (as_int(j) + r), self.head.seqlen_k - 1) for r in range(self.shape.rows)
        ]
        return Scope(self, dict(self.tile.known), [], keys)

    def apply_score(self, s: Grid, j: Scalar) -> Scope:
        """The score function on scores, in place; its slope, if one is wanted, into `slopes`."""
        owner, scope = self.owner, self.scope(j)
        assert owner.score is not None
        for r, row in enumerate(s):
            for v, x in enumerate(row):
                scope.scores[r, v] = Value(x.raw)
                x.set(scope.vector(owner.score, r, v, FLOAT))
                if owner.slopes is not None:
                    assert owner.slope is not None
                    slope = scope.vector(owner.slope, r, v, FLOAT)
                    owner.slopes.at(j, v * self.shape.lanes)[r, 0].store(slope)
        return scope

    def hide(self, s: Grid, j: Scalar) -> Scope:
        """-inf where the mask function says so."""
        scope = self.scope(j)
        assert self.owner.mask is not None
        for r, row in enumerate(s):
            for v, x in enumerate(row):
                x.set(select(scope.vector(self.owner.mask, r, v, BOOL), x, -INF))
        return scope

    def report(self, s: Grid, scope: Scope) -> None:
        """Tell the host where a visible score has read out of range."""
        wrong = [*self.tile.wrong, *scope.wrong]
        if not wrong:
            return
        found = _any(scope.wrong)
        flags = [flag for flag in (self.any_wrong, found) if flag is not None]
        with when(functools.reduce(operator.or_, flags)):
            for load in wrong:
                self._report(s, load)

    def _report(self, s: Grid, load: Wrong) -> None:
        rows = range(len(s)) if load.r is None else (load.r,)
        for r in rows:
            for v in range(self.shape.vectors) if load.v is None else (load.v,):
                score = Value(s[r][v].raw)
                hidden = score.equals(-INF)
                found = load.found if load.v is not None else splat(load.found, self.shape.lanes)
                exists = self.queries[v] <= splat(self.last_query, self.shape.lanes)
                where = found & exists & (hidden ^ like(1, hidden))
                with when(any_lane(where)):
                    self.head.args.wrong_index.store(load.word(where))


def _any(wrong: list[Wrong]) -> Value | None:
    """Whether one of them is, as one bit."""
    bits = [Value(load.found.raw) if load.v is None else any_lane(load.found) for load in wrong]
    return functools.reduce(operator.or_, bits) if bits else None


class Scope:
    """Values of nodes that are known at one point of the kernel, and the way to more.

    A value is a number where it is the same for all queries, else a vector of them. Keys are counted by r,
    vectors of queries by v.
    """

    def __init__(
        self, tile: TileFunctions, known: Known, wrong: list[Wrong], keys: list[Value] | None = None
    ):
        self.tile, self.owner, self.shape = tile, tile.owner, tile.shape
        self.graph, self.levels = tile.owner.graph, tile.owner.levels
        self.known, self.wrong, self.keys = known, wrong, keys or []
        self.scores: dict[tuple[int, int], Value] = {}

    def at(self, n: int, r: int, v: int) -> Operand:
        """The value of a node."""
        for m in self.owner.needed(n):
            place = self._place(m, r, v)
            if place not in self.known:
                self.known[place] = self._compute(m, r, v)
        return self.known[self._place(n, r, v)]

    def _place(self, n: int, r: int, v: int) -> tuple[int, int | None, int | None]:
        return n, (r if "j" in self.levels[n] else None), (v if "i" in self.levels[n] else None)

    def vector(self, n: int, r: int, v: int, kind: str, bits: int = 32) -> Value:
        """The value of a node as a vector of a kind; `bits`: of integers."""
        return self._operand(n, r, v, kind, True, bits)

    def _operand(self, n: int, r: int, v: int, kind: str, is_vector: bool, bits: int = 64) -> Value:
        type_ = self._type(kind, is_vector, bits)
        constant = self.graph.value(n)
        if constant is not None:
            return Value(like(_python(constant, kind), Value(ir.Constant(type_, ir.Undefined))).raw)
        place = (*self._place(n, r, v), kind, is_vector, bits)
        if place not in self.known:
            x = converted(self.at(n, r, v), self._type(kind, "i" in self.levels[n], bits))
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
        node, is_vector, head = self.graph.nodes[n], "i" in self.levels[n], self.tile.head
        match node.op:
            case "score":
                return self.scores[r, v]
            case "b":
                return head.batch
            case "h":
                return head.head
            case "i":
                return minimum(self.tile.queries[v], splat(self.tile.last_query, self.shape.lanes))
            case "j":
                return self.keys[r]
            case "load":
                return self._load(n, r, v)
        bits = self._bits(n, is_vector)
        kinds = [self._argument_kind(n, place) for place in range(len(node.args))]
        args = [self._operand(a, r, v, kind, is_vector, bits) for a, kind in zip(node.args, kinds)]
        if node.op in (BOOL, INT, FLOAT):
            found: Operand = converted(args[0], self._type(node.op, is_vector, bits))
        elif node.op == "pow":
            found = power(args[0], self.graph.value(node.args[1]))
        elif node.op in FUNCTIONS:
            found = elementary(node.op, args[0], self.shape.exp_degree)
        elif node.op in ("floordiv", "mod", "div"):
            found = self._quotient(n, args)
        else:
            found = OPERATIONS[node.op](*args)
        return self._narrowed(found, n, is_vector)

    def _argument_kind(self, n: int, place: int) -> str:
        """What an argument is converted to before the operation."""
        node = self.graph.nodes[n]
        kinds = {self.graph.nodes[a].kind for a in node.args}
        if node.op in (BOOL, INT, FLOAT):
            return self.graph.nodes[node.args[place]].kind
        if node.op == "where":
            return BOOL if place == 0 else node.kind
        if node.op == "pow":
            return node.kind
        if FLOAT in kinds or node.kind == FLOAT:
            return FLOAT
        return BOOL if kinds == {BOOL} and node.op in LOGIC and node.kind == BOOL else INT

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
            return quotient(a, b, like(1 / constant, a)) if is_invertible(constant) else a / b
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
        node, is_vector = self.graph.nodes[n], "i" in self.levels[n]
        kind = self.owner.functions.tensors[node.value].kind
        begin, sizes = self._layout(node.value)
        place: Operand = begin
        for axis, (argument, size) in enumerate(zip(node.args, sizes)):
            has_i = "i" in self.levels[argument]
            given: Operand = self._operand(argument, r, v, INT, has_i, 64)
            index = select(given < 0, given + size, given)
            wrong = (index < 0) | (index >= size)
            self.wrong.append(Wrong(n, axis, *self._place(argument, r, v)[1:], given, wrong))
            index = select(wrong, 0, index)
            for later in sizes[axis + 1 :]:
                index = index * later
            place = index + place
        name, stored = ("captured_floats", self.shape.kind) if kind == FLOAT else ("captured_integers", "i64")
        source = self.tile.head.args.ptr(name, stored)
        found = self._gathered(source, place) if is_vector else source[place].load()
        return converted(found, self._type(BOOL, is_vector, 64)) if kind == BOOL else found

    def _layout(self, tensor: int) -> tuple[Value, list[Value]]:
        """Where a captured tensor begins in its buffer, and its sizes."""
        tensors = self.owner.functions.tensors
        first = sum(1 + t.ndim for t in tensors[:tensor])
        layout = self.tile.head.args.ptr("captured_layout", "i64")
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


def _python(constant: Any, kind: str) -> Any:
    return {BOOL: bool, INT: int, FLOAT: float}[kind](constant) if kind != BOOL else int(bool(constant))
