"""What the launches of all Hopper kernels share: descriptors, the scheduler's counter, numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.core.device_errors import error_flags
from tilewise.core.dropout import rate, threshold
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.gpu.functions.captured import Captured
from tilewise.gpu.hopper.common.arguments import Extras, Factors, KernelConfig, QueriesConfig, Sizes
from tilewise.gpu.hopper.common.functions import captured_of, compiled_functions, inlines_mask
from tilewise.gpu.launch.gpus import gpu_of
from tilewise.gpu.launch.launch_plan import Launch, Step, Tensors, run, run_steps
from tilewise.gpu.launch.plan import scheduler_counter as scheduler_counter

LOG2_E = math.log2(math.e)

# L2 swizzle: as many heads at a time as have keys and values that stay in the L2 cache (50 MB) together.
L2_SWIZZLE_BYTES = 16 << 20

UNBOUNDED = 1 << 29  # a window edge beyond every length
GROUP_ROWS = 8  # of shared memory that TMA swizzles, 128 bytes a row
MOST_ROWS = 256  # of a tile
BIAS_TILE = 64  # rows and columns that one program copies


def num_sms(index: int | None) -> int:
    """Of a GPU by its number."""
    return gpu_of(index).num_sms


def errors_of(problem: AttentionProblem, query: Tensor | None) -> Tensor | None:
    """Flags for wrong lengths and pages of a cache."""
    assert query is not None
    return error_flags(query.device) if problem.is_cached else None


def factors(problem: AttentionProblem) -> Factors:
    if problem.softcap > 0:
        return Factors(LOG2_E, 2 * LOG2_E * problem.scale / problem.softcap, problem.softcap, 1.0)
    return Factors(problem.scale * LOG2_E, 0.0, 0.0, problem.scale)


def options(problem: AttentionProblem) -> dict[str, Any]:
    """Of a `KernelConfig` what follows from the options of a call."""
    visibility, function = problem.visibility(), compiled_functions(problem)
    return {
        "IS_PACKED": problem.is_packed,
        "IS_CACHED": problem.is_cached,
        "HAS_LEFTPAD": problem.has_leftpad,
        "PAGE_SIZE": problem.page_size or 0,
        "HAS_LEFT": visibility.left is not None,
        "HAS_RIGHT": visibility.right is not None,
        "HAS_SOFTCAP": problem.softcap > 0,
        "HAS_MASK": problem.mask_shape is not None,
        "MASK": function.mask,
        "HAS_DROPOUT": problem.dropout_p > 0,
        "HAS_ORIGIN": problem.dropout_step > 0,
        "HAS_ALIBI": problem.has_alibi,
        "HAS_BIAS": problem.bias_shape is not None,
        "BIAS_OF_DISTANCES": problem.bias_of_distances,
        "SCORE": function.score,
    }


def extras_of(
    problem: AttentionProblem, inputs: Inputs, is_transposed: bool = False
) -> tuple[Tensor | None, ...]:
    """The tensors of `Extras`, on the device, those of `Captured` last; is_transposed: rows are keys."""
    seed, slopes, bias = inputs.dropout_seed, inputs.alibi_slopes, inputs.bias
    if seed is not None:
        seed = seed.to(inputs.query.device)
    if bias is not None and not problem.bias_of_distances:
        bias = _pairs(problem, bias, is_transposed)
    is_read = problem.has_score_function or inlines_mask(problem)
    captured = captured_of(inputs) if is_read else (None,) * 3
    return seed, None if slopes is None else slopes.contiguous(), bias, *captured


def _pairs(problem: AttentionProblem, bias: Tensor, is_transposed: bool) -> Tensor:
    """A bias of 16-bit numbers, two neighbours of a row as an int32; a copy if they lie otherwise."""
    bias = bias.mT if is_transposed else bias
    for dim, stride in enumerate(bias.stride()[:3]):
        if stride == 0:  # expanded: all of it is one
            bias = bias.narrow(dim, 0, 1)
    *lead, columns = bias.shape
    if columns == 1:  # of all columns, see `BIAS_OF_ROWS`
        return bias.expand(*lead, 2).contiguous().view(torch.int32)
    is_aligned = bias.data_ptr() % 4 == 0 and all(stride % 2 == 0 for stride in bias.stride()[:3])
    if columns % 2 or bias.stride(3) != 1 or not is_aligned:
        padded = bias.new_empty((*lead, -(-columns // 8) * 8))
        is_cut = is_transposed and bias.shape[2] > 1 and not problem.is_packed
        edges = _visible_queries(problem) if is_cut else (-UNBOUNDED, UNBOUNDED)
        run(_copy_launch, edges, (bias,), fresh=(padded,))
        bias = padded
    return bias.view(torch.int32)


def pairs_of_distances(problem: AttentionProblem, numbers: Tensor) -> Tensor:
    """Numbers of distances (batch or 1, heads or 1, distances) as kernels with queries as rows read them.

    In units of log2, each beside the next one as an int64, from the distance 0 on. What a tile may read
    beyond them is 0.
    """
    return _neighbours(numbers, problem.seqlen_q - 1)


def transposed_pairs_of_distances(problem: AttentionProblem, numbers: Tensor) -> Tensor:
    """The same for kernels with keys as rows."""
    return _neighbours(numbers, problem.seqlen_k - 1, are_rows_keys=True)


def _neighbours(numbers: Tensor, zero: int, are_rows_keys: bool = False) -> Tensor:
    *lead, length = numbers.shape
    first = -(-(MOST_ROWS + zero) // 2) * 2  # so that addresses are multiples of 16 bytes
    size = first - zero + length + MOST_ROWS
    if numbers.is_meta:  # see `core.functions.distances.numbers`
        return numbers.new_empty((*lead, size - 1), dtype=torch.int64)[..., first:]
    padded = numbers.new_zeros(*lead, size)
    padded[..., first - zero :][..., :length] = (numbers.flip(-1) if are_rows_keys else numbers) * LOG2_E
    pairs = torch.stack((padded[..., :-1], padded[..., 1:]), -1)
    return pairs.view(torch.int64).squeeze(-1)[..., first:]


def _visible_queries(problem: AttentionProblem) -> tuple[int, int]:
    """The least and the largest query - key of a visible score."""
    visibility, offset = problem.visibility(), problem.seqlen_k - problem.seqlen_q
    return -offset - edge(visibility.right), edge(visibility.left) - offset


def _copy_launch(edges: tuple[int, int], tensors: Tensors) -> Launch:
    from tilewise.gpu.hopper.common.biases import copy_bias_kernel

    bias, padded = tensors
    assert bias is not None and padded is not None
    batch, heads, rows, columns = bias.shape
    tiles = -(-rows // BIAS_TILE) * -(-padded.shape[3] // BIAS_TILE)
    sizes = (heads, rows, columns, padded.shape[3] // 8)
    arguments = (bias, padded, *bias.stride(), *sizes, *edges, BIAS_TILE)
    return Launch(copy_bias_kernel, batch * heads * tiles, arguments, num_warps=4)


def extras(
    problem: AttentionProblem,
    seed: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    floats: Tensor | None,
    integers: Tensor | None,
    layout: Tensor | None,
) -> Extras:
    """What the scores and weights of a problem have besides."""
    found = Extras()
    if problem.dropout_p > 0:
        least = threshold(problem.dropout_p)
        addend = (128 - least % 128) * 0x01010101
        addend -= (addend >> 31) << 32  # as a signed integer
        found = Extras(seed, addend, -1 if least < 128 else 0, 1 / (1 - rate(problem.dropout_p)))
    if slopes is not None:
        stride = slopes.stride(0) if slopes.ndim == 2 else 0
        found = found._replace(slopes=slopes, slopes_stride=stride)
    if bias is not None:
        strides = (0 if size == 1 else stride for size, stride in zip(bias.shape, bias.stride(), strict=True))
        batch, head, row, *_ = strides
        found = found._replace(bias=bias, bias_batch=batch, bias_head=head)
        if not problem.bias_of_distances:
            found = found._replace(bias_row=row)
    if problem.has_score_function:
        found = found._replace(score_unit=problem.softcap or problem.scale)
    if layout is not None:
        found = found._replace(captured=Captured(floats, integers, layout, error_flags(layout.device)))
    return found


def edge(bound: int | None) -> int:
    """A window's edge as kernels take it."""
    return UNBOUNDED if bound is None else min(bound, UNBOUNDED)


