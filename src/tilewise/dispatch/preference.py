"""Which of several able backends is faster, as measured: a reason to pass one over."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilewise.core.problem import AttentionProblem
from tilewise.dispatch.capability import BACKWARD, refusal

LONG = 1024  # queries and keys


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


def _has_fast_dot_products(problem: AttentionProblem, direction: str) -> bool:
    """The long full backward in bfloat16 on AMD's processors with AVX-512 BF16, twice as fast there as
    multiply-adds. Time of the generated kernels over PyTorch's: 1.06 and 1.15 for 2048 keys and 0.85 for 512;
    on Intel's 0.5 to 0.7."""
    if problem.dtype != torch.bfloat16 or problem.mask_shape is not None or problem.bias_shape is not None:
        return False
    is_long = min(problem.seqlen_q, problem.seqlen_k) >= LONG
    return direction == BACKWARD and is_long and not problem.causal and _is_amd_with_dot_products()


def _is_amd_with_dot_products() -> bool:
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # newer PyTorch only
    is_amd = "AMD" in str(capabilities.get("cpu_name"))
    return is_amd and torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


TABLE = (
    Preference("aten", "tiled", _has_slow_products, "is measured slower than the tiles for this problem"),
    Preference(
        "llvm",
        "aten",
        _has_fast_dot_products,
        "is measured slower than PyTorch's own kernel for this problem",
    ),
)


def slower(name: str, problem: AttentionProblem, direction: str) -> str | None:
    """Why a backend that could serve a problem is passed over for another that can; None if it is not."""
    for row in TABLE:
        is_beaten = row.backend == name and row.applies(problem, direction)
        if is_beaten and refusal(row.other, problem, direction) is None:
            return row.reason
    return None
