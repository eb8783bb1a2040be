"""Attention forward in 8 bits for Hopper: the roles of `forward.kernel`, products of float8_e4m3fn or int8.

    S = q_factor k_factor scale * Q K^T,  P = exp(S + log v_factor - m),  O = P V / l

What differs from `forward.kernel`:

- Q, K and V come in the blocks of `core.quantized`: heads apart, 128 rows with a factor each. V is
  transposed, as 8-bit operands must have the summed dimension last.
- Q and K may be integers: their products are sums without rounding, and become float32 as they are read.
- V's factor joins the exponent, so that O is one sum over tiles of different factors. l takes it out again.
- m is the running maximum: 8-bit P has no room for a reference that stays.
- The tensor cores add 8-bit products with few bits: sums over thousands of keys would lose up to a fifth. So
  each tile's P V is a sum of its own, added to O in float32, where O is rescaled anyway.
- P as an accumulator has other columns in a thread than P as an operand. V's keys are permuted within every
  sixteen instead (`core.quantized.key_order`), so that nothing moves.
- A warpgroup does one thing after the other: two others fill in, or one where registers are short.

FlashAttention-3 (Shah et al., 2024), section 3.3.
"""

from tilewise.gpu.hopper.common.arguments import RowTargets, Scales, Sizes
from tilewise.gpu.hopper.common.channel import Ring, make_tile_ring
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    as_blocks,
    gl,
    gluon,
    pingpong_arrive,
    pingpong_wait,
    specialize,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.layouts import (
    accumulator_layout,
    operand_layout_8_bit,
    partial_layout,
    row_layout,
)
from tilewise.gpu.hopper.common.products import rescaled
from tilewise.gpu.hopper.common.ranges import key_tiles, mask_left, mask_right, unvisited, visited
from tilewise.gpu.hopper.common.scheduler import (
    count_work_tiles,
    fetch_add,
    locate,
    make_work_ring,
    next_work,
    peek,
    send,
    send_end,
)
from tilewise.gpu.hopper.common.softmax import (
    exp2,
    finite_or_zero,
    log2,
    partial_sums,
    reciprocal,
    softcapped,
)
from tilewise.gpu.hopper.forward.epilogue import store_lse, store_staged
from tilewise.gpu.launch.entry import entry

BLOCK_ROWS = gl.constexpr(128)  # rows that share a factor; keys of a tile
LOG2_LARGEST = gl.constexpr(8.0)  # of P: 256 of 448, see `tilewise.fp8.round_weights`
ROUND_FOUR = gl.constexpr(  # float32 to 8 bits
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
)
SMALLEST = gl.constexpr(2.0**-126)  # a product of factors is not 0: masked scores would be NaN


@aggregate
class Rings:
    """What the load role sends to the mma roles."""

    q: Ring
    k: Ring
    v: Ring
    work: Ring
    smem_o: gl.shared_memory_descriptor  # the slots of q, which are the staging buffers of O


