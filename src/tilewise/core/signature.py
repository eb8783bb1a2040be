"""The signature of a call: everything of it that a plan may read, and nothing else.

Calls of one signature differ in the values of their tensors alone. A plan is made from the signature, so what
is not in it, a plan cannot see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise.core.torch_private import is_lazy

Tensors = Sequence[Tensor | None]
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
    """What a forward is to give besides `out`, and in which dtype; of a backward the dtype alone."""

    lse: bool = True
    residual: bool = False  # what rounding took from lse: some backwards want it
    order: str = "bshd"  # of out's memory: "bshd", or "bhsd" with each head's rows together
    statistics: tuple[str, ...] = ()  # "row_max" or "max_logit", "entropy": with out, by a kernel that can
    wide: bool = False  # out or gradients in float32 if query is of 16 bits: to be summed with others


class Signature(NamedTuple):
    """Of one direction of one call; hashable."""

    direction: str  # "forward", "backward", "bias": a backward of the bias alone, "statistics" of the weights
    inputs: tuple[TensorSignature | None, ...]  # of `Inputs`, in its order
    # backward: of out, lse, residual, dout and dlse; statistics: of lse and residual; forward: none
    results: tuple[TensorSignature | None, ...]
    shares_memory: bool  # key and value begin at the same address
    options: Any  # `Options`
    backend: str | None  # the one asked for
    request: Request
    needs_bias_gradient: bool
    threads: int  # of PyTorch's pool
    layout: str = "bshd"  # of the call's tensors; those of a plan's signature are always described as "bshd"
    is_partial: bool = False  # backward: out and lse are those of more keys than the call has
    aux: Any = None  # of statistics: which, a `core.statistics.Aux`


def as_bshd(signature: Signature) -> Signature:
    """The signature as plans are made from it: (batch, seqlen, heads, dim) in any layout."""
    if signature.layout == "bshd":
        return signature
    inputs, results = map(list, (signature.inputs, signature.results))
    for tensors, indices in ((inputs, (0, 1, 2)), (results, (0, 3) if results else ())):
        for n in indices:  # query, key, value; out, dout
            t = tensors[n]
            if t is not None and t.ndim == 4:  # others are refused by their shape
                tensors[n] = t._replace(shape=swapped(t.shape), strides=swapped(t.strides))
    return signature._replace(inputs=tuple(inputs), results=tuple(results))


def swapped(sizes: Sequence[int]) -> tuple[int, ...]:
    """With the middle two of four in the other order."""
    first, second, third, fourth = sizes
    return first, third, second, fourth


# PyTorch keeps a negation, or that all numbers are 0, as a bit: `x.conj().imag` is such a tensor. PyTorch's
# operations look at the bits, kernels that read memory do not. So whoever calls a kernel without PyTorch's
# dispatcher resolves its tensors first. Conjugates are complex, which no function here takes.


class LazyTensor(Exception):
    """A tensor's numbers are not what its memory holds: it is to be resolved first."""


def resolved(value: Any) -> Any:
    """A tensor with its numbers in memory; anything else as it is. Differentiable."""
    if isinstance(value, Tensor) and is_lazy(value):
        return value.clone()
    return value


def all_resolved(values: Any) -> tuple[Any, ...]:
    return tuple(map(resolved, values))


def plain(value: Any) -> Any:
    """A tensor of a subclass as a plain one in the same memory; anything else as it is."""
    if isinstance(value, Tensor) and type(value) not in (Tensor, Parameter):
        return value.as_subclass(Tensor)
    return value


class NoMemory(Exception):
    """Something is no tensor, or a tensor that has no memory: PyTorch's dispatcher is to see the call."""


# ---- a GPU that is not here


class Gpu(NamedTuple):
    """What plans ask of a GPU."""

    name: str
    capability: tuple[int, int]  # CUDA's compute capability
    num_sms: int


_stand_in: Gpu | None = None


def stand_in() -> Gpu | None:
    """The GPU that tensors on the meta device stand for, if they do."""
    return _stand_in


@contextlib.contextmanager
def standing_in(gpu: Gpu) -> Iterator[None]:
    """Inside, tensors on the meta device are taken for tensors of `gpu`: calls take their usual way to a plan
    and its launches, which compile and start nothing.

    In every thread, as backwards run in threads of PyTorch's; so nothing else may run on a GPU meanwhile.
    """
    global _stand_in
    before, _stand_in = _stand_in, gpu
    try:
        yield
    finally:
        _stand_in = before


def device_of(t: Tensor) -> torch.device:
    """Where plans are to think that a tensor is."""
    return torch.device("cuda", 0) if _stand_in is not None and t.is_meta else t.device


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scores, lse and sums: float64 for float64 inputs, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- looking at tensors


def look(tensors: Tensors, grad_enabled: bool) -> tuple[TensorSignature | None, ...]:
    """What a plan may know of tensors. Raises LazyTensor, NoMemory."""
    try:
        return tuple([None if t is None else _look_at(t, grad_enabled) for t in tensors])
    except (RuntimeError, AttributeError) as error:
        raise NoMemory from error


def _look_at(t: Tensor, grad_enabled: bool) -> TensorSignature:
    if type(t) is not Tensor and type(t) is not Parameter:
        raise NoMemory
    address, device = t.data_ptr(), device_of(t)
    if is_lazy(t):
        raise LazyTensor
    if address == 0 and device.type == "meta":
        raise NoMemory
    needs_grad = grad_enabled and t.requires_grad
    return TensorSignature(t.shape, t.stride(), t.dtype, device, address % ALIGNMENT, needs_grad)


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


def new_out(query: Tensor, head_dim_v: int, order: str, dtype: torch.dtype | None = None) -> Tensor:
    """(..., seqlen, heads, head_dim_v) of query's or another dtype, its memory in an order: see `Request`."""
    *batch, seqlen, heads, _ = query.shape
    if order == "bhsd" and batch:
        return query.new_empty((*batch, heads, seqlen, head_dim_v), dtype=dtype).transpose(1, 2)
    return query.new_empty((*batch, seqlen, heads, head_dim_v), dtype=dtype)


def in_order(out: Tensor, order: str) -> Tensor:
    """out, or a copy whose memory is in the order: for kernels that store in one order only."""
    by_head = out.transpose(-3, -2)
    if order == "bshd" or out.ndim == 3 or by_head.is_contiguous():
        return out
    return by_head.contiguous().transpose(-3, -2)
