"""Statistics of attention weights where the output is not wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Never

from torch import Tensor

from tilewise.api import Window, canonical_inputs, check_layout, to_bshd, window_bounds
from tilewise.autograd import statistics
from tilewise.cache.contiguous import KVCache
from tilewise.cache.paged import PagedKVCache
from tilewise.cache.pages import PagedBatch
from tilewise.cache.step import cached_step
from tilewise.core.checks import check_known, check_tensors
from tilewise.core.functions.call import MaskFunction, ScoreFunction, with_functions
from tilewise.core.problem import Options, in_layout
from tilewise.core.statistics import Aux, Statistics
from tilewise.varlen import read_length

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def attention_statistics(
    query: Tensor,
    key: Tensor | KVCache | PagedKVCache,
    aux: Aux,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    batch: PagedBatch | Sequence[int] | None = None,
    causal: bool = False,
    window: Window | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    mask_mod: MaskFunction | None = None,
    score_mod: ScoreFunction | None = None,
    block_mask: BlockMask | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    layout: str = "bshd",
    precision: str = "ieee",
    backend: str | None = None,
    **unknown: Never,
) -> Statistics:
    """Statistics of the weights softmax(scale * Q K^T + ...), in O(N) memory and without values.

    Args:
        query: (batch, seqlen_q, num_heads, head_dim) in `layout`; packed (total_q, num_heads, head_dim).
        key: (batch, seqlen_k, num_kv_heads, head_dim), packed likewise; or a cache, whose last keys the
            queries are aligned with. Nothing is appended to it.
        aux: which statistics, see `tilewise.Aux`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as of `tilewise.attention_varlen`.
        batch: the sequences of a `PagedKVCache`, as of `tilewise.attention_with_cache`.

    The other arguments are those of `tilewise.attention`; with a cache, functions count as in
    `attention_with_cache`. The last W queries attend alike without those before them: `query[:, -W:]` is all
    that their statistics need.

    Returns:
        A `tilewise.Statistics`: attributes of the names that aux asks for, differentiable where `Aux` says.
        A query that sees no key has row_max -inf, lse -inf (its sink's logit if it has one), entropy 0,
        weights 0 and keys -1.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and says what does.
        NotImplementedError: the backend asked for does not give these statistics.

    Example:
        >>> import torch
        >>> q = torch.zeros(1, 4, 2, 8)
        >>> ask = Aux(entropy=True, max_logit=True, column_sum=True)
        >>> found = attention_statistics(q, q, ask, causal=True)
        >>> found.entropy[0, 0].exp().round(), found.max_logit, found.column_sum[0, 0, -1]
        (tensor([1., 2., 3., 4.]), tensor([0., 0.]), tensor(0.2500))
    """
    check_known(attention_statistics, unknown)
    check_tensors(query=query)
    scores = (mask, bias, alibi_slopes, sinks)
    lengths = (read_length("max_seqlen_q", max_seqlen_q), read_length("max_seqlen_k", max_seqlen_k))
    options = Options(causal, *window_bounds(window), softcap, 0.0, scale, False, *lengths, precision)
    are_lengths_known, cached = False, None
    check_layout(layout)
    if isinstance(key, KVCache | PagedKVCache):
        if cu_seqlens_q is not None or cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_q and cu_seqlens_k must be None with a cache: it knows its lengths")
        (query,) = to_bshd(layout, query=query)
        step = cached_step(key, batch, query, None, None)
        inputs = step.inputs(canonical_inputs(query, key.key, key.value, *scores))
        are_lengths_known, cached = step.are_lengths_known(), step.standing(query)
    else:
        if batch is not None:
            raise ValueError("batch must be None without a PagedKVCache: it names sequences of one")
        check_tensors(key=key)
        inputs = in_layout(canonical_inputs(query, key, _no_values(key, backend), *scores), layout)
        inputs = inputs._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    inputs, options = with_functions(inputs, options, mask_mod, score_mod, block_mask, cached)
    _, _, found = statistics.attention(inputs, options, backend, aux, are_lengths_known)
    return found


def _no_values(key: Tensor, backend: str | None) -> Tensor:
    """The smallest values that a forward takes: a number a key, on a GPU 8; for `aten` as many as keys."""
    if backend == "aten":
        return key.detach()
    return key.new_zeros((*key.shape[:-1], 8 if key.is_cuda else 1))
