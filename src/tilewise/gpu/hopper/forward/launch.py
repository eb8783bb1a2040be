"""Host side of the Hopper backend: what it serves, and the launch of its kernels.

Nothing here depends on lengths at compile time, so a new sequence length or batch size runs the kernels
that are already compiled.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.signature import new_out
from tilewise.gpu.hopper.common.arguments import WARPGROUP_ROWS, ForwardConfig, Sizes
from tilewise.gpu.hopper.decode import launch as decode_launch, mla_launch as decode_mla_launch
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

LOG2_E = math.log2(math.e)

# Heads are worked through in sections whose keys and values stay in the L2 cache (50 MB) together.
SECTION_BYTES = 16 << 20

MAX_HEAD_DIM = 256
BOX_COLUMNS = 64  # of pages smaller than a tile: in shared memory these columns of all rows are together
MANY_ROWS = 1 << 16  # of queries: two tiles of four warpgroups for nearly each of 132 SMs
UNBOUNDED = 1 << 29  # a window edge beyond every length


@functools.cache
def _is_hopper(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) == (9, 0)


def missing_device(problem: AttentionProblem) -> str | None:
    """None on a Hopper GPU, else what is asked for."""
    if problem.device_type != "cuda" or torch.version.hip is not None or not _is_hopper(None):
        return "runs on NVIDIA Hopper GPUs (compute capability 9.0) only"
    return None


def unserved_shape(problem: AttentionProblem) -> str | None:
    """None if one of the Hopper kernels takes the problem's sizes and options, else why not."""
    sizes = (problem.head_dim, problem.head_dim_v)
    has_other_sizes = any(d % 8 or d > MAX_HEAD_DIM for d in sizes)
    is_latent = problem.is_cached and sizes == decode_mla_launch.HEAD_DIMS
    if (has_other_sizes or problem.head_dim_v > max(64, problem.head_dim)) and not is_latent:
        return (
            f"takes head sizes that are multiples of 8 up to {MAX_HEAD_DIM}, that of V no larger, not {sizes}"
        )
    lengths = (problem.batch, problem.seqlen_q, problem.seqlen_k, problem.num_heads)
    if max(lengths) >= UNBOUNDED:
        return f"takes lengths below {UNBOUNDED}"
    if is_latent:
        return decode_mla_launch.supports(problem)
    if problem.is_cached and (decode_launch.has_few_queries(problem) or decode_launch.is_faster(problem)):
        return decode_launch.supports(problem)
    if problem.page_size is not None and not decode_launch.can_load_pages(problem.page_size):
        return f"takes page sizes that are powers of two from 8, not {problem.page_size}"
    return "takes ALiBi slopes for few queries to a cache only" if problem.has_alibi else None


