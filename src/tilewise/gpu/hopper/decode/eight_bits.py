"""8-bit pages in the decoding kernel: numbers become float16 on their way to the tensor cores, exactly.

Two of float8_e4m3fn are one instruction. The scales of pages, powers of two, join scores and exponents, of
which there are fewer: p = exp(s + log v_scale - m), and l takes it out again.
"""

from tilewise.gpu.hopper.common.compat import bits_of, fence_async_shared, float_of, gl, gluon
from tilewise.gpu.hopper.common.guards import page_or_zero
from tilewise.gpu.hopper.common.layouts import row_layout
from tilewise.gpu.hopper.common.softmax import exp2, finite_or_zero, log2
from tilewise.gpu.hopper.decode.rows import read_queries

SMALLEST = gl.constexpr(2.0**-100)  # so that one over a unit is a number
EXPONENT = gl.constexpr(0x7F800000)  # bits of a float32


@gluon.jit
def load_queries_as_float16(q, smem, split, sizes, cfg: gl.constexpr):
    """Queries of all heads of a key head [64, BLOCK_D], each over its unit, to below 512: the units [64]."""
    x = read_queries(q, 0, cfg.BLOCK_D, split, sizes, cfg).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(x), 1), SMALLEST)
    unit = float_of(bits_of(largest) & EXPONENT) * 2.0**-8  # a power of two
    smem.store((x * (1.0 / unit)[:, None]).to(gl.float16))
    fence_async_shared()  # the stores above are visible to wgmma
    return gl.convert_layout(unit, row_layout(cfg.BLOCK_N))


@gluon.jit
def widened(tile, smem):
    """smem, with an 8-bit tile [BLOCK_N, columns] as float16."""
    LANES: gl.constexpr = (
        tile.shape[1] // 8
    )  # of a row: no two of those that access memory at once share a bank
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    smem.store(tile.load(layout).to(gl.float16))
    fence_async_shared()
    return smem


@gluon.jit
def tile_scales(cache, split, n, sizes, cfg: gl.constexpr):
    """(of keys, of values): of the page that tile n of a split lies in; behind its end, of its last one."""
    tile = gl.maximum(split.tile + gl.minimum(n, split.count - 1), 0)
    row = gl.cast(split.batch, gl.int64) * sizes.stride_page_table
    page = gl.load(cache.page_table + row + tile * cfg.BLOCK_N // cfg.PAGE_SIZE).to(gl.int32)
    place = gl.cast(page_or_zero(page, sizes), gl.int64) * (sizes.num_heads // cfg.PACK) + split.kv_head
    return gl.load(cache.key_scale + place), gl.load(cache.value_scale + place)


@gluon.jit
def scaled_softmax(s, m, scale, value_scale):
    """`online_softmax` of rows that have a scale each, with weights times value_scale."""
    log2_value = log2(value_scale)
    m_new = gl.maximum(m, gl.max(s, 1) * scale + log2_value)
    m_finite = finite_or_zero(m_new)
    p = exp2(s * scale[:, None] + (log2_value - m_finite)[:, None])
    return p, m_new, exp2(m - m_finite)
