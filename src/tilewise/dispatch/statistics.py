"""Which backend gives which statistics of the weights: what each can do, as data.

A forward gives some in its own pass; the others need a second pass over the scores. The gradients of
statistics are computed by `tiled` on every device.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from tilewise.core.plan import Results, Watched
from tilewise.core.problem import AttentionProblem, Inputs, Options, describe_signature
from tilewise.core.signature import Request, Signature
from tilewise.core.statistics import NOTHING, Aux, Measured, merged
from tilewise.dispatch import plans
from tilewise.dispatch.capability import BACKENDS, refusal
from tilewise.dispatch.choice import first_able, load

NAMES = tuple(f.name for f in fields(Aux) if f.name != "last_rows")
# What each backend's second pass gives. `lse` needs none: every forward has it.
SERVES: dict[str, frozenset[str]] = {
    "hopper": frozenset({"lse", "column_sum", "block_sum", "top_k"}),
    "triton": frozenset(NAMES) - {"rows"},  # a few rows take the tiles a fraction of a pass
    "llvm": frozenset(NAMES) - {"rows"},
    "aten": frozenset({"lse"}),
    "tiled": frozenset(NAMES),
}
# What a forward may be asked for in its own pass: a kernel that cannot leaves it out. max_logit follows from
# row_max, so that not both are asked for.
IN_FORWARD = ("row_max", "max_logit", "entropy")
WITHOUT_FUNCTIONS = ("triton",)  # have no statistics with mask or score functions


def statistics_refusal(name: str, problem: AttentionProblem, aux: Aux) -> str | None:
    """Why a backend does not give these statistics of a problem, or None."""
    missing = [statistic for statistic in aux.names if statistic not in SERVES[name]]
    if missing:
        return f"does not give {', '.join(missing)}"
    if name in WITHOUT_FUNCTIONS and problem.functions is not None:
        return "has no statistics with mask or score functions"
    return refusal(name, problem) or _unserved_pass(name, problem, aux)


def _unserved_pass(name: str, problem: AttentionProblem, aux: Aux) -> str | None:
    """Why a backend's second pass does not take a problem that its forward takes."""
    if name != "hopper" or not aux.needs_pass:
        return None
    from tilewise.gpu.hopper.statistics.launch import unserved

    return unserved(problem, aux)


def given_by_forward(name: str | None, problem: AttentionProblem, aux: Aux) -> set[str]:
    """Statistics that the forward of the backend asked for gives, and its second pass does not."""
    if name != "hopper" or refusal(name, problem) is not None:
        return set()
    from tilewise.gpu.hopper.plan import watches

    return {statistic for statistic in aux.names if statistic in IN_FORWARD and watches(problem)}


def choose(problem: AttentionProblem, aux: Aux, backend: str | None) -> str:
    """The backend that gives all statistics of a request: the first that can, or the one asked for.

    Raises:
        ValueError, TypeError: unknown backend.
        NotImplementedError: the backend asked for refuses; the message names what would serve.
    """
    return first_able(backend, lambda name: statistics_refusal(name, problem, aux))


def servers(problem: AttentionProblem, aux: Aux, backend: str | None, of_forward: str) -> dict[str, str]:
    """Which backend gives each statistic; `backend` is the one asked for, `of_forward` the forward's.

    Raises as `choose`.
    """
    given = given_by_forward(of_forward, problem, aux)
    names = [name for name in aux.names if name != "lse"]
    return {n: of_forward if n in given else choose(problem, aux.only([n]), backend) for n in names}


@functools.lru_cache(maxsize=256)
def request(aux: Aux) -> Request:
    """What the forward is asked for, beside its output."""
    names = tuple(name for name in IN_FORWARD if name in aux.names)
    return Request(
        residual=True, statistics=tuple(n for n in names if n != "max_logit" or "row_max" not in names)
    )


@functools.lru_cache(maxsize=256)
def _after_forward(aux: Aux) -> Aux:
    """What is left of a request when the forward has given what it can."""
    return aux.only([name for name in aux.names if name not in IN_FORWARD])


def measure(
    inputs: Inputs, forward: Results | Watched, options: Options, backend: str | None, aux: Aux
) -> Measured:
    """`Measured` of a call whose forward gave this."""
    given = NOTHING
    if isinstance(forward, Watched):
        forward, row_max, entropy, max_logit = forward
        given = NOTHING._replace(row_max=row_max, entropy=entropy, max_logit=max_logit)
        aux = _after_forward(aux)
    if not aux.needs_pass:
        return _with_nan(given, forward)
    call = (options, backend, plans.NO_REQUEST, False, torch.get_num_threads(), "bshd", False, aux)
    entry = plans.find("statistics", (*inputs, forward.lse, forward.residual), call, _make)
    return _with_nan(merged((given, plans.run(entry, inputs, forward))), forward)


def _with_nan(found: Measured, results: Results) -> Measured:
    """Maxima forget a NaN, which is in lse."""
    if found.row_max is None or results.lse is None:
        return found
    is_nan = results.lse.isnan() & (found.row_max < float("inf"))
    return found._replace(row_max=found.row_max.masked_fill(is_nan, float("nan")))


class Passes(NamedTuple):
    """Several backends' passes, each for its share of the statistics."""

    problem: AttentionProblem
    plans: tuple[Any, ...]

    def run(self, *arguments: Any) -> Measured:
        return merged(plan.run(*arguments) for plan in self.plans)


def _make(signature: Signature) -> plans.Entry:
    problem, aux = describe_signature(signature), signature.aux
    shares: dict[str, list[str]] = {}
    for statistic in aux.names:
        if statistic != "lse":
            shares.setdefault(choose(problem, aux.only([statistic]), signature.backend), []).append(statistic)
    passes = tuple(
        _pass(name, problem, signature._replace(aux=aux.only(names))) for name, names in shares.items()
    )
    plan: Any = passes[0] if len(passes) == 1 else Passes(problem, passes)
    return plans.Entry(plan, signature, ", ".join(shares), plans.Saves(False))


def _pass(name: str, problem: AttentionProblem, signature: Signature) -> Any:
    plan: Any = load(name).plan(problem, signature)
    # Queries with very many largest weights are left to a kernel of another backend.
    has_lists = name == "hopper" and signature.aux.top_k
    return plan._replace(redo=load("triton").redo_top_k) if has_lists else plan


def table() -> str:
    """`SERVES` in Markdown: which statistics each backend's second pass gives."""
    lines = [f"| | {' | '.join(f'`{name}`' for name in BACKENDS)} |", f"|---|{':---:|' * len(BACKENDS)}"]
    for statistic in NAMES:
        cells = ("✓" if statistic in SERVES[name] else "–" for name in BACKENDS)
        lines.append(f"| `{statistic}` | {' | '.join(cells)} |")
    return "\n".join(lines)
