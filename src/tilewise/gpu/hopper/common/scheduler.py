"""The tile scheduler: which work tile a CTA takes next, of queries, or in the backward of keys.

Kernels are persistent. A CTA starts with the work tile of its own number and takes the next ones from one
atomic counter, so that none idles while tiles remain, whatever their lengths. Long tiles come first: the
last one to start is short. Tiles that run at the same time read the same keys (L2 swizzle): only as many
heads are worked on as have keys and values that fit the L2 cache.
"""

from tilewise.gpu.hopper.common.channel import make_ring
from tilewise.gpu.hopper.common.compat import aggregate, gl, gluon
from tilewise.gpu.hopper.common.guards import WRONG_START, own_keys
from tilewise.gpu.launch.entry import entry


@aggregate
class WorkTile:
    """One work tile. `row`: its first query (or key) in its sequence; -1 says that all is done."""

    row: gl.tensor
    head: gl.tensor  # first query head of the tile; of a tile of keys its key head
    batch: gl.tensor  # of a dense tensor; of packed sequences or a cache the sequence
    start_q: gl.tensor  # rows before the sequence, in the packed tensors; 0 if dense
    seqlen_q: gl.tensor
    start_k: gl.tensor  # likewise of keys; of a cache rows of left padding, or `WRONG_START`
    seqlen_k: gl.tensor


@gluon.jit
def l2_swizzled(index, num_tiles, num_bh, l2_swizzle, DESCENDING: gl.constexpr):
    """(tile, bh) of an index into `num_tiles` tiles x `num_bh` (batch, head) pairs.

    `l2_swizzle` pairs at a time. Of these, the tiles of a pair are neighbours, or, if DESCENDING, the last
    (longest) tiles of all of them come first.
    """
    per_swizzle = num_tiles * l2_swizzle
    first_bh = index // per_swizzle * l2_swizzle
    rest = index % per_swizzle
    size = gl.minimum(l2_swizzle, num_bh - first_bh)
    if DESCENDING:
        tile = num_tiles - 1 - rest // size
        bh = first_bh + rest % size
    else:
        tile = rest % num_tiles
        bh = first_bh + rest // num_tiles
    return tile, bh


@gluon.jit
def count_work_tiles(sizes, packing):
    """Work tiles of all (batch, head) pairs; if ordered, `order_sequences_kernel` has counted."""
    if packing.first_tile is None:
        num_tiles = sizes.num_tiles
    else:
        num_tiles = gl.load(packing.first_tile + sizes.batch)
    return num_tiles * sizes.num_bh


@gluon.jit
def find_sequence(first_tile, batch, tile):
    """The last i with first_tile[i] <= tile, by bisection."""
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(first_tile + middle) <= tile:
            low = middle
        else:
            high = middle
    return low


@gluon.jit
def length_of(cu_seqlens, i, batch):
    """Length of sequence i, 0 past the last; offsets are int32 or int64."""
    start = gl.load(cu_seqlens + i, mask=i < batch, other=0).to(gl.int32)
    return gl.load(cu_seqlens + i + 1, mask=i < batch, other=0).to(gl.int32) - start


@gluon.jit
def tiles_of(cu_seqlens, seqlen, i, batch, BLOCK_POSITIONS: gl.constexpr):
    """Tiles of sequence i, 0 past the last; without offsets all are of one length."""
    if cu_seqlens is None:
        length = gl.where(i < batch, seqlen, 0)
    else:
        length = length_of(cu_seqlens, i, batch)
    return (length + BLOCK_POSITIONS - 1) // BLOCK_POSITIONS


