"""`attn_implementation="tilewise"` for Hugging Face transformers.

transformers asks an attention implementation for two functions: `visibility_mask` says once a forward pass
which keys each query may see, and `attention_forward` is called by every layer with what it said.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.api import attention
from tilewise.autograd import functions
from tilewise.core.statistics import Aux
from tilewise.faces.autocast import autocast
from tilewise.faces.transformers_mask import Pattern, PatternMask, packed_starts, visibility_mask
from tilewise.faces.transformers_paged import paged_attention_forward
from tilewise.varlen import attention_varlen

# transformers gives names that contain these a meaning of their own.
RESERVED = ("eager", "flash", "flex", "paged", "sdpa")


def register(name: str = "tilewise", *, weight_rows: Sequence[int] | None = None) -> None:
    """Make `attn_implementation=name` run tilewise attention in Hugging Face transformers.

    Call it before a model is built (`from_pretrained`, `from_config`) or switched
    (`set_attn_implementation`): transformers refuses names that it does not know. Calling it again is fine.
    Models of T5's kind are not switched as a whole: build them with it, or switch encoder and decoder each.
    It serves every model that goes through transformers' attention interface: grouped-query and cross
    attention, sliding windows, softcap, sinks, position biases, dropout in training, padding, dynamic and
    static caches, and packed sequences (`cu_seq_lens_q`, `cu_seq_lens_k`, or one row of position ids that
    restart, without an attention mask).
    Models whose layers multiply queries and keys themselves, as BLOOM's, are refused or stay with eager.
    Those that choose a class by name raise KeyError: Falcon, Data2Vec's vision model, SAM, SAM-HQ,
    DeepSeek-OCR 2, GPT-J, GPT-Neo, GIT, Bark and SuperGlue.
    Keys that DeepSeek-V3.2's kind chooses are a mask; MiniMax-M3's blocks of keys raise NotImplementedError.
    Continuous batching (`generate_batch`) goes by the name `"paged|" + name`, on GPUs and CPUs, up to release
    5.18; newer ones take only their own functions there, or `tilewise.compat.hf_kernels`.
    A padded query that sees no key gets 0, where the eager implementation gives the mean of the values.

    Args:
        name: letters, digits, "_", "-" and "."; not containing "eager", "flash", "flex", "paged" or "sdpa".
        weight_rows: queries of which a call with `output_attentions=True` gives the weights, as (-1,) for the
            last: (batch, num_heads, len(weight_rows), seqlen_k) a layer, exact, before dropout. The matrix
            of all is never formed: None refuses such calls.

    Raises:
        ImportError: transformers is missing or too old.
        TypeError, ValueError: name is no string, or not one that transformers can use; weight_rows are not
            integers.

    Example:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> register()
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2, attn_implementation="tilewise")
        >>> LlamaModel(config)(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 8])
    """
    if not isinstance(name, str):
        raise TypeError(f"name={name!r} must be a string")
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or any(word in name for word in RESERVED):
        raise ValueError(
            f"name={name!r} must be letters, digits, '_', '-' and '.', "
            f"without {', '.join(map(repr, RESERVED))}: transformers interprets these"
        )
    extra = "pip install --upgrade 'tilewise[transformers]'"
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(f"transformers could not be imported ({error}): {extra}") from error
    if not {"q_length", "q_offset"} <= inspect.signature(sdpa_mask).parameters.keys():
        raise ImportError(f"transformers {__version__} is too old: {extra}")
    rows = None if weight_rows is None else Aux(rows=tuple(weight_rows)).rows
    AttentionInterface.register(name, functools.partial(attention_forward, weight_rows=rows))
    AttentionInterface.register(f"paged|{name}", paged_attention_forward)
    AttentionMaskInterface.register(name, visibility_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    deterministic: bool | None = None,
    output_attentions: bool | None = None,
    weight_rows: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: takes what transformers' own take.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim).
        key, value: (batch, num_kv_heads, seqlen_k, dim), not repeated.
        attention_mask: None, or (batch, 1 or num_heads, seqlen_q, seqlen_k), bool (True = attend) or added
            to the scores. It says everything: is_causal and sliding_window count only where it is None.
        sliding_window: keys that a query sees, itself included; as many again to its right if not causal.
        is_causal: None asks the module, which is causal unless it says otherwise.
        s_aux: one sink logit a head.
        position_bias: added to the scores, (1 or batch, num_heads, seqlen_q, seqlen_k).
        indices: the only keys that a query may see, (batch, seqlen_q, count), of DeepSeek's sparse attention.
        block_indices: refused, MiniMax-M3's sparse attention.
        cu_seq_lens_q, cu_seq_lens_k: offsets of packed sequences in the flattened (batch * seqlen) tokens.
        position_ids: (1, seqlen) of packed sequences if they restart: see `packed_starts`.
        output_attentions: also return the weights of `weight_rows`, see `register`.

    Returns:
        (batch, seqlen_q, num_heads, head_dim_v) contiguous; and the weights (batch, num_heads,
        len(weight_rows), seqlen_k), None unless output_attentions.
    """
    _refuse(output_attentions and weight_rows is None, block_indices)
    query, key, value = autocast(query, key, value)
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    used_k = seqlen_k
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.reshape(-1),
        "dropout_p": dropout if module.training else 0.0,
        "deterministic": bool(deterministic),
    }
    starts, longest = None, (max_length_q, max_length_k)
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        starts = cu_seq_lens_q, cu_seq_lens_k
    pattern: Pattern | None = getattr(attention_mask, "pattern", None)
    if pattern is not None and (pattern.seqlen_q, pattern.seqlen_k) == (seqlen_q, seqlen_k):
        options["window"], used_k = pattern.window, pattern.used_k
        attention_mask = pattern.key_mask
        if starts is None and pattern.sequence_ids is not None:
            starts, longest = (pattern.cu_seqlens, pattern.cu_seqlens), (None, None)
    elif attention_mask is None:
        options |= _module_options(module, is_causal, sliding_window)
    looks_back = options.get("causal") or options.get("window", (None, None))[1] == 0
    if starts is None and attention_mask is None and looks_back and 1 < seqlen_q == used_k:
        packed = packed_starts(position_ids, len(query), seqlen_q)
        if packed is not None:
            starts, longest = (packed, packed), (None, None)

    is_plain = attention_mask is None and position_bias is None and indices is None
    if starts is not None and is_plain and not output_attentions:
        return _attend_packed(query, key, value, starts, longest, options), None
    is_served = functions.is_served()  # by ranks: columns are those of the whole sequence
    mask, bias = _mask_and_bias(attention_mask, position_bias, None if is_served else seqlen_k)
    if indices is not None:
        chosen = _chosen(indices, seqlen_k)
        mask = chosen if mask is None else mask & chosen
    if starts is not None:
        same = _same_sequence(*starts, query.shape[0], seqlen_q, seqlen_k)
        mask = same if mask is None else mask & same
    if used_k < seqlen_k:
        if not is_served:
            mask, bias = (
                t[..., :used_k] if t is not None and t.shape[-1] == seqlen_k else t for t in (mask, bias)
            )
        key, value = key[:, :, :used_k], value[:, :, :used_k]
    if output_attentions:
        options["return_aux"] = Aux(rows=weight_rows)
    found = attention(query, key, value, mask=mask, bias=bias, layout="bhsd", **options)
    out, weights = found, None
    if output_attentions:
        out, aux = found
        weights = F.pad(aux.rows, (0, seqlen_k - used_k))
    return out.transpose(1, 2), weights


