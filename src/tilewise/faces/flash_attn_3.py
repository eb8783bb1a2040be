"""Drop-in for `flash_attn_interface`, the functions of FlashAttention-3: signatures, defaults and returns.

    from tilewise.flash_attn_3 import flash_attn_func  # was: from flash_attn_interface import flash_attn_func

Tensors are (batch, seqlen, heads, head_dim), packed ones (total, heads, head_dim). Common arguments:

- softmax_scale: None is 1 / sqrt(head_dim).
- causal: aligned bottom-right: the last query with the last key.
- qv: (batch, seqlen_q, heads, head_dim_v), packed like q: scores are q k + qv v, as in absorbed latent
  attention, and softmax_scale None counts head_dim of both. k and v are copied side by side each time, which
  `tilewise.PagedKVCache(..., value_in_key=True)` does not need.
- attention_chunk: C > 0 cuts positions into chunks of C, as Llama 4 does: query i, at position p = i +
  seqlen_k - seqlen_q, sees of what causal and window leave it only the keys j with j // C == p // C, counted
  from the first key behind cache_leftpad. A query before the first key (p < 0) sees nothing. No mask is made,
  and no copy of q, k and v unless the strides of batch and sequence do not fold. 0 is off. Gradients follow,
  which those of FlashAttention-3 do not yet. Source: its `hopper/mask.h`.
- q_descale, k_descale, v_descale: float32 (batch, KV heads), what float8_e4m3fn q, k and v are multiplied by;
  None is 1. out is bfloat16 then, and there are no gradients. qv must be None, as in FlashAttention-3. On
  Hopper GPUs the products are of 8 bits, and so weights are rounded too; elsewhere, with a cache, in chunks
  and in compiled code they are of bfloat16, which is nearer to exact.
- q, k and v may be `tilewise.fp8.Quantized`, all three, without q_descale, qv, attention_chunk and seqused.
- window_size: (left, right) keys seen before and after each query's aligned position; -1 is unbounded.
  Tensors of one integer are read, which waits for their device.
- softcap: scores become softcap * tanh(scores / softcap); at most 0 is off.
- num_splits, pack_gqa, sm_margin, scheduler_metadata: accepted; they never change the result's meaning.
- deterministic: gradients equal bit for bit from run to run.
- return_attn_probs: return (out, softmax_lse) instead of out; softmax_lse is (batch, heads, seqlen_q), packed
  (heads, total_q), natural log.

A query that sees no key has out 0, softmax_lse -inf and zero gradients. Beyond FlashAttention-3: any head
size from 1 to 576, float32 and float64, any device.

All functions raise ValueError, TypeError or NotImplementedError naming an argument that does not fit.
"""

from __future__ import annotations

from typing import Any, Never

import torch
from torch import Tensor

from tilewise.autograd import functions as autograd
from tilewise.core.checks import check_flag, check_known, check_tensors
from tilewise.core.merge import merge
from tilewise.faces import chunks, flash_attn_call
from tilewise.faces.fp8 import Descale
from tilewise.faces.kv_cache_arguments import KVCacheCall
from tilewise.faces.kv_cache_call import attention_with_kv_cache

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

