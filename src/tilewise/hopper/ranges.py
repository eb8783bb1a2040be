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
def by_thread(s):
    """A tile [64, BLOCK_N] of scores as [64, BLOCK_N // 8, 4, 2]: columns 2t and 2t + 1 of every eight are
    thread t's, so that a thread's columns less 2t are constants.
    """
    return s.reshape([64, s.shape[1] // 8, 4, 2])


@gluon.jit
def columns(x):
    """[1, BLOCK_N // 8, 1, 2] columns of `by_thread` less 2t."""
    layout: gl.constexpr = x.type.layout
    eights = gl.arange(0, x.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    ones = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    return 8 * eights[None, :, None, None] + ones[None, None, None, :]


@gluon.jit
def edge(x, tile, row, work, cfg: gl.constexpr):
    """[64, 1, 4, 1]: each row's position among the keys, less the first column of each thread."""
    layout: gl.constexpr = x.type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))) // cfg.PACK
    threads = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    position = rows + (row + work.seqlen_k - work.seqlen_q - tile * cfg.BLOCK_N)
    return position[:, None, None, None], 2 * threads[None, None, :, None]


@gluon.jit
def hide_right(s, tile, row, work, sizes, cfg: gl.constexpr):
    """s with -inf where a key is past the last that its query sees."""
    x = by_thread(s)
    position, first = edge(x, tile, row, work, cfg)
    last = 0 * position + (work.seqlen_k - 1 - tile * cfg.BLOCK_N)
    if cfg.HAS_RIGHT:
        last = gl.minimum(position + sizes.window_right, last)
    x = gl.where(columns(x) <= last - first, x, float("-inf"))
    return gl.convert_layout(x.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def hide_left(s, tile, row, work, sizes, cfg: gl.constexpr):
    """s with -inf where a key is before the first that its query sees."""
    x = by_thread(s)
    position, first = edge(x, tile, row, work, cfg)
    x = gl.where(columns(x) >= position - sizes.window_left - first, x, float("-inf"))
    return gl.convert_layout(x.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def positions(s, tile, row, work, cfg: gl.constexpr):
    rows = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout)) // cfg.PACK
    cols = tile * cfg.BLOCK_N + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return rows + (row + work.seqlen_k - work.seqlen_q), cols


@gluon.jit
def old_right(s, tile, row, work, sizes, cfg: gl.constexpr):
    position, cols = positions(s, tile, row, work, cfg)
    last = 0 * position + (work.seqlen_k - 1)
    if cfg.HAS_RIGHT:
        last = gl.minimum(position + sizes.window_right, last)
    return gl.where(cols[None, :] <= last[:, None], s, float("-inf"))


@gluon.jit
def old_left(s, tile, row, work, sizes, cfg: gl.constexpr):
    position, cols = positions(s, tile, row, work, cfg)
    return gl.where(cols[None, :] >= (position - sizes.window_left)[:, None], s, float("-inf"))


@gluon.jit
def hide(s, tile, row, work, sizes, cfg: gl.constexpr):
    """s with -inf where a query does not see a key, right or left."""
    s = hide_right(s, tile, row, work, sizes, cfg)
    if cfg.HAS_LEFT:
        s = hide_left(s, tile, row, work, sizes, cfg)
    return s
