"""Attention and its gradients, as the formulas read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.checks import check_known
from tilewise.core.dropout import keep_mask, rate


class ReferenceGradients(NamedTuple):
    """Gradients of the reference, in its dtype; `bias` and `sinks` are None where the call has none."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    captured: tuple[Tensor, ...] = ()  # of the tensors given as `captured`


class Forward(NamedTuple):
    """Everything the backward formula needs, for dense (batch, heads, seqlen, dim) tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    s: Tensor  # scores, -inf where not visible, without the sink
    p: Tensor  # softmax weights, before dropout
    keep: Tensor  # dropout factor: 0 or 1 / (1 - rate(dropout_p))
    tanh: Tensor | None  # of the softcapped scores
    p_sink: Tensor | None  # weight of the sink, (batch, heads, seqlen_q)
    scale: float
    out: Tensor
    lse: Tensor
    before: Tensor  # the scores before the score function
    indices: tuple[Tensor, ...]  # b, h, i, j


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Tensor, Tensor]:
    """Exact attention by the formula, O(N^2) memory.

    Takes the options of `tilewise.attention` that say what to compute (and `cu_seqlens_q`, `cu_seqlens_k` for
    packed inputs; `dropout_seed` fixes the dropout mask); tensors in the given `layout`.

    Args:
        query: (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim) if packed.
        key: (batch, seqlen_k, num_kv_heads, head_dim), or packed likewise.
        value: (batch, seqlen_k, num_kv_heads, head_dim_v), or packed likewise.
        dtype: precision everything is computed in.

    Returns:
        (out, lse) in `dtype`: out like query with head_dim_v; lse (batch, num_heads, seqlen_q), or
        (num_heads, total_q) if packed. A query that sees no key has out 0 and lse -inf (or its sink).

    Example:
        >>> q = k = v = torch.eye(2).view(1, 2, 1, 2)
        >>> out, lse = attention(q, k, v, causal=True)
        >>> out[0, 0, 0].tolist()
        [1.0, 0.0]
    """
    check_options(attention, options)
    if options.get("cu_seqlens_q") is not None:
        parts = [attention(*p.tensors, dtype=dtype, **p.options) for p in unpack(query, key, value, options)]
        empty_out = query.new_zeros((0, query.shape[1], value.shape[2]), dtype=dtype)
        empty_lse = query.new_zeros((query.shape[1], 0), dtype=dtype)
        return (
            torch.cat([empty_out, *(out[0] for out, _ in parts)]),
            torch.cat([empty_lse, *(lse[0] for _, lse in parts)], dim=1),
        )
    f = forward(query, key, value, dtype, **options)
    return _swapped(f.out, options), f.lse


def attention_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dlse: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> ReferenceGradients:
    """Gradients of `attention` by the formula: dV = P^T dO, dS = P * (dP - D), dQ = dS K, dK = dS^T Q.

    Args:
        dout: gradient of out, same shape.
        dlse: gradient of lse, same shape; None is zero.
        options: also `captured`, the tensors of `score_mod` whose gradients are asked for.

    Returns:
        Gradients in `dtype`, shaped like the inputs they belong to.
    """
    check_options(attention_backward, options)
    if options.get("cu_seqlens_q") is not None:
        return _packed_backward(dout, query, key, value, dlse, dtype, options)
    f = forward(query, key, value, dtype, **options)
    do = _swapped(dout, options).to(dtype)
    group = f.q.shape[1] // max(1, f.k.shape[1])
    k, v = f.k.repeat_interleave(group, 1), f.v.repeat_interleave(group, 1)
    dp = (do @ v.mT) * f.keep
    delta = (f.p * dp).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    ds = f.p * (dp - delta[..., None])  # gradient of the biased score
    captured = options.get("captured", ())
    if options.get("score_mod") is not None:
        ds, *captured = _through_function(options["score_mod"], f, ds, captured)
    ds_raw = ds if f.tanh is None else ds * (1 - f.tanh**2)
    grouped = (f.k.shape[0], f.k.shape[1], group, f.k.shape[2])
    dk = (ds_raw.mT @ f.q * f.scale).view(*grouped, f.q.shape[-1]).sum(2)
    dv = ((f.p * f.keep).mT @ do).view(*grouped, f.v.shape[-1]).sum(2)
    bias, sinks = options.get("bias"), options.get("sinks")
    return ReferenceGradients(
        _swapped(ds_raw @ k * f.scale, options),
        _swapped(dk, options),
        _swapped(dv, options),
        None if bias is None else ds.sum_to_size(bias.shape),
        None if sinks is None or f.p_sink is None else -(f.p_sink * delta).sum((0, 2)),
        tuple(captured),
    )


def check_options(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raises TypeError for an option that the formula does not have."""
    _, _, _, _, *names = inspect.signature(forward).parameters  # after query, key, value and dtype
    lengths = ("max_seqlen_q", "max_seqlen_k") if options.get("cu_seqlens_q") is not None else ()
    check_known(function, options, (*names, *lengths))


