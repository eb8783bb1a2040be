"""8-bit attention tile by tile, as the kernel of `gpu.hopper.fp8` computes it; formulas are in `core.fp8`.

For each tile of 128 queries, which share a scale:

    m, l, acc = -inf, 0, 0
    for each tile of 128 keys, of scale t for its values v8:
        s     = q8 k8^T times both scales (+ softcap, mask, ...) + log t      [block_q, block_k]
        m_new = max(m, rowmax(s)),  c = exp(m - m_new),  p = exp(s - m_new)
        l     = c * l + rowsum(p) / t
        acc   = c * acc + e4m3(256 p) v8 / 256             (each tile's product is a sum of its own)
    out = acc / l,  lse = m + log(l)

t joins the exponent, so that acc is one sum over tiles of different scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.core import fp8
from tilewise.tiled.tiles import QueryTile


def softmax_sums(rows: QueryTile) -> tuple[Tensor, Tensor, Tensor]:
    """m, l [n, group * block_q, 1] and acc [n, group * block_q, head_dim_v] of a query tile."""
    m = rows.q.new_full((*rows.q.shape[:2], 1), float("-inf"))
    l, acc = torch.zeros_like(m), rows.q.new_zeros((*rows.q.shape[:2], rows.problem.head_dim_v))
    key_tiles = list(rows.key_tiles())
    if rows.visibility.left is not None:
        key_tiles.reverse()  # the kernel's order
    for j0, j1 in key_tiles:
        v, scale, keep = rows.tiles.value(j0, j1), rows.tiles.value_scale(j0), rows.keep(j0, j1)
        s = rows.scores(j0, j1).s + scale.log()
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        m_finite = m_new.masked_fill(m_new == float("-inf"), 0.0)  # exp(-inf - -inf) would be NaN
        correction, p = torch.exp(m - m_finite), s.sub_(m_finite).exp_()
        l = l * correction + p.sum(-1, keepdim=True) / scale
        weights = fp8.round_weights(p)
        acc = acc * correction + torch.bmm(weights if keep is None else weights * keep, v)
        m = m_new
    if rows.inputs.sinks is None:
        return m, l, acc
    sink = rows.sinks()
    m_new = torch.maximum(m, sink)
    m_finite = m_new.masked_fill(m_new == float("-inf"), 0.0)
    correction = torch.exp(m - m_finite)
    return m_new, l * correction + torch.exp(sink - m_finite), acc * correction