def _refuse(wants_all_weights: bool | None, block_indices: Tensor | None) -> None:
    """What the attention function does not do raises NotImplementedError."""
    if wants_all_weights:
        raise NotImplementedError(
            "output_attentions=True asks for the matrix of weights, which tilewise does not form: "
            "register(weight_rows=(-1,)) gives single rows, attn_implementation='eager' all"
        )
    if block_indices is not None:
        raise NotImplementedError(
            "block_indices asks for sparse attention by blocks of keys, which tilewise does not do: "
            "attn_implementation='eager' does"
        )


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, starts: Any, longest: Any, options: dict[str, Any]
) -> Tensor:
    """Packed sequences in (batch, heads, seqlen, dim) tensors; `starts` count the flattened tokens."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    bounds = [None if n is None else int(n) for n in longest]
    out = attention_varlen(q, k, v, *starts, *bounds, **options)
    return out.view(query.shape[0], query.shape[2], *out.shape[1:])  # type: ignore[union-attr]


def _module_options(module: nn.Module, is_causal: bool | None, sliding_window: int | None) -> dict[str, Any]:
    """What the layer itself says is visible; asked only if there is no mask."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if sliding_window is None:
        return {"causal": causal}
    return {"causal": causal, "window": (sliding_window - 1, 0 if causal else sliding_window - 1)}


def _mask_and_bias(
    attention_mask: Tensor | None, position_bias: Tensor | None, seqlen_k: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """What hides scores, and what is added to them. A seqlen_k of None is not held against the mask."""
    if attention_mask is None:
        return None, position_bias
    if attention_mask.ndim != 4:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask.shape={shape} must be (batch, heads, seqlen_q, seqlen_k)")
    if seqlen_k is not None and 1 != attention_mask.shape[3] != seqlen_k:
        shape = tuple(attention_mask.shape)
        raise ValueError(f"attention_mask.shape={shape} must have one column for each of the {seqlen_k} keys")
    if isinstance(attention_mask, PatternMask):
        attention_mask = attention_mask.full()
    if attention_mask.dtype == torch.bool:
        return attention_mask, position_bias
    if not attention_mask.dtype.is_floating_point:
        dtype = attention_mask.dtype
        raise TypeError(f"attention_mask.dtype={dtype} must be torch.bool (True = attend) or floating-point")
    return None, attention_mask if position_bias is None else attention_mask + position_bias


def _chosen(indices: Tensor, seqlen_k: int) -> Tensor:
    """Bool (batch, 1, seqlen_q, seqlen_k): the key is one of the query's."""
    chosen = indices.new_zeros((*indices.shape[:2], seqlen_k), dtype=torch.bool)
    return chosen.scatter(-1, indices.long(), True)[:, None]


def _same_sequence(starts_q: Tensor, starts_k: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Bool (batch, 1, seqlen_q, seqlen_k): query and key lie in the same packed sequence."""
    ids_q, ids_k = (
        torch.searchsorted(starts, torch.arange(batch * n, device=starts.device), right=True).view(batch, n)
        for starts, n in ((starts_q, seqlen_q), (starts_k, seqlen_k))
    )
    return (ids_q[:, :, None] == ids_k[:, None])[:, None]
