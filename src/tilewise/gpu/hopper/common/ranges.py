"""Which key tiles a tile of queries visits, and which scores are visible: `tilewise.core.mask` on the GPU."""

from tilewise.gpu.hopper.common.compat import aggregate, gl, gluon
from tilewise.gpu.hopper.common.layouts import along

MANY_TILES = gl.constexpr(8)  # of keys: from there on a work tile looks how its scores go on


@aggregate
class KeyTiles:
    """Key tiles [begin, end) of some query rows; those in [full_begin, full_end) need no mask.

    Before the last num_steady tiles of the visit, in the order of `visited`, each row has seen a key; and
    where `far` is not 0, it has been visited first, and tile 0 second.
    """

    begin: gl.tensor
    end: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    num_steady: gl.tensor
    far: gl.tensor


@gluon.jit
def hidden_rows(keys, cfg: gl.constexpr):
    """Rows of left padding in the first tile of the keys of a work tile, or a split.

    With pages tiles begin with a page, or with a part of BLOCK_N rows. But if that has all keys, the tile
    begins with the first: TMA fills with zeros what is before a row, or behind one, not both.
    """
    rows = 0 * keys.seqlen_k
    if cfg.HIDES_PADDING:
        UNIT: gl.constexpr = min(cfg.PAGE_SIZE, cfg.BLOCK_N)
        rows = gl.where(keys.seqlen_k > UNIT, keys.start_k % UNIT, 0)
    return rows


@gluon.jit
def tile_origin(keys, cfg: gl.constexpr):
    """The row of the cache at which the first of such tiles begins."""
    row = 0 * keys.seqlen_k
    if cfg.HAS_LEFTPAD:
        row = keys.start_k - hidden_rows(keys, cfg)
    return row


