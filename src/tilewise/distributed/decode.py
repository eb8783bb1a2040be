"""Decoding with a cache split over ranks: each attends to its own keys, one message merges the results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api import canonical_inputs
from tilewise.autograd import functions
from tilewise.cache import KVCache, PagedKVCache
from tilewise.cache.step import cached_step
from tilewise.core.checks import check_flag, check_tensors, shown
from tilewise.core.device_errors import check_if_debugging
from tilewise.core.problem import Options
from tilewise.core.signature import Request, all_resolved
from tilewise.core.torch_private import between_graphs
from tilewise.distributed.parts import Totals
from tilewise.distributed.ranks import agree, gather, ranks_of


@between_graphs
def attention_with_split_cache(
    query: Tensor,
    cache: KVCache | PagedKVCache,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    owner: int = 0,
    group: Any = None,
    mesh: Any = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to the keys of all ranks' caches together: one step of decoding.

    Each rank's cache holds some of the keys, in any order and number, or none. Keys in caches are before the
    new tokens; among these attention is causal. RoPE, if any, has been applied: a cache does not know the
    positions of its keys.

    Args:
        query: (batch, new_tokens, num_heads, head_dim), the same on all ranks.
        cache: this rank's keys and values.
        key, value: (batch, new_tokens, num_kv_heads, head_dim or head_dim_v), the same on all ranks; the
            owner appends them to its cache. None appends nothing.
        owner: the rank in the group that keeps the new tokens: let steps take turns, or fill one by one.
        group, mesh: who shares the cache, as of `context_parallel_attention`.
        softcap, sinks, scale, return_lse, backend: as of `tilewise.attention_with_cache`.

    Returns:
        out (batch, new_tokens, num_heads, head_dim_v) like query, on every rank the same; with return_lse
        also lse (batch, num_heads, new_tokens). Merged in float32 (float64 for float64).

    Raises:
        ValueError, TypeError: as `attention_with_cache`; on CPU groups, or if TILEWISE_DEBUG=1, on all ranks,
            and no cache has grown.
        NotImplementedError: query requires grad.

    Example:
        >>> cache, x = KVCache(1, 8, 1, 4, dtype=torch.float32), torch.ones(1, 1, 1, 4)
        >>> attention_with_split_cache(x, cache, x, x).shape  # alone: the whole cache
        torch.Size([1, 1, 1, 4])
    """
    ranks = ranks_of(group, mesh)
    error = found = None
    is_owner = ranks.rank == owner
    try:
        check_tensors(query=query)
        check_flag("return_lse", return_lse)
        if not isinstance(owner, int) or isinstance(owner, bool) or not 0 <= owner < ranks.world:
            raise ValueError(f"owner={shown(owner)} must be a rank of the group, 0 to {ranks.world - 1}")
        if query.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("query with gradient is not served: decode under torch.no_grad()")
        options = Options(is_owner and key is not None, softcap=softcap, scale=scale)
        own = (key, value, sinks) if is_owner else (None, None, None)
        found = _attend(query, cache, *own, options, backend, Request(wide=ranks.world > 1))
    except Exception as refusal:
        error = refusal

    def facts() -> dict[str, Any]:
        sizes = f"{tuple(cache.key.shape[2:])}, {tuple(cache.value.shape[2:])}"
        return {
            "query": _fact(query), "key": _fact(key), "value": _fact(value), "sinks": _fact(sinks),
            "heads and dimensions of the cache": sizes,
            "owner": owner, "softcap": softcap, "scale": scale, "return_lse": return_lse,
        }  # fmt: skip

    try:
        agree(ranks, facts, error, query.device if isinstance(query, Tensor) else torch.device("cpu"))
    except Exception:
        if found is not None and is_owner and key is not None:
            _forget(cache, key.shape[1])
        raise
    assert found is not None
    out, lse = found
    if ranks.world == 1:
        return (out, lse) if return_lse else out
    numbers = torch.cat((out.to(lse.dtype).flatten(), lse.flatten()))  # one message
    total = Totals(query, out.shape[-1], has_lse=True)
    for part in gather(numbers, ranks):
        outs, lses = part.split((out.numel(), lse.numel()))
        total.add(0, outs.view(out.shape), lses.view(lse.shape))
    out, merged = total.finish()
    assert merged is not None
    return (out, merged) if return_lse else out


def _attend(
    query: Tensor,
    cache: KVCache | PagedKVCache,
    key: Tensor | None,
    value: Tensor | None,
    sinks: Tensor | None,
    options: Options,
    backend: str | None,
    request: Request,
) -> tuple[Tensor, Tensor]:
    """out and lse of `attention_with_cache`, as a request says."""
    if value is not None and key is None:
        raise TypeError("key=NoneType must be a torch.Tensor when value is given")
    query, key, value, sinks = all_resolved((query, key, value, sinks))
    step = cached_step(cache, None, query, key, value)
    try:
        inputs = step.inputs(canonical_inputs(query, cache.key, cache.value, sinks=sinks))
        functions.check(inputs, options, backend, request)  # before the cache changes
        inputs = inputs._replace(query=step.store(query, key, value, None))
        is_known = step.are_lengths_known()
        found = functions.attention(inputs, options, backend, request, are_values_known=is_known)
    except BaseException:
        step.undo()
        raise
    check_if_debugging()
    return found


def _forget(cache: KVCache | PagedKVCache, count: int) -> None:
    """Take back tokens just appended, of a call that another rank refuses."""
    if isinstance(cache, KVCache):
        cache.advance(-count)
        return
    for sequence in cache.sequences:
        cache.truncate(sequence, cache.length(sequence) - count)


def _fact(t: Any) -> str:
    return f"{t.dtype} {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
