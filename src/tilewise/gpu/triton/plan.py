"""The one entry of the Triton kernels: which plan serves a call."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from tilewise.core.plan import FunctionPlan, Plan, Results, Saves
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.signature import Signature, in_order
from tilewise.gpu.launch.launch_plan import Step
from tilewise.gpu.launch.plan import Again, Given, GpuPlan, again_backward, again_forward, function_plan
from tilewise.gpu.triton import launch, launch_decode
from tilewise.gpu.triton.call import with_dense_rows
from tilewise.gpu.triton.launch import BiasGradient
from tilewise.gpu.triton.statistics.plan import StatisticsPlan, redo_top_k as redo_top_k


def plan(problem: AttentionProblem, signature: Signature) -> Plan:
    """Calls without optional tensors are launched again as they were; others are readied anew."""
    if signature.direction == "statistics":
        return StatisticsPlan(problem, signature.aux)  # type: ignore[return-value]
    if signature.direction == "bias":
        return FunctionPlan(problem, _bias_gradient)  # type: ignore[arg-type]
    if problem.functions is not None:
        return function_plan(problem, signature.request, _forward, _backward)
    if signature.direction == "backward":
        again = functools.partial(_again_backward, problem)
        return GpuPlan(problem, signature, _backward, again, _given_to_backward)
    residual, order = signature.request.residual, signature.request.order
    first = functools.partial(_forward, order=order, residual=residual)
    again = functools.partial(_again_forward, problem, order, residual)
    return GpuPlan(problem, signature, first, again, _given_to_forward)


def saves(problem: AttentionProblem) -> Saves:
    return Saves(residual=True)


def _forward(problem: AttentionProblem, inputs: Inputs, order: str, residual: bool) -> Results:
    out, *rest = launch.forward(problem, inputs, order=order, residual=residual)
    return Results(in_order(out, order), *rest)


def _given_to_forward(inputs: Inputs) -> Given | None:
    return None if any(t is not None for t in inputs[3:]) else inputs[:3]


def _again_forward(problem: AttentionProblem, order: str, residual: bool, given: Given) -> Again | None:
    if any(with_dense_rows(t) is not t for t in given) or launch_decode.serves(problem):
        return None

    def steps(given: Given, new: Given) -> list[Step]:
        return [Step(launch.forward_launch, Inputs(*given), (None,), tuple(new))]

    return again_forward(problem, order, residual, given, steps)


def _backward(
    problem: AttentionProblem, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    assert results.out is not None and results.lse is not None
    given = (results.out, results.lse, dout, dlse)
    return launch.backward(problem, inputs, *given, residual=results.residual)


def _bias_gradient(
    problem: AttentionProblem, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None
) -> BiasGradient:
    assert results.out is not None and results.lse is not None
    given = (results.out, results.lse, dout, dlse)
    return launch.bias_gradient(problem, inputs, *given, residual=results.residual)


def _given_to_backward(
    inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None
) -> Sequence[Tensor] | None:
    if dlse is not None or any(t is not None for t in inputs[3:]):
        return None
    return (*inputs[:3], *results, dout)  # type: ignore[return-value]


def _again_backward(problem: AttentionProblem, given: Given) -> Again | None:
    *tensors, lse, residual, dout = given
    is_ready = all(with_dense_rows(t) is t for t in (*tensors, dout))
    if not is_ready or not all(t is None or t.is_contiguous() for t in (lse, residual)):
        return None
    rows = launch.padded_rows(problem, lse.shape)
    steps = functools.partial(launch.plain_backward_steps, problem)
    return again_backward(problem, given, steps, (rows, rows, rows))
