"""Which of several able backends is faster, as measured: a reason to pass one over."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewise.core.problem import AttentionProblem
from tilewise.dispatch.capability import BACKWARD, refusal


class Preference(NamedTuple):
    """A backend that loses to another one where `applies(problem, direction)`."""

    backend: str
    other: str
    applies: Callable[[AttentionProblem, str], bool]
    reason: str


def _has_slow_products(problem: AttentionProblem, direction: str) -> bool:
    """PyTorch's own float16 products are not vectorized. 2 cores, torch 2.13: only forwards of short
    sequences beat the tiles."""
    is_short_forward = direction != BACKWARD and problem.seqlen_q * problem.seqlen_k < 256 * 256
    return problem.dtype == torch.float16 and not is_short_forward


TABLE = (
    Preference("aten", "tiled", _has_slow_products, "is measured slower than the tiles for this problem"),
)


def slower(name: str, problem: AttentionProblem, direction: str) -> str | None:
    """Why a backend that could serve a problem is passed over for another that can; None if it is not."""
    for row in TABLE:
        is_beaten = row.backend == name and row.applies(problem, direction)
        if is_beaten and refusal(row.other, problem, direction) is None:
            return row.reason
    return None