def forward(
    problem: AttentionProblem,
    inputs: Inputs,
    config: ForwardConfig | None = None,
    order: str = "bshd",
    residual: bool = False,
) -> tuple[Tensor, ...]:
    """out (like query, head_dim_v) and lse float32 (batch, heads, seqlen_q), packed (heads, total_q).

    And, if asked for, what rounding took from lse, in its shape.
    """
    if problem.precision == "fp8":
        from tilewise.gpu.hopper.fp8 import launch as fp8_launch

        return fp8_launch.forward(problem, inputs)
    if problem.head_dim > MAX_HEAD_DIM:
        return decode_mla_launch.forward(problem, inputs, residual=residual)
    if config is None and decode_launch.is_faster(problem):
        return decode_launch.forward(problem, inputs, residual=residual)
    cfg = config or forward_config(problem)
    ready = decode_launch.keys_ready if problem.is_cached else tma_ready
    query, key, value = tma_ready(inputs.query), ready(inputs.key), ready(inputs.value)
    rows = query.shape[:-2]
    out = new_out(query, problem.head_dim_v, order)
    stat_shape = (problem.num_heads, *rows) if problem.is_packed else (rows[0], problem.num_heads, rows[1])
    lse = torch.empty(stat_shape, dtype=torch.float32, device=query.device)
    cu_q, cu_k, lengths, table, sinks = (
        None if t is None else t.contiguous()
        for t in (
            inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqlens_k, inputs.page_table, inputs.sinks,
        )
    )  # fmt: skip
    ordered = order_sequences(problem, cu_q, cu_k if lengths is None else lengths, cfg.BLOCK_M // cfg.PACK)
    tensors = (query, key, value, sinks, cu_q, cu_k, lengths, table)
    rest = (torch.empty_like(lse),) if residual else ()
    fresh = (out, lse, *(rest or (None,)), *ordered, scheduler_counter(query.device))
    run(forward_launch, problem, tensors, cfg, fresh=fresh)
    return out, lse, *rest


def shared_counter(device: torch.device) -> tuple[Tensor, ...]:
    """What the launches of a stream share."""
    return (scheduler_counter(device),)


def shared_counters(device: torch.device) -> tuple[Tensor, ...]:
    """The same for two kernels that run side by side."""
    return scheduler_counter(device), scheduler_counter(device, 1)


def order_sequences(
    problem: AttentionProblem, tiled: Tensor | None, other: Tensor | None, rows: int
) -> tuple[Tensor | None, Tensor | None]:
    """Those with most to do first, and the tiles of `rows` of the tiled side before each; None if dense.

    Args:
        tiled: offsets; None with a cache: as many queries each.
        other: offsets; of a cache lengths.
    """
    if other is None:
        return None, None
    aligned = -(-problem.batch // 4) * 4  # to 16 bytes: else kernels are compiled anew for some batches
    table = torch.empty(aligned + problem.batch + 1, dtype=torch.int32, device=other.device)
    order, first_tile = table[: problem.batch], table[aligned:]
    run(_order_launch, problem, (other, tiled), rows, fresh=(order, first_tile))
    return order, first_tile


def _order_launch(problem: AttentionProblem, tensors: Tensors, rows: int) -> Launch:
    from tilewise.gpu.hopper.common.schedule import order_sequences_kernel

    other, tiled, *fresh = tensors
    numbers = (problem.batch, problem.seqlen_q, rows, not problem.is_cached)
    return Launch(order_sequences_kernel, 1, (tiled, other, *fresh, *numbers), num_warps=4)


def forward_launch(problem: AttentionProblem, tensors: Tensors, cfg: ForwardConfig) -> Launch:
    from tilewise.gpu.hopper.forward.kernel import attn_fwd_kernel

    query, key, value, sinks, cu_q, cu_k, *cache, out, lse, residual, order, first_tile, counter = tensors
    assert query is not None
    sizes = _sizes(problem, cfg, query, key, value, cache[1])
    rows, width = (WARPGROUP_ROWS // cfg.PACK, cfg.PACK), cfg.PART_WIDTH if cfg.BOXES == 1 else BOX_COLUMNS
    width_v = cfg.BLOCK_DV if cfg.BOXES == 1 else BOX_COLUMNS
    arguments = (
        descriptor(query, (*rows, cfg.PART_WIDTH), problem.is_packed),
        descriptor(key, (cfg.BOX_ROWS, 1, width), cfg.IS_ORDERED),
        descriptor(value, (cfg.BOX_ROWS, 1, width_v), cfg.IS_ORDERED),
        descriptor(out, (*rows, cfg.BLOCK_DV), problem.is_packed),
        *(lse, residual, sinks, cu_q, cu_k, order, first_tile, counter, *cache),
        decode_launch.errors_of(problem, query),
        *sizes,
        *factors(problem),
        cfg,
    )
    tiles = (
        query.shape[0] // (cfg.BLOCK_M // cfg.PACK) + problem.batch if problem.is_packed else sizes.num_tiles
    )
    slots = sizes.num_slots * (problem.batch if cfg.IS_CACHED and not problem.is_packed else 1)
    programs = min(num_sms(query.device.index) * cfg.BLOCKS_PER_SM, tiles * slots)
    return Launch(attn_fwd_kernel, programs, arguments, num_warps=4, maxnreg=cfg.maxnreg)


def _sizes(
    problem: AttentionProblem,
    cfg: ForwardConfig,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    table: Tensor | None,
) -> Sizes:
    visibility = problem.visibility()
    positions = cfg.BLOCK_M // cfg.PACK
    num_slots = problem.num_heads // cfg.PACK * (1 if cfg.IS_ORDERED else problem.batch)
    read_together = min(problem.seqlen_k, window_size(problem) + positions)  # keys of a tile of queries
    key_bytes = 2 * read_together * (problem.head_dim + problem.head_dim_v)
    slots_a_key = max(1, problem.group_size // cfg.PACK)
    return Sizes(
        batch=problem.batch,
        seqlen_q=query.shape[0] if problem.is_packed else problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        group_size=problem.group_size,
        num_slots=num_slots,
        num_tiles=-(-problem.seqlen_q // positions),
        section=slots_a_key * section_size(num_slots // slots_a_key, max(1, SECTION_BYTES // key_bytes)),
        window_left=edge(visibility.left),
        window_right=edge(visibility.right),
        rows_k=decode_launch.rows_per_entry(key) if cfg.IS_CACHED else 0,
        rows_v=decode_launch.rows_per_entry(value) if cfg.IS_CACHED else 0,
        stride_page_table=0 if table is None else table.shape[1],
        num_pages=0 if key is None else len(key),
    )


def edge(bound: int | None) -> int:
    """A window's edge as kernels take it."""
    return UNBOUNDED if bound is None else min(bound, UNBOUNDED)


def factors(problem: AttentionProblem) -> tuple[float, float, float, float]:
    """A kernel's scale_log2e, two_over_softcap_log2e, softcap_log2e and scale."""
    if problem.softcap > 0:
        return LOG2_E, 2 * LOG2_E * problem.scale / problem.softcap, problem.softcap, 1.0
    return problem.scale * LOG2_E, 0.0, 0.0, problem.scale


def section_size(num_keys: int, fitting: int) -> int:
    """Key heads of a section: as many as fit, but equal sections; a small last one would leave SMs idle."""
    largest_divisor = max(n for n in range(1, min(fitting, num_keys) + 1) if num_keys % n == 0)
    num_sections = -(-num_keys // fitting)
    return largest_divisor if 2 * largest_divisor > fitting else -(-num_keys // num_sections)


@functools.lru_cache(maxsize=4096)
def forward_config(problem: AttentionProblem) -> ForwardConfig:
    """The tiles of a problem. Measurements are in docs/kernels-hopper.md."""
    visibility = problem.visibility()
    width = 128 if -(-problem.head_dim // 64) % 2 == 0 else 64
    block_dv = max(64, 1 << (problem.head_dim_v - 1).bit_length())
    block_n, warpgroups, stages, q_slots, registers, blocks = _tile(problem, block_dv)
    producer_registers = 24
    if 0 < (problem.page_size or 0) < block_n:  # copies of several pages side by side
        wide = (232, 40) if block_n == 128 else (224, 56)
        registers, producer_registers = wide if registers == 240 else (registers, 32)
    return ForwardConfig(
        BLOCK_N=block_n,
        WARPGROUPS=warpgroups,
        STAGES=stages,
        Q_SLOTS=q_slots,
        CONSUMER_REGISTERS=registers,
        PRODUCER_REGISTERS=producer_registers,
        BLOCKS_PER_SM=blocks,
        PARTS=-(-problem.head_dim // width),
        PART_WIDTH=width,
        BLOCK_DV=block_dv,
        LARGEST_SUM=2.0**15 if problem.dtype == torch.float16 else 2.0**40,
        PACK=_pack(problem),
        IS_PACKED=problem.is_packed,
        IS_CACHED=problem.is_cached,
        PAGE_SIZE=problem.page_size or 0,
        HAS_LEFT=visibility.left is not None,
        HAS_RIGHT=visibility.right is not None,
        HAS_SOFTCAP=problem.softcap > 0,
        HAS_SINKS=problem.has_sinks,
    )


def _tile(problem: AttentionProblem, block_dv: int) -> tuple[int, int, int, int, int, int]:
    """(BLOCK_N, WARPGROUPS, STAGES, Q_SLOTS, CONSUMER_REGISTERS, BLOCKS_PER_SM); shared memory is 227 KB.

    Head size 64 needs four warpgroups on an SM to hide what is not a product. In one block they share keys,
    and have registers to overlap their own products and softmax; in two blocks they are free of each other,
    which is worth more where tiles of queries are short or few.
    """
    window = window_size(problem)
    is_causal = problem.visibility().right is not None
    if problem.head_dim <= 64:
        is_short = window <= 1024 or problem.is_packed or (is_causal and problem.seqlen_k <= 2048)
        if is_short or problem.batch * problem.num_heads * problem.seqlen_q < MANY_ROWS:
            return 64, 2, 4, 4, 104, 2  # twice 4 x 8 KB of Q, 4 x 16 KB of K and V: 192 KB
        return 64, 4, 8, 8, 112, 1  # 8 x 8 KB of Q, 8 x 16 KB of K and V: 192 KB
    if block_dv <= 128:  # size 128: 4 x 16 KB of Q, 2 x 64 KB: 192 KB; 192/128: 2 x 32 KB, 2 x 80 KB: 224 KB
        block_n, stages = (64, 4) if window <= 512 else (128, 2)
        return block_n, 2, stages, 4 if problem.head_dim <= 128 else 2, 240, 1
    return 64, 2, 2, 2, 240, 1  # 2 x 32 KB of Q, 2 x 64 KB of K and V: 192 KB


def window_size(problem: AttentionProblem) -> int:
    """Keys that a query sees besides its own; UNBOUNDED or more without a window."""
    visibility = problem.visibility()
    left, right = (UNBOUNDED if side is None else side for side in (visibility.left, visibility.right))
    return left + right


def _pack(problem: AttentionProblem) -> int:
    """Query heads that share a tile: all of a key head's where queries may be too few to fill one."""
    group = problem.group_size
    fits = 1 < group <= WARPGROUP_ROWS and group & (group - 1) == 0
    may_be_few = problem.seqlen_q <= WARPGROUP_ROWS or (problem.is_packed and problem.is_cached)
    return group if fits and may_be_few else 1


def tma_ready(t: Tensor) -> Tensor:
    """t, or a copy if TMA can't address it: rows contiguous, 16-byte aligned, no broadcast dimensions."""
    is_ready = t.data_ptr() % 16 == 0 and _is_addressable(t.shape, t.stride())
    return t if is_ready else t.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=4096)
def _is_addressable(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    used = [stride for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size > 1]
    return strides[-1] == 1 and all(stride > 0 and stride % 8 == 0 for stride in used)


def descriptor(t: Tensor | None, block: tuple[int, int, int], is_bounded: bool) -> Any:
    """TMA descriptor of (batch, rows, heads, dim) in blocks of (rows, heads, dim).

    Packed (rows, heads, dim), and all rows of a cache's entries: two more dimensions bound each sequence, see
    `hopper.key_loads.coords`.
    """
    from tilewise.gpu.hopper.common.compat import TensorDescriptor

    assert t is not None
    strides = [t.shape[-1] if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
    strides[-1] = 1
    if is_bounded:
        strides = strides[-3:]
        shape = [0x7FFF0000, 0x7FFF0000, 1 << 30, *t.shape[-2:]]
        strides = [(1 << 34) - strides[0], strides[0], *strides]
        block_shape = [1, 1, *block]
    else:
        shape = list(t.shape)
        block_shape = [1, *block]
    return TensorDescriptor(t, shape, strides, block_shape, shared_layout(tuple(block_shape), t.dtype))


@functools.cache
def shared_layout(block_shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Swizzled shared memory of a TMA descriptor's block."""
    from tilewise.gpu.hopper.common.compat import gl

    elements = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float8_e4m3fn: gl.float8e4nv}
    element = elements[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), element)


@functools.cache
def num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


_COUNTERS: dict[tuple[int, int, int], Tensor] = {}


def scheduler_counter(device: torch.device, number: int = 0) -> Tensor:
    """Two zeros for a launch's scheduler, which leaves them zero again.

    Launches of one stream follow each other, so they share a pair; a captured graph owns its own. Kernels
    that run side by side take pairs of other numbers.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    stream = torch._C._cuda_getCurrentRawStream(device.index)  # the Stream object takes 3 us
    key = (device.index, stream, number)
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _COUNTERS[key]
