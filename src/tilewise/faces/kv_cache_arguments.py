"""The arguments of `flash_attn_with_kvcache`: what they say, and every check of them."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core import checks
from tilewise.core.torch_private import compiles_here
from tilewise.core.values import check_pages
from tilewise.faces.fp8 import NO_FACTORS, Descale
from tilewise.faces.tokens import check_integer_tensors, counts_of


@dataclass(frozen=True)
class KVCacheCall:
    """What the two faces share, under flash-attn 3's names; `table_name` is the face's for `page_table`."""

    q: Tensor  # (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q
    k_cache: Tensor  # (batch_cache, capacity, KV heads, head_dim), or (pages, page_size, KV heads, head_dim)
    v_cache: Tensor
    k: Tensor | None = None  # (batch, seqlen_new, KV heads, head_dim), or packed with cu_seqlens_k_new
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
    attention_chunk: int = 0  # positions in a chunk: see `tilewise.integrations.chunks`
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


class Rotary(NamedTuple):
    cos: Tensor
    sin: Tensor
    starts: Tensor  # (batch,) position of each sequence's first new token


class Places(NamedTuple):
    """Where a call's tokens lie, and stand: what its arguments say together."""

    queries: Layout
    new: Layout | None  # tokens that are appended
    table: Tensor | None  # (batch, pages), see `_pages_of`
    held: Tensor  # (batch,) tokens that the cache has
    rotary: Rotary | None
    is_local: bool  # queries have positions one after the other; otherwise all of them have the first one's


def places_of(call: KVCacheCall, is_local: bool) -> Places:
    """Those of a call whose tensors `check_tensors` has seen.

    Values of lengths and indices are checked on the CPU, but for compiled code.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    queries = _query_layout(call)
    table = _pages_of(call, queries.batch)
    capacity = call.k_cache.shape[1] * (1 if table is None else table.shape[1])
    new = _new_layout(call, queries.batch)
    held = _held_lengths(call, queries.batch, capacity)
    at = Places(queries, new, table, held, _rotary_of(call, held), is_local)
    if call.q.device.type == "cpu" and not compiles_here():
        _check_lengths(call, at, capacity)
    return at


def _query_layout(call: KVCacheCall) -> Layout:
    rank, shape = (4, "(batch, seqlen_q, heads, head_dim)")
    if call.cu_seqlens_q is not None:
        rank, shape = 3, "(total_q, heads, head_dim) with cu_seqlens_q"
    if call.q.ndim != rank:
        raise ValueError(f"q.shape={tuple(call.q.shape)} must be {shape}")
    return _layout("cu_seqlens_q", call.cu_seqlens_q, call.q)


def _layout(name: str, cu_seqlens: Tensor | None, x: Tensor) -> Layout:
    if cu_seqlens is None:
        return Layout(x.shape[0], x.shape[0] * x.shape[1], None)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 1:
        raise ValueError(f"{name}.shape={tuple(cu_seqlens.shape)} must be (batch + 1,)")
    if cu_seqlens.device.type == "cpu" and not compiles_here():
        counts_of(name, cu_seqlens, len(x))
    return Layout(len(cu_seqlens) - 1, len(x), cu_seqlens)


def _new_layout(call: KVCacheCall, batch: int) -> Layout | None:
    """The new tokens, after checking that k and v fit the caches."""
    if call.k is None or call.v is None:
        if (call.k is None) != (call.v is None):
            raise ValueError("k and v must be given together, or neither")
        if call.cu_seqlens_k_new is not None:
            raise ValueError("cu_seqlens_k_new must be None when no new k and v are given")
        is_turned = call.rotary_cos is not None or call.rotary_sin is not None
        if is_turned and call.rotary_seqlens is None:
            raise ValueError(
                "rotary_cos must be None when no new k and v are given: only rotary_cos, rotary_sin and "
                "rotary_seqlens together rotate q alone"
            )
        return None
    if call.cache_seqlens is None:
        raise ValueError("cache_seqlens=None must say where k and v are written")
    rank = 3 if call.cu_seqlens_k_new is not None else 4
    for name, new, cache in (("k", call.k, call.k_cache), ("v", call.v, call.v_cache)):
        fits = new.ndim == rank and new.shape[-2:] == cache.shape[2:] and (rank == 3 or new.shape[0] == batch)
        if not fits:
            heads, dim = cache.shape[2:]
            leading = "total_new" if rank == 3 else f"{batch}, seqlen_new"
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
    if not 0 <= length <= capacity:
        raise ValueError(f"cache_seqlens={length} must be between 0 and the capacity {capacity}")
    return torch.full((batch,), length, dtype=torch.int32, device=call.q.device)


def _pages_of(call: KVCacheCall, batch: int) -> Tensor | None:
    """(batch, pages): the face's table; a column of cache rows for `cache_batch_idx`; None if row b is b."""
    table, index = call.page_table, call.cache_batch_idx
    if table is not None and (table.ndim != 2 or call.k_cache.shape[1] < 1):
        raise ValueError(
            f"{call.table_name}.shape={tuple(table.shape)} must be (batch={batch}, pages a "
            f"sequence) and the page size {call.k_cache.shape[1]} at least 1"
        )
    rows = (call.k_cache if table is None else table).shape[0]
    if index is not None:
        _check_batch_idx(call, index, batch, rows)
        return index[:, None] if table is None else table.index_select(0, index)
    if table is not None and rows != batch:
        raise ValueError(
            f"{call.table_name}.shape={tuple(table.shape)} must be (batch={batch}, pages a sequence)"
        )
    if rows < batch:
        raise ValueError(f"k_cache.shape[0]={rows} must be at least the batch size {batch}")
    return table


