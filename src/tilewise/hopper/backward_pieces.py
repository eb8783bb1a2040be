"""Tiles of keys that several blocks share: each has some of their queries.

Where the number of SMs does not divide that of equal tiles, some idle in the last round, or in the only one.
That round's tiles are laid end to end, a step for each query tile of each head of the group, and cut into
units of equal length, one for an SM (stream-K, Osama et al. 2023). What a unit has of one tile is a piece:

    tiles   |         0         |         1         |         2         |
    units   |      0      |      1      |      2      |      3      |   4
    pieces  |      0      |  1  |   3   |     4     |5|      6      | 7

A piece's number is that of its unit plus that of its tile, so those of a tile are neighbours; not all are in
use. Its dK and dV go to memory of their own, in float32, and the last kernel adds up those of a tile.

What is drawn is a unit; what the roles work on has an index: first the whole tiles', then one for each step.
"""

from tilewise.hopper.backward_ranges import locate_keys
from tilewise.hopper.compat import gl, gluon
from tilewise.hopper.schedule import count_work, draw, drawn, peek


@gluon.jit
def steps_of_tile(sizes):
    """Query tiles that a tile of keys visits, where all are visited: of all heads of the group."""
    return sizes.tiles_q * sizes.group_size


@gluon.jit
def count_indices(sizes, packing, pieces, cfg: gl.constexpr):
    num_work = count_work(sizes, packing, cfg)
    if cfg.IS_SPLIT:
        num_work = pieces.whole + (num_work - pieces.whole) * steps_of_tile(sizes)
    return num_work


@gluon.jit
def first_index(number, pieces, cfg: gl.constexpr):
    """The index of what a block draws: a whole tile, or the first step of a unit."""
    if cfg.IS_SPLIT:
        number += gl.maximum(number - pieces.whole, 0) * (pieces.unit - 1)
    return number


@gluon.jit
def next_index(index, steps, num_work, pieces, counter, cfg: gl.constexpr):
    """The index after a piece of `steps`: the rest of its unit, or what is drawn."""
    after = index + steps
    if cfg.IS_SPLIT and (index >= pieces.whole) & (after < num_work) & (
        (after - pieces.whole) % pieces.unit != 0
    ):
        index = after
    else:
        index = first_index(drawn(draw(counter)), pieces, cfg)
    return index


@gluon.jit
def locate_piece(index, sizes, packing, pieces, cfg: gl.constexpr):
    """(Work, step) of an index: the tile of keys, and the first step of a piece, or -1 if it is whole."""
    step = index * 0 - 1
    if cfg.IS_SPLIT:
        step = gl.maximum(index - pieces.whole, -1)
        index = gl.where(step < 0, index, pieces.whole + step // steps_of_tile(sizes))
    return locate_keys(index, sizes, packing, cfg), step


@gluon.jit
def receive_piece(ring, use, NUM_WARPS: gl.constexpr = 4):
    """(Work, step) of a use, as `locate_piece` has found it."""
    work, step = peek(ring, use, NUM_WARPS)
    ring.release(use)
    return work, step


@gluon.jit
def queries_of(step, work, tiles, sizes, pieces, cfg: gl.constexpr):
    """(first head, number of its first query tile, steps, spread) of a whole tile of keys or of a piece.

    The spread is for `staggered`: the first unit that starts in a tile starts at the tile's own query tile.
    """
    head = work.head * sizes.group_size
    tile = tiles.begin
    steps = tiles.count() * sizes.group_size
    spread = work.row // cfg.BLOCK_N
    if cfg.IS_SPLIT and step >= 0:
        first = step % steps
        spread += steps - (pieces.unit - (step - first) % pieces.unit) % pieces.unit
        steps = gl.minimum(steps - first, pieces.unit - step % pieces.unit)
        head += first // tiles.count()
        tile += first % tiles.count()
    return head, tile, steps, spread


@gluon.jit
def store_piece(W: gl.constexpr, step, dk, dv, sizes, pieces, cfg: gl.constexpr):
    """dK and dV [64, BLOCK_D] in float32, each thread 16 bytes at a time."""
    SIZE: gl.constexpr = 64 * cfg.BLOCK_D
    number = step // pieces.unit + step // steps_of_tile(sizes)
    place = pieces.sums + (number * 4 + W * 2) * SIZE
    for part in gl.static_range(2):
        x = dk if part == 0 else dv
        x = x.reshape([4, 2, 8, cfg.BLOCK_D // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([SIZE])
        gl.store(place + part * SIZE + gl.arange(0, SIZE, x.type.layout), x)
