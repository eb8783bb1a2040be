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


def lse_of_torch_products(problem: AttentionProblem, inputs: Inputs) -> Tensor:
    """lse of the same 8-bit numbers, their products by PyTorch on the GPU and all else in float64.

    Tensor cores keep about 14 bits of a sum of 8-bit products, whoever asks them: this is the error of that.
    """
    visibility = problem.visibility()
    window = (visibility.left, visibility.right)
    group = problem.num_heads // problem.num_kv_heads
    parts = []
    for query, key, _ in sequences(problem, inputs):
        q, k = fp8.round_rows(fp8.rotate(query)), fp8.round_rows(fp8.rotate(key))
        s = torch.stack(
            [
                torch_product(q.values[h], q.factors[h], k.values[h // group], k.factors[h // group])
                for h in range(problem.num_heads)
            ]
        )
        s = s * (problem.scale / q.values.shape[-1])
        if problem.softcap:
            s = problem.softcap * torch.tanh(s / problem.softcap)
        q, k = (t.new_zeros(1, t.shape[1], problem.num_heads, 1) for t in (query, key))
        parts.append(reference.attention(q, k, k, bias=s[None], window=window, sinks=inputs.sinks)[1])
    return torch.cat(parts, 2)[0] if problem.is_packed else torch.cat(parts)


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
