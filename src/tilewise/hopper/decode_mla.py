"""Decoding of absorbed multi-head latent attention for Hopper: one key head of 576 columns, 512 of them V.

    role            warps   does
    score_role      4       S = Q K^T by wgmma, softmax in registers; hands P and alpha over; stores lse
    value_role x 2  4 each  its half of O, 64 x 256 in registers: O = alpha O + P V by wgmma; stores it
    load_role       1       streams the key tiles of the worker's pieces into a ring, by TMA

        K tile ---> score_role --- P, alpha ---> value_role 0   O[:, :256]   V is the same K tile, read
          |                           +--------> value_role 1   O[:, 256:]   by all three
          +-----------------------------------------^

The rows of a score tile are queries of up to 64 heads, so that each key is read once for all of them. More
heads are several blocks, segments of their own, which read the same keys at the same time, through L2. Plan,
pieces and merging kernel are those of `hopper.decode`. P V of one tile runs beside S and softmax of the next:
what binds is memory with 16 heads, and the tensor cores with 128.
Source: DeepSeek-AI, "DeepSeek-V2" (2024); FlashMLA's cut of O in halves.
"""

from tilewise.hopper.arguments import UNSPECIALIZED_DECODE_SIZES, DecodeSizes
from tilewise.hopper.channel import Ring, make_ring
from tilewise.hopper.compat import (
    aggregate,
    as_boxes,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    start_next_kernel,
    wait_for_previous_kernel,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.hopper.decode import weigh
from tilewise.hopper.decode_load import box_place, load_pages
from tilewise.hopper.decode_plan import make_line, piece_at, piece_index, worker_units
from tilewise.hopper.decode_rows import (
    load_queries,
    store_columns,
    store_lse,
    store_piece_columns,
    store_piece_lse,
)
from tilewise.hopper.layouts import accumulator_layout, row_layout
from tilewise.hopper.products import product
from tilewise.hopper.softmax import Factors

PART = gl.constexpr(128)  # columns of a tile's part: with 256, ptxas finds too few registers for a product
PARTS = gl.constexpr(4)  # of V, two for each value role
REST = gl.constexpr(64)  # columns of K that V does not have: they carry the rotary positions


@aggregate
class Shared:
    """Shared memory. The barriers of `keys` and `queries` count their last columns, too."""

    keys: Ring  # STAGES tiles of four parts [BLOCK_N, PART]
    keys_rest: gl.shared_memory_descriptor  # [STAGES, BLOCK_N, REST]
    queries: Ring  # one tile of four parts [64, PART]
    queries_rest: gl.shared_memory_descriptor  # [64, REST]
    weights: Ring  # P [64, BLOCK_N]; one more use at the end of a piece, without P
    factors: gl.shared_memory_descriptor  # [64]: what a use multiplies O by, first of all


@gluon.jit
def make_shared(dtype: gl.constexpr, cfg: gl.constexpr):
    """2 x 72 KB of keys, 72 KB of queries, 8 KB of P: 224 KB of 227 KB."""
    k_part: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, PART], dtype)
    k_rest: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, REST], dtype)
    q_part: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, PART], dtype)
    q_rest: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, REST], dtype)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, cfg.BLOCK_N], dtype)
    keys = gl.allocate_shared_memory(dtype, [PARTS * cfg.STAGES, cfg.BLOCK_N, PART], k_part)
    keys_rest = gl.allocate_shared_memory(dtype, [cfg.STAGES, cfg.BLOCK_N, REST], k_rest)
    queries = gl.allocate_shared_memory(dtype, [PARTS, 64, PART], q_part)
    queries_rest = gl.allocate_shared_memory(dtype, [64, REST], q_rest)
    weights = gl.allocate_shared_memory(dtype, [1, 64, cfg.BLOCK_N], p_layout)
    factors = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Shared(
        make_ring(keys, cfg.STAGES, PARTS, 3),
        keys_rest,
        make_ring(queries, 1, PARTS, 1, 2),
        queries_rest,
        make_ring(weights, 1, 1, 2),
        factors,
    )


# ---- the load role


