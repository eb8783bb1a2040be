"""Decoding for Hopper: few queries against a cache of many keys, at the speed of memory (split-KV).

    role           warps   does
    load_role x 2  1 each  stream the key tiles of their worker's splits into rings, by TMA
    mma_role x 2   4 each  S by wgmma, softmax in registers, O by wgmma; store each split's O / l and lse

    attn_decode_kernel        split -> normalized out (float32) and lse (log2 units), see `stream_k`;
                              a split that is a whole segment -> out and lse
    attn_decode_merge_kernel  out = sum_p exp(lse_p - lse) out_p,  lse = log(sum_p exp lse_p [+ exp sink])

Up to 64 rows, queries times the heads of a GQA group, cost the same: wgmma has 64 in any case. So the kernel
is bound by memory, and keeps bytes in flight: the load roles run ahead across the borders of splits. The
warpgroups work on alternate tiles, each with an O of its own. At the end of a split the first one adds the
second one's to its own. A ring has an even number of slots, so that only one warpgroup waits for a slot: with
two, one could be a phase ahead of the other, and a parity does not tell one phase from the next but one.
8-bit pages: `eight_bits`. Source: Dao et al., "Flash-Decoding" (2023).

The second kernel, and the next one's first, are launched early (programmatic dependent launch), so that
their start overlaps the end of the one before. Each waits for that one before it reads what it wrote.
"""

from tilewise.gpu.hopper.common.channel import Ring, make_ring
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    gl,
    gluon,
    start_next_kernel,
    wait_for_previous_kernel,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.guards import split_poison
from tilewise.gpu.hopper.common.layouts import accumulator_layout, operand_layout, row_layout, tile_layout
from tilewise.gpu.hopper.common.products import product, rescaled
from tilewise.gpu.hopper.common.softmax import LOG2_E
from tilewise.gpu.hopper.decode.arguments import DecodeSizes
from tilewise.gpu.hopper.decode.eight_bits import attend_8_bit_tiles, combine_warps
from tilewise.gpu.hopper.decode.load import load_role
from tilewise.gpu.hopper.decode.rows import combine_halves, load_queries, send_half, store_split
from tilewise.gpu.hopper.decode.softmax import first_row, row_numbers, softmax_step
from tilewise.gpu.hopper.decode.stream_k import make_schedule, split_at, worker_units
from tilewise.gpu.launch.entry import entry


@aggregate
class Shared:
    """Shared memory: the rings of keys and values, and what a warpgroup has for itself or for the other."""

    k: Ring  # STAGES tiles [BLOCK_N, BLOCK_D]
    v: Ring  # STAGES tiles [BLOCK_N, BLOCK_DV]
    q: gl.shared_memory_descriptor  # [WARPGROUPS, 64, BLOCK_D], but for 8-bit pages
    half: Ring  # READERS tiles: a warpgroup's acc of a split, [BLOCK_DV / 8, 512] as `by_threads` has it
    half_stats: gl.shared_memory_descriptor  # [2 * READERS, 64]: their m and l


