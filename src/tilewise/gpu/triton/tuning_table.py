"""Tile configurations of the Triton kernels, as data: one row for each kernel, GPU family and head size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelTile:
    """A score tile of block_m queries by block_n keys, the warps that share it, and the loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    has_tma: bool = False  # the GPU's copy engine loads the tiles of the loop, where it can read the tensors
    is_left_shared: bool = False  # dbias: boxes of queries serve products from shared memory, not registers
    max_registers: int | None = None  # of a thread, where the compiler would take more than pays
    is_cut: bool = False  # float32 as sums of three bfloat16, six products of which matrix units have


@dataclass(frozen=True)
class DecodeTile:
    """Tile of the decoding kernel: at most block_m rows (queries times heads) by block_n keys."""

    block_m: int
    block_n: int
    workers: int  # for each multiprocessor
    num_warps: int
    num_stages: int
    is_transposed: bool = False


# kernel -> largest padded head size of QK or V -> tile, smallest first. A tile for "dk" and one for "dv":
# each gradient has a launch of its own, in tiles twice as large, at the price of one product more.
Rows = dict[str, dict[int, KernelTile | None]]


def changed(table: Rows, changes: Rows) -> Rows:
    """The table with other tiles at some head sizes; a causal kernel's are those of the general one."""
    found = dict(table)
    for kernel, rows in changes.items():
        found[kernel] = dict(sorted((table.get(kernel.removesuffix("_causal"), {}) | rows).items()))
    return found


# Beyond what a table holds, on any GPU.
WIDEST = {
    **dict.fromkeys(("forward", "forward_short", "dbias"), KernelTile(16, 16, 4, 1)),
    **dict.fromkeys(("dkdv", "dq"), KernelTile(16, 16, 8, 1)),
}

# Any GPU with 99 KB of shared memory a CTA or more. Chosen by registers and spills; not timed.
PORTABLE: Rows = {
    "forward": {64: KernelTile(128, 64, 4, 3), 128: KernelTile(64, 64, 4, 2), 256: KernelTile(64, 32, 4, 2)},
    # few queries, as in decoding
    "forward_short": {
        64: KernelTile(16, 128, 4, 3),
        128: KernelTile(16, 64, 4, 3),
        256: KernelTile(16, 32, 4, 2),
    },
    "dkdv": {128: KernelTile(32, 64, 4, 2), 256: KernelTile(16, 32, 4, 2)},
    "dq": {64: KernelTile(64, 64, 4, 2), 128: KernelTile(64, 32, 4, 2), 256: KernelTile(32, 16, 4, 2)},
    "dbias": {128: KernelTile(64, 64, 4, 1), 256: KernelTile(32, 32, 4, 1)},
}

# dq with the gradients of captured tensors, which take registers. Chosen by these and spills; not timed.
HOPPER_DQ_CAPTURED: Rows = {"dq_captured": {128: KernelTile(64, 64, 8, 2), 256: KernelTile(32, 32, 4, 2)}}

# Timed by sweeps of 6 to 16 tiles each, 4 x 4096 queries and keys, bfloat16: NVIDIA H200, 2026-11-21,
# torch 2.11.0+cu130, triton 3.6.0. `tilewise tune` repeats it. Data-centre Blackwell takes these tiles too,
# not timed there. The rows of 192 were timed with 192 columns of QK and 128 of V.
HOPPER = HOPPER_DQ_CAPTURED | changed(
    PORTABLE,
    {
        "forward": {
            64: KernelTile(128, 64, 8, 3),
            128: KernelTile(64, 64, 4, 3, has_tma=True),
            192: KernelTile(128, 64, 8, 3),
            256: KernelTile(128, 64, 8, 2),
            512: KernelTile(64, 32, 8, 2),
        },
        "dkdv": {
            64: KernelTile(64, 64, 4, 3),
            128: KernelTile(64, 64, 4, 2, has_tma=True),
            192: KernelTile(32, 128, 8, 3),
            256: KernelTile(32, 64, 8, 2),
        },
        "dk": {192: None, 256: KernelTile(32, 128, 8, 2)},
        "dv": {192: None, 256: KernelTile(32, 128, 8, 3)},
        "dq": {
            64: KernelTile(64, 64, 4, 3),
            128: KernelTile(128, 64, 8, 3, has_tma=True),
            192: KernelTile(128, 32, 8, 3),
            256: KernelTile(128, 64, 8, 1),
        },
    },
)

