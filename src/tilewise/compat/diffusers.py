"""The attention backend "tilewise" of diffusers.

    tilewise.compat.diffusers.register()
    model.set_attention_backend("tilewise")  # or: with attention_backend("tilewise"): ...

diffusers keeps backends in a registry, by the members of an enum. Every way of switching looks the name up in
that enum, so `register` gives it one more member.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from tilewise import api
from tilewise.faces.autocast import autocast

NAME = "tilewise"
TESTED = "0.36 to 0.42"


def register() -> None:
    """Make "tilewise" an attention backend of diffusers; safe to call twice. No model uses it yet.

    Raises:
        ImportError: diffusers is not installed.
        NotImplementedError: this diffusers keeps its backends elsewhere; the message names versions that fit.
    """
    try:
        module = importlib.import_module("diffusers.models.attention_dispatch")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("diffusers"):
            raise
        raise _unfit() from None
    registry = getattr(module, "_AttentionBackendRegistry", None)
    names = getattr(module, "AttentionBackendName", None)
    if registry is None or names is None:
        raise _unfit()
    if NAME not in names.__members__:
        _add_member(names)
    registry.register(names(NAME))(attention)


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

    Returns:
        (batch, seqlen_q, num_heads, head_dim_v), and with return_lse (batch, num_heads, seqlen_q). A query
        that sees no key gives 0.

    Raises:
        ValueError, TypeError: as `tilewise.attention`; and fewer KV heads without enable_gqa.
        NotImplementedError: _parallel_config: the model runs under context parallelism.
    """
    if _parallel_config is not None:
        raise NotImplementedError(
            f"_parallel_config={_parallel_config!r}: tilewise does not serve diffusers' context parallelism; "
            'set_attention_backend("native") does'
        )
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key.shape[2]={key.shape[2]} (heads) must equal query.shape[2]={query.shape[2]} "
            "unless enable_gqa=True"
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # padding, to diffusers
    left, right = (None if bound < 0 else bound for bound in window_size)
    if is_causal and (left, right) == (None, None) and query.shape[1] != key.shape[1]:
        # Aligned at the beginning: at the end, that is a right edge, once keys that nobody sees are cut off.
        key, value = key[:, : query.shape[1]], value[:, : query.shape[1]]
        attn_mask = attn_mask if attn_mask is None else attn_mask[..., : query.shape[1]]
        is_causal, right = False, query.shape[1] - key.shape[1]
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    query, key, value, *rest = autocast(*given)
    mask = next((t for t in rest if t.dtype == torch.bool), None)
    bias = next((t for t in rest if t.dtype != torch.bool), None)
    return api.attention(
        query, key, value,
        causal=is_causal, window=(left, right), mask=mask, bias=bias, dropout_p=dropout_p, scale=scale,
        return_lse=return_lse,
    )  # fmt: skip


def _add_member(names: Any) -> None:
    """A member of an enum of strings that is closed already."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_map_[member._name_] = member
    names._value2member_map_[NAME] = member
    names._member_names_.append(member._name_)


def _unfit() -> Exception:
    """Why there is nothing to register with."""
    try:
        version = importlib.metadata.version("diffusers")
    except importlib.metadata.PackageNotFoundError:
        return ImportError(
            f"diffusers is not installed, {TESTED} are tested: pip install 'tilewise[diffusers]'"
        )
    return NotImplementedError(
        f"diffusers {version} has no attention backends that can be registered; {TESTED} are tested"
    )
