"""Split-KV by Stream-K: key tiles of all sequences in one schedule, of which each worker has an equal share.

A worker is a persistent CTA. The rows of a score tile are queries of a whole GQA group, so that each key is
read once. A segment is one (sequence, key head, tile of rows). The schedule lists segment after segment:

    segment      0               1          2
    units    | s . . . . . . | s . . . | s . . . . . |      a tile each, but for the segment's start
    worker   |   0   |   1   |   2   |   3   |  4  |        a split: what one worker does of one segment

Each worker has total // workers units, the first total % workers of them one more. A split that is all of
its segment needs no reduction. Where lengths differ, the start of a segment counts START_UNITS: keys
are loaded ahead across it, but queries are not, so a worker of many short segments would be the last to end.
Where all are equally long, each worker has as many starts, and only tiles count.
Every program computes the schedule from the lengths: the host reads nothing, and a CUDA graph replays with
new lengths. Source: Osama et al., "Stream-K" (2023).
"""

from tilewise.gpu.hopper.common.compat import aggregate, gl, gluon
from tilewise.gpu.hopper.common.guards import own_keys
from tilewise.gpu.hopper.common.softmax import reciprocal


@aggregate
class Schedule:
    """Of every sequence its keys, units of one of its segments, and the end of its last segment."""

    starts: gl.tensor  # [BLOCK_B], left padding
    lengths: gl.tensor  # without it, see `guards.own_keys`
    units: gl.tensor
    ends: gl.tensor
    start: gl.tensor  # units that a segment's start counts: START_UNITS, or 0 where tiles alone count


@aggregate
class Split:
    """`count` key tiles from `tile` on, of one segment; none where its start alone is the worker's."""

    batch: gl.tensor
    segment: gl.tensor  # within its sequence
    tile: gl.tensor  # from 0 at the sequence's first keys, seen or not: see `ranges.tile_origin`
    count: gl.tensor
    units: gl.tensor  # count, and what it has of the start's
    is_whole: gl.tensor  # all of the segment
    row: gl.tensor  # first query
    kv_head: gl.tensor
    seqlen_q: gl.tensor
    start_k: gl.tensor  # rows of left padding
    seqlen_k: gl.tensor


