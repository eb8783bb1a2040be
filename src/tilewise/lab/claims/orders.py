"""FlashAttention's first and second order of work against each other: the same tiles, by PyTorch operations.

No kernel of the first order exists here. Written with the same operations, the orders differ in what they
rescale and in what they write and read again.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from tilewise.lab.bench.timing import stopwatch
from tilewise.lab.claims.claim import FA2, Measured, Setting, claim

BLOCK = 128
ROUNDS = 7


def keys_outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention's order: each tile of keys meets all queries, whose O, m and l lie in memory.

    Args:
        q, k, v: (heads, seqlen, dim).
    """
    out = torch.zeros_like(q)
    m, l = q.new_full((*q.shape[:2], 1), float("-inf")), q.new_zeros((*q.shape[:2], 1))
    scale = q.shape[-1] ** -0.5
    for keys, values in zip(k.split(BLOCK, 1), v.split(BLOCK, 1)):
        tiles = (x.split(BLOCK, 1) for x in (q, out, m, l))
        for queries, o, m_tile, l_tile in zip(*tiles):  # views: what is written stays
            s = queries @ keys.mT * scale
            m_new = torch.maximum(m_tile, s.amax(-1, keepdim=True))
            p, before = torch.exp(s - m_new), l_tile * torch.exp(m_tile - m_new)
            l_new = before + p.sum(-1, keepdim=True)
            o.copy_((before * o + p @ values) / l_new)
            m_tile.copy_(m_new)
            l_tile.copy_(l_new)
    return out


def queries_outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention-2's order: each tile of queries meets all keys; O is divided once, at the end."""
    found, scale = [], q.shape[-1] ** -0.5
    for queries in q.split(BLOCK, 1):
        o = torch.zeros_like(queries)
        m, l = (queries.new_full((*queries.shape[:2], 1), start) for start in (float("-inf"), 0.0))
        for keys, values in zip(k.split(BLOCK, 1), v.split(BLOCK, 1)):
            s = queries @ keys.mT * scale
            m_new = torch.maximum(m, s.amax(-1, keepdim=True))
            p, alpha = torch.exp(s - m_new), torch.exp(m - m_new)
            l = l * alpha + p.sum(-1, keepdim=True)
            o, m = o * alpha + p @ values, m_new
        found.append(o / l)
    return torch.cat(found, 1)


@claim(
    "fa2-over-fa1", "FlashAttention-2 is 2 times faster than FlashAttention.", FA2, 2, "×",
    why="The orders alone differ by less. The rest is that FlashAttention-2 divides a head's queries among "
    "multiprocessors and warps, which both orders leave to PyTorch here.",
)  # fmt: skip
def fa2_over_fa1(setting: Setting) -> Measured:
    heads, seqlen, dim = (96, 4096, 64) if setting.is_gpu else (12, 2048, 64)
    q, k, v = (torch.randn(heads, seqlen, dim, device=setting.device) for _ in range(3))
    clock = stopwatch(setting.device)
    calls = [lambda order=order: order(q, k, v) for order in (keys_outside, queries_outside)]  # type: ignore[misc]
    for call in calls:
        clock.warm_up(call)
    taken = [[statistics.median(clock.sample(call, 1)) for call in calls] for _ in range(ROUNDS)]
    return Measured(
        statistics.median(first / second for first, second in taken),
        f"forward in the two orders, in PyTorch operations on tiles of {BLOCK} × {BLOCK}, {seqlen:,} tokens, "
        f"{heads} heads of {dim}, float32",
    )
