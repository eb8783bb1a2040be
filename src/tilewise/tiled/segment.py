"""A segment of a problem, which is cut into tiles, and what its 8-bit numbers stand for."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilewise.core import fp8
from tilewise.core.fp8 import BLOCK_ROWS
from tilewise.core.mask import Visibility
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.quantized import in_key_order


class Segment(NamedTuple):
    """Batch entries that share one visibility: a chunk of a dense batch, or one ragged sequence."""

    sequences: range  # batch entries
    rows_q: slice  # rows of a packed query; all rows otherwise
    rows_k: slice
    visibility: Visibility


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
