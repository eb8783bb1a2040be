"""8-bit pages in the decoding kernel: keys and values become float16 in registers, where they are multiplied.

Of float8_e4m3fn that is exact, and one instruction for two numbers. The scales of pages join scores and
exponents, of which there are fewer: p = exp(s + log v_scale - m), and l takes it out again.

    k ring, 8 bits --> registers, float16 --> S = Q K^T      a warp: 16 rows, a quarter of the tile's keys,
    v ring, 8 bits --> registers, float16 --> O += P V       all of one page; an O of its own

wgmma reads its right factor from shared memory: writing float16 there takes more time than 8 bits save. mma
has both factors in registers. Up to 16 rows, warpgroups work on alternate tiles; with up to 32, each works on
all tiles for 16 of the rows. At the end of a split O and the sums of all warps are added.

In tensors of 64 rows, row 16 w + r is row r of warp w. A product may add up its columns in any order, and
O's columns may lie in any until the end. They are ordered so that a thread reads 16 bytes side by side from
shared memory, without bank conflicts. Thread 4 g + t of a warp is (g, t), as in mma's definition.

A fence comes before each `release`: until it, loads of the slot may still be on their way, which a barrier of
warps does not wait for, and TMA, which finds keys in the L2 cache, could fill the slot before they read it.
"""

from tilewise.gpu.hopper.common.compat import (
    bits_of,
    fence_async_shared,
    float_of,
    gl,
    gluon,
    mma_v2,
)
from tilewise.gpu.hopper.common.guards import page_or_zero
from tilewise.gpu.hopper.common.layouts import accumulator_layout, along, row_layout, warp_layout
from tilewise.gpu.hopper.common.ranges import tile_origin
from tilewise.gpu.hopper.common.softmax import exp2, finite_or_zero
from tilewise.gpu.hopper.decode.rows import by_threads, inverse_of, read_rows
from tilewise.gpu.hopper.decode.softmax import first_row, row_numbers, softmax_step

SMALLEST = gl.constexpr(2.0**-100)  # so that one over a unit is a number
EXPONENT = gl.constexpr(0x7F800000)  # bits of a float32


