"""What kernels do about lengths and page numbers that lead outside of a cache: `core.device_errors`.

A sequence of a wrong length or left padding has no keys. In place of a page that is none, page 0 is read, and
the sum of exponentials starts as NaN, with which out and lse become NaN. The role that sums reads the page
numbers once more, ahead of its loop, while the first keys are under way.
"""

from tilewise.core.device_errors import LENGTH, PAGE
from tilewise.gpu.hopper.common.compat import gl, gluon, unhoisted
from tilewise.gpu.hopper.common.ranges import tile_origin

PAGE_FLAG, LENGTH_FLAG = gl.constexpr(PAGE), gl.constexpr(LENGTH)
WRONG_START = gl.constexpr(1 << 30)  # of keys: says that a length or left padding is wrong


@gluon.jit
def own_keys(held, pad, most, cfg: gl.constexpr):
    """(left padding, length without it, whether both are right) of sequences, both 0 if not.

    Where tiles begin with padding the length counts that, too: see `ranges.hidden_rows`.
    """
    fits = (held >= 0) & (held <= most)
    if cfg.HAS_LEFTPAD:
        fits = fits & (pad >= 0) & (pad <= held)
        pad = gl.cast(gl.where(fits, pad, 0), gl.int32)
    seqlen_k = gl.cast(gl.where(fits, held, 0), gl.int32) - pad
    if cfg.HIDES_PADDING:
        UNIT: gl.constexpr = min(cfg.PAGE_SIZE, cfg.BLOCK_N)
        seqlen_k += gl.where(pad % UNIT + seqlen_k > UNIT, pad % UNIT, 0)
    return pad, seqlen_k, fits


@gluon.jit
def page_or_zero(page, sizes):
    """Page numbers that may be read."""
    return gl.where((page >= 0) & (page < sizes.num_pages), page, 0)


@gluon.jit
def length_poison(cache, b, sizes, cfg: gl.constexpr):
    """0, or NaN for a sequence of a wrong length or left padding, which is reported."""
    pad = gl.load(cache.leftpad_k + b) if cfg.HAS_LEFTPAD else 0
    _, _, fits = own_keys(gl.load(cache.seqlens_k + b), pad, sizes.seqlen_k, cfg)
    return reported_length(fits == 0, cache.errors)


@gluon.jit
def reported_length(is_wrong, errors):
    if is_wrong:
        gl.store(errors + LENGTH_FLAG, 1)
    return gl.where(is_wrong, float("nan"), 0.0)


@gluon.jit
def page_poison(
    cache, keys, first_tile, end_tile, sizes, LANE_PAGES: gl.constexpr, NUM_WARPS: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """0, or NaN if a page of key tiles [first_tile, end_tile) is none, which is reported.

    Every warp reads all of them, so that none waits for another, LANE_PAGES a lane at once.
    """
    poison = 0.0 * sizes.num_pages
    if cfg.PAGE_SIZE > 0:
        COUNT: gl.constexpr = 32 * LANE_PAGES
        lanes = unhoisted(gl.arange(0, COUNT, gl.BlockedLayout([LANE_PAGES], [32], [NUM_WARPS], [0])))
        table = cache.page_table + gl.cast(keys.batch, gl.int64) * sizes.stride_page_table
        row = tile_origin(keys, cfg)
        end = row + gl.minimum(keys.seqlen_k, end_tile * cfg.BLOCK_N)
        end = (end + (cfg.PAGE_SIZE - 1)) // cfg.PAGE_SIZE
        wrong = gl.full([COUNT], 0, gl.int32, lanes.type.layout)
        for n in range((row + first_tile * cfg.BLOCK_N) // cfg.PAGE_SIZE, end, COUNT):
            page = gl.load(table + (n + lanes), mask=n + lanes < end, other=0)
            is_wrong = (n + lanes < end) & ((page < 0) | (page >= sizes.num_pages))
            wrong = gl.maximum(wrong, is_wrong.to(gl.int32))
        is_wrong = gl.max(wrong, 0) > 0
        if is_wrong:
            gl.store(cache.errors + PAGE_FLAG, 1)
        poison = gl.where(is_wrong, float("nan"), 0.0)
    return poison


@gluon.jit
def split_poison(cache, split, sizes, cfg: gl.constexpr):
    """`page_poison` of a split of the decoding kernels, for a warpgroup."""
    end_tile = split.tile + split.count
    return page_poison(cache, split, split.tile, end_tile, sizes, 16, 4, cfg)
