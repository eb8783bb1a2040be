"""What kernels do about lengths and page numbers that lead outside of a cache: `core.device_errors`.

A sequence of a wrong length has no keys, and a page that is none is not read. What is added to the sums of
exponentials is then NaN, and so are out and lse. `ragged.errors` is None where there is no cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.core.device_errors import LENGTH, PAGE

PAGE_FLAG, LENGTH_FLAG = tl.constexpr(PAGE), tl.constexpr(LENGTH)
BLOCK_PAGES = tl.constexpr(128)


@triton.jit
def cached_rows(b, exists, sizes, ragged):
    """(first key row, keys, whether the numbers say so rightly) of sequences b, scalar or vector.

    There are no keys where the length or the left padding is wrong.
    """
    k_start = b * 0
    end = b * 0 + sizes.seqlen_k
    fits = end >= 0
    if ragged.seqlens_k is not None:
        held = tl.load(ragged.seqlens_k + b, mask=exists, other=0)
        fits = (held >= 0) & (held <= sizes.seqlen_k)
        end = tl.where(fits, held, 0).to(tl.int32)
    if ragged.leftpad_k is not None:
        pad = tl.load(ragged.leftpad_k + b, mask=exists, other=0)
        fits = fits & (pad >= 0) & (pad <= end)
        k_start = tl.where(fits, pad, 0).to(tl.int32)
        end = tl.where(fits, end, 0)
    return k_start, end - k_start, fits


@triton.jit
def is_page(page, sizes):
    return (page >= 0) & (page < sizes.num_pages)


@triton.jit
def length_poison(b, sizes, ragged):
    """0, or NaN for a sequence of a wrong length, which is reported."""
    _, _, fits = cached_rows(b, b >= 0, sizes, ragged)
    if not fits:
        tl.store(ragged.errors + LENGTH_FLAG, 1)
    return tl.where(fits, 0.0, float("nan"))


@triton.jit
def page_poison(b, first_row, end_row, sizes, ragged, cfg: tl.constexpr):
    """0, or NaN if a page of rows [first_row, end_row) of sequence b is none, which is reported.

    After the rows were read: their page numbers are in the nearest cache then.
    """
    table = ragged.page_table + b.to(tl.int64) * sizes.stride_page_table
    end = tl.cdiv(end_row, cfg.PAGE_SIZE)
    wrong = tl.zeros((BLOCK_PAGES,), tl.int32)
    for n in range(first_row // cfg.PAGE_SIZE, end, BLOCK_PAGES):
        at = n + tl.arange(0, BLOCK_PAGES)
        page = tl.load(table + at, mask=at < end, other=0)
        wrong += ((at < end) & (is_page(page, sizes) == 0)).to(tl.int32)
    fits = tl.max(wrong, 0) == 0
    if not fits:
        tl.store(ragged.errors + PAGE_FLAG, 1)
    return tl.where(fits, 0.0, float("nan"))
