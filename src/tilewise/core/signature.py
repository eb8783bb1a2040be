"""The signature of a call: everything of it that a plan may read, and nothing else.

Calls of one signature differ in the values of their tensors alone. A plan is made from the signature, so what
is not in it, a plan cannot see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: what GPU copies and Triton's specialization ask of an address


class TensorSignature(NamedTuple):
    """What a tensor shows without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    misalignment: int  # bytes behind a multiple of ALIGNMENT
    needs_grad: bool  # it requires grad, and gradients are enabled

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Request(NamedTuple):
    """What a forward is to give besides `out`."""

    lse: bool = True
    residual: bool = False  # what rounding took from lse: some backwards want it
    order: str = "bshd"  # of out's memory: "bshd", or "bhsd" with each head's rows together


class Signature(NamedTuple):
    """Of one direction of one call; hashable. Tensors are plain tuples here, for speed: see `named`."""

    direction: str  # "forward" or "backward"
    inputs: tuple[Any, ...]  # of `Inputs`, in its order
    results: tuple[Any, ...]  # backward: of out, lse, residual, dout and dlse
    shares_memory: bool  # key and value begin at the same address
    options: Any  # `Options`
    backend: str | None  # the one asked for
    request: Request
    needs_bias_gradient: bool
    threads: int  # of PyTorch's pool


def named(raw: Sequence[Any]) -> list[Any]:
    """`TensorSignature`s of what `look` returned."""
    return [None if t is None else TensorSignature(*t) for t in raw]


class LazyTensor(Exception):
    """A tensor's numbers are not what its memory holds: it is to be resolved first, see `core.lazy`."""


class NoMemory(Exception):
    """Something is no tensor, or a tensor that has no memory: PyTorch's dispatcher is to see the call."""


def look(tensors: Sequence[Tensor | None], grad_enabled: bool) -> tuple[Any, ...]:
    """What a plan may know of tensors. Raises LazyTensor, NoMemory."""
    try:
        return tuple([None if t is None else _look_at(t, grad_enabled) for t in tensors])
    except (RuntimeError, AttributeError) as error:
        raise NoMemory from error


def _look_at(t: Tensor, grad_enabled: bool) -> tuple[Any, ...]:
    address = t.data_ptr()
    if t.is_neg() or (address == 0 and t._is_zerotensor()):
        raise LazyTensor
    needs_grad = grad_enabled and t.requires_grad
    return t.shape, t.stride(), t.dtype, t.device, address % ALIGNMENT, needs_grad


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor whose elements follow each other.

    Example:
        >>> contiguous_strides((2, 3, 4))
        (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def rows_dense(t: Tensor) -> Tensor:
    """t, or a copy if its last dimension is not contiguous."""
    return t if t.stride(-1) == 1 else t.clone(memory_format=torch.contiguous_format)
