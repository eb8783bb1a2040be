"""The public functions: defaults and layout, then one call down.

Every face ends in `tilewise.autograd.functions.attention(inputs, options, backend)`. What shapes mean and
what is refused is decided in `tilewise.core.problem` and `core.checks`. `tilewise.varlen` has the
function of packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor

from tilewise.autograd import functions, statistics
from tilewise.cache.contiguous import KVCache
from tilewise.cache.paged import PagedKVCache
from tilewise.cache.pages import PagedBatch
from tilewise.cache.step import Rotary, cached_step
from tilewise.core.checks import (
    check_broadcastable,
    check_flag,
    check_known,
    check_number,
    check_tensors,
    shown,
    warn_of_two_meanings,
    window_bound,
)
from tilewise.core.device_errors import check_if_debugging
from tilewise.core.functions.call import MaskFunction, ScoreFunction, is_learned, with_functions
from tilewise.core.problem import Inputs, Options, in_layout
from tilewise.core.quantized import Quantized, inputs_of, is_quantized
from tilewise.core.signature import all_resolved, resolved
from tilewise.core.statistics import Aux
from tilewise.core.torch_private import compiles_here, number

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Window = tuple[int | None, int | None]
NO_WINDOW: Window = (None, None)
Answer = Any  # out, or a tuple of out, lse if asked for, and `Statistics` if asked for


def attention(
    query: Tensor | Quantized,
    key: Tensor | Quantized,
    value: Tensor | Quantized,
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
    layout: str = "bshd",
    return_lse: bool = False,
    return_aux: Aux | None = None,
    deterministic: bool = False,
    precision: str = "ieee",
    generator: torch.Generator | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Answer:
    """Exact attention, `softmax(scale * Q K^T + ...) V`, in O(N) memory.

    Args:
        query: (batch, seqlen_q, num_heads, head_dim) of float64, float32, bfloat16 or float16. head_dim is
            1 to 576. PyTorch's SDPA has (batch, num_heads, seqlen_q, head_dim): such tensors want
            layout="bhsd", as without it heads are taken for positions. query, key and value may be
            `tilewise.fp8.Quantized` together.
        key: (batch, seqlen_k, num_kv_heads, head_dim); num_kv_heads divides num_heads (GQA, MQA).
        value: (batch, seqlen_k, num_kv_heads, head_dim_v).
        causal: hide the future; the last query is aligned with the last key (bottom-right).
        window: (left, right): keys seen before and after each query's aligned position; None unbounded.
        mask: bool, True = attend, broadcastable to (batch, num_heads, seqlen_q, seqlen_k). Two dimensions are
            (seqlen_q, seqlen_k); padding (batch, seqlen_k) is mask[:, None, None, :].
        bias: float, added to the scores, broadcastable likewise; differentiable.
        mask_mod: (b, h, q_idx, kv_idx) -> bool, True = attend. As FlexAttention's; indices count from 0.
        score_mod: (score, b, h, q_idx, kv_idx) -> score, after softcap and biases. It is traced once, so it
            has operators and `torch` functions of numbers, and `tensor[index]` of captured tensors, which
            get gradients. What can't be traced raises an error that names the line.
        block_mask: FlexAttention's `BlockMask`, from PyTorch or `tilewise.flex_attention`, for (batch or 1,
            num_heads or 1, seqlen_q, seqlen_k). With mask_mod, a key is visible where both say so.
        alibi_slopes: (num_heads,) or (batch, num_heads): adds -slope * |distance|. Has a gradient.
        softcap: scores become softcap * tanh(scores / softcap) before any bias; 0 is off.
        sinks: (num_heads,) logits that join the softmax without a value; differentiable.
        dropout_p: probability in [0, 1) of dropping an attention weight, rounded to a multiple of 1/256 (but
            not to 0 or 1); the others count 1 / (1 - that).
        scale: softmax scale; None is 1 / sqrt(head_dim).
        layout: "bshd" or "bhsd". Any strides are taken without a copy if the last dimension is contiguous.
        return_lse: also return the log-sum-exp of each query's scores; differentiable.
        return_aux: also return these statistics of the weights, see `tilewise.Aux`.
        deterministic: ask for gradients that are equal bit for bit from run to run.
        precision: of the products. "ieee" is exact to the dtype. "tf32" lets a GPU's matrix units round
            float32 inputs to 10 bits of mantissa, for several times the speed; other dtypes and CPUs compute
            the same with both. "fp8" is approximate: bfloat16 and float16 inputs are rounded to 4 significant
            bits, query and key after a rotation, and so are the weights. "int8" has integers for query and
            key, and less error. Their gradients are straight-through: the exact formula's, with the
            weights of the 8-bit forward's lse. See `tilewise.fp8`.
        generator: draws the dropout seed.
        backend: a backend's name; None lets `tilewise.explain` choose. One asked for never falls back.

    Returns:
        out in query's dtype and layout with head_dim_v, its memory ordered (batch, seqlen, heads, dim);
        with return_lse also lse (batch, num_heads, seqlen_q), natural log, float32 (float64 for float64);
        with return_aux last a `tilewise.Statistics`.
        A query that sees no key has out 0, lse -inf (its sink's logit if it has one) and zero gradients.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it and says what does.
        NotImplementedError: the backend asked for does not serve the call; the message names one that does.

    Source: Dao et al., FlashAttention (2022), section 3; Dao, FlashAttention-2 (2023), section 3.

    Example:
        >>> q = torch.ones(1, 3, 2, 8); k = torch.ones(1, 5, 1, 8); v = torch.arange(5.0).view(1, 5, 1, 1)
        >>> attention(q, k, v, causal=True)[0, :, 0, 0]
        tensor([1.0000, 1.5000, 2.0000])
    """
    if functions.is_unheard():  # inside of context_parallel: other ranks wait for this call
        return functions.heard(attention, locals())
    if unknown:
        check_known(attention, unknown)
    bounds = NO_WINDOW if window is None else window_bounds(window)
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    if layout != "bshd":
        check_layout(layout)
    inputs = canonical_inputs(
        query, key, value, mask, bias, alibi_slopes, sinks, dropout_p=dropout_p, generator=generator
    )
    if inputs.query_blocks is not None:
        precision = products_of(inputs, precision)
        inputs = in_layout(inputs, layout)  # which has no meaning for tensors in 8 bits, but for out
    if mask is not None or bias is not None:
        _check_scores(inputs, layout, mask, bias)
    options = Options(causal, *bounds, softcap, dropout_p, scale, deterministic, None, None, precision)
    is_scored = alibi_slopes is not None and is_learned(alibi_slopes)
    if mask_mod is not None or score_mod is not None or block_mask is not None or is_scored:
        given, is_shard = in_layout(inputs, layout), functions.is_served()
        given, options = with_functions(given, options, mask_mod, score_mod, block_mask, is_shard=is_shard)
        inputs = in_layout(given, layout)
    if return_aux is not None:
        out, lse, aux = statistics.attention(in_layout(inputs, layout), options, backend, return_aux)
        out = out.transpose(1, 2) if layout == "bhsd" else out
        return (out, lse, aux) if return_lse else (out, aux)
    request = functions.LSE if return_lse else functions.NO_LSE
    out, lse = functions.attention(inputs, options, backend, request, layout)
    return (out, lse) if return_lse else out


def attention_with_cache(
    query: Tensor,
    cache: KVCache | PagedKVCache,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    batch: PagedBatch | Sequence[int] | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    causal: bool = True,
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
    precision: str = "ieee",
    layout: str = "bshd",
    return_lse: bool = False,
    return_aux: Aux | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Answer:
    """Append new keys and values to a cache, then attend to all that it holds.

    Prefill, chunked prefill, decoding and mixtures of them are this one call: each sequence's last query is
    aligned with its last cached key.

    Args:
        query: (batch, new_tokens, num_heads, head_dim) in `layout`; with a `PagedBatch` also packed (total
            new tokens, num_heads, head_dim), each sequence having its own number of them.
        cache: keys and values so far; appended to in place if key and value are given.
        key: (batch, new_tokens, num_kv_heads, head_dim) in `layout`, or packed; None appends nothing.
        value: likewise with head_dim_v; None for a cache whose values lie in its keys (`value_in_key`).
        batch: which sequences of a `PagedKVCache` these are. None: all that live; a list of sequences; or
            what `cache.reserve` returned, which has counted the new tokens already. Layers that share pages
            take new tokens with the last alone.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), as of `tilewise.rotary.rotary_tables`: query and
            key are rotated by their positions in the sequence first.
        rotary_interleaved: pairs are coordinates (0, 1), (2, 3), ...; otherwise (p, p + rotary_dim / 2).
        mask, bias: broadcastable to (batch, num_heads, new_tokens, capacity), which is max_seqlen of a
            `KVCache`, of pages `batch.page_table.shape[1] * page_size`.
        mask_mod, score_mod, block_mask: q_idx and kv_idx are positions in the sequence, so that a function
            says the same in training, prefill and decoding; b counts the batch's rows. A block_mask is at
            least as long as the longest sequence. They come on top of causal=True, the default here.

    The other arguments are those of `attention`. Gradients reach query only.

    Returns:
        As `attention`; packed as `attention_varlen` for packed queries.

    Raises:
        ValueError, TypeError, NotImplementedError, IndexError: as `attention`, and when the cache would
            overflow or a new key or value requires grad. The cache is then unchanged.

    Absorbed multi-head latent attention (DeepSeek-V2, 2024) is one KV head of head_dim 576 whose first 512
    coordinates are the values: `PagedKVCache(..., 1, 576, head_dim_v=512, value_in_key=True)`.

    Example:
        >>> cache = KVCache(1, 8, 1, 4, dtype=torch.float32)
        >>> x = torch.ones(1, 3, 1, 4)
        >>> attention_with_cache(x, cache, x, x).shape, cache.lengths.tolist()
        (torch.Size([1, 3, 1, 4]), [3])
    """
    if unknown:
        check_known(attention_with_cache, unknown)
    check_tensors(query=query)
    if return_lse is not False:
        check_flag("return_lse", return_lse)
    if rotary_interleaved is not False:
        check_flag("rotary_interleaved", rotary_interleaved)
    if value is not None and key is None:
        raise TypeError("key=NoneType must be a torch.Tensor when value is given")
    if not compiles_here():
        query, key, value, rotary_cos, rotary_sin = all_resolved((query, key, value, rotary_cos, rotary_sin))
        alibi_slopes, sinks = resolved(alibi_slopes), resolved(sinks)
    query, key, value = to_bshd(layout, query=query, key=key, value=value)
    has_rotary = rotary_cos is not None or rotary_sin is not None
    rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved) if has_rotary else None  # type: ignore[arg-type]
    bounds = NO_WINDOW if window is None else window_bounds(window)
    options = Options(causal, *bounds, softcap, scale=scale, precision=precision)
    request = functions.LSE if return_lse else functions.NO_LSE
    step = cached_step(cache, batch, query, key, value)
    try:
        if rotary is not None:
            step.check_rotary(rotary)
        inputs = step.inputs(canonical_inputs(query, cache.key, cache.value, mask, bias, alibi_slopes, sinks))
        if mask_mod is not None or score_mod is not None or block_mask is not None:
            cached = step.standing(query)
            inputs, options = with_functions(inputs, options, mask_mod, score_mod, block_mask, cached)
        entry = None
        if return_aux is not None:
            statistics.check(inputs, options, backend, return_aux)
        elif not compiles_here():
            entry = functions.check(inputs, options, backend, request)  # before the cache changes
        query = step.store(query, key, value, rotary)
        if query is not inputs.query:
            inputs, entry = inputs._replace(query=query), None
        aux, is_known = None, step.are_lengths_known()
        if return_aux is not None:
            out, lse, aux = statistics.attention(inputs, options, backend, return_aux, is_known)
        else:
            out, lse = functions.attention(
                inputs, options, backend, request, are_values_known=is_known, entry=entry
            )
    except BaseException:  # also an interrupt, and what only a run finds, as a wrong index of a function
        step.undo()
        raise
    check_if_debugging()
    if layout == "bhsd" and out.ndim == 4:
        out = out.transpose(1, 2)
    if aux is not None:
        return (out, lse, aux) if return_lse else (out, aux)
    return (out, lse) if return_lse else out


def canonical_inputs(
    query: Tensor | Quantized,
    key: Tensor | Quantized,
    value: Tensor | Quantized,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> Inputs:
    """The tensors as every backend takes them: masks with four dimensions, and a dropout seed if one is
    needed."""
    blocks = None
    if not (type(query) is type(key) is type(value) is Tensor) and is_quantized(query, key, value):
        blocks = inputs_of(query, key, value)
        query, key, value = blocks[:3]
    seed = None
    if type(dropout_p) is not float or dropout_p != 0 or generator is not None:
        seed = draw_seed(query, dropout_p, generator)  # type: ignore[arg-type]
    mask = None if mask is None else _four_dimensions(mask)
    bias = None if bias is None else _four_dimensions(bias)
    if blocks is not None:
        return Inputs(*blocks[:8], mask, bias, alibi_slopes, sinks, seed, *blocks[13:])
    return Inputs(query, key, value, None, None, None, None, None, mask, bias, alibi_slopes, sinks, seed)  # type: ignore[arg-type]


def products_of(inputs: Inputs, precision: str) -> str:
    """The precision of a call: of tensors in 8 bits it need not be said."""
    blocks = inputs.query_blocks
    if blocks is None or precision != "ieee":
        return precision
    return "int8" if blocks.dtype == torch.int8 else "fp8"


def draw_seed(query: Tensor, dropout_p: float, generator: torch.Generator | None = None) -> Tensor | None:
    """A dropout seed, () int64; None if nothing is dropped."""
    check_tensors(query=query)
    dropout_p = number("dropout_p", dropout_p)
    check_number("dropout_p", dropout_p)
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"generator={shown(generator)} must be None or a torch.Generator")
    if not dropout_p > 0:
        return None
    return torch.randint(2**63 - 1, (), device=query.device, generator=generator)


def to_bshd(layout: str, **tensors: Any) -> list[Any]:
    """Views (batch, seqlen, heads, dim) of tensors in a layout; packed ones and None stay as they are."""
    check_layout(layout)
    check_tensors(**{name: t for name, t in tensors.items() if t is not None})
    if layout == "bshd":
        return list(tensors.values())
    return [t if t is None or t.ndim != 4 else t.transpose(1, 2) for t in tensors.values()]


def check_layout(layout: Any) -> None:
    """Raises ValueError if there is no such layout."""
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout={shown(layout)} must be 'bshd' or 'bhsd'")


def _check_scores(inputs: Inputs, layout: str, mask: Tensor | None, bias: Tensor | None) -> None:
    """Raises ValueError unless mask and bias, as they were given, fit tensors of four dimensions.

    Warns of a mask whose shape is also that of padding.
    """
    query, key = inputs.query, inputs.key
    check_tensors(query=query, key=key)
    if functions.is_served():  # columns are those of the whole sequence: the server checks them
        return
    if query.ndim == key.ndim == 4:
        rows, heads = (2, 1) if layout == "bhsd" else (1, 2)
        full = (query.shape[0], query.shape[heads], query.shape[rows], key.shape[rows])
        check_broadcastable(full, mask=mask, bias=bias)
        warn_of_two_meanings(mask, full)


def _four_dimensions(t: Tensor) -> Tensor:
    if not isinstance(t, Tensor) or t.ndim >= 4 or t.layout != torch.strided:  # which the checks name
        return t
    return t.reshape((1,) * (4 - t.ndim) + t.shape)


def window_bounds(window: Window | None) -> Window:
    """The (left, right) bounds of a window argument; raises ValueError if it is none."""
    if window is None:
        return NO_WINDOW
    fits = isinstance(window, tuple | list) and len(window) == 2
    if not fits or any(
        b is not None and (not isinstance(b, int | Integral | torch.SymInt) or b < 0) for b in window
    ):
        for bound in window if fits else ():
            number("window", bound)  # which says more of NumPy's
        hint = ": None is unbounded, as -1 is in flash-attn" if fits and -1 in window else ""
        raise ValueError(
            f"window={shown(window)} must be (left, right), each None or an integer of at least 0{hint}"
        )
    return window_bound(window[0]), window_bound(window[1])
