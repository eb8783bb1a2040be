"""The k largest of each query's candidates, in order: four threads a query, a list each."""

from tilewise.gpu.hopper.common.compat import float_of, gl, gluon
from tilewise.gpu.hopper.common.softmax import LOG2_E, exp2

NO_KEY = gl.constexpr((1 << 31) - 1)


@gluon.jit(do_not_specialize=["num_rows", "unit_log2e"])
def select_largest_kernel(
    list_ptr, held_ptr, lse_ptr, residual_ptr, weight_ptr, key_ptr, num_rows, unit_log2e,
    COUNT: gl.constexpr, LIST_SIZE: gl.constexpr,
):  # fmt: skip
    """Of 32 queries, in `largest`'s lists: weights and keys, of equal ones the lower key first.

    `unit_log2e`: what a candidate's score counts in units of log2. Of queries whose lists did not hold all,
    what comes out is void.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, LIST_SIZE], [8, 4], [4, 1], [1, 0])
    row = gl.cast(gl.program_id(0), gl.int64) * 32 + gl.arange(0, 32, gl.SliceLayout(1, layout))
    slot = gl.arange(0, 4 * LIST_SIZE, gl.SliceLayout(0, layout))[None, :]
    exists = row < num_rows
    held = gl.load(held_ptr + row[:, None] * 4 + slot // LIST_SIZE, mask=exists[:, None], other=0)
    is_left = slot % LIST_SIZE < held
    entry = gl.load(list_ptr + row[:, None] * (4 * LIST_SIZE) + slot, mask=is_left, other=0)
    score = gl.where(is_left, float_of(entry.to(gl.int32)), float("-inf"))
    key = (entry >> 32).to(gl.int32)
    lse = gl.load(lse_ptr + row, mask=exists, other=0.0)
    if residual_ptr is not None:
        lse += gl.load(residual_ptr + row, mask=exists, other=0.0)
    for n in gl.static_range(COUNT):
        largest = gl.max(score, 1)
        first = gl.min(gl.where(score == largest[:, None], key, NO_KEY), 1)
        is_none = largest == float("-inf")
        weight = exp2(largest * unit_log2e - lse * LOG2_E)
        gl.store(weight_ptr + row * COUNT + n, gl.where(is_none, 0.0, weight), mask=exists)
        gl.store(key_ptr + row * COUNT + n, gl.where(is_none, -1, first).to(gl.int64), mask=exists)
        score = gl.where(key == first[:, None], float("-inf"), score)
