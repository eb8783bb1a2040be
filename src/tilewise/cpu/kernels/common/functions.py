"""Mask and score functions in the kernels: an expression, printed where scores are finished.

Tiles have queries in lanes (`TileFunctions`), a few queries have keys there (`RowFunctions`). What depends on
neither query nor key is computed once, what depends on one of the two once for that; only the rest for each
score (`function_scope.py`).

An index out of range reads some place of its tensor. If the score is visible, or may be but for what is
read there, the host is told.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from tilewise.core.functions.captured import doubt
from tilewise.core.functions.derivative import derivative
from tilewise.core.functions.expression import BOOL, FLOAT, decode
from tilewise.core.functions.tile_map import EMPTY, FULL
from tilewise.cpu.dsl.control import loop, when
from tilewise.cpu.dsl.lanes import any_lane
from tilewise.cpu.dsl.memory import Ptr, Rows
from tilewise.cpu.dsl.vector import Scalar, Value, Var, as_int, count_from, int32, maximum, minimum, select
from tilewise.cpu.kernels.common.function_scope import LANE, LINE, Expression, Scope, any_of, report
from tilewise.cpu.kernels.common.tiles import INF, Grid, Head, Scratch, Shape

Visible = Callable[[int, int], Value]  # of line r and vector v, what each lane sees


class KernelFunctions(Expression):
    """The functions of one kernel: their expression, and which tiles they leave empty, full or partial.

    `lane`: what lanes hold, "i" (queries, in tiles) or "j" (keys, of few queries).
    """

    def __init__(self, shape: Shape, scratch: Scratch, with_slope: bool = False, lane: str = "i") -> None:
        functions = decode(shape.config.functions)
        graph, self.slope = functions.graph, None
        self.load_slopes: dict[int, int] = {}  # of loads whose gradient is wanted: d score / d load
        if with_slope and functions.score is not None:
            graph, _, slope, loads = derivative(functions)
            self.slope = graph.const(0.0) if slope is None else slope
            tensors, nodes = functions.tensors, graph.nodes
            self.load_slopes = {n: g for n, g in loads.items() if tensors[nodes[n].value].wants_grad}
        self.mask, self.score = functions.mask, functions.score
        graph = graph.copy()
        every = {n for n, node in enumerate(graph.nodes) if node.op == "load"}
        # Where the mask, and a score that may be visible, depend on what wrong indices read.
        self.unsure_mask, self.unsure_score = (
            None if root is None else doubt(graph, root, every) for root in (self.mask, self.score)
        )
        if self.mask is not None and self.unsure_score is not None:
            seen = self.mask if self.unsure_mask is None else graph.add("or", self.mask, self.unsure_mask)
            self.unsure_score = graph.add("and", self.unsure_score, seen)
        self.has_map = bool(functions.hiding)
        roots = [n for n in (self.mask, self.score, self.slope, *self.load_slopes.values()) if n is not None]
        super().__init__(shape, scratch, functions, graph, roots, lane)
        kept = [g for g in sorted(set(self.load_slopes.values())) if self.graph.value(g) is None]
        if self.slope is not None and self.graph.value(self.slope) != 1.0:
            kept.insert(0, self.slope)
        # Slopes of a tile's scores, but for those of loads that are one number.
        self.kept = {g: scratch.rows(shape.block_k, shape.block_q) for g in dict.fromkeys(kept)}
        self.slopes = None if self.slope is None else self.kept.get(self.slope)

    def map_row(self, head: Head, name: str, q0: Scalar) -> Ptr:
        """Of `map`, the kinds of tiles, or of `visits`: the row that queries from q0 on are in."""
        args = head.args
        row = head.batch * getattr(args, f"{name}_b") + head.head * getattr(args, f"{name}_h")
        row = row + as_int(q0) // args.map_q * getattr(args, f"{name}_i")
        return args.ptr(name, "u8")[row]

    def visible(self, head: Head, q0: Scalar, j0: Scalar, first: Scalar, n: Scalar) -> tuple[Value, Value]:
        """The keys j0 + [first, n) without those at both ends that are in empty tiles; none: n <= first."""
        args, row = head.args, self.map_row(head, "map", q0)
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
        visits = self.map_row(head, "visits", q0)
        before, behind = Var(as_int(0)), Var(as_int(0))
        for total, start, stop in ((before, blocks[0], block), (behind, block + 1, blocks[1] + 1)):
            for n in loop(start, stop):
                total.set(total + visits[n].load())
        return visits[block].load() > 0, Value(before.raw), behind.equals(0)

    def at(self, shape: Shape, head: Head, q0: Scalar, j0: Scalar) -> TileFunctions:
        return TileFunctions(self, shape, head, q0, j0)


class TileFunctions:
    """The functions at a tile of queries from q0 on, and keys from j0 on."""

    def __init__(self, owner: KernelFunctions, shape: Shape, head: Head, q0: Scalar, j0: Scalar) -> None:
        self.owner, self.shape, self.head, self.j0 = owner, shape, head, j0
        self.row = owner.map_row(head, "map", q0) if owner.has_map else None
        queries = [count_from(as_int(q0) + c, shape.lanes) for c in shape.columns()]
        last = int32(head.seqlen_q - 1, shape.lanes)
        self.exists = [query <= last for query in queries]
        self.queries = [minimum(query, last) for query in queries]
        self.tile = Scope(owner, shape, head, {"i": self.queries}, {}, [])
        self.tile.compute_early(LINE, shape.vectors)
        self.any_wrong = any_of(self.tile.wrong)

    def kind(self, j: Scalar) -> Value:
        """EMPTY, PARTIAL or FULL: of the tile of the key j0 + j."""
        assert self.row is not None
        return self.row[(as_int(self.j0) + j) >> self.head.args.map_k].load()

    def is_partial(self, j: Scalar) -> Value:
        return self.kind(j) < FULL

    def scope(self, j: Scalar, count: int) -> Scope:
        """To compute the functions of `count` keys from j0 + j on; those behind the last repeat it."""
        keys = [minimum(as_int(self.j0) + (as_int(j) + r), self.head.seqlen_k - 1) for r in range(count)]
        return self.tile.inner(j=keys)

    def apply_score(self, s: Grid, j: Scalar) -> Scope:
        """The score function on scores, in place; slopes that are wanted into `kept`."""
        owner, scope = self.owner, self.scope(j, len(s))
        assert owner.score is not None
        for r, row in enumerate(s):
            for v, x in enumerate(row):
                scope.scores[r, v] = Value(x.raw)
                x.set(scope.vector(owner.score, r, v, FLOAT))
                for n, area in owner.kept.items():
                    area.at(j, v * self.shape.lanes)[r, 0].store(scope.vector(n, r, v, FLOAT))
        return scope

    def add_captured(self, ds: Rows, end: Value) -> None:
        """What the gradients ds of a tile's scores, [keys, queries], add to those of captured floats."""
        args, shape, owner = self.head.args, self.shape, self.owner
        slot = (self.head.batch * args.num_kv_heads + self.head.kv_head) * args.splits
        slot = slot + as_int(self.j0) // args.split_keys
        total = args.ptr("dcaptured", "f64")[slot * args.num_captured]
        for j in loop(0, end):
            scope = self.scope(j, 1)
            for v, c in enumerate(shape.columns()):
                g = ds[j, c].load(shape.lanes)
                with when(any_lane(g.equals(0.0) ^ 1)):
                    for n, slope in owner.load_slopes.items():
                        scope.inner().add_at(n, 0, v, self._through(g, slope, j, c), total)

    def _through(self, g: Value, slope: int, j: Scalar, c: int) -> Value:
        """g times a slope; 0 from 0, whatever that is."""
        constant = self.owner.graph.value(slope)
        if constant is not None:
            return g if constant == 1.0 else g * float(constant)
        return select(g.equals(0.0), 0.0, g * self.owner.kept[slope][j, c].load(self.shape.lanes))

    def hide(self, s: Grid, j: Scalar) -> Scope:
        """-inf where the mask function says so."""
        scope = self.scope(j, len(s))
        assert self.owner.mask is not None
        for r, row in enumerate(s):
            for v, x in enumerate(row):
                x.set(select(scope.vector(self.owner.mask, r, v, BOOL), x, -INF))
        return scope

    def report(self, s: Grid, scope: Scope, unsure: int | None, others: Visible) -> None:
        """Tell the host where a score that is visible, or may be, has read out of range.

        `unsure`: the node that says where it may be; `others`: what options let vector v of line r see.
        """
        wrong = [*self.tile.wrong, *scope.wrong]
        if not wrong:
            return
        found = any_of(scope.wrong)
        flags = [flag for flag in (self.any_wrong, found) if flag is not None]
        with when(functools.reduce(operator.or_, flags)):
            inner, seen = scope.inner(), {}
            for r in range(len(s)):
                for v in range(self.shape.vectors):
                    hidden = Value(s[r][v].raw).equals(-INF)
                    visible = hidden ^ 1
                    if unsure is not None:
                        visible = visible | (others(r, v) & inner.vector(unsure, r, v, BOOL))
                    seen[r, v] = self.exists[v] & visible
            for load in wrong:
                for r in range(len(s)) if load.r is None else (load.r,):
                    for v in range(self.shape.vectors) if load.v is None else (load.v,):
                        report(self.head, load, seen[r, v])


