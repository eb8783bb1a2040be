"""Decoding for Hopper: few queries against a cache of many keys, at the speed of memory (split-KV).

    role           warps   does
    load_role x 2  1 each  stream the key tiles of their worker's pieces into rings, by TMA: one K, one V
    mma_role x 2   4 each  S by wgmma, softmax in registers, O by wgmma; store each piece's O / l and lse

    attn_decode_kernel        piece -> normalized out (float32) and lse (log2 units), see `decode_plan`
    attn_decode_merge_kernel  out = sum_p exp(lse_p - lse) out_p,  lse = log(sum_p exp lse_p [+ exp sink])

Up to 64 rows, queries times the heads that share a key head, cost the same: wgmma has 64 in any case. So
what binds is memory, and the kernel's form follows from keeping bytes under way: the load roles run ahead
across the borders of pieces. The warpgroups take turns at tiles, each with an O of its own. A ring's slots
are an even number, so that one warpgroup alone waits for a slot: with two, one could be a round ahead of the
other, and a parity does not tell one round from the next but one. Dao et al., "Flash-Decoding" (2023).

The second kernel, and the next one's first, are launched early (programmatic dependent launch), so that
their start overlaps the end of the one before. Each waits for that one before it reads what it wrote.
"""

from tilewise.hopper.arguments import UNSPECIALIZED_DECODE_SIZES, DecodeSizes
from tilewise.hopper.channel import make_ring
from tilewise.hopper.compat import (
    as_boxes,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    prefetch,
    start_next_kernel,
    wait_for_previous_kernel,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.hopper.decode_plan import (
    batch_layout,
    make_line,
    number_of,
    piece_at,
    piece_index,
    worker_of,
    worker_start,
)
from tilewise.hopper.layouts import accumulator_layout, operand_layout, row_layout
from tilewise.hopper.ranges import hide
from tilewise.hopper.softmax import Factors, exp2, finite_or_zero, online_softmax, softcapped

LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)

# ---- the load role


@gluon.jit
def load_pages(ptr_table, tile, pages_held, cfg: gl.constexpr):
    """Numbers of the pages [PAGES] of key tile `tile`; 0 for those beyond the sequence's."""
    page = gl.arange(0, cfg.PAGES, gl.BlockedLayout([1], [32], [1], [0]))
    if cfg.PAGE_SIZE > 0:
        page += tile * cfg.BLOCK_N // cfg.PAGE_SIZE
        page = gl.load(ptr_table + page, mask=page < pages_held, other=0).to(gl.int32)
    return page


@gluon.jit
def load_keys(
    ring, boxes, use, desc, pages, piece, tile, rows_per_entry, PARTS: gl.constexpr, cfg: gl.constexpr
):
    """Start TMA copies of one tile of keys or values; rows past the sequence's end become zeros.

    A box's coordinates end its rows where the sequence ends: see `hopper.forward.coords`.
    """
    PAGES: gl.constexpr = cfg.PAGES
    ring.acquire(use)
    slot = use % ring.STAGES
    bar_full = ring.full.index(slot)
    mbarrier.expect(bar_full, PARTS * PAGES * desc.block_type.nbytes)
    index = gl.arange(0, PAGES, gl.BlockedLayout([1], [32], [1], [0]))
    for n in gl.static_range(PAGES):
        row = tile * cfg.BLOCK_N + n * cfg.BOX_ROWS
        end = gl.minimum(piece.seqlen_k, row + cfg.BOX_ROWS)
        if cfg.PAGE_SIZE == 0:
            entry = piece.batch
        else:
            entry = gl.sum(gl.where(index == n, pages, 0), 0)
            end = end - row // cfg.PAGE_SIZE * cfg.PAGE_SIZE
            row = row % cfg.PAGE_SIZE
        end = gl.maximum(end, 0)
        end_row = entry * rows_per_entry + end
        for part in gl.static_range(PARTS):
            box = (slot * PARTS + part) * PAGES + n
            place = (1 << 30, end_row, (1 << 30) - end + row, piece.kv_head, part * cfg.BOX_WIDTH)
            load_tile(desc, place, bar_full, boxes.index(box))


