"""What the Hopper backward kernels are given. This module imports neither triton nor gluon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tilewise.gpu.hopper.common.arguments import KernelConfig, StreamConfig
from tilewise.gpu.launch.entry import by_field

MOST_SOFTCAP = 1000.0  # that keeps lse so small that 16-bit weights need no shift
LARGE_LSE = 44.0  # 64 in units of log2; up to here a float has it to 2^-18
DQ_TILE = 4096  # float32 elements of dq that one warpgroup adds at a time: [64, 64]


@dataclass(frozen=True, kw_only=True)
class BackwardConfig(KernelConfig):
    """Compile-time choices of the backward kernel. Rows of its tiles are keys."""

    WARPGROUPS: int = 2
    BLOCK_M: int  # queries of a tile
    BLOCK_N: int  # keys of a tile: 64 for each of two warpgroups
    BLOCK_D: int  # head sizes of QK and V, padded by TMA to a power of two
    K_STAGES: int  # tiles of v; two: of k as well. With one, k shares the queries' slots: see `loads`
    LATEST_FIRST: bool = False  # queries of a tile of keys from the last to the first, each of all heads
    IS_SPLIT: bool = False  # several CTAs share a tile of keys: see `splits`
    HAS_LARGE_LSE: bool = True  # where lse is large, rows have a shift: see `scores.weights`
    WIDE_COLUMNS: int = 0  # of dq and dk, if gradients are in float32
    WIDE_COLUMNS_V: int = 0  # of dv, likewise
    STATS: ClassVar[int] = 2  # rows of `rows.attn_bwd_prepare_kernel`; there is no room for the shift
    MMA_REGISTERS: ClassVar[int] = 240
    LOAD_REGISTERS: ClassVar[int] = 24

    @property
    def DESCENDING(self) -> bool:
        """Whether the last keys of a sequence are worked on first."""
        return self.IS_DETERMINISTIC and self.HAS_RIGHT and not self.LATEST_FIRST

    @property
    def ENDS_UNEVENLY(self) -> bool:
        """Whether SMs are idle at the end, for the next kernel to start early. Where not, that costs 2%."""
        return self.HAS_LEFT or not self.HAS_RIGHT

    @property
    def STAGGERED(self) -> bool:
        """Whether tiles of keys start at different queries."""
        return not (self.HAS_LEFT or self.HAS_RIGHT or self.IS_DETERMINISTIC or self.HAS_MASK)

    @property
    def IS_STREAM_K(self) -> bool:
        """Whether shared tiles, of the same length, are cut into units of steps."""
        return self.IS_SPLIT and not self.HAS_RIGHT

    @property
    def IS_EVENLY_SPLIT(self) -> bool:
        """Whether each is cut into the same number of splits."""
        return self.IS_SPLIT and self.HAS_RIGHT


@by_field
class BackwardSizes(NamedTuple):
    """Integers that change from call to call."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    group_size: int  # query heads that share one key head
    num_bh: int  # (batch, key head) pairs, or key heads if packed
    num_tiles: int  # key tiles of a (batch, key head); packed: not used
    l2_swizzle: int  # (batch, key head) pairs whose tiles are interleaved, those with most to do first
    tiles_q: int  # query tiles of a query head in the scratch tensors
    window_left: int
    window_right: int


class Division(NamedTuple):
    """How CTAs divide tiles of keys, see `splits`; without splits each is one CTA's."""

    work_tiles: int  # units or splits, and whole tiles
    shared: int = 0  # tiles
    splits: int = 0  # at most
    border: int = 0  # of shared tiles and whole ones
    unit: int = 1


@by_field
class Splits(NamedTuple):
    """Which tiles of keys several CTAs share, where IS_SPLIT: see `splits`."""

    border: int  # tiles of keys from this one on; causal, those before it
    unit: int  # steps of a unit: query tiles, of all heads of a group; causal, splits of a tile
    sums: Any  # float32 (splits, 2 warpgroups, dK and dV, 64 * BLOCK_D), in the order of registers


@by_field
class RowSizes(NamedTuple):
    """Integers of `rows.attn_bwd_prepare_kernel`."""

    tiles_q: int
    num_heads: int
    seqlen_q: int
    batch: int
    total_q: int  # rows of lse's heads


@by_field
class FinishSizes(NamedTuple):
    """Integers of `rows.attn_bwd_finish_kernel`."""

    tiles_q: int
    num_heads: int
    seqlen_q: int
    batch: int
    seqlen_k: int
    group_size: int
    key_tiles: int  # of a key head; packed: not used
    num_tiles: int  # query tiles of all heads
    late: int  # of each head: see `launch.late_tiles`


class ScoreFactors(NamedTuple):
    """Floats that turn products into exponents of 2, and ds into dk."""

    scale: Any
    scale_log2e: Any
    two_over_softcap_log2e: Any
    softcap_log2e: Any


@dataclass(frozen=True, kw_only=True)
class WideBackwardConfig(StreamConfig):
    """Compile-time choices of the kernels for head sizes over 128. No tile of keys waits for others.

    STAGES: tiles of Q and of dO in flight in the keys kernel.
    """

    WARPGROUPS: int = 2
    BLOCK_M: int  # queries of a tile of the keys kernel, and of the row statistics
    BLOCK_N: int  # keys of a tile
    D_CHUNKS: int  # head_dim of QK in chunks; TMA fills the last one up with zeros
    D_CHUNK: int  # 64 columns or a larger power of two: 192 is three chunks of 64
    BLOCK_DV: int  # head size of V, padded by TMA to a power of two
    K_STAGES: int  # those of K and V in the queries kernel
    V_STAGES: int
    HAS_LARGE_LSE: bool = True
    WIDE_COLUMNS: int = 0  # as of `BackwardConfig`
    WIDE_COLUMNS_V: int = 0
    DESCENDING: ClassVar[bool] = False  # whether the last keys of a sequence are worked on first
    STATS: ClassVar[int] = 4  # rows of `rows.attn_bwd_prepare_kernel`: with the shift, and one not in use

    @property
    def IS_SLIM(self) -> bool:
        """Whether dK and dV of 128 keys fit the registers of two warpgroups."""
        return self.D_CHUNKS * self.D_CHUNK <= 192 and self.BLOCK_DV == 128
