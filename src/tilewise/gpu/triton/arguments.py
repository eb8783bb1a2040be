"""What the kernels are given: named tuples of tensors and numbers, and the compile-time choices.

`None` in a tuple leaves no trace in the compiled kernel. This module does not import triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tilewise.gpu.functions.captured import Captured
from tilewise.gpu.launch.entry import by_field

# The backward keeps lse and delta in blocks of so many rows, a sequence's last one padded: no tile of
# queries is larger, so their loads are aligned and need no mask.
STAT_ROWS = 128


class Rows(NamedTuple):
    """Rows of one tensor: (batch, row, head) strides in elements; the last dimension is contiguous."""

    ptr: Any
    stride_batch: int  # 0 if packed; a page's stride if paged
    stride_row: int
    stride_head: int


@by_field
class Source(NamedTuple):
    """A tensor that a loop reads tile by tile: by addresses, or as boxes that the GPU copies itself (TMA).

    The descriptors are of (1, rows, 1, columns) of a 4-D tensor, or of (1, 1, rows, columns) if heads come
    before rows, for a tile's first chunk and its second; None where addresses serve.
    """

    rows: Rows
    desc: Any
    desc_rest: Any


class ScoreTensor(NamedTuple):
    """A tensor that broadcasts to the score matrix; a stride of 0 is a broadcast dimension."""

    ptr: Any
    stride_batch: int
    stride_head: int
    stride_row: int
    stride_col: int


class Slopes(NamedTuple):
    """ALiBi slopes; stride_batch is 0 where one row serves every batch entry."""

    ptr: Any
    stride_batch: int


class Visits(NamedTuple):
    """The tiles that functions leave to a dense call, those that are visible as a whole first.

    A row is of one program's tile, or of `factor` of them. Its numbers count tiles of the loop's, or runs of
    `factor` of them.
    """

    order: Any  # (batch or 1, heads or 1, rows, columns) int32: those visible, then those partly so, the rest
    counts: Any  # (batch or 1, heads or 1, rows, 2) int32: how many are full, and how many are visible at all
    per_batch: int  # 0 if all batch entries share the rows, else 1
    per_head: int
    factor: int


@by_field
class Extras(NamedTuple):
    """Tensors that change scores or weights. None: absent from the compiled kernel."""

    mask: ScoreTensor | None
    bias: ScoreTensor | None
    alibi: Slopes | None
    sinks: Any
    dropout_seed: Any
    captured: Captured | None
    visits: Visits | None


class Ragged(NamedTuple):
    """Where each sequence lies, for packed problems and caches. None: absent from the compiled kernel."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqlens_k: Any
    leftpad_k: Any
    page_table: Any
    errors: Any = None  # flags for wrong lengths and pages of a cache: see `tilewise.core.device_errors`


@by_field
class Sizes(NamedTuple):
    """Integers that change from call to call. None: absent from the compiled kernel."""

    batch: int
    num_heads: int
    seqlen_q: int  # packed: total rows
    seqlen_k: int
    stride_page_table: int
    num_pages: int  # or entries of a cache
    window_left: int | None
    window_right: int | None  # causal is a window whose right edge is 0
    dropout_threshold: int  # a byte below it drops its weight
    num_tiles: int
    num_bh: int  # (batch, head) pairs; heads if packed
    l2_swizzle: int  # (batch, head) pairs whose tiles are interleaved: their K and V stay in L2 together


class Factors(NamedTuple):
    """Floats that change from call to call."""

    scale: float
    softcap: float
    keep: float  # 1 / (1 - rate of dropout)


@dataclass(frozen=True)
class Columns:
    """A head's DIM columns as powers of two: FIRST, and REST more unless that is 0. 192 = 128 + 64."""

    DIM: int
    FIRST: int
    REST: int


@dataclass(frozen=True)
class KernelConfig:
    """Compile-time choices of one kernel."""

    BLOCK_M: int
    BLOCK_N: int
    QK: Columns  # of query and key
    V: Columns
    GROUP_SIZE: int  # query heads that share one key head
    PAGE_SIZE: int  # 0: keys are not paged
    HAS_SOFTCAP: bool
    IS_FOLDED: bool  # the exponential's multiply-add scales: nothing capped, the scale positive and not tiny
    PRECISION: str  # of a float32 product: "bf16x6", "ieee" or "tf32"
    HAS_PDL: bool  # programmatic dependent launch: the kernels of a backward overlap at their ends
    MASK: Any = None  # helpers that `gpu.functions` makes of mask and score functions
    SCORE: Any = None
    HAS_SLOPE: bool = False  # the derivative of the score function by the score is not 1
    IS_GUARDED: bool = False  # indices of functions may be out of range
    ADD_CAPTURED: Any = None  # a helper that sums the gradients of captured tensors
    DROPOUT_STEP: int = 0  # 16 or 1: the seed has an origin, whose query and key are multiples of this


@by_field
class BiasSizes(NamedTuple):
    """Arguments of the dbias kernel: extents of the bias and of what it serves, and how that is split."""

    bias_batch: int
    bias_heads: int
    bias_rows: int
    bias_cols: int
    loop_batch: int  # sequences one bias tile serves: 1, or all of them where bias is broadcast
    loop_heads: int
    loop_rows: int  # query tiles likewise
    loop_cols: int
    tiles_m: int  # bias tiles
    tiles_n: int
    per_split: int  # iterations of one program; the splits are summed afterwards


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(KernelConfig):
    """Compile-time choices of the decoding kernels, whose values are in one chunk of columns."""

    ROWS: int  # rows of a tile that are stored, at most BLOCK_M
    BLOCK_B: int  # batch, padded to 16 or a larger power of two
    IS_SHARED: bool  # the values are the first columns of the keys, as in absorbed MLA
    IS_TRANSPOSED: bool  # keys along the rows of the score tile


class Sequence(NamedTuple):
    """One head of one sequence inside a kernel, and how its queries align with its keys."""

    b: Any
    h: Any
    seqlen_q: Any
    seqlen_k: Any
    offset: Any  # seqlen_k - seqlen_q: the last query is aligned with the last key
    first_col: Any  # column of mask and bias that key 0 has
