"""The oracle: attention as the formula reads, with every N x N matrix stored, in float64.

Nothing here is shared with the backends (masks and positions are written out again), so an error in
the tile arithmetic cannot hide. Use it to test; it needs O(seqlen_q * seqlen_k) memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.checks import check_known
from tilewise.core.dropout import keep_mask, rate
from tilewise.core.statistics import Aux, Statistics, TopK

__all__ = ["ReferenceGradients", "attention", "attention_backward", "attention_statistics"]


class ReferenceGradients(NamedTuple):
    """Gradients of the reference, in its dtype; `bias` and `sinks` are None where the call has none."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    captured: tuple[Tensor, ...] = ()  # of the tensors given as `captured`


class _Forward(NamedTuple):
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
    _check(attention, options)
    if options.get("cu_seqlens_q") is not None:
        parts = [attention(*p.tensors, dtype=dtype, **p.options) for p in _unpack(query, key, value, options)]
        empty_out = query.new_zeros((0, query.shape[1], value.shape[2]), dtype=dtype)
        empty_lse = query.new_zeros((query.shape[1], 0), dtype=dtype)
        return (
            torch.cat([empty_out, *(out[0] for out, _ in parts)]),
            torch.cat([empty_lse, *(lse[0] for _, lse in parts)], dim=1),
        )
    forward = _forward(query, key, value, dtype, **options)
    return _from_bhsd(forward.out, options), forward.lse


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
    _check(attention_backward, options)
    if options.get("cu_seqlens_q") is not None:
        return _packed_backward(dout, query, key, value, dlse, dtype, options)
    f = _forward(query, key, value, dtype, **options)
    do = _to_bhsd(dout, options).to(dtype)
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
        _from_bhsd(ds_raw @ k * f.scale, options),
        _from_bhsd(dk, options),
        _from_bhsd(dv, options),
        None if bias is None else ds.sum_to_size(bias.shape),
        None if sinks is None or f.p_sink is None else -(f.p_sink * delta).sum((0, 2)),
        tuple(captured),
    )


