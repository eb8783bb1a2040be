"""The boolean masks of benchmark cases: as a function of positions, as a tensor, and how much they leave."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tilewise.lab.bench.cases import Case

BLOCK = 128  # positions of a block of "blocks"
RADIUS = 6  # rows and columns of a neighbourhood, each way
DILATED = 512  # keys

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


def _documents(case: Case, device: str) -> CaseMask:
    """Causal in each of some documents, which lie one behind the other."""
    lengths = document_lengths(case.seqlen_k, case.seqlen_k, case.seqlen_k // 4)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    pairs = case.batch * sum(n * (n + 1) // 2 for n in lengths)
    return CaseMask(lambda b, h, i, j: (document[i] == document[j]) & (j <= i), pairs)


def _neighbourhood(case: Case, device: str) -> CaseMask:
    """Tokens are a square picture, and each sees those at most RADIUS rows and columns away."""
    side = math.isqrt(case.seqlen_k)
    pairs = 0
    for i in range(case.seqlen_q):
        y, x = divmod(i, side)
        for row in range(max(0, y - RADIUS), y + RADIUS + 1):
            length = min(side, case.seqlen_k - row * side)  # the last row may be shorter
            pairs += max(0, min(x + RADIUS, length - 1) - max(x - RADIUS, 0) + 1)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        rows = (i // side - j // side).abs() <= RADIUS
        return rows & ((i % side - j % side).abs() <= RADIUS)

    return CaseMask(mask_mod, case.batch * pairs)


def _dilated(case: Case, device: str) -> CaseMask:
    """Every fourth key of the last DILATED."""
    pairs = sum(min(i, DILATED - 1) // 4 + 1 for i in range(case.seqlen_q))

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i - j >= 0) & (i - j < DILATED) & ((i - j) % 4 == 0)

    return CaseMask(mask_mod, case.batch * pairs)


def _mixed(case: Case, device: str) -> CaseMask:
    """Text is causal; the tokens of a picture also see each other: every other quarter of a quarter."""
    n, size = case.seqlen_k, case.seqlen_k // 16
    picture = torch.arange(n, device=device) // size
    picture = torch.where(picture % 2 == 1, picture, -1)
    pairs = case.batch * (n * (n + 1) // 2 + 8 * size * (size - 1) // 2)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) | ((picture[i] == picture[j]) & (picture[i] >= 0))

    return CaseMask(mask_mod, pairs)


def document_lengths(total: int, seed: int, longest: int = 16384) -> tuple[int, ...]:
    """A long-tailed mix of document lengths (log-normal, median 512 tokens) that adds up to `total`.

    Example:
        >>> sum(document_lengths(65536, seed=0))
        65536
    """
    source, lengths = random.Random(seed), []
    while total > 0:
        length = min(total, longest, max(16, round(source.lognormvariate(6.24, 1.3))))
        lengths.append(length)
        total -= length
    return tuple(lengths)


# name: the mask of a dense case of as many queries as keys, a multiple of BLOCK
MASKS: dict[str, Callable[[Case, str], CaseMask]] = {
    "padding": _padding,
    "prefix": _prefix,
    "blocks": _blocks,
    "documents": _documents,
    "neighbourhood": _neighbourhood,
    "dilated": _dilated,
    "mixed": _mixed,
}
BOOLEAN_MASKS = ("padding", "prefix", "blocks")  # of the suite of boolean masks
FUNCTION_MASKS = ("prefix", "documents", "neighbourhood", "dilated", "mixed", "blocks")