WithLse = Tensor | tuple[Tensor, Tensor]


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> WithLse:
    """Self-attention with query, key and value in one tensor.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim), or with num_heads_q (batch, seqlen, num_heads_q +
            2 * KV heads, head_dim): all queries, then keys, then values.
        num_heads_q: query heads, for the second form.

    The other arguments, returns and errors are those of the module.

    Example:
        >>> flash_attn_qkvpacked_func(torch.ones(1, 4, 4, 8), num_heads_q=2).shape
        torch.Size([1, 4, 2, 8])
    """
    if autograd.is_unheard():
        return autograd.heard(flash_attn_qkvpacked_func, locals())
    check_known(flash_attn_qkvpacked_func, unknown)
    if isinstance(qkv, Tensor) and qkv.ndim == 4:
        q, k, v = flash_attn_call.split_heads(qkv, num_heads_q)
    else:
        q, k, v = flash_attn_call.unpack("qkv", qkv, 3, rank=5)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk,
        softcap, deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> WithLse:
    """Attention.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, KV heads, head_dim); the number of KV heads divides that of heads.
        v: (batch, seqlen_k, KV heads, head_dim_v).

    The other arguments, returns and errors are those of the module.

    Example:
        >>> q, k = torch.ones(1, 2, 1, 8), torch.ones(1, 4, 1, 8)
        >>> v = torch.arange(4.0).view(1, 4, 1, 1)
        >>> flash_attn_func(q, k, v, causal=True).flatten()
        tensor([1.0000, 1.5000])
    """
    if autograd.is_unheard():
        return autograd.heard(flash_attn_func, locals())
    check_known(flash_attn_func, unknown)
    options = flash_attn_call.options(
        softmax_scale, causal, window_size, softcap, deterministic=deterministic
    )
    descale = Descale(q_descale, k_descale, v_descale)
    return flash_attn_call.attend(q, k, v, qv, descale, options, attention_chunk, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> WithLse:
    """Attention over packed sequences.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, KV heads, head_dim).
        v: (total_k, KV heads, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 or int64: each sequence's first row, and the total.
        max_seqlen_q, max_seqlen_k: the longest sequence.
        seqused_q, seqused_k: (batch,) how many of each sequence's rows count; the rows behind them are not
            seen, their out is 0 and their softmax_lse -inf. The rows that count are copied together.

    The other arguments, returns and errors are those of the module.

    Example:
        >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> x = torch.ones(5, 2, 8)
        >>> used = torch.tensor([2, 1], dtype=torch.int32)
        >>> flash_attn_varlen_func(x, x, x, starts, starts, 3, 3, seqused_q=used)[:, 0, 0].tolist()
        [1.0, 1.0, 1.0, 0.0, 0.0]
    """
    if autograd.is_unheard():
        return autograd.heard(flash_attn_varlen_func, locals())
    check_known(flash_attn_varlen_func, unknown)
    options = flash_attn_call.options(
        softmax_scale, causal, window_size, softcap, deterministic=deterministic,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return flash_attn_call.attend(
        q, k, v, qv, Descale(q_descale, k_descale, v_descale), options, attention_chunk, return_attn_probs,
        (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k),
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Append k and v to a cache in place, then attend to what it holds. Has no gradients.

    Args:
        q: (batch, seqlen_q, heads, head_dim), or packed (total_q, heads, head_dim) with cu_seqlens_q.
        k_cache: (batch_cache, capacity, KV heads, head_dim); with page_table, pages (pages, page_size,
            KV heads, head_dim). Updated in place if k and v are given.
        v_cache: likewise with head_dim_v.
        k: (batch, seqlen_new, KV heads, head_dim), or packed with cu_seqlens_k_new: new tokens, written from
            position cache_seqlens on.
        v: likewise with head_dim_v.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): rotate k and q before use. k takes positions
            start, start + 1, ...; so does q if causal, windowed or in chunks, otherwise all of q takes start.
            Without k and v only q is rotated, from rotary_seqlens on, which flash-attn refuses. float8_e4m3fn
            tokens are rotated in float32: k is then rounded to 8 bits to be stored (an error of up to 1/16),
            q is multiplied by its factors and rounded to bfloat16.
        cache_seqlens: tokens already in the cache: an integer, or (batch,) int32 or int64; None is all.
        cache_batch_idx: (batch,) which sequence of the cache, or row of page_table, each batch entry uses;
            None is 0, 1, ....
            With k and v none may occur twice: refused on the CPU; on a GPU one entry's tokens are lost.
        cache_leftpad: (batch,) leading cache rows to ignore.
        page_table: (batch, pages a sequence), or with cache_batch_idx any number of rows.
        cu_seqlens_q, cu_seqlens_k_new: (batch + 1,): each packed sequence's first row, and the total. Queries
            of unequal lengths have the cached rows in use copied together.
        max_seqlen_q: the longest of cu_seqlens_q, if known.
        rotary_seqlens: (batch,) the rotary start of each sequence; None is cache_seqlens.
        rotary_interleaved: pairs are coordinates (0, 1), (2, 3), ...; otherwise (p, p + rotary_dim / 2).
        return_softmax_lse: return (out, softmax_lse, out_accum, softmax_lse_accum), the last two empty.

    The other arguments are those of the module.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) or packed like q; softmax_lse (batch, heads, seqlen_q), or
        packed (heads, total_q).

    Raises:
        ValueError, TypeError, NotImplementedError: an argument does not fit, new tokens overflow the cache,
            or an index is out of range. Nothing has been written then.

    Example:
        >>> k_cache, v_cache = torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 2)
        >>> x = torch.ones(1, 3, 1, 4)
        >>> flash_attn_with_kvcache(x, k_cache, v_cache, x, x[..., :2], cache_seqlens=2, causal=True).shape
        torch.Size([1, 3, 1, 2])
        >>> k_cache[0, :, 0, 0].tolist()
        [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """
    if autograd.is_unheard():
        return autograd.heard(flash_attn_with_kvcache, locals())
    check_known(flash_attn_with_kvcache, unknown)
    check_flag("return_softmax_lse", return_softmax_lse)
    chunk = chunks.chunk_of(attention_chunk)
    call = KVCacheCall(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        page_table, cu_seqlens_q, cu_seqlens_k_new, rotary_seqlens, rotary_interleaved,
        qv=qv, descale=Descale(q_descale, k_descale, v_descale), attention_chunk=chunk,
    )  # fmt: skip
    options = flash_attn_call.options(softmax_scale, causal, window_size, softcap, max_seqlen_q=max_seqlen_q)
    out, lse = attention_with_kv_cache(call, options)
    return (out, lse, out.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """Attention over parts of the keys, put together. Differentiable unless out is given.

    Args:
        out_partial: (parts, batch, seqlen_q, heads, head_dim_v): what each part's call returned.
        lse_partial: (parts, batch, seqlen_q, heads): the transposed softmax_lse of the parts.
        out: (batch, seqlen_q, heads, head_dim_v), written to.
        out_dtype: of the result; None is that of out_partial.

    Returns:
        out; and lse (batch, seqlen_q, heads), -inf where no part saw a key.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.

    Example:
        >>> out, lse = flash_attn_combine(torch.ones(2, 1, 3, 4, 8), torch.zeros(2, 1, 3, 4))
        >>> out.shape, round(lse[0, 0, 0].item(), 4)
        (torch.Size([1, 3, 4, 8]), 0.6931)
    """
    check_known(flash_attn_combine, unknown)
    check_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.ndim != 5 or lse_partial.shape != out_partial.shape[:-1] or not len(out_partial):
        raise ValueError(
            f"out_partial.shape={tuple(out_partial.shape)} and lse_partial.shape={tuple(lse_partial.shape)} "
            "must be (parts, batch, seqlen_q, heads, head_dim_v) and (parts, batch, seqlen_q, heads), with "
            "at least one part"
        )
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    exact = torch.promote_types(out_partial.dtype, lse_partial.dtype)  # so that it is rounded once, to dtype
    parts = [(o, lse.transpose(1, 2)) for o, lse in zip(out_partial.to(exact), lse_partial)]
    found, lse = merge(parts)
    found, lse = found.to(dtype), lse.transpose(1, 2)
    if out is None:
        return found, lse
    check_tensors(out=out)
    if out.shape != found.shape or out.dtype != dtype:
        raise ValueError(
            f"out of shape {tuple(out.shape)} and {out.dtype} must be of {tuple(found.shape)} and {dtype}"
        )
    return out.copy_(found), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    **unknown: Never,
) -> None:
    """What `flash_attn_with_kvcache` takes as scheduler_metadata: None, as kernels schedule themselves.

    Takes what FlashAttention-3 takes, so that code written for it runs, and reads none of it.
    """
    check_known(get_scheduler_metadata, unknown)