def _check_batch_idx(call: KVCacheCall, index: Tensor, batch: int, rows: int) -> None:
    """Rows of the cache, or of its page table."""
    _per_sequence("cache_batch_idx", index, batch)
    if call.k_cache.shape[1] < 1:
        raise ValueError(f"k_cache.shape={tuple(call.k_cache.shape)} must hold at least one token a sequence")
    if index.is_cuda or compiles_here():
        return
    held = index.tolist()
    if not all(0 <= i < rows for i in held):
        raise ValueError(f"cache_batch_idx={held} must index the cache's {rows} sequences")
    if call.k is not None and len(set(held)) < batch:
        raise ValueError(f"cache_batch_idx={held} must not name a sequence twice when k and v are appended")


def check_tensors(call: KVCacheCall) -> None:
    needed = ("q", "k_cache", "v_cache")
    given = {n: getattr(call, n) for n in (*needed, "k", "v", "rotary_cos", "rotary_sin", "alibi_slopes")}
    checks.check_tensors(**{name: t for name, t in given.items() if t is not None or name in needed})
    k_cache, v_cache = tuple(call.k_cache.shape), tuple(call.v_cache.shape)
    if len(k_cache) != 4 or len(v_cache) != 4 or v_cache[:3] != k_cache[:3]:
        raise ValueError(
            f"k_cache.shape={k_cache} and v_cache.shape={v_cache} must be (batch, capacity, KV heads, dim) "
            f"or (pages, page size, KV heads, dim) with {call.table_name}, equal up to the last size"
        )
    for name, cache in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if cache.dtype != call.q.dtype:
            raise TypeError(f"{name}.dtype={cache.dtype} must equal q.dtype={call.q.dtype}")
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            raise ValueError(f"{name}.stride(-1)={cache.stride(-1)} must be 1: it is updated in place")
    tensors = {name: getattr(call, name) for name in _INTEGER_TENSORS if getattr(call, name) is not None}
    if isinstance(tensors.get("cache_seqlens"), Integral):
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


def _check_lengths(call: KVCacheCall, at: Places, capacity: int) -> None:
    """What only the values of lengths and pages can tell."""
    held, new = at.held, at.new
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
    if call.page_table is not None and at.table is not None:
        check_pages(call.table_name, at.table, (held + added).tolist(), call.k_cache)
    if call.rotary_cos is not None:
        starts = held if call.rotary_seqlens is None else call.rotary_seqlens
        turned = held * 0 + at.queries.counts()
        counts = [added, turned if at.is_local else turned.clamp(max=1)]
        last = max((int((starts + count).max()) for count in counts if len(starts)), default=0) - 1
        first = int(starts.min()) if len(starts) else 0
        if first < 0 or last >= len(call.rotary_cos):
            raise ValueError(f"rotary_cos.shape[0]={len(call.rotary_cos)} must exceed position {last}")


def _rotary_of(call: KVCacheCall, held: Tensor) -> Rotary | None:
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
            f"(positions, rotary_dim / 2) with rotary_dim from 2 to the head_dim {most}"
        )
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not t.dtype.is_floating_point:
            raise TypeError(f"{name}.dtype={t.dtype} must be a floating-point dtype")
        if t.device != call.q.device:
            raise ValueError(f"{name}.device={t.device} must equal q.device={call.q.device}")
    return Rotary(cos, sin, starts)