@gluon.jit
def first_block(start, batch, seqlen, IS_PACKED: gl.constexpr):
    """Where a sequence's tiles of 128 rows begin: see `quantize.rows_of`."""
    if IS_PACKED:
        block = start // BLOCK_ROWS + batch
    else:
        block = batch * ((seqlen + BLOCK_ROWS - 1) // BLOCK_ROWS)
    return block


@gluon.jit
def load_role(q_desc, k_desc, v_desc, rings, counter, sizes, packing, cfg: gl.constexpr):
    """Take work tiles and stream theirs: K first, then Q, then K and V alternately, one K ahead."""
    WARPGROUPS: gl.constexpr = cfg.WARPGROUPS
    num_work_tiles = count_work_tiles(sizes, packing)
    index = gl.program_id(0)
    use = 0  # of the K and V rings
    work_use = 0  # of the work ring: work tiles so far
    while index < num_work_tiles:
        work = locate(index, sizes, packing, None, cfg)
        tiles = key_tiles(work.row, cfg.BLOCK_M, work, sizes, cfg)
        head_k = work.head // sizes.group_size
        row_q = BLOCK_ROWS * first_block(work.start_q, work.batch, work.seqlen_q, cfg.IS_PACKED) + work.row
        block_k = first_block(work.start_k, work.batch, work.seqlen_k, cfg.IS_PACKED)
        left = tiles.end - tiles.begin - 1
        block = block_k + visited(tiles, left, cfg)
        rings.k.load(use, k_desc, (head_k, block, 0, 0), 1)
        send(rings.work, work_use, work)
        for w in gl.static_range(WARPGROUPS):
            rings.q.load(work_use * WARPGROUPS + w, q_desc, (work.head, row_q + w * 64, 0), 1)
        while left > 0:
            before = block
            left -= 1
            block = block_k + visited(tiles, left, cfg)
            rings.k.load(use + 1, k_desc, (head_k, block, 0, 0), 1)
            rings.v.load(use, v_desc, (head_k, before, 0, 0), 1)
            use += 1
        ticket = fetch_add(counter)  # as late as possible, but answered while V waits for its slot
        rings.v.load(use, v_desc, (head_k, block, 0, 0), 1)
        use += 1
        work_use += 1
        index = next_work(ticket)
    send_end(rings.work, work_use, index, counter)


@gluon.jit
def scores(q_ring, q_use, k_ring, use, cfg: gl.constexpr):
    """S = Q K^T of a use."""
    k_ring.wait(use)
    q = q_ring.chunk(q_use, 0).reshape([64, cfg.HEAD_DIM])
    k = k_ring.chunk(use, 0).reshape([cfg.BLOCK_N, cfg.HEAD_DIM])
    if cfg.HAS_INTEGERS:
        s = gl.full([64, cfg.BLOCK_N], 0, gl.int32, accumulator_layout(cfg.BLOCK_N, 32))
    else:
        s = gl.full([64, cfg.BLOCK_N], 0.0, gl.float32, accumulator_layout(cfg.BLOCK_N, 32))
    s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))  # [64, BLOCK_N]
    k_ring.release(use)
    return s.to(gl.float32)


@gluon.jit
def weighted_values(p, v_ring, use, CHUNK: gl.constexpr, cfg: gl.constexpr):
    """Start P V of one use, of one chunk of V's columns."""
    WIDTH: gl.constexpr = cfg.BLOCK_DV // cfg.V_CHUNKS
    v = v_ring.chunk(use, 0).reshape([cfg.BLOCK_DV, cfg.BLOCK_N]).slice(CHUNK * WIDTH, WIDTH)
    zeros = gl.full([64, WIDTH], 0.0, gl.float32, accumulator_layout(WIDTH, 32))
    return warpgroup_mma(p, v.permute((1, 0)), zeros, use_acc=False, is_async=True)  # [64, WIDTH]


@gluon.jit
def begin_pingpong(W: gl.constexpr, cfg: gl.constexpr):
    """Two warpgroups alternate at P V (ping-pong), once a tile: else both wait for exponentials at once."""
    if cfg.WARPGROUPS == 2:
        pingpong_wait(W)


@gluon.jit
def end_pingpong(W: gl.constexpr, cfg: gl.constexpr):
    if cfg.WARPGROUPS == 2:
        pingpong_arrive(W)


@gluon.jit
def add_values(W: gl.constexpr, acc, alpha, p, v_ring, use, cfg: gl.constexpr):
    """acc times alpha, plus P V of a use: chunk by chunk of the columns, as registers are short."""
    CHUNKS: gl.constexpr = cfg.V_CHUNKS
    v_ring.wait(use)
    begin_pingpong(W, cfg)
    sums = ()
    for chunk in gl.static_range(CHUNKS):
        product = warpgroup_mma_wait(0, deps=(weighted_values(p, v_ring, use, chunk, cfg),))
        sums = sums + (rescaled(acc[chunk], alpha) + product,)  # type: ignore[assignment]  # noqa: RUF005
    end_pingpong(W, cfg)
    v_ring.release(use)
    return sums


