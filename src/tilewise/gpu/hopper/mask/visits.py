"""How the forward walks the tile map of a mask, and hides what its bits hide: see `tile_map`."""

from tilewise.gpu.hopper.common.arguments import FLAG_BITS
from tilewise.gpu.hopper.common.compat import aggregate, gl, gluon
from tilewise.gpu.hopper.common.layouts import along, partial_layout
from tilewise.gpu.hopper.common.ranges import visited

SHIFT = gl.constexpr(FLAG_BITS)
NOTHING_SEEN = gl.constexpr(0b0011)  # flags: both warpgroups have hidden scores, and rows that see no key


@aggregate
class Visits:
    """The key tiles that a work tile visits: of [tiles.begin, tiles.end) those that its mask has.

    At least one, perhaps all hidden. Without a mask all of them, and `first` and `row` mean nothing.
    """

    count: gl.tensor
    first: gl.tensor  # where its entries begin in `MaskMap.tiles`
    row: gl.tensor  # of the map, times its key tiles: the first tile of bits
    has_some: gl.tensor  # 0: the mask hides all of them


@gluon.jit
def visits_of(tiles, work, mask, cfg: gl.constexpr):
    """The visits of a work tile."""
    count = tiles.end - tiles.begin
    if cfg.HAS_MASK:
        key_tiles = (work.seqlen_k + cfg.BLOCK_N - 1) // cfg.BLOCK_N
        row = work.batch * mask.stride_batch + work.head * mask.stride_head
        row += work.row // cfg.BLOCK_M * mask.stride_tile
        row = gl.cast(row, gl.int64)
        before = row * (2 * key_tiles + 1)
        low = gl.load(mask.tiles + before + tiles.begin)
        found = gl.load(mask.tiles + before + tiles.end) - low
        result = Visits(gl.maximum(found, 1), before + key_tiles + 1 + low, row * key_tiles, found)
    else:
        result = Visits(count, count, count, count)
    return result


@gluon.jit
def entry_at(left, visits, tiles, mask, cfg: gl.constexpr):
    """The map's entry for the visit after which `left` others are to come; without a mask nothing."""
    entry = 0 * left
    if cfg.HAS_MASK:
        if cfg.NEAREST_FIRST:
            n = left
        else:
            n = visits.count - 1 - left
        nothing = (tiles.begin << SHIFT) + NOTHING_SEEN
        entry = gl.load(mask.tiles + visits.first + n, mask=visits.has_some > 0, other=0)
        entry = gl.where(visits.has_some > 0, entry, nothing)
    return entry


@gluon.jit
def tile_of(entry, left, tiles, cfg: gl.constexpr):
    """The key tile of a visit."""
    if cfg.HAS_MASK:
        j = entry >> SHIFT
    else:
        j = visited(tiles, left, cfg)
    return j


@gluon.jit
def is_partial(W: gl.constexpr, entry):
    """Whether the mask hides a score of warpgroup W in this tile."""
    return (entry >> W & 1) != 0


@gluon.jit
def is_seen_by_all(W: gl.constexpr, entry, j, tiles, cfg: gl.constexpr):
    """1 if each row of warpgroup W sees a key in this tile: by the mask, and by a tile that is no edge."""
    seen = (entry >> (cfg.WARPGROUPS + W)) & 1
    seen = gl.where(j < tiles.full_end, seen, 0)
    if cfg.HAS_LEFT:
        seen = gl.where(j >= tiles.full_begin, seen, 0)
    return seen


@gluon.jit
def load_bits(W: gl.constexpr, entry, visits, mask, cfg: gl.constexpr):
    """`load_words` of warpgroup W's rows in a tile, if there are any."""
    words = 0
    if cfg.HAS_MASK and cfg.MASK is None:
        words = load_words(W, (visits.row + (entry >> SHIFT)) * cfg.WARPGROUPS + W, entry, mask)
    return words


@gluon.jit
def load_words(W: gl.constexpr, number, entry, mask):
    """[64, 4] words of warpgroup W's rows, those of that number; of a full tile, all 1, none is read."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, partial_layout()))[:, None]
    threads = gl.arange(0, 4, gl.SliceLayout(0, partial_layout()))[None, :]
    is_read = (rows + threads >= 0) & is_partial(W, entry)
    return gl.load(mask.bits + number * 256 + (4 * rows + threads), mask=is_read, other=-1).to(gl.int32)


@gluon.jit
def hide_by_bits(s, words, hidden=float("-inf")):
    """Scores s [64, BLOCK_N] with `hidden` where the bit of a thread's word is 0."""
    x = s.reshape([64, s.shape[1] // 8, 4, 2])
    layout: gl.constexpr = x.type.layout
    by_word: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, layout))
    eights, pair = gl.arange(0, x.shape[1], along(1, layout, 4)), gl.arange(0, 2, along(3, layout, 4))
    bit = 1 << (2 * eights[None, :, None, None] + pair[None, None, None, :])  # known to the compiler
    words = gl.convert_layout(words, by_word, assert_trivial=True)[:, None, :, None]
    x = gl.where((words & bit) != 0, x, hidden)
    return gl.convert_layout(x.reshape(s.shape), s.type.layout, assert_trivial=True)
