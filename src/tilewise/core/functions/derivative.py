"""Derivatives of an expression: by the score and by what it loads from floating-point tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from tilewise.core.functions.expression import FLOAT, Functions, Graph


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
    adjoints = {root: graph.const(1.0)}
    for n in reversed(graph.reachable([root])):
        node = graph.nodes[n]
        if n not in adjoints or node.kind != FLOAT or not node.args or node.op in ("load", "dot_load"):
            continue
        for argument, term in _terms(graph, n, adjoints[n]):
            if graph.nodes[argument].kind == FLOAT:
                before = adjoints.get(argument)
                adjoints[argument] = term if before is None else graph.add("add", before, term)
    return {n: g for n, g in adjoints.items() if graph.nodes[n].op in ("score", "load")}


def _terms(graph: Graph, n: int, g: int) -> list[tuple[int, int]]:
    """What a node adds to its arguments' adjoints, g being its own."""
    node, add, const = graph.nodes[n], graph.add, graph.const
    args = node.args
    a, b = (*args, args[0])[:2]
    zero = const(0.0)
    match node.op:
        case "add":
            return [(a, g), (b, g)]
        case "sub":
            return [(a, g), (b, add("neg", g))]
        case "mul":
            return [(a, add("mul", g, graph.cast(b, FLOAT))), (b, add("mul", g, graph.cast(a, FLOAT)))]
        case "div":
            by = graph.cast(b, FLOAT)
            return [(a, add("div", g, by)), (b, add("neg", add("div", add("mul", g, n), by)))]
        case "mod" | "fmod":
            quotient = add("floordiv", a, b) if node.op == "mod" else add("trunc", add("div", a, b))
            return [(a, g), (b, add("neg", add("mul", g, quotient)))]
        case "pow":
            return _of_power(graph, n, g)
        case "neg":
            return [(a, add("neg", g))]
        case "abs":
            sign = add("where", add("lt", zero, a), g, add("where", add("lt", a, zero), add("neg", g), zero))
            return [(a, sign)]
        case "minimum" | "maximum":
            half = add("where", add("eq", a, b), add("mul", const(0.5), g), zero)
            less, more = (add("where", add("lt", *pair), g, half) for pair in ((a, b), (b, a)))
            return [(a, less), (b, more)] if node.op == "minimum" else [(a, more), (b, less)]
        case "where":
            _, x, y = args
            return [(x, add("where", a, g, zero)), (y, add("where", a, zero, g))]
        case op if op in _SLOPES:
            return [(a, add("mul", g, _SLOPES[op](graph, graph.cast(a, FLOAT), n)))]
    return []  # of steps: floor, ceil, round, trunc, floordiv, casts


def _of_power(graph: Graph, n: int, g: int) -> list[tuple[int, int]]:
    """As PyTorch has it: a power of 0 has no slope, nor has 0 by its exponent."""
    add, const = graph.add, graph.const
    a, b = graph.nodes[n].args
    exponent = graph.value(b)
    if exponent == 0:
        return []
    if exponent == 0.5:
        return [(a, add("mul", g, add("div", const(0.5), n)))]
    less = add("sub", b, const(1.0 if graph.nodes[b].kind == FLOAT else 1))
    slope = add("mul", graph.cast(b, FLOAT), add("pow", a, less))
    if exponent is not None:
        return [(a, add("mul", g, slope))]
    slope = add("where", add("eq", b, const(0)), const(0.0), slope)
    is_zero = add("and", add("eq", a, const(0)), add("le", const(0), b))
    by_exponent = add("where", is_zero, const(0.0), add("mul", n, add("log", a)))
    return [(a, add("mul", g, slope)), (b, add("mul", g, by_exponent))]


def _bell(graph: Graph, a: int, height: float) -> int:
    """height * e^(-a^2)"""
    square = graph.add("mul", a, a)
    return graph.add("mul", graph.const(height), graph.add("exp", graph.add("neg", square)))


def _one_and_square(graph: Graph, a: int) -> int:
    return graph.add("add", graph.const(1.0), graph.add("mul", a, a))


def _one_less_square(graph: Graph, a: int) -> int:
    one = graph.const(1.0)
    return graph.add("mul", graph.add("sub", one, a), graph.add("add", one, a))


def _square_less_one(graph: Graph, a: int) -> int:
    one = graph.const(1.0)
    return graph.add("mul", graph.add("sub", a, one), graph.add("add", a, one))


def _inverse_root(graph: Graph, a: int) -> int:
    return graph.add("div", graph.const(1.0), graph.add("sqrt", a))


_SLOPES: dict[str, Callable[[Graph, int, int], int]] = {  # of (graph, argument, the function's value)
    "exp": lambda graph, a, n: n,
    "exp2": lambda graph, a, n: graph.add("mul", n, graph.const(math.log(2))),
    "expm1": lambda graph, a, n: graph.add("exp", a),  # n + 1 has no digits of small ones
    "log": lambda graph, a, n: graph.add("div", graph.const(1.0), a),
    "log2": lambda graph, a, n: graph.add("div", graph.const(1 / math.log(2)), a),
    "log10": lambda graph, a, n: graph.add("div", graph.const(1 / math.log(10)), a),
    "log1p": lambda graph, a, n: graph.add("div", graph.const(1.0), graph.add("add", a, graph.const(1.0))),
    "tanh": lambda graph, a, n: graph.add("sub", graph.const(1.0), graph.add("mul", n, n)),
    "sqrt": lambda graph, a, n: graph.add("div", graph.const(0.5), n),
    "sin": lambda graph, a, n: graph.add("cos", a),
    "cos": lambda graph, a, n: graph.add("neg", graph.add("sin", a)),
    "sinh": lambda graph, a, n: graph.add("cosh", a),
    "cosh": lambda graph, a, n: graph.add("sinh", a),
    "asin": lambda graph, a, n: _inverse_root(graph, _one_less_square(graph, a)),
    "acos": lambda graph, a, n: graph.add("neg", _inverse_root(graph, _one_less_square(graph, a))),
    "atan": lambda graph, a, n: graph.add("div", graph.const(1.0), _one_and_square(graph, a)),
    "asinh": lambda graph, a, n: _inverse_root(graph, _one_and_square(graph, a)),
    "acosh": lambda graph, a, n: _inverse_root(graph, _square_less_one(graph, a)),
    "atanh": lambda graph, a, n: graph.add("div", graph.const(1.0), _one_less_square(graph, a)),
    "erf": lambda graph, a, n: _bell(graph, a, 2 / math.sqrt(math.pi)),
    "erfc": lambda graph, a, n: _bell(graph, a, -2 / math.sqrt(math.pi)),
    "erfcx": lambda graph, a, n: graph.add(
        "sub",
        graph.add("mul", graph.const(2.0), graph.add("mul", a, n)),
        graph.const(2 / math.sqrt(math.pi)),
    ),
}
