"""What the 8-bit kernels of Hopper are compared with: float64 attention of the same 8-bit numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import reference
from tilewise.core import fp8
from tilewise.core.problem import AttentionProblem, Inputs, spans


def rounded_operands(precision: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What 8-bit numbers of q, k and v (..., rows, dim) stand for; q and k rotated, q over the size."""
    dtype = fp8.OPERANDS[precision]
    q, k = (fp8.round_rows(fp8.rotate(x), dtype).dequantize() for x in (q, k))
    return q / q.shape[-1], k, fp8.round_rows(v).dequantize()


def exact_of_rounded(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """float64 attention of the numbers that the 8-bit ones stand for."""
    parts: list[tuple[Tensor, ...]] = []
    for tensors in sequences(problem, inputs):
        rounded = rounded_operands(problem.precision, *tensors)
        parts.append(tuple(t.transpose(0, 1).double() for t in rounded))
    join = torch.cat if problem.is_packed else torch.stack
    q, k, v = (join(tensors) for tensors in zip(*parts, strict=True))
    visibility = problem.visibility()
    extras = {name: getattr(inputs, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "sinks")}
    extras = {name: t for name, t in extras.items() if t is not None}
    window = (visibility.left, visibility.right)
    return reference.attention(q, k, v, scale=problem.scale, window=window, softcap=problem.softcap, **extras)


def of_torch_products(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) of the same 8-bit numbers: scores from PyTorch's products on the GPU, all else in float64.

    Tensor cores keep about 14 bits of a sum of 8-bit products, whoever asks them: this is the error of that,
    and of weights in 8 bits.
    """
    visibility = problem.visibility()
    window = (visibility.left, visibility.right)
    parts = []
    for query, key, value in sequences(problem, inputs):
        (rows, keys), heads = (query.shape[1], key.shape[1]), problem.num_heads
        s = scores_of_torch_products(problem, query, key)
        q, k = query.new_zeros(1, rows, heads, 1), query.new_zeros(1, keys, heads, 1)
        each = torch.eye(keys, device=q.device)[None, :, None].expand(-1, -1, heads, -1)  # shows the weights
        p, lse = reference.attention(q, k, each, bias=s[None], window=window, sinks=inputs.sinks)
        out = product_with_values(p[0].transpose(0, 1), value, window[0] is not None)
        parts.append((out.transpose(0, 1)[None].to(problem.dtype), lse))
    outs, lses = zip(*parts, strict=True)
    if problem.is_packed:
        return torch.cat(outs, 1)[0], torch.cat(lses, 2)[0]
    return torch.cat(outs), torch.cat(lses)


def scores_of_torch_products(problem: AttentionProblem, query: Tensor, key: Tensor) -> Tensor:
    """Scaled and capped scores, float64 (heads, rows, keys), of a sequence's (heads, rows, dim)."""
    q, k = fp8.round_rows(fp8.rotate(query)), fp8.round_rows(fp8.rotate(key))
    group = problem.num_heads // problem.num_kv_heads
    s = torch.stack(
        [
            torch_product(q.values[h], q.factors[h], k.values[h // group], k.factors[h // group])
            for h in range(problem.num_heads)
        ]
    )
    s = s * (problem.scale / q.values.shape[-1])
    return problem.softcap * torch.tanh(s / problem.softcap) if problem.softcap else s


def product_with_values(p: Tensor, value: Tensor, is_reversed: bool) -> Tensor:
    """p (heads, rows, keys) times value (KV heads, keys, dim), both in 8 bits as `tiled.fp8` rounds them.

    A weight joins with its values' factor and is rounded over the largest so far of its row's tiles.
    """
    v = fp8.round_rows(value)
    factors = v.factors.repeat_interleave(len(p) // len(value), 0)  # (heads, tiles)
    tiles = torch.nn.functional.pad(p, (0, -p.shape[-1] % fp8.BLOCK_ROWS))
    tiles = tiles.view(*p.shape[:2], factors.shape[1], fp8.BLOCK_ROWS) * factors[:, None, :, None]
    largest = tiles.amax(-1, keepdim=True)
    order = (lambda t: t.flip(2)) if is_reversed else (lambda t: t)
    largest = order(order(largest).cummax(2).values)
    largest = largest.masked_fill(largest == 0, 1.0)
    weights = (fp8.round_weights(tiles / largest) * largest).flatten(2)[..., : p.shape[-1]]
    return weights @ v.values.double().repeat_interleave(len(p) // len(value), 0)


def torch_product(q: Tensor, q_factors: Tensor, k: Tensor, k_factors: Tensor) -> Tensor:
    """q k^T, float64 (rows, keys), of two heads' 8-bit numbers."""
    rows, keys = len(q), len(k)
    q, k = (torch.nn.functional.pad(t.view(torch.uint8), (0, 0, 0, 16 + -len(t) % 16)) for t in (q, k))
    one = torch.ones((), device=q.device)
    s = torch._scaled_mm(
        q.view(fp8.FP8), k.view(fp8.FP8).T, one, one, out_dtype=torch.float32, use_fast_accum=True
    )
    q_factors, k_factors = (t.double().repeat_interleave(fp8.BLOCK_ROWS) for t in (q_factors, k_factors))
    return s[:rows, :keys].double() * q_factors[:rows, None] * k_factors[:keys]


def sequences(problem: AttentionProblem, inputs: Inputs) -> list[tuple[Tensor, ...]]:
    """q, k and v (heads, rows, dim) of each sequence."""
    query, key, value = inputs[:3]
    if problem.is_packed:
        found = [(query[a:b], key[c:d], value[c:d]) for a, b, c, d in spans(problem, inputs)]
    else:
        found = list(zip(query, key, value, strict=True))
    return [tuple(t.transpose(0, 1) for t in tensors) for tensors in found]
