"""`flex_attention` with PyTorch's arguments."""

from __future__ import annotations

from typing import Any, Never

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

from tilewise.api import canonical_inputs
from tilewise.autograd import functions, statistics
from tilewise.core.checks import check_flag, check_known, check_tensors, shown
from tilewise.core.functions.call import ScoreFunction, with_functions
from tilewise.core.problem import Options, in_layout
from tilewise.core.signature import Request, in_order
from tilewise.core.statistics import Aux
from tilewise.faces.autocast import autocast


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: theirs.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: theirs.AuxRequest | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor | theirs.AuxOutput]:
    """Drop-in for `torch.nn.attention.flex_attention.flex_attention`; needs no `torch.compile`.

    Gradients reach query, key, value and the floating-point tensors that score_mod captures, on CPUs too,
    with second derivatives, forward mode and `torch.func.grad`. Lengths may be any. Keys and values of a
    narrower dtype are widened to query's; under autocast all but float64 take autocast's dtype.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim).
        key: (batch, num_kv_heads, seqlen_k, head_dim); with a block_mask also of batch 1, which all share.
        value: (batch, num_kv_heads, seqlen_k, head_dim_v).
        score_mod: (score, b, h, q_idx, kv_idx) -> score. See `tilewise.attention`.
        block_mask: of `create_block_mask`, here or in PyTorch, or of `BlockMask.from_kv_blocks`: in full
            blocks all is visible, in partial ones what its mask_mod says, elsewhere nothing.
        scale: softmax scale; None is 1 / sqrt(head_dim).
        enable_gqa: allow fewer KV heads than query heads.
        return_lse: also return lse, as PyTorch's older releases have it; excludes return_aux.
        kernel_options: tile sizes and the like of PyTorch's kernels, which don't run here.
        return_aux: `AuxRequest(lse=True, max_scores=True)` also returns an `AuxOutput` of these.

    Returns:
        out (batch, num_heads, seqlen_q, head_dim_v). With return_aux, also an `AuxOutput`; with return_lse,
        also lse: (batch, num_heads, seqlen_q), natural log, float32 (float64 for float64), differentiable.
        max_scores, likewise: each query's largest visible score after score_mod; it has no gradient, and a
        call with it no second derivatives. A query that sees no key has out 0, lse and max_scores -inf. out's
        memory is in query's order, batch first.

    Raises:
        ValueError, TypeError: an argument does not fit; or as `tilewise.attention`.
        NotImplementedError: a function that can't be traced; `torch.func` or forward mode with max_scores.

    Source: Dong et al., Flex Attention (2024).

    Example:
        >>> import torch
        >>> from tilewise.flex_attention import create_block_mask, flex_attention
        >>> causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 3, 3, device="cpu")
        >>> q = torch.ones(1, 1, 3, 8); v = torch.arange(3.0).view(1, 1, 3, 1)
        >>> flex_attention(q, q, v, block_mask=causal).flatten()
        tensor([0.0000, 0.5000, 1.0000])
    """
    if functions.is_unheard():
        return functions.heard(flex_attention, locals())
    check_known(flex_attention, unknown)
    check_tensors(query=query, key=key, value=value)
    check_flag("enable_gqa", enable_gqa)
    check_flag("return_lse", return_lse)
    _check_request(return_lse, return_aux)
    wants_lse = return_lse if return_aux is None else bool(return_aux.lse)
    wants_max = return_aux is not None and bool(return_aux.max_scores)
    if kernel_options is not None and not isinstance(kernel_options, dict):
        raise TypeError(f"kernel_options={shown(kernel_options)} must be None or a dict")
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.ndim != 4:
            raise ValueError(f"{name} of shape {tuple(t.shape)} must be (batch, heads, seqlen, head_dim)")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}: they must be equal, or enable_gqa=True"
        )
    query, key, value = autocast(query, key, value)
    key, value = _widened(query.dtype, key, value)
    if block_mask is not None and key.shape[0] == value.shape[0] == 1:
        key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    inputs, options = canonical_inputs(query, key, value), Options(scale=scale)
    if score_mod is not None or block_mask is not None:
        given, is_shard = in_layout(inputs, "bhsd"), functions.is_served()
        given, options = with_functions(given, options, None, score_mod, block_mask, is_shard=is_shard)
        inputs = in_layout(given, "bhsd")
    _, by_head, by_token, _ = query.stride()  # out lies as query does, as PyTorch's
    order, largest = "bhsd" if by_head >= by_token else "bshd", None
    if wants_max:
        asked = Aux(row_max=True)
        out, lse, found = statistics.attention(in_layout(inputs, "bhsd"), options, None, asked)
        out, largest = in_order(out, order).transpose(1, 2), found.row_max
    else:
        out, lse = functions.attention(inputs, options, None, Request(lse=wants_lse, order=order), "bhsd")
    if return_aux is None:
        return (out, lse) if return_lse else out
    return out, theirs.AuxOutput(lse=lse if wants_lse else None, max_scores=largest)


def _widened(dtype: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Floating-point tensors of a narrower dtype in this one."""
    return [
        t.to(dtype) if t.dtype.is_floating_point and t.dtype.itemsize < dtype.itemsize else t for t in tensors
    ]


def _check_request(return_lse: bool, return_aux: Any) -> None:
    """Raises TypeError, ValueError if what is asked for can't be had."""
    if return_aux is None:
        return
    if not isinstance(return_aux, theirs.AuxRequest):
        raise TypeError(f"return_aux={shown(return_aux)} must be None or an AuxRequest")
    if return_lse:
        raise ValueError("return_lse=True must be False when return_aux is given: AuxRequest(lse=True)")
