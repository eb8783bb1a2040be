"""How many bits the integers of an expression need, in kernels that serve calls of any length."""

from __future__ import annotations

import torch

from tilewise.core.functions.expression import INT, LENGTH, Functions, Graph
from tilewise.core.functions.interval import Intervals, Ranges

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
    zero, last = (torch.tensor(n, device="cpu") for n in (0, LENGTH - 1))
    found = Intervals(graph, functions, None, Ranges(*((zero, last),) * 4))
    wide = set()
    for n, node in enumerate(graph.nodes):
        if node.kind == INT and node.op != "dot_load":
            low, high = found(n)
            if int(low.min()) < -INT32 or int(high.max()) >= INT32:
                wide.add(n)
    return frozenset(wide)
