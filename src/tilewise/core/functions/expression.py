"""An expression of scalars: what a mask or score function computes for one query and one key.

A `Graph` is a list of nodes; a node knows its arguments by their numbers, which are smaller than its own, and
equal nodes are one. Integers are exact (64 bits), floats are of the scores' dtype, as are captured ones.

    leaves       const, score, b, h, i, j, load: a captured tensor's number at integer expressions;
                 of tangents dot_score, dot_load
    is_wrong     of a load: whether an index is out of range (`captured.doubt`)
    arithmetic   add sub mul div floordiv mod pow neg abs minimum maximum, of integers or floats;
                 fmod, and in kernels absolute_power, of floats
    comparisons  lt le eq ne
    logic        and or xor not, bit by bit of integers; shl shr; where
    functions    exp exp2 expm1 log log2 log10 log1p sqrt sin cos tanh floor ceil round trunc, and those that
                 kernels compute by formulas (`operations.elementary`)
    casts        float int bool
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

BOOL, INT, FLOAT = "bool", "int", "float"
RANKS = {BOOL: 0, INT: 1, FLOAT: 2}  # by which kinds are promoted
INDICES = ("b", "h", "i", "j")
LENGTH = 1 << 30  # b, h, i and j are less, or a kernel does not take the call
COMPARISONS = ("lt", "le", "eq", "ne")
LOGIC = ("and", "or", "xor", "not", "shl", "shr")
FUNCTIONS = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tanh", "floor", "ceil",
    "round", "trunc", "erf", "erfc", "erfcx", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh",
    "atanh",
)  # fmt: skip


class Node(NamedTuple):
    """`value`: of a constant, or the number of the tensor that a load reads."""

    op: str
    args: tuple[int, ...]
    kind: str
    value: Any = None


class Captured(NamedTuple):
    """A captured tensor: of loads from it, the kind and the number of indices. `wants_grad`: its gradient."""

    kind: str
    ndim: int
    wants_grad: bool = False


class Graph:
    """Nodes in the order in which they can be computed."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._numbers: dict[Any, int] = {}

    def copy(self, tensors: dict[int, int] | None = None) -> Graph:
        """Its nodes by the same numbers; `tensors`: which ones loads read instead."""
        other = Graph()
        for n, node in enumerate(self.nodes):
            node = node._replace(value=tensors[n]) if tensors and n in tensors else node
            other.nodes.append(node)
            other._numbers[node, repr(node.value)] = n
        return other

    def add(self, op: str, *args: int, value: Any = None, kind: str | None = None) -> int:
        """The number of a node: of an equal one, of a simpler one that computes the same, or a new one."""
        simpler = self._simplified(op, args)
        if simpler is not None:
            return simpler
        found = Node(op, args, kind or self._kind(op, args), value)
        key = (found, repr(value))  # -0.0 equals 0.0, but is another number
        if key not in self._numbers:
            self._numbers[key] = len(self.nodes)
            self.nodes.append(found)
        return self._numbers[key]

    def const(self, value: bool | int | float) -> int:
        kind = BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT
        return self.add("const", value=value, kind=kind)

    def load(self, tensor: int, indices: Iterable[int], kind: str) -> int:
        return self.add("load", *indices, value=tensor, kind=kind)

    def cast(self, node: int, kind: str) -> int:
        return node if self.nodes[node].kind == kind else self.add(kind, node)

    def value(self, node: int) -> Any:
        """Of a constant; None of anything else."""
        return self.nodes[node].value if self.nodes[node].op == "const" else None

    def argument_kinds(self, n: int) -> list[str]:
        """What each argument of a node is converted to before the operation."""
        op, args, kind, _ = self.nodes[n]
        kinds = {self.nodes[a].kind for a in args}
        if op == "where":
            return [BOOL, kind, kind]
        if op in RANKS or op == "pow":
            common = kind
        elif FLOAT in kinds or kind == FLOAT:
            common = FLOAT
        else:
            common = BOOL if kinds == {BOOL} and op in LOGIC and kind == BOOL else INT
        return [common] * len(args)

    def reachable(self, roots: Iterable[int]) -> list[int]:
        """All that the roots need, in the order in which it can be computed."""
        found: set[int] = set()
        waiting = list(roots)
        while waiting:
            n = waiting.pop()
            if n not in found:
                found.add(n)
                waiting.extend(self.nodes[n].args)
        return sorted(found)

    def _kind(self, op: str, args: tuple[int, ...]) -> str:
        kinds = [self.nodes[a].kind for a in args]
        if op in (FLOAT, INT, BOOL):
            return op
        if op in COMPARISONS:
            return BOOL
        if op == "div" or op in FUNCTIONS:
            return FLOAT
        if op == "where":
            kinds = kinds[1:]
        kind = max(kinds, key=RANKS.__getitem__)
        return INT if kind == BOOL and op not in (*LOGIC, "where") else kind

    def _simplified(self, op: str, args: tuple[int, ...]) -> int | None:
        values = [self.value(a) for a in args]
        if args and "load" not in op and all(v is not None for v in values):
            folded = _fold(op, values)
            return None if folded is None else self.const(folded)
        kinds = [self.nodes[a].kind for a in args]
        if kinds == [op]:  # a cast to what it is
            return args[0]
        if op == "where":
            if values[0] is not None and kinds[1] == kinds[2]:
                return args[1] if values[0] else args[2]
            return args[1] if args[1] == args[2] else None
        if len(args) != 2 or "load" in op:
            return None
        kind = max(kinds, key=RANKS.__getitem__)
        for this, value in ((args[0], values[1]), (args[1], values[0])):
            if value is None or self.nodes[this].kind != kind or (op == "sub" and this != args[0]):
                continue
            if op in ("add", "sub") and value == 0 and kind != BOOL:
                return this  # the sign of a zero aside
            if op == "mul" and value == 1 and kind != BOOL:
                return this
            if op in ("and", "or") and kind == BOOL:
                return this if value == (op == "and") else self.const(op == "or")
        return None


