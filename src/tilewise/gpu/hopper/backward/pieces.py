"""Tiles of keys that several blocks share: each has some of their queries, a piece.

Where the number of SMs does not divide that of equal tiles, some idle in the last round, or in the only one.
That round's tiles are laid end to end, a step for each query tile of each head of the group, and cut into
units of equal length, one for an SM (stream-K, Osama et al. 2023). A piece is what a unit has of one tile:

    tiles   |         0         |         1         |         2         |
    units   |      0      |      1      |      2      |      3      |   4
    pieces  |      0      |  1  |   3   |     4     |5|      6      | 7

A piece's number is that of its unit plus that of its tile, so those of a tile are neighbours; not all are in
use. What is drawn is a unit; what the roles work on has an index: first the whole tiles', then one a step.

Causal, tiles differ in length, and a few long ones leave SMs idle. Those, which come first, are cut into a
number of parts each, the `unit`; a part is drawn, and its index is the number of the piece.

A piece's dK and dV go to memory in float32, to that of dq if they fit, and the last kernel adds up those of
a tile.
"""

from tilewise.gpu.hopper.backward.ranges import locate_keys
from tilewise.gpu.hopper.common.compat import gl, gluon
from tilewise.gpu.hopper.common.schedule import count_work, draw, drawn, peek


@gluon.jit
def steps_of_tile(sizes):
    """Query tiles that a tile of keys visits, where all are visited: of all heads of the group."""
    return sizes.tiles_q * sizes.group_size


@gluon.jit
def count_indices(sizes, packing, pieces, cfg: gl.constexpr):
    num_work = count_work(sizes, packing)
    if cfg.IN_UNITS:
        num_work = pieces.border + (num_work - pieces.border) * steps_of_tile(sizes)
    if cfg.IN_PARTS:
        num_work += pieces.border * (pieces.unit - 1)
    return num_work


@gluon.jit
def first_index(number, pieces, cfg: gl.constexpr):
    """The index of what a block draws: a whole tile or a part, or the first step of a unit."""
    if cfg.IN_UNITS:
        number += gl.maximum(number - pieces.border, 0) * (pieces.unit - 1)
    return number


@gluon.jit
def next_index(index, steps, num_work, pieces, counter, cfg: gl.constexpr):
    """The index after a piece of `steps`: the rest of its unit, or what is drawn."""
    after = index + steps
    if cfg.IN_UNITS and (index >= pieces.border) & (after < num_work) & (
        (after - pieces.border) % pieces.unit != 0
    ):
        index = after
    else:
        index = first_index(drawn(draw(counter)), pieces, cfg)
    return index


@gluon.jit
def locate_piece(index, sizes, packing, pieces, cfg: gl.constexpr):
    """(Work, start) of an index: a piece's first step of all that are shared, or its number of all parts.

    The start is -1 if the tile is whole.
    """
    start = index * 0 - 1
    if cfg.IN_UNITS:
        start = gl.maximum(index - pieces.border, -1)
        index = gl.where(start < 0, index, pieces.border + start // steps_of_tile(sizes))
    if cfg.IN_PARTS:
        start = gl.where(index < pieces.border * pieces.unit, index, -1)
        index = gl.where(start < 0, index - pieces.border * (pieces.unit - 1), index // pieces.unit)
    return locate_keys(index, sizes, packing, cfg), start


@gluon.jit
def receive_piece(ring, use, NUM_WARPS: gl.constexpr = 4):
    """(Work, start) of a use, as `locate_piece` has found it."""
    work, start = peek(ring, use, NUM_WARPS)
    ring.release(use)
    return work, start


@gluon.jit
def queries_of(start, work, tiles, sizes, pieces, cfg: gl.constexpr):
    """(first head, number of its first query tile, steps, spread) of a whole tile of keys or of a piece.

    The spread is for `staggered`: the first unit that starts in a tile starts at the tile's own query tile.
    """
    steps = tiles.count() * sizes.group_size
    first = 0 * steps
    spread = work.row // cfg.BLOCK_N
    if cfg.IN_UNITS and start >= 0:
        first = start % steps
        spread += steps - (pieces.unit - (start - first) % pieces.unit) % pieces.unit
        steps = gl.minimum(steps - first, pieces.unit - start % pieces.unit)
    if cfg.IN_PARTS and start >= 0:
        first = start % pieces.unit * steps // pieces.unit
        steps = (start % pieces.unit + 1) * steps // pieces.unit - first
    return (
        work.head * sizes.group_size + first // tiles.count(),
        tiles.begin + first % tiles.count(),
        steps,
        spread,
    )


@gluon.jit
def store_piece(W: gl.constexpr, start, dk, dv, sizes, pieces, cfg: gl.constexpr):
    """dK and dV [64, BLOCK_D] in float32, each thread 16 bytes at a time."""
    SIZE: gl.constexpr = 64 * cfg.BLOCK_D
    number = start
    if cfg.IN_UNITS:
        number = start // pieces.unit + start // steps_of_tile(sizes)
    place = pieces.sums + (number * 4 + W * 2) * SIZE
    for part in gl.static_range(2):
        x = dk if part == 0 else dv
        x = x.reshape([4, 2, 8, cfg.BLOCK_D // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([SIZE])
        gl.store(place + part * SIZE + gl.arange(0, SIZE, x.type.layout), x)
