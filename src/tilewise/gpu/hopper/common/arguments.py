"""What the Hopper kernels are given. This module imports neither triton nor gluon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tilewise.gpu.launch.entry import by_field

WARPGROUP_ROWS = 64  # query rows of one wgmma warpgroup
FLAG_BITS = 4  # of an entry of a mask's tile map: see `mask.tile_map`


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Compile-time choices that kernels share. One that knows nothing of an option is never given it."""

    WARPGROUPS: int  # consumers, 64 rows each
    CTAS_PER_SM: int = 1  # thread blocks (CTAs) of an SM, which share its registers
    PACK: int = 1  # query heads of one key head that share a tile: row = position * PACK + head
    IS_PACKED: bool = False  # sequences one after another, bounded by cu_seqlens
    IS_CACHED: bool = False  # keys of a cache, of which each sequence has a number of its own
    HAS_LEFTPAD: bool = False  # of which some at its beginning are not seen
    PAGE_SIZE: int = 0  # 0: keys are not paged
    IS_DETERMINISTIC: bool = False  # in the backward, tiles of keys add to dq in their order
    HAS_LEFT: bool  # the window has a left edge
    HAS_RIGHT: bool  # or a right edge; causal is a right edge of 0
    HAS_SOFTCAP: bool
    HAS_SINKS: bool = False
    HAS_MASK: bool = False  # tiles are visited by a `MaskMap`, or a `TransposedMap`
    MASK: Any = None  # a mask function, inlined where the map has no bits: see `gpu.functions.source`
    HAS_DROPOUT: bool = False
    HAS_ORIGIN: bool = False  # the call is a part of one by which dropout numbers heads, queries and keys
    HAS_ALIBI: bool = False
    HAS_BIAS: bool = False
    BIAS_OF_ROWS: bool = False  # all columns of a tile have the same
    BIAS_OF_DISTANCES: bool = False  # it depends on key - query
    BOTH_ENDS_FIRST: bool = False  # of the key tiles the last and the first are visited before others
    SCORE: Any = None  # a score function: see `gpu.functions.source`
    HAS_SLOPE: bool = False  # in the backward, its derivative by the score is not 1

    @property
    def IS_ORDERED(self) -> bool:
        """Whether tiles are numbered sequence by sequence, those with most keys first."""
        return self.IS_PACKED or self.IS_CACHED

    @property
    def HIDES_PADDING(self) -> bool:
        """Whether a sequence's first tile may have rows of left padding, as it begins where TMA finds pages.

        Without pages it begins with the first key.
        """
        return self.HAS_LEFTPAD and self.PAGE_SIZE > 0

    @property
    def NEAREST_FIRST(self) -> bool:
        """Whether key tiles are visited from the last to the first: see `ranges.visited`."""
        return self.HAS_LEFT or self.HAS_ALIBI

    @property
    def maxnreg(self) -> int:
        """Registers of each thread at the start: the SM's, over the warps that Triton reserves.

        The producers' single warps count as a warpgroup.
        """
        return 65536 // (128 * (self.WARPGROUPS + 1) * self.CTAS_PER_SM) // 8 * 8


@dataclass(frozen=True, kw_only=True)
class StreamConfig(KernelConfig):
    """What kernels share of which each warpgroup keeps a tile, while tiles for all stream by."""

    STAGES: int  # tiles in flight of those that stream by
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int = 24

    @property
    def WARPS(self) -> list[int]:
        """Of the partitions after the first: the other warpgroups, and the producer."""
        return [4] * (self.WARPGROUPS - 1) + [1]

    @property
    def REGISTERS(self) -> list[int]:
        """Of theirs; the first has the rest."""
        return [self.CONSUMER_REGISTERS] * (self.WARPGROUPS - 1) + [self.PRODUCER_REGISTERS]


@dataclass(frozen=True, kw_only=True)
class QueriesConfig(StreamConfig):
    """What the forward kernels share: queries stay, and keys stream by."""

    Q_SLOTS: int  # query tiles of a warpgroup in shared memory: more than WARPGROUPS load the next ones early
    BLOCK_DV: int  # head size of V, filled up to a power of two

    @property
    def BLOCK_M(self) -> int:
        """Query rows of a work tile: those of all warpgroups."""
        return self.WARPGROUPS * WARPGROUP_ROWS


