"""Decoding of absorbed multi-head latent attention for Hopper: one key head of 576 columns, 512 of them V.

    role            warps   does
    score_role      4       S = Q K^T by wgmma, softmax in registers; publishes P and alpha; stores lse
    value_role x 2  4 each  its half of O, 64 x 256 in registers: O = alpha O + P V by wgmma; stores it
    load_role x 2   1 each  half of the columns of the key tiles into rings: `mla_load`

        K tile ---> score_role --- P, alpha ---> value_role 0   O[:, :256]   V is the same K tile, read
          |                           +--------> value_role 1   O[:, 256:]   by all three
          +-----------------------------------------^

The rows of a score tile are queries of up to 64 heads, so that each key is read once for all of them. More
heads are several blocks, segments of their own, which read the same keys at the same time, through L2.
Schedule and reduction are those of `decode.kernel`. P V of one tile runs beside S and softmax of the next.
The kernel is bound by memory with 16 heads, by the tensor cores with 128.
Source: DeepSeek-AI, "DeepSeek-V2" (2024); FlashMLA's cut of O in halves.
"""

from tilewise.gpu.hopper.common.channel import Ring, make_ring
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    start_next_kernel,
    wait_for_previous_kernel,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.guards import split_poison
from tilewise.gpu.hopper.common.layouts import accumulator_layout, row_layout
from tilewise.gpu.hopper.common.products import product
from tilewise.gpu.hopper.decode.arguments import DecodeSizes
from tilewise.gpu.hopper.decode.mla_load import (
    CHUNK,
    CHUNKS,
    Keys,
    allocate_queries,
    half_of,
    load_half_of_queries,
    load_role,
    make_keys,
)
from tilewise.gpu.hopper.decode.rows import store_columns, store_lse, store_split_columns, store_split_lse
from tilewise.gpu.hopper.decode.softmax import softmax_step
from tilewise.gpu.hopper.decode.stream_k import make_schedule, split_at, split_index, worker_units
from tilewise.gpu.launch.entry import entry


@aggregate
class Shared:
    """Shared memory of a CTA."""

    keys: Keys
    queries: Ring  # one tile of four chunks [64, CHUNK]; its barriers count `queries_rope`, too
    queries_rope: gl.shared_memory_descriptor  # [64, 64 columns]
    weights: Ring  # P [64, BLOCK_N]; one more use at the end of a split, without P
    factors: gl.shared_memory_descriptor  # [64]: what a use multiplies O by, first of all


@gluon.jit
def make_shared(dtype: gl.constexpr, cfg: gl.constexpr):
    """2 x 72 KB of keys, 72 KB of queries, 8 KB of P: 224 KB of 227 KB."""
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, cfg.BLOCK_N], dtype)
    queries, queries_rope = allocate_queries(dtype)
    weights = gl.allocate_shared_memory(dtype, [1, 64, cfg.BLOCK_N], p_layout)
    factors = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Shared(
        make_keys(dtype, cfg),
        make_ring(queries, 1, CHUNKS, 1, 2),
        queries_rope,
        make_ring(weights, 1, 1, 2),
        factors,
    )


# ---- the mma roles


