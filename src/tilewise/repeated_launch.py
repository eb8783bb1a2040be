"""A dense forward call on a GPU that was made before: two allocations and one launch."""

from __future__ import annotations

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
    # one element each, seen as a whole tensor: `empty_like` is the cheapest way to allocate another
    one = query.new_empty(())
    blank_out = one.expand(*query.shape[:-1], problem.head_dim_v)
    blank_lse = one.float().expand(problem.batch, problem.num_heads, problem.seqlen_q)
    is_bhsd = layout == "bhsd"

    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        out, lse = torch.empty_like(blank_out), torch.empty_like(blank_lse)
        plan(arrange(query, key, value, out, lse))  # which reads addresses only
        if is_bhsd:
            out = out.transpose(1, 2)
        return (out, lse) if return_lse else out

    return run