class RowFunctions:
    """The functions of query i of a head, keys in lanes."""

    def __init__(self, owner: KernelFunctions, shape: Shape, head: Head, i: Value) -> None:
        self.owner, self.head = owner, head
        self.row = Scope(owner, shape, head, {"i": [i]}, {}, [])
        self.row.compute_early(LANE, 1)
        self.last = int32(head.seqlen_k - 1, shape.lanes)

    def scope(self, key: Value) -> Scope:
        """To compute the functions at a vector of keys; those behind the last repeat it."""
        return self.row.inner(j=[minimum(key, self.last)])

    def visible(self, key: Value, exists: Value) -> Value:
        """Which of the keys the mask function shows; `exists`: those that count."""
        scope = self.scope(key)
        assert self.owner.mask is not None
        seen = scope.vector(self.owner.mask, 0, 0, BOOL) & exists
        self._report(scope, seen, self.owner.unsure_mask, exists)
        return seen

    def score(self, s: Value, key: Value, exists: Value) -> Value:
        """The score function of a vector of scores; `exists`: those that count."""
        scope = self.scope(key)
        assert self.owner.score is not None
        scope.scores[0, 0] = s
        found = scope.vector(self.owner.score, 0, 0, FLOAT)
        hidden = found.equals(-INF)
        self._report(scope, exists & (hidden ^ 1), self.owner.unsure_score, exists)
        return found

    def _report(self, scope: Scope, seen: Value, unsure: int | None, exists: Value) -> None:
        """`seen`: of the keys that exist; `unsure`: the node that says where others may be seen too."""
        wrong = [*self.row.wrong, *scope.wrong]
        found = any_of(wrong)
        if found is None:
            return
        with when(found):
            if unsure is not None:
                seen = seen | (exists & scope.inner().vector(unsure, 0, 0, BOOL))
            for load in wrong:
                report(self.head, load, seen)
