"""Candidates for the k largest scores of each query: a tile of queries stays, its keys stream by twice.

    first   the largest score of each class of keys, those alike modulo BLOCK_N; of these the k-th is a bound
    then    every score that is not below the bound, with its key, into the lists of its query

There are at least k of these, and few more: on random data 8.3 for k = 8. Each query has four lists, one for
each thread that has its scores, so that a place is what a thread has counted. What does not fit is counted
alone: see `attn_top_k_kernel`, which does such queries.

    role                 warps   does
    load_role            1       takes tiles of queries; starts TMA copies of Q, and of K twice, into rings
    largest_role x 2, 4  4 each  S by wgmma, in registers, of its 64 queries

A warpgroup does one thing after the other; the others' products run meanwhile.
"""

from tilewise.gpu.hopper.common.arguments import Sizes
from tilewise.gpu.hopper.common.channel import Ring, make_tile_ring, skip
from tilewise.gpu.hopper.common.compat import (
    aggregate,
    gl,
    gluon,
    specialize,
    wait_for_previous_kernel,
    warpgroup_mma_wait,
)
from tilewise.gpu.hopper.common.key_loads import keys_at, queries_at
from tilewise.gpu.hopper.common.layouts import accumulator_layout, along, pair_layout
from tilewise.gpu.hopper.common.products import awaited_product
from tilewise.gpu.hopper.common.ranges import hide, key_tiles
from tilewise.gpu.hopper.common.scheduler import (
    count_work_tiles,
    fetch_add,
    locate,
    make_work_ring,
    next_work,
    number_of,
    peek,
    send,
    send_end,
)
from tilewise.gpu.hopper.common.softmax import columns_of_thread, softcapped
from tilewise.gpu.launch.entry import entry

LOWEST = gl.constexpr(-3.4028234e38)  # finite float32


@aggregate
class Rings:
    """What the load role sends to the others."""

    q: Ring  # tiles of 64 queries, one for each warpgroup
    k: Ring  # tiles of BLOCK_N keys, for all
    work: Ring


@gluon.jit
def load_role(q_desc, k_desc, counter, rings, sizes, packing, cfg: gl.constexpr):
    """Take work tiles and stream theirs."""
    WARPGROUPS: gl.constexpr = cfg.WARPGROUPS
    num_work_tiles = count_work_tiles(sizes, packing)
    index = gl.program_id(0)
    use = 0  # of the ring of keys
    work_use = 0
    while index < num_work_tiles:
        work = locate(index, sizes, packing, None, cfg)
        send(rings.work, work_use, work)
        tiles = key_tiles(work.row, cfg.BLOCK_M, work, sizes, cfg)
        head_k = work.head // sizes.group_size
        for w in gl.static_range(WARPGROUPS):
            at = queries_at(work.row + w * 64, work.head, work, cfg)
            rings.q.load(WARPGROUPS * work_use + w, q_desc, at, cfg.D_CHUNKS)
        for n in range(2 * (tiles.end - tiles.begin)):
            tile = gl.where(n < tiles.end - tiles.begin, n + tiles.begin, n + 2 * tiles.begin - tiles.end)
            rings.k.load(use, k_desc, keys_at(tile * cfg.BLOCK_N, head_k, work, cfg), cfg.D_CHUNKS)
            use += 1
        index = next_work(fetch_add(counter))
        work_use += 1
    send_end(rings.work, work_use, index, counter)


@gluon.jit
def visible(s, tile, row, own, work, sizes, factors, cfg: gl.constexpr):
    """Scores of finished products, -inf where a query does not see a key."""
    if cfg.HAS_SOFTCAP:
        s = softcapped(s, factors)
    if (tile < own.full_begin) | (tile >= own.full_end):
        s = hide(s, tile, row, work, sizes, cfg)
    return s


@gluon.jit
def kth_largest(best, count):
    """[64]: of each row the count-th largest number that differs from those before; finite."""
    bound = gl.max(best, 1)
    for _ in range(1, count):
        best = gl.where(best < bound[:, None], best, float("-inf"))
        bound = gl.max(best, 1)
    return gl.maximum(bound, LOWEST)


