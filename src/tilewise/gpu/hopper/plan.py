"""The one entry of these kernels: which plan serves a call."""

from __future__ import annotations

import functools

from torch import Tensor

from tilewise.core.plan import FunctionPlan, Plan, Results, Saves
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.signature import Signature
from tilewise.gpu.hopper.forward import launch


def plan(problem: AttentionProblem, signature: Signature) -> Plan:
    if signature.direction == "backward":
        return FunctionPlan(problem, _backward)
    return FunctionPlan(problem, functools.partial(_forward, residual=signature.request.residual))


def saves(problem: AttentionProblem) -> Saves:
    return Saves(residual=True)


def _forward(problem: AttentionProblem, inputs: Inputs, residual: bool) -> Results:
    return Results(*launch.forward(problem, inputs, residual=residual))


def _backward(
    problem: AttentionProblem, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    assert results.out is not None and results.lse is not None
    given = (results.out, results.lse, dout, dlse)
    return launch.backward(problem, inputs, *given, residual=results.residual)