@gluon.jit
def worker_tiles(line, sizes):
    """The tiles [unit, end) of the line that this program works on."""
    total = gl.max(line.ends, 0)
    unit = worker_start(gl.program_id(0), total, sizes.workers)
    return unit, worker_start(gl.program_id(0) + 1, total, sizes.workers)


@gluon.jit
def load_role(
    IS_VALUE: gl.constexpr, L: gl.constexpr, desc, ring, seqlens_k, page_table, sizes, cfg: gl.constexpr
):
    """Stream every LOADERS-th tile of the worker's: keys, or values."""
    PARTS: gl.constexpr = cfg.PARTS_V if IS_VALUE else cfg.PARTS
    rows_per_entry = sizes.rows_v if IS_VALUE else sizes.rows_k
    boxes = as_boxes(ring.tiles, cfg.STAGES * PARTS * cfg.PAGES, desc)
    if cfg.PREFETCH and cfg.HAS_LENGTHS and L == 0:
        b = gl.arange(0, cfg.BLOCK_B, batch_layout(cfg.BLOCK_B, 1))
        prefetch(seqlens_k + gl.minimum(b, sizes.batch - 1))  # since the last call, keys went through L2
    wait_for_previous_kernel()
    line = make_line(seqlens_k, sizes, cfg, 1)
    unit, end = worker_tiles(line, sizes)
    use = 0  # of the ring
    while unit < end:
        piece = piece_at(unit, end, line, sizes, cfg, 1)
        ptr_table = page_table
        held = 0
        if cfg.PAGE_SIZE > 0:
            ptr_table = page_table + gl.cast(piece.batch, gl.int64) * sizes.stride_page_table
            held = (piece.seqlen_k + (cfg.PAGE_SIZE - 1)) // cfg.PAGE_SIZE
        first = (L - use) & (cfg.LOADERS - 1)
        pages = load_pages(ptr_table, piece.tile + first, held, cfg)
        for n in range(first, piece.count, cfg.LOADERS):
            tile = piece.tile + n
            next_pages = load_pages(ptr_table, tile + cfg.LOADERS, held, cfg)  # answered during a wait
            load_keys(ring, boxes, use + n, desc, pages, piece, tile, rows_per_entry, PARTS, cfg)
            pages = next_pages
        use += piece.count
        unit += piece.count


# ---- the mma roles


@gluon.jit
def load_queries(q, smem, piece, sizes, cfg: gl.constexpr):
    """Queries of all heads of a key head [64, BLOCK_D], rows that do not exist as zeros."""
    LANES: gl.constexpr = cfg.BLOCK_D // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = gl.arange(0, cfg.BLOCK_D, gl.SliceLayout(0, layout))
    position = piece.row + rows // cfg.PACK
    head = piece.kv_head * cfg.PACK + rows % cfg.PACK
    exists = (rows < cfg.ROWS) & (position < sizes.seqlen_q)
    start = gl.cast(piece.batch, gl.int64) * sizes.stride_q_batch
    offset = position * sizes.stride_q_row + head * sizes.stride_q_head
    mask = exists[:, None] & (cols < cfg.HEAD_DIM)[None, :]
    smem.store(gl.load(q + start + (offset[:, None] + cols[None, :]), mask=mask, other=0.0))
    fence_async_shared()  # the stores above are visible to wgmma


