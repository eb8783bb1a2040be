"""Statistics of the weights, as the formulas read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.core.statistics import Aux, Statistics, TopK
from tilewise.reference.formula import Forward, check_options, forward, unpack


def attention_statistics(
    query: Tensor, key: Tensor, aux: Aux, *, dtype: torch.dtype = torch.float64, **options: Any
) -> Statistics:
    """What `tilewise.attention_statistics` gives, by the formulas of `core.statistics`, O(N^2) memory.

    Args:
        query, key, options: as `attention` takes them.
        aux: which statistics.
        dtype: precision everything is computed in. PyTorch differentiates the result.

    Example:
        >>> q = torch.eye(2).view(1, 2, 1, 2)
        >>> attention_statistics(q, q, Aux(row_max=True), scale=1.0).row_max.flatten().tolist()
        [1.0, 1.0]
    """
    check_options(attention_statistics, options)
    if options.get("cu_seqlens_q") is not None:
        parts = unpack(query, key, key, options)
        found = [attention_statistics(*p.tensors[:2], aux, dtype=dtype, **p.options) for p in parts]
        return _packed_statistics(found, aux)
    f = forward(query, key, key, dtype, **options)
    batch, heads, seqlen_q, seqlen_k = f.s.shape
    i = torch.arange(seqlen_q, device=f.s.device)[:, None]
    j = torch.arange(seqlen_k, device=f.s.device)[None, :]
    entropy = f.lse - (f.p * f.s.masked_fill(f.s == float("-inf"), 0.0)).sum(-1)
    if f.p_sink is not None:
        entropy = entropy - f.p_sink * options["sinks"].to(dtype)[:, None]
    row_max = f.s.amax(-1) if seqlen_k else f.s.new_full(f.s.shape[:-1], float("-inf"))
    columns = f.p[:, :, max(0, seqlen_q - (aux.last_rows or seqlen_q)) :].sum(2)
    if aux.column_sum == "group":
        columns = columns.unflatten(1, (f.k.shape[1], heads // f.k.shape[1])).sum(2)
    rows = [r for r in aux.rows or () if -seqlen_q <= r < seqlen_q]
    whole_rows = f.p.new_zeros((batch, heads, len(aux.rows or ()), seqlen_k))
    if rows:
        whole_rows[:, :, [r in rows for r in aux.rows or ()]] = f.p[:, :, rows]
    return Statistics(
        lse=f.lse if aux.lse else None,
        row_max=row_max if aux.row_max else None,
        max_logit=_max_logit(row_max) if aux.max_logit else None,
        entropy=entropy.masked_fill(f.lse == float("-inf"), 0.0) if aux.entropy else None,
        column_sum=columns if aux.column_sum else None,
        top_k=_top_k(f, aux.top_k) if aux.top_k else None,
        rows=whole_rows if aux.rows else None,
        block_sum=_block_sums(f.p, aux.block_sum) if aux.block_sum else None,
        expected_distance=(f.p * (i + seqlen_k - seqlen_q - j).abs()).sum(-1)
        if aux.expected_distance
        else None,
    )


def _max_logit(row_max: Tensor) -> Tensor:
    """Of each head; -inf where there are no rows."""
    none = row_max.new_full((1, row_max.shape[1]), float("-inf"))
    return torch.cat([none, row_max.transpose(1, 2).flatten(0, 1)]).amax(0)


def _top_k(f: Forward, k: int) -> TopK:
    padding = (0, max(0, k - f.s.shape[-1]))
    s = torch.nn.functional.pad(f.s, padding, value=float("-inf"))
    s, keys = s.sort(dim=-1, descending=True, stable=True)
    keys = keys[..., :k]
    p = torch.nn.functional.pad(f.p, padding).gather(-1, keys)
    return TopK(p, keys.masked_fill(s[..., :k] == float("-inf"), -1))


def _block_sums(p: Tensor, size: int) -> Tensor:
    """(batch, heads, rows, keys), padded to whole blocks, summed over them."""
    padding = (0, -p.shape[3] % size, 0, -p.shape[2] % size)
    return torch.nn.functional.pad(p, padding).unflatten(3, (-1, size)).unflatten(2, (-1, size)).sum((3, 5))


def _packed_statistics(found: list[Statistics], aux: Aux) -> Statistics:
    """Rows and keys of all sequences after each other; what has a batch dimension, padded to the longest."""

    def joined(name: str, dim: int = -1) -> Tensor | None:
        if not aux.asks(name):
            return None
        return torch.cat([getattr(f, name)[0] for f in found], dim)

    def stacked(name: str) -> Tensor | None:
        if not aux.asks(name):
            return None
        parts = [getattr(f, name) for f in found]
        longest = [max(p.shape[dim] for p in parts) for dim in (2, 3)]
        sizes = [(0, longest[1] - p.shape[3], 0, longest[0] - p.shape[2]) for p in parts]
        return torch.cat([torch.nn.functional.pad(p, size) for p, size in zip(parts, sizes)])

    best = [f.top_k for f in found if f.top_k is not None]
    return Statistics(
        **{name: joined(name) for name in ("lse", "row_max", "entropy", "column_sum", "expected_distance")},
        max_logit=torch.stack([f.max_logit for f in found]).amax(0) if aux.max_logit else None,  # type: ignore[misc]
        top_k=TopK(*(torch.cat([t[0] for t in ts], 1) for ts in zip(*best))) if best else None,
        **{name: stacked(name) for name in ("rows", "block_sum")},
    )
