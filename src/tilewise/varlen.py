"""Attention over packed sequences: the public function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Never

import torch
from torch import Tensor

from tilewise.api import NO_WINDOW, Answer, Window, canonical_inputs, products_of, window_bounds
from tilewise.autograd import functions, statistics
from tilewise.core.checks import check_flag, check_known, check_tensors, shown
from tilewise.core.functions.call import MaskFunction, ScoreFunction, is_learned, with_functions
from tilewise.core.problem import Inputs, Options
from tilewise.core.quantized import Quantized, check_offsets
from tilewise.core.statistics import Aux

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def attention_varlen(
    query: Tensor | Quantized,
    key: Tensor | Quantized,
    value: Tensor | Quantized,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
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
    dropout_p: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    return_aux: Aux | None = None,
    deterministic: bool = False,
    precision: str = "ieee",
    generator: torch.Generator | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Answer:
    """Attention over packed sequences: no padding is stored or computed.

    Sequence `n` is rows `cu_seqlens_q[n]:cu_seqlens_q[n + 1]` of query and `cu_seqlens_k[n]:
    cu_seqlens_k[n + 1]` of key and value; sequences do not see each other.

    Args:
        query: (total_q, num_heads, head_dim).
        key: (total_k, num_kv_heads, head_dim).
        value: (total_k, num_kv_heads, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 or int64, from 0 to total, never decreasing.
        max_seqlen_q, max_seqlen_k: the longest sequence, if known. A tensor is read: this waits.
        mask, bias: broadcastable to (batch, num_heads, longest_q, longest_k), positions counted from each
            sequence's start, as functions count them. A block_mask is at least as long as the longest.

    The other arguments are those of `attention`.

    Returns:
        out (total_q, num_heads, head_dim_v); with return_lse also lse (num_heads, total_q).

    Raises:
        ValueError, TypeError, NotImplementedError: as `attention`.

    Example:
        >>> q = k = torch.ones(5, 1, 8); v = torch.arange(5.0).view(5, 1, 1)
        >>> starts = torch.tensor([0, 2, 5])
        >>> attention_varlen(q, k, v, starts, starts).flatten()
        tensor([0.5000, 0.5000, 3.0000, 3.0000, 3.0000])
    """
    if functions.is_unheard():  # inside of context_parallel: other ranks wait for this call
        return functions.heard(attention_varlen, locals())
    if unknown:
        check_known(attention_varlen, unknown)
    check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    inputs = canonical_inputs(
        query, key, value, mask, bias, alibi_slopes, sinks, dropout_p=dropout_p, generator=generator
    )
    # where a graph ends, PyTorch 2.11 cannot hand over what `_replace` makes
    inputs = Inputs(*inputs[:3], cu_seqlens_q, cu_seqlens_k, *inputs[5:])
    if inputs.query_blocks is not None:
        check_offsets(cu_seqlens_q=(query, cu_seqlens_q), cu_seqlens_k=(key, cu_seqlens_k))
        precision = products_of(inputs, precision)
    lengths = (read_length("max_seqlen_q", max_seqlen_q), read_length("max_seqlen_k", max_seqlen_k))
    bounds = NO_WINDOW if window is None else window_bounds(window)
    options = Options(causal, *bounds, softcap, dropout_p, scale, deterministic, *lengths, precision)
    is_scored = alibi_slopes is not None and is_learned(alibi_slopes)
    if mask_mod is not None or score_mod is not None or block_mask is not None or is_scored:
        inputs, options = with_functions(inputs, options, mask_mod, score_mod, block_mask)
    if return_aux is not None:
        out, lse, aux = statistics.attention(inputs, options, backend, return_aux)
        return (out, lse, aux) if return_lse else (out, aux)
    request = functions.LSE if return_lse else functions.NO_LSE
    out, lse = functions.attention(inputs, options, backend, request)
    return (out, lse) if return_lse else out


def read_length(name: str, length: int | Tensor | None) -> int | None:
    """A length that may be a tensor of one number; raises TypeError if it has more."""
    if not isinstance(length, Tensor):
        return length
    if length.numel() != 1:
        raise TypeError(f"{name}={shown(length)} must be an integer")
    return int(length)
