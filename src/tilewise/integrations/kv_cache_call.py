"""`flash_attn_with_kvcache` of both flash-attn generations: check everything, append, attend.

A contiguous cache is a paged one whose page is a whole sequence: token `t` of sequence `b` lies in row
`t % page_size` of page `table[b, t // page_size]`. Appending and gathering are written once, in those terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import autograd
from tilewise.api import canonical_inputs
from tilewise.cached_step import has_triton
from tilewise.integrations.flash_attn_call import with_qv
from tilewise.integrations.fp8 import FP8, NO_FACTORS, Descale
from tilewise.integrations.tokens import check_integer_tensors, check_pages, counts_of
from tilewise.problem import Inputs, Options, describe
from tilewise.rotary import apply_rotary
from tilewise.values import check_values


@dataclass(frozen=True)
class KVCacheCall:
    """What the two faces share, under flash-attn 3's names; `table_name` is the face's for `page_table`."""

    q: Tensor  # (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q
    k_cache: Tensor  # (batch_cache, capacity, kv heads, head_dim), or (pages, page_size, kv heads, head_dim)
    v_cache: Tensor
    k: Tensor | None = None  # (batch, seqlen_new, kv heads, head_dim), or packed with cu_seqlens_k_new
    v: Tensor | None = None
    rotary_cos: Tensor | None = None  # (positions, rotary_dim / 2)
    rotary_sin: Tensor | None = None
    cache_seqlens: int | Tensor | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    page_table: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    rotary_seqlens: Tensor | None = None
    rotary_interleaved: bool = True
    alibi_slopes: Tensor | None = None
    qv: Tensor | None = None  # (batch, seqlen_q, heads, head_dim_v), or packed: scores are q k + qv v
    descale: Descale = NO_FACTORS
    table_name: str = "page_table"


class Layout(NamedTuple):
    """How the tokens of q, or of k, lie: (batch, count, ...), or packed with offsets."""

    batch: int
    total: int
    cu_seqlens: Tensor | None

    def counts(self) -> Tensor | int:
        """Tokens of each sequence."""
        return self.total // max(1, self.batch) if self.cu_seqlens is None else self.cu_seqlens.diff()

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Every token's sequence and place in it; waits for no device."""
        token = torch.arange(self.total, device=device)
        if self.cu_seqlens is None:
            count = max(1, self.total // max(1, self.batch))
            return token // count, token % count
        sequence = torch.searchsorted(self.cu_seqlens[1:], token, right=True)
        return sequence, token - self.cu_seqlens[sequence]


@torch.no_grad()
def attention_with_kv_cache(call: KVCacheCall, options: Options) -> tuple[Tensor, Tensor]:
    """Append k and v to the caches in place, then attend to what they hold. Has no gradients.

    Values of lengths and indices are checked on the CPU. On a GPU and in compiled code they are not read, so
    that nothing waits and a graph can hold the call.

    Returns:
        out (like q with the value's head size) and lse (batch, heads, seqlen_q), packed (heads, total_q).

    Raises:
        ValueError, TypeError: an argument does not fit; nothing has been written then.
    """
    _check_tensors(call)
    queries = _query_layout(call)
    batch, device = queries.batch, call.q.device
    table = _page_table(call, batch)
    capacity = call.k_cache.shape[1] * (1 if table is None else table.shape[1])
    new = _new_layout(call, batch)
    held = _held_lengths(call, batch, capacity)
    rotary = _rotary(call, options, held)
    are_values_read = device.type == "cpu" and not torch.compiler.is_compiling()
    if are_values_read:
        _check_values(call, queries, new, held, capacity, table)
    is_fused = new is not None and _is_fusible(call, options, queries, new, rotary, held)
    is_fp8 = call.descale.is_needed(call.q, call.k_cache, call.cu_seqlens_q)
    lengths = held if new is None else torch.empty_like(held) if is_fused else held + new.counts()
    inputs = _inputs(call, table, lengths)
    if is_fp8:
        if rotary is not None:
            raise NotImplementedError("rotary_cos must be None for float8_e4m3fn q: turn q and k before")
        inputs = _eight_bit(call, inputs)
    whole = inputs if call.qv is None else _shaped_as_with_qv(call, inputs)
    if not torch.compiler.is_compiling():
        check_values(describe(whole, options), whole, options)  # the rest, also before the first write

    if new is not None and is_fused:
        inputs = inputs._replace(query=_append_at_once(call, held, lengths, table, rotary))
    elif new is not None:
        query = _append(call, options, queries, new, held, table, rotary)
        inputs = inputs if is_fp8 else inputs._replace(query=query)
    if call.qv is not None:
        query, key = with_qv(inputs.query, call.qv, inputs.key, inputs.value)
        inputs = inputs._replace(query=query, key=key)
    out, lse = autograd.attention(inputs, options, None)
    return call.descale.output(out, call.cu_seqlens_q) if is_fp8 else out, lse


def _eight_bit(call: KVCacheCall, inputs: Inputs) -> Inputs:
    """8-bit caches as the pages that they are stored in, of scale 1: all factors go to q and out."""
    table, key = inputs.page_table, inputs.key
    if table is None:
        table = torch.arange(len(key), dtype=torch.int32, device=key.device)[:, None]
    ones = torch.ones(key.shape[0], key.shape[2], device=key.device)
    query = call.descale.query(call.q, call.cu_seqlens_q)
    return inputs._replace(query=query, page_table=table, key_scale=ones, value_scale=ones)


def _shaped_as_with_qv(call: KVCacheCall, inputs: Inputs) -> Inputs:
    """What is attended to, up to the keys' values: nothing is copied but the queries."""
    assert call.qv is not None
    query, _ = with_qv(call.q, call.qv, inputs.key[:0], inputs.value[:0])
    key = inputs.key[..., :1].expand(*inputs.key.shape[:-1], inputs.key.shape[-1] + inputs.value.shape[-1])
    return inputs._replace(query=query, key=key)


def _append_at_once(
    call: KVCacheCall, held: Tensor, lengths: Tensor, table: Tensor | None, rotary: Rotary | None
) -> Tensor:
    """`_append` in one launch, which also writes the lengths with the new tokens."""
    from tilewise.triton.append import Tokens, append

    assert call.k is not None and call.v is not None
    tables = None if rotary is None else (rotary.cos, rotary.sin, call.rotary_interleaved)
    tokens = Tokens(None, None, held, table, lengths)
    return append(call.q, call.k, call.v, call.k_cache, call.v_cache, tokens, tables)


def _append(
    call: KVCacheCall,
    options: Options,
    queries: Layout,
    new: Layout,
    held: Tensor,
    table: Tensor | None,
    rotary: Rotary | None,
) -> Tensor:
    """Turn q and k by their positions, and write k and v; q as it is to be used."""
    assert call.k is not None and call.v is not None
    q, k, device = call.q, call.k, call.q.device
    sequence, offset = new.offsets(device)
    if rotary is not None:
        k = _turn(call, k, rotary, sequence, offset)
        at = queries.offsets(device)
        q = _turn(call, q, rotary, at[0], at[1] if _is_local(options) else at[1] * 0)
    position = held[sequence] + offset
    entry, row = sequence, position
    if table is not None:
        entry, row = (
            table[sequence, position // call.k_cache.shape[1]].long(),
            position % call.k_cache.shape[1],
        )
    call.k_cache[entry, row.long()] = k.flatten(0, -3)
    call.v_cache[entry, row.long()] = call.v.flatten(0, -3)
    return q


class Rotary(NamedTuple):
    cos: Tensor
    sin: Tensor
    starts: Tensor  # (batch,) position of each sequence's first new token


def _turn(call: KVCacheCall, x: Tensor, rotary: Rotary, sequence: Tensor, offset: Tensor) -> Tensor:
    position = (rotary.starts[sequence] + offset).view(x.shape[:-2]).long()
    return apply_rotary(x, rotary.cos[position], rotary.sin[position], interleaved=call.rotary_interleaved)


def _is_local(options: Options) -> bool:
    return options.causal or options.window_left is not None or options.window_right is not None


def _is_fusible(
    call: KVCacheCall, options: Options, queries: Layout, new: Layout, rotary: Rotary | None, held: Tensor
) -> bool:
    """Whether one Triton kernel can turn and write everything."""
    assert call.k is not None and call.v is not None
    if not (call.q.is_cuda and has_triton() and new.total > 0) or torch.compiler.is_compiling():
        return False
    if rotary is not None and not (
        _is_local(options) and queries.total == new.total and rotary.starts is held
    ):
        return False
    tensors = (call.q, call.k, call.v)
    is_even = (
        queries.cu_seqlens is None and new.cu_seqlens is None and call.q.dtype not in (torch.float64, FP8)
    )
    rows_dense = all(t.stride(-1) == 1 for t in tensors)
    whole = call.k_cache.is_contiguous() and call.v_cache.is_contiguous()
    return is_even and rows_dense and whole


def _inputs(call: KVCacheCall, table: Tensor | None, lengths: Tensor) -> Inputs:
    """The queries against the caches where they lie."""
    k_cache, v_cache = call.k_cache, call.v_cache
    if table is None:
        k_cache, v_cache = k_cache[: len(lengths)], v_cache[: len(lengths)]
    return canonical_inputs(call.q, k_cache, v_cache, alibi_slopes=call.alibi_slopes)._replace(
        cu_seqlens_q=call.cu_seqlens_q,
        seqlens_k=lengths,
        leftpad_k=call.cache_leftpad,
        page_table=table,
    )


def _query_layout(call: KVCacheCall) -> Layout:
    rank, shape = (4, "(batch, seqlen_q, heads, head_dim)")
    if call.cu_seqlens_q is not None:
        rank, shape = 3, "(total_q, heads, head_dim) with cu_seqlens_q"
    if call.q.ndim != rank:
        raise ValueError(f"q.shape={tuple(call.q.shape)} must be {shape}")
    return _layout("cu_seqlens_q", call.cu_seqlens_q, call.q)


def _layout(name: str, cu_seqlens: Tensor | None, x: Tensor) -> Layout:
    if cu_seqlens is None:
        return Layout(len(x), x.shape[0] * x.shape[1], None)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1:
        raise ValueError(f"{name}.shape={tuple(cu_seqlens.shape)} must be (batch + 1,)")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        counts_of(name, cu_seqlens, len(x))
    return Layout(len(cu_seqlens) - 1, len(x), cu_seqlens)


def _new_layout(call: KVCacheCall, batch: int) -> Layout | None:
    """The new tokens, after checking that k and v fit the caches."""
    if call.k is None or call.v is None:
        if (call.k is None) != (call.v is None):
            raise ValueError("k and v must be given together, or neither")
        for name in ("rotary_cos", "rotary_sin", "rotary_seqlens", "cu_seqlens_k_new"):
            if getattr(call, name) is not None:
                raise ValueError(f"{name} must be None when no new k and v are given")
        return None
    if call.cache_seqlens is None:
        raise ValueError("cache_seqlens=None must say where k and v are written")
    rank = 3 if call.cu_seqlens_k_new is not None else 4
    leading = "total_new" if rank == 3 else f"{batch}, seqlen_new"
    for name, new, cache in (("k", call.k, call.k_cache), ("v", call.v, call.v_cache)):
        fits = new.ndim == rank and new.shape[-2:] == cache.shape[2:] and (rank == 3 or len(new) == batch)
        if not fits:
            heads, dim = cache.shape[2:]
            raise ValueError(
                f"{name}.shape={tuple(new.shape)} must be ({leading}, {heads}, {dim}) for this cache"
            )
        if new.dtype != cache.dtype:
            raise TypeError(f"{name}.dtype={new.dtype} must equal {name}_cache.dtype={cache.dtype}")
        if new.device != cache.device:
            raise ValueError(f"{name}.device={new.device} must equal {name}_cache.device={cache.device}")
    if call.v.shape[:-2] != call.k.shape[:-2]:
        raise ValueError(
            f"v.shape={tuple(call.v.shape)} must have as many tokens as k: {tuple(call.k.shape)}"
        )
    layout = _layout("cu_seqlens_k_new", call.cu_seqlens_k_new, call.k)
    if layout.batch != batch:
        raise ValueError(f"cu_seqlens_k_new has {layout.batch} sequences, must have {batch} as q")
    return layout


def _held_lengths(call: KVCacheCall, batch: int, capacity: int) -> Tensor:
    seqlens = call.cache_seqlens
    if isinstance(seqlens, Tensor):
        return _per_sequence("cache_seqlens", seqlens, batch)
    length = capacity if seqlens is None else seqlens
    return torch.full((batch,), length, dtype=torch.int32, device=call.q.device)


def _page_table(call: KVCacheCall, batch: int) -> Tensor | None:
    """(batch, pages): the face's table; a column of cache rows for `cache_batch_idx`; None if row b is b."""
    if call.page_table is not None:
        if call.cache_batch_idx is not None:
            raise ValueError(f"cache_batch_idx must be None when {call.table_name} is given")
        if call.page_table.ndim != 2 or len(call.page_table) != batch or call.k_cache.shape[1] < 1:
            raise ValueError(
                f"{call.table_name}.shape={tuple(call.page_table.shape)} must be (batch={batch}, pages a "
                f"sequence) and the page size {call.k_cache.shape[1]} at least 1"
            )
        return call.page_table
    rows = len(call.k_cache)
    if call.cache_batch_idx is None:
        if rows < batch:
            raise ValueError(f"k_cache.shape[0]={rows} must be at least the batch size {batch}")
        return None
    index = _per_sequence("cache_batch_idx", call.cache_batch_idx, batch)
    is_read = not index.is_cuda and not torch.compiler.is_compiling()
    if is_read and not all(0 <= i < rows for i in index.tolist()):
        raise ValueError(f"cache_batch_idx={index.tolist()} must index the cache's {rows} sequences")
    if call.k_cache.shape[1] < 1:
        raise ValueError(f"k_cache.shape={tuple(call.k_cache.shape)} must hold at least one token a sequence")
    return call.cache_batch_idx[:, None]


def _check_tensors(call: KVCacheCall) -> None:
    for name in ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin"):
        t = getattr(call, name)
        if not isinstance(t, Tensor) and (t is not None or name in ("q", "k_cache", "v_cache")):
            raise TypeError(f"{name}={type(t).__name__} must be a torch.Tensor")
    k_cache, v_cache = tuple(call.k_cache.shape), tuple(call.v_cache.shape)
    if len(k_cache) != 4 or len(v_cache) != 4 or v_cache[:3] != k_cache[:3]:
        raise ValueError(
            f"k_cache.shape={k_cache} and v_cache.shape={v_cache} must be (batch, capacity, kv heads, dim) "
            f"or (pages, page size, kv heads, dim) with {call.table_name}, equal up to the last size"
        )
    for name, cache in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            raise ValueError(f"{name}.stride(-1)={cache.stride(-1)} must be 1: it is updated in place")
    tensors = {name: getattr(call, name) for name in _INTEGER_TENSORS if getattr(call, name) is not None}
    if isinstance(tensors.get("cache_seqlens"), int):
        del tensors["cache_seqlens"]
    if "page_table" in tensors:
        tensors[call.table_name] = tensors.pop("page_table")
    check_integer_tensors(**tensors)


_INTEGER_TENSORS = (
    "cache_seqlens",
    "cache_batch_idx",
    "cache_leftpad",
    "page_table",
    "cu_seqlens_q",
    "cu_seqlens_k_new",
    "rotary_seqlens",
)


def _per_sequence(name: str, t: Tensor, batch: int) -> Tensor:
    if tuple(t.shape) != (batch,):
        raise ValueError(f"{name}.shape={tuple(t.shape)} must be (batch,)=({batch},)")
    return t


def _check_values(
    call: KVCacheCall, queries: Layout, new: Layout | None, held: Tensor, capacity: int, table: Tensor | None
) -> None:
    """What only the values of lengths and pages can tell."""
    added = held * 0 if new is None else held * 0 + new.counts()
    pads = [0] * len(held)
    if call.cache_leftpad is not None:
        pads = _per_sequence("cache_leftpad", call.cache_leftpad, len(held)).tolist()
    for i, (h, a, pad) in enumerate(zip(held.tolist(), added.tolist(), pads)):
        if not 0 <= h <= capacity:
            raise ValueError(f"cache_seqlens[{i}]={h} must be between 0 and the capacity {capacity}")
        if h + a > capacity:
            raise ValueError(
                f"{a} new tokens do not fit: cache_seqlens[{i}]={h} of capacity {capacity} are taken"
            )
        if not 0 <= pad <= h + a:
            raise ValueError(f"cache_leftpad[{i}]={pad} must be between 0 and the length {h + a}")
    if call.page_table is not None and table is not None:
        check_pages(call.table_name, table, (held + added).tolist(), call.k_cache)
    if call.rotary_cos is not None and new is not None:
        starts = held if call.rotary_seqlens is None else call.rotary_seqlens
        counts = [layout.counts() for layout in (queries, new)]
        last = max((int((starts + count).max()) for count in counts if len(starts)), default=0) - 1
        first = int(starts.min()) if len(starts) else 0
        if first < 0 or last >= len(call.rotary_cos):
            raise ValueError(f"rotary_cos.shape[0]={len(call.rotary_cos)} must exceed position {last}")


def _rotary(call: KVCacheCall, options: Options, held: Tensor) -> Rotary | None:
    cos, sin, starts = call.rotary_cos, call.rotary_sin, held
    if call.rotary_seqlens is not None:
        starts = _per_sequence("rotary_seqlens", call.rotary_seqlens, len(held))
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("rotary_cos and rotary_sin must be given together, or neither")
        return None
    shape, most = tuple(cos.shape), min(call.q.shape[-1], call.k_cache.shape[-1])
    if len(shape) != 2 or tuple(sin.shape) != shape or not 2 <= 2 * shape[1] <= most:
        raise ValueError(
            f"rotary_cos.shape={shape} and rotary_sin.shape={tuple(sin.shape)} must both be "
            f"(positions, rotary_dim / 2) with rotary_dim from 2 to the head size {most}"
        )
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not t.dtype.is_floating_point:
            raise TypeError(f"{name}.dtype={t.dtype} must be a floating-point dtype")
        if t.device != call.q.device:
            raise ValueError(f"{name}.device={t.device} must equal q.device={call.q.device}")
    return Rotary(cos, sin, starts)
