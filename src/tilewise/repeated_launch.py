"""A dense forward call on a GPU that was made before: two allocations and one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.launch_plan import LaunchPlan, Tensors
from tilewise.problem import AttentionProblem


def repeatable(
    problem: AttentionProblem,
    query: Tensor,
    layout: str,
    return_lse: bool,
    plan: LaunchPlan,
    arrange: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensors],
) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """A function of query, key and value in the caller's layout, which must be like those of the plan.

    Args:
        query: like those of the calls to come, (batch, seqlen_q, num_heads, head_dim).
        plan: what launches the kernel.
        arrange: all tensors of the launch, from query, key, value, out and lse.
    """
    batch, seqlen, heads, dim = (*query.shape[:-1], problem.head_dim_v)
    # one element, seen as a whole tensor: `empty_like` is the cheapest way to allocate another
    blank_lse = query.new_empty((), dtype=torch.float32).expand(batch, heads, seqlen)
    if layout == "bhsd":
        shape, stride = (batch, heads, seqlen, dim), (seqlen * heads * dim, dim, heads * dim, 1)
        new_out = functools.partial(
            torch.empty_strided, shape, stride, dtype=query.dtype, device=query.device
        )
    else:
        new_out = functools.partial(torch.empty_like, query.new_empty(()).expand(batch, seqlen, heads, dim))

    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        out, lse = new_out(), torch.empty_like(blank_lse)
        plan(arrange(query, key, value, out, lse))  # which reads addresses only
        return (out, lse) if return_lse else out

    return run
