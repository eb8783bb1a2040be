"""What the Hopper kernels are given. This module imports neither triton nor gluon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

WARPGROUP_ROWS = 64  # query rows of one wgmma warpgroup


@dataclass(frozen=True)
class ForwardConfig:
    """Compile-time choices of the forward kernel."""

    BLOCK_N: int  # keys of a tile
    WARPGROUPS: int  # consumers, 64 query rows each
    STAGES: int  # K/V tiles in flight
    Q_STAGES: int  # query tiles in flight: 2 loads the next one early
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    BLOCK_D: int  # head sizes of QK and V, padded by TMA to a power of two
    BLOCK_DV: int
    PACK: int  # query heads of one key head that share a tile: row = position * PACK + head
    IS_PACKED: bool  # sequences one after another, bounded by cu_seqlens
    HAS_LEFT: bool  # the window has a left edge
    HAS_RIGHT: bool  # or a right edge; causal is a right edge of 0
    HAS_SOFTCAP: bool
    HAS_SINKS: bool

    @property
    def BLOCK_M(self) -> int:
        """Query rows of one block: all its warpgroups' rows."""
        return self.WARPGROUPS * WARPGROUP_ROWS

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the tiles, without the barriers (under 1 KB)."""
        query = self.Q_STAGES * self.BLOCK_M * max(self.BLOCK_D, self.BLOCK_DV)
        return 2 * (query + self.STAGES * self.BLOCK_N * (self.BLOCK_D + self.BLOCK_DV))

    @property
    def total_warps(self) -> int:
        """Warps a block reserves: Triton rounds the producer's one warp up to a warpgroup."""
        return 4 * self.WARPGROUPS + 4


class Packing(NamedTuple):
    """Where packed sequences lie, and their order of work. All None for a dense problem."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    order: Any  # (batch,) sequences, longest first
    first_tile: Any  # (batch + 1,) query tiles of one head before each sequence of `order`


class Sizes(NamedTuple):
    """Integers that change from call to call, built inside a kernel."""

    batch: Any
    seqlen_q: Any
    seqlen_k: Any
    group_size: Any  # query heads that share one key head
    num_slots: Any  # (batch, head) pairs, or heads if packed; with PACK heads in one tile, that many fewer
    num_tiles: Any  # query tiles of a slot; packed: not used
    section: Any  # slots whose keys and values stay in L2 together
    window_left: Any
    window_right: Any
