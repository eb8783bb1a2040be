"""What the 8-bit kernels of Hopper are compared with: `tilewise.fp8`, put into their slots, and float64."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tilewise import fp8, reference
from tilewise.hopper.fp8_launch import Rounded
from tilewise.problem import AttentionProblem, Inputs, spans


def stored_keys() -> Tensor:
    """The key of each position of a slot of V^T: column 8c + 2t + b becomes column 4t + 2c + b."""
    keys = torch.arange(fp8.BLOCK_ROWS)
    first, c, t, b = keys // 16 * 16, keys % 16 // 8, keys % 8 // 2, keys % 2
    return torch.empty_like(keys).index_put((first + 4 * t + 2 * c + b,), keys)


def in_slots(problem: AttentionProblem, t: Tensor, cu_seqlens: Tensor | None, is_value: bool) -> Rounded:
    """What the quantizing kernels make of a tensor on the CPU."""
    heads, dim = t.shape[-2:]
    if cu_seqlens is None:
        per_sequence = -(-t.shape[1] // fp8.BLOCK_ROWS)
        sequences = [(t[b], b * per_sequence) for b in range(len(t))]
        slots = len(t) * per_sequence
    else:
        starts = cu_seqlens.tolist()
        sequences = [(t[i:j], i // fp8.BLOCK_ROWS + b) for b, (i, j) in enumerate(itertools.pairwise(starts))]
        slots = len(t) // fp8.BLOCK_ROWS + problem.batch
    width = fp8.padded_dim(dim)
    values = torch.zeros(heads, slots, fp8.BLOCK_ROWS, width).to(fp8.FP8)
    factors = torch.ones(heads, slots)
    for x, slot in sequences:
        x = x.transpose(0, 1)
        rounded = fp8.quantize(torch.nn.functional.pad(x, (0, width - dim)) if is_value else fp8.rotate(x))
        count = rounded.factors.shape[-1]
        rows = torch.zeros(heads, count * fp8.BLOCK_ROWS, width)
        rows[:, : x.shape[1]] = rounded.values.float()
        values[:, slot : slot + count] = rows.view(heads, count, fp8.BLOCK_ROWS, width).to(fp8.FP8)
        factors[:, slot : slot + count] = rounded.factors
    if is_value:
        values = values.view(torch.uint8)[:, :, stored_keys()].transpose(2, 3).contiguous().view(fp8.FP8)
    return Rounded(values, factors)


def exact_of_rounded(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """float64 attention of the numbers that the 8-bit ones stand for."""
    parts: list[tuple[Tensor, ...]] = []
    query, key, value = inputs[:3]
    if problem.is_packed:
        sequences = [(query[a:b], key[c:d], value[c:d]) for a, b, c, d in spans(problem, inputs)]
    else:
        sequences = list(zip(query, key, value, strict=True))
    for tensors in sequences:
        rounded = fp8.rounded_operands(*(t.transpose(0, 1) for t in tensors))
        parts.append(tuple(t.transpose(0, 1).double() for t in rounded))
    join = torch.cat if problem.is_packed else torch.stack
    q, k, v = (join(tensors) for tensors in zip(*parts, strict=True))
    visibility = problem.visibility()
    extras = {name: getattr(inputs, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "sinks")}
    extras = {name: t for name, t in extras.items() if t is not None}
    window = (visibility.left, visibility.right)
    return reference.attention(q, k, v, scale=problem.scale, window=window, softcap=problem.softcap, **extras)
