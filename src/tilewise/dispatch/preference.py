"""Which of several able backends is faster, as measured: a reason to pass one over."""

from __future__ import annotations

import torch

from tilewise.core.problem import AttentionProblem
from tilewise.dispatch.capability import BACKWARD


def slower(name: str, problem: AttentionProblem, direction: str) -> str | None:
    """Why a backend that could serve a problem is passed over for another that can; None if it is not.

    PyTorch's own float16 products are not vectorized. 2 cores, torch 2.13: only forwards of short sequences
    beat the tiles, which serve everything.
    """
    is_short_forward = direction != BACKWARD and problem.seqlen_q * problem.seqlen_k < 256 * 256
    if name == "aten" and problem.dtype == torch.float16 and not is_short_forward:
        return "is measured slower than the tiles for this problem"
    return None