@entry(gluon.jit)
def order_sequences_kernel(
    cu_seqlens_q, seqlens_k, order, first_tile, batch: int, seqlen_q: int,
    BLOCK_POSITIONS: gl.constexpr, HAS_OFFSETS: gl.constexpr,
):  # fmt: skip
    """Sequences by falling number of keys: `order`, and the query tiles `first_tile` before each.

    seqlens_k: offsets of packed keys, or the lengths themselves.
    One program counts, for each sequence, which others come before it: a sort without moving anything.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 32], [32, 1], [4, 1], [1, 0])
    for i0 in range(0, batch, 128):
        i = i0 + gl.arange(0, 128, gl.SliceLayout(1, layout))
        length_i = keys_of(seqlens_k, i, batch, HAS_OFFSETS)
        rank = 0 * i
        first = 0 * i
        for j0 in range(0, batch, 32):
            j = j0 + gl.arange(0, 32, gl.SliceLayout(0, layout))
            length_j = keys_of(seqlens_k, j, batch, HAS_OFFSETS)
            tiles_j = tiles_of(cu_seqlens_q, seqlen_q, j, batch, BLOCK_POSITIONS)
            is_longer = length_j[None, :] > length_i[:, None]
            is_tie = (length_j[None, :] == length_i[:, None]) & (j[None, :] < i[:, None])
            is_before = (is_longer | is_tie) & (j < batch)[None, :]
            rank += gl.sum(is_before.to(gl.int32), 1)
            first += gl.sum(gl.where(is_before, tiles_j[None, :], 0), 1)
        gl.store(order + rank, i, mask=i < batch)
        gl.store(first_tile + rank, first, mask=i < batch)
        # the sequence that comes last also knows the total
        total = first + tiles_of(cu_seqlens_q, seqlen_q, i, batch, BLOCK_POSITIONS)
        gl.store(first_tile + batch + 0 * i, total, mask=rank == batch - 1)


@gluon.jit
def keys_of(seqlens_k, i, batch, HAS_OFFSETS: gl.constexpr):
    """Keys of sequence i, 0 past the last."""
    if HAS_OFFSETS:
        length = length_of(seqlens_k, i, batch)
    else:
        length = gl.load(seqlens_k + i, mask=i < batch, other=0).to(gl.int32)
    return length


@gluon.jit
def locate_tile(
    index, num_bh, l2_swizzle, ROWS: gl.constexpr, SWIZZLE: gl.constexpr, sizes, packing, cfg: gl.constexpr
):
    """The work tile of ROWS rows of an index into all tiles of `num_bh` (batch, head) pairs, or packed heads.

    SWIZZLE: a function like `l2_swizzled`, which takes cfg last.
    """
    if cfg.IS_PACKED:
        b, first, own_tiles = ordered_sequence(index // num_bh, sizes.batch, packing)
        start_q, own_q = packed_rows(packing.cu_seqlens_q, b)
        start_k, own_k = packed_rows(packing.cu_seqlens_k, b)
        tile, head = SWIZZLE(index - first * num_bh, own_tiles, num_bh, l2_swizzle, cfg)
    else:
        tile, bh = SWIZZLE(index, sizes.num_tiles, num_bh, l2_swizzle, cfg)
        heads = num_bh // sizes.batch
        b, head = bh // heads, bh % heads
        zero = 0 * bh
        start_q, own_q, start_k, own_k = zero, sizes.seqlen_q + zero, zero, sizes.seqlen_k + zero
    return WorkTile(tile * ROWS, head * cfg.PACK, b, start_q, own_q, start_k, own_k)


@gluon.jit
def ordered_sequence(number, batch, packing):
    """(sequence, tiles before it, its tiles) of tile `number`."""
    rank = find_sequence(packing.first_tile, batch, number)
    b = gl.load(packing.order + rank)
    first = gl.load(packing.first_tile + rank)
    return b, first, gl.load(packing.first_tile + rank + 1) - first


@gluon.jit
def packed_rows(cu_seqlens, b):
    """(first row, rows) of sequence b."""
    start = gl.load(cu_seqlens + b).to(gl.int32)
    return start, gl.load(cu_seqlens + b + 1).to(gl.int32) - start


@gluon.jit
def longest_first(index, num_tiles, num_bh, l2_swizzle, cfg: gl.constexpr):
    """`l2_swizzled`: with a right edge the last tiles are the longest."""
    return l2_swizzled(index, num_tiles, num_bh, l2_swizzle, cfg.HAS_RIGHT)


@gluon.jit
def locate(index, sizes, packing, cache, cfg: gl.constexpr):
    """The work tile of an index. Ordered: each sequence has its own tiles, and bh is a head."""
    ROWS: gl.constexpr = cfg.BLOCK_M // cfg.PACK
    if cfg.IS_CACHED:
        b, first, own_tiles = ordered_sequence(index // sizes.num_bh, sizes.batch, packing)
        if cfg.IS_PACKED:
            start_q, own_q = packed_rows(packing.cu_seqlens_q, b)
        else:
            start_q, own_q = 0 * b, sizes.seqlen_q + 0 * b
        pad = gl.load(cache.leftpad_k + b) if cfg.HAS_LEFTPAD else 0 * b
        pad, own_k, fits = own_keys(gl.load(cache.seqlens_k + b), pad, sizes.seqlen_k, cfg)
        start_k = gl.where(fits, pad, WRONG_START)  # there are no keys then
        rest = index - first * sizes.num_bh
        tile, bh = longest_first(rest, own_tiles, sizes.num_bh, sizes.l2_swizzle, cfg)
        work = WorkTile(tile * ROWS, bh * cfg.PACK, b, start_q, own_q, start_k, own_k)
    else:
        work = locate_tile(index, sizes.num_bh, sizes.l2_swizzle, ROWS, longest_first, sizes, packing, cfg)
    return work


@gluon.jit
def number_of(work, sizes, cfg: gl.constexpr):
    """The number of a work tile's (batch, head), packed of its head, where sizes count query heads.

    As 64 bits: what is found by it may be far away.
    """
    number = work.head
    if not cfg.IS_PACKED:
        number = work.batch * (sizes.num_bh // sizes.batch) + work.head
    return gl.cast(number, gl.int64)


@gluon.jit
def fetch_add(counter, is_wanted=True, IS_ACQUIRE: gl.constexpr = False):
    """Add 1 to a counter, and ask what it was. The answer is not waited for: see `fetched`, `next_work`."""
    SEM: gl.constexpr = "acquire" if IS_ACQUIRE else "relaxed"
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.atomic_add(counter + 0 * lane, 0 * lane + 1, mask=(lane == 0) & is_wanted, sem=SEM)


@gluon.jit
def fetched(ticket):
    """What the counter of `fetch_add` was."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.sum(gl.where(lane == 0, ticket, 0), 0)


