"""Tensors whose memory does not hold their numbers: PyTorch keeps a negation, or that all are 0, as a bit.

`x.conj().imag` is such a tensor. PyTorch's operations look at the bits, kernels that read memory do not,
so whoever calls one without PyTorch's dispatcher resolves its tensors first. Conjugates are complex, which no
function here takes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_lazy(t: Tensor) -> bool:
    """Whether memory does not hold the numbers."""
    return t.is_neg() or t._is_zerotensor()


def resolved(value: Any) -> Any:
    """A tensor with its numbers in memory; anything else as it is. Differentiable."""
    if isinstance(value, Tensor) and is_lazy(value):
        return value.clone()
    return value


def all_resolved(values: Any) -> tuple[Any, ...]:
    return tuple(map(resolved, values))