@gluon.jit
def weigh(s, m, l, tile, slope_log2, piece, sizes, factors, cfg: gl.constexpr):
    """Softmax of one tile of products s [64, BLOCK_N]: (p, m, l, alpha). Only edge tiles are masked."""
    scale_log2e = factors.scale_log2e
    if cfg.HAS_SOFTCAP:
        s = softcapped(s, factors)
    offset = piece.seqlen_k - piece.seqlen_q
    if cfg.HAS_ALIBI:
        rows = gl.arange(0, 64, gl.SliceLayout(1, s.type.layout)) // cfg.PACK
        cols = tile * cfg.BLOCK_N + gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(0, s.type.layout))
        distance = gl.abs((rows + (piece.row + offset))[:, None] - cols[None, :])
        s = s * scale_log2e - distance.to(gl.float32) * slope_log2[:, None]
        scale_log2e = 1.0
    first = tile * cfg.BLOCK_N
    is_edge = first + cfg.BLOCK_N > piece.seqlen_k
    if cfg.HAS_RIGHT:
        is_edge = is_edge | (first + (cfg.BLOCK_N - 1) > piece.row + offset + sizes.window_right)
    if cfg.HAS_LEFT:
        is_edge = is_edge | (first < piece.row + (cfg.ROWS // cfg.PACK - 1) + offset - sizes.window_left)
    if is_edge:
        s = hide(s, tile, piece.row, piece, sizes, cfg)
    p, m, alpha = online_softmax(s, m, scale_log2e)
    return p, m, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def store_piece(partial, partial_lse, acc, m, l, place, piece, sizes, cfg: gl.constexpr):
    """Normalized out [ROWS, BLOCK_DV] and lse in log2 units, -inf for a row that saw no key."""
    rows = gl.arange(0, 64, row_layout(cfg.BLOCK_N))
    exists = (rows < cfg.ROWS) & (piece.row + rows // cfg.PACK < sizes.seqlen_q)
    gl.store(partial_lse + (place * cfg.ROWS + rows), m + gl.log2(l), mask=exists)
    inverse = 1.0 / gl.where(l == 0.0, 1.0, l)
    acc_rows: gl.constexpr = row_layout(cfg.BLOCK_DV)
    acc = acc * gl.convert_layout(inverse, acc_rows, assert_trivial=True)[:, None]
    rows = gl.arange(0, 64, acc_rows)
    exists = (rows < cfg.ROWS) & (piece.row + rows // cfg.PACK < sizes.seqlen_q)
    cols = gl.arange(0, cfg.BLOCK_DV, gl.SliceLayout(0, accumulator_layout(cfg.BLOCK_DV)))
    offset = rows[:, None] * cfg.BLOCK_DV + cols[None, :]
    gl.store(partial + place * (cfg.ROWS * cfg.BLOCK_DV) + offset, acc, mask=exists[:, None])


@gluon.jit
def store_rows(out, lse, acc, m, l, b, segment, first, sizes, cfg: gl.constexpr):
    """out and lse of rows [first, ...) of a whole segment, from acc [rows, BLOCK_DV] that l divides."""
    inverse = 1.0 / gl.where(l == 0.0, 1.0, l)
    stat_rows: gl.constexpr = m.type.layout
    position, head, exists = places(first, m.shape[0], stat_rows, segment, sizes, cfg)
    stat = (b * sizes.num_heads + head).to(gl.int64) * sizes.seqlen_q + position
    gl.store(lse + stat, (m + gl.log2(l)) * LN_2, mask=exists)
    layout: gl.constexpr = acc.type.layout
    acc_rows: gl.constexpr = gl.SliceLayout(1, layout)
    acc = acc * gl.convert_layout(inverse, acc_rows)[:, None]
    position, head, exists = places(first, acc.shape[0], acc_rows, segment, sizes, cfg)
    row = (b * sizes.seqlen_q + position).to(gl.int64) * sizes.num_heads + head
    cols = gl.arange(0, cfg.BLOCK_DV, gl.SliceLayout(0, layout))
    mask = exists[:, None] & (cols < cfg.HEAD_DIM_V)[None, :]
    gl.store(out + (row[:, None] * cfg.HEAD_DIM_V + cols[None, :]), acc.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def places(first, COUNT: gl.constexpr, layout: gl.constexpr, segment, sizes, cfg: gl.constexpr):
    """(query, head, whether it exists) of rows [first, first + COUNT) of a segment."""
    rows = first + gl.arange(0, COUNT, layout)
    position = segment % sizes.row_tiles * (cfg.ROWS // cfg.PACK) + rows // cfg.PACK
    head = segment // sizes.row_tiles * cfg.PACK + rows % cfg.PACK
    return position, head, (rows < cfg.ROWS) & (position < sizes.seqlen_q)


@gluon.jit
def by_threads(acc, cfg: gl.constexpr):
    """acc [64, BLOCK_DV] as [BLOCK_DV / 8, 512]: each thread stores four of its numbers side by side."""
    acc = acc.reshape([4, 2, 8, cfg.BLOCK_DV // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return acc.reshape([cfg.BLOCK_DV // 8, 512])


@gluon.jit
def hand_over(acc, m, l, use, halves, stats, cfg: gl.constexpr):
    """The second warpgroup's part of a piece, for the first one."""
    halves.acquire(use)
    halves.part(use, 0).store(by_threads(acc, cfg))
    stats.index(0).store(m)
    stats.index(1).store(l)
    halves.publish(use)


@gluon.jit
def take_over(acc, m, l, use, halves, stats, cfg: gl.constexpr):
    """(acc, m, l) of a whole piece, from the first warpgroup's and what the second handed over."""
    halves.wait(use)
    other = halves.part(use, 0).load(by_threads(acc, cfg).type.layout)
    other_m, other_l = stats.index(0).load(m.type.layout), stats.index(1).load(m.type.layout)
    halves.release(use)
    other = other.reshape([cfg.BLOCK_DV // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    layout: gl.constexpr = accumulator_layout(cfg.BLOCK_DV)
    other = gl.convert_layout(other.reshape([64, cfg.BLOCK_DV]), layout, assert_trivial=True)
    m_new = gl.maximum(m, other_m)
    m_finite = finite_or_zero(m_new)
    mine, others = exp2(m - m_finite), exp2(other_m - m_finite)
    l = l * mine + other_l * others
    mine = gl.convert_layout(mine, row_layout(cfg.BLOCK_DV), assert_trivial=True)
    others = gl.convert_layout(others, row_layout(cfg.BLOCK_DV), assert_trivial=True)
    return acc * mine[:, None] + other * others[:, None], m_new, l


@gluon.jit
def mma_role(
    W: gl.constexpr, q, out, lse, partial, partial_lse, seqlens_k, slopes, q_tiles, k_ring, v_ring, halves, stats,
    sizes, factors, cfg: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: every WARPGROUPS-th tile of the worker's."""
    rows = gl.arange(0, 64, row_layout(cfg.BLOCK_N))
    wait_for_previous_kernel()
    if W == 0:
        start_next_kernel()
    line = make_line(seqlens_k, sizes, cfg, 4)
    unit, end = worker_tiles(line, sizes)
    use = 0  # of the rings, by all warpgroups
    pieces = 0
    while unit < end:
        piece = piece_at(unit, end, line, sizes, cfg, 4)
        load_queries(q, q_tiles.index(W), piece, sizes, cfg)
        slope_log2 = gl.full([64], 0.0, gl.float32, row_layout(cfg.BLOCK_N))
        if cfg.HAS_ALIBI:
            head = piece.kv_head * cfg.PACK + rows % cfg.PACK
            slope = gl.load(slopes + piece.batch * sizes.stride_slopes + head)
            slope_log2 = slope.to(gl.float32) * LOG2_E
        m = gl.full([64], float("-inf"), gl.float32, row_layout(cfg.BLOCK_N))
        l = gl.full([64], 0.0, gl.float32, row_layout(cfg.BLOCK_N))
        acc = gl.full([64, cfg.BLOCK_DV], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_DV))
        for n in range((W - use) & (cfg.WARPGROUPS - 1), piece.count, cfg.WARPGROUPS):
            k_ring.wait(use + n)
            zero = gl.full([64, cfg.BLOCK_N], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_N))
            k_tile = k_ring.part(use + n, 0).permute((1, 0))
            s = warpgroup_mma(q_tiles.index(W), k_tile, zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))  # [64, BLOCK_N]
            k_ring.release(use + n)
            p, m, l, alpha = weigh(s, m, l, piece.tile + n, slope_log2, piece, sizes, factors, cfg)
            p = gl.convert_layout(p.to(v_ring.tiles.dtype), operand_layout(cfg.BLOCK_DV))
            alpha = gl.convert_layout(alpha, row_layout(cfg.BLOCK_DV), assert_trivial=True)
            acc = acc * alpha[:, None]
            v_ring.wait(use + n)
            acc = warpgroup_mma(p, v_ring.part(use + n, 0), acc, is_async=True)  # [64, BLOCK_DV]
            acc = warpgroup_mma_wait(0, deps=(acc,))
            v_ring.release(use + n)
        place = piece_index(piece.batch, piece.segment, gl.program_id(0), sizes) * cfg.PARTIALS
        if cfg.PARTIALS == 2:
            store_piece(partial, partial_lse, acc, m, l, place + W, piece, sizes, cfg)
        elif W == 0:
            acc, m, l = take_over(acc, m, l, pieces, halves, stats, cfg)
            if cfg.STORES_WHOLE and piece.is_whole:
                store_rows(out, lse, acc, m, l, piece.batch, piece.segment, 0, sizes, cfg)
            else:
                store_piece(partial, partial_lse, acc, m, l, place, piece, sizes, cfg)
        else:
            hand_over(acc, m, l, pieces, halves, stats, cfg)
        pieces += 1
        use += piece.count
        unit += piece.count


# ---- the kernels


@gluon.jit(do_not_specialize=UNSPECIALIZED_DECODE_SIZES)
def attn_decode_kernel(
    q, k_desc, v_desc, out, lse, partial, partial_lse, seqlens_k, page_table, slopes,
    batch, num_heads, seqlen_q, seqlen_k, segments, row_tiles, workers, window_left, window_right,
    stride_q_batch, stride_q_row, stride_q_head, stride_slopes, stride_page_table, rows_k, rows_v,
    scale_log2e, two_over_softcap_log2e, softcap_log2e, cfg: gl.constexpr,
):  # fmt: skip
    """One worker's part of the line. Grid: (workers,); `cfg` is a DecodeConfig.

    partial: float32 [pieces * WARPGROUPS, ROWS, BLOCK_DV]; partial_lse: [pieces * WARPGROUPS, ROWS].
    """
    sizes = DecodeSizes(
        batch, num_heads, seqlen_q, seqlen_k, segments, row_tiles, workers, window_left, window_right,
        stride_q_batch, stride_q_row, stride_q_head, stride_slopes, stride_page_table, rows_k, rows_v,
    )  # fmt: skip
    factors = Factors(scale_log2e, two_over_softcap_log2e, softcap_log2e)
    layout_k: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, cfg.BLOCK_D], k_desc.dtype)
    layout_v: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, cfg.BLOCK_DV], k_desc.dtype)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [cfg.STAGES, cfg.BLOCK_N, cfg.BLOCK_D], layout_k)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, [cfg.STAGES, cfg.BLOCK_N, cfg.BLOCK_DV], layout_v)
    k_ring = make_ring(k_tiles, cfg.STAGES, 1, 1)
    v_ring = make_ring(v_tiles, cfg.STAGES, 1, 1)
    layout_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, cfg.BLOCK_D], k_desc.dtype)
    q_tiles = gl.allocate_shared_memory(k_desc.dtype, [cfg.WARPGROUPS, 64, cfg.BLOCK_D], layout_q)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    half: gl.constexpr = [1, cfg.BLOCK_DV // 8, 512]
    halves = make_ring(
        gl.allocate_shared_memory(gl.float32, half, gl.SwizzledSharedLayout(1, 1, 1, [1, 0])), 1, 1, 1
    )
    stats = gl.allocate_shared_memory(gl.float32, [2, 64], plain)
    gl.warp_specialize(
        [
            (mma_role, (0, q, out, lse, partial, partial_lse, seqlens_k, slopes, q_tiles, k_ring, v_ring, halves, stats, sizes, factors, cfg)),
            (mma_role, (1, q, out, lse, partial, partial_lse, seqlens_k, slopes, q_tiles, k_ring, v_ring, halves, stats, sizes, factors, cfg)),
            (load_role, (False, 0, k_desc, k_ring, seqlens_k, page_table, sizes, cfg)),
            (load_role, (True, 0, v_desc, v_ring, seqlens_k, page_table, sizes, cfg)),
            (load_role, (False, 1, k_desc, k_ring, seqlens_k, page_table, sizes, cfg)),
            (load_role, (True, 1, v_desc, v_ring, seqlens_k, page_table, sizes, cfg)),
        ],
        [4, 1, 1, 1, 1],
        [cfg.CONSUMER_REGISTERS, cfg.PRODUCER_REGISTERS, cfg.PRODUCER_REGISTERS, cfg.PRODUCER_REGISTERS, cfg.PRODUCER_REGISTERS],
    )


@gluon.constexpr_function
def merge_layout(cfg):
    """Of [MERGE_ROWS, MERGE_PIECES, BLOCK_DV]: four columns a thread, warps along rows or along pieces."""
    lanes = min(32, cfg.BLOCK_DV // 4)
    warps = min(4, cfg.MERGE_ROWS)
    return gl.BlockedLayout([1, 1, 4], [1, 32 // lanes, lanes], [warps, 4 // warps, 1], [2, 1, 0])


@gluon.jit(do_not_specialize=UNSPECIALIZED_DECODE_SIZES)
def attn_decode_merge_kernel(
    partial, partial_lse, out, lse, seqlens_k, sinks,
    batch, num_heads, seqlen_q, seqlen_k, segments, row_tiles, workers, window_left, window_right,
    stride_q_batch, stride_q_row, stride_q_head, stride_slopes, stride_page_table, rows_k, rows_v,
    cfg: gl.constexpr,
):  # fmt: skip
    """out and lse of MERGE_ROWS rows of a segment. Grid: (segments of all sequences * blocks of rows,)."""
    sizes = DecodeSizes(
        batch, num_heads, seqlen_q, seqlen_k, segments, row_tiles, workers, window_left, window_right,
        stride_q_batch, stride_q_row, stride_q_head, stride_slopes, stride_page_table, rows_k, rows_v,
    )  # fmt: skip
    layout: gl.constexpr = merge_layout(cfg)
    rows_layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    out_layout: gl.constexpr = gl.SliceLayout(1, layout)
    BLOCKS: gl.constexpr = (cfg.ROWS + cfg.MERGE_ROWS - 1) // cfg.MERGE_ROWS
    start_next_kernel()
    # The first kernel started this one after its own wait, so the lengths are there to be read.
    b = gl.program_id(0) // BLOCKS // segments
    segment = gl.program_id(0) // BLOCKS % segments
    line = make_line(seqlens_k, sizes, cfg, 4)
    total = gl.max(line.ends, 0)
    tiles = number_of(line.tiles, b, cfg, 4)
    first = number_of(line.ends, b, cfg, 4) - (segments - segment) * tiles
    worker = worker_of(first, total, workers)
    piece = piece_index(b, segment, worker, sizes) * cfg.PARTIALS
    count = (worker_of(first + tiles - 1, total, workers) - worker + 1) * cfg.PARTIALS
    count = gl.where(tiles > 0, count, 0)
    if cfg.STORES_WHOLE and count == 1:
        count = -1  # the worker has stored it

    first_row = gl.program_id(0) % BLOCKS * cfg.MERGE_ROWS
    rows = first_row + gl.arange(0, cfg.MERGE_ROWS, rows_layout)
    cols = gl.arange(0, cfg.BLOCK_DV, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    pieces = gl.arange(0, cfg.MERGE_PIECES, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    _, head, exists = places(first_row, cfg.MERGE_ROWS, rows_layout, segment, sizes, cfg)
    m = gl.full([cfg.MERGE_ROWS], float("-inf"), gl.float32, rows_layout)
    l = gl.full([cfg.MERGE_ROWS], 0.0, gl.float32, rows_layout)
    if cfg.HAS_SINKS:
        m = gl.load(sinks + head, mask=exists, other=0.0).to(gl.float32) * LOG2_E
        l += 1.0
    acc = gl.full([cfg.MERGE_ROWS, cfg.BLOCK_DV], 0.0, gl.float32, out_layout)
    wait_for_previous_kernel()  # until every piece is written
    for n in range(0, count, cfg.MERGE_PIECES):
        place = (piece + n + pieces)[None, :] * cfg.ROWS + rows[:, None]
        is_piece = (n + pieces < count)[None, :] & exists[:, None]  # [MERGE_ROWS, MERGE_PIECES]
        part_lse = gl.load(partial_lse + place, mask=is_piece, other=float("-inf"))
        offset = gl.expand_dims(place * cfg.BLOCK_DV, 2) + gl.expand_dims(gl.expand_dims(cols, 0), 0)
        part = gl.load(partial + offset, mask=gl.expand_dims(is_piece, 2), other=0.0)
        m_new = gl.maximum(m, gl.max(part_lse, 1))
        m_finite = finite_or_zero(m_new)
        alpha = exp2(m - m_finite)
        weight = exp2(part_lse - m_finite[:, None])
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, out_layout))[:, None]
        acc += gl.sum(part * gl.expand_dims(weight, 2), 1)
        l = l * alpha + gl.sum(weight, 1)
        m = m_new
    if count >= 0:
        store_rows(out, lse, acc, m, l, b, segment, first_row, sizes, cfg)
