"""Score functions that add a number of each distance, score + f(b, h, j - i): T5's bias and its kin.

Such numbers are as many as there are distances, so kernels read them as they read a bias, whatever f is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.functions.derivative import derivative
from tilewise.core.functions.evaluate import Buffers, Evaluator, Values, add_at, times
from tilewise.core.functions.expression import COMPARISONS, FLOAT, INT, Functions, Graph, decode
from tilewise.core.functions.patterns import Reader


class DistanceBias(NamedTuple):
    """What functions add to scores."""

    functions: Functions  # what is added, as the score
    by_batch: bool
    by_head: bool
    rest: str | None  # the text of the mask function


@functools.lru_cache(maxsize=512)
def distance_bias(text: str | None) -> DistanceBias | None:
    """None if there is no score function, or it does anything else, or an index may be out of range."""
    functions = None if text is None else decode(text)
    if functions is None or functions.score is None or functions.guarded:
        return None
    reader = Reader(functions)
    graph, (inner, terms) = reader.graph, reader.sum_with_score(functions.score)
    grown = growth(graph, [term for term, _ in terms])
    if graph.nodes[inner].op != "score" or any(grown[term] != 0 for term, _ in terms):
        return None
    reads = set[str]().union(*(reader.reads[term] for term, _ in terms))
    node = graph.const(0.0)
    for term, sign in terms:
        node = graph.add("add" if sign > 0 else "sub", node, term)
    node = graph.cast(node, FLOAT)
    if -math.inf in {graph.value(n) for n in graph.reachable([node])}:
        return None  # it hides keys, so that tiles may be left out
    tensors, mask = functions.tensors, functions.mask
    rest = None if mask is None else Functions(graph, None, mask, tensors).plain_text
    return DistanceBias(Functions(graph, node, None, tensors), "b" in reads, "h" in reads, rest)


def growth(graph: Graph, roots: Iterable[int]) -> dict[int, int | None]:
    """By how much nodes grow where i and j both grow by 1, as along a diagonal of scores; None: not known.

    What grows are whole numbers: of others a sum is rounded, here up and there down along a diagonal.
    """
    grown: dict[int, int | None] = {}
    for n in graph.reachable(roots):
        op, args, kind, _ = graph.nodes[n]
        steps = [step for a in args if (step := grown[a]) is not None]
        factors = [value for a in args if isinstance(value := graph.value(a), int)]
        grown[n] = None
        if op in ("i", "j"):
            grown[n] = 1
        elif op == "score" or len(steps) < len(args):
            continue
        elif not any(steps) or (op in COMPARISONS and steps[0] == steps[1]):
            grown[n] = 0
        elif not all(grown[a] or _is_whole(graph, a) for a in args):
            continue
        elif op in (FLOAT, "add"):
            grown[n] = sum(steps)
        elif op in ("neg", "sub"):
            grown[n] = -steps[-1] + sum(steps[:-1])
        elif op == "mul" and kind == INT and factors:
            grown[n] = factors[0] * sum(steps)  # one of them is 0
    return grown


def _is_whole(graph: Graph, n: int) -> bool:
    op, _, kind, value = graph.nodes[n]
    return kind != FLOAT or op == FLOAT or (op == "const" and value.is_integer())


@torch.no_grad()
def numbers(
    found: DistanceBias, buffers: Buffers, extent: tuple[int, int, int, int], device: torch.device
) -> Tensor:
    """What is added at each distance (batch or 1, heads or 1, seqlen_q + seqlen_k - 1), float32.

    From the distance 1 - seqlen_q of the last query and the first key on. `extent`: batch, heads, seqlen_q
    and seqlen_k. On the meta device without them: most operations there import PyTorch's compiler first,
    which takes seconds.
    """
    if device.type == "meta":
        batch, heads, seqlen_q, seqlen_k = extent
        sizes = batch if found.by_batch else 1, heads if found.by_head else 1, seqlen_q + seqlen_k - 1
        return torch.empty(sizes, device=device)
    values = _values(found, extent, device)
    assert found.functions.score is not None
    given = Evaluator(found.functions.graph, found.functions, buffers, values)(found.functions.score)
    return given.expand(values.b.numel(), values.h.numel(), values.i.numel())


def captured_gradient(
    found: DistanceBias, buffers: Buffers, extent: tuple[int, int, int, int], dnumbers: Tensor
) -> Tensor:
    """The gradient of the floats of `buffers` from that of `numbers`; the same bits in every run."""
    assert buffers.floats is not None
    if dnumbers.is_meta:  # see `numbers`
        return buffers.floats.new_empty(buffers.floats.shape)
    by_load = derivative(found.functions)
    values = _values(found, extent, dnumbers.device)
    evaluate = Evaluator(by_load.graph, found.functions, buffers, values)
    total = torch.zeros_like(buffers.floats, dtype=torch.float64)
    for n, slope in by_load.loads.items():
        if found.functions.tensors[by_load.graph.nodes[n].value].wants_grad:
            add_at(total, evaluate.position(n), times(dnumbers, evaluate(slope)))
    return total.to(buffers.floats.dtype)


def _values(found: DistanceBias, extent: tuple[int, int, int, int], device: torch.device) -> Values:
    batch, heads, seqlen_q, seqlen_k = extent
    distance = torch.arange(max(0, seqlen_q + seqlen_k - 1), device=device) + (1 - seqlen_q)
    b = torch.arange(batch if found.by_batch else 1, device=device)[:, None, None]
    h = torch.arange(heads if found.by_head else 1, device=device)[:, None]
    return Values(None, b, h, (-distance).clamp(min=0), distance.clamp(min=0), torch.float32)
