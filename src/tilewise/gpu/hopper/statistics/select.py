"""The k largest of each query's candidates, in order. Plain Triton, bound by memory."""

import triton
import triton.language as tl

from tilewise.gpu.launch.exact import shift_and_low

BEYOND = tl.constexpr((1 << 31) - 1)  # a key that there is none of
LEAST = tl.constexpr(-(1 << 63))  # below every candidate


@triton.jit(do_not_specialize=["num_rows", "unit", "unit_log2e"])
def select_largest_kernel(
    list_ptr, held_ptr, lse_ptr, residual_ptr, weight_ptr, key_ptr, num_rows, unit, unit_log2e,
    BLOCK_M: tl.constexpr, COUNT: tl.constexpr, LIST_SIZE: tl.constexpr,
):  # fmt: skip
    """Of BLOCK_M queries, in `largest`'s lists: weights and keys, of equal ones the lower key first.

    `unit`: what a candidate's score counts. Of queries whose lists did not hold all, what comes out is void.
    """
    SLOTS: tl.constexpr = 4 * LIST_SIZE
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < num_rows
    slot = tl.arange(0, SLOTS)[None, :]
    held = tl.load(held_ptr + row[:, None] * 4 + slot // LIST_SIZE, mask=exists[:, None], other=0)
    is_left = slot % LIST_SIZE < held
    entry = tl.load(list_ptr + row[:, None] * SLOTS + slot, mask=is_left, other=0)
    bits = (entry & 0xFFFFFFFF).to(tl.int32)
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, in the order of the scores
    after = BEYOND - (entry >> 32)  # the lower the key, the larger
    ranked = tl.where(is_left, (ascending.to(tl.int64) << 32) | after, LEAST)
    lse = tl.load(lse_ptr + row, mask=exists, other=0.0)
    residual = tl.zeros((BLOCK_M,), tl.float32)
    if residual_ptr is not None:
        residual += tl.load(residual_ptr + row, mask=exists, other=0.0)
    shift, low = shift_and_low(lse, residual, unit)
    for n in tl.static_range(COUNT):
        first = tl.max(ranked, 1)
        ranked = tl.where(ranked == first[:, None], LEAST, ranked)
        ascending = (first >> 32).to(tl.int32)
        score = (ascending ^ ((ascending >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        weight = tl.exp2((score - shift) * unit_log2e - low)
        is_none = first == LEAST
        tl.store(weight_ptr + row * COUNT + n, tl.where(is_none, 0.0, weight), mask=exists)
        key = BEYOND - (first & 0xFFFFFFFF)
        tl.store(key_ptr + row * COUNT + n, tl.where(is_none, -1, key), mask=exists)
