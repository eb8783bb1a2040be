"""Products on a warpgroup's tensor cores (wgmma): of tiles, and of heads that are cut into head_dim chunks.

192 columns are three chunks of 64 side by side, so that nothing is padded to 256. What is started here runs
on until `await_chunks` or `warpgroup_mma_wait`.
"""

from tilewise.gpu.hopper.common.compat import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from tilewise.gpu.hopper.common.layouts import accumulator_layout


@gluon.jit
def product(a, b):
    """Start a @ b of 64 rows."""
    zeros = gl.full([64, b.shape[1]], 0.0, gl.float32, accumulator_layout(b.shape[1]))
    return warpgroup_mma(a, b, zeros, use_acc=False, is_async=True)


@gluon.jit
def product_of_chunks(a, use_a, b, use_b, COLUMNS: gl.constexpr, cfg: gl.constexpr):
    """Start a @ b^T [64, COLUMNS] of two rings' tiles, one group of products for each chunk of the head."""
    CHUNKS: gl.constexpr = cfg.D_CHUNKS
    s = gl.full([64, COLUMNS], 0.0, gl.float32, accumulator_layout(COLUMNS))
    for chunk in gl.static_range(CHUNKS):
        a_chunk = a.chunk(use_a, chunk).reshape([64, cfg.D_CHUNK])
        b_chunk = b.chunk(use_b, chunk).reshape([COLUMNS, cfg.D_CHUNK])
        s = warpgroup_mma(a_chunk, b_chunk.permute((1, 0)), s, use_acc=chunk > 0, is_async=True)
    return s


@gluon.jit
def awaited_product(a, use_a, b, use_b, COLUMNS: gl.constexpr, cfg: gl.constexpr):
    """`product_of_chunks`, once the tile of b has arrived."""
    b.wait(use_b)
    return product_of_chunks(a, use_a, b, use_b, COLUMNS, cfg)


@gluon.jit
def zero_chunks(cfg: gl.constexpr):
    """Accumulators of 64 rows, one for each chunk of the head."""
    CHUNKS: gl.constexpr = cfg.D_CHUNKS
    chunks = ()
    for _ in gl.static_range(CHUNKS):
        zeros = gl.full([64, cfg.D_CHUNK], 0.0, gl.float32, accumulator_layout(cfg.D_CHUNK))
        chunks = chunks + (zeros,)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@gluon.jit
def accumulate_chunks(a, ring, use, chunks, cfg: gl.constexpr):
    """Start chunks += a @ the tile of a use, one group of products for each chunk of the head."""
    CHUNKS: gl.constexpr = cfg.D_CHUNKS
    sums = ()
    for chunk in gl.static_range(CHUNKS):
        b = ring.chunk(use, chunk).reshape([a.shape[1], cfg.D_CHUNK])
        sums = sums + (warpgroup_mma(a, b, chunks[chunk], is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@gluon.jit
def await_chunks(chunks, REST: gl.constexpr, cfg: gl.constexpr):
    """Wait for all but the last REST products; those before have the sums `chunks`."""
    sums = warpgroup_mma_wait(REST, deps=chunks)
    if cfg.D_CHUNKS == 1:
        sums = (sums,)
    return sums


@gluon.jit
def scaled(chunks, factor):
    """Each of the chunks times a number."""
    scaled_chunks = ()
    for i in gl.static_range(len(chunks)):
        scaled_chunks = scaled_chunks + (chunks[i] * factor,)  # type: ignore[assignment]  # noqa: RUF005
    return scaled_chunks


@gluon.jit
def store_wide(
    target, sums, row, seqlen, start, head, heads, FIRST: gl.constexpr, COLUMNS: gl.constexpr,
    PACK: gl.constexpr = 1,
):  # fmt: skip
    """Store 64 rows of sums in float32, from registers: tiles in shared memory hold 16 bits a number.

    target: contiguous (tokens, heads, COLUMNS), of which `sums` are columns from FIRST on. The rows are those
    from `row` on of a sequence that begins at token `start`, of PACK heads alternately.
    """
    layout: gl.constexpr = sums.type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    cols = FIRST + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    position = row + rows // PACK
    place = (start + position).to(gl.int64) * heads + (head + rows % PACK)
    mask = (position < seqlen)[:, None] & (cols < COLUMNS)[None, :]
    gl.store((target + place * COLUMNS)[:, None] + cols[None, :], sums, mask=mask)


@gluon.jit
def beside(x, tile):
    """Numbers of rows as a column beside an accumulator, or partial sums, of these rows."""
    return gl.convert_layout(x, gl.SliceLayout(1, tile.type.layout), assert_trivial=True)[:, None]


@gluon.jit
def rescaled(tile, alpha):
    """Each row of an accumulator, or of partial sums, times its alpha."""
    return tile * beside(alpha, tile)
