"""Compilation ahead of time, so that no call waits for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention
from tilewise.core.checks import check_tensors
from tilewise.varlen import attention_varlen


def warmup(query: Tensor, key: Tensor, value: Tensor, *, backward: bool = True, **options: Any) -> None:
    """Compile what calls like this one need, and leave everything else as it was.

    Compiled kernels depend on dtypes, head_dim, query heads per KV head, and which options are in use; not on
    batch size or lengths. So short tensors will do, with the memory layout of the later ones. But up to 16
    queries take kernels of their own, and other ones for at least 256 keys, compiled for every power of two
    of batch sizes above 16.

    Args:
        query, key, value, options: as `tilewise.attention`; with `cu_seqlens_q` and `cu_seqlens_k`, as
            `tilewise.attention_varlen`. Their values do not matter; gradients they hold are not touched.
        backward: compile the backward too, with the gradient of `bias` if it requires grad.

    Raises:
        ValueError, TypeError, NotImplementedError: as `tilewise.attention`.

    Example:
        >>> x = torch.zeros(1, 64, 8, 32)
        >>> warmup(x, x, x, causal=True)
    """
    check_tensors(query=query, key=key, value=value)
    leaves = [t.detach().requires_grad_(backward and t.is_floating_point()) for t in (query, key, value)]
    bias = options.get("bias")
    if isinstance(bias, Tensor):
        options["bias"] = bias.detach().requires_grad_(backward and bias.requires_grad)
        leaves.append(options["bias"])
    if options.get("dropout_p") and options.get("generator") is None:
        options["generator"] = torch.Generator(query.device)  # the default one keeps its state
    call: Any = attention_varlen if "cu_seqlens_q" in options else attention
    with torch.enable_grad():
        out = call(*leaves[:3], **options)
        tensors = out if isinstance(out, tuple) else (out,)
        if backward:
            inputs = [t for t in leaves if t.requires_grad]
            torch.autograd.grad(tensors, inputs, [torch.zeros_like(t) for t in tensors])
