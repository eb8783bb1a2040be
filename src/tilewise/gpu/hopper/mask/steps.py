"""How the backward walks the transposed tile map of a mask: which query tiles a tile of keys visits."""

from tilewise.gpu.hopper.common.compat import aggregate, gl, gluon
from tilewise.gpu.hopper.mask.visits import NOTHING_SEEN, SHIFT, load_words


@aggregate
class Walk:
    """The query tiles of all heads of a group that a tile of keys visits: at least one, perhaps all hidden.

    Without a mask nothing here means anything.
    """

    first: gl.tensor  # where its entries begin in `TransposedMap.lists`
    found: gl.tensor  # how many there are
    count: gl.tensor  # of steps
    begin: gl.tensor  # the query tile of the only step if there are none
    spread: gl.tensor  # how far tiles of keys that start together are apart


@gluon.jit
def walk_of(work, tiles, spread, mask, sizes, cfg: gl.constexpr):
    """The walk of a tile of keys."""
    zero = 0 * spread
    if cfg.HAS_MASK:
        row = work.batch * mask.list_batch + work.head * mask.list_head + work.row // cfg.BLOCK_N
        first = gl.cast(row, gl.int64) * (1 + sizes.group_size * sizes.tiles_q)
        found = gl.load(mask.lists + first)
        if cfg.HAS_LEFT or cfg.HAS_RIGHT:
            spread = zero
        walk = Walk(first + 1, found, gl.maximum(found, 1), tiles.begin, spread)
    else:
        walk = Walk(zero, zero, zero, zero, zero)
    return walk


@gluon.jit
def step_entry(number, walk, mask):
    """The entry of step `number`: the slot head_of_group * tiles_q + tile << FLAG_BITS, and flags."""
    n = (number + walk.spread) % walk.count
    entry = gl.load(mask.lists + walk.first + n, mask=walk.found > 0, other=0)
    return gl.where(walk.found > 0, entry, (walk.begin << SHIFT) + NOTHING_SEEN)


@gluon.jit
def head_and_tile(entry, work, sizes):
    """(query head, query tile) of an entry."""
    slot = entry >> SHIFT
    return work.head * sizes.group_size + slot // sizes.tiles_q, slot % sizes.tiles_q


@gluon.jit
def load_step_bits(W: gl.constexpr, entry, head, tile, work, mask, sizes, cfg: gl.constexpr):
    """`load_words` of warpgroup W's keys."""
    row = work.batch * mask.stride_batch + head * mask.stride_head
    row += work.row // cfg.BLOCK_N * mask.stride_tile
    return load_words(W, (gl.cast(row, gl.int64) * sizes.tiles_q + tile) * 2 + W, entry, mask)
