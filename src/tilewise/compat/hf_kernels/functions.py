"""What the repository exports: the functions that transformers looks for, with sinks.

They are those of `tilewise.flash_attn`, with one argument more, as vLLM's FlashAttention-3 has it: s_aux,
(heads,) logits that take part in each row's softmax without a value. Errors and the other arguments are the
same; return_attn_probs and s_aux exclude each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention, attention_varlen
from tilewise.faces import flash_attn
from tilewise.faces.flash_attn_call import options

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention; q, k and v are (batch, seqlen, heads, head_dim)."""
    if s_aux is None:
        return flash_attn.flash_attn_func(
            q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs,
        )  # fmt: skip
    _refuse("return_attn_probs", return_attn_probs)
    scalars = _scalars(softmax_scale, causal, window_size, softcap, dropout_p, deterministic)
    return attention(q, k, v, alibi_slopes=alibi_slopes, sinks=s_aux, **scalars)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention over packed sequences; q, k and v are (total, heads, head_dim)."""
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if s_aux is None:
        return flash_attn.flash_attn_varlen_func(
            q, k, v, *lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
            deterministic, return_attn_probs,
        )  # fmt: skip
    _refuse("return_attn_probs", return_attn_probs)
    scalars = _scalars(softmax_scale, causal, window_size, softcap, dropout_p, deterministic)
    return attention_varlen(q, k, v, *lengths, alibi_slopes=alibi_slopes, sinks=s_aux, **scalars)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, s_aux: Tensor | None = None, **kwargs: Any
) -> Any:
    """Append to a cache, contiguous or in pages, then attend to what it holds."""
    if s_aux is None:
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, *args, **kwargs)
    _refuse("return_softmax_lse", kwargs.pop("return_softmax_lse", False))
    kwargs["return_softmax_lse"] = True
    out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, *args, **kwargs)
    # A sink adds exp(sink) to the sum exp(lse) that weights were divided by.
    share = torch.sigmoid(lse - s_aux.float()[:, None]).transpose(1, 2)  # (batch, seqlen, heads)
    return (out * share[..., None]).to(out.dtype)


def _refuse(name: str, flag: bool) -> None:
    if flag:
        raise NotImplementedError(f"{name}=True must be False with s_aux")


def _scalars(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    dropout_p: float,
    deterministic: bool,
) -> dict[str, Any]:
    """Checked as flash-attn's arguments, named as ours."""
    checked = options(softmax_scale, causal, window_size, softcap)
    return {
        "causal": checked.causal,
        "window": (checked.window_left, checked.window_right),
        "softcap": checked.softcap,
        "dropout_p": dropout_p,
        "scale": checked.scale,
        "deterministic": deterministic,
    }
