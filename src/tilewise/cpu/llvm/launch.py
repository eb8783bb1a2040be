"""The LLVM backend's face: what it covers, and which plan a call runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.cpu.llvm.compile import unavailable
from tilewise.cpu.llvm.plans import BackwardPlan, DecodePlan, ForwardPlan, local, rows_dense
from tilewise.problem import AttentionProblem, Gradients, Inputs

KEPT_PLANS = 256


@functools.lru_cache(maxsize=4096)
def supports(problem: AttentionProblem) -> str | None:
    """None if these kernels serve the problem, else the reason why not."""
    if problem.device_type != "cpu":
        return "runs on the CPU only"
    if problem.dropout_p > 0:
        return "has no dropout"
    if problem.is_quantized:
        return "has no quantized caches"
    if problem.bias_needs_grad and not _bias_is_full(problem):
        return "has no gradient of a bias that is broadcast"
    return unavailable()


def _bias_is_full(problem: AttentionProblem) -> bool:
    """Whether every score has a bias of its own, so that its gradient is that score's."""
    assert problem.bias_shape is not None
    *heads, seqlen_q, seqlen_k = problem.bias_shape
    if heads != [problem.batch, problem.num_heads]:
        return False
    if problem.is_packed:  # the longest sequences are not known here
        return seqlen_q > 1 and seqlen_k > 1
    return (seqlen_q, seqlen_k) == (problem.seqlen_q, problem.seqlen_k)


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
    rows = problem.seqlen_q * problem.group_size
    return 0 < rows <= (16 if problem.seqlen_k >= 2048 else 8)


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
    key = (make, id(problem), threads, q.stride(), k.stride(), v.stride())
    plan = local.plans.get(key)
    if plan is None:
        if len(local.plans) >= KEPT_PLANS:
            local.plans.clear()
        plan = local.plans[key] = make(problem, inputs, threads)
    return plan
