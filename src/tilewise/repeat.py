"""Calls that were made before: from a few tuples of metadata straight to what the first call found.

The first call of a kind takes the whole path: validation, the choice of a backend, its plan. Where a second
one can differ in nothing but the values of query, key and value, and nothing watches it (function transforms,
tracing), it takes what the first found. This is what makes a small call as cheap as PyTorch's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from tilewise.autograd import functions as autograd, operators as ops
from tilewise.core.eager import PLAIN_TYPES, is_plain_eager
from tilewise.core.problem import Inputs, Options, describe
from tilewise.dispatch import choice as dispatch
from tilewise.gpu.launch.launch_plan import ALIGNMENT

KEPT = 1024
Run = Callable[[Tensor, Tensor, Tensor], Any]


class _Local(threading.local):
    """Each thread has its own: a plan serves one call at a time."""

    def __init__(self) -> None:
        self.runs: dict[Hashable, Run | None] = {}  # None: such calls take the whole path
        # By scalars, and whether there are gradients: what served the last call by its signature; what may
        # serve the next without one.
        self.last: dict[Hashable, Run] = {}
        self.quick: dict[Hashable, Run] = {}


_local = _Local()


def attempt(query: Tensor, key: Tensor, value: Tensor, *scalars: Any) -> tuple[Hashable | None, Any]:
    """The signature of a call, and its result if such a call was made before, else None.

    `scalars` are all the other arguments. The signature is None where a call has to take the whole path.
    """
    if not is_plain_eager(query) or type(key) not in PLAIN_TYPES or type(value) not in PLAIN_TYPES:
        return None, None
    needs_grad = _needs_grad(query, key, value)
    options = needs_grad, scalars
    try:
        quick = _local.quick.get(options)
    except TypeError:  # an argument of a wrong type, for the whole path
        return None, None
    if quick is not None:
        result = quick(query, key, value)
        if result is not None:
            return None, result
        del _local.quick[options]
    place = _place(query, key, value)
    if place is None:
        return None, None
    try:
        signature = (
            query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
            query.dtype, key.dtype, value.dtype, place, options,
        )  # fmt: skip
    except RuntimeError:  # nested tensors have no shape
        return None, None
    run = _local.runs.get(signature, _new)
    if run is _new:
        return signature, None
    if run is None:
        return None, None
    _remember(run, options)
    return signature, run(query, key, value)


def _remember(run: Any, options: Hashable) -> None:
    """Twice in a row the same run: later calls may try its quick way, which looks at the tensors itself."""
    is_same = _local.last.get(options) is run
    if is_same:
        if hasattr(type(run), "quick") and run.quick is not None:
            _local.quick[options] = run.quick
        return
    if len(_local.last) >= KEPT:
        _local.last.clear()
        _local.quick.clear()
    _local.last[options] = run


def _new(*_: Tensor) -> None:
    """Stands for a signature that was not seen yet."""


def _place(query: Tensor, key: Tensor, value: Tensor) -> Hashable | None:
    """Where a call runs and what else a plan there depends on; None where calls are not repeated."""
    if query.is_cpu and key.is_cpu and value.is_cpu:
        return torch.get_num_threads()
    if not (query.is_cuda and key.is_cuda and value.is_cuda):
        return None
    device = query.get_device()
    if not device == key.get_device() == value.get_device() == torch.cuda.current_device():
        return None
    is_aligned = (query.data_ptr() | key.data_ptr() | value.data_ptr()) % ALIGNMENT == 0
    return ("cuda", device) if is_aligned else None


def _needs_grad(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return (query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled()


def keep(
    signature: Hashable,
    given: tuple[Tensor, Tensor, Tensor],
    inputs: Inputs,
    options: Options,
    backend: str | None,
    layout: str,
    return_lse: bool,
) -> None:
    """Let later calls of this signature go straight to the backend, if it knows a way.

    `given` are query, key and value as the caller has them; `inputs` must be views of them.
    """
    if any(unwrap_if_dead(t) is not t for t in given):  # tensors of a transform that is over
        return
    if len(_local.runs) >= KEPT:
        _local.runs.clear()
    _local.runs[signature] = None
    if any(t.data_ptr() != view.data_ptr() for t, view in zip(given, inputs[:3], strict=True)):
        return
    needs_grad = _needs_grad(*given)
    with torch.no_grad():  # as inside of an autograd.Function
        problem = describe(inputs, options)
    module = dispatch.load(dispatch.choose(problem, backend))
    make: Callable[..., Run | None] | None = getattr(module, "repeatable", None)
    recomputes = needs_grad and ops.recomputes(problem, backend)
    wants_lse = return_lse or (needs_grad and not recomputes)
    run = None if make is None else make(problem, inputs, layout, wants_lse)
    if run is not None and needs_grad:
        run = autograd.RepeatedCall(run, problem, options, backend, layout, return_lse, recomputes)
    _local.runs[signature] = run


def clear() -> None:
    """Forget what this thread has found: after a change of what backends can serve."""
    for found in (_local.runs, _local.last, _local.quick):
        found.clear()
