"""Which key tiles a tile of queries visits, and which scores are visible: `tilewise.mask` on the GPU."""

from tilewise.hopper.compat import aggregate, gl, gluon


@aggregate
class KeyTiles:
    """Key tiles [begin, end) of some query rows; those in [plain_begin, plain_end) need no mask.

    When the tiles from steady_end on have been visited, each row has seen a key.
    """

    begin: gl.tensor
    end: gl.tensor
    plain_begin: gl.tensor
    plain_end: gl.tensor
    steady_end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, begin, end, plain_begin, plain_end, steady_end):
        self.begin = begin
        self.end = end
        self.plain_begin = plain_begin
        self.plain_end = plain_end
        self.steady_end = steady_end


@gluon.jit
def key_tiles(row, NUM_ROWS: gl.constexpr, work, sizes, cfg: gl.constexpr):
    """The key tiles that queries [row, row + NUM_ROWS) can see: at least one, perhaps all hidden."""
    offset = work.seqlen_k - work.seqlen_q
    first, last = 0, work.seqlen_k - 1  # keys that some row sees
    plain_first, plain_last = 0, work.seqlen_k - 1  # keys that all rows see
    if cfg.HAS_LEFT:
        first = gl.maximum(row + offset - sizes.window_left, 0)
        plain_first = gl.maximum(row + NUM_ROWS - 1 + offset - sizes.window_left, 0)
    if cfg.HAS_RIGHT:
        last = gl.minimum(row + NUM_ROWS - 1 + offset + sizes.window_right, last)
        plain_last = gl.minimum(row + offset + sizes.window_right, plain_last)
    # a floor division of negatives would round toward zero: clamp first
    end = gl.maximum(last + cfg.BLOCK_N, cfg.BLOCK_N) // cfg.BLOCK_N
    begin = gl.minimum(first // cfg.BLOCK_N, end - 1)
    plain_begin = (plain_first + cfg.BLOCK_N - 1) // cfg.BLOCK_N
    plain_end = gl.maximum(plain_last + 1, 0) // cfg.BLOCK_N
    # after plain_last's tile each row has seen that key; without a key that all see, never
    steady_end = gl.where(plain_first <= plain_last, plain_last // cfg.BLOCK_N, 0)
    return KeyTiles(begin, end, plain_begin, plain_end, steady_end)


@gluon.jit
def positions(s, tile, row, work, cfg: gl.constexpr):
    """(each row's position among the keys, the keys) of a tile; rows hold PACK heads of each position."""
    rows = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout)) // cfg.PACK
    cols = tile * cfg.BLOCK_N + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return rows + (row + work.seqlen_k - work.seqlen_q), cols


@gluon.jit
def hide_right(s, tile, row, work, sizes, cfg: gl.constexpr):
    """s with -inf where a key is past the last that its query sees."""
    position, cols = positions(s, tile, row, work, cfg)
    last = 0 * position + (work.seqlen_k - 1)
    if cfg.HAS_RIGHT:
        last = gl.minimum(position + sizes.window_right, last)
    return gl.where(cols[None, :] <= last[:, None], s, float("-inf"))


@gluon.jit
def hide_left(s, tile, row, work, sizes, cfg: gl.constexpr):
    """s with -inf where a key is before the first that its query sees."""
    position, cols = positions(s, tile, row, work, cfg)
    return gl.where(cols[None, :] >= (position - sizes.window_left)[:, None], s, float("-inf"))


@gluon.jit
def hide(s, tile, row, work, sizes, cfg: gl.constexpr):
    """s with -inf where a query does not see a key, right or left."""
    s = hide_right(s, tile, row, work, sizes, cfg)
    if cfg.HAS_LEFT:
        s = hide_left(s, tile, row, work, sizes, cfg)
    return s
