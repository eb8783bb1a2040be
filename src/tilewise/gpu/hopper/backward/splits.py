"""Tiles of keys that several CTAs share: each has a split of their queries.

Where the number of SMs does not divide that of equal tiles, some idle in the last wave, or in the only one.
That wave's tiles are laid end to end, a step for each query tile of each head of the group, and cut into
units of equal length, one for an SM (Stream-K, Osama et al. 2023). A split is what a unit has of one tile:

    tiles   |         0         |         1         |         2         |
    units   |      0      |      1      |      2      |      3      |   4
    splits  |      0      |  1  |   3   |     4     |5|      6      | 7

A split's number is that of its unit plus that of its tile, so those of a tile are neighbours; not all are in
use. A CTA takes a unit; what the roles work on has an index: first the whole tiles', then one a step.

Causal, tiles differ in length, and a few long ones leave SMs idle. Those, which come first, are cut into a
number of splits each, the `unit`; a CTA takes a split, whose index is its number.

A split's dK and dV go to memory in float32, to that of dq if they fit. The last kernel reduces them.
"""

from tilewise.gpu.hopper.backward.ranges import locate_keys
from tilewise.gpu.hopper.common.compat import gl, gluon
from tilewise.gpu.hopper.common.scheduler import count_work_tiles, fetch_add, next_work


@gluon.jit
def steps_of_tile(sizes):
    """Query tiles that a tile of keys visits, where all are visited: of all heads of the group."""
    return sizes.tiles_q * sizes.group_size


@gluon.jit
def count_indices(sizes, packing, splits, cfg: gl.constexpr):
    num_work_tiles = count_work_tiles(sizes, packing)
    if cfg.IS_STREAM_K:
        num_work_tiles = splits.border + (num_work_tiles - splits.border) * steps_of_tile(sizes)
    if cfg.IS_EVENLY_SPLIT:
        num_work_tiles += splits.border * (splits.unit - 1)
    return num_work_tiles


@gluon.jit
def first_index(number, splits, cfg: gl.constexpr):
    """The index of what a CTA takes: a whole tile or a split, or the first step of a unit."""
    if cfg.IS_STREAM_K:
        number += gl.maximum(number - splits.border, 0) * (splits.unit - 1)
    return number


@gluon.jit
def next_index(index, steps, num_work_tiles, splits, counter, cfg: gl.constexpr):
    """The index after a split of `steps`: the rest of its unit, or what the CTA takes next."""
    after = index + steps
    if cfg.IS_STREAM_K and (index >= splits.border) & (after < num_work_tiles) & (
        (after - splits.border) % splits.unit != 0
    ):
        index = after
    else:
        index = first_index(next_work(fetch_add(counter)), splits, cfg)
    return index


@gluon.jit
def locate_split(index, sizes, packing, splits, cfg: gl.constexpr):
    """(work tile, start) of an index: a split's first step of all that are shared, or its number.

    The start is -1 if the tile is whole.
    """
    start = index * 0 - 1
    if cfg.IS_STREAM_K:
        start = gl.maximum(index - splits.border, -1)
        index = gl.where(start < 0, index, splits.border + start // steps_of_tile(sizes))
    if cfg.IS_EVENLY_SPLIT:
        start = gl.where(index < splits.border * splits.unit, index, -1)
        index = gl.where(start < 0, index - splits.border * (splits.unit - 1), index // splits.unit)
    return locate_keys(index, sizes, packing, cfg), start


@gluon.jit
def queries_of(start, work, tiles, sizes, splits, cfg: gl.constexpr):
    """(first head, number of its first query tile, steps, spread) of a whole tile of keys or of a split.

    The spread is for `staggered`: the first unit that starts in a tile starts at the tile's own query tile.
    """
    steps = tiles.count() * sizes.group_size
    first = 0 * steps
    spread = work.row // cfg.BLOCK_N
    if cfg.IS_STREAM_K and start >= 0:
        first = start % steps
        spread += steps - (splits.unit - (start - first) % splits.unit) % splits.unit
        steps = gl.minimum(steps - first, splits.unit - start % splits.unit)
    if cfg.IS_EVENLY_SPLIT and start >= 0:
        first = start % splits.unit * steps // splits.unit
        steps = (start % splits.unit + 1) * steps // splits.unit - first
    return (
        work.head * sizes.group_size + first // tiles.count(),
        tiles.begin + first % tiles.count(),
        steps,
        spread,
    )


@gluon.jit
def store_split(W: gl.constexpr, start, dk, dv, sizes, splits, cfg: gl.constexpr):
    """dK and dV [64, BLOCK_D] in float32, each thread 16 bytes at a time."""
    SIZE: gl.constexpr = 64 * cfg.BLOCK_D
    number = start
    if cfg.IS_STREAM_K:
        number = start // splits.unit + start // steps_of_tile(sizes)
    ptrs = splits.sums + (number * 4 + W * 2) * SIZE
    for n in gl.static_range(2):
        x = dk if n == 0 else dv
        x = x.reshape([4, 2, 8, cfg.BLOCK_D // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([SIZE])
        gl.store(ptrs + n * SIZE + gl.arange(0, SIZE, x.type.layout), x)
