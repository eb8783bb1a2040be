"""Tokens of sequences that are packed or lie in pages: counting, finding, and checking where they lie."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tilewise.core.values import check_pages


def tokens_of(counts: list[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of sequences of so many tokens, one after the other: each token's sequence, and its place in that,
    (total,) each; and the offsets (sequences + 1,)."""
    count = torch.tensor(counts, dtype=torch.int64, device=device)
    sequence = torch.repeat_interleave(torch.arange(len(counts), device=device), count)
    cu_seqlens = torch.nn.functional.pad(count.cumsum(0), (1, 0))
    return sequence, torch.arange(len(sequence), device=device) - cu_seqlens[sequence], cu_seqlens


def check_table(cache_k: Tensor, cache_v: Tensor, table: Tensor, batch: int) -> None:
    """Raise ValueError or TypeError unless pages and a table of so many sequences fit."""
    check_integer_tensors(block_table=table)
    if table.ndim != 2 or len(table) != batch or cache_k.ndim != 4 or cache_v.ndim != 4:
        raise ValueError(
            f"block_table.shape={tuple(table.shape)} must be (batch={batch}, pages a sequence), and "
            f"k.shape={tuple(cache_k.shape)}, v.shape={tuple(cache_v.shape)} (pages, page_size, heads, dim)"
        )


def check_counts(cache_k: Tensor, table: Tensor, counts: list[int]) -> None:
    """Raise ValueError unless the table has pages for so many tokens of each sequence."""
    capacity = table.shape[1] * cache_k.shape[1]
    if max(counts, default=0) > capacity:
        raise ValueError(f"block_table.shape={tuple(table.shape)} holds {capacity} tokens, not {max(counts)}")
    check_pages("block_table", table, counts, cache_k)


def gather_pages(cache_k: Tensor, cache_v: Tensor, table: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """The first `counts[b]` tokens of every sequence, packed. Differentiable."""
    sequence, offset, _ = tokens_of(counts, table.device)
    place = table[sequence, offset // cache_k.shape[1]].long(), offset % cache_k.shape[1]
    return cache_k[place], cache_v[place]


def counts_of(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """The sequence lengths that offsets stand for.

    Raises:
        ValueError, TypeError: they are not (batch + 1,) integers from 0 to total that never decrease.
    """
    check_integer_tensors(**{name: cu_seqlens})
    offsets = cu_seqlens.tolist() if cu_seqlens.ndim == 1 else []
    counts = [b - a for a, b in itertools.pairwise(offsets)]
    if not offsets or offsets[0] != 0 or offsets[-1] != total or min(counts, default=0) < 0:
        raise ValueError(
            f"{name}={offsets} must be (batch + 1,), never decrease and go from 0 to total={total}"
        )
    return counts


def check_integer_tensors(**tensors: Tensor) -> None:
    for name, t in tensors.items():
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
            found = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"{name} of {found} must be an int32 or int64 tensor")