@gluon.constexpr_function
def powers(first, end):
    """first, 2 * first, ... before end."""
    return [first << i for i in range((end // first).bit_length() - 1)]


@gluon.constexpr_function
def keys_layout(rows, columns):
    """Of keys or queries, a quarter of the rows a warp: (g, t) has a quarter of rows g, g + 8 ..."""
    own = [[0, n] for n in powers(1, columns // 4)] + [[n, 0] for n in powers(8, rows // 4)]
    lanes = [[0, columns // 4], [0, columns // 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(own, lanes, [[rows // 4, 0], [rows // 2, 0]], [], [rows, columns])


@gluon.constexpr_function
def values_layout(rows, columns):
    """Of values [rows, columns] likewise: (g, t) has an eighth of rows 2t and 2t + 1 of every eight."""
    own = [[0, n] for n in powers(1, columns // 8)] + [[1, 0]] + [[n, 0] for n in powers(8, rows // 4)]
    lanes = [[2, 0], [4, 0]] + [[0, n] for n in powers(columns // 8, columns)]
    return gl.DistributedLinearLayout(own, lanes, [[rows // 4, 0], [rows // 2, 0]], [], [rows, columns])


@gluon.jit
def inner_order(x, ROWS: gl.constexpr):
    """x [4 * ROWS, columns] as [4, ROWS, columns], in the order of columns in which threads hold keys.

    Of every 16 columns of a product, a thread has 2t, 2t + 1, 2t + 8, 2t + 9: four that are side by side.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    x = x.reshape([4, ROWS, 4, COLUMNS // 16, 2, 2]).permute([0, 1, 3, 4, 2, 5])
    return x.reshape([4, ROWS, COLUMNS])


@gluon.jit
def load_queries(q, first, split, sizes, cfg: gl.constexpr):
    """Queries [4, 16, BLOCK_D] of rows from `first` on, each over its unit, to below 512; units [4, 16].

    Units are powers of two. bfloat16 numbers down to 2^-25 of their row's largest keep all bits.
    """
    layout: gl.constexpr = keys_layout(64, cfg.BLOCK_D)
    rows = row_numbers(first, gl.SliceLayout(1, layout), cfg)
    x = read_rows(q, rows, 0, cfg.BLOCK_D, layout, split, sizes, cfg).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(x), 1), SMALLEST)
    unit = float_of(bits_of(largest) & EXPONENT) * 2.0**-8
    x = inner_order((x * (1.0 / unit)[:, None]).to(gl.float16), 16)
    unit = gl.convert_layout(unit.reshape([4, 16]), gl.SliceLayout(2, warp_layout()), assert_trivial=True)
    return gl.convert_layout(x, gl.DotOperandLayout(0, warp_layout(), 2), assert_trivial=True), unit


@gluon.jit
def load_keys(tile):
    """Keys [BLOCK_N, BLOCK_D] in shared memory as a right factor [4, BLOCK_D, BLOCK_N / 4]."""
    ROWS: gl.constexpr = tile.shape[0]
    x = tile.load(keys_layout(ROWS, tile.shape[1])).to(gl.float16)
    x = inner_order(x, ROWS // 4).permute([0, 2, 1])
    return gl.convert_layout(x, gl.DotOperandLayout(1, warp_layout(), 2), assert_trivial=True)


@gluon.jit
def load_values(tile):
    """Values [BLOCK_N, BLOCK_DV] in shared memory as a right factor [4, BLOCK_N / 4, BLOCK_DV].

    Its column 8 a + b is column a + BLOCK_DV / 8 * b.
    """
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    x = tile.load(values_layout(ROWS, COLUMNS)).to(gl.float16)
    x = x.reshape([4, ROWS // 4, 8, COLUMNS // 8]).permute([0, 1, 3, 2]).reshape([4, ROWS // 4, COLUMNS])
    return gl.convert_layout(x, gl.DotOperandLayout(1, warp_layout(), 2), assert_trivial=True)


@gluon.jit
def pages_of(cache, split, n, sizes, cfg: gl.constexpr):
    """Numbers of the pages [4] of the warps' keys, of a split's tile n; behind its end, of others."""
    warp = gl.arange(0, 4, along(0, warp_layout(), 3))
    first = (split.tile + gl.minimum(n, split.count - 1)) * cfg.BLOCK_N + cfg.BLOCK_N // 4 * warp
    first = tile_origin(split, cfg) + gl.maximum(gl.minimum(first, split.seqlen_k - 1), 0)
    row = gl.cast(split.batch, gl.int64) * sizes.stride_page_table
    return gl.load(cache.page_table + row + first // cfg.PAGE_SIZE).to(gl.int32)


@gluon.jit
def scales_of(pages, cache, split, sizes, cfg: gl.constexpr):
    """(of keys, of values) of pages."""
    place = page_or_zero(pages, sizes).to(gl.int64) * (sizes.num_heads // cfg.PACK) + split.kv_head
    return gl.load(cache.key_scale + place), gl.load(cache.value_scale + place)


@gluon.jit
def of_rows(x, cfg: gl.constexpr):
    """Numbers [4, 16] as [64], beside scores."""
    return gl.convert_layout(x.reshape([64]), row_layout(cfg.BLOCK_N // 4), assert_trivial=True)


@gluon.jit
def attend_8_bit_tiles(
    W: gl.constexpr, q, m, l, use, split, slope_log2, cache, smem, sizes, factors, cfg: gl.constexpr
):
    """(acc, m, l) of the warps of warpgroup W after a split, of its rows and tiles.

    A tile's page numbers are read two tiles ahead, its scales one: neither is waited for.
    """
    KEYS: gl.constexpr = cfg.BLOCK_N // 4  # of a warp
    STEP: gl.constexpr = cfg.WARPGROUPS // cfg.READERS
    row = first_row(W, cfg)
    first = (W - use) & (STEP - 1)
    pages = pages_of(cache, split, first, sizes, cfg)
    queries, unit = load_queries(q, row, split, sizes, cfg)
    scales = scales_of(pages, cache, split, sizes, cfg)
    pages = pages_of(cache, split, first + STEP, sizes, cfg)
    acc = gl.full([4, 16, cfg.BLOCK_DV], 0.0, gl.float32, warp_layout())
    for n in range(first, split.count, STEP):
        key_scale, value_scale = scales
        scales = scales_of(pages, cache, split, sizes, cfg)
        pages = pages_of(cache, split, n + 2 * STEP, sizes, cfg)
        smem.k.wait(use + n)
        keys = load_keys(smem.k.chunk(use + n, 0))
        s = mma_v2(queries, keys, gl.full([4, 16, KEYS], 0.0, gl.float32, warp_layout()))
        fence_async_shared()  # keys are in registers before TMA may fill their slot again
        smem.k.release(use + n)
        s = s.reshape([64, KEYS])
        s = gl.convert_layout(s, accumulator_layout(KEYS), assert_trivial=True)
        units = of_rows(unit * key_scale[:, None], cfg)
        value_scales = of_rows(value_scale[:, None] + 0.0 * unit, cfg)
        p, m, l, alpha = softmax_step(
            s, m, l, split.tile + n, slope_log2, split, sizes, factors, cfg, row, units, value_scales
        )
        p = p.to(gl.float16).reshape([4, 16, KEYS])
        p = gl.convert_layout(p, gl.DotOperandLayout(0, warp_layout(), 2), assert_trivial=True)
        alpha = alpha.reshape([4, 16])
        alpha = gl.convert_layout(alpha, gl.SliceLayout(2, warp_layout()), assert_trivial=True)
        smem.v.wait(use + n)
        values = load_values(smem.v.chunk(use + n, 0))
        acc = mma_v2(p, values, acc * alpha[:, :, None])
        fence_async_shared()  # and values
        smem.v.release(use + n)
    acc = acc.reshape([64, cfg.BLOCK_DV])
    return gl.convert_layout(acc, accumulator_layout(cfg.BLOCK_DV), assert_trivial=True), m, l


@gluon.constexpr_function
def stats_layout():
    """Of [64] numbers, of rows and warps: (g, t) has those of all warps for rows g and g + 8."""
    lanes = [[0], [0], [1], [2], [4]]
    return gl.DistributedLinearLayout([[8], [16], [32]], lanes, [[0], [0]], [], [64])


@gluon.constexpr_function
def sums_layout(columns):
    """Of what `by_threads` makes of acc: a thread has two or four columns side by side, of all warps."""
    own = [[0, 1], [0, 2], [0, 128], [0, 256]] + [[n, 0] for n in powers(1, columns // 32)]
    lanes = [[0, n] for n in powers(4, 128)]
    warps = [[n, 0] for n in powers(columns // 32, columns // 8)]
    return gl.DistributedLinearLayout(own, lanes, warps, [], [columns // 8, 512])


@gluon.jit
def combine_warps(W: gl.constexpr, acc, m, l, smem, cfg: gl.constexpr):
    """(out [16, BLOCK_DV], m [16], l [16]) of a split, from acc [64, BLOCK_DV], m [64], l [64] of warps."""
    GROUPS: gl.constexpr = cfg.BLOCK_DV // 8
    smem.half.chunk(W, 0).store(by_threads(acc, cfg))
    smem.half_stats.index(2 * W).store(m)
    smem.half_stats.index(2 * W + 1).store(l)
    x = smem.half.chunk(W, 0).load(sums_layout(cfg.BLOCK_DV)).reshape([GROUPS, 4, 8, 4, 2, 2])
    x = x.permute([1, 4, 2, 3, 5, 0]).reshape([4, 16, 8, GROUPS])
    m = smem.half_stats.index(2 * W).load(stats_layout()).reshape([4, 16])
    l = smem.half_stats.index(2 * W + 1).load(stats_layout()).reshape([4, 16])
    m_new = gl.max(m, 0)
    weight = exp2(m - finite_or_zero(m_new)[None, :])
    l_new = gl.sum(l * weight, 0)
    by_warp: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, x.type.layout))
    weight = gl.convert_layout(weight * inverse_of(l_new)[None, :], by_warp, assert_trivial=True)
    out = gl.sum(x * weight[:, :, None, None], 0)
    return out.reshape([16, cfg.BLOCK_DV]), m_new, l_new
