"""`torch.nn.functional.scaled_dot_product_attention`, argument for argument."""

from __future__ import annotations

import math
from typing import Any, Never

import torch
from torch import Tensor

from tilewise.api import draw_seed
from tilewise.autograd import functions
from tilewise.core.checks import check_flag, check_known, check_number, check_tensors
from tilewise.core.problem import Inputs, Options
from tilewise.core.signature import Request
from tilewise.core.torch_private import is_any_autocast_enabled
from tilewise.faces.autocast import autocast
from tilewise.faces.jagged import is_jagged, jagged_attention

BY_HEAD, BY_TOKEN = Request(lse=False, order="bhsd"), Request(lse=False)


class SDPAValueError(ValueError, RuntimeError):
    """A value that does not fit: `ValueError` as everywhere here, and `RuntimeError` as PyTorch raises."""


class SDPATypeError(TypeError, RuntimeError):
    """A type that does not fit: `TypeError` as everywhere here, and `RuntimeError` as PyTorch raises."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: Never,
) -> Tensor:
    """Drop-in for `torch.nn.functional.scaled_dot_product_attention`, with torch's semantics.

    Unlike `tilewise.attention`, the causal mask is aligned top-left: query `i` sees keys `0..i`; and under
    autocast all floating-point tensors but float64 take autocast's dtype.

    Args:
        query: (..., num_heads, seqlen_q, head_dim); any number of leading dimensions, also none. Or all three
            nested, of layout `torch.jagged`: (batch, num_heads, ragged seqlen, head_dim), without attn_mask.
        key: (..., num_kv_heads, seqlen_k, head_dim).
        value: (..., num_kv_heads, seqlen_k, head_dim_v).
        attn_mask: bool (True = attend) or float added to the scores, broadcastable to
            (..., num_heads, seqlen_q, seqlen_k); differentiable if float. Or `causal_upper_left` or
            `causal_lower_right` of `torch.nn.attention.bias`, for which no mask is made.
        dropout_p: probability in [0, 1] of dropping a weight; applied whenever it is not 0, as torch does.
        is_causal: top-left causal mask; excludes attn_mask.
        scale: softmax scale; None is 1 / sqrt(head_dim).
        enable_gqa: allow fewer KV heads than query heads.

    Returns:
        (..., num_heads, seqlen_q, head_dim_v), nested if query is, its memory in query's order as torch's. A
        query that sees no key gives 0.

    Raises:
        SDPAValueError, SDPATypeError: where `tilewise.attention` raises ValueError or TypeError, and for
            is_causal together with attn_mask. Both are RuntimeErrors too, which PyTorch raises.
        NotImplementedError: attn_mask of nested tensors.

    Example:
        >>> q, k = torch.ones(1, 2, 3, 8), torch.ones(1, 2, 5, 8)
        >>> v = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 2, 5, 1)
        >>> scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0].flatten()
        tensor([0.0000, 0.5000, 1.0000])
    """
    try:
        if unknown:  # the call would take its time each time
            check_known(scaled_dot_product_attention, unknown)
        is_lower_right = False
        if attn_mask is not None and hasattr(attn_mask, "seq_len_kv") and not is_jagged(query, key, value):
            is_lower_right = _is_lower_right(attn_mask, query, key, is_causal)
            attn_mask, is_causal = None, True
        if is_any_autocast_enabled():
            query, key, value, attn_mask = autocast(query, key, value, attn_mask)
        if not (type(query) is type(key) is type(value) is Tensor):
            if is_jagged(query, key, value):
                return jagged_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            check_tensors(query=query, key=key, value=value)
        is_default = is_causal is False and enable_gqa is False and type(dropout_p) is float
        if not is_default or dropout_p != 0:
            _check_options(attn_mask, dropout_p, is_causal, enable_gqa)
        q, k, v, leading = _batched(query, key, value, enable_gqa)
        mask = bias = right = None
        if attn_mask is not None:
            mask, bias = _mask_or_bias(attn_mask, q, k, q.shape[:1] if leading is None else leading)
        if is_causal and not is_lower_right and q.shape[2] != k.shape[2]:
            # Top-left: query i sees keys up to i. In bottom-right terms that is a right edge of
            # seqlen_q - seqlen_k, after the keys that no query can see are cut off.
            k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
            right, is_causal = q.shape[2] - k.shape[2], False
        if dropout_p == 1:  # torch allows it: no weight survives
            v, dropout_p = v * 0, 0.0
        seed = draw_seed(q, dropout_p) if dropout_p else None
        inputs = Inputs(q, k, v, None, None, None, None, None, mask, bias, None, None, seed)
        options = Options(is_causal, None, right, 0.0, dropout_p, scale)
        _, by_head, by_token, _ = q.stride()  # out lies as query does, as torch's
        request = BY_HEAD if by_head >= by_token else BY_TOKEN
        out = functions.attention(inputs, options, None, request, "bhsd")[0]
        if leading is not None:
            is_one_head = max(query.ndim, key.ndim, value.ndim) == 2
            out = out[0, 0] if is_one_head else out.reshape(*leading, *out.shape[1:])
        return out
    except (ValueError, TypeError, RuntimeError) as error:
        raise _as_pytorchs(error, query=query, key=key, value=value) from None


def _as_pytorchs(error: Exception, **tensors: Any) -> Exception:
    """Of one of the two kinds above. PyTorch's own error stays, but of a tensor that can't say its shape."""
    if not isinstance(error, ValueError | TypeError):
        padded = [
            n for n, t in tensors.items() if getattr(t, "is_nested", False) and t.layout == torch.strided
        ]
        if not padded:
            return error
        message = f"{padded[0]} is nested of layout=torch.strided, must be dense or of layout=torch.jagged"
        error = TypeError(message).with_traceback(error.__traceback__)
    functions.refuse(error)
    kind = SDPAValueError if isinstance(error, ValueError) else SDPATypeError
    return kind(*error.args).with_traceback(error.__traceback__)


def _check_options(attn_mask: Any, dropout_p: float, is_causal: bool, enable_gqa: bool) -> None:
    """Raises ValueError or TypeError."""
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    check_number("dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p={dropout_p} must be in [0, 1]")
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal=True must be False when attn_mask is given")


def _is_lower_right(bias: Any, query: Tensor, key: Tensor, is_causal: bool) -> bool:
    """Whether a `CausalBias` is aligned at the end. Raises TypeError, ValueError if it does not fit.

    It is known by what it has: importing its class imports Dynamo and Triton.
    """
    check_tensors(query=query, key=key)
    if is_causal:
        raise ValueError("is_causal=True must be False when attn_mask is given")
    sizes, wanted = (bias.seq_len_q, bias.seq_len_kv), (*query.shape[-2:-1], *key.shape[-2:-1])
    if sizes != wanted:
        raise ValueError(f"attn_mask is a causal bias of {sizes}, must be of (seqlen_q, seqlen_k)={wanted}")
    return bool(bias.variant.name == "LOWER_RIGHT")


def _batched(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, torch.Size | None]:
    """All three as (batch, heads, seqlen, dim), and the leading dimensions that the batch stands for: None
    where they are so already."""
    sizes_q, sizes_k, sizes_v = query.shape, key.shape, value.shape
    if len(sizes_q) == len(sizes_k) == len(sizes_v) == 4:  # noqa: SIM102
        if sizes_q[0] == sizes_k[0] == sizes_v[0] and sizes_q[1] == sizes_k[1] == sizes_v[1]:
            return query, key, value, None
    return _broadcast(query, key, value, enable_gqa)


def _broadcast(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
    """The same of tensors that have other dimensions, or heads that differ."""
    check_tensors(query=query, key=key, value=value)
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim < 2:
            raise ValueError(
                f"{name}.shape={tuple(t.shape)} must have at least 2 dimensions: (..., seqlen, head_dim)"
            )
    try:
        leading = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    except RuntimeError:
        shapes = [tuple(t.shape) for t in (query, key, value)]
        raise ValueError(
            "query.shape={}, key.shape={} and value.shape={} must broadcast in front of the last 3 "
            "dimensions".format(*shapes)
        ) from None
    q, k, v = (_four_dimensions(t, leading) for t in (query, key, value))
    return *(_match_groups(q, k, v) if enable_gqa else _match_heads(q, k, v)), leading


def _four_dimensions(t: Tensor, leading: torch.Size) -> Tensor:
    """(leading batch, heads, seqlen, dim): a view where the strides allow it."""
    if t.ndim == 2:
        t = t[None]
    t = t.expand(*leading, *t.shape[-3:])
    return t if t.ndim == 4 else t.reshape(leading.numel(), *t.shape[-3:])


def _match_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Equal heads; as in torch, a single head is broadcast."""
    if q.shape[1] == k.shape[1] == v.shape[1]:
        return q, k, v
    wanted, *others = [t.shape[1] for t in (q, k, v) if t.shape[1] != 1]  # no set: symbols have no hash
    if any(heads != wanted for heads in others):
        raise ValueError(
            f"key.shape[-3]={k.shape[1]} and value.shape[-3]={v.shape[1]} (heads) must equal "
            f"query.shape[-3]={q.shape[1]} unless enable_gqa=True"
        )
    q, k, v = (t.expand(-1, wanted, -1, -1) for t in (q, k, v))
    return q, k, v


