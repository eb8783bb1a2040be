"""Drop-in for the functions of the `flash_attn` package, version 2.8: signatures, defaults and returns.

    from tilewise.flash_attn import flash_attn_func  # was: from flash_attn import flash_attn_func

Tensors are (batch, seqlen, heads, head_dim), packed ones (total, heads, head_dim). Common arguments:

- dropout_p: probability of dropping an attention weight, rounded as `tilewise.attention` has it.
- softmax_scale: None is 1 / sqrt(head_dim).
- causal: aligned bottom-right: the last query with the last key.
- window_size: (left, right) keys seen before and after each query's aligned position; -1 is unbounded.
- softcap: scores become softcap * tanh(scores / softcap); at most 0 is off.
- alibi_slopes: (heads,) or (batch, heads): adds -slope * |distance|.
- deterministic: gradients equal bit for bit from run to run.
- return_attn_probs: return (out, softmax_lse, S_dmask). softmax_lse is (batch, heads, seqlen_q), packed
  (heads, total_q), natural log. S_dmask is empty when dropout_p is 0; otherwise the softmax weights
  (batch, heads, seqlen_q, seqlen_k), negative where dropped: O(seqlen_q * seqlen_k) memory, for testing.

A query that sees no key has out 0, softmax_lse +inf (as flash-attn 2 has it) and zero gradients. Beyond
flash-attn: any head_dim from 1 to 576, values of another head_dim, float32 and float64, any device.

All functions raise ValueError or TypeError naming an argument that does not fit.
"""

from __future__ import annotations

from typing import Any, Never

import torch
from torch import Tensor

from tilewise.api import canonical_inputs
from tilewise.autograd import functions as autograd
from tilewise.core.checks import check_flag, check_known
from tilewise.core.problem import Inputs, Options, describe
from tilewise.faces import flash_attn_call
from tilewise.faces.kv_cache_arguments import KVCacheCall
from tilewise.faces.kv_cache_call import attention_with_kv_cache
from tilewise.reference.formula import Part, forward, unpack

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

