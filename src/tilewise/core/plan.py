"""What serves a call: a plan, made once for a signature and run for every call that has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tilewise.core.problem import AttentionProblem, Gradients, Inputs, in_layout
from tilewise.core.signature import Signature


class Results(NamedTuple):
    """What a forward gives; what nobody asked for is None."""

    out: Tensor | None
    lse: Tensor | None = None
    residual: Tensor | None = None  # lse + residual is the exact log-sum-exp


class Watched(NamedTuple):
    """What a forward gives that was asked for statistics of its weights, and has them in its pass."""

    results: Results
    row_max: Tensor | None = None
    entropy: Tensor | None = None
    max_logit: Tensor | None = None


class Saves(NamedTuple):
    """What a backward reads of its forward's results."""

    results: bool = True  # out and lse; False: there is no backward
    residual: bool = False


class Retry(NamedTuple):
    """The tensors hold numbers that the plan's kernel cannot. What was written is void."""

    by: Plan | str  # what can: another plan of the same call, or the backend that has one


class Plan(Protocol):
    """Shared between threads, and alike for all calls of a signature: it holds none of their tensors.

    Arguments and scratch memory come from a pool of the thread.
    """

    @property
    def problem(self) -> AttentionProblem: ...

    @property
    def layout(self) -> str:
        """Of the tensors that `run` takes and gives: "bshd", or the signature's."""

    def run(
        self,
        inputs: Inputs,
        results: Results | None = None,
        dout: Tensor | None = None,
        dlse: Tensor | None = None,
        /,
    ) -> Results | Watched | Gradients | Retry:
        """A forward takes inputs and gives `Results`, or `Watched` if its request names statistics; a
        backward takes all and gives `Gradients`.

        The tensors must have the plan's signature. `dlse` may be None.
        """


@dataclass(frozen=True)
class FunctionPlan:
    """A plan that keeps nothing but the problem: `function(problem, ...)` does all."""

    problem: AttentionProblem
    function: Callable[..., Results | Watched | Gradients | Retry]
    layout: str = "bshd"

    def run(
        self, inputs: Inputs, results: Results | None = None, *gradients: Tensor | None
    ) -> Results | Watched | Gradients | Retry:
        if results is None:
            return self.function(self.problem, inputs)
        return self.function(self.problem, inputs, results, *gradients)


def fitted(plan: Plan, signature: Signature) -> Plan:
    """The plan, for tensors in the signature's layout."""
    return plan if plan.layout == signature.layout else Transposed(plan.problem, signature.layout, plan)


@dataclass(frozen=True)
class Transposed:
    """A plan for tensors in "bshd", in calls that have them in another layout."""

    problem: AttentionProblem
    layout: str
    plan: Plan

    def run(self, *arguments: Any) -> Results | Watched | Gradients | Retry:
        found = self.plan.run(*in_bshd(self.layout, *arguments))
        return found if isinstance(found, Retry) else answer_in(self.layout, found)


def in_bshd(
    layout: str,
    inputs: Inputs,
    results: Results | None = None,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> tuple[Any, ...]:
    """What `Plan.run` takes, in "bshd"; it is given in a layout."""
    if results is None or dout is None:
        return (in_layout(inputs, layout),)
    if layout != "bshd":
        results, dout = _transposed(results), dout.transpose(1, 2)
    return in_layout(inputs, layout), results, dout, dlse


def answer_in(layout: str, found: Any) -> Any:
    """What `Plan.run` gives, in a layout; it is given in "bshd"."""
    if layout == "bshd":
        return found
    if isinstance(found, Gradients):
        return in_layout(found, layout)
    if isinstance(found, Watched):
        return found._replace(results=_transposed(found.results))
    return _transposed(found) if isinstance(found, Results) else found


def _transposed(results: Results) -> Results:
    return results if results.out is None else results._replace(out=results.out.transpose(1, 2))
