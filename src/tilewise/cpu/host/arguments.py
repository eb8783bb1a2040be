"""What a kernel is told: `Config` and `Target` while it is built, a block of 64-bit words when it is called.

This file knows nothing of LLVM, so that a process which finds its kernels in the cache never loads the
code that builds them.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Any

# First, as they change from call to call: of every forward.
CHANGING = ("q", "k", "v", "out", "lse", "lse_residual", "scratch", "partial", "ticket")
CHANGING_BACKWARD = (*CHANGING, "do", "dlse", "dq", "dk", "dv", "dbias", "delta", "dq_sum")
STATISTICS = (
    "row_max", "entropy", "expected_distance", "column_sum", "block_sum", "top_weights", "top_keys",
)  # fmt: skip
CAPTURED = ("captured_floats", "captured_integers", "captured_layout")  # of mask and score functions
POINTERS = (
    *CHANGING_BACKWARD, *STATISTICS, "mask", "bias", "slopes", "sinks", "spans", "page_table",
    *CAPTURED, "dcaptured", "map", "visits",
)  # fmt: skip
FLOATS = ("q_factor", "softcap", "scale", "inverse_keep")
TENSORS_BSHD = ("q", "k", "v", "out", "do", "dq", "dk", "dv")  # strides _b, _n, _h, in elements
SCORE_TENSORS = ("mask", "bias", "dbias")  # strides _b, _h, _i, _j, in elements; the last is 0 or 1
INTEGERS = (
    "items", "chunks", "tiles", "num_heads", "num_kv_heads", "group", "left", "right", "span_stride",
    "own_heads", "shared_heads", "sharing", "owners", "sum_tiles",
    "lse_b", "lse_h", "slopes_b",
    "score_k0", "page_b", "scratch_bytes", "splits", "split_keys", "item_heads", "parts", "part_heads",
    "seed", "threshold", "drop_q", "drop_k", "drop_head", "drop_heads",  # of dropout
    "last_rows", "visited_rows", "column_p", "column_b", "column_h",  # of statistics
    "block_size", "block_parts", "block_p", "block_b", "block_h", "block_i",
    "map_b", "map_h", "map_i", "map_q", "map_k",  # of functions' tile map: strides, queries, log2 of keys
    "visits_b", "visits_h", "visits_i",
    "num_captured",  # floats: of each sum of "dcaptured", one for each head's split of keys
    *(f"{t}_{axis}" for t in TENSORS_BSHD for axis in "bnh"),
    *(f"{t}_{axis}" for t in SCORE_TENSORS for axis in "bhij"),
)  # fmt: skip
FIELDS = (*POINTERS, *FLOATS, *INTEGERS)
COUNTER, SLOTS, FIRST = 0, 8, 16  # the shared counters have cache lines of their own
NOT_CUT = SLOTS + 1  # not 0: numbers too large or too small to be cut
WRONG_INDEX = SLOTS + 2  # not 0: 1 + the load that has read out of range, its dimension, and its index in
INDEX_BITS, DIMENSION_BITS = 44, 6  # so many of the low bits
WORD = {name: FIRST + i for i, name in enumerate(FIELDS)}
WORDS = FIRST + len(FIELDS)
UNBOUNDED = 1 << 30
# Keys converted and scored together; splits are multiples. 32 to 128 measure alike in long sequences.
BLOCK_K = 64


@dataclass(frozen=True)
class Target:
    """The machine code to generate.

    `rows` x 3 vectors is the accumulator block of the micro-kernel: 24 of 32 registers, or 12 of 16.
    Blocks are cut to fit `l2_bytes`, a core's L2 cache.
    """

    isa: str
    vector_bytes: int
    rows: int
    cpu: str
    features: str
    l2_bytes: int = 1 << 20


@dataclass(frozen=True)
class Config:
    """What is compiled into a kernel. Everything else (lengths, strides, windows) is read at run time."""

    kind: str  # of query, key, value and out: f64, f32, bf16, f16
    head_dim: int
    head_dim_v: int
    vectors: int  # query vectors of a tile, 1 to 3
    has_softcap: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    has_mask: bool = False
    bias_kind: str = ""
    functions: str = ""  # mask and score functions: `core.functions.expression.Functions.text`
    dbias_kind: str = ""  # where the gradient of the bias is summed
    has_dropout: bool = False
    wide: tuple[str, ...] = ()  # those of out, dq, dk and dv that are of the scores' type
    is_partial: bool = False  # lse counts keys that the call does not have: weights are as it says
    page_size: int = 0  # 0: not in pages
    has_leftpad: bool = False  # of pages
    # Queries times the heads that share a key head, rounded up to 1, 2, 4, 8, 12, ...: of decoding kernels.
    rows: int = 0
    key_block: int = 0  # keys of a block that holds all keys of a call; 0: the kernel's usual number
    statistics: tuple[str, ...] = ()  # those of the weights that the kernel gives; "top_k" with
    top_k: int = 0  # so many of the largest
    # bfloat16 numbers that a number is cut into for products of bfloat16; 0: products in the compute type
    terms: int = 0


class Block:
    """The words of one call, in memory that stays where it is.

    `template`: the block whose words these are, but for those of the last call.
    """

    def __init__(self) -> None:
        self.template: Block | None = None
        memory = ctypes.create_string_buffer(8 * WORDS + 64)
        self.words = (ctypes.c_int64 * WORDS).from_buffer(memory, -ctypes.addressof(memory) % 64)  # keeps it
        self.address = ctypes.addressof(self.words)

    def fill(self, template: Block) -> None:
        """Take a template's words."""
        ctypes.memmove(self.address, template.address, 8 * WORDS)
        self.template = template

    def update(self, **values: Any) -> None:
        for name, value in values.items():
            self.words[WORD[name]] = _bits(value) if name in FLOATS else value


def _bits(x: float) -> int:
    return struct.unpack("q", struct.pack("d", x))[0]