def _called(function: Callable[..., Tensor], dtype: torch.dtype, *arguments: Tensor) -> Tensor:
    """A user's function: where the scores are float64, so is what it makes of indices, as `j * 0.1`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype == torch.float64 else before)
    try:
        return function(*arguments)
    finally:
        torch.set_default_dtype(before)


def _through_function(
    score_mod: Callable[..., Tensor], f: Forward, ds: Tensor, captured: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients of the scores before the function and of captured tensors, by PyTorch's autograd."""
    with torch.enable_grad():
        before = f.before.detach().requires_grad_()
        after = _called(score_mod, before.dtype, before, *f.indices)
    if not after.requires_grad:  # the function reads no score
        return [torch.zeros_like(t) for t in (before, *captured)]
    grads = torch.autograd.grad(
        after, (before, *captured), ds.expand_as(after), allow_unused=True, materialize_grads=True
    )
    return [torch.where(ds == 0, 0.0, grads[0]), *grads[1:]]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dtype: torch.dtype,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    layout: str = "bshd",
    dropout_seed: Tensor | None = None,
    first_sequence: int = 0,
    cu_seqlens_q: None = None,
    cu_seqlens_k: None = None,
    mask_mod: Callable[..., Tensor] | None = None,
    score_mod: Callable[..., Tensor] | None = None,
    captured: Sequence[Tensor] = (),
    deterministic: bool = False,  # like the next, says how to compute, not what
    precision: str = "ieee",
) -> Forward:
    """A dense call, step by step, in `dtype`."""
    q, k, v = (_swapped(t, {"layout": layout}).to(dtype) for t in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // max(1, k.shape[1])
    s = scale * (q @ k.repeat_interleave(group, 1).mT)  # [batch, heads, seqlen_q, seqlen_k]
    tanh = torch.tanh(s / softcap) if softcap > 0 else None
    if tanh is not None:
        s = softcap * tanh
    if bias is not None:
        s = s + bias.to(dtype)
    i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device=q.device)[None, :]
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(dtype)[..., None, None] * (i - j).abs()
    left, right = window or (None, None)
    hidden = torch.zeros_like(i - j, dtype=torch.bool)
    if causal:
        hidden |= j > i
    if left is not None:
        hidden |= j < i - left
    if right is not None:
        hidden |= j > i + right
    if mask is not None:
        hidden = hidden | ~mask
    indices = _function_indices(first_sequence, s.shape, q.device)
    before = s
    if score_mod is not None:
        s = _called(score_mod, dtype, s, *indices).to(dtype)
    if mask_mod is not None:
        hidden = hidden | ~_called(mask_mod, dtype, *indices)
    s = s.masked_fill(hidden, float("-inf"))
    scores = s
    if sinks is not None:  # a key that has a score and no value
        s = torch.cat([s, sinks.to(dtype)[None, :, None, None].expand(*s.shape[:-1], 1)], -1)
    lse = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], float("-inf"))
    p = torch.softmax(s, -1)  # not exp(s - lse): a large lse has lost the digits of log(sum)
    p = torch.where((lse == float("-inf"))[..., None], torch.zeros_like(p), p)
    p_sink = None
    if sinks is not None:
        p, p_sink = p[..., :-1], p[..., -1]
    keep = torch.ones_like(p)
    if dropout_p > 0:
        assert dropout_seed is not None
        rows = range(first_sequence, first_sequence + q.shape[0])
        keep = keep_mask(dropout_seed, dropout_p, rows, q.shape[1], 0, q.shape[2], 0, k.shape[2])
        keep = keep.to(dtype) / (1 - rate(dropout_p))
    out = (p * keep) @ v.repeat_interleave(group, 1)
    return Forward(q, k, v, scores, p, keep, tanh, p_sink, scale, out, lse, before, indices)


