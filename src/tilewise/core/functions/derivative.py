"""Derivatives of an expression: by the score and by what it loads from floating-point tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from tilewise.core.functions.expression import FLOAT, Functions, Graph
from tilewise.core.functions.operations import methods as methods  # which stand-ins have
from tilewise.core.functions.proxy import Proxy, Recorder


class Derivative(NamedTuple):
    """Of the score, or of its tangent: nodes of `graph`, which has the functions' own nodes first.

    Attributes:
        value: what is differentiated.
        slope: d value / d score; None is 0.
        loads: of each load from a tensor of floats, d value / d load.
    """

    graph: Graph
    value: int
    slope: int | None
    loads: dict[int, int]


@functools.lru_cache(maxsize=512)
def derivative(functions: Functions) -> Derivative:
    """Of the score function."""
    assert functions.score is not None
    graph = functions.graph.copy()
    return Derivative(graph, functions.score, *_by_leaf(graph, functions.score))


@functools.lru_cache(maxsize=512)
def tangent(functions: Functions, with_loads: bool) -> Derivative:
    """Of the tangent of the score, which reads the leaves dot_score and, `with_loads`, dot_load."""
    assert functions.score is not None
    graph = functions.graph.copy()
    slope, loads = _by_leaf(graph, functions.score)
    terms = [] if slope is None else [graph.add("mul", slope, graph.add("dot_score", kind=FLOAT))]
    for n, g in loads.items() if with_loads else ():
        node = graph.nodes[n]
        terms.append(graph.add("mul", g, graph.add("dot_load", *node.args, value=node.value, kind=FLOAT)))
    value = graph.const(0.0)
    for term in terms:
        value = graph.add("add", value, term)
    return Derivative(graph, value, *_by_leaf(graph, value))


def _by_leaf(graph: Graph, root: int) -> tuple[int | None, dict[int, int]]:
    """The derivative by the score, None if 0, and those by loads."""
    found = gradients(graph, root)
    slopes = [g for n, g in found.items() if graph.nodes[n].op == "score"]
    return slopes[0] if slopes else None, {n: g for n, g in found.items() if graph.nodes[n].op == "load"}


def gradients(graph: Graph, root: int) -> dict[int, int]:
    """d root / d leaf of every floating-point leaf that root reads, as nodes of the same graph.

    Where a leaf's derivative is 0 for all values, it is left out.
    """
    recorder = Recorder(graph=graph)
    adjoints = {root: graph.const(1.0)}
    for n in reversed(graph.reachable([root])):
        node = graph.nodes[n]
        if n not in adjoints or node.kind != FLOAT or not node.args or node.op in ("load", "dot_load"):
            continue
        y, g, *args = (Proxy(recorder, m) for m in (n, adjoints[n], *node.args))
        for argument, term in zip(args, _terms(node.op, y, g, *args)):
            if term is not None and argument.kind == FLOAT:
                before, number = adjoints.get(argument.node), recorder.number(term)
                adjoints[argument.node] = number if before is None else graph.add("add", before, number)
    return {n: g for n, g in adjoints.items() if graph.nodes[n].op in ("score", "load")}


def _terms(op: str, y: Any, g: Any, a: Any, b: Any = None, _: Any = None) -> tuple[Any, ...]:
    """What y = op(a, b, ...) adds to its arguments' adjoints, g being its own; None is nothing."""
    match op:
        case "add":
            return g, g
        case "sub":
            return g, -g
        case "mul":
            return g * b.float(), g * a.float()
        case "div":
            return g / b.float(), -(g * y / b.float())
        case "mod" | "fmod":
            return g, -(g * (a // b if op == "mod" else (a / b).trunc()))
        case "pow":
            return _of_power(y, g, a, b)
        case "neg":
            return (-g,)
        case "abs":
            return (g.where(a > 0.0, (-g).where(a < 0.0, 0.0)),)
        case "minimum" | "maximum":
            half = (g * 0.5).where(a == b, 0.0)
            less, more = g.where(a < b, half), g.where(b < a, half)
            return (less, more) if op == "minimum" else (more, less)
        case "where":
            return None, g.where(a, 0.0), g.masked_fill(a, 0.0)
        case op if op in _SLOPES:
            return (g * _SLOPES[op](a.float(), y),)
    return ()  # of steps: floor, ceil, round, trunc, floordiv, casts


def _of_power(y: Any, g: Any, a: Any, b: Any) -> tuple[Any, ...]:
    """As PyTorch has it: a power of 0 has no slope, nor has 0 by its exponent."""
    recorder = a.recorder
    exponent = recorder.graph.value(b.node)
    if exponent == 0:
        return ()
    if exponent == 0.5:
        return (g * (0.5 / y),)
    slope = b.float() * a ** recorder.add("sub", b, 1)  # of a bool too, which has no minus
    if exponent is not None:
        return (g * slope,)
    by_exponent = (y * a.log()).masked_fill((a == 0) & (b >= 0), 0.0)
    return g * slope.masked_fill(b == 0, 0.0), g * by_exponent


_SLOPES: dict[str, Callable[[Any, Any], Any]] = {  # of (argument, the function's value)
    "exp": lambda x, y: y,
    "exp2": lambda x, y: y * math.log(2),
    "expm1": lambda x, y: x.exp(),  # y + 1 has no digits of small ones
    "log": lambda x, y: 1.0 / x,
    "log2": lambda x, y: (1 / math.log(2)) / x,
    "log10": lambda x, y: (1 / math.log(10)) / x,
    "log1p": lambda x, y: 1.0 / (x + 1.0),
    "tanh": lambda x, y: 1.0 - y * y,
    "sqrt": lambda x, y: 0.5 / y,
    "sin": lambda x, y: x.cos(),
    "cos": lambda x, y: -x.sin(),
    "sinh": lambda x, y: x.cosh(),
    "cosh": lambda x, y: x.sinh(),
    "asin": lambda x, y: 1.0 / ((1.0 - x) * (1.0 + x)).sqrt(),
    "acos": lambda x, y: -(1.0 / ((1.0 - x) * (1.0 + x)).sqrt()),
    "atan": lambda x, y: 1.0 / (1.0 + x * x),
    "asinh": lambda x, y: 1.0 / (1.0 + x * x).sqrt(),
    "acosh": lambda x, y: 1.0 / ((x - 1.0) * (x + 1.0)).sqrt(),
    "atanh": lambda x, y: 1.0 / ((1.0 - x) * (1.0 + x)),
    "erf": lambda x, y: 2 / math.sqrt(math.pi) * (-(x * x)).exp(),
    "erfc": lambda x, y: -2 / math.sqrt(math.pi) * (-(x * x)).exp(),
    "erfcx": lambda x, y: 2.0 * (x * y) - 2 / math.sqrt(math.pi),
}
