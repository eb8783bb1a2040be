"""What the faces of flash-attn 2 and 3 share: reading their arguments, and packed sequences used in part."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from tilewise.api import canonical_inputs, products_of
from tilewise.core.checks import check_flag, check_number, check_tensors, shown, window_bound
from tilewise.core.problem import Inputs, Options
from tilewise.core.quantized import check_offsets
from tilewise.faces import chunks
from tilewise.faces.fp8 import Descale, as_bfloat16
from tilewise.faces.tokens import (
    check_counts,
    check_integer_tensors,
    check_table,
    counts_of,
    gather_pages,
    tokens_of,
)
from tilewise.varlen import read_length


def options(
    softmax_scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float, **others: Any
) -> Options:
    """flash-attn's scalars: a negative window bound is unbounded, a softcap of at most 0 is off.

    Raises:
        ValueError: window_size is not two integers.
    """
    if isinstance(window_size, Tensor) and window_size.ndim == 1:
        window_size = tuple(window_size)  # type: ignore[assignment]
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise _window_error(window_size)
    left, right = (_bound(bound, window_size) for bound in window_size)
    check_flag("causal", causal)
    check_number("softcap", softcap)
    if softmax_scale is not None:
        check_number("softmax_scale", softmax_scale)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        if name in others:
            others[name] = read_length(name, others[name])
    softcap = 0.0 if softcap < 0 else softcap
    return Options(bool(causal), left, right, softcap, scale=softmax_scale, **others)


def with_products(options: Options, inputs: Inputs) -> Options:
    """The options, with the precision that tensors were quantized in."""
    if inputs.query_blocks is None:
        return options
    return options._replace(precision=products_of(inputs, options.precision))


def _bound(bound: Any, window_size: Any) -> int | None:
    """One of flash-attn's window bounds as ours; it may be a tensor that holds one integer."""
    if type(bound) is not int:
        if isinstance(bound, Tensor) and not bound.is_floating_point() and bound.numel() == 1:
            bound = int(bound)
        if not isinstance(bound, Integral):
            raise _window_error(window_size)
    return None if bound < 0 else window_bound(bound)


def _window_error(window_size: Any) -> ValueError:
    return ValueError(
        f"window_size={shown(window_size)} must be (left, right), two integers, -1 for unbounded"
    )


def unpack(name: str, packed: Tensor, parts: int, rank: int) -> tuple[Tensor, ...]:
    """Views of the tensors stacked in front of the last two dimensions.

    Raises:
        ValueError, TypeError: the packed tensor does not fit.
    """
    check_tensors(**{name: packed})
    if packed.ndim != rank or packed.shape[-3] != parts:
        leading = "batch, seqlen" if rank == 5 else "total"
        raise ValueError(f"{name}.shape={tuple(packed.shape)} must be ({leading}, {parts}, heads, head_dim)")
    return packed.unbind(-3)


def split_heads(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    """Views of the query heads, and of as many key and value heads, that lie behind each other.

    Raises:
        ValueError: num_heads_q leaves none, or an odd number.
    """
    num_kv_heads = 0 if num_heads_q is None else (qkv.shape[2] - num_heads_q) // 2
    if num_heads_q is None or num_kv_heads < 1 or num_heads_q + 2 * num_kv_heads != qkv.shape[2]:
        raise ValueError(
            f"num_heads_q={num_heads_q} must leave an even number of qkv.shape[2]={qkv.shape[2]} heads, "
            "half for keys and half for values"
        )
    return qkv.split((num_heads_q, num_kv_heads, num_kv_heads), dim=2)


def varlen_inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **others: Any
) -> Inputs:
    """`canonical_inputs` with the offsets of packed sequences.

    Raises:
        TypeError: the offsets are no tensors.
        ValueError: they are not those that tensors were quantized with.
    """
    check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    inputs = canonical_inputs(q, k, v, **others)
    if inputs.query_blocks is not None:
        check_offsets(cu_seqlens_q=(q, cu_seqlens_q), cu_seqlens_k=(k, cu_seqlens_k))
    return inputs._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)


def paged_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor,
    **others: Any,
) -> Inputs:
    """Packed queries, and keys in pages: where they lie, or, for a gradient or dropout, copied together.

    Raises:
        ValueError, TypeError: offsets, table and pages do not fit. On a GPU kernels look at their numbers,
            as of a cache, if nothing is copied.
    """
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_integer_tensors(cu_seqlens_k=cu_seqlens_k)
    check_table(k, v, block_table, cu_seqlens_k.numel() - 1)
    has_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    stay = not (has_gradient or others.get("dropout_p"))
    if cu_seqlens_k.is_cpu or not stay:
        total = int(cu_seqlens_k[-1]) if cu_seqlens_k.numel() else 0
        counts = counts_of("cu_seqlens_k", cu_seqlens_k, total)
        check_counts(k, block_table, counts)
    if not stay:
        k, v = gather_pages(k, v, block_table, counts)
        return varlen_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, **others)
    lengths = cu_seqlens_k.diff().to(torch.int32)
    inputs = canonical_inputs(q, k, v, **others)
    return inputs._replace(cu_seqlens_q=cu_seqlens_q, seqlens_k=lengths, page_table=block_table)


