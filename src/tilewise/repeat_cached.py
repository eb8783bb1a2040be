"""Cached calls on a GPU that were made before: one look at the tensors, then the launches.

As in `tilewise.repeat`, the first call of a kind takes the whole path, and a later one that differs from it
in values only takes what that found. Lengths and pages are values: what a cache's bookkeeping can tell of
them is checked in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.core.eager import PLAIN_TYPES, is_plain_eager
from tilewise.core.problem import Inputs, Options, describe
from tilewise.dispatch import choice as dispatch
from tilewise.gpu.launch.launch_plan import ALIGNMENT
from tilewise.gpu.launch.repeated_launch import Attend, CachedTensors

KEPT = 4096

_found: dict[Hashable, Attend | None] = {}  # None: such calls take the whole path


def attempt(
    tensors: CachedTensors | None, others: Sequence[Tensor | None], *scalars: Any
) -> tuple[Hashable | None, Attend | None]:
    """The signature of a call, and what attends for it if such a call was made before.

    `others` are further tensors that the caller works with; `scalars` is all that both depend on besides,
    the caller's name included. The signature is None where a call has to take the whole path: it has other
    tensors than these (`tensors` is None), or something watches.
    """
    if tensors is None or type(tensors.query) not in PLAIN_TYPES:
        return None, None
    if not (_is_on_gpu(tensors.query) and is_plain_eager(tensors.query)):
        return None, None
    device, has_history = torch.cuda.current_device(), torch.is_grad_enabled()
    looks: list[Any] = [device, scalars]
    addresses = 0
    try:
        for t in (*tensors, *others):
            if t is None:
                looks.append(None)
                continue
            if type(t) not in PLAIN_TYPES or t.get_device() != device or (has_history and t.requires_grad):
                return None, None
            addresses |= t.data_ptr()
            looks += (t.shape, t.stride(), t.dtype)
        if addresses % ALIGNMENT or any(t.stride(-1) != 1 for t in tensors[:3]):  # some would be copied
            return None, None
        looks.append(tensors.key.data_ptr() == tensors.value.data_ptr())  # latent attention's values
        signature = tuple(looks)
        attend = _found.get(signature, _unseen)
    except (RuntimeError, TypeError):  # a tensor without memory, a scalar of a wrong type: the whole path
        return None, None
    return (signature, None) if attend is _unseen else (None, attend)


def _unseen(_: CachedTensors) -> tuple[Tensor, Tensor]:
    """Stands for a signature that was not seen yet."""
    raise AssertionError


def _is_on_gpu(t: Tensor) -> bool:
    return t.is_cuda


def keep(signature: Hashable, inputs: Inputs, options: Options, backend: str | None) -> None:
    """Let later calls of this signature go straight to the backend, if it knows a way.

    `inputs` are those that the call has attended with.
    """
    if len(_found) >= KEPT:
        _found.clear()
    with torch.no_grad():
        problem = describe(inputs, options)
    module = dispatch.load(dispatch.choose(problem, backend))
    make: Callable[..., Attend | None] | None = getattr(module, "repeatable_cached", None)
    _found[signature] = None if make is None else make(problem, inputs)