@gluon.jit
def load_tiles(desc, smem, use, pages, piece, tile, sizes, cfg: gl.constexpr):
    """Start TMA copies of one tile of keys; rows past the sequence's end become zeros."""
    place = box_place(0, pages, piece, tile, sizes.rows_k, cfg)
    load_columns(desc, smem.keys, use, place, 0, PARTS * PART // REST, desc.block_type.nbytes)
    rest = as_boxes(smem.keys_rest, cfg.STAGES, desc).index(use % cfg.STAGES)
    coords = (1 << 30, place[0], place[1], 0, PARTS * PART)
    load_tile(desc, coords, smem.keys.full.index(use % cfg.STAGES), rest)


@gluon.jit
def load_columns(
    desc, ring, use, place, FIRST: gl.constexpr, BOXES: gl.constexpr, MORE_BYTES: gl.constexpr = 0
):  # fmt: skip
    """Start TMA copies of boxes of a tile's columns, from FIRST on, into one slot of a ring.

    MORE_BYTES: of other copies that the caller then starts, for the barrier of the same slot.
    """
    boxes = as_boxes(ring.tiles, ring.STAGES * BOXES, desc)
    slot = use % ring.STAGES
    ring.acquire(use)
    bar_full = ring.full.index(slot)
    mbarrier.expect(bar_full, BOXES * desc.block_type.nbytes + MORE_BYTES)
    for box in gl.static_range(BOXES):
        coords = (1 << 30, place[0], place[1], 0, FIRST + box * REST)
        load_tile(desc, coords, bar_full, boxes.index(slot * BOXES + box))


@gluon.jit
def load_role(desc, smem, seqlens_k, page_table, sizes, cfg: gl.constexpr):
    """Stream the worker's key tiles. Page numbers are read a tile ahead."""
    wait_for_previous_kernel()
    line = make_line(seqlens_k, sizes, cfg, 1)
    unit, end = worker_units(line, sizes)
    use = 0  # of the ring
    while unit < end:
        piece = piece_at(unit, end, line, sizes, cfg, 1)
        ptr_table = page_table
        held = 0
        if cfg.PAGE_SIZE > 0:
            ptr_table = page_table + gl.cast(piece.batch, gl.int64) * sizes.stride_page_table
            held = (piece.seqlen_k + (cfg.PAGE_SIZE - 1)) // cfg.PAGE_SIZE
        pages = load_pages(ptr_table, piece.tile, held, cfg)
        for n in range(piece.count):
            next_pages = load_pages(ptr_table, piece.tile + n + 1, held, cfg)  # answered during a wait
            load_tiles(desc, smem, use + n, pages, piece, piece.tile + n, sizes, cfg)
            pages = next_pages
        use += piece.count
        unit += piece.units


# ---- the mma roles


@gluon.jit
def scores(smem, use, cfg: gl.constexpr):
    """Start S = Q K^T [64, BLOCK_N] of a use of the ring of keys."""
    s = product(smem.queries_rest, smem.keys_rest.index(use % cfg.STAGES).permute((1, 0)))
    for n in gl.static_range(PARTS):
        k = smem.keys.part(use, n).permute((1, 0))
        s = warpgroup_mma(smem.queries.part(0, n), k, s, is_async=True)
    return s


@gluon.jit
def score_role(lse, partial_lse, seqlens_k, smem, sizes, factors, cfg: gl.constexpr):
    """S and softmax of every tile of the worker's. A piece's last factor is 1 / l."""
    keys, weights = smem.keys, smem.weights
    wait_for_previous_kernel()
    start_next_kernel()
    line = make_line(seqlens_k, sizes, cfg, 4)
    unit, end = worker_units(line, sizes)
    use = 0  # of the ring of keys
    handed = 0  # of the ring of weights
    pieces = 0
    while unit < end:
        piece = piece_at(unit, end, line, sizes, cfg, 4)
        m = gl.full([64], float("-inf"), gl.float32, row_layout(cfg.BLOCK_N))
        l = gl.full([64], 0.0, gl.float32, row_layout(cfg.BLOCK_N))
        smem.queries.wait(pieces)
        for n in range(piece.count):
            keys.wait(use + n)
            s = warpgroup_mma_wait(0, deps=(scores(smem, use + n, cfg),))  # [64, BLOCK_N]
            keys.release(use + n)
            p, m, l, alpha = weigh(s, m, l, piece.tile + n, 0.0, piece, sizes, factors, cfg)
            p = p.to(weights.tiles.dtype)
            weights.acquire(handed + n)
            smem.factors.store(alpha)
            weights.part(handed + n, 0).store(p)
            fence_async_shared()  # the stores above are visible to wgmma
            weights.publish(handed + n)
        use += piece.count
        handed += piece.count
        weights.acquire(handed)
        smem.factors.store(1.0 / gl.where(l == 0.0, 1.0, l))
        weights.publish(handed)
        if cfg.STORES_WHOLE and piece.is_whole:
            store_lse(lse, m, l, piece.batch, piece.segment, 0, sizes, cfg)
        else:
            place = piece_index(piece.batch, piece.segment, gl.program_id(0), sizes)
            store_piece_lse(partial_lse, m, l, place, piece, sizes, cfg)
        handed += 1
        pieces += 1
        unit += piece.units


@gluon.jit
def value_role(H: gl.constexpr, q, out, partial, seqlens_k, smem, sizes, cfg: gl.constexpr):
    """Half H of O, and of the queries, which it loads when the piece before has needed its own."""
    keys, weights = smem.keys, smem.weights
    rows: gl.constexpr = row_layout(PART)
    LEFT: gl.constexpr = 2 * H  # the first of this role's two parts
    wait_for_previous_kernel()
    line = make_line(seqlens_k, sizes, cfg, 4)
    unit, end = worker_units(line, sizes)
    use = 0  # of the ring of keys
    handed = 0  # of the ring of weights
    pieces = 0
    while unit < end:
        piece = piece_at(unit, end, line, sizes, cfg, 4)
        load_queries(q, smem.queries.part(0, LEFT), LEFT * PART, piece, sizes, cfg)
        load_queries(q, smem.queries.part(0, LEFT + 1), (LEFT + 1) * PART, piece, sizes, cfg)
        if H == 0:
            load_queries(q, smem.queries_rest, PARTS * PART, piece, sizes, cfg)
        smem.queries.publish(pieces)
        left = gl.full([64, PART], 0.0, gl.float32, accumulator_layout(PART))
        right = left
        for n in range(piece.count):
            weights.wait(handed + n)
            alpha = smem.factors.load(rows)[:, None]
            left, right = left * alpha, right * alpha
            p = weights.part(handed + n, 0)  # [64, BLOCK_N]
            keys.wait(use + n)
            left = warpgroup_mma(p, keys.part(use + n, LEFT), left, is_async=True)  # [64, PART]
            right = warpgroup_mma(p, keys.part(use + n, LEFT + 1), right, is_async=True)
            left, right = warpgroup_mma_wait(0, deps=(left, right))
            weights.release(handed + n)
            keys.release(use + n)
        use += piece.count
        handed += piece.count
        weights.wait(handed)
        inverse = smem.factors.load(rows)[:, None]
        weights.release(handed)
        for n in gl.static_range(2):
            acc = (left, right)[n] * inverse
            if cfg.STORES_WHOLE and piece.is_whole:
                store_columns(out, acc, (LEFT + n) * PART, piece.batch, piece.segment, 0, sizes, cfg)
            else:
                place = piece_index(piece.batch, piece.segment, gl.program_id(0), sizes)
                store_piece_columns(partial, acc, (LEFT + n) * PART, place, piece, sizes, cfg)
        handed += 1
        pieces += 1
        unit += piece.units


# ---- the kernel; the merging one is `hopper.decode_merge`


@gluon.jit(do_not_specialize=UNSPECIALIZED_DECODE_SIZES)
def attn_decode_mla_kernel(
    q, k_desc, out, lse, partial, partial_lse, seqlens_k, page_table,
    batch, num_heads, seqlen_q, seqlen_k, segments, row_tiles, workers, window_left, window_right,
    stride_q_batch, stride_q_row, stride_q_head, stride_slopes, stride_page_table, rows_k, rows_v,
    scale_log2e, two_over_softcap_log2e, softcap_log2e, cfg: gl.constexpr,
):  # fmt: skip
    """One worker's part of the line. Grid: (workers,); `cfg` is an MlaConfig.

    partial: float32 [pieces, ROWS, BLOCK_DV]; partial_lse: [pieces, ROWS].
    """
    sizes = DecodeSizes(
        batch, num_heads, seqlen_q, seqlen_k, segments, row_tiles, workers, window_left, window_right,
        stride_q_batch, stride_q_row, stride_q_head, stride_slopes, stride_page_table, rows_k, rows_v,
    )  # fmt: skip
    factors = Factors(scale_log2e, two_over_softcap_log2e, softcap_log2e)
    smem = make_shared(k_desc.dtype, cfg)
    gl.warp_specialize(
        [
            (score_role, (lse, partial_lse, seqlens_k, smem, sizes, factors, cfg)),
            (value_role, (0, q, out, partial, seqlens_k, smem, sizes, cfg)),
            (value_role, (1, q, out, partial, seqlens_k, smem, sizes, cfg)),
            (load_role, (k_desc, smem, seqlens_k, page_table, sizes, cfg)),
        ],
        [4, 4, 1],
        cfg.REGISTERS,
    )
