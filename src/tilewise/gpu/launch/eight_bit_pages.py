"""8-bit pages of caches: new tokens into them, and out of them for kernels that multiply 16 or 32 bits.

Numbers are integers here, as GPUs before compute capability 8.9 know no float8_e4m3fn: its bits, seven places
higher, are those of a float16 that is 2^8 times as small. Writing is one launch for keys and values. Reading
is one pass over the pages that hold tokens: many queries share it, so that it costs little.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.core.device_errors import PAGE, error_flags
from tilewise.core.fp8 import LARGEST, LEAST_EXPONENT
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.signature import rows_dense
from tilewise.gpu.launch.entry import entry
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

BLOCK_ROWS = 16  # of a page at a time
BLOCK_COLUMNS = 512  # of heads side by side
PAGE_FLAG = tl.constexpr(PAGE)
LARGEST_NUMBER, LEAST_POWER = tl.constexpr(LARGEST), tl.constexpr(LEAST_EXPONENT)


def dequantized(problem: AttentionProblem, inputs: Inputs) -> tuple[AttentionProblem, Inputs]:
    """The problem and inputs with a contiguous cache in the queries' dtype.

    A page whose number is none becomes NaN, which is reported; zeros if no query sees it. Nothing is written
    before and behind the pages of a sequence, or of one whose length is wrong.
    """
    pages, lengths, table = inputs.key, inputs.seqlens_k, inputs.page_table
    assert table is not None and lengths is not None
    rows = (*table.shape[:1], table.shape[1] * pages.shape[1], pages.shape[2])
    key, value = (pages.new_empty((*rows, t.shape[3]), dtype=problem.dtype) for t in inputs[1:3])
    as_integers = (t.view(torch.uint8) for t in inputs[1:3])
    scales = (None if t is None else t.contiguous() for t in (inputs.key_scale, inputs.value_scale))
    small = (table, lengths, inputs.leftpad_k, inputs.cu_seqlens_q)
    tensors = (*as_integers, *scales, *(None if t is None else t.contiguous() for t in small))
    run(_launch, problem, tensors, fresh=(key, value))
    inputs = inputs._replace(key=key, value=value, page_table=None, key_scale=None, value_scale=None)
    return replace(problem, is_quantized=False, page_size=None), inputs


def _launch(problem: AttentionProblem, tensors: Tensors) -> Launch:
    key, value, key_scale, value_scale, table, *small, new_key, new_value = tensors
    assert key is not None and value is not None and table is not None
    page_size, heads = key.shape[1:3]
    widths = [triton.next_power_of_2(t.shape[3]) for t in (key, value)]
    left = problem.seqlen_k if problem.window_left is None else min(problem.window_left, problem.seqlen_k)
    arguments = (
        *((key, *key.stride()[:3], key_scale), (value, *value.stride()[:3], value_scale)),
        *(table, *small, error_flags(key.device), new_key, new_value, len(key), table.shape[1]),
        *(problem.seqlen_q, left, page_size, heads, key.shape[3], value.shape[3]),
        *(min(BLOCK_ROWS, triton.next_power_of_2(page_size)), *widths, max(1, BLOCK_COLUMNS // max(widths))),
    )
    return Launch(dequantize_kernel, table.numel(), arguments, 4)


@entry(triton.jit)
def dequantize_kernel(
    keys, values, table, lengths, leftpads, cu_seqlens_q, errors, new_key, new_value,
    num_pages: int, table_pages: int, seqlen_q: int, window_left: int, page_size, heads,
    DIM: tl.constexpr, DIM_V: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """One page of a sequence. Keys and values: pages, strides of a page, a row and a head, and scales."""
    key, key_page, key_row, key_head, key_scale = keys
    value, value_page, value_row, value_head, value_scale = values
    place = tl.program_id(0)
    b = place // table_pages
    first = place % table_pages * page_size
    held, pad = tl.load(lengths + b), 0
    if leftpads is not None:
        pad = tl.load(leftpads + b)
    queries = seqlen_q
    if cu_seqlens_q is not None:
        queries = (tl.load(cu_seqlens_q + b + 1) - tl.load(cu_seqlens_q + b)).to(tl.int32)
    end = first + page_size
    if (first < held) & (held <= table_pages * page_size) & (end > pad) & (queries > 0):
        page = tl.load(table + place).to(tl.int64)
        is_page = (page >= 0) & (page < num_pages)
        is_seen = end > held - queries - window_left
        if (is_page == 0) & is_seen:
            tl.store(errors + PAGE_FLAG, 1)
        otherwise = tl.where(is_seen, float("nan"), 0.0)
        page = tl.where(is_page, page, 0)
        start = place.to(tl.int64) * page_size * heads
        for row in range(0, page_size, ROWS):
            _write(
                key + page * key_page, key_row, key_head, key_scale + page * heads, new_key + start * DIM,
                row, page_size, heads, is_page, otherwise, DIM, ROWS, WIDTH, HEADS,
            )  # fmt: skip
            _write(
                value + page * value_page, value_row, value_head, value_scale + page * heads,
                new_value + start * DIM_V, row, page_size, heads, is_page, otherwise,
                DIM_V, ROWS, WIDTH_V, HEADS,
            )  # fmt: skip


@triton.jit
def _write(
    source, stride_row, stride_head, scale, target, first, page_size, heads, is_page, otherwise,
    DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rows of a page, from `first` on, of all heads; `otherwise` where that is none.

    A page may be a whole sequence: every product in 64 bits.
    """
    row = (first + tl.arange(0, ROWS)[:, None, None]).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, None, :]
    for block in range(0, heads, HEADS):
        head = (block + tl.arange(0, HEADS)[None, :, None]).to(tl.int64)
        mask = (row < page_size) & (head < heads) & (column < DIM)
        place = row * stride_row + head * stride_head + column
        bits = tl.load(source + place, mask=mask, other=0).to(tl.int32)
        x = _number(bits) * tl.load(scale + head, mask=head < heads, other=0.0)
        x = tl.where(is_page, x, otherwise)
        tl.store(target + (row * heads + head) * DIM + column, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _number(bits):
    """The float32 number of 8 bits."""
    size = bits & 127
    x = (((bits & 128) << 8) | (size << 7)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(size < 127, x, float("nan"))


# ---- new tokens into pages


def write_pages(
    storages: tuple[Tensor, Tensor | None],
    scales: tuple[Tensor, Tensor | None],
    new: tuple[Tensor, Tensor | None],
    places: tuple[Tensor, Tensor, Tensor],
) -> None:
    """`cache.quantized_pages.write_quantized` of keys and values, bit for bit but for the sign of a NaN.

    Args:
        storages: (pages, page_size, heads, dim) float8_e4m3fn; values None if they lie in the keys.
        scales: (pages, heads) float32.
        new: (batch, new_tokens, heads, dim), or packed; rows of padding are not read.
        places: `slots`, `written` and `kept` of a `PagedBatch`.
    """
    if not len(places[1]):
        return
    rows = (None if t is None else rows_dense(t.flatten(0, -3)) for t in new)
    as_integers = (None if t is None else t.view(torch.uint8) for t in storages)
    run(_write_launch, None, (*as_integers, *scales, *rows, *places))


def _write_launch(problem: None, tensors: Tensors) -> Launch:
    key, value, key_scale, value_scale, new_key, new_value, slots, written, kept = tensors
    assert key is not None and new_key is not None and slots is not None and written is not None
    page_size, heads, dim = key.shape[1:]
    dim_v = 0 if value is None else value.shape[3]
    widths = [triton.next_power_of_2(d) for d in (dim, dim_v or 1)]
    new = ((t, *((0, 0) if t is None else t.stride()[:2])) for t in (new_key, new_value))
    arguments = (
        *((key, key_scale), (value, value_scale), *new, slots, written, kept),
        *(len(slots), page_size, heads, dim, dim_v),
        *(max(1, min(4096 // max(widths), triton.next_power_of_2(page_size))), *widths, 1024),
    )
    return Launch(write_kernel, len(written), arguments, 4, programs_y=heads)


@entry(triton.jit)
def write_kernel(
    keys, values, new_keys, new_values, slots, written, kept, tokens: int, page_size, heads,
    DIM: tl.constexpr, DIM_V: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One head of a written page.

    Keys and values: pages, and their scales; new ones: with strides of a token and a head.
    """
    key, key_scale = keys
    value, value_scale = values
    new_key, key_token, key_head = new_keys
    new_value, value_token, value_head = new_values
    head = tl.program_id(1).to(tl.int64)
    page = tl.load(written + tl.program_id(0)).to(tl.int64)
    held = tl.load(kept + tl.program_id(0))
    first = page * page_size + held  # the slot of the page's first new token
    token = tokens
    for n in range(0, tokens, TOKENS):
        index = n + tl.arange(0, TOKENS)
        slot = tl.load(slots + index, mask=index < tokens, other=-1)
        token = tl.minimum(token, tl.min(tl.where(slot == first, index, tokens), 0))
    place = (page * page_size * heads + head) * DIM
    _quantize(
        key + place, key_scale + page * heads + head, new_key + head * key_head, key_token, slots,
        page * page_size, token, tokens, held, page_size, heads, DIM, ROWS, WIDTH,
    )  # fmt: skip
    if DIM_V > 0:
        place = (page * page_size * heads + head) * DIM_V
        _quantize(
            value + place, value_scale + page * heads + head, new_value + head * value_head, value_token,
            slots, page * page_size, token, tokens, held, page_size, heads, DIM_V, ROWS, WIDTH_V,
        )  # fmt: skip


@triton.jit
def _quantize(
    page, scale, new, stride_token, slots, first_slot, token, tokens, held, page_size, heads,
    DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One head of a page anew, with the smallest power of two that holds all its tokens."""
    old = tl.load(scale)
    largest = 0.0
    for row in range(0, page_size, ROWS):
        x, _ = _content(
            page, old, new, stride_token, slots, first_slot, token, tokens, held, row, page_size, heads,
            DIM, ROWS, WIDTH,
        )  # fmt: skip
        size = tl.where(x == x, tl.abs(x), 0.0)
        largest = tl.maximum(largest, tl.max(tl.max(size, 1), 0))
    bits = tl.div_rn(largest, LARGEST_NUMBER).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    exponent = tl.where(bits == 0, 0, tl.maximum(exponent, LEAST_POWER))
    power = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    unchanged = tl.where(power == old, held, 0)  # rows
    for row in range(0, page_size, ROWS):
        x, place = _content(
            page, old, new, stride_token, slots, first_slot, token, tokens, held, row, page_size, heads,
            DIM, ROWS, WIDTH,
        )  # fmt: skip
        tl.debug_barrier()  # all threads have read what is written here
        rows, columns = row + tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
        changes = (rows >= unchanged) & (rows < page_size) & (columns < DIM)
        tl.store(page + place, _eight_bits(x * inverse), mask=changes)
    tl.store(scale, power)


@triton.jit
def _content(
    page, old, new, stride_token, slots, first_slot, token, tokens, held, row, page_size, heads,
    DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(numbers that rows are to hold, where they lie): of earlier tokens, of new ones, and 0 behind them."""
    rows, columns = row + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    index = token + rows - held
    can_be_new = (rows >= held) & (rows < page_size) & (index < tokens)
    is_new = tl.load(slots + index, mask=can_be_new, other=-1) == first_slot + rows
    place = rows[:, None] * heads * DIM + columns
    is_old = (rows < held)[:, None] & (columns < DIM)
    bits = tl.load(page + place, mask=is_old, other=0).to(tl.int32)
    at = index.to(tl.int64)[:, None] * stride_token + columns
    x = tl.load(new + at, mask=is_new[:, None] & (columns < DIM), other=0.0).to(tl.float32)
    x = tl.where(is_old, _number(bits) * old, x)
    return tl.where(tl.abs(x) == float("inf"), float("nan"), x), place


@triton.jit
def _eight_bits(x):
    """float8_e4m3fn of float32 numbers up to 448 or NaN, rounded to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - (150 << 23)  # below 2^-6
    found = tl.where(size >= (121 << 23), normal, small)
    found = tl.where(x == x, found, 127)
    return (found | ((bits >> 24) & 128)).to(tl.uint8)