WithProbs = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> WithProbs:
    """Self-attention with query, key and value stacked in one tensor.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim).

    The other arguments, returns and errors are those of the module.

    Example:
        >>> flash_attn_qkvpacked_func(torch.ones(1, 4, 3, 2, 8), causal=True).shape
        torch.Size([1, 4, 2, 8])
    """
    if autograd.is_unheard():
        return autograd.heard(flash_attn_qkvpacked_func, locals())
    check_known(flash_attn_qkvpacked_func, unknown)
    q, k, v = flash_attn_call.unpack("qkv", qkv, 3, rank=5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> WithProbs:
    """Attention with key and value stacked in one tensor.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        kv: (batch, seqlen_k, 2, KV heads, head_dim).

    The other arguments, returns and errors are those of the module.

    Example:
        >>> flash_attn_kvpacked_func(torch.ones(1, 4, 2, 8), torch.ones(1, 6, 2, 1, 8)).shape
        torch.Size([1, 4, 2, 8])
    """
    if autograd.is_unheard():
        return autograd.heard(flash_attn_kvpacked_func, locals())
    check_known(flash_attn_kvpacked_func, unknown)
    k, v = flash_attn_call.unpack("kv", kv, 2, rank=5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> WithProbs:
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
        softmax_scale, causal, window_size, softcap, dropout_p=dropout_p, deterministic=deterministic
    )
    inputs = canonical_inputs(q, k, v, alibi_slopes=alibi_slopes, dropout_p=dropout_p)
    return _attend(inputs, options, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> WithProbs:
    """Self-attention over packed sequences, query, key and value stacked in one tensor.

    Args:
        qkv: (total, 3, heads, head_dim).
        cu_seqlens: (batch + 1,) int32 or int64: each sequence's first row, and the total.
        max_seqlen: the longest sequence.

    The other arguments, returns and errors are those of the module.

    Example:
        >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.ones(5, 3, 2, 8), starts, 3).shape
        torch.Size([5, 2, 8])
    """
    if autograd.is_unheard():
        return autograd.heard(flash_attn_varlen_qkvpacked_func, locals())
    check_known(flash_attn_varlen_qkvpacked_func, unknown)
    q, k, v = flash_attn_call.unpack("qkv", qkv, 3, rank=4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **unknown: Never,
) -> WithProbs:
    """Attention over packed sequences, key and value stacked in one tensor.

    Args:
        q: (total_q, heads, head_dim).
        kv: (total_k, 2, KV heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 or int64: each sequence's first row, and the total.
        max_seqlen_q, max_seqlen_k: the longest sequence.

    The other arguments, returns and errors are those of the module.

    Example:
        >>> q_starts, k_starts = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 8])
        >>> q, kv = torch.ones(5, 2, 8), torch.ones(8, 2, 1, 8)
        >>> flash_attn_varlen_kvpacked_func(q, kv, q_starts, k_starts, 3, 4).shape
        torch.Size([5, 2, 8])
    """
    if autograd.is_unheard():
        return autograd.heard(flash_attn_varlen_kvpacked_func, locals())
    check_known(flash_attn_varlen_kvpacked_func, unknown)
    k, v = flash_attn_call.unpack("kv", kv, 2, rank=4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    **unknown: Never,
) -> WithProbs:
    """Attention over packed sequences.

    Args:
        q: (total_q, heads, head_dim).
        k, v: (total_k, KV heads, head_dim); with block_table, pages (pages, page_size, KV heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 or int64: each sequence's first row, and the total.
        max_seqlen_q, max_seqlen_k: the longest sequence.
        block_table: (batch, pages a sequence) int32 or int64: each sequence's pages in k and v. They are read
            where they lie, and on a GPU checked there (`tilewise.check_errors`); for a gradient or dropout
            the rows in use are copied together.

    The other arguments, returns and errors are those of the module.

    Example:
        >>> starts = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> x = torch.ones(5, 2, 8)
        >>> out, lse, _ = flash_attn_varlen_func(x, x, x, starts, starts, 3, 3, return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([5, 2, 8]), torch.Size([2, 5]))
    """
    if autograd.is_unheard():
        return autograd.heard(flash_attn_varlen_func, locals())
    check_known(flash_attn_varlen_func, unknown)
    options = flash_attn_call.options(
        softmax_scale, causal, window_size, softcap, dropout_p=dropout_p, deterministic=deterministic,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    packed = (q, k, v, cu_seqlens_q, cu_seqlens_k)
    given: dict[str, Any] = {"alibi_slopes": alibi_slopes, "dropout_p": dropout_p}
    if block_table is None:
        inputs = flash_attn_call.varlen_inputs(*packed, **given)
    else:
        inputs = flash_attn_call.paged_inputs(*packed, block_table, **given)
        options = options if inputs.page_table is None else options._replace(max_seqlen_k=None)
    return _attend(inputs, options, return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append k and v to a cache in place, then attend to what it holds. Has no gradients.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache, v_cache: (batch_cache, capacity, KV heads, head_dim); with block_table, pages
            (pages, page_size, KV heads, head_dim). Updated in place if k and v are given.
        k, v: (batch, seqlen_new, KV heads, head_dim): new tokens, written from position cache_seqlens on.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): rotate k and q before use. k takes positions
            cache_seqlens, cache_seqlens + 1, ...; so does q if causal or windowed, otherwise all of q takes
            cache_seqlens. Only with k and v.
        cache_seqlens: tokens already in the cache: an integer, or (batch,) int32 or int64; None is all.
        cache_batch_idx: (batch,) which sequence of the cache each batch entry uses; None is 0, 1, ....
            With k and v none may occur twice: refused on the CPU; on a GPU one entry's tokens are lost.
        cache_leftpad: (batch,) leading cache rows to ignore.
        block_table: (batch, pages a sequence).
        rotary_interleaved: pairs are coordinates (0, 1), (2, 3), ...; otherwise (p, p + rotary_dim / 2).
        num_splits: accepted; the number of splits never changes the result's meaning.
        return_softmax_lse: return (out, softmax_lse).

    The other arguments are those of the module.

    Returns:
        out (batch, seqlen_q, heads, head_dim); softmax_lse (batch, heads, seqlen_q).

    Raises:
        ValueError, TypeError: an argument does not fit, new tokens overflow the cache, or an index is out of
            range. Nothing has been written then.

    Example:
        >>> k_cache, v_cache = torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 1, 4)
        >>> x = torch.ones(1, 3, 1, 4)
        >>> out = flash_attn_with_kvcache(x, k_cache, v_cache, x, x, cache_seqlens=2, causal=True)
        >>> k_cache[0, :, 0, 0].tolist()
        [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """
    if autograd.is_unheard():
        return autograd.heard(flash_attn_with_kvcache, locals())
    check_known(flash_attn_with_kvcache, unknown)
    check_flag("return_softmax_lse", return_softmax_lse)
    call = KVCacheCall(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad,
        block_table, rotary_interleaved=rotary_interleaved, alibi_slopes=alibi_slopes,
        table_name="block_table",
    )  # fmt: skip
    out, lse = attention_with_kv_cache(
        call, flash_attn_call.options(softmax_scale, causal, window_size, softcap)
    )
    return (out, _positive_infinity(lse)) if return_softmax_lse else out


def _attend(inputs: Inputs, options: Options, return_attn_probs: bool) -> WithProbs:
    check_flag("return_attn_probs", return_attn_probs)
    out, lse = autograd.attention(inputs, flash_attn_call.with_products(options, inputs), None)
    if not return_attn_probs:
        return out
    s_dmask = out.new_empty(0) if options.dropout_p == 0 else _signed_weights(inputs, options)
    return out, _positive_infinity(lse), s_dmask


def _positive_infinity(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == float("-inf"), float("inf"))


@torch.no_grad()
def _signed_weights(inputs: Inputs, options: Options) -> Tensor:
    """The softmax weights (batch, heads, seqlen_q, seqlen_k), negative where dropped, by the formula."""
    if autograd.is_served():
        raise NotImplementedError("return_attn_probs with dropout_p is not served inside of context_parallel")
    problem = describe(inputs, options)
    tensors = inputs.query, inputs.key, inputs.value
    given = {
        "causal": options.causal, "window": (options.window_left, options.window_right),
        "softcap": options.softcap, "scale": options.scale, "alibi_slopes": inputs.alibi_slopes,
        "dropout_p": options.dropout_p, "dropout_seed": inputs.dropout_seed,
        "cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k,
    }  # fmt: skip
    parts = unpack(*tensors, given) if problem.is_packed else [Part(tensors, given)]
    found = [forward(*part.tensors, torch.float64, **part.options) for part in parts]
    signed = [torch.where(f.keep > 0, f.p, -f.p).to(inputs.query.dtype) for f in found]
    sizes = [(0, problem.seqlen_k - p.shape[3], 0, problem.seqlen_q - p.shape[2]) for p in signed]
    none = inputs.query.new_zeros((0, problem.num_heads, problem.seqlen_q, problem.seqlen_k))
    return torch.cat([none, *(torch.nn.functional.pad(p, size) for p, size in zip(signed, sizes))])