# Packed sequences and caches, which TMA does not read. Timed without them.
HOPPER_ADDRESSES = changed(
    HOPPER,
    {
        "forward": {128: KernelTile(128, 128, 8, 3)},
        "forward_causal": {128: KernelTile(64, 64, 4, 3)},
        "dkdv": {128: KernelTile(64, 128, 8, 3)},
        "dkdv_causal": {128: KernelTile(32, 64, 4, 3)},
    },
)

# Scores with a softcap or ALiBi: a few registers more. Timed likewise.
HOPPER_FORMULA = changed(
    HOPPER,
    {
        "forward": dict.fromkeys((64, 128), KernelTile(64, 64, 4, 3)),
        "dkdv": {128: KernelTile(64, 128, 8, 3)},
    },
)

# Scores with a bias, a mask or dropout, and on other GPUs with a softcap or ALiBi: these take registers.
EXTRAS = changed(
    PORTABLE,
    {
        "forward": {
            64: KernelTile(64, 64, 4, 2),
            128: KernelTile(64, 32, 4, 2),
            256: KernelTile(32, 32, 4, 2),
        },
        "dkdv": {128: KernelTile(32, 32, 4, 2)},
        "dq": {64: KernelTile(64, 32, 4, 2), 128: KernelTile(32, 32, 4, 2)},
        "dbias": {128: KernelTile(32, 64, 4, 1)},
    },
)

# Timed at head sizes 64 and 128.
HOPPER_BIAS = HOPPER_DQ_CAPTURED | changed(
    EXTRAS,
    {
        "forward": {64: KernelTile(64, 64, 4, 3), 128: KernelTile(128, 64, 8, 3, has_tma=True)},
        "dkdv": {64: KernelTile(64, 64, 4, 2), 128: KernelTile(64, 64, 4, 2, has_tma=True)},
        "dq": {64: KernelTile(64, 64, 4, 3), 128: KernelTile(64, 64, 4, 2, has_tma=True)},
        "dbias": {
            64: KernelTile(64, 64, 4, 2, has_tma=True, is_left_shared=True, max_registers=168),
            128: KernelTile(64, 64, 4, 2, has_tma=True),
        },
    },
)

# Timed at head size 128.
HOPPER_MASK = changed(
    HOPPER_BIAS,
    {
        "forward": {128: KernelTile(64, 64, 4, 2, has_tma=True)},
        "dkdv": {128: KernelTile(64, 128, 8, 2, has_tma=True)},
    },
)

# Timed at head size 128, without other options.
HOPPER_DROPOUT = changed(HOPPER_MASK, {"dkdv": {128: KernelTile(32, 64, 4, 2, has_tma=True)}})

# float32 on the plain arithmetic units: small tiles, or the code explodes.
FLOAT32: Rows = {
    "forward": {128: KernelTile(16, 32, 4, 1), 256: KernelTile(16, 32, 8, 1)},
    "forward_short": {128: KernelTile(16, 32, 4, 1), 256: KernelTile(16, 32, 8, 1)},
    "dq": {256: KernelTile(16, 16, 4, 1)},
    "dbias": {64: KernelTile(32, 32, 4, 1)},
}

# float32 in full precision by matrix units. No wgmma: with so many operands ptxas loses descriptors.
# Heads in two chunks would spill 40 KB. Timed by sweeps of 4 or 5 tiles, 2 x 2048 queries and keys: NVIDIA
# H200, 2026-11-30, torch 2.11.0+cu130, triton 3.6.0; any GPU takes them.
CUT_FLOAT32 = changed(
    FLOAT32,
    {
        "forward": {
            64: KernelTile(64, 32, 2, 1, is_cut=True),
            128: KernelTile(32, 64, 4, 1, is_cut=True),
        },
        "dkdv": {64: KernelTile(32, 32, 4, 1, is_cut=True)},
        "dk": {64: None, 128: KernelTile(64, 32, 8, 1, is_cut=True), 256: None},
        "dv": {64: None, 128: KernelTile(64, 32, 8, 1, is_cut=True), 256: None},
        "dq": {64: KernelTile(32, 64, 4, 1, is_cut=True), 128: KernelTile(32, 64, 8, 1, is_cut=True)},
    },
)

# float32 with products in tf32: matrix units, but twice the bytes of a 16-bit type.
TF32: Rows = {
    "forward": {128: KernelTile(64, 32, 4, 2), 256: KernelTile(32, 16, 4, 2)},
    "forward_short": {256: KernelTile(16, 32, 4, 2)},
    "dkdv": {64: KernelTile(32, 64, 4, 2), 128: KernelTile(16, 64, 8, 2)},
    "dq": {64: KernelTile(64, 32, 4, 2), 128: KernelTile(64, 16, 8, 2)},
    "dbias": {64: KernelTile(32, 32, 4, 1)},
}


