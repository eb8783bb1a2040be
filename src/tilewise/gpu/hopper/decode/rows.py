"""Rows of a segment in the decoding kernels: read, put together from two warpgroups, stored.

Row r of a segment's tile is query r // PACK and, of its GQA group, head r % PACK.
"""

from tilewise.gpu.hopper.common.compat import fence_async_shared, gl, gluon
from tilewise.gpu.hopper.common.layouts import accumulator_layout
from tilewise.gpu.hopper.common.products import rescaled
from tilewise.gpu.hopper.common.softmax import (
    LN_2,
    exact_lse,
    exp2,
    finite_or_zero,
    log2,
    reciprocal,
    two_sum,
)
from tilewise.gpu.hopper.decode.stream_k import split_index, tile_of


@gluon.jit
def query_rows(first, COUNT: gl.constexpr, layout: gl.constexpr, segment, sizes, cfg: gl.constexpr):
    """(query, head, whether it exists) of rows [first, first + COUNT) of a segment."""
    rows = first + gl.arange(0, COUNT, layout)
    block, row_tile = tile_of(segment, sizes, cfg)
    position = row_tile * (cfg.ROWS // cfg.PACK) + rows // cfg.PACK
    head = block * cfg.PACK + rows % cfg.PACK
    return position, head, (rows < cfg.ROWS) & (position < sizes.seqlen_q)


@gluon.jit
def read_queries(q, FIRST: gl.constexpr, COLUMNS: gl.constexpr, split, sizes, cfg: gl.constexpr):
    """64 queries of all heads of a segment, columns from FIRST on; 0 where a row does not exist."""
    LANES: gl.constexpr = COLUMNS // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    return read_rows(q, rows, FIRST, COLUMNS, layout, split, sizes, cfg)


@gluon.jit
def read_rows(
    q, rows, FIRST: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr, split, sizes,
    cfg: gl.constexpr,
):  # fmt: skip
    """Such rows of a segment's tile, in a layout."""
    cols = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    position = split.row + rows // cfg.PACK
    head = split.kv_head * cfg.PACK + rows % cfg.PACK
    exists = (rows < cfg.ROWS) & (position < sizes.seqlen_q)
    start = gl.cast(split.batch, gl.int64) * sizes.stride_q_batch
    offset = position * sizes.stride_q_row + head.to(gl.int64) * sizes.stride_q_head
    mask = exists[:, None] & (cols < cfg.HEAD_DIM)[None, :]
    return gl.load(q + start + (offset[:, None] + cols[None, :]), mask=mask, other=0.0)


@gluon.jit
def load_queries(q, smem, split, sizes, cfg: gl.constexpr):
    """Queries of all heads of a key head [64, BLOCK_D]."""
    smem.store(read_queries(q, 0, cfg.BLOCK_D, split, sizes, cfg))
    fence_async_shared()  # the stores above are visible to wgmma


@gluon.jit
def by_threads(acc, cfg: gl.constexpr):
    """acc [64, BLOCK_DV] as [BLOCK_DV / 8, 512]: each thread stores four of its numbers side by side."""
    acc = acc.reshape([4, 2, 8, cfg.BLOCK_DV // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return acc.reshape([cfg.BLOCK_DV // 8, 512])


@gluon.jit
def send_half(acc, m, l, use, smem, cfg: gl.constexpr):
    """Leave the second warpgroup's half of a split in shared memory, for the first one."""
    smem.half.acquire(use)
    smem.half.chunk(use, 0).store(by_threads(acc, cfg))
    smem.half_stats.index(0).store(m)
    smem.half_stats.index(1).store(l)
    smem.half.publish(use)


@gluon.jit
def combine_halves(acc, m, l, use, smem, cfg: gl.constexpr):
    """(out, m, l) of a whole split, from the first warpgroup's half and the second's, still to be released.

    Of 8-bit pages out is not yet over l.
    """
    smem.half.wait(use)
    other = smem.half.chunk(use, 0).load(by_threads(acc, cfg).type.layout)
    other_m = smem.half_stats.index(0).load(m.type.layout)
    other_l = smem.half_stats.index(1).load(m.type.layout)
    other = other.reshape([cfg.BLOCK_DV // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    layout: gl.constexpr = accumulator_layout(cfg.BLOCK_DV)
    other = gl.convert_layout(other.reshape([64, cfg.BLOCK_DV]), layout, assert_trivial=True)
    m_new = gl.maximum(m, other_m)
    m_finite = finite_or_zero(m_new)
    mine, others = exp2(m - m_finite), exp2(other_m - m_finite)
    l = l * mine + other_l * others
    inverse = 1.0 if cfg.HAS_SCALES else inverse_of(l)
    return rescaled(acc, mine * inverse) + rescaled(other, others * inverse), m_new, l


@gluon.jit
def store_split_lse(targets, m, l, first, index, split, sizes, cfg: gl.constexpr):
    """lse of rows [first, ...) of a split, and unless that is None what rounding took from it."""
    rows = first + gl.arange(0, m.shape[0], m.type.layout)
    exists = (rows < cfg.ROWS) & (split.row + rows // cfg.PACK < sizes.seqlen_q)
    high, low = two_sum(m, log2(l))
    stat = index * cfg.ROWS + rows
    gl.store(targets.partial_lse + stat, high, mask=exists, eviction_policy="evict_last")
    if targets.partial_low is not None:
        low = gl.where(l == 0.0, 0.0, low)
        gl.store(targets.partial_low + stat, low, mask=exists, eviction_policy="evict_last")


@gluon.jit
def store_split_columns(partial, acc, FIRST: gl.constexpr, first, index, split, sizes, cfg: gl.constexpr):
    """Columns of a split's normalized out, from FIRST on, of rows [first, ...)."""
    layout: gl.constexpr = acc.type.layout
    rows = first + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    exists = (rows < cfg.ROWS) & (split.row + rows // cfg.PACK < sizes.seqlen_q)
    cols = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    ptrs = partial + (index * cfg.ROWS + rows) * cfg.BLOCK_DV
    gl.store(ptrs[:, None] + cols[None, :], acc, mask=exists[:, None], eviction_policy="evict_last")


@gluon.jit
def inverse_of(l):
    """1 / l, 1 for a row that saw no key."""
    return reciprocal(gl.where(l == 0.0, 1.0, l))


@gluon.jit
def divided(acc, l):
    """acc / l, 0 for a row that saw no key."""
    return acc * gl.convert_layout(inverse_of(l), gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def store_split(targets, acc, m, l, first, split, sizes, factors, cfg: gl.constexpr):
    """What a worker has of rows [first, ...) of a segment: out and lse, or if others have some, a split's."""
    if cfg.STORES_WHOLE and split.is_whole:
        store_lse(targets, m, l, split.batch, split.segment, first, sizes, factors, cfg)
        store_columns(targets.out, acc, 0, split.batch, split.segment, first, sizes, cfg)
    else:
        index = split_index(split.batch, split.segment, gl.program_id(0), sizes)
        store_split_lse(targets, m, l, first, index, split, sizes, cfg)
        store_split_columns(targets.partial, acc, 0, first, index, split, sizes, cfg)


@gluon.jit
def store_lse(targets, m, l, b, segment, first, sizes, factors, cfg: gl.constexpr):
    """lse of rows [first, ...) of a segment, and unless that is None the residual."""
    layout: gl.constexpr = m.type.layout
    position, head, exists = query_rows(first, m.shape[0], layout, segment, sizes, cfg)
    stat = (b * sizes.num_heads + head).to(gl.int64) * sizes.seqlen_q + position
    if targets.residual is None:
        gl.store(targets.lse + stat, (m + log2(l)) * LN_2, mask=exists)
    else:
        high, low = exact_lse(m, l, factors)
        gl.store(targets.lse + stat, high, mask=exists)
        gl.store(targets.residual + stat, low, mask=exists)


@gluon.jit
def store_columns(out, acc, FIRST, b, segment, first, sizes, cfg: gl.constexpr):
    """Columns of out, from FIRST on, of rows [first, ...) of a segment."""
    layout: gl.constexpr = acc.type.layout
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    position, head, exists = query_rows(first, acc.shape[0], by_row, segment, sizes, cfg)
    row = (b * sizes.seqlen_q + position).to(gl.int64) * sizes.num_heads + head
    cols = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    mask = exists[:, None] & (cols < cfg.HEAD_DIM_V)[None, :]
    ptrs = out + row * cfg.HEAD_DIM_V
    gl.store(ptrs[:, None] + cols[None, :], acc.to(out.dtype.element_ty), mask=mask)
