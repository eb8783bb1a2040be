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

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tilewise.core import fp8
from tilewise.core.fp8 import BLOCK_ROWS
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.quantized import in_key_order

if TYPE_CHECKING:
    from tilewise.tiled.tiles import QueryTile, Segment


class Operands(NamedTuple):
    """What 8-bit numbers of a segment stand for, float32; those of the values without their scales."""

    query: Tensor  # (batch, heads, seqlen_q, dim), rotated and over its size
    key: Tensor  # (batch, KV heads, seqlen_k, dim), rotated
    value: Tensor  # (batch, KV heads, seqlen_k, head_dim_v)
    value_scale: Tensor  # (batch, KV heads, blocks)
    block_rows: int  # that share a scale of the values


def tile_rows(problem: AttentionProblem) -> int:
    """Keys of a tile: those that share a scale."""
    return min(BLOCK_ROWS, problem.page_size or BLOCK_ROWS) if problem.is_quantized else BLOCK_ROWS


def operands(precision: str, query: Tensor, key: Tensor, value: Tensor) -> Operands:
    """Of tensors (batch, heads, rows, dim), rounded here."""
    v = fp8.round_rows(value)
    return Operands(*_rotated(precision, query, key), v.values.float(), v.factors, BLOCK_ROWS)


def _rotated(precision: str, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    dtype = fp8.OPERANDS[precision]
    q, k = (fp8.round_rows(fp8.rotate(x), dtype).dequantize() for x in (query, key))
    return q / q.shape[-1], k


def operands_of_pages(
    precision: str, query: Tensor, key: Tensor, value: Tensor, scale: Tensor, page_size: int
) -> Operands:
    """Of 8-bit pages, as they stand: their keys are not rotated, so neither is the query.

    Keys that are to be integers are rotated and rounded once more.

    Args:
        key: (1, KV heads, seqlen_k, dim), times its scales.
        value: (1, KV heads, seqlen_k, head_dim_v), 8-bit.
        scale: (pages, KV heads) of the values.
    """
    if precision == "int8":
        q, key = _rotated(precision, query, key)
    else:
        q = fp8.round_rows(query).dequantize()
    return Operands(q, key, value.float(), scale.T[None].float(), page_size)


def operands_in_blocks(problem: AttentionProblem, inputs: Inputs, segment: Segment) -> Operands:
    """Of what `core.quantized` has rounded."""
    lengths = segment.visibility.seqlen_q, segment.visibility.seqlen_k
    starts = segment.rows_q.start, segment.rows_k.start
    parts = []
    for name, rows, start in zip(("query", "key", "value"), (*lengths, lengths[1]), (*starts, starts[1])):
        blocks, scale = getattr(inputs, f"{name}_blocks"), getattr(inputs, f"{name}_scale")
        count, sequences = -(-rows // BLOCK_ROWS), segment.sequences
        first = start // BLOCK_ROWS + sequences.start if problem.is_packed else sequences.start * count
        blocks = blocks[:, first : first + count * len(sequences)]
        scale = scale[:, first : first + count * len(sequences)]
        if name == "value":
            blocks = in_key_order(blocks)
        numbers = blocks.float() * (1 if name == "value" else scale[..., None, None])
        numbers = numbers.unflatten(1, (len(sequences), count)).flatten(2, 3)[:, :, :rows].transpose(0, 1)
        parts.append((numbers, scale.unflatten(1, (len(sequences), count)).transpose(0, 1)))
    (q, _), (k, _), (v, v_scale) = parts
    return Operands(q, k, v[..., : problem.head_dim_v], v_scale, BLOCK_ROWS)


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
