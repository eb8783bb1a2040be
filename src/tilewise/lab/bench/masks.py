"""The boolean masks of benchmark cases: as a function of positions, as a tensor, and how much they leave."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tilewise.lab.bench.cases import Case

BLOCK = 128  # positions of a block of "blocks"

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # FlexAttention's: batch, head, query, key


class CaseMask(NamedTuple):
    """`pairs` are the visible (query, key) pairs of one head, over the batch."""

    mask_mod: MaskMod
    pairs: int
    has_batch: bool = False
    has_queries: bool = True

    def dense(self, case: Case, device: str) -> Tensor:
        """Bool (batch or 1, 1, seqlen_q or 1, seqlen_k), True = attend, of positions in 16 bits or more."""
        batch, queries = case.batch if self.has_batch else 1, case.seqlen_q if self.has_queries else 1
        b, i, j = (torch.arange(n, device=device) for n in (batch, queries, case.seqlen_k))
        return self.mask_mod(b[:, None, None, None], b[:1], i[:, None], j).expand(batch, 1, queries, len(j))


def _padding(case: Case, device: str) -> CaseMask:
    """Sequences whose ends are padding, a quarter of all keys."""
    steps = [(2 * n + 1) / (4 * case.batch) for n in range(case.batch)]
    kept = [round(case.seqlen_k * (1 - step)) for step in steps]
    lengths = torch.tensor(kept, device=device)
    return CaseMask(lambda b, h, i, j: j < lengths[b], sum(kept) * case.seqlen_q, True, False)


def _prefix(case: Case, device: str) -> CaseMask:
    """Causal behind a prefix of a quarter of the keys, which every query sees."""
    n, prefix = case.seqlen_k, case.seqlen_k // 4
    pairs = n * (n + 1) // 2 + prefix * (prefix - 1) // 2
    return CaseMask(lambda b, h, i, j: (j <= i) | (j < prefix), case.batch * pairs)


def _blocks(case: Case, device: str) -> CaseMask:
    """Half of all blocks of 128 x 128, drawn at random; those on the diagonal are always there."""
    rows, columns = case.seqlen_q // BLOCK, case.seqlen_k // BLOCK
    source = random.Random(rows * columns)
    drawn = [[i == j or source.random() < 0.5 for j in range(columns)] for i in range(rows)]
    blocks = torch.tensor(drawn, device=device)
    pairs = case.batch * BLOCK * BLOCK * sum(map(sum, drawn))
    return CaseMask(lambda b, h, i, j: blocks[i // BLOCK, j // BLOCK], pairs)


# name: the mask of a dense case of as many queries as keys, a multiple of BLOCK
MASKS: dict[str, Callable[[Case, str], CaseMask]] = {
    "padding": _padding,
    "prefix": _prefix,
    "blocks": _blocks,
}
