"""Attention over parts of the keys, put together: the rule behind split keys, rings and cascades.

Each part's softmax is normalized over its own keys, and its log-sum-exp says how much it weighs:

    lse = log(sum_p exp(lse_p)),   out = sum_p exp(lse_p - lse) out_p
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.core.checks import check_tensors, shown


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One (out, lse) from those of disjoint sets of keys, for the same queries. Differentiable.

    Computed in lse's dtype and rounded once. A sink must be in one of the parts only.

    Args:
        parts: at least one (out, lse): out (batch, seqlen_q, num_heads, head_dim_v) with lse (batch,
            num_heads, seqlen_q), or packed (total_q, num_heads, head_dim_v) with lse (num_heads, total_q), as
            `tilewise.attention(..., return_lse=True)` and `attention_varlen` return them.

    Returns:
        out and lse, as if all keys had been one call's. A query that saw no key in any part: out 0, lse -inf.

    Raises:
        ValueError: there is no part, or shapes do not fit each other.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018); Dao et al.,
    FlashAttention (2022), section 3.1.

    Example:
        >>> import tilewise
        >>> q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 6, 1, 8)
        >>> parts = [tilewise.attention(q, half, half, return_lse=True) for half in k.split([4, 2], 1)]
        >>> out, lse = merge(parts)
        >>> torch.allclose(out, tilewise.attention(q, k, k), atol=1e-6)
        True
    """
    if not isinstance(parts, Sequence) or not parts:
        raise ValueError(f"parts={shown(parts)} must hold at least one (out, lse)")
    for n, part in enumerate(parts):
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise TypeError(f"parts[{n}]={shown(part)} must be a tuple (out, lse)")
        check_tensors(**{f"parts[{n}][0]": part[0], f"parts[{n}][1]": part[1]})
        out, lse = part
        right = (*out.shape[:-3], out.shape[-2], out.shape[-3]) if out.ndim in (3, 4) else None
        if tuple(lse.shape) != right or out.shape != parts[0][0].shape:
            raise ValueError(
                f"parts[{n}] has out.shape={tuple(out.shape)} and lse.shape={tuple(lse.shape)}, must have "
                f"(..., seqlen, heads, dim) and (..., heads, seqlen), equal in all parts"
            )
    lses = torch.stack([lse for _, lse in parts])
    is_blind = (lses == float("-inf")).all(0)  # -inf - -inf would be NaN, here and in the gradient
    lses = lses.masked_fill(is_blind, 0.0)
    lse = torch.logsumexp(lses, 0).masked_fill(is_blind, float("-inf"))
    weights = torch.softmax(lses, 0).masked_fill(is_blind, 0.0)  # of a large lse, exp(lses - lse) is not 1
    weights = weights.transpose(-1, -2)[..., None]
    outs = torch.stack([out.to(lse.dtype) for out, _ in parts])
    return (weights * outs).sum(0).to(parts[0][0].dtype), lse


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Add the keys of one more part to (out, lse), in place. Shapes as of `merge`; out has lse's dtype.

    Start from out 0 and lse -inf.

    Example:
        >>> out, lse = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), float("-inf"))
        >>> merge_into(out, lse, torch.tensor([[[[1.0]]]]), torch.zeros(1, 1, 1))
        >>> merge_into(out, lse, torch.tensor([[[[3.0]]]]), torch.zeros(1, 1, 1))
        >>> out.item(), round(lse.exp().item(), 4)
        (2.0, 2.0)
    """
    weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == float("-inf"), 0.0)
    out.lerp_(part_out.to(out.dtype), weight.transpose(-1, -2)[..., None])
    torch.logaddexp(lse, part_lse, out=lse)
