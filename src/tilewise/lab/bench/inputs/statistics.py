"""Statistics of benchmark cases: what each asks for, and how PyTorch gets it from stored weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.core.statistics import Aux, Statistics

BLOCK = 128  # queries and keys of a tile of `block_sum`
STATISTICS = {
    "max_logit": Aux(max_logit=True),
    "entropy": Aux(max_logit=True, entropy=True),
    "column_sum": Aux(column_sum=True),
    "top_k": Aux(top_k=8),
    "block_sum": Aux(block_sum=BLOCK),
}
# Of scores and weights (batch, heads, seqlen_q, seqlen_k), lengths multiples of BLOCK.
BY_FORMULA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "max_logit": lambda s, p: s.amax((0, 2, 3)),
    "entropy": lambda s, p: torch.special.entr(p).sum(-1),
    "column_sum": lambda s, p: p.sum(2),
    "top_k": lambda s, p: p.topk(8, -1).values,
    "block_sum": lambda s, p: p.unflatten(3, (-1, BLOCK)).sum(4).unflatten(2, (-1, BLOCK)).sum(3),
}


def formula(name: str, s: Tensor, p: Tensor) -> dict[str, Tensor]:
    """What a case asks for, by statistic; of the k largest weights without their keys."""
    return {each: BY_FORMULA[each](s, p) for each in STATISTICS[name].names}


def tensors(name: str, found: Statistics) -> dict[str, Tensor]:
    """The same of an answer."""
    given = {each: getattr(found, each) for each in STATISTICS[name].names}
    return {each: t if isinstance(t, Tensor) else t.weights for each, t in given.items()}
