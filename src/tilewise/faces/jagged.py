"""Nested tensors of layout `torch.jagged`, (batch, heads, ragged seqlen, dim), as packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.core.torch_private import ragged_dim
from tilewise.varlen import attention_varlen


def is_jagged(*arguments: Any) -> bool:
    """Whether one of them is a nested tensor of that layout."""
    return any(isinstance(t, Tensor) and t.layout == torch.jagged for t in arguments)


def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """`scaled_dot_product_attention` of nested tensors: each sequence by itself, nothing is padded.

    Beyond PyTorch's own: causal, grouped heads and every head_dim, on every device. Of key and value the
    lengths must be the same; with is_causal also those of query.

    Returns:
        nested (batch, heads, ragged seqlen, head_dim_v), with query's offsets.
    """
    q, starts_q = _packed("query", query)
    k, starts_k = _packed("key", key)
    v, starts_v = _packed("value", value)
    if attn_mask is not None:
        raise NotImplementedError("attn_mask of nested tensors: attention_varlen takes mask and bias")
    heads, heads_k = q.shape[1], k.shape[1]
    if heads != heads_k and not enable_gqa:
        raise ValueError(
            f"key.shape[1]={heads_k} (heads) must equal query.shape[1]={heads} unless enable_gqa=True"
        )
    _check_lengths("value", starts_v, "key", starts_k)
    if is_causal:  # top-left is then bottom-right
        _check_lengths("key", starts_k, "query with is_causal=True", starts_q)
    out = attention_varlen(q, k, v, starts_q, starts_k, dropout_p=dropout_p, causal=is_causal, scale=scale)
    return torch.nested.nested_tensor_from_jagged(out, starts_q).transpose(1, 2)  # type: ignore


def _packed(name: str, t: Any) -> tuple[Tensor, Tensor]:
    """(total, heads, dim), and the offsets of its sequences."""
    if not is_jagged(t):
        kind = f"layout={t.layout}" if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{name} ({kind}) must be nested, of layout=torch.jagged, as the others are")
    if t.ndim != 4 or ragged_dim(t) != 2:
        raise ValueError(
            f"{name}.shape={tuple(t.shape)} must be (batch, heads, ragged seqlen, dim): build it as "
            "(batch, ragged seqlen, heads, dim), then transpose(1, 2)"
        )
    t = t.transpose(1, 2)
    rows, offsets, lengths = t.values(), t.offsets(), t.lengths()
    if lengths is None:
        return rows, offsets
    # Rows that belong to no sequence are left out. PyTorch's `contiguous` does that too, but has no gradient.
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=offsets.dtype), (1, 0))
    shift = (offsets[:-1] - starts[:-1]).repeat_interleave(lengths)
    return rows[torch.arange(len(shift), device=rows.device) + shift], starts


def _check_lengths(name: str, offsets: Tensor, other: str, wanted: Tensor) -> None:
    """Raises ValueError if two tensors of offsets differ; the same tensor is not read."""
    if offsets is not wanted and not torch.equal(offsets, wanted):
        raise ValueError(f"{name} must have the sequence lengths of {other}: attention_varlen takes others")
