"""8-bit pages as contiguous caches of 16 or 32 bits, for kernels that multiply those.

One pass over the pages that hold tokens. Many queries share them, so that it costs little. A number is read
as an integer, as GPUs before compute capability 8.9 know no float8_e4m3fn. Its bits, seven places higher, are
those of a float16 that is 2^8 times as small.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

BLOCK_ROWS = 16  # of a page at a time
BLOCK_COLUMNS = 512  # of heads side by side


def dequantized(problem: AttentionProblem, inputs: Inputs) -> tuple[AttentionProblem, Inputs]:
    """The problem and inputs with a contiguous cache in the queries' dtype.

    A page whose number is none becomes NaN. Behind the pages of a sequence nothing is written.
    """
    pages, lengths, table = inputs.key, inputs.seqlens_k, inputs.page_table
    assert table is not None and lengths is not None
    rows = (*table.shape[:1], table.shape[1] * pages.shape[1], pages.shape[2])
    key, value = (pages.new_empty((*rows, t.shape[3]), dtype=problem.dtype) for t in inputs[1:3])
    as_integers = (t.view(torch.uint8) for t in inputs[1:3])
    scales = (None if t is None else t.contiguous() for t in (inputs.key_scale, inputs.value_scale))
    tensors = (*as_integers, *scales, table.contiguous(), lengths.contiguous())
    run(_launch, None, tensors, fresh=(key, value))
    problem = replace(problem, is_quantized=False, page_size=None)
    return problem, inputs._replace(
        key=key, value=value, page_table=None, key_scale=None, value_scale=None, seqlens_k=lengths
    )


def _launch(problem: None, tensors: Tensors) -> Launch:
    key, value, key_scale, value_scale, table, lengths, *fresh = tensors
    assert key is not None and value is not None and table is not None
    page_size, heads = key.shape[1:3]
    widths = [triton.next_power_of_2(t.shape[3]) for t in (key, value)]
    strides = (*key.stride()[:3], *value.stride()[:3])
    arguments = (
        *(key, value, key_scale, value_scale, table, lengths, *fresh),
        *(*strides, len(key), table.shape[1], page_size, heads, key.shape[3], value.shape[3]),
        *(min(BLOCK_ROWS, triton.next_power_of_2(page_size)), *widths, max(1, BLOCK_COLUMNS // max(widths))),
    )
    return Launch(dequantize_kernel, table.numel(), arguments, 4)


@triton.jit(do_not_specialize=["num_pages", "table_pages"])
def dequantize_kernel(
    key, value, key_scale, value_scale, table, lengths, new_key, new_value,
    key_page, key_row, key_head, value_page, value_row, value_head, num_pages, table_pages, page_size, heads,
    DIM: tl.constexpr, DIM_V: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """One page of a sequence. Strides are in numbers."""
    entry = tl.program_id(0)
    first = entry % table_pages * page_size
    if first < tl.load(lengths + entry // table_pages):
        page = tl.load(table + entry).to(tl.int64)
        is_page = (page >= 0) & (page < num_pages)
        page = tl.where(is_page, page, 0)
        start = entry.to(tl.int64) * page_size * heads
        for row in range(0, page_size, ROWS):
            _write(
                key + page * key_page, key_row, key_head, key_scale + page * heads, new_key + start * DIM,
                row, page_size, heads, is_page, DIM, ROWS, WIDTH, HEADS,
            )  # fmt: skip
            _write(
                value + page * value_page, value_row, value_head, value_scale + page * heads,
                new_value + start * DIM_V, row, page_size, heads, is_page, DIM_V, ROWS, WIDTH_V, HEADS,
            )  # fmt: skip


@triton.jit
def _write(
    source, stride_row, stride_head, scale, target, first, page_size, heads, is_page,
    DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rows of a page, from `first` on, of all heads."""
    row = first + tl.arange(0, ROWS)[:, None, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    for block in range(0, heads, HEADS):
        head = block + tl.arange(0, HEADS)[None, :, None]
        mask = (row < page_size) & (head < heads) & (column < DIM)
        place = row * stride_row + head * stride_head + column
        bits = tl.load(source + place, mask=mask, other=0).to(tl.int32)
        size = bits & 127
        x = (((bits & 128) << 8) | (size << 7)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        x = x * 256.0 * tl.load(scale + head, mask=head < heads, other=0.0)
        x = tl.where(is_page & (size < 127), x, float("nan"))
        tl.store(target + (row * heads + head) * DIM + column, x.to(target.dtype.element_ty), mask=mask)
