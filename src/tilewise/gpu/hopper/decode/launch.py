"""Host side of the decoding kernels for Hopper. Nothing here reads a length or a page table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.signature import rows_dense
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.common.arguments import WARPGROUP_ROWS, Cache
from tilewise.gpu.hopper.decode.arguments import DecodeConfig, DecodeSizes, DecodeTargets
from tilewise.gpu.launch.launch_plan import Launch, Step, Tensors, run_steps

FEW_QUERIES = 16  # of a cache
SAVED_KEYS = 640  # by a worker: what split-KV has to save with more queries
MIN_KEYS = 256  # below, other kernels have as much to read as to compute
MANY_KEYS = 1024
MAX_HEAD_DIM = 128
MAX_BATCH = 256
LEAST_8_BIT_PAGE = 16  # as many keys of a tile has a warp
MOST_8_BIT_ROWS = 32  # of a tile of queries: 16 a warpgroup
LEAST_TILE = 64  # keys of one at head size 128
STAGES = 4  # 4 x 32 KB under way; 6 were slower
FEW_KEYS = 1 << 18  # of all key heads: so few go faster with 2 stages, and reading 32 page numbers
START_UNITS = 4  # 8 sequences of 0 to 16k keys, 8 queries: 85 us with 0, 74 with 2, 73 with 4
FEW_SPLITS = 4  # of a segment: up to these, an even number of workers is worth more than all of them
MERGE_REGISTERS = 104  # of 128 threads; with 384 of REGISTERS they are all that a multiprocessor has
REGISTERS = 136  # on average over two consumer warpgroups and a producer's worth
USUAL_SMS = 132
MAX_UNITS = 1 << 26  # of the schedule: `stream_k.quotient` is exact for shares of up to 2^19
GROUP_COLUMNS = 64  # beside `host.GROUP_ROWS`


class CachedTensors(NamedTuple):
    """What a call with a cache attends with: see `tilewise.core.problem.Inputs`."""

    query: Tensor
    key: Tensor
    value: Tensor
    seqlens_k: Tensor | None
    leftpad_k: Tensor | None = None
    page_table: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    sinks: Tensor | None = None


def supports(problem: AttentionProblem) -> str | None:
    """None if the decoding kernels can do the problem, of which the other kernels' reasons are known."""
    if problem.is_packed:
        return "takes the same number of queries of each sequence, not packed ones"
    if problem.seqlen_k < MIN_KEYS or problem.batch > MAX_BATCH:
        return f"takes caches for at least {MIN_KEYS} keys and at most {MAX_BATCH} sequences"
    if problem.head_dim > MAX_HEAD_DIM or problem.group_size > WARPGROUP_ROWS:
        return f"takes caches for head sizes to {MAX_HEAD_DIM}, {WARPGROUP_ROWS} query heads on a key head"
    if reason := host.unserved_pages(problem):
        return reason
    if problem.is_quantized and (reason := unserved_8_bit_pages(problem)):
        return reason
    has_tensors = problem.mask_shape is not None or problem.bias_shape is not None
    if has_tensors or problem.dropout_p > 0 or problem.functions is not None:
        return "takes no mask, bias, dropout or functions"
    return too_many_units(problem, decode_config(problem))


def unserved_8_bit_pages(problem: AttentionProblem) -> str | None:
    """None if a warp's keys of a tile have one scale, and TMA can take their rows whole."""
    sizes = (problem.head_dim, problem.head_dim_v)
    if problem.page_size is None or problem.page_size < LEAST_8_BIT_PAGE:
        return f"takes 8-bit pages of at least {LEAST_8_BIT_PAGE} tokens, not {problem.page_size}"
    if problem.group_size > MOST_8_BIT_ROWS:
        return f"takes 8-bit pages for {MOST_8_BIT_ROWS} query heads on a key head, not {problem.group_size}"
    if any(size % 16 for size in sizes) or len({block_dim(size) for size in sizes}) > 1:
        return (
            f"takes 8-bit pages for head sizes that are multiples of 16, both above 64 or none, not {sizes}"
        )
    return None


