"""One call's tensors and numbers in the form that the kernels take."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.device_errors import error_flags
from tilewise.core.dropout import rate, threshold
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.gpu.functions.axes import bytes_of_loads
from tilewise.gpu.functions.captured import Captured, layout_on
from tilewise.gpu.functions.source import Helpers, helpers, kernel_functions
from tilewise.gpu.launch.gpus import gpu_of
from tilewise.gpu.launch.launch_plan import Launch, Tensors, is_interpreted
from tilewise.gpu.triton.arguments import (
    Columns,
    Extras,
    Factors,
    KernelConfig,
    Ragged,
    Rows,
    ScoreTensor,
    Sizes,
    Slopes,
    Source,
    Visits,
)
from tilewise.gpu.triton.tuning_table import DecodeTile, KernelTile, kernel_tile

# L2 swizzle: as many heads at a time as have keys and values (or queries) that stay in the L2 cache together.
L2_SWIZZLE_BYTES = 24 << 20
# Of Hopper's shared memory, for what functions read: one float for each score of 64 x 128 and one for each
# key, two tiles ahead. Other GPUs have half of it.
CAPTURED_BYTES = 65 << 10
SMALLEST_SCALE = 1e-30  # of scores whose ALiBi is divided by it and stays finite
MOST_WINDOW = 1 << 30  # beyond every length: kernels add a window's edge to positions in 32 bits

_N = len(Inputs._fields)
_CONTIGUOUS = (
    *("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "leftpad_k", "page_table"),
    *("alibi_slopes", "sinks"),
)


class Results(NamedTuple):
    """The tensors of a launch besides the inputs of the call."""

    out: Tensor | None = None
    lse: Tensor | None = None
    residual: Tensor | None = None  # what rounding took from lse
    dout: Tensor | None = None
    dlse: Tensor | None = None
    shift: Tensor | None = None  # with low and delta: see attn_bwd_prepare_kernel
    low: Tensor | None = None
    delta: Tensor | None = None
    dsinks: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dcaptured: Tensor | None = None
    order: Tensor | None = None  # with counts: the tiles that functions leave, see `arguments.Visits`
    counts: Tensor | None = None


GIVEN = 5  # of `Results`, to a backward: the rest is allocated for it


def launchable(inputs: Inputs) -> Inputs:
    """The inputs as kernels take them; copies only what they could not read where it lies."""
    query, key, value, *others = inputs
    if [t for t in others if t is not None]:
        i = inputs
        inputs = i._replace(
            **{name: t.contiguous() for name in _CONTIGUOUS if (t := getattr(i, name)) is not None},
            mask=None if i.mask is None else i.mask.view(torch.uint8),
            dropout_seed=None if i.dropout_seed is None else i.dropout_seed.to(query.device),
            captured_layout=layout_on(i.captured_layout, query.device),
        )
    return Inputs(with_dense_rows(query), with_dense_rows(key), with_dense_rows(value), *inputs[3:])


def distances_as_bias(problem: AttentionProblem, numbers: Tensor) -> Tensor:
    """Numbers of distances as a bias (batch or 1, heads or 1, 1, columns): the first query's row.

    In memory the next query's begins one number before it. Any length gives addresses of whole 16 bytes.
    """
    *lead, length = numbers.shape
    first = -(-(problem.seqlen_q - 1) // 4) * 4
    size = -(-(first + problem.seqlen_k) // 16) * 16  # no length has kernels of its own
    padded = numbers.new_zeros(*lead, 1, size)
    padded[..., 0, first - problem.seqlen_q + 1 :][..., :length] = numbers
    return padded[..., first:]


def with_dense_rows(t: Tensor) -> Tensor:
    """t, or a copy if its last dimension has gaps or a tile of its rows would span 2^31."""
    strides = t.stride()
    is_fine = (strides[-1] == 1 or t.shape[-1] == 1) and strides[0 if t.ndim == 3 else 1] < 1 << 23
    return t if is_fine else t.contiguous()


class Call:
    """What the arguments of every kernel are made of: `launchable` inputs, results and numbers."""

    def __init__(
        self, problem: AttentionProblem, tensors: Tensors, wanted: frozenset[int] = frozenset()
    ) -> None:
        """`wanted`: the captured tensors whose gradient the kernel sums."""
        text, self.problem = problem.functions, problem
        self.functions = None if text is None else kernel_functions(text, wanted)
        self.inputs = inputs = Inputs(*tensors[:_N])  # type: ignore[arg-type]
        self.results = Results(*tensors[_N:])
        self.is_packed = problem.is_packed
        self.seqlen_q = inputs.query.shape[0] if self.is_packed else problem.seqlen_q
        self.seqlen_k = inputs.key.shape[0] if problem.has_packed_keys else problem.seqlen_k
        self.bh_q = problem.num_heads * (1 if self.is_packed else problem.batch)
        self.bh_k = problem.num_kv_heads * (1 if problem.has_packed_keys else problem.batch)

    def tiles_q(self, block: int) -> int:
        return self.seqlen_q // block + self.problem.batch if self.is_packed else -(-self.seqlen_q // block)

    def tiles_k(self, block: int) -> int:
        is_packed = self.problem.has_packed_keys
        return self.seqlen_k // block + self.problem.batch if is_packed else -(-self.seqlen_k // block)

    def l2_swizzle(self, length: int, heads: int) -> int:
        """(batch, head) pairs at a time: each reads `heads` heads of `length` rows of two tensors."""
        problem = self.problem
        one = length * heads * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
        return max(1, L2_SWIZZLE_BYTES // max(1, one))

    def rows(self, t: Tensor | None) -> Any:
        if t is None:
            return None
        strides = t.stride() if 1 not in t.shape else _canonical_strides(t)
        return Rows(t, 0, strides[0], strides[1]) if t.ndim == 3 else Rows(t, *strides[:3])

    def source(
        self, t: Tensor | None, num_rows: int = 0, has_tma: bool = False, is_left_shared: bool = False
    ) -> Source:
        """A tensor that a loop reads in tiles of num_rows, by TMA if it can be."""
        if not (has_tma and can_tma(self.problem)):
            return Source(self.rows(t), None, None)
        return Source(self.rows(t), *_descriptors(t, num_rows, is_left_shared))

    def ragged(self) -> Any:
        i = self.inputs
        errors = error_flags(i.query.device) if self.problem.is_cached else None
        return Ragged(i.cu_seqlens_q, i.cu_seqlens_k, i.seqlens_k, i.leftpad_k, i.page_table, errors)

    def extras(self, rows: int = 0, columns: int = 0) -> Any:
        """`rows`, `columns`: of tiles that a kernel with functions goes through."""
        i = self.inputs
        mask, bias = (None if t is None else ScoreTensor(t, *_canonical_strides(t)) for t in (i.mask, i.bias))
        if bias is not None and self.problem.bias_of_distances:
            bias = bias._replace(stride_row=-1)
        slopes = None
        if i.alibi_slopes is not None:
            slopes = Slopes(i.alibi_slopes, i.alibi_slopes.stride(0) if i.alibi_slopes.ndim == 2 else 0)
        seed = i.dropout_seed if self.problem.dropout_p > 0 else None
        return Extras(mask, bias, slopes, i.sinks, seed, self.captured(), self.visits(rows, columns))

    def captured(self) -> Any:
        i = self.inputs
        if self.functions is None or i.captured_layout is None:
            return None
        errors = error_flags(i.query.device)
        return Captured(i.captured_floats, i.captured_integers, i.captured_layout, errors)

    def visits(self, rows: int, columns: int) -> Any:
        order, counts = self.results.order, self.results.counts
        if order is None:
            return None
        factor, (batch, heads, *shape) = 1, order.shape
        while [-(-rows // factor), -(-columns // factor)] != shape:
            factor *= 2
        return Visits(order, counts, int(batch > 1), int(heads > 1), factor)

    def sizes(self, num_tiles: int = 0, num_bh: int = 0, l2_swizzle: int = 0) -> Any:
        problem = self.problem
        visibility = problem.visibility()
        left, right = (
            None if edge is None else min(edge, MOST_WINDOW) for edge in (visibility.left, visibility.right)
        )
        table = self.inputs.page_table
        return Sizes(
            batch=problem.batch,
            num_heads=problem.num_heads,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            stride_page_table=0 if table is None else table.shape[1],
            num_pages=len(self.inputs.key),
            window_left=left,
            window_right=right,
            dropout_threshold=threshold(problem.dropout_p),
            num_tiles=num_tiles,
            num_bh=num_bh,
            l2_swizzle=min(l2_swizzle, num_bh),  # times num_tiles, in 32 bits
        )

    def factors(self) -> Any:
        return Factors(self.problem.scale, self.problem.softcap, 1.0 / (1.0 - rate(self.problem.dropout_p)))

    def tile(self, kernel: str) -> KernelTile:
        """The tuning table's row for this call on this GPU."""
        tile = table_tile(kernel, self.problem, self.inputs.query.device)
        assert tile is not None
        return tile

    def launch_tiled(
        self,
        kernel: Any,
        tile: KernelTile,
        arguments: tuple[Any, ...],
        by_key: bool = False,
        is_early: bool = False,
    ) -> Launch:
        """`kernel` on `arguments` and what all kernels take; a program has a tile of queries, or of keys."""
        group_size = self.problem.group_size
        tiles, looped = self.tiles_q(tile.block_m), self.tiles_k(tile.block_n)
        bh, l2_swizzle = self.bh_q, group_size * self.l2_swizzle(self.seqlen_k, 1)
        if by_key:
            tiles, looped = looped, tiles
            bh, l2_swizzle = self.bh_k, self.l2_swizzle(self.seqlen_q, group_size)
        rest = self.ragged(), self.extras(tiles, looped), self.factors(), self.sizes(tiles, bh, l2_swizzle)
        return self.launch(kernel, tile, tiles * bh, (*arguments, *rest), is_early)

    def launch(
        self, kernel: Any, tile: KernelTile, programs: int, arguments: tuple[Any, ...], is_early: bool = False
    ) -> Launch:
        """`kernel` on arguments and this call's compile-time choices.

        is_early: it may start before the kernel before it has ended, for which it waits by itself.
        """
        arguments = (*arguments, self.config(tile))
        is_early = is_early and has_pdl(self.inputs.query.device)
        resources = (tile.num_warps, self.num_stages(tile), tile.max_registers)
        return Launch(kernel, programs, arguments, *resources, launch_pdl=is_early)

    def num_stages(self, tile: KernelTile) -> int:
        """The tile's, or fewer: what functions read is in flight in shared memory too."""
        if self.functions is None:
            return tile.num_stages
        size = bytes_of_loads(self.functions.text, tile.block_m, tile.block_n)
        is_large = not is_interpreted() and gpu_capability(self.inputs.query.device)[0] in (9, 10)
        share = CAPTURED_BYTES if is_large else CAPTURED_BYTES // 2
        return min(tile.num_stages, 1 + share // max(1, size))

    def config(self, tile: KernelTile | DecodeTile) -> KernelConfig:
        p = self.problem
        # What is added to unscaled scores becomes what their product starts with: a bias would have to be
        # waited for, and in float32 the sum's rounding would show ALiBi's size.
        is_exact = p.dtype.itemsize == 2 or not p.has_alibi
        is_folded = p.scale > SMALLEST_SCALE and p.softcap == 0 and p.bias_shape is None and is_exact
        made = Helpers() if self.functions is None else helpers(self.functions)
        return KernelConfig(
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            QK=columns(p.head_dim),
            V=columns(p.head_dim_v),
            GROUP_SIZE=p.group_size,
            PAGE_SIZE=p.page_size or 0,
            HAS_SOFTCAP=p.softcap > 0,
            IS_FOLDED=is_folded and made.score is None,
            PRECISION="bf16x6" if isinstance(tile, KernelTile) and tile.is_cut else p.precision,
            HAS_PDL=has_pdl(self.inputs.query.device),
            MASK=made.mask,
            SCORE=made.score,
            HAS_SLOPE=made.has_slope,
            IS_GUARDED=made.is_guarded,
            ADD_CAPTURED=made.add_captured,
            DROPOUT_STEP=p.dropout_step,
        )


def can_tma(problem: AttentionProblem) -> bool:
    """Not where sequences end inside of a tensor: what lies behind them may be NaN."""
    return not (problem.is_packed or problem.is_cached)


def _descriptors(t: Tensor | None, num_rows: int, is_left_shared: bool) -> tuple[Any, Any]:
    """(first chunk, second chunk) of tiles of (batch, seqlen, heads, dim); None where TMA cannot read t.

    is_left_shared: boxes of (1, 1, rows, columns). Triton drops dimensions of one that come first; with any
    other, a box is reshaped, and as a product's left operand goes through registers.
    """
    if t is None or not _is_tma_ready(t):
        return None, None
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape, cut = list(t.shape), columns(t.shape[-1])
    strides = [stride or t.shape[-1] for stride in _canonical_strides(t)[:-1]] + [1]  # of size one: any
    box = [1, num_rows, 1]
    if is_left_shared:
        shape, strides, box = ([n[0], n[2], n[1], *n[3:]] for n in (shape, strides, box))
    chunks = [
        TensorDescriptor(t, shape, strides, [*box, width]) if width else None
        for width in (cut.FIRST, cut.REST)
    ]
    return chunks[0], chunks[1]


def _is_tma_ready(t: Tensor) -> bool:
    """Hopper and newer; addresses and strides of whole 16 bytes, none of them 0."""
    if not is_interpreted() and gpu_capability(t.device) < (9, 0):
        return False
    size = t.dtype.itemsize
    strides = [stride * size for n, stride in zip(t.shape[:-1], t.stride()) if n > 1]
    is_aligned = t.data_ptr() % 16 == 0 and t.shape[-1] * size % 16 == 0
    return t.numel() > 0 and is_aligned and all(stride > 0 and stride % 16 == 0 for stride in strides)


def table_tile(kernel: str, problem: AttentionProblem, device: torch.device) -> KernelTile | None:
    """The tuning table's row for a kernel on a device."""
    if is_interpreted():
        return None if kernel in ("dk", "dv") else KernelTile(16, 16, 4, 1, has_tma=True)
    return _table_tile(kernel, problem, gpu_capability(device))


@functools.lru_cache(maxsize=4096)
def _table_tile(kernel: str, problem: AttentionProblem, capability: tuple[int, int]) -> KernelTile | None:
    p = problem
    widest = max(padded_dim(p.head_dim), padded_dim(p.head_dim_v))
    extras = "formula" if p.softcap > 0 or p.has_alibi or p.functions is not None else None
    if p.mask_shape is not None:
        extras = "mask"
    if p.bias_shape is not None:
        extras = "bias"
    if p.dropout_p > 0:
        extras = "dropout"
    float32_precision = p.precision if p.dtype == torch.float32 else None
    is_whole = not (columns(p.head_dim).REST or columns(p.head_dim_v).REST)
    return kernel_tile(kernel, capability, float32_precision, widest, extras, p.causal, can_tma(p), is_whole)


def gpu_capability(device: torch.device) -> tuple[int, int]:
    """CUDA's compute capability; of other vendors' GPUs that of the portable tiles."""
    return gpu_of(device.index).capability


def has_pdl(device: torch.device) -> bool:
    """Whether kernels can start before the one before has ended: Hopper and newer."""
    return not is_interpreted() and gpu_capability(device) >= (9, 0)


def padded(size: int) -> int:
    """The power of two that holds so many rows or columns of a tile."""
    return max(16, 1 << (size - 1).bit_length())


def columns(head_dim: int) -> Columns:
    """head_dim chunks of kernels: one, a power of two, or two where that saves 32 columns and more.

    Example:
        >>> columns(192), columns(112)
        (Columns(DIM=192, FIRST=128, REST=64), Columns(DIM=112, FIRST=128, REST=0))
    """
    whole = padded(head_dim)
    half, rest = whole // 2, padded(head_dim - whole // 2)
    is_cut = whole > 64 and rest < half
    return Columns(head_dim, half, rest) if is_cut else Columns(head_dim, whole, 0)


def padded_dim(head_dim: int) -> int:
    """Columns that a kernel computes for a head: what the tuning table's rows are found by."""
    cut = columns(head_dim)
    return cut.FIRST + cut.REST


def _canonical_strides(t: Tensor) -> tuple[int, ...]:
    """t's strides, 0 where the size is one: there any number may stand, and must not cause a compilation."""
    return tuple(0 if size == 1 else stride for size, stride in zip(t.shape, t.stride()))
