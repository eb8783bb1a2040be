"""The three ways to compute causal attention that the demo compares. Shapes (batch, seqlen, heads, dim)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise

Method = Callable[[Tensor, Tensor, Tensor], Tensor]


def standard(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as the formula reads: every score of every query and key is stored."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    seqlen = q.shape[2]
    s = (q * q.shape[-1] ** -0.5) @ k.mT  # [batch, heads, seqlen, seqlen]
    future = torch.ones(seqlen, seqlen, dtype=torch.bool, device=q.device).triu(1)
    p = s.masked_fill(future, float("-inf")).softmax(-1)
    return (p.to(v.dtype) @ v).transpose(1, 2)


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def tiled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return tilewise.attention(query, key, value, causal=True)  # type: ignore[return-value]


STANDARD, SDPA, TILEWISE = "standard", "torch SDPA", "tilewise"
METHODS: dict[str, Method] = {STANDARD: standard, SDPA: sdpa, TILEWISE: tiled}
