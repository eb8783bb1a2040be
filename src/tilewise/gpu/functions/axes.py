"""Along which axes of a tile of scores the numbers that a function reads change.

The gradient of such a number is a sum over the scores that read it. What is summed within a tile, where they
share it, is not added to memory score by score.
"""

from __future__ import annotations

import functools

from tilewise.core.functions.distances import growth
from tilewise.core.functions.expression import FLOAT, Functions, decode

NONE, ROWS, COLUMNS, DIAGONALS, EACH = "none", "rows", "columns", "diagonals", "each"


@functools.lru_cache(maxsize=1024)
def axes_of_loads(functions: Functions) -> dict[int, str]:
    """What the indices of each load depend on: neither i nor j, only i, only j, only i - j, or both.

    Example:
        >>> import torch
        >>> from tilewise.core.functions.trace import trace
        >>> table = torch.zeros(4, 8)
        >>> found = trace(None, lambda s, b, h, i, j: s + table[h, (i - j).clamp(0, 7)]).functions
        >>> list(axes_of_loads(found).values())
        ['diagonals']
    """
    graph, axes = functions.graph, {}
    grown = growth(graph, functions.roots)
    for n in grown:
        op, indices, *_ = graph.nodes[n]
        if op != "load":
            continue
        read = {graph.nodes[m].op for m in graph.reachable(indices)}
        if {"i", "j"} <= read:
            axes[n] = EACH if any(grown[index] != 0 for index in indices) else DIAGONALS
        else:
            axes[n] = ROWS if "i" in read else COLUMNS if "j" in read else NONE
    return axes


@functools.lru_cache(maxsize=1024)
def bytes_of_loads(text: str, rows: int, columns: int) -> int:
    """What a tile of scores reads of captured tensors: 4 bytes a float, 8 an integer."""
    functions = decode(text)
    numbers = {NONE: 0, ROWS: rows, COLUMNS: columns}
    return sum(
        numbers.get(axes, rows * columns) * (4 if functions.graph.nodes[n].kind == FLOAT else 8)
        for n, axes in axes_of_loads(functions).items()
    )
