"""vmap of the differentiable functions: a larger batch where that is the same, otherwise a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.autograd.operators import NUM_INPUTS, NUM_OPTIONS
from tilewise.core.problem import Inputs, Options
from tilewise.core.torch_private import between_graphs

_BATCHED_BY_FOLDING = {"query", "key", "value", "mask", "bias"}


@between_graphs
def fold_or_loop(
    function: Callable[..., tuple[Tensor, ...]],
    leading: int,
    info: Any,
    in_dims: tuple[int | None, ...],
    arguments: tuple[Any, ...],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Fold the new dimension into the batch where the problem is dense; otherwise run one by one.

    `leading` arguments (dout, dlse, out, lse, residual) come before `Inputs`; each has a batch dimension.
    """
    end = leading + NUM_INPUTS
    inputs, tensors, rest = Inputs(*arguments[leading:end]), arguments[:end], arguments[end:]
    is_dense = all(
        t is None or (name in _BATCHED_BY_FOLDING and t.ndim == 4 + (dim is not None))
        for name, t, dim in zip(Inputs._fields, inputs, in_dims[leading:end])
    )
    asks_for_batch = Options(*rest[:NUM_OPTIONS]).functions is not None  # perhaps
    if not is_dense or asks_for_batch:
        return loop(function, info, in_dims, arguments)  # type: ignore[no-any-return]
    stacked = [_stack(t, dim, info.batch_size) for t, dim in zip(tensors, in_dims)]
    batch = stacked[leading].shape[1]  # type: ignore[union-attr]
    if not all(t is None or t.shape[1] == batch for t in stacked):
        return loop(function, info, in_dims, arguments)  # type: ignore[no-any-return]
    results = function(*(None if t is None else t.flatten(0, 1) for t in stacked), *rest)
    outputs = [
        r.unflatten(0, (info.batch_size, batch)) if r.ndim > 1 else r.expand(info.batch_size, -1)
        for r in results
    ]
    return tuple(outputs), (0,) * len(outputs)


def _stack(t: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """The mapped dimension first; a tensor without one is repeated as a view."""
    if t is None:
        return None
    return t.movedim(dim, 0) if dim is not None else t.expand(size, *t.shape)


@between_graphs
def loop(function: Callable[..., tuple[Tensor, ...]], info: Any, in_dims: Any, arguments: Any) -> Any:
    """Run one by one and stack."""
    if info.batch_size == 0:
        return _of_none(function, in_dims, arguments)
    rows = [
        function(*(t if dim is None else t.select(dim, n) for t, dim in zip(arguments, in_dims)))
        for n in range(info.batch_size)
    ]
    outputs = tuple(torch.stack(column) for column in zip(*rows))
    return outputs, (0,) * len(outputs)


def _of_none(function: Callable[..., Any], in_dims: Any, arguments: Any) -> tuple[Any, Any]:
    """The stacked results of no rows, in the shapes that one would have."""

    def one(t: Any, dim: int | None) -> Any:
        shape = [n for place, n in enumerate(t.shape) if place != dim]
        return t.new_empty(shape, device="meta")

    row = function(*(one(t, dim) if isinstance(t, Tensor) else t for t, dim in zip(arguments, in_dims)))
    device = next(t.device for t in arguments if isinstance(t, Tensor))
    outputs = tuple(t.new_empty((0, *t.shape), device=device) for t in row)
    return outputs, (0,) * len(outputs)
