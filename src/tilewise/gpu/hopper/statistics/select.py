"""The k largest of each query's candidates, in order: four threads a query, a list each."""

from tilewise.gpu.hopper.common.compat import float_of, gl, gluon, start_next_kernel, wait_for_previous_kernel
from tilewise.gpu.hopper.common.layouts import along
from tilewise.gpu.hopper.common.softmax import LOG2_E, exp2
from tilewise.gpu.launch.entry import entry

NO_KEY = gl.constexpr((1 << 31) - 1)
FEW = gl.constexpr(8)  # candidates in a list


@entry(gluon.jit)
def select_largest_kernel(
    list_ptr, held_ptr, lse_ptr, residual_ptr, weight_ptr, key_ptr, num_rows: int, unit_log2e,
    COUNT: gl.constexpr, LIST_SIZE: gl.constexpr,
):  # fmt: skip
    """Of 32 queries, in `largest`'s lists: weights and keys, of equal ones the lower key first.

    `unit_log2e`: what a candidate's score counts in units of log2. Of queries whose lists did not hold all,
    what comes out is void.
    """
    wait_for_previous_kernel()
    start_next_kernel()
    by_list: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    row = gl.cast(gl.program_id(0), gl.int64) * 32 + gl.arange(0, 32, gl.SliceLayout(1, by_list))
    of_row = gl.arange(0, 4, gl.SliceLayout(0, by_list))[None, :]
    held = gl.load(held_ptr + row[:, None] * 4 + of_row, mask=(row < num_rows)[:, None], other=0)
    if gl.max(gl.max(held, 1), 0) <= FEW:
        select(
            list_ptr, held, lse_ptr, residual_ptr, weight_ptr, key_ptr, num_rows, unit_log2e,
            COUNT, LIST_SIZE, FEW,
        )  # fmt: skip
    else:
        select(
            list_ptr, held, lse_ptr, residual_ptr, weight_ptr, key_ptr, num_rows, unit_log2e,
            COUNT, LIST_SIZE, LIST_SIZE,
        )  # fmt: skip


@gluon.jit
def select(
    list_ptr, held, lse_ptr, residual_ptr, weight_ptr, key_ptr, num_rows, unit_log2e,
    COUNT: gl.constexpr, LIST_SIZE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """The same from lists [32, 4] of which none holds more than SLOTS."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, SLOTS], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    row = gl.cast(gl.program_id(0), gl.int64) * 32 + gl.arange(0, 32, along(0, layout, 3))
    of_row = gl.arange(0, 4, along(1, layout, 3))[None, :, None]
    slot = gl.arange(0, SLOTS, along(2, layout, 3))[None, None, :]
    held = gl.convert_layout(held, gl.SliceLayout(2, layout), assert_trivial=True)
    is_left = slot < held[:, :, None]
    places = (row[:, None, None] * 4 + of_row) * LIST_SIZE + slot
    entry = gl.load(list_ptr + places, mask=is_left, other=0)
    score = gl.where(is_left, float_of(entry.to(gl.int32)), float("-inf"))
    key = (entry >> 32).to(gl.int32)
    exists = row < num_rows
    lse = gl.load(lse_ptr + row, mask=exists, other=0.0)
    if residual_ptr is not None:
        lse += gl.load(residual_ptr + row, mask=exists, other=0.0)
    for n in gl.static_range(COUNT):
        largest = gl.max(gl.max(score, 2), 1)
        first = gl.min(gl.min(gl.where(score == largest[:, None, None], key, NO_KEY), 2), 1)
        is_none = largest == float("-inf")
        weight = exp2(largest * unit_log2e - lse * LOG2_E)
        gl.store(weight_ptr + row * COUNT + n, gl.where(is_none, 0.0, weight), mask=exists)
        gl.store(key_ptr + row * COUNT + n, gl.where(is_none, -1, first).to(gl.int64), mask=exists)
        score = gl.where(key == first[:, None, None], float("-inf"), score)