def _fold(op: str, values: list[Any]) -> Any:
    """The operation on Python numbers; None if there is none, it fails, or 64 bits don't hold the result."""
    try:
        found = _FOLDS[op](*values) if op in _FOLDS else None
    except (ArithmeticError, ValueError, TypeError):
        return None
    is_wide = isinstance(found, int) and not -(1 << 63) <= found < 1 << 63
    return None if is_wide or isinstance(found, complex) else found


OPERATORS: dict[str, Callable[..., Any]] = {  # of numbers and of tensors
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow, "neg": operator.neg,
    "abs": abs, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.invert,
    "shl": operator.lshift, "shr": operator.rshift,
}  # fmt: skip
_FOLDS = OPERATORS | {
    "not": lambda a: not a if isinstance(a, bool) else ~a, "float": float, "int": int, "bool": bool,
    **{name: getattr(math, name) for name in (
        "exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos", "fmod",
    )},
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Functions:
    """A mask function, a score function or both, with the tensors that they capture.

    Attributes:
        score, mask: the nodes of the score and of whether a key is visible; None without such a function.
        guarded: the loads one of whose indices may be negative or out of range in this call.
        text: all of this as a string, the same for equal functions.
    """

    graph: Graph
    score: int | None
    mask: int | None
    tensors: tuple[Captured, ...]
    guarded: frozenset[int] = frozenset()

    @property
    def roots(self) -> list[int]:
        return [root for root in (self.score, self.mask) if root is not None]

    @functools.cached_property
    def wants_grad(self) -> bool:
        return any(t.wants_grad for t in self.tensors)

    @functools.cached_property
    def hiding(self) -> tuple[int, ...]:
        """The roots that may hide keys: the mask, and a score with a -inf of its own."""
        roots: tuple[int, ...] = () if self.mask is None else (self.mask,)
        if self.score is not None:
            constants = {self.graph.value(n) for n in self.graph.reachable([self.score])}
            roots += (self.score,) if -math.inf in constants else ()
        return roots

    @functools.cached_property
    def hides_by(self) -> frozenset[str]:
        """Which of b, h, i, j and score say what is hidden."""
        ops = {self.graph.nodes[n].op for n in self.graph.reachable(self.hiding)}
        return frozenset(ops & {*INDICES, "score"})

    @functools.cached_property
    def text(self) -> str:
        """Nodes that nothing reads are left out."""
        order = self.graph.reachable(self.roots)
        numbers = {n: new for new, n in enumerate(order)}
        nodes = [
            [op, [numbers[a] for a in args], kind, *([] if value is None else [value])]
            for op, args, kind, value in (self.graph.nodes[n] for n in order)
        ]
        roots = [None if root is None else numbers[root] for root in (self.score, self.mask)]
        guarded = sorted(numbers[n] for n in self.guarded if n in numbers)
        return json.dumps([nodes, roots, self.tensors, guarded], separators=(",", ":"))

    @functools.cached_property
    def mask_only(self) -> Functions:
        return replace(self, score=None)

    @functools.cached_property
    def score_only(self) -> Functions:
        return replace(self, mask=None)

    def without_gradients(self) -> Functions:
        """As kernels see it, to which it is all the same which tensors want a gradient, and how a call is."""
        plain = tuple(t._replace(wants_grad=False) for t in self.tensors)
        return replace(self, tensors=plain, guarded=frozenset())

    @functools.cached_property
    def plain_text(self) -> str:
        return self.without_gradients().text

    @functools.cached_property
    def trimmed(self) -> tuple[Functions, tuple[int, ...]]:
        """With those captured tensors only that a load reads, and their numbers in these functions."""
        loads = [n for n in self.graph.reachable(self.roots) if self.graph.nodes[n].op == "load"]
        numbers = sorted({self.graph.nodes[n].value for n in loads})
        graph = self.graph.copy({n: numbers.index(self.graph.nodes[n].value) for n in loads})
        tensors = tuple(self.tensors[n] for n in numbers)
        return replace(self, graph=graph, tensors=tensors), tuple(numbers)

    def with_gradients(self) -> Functions:
        """With the gradient of every captured tensor of floats."""
        wanted = tuple(t._replace(wants_grad=t.kind == FLOAT) for t in self.tensors)
        return replace(self, tensors=wanted)


@functools.lru_cache(maxsize=512)
def decode(text: str) -> Functions:
    """The functions of a `Functions.text`."""
    nodes, (score, mask), tensors, guarded = json.loads(text)
    graph = Graph()
    numbers: list[int] = []
    for op, args, kind, *value in nodes:
        numbers.append(
            graph.add(op, *(numbers[a] for a in args), value=value[0] if value else None, kind=kind)
        )
    score, mask = (None if root is None else numbers[root] for root in (score, mask))
    captured = tuple(Captured(*t) for t in tensors)
    return Functions(graph, score, mask, captured, frozenset(numbers[n] for n in guarded))


@functools.lru_cache(maxsize=512)
def shifted(text: str) -> str:
    """The text of the same functions for a part of a problem: one more captured tensor of integers holds
    its first sequence, head, query and key, so one text, and one kernel, serves every part."""
    functions = decode(text)
    graph = Graph()
    numbers: list[int] = []
    guarded = set()  # but for indices that are constants, which are known to be in range
    for op, args, kind, value in functions.graph.nodes:
        number = graph.add(op, *(numbers[a] for a in args), value=value, kind=kind)
        if op == "load" and any(functions.graph.value(a) is None for a in args):
            guarded.add(number)
        if op in INDICES:
            first = graph.load(len(functions.tensors), [graph.const(INDICES.index(op))], INT)
            first = graph.add("minimum", graph.add("maximum", first, graph.const(0)), graph.const(LENGTH - 1))
            number = graph.add("add", number, first)  # of less than 32 bits, as said by the bounds
        numbers.append(number)
    score, mask = (None if root is None else numbers[root] for root in (functions.score, functions.mask))
    return Functions(graph, score, mask, (*functions.tensors, Captured(INT, 1)), frozenset(guarded)).text


@functools.lru_cache(maxsize=512)
def reads_by_score(functions: Functions, wants_grad: bool = True) -> bool:
    """Whether a tensor, or one that wants a gradient, is read at an index that is computed from the score."""
    graph = functions.graph
    for n in graph.reachable([] if functions.score is None else [functions.score]):
        node = graph.nodes[n]
        is_meant = node.op == "load" and (functions.tensors[node.value].wants_grad or not wants_grad)
        if is_meant and "score" in {graph.nodes[m].op for m in graph.reachable(node.args)}:
            return True
    return False
