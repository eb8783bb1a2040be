"""Who does what when few queries meet many keys: one line of key tiles, of which workers take equal parts.

The rows of a score tile are queries of all heads that share a key head, so that each key is read once. A
segment is one (sequence, key head, tile of rows); its key tiles stand on the line, segment after segment:

    segment      0               1          2
    tiles    | . . . . . . . | . . . . | . . . . . . |
    worker   |   0   |   1   |   2   |   3   |  4  |        a piece: what one worker does of one segment

Worker w has the tiles from w * total // workers on, so tile u is worker ((u + 1) * workers - 1) // total's.
The line follows from the lengths by arithmetic that every program does for itself: nothing is read by the
host, and a CUDA graph replays with new lengths. Source: Osama et al., "Stream-K" (2023).
"""

from tilewise.hopper.compat import aggregate, gl, gluon


@aggregate
class Plan:
    """The line, in shared memory: a sequence's number of keys, and where its last segment ends."""

    lengths: gl.shared_memory_descriptor  # [BLOCK_B, 1]
    ends: gl.shared_memory_descriptor  # [BLOCK_B, 1]

    @gluon.constexpr_function
    def __init__(self, lengths, ends):
        self.lengths = lengths
        self.ends = ends


@aggregate
class Piece:
    """`count` key tiles from `tile` on, of one segment."""

    batch: gl.tensor
    segment: gl.tensor  # within its sequence
    tile: gl.tensor
    count: gl.tensor
    row: gl.tensor  # first query
    kv_head: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, segment, tile, count, row, kv_head, seqlen_q, seqlen_k):
        self.batch = batch
        self.segment = segment
        self.tile = tile
        self.count = count
        self.row = row
        self.kv_head = kv_head
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k


@gluon.constexpr_function
def batch_layout():
    """Of one number a sequence, over four warps."""
    return gl.BlockedLayout([1], [32], [4], [0])


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
def sequence_ends(seqlens_k, sizes, cfg: gl.constexpr):
    """(keys of each sequence, tiles of one of its segments, where its last segment ends), each [BLOCK_B]."""
    b = gl.arange(0, cfg.BLOCK_B, batch_layout())
    exists = b < sizes.batch
    seqlen_k = gl.where(exists, sizes.seqlen_k, 0)
    if cfg.HAS_LENGTHS:  # a wrong length must not lead outside of the cache
        held = gl.load(seqlens_k + b, mask=exists, other=0).to(gl.int32)
        seqlen_k = gl.minimum(gl.maximum(held, 0), seqlen_k)
    tiles = (seqlen_k + (cfg.BLOCK_N - 1)) // cfg.BLOCK_N - first_tile(seqlen_k, sizes, cfg)
    tiles = gl.where(seqlen_k > 0, tiles, 0)
    return seqlen_k, tiles, gl.associative_scan(tiles * sizes.segments, 0, add)


@gluon.jit
def worker_start(worker, total, workers):
    """The first tile of a worker; those that are more than the tiles have none."""
    workers = gl.minimum(workers, gl.maximum(total, 1))
    worker = gl.minimum(worker, workers)
    return gl.cast(gl.cast(worker, gl.int64) * total // workers, gl.int32)


@gluon.jit
def worker_of(unit, total, workers):
    """The worker that has tile `unit`."""
    workers = gl.minimum(workers, gl.maximum(total, 1))
    return gl.cast((gl.cast(unit + 1, gl.int64) * workers - 1) // gl.maximum(total, 1), gl.int32)


@gluon.jit
def read_number(smem, i, NUM_WARPS: gl.constexpr):
    """smem[i] of [n, 1] as a scalar."""
    return gl.sum(smem.index(i).load(gl.BlockedLayout([1], [32], [NUM_WARPS], [0])), 0)


@gluon.jit
def piece_at(unit, end, b, plan, sizes, cfg: gl.constexpr, NUM_WARPS: gl.constexpr):
    """The piece from tile `unit` of the line on, before tile `end`; b is its sequence or an earlier one."""
    sequence_end = read_number(plan.ends, b, NUM_WARPS)
    while sequence_end <= unit:
        b += 1
        sequence_end = read_number(plan.ends, b, NUM_WARPS)
    seqlen_k = read_number(plan.lengths, b, NUM_WARPS)
    first = first_tile(seqlen_k, sizes, cfg)
    tiles = (seqlen_k + (cfg.BLOCK_N - 1)) // cfg.BLOCK_N - first
    place = unit - (sequence_end - tiles * sizes.segments)
    segment = place // tiles
    tile = place % tiles
    row_tile = segment % sizes.row_tiles
    return Piece(
        b,
        segment,
        first + tile,
        gl.minimum(tiles - tile, end - unit),
        row_tile * (cfg.ROWS // cfg.PACK),
        segment // sizes.row_tiles,
        sizes.seqlen_q + 0 * b,
        seqlen_k,
    )


@gluon.jit
def piece_index(batch, segment, worker, sizes):
    """Where a piece's results lie: distinct, since of two neighbours one number is larger, none smaller."""
    return gl.cast(batch, gl.int64) * sizes.segments + segment + worker
