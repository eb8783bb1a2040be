"""`torch.nn.functional.scaled_dot_product_attention`, argument for argument."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.api import attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in for `torch.nn.functional.scaled_dot_product_attention`, with torch's semantics.

    Unlike `tilewise.attention`, the causal mask is aligned top-left: query `i` sees keys `0..i`.

    Args:
        query: (..., num_heads, seqlen_q, head_dim); any number of leading dimensions, also none.
        key: (..., num_kv_heads, seqlen_k, head_dim).
        value: (..., num_kv_heads, seqlen_k, head_dim_v).
        attn_mask: bool (True = attend) or float added to the scores, broadcastable to
            (..., num_heads, seqlen_q, seqlen_k); differentiable if float.
        dropout_p: probability of dropping a weight; applied whenever it is not 0, as torch does.
        is_causal: top-left causal mask; excludes attn_mask.
        scale: softmax scale; None is 1 / sqrt(head_dim).
        enable_gqa: allow fewer key heads than query heads.

    Returns:
        (..., num_heads, seqlen_q, head_dim_v). A query that sees no key gives 0.

    Raises:
        ValueError, TypeError: as `tilewise.attention`, and is_causal together with attn_mask.

    Example:
        >>> q, k = torch.ones(1, 2, 3, 8), torch.ones(1, 2, 5, 8)
        >>> v = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 2, 5, 1)
        >>> scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0].flatten()
        tensor([0.0000, 0.5000, 1.0000])
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}={type(t).__name__} must be a torch.Tensor")
        if t.ndim < 2:
            raise ValueError(
                f"{name}.shape={tuple(t.shape)} must have at least 2 dimensions: (..., seqlen, head_dim)"
            )
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal=True must be False when attn_mask is given")
    leading = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    q, k, v = (_four_dimensions(t, leading) for t in (query, key, value))
    if not enable_gqa and not q.shape[1] == k.shape[1] == v.shape[1]:
        heads = {t.shape[1] for t in (q, k, v)}
        if heads - {1} and len(heads - {1}) == 1:  # torch broadcasts a single head
            q, k, v = (t.expand(-1, max(heads), -1, -1) for t in (q, k, v))
        else:
            raise ValueError(
                f"key.shape[-3]={k.shape[1]} (heads) must equal query.shape[-3]={q.shape[1]} unless enable_gqa=True"
            )
    window = None
    if is_causal:
        # Top-left: query i sees keys up to i. In bottom-right terms that is a right edge of
        # seqlen_q - seqlen_k, after the keys that no query can see are cut off.
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
        window = (None, q.shape[2] - k.shape[2])
    options = {} if attn_mask is None else _mask_options(attn_mask, leading)
    is_square = is_causal and q.shape[2] == k.shape[2]
    out = attention(
        q, k, v, layout="bhsd", dropout_p=dropout_p, scale=scale,
        causal=is_square, window=None if is_square else window, **options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    if query.ndim == 2:
        return out[0, 0]
    return out.reshape(*leading, *out.shape[1:])


def _four_dimensions(t: Tensor, leading: torch.Size) -> Tensor:
    """(leading batch, heads, seqlen, dim): a view where the strides allow it."""
    if t.ndim == 2:
        t = t[None]
    t = t.expand(*leading, *t.shape[-3:])
    return t.reshape(-1, *t.shape[-3:]) if t.ndim != 4 else t


def _mask_options(attn_mask: Tensor, leading: torch.Size) -> dict[str, Tensor]:
    if attn_mask.ndim > 4 or (attn_mask.ndim == 4 and len(leading) != 1):
        tail = attn_mask.shape[-3:]
        attn_mask = attn_mask.expand(*leading, *tail).reshape(-1, *tail)
    return {"mask": attn_mask} if attn_mask.dtype == torch.bool else {"bias": attn_mask}
