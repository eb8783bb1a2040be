"""The split-KV reduction: out and lse of a segment from those of its splits; see `decode.kernel`."""

from tilewise.gpu.hopper.common.compat import gl, gluon, start_next_kernel, wait_for_previous_kernel
from tilewise.gpu.hopper.common.guards import length_poison
from tilewise.gpu.hopper.common.layouts import along
from tilewise.gpu.hopper.common.softmax import LOG2_E, exp2, finite_or_zero
from tilewise.gpu.hopper.decode.arguments import DecodeSizes
from tilewise.gpu.hopper.decode.rows import divided, query_rows, store_columns, store_lse
from tilewise.gpu.hopper.decode.stream_k import make_schedule, number_of, split_index, worker_of
from tilewise.gpu.launch.entry import entry


@gluon.constexpr_function
def split_lanes(cfg):
    """Splits that the lanes of a warp read at a time, each all columns that are the warp's."""
    warps = min(4, cfg.MERGE_ROWS)
    return 32 // min(32, cfg.MERGE_COLUMNS // 4 // (4 // warps))


@gluon.constexpr_function
def merge_layout(cfg):
    """Of [MERGE_ROWS, LANES, MERGE_COLUMNS]: a warp has all splits of its rows and columns."""
    warps, lanes = min(4, cfg.MERGE_ROWS), split_lanes(cfg)
    return gl.BlockedLayout([1, 1, 4], [1, lanes, 32 // lanes], [warps, 1, 4 // warps], [2, 1, 0])


@gluon.jit
def add_splits(
    acc, m, l, ptr_lse, ptr_low, ptrs, left, COUNT: gl.constexpr, LANES: gl.constexpr, cfg: gl.constexpr
):  # fmt: skip
    """(acc, m, l) with COUNT more splits of each lane's, at most `left`, every LANES-th one from ptrs on.

    Addresses that differ by constants: as a vector of splits, 265 instructions came before the last load.
    """
    stats = ()  # [MERGE_ROWS, LANES] each
    lows = ()
    outs = ()  # [MERGE_ROWS, LANES, MERGE_COLUMNS]
    for i in gl.static_range(COUNT):
        stat = i * LANES * cfg.ROWS
        exists = left > i * LANES
        stats = stats + (gl.load(ptr_lse + stat, mask=exists, other=float("-inf")),)  # type: ignore[assignment]  # noqa: RUF005
        if ptr_low is not None:
            lows = lows + (gl.load(ptr_low + stat, mask=exists, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        out_ = gl.load(ptrs + stat * cfg.BLOCK_DV, mask=gl.expand_dims(exists, 2), other=0.0)
        outs = outs + (out_,)  # type: ignore[assignment]  # noqa: RUF005
    largest = m[:, None]
    for i in gl.static_range(COUNT):
        largest = gl.maximum(largest, stats[i])
    m_new = gl.max(largest, 1)
    m_finite = finite_or_zero(m_new)
    alpha = exp2(m - m_finite)
    acc = acc * gl.expand_dims(alpha[:, None], 2)
    weights = 0.0
    for i in gl.static_range(COUNT):
        x = stats[i] - m_finite[:, None]
        if ptr_low is not None:
            x += lows[i]
        weight = exp2(x)
        weights += weight
        acc += outs[i] * gl.expand_dims(weight, 2)
    return acc, m_new, l * alpha + gl.sum(weights, 1)


@entry(gluon.jit)
def attn_decode_merge_kernel(
    targets, cache, sinks, sizes: DecodeSizes, factors, cfg: gl.constexpr,
):  # fmt: skip
    """out, lse and, if asked for, residual of MERGE_ROWS rows of a segment.

    Grid: (segments of all sequences * tiles of rows * tiles of columns,).
    """
    layout: gl.constexpr = merge_layout(cfg)
    rows_layout: gl.constexpr = along(0, layout, 3)
    LANES: gl.constexpr = split_lanes(cfg)
    COUNT: gl.constexpr = (cfg.MERGE_SPLITS + LANES - 1) // LANES  # splits that a thread holds at a time
    STEP: gl.constexpr = COUNT * LANES
    ROW_TILES: gl.constexpr = (cfg.ROWS + cfg.MERGE_ROWS - 1) // cfg.MERGE_ROWS
    COLUMN_TILES: gl.constexpr = cfg.BLOCK_DV // cfg.MERGE_COLUMNS
    program = gl.program_id(0) // COLUMN_TILES
    first_column = gl.program_id(0) % COLUMN_TILES * cfg.MERGE_COLUMNS
    start_next_kernel()
    # The first kernel started this one after its own wait, so the lengths are there to be read.
    b = program // ROW_TILES // sizes.segments
    segment = program // ROW_TILES % sizes.segments
    schedule = make_schedule(cache, sizes, cfg, 4)
    total = gl.max(schedule.ends, 0)
    units = number_of(schedule.units, b, cfg, 4)
    first = number_of(schedule.ends, b, cfg, 4) - (sizes.segments - segment) * units
    worker = worker_of(first, total, sizes.workers)
    split = split_index(b, segment, worker, sizes)
    count = worker_of(first + units - 1, total, sizes.workers) - worker + 1
    count = gl.where(units > 0, count, 0)
    if cfg.STORES_WHOLE and count == 1:
        count = -1  # the worker has stored it

    first_row = program % ROW_TILES * cfg.MERGE_ROWS
    rows = first_row + gl.arange(0, cfg.MERGE_ROWS, rows_layout)
    cols = first_column + gl.arange(0, cfg.MERGE_COLUMNS, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    lanes = gl.arange(0, LANES, along(1, layout, 3))
    _, head, exists = query_rows(first_row, cfg.MERGE_ROWS, rows_layout, segment, sizes, cfg)
    left = gl.where(exists[:, None], count - lanes[None, :], 0)  # [MERGE_ROWS, LANES]: splits from there on
    stat = lanes[None, :] * cfg.ROWS + rows[:, None]
    offset = gl.expand_dims(stat * cfg.BLOCK_DV, 2) + gl.expand_dims(gl.expand_dims(cols, 0), 0)
    m = gl.full([cfg.MERGE_ROWS], float("-inf"), gl.float32, rows_layout)
    l = gl.full([cfg.MERGE_ROWS], 0.0, gl.float32, rows_layout)
    if cfg.HAS_SINKS:
        m = gl.load(sinks + head, mask=exists, other=0.0).to(gl.float32) * LOG2_E
        l += 1.0
    if cfg.IS_CACHED:
        l += length_poison(cache, b, sizes, cfg)
    acc = gl.full([cfg.MERGE_ROWS, LANES, cfg.MERGE_COLUMNS], 0.0, gl.float32, layout)
    # A first iteration without splits brings the instructions into the cache while the workers are busy.
    for n in range(-STEP, gl.maximum(count, 1), STEP):
        if n == 0:
            wait_for_previous_kernel()  # until all is written: who waits for this kernel relies on it
        here = (split + n) * cfg.ROWS
        ptr_lse, ptrs = targets.partial_lse + here + stat, targets.partial + here * cfg.BLOCK_DV + offset
        ptr_low = None
        if targets.partial_low is not None:
            ptr_low = targets.partial_low + here + stat
        acc, m, l = add_splits(
            acc, m, l, ptr_lse, ptr_low, ptrs, gl.where(n >= 0, left - n, 0), COUNT, LANES, cfg
        )  # fmt: skip
    if count >= 0:
        store_columns(
            targets.out, divided(gl.sum(acc, 1), l), first_column, b, segment, first_row, sizes, cfg
        )
        if first_column == 0:
            store_lse(targets, m, l, b, segment, first_row, sizes, factors, cfg)