def window_size(problem: AttentionProblem) -> int:
    """Keys that a query sees besides its own; UNBOUNDED or more without a window."""
    visibility = problem.visibility()
    return edge(visibility.left) + edge(visibility.right)


def most_tiles(problem: AttentionProblem, rows: int, block: int) -> int:
    """Tiles of a head; `rows` of its tensor, which packed are all sequences': each may add one, or less."""
    return rows // block + problem.batch if problem.is_packed else -(-rows // block)


def persistent(
    kernel: Any,
    device: torch.device,
    work_tiles: int,
    arguments: tuple[Any, ...],
    cfg: KernelConfig,
    is_early: bool = True,
) -> Launch:
    """A launch of as many programs as run at once, which take work tiles until none is left.

    Args:
        work_tiles: how many there are at most.
        arguments: all but cfg, which comes last.
        is_early: it may start before the kernel before it has ended, for which it waits by itself.
    """
    programs = min(num_sms(device.index) * cfg.CTAS_PER_SM, work_tiles)
    return Launch(kernel, programs, (*arguments, cfg), num_warps=4, maxnreg=cfg.maxnreg, launch_pdl=is_early)


def work_sizes(problem: AttentionProblem, cfg: QueriesConfig, rows: int, key_bytes: int) -> Sizes:
    """The integers of a forward kernel. rows: of a packed query. key_bytes: of a key and its value."""
    visibility = problem.visibility()
    positions = cfg.BLOCK_M // cfg.PACK
    num_bh = problem.num_heads // cfg.PACK * (1 if cfg.IS_ORDERED else problem.batch)
    read_together = min(problem.seqlen_k, window_size(problem) + positions)  # keys of a tile of queries
    heads_per_key = max(1, problem.group_size // cfg.PACK)
    fitting = max(1, L2_SWIZZLE_BYTES // (read_together * key_bytes))
    return Sizes(
        batch=problem.batch,
        seqlen_q=rows if problem.is_packed else problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        group_size=problem.group_size,
        num_bh=num_bh,
        num_tiles=-(-problem.seqlen_q // positions),
        l2_swizzle=heads_per_key * l2_swizzle_size(num_bh // heads_per_key, fitting),
        window_left=edge(visibility.left),
        window_right=edge(visibility.right),
    )


def l2_swizzle_size(num_keys: int, fitting: int) -> int:
    """Key heads at a time: as many as fit, but as many each time; a few at the end would leave SMs idle."""
    largest_divisor = max(n for n in range(1, min(fitting, num_keys) + 1) if num_keys % n == 0)
    num_times = -(-num_keys // fitting)
    return largest_divisor if 2 * largest_divisor > fitting else -(-num_keys // num_times)


def order_sequences(
    problem: AttentionProblem, tiled: Tensor | None, other: Tensor | None, rows: int
) -> Tensors:
    """Sequences with most to do first, and the tiles of `rows` of the tiled side before each; None if dense.

    Args:
        tiled: offsets; None with a cache: as many queries each.
        other: offsets; of a cache lengths.
    """
    ordered = new_order(problem, other)
    if other is not None:
        run_steps(problem, order_steps(tiled, other, rows, ordered))
    return ordered


def new_order(problem: AttentionProblem, other: Tensor | None) -> Tensors:
    """Memory for what `order_steps` write, None if dense."""
    if other is None:
        return None, None
    aligned = -(-problem.batch // 4) * 4  # to 16 bytes: else kernels are compiled anew for some batches
    table = torch.empty(aligned + problem.batch + 1, dtype=torch.int32, device=other.device)
    return table[: problem.batch], table[aligned:]


def order_shapes(problem: AttentionProblem, other: Tensor | None) -> list[tuple[int, ...]]:
    """Of `new_order`."""
    return [] if other is None else [(problem.batch,), (problem.batch + 1,)]


def order_steps(tiled: Tensor | None, other: Tensor | None, rows: int, ordered: Tensors) -> list[Step]:
    """The launch that orders sequences, if there are any: see `order_sequences`."""
    return [] if other is None else [Step(_order_launch, (other, tiled), (rows,), ordered)]


def _order_launch(problem: AttentionProblem, tensors: Tensors, rows: int) -> Launch:
    from tilewise.gpu.hopper.common.scheduler import order_sequences_kernel

    other, tiled, *fresh = tensors
    numbers = (problem.batch, problem.seqlen_q, rows, not problem.is_cached)
    return Launch(order_sequences_kernel, 1, (tiled, other, *fresh, *numbers), num_warps=4)


def tma_ready(t: Tensor) -> Tensor:
    """t, or a copy if TMA can't address it: rows contiguous, 16-byte aligned, no broadcast dimensions."""
    is_ready = t.data_ptr() % 16 == 0 and _is_addressable(t.shape, t.stride(), 16 // t.element_size())
    return t if is_ready else t.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=4096)
def _is_addressable(shape: torch.Size, strides: tuple[int, ...], multiple: int) -> bool:
    used = [stride for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size > 1]
    return strides[-1] == 1 and all(stride > 0 and stride % multiple == 0 for stride in used)


def keys_ready(t: Tensor, rows: int = 1) -> Tensor:
    """t, or a copy if TMA can't address its entries, which must be a multiple of `rows` rows apart."""
    t = tma_ready(t)
    return t if t.shape[0] == 1 or t.stride(0) % (rows * row_stride(t)) == 0 else t.contiguous()


def row_stride(t: Tensor) -> int:
    """Elements from one row to the next; of entries of one row any that TMA can take."""
    return t.stride(1) if t.shape[1] > 1 else t.shape[3]


def rows_per_entry(t: Tensor | None) -> int:
    """Rows from one sequence, or page, to the next."""
    if t is None:
        return 0
    return t.shape[1] if t.shape[0] == 1 else t.stride(0) // row_stride(t)


def unserved_pages(problem: AttentionProblem) -> str | None:
    """None if TMA puts pages where a tile in shared memory has them: in whole groups of 8 rows."""
    size = problem.page_size
    if size is None or (size >= GROUP_ROWS and size & (size - 1) == 0):
        return None
    return f"takes page sizes that are powers of two from {GROUP_ROWS}, not {size}"


def descriptor(t: Tensor | None, box: tuple[int, int, int], is_bounded: bool) -> Any:
    """TMA descriptor of (batch, rows, heads, dim) in boxes of (rows, heads, dim).

    Packed (rows, heads, dim), and all rows of a cache's entries: two more dimensions bound each sequence, see
    `common.key_loads.coords`.
    """
    assert t is not None
    strides = [t.shape[-1] if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
    strides[-1] = 1
    if is_bounded:
        strides = strides[-3:]
        shape = [0x7FFF0000, 0x7FFF0000, 1 << 30, *t.shape[-2:]]
        strides = [(1 << 34) - strides[0], strides[0], *strides]
        return box_descriptor(t, shape, strides, (1, 1, *box))
    return box_descriptor(t, t.shape, strides, (1, *box))


def box_descriptor(t: Tensor, shape: Sequence[int], strides: Sequence[int], box: tuple[int, ...]) -> Any:
    """TMA descriptor of t as a tensor of that shape and strides, in boxes that are swizzled."""
    from tilewise.gpu.hopper.common.compat import TensorDescriptor

    return TensorDescriptor(t, list(shape), list(strides), list(box), shared_layout(box, t.dtype))


def flat_descriptor(t: Tensor | None, box: tuple[int, int]) -> Any:
    """TMA descriptor of a contiguous float32 matrix, copied as it lies in memory."""
    from tilewise.gpu.hopper.common.compat import TensorDescriptor, gl

    assert t is not None
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(t, list(t.shape), [t.shape[1], 1], list(box), layout)


@functools.cache
def shared_layout(block_shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Layout of a TMA box in shared memory, swizzled."""
    from tilewise.gpu.hopper.common.compat import gl

    elements = {
        torch.bfloat16: gl.bfloat16, torch.float16: gl.float16,
        torch.float8_e4m3fn: gl.float8e4nv, torch.int8: gl.int8,
    }  # fmt: skip
    element = elements[dtype]
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), element)
