"""The attention backend "tilewise" of diffusers.

    tilewise.compat.diffusers.register()
    model.set_attention_backend("tilewise")  # or: with attention_backend("tilewise"): ...

diffusers keeps backends in a registry, by the members of an enum. Every way of switching looks the name up in
that enum, so `register` gives it one more member.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from tilewise import api
from tilewise.autograd.functions import obeying_torch
from tilewise.compat import Package
from tilewise.core.plan import Results
from tilewise.core.problem import Inputs, Options
from tilewise.dispatch import plans
from tilewise.faces.autocast import autocast

NAME = "tilewise"
PACKAGE = Package(
    ("diffusers",), "0.36 to 0.42 are tested", "has no attention backends that can be registered"
)


def register() -> None:
    """Make "tilewise" an attention backend of diffusers; safe to call twice. No model uses it yet.

    Raises:
        ImportError: diffusers is not installed.
        NotImplementedError: this diffusers keeps its backends elsewhere; the message names versions that fit.
    """
    (module,) = PACKAGE.modules("diffusers.models.attention_dispatch")
    registry = getattr(module, "_AttentionBackendRegistry", None)
    names = getattr(module, "AttentionBackendName", None)
    if registry is None or names is None:
        raise PACKAGE.unfit()
    if NAME not in names.__members__:
        _add_member(names)
    registry.register(names(NAME), supports_context_parallel=True)(attention)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What diffusers' dispatcher calls, with the meaning that its native backend has.

    Args:
        query: (batch, seqlen_q, num_heads, head_dim).
        key, value: (batch, seqlen_k, num_kv_heads, head_dim or head_dim_v).
        attn_mask: bool (True = attend) or float added to the scores: (batch, seqlen_k), or broadcastable to
            (batch, num_heads, seqlen_q, seqlen_k).
        dropout_p, scale, return_lse: as `tilewise.attention`.
        is_causal: query `i` sees keys `0..i`.
        enable_gqa: allow fewer KV heads than query heads.
        window_size: (left, right): keys seen before and after each query; -1 is unbounded. Then is_causal and
            window are aligned at the end, as flash-attn's are.
        _parallel_config: diffusers' ParallelConfig: a sequence in shards, which diffusers gathers by ring,
            Ulysses or both. lse is (batch, seqlen_q, num_heads) then.

    Returns:
        (batch, seqlen_q, num_heads, head_dim_v), and with return_lse (batch, num_heads, seqlen_q). A query
        that sees no key gives 0.

    Raises:
        ValueError, TypeError: as `tilewise.attention`; and fewer KV heads without enable_gqa.
        NotImplementedError: _parallel_config with dropout, a window or, in a ring, a mask.
    """
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key.shape[2]={key.shape[2]} (heads) must equal query.shape[2]={query.shape[2]} "
            "unless enable_gqa=True"
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # padding, to diffusers
    if _parallel_config is not None and _parallel_config.context_parallel_config is not None:
        _check_parallel(_parallel_config, attn_mask, dropout_p, window_size)
        module = importlib.import_module("diffusers.models.attention_dispatch")
        return module._templated_context_parallel_attention(  # type: ignore[no-any-return]
            *autocast(query, key, value), attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
            forward_op=forward_op, backward_op=backward_op, _parallel_config=_parallel_config,
        )  # fmt: skip
    left, right = (None if bound < 0 else bound for bound in window_size)
    if is_causal and (left, right) == (None, None) and query.shape[1] != key.shape[1]:
        # Aligned at the beginning: at the end, that is a right edge, once keys that nobody sees are cut off.
        key, value = key[:, : query.shape[1]], value[:, : query.shape[1]]
        attn_mask = attn_mask if attn_mask is None else attn_mask[..., : query.shape[1]]
        is_causal, right = False, query.shape[1] - key.shape[1]
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    mask, bias = _mask_and_bias(attn_mask)
    return api.attention(
        query, key, value,
        causal=is_causal, window=(left, right), mask=mask, bias=bias, dropout_p=dropout_p, scale=scale,
        return_lse=return_lse,
    )  # fmt: skip


def forward_op(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One block of a sequence in shards, as diffusers' functions call it; lse is (batch, seqlen, heads).

    Of a ring the first block is saved; the backward is given the others, and out and lse of all.
    """
    query, key, value = map(_arrived, (query, key, value))
    mask, bias = _mask_and_bias(attn_mask)
    inputs, options = api.canonical_inputs(query, key, value, mask, bias), obeying_torch(Options(scale=scale))
    results = plans.attend(inputs, options, None)
    assert results.out is not None and results.lse is not None
    out, lse = results.out, results.lse.transpose(1, 2).contiguous()
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.attn_mask, ctx.scale = attn_mask, scale
    return (out, lse) if return_lse else out


def backward_op(ctx: Any, grad_out: Tensor, *args: Any, **block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one block; `block` has what differs from what was saved.

    Raises:
        NotImplementedError: a ring of a diffusers that does not say what all blocks together came to.
    """
    saved = dict(zip(("query", "key", "value", "out", "lse"), ctx.saved_tensors, strict=True)) | block
    is_ring = ctx._parallel_config.context_parallel_config.ring_degree > 1
    if is_ring and not {"out", "lse"} <= block.keys():
        raise NotImplementedError(
            "gradients of a ring want diffusers 0.42: it says out and lse of all blocks"
        )
    mask, bias = _mask_and_bias(ctx.attn_mask)
    query, key, value, out, lse, dout = map(_arrived, (*saved.values(), grad_out))
    inputs: Inputs = api.canonical_inputs(query, key, value, mask, bias)
    results, options = Results(out, lse.transpose(1, 2).contiguous()), obeying_torch(Options(scale=ctx.scale))
    grads = plans.differentiate(inputs, results, dout, None, options, None, False, is_partial=is_ring)
    return grads.query, grads.key, grads.value


def _arrived(t: Tensor) -> Tensor:
    """A plain tensor: one that a collective still writes is a subclass, and copying it waits."""
    return t if type(t) is Tensor else t.clone()


def _mask_and_bias(attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if attn_mask is None:
        return None, None
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    if not attn_mask.dtype.is_floating_point:
        dtype = attn_mask.dtype
        raise TypeError(f"attn_mask.dtype={dtype} must be torch.bool (True = attend) or floating-point")
    return None, attn_mask


def _check_parallel(config: Any, attn_mask: Any, dropout_p: float, window_size: tuple[int, int]) -> None:
    """Refuse what blocks do not know: their place in the sequence, and which rows of a mask are theirs."""
    is_ring = config.context_parallel_config.ring_degree > 1
    given = {"dropout_p": dropout_p, "window_size": window_size != (-1, -1)}
    given["attn_mask"] = is_ring and attn_mask is not None
    for name, value in given.items():
        if value:
            raise NotImplementedError(f"{name} is not served under diffusers' context parallelism")


def _add_member(names: Any) -> None:
    """A member of an enum of strings that is closed already."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_map_[member._name_] = member
    names._value2member_map_[NAME] = member
    names._member_names_.append(member._name_)
