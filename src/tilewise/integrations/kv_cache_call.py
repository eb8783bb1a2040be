"""`flash_attn_with_kvcache` of both flash-attn generations: check everything, append, attend.

A contiguous cache is a paged one whose page is a whole sequence: token `t` of sequence `b` lies in row
`t % page_size` of page `table[b, t // page_size]`. Appending and gathering are written once, in those terms.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import autograd
from tilewise.api import canonical_inputs
from tilewise.problem import Inputs, Options, check_values, describe
from tilewise.rotary import apply_rotary


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
    table_name: str = "page_table"


class Tokens:
    """Tokens of several sequences one after the other: `counts[b]` of them, from position `starts[b]`."""

    def __init__(self, counts: list[int], starts: list[int], device: torch.device) -> None:
        self.counts, self.starts = counts, starts
        count = torch.tensor(counts, dtype=torch.int64, device=device)
        self.sequence = torch.repeat_interleave(torch.arange(len(counts), device=device), count)  # (total,)
        first = count.cumsum(0) - count
        self.offset = torch.arange(len(self.sequence), device=device) - first[self.sequence]
        self.cu_seqlens = torch.cat((count.new_zeros(1), count.cumsum(0)))

    @property
    def position(self) -> Tensor:
        start = torch.tensor(self.starts, dtype=torch.int64, device=self.sequence.device)
        return start[self.sequence] + self.offset

    def place(self, table: Tensor | None, page_size: int) -> tuple[Tensor, Tensor]:
        """The page and the row in it of every token; without a table, a sequence's page is its own number."""
        if table is None:
            return self.sequence, self.position
        return table[self.sequence, self.position // page_size].long(), self.position % page_size


@torch.no_grad()
def attention_with_kv_cache(call: KVCacheCall, options: Options) -> tuple[Tensor, Tensor]:
    """Append k and v to the caches in place, then attend to what they hold. Has no gradients.

    Returns:
        out (like q with the value's head size) and lse (batch, heads, seqlen_q), packed (heads, total_q).

    Raises:
        ValueError, TypeError: an argument does not fit; nothing has been written then.
    """
    _check_tensors(call)
    query_counts = _query_counts(call)
    batch, device = len(query_counts), call.q.device
    table = _page_table(call, batch)
    capacity = call.k_cache.shape[1] * (1 if table is None else table.shape[1])
    held = _held_lengths(call, batch, capacity)
    added = _new_counts(call, batch)
    lengths = [h + a for h, a in zip(held, added)]
    leftpad = _integers("cache_leftpad", call.cache_leftpad, batch)
    _check_lengths(call, held, added, leftpad, capacity, table)

    starts = held
    if call.rotary_seqlens is not None:
        starts = _integers("rotary_seqlens", call.rotary_seqlens, batch) or []
    q = _rotate_query(call, options, query_counts, starts)
    new_keys = _rotate_new_keys(call, added, starts)
    kept = None  # the cached rows that count, where they have to be copied together
    if call.cu_seqlens_q is not None and len(set(query_counts)) > 1:
        first = leftpad or [0] * batch
        kept = Tokens([n - f for n, f in zip(lengths, first)], first, device)
        inputs = _ragged_inputs(call, q, kept)
    else:
        q = q.reshape(batch, query_counts[0] if batch else 0, *q.shape[-2:])  # a view: only rows are split
        inputs = _even_inputs(call, q, table, lengths, leftpad)
    check_values(describe(inputs, options), inputs, options)  # the rest, also before the first write

    if new_keys is not None and call.v is not None:
        page, row = Tokens(added, held, device).place(table, call.k_cache.shape[1])
        call.k_cache[page, row] = new_keys  # [new tokens, kv heads, head_dim]
        call.v_cache[page, row] = call.v.flatten(0, -3)
    if kept is not None:
        key, value = (gather_tokens(cache, table, kept) for cache in (call.k_cache, call.v_cache))
        inputs = inputs._replace(key=key, value=value)
    out, lse = autograd.attention(inputs, options, None)
    if call.cu_seqlens_q is not None and kept is None:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return out, lse


def _even_inputs(
    call: KVCacheCall, q: Tensor, table: Tensor | None, lengths: list[int], leftpad: list[int] | None
) -> Inputs:
    """Queries (batch, seqlen_q, heads, head_dim) against the caches where they lie."""
    k_cache, v_cache = call.k_cache, call.v_cache
    if table is None:
        k_cache, v_cache = k_cache[: len(q)], v_cache[: len(q)]
    return canonical_inputs(q, k_cache, v_cache, alibi_slopes=call.alibi_slopes)._replace(
        seqlens_k=torch.tensor(lengths, dtype=torch.int32, device=q.device),
        leftpad_k=None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32, device=q.device),
        page_table=table,
    )


