"""The generated CPU kernels' one entry: which plan serves a call."""

from __future__ import annotations

from tilewise.core.plan import Plan, Saves
from tilewise.core.problem import AttentionProblem
from tilewise.core.signature import Signature
from tilewise.cpu.host import configs
from tilewise.cpu.host.backward_plan import BackwardPlan
from tilewise.cpu.host.forward_plan import DecodePlan, ForwardPlan
from tilewise.cpu.host.statistics_plan import StatisticsPlan


def plan(problem: AttentionProblem, signature: Signature) -> Plan:
    """The kernel for a problem, and how its work is divided."""
    if signature.direction == "backward":
        return BackwardPlan(problem, signature)
    if signature.direction == "statistics":
        return StatisticsPlan(problem, signature)  # type: ignore[return-value]
    if configs.is_decoding(problem):
        return DecodePlan(problem, signature)
    return ForwardPlan(problem, signature)


def saves(problem: AttentionProblem) -> Saves:
    return Saves(residual=True)
