"""`flash_attn_with_kvcache` of both flash-attn generations: append, attend.

A contiguous cache is a paged one whose page is a whole sequence: token `t` of sequence `b` lies in row
`t % page_size` of page `table[b, t // page_size]`. Appending and gathering are written once, in those terms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.autograd import functions
from tilewise.cache.rotary import apply_rotary
from tilewise.core.device_errors import check_if_debugging
from tilewise.core.kept import unit_scales
from tilewise.core.problem import Inputs, Options, describe
from tilewise.core.signature import resolved
from tilewise.core.torch_private import compiles_here, is_lazy
from tilewise.core.values import check_values
from tilewise.faces import chunks
from tilewise.faces.flash_attn_call import with_qv
from tilewise.faces.fp8 import FP8, to_fp8
from tilewise.faces.kv_cache_arguments import KVCacheCall, Places, Rotary, check_tensors, places_of
from tilewise.gpu.launch.launch_plan import HAS_TRITON


@torch.no_grad()
def attention_with_kv_cache(call: KVCacheCall, options: Options) -> tuple[Tensor, Tensor]:
    """Append k and v to the caches in place, then attend to what they hold. Has no gradients.

    Values of lengths and indices are checked on the CPU. On a GPU and in compiled code the host does not read
    them, so that nothing waits and a graph can hold the call: see `tilewise.check_errors`.

    Returns:
        out (like q with the value's head_dim) and lse (batch, heads, seqlen_q), packed (heads, total_q).

    Raises:
        ValueError, TypeError: an argument does not fit; nothing has been written then.
    """
    if functions.is_served():  # which would refuse it behind the first write
        raise NotImplementedError("flash_attn_with_kvcache is not served inside of context_parallel")
    call = _resolved(call)
    check_tensors(call)
    at = places_of(call, _is_local(call, options))
    held, new, rotary = at.held, at.new, at.rotary
    is_fused = new is not None and _is_fusible(call, at)
    is_fp8 = call.descale.is_needed(call.q, call.k_cache, call.cu_seqlens_q)
    lengths = held if new is None else torch.empty_like(held) if is_fused else held + new.counts()
    inputs = _inputs(call, at.table, lengths)
    if is_fp8:
        inputs = _eight_bit(call, inputs)
    whole = inputs if call.qv is None else _shaped_as_with_qv(call, inputs)
    entry, is_whole = None, call.qv is None and call.attention_chunk == 0
    if not compiles_here():  # the rest, also before the first write
        entry = functions.check(inputs, options, None) if is_whole else None
        check_values(describe(whole, options) if entry is None else entry.plan.problem, whole, options)

    if new is not None:
        query = _append_at_once(call, at, lengths) if is_fused else _append(call, at)
    elif rotary is not None:
        query = _turned_query(call, at)
    if rotary is not None:
        query = call.descale.query(query, call.cu_seqlens_q) if is_fp8 else query
        inputs, entry = inputs._replace(query=query), None
    if call.qv is not None:
        query, key = with_qv(inputs.query, call.qv, inputs.key, inputs.value)
        inputs = inputs._replace(query=query, key=key)
    if is_whole:
        out, lse = functions.attention(inputs, options, None, are_values_known=True, entry=entry)
    else:
        out, lse = chunks.attention(inputs, options, call.attention_chunk)
    check_if_debugging()
    return call.descale.output(out, call.cu_seqlens_q) if is_fp8 else out, lse


def _resolved(call: KVCacheCall) -> KVCacheCall:
    """The call with the numbers of its tensors in memory; not of caches, which stay where they are."""
    if compiles_here():
        return call
    names = ("q", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "alibi_slopes")
    given = [(name, getattr(call, name)) for name in names]
    lazy: dict[str, Any] = {name: resolved(t) for name, t in given if isinstance(t, Tensor) and is_lazy(t)}
    return replace(call, **lazy) if lazy else call


def _eight_bit(call: KVCacheCall, inputs: Inputs) -> Inputs:
    """8-bit caches as the pages that they are stored in, of scale 1: all factors go to q and out."""
    table, key = inputs.page_table, inputs.key
    if table is None:
        table = torch.arange(len(key), dtype=torch.int32, device=key.device)[:, None]
    ones = unit_scales(key)
    query = call.descale.query(call.q, call.cu_seqlens_q)
    return inputs._replace(query=query, page_table=table, key_scale=ones, value_scale=ones)


def _shaped_as_with_qv(call: KVCacheCall, inputs: Inputs) -> Inputs:
    """What is attended to, up to the keys' values: nothing is copied but the queries."""
    assert call.qv is not None
    query, _ = with_qv(call.q, call.qv, inputs.key[:0], inputs.value[:0])
    key = inputs.key[..., :1].expand(*inputs.key.shape[:-1], inputs.key.shape[-1] + inputs.value.shape[-1])
    return inputs._replace(query=query, key=key)


def _append_at_once(call: KVCacheCall, at: Places, lengths: Tensor) -> Tensor:
    """`_append` in one launch, which also writes the lengths with the new tokens."""
    from tilewise.gpu.triton.append import Tokens, append

    assert call.k is not None and call.v is not None
    tables = None if at.rotary is None else (at.rotary.cos, at.rotary.sin, call.rotary_interleaved)
    tokens = Tokens(None, None, at.held, at.table, lengths)
    return append(call.q, call.k, call.v, call.k_cache, call.v_cache, tokens, tables)


def _append(call: KVCacheCall, at: Places) -> Tensor:
    """Rotate q and k by their positions, and write k and v; return q rotated, of 8 bits in float32."""
    assert call.k is not None and call.v is not None and at.new is not None
    q, k = call.q, call.k
    sequence, offset = at.new.offsets(q.device)
    if at.rotary is not None:
        k = _turn(call, k, at.rotary, sequence, offset)
        k = to_fp8(k) if call.k.dtype == FP8 else k
        q = _turned_query(call, at)
    entry = sequence
    row, size = at.held[sequence] + offset, call.k_cache.shape[1]
    if at.table is not None:
        entry, row = at.table[sequence, row // size].long(), row % size
    call.k_cache[entry, row.long()] = k.flatten(0, -3)
    call.v_cache[entry, row.long()] = call.v.flatten(0, -3)
    return q


def _turned_query(call: KVCacheCall, at: Places) -> Tensor:
    assert at.rotary is not None
    sequence, offset = at.queries.offsets(call.q.device)
    return _turn(call, call.q, at.rotary, sequence, offset if at.is_local else offset * 0)


def _turn(call: KVCacheCall, x: Tensor, rotary: Rotary, sequence: Tensor, offset: Tensor) -> Tensor:
    position = (rotary.starts[sequence] + offset).view(x.shape[:-2]).long()
    x = x.float() if x.dtype == FP8 else x
    return apply_rotary(x, rotary.cos[position], rotary.sin[position], interleaved=call.rotary_interleaved)


def _is_local(call: KVCacheCall, options: Options) -> bool:
    """Whether queries have positions one after the other: with any mask, as FlashAttention has it."""
    has_window = options.window_left is not None or options.window_right is not None
    return options.causal or has_window or call.attention_chunk > 0


def _is_fusible(call: KVCacheCall, at: Places) -> bool:
    """Whether one Triton kernel can rotate and write everything."""
    queries, new, rotary = at.queries, at.new, at.rotary
    assert call.k is not None and call.v is not None and new is not None
    if compiles_here() or not (call.q.is_cuda and HAS_TRITON and new.total > 0):
        return False
    if rotary is not None and not (at.is_local and queries.total == new.total and rotary.starts is at.held):
        return False
    tensors = (call.q, call.k, call.v)
    is_even = (
        queries.cu_seqlens is None and new.cu_seqlens is None and call.q.dtype not in (torch.float64, FP8)
    )
    rows_dense = all(t.stride(-1) == 1 for t in tensors)
    whole = all(cache.is_contiguous() and not is_lazy(cache) for cache in (call.k_cache, call.v_cache))
    return is_even and rows_dense and whole


def _inputs(call: KVCacheCall, table: Tensor | None, lengths: Tensor) -> Inputs:
    """The queries against the caches where they lie."""
    k_cache, v_cache, batch = call.k_cache, call.v_cache, lengths.shape[0]
    if table is None and k_cache.shape[0] > batch:
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    places = call.cu_seqlens_q, None, lengths, call.cache_leftpad, table
    return Inputs(call.q, k_cache, v_cache, *places, alibi_slopes=call.alibi_slopes)