def _ragged_inputs(call: KVCacheCall, q: Tensor, kept: Tokens) -> Inputs:
    """Packed queries; key and value stand for the rows gathered later: one row of memory, repeated."""
    total = sum(kept.counts)
    key, value = (
        cache.new_empty(cache.shape[-1]).expand(total, *cache.shape[2:])
        for cache in (call.k_cache, call.v_cache)
    )
    inputs = canonical_inputs(q, key, value, alibi_slopes=call.alibi_slopes)
    return inputs._replace(cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=kept.cu_seqlens)


def gather_tokens(cache: Tensor, table: Tensor | None, tokens: Tokens) -> Tensor:
    """The cached rows of these tokens, packed: (total, kv heads, dim). Differentiable."""
    return cache[tokens.place(table, cache.shape[1])]


def gather_pages(
    cache_k: Tensor, cache_v: Tensor, table: Tensor, table_name: str, counts: list[int]
) -> tuple[Tensor, Tensor]:
    """The first `counts[b]` tokens of every sequence, packed. Differentiable.

    Raises:
        ValueError, TypeError: the table or the caches do not fit.
    """
    _check_integer_tensors(**{table_name: table})
    if table.ndim != 2 or len(table) != len(counts) or cache_k.ndim != 4 or cache_v.ndim != 4:
        raise ValueError(
            f"{table_name}.shape={tuple(table.shape)} must be (batch={len(counts)}, pages a sequence), and "
            f"k.shape={tuple(cache_k.shape)}, v.shape={tuple(cache_v.shape)} (pages, page_size, heads, dim)"
        )
    capacity = table.shape[1] * cache_k.shape[1]
    if max(counts, default=0) > capacity:
        raise ValueError(
            f"{table_name}.shape={tuple(table.shape)} holds {capacity} tokens, not {max(counts)}"
        )
    _check_pages(table_name, table, counts, cache_k)
    tokens = Tokens(counts, [0] * len(counts), table.device)
    return gather_tokens(cache_k, table, tokens), gather_tokens(cache_v, table, tokens)


def counts_of(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """The sequence lengths that offsets stand for.

    Raises:
        ValueError, TypeError: they are not (batch + 1,) integers from 0 to total that never decrease.
    """
    _check_integer_tensors(**{name: cu_seqlens})
    offsets = cu_seqlens.tolist() if cu_seqlens.ndim == 1 else []
    counts = [b - a for a, b in itertools.pairwise(offsets)]
    if not offsets or offsets[0] != 0 or offsets[-1] != total or min(counts, default=0) < 0:
        raise ValueError(
            f"{name}={offsets} must be (batch + 1,), never decrease and go from 0 to total={total}"
        )
    return counts


def _query_counts(call: KVCacheCall) -> list[int]:
    rank, shape = (4, "(batch, seqlen_q, heads, head_dim)")
    if call.cu_seqlens_q is not None:
        rank, shape = 3, "(total_q, heads, head_dim) with cu_seqlens_q"
    if call.q.ndim != rank:
        raise ValueError(f"q.shape={tuple(call.q.shape)} must be {shape}")
    if call.cu_seqlens_q is not None:
        return counts_of("cu_seqlens_q", call.cu_seqlens_q, call.q.shape[0])
    return [call.q.shape[1]] * call.q.shape[0]


def _new_counts(call: KVCacheCall, batch: int) -> list[int]:
    """New tokens of every sequence, after checking that k and v fit the caches."""
    if call.k is None or call.v is None:
        if (call.k is None) != (call.v is None):
            raise ValueError("k and v must be given together, or neither")
        for name in ("rotary_cos", "rotary_sin", "rotary_seqlens", "cu_seqlens_k_new"):
            if getattr(call, name) is not None:
                raise ValueError(f"{name} must be None when no new k and v are given")
        return [0] * batch
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
    if call.cu_seqlens_k_new is None:
        return [call.k.shape[1]] * batch
    counts = counts_of("cu_seqlens_k_new", call.cu_seqlens_k_new, call.k.shape[0])
    if len(counts) != batch:
        raise ValueError(f"cu_seqlens_k_new has {len(counts)} sequences, must have {batch} as q")
    return counts


def _held_lengths(call: KVCacheCall, batch: int, capacity: int) -> list[int]:
    seqlens = call.cache_seqlens
    if seqlens is None:
        return [capacity] * batch
    if isinstance(seqlens, int):
        return [seqlens] * batch
    return _integers("cache_seqlens", seqlens, batch) or []


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
    index = _integers("cache_batch_idx", call.cache_batch_idx, batch) or []
    if not all(0 <= i < rows for i in index):
        raise ValueError(f"cache_batch_idx={index} must index the cache's {rows} sequences")
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
    _check_integer_tensors(**tensors)


_INTEGER_TENSORS = (
    "cache_seqlens",
    "cache_batch_idx",
    "cache_leftpad",
    "page_table",
    "cu_seqlens_q",
    "cu_seqlens_k_new",
    "rotary_seqlens",
)


def _check_integer_tensors(**tensors: Tensor) -> None:
    for name, t in tensors.items():
        if not isinstance(t, Tensor) or t.dtype not in (torch.int32, torch.int64):
            found = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"{name} of {found} must be an int32 or int64 tensor")


