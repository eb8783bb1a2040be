"""The one entry of the Triton kernels: which plan serves a call."""

from __future__ import annotations

import functools

from torch import Tensor

from tilewise.core.plan import FunctionPlan, Plan, Results, Saves
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.signature import Signature, in_order
from tilewise.gpu.launch.launch_plan import Step, again_backward, again_forward
from tilewise.gpu.launch.plan import (
    Again,
    Given,
    GpuPlan,
    function_plan,
    given_to_backward,
    given_to_forward,
    nothing,
)
from tilewise.gpu.triton import call, launch, launch_decode
from tilewise.gpu.triton.call import launchable, with_dense_rows
from tilewise.gpu.triton.statistics.plan import StatisticsPlan, redo_top_k as redo_top_k


def plan(problem: AttentionProblem, signature: Signature) -> Plan:
    """Decoding, and calls with the tensors of `IN_FORWARDS`, are launched again; others are readied anew."""
    if signature.direction == "statistics":
        return StatisticsPlan(problem, signature.aux)  # type: ignore[return-value]
    if signature.direction == "bias":
        return FunctionPlan(problem, launch.bias_gradient)  # type: ignore[arg-type]
    if problem.functions is not None:
        return function_plan(problem, signature.request, _forward, launch.backward)
    if signature.direction == "backward":
        again = functools.partial(_again_backward, problem)
        return GpuPlan(problem, signature, launch.backward, again, given_to_backward(signature))
    residual, order = signature.request.residual, signature.request.order
    first = functools.partial(_forward, order=order, residual=residual)
    if launch_decode.serves(problem):
        again = functools.partial(launch_decode.again, problem, order, residual)
        return GpuPlan(problem, signature, first, again, tuple)
    again = functools.partial(_again_forward, problem, order, residual)
    return GpuPlan(problem, signature, first, again, given_to_forward(signature))


def saves(problem: AttentionProblem) -> Saves:
    return Saves(residual=True)


def _forward(problem: AttentionProblem, inputs: Inputs, order: str, residual: bool) -> Results:
    out, *rest = launch.forward(problem, inputs, order=order, residual=residual)
    return Results(in_order(out, order), *rest)


def _again_forward(problem: AttentionProblem, order: str, residual: bool, given: Given) -> Again | None:
    if any(with_dense_rows(t) is not t for t in given[:3]):
        return None

    def steps(given: Given, new: Given) -> list[Step]:
        inputs, results = Inputs(*given[:3], *new[3:]), call.Results(*new[:3])
        return [Step(launch.forward_launch, inputs, (None,), results)]

    return again_forward(problem, order, residual, given, steps, _others if len(given) > 3 else nothing)


def _others(given: Given) -> tuple[Tensor | None, ...]:
    """What a forward reads besides query, key and value, as kernels take it."""
    return launchable(Inputs(*given))[3:]


def _again_backward(problem: AttentionProblem, given: Given) -> Again | None:
    if problem.bias_needs_grad:
        return None
    *tensors, lse, residual, dout = given[:7]
    is_ready = all(with_dense_rows(t) is t for t in (*tensors, dout))
    if not is_ready or not all(t is None or t.is_contiguous() for t in (lse, residual)):
        return None

    def steps(given: Given, new: Given) -> list[Step]:
        dq, dk, dv, shift, low, delta, *others = new
        out, lse, residual, dout = given[3:7]
        results = call.Results(out, lse, residual, dout, None, shift, low, delta, None, dq, dk, dv)
        return launch.backward_steps(problem, Inputs(*given[:3], *others), results, {})

    def more(given: Given) -> tuple[Tensor | None, ...]:
        return _others((*given[:3], *given[7:]))

    rows = launch.padded_rows(problem, lse.shape)
    return again_backward(problem, given, steps, (rows, rows, rows), more if len(given) > 7 else nothing)
