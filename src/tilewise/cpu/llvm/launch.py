"""The LLVM backend's face: what it covers, and which plan a call runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.cpu.llvm.compile import unavailable
from tilewise.cpu.llvm.configs import has_amx
from tilewise.cpu.llvm.plans import (
    CPU,
    BackwardPlan,
    DecodePlan,
    ForwardPlan,
    local,
    rows_dense,
)
from tilewise.problem import AttentionProblem, Gradients, Inputs

KEPT_PLANS = 256
DECODE_ROWS, DECODE_QUERIES = 32, 16  # at most: queries times the heads that share a key head, and queries
MODEL_BYTES = 1 << 16  # larger outputs belong to calls that last longer than an allocation


@functools.lru_cache(maxsize=4096)
def supports(problem: AttentionProblem) -> str | None:
    """None if these kernels serve the problem, else the reason why not."""
    if problem.device_type != "cpu":
        return "runs on the CPU only"
    if problem.is_quantized:
        return "has no quantized caches"
    if problem.bias_needs_grad and problem.bias_shape and problem.bias_shape[3] == 1 < problem.seqlen_k:
        return "has no gradient of a bias that is broadcast over keys"
    return unavailable()


def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (like query, head_dim_v) and lse (batch, heads, seqlen_q), or packed (heads, total_q)."""
    inputs = _with_dense_rows(inputs)
    return _plan(_forward_plan, problem, inputs)(inputs)


def _forward_plan(problem: AttentionProblem, inputs: Inputs, threads: int) -> ForwardPlan | DecodePlan:
    return (DecodePlan if _is_decoding(problem) else ForwardPlan)(problem, inputs, threads)


def _is_decoding(problem: AttentionProblem) -> bool:
    """Few queries that share each key: the head dimension then fills the lanes better than they do."""
    if problem.is_packed or problem.mask_shape is not None or problem.bias_shape is not None:
        return False
    if problem.dropout_p > 0:
        return False
    seqlen_q, group = problem.seqlen_q, problem.group_size
    most = min(DECODE_ROWS, DECODE_QUERIES * group)
    if has_amx(problem) and (group < 4 or problem.seqlen_k < 2048):
        most = 8 * min(group, 2)  # tile registers make up for what queries alone leave empty
    return 0 < seqlen_q * group <= most


def repeatable(
    problem: AttentionProblem, inputs: Inputs, layout: str, return_lse: bool
) -> Callable[[Tensor, Tensor, Tensor], Any] | None:
    """A function of query, key and value in the caller's layout, for calls that differ in their values only.

    None where optional tensors or copies come in between.
    """
    if _with_dense_rows(inputs) is not inputs:
        return None
    plan = _plan(_forward_plan, problem, inputs)
    if plan.has_options:
        return None
    axes = (0, 2, 1, 3) if layout == "bhsd" else (0, 1, 2, 3)
    shape, stride = (tuple(sizes[axis] for axis in axes) for sizes in (plan.out_shape, plan.out_stride))
    new_out = _allocator(shape, stride, problem.dtype)
    lse_stride = torch.empty(plan.lse_shape, device="meta").stride()
    new_lse = _allocator(plan.lse_shape, lse_stride, problem.compute_dtype)
    attend = plan.attend

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = new_out()
        attend(query, key, value, out, None)
        return out

    def run_with_lse(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        attend(query, key, value, out, lse)
        return out, lse

    return run_with_lse if return_lse else run


def _allocator(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
    """Makes new tensors. Cheapest is `empty_like` of a model, which has memory of its own for a moment."""
    if math.prod(shape) * dtype.itemsize > MODEL_BYTES:
        return functools.partial(torch.empty_strided, shape, stride, dtype=dtype, device=CPU)
    model = torch.empty_strided(shape, stride, dtype=dtype, device=CPU)
    model.untyped_storage().resize_(0)
    return functools.partial(torch.empty_like, model)


def backward(
    problem: AttentionProblem, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """Gradients by recomputation from lse, each with the dtype of its input. Deterministic."""
    inputs = _with_dense_rows(inputs)
    return _plan(BackwardPlan, problem, inputs)(inputs, out, lse, dout, dlse)


def _with_dense_rows(inputs: Inputs) -> Inputs:
    """Query, key and value with a contiguous last dimension: a copy only where it was not."""
    q, k, v = inputs.query, inputs.key, inputs.value
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return inputs
    return inputs._replace(query=rows_dense(q), key=rows_dense(k), value=rows_dense(v))


def _plan(make: Callable[..., Any], problem: AttentionProblem, inputs: Inputs) -> Any:
    threads = torch.get_num_threads()
    q, k, v = inputs.query, inputs.key, inputs.value
    # A plan keeps its problem alive, so no other problem can have the same id while the plan is here.
    # Lengths besides: packed problems that are equal may have other totals, which a plan holds as a stride.
    key = (make, id(problem), threads, len(q), q.stride(), k.stride(), v.stride())
    plan = local.plans.get(key)
    if plan is None:
        if len(local.plans) >= KEPT_PLANS:
            local.plans.clear()
        plan = local.plans[key] = make(problem, inputs, threads)
    return plan