def _match_groups(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As many key as value heads, a divisor of the query's; torch lets the two differ."""
    for name, t in (("key", k), ("value", v)):
        if t.shape[1] != q.shape[1] and (t.shape[1] == 0 or q.shape[1] % t.shape[1]):
            raise ValueError(
                f"{name}.shape[-3]={t.shape[1]} (heads) must divide query.shape[-3]={q.shape[1]}"
            )
    if k.shape[1] != v.shape[1]:
        heads = math.lcm(k.shape[1], v.shape[1])
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    return q, k, v


def _mask_or_bias(
    attn_mask: Tensor, q: Tensor, k: Tensor, leading: torch.Size
) -> tuple[Tensor | None, Tensor | None]:
    """(mask, None) or (None, bias), of (leading batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1)."""
    shape = *leading, q.shape[1], q.shape[2], k.shape[2]
    check_tensors(attn_mask=attn_mask)
    is_bias = attn_mask.dtype.is_floating_point and attn_mask.dtype.itemsize > 1
    if attn_mask.dtype != torch.bool and not is_bias:
        raise TypeError(f"attn_mask.dtype={attn_mask.dtype} must be bool or floats of 16 bits or more")
    padded = (1,) * (len(shape) - attn_mask.ndim) + tuple(attn_mask.shape)
    if functions.is_served():  # columns are those of the whole sequence: the server checks them
        shape = *shape[:-1], padded[-1]
    if len(padded) > len(shape) or any(1 != a != b for a, b in zip(padded, shape, strict=True)):
        is_padding = tuple(attn_mask.shape) == (shape[0], shape[-1])
        hint = "; of padding (batch, seqlen_k) pass attn_mask[:, None, None, :]" if is_padding else ""
        raise ValueError(
            f"attn_mask.shape={tuple(attn_mask.shape)} must be broadcastable to "
            f"(..., num_heads, seqlen_q, seqlen_k)={shape}{hint}"
        )
    attn_mask, batch = attn_mask.reshape(padded), 1
    if any(size != 1 for size in padded[:-3]):
        attn_mask, batch = attn_mask.expand(*shape[:-3], *padded[-3:]), math.prod(shape[:-3])
    flat = attn_mask.reshape(batch, *padded[-3:])
    return (flat, None) if flat.dtype == torch.bool else (None, flat)
