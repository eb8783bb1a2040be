"""What the repository exports: the functions that transformers looks for, with sinks.

They are those of `tilewise.flash_attn`, with one argument more, as vLLM's FlashAttention-3 has it: s_aux,
(heads,) logits that take part in each row's softmax without a value. Errors and the other arguments are the
same. With s_aux a call gives neither log-sum-exp nor weights, and varlen calls take no pages.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention
from tilewise.core.checks import check_known, check_tensors, shown
from tilewise.faces import flash_attn
from tilewise.faces.flash_attn_call import options
from tilewise.varlen import attention_varlen

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

S_AUX = inspect.Parameter("s_aux", inspect.Parameter.KEYWORD_ONLY, default=None)


def _with_sinks(plain: Callable[..., Any], attend: Callable[..., Any], *tensors: str) -> Callable[..., Any]:
    """A function of flash-attn's with s_aux: where that is given, `attend` serves, and takes `tensors`.

    transformers reads the signature to learn what the function can do.
    """
    name, signature = plain.__name__, inspect.signature(plain)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]

    @functools.wraps(plain)
    def function(*args: Any, s_aux: Tensor | None = None, **kwargs: Any) -> Any:
        if s_aux is None:
            return getattr(flash_attn, name)(*args, **kwargs)
        check_known(function, kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        _refuse(return_attn_probs=given["return_attn_probs"], block_table=given.get("block_table"))
        checked = options(given["softmax_scale"], given["causal"], given["window_size"], given["softcap"])
        return attend(
            *(given[t] for t in tensors),
            causal=checked.causal,
            window=(checked.window_left, checked.window_right),
            softcap=checked.softcap,
            scale=checked.scale,
            dropout_p=given["dropout_p"],
            deterministic=given["deterministic"],
            alibi_slopes=given["alibi_slopes"],
            sinks=s_aux,
        )

    function.__signature__ = signature.replace(parameters=[*named, S_AUX])  # type: ignore[attr-defined]
    return function


_QKV, _LENGTHS = ("q", "k", "v"), ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
flash_attn_func = _with_sinks(flash_attn.flash_attn_func, attention, *_QKV)
flash_attn_varlen_func = _with_sinks(flash_attn.flash_attn_varlen_func, attention_varlen, *_QKV, *_LENGTHS)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, s_aux: Tensor | None = None, **kwargs: Any
) -> Any:
    """Append to a cache, contiguous or in pages, then attend to what it holds."""
    if s_aux is None:
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, *args, **kwargs)
    _refuse(return_softmax_lse=kwargs.pop("return_softmax_lse", False))
    check_tensors(q=q, s_aux=s_aux)  # before the cache is written
    heads = q.shape[-2:-1]
    if s_aux.shape != heads or s_aux.device != q.device:
        raise ValueError(
            f"s_aux of shape {tuple(s_aux.shape)}, on {s_aux.device} must be (heads,)={tuple(heads)}, on "
            f"{q.device}: one logit a head"
        )
    kwargs["return_softmax_lse"] = True
    out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, *args, **kwargs)
    # A sink adds exp(sink) to the sum exp(lse) that weights were divided by.
    share = torch.sigmoid(lse - s_aux.to(lse.dtype)[:, None]).transpose(1, 2)  # (batch, seqlen, heads)
    return (out * share[..., None]).to(out.dtype)


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            wanted = "False" if name.startswith("return") else "None"
            raise NotImplementedError(f"{name}={shown(value)} must be {wanted} with s_aux")
