"""The LLVM backend's face: what it covers, and which plan a call runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.cpu.host import configs
from tilewise.cpu.host.backward_plan import BackwardPlan
from tilewise.cpu.host.compile import unavailable
from tilewise.cpu.host.plans import DecodePlan, ForwardPlan, OutputPlan, ShortPlan, local, rows_dense
from tilewise.cpu.host.repeated import RepeatedBackward, RepeatedForward

KEPT_PLANS = 256
UNCUT = False  # `may_cut` of plans for calls with numbers that cannot be cut


@functools.lru_cache(maxsize=4096)
def supports(problem: AttentionProblem) -> str | None:
    """None if these kernels serve the problem, else the reason why not."""
    if problem.device_type != "cpu":
        return "runs on the CPU only"
    if problem.is_quantized:
        return "has no quantized caches"
    if problem.precision == "fp8":
        return "has no 8-bit products"
    if problem.bias_needs_grad and problem.bias_shape:
        if problem.bias_shape[3] == 1 < problem.seqlen_k:
            return "has no gradient of a bias that is broadcast over keys"
        if problem.bias_shape[0] < problem.batch and problem.has_leftpad:  # their blocks of keys differ
            return "has no gradient of a bias that sequences with left padding share"
    return unavailable()


def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out (like query, head_dim_v) and lse (batch, heads, seqlen_q), or packed (heads, total_q)."""
    inputs = _with_dense_rows(inputs)
    plan = _plan(_forward_plan, problem, inputs)
    results = plan(inputs)
    return _plan(_forward_plan, problem, inputs, UNCUT)(inputs) if plan.failed_to_cut else results


def _forward_plan(
    problem: AttentionProblem, inputs: Inputs, threads: int, may_cut: bool = True
) -> OutputPlan:
    if configs.is_short(problem):
        return ShortPlan(problem, inputs, threads)
    if configs.is_decoding(problem):
        return DecodePlan(problem, inputs, threads, may_cut)
    return ForwardPlan(problem, inputs, threads, may_cut)


def repeatable(
    problem: AttentionProblem, inputs: Inputs, layout: str, return_lse: bool
) -> RepeatedForward | None:
    """A function of query, key and value in the caller's layout, for calls that differ in their values only.

    None where optional tensors or copies come in between.
    """
    if _with_dense_rows(inputs) is not inputs:
        return None
    plan = _plan(_forward_plan, problem, inputs)
    if plan.has_options:
        return None
    like = Inputs(
        *(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in inputs[:3])
    )
    uncut = functools.partial(_plan, _forward_plan, problem, like, UNCUT)
    given = [t.transpose(1, 2) if layout == "bhsd" else t for t in like[:3]]
    return RepeatedForward(plan, uncut, given, layout, return_lse)


def backward(
    problem: AttentionProblem,
    inputs: Inputs,
    out: Tensor | None,
    lse: Tensor | None,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """Gradients by recomputation from lse, each with the dtype of its input. Deterministic.

    out and lse may be None where the problem `recomputes`.
    """
    inputs = _with_dense_rows(inputs)
    plan = _plan(BackwardPlan, problem, inputs)
    gradients = plan(inputs, out, lse, dout, dlse)
    if plan.failed_to_cut:
        return _plan(BackwardPlan, problem, inputs, "bshd", UNCUT)(inputs, out, lse, dout, dlse)
    return gradients


recomputes = configs.recomputes


def repeatable_backward(
    problem: AttentionProblem, layout: str, whole: Callable[..., tuple[Tensor, ...]]
) -> Callable[..., tuple[Tensor, ...]]:
    """See `tilewise.autograd.operators.repeatable_backward`."""

    def plan_for(*tensors: Tensor, may_cut: bool = True) -> BackwardPlan:
        return _plan(BackwardPlan, problem, tensors, layout, may_cut)

    return RepeatedBackward(problem, layout, plan_for, whole)


def _with_dense_rows(inputs: Inputs) -> Inputs:
    """Query, key and value with a contiguous last dimension: a copy only where it was not."""
    q, k, v = inputs.query, inputs.key, inputs.value
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return inputs
    return inputs._replace(query=rows_dense(q), key=rows_dense(k), value=rows_dense(v))


def _plan(make: Callable[..., Any], problem: AttentionProblem, inputs: tuple[Any, ...], *choices: Any) -> Any:
    threads = torch.get_num_threads()
    # All that a plan may read of tensors: equal problems may differ in any of it.
    looks = tuple([None if t is None else (t.shape, t.stride(), t.dtype) for t in inputs])
    key = (make, problem, threads, looks, choices)
    plan = local.plans.get(key)
    if plan is None:
        if len(local.plans) >= KEPT_PLANS:
            local.plans.clear()
        plan = local.plans[key] = make(problem, inputs, threads, *choices)
    return plan
