"""Products on a warpgroup's tensor cores (wgmma): of tiles, and of heads that are cut into parts.

192 columns are three parts of 64 side by side, so that nothing is padded to 256. What is started here runs
on until `await_parts` or `warpgroup_mma_wait`.
"""

from tilewise.gpu.hopper.common.compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from tilewise.gpu.hopper.common.layouts import accumulator_layout


@gluon.jit
def product(a, b):
    """Start a @ b of 64 rows."""
    zeros = gl.full([64, b.shape[1]], 0.0, gl.float32, accumulator_layout(b.shape[1]))
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def product_of_parts(a, use_a, b, use_b, COLUMNS: gl.constexpr, cfg: gl.constexpr):
    """Start a @ b^T [64, COLUMNS] of two rings' tiles, one group of products for each part of the head."""
    PARTS: gl.constexpr = cfg.PARTS
    s = gl.full([64, COLUMNS], 0.0, gl.float32, accumulator_layout(COLUMNS))
    for part in gl.static_range(PARTS):
        a_part = a.part(use_a, part).reshape([64, cfg.PART_WIDTH])
        b_part = b.part(use_b, part).reshape([COLUMNS, cfg.PART_WIDTH])
        s = warpgroup_mma(a_part, b_part.permute((1, 0)), s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def zero_parts(cfg: gl.constexpr):
    """Accumulators of 64 rows, one for each part of the head."""
    PARTS: gl.constexpr = cfg.PARTS
    parts = ()
    for _ in gl.static_range(PARTS):
        zeros = gl.full([64, cfg.PART_WIDTH], 0.0, gl.float32, accumulator_layout(cfg.PART_WIDTH))
        parts = parts + (zeros,)  # type: ignore[assignment]  # noqa: RUF005
    return parts


@gluon.jit
def accumulate_parts(a, ring, use, parts, cfg: gl.constexpr):
    """Start parts += a @ the tile of a use, one group of products for each part of the head."""
    PARTS: gl.constexpr = cfg.PARTS
    sums = ()
    for part in gl.static_range(PARTS):
        b = ring.part(use, part).reshape([a.shape[1], cfg.PART_WIDTH])
        sums = sums + (warpgroup_mma(a, b, parts[part], is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@gluon.jit
def await_parts(parts, REST: gl.constexpr, cfg: gl.constexpr):
    """Wait for all but the last REST products; those before have the sums `parts`."""
    sums = warpgroup_mma_wait(REST, deps=parts)
    if cfg.PARTS == 1:
        sums = (sums,)
    return sums


@gluon.jit
def scaled(parts, factor):
    """Each of the parts times a number."""
    scaled_parts = ()
    for i in gl.static_range(len(parts)):
        scaled_parts = scaled_parts + (parts[i] * factor,)  # type: ignore[assignment]  # noqa: RUF005
    return scaled_parts
