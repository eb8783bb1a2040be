"""Which backend takes the second pass that statistics of the weights need: what each can do, as data.

The gradients of statistics are computed by `tiled` on every device.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from tilewise.core.checks import shown
from tilewise.core.plan import Results
from tilewise.core.problem import AttentionProblem, Inputs, Options, describe_signature
from tilewise.core.signature import Signature
from tilewise.core.statistics import Aux
from tilewise.dispatch import plans
from tilewise.dispatch.capability import BACKENDS, FORWARD, refusal
from tilewise.dispatch.choice import load
from tilewise.dispatch.preference import slower

NAMES = tuple(f.name for f in fields(Aux) if f.name != "last_rows")
# What each backend's second pass gives. `lse` needs none: every forward has it.
SERVES: dict[str, frozenset[str]] = {
    "hopper": frozenset({"lse"}),
    "triton": frozenset({"lse", "row_max", "max_logit", "entropy", "column_sum", "expected_distance"}),
    "llvm": frozenset({"lse", "row_max", "max_logit", "entropy", "column_sum"}),
    "aten": frozenset({"lse"}),
    "tiled": frozenset(NAMES),
}
WITHOUT_FUNCTIONS = ("triton",)  # have no statistics with mask or score functions


def statistics_refusal(name: str, problem: AttentionProblem, aux: Aux) -> str | None:
    """Why a backend does not give these statistics of a problem, or None."""
    missing = [statistic for statistic in aux.names if statistic not in SERVES[name]]
    if missing:
        return f"does not give {', '.join(missing)}"
    if name in WITHOUT_FUNCTIONS and problem.functions is not None:
        return "has no statistics with mask or score functions"
    return refusal(name, problem, FORWARD)


def choose(problem: AttentionProblem, aux: Aux, backend: str | None) -> str:
    """The backend that takes the second pass: the first that can, or the one asked for.

    Raises:
        ValueError, TypeError: unknown backend.
        NotImplementedError: the backend asked for refuses; the message names what would serve.
    """
    able = [
        name
        for name in BACKENDS
        if statistics_refusal(name, problem, aux) is None and slower(name, problem, FORWARD) is None
    ]
    if backend is None:
        return able[0]
    if not isinstance(backend, str):
        raise TypeError(f"backend={shown(backend)} must be None or a string")
    load(backend)
    reason = statistics_refusal(backend, problem, aux)
    if reason is not None:
        would_serve = " or ".join(map(repr, able))
        raise NotImplementedError(f"backend={backend!r} {reason}; {would_serve} would serve")
    return backend


def measure(inputs: Inputs, results: Results, options: Options, backend: str | None, aux: Aux) -> Any:
    """`Measured` of a call whose forward gave `results`."""
    call = (options, backend, plans.NO_REQUEST, False, torch.get_num_threads(), "bshd", False, aux)
    entry = plans.find("statistics", (*inputs, results.lse, results.residual), call, _make)
    return plans.run(entry, inputs, results)


def _make(signature: Signature) -> plans.Entry:
    problem = describe_signature(signature)
    name = choose(problem, signature.aux, signature.backend)
    return plans.Entry(load(name).plan(problem, signature), signature, name, plans.Saves(False))


def table() -> str:
    """`SERVES` in Markdown: which statistics each backend's second pass gives."""
    lines = [f"| | {' | '.join(f'`{name}`' for name in BACKENDS)} |", f"|---|{':---:|' * len(BACKENDS)}"]
    for statistic in NAMES:
        cells = ("✓" if statistic in SERVES[name] else "–" for name in BACKENDS)
        lines.append(f"| `{statistic}` | {' | '.join(cells)} |")
    return "\n".join(lines)
