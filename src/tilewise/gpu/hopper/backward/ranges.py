"""Which tile of keys is next, which query tiles it visits, what they see: `core.mask`, transposed."""

from tilewise.gpu.hopper.common.compat import aggregate, gl, gluon, unhoisted
from tilewise.gpu.hopper.common.layouts import along
from tilewise.gpu.hopper.common.scheduler import l2_swizzled, locate_tile


@aggregate
class QueryTiles:
    """Query tiles [begin, end) of some keys, at least one; [full_begin, full_end) need no mask."""

    begin: gl.tensor
    end: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor

    @gluon.jit
    def count(self):
        return self.end - self.begin


@gluon.jit
def query_tiles(key, NUM_KEYS: gl.constexpr, work, sizes, cfg: gl.constexpr):
    """The query tiles that see keys [key, key + NUM_KEYS) of a sequence: at least one, perhaps all hidden.

    Queries past the end of the sequence need no mask: their lse is +inf.
    """
    offset = work.seqlen_k - work.seqlen_q
    first, last = 0, work.seqlen_q - 1  # queries that see some key
    full_first, full_last = 0, work.seqlen_q + cfg.BLOCK_M  # queries that see all keys
    if cfg.HAS_RIGHT:
        first = gl.maximum(key - offset - sizes.window_right, 0)
        full_first = gl.maximum(key + NUM_KEYS - 1 - offset - sizes.window_right, 0)
    if cfg.HAS_LEFT:
        last = gl.minimum(key + NUM_KEYS - 1 - offset + sizes.window_left, last)
        full_last = key - offset + sizes.window_left
    # a floor division of negatives would round toward zero: clamp first
    end = gl.maximum(last + cfg.BLOCK_M, cfg.BLOCK_M) // cfg.BLOCK_M
    begin = gl.minimum(first // cfg.BLOCK_M, end - 1)
    full_begin = (full_first + cfg.BLOCK_M - 1) // cfg.BLOCK_M
    full_end = gl.maximum(full_last + 1, 0) // cfg.BLOCK_M
    full_end = gl.where(key + NUM_KEYS > work.seqlen_k, 0, full_end)
    return QueryTiles(begin, end, full_begin, full_end)


@gluon.jit
def next_tile(head, tile, tiles):
    """(head, tile) of the next query tile: after a head's last, the first of the group's next head."""
    is_last = tile + 1 == tiles.end
    tile = gl.where(is_last, tiles.begin, tile + 1)
    return gl.where(is_last, head + 1, head), tile


@gluon.jit
def next_queries(head, tile, tiles, work, sizes, cfg: gl.constexpr):
    """Likewise, but LATEST_FIRST: each query tile of all heads of the group, before the next query tile."""
    if cfg.LATEST_FIRST:
        is_last = head + 1 == (work.head + 1) * sizes.group_size
        head = gl.where(is_last, work.head * sizes.group_size, head + 1)
        tile = gl.where(is_last, tile + 1, tile)
    else:
        head, tile = next_tile(head, tile, tiles)
    return head, tile


@gluon.jit
def mirrored(tile, tiles, cfg: gl.constexpr):
    """The query tile that comes as number `tile`, but for `staggered`."""
    if cfg.LATEST_FIRST:
        tile = tiles.begin + tiles.end - 1 - tile
    return tile


@gluon.jit
def staggered(tile, tiles, spread, cfg: gl.constexpr):
    """The query tile that comes as number `tile`.

    If all keys see all queries, tiles of keys that start together start at different queries, `spread` from
    the first one: they would wait for each other at each query tile's dQ.
    """
    if cfg.STAGGERED:
        tile = tiles.begin + (tile - tiles.begin + spread) % tiles.count()
    return mirrored(tile, tiles, cfg)


@aggregate
class Step:
    """A query tile that a tile of keys visits: `number` before `staggered`. What there is not is 0."""

    shifts: gl.tensor  # of all query tiles: what `rows` subtracts from scores where lse is large
    head: gl.tensor
    number: gl.tensor
    spread: gl.tensor
    tiles: QueryTiles
    has_hidden: gl.tensor  # whether a mask hides scores of the warpgroup, by its bits
    words: gl.tensor
    kept: gl.tensor  # which weights survive dropout: see `survivors`
    slope: gl.tensor  # of ALiBi
    bias: gl.tensor  # see `load_bias`


@gluon.jit
def load_shift(stats, at, work, layout: gl.constexpr, sizes, cfg: gl.constexpr):
    """The shift [BLOCK_M] of a query tile's rows: the third of its stats, or where the step `at` finds it."""
    if cfg.STATS > 2:
        shift = stats.slice(2 * cfg.BLOCK_M, cfg.BLOCK_M, 0).load(layout)
    else:
        tile = scratch_tile(work, at.head, staggered(at.number, at.tiles, at.spread, cfg), sizes, cfg)
        shift = gl.load(at.shifts + tile * cfg.BLOCK_M + gl.arange(0, cfg.BLOCK_M, layout))
    return shift


@gluon.jit
def dq_order(tile, work, sizes, cfg: gl.constexpr):
    """How many key tiles add to dQ of a query tile before this work's; -1 if no query sees these keys.

    They add in the order in which CTAs take them: ascending, or descending from the last tile a query sees.
    """
    offset = work.seqlen_k - work.seqlen_q
    is_seen = work.seqlen_q > 0
    if cfg.HAS_RIGHT:
        is_seen = is_seen & (work.row - offset - sizes.window_right < work.seqlen_q)
    if cfg.HAS_LEFT:
        is_seen = is_seen & (work.row + cfg.BLOCK_N - 1 - offset + sizes.window_left >= 0)
    if cfg.DESCENDING:
        last = (tile + 1) * cfg.BLOCK_M - 1 + offset + sizes.window_right
        order = gl.minimum(last, work.seqlen_k - 1) // cfg.BLOCK_N - work.row // cfg.BLOCK_N
    else:
        first = 0
        if cfg.HAS_LEFT:
            first = gl.maximum(tile * cfg.BLOCK_M + offset - sizes.window_left, 0) // cfg.BLOCK_N
        order = work.row // cfg.BLOCK_N - first
    return gl.where(is_seen, order, -1)


@gluon.jit
def mask_transposed(x, tile, key, work, sizes, cfg: gl.constexpr):
    """Exponents x [keys, BLOCK_M queries], with -inf where a query does not see a key.

    A thread holds two of every eight columns. What it compares is computed for two columns, here, and the
    number of the eight is a constant of each comparison: as positions of all columns they would be hoisted
    out of the loop of tiles and take 32 registers of it.
    """
    y = x.reshape([x.shape[0], x.shape[1] // 8, 8])
    layout: gl.constexpr = y.type.layout
    keys = unhoisted(key + gl.arange(0, x.shape[0], along(0, layout, 3)))
    first = tile * cfg.BLOCK_M + work.seqlen_k - work.seqlen_q  # position of the first query
    columns = first + gl.arange(0, 8, along(2, layout, 3))
    eights = 8 * gl.arange(0, x.shape[1] // 8, along(1, layout, 3))[None, :, None]
    ahead = keys[:, None, None] - columns[None, None, :]  # of the query, but for its eight
    least = 0 * ahead
    if cfg.HAS_RIGHT:
        least = ahead - sizes.window_right
    visible = gl.where((keys < work.seqlen_k)[:, None, None], least, 1 << 30) <= eights
    if cfg.HAS_LEFT:
        visible = visible & (ahead + sizes.window_left >= eights)
    hidden = gl.where(visible, y, float("-inf")).reshape(x.shape)
    return gl.convert_layout(hidden, x.type.layout, assert_trivial=True)


@gluon.jit
def swizzled_keys(index, num_tiles, num_bh, l2_swizzle, cfg: gl.constexpr):
    """(tile, bh) of an index: `l2_swizzle` (batch, head) pairs at a time, whose tiles share queries in L2.

    Deterministic, tiles wait for each other at each query tile. So as many pairs alternate as start together,
    and a tile starts some time after the one it waits for. Causal: the last come first, as do their first
    queries; or, LATEST_FIRST, as else.
    """
    if cfg.IS_DETERMINISTIC and not cfg.LATEST_FIRST:
        l2_swizzle = (gl.num_programs(0) + num_tiles - 1) // num_tiles
    tile, bh = l2_swizzled(index, num_tiles, num_bh, l2_swizzle, True)
    if not cfg.DESCENDING:
        tile = num_tiles - 1 - tile
    return tile, bh


@gluon.jit
def locate_keys(index, sizes, packing, cfg: gl.constexpr):
    """The work tile of an index: `row` is its first key, `head` its key head, `batch` its sequence.

    If causal, the first tiles of a sequence see most queries.
    """
    return locate_tile(index, sizes.num_bh, sizes.l2_swizzle, cfg.BLOCK_N, swizzled_keys, sizes, packing, cfg)


@gluon.jit
def bh_counter(semaphores, work, sizes, cfg: gl.constexpr):
    """Counts the tiles of keys of a (batch, key head) whose dQ is complete. It comes after the semaphores."""
    bh = work.head
    heads = sizes.num_bh * sizes.group_size
    if not cfg.IS_PACKED:
        bh = work.batch * (sizes.num_bh // sizes.batch) + work.head
    return semaphores + heads * sizes.tiles_q + bh


@gluon.jit
def scratch_tile(work, head, tile, sizes, cfg: gl.constexpr):
    """Where a query tile of a query head lies in the scratch tensors."""
    if cfg.IS_PACKED:
        first = head * sizes.tiles_q + work.start_q // cfg.BLOCK_M + work.batch
    else:
        heads = sizes.num_bh // sizes.batch * sizes.group_size
        first = (work.batch * heads + head) * sizes.tiles_q
    return first + tile
