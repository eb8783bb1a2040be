"""What the Hopper decoding kernels are given. This module imports neither triton nor gluon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tilewise.gpu.hopper.common.arguments import KernelConfig
from tilewise.gpu.launch.entry import by_field


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(KernelConfig):
    """Compile-time choices of the decoding kernels."""

    LOADERS: ClassVar[int] = 2  # warps, on alternate tiles

    WARPGROUPS: int = 2  # consumers, on alternate tiles as well
    BLOCK_N: int  # keys of a tile
    STAGES: int  # tiles of K and of V in flight: a multiple of WARPGROUPS, so that a slot keeps its consumer
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    HEAD_DIM: int
    HEAD_DIM_V: int
    BLOCK_D: int  # padded to 64 or 128
    BLOCK_DV: int
    BLOCK_B: int  # batch, padded to a power of two
    START_UNITS: int  # key tiles that the start of a segment counts as, where lengths differ
    ROWS: int  # rows of a tile in use, at most 64: a multiple of PACK
    HAS_ROW_TILES: bool  # a sequence's queries take several such tiles
    BOX_ROWS: int  # of one TMA copy: no more than a page has
    BOX_WIDTH: int
    HAS_SCALES: bool = False  # 8-bit pages
    READERS: int = 1  # consumers of each tile: of 8-bit pages both, for 16 rows each, if there are more
    WHOLE_PAGES: bool = False  # a page that is full takes one TMA copy, whatever the boxes
    PAGE_LANES: int = 1  # page numbers that a load warp reads at once: PAGES, or 32, which are summed faster
    MERGE_ROWS: int
    MERGE_SPLITS: int  # held at a time by a merging program
    MERGE_COLUMNS: int

    @property
    def REGISTERS(self) -> list[int]:
        """Of the partitions after the first, which has the rest."""
        return [self.CONSUMER_REGISTERS] + self.LOADERS * [self.PRODUCER_REGISTERS]

    @property
    def STORES_WHOLE(self) -> bool:
        """Whether a worker that does a whole segment stores its rows, which else the merging kernel does."""
        return not self.HAS_SINKS

    @property
    def PAGES(self) -> int:
        """Pages that a tile lies in."""
        return -(-self.BLOCK_N // self.PAGE_SIZE) if self.PAGE_SIZE else 1

    @property
    def BOXES(self) -> int:
        """Boxes of a tile along its keys."""
        return self.BLOCK_N // self.BOX_ROWS

    @property
    def maxnreg(self) -> int:
        """Registers of each thread at the start; the producers are a warpgroup's worth of warps."""
        total = self.WARPGROUPS * self.CONSUMER_REGISTERS + self.PRODUCER_REGISTERS
        return total // (self.WARPGROUPS + 1) // 8 * 8


@dataclass(frozen=True, kw_only=True)
class MlaConfig(DecodeConfig):
    """Compile-time choices of the kernel for absorbed latent attention, and of its merging kernel."""

    SCORE_REGISTERS: int  # the consumers' are those of the two halves of O
    KEY_SLOTS: int  # chunks of key tiles in flight, of each half of V

    @property
    def REGISTERS(self) -> list[int]:
        consumer, producer = self.CONSUMER_REGISTERS, self.PRODUCER_REGISTERS
        return [consumer, consumer, producer, producer]

    @property
    def maxnreg(self) -> int:
        """Registers of each thread at the start, of four warpgroups; the producers are one."""
        return (self.SCORE_REGISTERS + sum(self.REGISTERS[:-1])) // len(self.REGISTERS) // 8 * 8


class DecodeTargets(NamedTuple):
    """Where the decoding kernels store results, and those of splits until they are reduced."""

    out: Any
    lse: Any
    residual: Any  # None if nobody asks for it, as is partial_low
    partial: Any  # float32 [splits, ROWS, BLOCK_DV], each divided by its own sum
    partial_lse: Any  # [splits, ROWS], in units of log2
    partial_low: Any  # what rounding took from it


@by_field
class DecodeSizes(NamedTuple):
    """Integers of a decoding call that change from call to call."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_k: int  # the most that a sequence may have
    segments: int  # of each sequence: key heads times row tiles
    row_tiles: int
    workers: int
    window_left: int
    window_right: int
    stride_q_batch: Any  # strides of queries tell how many elements may be read at once: no `int`
    stride_q_row: Any
    stride_q_head: Any
    stride_slopes: int  # 0 where one row of ALiBi slopes serves every sequence
    stride_page_table: int
    num_pages: int  # or entries of a cache
    rows_k: int  # rows from one sequence, or page, to the next
    rows_v: int