@gluon.jit
def make_shared(dtype: gl.constexpr, cfg: gl.constexpr):
    """At head size 128: 4 x 32 KB of keys and values, 32 KB of queries, 32 KB of acc = 192 KB of 227 KB.

    Tiles of 8 bits have twice as many keys, so as many bytes; queries stay in registers.
    """
    k_layout: gl.constexpr = tile_layout([cfg.BLOCK_N, cfg.BLOCK_D], dtype, cfg.WHOLE_PAGES)
    v_layout: gl.constexpr = tile_layout([cfg.BLOCK_N, cfg.BLOCK_DV], dtype, cfg.WHOLE_PAGES)
    k = gl.allocate_shared_memory(dtype, [cfg.STAGES, cfg.BLOCK_N, cfg.BLOCK_D], k_layout)
    v = gl.allocate_shared_memory(dtype, [cfg.STAGES, cfg.BLOCK_N, cfg.BLOCK_DV], v_layout)
    q = k  # of 8-bit pages nothing: queries stay in registers
    if not cfg.HAS_SCALES:
        q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, cfg.BLOCK_D], dtype)
        q = gl.allocate_shared_memory(dtype, [cfg.WARPGROUPS, 64, cfg.BLOCK_D], q_layout)
    half_shape: gl.constexpr = [cfg.READERS, cfg.BLOCK_DV // 8, 512]
    half = gl.allocate_shared_memory(gl.float32, half_shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    stats = gl.allocate_shared_memory(
        gl.float32, [2 * cfg.READERS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    k_ring = make_ring(k, cfg.STAGES, 1, cfg.READERS)
    v_ring = make_ring(v, cfg.STAGES, 1, cfg.READERS)
    return Shared(k_ring, v_ring, q, make_ring(half, cfg.READERS, 1, 1), stats)


# ---- the mma roles


@gluon.jit
def attend_tiles(W: gl.constexpr, acc, m, l, use, split, slope_log2, smem, sizes, factors, cfg: gl.constexpr):
    """(acc, m, l) after every WARPGROUPS-th tile of a split."""
    k_ring, v_ring = smem.k, smem.v
    q_tile = smem.q.index(W)  # [64, BLOCK_D]
    for n in range((W - use) & (cfg.WARPGROUPS - 1), split.count, cfg.WARPGROUPS):
        k_ring.wait(use + n)
        s = product(q_tile, k_ring.chunk(use + n, 0).permute((1, 0)))
        s = warpgroup_mma_wait(0, deps=(s,))  # [64, BLOCK_N]
        k_ring.release(use + n)
        p, m, l, alpha = softmax_step(s, m, l, split.tile + n, slope_log2, split, sizes, factors, cfg)
        p = gl.convert_layout(p.to(v_ring.tiles.dtype), operand_layout(cfg.BLOCK_DV))
        acc = rescaled(acc, alpha)
        v_ring.wait(use + n)
        acc = warpgroup_mma(p, v_ring.chunk(use + n, 0), acc, is_async=True)  # [64, BLOCK_DV]
        acc = warpgroup_mma_wait(0, deps=(acc,))
        v_ring.release(use + n)
    return acc, m, l


@gluon.jit
def mma_role(W: gl.constexpr, q, targets, cache, slopes, smem, sizes, factors, cfg: gl.constexpr):
    """Warpgroup W: every WARPGROUPS-th tile of the worker's. The first one stores a split for both."""
    by_row: gl.constexpr = row_layout(cfg.BLOCK_N // (4 if cfg.HAS_SCALES else 1))
    first = first_row(W, cfg)
    rows = row_numbers(first, by_row, cfg)
    wait_for_previous_kernel()
    if W == 0:
        start_next_kernel()
    schedule = make_schedule(cache, sizes, cfg, 4)
    unit, end = worker_units(schedule, sizes)
    use = 0  # of the rings, by all warpgroups
    splits = 0
    while unit < end:
        split = split_at(unit, end, schedule, sizes, cfg, 4)
        slope_log2 = gl.full([64], 0.0, gl.float32, by_row)
        if cfg.HAS_ALIBI:
            head = split.kv_head * cfg.PACK + rows % cfg.PACK
            slope = gl.load(slopes + split.batch * sizes.stride_slopes + head)
            slope_log2 = slope.to(gl.float32) * LOG2_E
        m = gl.full([64], float("-inf"), gl.float32, by_row)
        l = gl.full([64], 0.0, gl.float32, by_row)
        if W == 0 or cfg.READERS == 2:
            l += split_poison(cache, split, sizes, cfg)
        if cfg.HAS_SCALES:
            acc, m, l = attend_8_bit_tiles(
                W, q, m, l, use, split, slope_log2, cache, smem, sizes, factors, cfg
            )
        else:
            acc = gl.full([64, cfg.BLOCK_DV], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_DV))
            load_queries(q, smem.q.index(W), split, sizes, cfg)
            acc, m, l = attend_tiles(W, acc, m, l, use, split, slope_log2, smem, sizes, factors, cfg)
        if cfg.READERS == 2:
            acc, m, l = combine_warps(W, acc, m, l, smem, cfg)
            store_split(targets, acc, m, l, first, split, sizes, factors, cfg)
        elif W == 0:
            acc, m, l = combine_halves(acc, m, l, splits, smem, cfg)
            if cfg.HAS_SCALES:
                acc, m, l = combine_warps(W, acc, m, l, smem, cfg)
            smem.half.release(splits)
            store_split(targets, acc, m, l, first, split, sizes, factors, cfg)
        else:
            send_half(acc, m, l, splits, smem, cfg)
        splits += 1
        use += split.count
        unit += split.units


# ---- the kernels


@entry(gluon.jit)
def attn_decode_kernel(
    q, k_desc, v_desc, k_page_desc, v_page_desc, targets, cache, slopes, sizes: DecodeSizes, factors,
    cfg: gl.constexpr,
):  # fmt: skip
    """One worker's share of the schedule. Grid: (workers,); `cfg` is a DecodeConfig."""
    smem = make_shared(k_desc.dtype, cfg)
    k, v = (k_desc, k_page_desc), (v_desc, v_page_desc)
    gl.warp_specialize(
        [
            (mma_role, (0, q, targets, cache, slopes, smem, sizes, factors, cfg)),
            (mma_role, (1, q, targets, cache, slopes, smem, sizes, factors, cfg)),
            (load_role, (0, k, v, cache, smem, sizes, cfg)),
            (load_role, (1, k, v, cache, smem, sizes, cfg)),
        ],
        [4, 1, 1],
        cfg.REGISTERS,
    )
