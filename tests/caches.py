"""Caches for tests: NaN wherever no sequence has a token, and numbers of no page where none has a row."""

from __future__ import annotations

import torch
from torch import Tensor

NAN = float("nan")
NO_PAGE = 1 << 30


def cached(
    tokens: list[Tensor], lengths: list[int], leftpad: list[int] | None = None, page_size: int | None = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Keys and values (batch, capacity, heads, dim) as a cache holds them, and the `Inputs` that say where.

    Pages are in any order, and one is no sequence's.

    Args:
        leftpad: rows of each sequence that are no tokens, at its beginning.
    """
    batch, capacity, device = *tokens[0].shape[:2], tokens[0].device
    ends, starts = (
        torch.tensor(n, dtype=torch.int32, device=device) for n in (lengths, leftpad or [0] * batch)
    )
    where = {"seqlens_k": ends} if leftpad is None else {"seqlens_k": ends, "leftpad_k": starts}
    row = torch.arange(capacity, device=device)
    is_token = (row >= starts[:, None]) & (row < ends[:, None])
    stored = [t.masked_fill(~is_token[..., None, None], NAN) for t in tokens]
    if page_size is not None:
        table = torch.randperm(batch * capacity // page_size, device=device).view(batch, -1).int()
        stored = [_in_pages(t, page_size, table) for t in stored]
        first_row = row[::page_size]
        is_unused = (first_row >= ends[:, None]) | (first_row + page_size <= starts[:, None])
        where["page_table"] = table.masked_fill(is_unused, NO_PAGE)
    return stored, where


def _in_pages(t: Tensor, page_size: int, table: Tensor) -> Tensor:
    pages = t.unflatten(1, (-1, page_size)).flatten(0, 1)
    pool = pages.new_full((len(pages) + 1, *pages.shape[1:]), NAN)
    pool[table.flatten().long()] = pages
    return pool


def in_8_bits(pools: list[Tensor], scales: list[Tensor], table: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Pages as float8_e4m3fn, and the tokens that they hold by a scale for each page and head."""
    stored = [t.to(torch.float8_e4m3fn) for t in pools]
    return stored, [
        in_rows(t.float() * s[:, None, :, None], table) for t, s in zip(stored, scales, strict=True)
    ]


def in_rows(pool: Tensor, table: Tensor) -> Tensor:
    """Pages as (batch, capacity, ...), with any page in place of none."""
    return pool[table.long().clamp(max=len(pool) - 1)].flatten(1, 2)