def too_many_units(problem: AttentionProblem, cfg: DecodeConfig) -> str | None:
    """None if the work can be divided, were every sequence as long as it may become."""
    tiles = -(-problem.seqlen_k // cfg.BLOCK_N) + cfg.START_UNITS
    if problem.batch * segments(problem, cfg) * tiles <= MAX_UNITS:
        return None
    return f"takes caches for fewer keys than {problem.batch} sequences of {problem.seqlen_k}"


def has_few_queries(problem: AttentionProblem) -> bool:
    return not problem.is_packed and problem.seqlen_q <= FEW_QUERIES


@functools.lru_cache(maxsize=4096)
def is_faster(problem: AttentionProblem) -> bool:
    """Whether split-KV is faster, since queries are few or their tiles too few for all SMs."""
    if supports(problem) is not None:
        return False
    if has_few_queries(problem):
        return problem.is_cached or problem.seqlen_k >= MANY_KEYS
    # a CTA of the forward does all keys of a tile of queries; here each has an equal share, but of 64 rows
    cfg = decode_config(problem)
    ctas = USUAL_SMS * (2 if cfg.BLOCK_D == 64 else 1)
    idle = ctas - problem.batch * segments(problem, cfg)
    return problem.seqlen_k * idle >= SAVED_KEYS * ctas


class Kernels(NamedTuple):
    """What differs between the kernels of this module and of `mla_launch`."""

    config: Callable[[AttentionProblem], DecodeConfig]
    launch: Callable[..., Launch]  # of the first; the second is `merge_launch`
    few_splits: int  # see `even_workers`


def forward(
    kernels: Kernels, problem: AttentionProblem, inputs: Inputs, cfg: DecodeConfig, residual: bool = False
) -> tuple[Tensor, ...]:
    """out (batch, seqlen_q, heads, head_dim_v) and lse float32 (batch, heads, seqlen_q).

    And, if asked for, what rounding took from lse, in its shape.
    """
    workers = num_workers(problem, cfg, inputs.query.device, kernels.few_splits)
    given = cached_tensors(inputs, cfg)
    fresh = tuple(
        None if n is None else given.query.new_empty(n[0], dtype=n[1])
        for n in new_tensors(problem, cfg, workers, residual)
    )
    run_steps(problem, steps(kernels, cfg, workers, given, fresh))
    return tuple(t for t in fresh[:3] if t is not None)


def steps(
    kernels: Kernels, cfg: DecodeConfig, workers: int, given: CachedTensors, fresh: Sequence[Tensor | None]
) -> tuple[Step, Step]:
    """Both launches; `fresh`: see `new_tensors`."""
    query, _, _, lengths, leftpad, *_, sinks = given
    choices, fresh = (cfg, workers), tuple(fresh)
    return (
        Step(kernels.launch, given[:-1], choices, fresh),
        Step(merge_launch, (query, lengths, leftpad, sinks), choices, fresh),
    )


def cached_tensors(inputs: Inputs, cfg: DecodeConfig) -> CachedTensors:
    """The tensors of a call as the kernels take them."""
    rows = host.GROUP_ROWS if cfg.WHOLE_PAGES else 1
    query = rows_dense(inputs.query)
    small = (getattr(inputs, name) for name in CachedTensors._fields[3:])
    rest = (None if t is None else t.contiguous() for t in small)
    key = host.keys_ready(inputs.key, rows)
    value = key if inputs.value is inputs.key else host.keys_ready(inputs.value, rows)
    return CachedTensors(query, key, value, *rest)


def new_tensors(
    problem: AttentionProblem, cfg: DecodeConfig, workers: int, residual: bool = False
) -> list[tuple[Any, torch.dtype] | None]:
    """Shapes and dtypes of `DecodeTargets`."""
    rows = (problem.batch * segments(problem, cfg) + workers) * cfg.ROWS
    sizes = problem.batch, problem.seqlen_q, problem.num_heads
    splits, lse = ((rows,), torch.float32), ((sizes[0], sizes[2], sizes[1]), torch.float32)
    low, rest = (splits, lse) if residual else (None, None)
    out = ((*sizes, problem.head_dim_v), problem.out_dtype)
    return [out, lse, rest, ((rows, cfg.BLOCK_DV), torch.float32), splits, low]


def segments(problem: AttentionProblem, cfg: DecodeConfig) -> int:
    """Of each sequence: GQA groups, or blocks of one's heads, times tiles of rows."""
    return problem.num_heads // cfg.PACK * row_tiles(problem, cfg)


def row_tiles(problem: AttentionProblem, cfg: DecodeConfig) -> int:
    return -(-problem.seqlen_q // (cfg.ROWS // cfg.PACK))


def num_workers(problem: AttentionProblem, cfg: DecodeConfig, device: torch.device, few_splits: int) -> int:
    num_segments = problem.batch * segments(problem, cfg)
    most = num_segments * -(-problem.seqlen_k // cfg.BLOCK_N)
    return min(even_workers(num_segments, host.num_sms(device.index), few_splits), most)


def even_workers(num_segments: int, most: int, few_splits: int = FEW_SPLITS) -> int:
    """Workers of `most` for a number of segments.

    A few less than all, where lengths are alike and each has whole segments or shares one with few others:
    there is little or nothing to reduce then. With many workers on a segment, all of them are faster: on an
    H200, 1 x 8k keys of 8 heads take 12.5 us with 132 workers, 14.3 with 131 as with 128.
    """
    for workers in range(most, most - most // 32 - 1, -1):
        if num_segments % workers == 0 or (
            workers % num_segments == 0 and workers <= few_splits * num_segments
        ):
            return workers
    return most


def _decode_launch(problem: AttentionProblem, tensors: Tensors, cfg: DecodeConfig, workers: int) -> Launch:
    from tilewise.gpu.hopper.decode.kernel import attn_decode_kernel

    query, key, value, lengths, leftpad, table, slopes, key_scale, value_scale = tensors[:9]
    arguments = (
        query,
        host.descriptor(key, (cfg.BOX_ROWS, 1, cfg.BOX_WIDTH), True),
        host.descriptor(value, (cfg.BOX_ROWS, 1, cfg.BOX_WIDTH), True),
        _page_descriptor(key) if cfg.WHOLE_PAGES else None,
        _page_descriptor(value) if cfg.WHOLE_PAGES else None,
        DecodeTargets(*tensors[9:]),
        Cache(lengths, table, host.errors_of(problem, query), key_scale, value_scale, leftpad),
        slopes,
        decode_sizes(problem, cfg, workers, query, key, value, table, slopes),
        host.factors(problem),
        cfg,
    )
    return Launch(attn_decode_kernel, workers, arguments, num_warps=4, maxnreg=cfg.maxnreg, launch_pdl=True)


def merge_launch(problem: AttentionProblem, tensors: Tensors, cfg: DecodeConfig, workers: int) -> Launch:
    from tilewise.gpu.hopper.decode.merge import attn_decode_merge_kernel

    query, lengths, leftpad, sinks, *fresh = tensors
    cache = Cache(lengths, None, host.errors_of(problem, query), leftpad_k=leftpad)
    numbers = (decode_sizes(problem, cfg, workers), host.factors(problem))
    arguments = (DecodeTargets(*fresh), cache, sinks, *numbers, cfg)
    tiles = -(-cfg.ROWS // cfg.MERGE_ROWS) * (cfg.BLOCK_DV // cfg.MERGE_COLUMNS)
    programs = problem.batch * segments(problem, cfg) * tiles
    return Launch(
        attn_decode_merge_kernel, programs, arguments, num_warps=4, maxnreg=MERGE_REGISTERS, launch_pdl=True
    )


def decode_sizes(
    problem: AttentionProblem,
    cfg: DecodeConfig,
    workers: int,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    table: Tensor | None = None,
    slopes: Tensor | None = None,
) -> DecodeSizes:
    visibility = problem.visibility()
    return DecodeSizes(
        batch=problem.batch,
        num_heads=problem.num_heads,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        segments=segments(problem, cfg),
        row_tiles=row_tiles(problem, cfg),
        workers=workers,
        window_left=host.edge(visibility.left),
        window_right=host.edge(visibility.right),
        stride_q_batch=0 if query is None else query.stride(0),
        stride_q_row=0 if query is None else query.stride(1),
        stride_q_head=0 if query is None else query.stride(2),
        stride_slopes=0 if slopes is None or slopes.ndim == 1 else slopes.shape[1],
        stride_page_table=0 if table is None else table.shape[1],
        num_pages=0 if key is None else len(key),
        rows_k=host.rows_per_entry(key),
        rows_v=host.rows_per_entry(value),
    )


def _page_descriptor(t: Tensor | None) -> Any:
    """TMA descriptor of pages in groups of 8 rows, for tiles of `row_groups_layout`."""
    assert t is not None
    pages, rows, heads, dim = t.shape
    row_stride, head_stride = t.stride(1), t.stride(2) if heads > 1 else dim
    groups = ((pages - 1) * host.rows_per_entry(t) + rows) // host.GROUP_ROWS
    shape = [groups, heads, dim // GROUP_COLUMNS, host.GROUP_ROWS, GROUP_COLUMNS]
    strides = [host.GROUP_ROWS * row_stride, head_stride, GROUP_COLUMNS, row_stride, 1]
    return host.box_descriptor(t, shape, strides, (rows // host.GROUP_ROWS, 1, *shape[2:]))


@functools.lru_cache(maxsize=4096)
def decode_config(problem: AttentionProblem) -> DecodeConfig:
    """The tiles of a problem. Measurements are in docs/kernels-hopper.md."""
    block_d, block_dv = block_dim(problem.head_dim), block_dim(problem.head_dim_v)
    block_n = 128 if block_d == 64 else LEAST_TILE  # 16 KB of K, 8 of 8 bits
    page_size = problem.page_size or 0
    consumer_registers = 160 if block_d == block_dv == 64 else 168
    most_rows = WARPGROUP_ROWS
    if problem.is_quantized:  # a warp's quarter of a tile lies in one page
        block_n, consumer_registers, most_rows = min(4 * page_size, 128), 184, MOST_8_BIT_ROWS
    has_groups = problem.head_dim == problem.head_dim_v == 2 * GROUP_COLUMNS and not problem.is_quantized
    whole_pages = 0 < page_size < block_n and has_groups
    box_rows = host.GROUP_ROWS if whole_pages else min(page_size or block_n, block_n)
    has_whole_rows = box_rows == block_n or problem.is_quantized  # else 64 columns of 16 bits a box
    pack = problem.group_size
    rows = min(most_rows // pack, problem.seqlen_q) * pack
    # splits of a segment, where lengths are alike; a merging program loops over more
    segments = problem.batch * problem.num_kv_heads
    is_short = segments * problem.seqlen_k <= FEW_KEYS
    merge_splits = min(64, 3 + USUAL_SMS // segments)
    merge_rows = max(1, min(8 if rows >= 8 else 4, 32 // power_of_two(merge_splits)))
    if merge_rows == 1 and segments * problem.seqlen_q * pack > USUAL_SMS:
        # one merging program fits an SM beside a worker: with more than those, none of the next call's starts
        merge_rows, merge_splits = 2, min(32, merge_splits)
    return DecodeConfig(
        BLOCK_N=block_n,
        STAGES=2 if is_short else STAGES,
        CONSUMER_REGISTERS=consumer_registers,
        PRODUCER_REGISTERS=3 * REGISTERS - 2 * consumer_registers,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BOX_ROWS=box_rows,
        WHOLE_PAGES=whole_pages,
        PAGE_LANES=32 if whole_pages and is_short else -(-block_n // (page_size or block_n)),
        BOX_WIDTH=block_d if block_d == block_dv and has_whole_rows else 64,
        HAS_SCALES=problem.is_quantized,
        READERS=2 if problem.is_quantized and rows > MOST_8_BIT_ROWS // 2 else 1,
        MERGE_ROWS=merge_rows,
        MERGE_SPLITS=merge_splits,
        MERGE_COLUMNS=block_dv,
        **options(problem, pack, rows),
    )


def options(problem: AttentionProblem, pack: int, rows: int) -> dict[str, Any]:
    """Of a `DecodeConfig` what follows from a call and its tiles of rows."""
    return {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_B": power_of_two(problem.batch),
        "START_UNITS": START_UNITS if problem.batch > 1 else 0,
        "PACK": pack,
        "ROWS": rows,
        "HAS_ROW_TILES": problem.seqlen_q > rows // pack,
        "HAS_SINKS": problem.has_sinks,
    } | host.options(problem)


def block_dim(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128


def power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


KERNELS = Kernels(decode_config, _decode_launch, FEW_SPLITS)
