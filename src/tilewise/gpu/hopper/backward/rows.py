"""Before and after the main backward kernel: row statistics in, dQ out. Plain Triton, bound by memory.

Scratch tensors hold query tiles of BLOCK_M rows one after another: tile `t` of query head `bh` is number
`bh * tiles_q + t`. Dense: bh is (batch, head). Packed: bh is a head, and sequence b owns the tiles
from cu_seqlens_q[b] // BLOCK_M + b on, which is always enough.
"""

import triton
import triton.language as tl

from tilewise.gpu.hopper.backward.arguments import LARGE_LSE, FinishSizes, RowSizes, Splits
from tilewise.gpu.launch.entry import entry
from tilewise.gpu.launch.exact import LOG2E, shift_and_low

LARGE = tl.constexpr(LARGE_LSE)
AHEAD = tl.constexpr(133.0)  # 192 in units of log2


@triton.jit
def locate_rows(tile, bh, sizes, cu_seqlens_q, BLOCK_M: tl.constexpr):
    """(sequence, head, first row in the tensor, first row in the sequence, seqlen_q) of a query tile."""
    start = tile * 0
    if cu_seqlens_q is None:
        b, h = bh // sizes.num_heads, bh % sizes.num_heads
        row, own = tile * BLOCK_M, sizes.seqlen_q
    else:
        b = tile * 0
        end = b + sizes.batch
        while end - b > 1:
            middle = (b + end) // 2
            is_after = tl.load(cu_seqlens_q + middle) // BLOCK_M + middle > tile
            end = tl.where(is_after, middle, end)
            b = tl.where(is_after, b, middle)
        start = tl.load(cu_seqlens_q + b).to(tl.int32)
        row = (tile - (start // BLOCK_M + b)) * BLOCK_M
        own = tl.load(cu_seqlens_q + b + 1).to(tl.int32) - start
        b, h = b * 0, bh
    return b, h, start, row, own


@entry(triton.jit)
def attn_bwd_prepare_kernel(
    out, do, lse_ptr, residual_ptr, dlse_ptr, stats_ptr, shifts_ptr, semaphores_ptr, cu_seqlens_q,
    sizes: RowSizes, scale, keep,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, HAS_LARGE_LSE: tl.constexpr,
    STARTS_NEXT: tl.constexpr,
):  # fmt: skip
    """stats [2, BLOCK_M] of a query tile: lse in units of log2, delta = rowsum(dO * O) - dlse.

    A float takes no more than 24 bits of lse. Where that of some row is large, in place of lse stands what a
    shift leaves of it in all rows, more than 128: see `scores.weights`. The shifts are a tensor of their own
    or, if that is None, the third of four rows of stats. `scale`: of logits; a softcap. With dropout delta
    counts `keep`.

    The semaphore of its dQ starts at 0: who claims it first stores.
    Rows that do not exist or see nothing get lse = +inf, so that their P is 0.
    """
    out_ptr, o_stride_batch, o_stride_row, o_stride_head = out
    do_ptr, do_stride_batch, do_stride_row, do_stride_head = do
    if STARTS_NEXT:  # the main kernel's CTAs get ready where programs have ended
        tl.extra.cuda.gdc_launch_dependents()
    number = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(0) % sizes.tiles_q
    bh = tl.program_id(0) // sizes.tiles_q
    b, h, start, row, own = locate_rows(tile, bh, sizes, cu_seqlens_q, BLOCK_M)
    i = row + tl.arange(0, BLOCK_M)
    exists = i < own
    rows = (start + i).to(tl.int64)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = exists[:, None] & (cols < DIM)
    o_base = out_ptr + b.to(tl.int64) * o_stride_batch + h.to(tl.int64) * o_stride_head
    do_base = do_ptr + b.to(tl.int64) * do_stride_batch + h.to(tl.int64) * do_stride_head
    o_tile = tl.load(o_base + rows * o_stride_row + cols, mask=mask, other=0.0).to(tl.float32)
    do_tile = tl.load(do_base + rows * do_stride_row + cols, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(o_tile * do_tile, 1)
    stat = bh.to(tl.int64) * sizes.total_q + start + i
    lse = tl.load(lse_ptr + stat, mask=exists, other=float("inf"))
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + stat, mask=exists, other=0.0)
    if keep is not None:
        delta *= keep
    residual = tl.zeros((BLOCK_M,), tl.float32)
    if residual_ptr is not None:
        residual += tl.load(residual_ptr + stat, mask=exists, other=0.0)
    is_finite = tl.abs(lse) < float("inf")
    finite = tl.where(is_finite, lse, 0.0)
    shift, low = tl.zeros((BLOCK_M,), tl.float32), (finite + residual) * LOG2E
    if HAS_LARGE_LSE:
        is_large = tl.max(tl.abs(finite), 0) > LARGE
        ahead = tl.maximum(tl.abs(finite) * 2.0**-20, AHEAD)  # more than roundings of shift
        far_shift, far_low = shift_and_low(finite, residual, tl.zeros((), tl.float32) + scale, ahead)
        shift, low = tl.where(is_large, far_shift, 0.0), tl.where(is_large, far_low, low)
    low = tl.where(is_finite, low, tl.where(lse == float("-inf"), float("inf"), lse))
    offset = tl.arange(0, BLOCK_M)
    if shifts_ptr is not None:
        tl.store(shifts_ptr + number * BLOCK_M + offset, shift)
        stats_ptr += number * (2 * BLOCK_M) + offset
    else:
        stats_ptr += number * (4 * BLOCK_M) + offset
        tl.store(stats_ptr + 2 * BLOCK_M, shift)
    tl.store(stats_ptr, low)
    tl.store(stats_ptr + BLOCK_M, delta)
    if semaphores_ptr is not None:
        tl.store(semaphores_ptr + number, 0)
        counter = semaphores_ptr + tl.num_programs(0) + bh
        tl.store(counter, 0, mask=tile == 0)
        tl.store(counter + 1, 0, mask=tile == 0)  # the next one's, or after the last `reduced_counter`


@triton.jit
def reduced_counter(semaphores_ptr, num_tiles, tiles_q):
    """Counts the programs that have reduced splits. It comes last, after those of tiles and heads."""
    return semaphores_ptr + num_tiles + num_tiles // tiles_q


@entry(triton.jit)
def attn_bwd_finish_kernel(
    sums_ptr, semaphores_ptr, first_tile_ptr, dq, cu_seqlens_q, scale, sizes: FinishSizes,
    dk, dv, splits: Splits,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    IS_EARLY: tl.constexpr, IS_EVENLY_SPLIT: tl.constexpr,
):  # fmt: skip
    """dQ, and dK and dV of keys that several CTAs share.

    Programs may start on SMs that have no work left in the main kernel. They wait for all keys of a head.
    Where splits of keys lie in dq, the tiles there come `late`: they wait until the splits are reduced.
    """
    SUBTILES: tl.constexpr = BLOCK_M * BLOCK_D // 4096
    dq_ptr, dq_stride_batch, dq_stride_row, dq_stride_head = dq
    tiles_q, num_heads, num_tiles, late = sizes.tiles_q, sizes.num_heads, sizes.num_tiles, sizes.late
    program = tl.program_id(0)
    reductions = tl.num_programs(0) - num_tiles * SUBTILES
    number = program - (num_tiles - late * num_heads) * SUBTILES  # of a reduction
    if (number >= 0) & (number < reductions):
        if splits.sums is not None:
            if IS_EARLY:
                tl.extra.cuda.gdc_wait()
            finish_keys(dk, dv, number, sizes, splits, DIM, DIM_V, BLOCK_D, IS_EVENLY_SPLIT)
            if late > 0:
                tl.debug_barrier()  # all threads have read
                tl.atomic_add(reduced_counter(semaphores_ptr, num_tiles, tiles_q), 1, sem="release")
    else:
        program = tl.where(number < 0, program, program - reductions)
        tile = tile_in_order(program // SUBTILES, late, num_tiles, num_heads, tiles_q)
        subtile, bh = tile * SUBTILES + program % SUBTILES, tile // tiles_q
        b, h, start, row, own = locate_rows(tile % tiles_q, bh, sizes, cu_seqlens_q, BLOCK_M)
        if IS_EARLY:
            key_tiles = sizes.key_tiles
            if first_tile_ptr is not None:
                key_tiles = tl.load(first_tile_ptr + sizes.batch)
            shares = key_tiles
            if splits.sums is not None:  # a tile that is shared counts as its steps
                shared = (bh // sizes.group_size + 1) * key_tiles - splits.border
                shared = tl.minimum(tl.maximum(shared, 0), key_tiles)
                shares += shared * (tiles_q * sizes.group_size - 1)
            prefetch(sums_ptr + subtile.to(tl.int64) * 4096 + tl.arange(0, 128) * 32)
            await_count(semaphores_ptr + num_tiles + bh // sizes.group_size, shares, 4000)
        dq_base = dq_ptr + b.to(tl.int64) * dq_stride_batch + h.to(tl.int64) * dq_stride_head
        dq_base += start.to(tl.int64) * dq_stride_row
        sums = (sums_ptr, semaphores_ptr, subtile)
        x = sum_of_queries(*sums, BLOCK_D, BLOCK_M) * scale
        if (number >= 0) & (late > 0):
            await_count(reduced_counter(semaphores_ptr, num_tiles, tiles_q), reductions, 200)
        store_queries(x, dq_base, dq_stride_row, row, own, subtile, DIM, BLOCK_D, BLOCK_M)
    if IS_EARLY and tl.program_id(0) == tl.num_programs(0) - 1:
        tl.extra.cuda.gdc_wait()  # dK and dV are written: who waits for this kernel relies on it


@triton.jit
def tile_in_order(index, late, num_tiles, num_heads, tiles_q):
    """The query tile that comes as number `index`: head by head, without the first `late` tiles of all heads.

    These come last, in the order of memory: all heads of a tile.
    """
    early = num_tiles - late * num_heads
    before = late // tiles_q * num_heads * tiles_q  # whole sequences
    first = late % tiles_q  # of the next sequence's heads
    rest = tiles_q - first
    if index >= early:
        row, head = (index - early) // num_heads, (index - early) % num_heads
        tile = (row // tiles_q * num_heads + head) * tiles_q + row % tiles_q
    elif index < rest * num_heads:
        tile = before + index // rest * tiles_q + first + index % rest
    else:
        tile = before + first * num_heads + index
    return tile


@triton.jit
def sum_of_queries(sums_ptr, semaphores_ptr, subtile, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """A [64, 64] subtile of a query tile's dQ / scale: 0 where nobody has claimed and written it."""
    SUBTILES: tl.constexpr = BLOCK_M * BLOCK_D // 4096
    x = tl.load(sums_ptr + subtile.to(tl.int64) * 4096 + tl.arange(0, 4096))
    x = tl.where(tl.load(semaphores_ptr + subtile // SUBTILES) > 0, x, 0.0)
    return in_rows(x, 64)


@triton.jit
def store_queries(
    x, dq_base, dq_stride_row, row, own, subtile,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """It in dQ's own layout and dtype."""
    SUBTILES: tl.constexpr = BLOCK_M * BLOCK_D // 4096
    n = subtile % SUBTILES
    i = row + n * 64 // BLOCK_D * 64 + tl.arange(0, 64)
    col = n * 64 % BLOCK_D + tl.arange(0, 64)
    ptrs = dq_base + i.to(tl.int64)[:, None] * dq_stride_row + col[None, :]
    tl.store(ptrs, x.to(dq_base.dtype.element_ty), mask=(i < own)[:, None] & (col < DIM)[None, :])


@triton.jit
def finish_keys(
    dk, dv, number, sizes, splits,
    DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, IS_EVENLY_SPLIT: tl.constexpr,
):  # fmt: skip
    """dK or dV of 64 keys, 16 columns: the sum of a tile's splits; see `splits`."""
    STRIPS: tl.constexpr = BLOCK_D // 16
    kv_heads, unit, steps = sizes.num_heads // sizes.group_size, splits.unit, sizes.tiles_q * sizes.group_size
    shared, strip = number // (4 * STRIPS), number % (4 * STRIPS)
    if IS_EVENLY_SPLIT:  # the first tiles of all heads
        bh, tile = shared % (kv_heads * sizes.batch), shared // (kv_heads * sizes.batch)
        first, last = shared * unit, shared * unit + unit - 1
    else:
        position = splits.border + shared
        bh, tile = position // sizes.key_tiles, position % sizes.key_tiles
        first, last = shared * steps // unit + shared, ((shared + 1) * steps - 1) // unit + shared
    x = tl.zeros((1024,), tl.float32)
    for split in range(first, last + 1, 8):
        eight = split + tl.arange(0, 8)
        ptrs = splits.sums + eight.to(tl.int64)[:, None] * (256 * BLOCK_D)
        ptrs += strip * 1024 + tl.arange(0, 1024)[None, :]
        x += tl.sum(tl.load(ptrs, mask=(eight <= last)[:, None], other=0.0), 0)
    x = in_rows(x, 16)
    keys = tile * 128 + strip // (2 * STRIPS) * 64 + tl.arange(0, 64)
    rows = ((bh // kv_heads).to(tl.int64) * sizes.seqlen_k + keys) * kv_heads + bh % kv_heads
    col = strip % STRIPS * 16 + tl.arange(0, 16)
    exists = (keys < sizes.seqlen_k)[:, None]
    if strip // STRIPS % 2 == 0:
        ptrs = dk + rows[:, None] * DIM + col[None, :]
        tl.store(ptrs, x.to(dk.dtype.element_ty), mask=exists & (col < DIM)[None, :])
    else:
        ptrs = dv + rows[:, None] * DIM_V + col[None, :]
        tl.store(ptrs, x.to(dv.dtype.element_ty), mask=exists & (col < DIM_V)[None, :])


@triton.jit
def in_rows(x, COLUMNS: tl.constexpr):
    """[64, COLUMNS] of what lies in the order of a warpgroup's registers."""
    # eights of columns, warp, row, pair of columns, half of the warp's rows, column -> rows, columns
    x = tl.permute(tl.reshape(x, (COLUMNS // 8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    return tl.reshape(x, (64, COLUMNS))


@triton.jit
def await_count(counter, least, NANOSECONDS: tl.constexpr):
    """Wait for those that count, all of whom have started: the main kernel's CTAs, or programs before this.

    In between it sleeps, up to twice as long as asked. Where tiles are few, thousands of warps wait for as
    long as the main kernel runs, and all asking at once they made that take twice as long.
    """
    while tl.atomic_add(counter, 0, sem="acquire") < least:
        while tl.load(counter, volatile=True) < least:
            SLEEP: tl.constexpr = "nanosleep.u32 $2; mov.b32 $0, $1;"
            tl.inline_asm_elementwise(
                SLEEP, "=r,r,r", [least, NANOSECONDS], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def prefetch(ptrs):
    """Bring lines of 128 bytes to the L2 cache, where others may still add to them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
    )