@gluon.jit
def key_tiles(row, NUM_ROWS: gl.constexpr, work, sizes, cfg: gl.constexpr):
    """The key tiles that queries [row, row + NUM_ROWS) can see: at least one, perhaps all hidden."""
    offset = work.seqlen_k - work.seqlen_q
    first, last = 0, work.seqlen_k - 1  # keys that some row sees
    full_first, full_last = 0, work.seqlen_k - 1  # keys that all rows see
    if cfg.HAS_LEFT:
        first = gl.maximum(row + offset - sizes.window_left, 0)
        full_first = gl.maximum(row + NUM_ROWS - 1 + offset - sizes.window_left, 0)
    if cfg.HAS_RIGHT:
        last = gl.minimum(row + NUM_ROWS - 1 + offset + sizes.window_right, last)
        full_last = gl.minimum(row + offset + sizes.window_right, full_last)
    if cfg.HIDES_PADDING:
        full_first = gl.maximum(full_first, hidden_rows(work, cfg))
    # a floor division of negatives would round toward zero: clamp first
    end = gl.maximum(last + cfg.BLOCK_N, cfg.BLOCK_N) // cfg.BLOCK_N
    begin = gl.minimum(first // cfg.BLOCK_N, end - 1)
    full_begin = (full_first + cfg.BLOCK_N - 1) // cfg.BLOCK_N
    full_end = gl.maximum(full_last + 1, 0) // cfg.BLOCK_N
    # a key that all rows see: full_last, or the first of all; once its tile has been visited, all are steady
    num_steady = full_last // cfg.BLOCK_N - begin if cfg.NEAREST_FIRST else end - 1
    num_steady = gl.where(full_first <= full_last, num_steady, 0)
    far = 0 * end
    if cfg.BOTH_ENDS_FIRST and not cfg.HAS_LEFT:
        far = far_tile(work, sizes, cfg)
        num_steady = gl.where(far > 0, gl.minimum(num_steady, end - 2), num_steady)
    return KeyTiles(begin, end, full_begin, full_end, num_steady, far)


@gluon.jit
def far_tile(work, sizes, cfg: gl.constexpr):
    """The last key tile of which each row of a work tile sees a key; 0 if it is one of the first."""
    last = work.seqlen_k - 1
    if cfg.HAS_RIGHT:
        last = gl.minimum(work.row + work.seqlen_k - work.seqlen_q + sizes.window_right, last)
    last = gl.maximum(last, 0) // cfg.BLOCK_N
    return gl.where(last >= MANY_TILES, last, 0)


@gluon.jit
def visited(tiles, left, cfg: gl.constexpr):
    """The key tile of a visit after which `left` others are to come.

    Ascending, so that the tile under a right edge, whose mask takes time, is not the first, beside which
    nothing runs. Descending with a left edge: of the tile under the right edge each row sees a key. And with
    ALiBi, as the largest scores are there. In float16, whose references bear less, the far tile is first and
    tile 0 second: scores that grow or fall along the keys are largest at one of them, and so are those of a
    first key that is a sink.
    """
    if cfg.NEAREST_FIRST:
        j = tiles.begin + left
    else:
        j = tiles.end - 1 - left
        if cfg.BOTH_ENDS_FIRST:
            j = gl.where(j == 0, tiles.far, gl.where(j <= tiles.far, j - 1, j))
    return j


@gluon.jit
def unvisited(tiles, all_tiles, cfg: gl.constexpr):
    """How many of the CTA's key tiles come (before, after) those of one warpgroup."""
    low, high = tiles.begin - all_tiles.begin, all_tiles.end - tiles.end
    if cfg.NEAREST_FIRST:
        low, high = high, low
    return low, high


@gluon.jit
def by_thread(s, tile, row, work, cfg: gl.constexpr):
    """(s as x, positions, firsts, columns) of scores s [64, BLOCK_N] of a tile, rows from `row` on.

    x [64, BLOCK_N // 8, 4, 2]: thread t has columns 2t and 2t + 1 of every eight. So the visible columns of
    a row are compared with numbers that the compiler knows: they take no registers.
    positions [64, 1, 1, 1]: of the rows, among the tile's keys; a row holds PACK heads of each position
    firsts [1, 1, 4, 1], columns [1, BLOCK_N // 8, 1, 2]: a column of x is the sum of the two
    """
    x = s.reshape([64, s.shape[1] // 8, 4, 2])
    layout: gl.constexpr = x.type.layout
    start = row + work.seqlen_k - work.seqlen_q - tile * cfg.BLOCK_N
    positions = start + gl.arange(0, 64, along(0, layout, 4)) // cfg.PACK
    firsts = 2 * gl.arange(0, 4, along(2, layout, 4))
    eights = 8 * gl.arange(0, x.shape[1], along(1, layout, 4))
    columns = eights[None, :, None, None] + gl.arange(0, 2, along(3, layout, 4))[None, None, None, :]
    return x, positions[:, None, None, None], firsts[None, None, :, None], columns


@gluon.jit
def mask_right(s, tile, row, work, sizes, cfg: gl.constexpr, hidden=float("-inf")):
    """s with `hidden` where a key is past the last that its query sees."""
    x, positions, firsts, columns = by_thread(s, tile, row, work, cfg)
    last = 0 * positions + (work.seqlen_k - 1 - tile * cfg.BLOCK_N)
    if cfg.HAS_RIGHT:
        last = gl.minimum(positions + sizes.window_right, last)
    x = gl.where(columns <= last - firsts, x, hidden)
    return gl.convert_layout(x.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def mask_left(s, tile, row, work, sizes, cfg: gl.constexpr, hidden=float("-inf")):
    """s with `hidden` where a key is before the first that its query sees."""
    x, positions, firsts, columns = by_thread(s, tile, row, work, cfg)
    first = positions - sizes.window_left
    if cfg.HIDES_PADDING:
        first = gl.maximum(first, hidden_rows(work, cfg) - tile * cfg.BLOCK_N)
    x = gl.where(columns >= first - firsts, x, hidden)
    return gl.convert_layout(x.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def hide(s, tile, row, work, sizes, cfg: gl.constexpr):
    """s with -inf where a query does not see a key, right or left."""
    s = mask_right(s, tile, row, work, sizes, cfg)
    if cfg.HAS_LEFT or cfg.HIDES_PADDING:
        s = mask_left(s, tile, row, work, sizes, cfg)
    return s