@gluon.jit
def scores(smem, use):
    """Start S = Q K^T [64, BLOCK_N] of a tile as its chunks arrive."""
    rope = smem.keys.rope
    rope.wait(use)
    s = product(smem.queries_rope, rope.chunk(use, 0).permute((1, 0)))
    for n in gl.static_range(CHUNKS):
        half = half_of(n // 2, smem.keys)
        half.wait(2 * use + n % 2)
        k = half.chunk(2 * use + n % 2, 0).permute((1, 0))
        s = warpgroup_mma(smem.queries.chunk(0, n), k, s, is_async=True)
    return s


@gluon.jit
def score_role(targets, cache, smem, sizes, factors, cfg: gl.constexpr):
    """S and softmax of every tile of the worker's. A split's last factor is 1 / l."""
    weights = smem.weights
    wait_for_previous_kernel()
    start_next_kernel()
    schedule = make_schedule(cache, sizes, cfg, 4)
    unit, end = worker_units(schedule, sizes)
    use = 0  # tiles so far
    weight_use = 0  # of the ring of weights
    splits = 0
    while unit < end:
        split = split_at(unit, end, schedule, sizes, cfg, 4)
        m = gl.full([64], float("-inf"), gl.float32, row_layout(cfg.BLOCK_N))
        l = gl.full([64], 0.0, gl.float32, row_layout(cfg.BLOCK_N))
        l += split_poison(cache, split, sizes, cfg)
        smem.queries.wait(splits)
        for n in range(split.count):
            s = warpgroup_mma_wait(0, deps=(scores(smem, use + n),))  # [64, BLOCK_N]
            smem.keys.rope.release(use + n)
            for chunk in gl.static_range(CHUNKS):
                half_of(chunk // 2, smem.keys).release(2 * (use + n) + chunk % 2)
            p, m, l, alpha = softmax_step(s, m, l, split.tile + n, 0.0, split, sizes, factors, cfg)
            p = p.to(weights.tiles.dtype)
            weights.acquire(weight_use + n)
            smem.factors.store(alpha)
            weights.chunk(weight_use + n, 0).store(p)
            fence_async_shared()  # the stores above are visible to wgmma
            weights.publish(weight_use + n)
        smem.queries.release(splits)
        use += split.count
        weight_use += split.count
        weights.acquire(weight_use)
        smem.factors.store(1.0 / gl.where(l == 0.0, 1.0, l))
        weights.publish(weight_use)
        if cfg.STORES_WHOLE and split.is_whole:
            store_lse(targets, m, l, split.batch, split.segment, 0, sizes, factors, cfg)
        else:
            index = split_index(split.batch, split.segment, gl.program_id(0), sizes)
            store_split_lse(targets, m, l, 0, index, split, sizes, cfg)
        weight_use += 1
        splits += 1
        unit += split.units


@gluon.jit
def value_role(H: gl.constexpr, q, targets, cache, smem, sizes, cfg: gl.constexpr):
    """Half H of O, and of the queries, which it loads when the split before has needed its own."""
    half, weights = half_of(H, smem.keys), smem.weights
    rows: gl.constexpr = row_layout(CHUNK)
    LEFT: gl.constexpr = 2 * H  # the first of this role's two chunks
    wait_for_previous_kernel()
    schedule = make_schedule(cache, sizes, cfg, 4)
    unit, end = worker_units(schedule, sizes)
    use = 0  # tiles so far
    weight_use = 0  # of the ring of weights
    splits = 0
    while unit < end:
        split = split_at(unit, end, schedule, sizes, cfg, 4)
        load_half_of_queries(H, q, smem.queries, smem.queries_rope, splits, split, sizes, cfg)
        left = gl.full([64, CHUNK], 0.0, gl.float32, accumulator_layout(CHUNK))
        right = left
        for n in range(split.count):
            weights.wait(weight_use + n)
            alpha = smem.factors.load(rows)[:, None]
            left, right = left * alpha, right * alpha
            p = weights.chunk(weight_use + n, 0)  # [64, BLOCK_N]
            first = 2 * (use + n)  # use of the half's ring
            half.wait(first)
            half.wait(first + 1)
            left = warpgroup_mma(p, half.chunk(first, 0), left, is_async=True)  # [64, CHUNK]
            right = warpgroup_mma(p, half.chunk(first + 1, 0), right, is_async=True)
            left = warpgroup_mma_wait(1, deps=(left,))
            half.release(first)
            right = warpgroup_mma_wait(0, deps=(right,))
            weights.release(weight_use + n)
            half.release(first + 1)
        use += split.count
        weight_use += split.count
        weights.wait(weight_use)
        inverse = smem.factors.load(rows)[:, None]
        weights.release(weight_use)
        for n in gl.static_range(2):
            acc = (left, right)[n] * inverse
            if cfg.STORES_WHOLE and split.is_whole:
                store_columns(targets.out, acc, (LEFT + n) * CHUNK, split.batch, split.segment, 0, sizes, cfg)
            else:
                index = split_index(split.batch, split.segment, gl.program_id(0), sizes)
                store_split_columns(targets.partial, acc, (LEFT + n) * CHUNK, 0, index, split, sizes, cfg)
        weight_use += 1
        splits += 1
        unit += split.units


# ---- the kernel; the reduction is `decode.merge`


@entry(gluon.jit)
def attn_decode_mla_kernel(
    q, k_desc, targets, cache, sizes: DecodeSizes, factors, cfg: gl.constexpr,
):  # fmt: skip
    """One worker's share of the schedule. Grid: (workers,); `cfg` is an MlaConfig."""
    smem = make_shared(k_desc.dtype, cfg)
    gl.warp_specialize(
        [
            (score_role, (targets, cache, smem, sizes, factors, cfg)),
            (value_role, (0, q, targets, cache, smem, sizes, cfg)),
            (value_role, (1, q, targets, cache, smem, sizes, cfg)),
            (load_role, (0, k_desc, smem.keys, smem.queries, cache, sizes, cfg)),
            (load_role, (1, k_desc, smem.keys, smem.queries, cache, sizes, cfg)),
        ],
        [4, 4, 1, 1],
        cfg.REGISTERS,
    )
