"""The generated CPU kernels' one entry: which plan serves a call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewise.core.plan import Plan, Results, Retry, Saves, Watched
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.signature import Signature
from tilewise.cpu.host import configs
from tilewise.cpu.host.backward_plan import BackwardPlan
from tilewise.cpu.host.call_plan import OutputPlan, longest
from tilewise.cpu.host.forward_plan import DecodePlan, ForwardPlan
from tilewise.cpu.host.statistics_plan import StatisticsPlan


def plan(problem: AttentionProblem, signature: Signature) -> Plan:
    """The kernel for a problem, and how its work is divided."""
    if signature.direction == "backward":
        return BackwardPlan(problem, signature)
    if signature.direction == "statistics":
        return StatisticsPlan(problem, signature)  # type: ignore[return-value]
    if problem.is_packed and not problem.needs_grad:
        return PackedPlan(problem, signature)
    return DecodePlan(problem, signature) if configs.is_decoding(problem) else ForwardPlan(problem, signature)


class PackedPlan:
    """A forward of packed sequences: their offsets tell whether all have few queries."""

    layout = "bshd"

    def __init__(self, problem: AttentionProblem, signature: Signature) -> None:
        self.problem, self.signature = problem, signature
        self.plans: dict[int, OutputPlan] = {}

    def run(self, inputs: Inputs, *_: Any) -> Results | Watched | Retry:
        return self.plan_of(longest(inputs.cu_seqlens_q)).run(inputs)

    def plan_of(self, seqlen_q: int) -> OutputPlan:
        """For so many queries of the longest sequence."""
        seqlen_q = min(seqlen_q, configs.MOST_QUERIES + 1)  # more are many
        if seqlen_q not in self.plans:
            few = replace(self.problem, seqlen_q=seqlen_q)
            is_decoding = configs.is_decoding(few)
            self.plans[seqlen_q] = (
                DecodePlan(few, self.signature) if is_decoding else ForwardPlan(self.problem, self.signature)
            )
        return self.plans[seqlen_q]


def saves(problem: AttentionProblem) -> Saves:
    return Saves(residual=True)