@gluon.constexpr_function
def appending():
    """(PTX, constraints) of `append`, of four elements of a thread: 0 and 1 of one row, 2 and 3 of another.

    An operand has four registers, one an element: results $0 to $3, of which $0 and $2 count the entries
    of the two rows, then x from $4 on, and so forth. Most threads find nothing: they look at a row's larger
    x, and go on.
    """
    names = ("result", "x", "bound", "held", "start", "key", "size")
    kinds = ("=&r", "f", "f", "r", "l", "r", "r")  # &: results are written before all operands are read
    look = """
        .reg .pred has_one, has_room;
        .reg .f32 first, second;
        .reg .b32 bits;
        .reg .b64 place;
        mov.b32 $0, $12;
        mov.b32 $2, $14;
        max.f32 first, $4, $5;
        max.f32 second, $6, $7;
        setp.ge.f32 has_one, first, $8;
        setp.ge.or.f32 has_one, second, $10, has_one;
        @!has_one bra DONE;"""
    put = """
        setp.ge.f32 has_one, ${x}, ${bound};
        setp.lt.and.s32 has_room, ${count}, ${size}, has_one;
        mad.wide.s32 place, ${count}, 8, ${start};
        mov.b32 bits, ${x};
        @has_room st.global.v2.b32 [place], {{bits, ${key}}};
        @has_one add.s32 ${count}, ${count}, 1;"""
    end = """
    DONE:
        mov.b32 $1, $0;
        mov.b32 $3, $2;"""
    of = [{name: 4 * n + e for n, name in enumerate(names)} | {"count": e // 2 * 2} for e in range(4)]
    lines = [look, *(put.format(**registers) for registers in of), end]
    return "{" + "".join(lines) + "}", ",".join(kind for kind in kinds for _ in range(4))


@gluon.jit
def append(x, bound, held, starts, key, size):
    """Put those of x [64, 4, 2] that are at least `bound` into lists; how many these [64, 4] hold, or would.

    starts: where the lists begin in memory. An entry: the bits of the number, above them its key.
    """
    ASM: gl.constexpr = appending()
    arguments = [x, bound[:, None, None], held[:, :, None], starts[:, :, None], key, size]
    held = gl.inline_asm_elementwise(ASM[0], ASM[1], arguments, dtype=gl.int32, is_pure=False, pack=4)
    _, held = held.split()
    return held


@gluon.jit
def collect(s, bound, held, tile, starts, list_size, cfg: gl.constexpr):
    """Put scores [64, BLOCK_N] of at least `bound` into lists that hold `held`; see `append`."""
    layout: gl.constexpr = pair_layout()
    threads = gl.arange(0, 4, along(1, layout, 3))[None, :, None]
    pairs = gl.arange(0, 2, along(2, layout, 3))[None, None, :]
    key = tile * cfg.BLOCK_N + 2 * threads + pairs
    columns = columns_of_thread(s)
    for n in gl.static_range(cfg.BLOCK_N // 8):
        x = gl.convert_layout(gl.join(columns[2 * n], columns[2 * n + 1]), layout, assert_trivial=True)
        held = append(x, bound, held, starts, key + 8 * n, list_size)
    return held


@gluon.jit
def largest_role(
    W: gl.constexpr, list_ptr, held_ptr, count, list_size, rings, sizes, factors, cfg: gl.constexpr
):  # fmt: skip
    """Warpgroup W: the candidates of 64 queries of every work tile."""
    use = 0  # of the ring of keys
    work_use = 0
    work, _ = peek(rings.work, work_use)
    while work.row >= 0:
        row = work.row + W * 64
        tiles = key_tiles(work.row, cfg.BLOCK_M, work, sizes, cfg)
        own = key_tiles(row, 64, work, sizes, cfg)
        bh = number_of(work, sizes, cfg)
        q_use = cfg.WARPGROUPS * work_use + W
        rings.q.wait(q_use)
        best = gl.full([64, cfg.BLOCK_N], float("-inf"), gl.float32, accumulator_layout(cfg.BLOCK_N))
        use = skip(rings.k, use, own.begin - tiles.begin)
        for tile in range(own.begin, own.end):
            s = awaited_product(rings.q, q_use, rings.k, use, cfg.BLOCK_N, cfg)  # [64, BLOCK_N]
            s = warpgroup_mma_wait(0, deps=(s,))
            rings.k.release(use)
            best = gl.maximum(best, visible(s, tile, row, own, work, sizes, factors, cfg))
            use += 1
        lists_of: gl.constexpr = gl.SliceLayout(2, pair_layout())
        bound = gl.convert_layout(kth_largest(best, count), gl.SliceLayout(1, lists_of), assert_trivial=True)

        rows = gl.arange(0, 64, gl.SliceLayout(1, lists_of))
        thread = gl.arange(0, 4, gl.SliceLayout(0, lists_of))[None, :]
        places = (bh * sizes.seqlen_q + work.start_q + row + rows)[:, None] * 4 + thread
        exists = (row + rows)[:, None] + 0 * thread < work.seqlen_q
        starts = (list_ptr + places * list_size).to(gl.int64)
        held = gl.where(exists, 0, list_size)  # of queries that do not exist: full
        use = skip(rings.k, use, tiles.end - own.end + own.begin - tiles.begin)
        for tile in range(own.begin, own.end):
            s = awaited_product(rings.q, q_use, rings.k, use, cfg.BLOCK_N, cfg)  # [64, BLOCK_N]
            s = warpgroup_mma_wait(0, deps=(s,))
            rings.k.release(use)
            s = visible(s, tile, row, own, work, sizes, factors, cfg)
            held = collect(s, bound, held, tile, starts, list_size, cfg)
            use += 1
        rings.q.release(q_use)
        use = skip(rings.k, use, tiles.end - own.end)
        gl.store(held_ptr + places, held, mask=exists)
        rings.work.release(work_use)
        work_use += 1
        work, _ = peek(rings.work, work_use)


@entry(gluon.jit)
def attn_candidates_kernel(
    q_desc, k_desc, list_ptr, held_ptr, packing, counter, sizes: Sizes, factors, count: int, list_size: int,
    cfg: gl.constexpr,
):  # fmt: skip
    """list_ptr: of each query, placed as in lse, four lists of list_size entries; held_ptr: what these hold.

    count: k.
    """
    wait_for_previous_kernel()
    N: gl.constexpr = cfg.WARPGROUPS
    rings = Rings(
        make_tile_ring(q_desc, N * cfg.SLOTS, cfg.D_CHUNKS, 1),
        make_tile_ring(k_desc, cfg.STAGES, cfg.D_CHUNKS, N),
        make_work_ring(N),
    )
    specialize(
        (largest_role, (list_ptr, held_ptr, count, list_size, rings, sizes, factors, cfg)),
        (load_role, (q_desc, k_desc, counter, rings, sizes, packing, cfg)),
        cfg,
    )