@gluon.constexpr_function
def batch_layout(block_b, num_warps):
    """Of one number a sequence: every warp holds all of them, so that no warp waits for another."""
    return gl.BlockedLayout([max(1, block_b // 32)], [32], [num_warps], [0])


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def first_tile(seqlen_k, sizes, cfg: gl.constexpr):
    """The first key tile that some query sees."""
    first = 0 * seqlen_k
    if cfg.HAS_LEFT:
        first = gl.maximum(seqlen_k - sizes.seqlen_q - sizes.window_left, 0) // cfg.BLOCK_N
    return first


@gluon.jit
def make_schedule(cache, sizes, cfg: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The schedule of all sequences, for a role of NUM_WARPS warps."""
    b = gl.arange(0, cfg.BLOCK_B, batch_layout(cfg.BLOCK_B, NUM_WARPS))
    exists = b < sizes.batch
    seqlen_k = gl.where(exists, sizes.seqlen_k, 0)
    start_k = 0 * b
    if cfg.IS_CACHED:
        held = gl.load(cache.seqlens_k + b, mask=exists, other=0)
        if cfg.HAS_LEFTPAD:
            start_k = gl.load(cache.leftpad_k + b, mask=exists, other=0)
        start_k, seqlen_k, _ = own_keys(held, start_k, sizes.seqlen_k, cfg)
    tiles = (seqlen_k + (cfg.BLOCK_N - 1)) // cfg.BLOCK_N - first_tile(seqlen_k, sizes, cfg)
    tiles = gl.where(seqlen_k > 0, tiles, 0)
    start, units = 0 * sizes.batch, tiles
    if cfg.START_UNITS > 0:
        most = gl.max(tiles, 0)
        is_ragged = gl.max((exists & (tiles < most)).to(gl.int32), 0)
        start = is_ragged * cfg.START_UNITS
        units = gl.where(tiles > 0, tiles + start, 0)
    return Schedule(start_k, seqlen_k, units, gl.associative_scan(units * sizes.segments, 0, add), start)


@gluon.jit
def quotient(a, b):
    """a // b of numbers that are not negative, for quotients below 2^19.

    A float32 quotient that is a little too small is off by one at most. The exact division takes three times
    the instructions, each of which waits for the one before, ahead of the first copy.
    """
    q = gl.cast(gl.cast(a, gl.float32) * (reciprocal(gl.cast(b, gl.float32)) * (1 - 2**-20)), gl.int32)
    return q + gl.cast(a - q * b >= b, gl.int32)


@gluon.jit
def worker_start(worker, total, workers):
    """The first unit of a worker."""
    share = quotient(total, workers)
    return worker * share + gl.minimum(worker, total - share * workers)


@gluon.jit
def worker_units(schedule, sizes):
    """The units [unit, end) of the schedule that this program works on."""
    total = gl.max(schedule.ends, 0)
    unit = worker_start(gl.program_id(0), total, sizes.workers)
    return unit, worker_start(gl.program_id(0) + 1, total, sizes.workers)


@gluon.jit
def worker_of(unit, total, workers):
    """The worker that has `unit`."""
    share = quotient(total, workers)
    more = total - share * workers  # workers that have one more
    longer = more * (share + 1)  # units of theirs
    rest = more + quotient(unit - longer, gl.maximum(share, 1))
    return gl.where(unit < longer, quotient(unit, share + 1), rest)


@gluon.jit
def number_of(numbers, b, cfg: gl.constexpr, NUM_WARPS: gl.constexpr):
    """numbers[b]"""
    index = gl.arange(0, cfg.BLOCK_B, batch_layout(cfg.BLOCK_B, NUM_WARPS))
    return gl.sum(gl.where(index == b, numbers, 0), 0)


@gluon.jit
def tile_of(segment, sizes, cfg: gl.constexpr):
    """(key head or block of query heads, tile of rows) of a segment."""
    block = segment
    # with a plain 0 the compiler keeps the offsets of all rows in registers, and some spill
    tile = gl.minimum(segment, 0)
    if cfg.HAS_ROW_TILES:
        block = quotient(segment, sizes.row_tiles)
        tile = segment - block * sizes.row_tiles
    return block, tile


@gluon.jit
def split_at(unit, end, schedule, sizes, cfg: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The split from `unit` of the schedule on, before `end`."""
    is_before = schedule.ends <= unit
    b = gl.sum(is_before.to(gl.int32), 0)
    offset = unit - gl.max(gl.where(is_before, schedule.ends, 0), 0)
    seqlen_k = number_of(schedule.lengths, b, cfg, NUM_WARPS)
    all_units = number_of(schedule.units, b, cfg, NUM_WARPS)
    segment = quotient(offset, all_units)
    first = offset - segment * all_units
    units = gl.minimum(all_units - first, end - unit)
    tile, count = first, units
    if cfg.START_UNITS > 0:
        tile = gl.maximum(first - schedule.start, 0)
        count = gl.maximum(first + units - schedule.start, 0) - tile
    start_k = 0 * b
    if cfg.HAS_LEFTPAD:
        start_k = number_of(schedule.starts, b, cfg, NUM_WARPS)
    kv_head, row_tile = tile_of(segment, sizes, cfg)
    return Split(
        b,
        segment,
        first_tile(seqlen_k, sizes, cfg) + tile,
        count,
        units,
        units == all_units,
        row_tile * (cfg.ROWS // cfg.PACK),
        kv_head,
        sizes.seqlen_q + 0 * b,
        start_k,
        seqlen_k,
    )


@gluon.jit
def split_index(batch, segment, worker, sizes):
    """Where a split's results lie. Distinct: to the next split, segment or worker grows, none shrinks."""
    return gl.cast(batch, gl.int64) * sizes.segments + segment + worker
