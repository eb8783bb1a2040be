"""Claims that need no clock: sizes, counts of bytes and operations, rounding errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import tilewise
from tilewise.core import fp8
from tilewise.lab.claims.claim import FA1, FA2, FA3, TUTORIAL, Measured, Setting, claim
from tilewise.lab.learn import io_model, kv_memory
from tilewise.lab.learn.counts import Cost, Shape
from tilewise.lab.learn.machines import KIB, MACHINES, MIB

counted = partial(claim, is_counted=True)
A100 = MACHINES["A100"]
LLAMA_7B, LLAMA_70B = kv_memory.MODELS["llama-2-7b"], kv_memory.MODELS["llama-2-70b"]
HALF = 2  # bytes of a number
ONE_HEAD = Shape(4096, 4096, 64)
ON_CHIP = 96 * KIB  # what tutorials give tiles of an A100


def square_tiles(shape: Shape, sram_bytes: int) -> io_model.BlockSizes:
    """As large as fast memory allows: a tile each of Q, K and V."""
    side = sram_bytes // (3 * shape.head_dim * shape.itemsize)
    return io_model.BlockSizes(side, side)


def io_forward(setting: Setting) -> Measured:
    standard, tiled = io_model.standard(ONE_HEAD), io_model.fa2(ONE_HEAD)
    larger = square_tiles(ONE_HEAD, ON_CHIP)
    most = standard.slow_bytes / io_model.fa2(ONE_HEAD, larger).slow_bytes
    cached = standard.once_bytes / tiled.once_bytes
    size = f"{ONE_HEAD.seqlen_q:,} tokens, head size {ONE_HEAD.head_dim}"
    blocks = io_model.BLOCKS
    return Measured(
        standard.slow_bytes / tiled.slow_bytes,
        f"counted from the loops: {size}, tiles {blocks.block_q} × {blocks.block_k}",
        f"{most:.1f}× with tiles {larger.block_q} × {larger.block_k}, "
        f"{cached:.0f}× where K and V stay in the L2 cache",
    )  # fmt: skip


for _name, _low, _high in (("io-forward", 10, 20), ("io-8-10", 8, 10)):
    _says = f"The forward moves {_low} to {_high} times fewer bytes to and from device memory."
    _why = "Each tile of queries reads all keys and values again. The L2 cache serves most of that."
    counted(_name, _says, TUTORIAL, _low, "×", why=_why)(io_forward)


def _score_matrix(setting: Setting, seqlen: int, unit: str) -> Measured:
    size = kv_memory.score_matrix_bytes(seqlen)
    other = f"{size / 1e6:.1f} MB" if unit == "MiB" else f"{size / MIB:,g} MiB"
    return Measured(
        size / UNITS[unit], f"counted: {seqlen:,}² = {seqlen**2:,} numbers of {HALF} bytes", other
    )


UNITS = {"MB": 1e6, "MiB": MIB, "GB": 1e9}
for _name, _tokens, _size, _unit in (
    ("score-512", 512, 0.5, "MB"),
    ("score-2k", 2048, 8, "MB"),
    ("score-4k", 4096, 32, "MiB"),
    ("score-8k", 8192, 134, "MB"),
    ("score-32k", 32768, 2.1, "GB"),
    ("score-matrix", 131072, 34, "GB"),
):
    _says = f"A score matrix of {_tokens:,} tokens takes {_size:g} {_unit} in float16."
    counted(_name, _says, TUTORIAL, _size, _unit, "equal")(partial(_score_matrix, seqlen=_tokens, unit=_unit))

CONTEXT = 100_000


@counted(
    "score-100k", f"A score matrix of {CONTEXT:,} tokens takes terabytes.", TUTORIAL, 1, "TB",
    why="It takes gigabytes. Terabytes are those of a batch or of many layers together.",
)  # fmt: skip
def score_100k(setting: Setting) -> Measured:
    heads = LLAMA_7B.heads
    layer = kv_memory.score_matrix_bytes(CONTEXT, heads) / 1e12
    size = kv_memory.score_matrix_bytes(CONTEXT) / 1e12
    return Measured(size, "counted, float16, one head", f"{layer:.2g} TB for a layer of {heads} heads")


@counted(
    "score-100k-memory",
    f"N × N matrices of {CONTEXT:,} tokens exceed a GPU's {A100.memory.bytes / 1e9:.0f} GB.",
    TUTORIAL, 1, "× the memory",
)  # fmt: skip
def score_100k_memory(setting: Setting) -> Measured:
    heads, memory = LLAMA_7B.heads, A100.memory.bytes
    share = kv_memory.score_matrix_bytes(CONTEXT) / memory
    return Measured(
        kv_memory.score_matrix_bytes(CONTEXT, heads) / memory,
        f"counted: the scores of one layer of {heads} heads, float16",
        f"{share:.2g}× for one head",
    )


LONG, HEADS, LAYERS = 8192, 32, 32


def _moving(setting: Setting, layers: int) -> Measured:
    size, milliseconds = kv_memory.score_matrix_bytes(LONG, HEADS), 1e3 / A100.device.bytes_per_second
    passes = _passes(io_model.standard(ONE_HEAD), ONE_HEAD)
    return Measured(
        layers * size * milliseconds,
        f"{size / 1e9:.2f} GB a layer moved once at {A100.device.bytes_per_second / 1e12:g} TB/s",
        f"S and P, written and read, take {passes * layers * size * milliseconds:.1f} ms",
    )


def _passes(cost: Cost, shape: Shape) -> float:
    """How often standard attention moves an N × N matrix."""
    moved = sum(moves.get(name, 0) for moves in (cost.reads, cost.writes) for name in "sp")
    return moved / (shape.pairs * shape.itemsize)


for _name, _layers, _ms in (("score-time", 1, 2), ("score-time-model", LAYERS, 70)):
    _of = "a layer" if _layers == 1 else f"{_layers} layers"
    _says = f"Moving the scores of {LONG:,} tokens and {HEADS} heads takes an A100 {_ms} ms in {_of}."
    counted(_name, _says, TUTORIAL, _ms, "ms")(partial(_moving, layers=_layers))


@counted(
    "round-trips", "Standard attention makes 4 round trips of N × N matrices to memory.",
    TUTORIAL, 4, "", "equal",
    why="The 4 are single passes: S and P are each written once and read once.",
)  # fmt: skip
def round_trips(setting: Setting) -> Measured:
    passes = _passes(io_model.standard(ONE_HEAD), ONE_HEAD)
    return Measured(passes / 2, "counted from the loops", f"{passes:g} passes")


BERT_TOKENS, BERT_HEADS, BERT_BATCH = 512, 16, 56  # BERT-large on one of MLPerf's eight GPUs


@counted(
    "l2-bert", f"BERT-large's score matrices of {BERT_TOKENS} tokens largely fit an A100's L2 cache.",
    TUTORIAL, 1, "× the cache", "at most",
    why="One matrix fits. A kernel writes those of all heads and sequences before the next one reads them.",
)  # fmt: skip
def l2_bert(setting: Setting) -> Measured:
    cache = A100.level("L2").total_bytes
    one = kv_memory.score_matrix_bytes(BERT_TOKENS)
    return Measured(
        kv_memory.score_matrix_bytes(BERT_TOKENS, BERT_HEADS * BERT_BATCH) / cache,
        f"counted: {BERT_HEADS} heads, batch {BERT_BATCH}, float16",
        f"one matrix: {one / KIB:.0f} KiB, {one / cache:.2g}× the cache",
    )


SHORT = 256


@counted(
    "sram-256", f"A score matrix of {SHORT} tokens fits a multiprocessor's memory.", TUTORIAL, 1,
    "× the memory", "at most",
)  # fmt: skip
def sram_256(setting: Setting) -> Measured:
    size, memory = kv_memory.score_matrix_bytes(SHORT), A100.fast_level.bytes
    return Measured(
        size / memory, f"{size / KIB:.0f} of {memory / KIB:.0f} KiB that an A100's tiles can have"
    )


TILES = io_model.BlockSizes(128, 64)


@counted(
    "tile-sram", f"Tiles of {TILES.block_q} queries and {TILES.block_k} keys fit {ON_CHIP // KIB} KB.",
    TUTORIAL, ON_CHIP // KIB, "KiB", "at most",
)  # fmt: skip
def tile_sram(setting: Setting) -> Measured:
    shape = dataclasses.replace(ONE_HEAD, head_dim=128)
    tiles = io_model.fa2(shape, TILES).sram_bytes
    assert tiles is not None
    return Measured(tiles / KIB, f"counted: a tile each of Q, K and V, head size {shape.head_dim}, 16 bits")


LARGE = Shape(32768, 32768, 64)
WIDE = dataclasses.replace(LARGE, head_dim=2 * LARGE.head_dim)
TWICE = dataclasses.replace(LARGE, seqlen_q=2 * LARGE.seqlen_q, seqlen_k=2 * LARGE.seqlen_k)


def _growth(setting: Setting, before: Callable[[], float], after: Callable[[], float]) -> Measured:
    size = f"{LARGE.seqlen_q:,} tokens and head size {LARGE.head_dim}"
    return Measured(after() / before(), f"counted from the loops, from {size}")


def _fa1_bytes(shape: Shape, sram_bytes: int = ON_CHIP) -> int:
    return io_model.fa1(shape, sram_bytes).slow_bytes


_fa1 = partial(_fa1_bytes, LARGE)
_tile = io_model.BlockSizes(*(2 * size for size in io_model.BLOCKS))
for _name, _says, _source, _claimed, _before, _after, _why in (
    ("order-tokens", "Twice the tokens, 4 times the bytes: N² d² / M.", FA1, 4,
     _fa1, partial(_fa1_bytes, TWICE), ""),
    ("order-head-size", "Twice the head size, 4 times the bytes: N² d² / M.", FA1, 4,
     _fa1, partial(_fa1_bytes, WIDE), ""),
    ("order-on-chip", "Twice the on-chip memory, half the bytes: N² d² / M.", FA1, 0.5,
     _fa1, partial(_fa1_bytes, LARGE, 2 * ON_CHIP), ""),
    ("order-tile", "Twice the tile, half the bytes: N² / B.", TUTORIAL, 0.5,
     lambda: io_model.fa2(LARGE).slow_bytes, lambda: io_model.fa2(LARGE, _tile).slow_bytes, ""),
    ("order-flops", "Twice the tokens, 4 times the FLOPs: N² d.", FA1, 4,
     lambda: io_model.fa1(LARGE, ON_CHIP).flops, lambda: io_model.fa1(TWICE, ON_CHIP).flops, ""),
    ("order-extra", "Twice the tokens, twice the memory beyond inputs and output: N.", FA1, 2,
     lambda: io_model.fa1(LARGE, ON_CHIP).extra_bytes, lambda: io_model.fa1(TWICE, ON_CHIP).extra_bytes, ""),
    ("order-standard", "Standard attention moves twice the bytes at twice the head size: N² d.", TUTORIAL, 2,
     lambda: io_model.standard(LARGE).slow_bytes, lambda: io_model.standard(WIDE).slow_bytes,
     "S and P have no d. It is N² + N d."),
):  # fmt: skip
    counted(_name, _says, _source, _claimed, "×", "equal", why=_why)(
        partial(_growth, before=_before, after=_after)
    )

COMPARED = [Shape(n, n, d) for n in (2048, 4096) for d in (64, 128)]


def _second_over_first(setting: Setting, count: Callable[[Cost], int]) -> Measured:
    """The least gain over `COMPARED`; both orders have the same on-chip memory."""
    gains = []
    for shape in COMPARED:
        first, second = io_model.fa1(shape, ON_CHIP), io_model.fa2(shape, square_tiles(shape, ON_CHIP))
        gains.append(count(first) / count(second))
    each = (f"{s.seqlen_q:,} × {s.head_dim}: {gain:.2f}×" for s, gain in zip(COMPARED, gains, strict=True))
    what = (
        f"counted from the loops, tiles for {ON_CHIP // KIB} KiB on chip, the least of {len(COMPARED)} sizes"
    )
    return Measured(
        min(gains), what, f"tokens × head size {', '.join(each)}; a count, not the 2× in time that is claimed"
    )


_COUNTS: dict[str, tuple[str, Callable[[Cost], int]]] = {
    "fa2-flops": ("does fewer non-matmul FLOPs", lambda cost: cost.vector_flops + cost.special_ops),
    "fa2-bytes": ("moves fewer bytes to and from device memory", lambda cost: cost.slow_bytes),
    "fa2-on-chip": ("reads and writes less on-chip memory", lambda cost: cost.fast_read + cost.fast_written),
}
for _name, (_does, _count) in _COUNTS.items():
    counted(_name, f"FlashAttention-2 {_does} than FlashAttention.", FA2, 1, "×")(
        partial(_second_over_first, count=_count)
    )


@counted("recompute-bytes", "Recomputing P in the backward moves fewer bytes, with more FLOPs.", FA1, 1, "×")
def recompute_bytes(setting: Setting) -> Measured:
    stored, again = io_model.backward_storing(ONE_HEAD), io_model.backward_recompute(ONE_HEAD)
    size = f"{ONE_HEAD.seqlen_q:,} tokens, head size {ONE_HEAD.head_dim}"
    note = f"{again.flops / stored.flops:.2f}× the FLOPs"
    return Measured(stored.slow_bytes / again.slow_bytes, f"counted from the loops: {size}", note)


@counted(
    "kv-cache-70b", "The cache of Llama 2 70B takes 10.5 GB at 4,096 tokens.", TUTORIAL, 10.5, "GB", "equal",
    why=f"Its {LLAMA_70B.heads} heads share {LLAMA_70B.kv_heads} key heads.",
)  # fmt: skip
def kv_cache_70b(setting: Setting) -> Measured:
    every_head = LLAMA_70B.with_every_head().cache_bytes(LLAMA_70B.context) / 1e9
    return Measured(
        LLAMA_70B.cache_bytes(LLAMA_70B.context) / 1e9,
        f"counted, {8 * HALF} bits",
        f"{every_head:.1f} GB if each of its {LLAMA_70B.heads} heads had keys",
    )


@counted(
    "kv-token-70b", "The cache of Llama 2 70B takes 32 KB for a token and layer.", TUTORIAL, 32, "KiB",
    "equal",
    why=f"Its {LLAMA_70B.heads} heads share {LLAMA_70B.kv_heads} key heads.",
)  # fmt: skip
def kv_token_70b(setting: Setting) -> Measured:
    sizes = [m.numbers_per_token * HALF / KIB for m in (LLAMA_70B, LLAMA_70B.with_every_head(), LLAMA_7B)]
    note = f"{sizes[1]:g} KiB if each head had keys; {sizes[2]:g} KiB in Llama 2 7B, where each has"
    return Measured(sizes[0], f"counted, {8 * HALF} bits", note)


def _sharing(setting: Setting, kv_heads: int) -> Measured:
    heads, tokens, dim = LLAMA_70B.heads, LLAMA_70B.context, LLAMA_70B.head_dim
    sizes = [
        tilewise.KVCache(1, tokens, n, dim, dtype=torch.float16, device="cpu").memory_bytes()
        for n in (heads, kv_heads)
    ]
    what = f"two caches in memory: {heads} key heads and {kv_heads}, {tokens:,} tokens"
    return Measured(sizes[0] / sizes[1], what, f"{sizes[0] / MIB:,.0f} and {sizes[1] / MIB:,.0f} MiB")


counted(
    "gqa-saving", "Shared key heads make a cache 8 to 32 times smaller: grouped queries.", TUTORIAL, 8, "×"
)(partial(_sharing, kv_heads=LLAMA_70B.kv_heads))
counted(
    "mqa-saving", "Shared key heads make a cache 8 to 32 times smaller: one key head.", TUTORIAL, 32, "×"
)(partial(_sharing, kv_heads=1))

GENERATED = 100


def _projections(setting: Setting, cached: bool) -> Measured:
    ratio = kv_memory.projections(GENERATED, False) / kv_memory.projections(GENERATED, True)
    found = kv_memory.projections(GENERATED, cached)
    return Measured(
        found, "counted: K and V of a token, once for each time", f"{ratio:g}× fewer with a cache"
    )


for _cached, _times in ((False, 5050), (True, 100)):
    _way = "with" if _cached else "without"
    _says = f"{GENERATED} tokens take {_times:,} computations of K and V {_way} a cache."
    counted(f"kv-work-{'cached' if _cached else 'again'}", _says, TUTORIAL, _times, "", "equal")(
        partial(_projections, cached=_cached)
    )

OUTLIERS, FACTOR = 1e-3, 10.0


@claim(
    "fp8-error", "Incoherent processing makes the error of 8-bit attention 2.6 times smaller.", FA3, 2.6, "×",
    why="Rotation spreads the outliers of Q and K. The rounding of all other numbers stays.",
)  # fmt: skip
def fp8_error(setting: Setting) -> Measured:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1024, 4, 128)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    for t in (q, k, v):
        t[torch.rand(shape, generator=generator) < OUTLIERS] *= FACTOR
    exact = tilewise.attention(q.double(), k.double(), v.double())
    ours = tilewise.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), precision="fp8", backend="tiled")
    errors = [float((out.double() - exact).square().mean().sqrt()) for out in (_one_scale(q, k, v), ours)]
    outliers = f"1 in {1 / OUTLIERS:,.0f} entries × {FACTOR:g}"
    return Measured(
        errors[0] / errors[1], f"{outliers}, {shape[1]:,} tokens, head size {shape[3]}",
        "beside one scale for each head and no rotation",
    )  # fmt: skip


def _one_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """8-bit attention without blocks or rotation, sums in float64."""
    q, k, v = (_rounded_per_head(t).double().transpose(1, 2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    rounded = fp8.round_weights(weights.float()).double()
    return (rounded @ v / weights.sum(-1, keepdim=True)).transpose(1, 2)


def _rounded_per_head(x: Tensor) -> Tensor:
    """x (batch, seqlen, heads, dim) in 8 bits with one scale for each head."""
    scale = x.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@claim("exact", "The result is that of standard attention, not an approximation.", FA1, 1, "× its error")
def exact(setting: Setting) -> Measured:
    q, k, v = (torch.randn(1, 2048, 4, 64, device=setting.device) for _ in range(3))
    double = tilewise.reference.attention(q, k, v, dtype=torch.float64)[0]
    ours = tilewise.attention(q, k, v, causal=False).double()
    standard = tilewise.reference.attention(q, k, v, dtype=torch.float32)[0].double()
    errors = [float((out - double).abs().mean()) for out in (standard, ours)]
    return Measured(errors[0] / errors[1], "mean error of PyTorch's formula over ours, float32, 2,048 tokens")
