"""Decoding of absorbed multi-head latent attention for Hopper: one key head of 576 columns, 512 of them V.

    role            warps   does
    score_role      4       S = Q K^T by wgmma, softmax in registers; hands P and alpha over; stores lse
    value_role x 2  4 each  its half of O, 64 x 256 in registers: O = alpha O + P V by wgmma; stores it
    load_role x 2   1 each  half of the columns of the key tiles into rings: `hopper.decode_mla_load`

        K tile ---> score_role --- P, alpha ---> value_role 0   O[:, :256]   V is the same K tile, read
          |                           +--------> value_role 1   O[:, 256:]   by all three
          +-----------------------------------------^

The rows of a score tile are queries of up to 64 heads, so that each key is read once for all of them. More
heads are several blocks, segments of their own, which read the same keys at the same time, through L2. Plan,
pieces and merging kernel are those of `hopper.decode`. P V of one tile runs beside S and softmax of the next:
what binds is memory with 16 heads, and the tensor cores with 128.
Source: DeepSeek-AI, "DeepSeek-V2" (2024); FlashMLA's cut of O in halves.
"""

from tilewise.gpu.hopper.common.arguments import UNSPECIALIZED_DECODE_SIZES, DecodeSizes
from tilewise.gpu.hopper.common.channel import Ring, make_ring
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    start_next_kernel,
    wait_for_previous_kernel,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.guards import piece_poison
from tilewise.gpu.hopper.common.layouts import accumulator_layout, row_layout
from tilewise.gpu.hopper.common.products import product
from tilewise.gpu.hopper.common.softmax import Factors
from tilewise.gpu.hopper.decode.kernel import weigh
from tilewise.gpu.hopper.decode.mla_load import (
    PART,
    PARTS,
    Keys,
    allocate_queries,
    half_of,
    load_half_of_queries,
    load_role,
    make_keys,
)
from tilewise.gpu.hopper.decode.plan import make_line, piece_at, piece_index, worker_units
from tilewise.gpu.hopper.decode.rows import store_columns, store_lse, store_piece_columns, store_piece_lse


@aggregate
class Shared:
    """Shared memory of a block."""

    keys: Keys
    queries: Ring  # one tile of four parts [64, PART]; its barriers count `queries_rest`, too
    queries_rest: gl.shared_memory_descriptor  # [64, 64 columns]
    weights: Ring  # P [64, BLOCK_N]; one more use at the end of a piece, without P
    factors: gl.shared_memory_descriptor  # [64]: what a use multiplies O by, first of all


@gluon.jit
def make_shared(dtype: gl.constexpr, cfg: gl.constexpr):
    """2 x 72 KB of keys, 72 KB of queries, 8 KB of P: 224 KB of 227 KB."""
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, cfg.BLOCK_N], dtype)
    queries, queries_rest = allocate_queries(dtype, cfg)
    weights = gl.allocate_shared_memory(dtype, [1, 64, cfg.BLOCK_N], p_layout)
    factors = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Shared(
        make_keys(dtype, 2, cfg),
        make_ring(queries, 1, PARTS, 1, 2),
        queries_rest,
        make_ring(weights, 1, 1, 2),
        factors,
    )


# ---- the mma roles