def attention_statistics(
    query: Tensor, key: Tensor, aux: Aux, *, dtype: torch.dtype = torch.float64, **options: Any
) -> Statistics:
    """What `tilewise.attention_statistics` gives, by the formulas of `core.statistics`, O(N^2) memory.

    Args:
        query, key, options: as `attention` takes them.
        aux: which statistics.
        dtype: precision everything is computed in. PyTorch differentiates the result.

    Example:
        >>> q = torch.eye(2).view(1, 2, 1, 2)
        >>> attention_statistics(q, q, Aux(row_max=True), scale=1.0).row_max.flatten().tolist()
        [1.0, 1.0]
    """
    _check(attention_statistics, options)
    if options.get("cu_seqlens_q") is not None:
        parts = _unpack(query, key, key, options)
        found = [attention_statistics(*p.tensors[:2], aux, dtype=dtype, **p.options) for p in parts]
        return _packed_statistics(found, aux)
    f = _forward(query, key, key, dtype, **options)
    batch, heads, seqlen_q, seqlen_k = f.s.shape
    i = torch.arange(seqlen_q, device=f.s.device)[:, None]
    j = torch.arange(seqlen_k, device=f.s.device)[None, :]
    entropy = f.lse - (f.p * f.s.masked_fill(f.s == float("-inf"), 0.0)).sum(-1)
    if f.p_sink is not None:
        entropy = entropy - f.p_sink * options["sinks"].to(dtype)[:, None]
    row_max = f.s.amax(-1) if seqlen_k else f.s.new_full(f.s.shape[:-1], float("-inf"))
    columns = f.p[:, :, max(0, seqlen_q - (aux.last_rows or seqlen_q)) :].sum(2)
    if aux.column_sum == "group":
        columns = columns.unflatten(1, (f.k.shape[1], heads // f.k.shape[1])).sum(2)
    rows = [r for r in aux.rows or () if -seqlen_q <= r < seqlen_q]
    whole_rows = f.p.new_zeros((batch, heads, len(aux.rows or ()), seqlen_k))
    if rows:
        whole_rows[:, :, [r in rows for r in aux.rows or ()]] = f.p[:, :, rows]
    return Statistics(
        lse=f.lse if aux.lse else None,
        row_max=row_max if aux.row_max else None,
        max_logit=_max_logit(row_max) if aux.max_logit else None,
        entropy=entropy.masked_fill(f.lse == float("-inf"), 0.0) if aux.entropy else None,
        column_sum=columns if aux.column_sum else None,
        top_k=_top_k(f, aux.top_k) if aux.top_k else None,
        rows=whole_rows if aux.rows else None,
        block_sum=_block_sums(f.p, aux.block_sum) if aux.block_sum else None,
        expected_distance=(f.p * (i + seqlen_k - seqlen_q - j).abs()).sum(-1)
        if aux.expected_distance
        else None,
    )


def _check(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raises TypeError for an option that the formula does not have."""
    names = tuple(
        n for n in inspect.signature(_forward).parameters if n not in ("query", "key", "value", "dtype")
    )
    lengths = ("max_seqlen_q", "max_seqlen_k") if options.get("cu_seqlens_q") is not None else ()
    check_known(function, options, (*names, *lengths))


def _max_logit(row_max: Tensor) -> Tensor:
    """Of each head; -inf where there are no rows."""
    none = row_max.new_full((1, row_max.shape[1]), float("-inf"))
    return torch.cat([none, row_max.transpose(1, 2).flatten(0, 1)]).amax(0)


def _top_k(f: _Forward, k: int) -> TopK:
    padding = (0, max(0, k - f.s.shape[-1]))
    s = torch.nn.functional.pad(f.s, padding, value=float("-inf"))
    s, keys = s.sort(dim=-1, descending=True, stable=True)
    keys = keys[..., :k]
    p = torch.nn.functional.pad(f.p, padding).gather(-1, keys)
    return TopK(p, keys.masked_fill(s[..., :k] == float("-inf"), -1))


def _block_sums(p: Tensor, size: int) -> Tensor:
    """(batch, heads, rows, keys), padded to whole blocks, summed over them."""
    padding = (0, -p.shape[3] % size, 0, -p.shape[2] % size)
    return torch.nn.functional.pad(p, padding).unflatten(3, (-1, size)).unflatten(2, (-1, size)).sum((3, 5))


def _packed_statistics(found: list[Statistics], aux: Aux) -> Statistics:
    """Rows and keys of all sequences after each other; what has a batch dimension, padded to the longest."""

    def joined(name: str, dim: int = -1) -> Tensor | None:
        if not aux.asks(name):
            return None
        return torch.cat([getattr(f, name)[0] for f in found], dim)

    def stacked(name: str) -> Tensor | None:
        if not aux.asks(name):
            return None
        parts = [getattr(f, name) for f in found]
        longest = [max(p.shape[dim] for p in parts) for dim in (2, 3)]
        sizes = [(0, longest[1] - p.shape[3], 0, longest[0] - p.shape[2]) for p in parts]
        return torch.cat([torch.nn.functional.pad(p, size) for p, size in zip(parts, sizes)])

    best = [f.top_k for f in found if f.top_k is not None]
    return Statistics(
        **{name: joined(name) for name in ("lse", "row_max", "entropy", "column_sum", "expected_distance")},
        max_logit=torch.stack([f.max_logit for f in found]).amax(0) if aux.max_logit else None,  # type: ignore[misc]
        top_k=TopK(*(torch.cat([t[0] for t in ts], 1) for ts in zip(*best))) if best else None,
        **{name: stacked(name) for name in ("rows", "block_sum")},
    )


def _called(function: Callable[..., Tensor], dtype: torch.dtype, *arguments: Tensor) -> Tensor:
    """A user's function: where the scores are float64, so is what it makes of indices, as `j * 0.1`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype == torch.float64 else before)
    try:
        return function(*arguments)
    finally:
        torch.set_default_dtype(before)


def _through_function(
    score_mod: Callable[..., Tensor], f: _Forward, ds: Tensor, captured: Sequence[Tensor]
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


def _forward(
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
) -> _Forward:
    q, k, v = (_to_bhsd(t, {"layout": layout}).to(dtype) for t in (query, key, value))
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
    return _Forward(q, k, v, scores, p, keep, tanh, p_sink, scale, out, lse, before, indices)


def _function_indices(first: int, shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    """b, h, i and j of mask and score functions, which broadcast to the scores."""
    ranges = [torch.arange(n, device=device) for n in shape]
    ranges[0] = ranges[0] + first
    return tuple(torch.meshgrid(*ranges, indexing="ij"))


class _Part(NamedTuple):
    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    rows_q: slice
    rows_k: slice


def _unpack(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> list[_Part]:
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
        parts.append(_Part(tensors, own, slice(q0, q1), slice(k0, k1)))
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
    for n, part in enumerate(_unpack(query, key, value, options)):
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


def _to_bhsd(t: Tensor, options: dict[str, Any]) -> Tensor:
    return t if options.get("layout", "bshd") == "bhsd" else t.transpose(1, 2)


def _from_bhsd(t: Tensor, options: dict[str, Any]) -> Tensor:
    return _to_bhsd(t, options)