@gluon.jit
def next_work(ticket):
    """The index of the work tile that a ticket of `fetch_add` won: the next that no CTA has taken."""
    return gl.num_programs(0) + fetched(ticket)


@gluon.jit
def reset_if_last(counter):
    """Called once by each CTA at its end: the last one sets the counters to 0 for the next launch."""
    if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def make_work_ring(CONSUMERS: gl.constexpr):
    """Two messages of eight integers."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return make_ring(gl.allocate_shared_memory(gl.int32, [2, 8], layout), 2, 1, CONSUMERS)


@gluon.jit
def send(ring, use, work, more=0):
    """The load role sends a work tile to the other roles, and one more number."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    ring.acquire(use)
    field = gl.arange(0, 8, layout)
    message = gl.where(field == 0, work.row, work.head)
    message = gl.where(field == 2, work.batch, message)
    message = gl.where(field == 3, work.start_q, message)
    message = gl.where(field == 4, work.seqlen_q, message)
    message = gl.where(field == 5, work.start_k, message)
    message = gl.where(field == 6, work.seqlen_k, message)
    message = gl.where(field == 7, more, message)
    ring.chunk(use, 0).store(message)
    ring.publish(use)


@gluon.jit
def send_end(ring, use, index, counter):
    """The load role tells the other roles that all is done; index is any integer."""
    nothing = 0 * index
    send(ring, use, WorkTile(nothing - 1, nothing, nothing, nothing, nothing, nothing, nothing))
    reset_if_last(counter)


@gluon.jit
def receive(ring, use, NUM_WARPS: gl.constexpr = 4):
    """(work tile, what else was sent) of a use, from the load role."""
    work, more = peek(ring, use, NUM_WARPS)
    ring.release(use)
    return work, more


@gluon.jit
def peek(ring, use, NUM_WARPS: gl.constexpr = 4):
    """`receive` of a use that is to be released later."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [NUM_WARPS], [0])
    ring.wait(use)
    message = ring.chunk(use, 0).load(layout)
    field = gl.arange(0, 8, layout)
    work = WorkTile(
        gl.sum(gl.where(field == 0, message, 0), 0),
        gl.sum(gl.where(field == 1, message, 0), 0),
        gl.sum(gl.where(field == 2, message, 0), 0),
        gl.sum(gl.where(field == 3, message, 0), 0),
        gl.sum(gl.where(field == 4, message, 0), 0),
        gl.sum(gl.where(field == 5, message, 0), 0),
        gl.sum(gl.where(field == 6, message, 0), 0),
    )
    return work, gl.sum(gl.where(field == 7, message, 0), 0)