@gluon.jit
def scores(smem, use):
    """Start S = Q K^T [64, BLOCK_N] of a tile as its parts arrive."""
    rest = smem.keys.rest
    rest.wait(use)
    s = product(smem.queries_rest, rest.part(use, 0).permute((1, 0)))
    for n in gl.static_range(PARTS):
        parts = half_of(n // 2, smem.keys)
        parts.wait(2 * use + n % 2)
        k = parts.part(2 * use + n % 2, 0).permute((1, 0))
        s = warpgroup_mma(smem.queries.part(0, n), k, s, is_async=True)
    return s


@gluon.jit
def score_role(
    lse,
    residual,
    partial_lse,
    partial_low,
    seqlens_k,
    page_table,
    errors,
    smem,
    sizes,
    factors,
    cfg: gl.constexpr,
):
    """S and softmax of every tile of the worker's. A piece's last factor is 1 / l."""
    weights = smem.weights
    wait_for_previous_kernel()
    start_next_kernel()
    line = make_line(seqlens_k, sizes, cfg, 4)
    unit, end = worker_units(line, sizes)
    use = 0  # tiles so far
    handed = 0  # of the ring of weights
    pieces = 0
    while unit < end:
        piece = piece_at(unit, end, line, sizes, cfg, 4)
        m = gl.full([64], float("-inf"), gl.float32, row_layout(cfg.BLOCK_N))
        l = gl.full([64], 0.0, gl.float32, row_layout(cfg.BLOCK_N))
        l += piece_poison(page_table, errors, piece, sizes, 4, cfg)
        smem.queries.wait(pieces)
        for n in range(piece.count):
            s = warpgroup_mma_wait(0, deps=(scores(smem, use + n),))  # [64, BLOCK_N]
            smem.keys.rest.release(use + n)
            for part in gl.static_range(PARTS):
                half_of(part // 2, smem.keys).release(2 * (use + n) + part % 2)
            p, m, l, alpha = weigh(s, m, l, piece.tile + n, 0.0, piece, sizes, factors, cfg)
            p = p.to(weights.tiles.dtype)
            weights.acquire(handed + n)
            smem.factors.store(alpha)
            weights.part(handed + n, 0).store(p)
            fence_async_shared()  # the stores above are visible to wgmma
            weights.publish(handed + n)
        smem.queries.release(pieces)
        use += piece.count
        handed += piece.count
        weights.acquire(handed)
        smem.factors.store(1.0 / gl.where(l == 0.0, 1.0, l))
        weights.publish(handed)
        if cfg.STORES_WHOLE and piece.is_whole:
            store_lse(lse, residual, m, l, piece.batch, piece.segment, 0, sizes, factors, cfg)
        else:
            place = piece_index(piece.batch, piece.segment, gl.program_id(0), sizes)
            store_piece_lse(partial_lse, partial_low, m, l, place, piece, sizes, cfg)
        handed += 1
        pieces += 1
        unit += piece.units


@gluon.jit
def value_role(H: gl.constexpr, q, out, partial, seqlens_k, smem, sizes, cfg: gl.constexpr):
    """Half H of O, and of the queries, which it loads when the piece before has needed its own."""
    parts, weights = half_of(H, smem.keys), smem.weights
    rows: gl.constexpr = row_layout(PART)
    LEFT: gl.constexpr = 2 * H  # the first of this role's two parts
    wait_for_previous_kernel()
    line = make_line(seqlens_k, sizes, cfg, 4)
    unit, end = worker_units(line, sizes)
    use = 0  # tiles so far
    handed = 0  # of the ring of weights
    pieces = 0
    while unit < end:
        piece = piece_at(unit, end, line, sizes, cfg, 4)
        load_half_of_queries(H, q, smem.queries, smem.queries_rest, pieces, piece, sizes, cfg)
        left = gl.full([64, PART], 0.0, gl.float32, accumulator_layout(PART))
        right = left
        for n in range(piece.count):
            weights.wait(handed + n)
            alpha = smem.factors.load(rows)[:, None]
            left, right = left * alpha, right * alpha
            p = weights.part(handed + n, 0)  # [64, BLOCK_N]
            first = 2 * (use + n)  # use of the parts
            parts.wait(first)
            parts.wait(first + 1)
            left = warpgroup_mma(p, parts.part(first, 0), left, is_async=True)  # [64, PART]
            right = warpgroup_mma(p, parts.part(first + 1, 0), right, is_async=True)
            left = warpgroup_mma_wait(1, deps=(left,))
            parts.release(first)
            right = warpgroup_mma_wait(0, deps=(right,))
            weights.release(handed + n)
            parts.release(first + 1)
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
    q, k_desc, out, lse, residual, partial, partial_lse, partial_low, seqlens_k, page_table, errors,
    batch, num_heads, seqlen_q, seqlen_k, segments, row_tiles, workers, window_left, window_right,
    stride_q_batch, stride_q_row, stride_q_head, stride_slopes, stride_page_table, num_pages, rows_k, rows_v,
    scale_log2e, two_over_softcap_log2e, softcap_log2e, scale, cfg: gl.constexpr,
):  # fmt: skip
    """One worker's part of the line. Grid: (workers,); `cfg` is an MlaConfig.

    partial: float32 [pieces, ROWS, BLOCK_DV]; partial_lse, partial_low: [pieces, ROWS].
    """
    sizes = DecodeSizes(
        batch, num_heads, seqlen_q, seqlen_k, segments, row_tiles, workers, window_left, window_right,
        stride_q_batch, stride_q_row, stride_q_head, stride_slopes, stride_page_table, num_pages,
        rows_k, rows_v,
    )  # fmt: skip
    factors = Factors(scale_log2e, two_over_softcap_log2e, softcap_log2e, scale)
    smem = make_shared(k_desc.dtype, cfg)
    gl.warp_specialize(
        [
            (
                score_role,
                (
                    lse,
                    residual,
                    partial_lse,
                    partial_low,
                    seqlens_k,
                    page_table,
                    errors,
                    smem,
                    sizes,
                    factors,
                    cfg,
                ),
            ),
            (value_role, (0, q, out, partial, seqlens_k, smem, sizes, cfg)),
            (value_role, (1, q, out, partial, seqlens_k, smem, sizes, cfg)),
            (load_role, (0, k_desc, smem.keys, smem.queries, seqlens_k, page_table, sizes, cfg)),
            (load_role, (1, k_desc, smem.keys, smem.queries, seqlens_k, page_table, sizes, cfg)),
        ],
        [4, 4, 1, 1],
        cfg.REGISTERS,
    )