@dataclass(frozen=True, kw_only=True)
class ForwardConfig(QueriesConfig):
    """Compile-time choices of the forward kernel. Packed queries may have cached keys."""

    BLOCK_N: int  # keys of a tile
    D_CHUNKS: int  # head_dim of QK in chunks; TMA fills the last one up with zeros
    D_CHUNK: int  # 64 columns or a larger power of two: 192 is three chunks of 64
    HEADROOM: float  # of the reference above the first tile's maximum, in units of log2: see `softmax_step`
    LARGEST_SUM: float  # of a row's p, by thread, with which no p overflows
    LARGEST_SPREAD: float  # of a row's first scores, in units of log2: steeper rows follow their maximum
    IS_GUARDED: bool = False  # the score function may read out of range
    WIDE_COLUMNS: int = 0  # of out, if it is in float32
    HAS_ROW_MAX: bool = False  # asked for
    HAS_ENTROPY: bool = False
    HAS_MAX_LOGIT: bool = False  # of heads: rows of a tile are of one

    @property
    def WATCHES(self) -> bool:
        """Whether statistics of the weights are asked for: see `forward.watched`."""
        return self.HAS_ROW_MAX or self.HAS_ENTROPY or self.HAS_MAX_LOGIT

    @property
    def BOX_ROWS(self) -> int:
        """Keys of one TMA copy: no more than a page has."""
        return min(self.PAGE_SIZE or self.BLOCK_N, self.BLOCK_N)

    @property
    def BOXES(self) -> int:
        """Boxes of a tile along its keys."""
        return self.BLOCK_N // self.BOX_ROWS

    @property
    def IS_OVERLAPPED(self) -> bool:
        """Whether a warpgroup's products run under its own softmax, not the other CTA's of the SM."""
        return self.CTAS_PER_SM == 1

    @property
    def FOLLOWS(self) -> bool:
        """Whether rows follow their maximum from the start, as it grows with every tile.

        ALiBi's is in the first tile if that has the nearest keys. A bias may be -inf, as a mask, and so may
        what a score function gives.
        """
        return self.HAS_BIAS or self.SCORE is not None or (self.HAS_ALIBI and not self.HAS_RIGHT)

    @property
    def DRAWS_EARLY(self) -> bool:
        """Whether a tile's dropout is drawn before its products start, under those of the other warpgroup.

        At head size 128 after them was 5-8% slower.
        """
        return self.HAS_DROPOUT and self.IS_OVERLAPPED

    @property
    def Q_CHUNKS(self) -> int:
        """Chunks of a query slot, which is also the staging buffer of O: a multiple of its width."""
        return self.O_TILES * self.BLOCK_DV // self.D_CHUNK

    @property
    def O_TILES(self) -> int:
        """Tiles of O that would fit a query slot; one is staged there."""
        return -(-self.D_CHUNKS * self.D_CHUNK // self.BLOCK_DV)


@dataclass(frozen=True, kw_only=True)
class FP8Config(QueriesConfig):
    """Compile-time choices of the 8-bit forward kernel."""

    BLOCK_N: ClassVar[int] = 128  # keys that share a factor

    HEAD_DIM: int  # of QK, filled up to a power of two
    HAS_INTEGERS: bool  # Q and K are int8, else float8_e4m3fn

    @property
    def V_CHUNKS(self) -> int:
        """Chunks of V's columns: registers hold O and one chunk's product."""
        return -(-self.BLOCK_DV // 128)

    @property
    def Q_CHUNKS(self) -> int:
        """Tiles of Q that fit a query slot, which is also the staging buffer of the 16-bit O."""
        return self.O_TILES * 2 * self.BLOCK_DV // self.HEAD_DIM

    @property
    def O_TILES(self) -> int:
        """Tiles of O that would fit there; one is staged."""
        return -(-self.HEAD_DIM // (2 * self.BLOCK_DV))


class Factors(NamedTuple):
    """Scalars of the scores."""

    scale_log2e: Any  # turns a product, or a capped score, into units of log2
    two_over_softcap_log2e: Any
    softcap_log2e: Any
    scale: Any  # turns it into a logit


@by_field
class Scales(NamedTuple):
    """float32 factors of 8-bit numbers: [heads, blocks] of Q; [KV heads, blocks] of K and V."""

    q: Any
    k: Any
    v: Any
    blocks_q: int  # of all sequences
    blocks_k: int


class Packing(NamedTuple):
    """Where packed sequences lie, and the order in which they are scheduled. All None for a dense problem."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    order: Any  # (batch,) sequences, longest first
    first_tile: Any  # (batch + 1,) query tiles of one head before each sequence of `order`


@by_field
class RowTargets(NamedTuple):
    """Where the forward stores what belongs to a row, each like lse; None for statistics not asked for."""

    lse: Any
    residual: Any  # what rounding took from lse; any pointer, which is not written to, if has_residual is 0
    has_residual: int  # no constant: training and evaluation share a kernel
    row_max: Any = None
    entropy: Any = None
    max_logit: Any = None  # (heads,), not of rows: -inf at first


class Cache(NamedTuple):
    """Where the keys of a cache's sequences lie. All None without a cache."""

    seqlens_k: Any
    page_table: Any  # (batch, pages); None: sequence b is entry b
    errors: Any  # flags for what is wrong in them: see `hopper.common.guards`
    key_scale: Any = None  # (pages, KV heads) of 8-bit pages
    value_scale: Any = None
    leftpad_k: Any = None  # rows of a sequence's before its first key


@by_field
class MaskMap(NamedTuple):
    """Which key tiles each tile of queries visits, and their bits: see `mask.tile_map`; None without one."""

    tiles: Any = None
    bits: Any = None
    stride_batch: int = 0  # rows of the map from one to the next; 0 where all share one
    stride_head: int = 0
    stride_tile: int = 0


@by_field
class Extras(NamedTuple):
    """What scores and weights have besides; what a call has not is None or 0."""

    dropout_seed: Any = None  # () int64, or (5,): `core.dropout.with_origin`
    dropout_addend: int = 0  # four bytes, each 128 - threshold % 128: see `common.dropout.survivors`
    dropout_either: int = 0  # all bits 1 if the threshold is below 128, else 0
    inverse_keep: float = 1.0  # what a weight that survives counts
    slopes: Any = None  # (heads,) or (batch, heads)
    slopes_stride: int = 0  # from one batch entry to the next
    bias: Any = None  # int32: two 16-bit numbers; of distances int64: two float32. See `common.biases`
    bias_batch: int = 0  # pairs from one to the next; 0 where all share one
    bias_head: int = 0
    bias_row: int = 0
    captured: Any = None  # what inlined functions read: see `gpu.functions.captured`
    score_unit: float = 1.0  # of what a score function is given: times products, or the tanh of capped ones


class Place(NamedTuple):
    """What functions ask besides a query's and a key's position."""

    b: Any
    h: Any
    seqlen_q: Any
    seqlen_k: Any


@by_field
class TransposedMap(NamedTuple):
    """Which query tiles each tile of keys visits, and their bits: see `mask.tile_map`."""

    lists: Any = None  # for each tile of keys of a key head: how many, and their entries
    bits: Any = None
    list_batch: int = 0  # lists from one to the next; 0 where all share one
    list_head: int = 0
    stride_batch: int = 0  # rows of bits from one to the next
    stride_head: int = 0
    stride_tile: int = 0


@by_field
class Sizes(NamedTuple):
    """Integers that change from call to call."""

    batch: int
    seqlen_q: int  # packed: of all sequences together
    seqlen_k: int  # cached: the most that a sequence may have
    group_size: int  # query heads that share one key head
    num_bh: int  # (batch, head) pairs, or heads if ordered; with PACK heads in one tile, that many fewer
    num_tiles: int  # query tiles of a (batch, head); ordered: not used
    l2_swizzle: int  # (batch, head) pairs whose tiles are interleaved: their K and V stay in L2 together
    window_left: int
    window_right: int
    rows_k: int = 0  # of a cache: rows from one entry, a sequence or a page, to the next
    rows_v: int = 0
    stride_page_table: int = 0
    num_pages: int = 0  # or entries of a cache
