"""Continuous batching in transformers, over its own paged cache: `attn_implementation="paged|tilewise"`.

transformers keeps the pages and prepares, once a step, which rows each sequence writes and reads. Where it
gives a table of pages the keys are read where they lie; otherwise (release 5.17 gives tables to flash-attn
alone) its cache copies the rows of a step together. Since 5.19 it takes only its own functions here and
those of a repository for `kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilewise.faces.flash_attn import flash_attn_with_kvcache
from tilewise.varlen import attention_varlen


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    block_table: Tensor | None = None,
    read_index: Any = None,
    write_index: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of a step: takes what transformers' own paged functions take.

    Args:
        query: (1, num_heads, total_q, head_dim): the new tokens of all sequences, packed.
        key, value: (1, num_kv_heads, total_q, dim), likewise.
        attention_mask: not used: sequences, causality and the layer's window say everything.
        cache: transformers' PagedAttentionCache; the new tokens are written to it.
        cu_seq_lens_q, cu_seq_lens_k: (sequences + 1,), or one for each kind of layer.
        block_table: (groups, sequences, pages), for steps of one token a sequence.

    Returns:
        (1, total_q, num_heads, head_dim_v), and None for the attention weights.

    Raises:
        ValueError: there is no cache, as outside of continuous batching.
        NotImplementedError: the layer chooses keys itself, as in DeepSeek's sparse attention.
    """
    for name in ("indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name} asks for sparse attention, which continuous batching does not have here: "
                "attn_implementation='eager' does"
            )
    if cache is None or cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError(
            "cache=None must be a PagedAttentionCache: 'paged|' names serve continuous batching only"
        )
    width = sliding_window or getattr(module, "sliding_window", None)
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k = cu_seq_lens_k["sliding_attention" if width else "full_attention"]
    options: dict[str, Any] = {"softcap": softcap or 0.0}
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # (total_q, heads, dim)
    if block_table is not None and s_aux is None:
        group, layer = cache.layer_index_to_group_indices[module.layer_idx]
        pages = (-1, cache.block_size, k.shape[1])
        k_cache, v_cache = (
            t[layer].view(*pages, t[layer].shape[-1]) for t in (cache.key_cache, cache.value_cache)
        )
        lengths = (cu_seq_lens_k.diff() - 1)[: len(q)].to(torch.int32)
        window = (width - 1, 0) if width else (-1, -1)
        out = flash_attn_with_kvcache(
            q[:, None], k_cache, v_cache, k[:, None], v[:, None], cache_seqlens=lengths,
            block_table=block_table[group], softmax_scale=scaling, causal=True, window_size=window, **options,
        )  # fmt: skip
        return out.transpose(0, 1), None  # type: ignore[union-attr]
    k, v = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, read_index=read_index,
        write_index=write_index,
    )  # fmt: skip
    starts = _within(cu_seq_lens_q, len(q)), _within(cu_seq_lens_k, len(k))
    out = attention_varlen(
        q, k, v, *starts, causal=True, window=(width - 1, None) if width else None, scale=scaling,
        sinks=None if s_aux is None else s_aux.reshape(-1), **options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[None], None


def _within(cu_seqlens: Tensor, total: int) -> Tensor:
    """Offsets that end at `total`: rows behind the last sequence pad the step, and go to one of their own."""
    end = torch.full((1,), total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.cat((cu_seqlens, end))