def kernel_tile(
    kernel: str,
    capability: tuple[int, int],
    float32_precision: str | None,
    padded_dim: int,
    extras: str | None = None,
    is_causal: bool = False,
    can_tma: bool = True,
    is_whole: bool = True,
) -> KernelTile | None:
    """The row for a kernel ("forward", "forward_short", "dkdv", "dq", "dbias") on a compute capability.

    For "dk" and "dv", None where "dkdv" serves both. "dq_captured": "dq" and gradients of captured tensors.

    `float32_precision`: "ieee" or "tf32", None for 16-bit types.
    `extras`: what makes scores more than a product and a mask of positions, so that a tile needs more
    registers: "formula" for a softcap or ALiBi, "mask", "bias", "dropout"; of several, the last of these.
    `can_tma`: sequences fill their tensors, so that TMA may read them.
    `is_whole`: no head's columns are in two chunks.

    Example:
        >>> kernel_tile("forward", (9, 0), None, padded_dim=128) == KernelTile(64, 64, 4, 3, has_tma=True)
        True
    """
    is_hopper = capability[0] in (9, 10)
    if float32_precision is not None:
        table = TF32 if float32_precision == "tf32" else CUT_FLOAT32 if is_whole else FLOAT32
    elif is_hopper:
        plain = HOPPER if can_tma else HOPPER_ADDRESSES
        options = {"mask": HOPPER_MASK, "bias": HOPPER_BIAS, "dropout": HOPPER_DROPOUT}
        table = ({None: plain, "formula": HOPPER_FORMULA} | options)[extras]
    else:
        table = PORTABLE if extras is None else EXTRAS
    if kernel not in table:
        kernel = kernel.removesuffix("_captured")
    rows = table.get(f"{kernel}_causal" if is_causal else kernel, table.get(kernel, {}))
    widest = WIDEST.get(kernel.removesuffix("_captured"))
    return next((tile for largest, tile in rows.items() if padded_dim <= largest), widest)


FEW_KEYS = 128 << 10  # of all sequences and key heads


def decode_tile(
    capability: tuple[int, int],
    is_float32: bool,
    head_dim: int,
    rows: int,
    keys: int,
    is_paged: bool = False,
    is_shared: bool = False,
    is_8_bit: bool = False,
) -> DecodeTile:
    """The tile of the decoding kernel.

    Triton keeps (num_stages - 1) / 2 tiles of K and of V in flight, / 3 if their pages have to be looked up.
    Measured: NVIDIA H200, 2026-11-21, torch 2.11.0+cu130, triton 3.6.0, bfloat16, head size 128; see
    docs/kernels-triton.md.

    Args:
        head_dim: the larger of QK's and V's.
        rows: queries times the heads of a GQA group.
        keys: sequences times key heads times the longest sequence.
        is_shared: the values lie in the keys, so that half the memory is enough.
        is_8_bit: keys and values are: as float32 with a tile ahead they spill up to 3 KB a thread.

    Example:
        >>> decode_tile((9, 0), False, 128, rows=4, keys=1 << 20)
        DecodeTile(block_m=64, block_n=64, workers=4, num_warps=4, num_stages=4, is_transposed=False)
    """
    if is_float32:
        return DecodeTile(16, 32, 2, 4, 1 if is_8_bit else 2)
    if capability[0] not in (9, 10):  # shared memory for two workers of 48 KB on any GPU
        return DecodeTile(32, 32, 2, 4, 4) if head_dim <= 128 else DecodeTile(16, 16, 2, 4, 2)
    if head_dim > 256:
        return DecodeTile(64, 64 if is_shared else 32, 1, 8, 2)
    if head_dim > 128:
        return DecodeTile(64, 32, 2, 4, 7)
    if rows > 16:
        return DecodeTile(64, 64, 2, 4, 9 if is_paged else 6, is_transposed=not is_paged)
    if is_paged:
        return DecodeTile(64, 64, 2, 4, 8)
    if head_dim <= 64:
        return DecodeTile(64, 128, 2, 4, 7)
    if keys <= FEW_KEYS:  # a split for each multiprocessor: fewer to merge
        return DecodeTile(64, 128, 1, 8, 3)
    return DecodeTile(64, 64, 4, 4, 4)
