"""Along which axes of a tile of scores the numbers that a function reads change.

The gradient of such a number is a sum over the scores that read it. What is summed within a tile, where they
share it, is not added to memory score by score.
"""

from __future__ import annotations

import functools

from tilewise.core.functions.expression import FLOAT, INT, Graph, decode

NONE, ROWS, COLUMNS, DIAGONALS, EACH = "none", "rows", "columns", "diagonals", "each"


def axes_of_load(graph: Graph, load: int) -> str:
    """What the indices of a load depend on: neither i nor j, only i, only j, only i - j, or both.

    Example:
        >>> import torch
        >>> from tilewise.core.functions.trace import trace
        >>> table = torch.zeros(4, 8)
        >>> graph = trace(None, lambda s, b, h, i, j: s + table[h, (i - j).clamp(0, 7)]).functions.graph
        >>> [axes_of_load(graph, n) for n, node in enumerate(graph.nodes) if node.op == "load"]
        ['diagonals']
    """
    indices = graph.nodes[load].args
    read = {graph.nodes[n].op for n in graph.reachable(indices)} & {"i", "j"}
    if len(read) < 2:
        return {"i": ROWS, "j": COLUMNS}[read.pop()] if read else NONE
    steps = _steps(graph, indices)
    return DIAGONALS if all(steps[n] == 0 for n in indices) else EACH


@functools.lru_cache(maxsize=1024)
def bytes_of_loads(text: str, rows: int, columns: int) -> int:
    """What a tile of scores reads of captured tensors: 4 bytes a float, 8 an integer."""
    functions = decode(text)
    graph, numbers = functions.graph, {NONE: 0, ROWS: rows, COLUMNS: columns}
    loads = [n for n in graph.reachable(functions.roots) if graph.nodes[n].op == "load"]
    return sum(
        numbers.get(axes_of_load(graph, n), rows * columns)
        * (4 if functions.tensors[graph.nodes[n].value].kind == FLOAT else 8)
        for n in loads
    )


def _steps(graph: Graph, roots: tuple[int, ...]) -> dict[int, int | None]:
    """By how much nodes grow with each step along a diagonal, where i and j grow by one; None: not known."""
    steps: dict[int, int | None] = {}
    for n in graph.reachable(roots):
        node = graph.nodes[n]
        known = [step for a in node.args if (step := steps[a]) is not None]
        steps[n] = None
        if node.op in ("i", "j"):
            steps[n] = 1
        elif node.op != "score" and len(known) == len(node.args):
            if not any(known):
                steps[n] = 0
            elif node.kind == INT and node.op in ("add", "sub", "neg"):  # floats would be rounded
                steps[n] = known[0] + known[1] if node.op == "add" else -known[-1] + sum(known[:-1])
    return steps
