"""8-bit pages in the decoding kernel: keys and values become float16 on their way to the tensor cores.

Of float8_e4m3fn that is exact, and one instruction for two numbers. The scales of pages, powers of two, join
scores and exponents, of which there are fewer: p = exp(s + log v_scale - m), and l takes it out again. A tile
lies in one page, so it has one scale of keys and one of values.

    k ring, 8 bits --> registers --> keys,   float16 --> S = Q K^T
    v ring, 8 bits --> registers --> values, float16 --> O += P V

Each warpgroup has `keys` and `values` [64 or 128, BLOCK_D] of its own. A ring's slot is released once it is
in registers. `keys` is written again when S has been awaited, `values` when O has.
"""

from tilewise.gpu.hopper.common.compat import (
    bits_of,
    fence_async_shared,
    float_of,
    gl,
    gluon,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.guards import page_or_zero
from tilewise.gpu.hopper.common.layouts import operand_layout, row_layout
from tilewise.gpu.hopper.common.products import product
from tilewise.gpu.hopper.decode.rows import read_queries
from tilewise.gpu.hopper.decode.softmax import softmax_step

SMALLEST = gl.constexpr(2.0**-100)  # so that one over a unit is a number
EXPONENT = gl.constexpr(0x7F800000)  # bits of a float32


@gluon.jit
def load_queries_as_float16(q, smem, split, sizes, cfg: gl.constexpr):
    """Queries of all heads of a key head [64, BLOCK_D], each over its unit, to below 512: the units [64].

    Units are powers of two. bfloat16 numbers down to 2^-25 of their row's largest keep all bits.
    """
    x = read_queries(q, 0, cfg.BLOCK_D, split, sizes, cfg).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(x), 1), SMALLEST)
    unit = float_of(bits_of(largest) & EXPONENT) * 2.0**-8
    smem.store((x * (1.0 / unit)[:, None]).to(gl.float16))
    fence_async_shared()  # the stores above are visible to wgmma
    return gl.convert_layout(unit, row_layout(cfg.BLOCK_N))


@gluon.jit
def widen(tile, smem):
    """An 8-bit tile [BLOCK_N, columns] as float16 into shared memory.

    A thread has 8 columns side by side, and its neighbours the next: no bank is asked twice at once.
    """
    LANES: gl.constexpr = tile.shape[1] // 8  # of a row
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    smem.store(tile.load(layout).to(gl.float16))
    fence_async_shared()  # the stores above are visible to wgmma


@gluon.jit
def page_of(cache, split, n, sizes, cfg: gl.constexpr):
    """The number of the page that tile n of a split lies in; behind its end, of its last one."""
    tile = gl.maximum(split.tile + gl.minimum(n, split.count - 1), 0)
    row = gl.cast(split.batch, gl.int64) * sizes.stride_page_table
    return gl.load(cache.page_table + row + tile * cfg.BLOCK_N // cfg.PAGE_SIZE).to(gl.int32)


@gluon.jit
def scales_of(page, cache, split, sizes, cfg: gl.constexpr):
    """(of keys, of values) of a page."""
    place = gl.cast(page_or_zero(page, sizes), gl.int64) * (sizes.num_heads // cfg.PACK) + split.kv_head
    return gl.load(cache.key_scale + place), gl.load(cache.value_scale + place)


@gluon.jit
def attend_8_bit_tiles(
    W: gl.constexpr, q, acc, m, l, use, split, slope_log2, cache, smem, sizes, factors, cfg: gl.constexpr
):
    """(acc, m, l) after every WARPGROUPS-th tile of a split.

    Values are widened under the product of queries and keys, and the next keys under that of weights and
    values. A tile's page number is read two tiles ahead, its scales one: neither is waited for.
    """
    WARPGROUPS: gl.constexpr = cfg.WARPGROUPS
    q_tile, keys, values = smem.q.index(W), smem.wide.index(2 * W), smem.wide.index(2 * W + 1)
    first = (W - use) & (WARPGROUPS - 1)
    scales = scales_of(page_of(cache, split, first, sizes, cfg), cache, split, sizes, cfg)
    page = page_of(cache, split, first + WARPGROUPS, sizes, cfg)
    unit = load_queries_as_float16(q, q_tile, split, sizes, cfg)
    if first < split.count:
        smem.k.wait(use + first)
        widen(smem.k.chunk(use + first, 0), keys)
        smem.k.release(use + first)
    for n in range(first, split.count, WARPGROUPS):
        s = product(q_tile, keys.permute((1, 0)))
        key_scale, value_scale = scales
        scales = scales_of(page, cache, split, sizes, cfg)
        page = page_of(cache, split, n + 2 * WARPGROUPS, sizes, cfg)
        smem.v.wait(use + n)
        widen(smem.v.chunk(use + n, 0), values)
        smem.v.release(use + n)
        s = warpgroup_mma_wait(0, deps=(s,))  # [64, BLOCK_N]
        p, m, l, alpha = softmax_step(
            s, m, l, split.tile + n, slope_log2, split, sizes, factors, cfg, unit * key_scale, value_scale
        )
        p = gl.convert_layout(p.to(gl.float16), operand_layout(cfg.BLOCK_DV))
        alpha = gl.convert_layout(alpha, row_layout(cfg.BLOCK_DV), assert_trivial=True)
        acc = acc * alpha[:, None]
        has_next = n + WARPGROUPS < split.count
        if has_next:  # before the product: a loop beside its registers would have them waited for
            smem.k.wait(use + n + WARPGROUPS)
        acc = warpgroup_mma(p, values, acc, is_async=True)  # [64, BLOCK_DV]
        widen(smem.k.chunk(use + n + WARPGROUPS, 0), keys)  # without a next tile, of any bytes
        smem.k.release(use + n + WARPGROUPS, has_next)
        acc, _ = warpgroup_mma_wait(0, deps=(acc, p))  # until then p's registers are read
    return acc, m, l