def _integers(name: str, t: Tensor | None, batch: int) -> list[int] | None:
    if t is None:
        return None
    if tuple(t.shape) != (batch,):
        raise ValueError(f"{name}.shape={tuple(t.shape)} must be (batch,)=({batch},)")
    return t.tolist()


def _check_lengths(
    call: KVCacheCall,
    held: list[int],
    added: list[int],
    leftpad: list[int] | None,
    capacity: int,
    table: Tensor | None,
) -> None:
    for i, (h, a) in enumerate(zip(held, added)):
        if not 0 <= h <= capacity:
            raise ValueError(f"cache_seqlens[{i}]={h} must be between 0 and the capacity {capacity}")
        if h + a > capacity:
            raise ValueError(
                f"{a} new tokens do not fit: cache_seqlens[{i}]={h} of capacity {capacity} are taken"
            )
        if leftpad is not None and not 0 <= leftpad[i] <= h + a:
            raise ValueError(f"cache_leftpad[{i}]={leftpad[i]} must be between 0 and the length {h + a}")
    if call.page_table is not None and table is not None:
        _check_pages(call.table_name, table, [h + a for h, a in zip(held, added)], call.k_cache)


def _check_pages(name: str, table: Tensor, lengths: list[int], cache: Tensor) -> None:
    """Only the pages in use: entries behind a sequence's end may hold anything."""
    if cache.shape[1] < 1:
        raise ValueError(f"the page size {cache.shape[1]} must be at least 1")
    for i, (length, pages) in enumerate(zip(lengths, table.tolist())):
        used = pages[: -(-length // cache.shape[1])]
        if not all(0 <= page < len(cache) for page in used):
            raise ValueError(f"{name}[{i}]={used} must index pages in [0, {len(cache)})")


def _rotate_query(call: KVCacheCall, options: Options, counts: list[int], starts: list[int]) -> Tensor:
    """q turned by its tokens' positions; all of them that of the first new key unless causal or windowed."""
    if call.rotary_cos is None or call.rotary_sin is None:
        if call.rotary_cos is not call.rotary_sin:
            raise ValueError("rotary_cos and rotary_sin must be given together, or neither")
        return call.q
    tokens = Tokens(counts, starts, call.q.device)
    is_local = options.causal or options.window_left is not None or options.window_right is not None
    positions = tokens.position if is_local else tokens.position - tokens.offset
    return _rotate(call, call.q, positions)


def _rotate_new_keys(call: KVCacheCall, counts: list[int], starts: list[int]) -> Tensor | None:
    """The new keys, packed, turned by the positions that they take in the cache."""
    if call.k is None or call.rotary_cos is None:
        return None if call.k is None else call.k.flatten(0, -3)
    return _rotate(call, call.k, Tokens(counts, starts, call.k.device).position).flatten(0, -3)


def _rotate(call: KVCacheCall, x: Tensor, positions: Tensor) -> Tensor:
    assert call.rotary_cos is not None and call.rotary_sin is not None
    shape = tuple(call.rotary_cos.shape)
    if len(shape) != 2 or tuple(call.rotary_sin.shape) != shape or not 2 <= 2 * shape[1] <= x.shape[-1]:
        raise ValueError(
            f"rotary_cos.shape={shape} and rotary_sin.shape={tuple(call.rotary_sin.shape)} must both be "
            f"(positions, rotary_dim / 2) with rotary_dim from 2 to the head size {x.shape[-1]}"
        )
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < shape[0]:
        raise ValueError(f"rotary_cos.shape[0]={shape[0]} must exceed position {int(positions.max())}")
    positions = positions.view(x.shape[:-2])
    cos, sin = call.rotary_cos[positions], call.rotary_sin[positions]
    return apply_rotary(x, cos, sin, interleaved=call.rotary_interleaved)