def _function_indices(first: int, shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """b, h, i and j of mask and score functions, which broadcast to the scores."""
    ranges = [torch.arange(n, device=device) for n in shape]
    ranges[0] = ranges[0] + first
    return tuple(torch.meshgrid(*ranges, indexing="ij"))


class Part(NamedTuple):
    """A dense problem, and where a packed one has it."""

    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    rows_q: slice = slice(None)
    rows_k: slice = slice(None)


def unpack(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> list[Part]:
    """One dense problem of batch 1 for each packed sequence."""
    cu_q, cu_k = options["cu_seqlens_q"].tolist(), options["cu_seqlens_k"].tolist()
    parts = []
    for n, (q0, q1, k0, k1) in enumerate(zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:])):
        own = {name: o for name, o in options.items() if not name.startswith(("cu_", "max_"))}
        own["first_sequence"] = n
        for name in ("mask", "bias"):
            t = own.get(name)
            if t is not None:
                t = t[n : n + 1] if t.shape[0] > 1 else t
                t = t[:, :, : q1 - q0] if t.shape[2] > 1 else t
                own[name] = t[..., : k1 - k0] if t.shape[3] > 1 else t
        slopes = own.get("alibi_slopes")
        if slopes is not None and slopes.ndim == 2:
            own["alibi_slopes"] = slopes[n : n + 1]
        tensors = (query[None, q0:q1], key[None, k0:k1], value[None, k0:k1])
        parts.append(Part(tensors, own, slice(q0, q1), slice(k0, k1)))
    return parts


def _packed_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dlse: Tensor | None,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> ReferenceGradients:
    dq, dk, dv = (torch.zeros_like(t, dtype=dtype) for t in (query, key, value))
    bias, sinks = options.get("bias"), options.get("sinks")
    dbias = None if bias is None else torch.zeros_like(bias, dtype=dtype)
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=dtype)
    captured = [torch.zeros_like(t) for t in options.get("captured", ())]
    for n, part in enumerate(unpack(query, key, value, options)):
        part_dlse = None if dlse is None else dlse[None, :, part.rows_q]
        g = attention_backward(
            dout[None, part.rows_q], *part.tensors, dlse=part_dlse, dtype=dtype, **part.options
        )
        dq[part.rows_q], dk[part.rows_k], dv[part.rows_k] = g.query[0], g.key[0], g.value[0]
        if dbias is not None and g.bias is not None:
            row = dbias[n : n + 1] if dbias.shape[0] > 1 else dbias
            row[:, :, : g.bias.shape[2], : g.bias.shape[3]] += g.bias
        if dsinks is not None and g.sinks is not None:
            dsinks += g.sinks
        for total, t in zip(captured, g.captured):
            total += t
    return ReferenceGradients(dq, dk, dv, dbias, dsinks, tuple(captured))


def _swapped(t: Tensor, options: dict[str, Any]) -> Tensor:
    """From the call's layout to (batch, heads, seqlen, dim), or back."""
    return t if options.get("layout", "bshd") == "bhsd" else t.transpose(1, 2)