@gluon.jit
def zero_output(cfg: gl.constexpr):
    """O of 64 rows, in chunks of its columns."""
    CHUNKS: gl.constexpr = cfg.V_CHUNKS
    WIDTH: gl.constexpr = cfg.BLOCK_DV // cfg.V_CHUNKS
    chunks = ()
    for _ in gl.static_range(CHUNKS):
        zeros = gl.full([64, WIDTH], 0.0, gl.float32, accumulator_layout(WIDTH, 32))
        chunks = chunks + (zeros,)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@gluon.jit
def as_operand(p, cfg: gl.constexpr):
    """P [64, BLOCK_N] rounded to 8 bits, its columns in the order of V's keys.

    Of every sixteen columns a thread t holds 2t, 2t + 1, 8 + 2t, 9 + 2t as an accumulator, and 4t to 4t + 3
    as an operand: column 8c + 2t + b becomes column 4t + 2c + b.
    """
    p = p.reshape([64, cfg.BLOCK_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, cfg.BLOCK_N])
    p = gl.convert_layout(p, operand_layout_8_bit(cfg.BLOCK_DV // cfg.V_CHUNKS), assert_trivial=True)
    return gl.inline_asm_elementwise(ROUND_FOUR, "=r,f,f,f,f", [p], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def softmax_step(s, m, l, j, row, tiles, k_factor, v_factor, work, sizes, factors, cfg: gl.constexpr):
    """Softmax of a finished tile of products, of key tile j: (p as operand, m, l, alpha)."""
    factor = factors.scale_log2e * k_factor
    if cfg.HAS_SOFTCAP:
        s = softcapped(s * k_factor, factors)
        factor = factors.scale_log2e
    factor = gl.where(factor < SMALLEST, SMALLEST, factor)
    if j >= tiles.full_end:  # only edge tiles are masked
        s = mask_right(s, j, row, work, sizes, cfg)
    if cfg.HAS_LEFT and j < tiles.full_begin:
        s = mask_left(s, j, row, work, sizes, cfg)
    log2_v = log2(v_factor)
    m_new = gl.maximum(m, gl.max(s, 1) * factor + log2_v)
    m_finite = finite_or_zero(m_new)
    alpha = exp2(m - m_finite)
    shift = log2_v + LOG2_LARGEST - m_finite
    p = exp2(s * factor + shift[:, None])  # [64, BLOCK_N]
    l = rescaled(l, alpha) + partial_sums(p) * reciprocal(v_factor)
    return as_operand(p, cfg), m_new, l, alpha


@gluon.jit
def skip(W: gl.constexpr, k_ring, v_ring, use, count, cfg: gl.constexpr):
    """Release tiles that other warpgroups need and this one does not."""
    for _ in range(count):
        begin_pingpong(W, cfg)
        end_pingpong(W, cfg)
        k_ring.wait(use)
        k_ring.release(use)
        v_ring.wait(use)
        v_ring.release(use)
        use += 1
    return use


@gluon.jit
def mma_role(W: gl.constexpr, o_desc, lse_ptr, sinks, rings, sizes, scales, factors, cfg: gl.constexpr):
    """Warpgroup W: its 64 rows of every work tile."""
    WARPGROUPS: gl.constexpr = cfg.WARPGROUPS
    HAS_SPARE_SLOT: gl.constexpr = cfg.Q_SLOTS >= 2 * WARPGROUPS
    use = 0  # of the K and V rings
    work_use = 0  # of the work ring
    if W == 1:
        end_pingpong(W, cfg)  # 0 begins
    work, _ = peek(rings.work, work_use)
    while work.row >= 0:
        row = work.row + W * 64
        all_tiles = key_tiles(work.row, cfg.BLOCK_M, work, sizes, cfg)
        tiles = key_tiles(row, 64, work, sizes, cfg)
        before, after = unvisited(tiles, all_tiles, cfg)
        q_factor, k_factors, v_factors = factors_of(work, row, sizes, scales, cfg)
        use = skip(W, rings.k, rings.v, use, before, cfg)
        q_use = work_use * WARPGROUPS + W
        rings.q.wait(q_use)
        if HAS_SPARE_SLOT and work_use > 0:
            wait_for_stores(0)  # the previous tile's O has left shared memory
            rings.q.release(q_use - WARPGROUPS)
        m = gl.full([64], float("-inf"), gl.float32, row_layout(cfg.BLOCK_N, 32))
        l = gl.full([64, 4], 0.0, gl.float32, partial_layout())
        acc = zero_output(cfg)
        left = tiles.end - tiles.begin  # tiles yet to visit
        while left > 0:
            left -= 1
            j = visited(tiles, left, cfg)
            k_factor, v_factor = gl.load(k_factors + j) * q_factor, gl.load(v_factors + j)
            s = scores(rings.q, q_use, rings.k, use, cfg)  # [64, BLOCK_N]
            p, m, l, alpha = softmax_step(
                s, m, l, j, row, tiles, k_factor, v_factor, work, sizes, factors, cfg
            )
            acc = add_values(W, acc, alpha, p, rings.v, use, cfg)
            use += 1
        use = skip(W, rings.k, rings.v, use, after, cfg)
        smem_o = rings.smem_o.index(q_use % cfg.Q_SLOTS * cfg.O_TILES)
        store_chunks(acc, m - LOG2_LARGEST, l, smem_o, row, work, o_desc, lse_ptr, sinks, sizes, cfg)
        if not HAS_SPARE_SLOT:  # the load role may wait for this slot before it loads what we need next
            wait_for_stores(0)
            rings.q.release(q_use)
        rings.work.release(work_use)
        work_use += 1
        work, _ = peek(rings.work, work_use)
    wait_for_stores(0)


@gluon.jit
def store_chunks(acc, m, l, smem_o, row, work, o_desc, lse_ptr, sinks, sizes, cfg: gl.constexpr):
    """`forward.epilogue.store_rows` of O in chunks."""
    CHUNKS: gl.constexpr = cfg.V_CHUNKS
    WIDTH: gl.constexpr = cfg.BLOCK_DV // cfg.V_CHUNKS
    m = gl.convert_layout(m, row_layout(cfg.BLOCK_N), assert_trivial=True)
    factor = store_lse(m, l, row, work, RowTargets(lse_ptr, None, 0), sinks, sizes, None, cfg)
    o = smem_o.reshape([64, cfg.BLOCK_DV])
    for chunk in gl.static_range(CHUNKS):
        o.slice(chunk * WIDTH, WIDTH, 1).store(rescaled(acc[chunk], factor).to(o_desc.dtype))
    store_staged(o_desc, smem_o, row, work, cfg)


@gluon.jit
def factors_of(work, row, sizes, scales, cfg: gl.constexpr):
    """(the factor of these rows of Q, pointers to those of K and V for the sequence's first keys)."""
    block_q = first_block(work.start_q, work.batch, work.seqlen_q, cfg.IS_PACKED)
    block_q += gl.minimum(row, work.seqlen_q - 1) // BLOCK_ROWS  # a warpgroup may have no rows
    q_factor = gl.load(scales.q + work.head * scales.blocks_q + block_q)
    block_k = first_block(work.start_k, work.batch, work.seqlen_k, cfg.IS_PACKED)
    first = work.head // sizes.group_size * scales.blocks_k + block_k
    return q_factor, scales.k + first, scales.v + first


@entry(gluon.jit)
def attn_fwd_fp8_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, sinks, packing, counter, scales: Scales, sizes: Sizes, factors,
    cfg: gl.constexpr,
):  # fmt: skip
    """out and lse of every query tile; `cfg` is an FP8Config."""
    N: gl.constexpr = cfg.WARPGROUPS
    q_ring = make_tile_ring(q_desc, cfg.Q_SLOTS, cfg.Q_CHUNKS, 1)
    k_ring = make_tile_ring(k_desc, cfg.STAGES, 1, N)
    v_ring = make_tile_ring(v_desc, cfg.STAGES, 1, N)
    smem_o = as_blocks(q_ring.tiles, cfg.Q_SLOTS * cfg.O_TILES, o_desc)
    rings = Rings(q_ring, k_ring, v_ring, make_work_ring(N), smem_o)
    specialize(
        (mma_role, (o_desc, lse_ptr, sinks, rings, sizes, scales, factors, cfg)),
        (load_role, (q_desc, k_desc, v_desc, rings, counter, sizes, packing, cfg)),
        cfg,
    )
