"""Captured tensors on their way to kernels: one buffer of floats, one of integers, and where each begins.

So operators and kernels take three tensors, whatever a function captures, and the gradient of the floats is
one tensor too. Autograd cuts it up again, as it has seen them put together.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tilewise.core.functions import interval
from tilewise.core.functions.evaluate import Buffers
from tilewise.core.functions.expression import FLOAT, Functions
from tilewise.core.functions.trace import Trace, line_of_load


def pack(trace: Trace, query: Tensor) -> Buffers:
    """The buffers of a call.

    Raises:
        ValueError: a captured tensor is on another device than query.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
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
        (floats if is_float else integers).append(t.reshape(-1).to(dtype if is_float else torch.int64))
    return Buffers(
        _joined(floats), _joined(integers), torch.tensor(layout, dtype=torch.int64) if layout else None
    )


def with_shift(buffers: Buffers, first: tuple[int, int, int], device: torch.device) -> Buffers:
    """The buffers of `expression.shifted` functions: `first` are the part's first head, query and key."""
    integers = _first_of_part(first, device)
    begin = 0 if buffers.integers is None else buffers.integers.numel()
    place = torch.tensor([begin, len(first)], dtype=torch.int64)
    return Buffers(
        buffers.floats,
        integers if buffers.integers is None else torch.cat((buffers.integers, integers)),
        place if buffers.layout is None else torch.cat((buffers.layout, place)),
    )


@functools.lru_cache(maxsize=1024)
def _first_of_part(first: tuple[int, int, int], device: torch.device) -> Tensor:
    return torch.tensor(first, dtype=torch.int64, device=device)


def _joined(parts: list[Tensor]) -> Tensor | None:
    if len(parts) > 1:
        return torch.cat(parts)
    return parts[0] if parts else None


@functools.lru_cache(maxsize=1024)
def _indices_out_of_range(
    functions: Functions, shapes: tuple[tuple[int, ...], ...], extent: tuple[int, int, int, int]
) -> dict[int, str]:
    """Loads one of whose indices is never in range, with the sentence that says so."""
    ranges = interval.Ranges.whole(*extent)
    found = interval.Intervals(functions.graph, functions, None, ranges)
    wrong = {}
    for n in functions.graph.reachable(functions.roots):
        node = functions.graph.nodes[n]
        if node.op != "load":
            continue
        for axis, (argument, size) in enumerate(zip(node.args, shapes[node.value])):
            low, high = (float(x) for x in found(argument))
            if high < -size or low >= size:
                seen = f"{low:g}" if low == high else f"{low:g} to {high:g}"
                wrong[n] = (
                    f"index {seen} in dimension {axis} of a captured tensor of shape {shapes[node.value]} "
                    f"must be at least {-size} and less than {size}"
                )
    return wrong


def check_indices(trace: Trace, extent: tuple[int, int, int, int]) -> None:
    """Raises IndexError if an index is out of range wherever b, h, i and j are in `extent`."""
    if not trace.tensors or 0 in extent:
        return
    shapes = tuple(tuple(t.shape) for t in trace.tensors)
    for n, sentence in _indices_out_of_range(trace.functions, shapes, extent).items():
        raise IndexError(f"{sentence} (line {trace.lines.get(n, 'unknown')})")


def out_of_range(functions: Functions, n: int, dimension: int, index: int, shape: tuple[int, ...]) -> str:
    """What is said of a wrong index of load n, which only values tell."""
    return (
        f"index {index} in dimension {dimension} of a captured tensor of shape {shape} is out of range "
        f"(line {line_of_load(functions, n)})"
    )
