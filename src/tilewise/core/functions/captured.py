"""Captured tensors on their way to kernels: one buffer of floats, one of integers, and where each begins.

So operators and kernels take three tensors, whatever a function captures, and the gradient of the floats is
one tensor too. Autograd cuts it up again, as it has seen them put together. Before there are numbers, the
shapes of a call tell which indices may be wrong, and what 32 bits may not hold.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.core.functions import interval
from tilewise.core.functions.evaluate import Buffers, Evaluator
from tilewise.core.functions.expression import BOOL, FLOAT, INT, LENGTH, Functions, Graph
from tilewise.core.functions.trace import Trace, line_of_load
from tilewise.core.kept import integers_on, kept
from tilewise.core.signature import compute_dtype


def pack(trace: Trace, query: Tensor) -> Buffers:
    """The buffers of a call.

    Raises:
        ValueError: a captured tensor is on another device than query.
    """
    floats: list[Tensor] = []
    integers: list[Tensor] = []
    layout: list[int] = []
    filled = [0, 0]
    for t, described in zip(trace.tensors, trace.functions.tensors):
        if t.device != query.device:
            raise ValueError(
                f"captured tensor of shape {tuple(t.shape)}: device={t.device} must equal "
                f"query.device={query.device}"
            )
        is_float = described.kind == FLOAT
        layout += [filled[is_float], *t.shape]
        filled[is_float] += t.numel()
        (floats if is_float else integers).append(t)
    return Buffers(
        _in_one(floats, compute_dtype(query.dtype)),
        _in_one(integers, torch.int64),
        torch.tensor(layout, dtype=torch.int64, device="cpu") if layout else None,
    )


def with_shift(buffers: Buffers, first: tuple[int, int, int, int], device: torch.device) -> Buffers:
    """The buffers of `expression.shifted` functions: the part's first sequence, head, query and key."""
    integers = integers_on(first, device)
    begin = 0 if buffers.integers is None else buffers.integers.numel()
    place = torch.tensor([begin, len(first)], dtype=torch.int64, device="cpu")
    return Buffers(
        buffers.floats,
        integers if buffers.integers is None else torch.cat((buffers.integers, integers)),
        place if buffers.layout is None else torch.cat((buffers.layout, place)),
    )