def with_qv(q: Tensor, qv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q and k of which q k is q k + qv v.

    Raises:
        ValueError, TypeError: qv does not fit.
    """
    check_tensors(q=q, k=k, v=v, qv=qv)
    if q.dtype == torch.float8_e4m3fn:
        raise NotImplementedError("qv must be None for float8_e4m3fn q: pass q, k, v and qv in bfloat16")
    kinds = {(t.dtype, t.device) for t in (q, k, v)}
    if k.shape[:-1] != v.shape[:-1] or len(kinds) > 1:
        raise ValueError("qv needs k and v of as many tokens and heads, of q's dtype and on its device")
    right = (*q.shape[:-1], v.shape[-1])
    if tuple(qv.shape) != right or qv.dtype != q.dtype or qv.device != q.device:
        raise ValueError(
            f"qv of shape {tuple(qv.shape)}, {qv.dtype}, on {qv.device} must be {right}, {q.dtype}, "
            f"on {q.device}"
        )
    return torch.cat([q, qv], -1), torch.cat([k, v], -1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    descale: Descale,
    options: Options,
    attention_chunk: int,
    return_attn_probs: bool,
    offsets: tuple[Tensor, ...] = (),
    used: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor | tuple[Tensor, Tensor]:
    """The functions of FlashAttention-3, dense or packed.

    Args:
        offsets: of packed queries and keys.
        used: how many rows of each packed sequence of queries and keys count.
    """
    check_flag("return_attn_probs", return_attn_probs)
    chunk = chunks.chunk_of(attention_chunk)
    is_fp8, is_cut = descale.is_needed(q, k, *offsets[:1]), any(n is not None for n in used)
    if qv is not None:
        q, k = with_qv(q, qv, k, v)
    blocks = None
    if is_fp8 and chunk == 0 and not is_cut:
        blocks = descale.in_blocks(q, k, v, options, *offsets)
    if blocks is not None:
        out, lse = chunks.attention(*blocks, chunk)
    else:
        if is_fp8:
            q, k, v = descale.query(q, *offsets[:1]), as_bfloat16("k", k), as_bfloat16("v", v)
        inputs = varlen_inputs(q, k, v, *offsets) if offsets else canonical_inputs(q, k, v)
        options = with_products(options, inputs)
        if inputs.query_blocks is not None and (chunk or is_cut):
            raise NotImplementedError(
                "attention_chunk, seqused_q and seqused_k take no Quantized tensors: pass those of 16 bits"
            )
        if not is_cut:
            out, lse = chunks.attention(inputs, options, chunk)
        else:
            out, lse = _attend_used(inputs, options, chunk, *used)
    out = descale.output(out, *offsets[:1]) if is_fp8 else out
    return (out, lse) if return_attn_probs else out


def _attend_used(
    inputs: Inputs, options: Options, chunk: int, seqused_q: Tensor | None, seqused_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pack the rows that count, attend, and put the results back in their rows."""
    query, key = inputs.query, inputs.key
    used_q, starts_q = _used_rows("q", inputs.cu_seqlens_q, seqused_q, len(query))
    used_k, starts_k = _used_rows("k", inputs.cu_seqlens_k, seqused_k, len(key))
    used = inputs._replace(
        query=query.index_select(0, used_q),
        key=key.index_select(0, used_k),
        value=inputs.value.index_select(0, used_k),
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
    )
    out, lse = chunks.attention(used, options, chunk)
    all_out = out.new_zeros(len(query), *out.shape[1:]).index_copy(0, used_q, out)
    all_lse = lse.new_full((lse.shape[0], len(query)), float("-inf")).index_copy(1, used_q, lse)
    return all_out, all_lse


def _used_rows(
    side: str, cu_seqlens: Tensor | None, seqused: Tensor | None, total: int
) -> tuple[Tensor, Tensor]:
    """The rows of the packed tensor that count, the first of each sequence, and the offsets of these."""
    assert cu_seqlens is not None
    used = counts = counts_of(f"cu_seqlens_{side}", cu_seqlens, total)
    if seqused is not None:
        if not isinstance(seqused, Tensor) or tuple(seqused.shape) != (len(counts),):
            raise ValueError(f"seqused_{side} must be a (batch,)=({len(counts)},) tensor")
        if seqused.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"seqused_{side}.dtype={seqused.dtype} must be int32 or int64")
        used = seqused.tolist()
    for n, (count, length) in enumerate(zip(used, counts)):
        if not 0 <= count <= length:
            raise ValueError(
                f"seqused_{side}[{n}]={count} must be between 0 and the sequence's length {length}"
            )
    sequence, offset, starts = tokens_of(used, cu_seqlens.device)
    return cu_seqlens[sequence] + offset, starts
