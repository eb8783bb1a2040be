"""Modules: self-attention with projections, rotary embedding and a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.api import Window, attention, attention_with_cache, window_bounds
from tilewise.cache.contiguous import KVCache
from tilewise.cache.rotary import apply_rotary, rotary_tables
from tilewise.core.checks import check_flag, check_integers, check_known, check_number, check_tensors
from tilewise.core.signature import compute_dtype
from tilewise.core.statistics import Aux
from tilewise.varlen import attention_varlen


class FlashAttention(torch.nn.Module):
    """Multi-head self-attention: projections, optional rotary embedding, exact attention in O(N) memory.

    Args:
        d_model: width of the input and the output, num_heads * head_dim.
        num_heads: query heads.
        num_kv_heads: heads of keys and values, a divisor of num_heads (GQA, MQA); None is num_heads.
        causal: hide the future.
        window: (left, right) keys seen before and after each query; None is unbounded.
        dropout: probability of dropping an attention weight, in training only.
        bias: whether the projections have a bias.
        rope: base of the rotary embedding (half-split, all of the head), e.g. 10000.0; None has none.

    Attributes:
        qkv_proj: d_model -> (num_heads + 2 * num_kv_heads) * head_dim: all queries, then keys, then values.
        out_proj: d_model -> d_model.

    Raises:
        ValueError, TypeError: an argument does not fit, or is none of these.

    Example:
        >>> layer = FlashAttention(64, num_heads=4, num_kv_heads=2, causal=True, rope=10000.0).eval()
        >>> x = torch.randn(1, 6, 64)
        >>> cache = layer.new_cache(batch=1, max_seqlen=16)
        >>> with torch.no_grad():
        ...     whole = layer(x)
        ...     prompt, token = layer(x[:, :5], cache), layer(x[:, 5:], cache)
        >>> torch.allclose(whole, torch.cat([prompt, token], dim=1), atol=1e-5)
        True
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        causal: bool = False,
        window: Window | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        rope: float | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        check_known(FlashAttention, unknown)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_integers(0, d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads)
        check_number("dropout", dropout)
        check_flag("causal", causal)
        check_flag("bias", bias)
        if rope is not None:
            check_number("rope", rope)
        if num_heads < 1 or d_model < 1 or d_model % num_heads:
            raise ValueError(f"d_model={d_model} must be a positive multiple of num_heads={num_heads}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout} must be in [0, 1)")
        head_dim = d_model // num_heads
        if rope is not None and (not 0 < rope < float("inf") or head_dim % 2):
            raise ValueError(
                f"rope={rope} must be None or a positive finite base, and then the head_dim "
                f"d_model / num_heads={head_dim} even"
            )
        window_bounds(window)
        self.d_model, self.head_dim = d_model, head_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.causal, self.window, self.dropout, self.rope = causal, window, dropout, rope
        self.qkv_proj = torch.nn.Linear(d_model, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)
        self.out_proj = torch.nn.Linear(d_model, d_model, bias=bias)

    def forward(
        self,
        x: Tensor,
        cache: KVCache | None = None,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        return_aux: Aux | None = None,
    ) -> Any:
        """Attend within each sequence of x, or to a cache that x is appended to.

        Args:
            x: (batch, seqlen, d_model), or packed (total, d_model) with cu_seqlens.
            cache: for inference: x continues the cached sequences and is appended. Causal attention is
                aligned with each sequence's end.
            cu_seqlens: (batch + 1,) int32 or int64, each packed sequence's start, and the total.
            mask: bool, True = attend, as of `tilewise.attention`; padding (batch, seqlen) is
                mask[:, None, None, :]. With a cache, as of `tilewise.attention_with_cache`.
            return_aux: also return these statistics of the weights.

        Returns:
            A tensor shaped like x; with return_aux also a `tilewise.Statistics`.

        Raises:
            ValueError, TypeError: an argument does not fit; the message names it and says what does. The
                cache is then unchanged.
        """
        self._check(x, cache, cu_seqlens)
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        qkv = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))  # (..., all heads, head_dim)
        query, key, value = qkv.split(heads, dim=-2)
        if self.rope is not None:
            positions = self._positions(x, cache, cu_seqlens)
            cos, sin = rotary_tables(positions, self.head_dim, self.rope, dtype=compute_dtype(x.dtype))
            query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        options: dict[str, Any] = {
            "causal": self.causal, "window": self.window, "mask": mask, "return_aux": return_aux
        }  # fmt: skip
        dropout_p = self.dropout if self.training else 0.0
        if cache is not None:
            if cache.key.dtype != key.dtype:
                raise TypeError(
                    f"cache.dtype={cache.key.dtype} must be the projections', {key.dtype} here: "
                    f"new_cache(..., dtype={key.dtype})"
                )
            out = attention_with_cache(query, cache, key, value, **options)
        elif cu_seqlens is not None:
            out = attention_varlen(query, key, value, cu_seqlens, cu_seqlens, dropout_p=dropout_p, **options)
        else:
            out = attention(query, key, value, dropout_p=dropout_p, **options)
        if return_aux is not None:
            out, aux = out
            return self.out_proj(out.flatten(-2)), aux
        return self.out_proj(out.flatten(-2))

    def new_cache(self, batch: int, max_seqlen: int, *, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache that fits this layer, on its device.

        Args:
            batch: sequences.
            max_seqlen: capacity of each, in tokens.
            dtype: of keys and values; None is the layer's own. For calls under autocast, give its dtype.
        """
        weight = self.qkv_proj.weight
        dtype = weight.dtype if dtype is None else dtype
        return KVCache(batch, max_seqlen, self.num_kv_heads, self.head_dim, dtype=dtype, device=weight.device)

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"causal={self.causal}, window={self.window}, dropout={self.dropout}, rope={self.rope}"
        )

    def _positions(self, x: Tensor, cache: KVCache | None, cu_seqlens: Tensor | None) -> Tensor:
        """Each token's position in its own sequence: (seqlen,), (batch, seqlen) or packed (total,)."""
        position = torch.arange(x.shape[-2], device=x.device)
        if cache is not None:
            return cache.lengths[:, None] + position
        if cu_seqlens is not None:
            starts = cu_seqlens.long()
            return position - starts[torch.searchsorted(starts[1:], position, right=True)]
        return position

    def _check(self, x: Tensor, cache: KVCache | None, cu_seqlens: Tensor | None) -> None:
        check_tensors(x=x, **({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}))
        rank, shape = (3, "(batch, seqlen, d_model)") if cu_seqlens is None else (2, "(total, d_model)")
        if x.ndim != rank or x.shape[-1] != self.d_model:
            given = "without" if cu_seqlens is None else "with"
            raise ValueError(
                f"x.shape={tuple(x.shape)} must be {shape} {given} cu_seqlens, d_model={self.d_model}"
            )
        if cu_seqlens is not None and (cu_seqlens.ndim != 1 or not len(cu_seqlens)):
            raise ValueError(f"cu_seqlens.shape={tuple(cu_seqlens.shape)} must be (batch + 1,)")
        if cache is None:
            return
        if not isinstance(cache, KVCache):
            raise TypeError(f"cache={type(cache).__name__} must be a tilewise.KVCache")
        if cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens must be None when cache is given: a cache takes (batch, seqlen, d_model)"
            )
        if self.training and self.dropout > 0:
            raise ValueError(f"cache must be None in training with dropout={self.dropout}: call eval()")
        if torch.is_grad_enabled() and (x.requires_grad or self.qkv_proj.weight.requires_grad):
            raise ValueError("cache keeps no history for gradients: call under torch.no_grad()")
        held = (cache.key.shape[0], *cache.key.shape[2:])
        right = (x.shape[0], self.num_kv_heads, self.head_dim)
        if held != right or cache.value.shape[-1] != self.head_dim:
            raise ValueError(f"cache of (batch, num_kv_heads, head_dim)={held} must be one of {right}")