def _in_one(tensors: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Tensors one behind the other: a view of a single one, or a copy.

    On a GPU a copy without a gradient is made once. On a CPU it is made in every call, so that writes count
    that PyTorch does not see: to `t.data`, or to NumPy's array of the same memory.
    """
    if not tensors:
        return None
    if len(tensors) == 1 and tensors[0].dtype == dtype and tensors[0].is_contiguous():
        return tensors[0].view(-1)
    has_gradient = any(t.requires_grad for t in tensors)
    make = functools.partial(_joined, tensors, dtype)
    return make() if has_gradient or tensors[0].is_cpu else kept(tensors, (dtype,), make, tensors[0].device)


def _joined(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([t.reshape(-1).to(dtype) for t in tensors])


@functools.lru_cache(maxsize=1024)
def _checked(
    functions: Functions, shapes: tuple[tuple[int, ...], ...], extent: tuple[int, int, int, int]
) -> tuple[Functions, dict[int, str]]:
    """(the functions with their guarded loads, what is said of loads that are never in range)."""
    ranges = interval.Ranges.whole(*(max(1, n) for n in extent))
    found = interval.Intervals(functions.graph, functions, None, ranges)
    guarded, wrong = set(), {}
    for n in functions.graph.reachable(functions.roots):
        node = functions.graph.nodes[n]
        for axis, argument in enumerate(node.args if node.op == "load" else ()):
            shape, (low, high) = shapes[node.value], (float(x) for x in found(argument))
            if low < 0 or high >= shape[axis]:
                guarded.add(n)
            if high < -shape[axis] or low >= shape[axis]:
                seen = f"{low:g}" if low == high else f"{low:g} to {high:g}"
                wrong[n] = (
                    f"index {seen} in dimension {axis} of a captured tensor of shape {shape} "
                    f"must be at least {-shape[axis]} and less than {shape[axis]}"
                )
    return replace(functions, guarded=frozenset(guarded)) if guarded else functions, wrong


def check_indices(trace: Trace, extent: tuple[int, int, int, int]) -> Functions:
    """The functions with those loads `guarded` whose indices may be out of range where b, h, i and j are in
    `extent`.

    Raises:
        IndexError: one is never in range, and there are scores.
    """
    if not trace.tensors:
        return trace.functions
    shapes = tuple(tuple(t.shape) for t in trace.tensors)
    functions, wrong = _checked(trace.functions, shapes, extent)
    for n, sentence in wrong.items() if 0 not in extent else ():
        raise IndexError(f"{sentence} (line {trace.lines.get(n, 'unknown')})")
    return functions


def out_of_range(functions: Functions, n: int, dimension: int, index: int, shape: tuple[int, ...]) -> str:
    """What is said of a wrong index of load n, which only values tell."""
    return (
        f"index {index} in dimension {dimension} of a captured tensor of shape {shape} is out of range "
        f"(line {line_of_load(functions, n)})"
    )


def raise_if_wrong(evaluate: Evaluator, where: Tensor) -> None:
    """Raises IndexError if a guarded load reads out of range `where` that counts."""
    functions = evaluate.functions
    for n in sorted(functions.guarded):
        outside = evaluate.is_wrong(n)
        wrong = None if outside is None else outside & where
        if wrong is None or not wrong.any():
            continue
        node = functions.graph.nodes[n]
        shape = evaluate.places[node.value][1]
        for dimension, (argument, size) in enumerate(zip(node.args, shape)):
            index = evaluate(argument).expand(wrong.shape)[wrong]
            for one in index[(index < -size) | (index >= size)][:1]:
                raise IndexError(out_of_range(functions, n, dimension, int(one), shape))


def doubt(graph: Graph, root: int, guarded: Collection[int]) -> int | None:
    """A node, new in the graph: whether a root depends on what wrong indices of the guarded loads read.

    It does not where the other operand of `&`, `|`, `*` or a `where` decides. None: it never depends.
    """
    add, never = graph.add, graph.const(False)
    found: dict[int, int] = {}
    for n in graph.reachable([root]):
        node = graph.nodes[n]
        of = [found[a] for a in node.args]
        one = functools.reduce(functools.partial(add, "or"), of, never)
        if node.op == "load" and n in guarded and node.args:
            one = add("or", one, add("is_wrong", n, kind=BOOL))
        elif node.op in ("and", "or", "mul") and node.kind != FLOAT and one != never:
            if node.op != "or" or node.kind == BOOL:
                for doubtful, a in zip(of, node.args):
                    is_open = graph.cast(a, BOOL)  # a 0 decides a product, a True an `|`
                    is_open = add("not", is_open) if node.op == "or" else is_open
                    one = add("and", one, add("or", doubtful, is_open))
        elif node.op == "where":
            differs, (_, x, y) = of[0], node.args
            if node.kind == BOOL:
                differs = add("and", of[0], add("or", add("or", of[1], of[2]), add("xor", x, y)))
            one = add("or", differs, add("where", node.args[0], of[1], of[2]))
        found[n] = one
    return None if found[root] == never else found[root]


INT32 = 1 << 31


def wide_integers(graph: Graph, functions: Functions) -> frozenset[int]:
    """The integer nodes that 32 bits may not hold; captured integers, of which nothing is known, among them.

    `graph`: the functions' own, or one with more nodes, as their derivative has.

    Example:
        >>> from tilewise.core.functions.trace import trace
        >>> found = trace(lambda b, h, i, j: (i - j) % 7 == j * 4, None).functions
        >>> [found.graph.nodes[n].op for n in wide_integers(found.graph, found)]
        ['mul']
    """
    found = interval.Intervals(graph, functions, None, interval.Ranges.whole(*(LENGTH,) * 4))
    wide = set()
    for n, node in enumerate(graph.nodes):
        if node.kind == INT and node.op != "dot_load":
            low, high = found(n)
            if int(low.min()) < -INT32 or int(high.max()) >= INT32:
                wide.add(n)
    return frozenset(wide)
