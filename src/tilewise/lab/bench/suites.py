"""The benchmark suites: which cases they have, and who runs them unless asked."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

from tilewise.lab.bench.cases import Case, decode, dense, packed
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.inputs.data import DATA
from tilewise.lab.bench.inputs.masks import BOOLEAN_MASKS, FUNCTION_MASKS, document_lengths
from tilewise.lab.bench.inputs.options import BIAS_GRADIENT, FUNCTION_OPTIONS, LEARNED, OPTIONS
from tilewise.lab.bench.inputs.statistics import STATISTICS

TOKENS = 16384  # a batch of the headline suite
HEADS = ((64, 32), (128, 16))  # head_dim, heads
DIRECTIONS, DTYPES = ("forward", "backward"), ("float32", "bfloat16", "float16")


class Suite(NamedTuple):
    """Named cases; `device` None means the GPU if there is one, `peers` those that run unless asked.

    `limits`: of a peer that is slow to set up, the cases it runs on unless it is asked for by name.
    """

    build: Callable[[bool, str], Iterator[Case]]  # (quick, device type) -> cases
    device: str | None
    peers: tuple[str, ...] | None = None
    limits: Mapping[str, str] = MappingProxyType({})  # regular expressions that search case names


def _headline(quick: bool, device: str) -> Iterator[Case]:
    lengths = (1024, 4096, 16384) if quick else (512, 1024, 2048, 4096, 8192, 16384)
    shapes = [(64, 64, 32, n) for n in lengths] + [(128, 128, 16, n) for n in lengths]
    shapes += [(256, 256, 8, n) for n in ((4096,) if quick else (4096, 16384))]
    shapes += [(192, 128, 16, n) for n in ((4096,) if quick else (4096, 16384))]  # MLA, not absorbed
    for (d, dv, heads, n), direction, causal in product(shapes, DIRECTIONS, (False, True)):
        yield dense(direction, "bfloat16", d, heads, TOKENS // n, n, causal=causal, head_dim_v=dv)


def _gqa(quick: bool, device: str) -> Iterator[Case]:
    for n, direction, causal in product((4096,) if quick else (1024, 4096, 16384), DIRECTIONS, (False, True)):
        yield dense(direction, "bfloat16", 128, 64, TOKENS // n, n, causal=causal, num_kv_heads=8)


def _window(quick: bool, device: str) -> Iterator[Case]:
    lengths = (8192,) if quick else (8192, 65536)
    for n, (head_dim, heads), direction, left in product(lengths, HEADS, DIRECTIONS, (128, 1024)):
        yield dense(direction, "bfloat16", head_dim, heads, max(1, TOKENS // n), n, window=(left, 0))


def _varlen(quick: bool, device: str) -> Iterator[Case]:
    lengths = document_lengths(16384 if quick else 65536, seed=0)
    for (head_dim, heads), direction, causal in product(HEADS, DIRECTIONS, (False, True)):
        yield packed(direction, "bfloat16", head_dim, heads, lengths, causal)


def _data(quick: bool, device: str) -> Iterator[Case]:
    """The same shapes with numbers of every kind."""
    shapes = product(((128, 16),) if quick else (*HEADS, (256, 8)), (4096,) if quick else (4096, 16384))
    for ((head_dim, heads), n), dtype, causal in product(shapes, ("bfloat16", "float16"), (False, True)):
        case = dense("forward", dtype, head_dim, heads, TOKENS // n, n, causal=causal)
        yield from (dataclasses.replace(case, data=data) for data in DATA)


def _shapes(quick: bool, causal: bool) -> Iterator[Case]:
    """What a mask or an option is added to."""
    for n, (head_dim, heads), direction in product((4096,) if quick else (4096, 16384), HEADS, DIRECTIONS):
        yield dense(direction, "bfloat16", head_dim, heads, TOKENS // n, n, causal=causal)


def _masks(quick: bool, device: str) -> Iterator[Case]:
    """Boolean masks that are made beforehand, and block masks of them for FlexAttention."""
    for case in _shapes(quick, causal=False):
        yield from (dataclasses.replace(case, mask=mask) for mask in BOOLEAN_MASKS)


def _options(quick: bool, device: str) -> Iterator[Case]:
    """What is added to causal scores, or taken from their weights; to all scores, a bias with a gradient."""
    for case in _shapes(quick, causal=True):
        yield from (dataclasses.replace(case, option=option) for option in OPTIONS)
        if case.direction == "backward":
            yield dataclasses.replace(case, causal=False, option=BIAS_GRADIENT)


def _functions(quick: bool, device: str) -> Iterator[Case]:
    """Mask and score functions; those of causal, window, ALiBi and softcap say what options say too."""
    shapes = [(dtype, 64, 4, 1024 if quick else 4096) for dtype in ("float32", "bfloat16")]
    if device != "cpu":
        lengths = (4096,) if quick else (4096, 16384)
        shapes = [("bfloat16", d, h, n) for (d, h), n in product(HEADS, lengths)]
    for (dtype, head_dim, heads, n), direction in product(shapes, DIRECTIONS):
        plain = dense(direction, dtype, head_dim, heads, 1 if device == "cpu" else TOKENS // n, n)
        case = dataclasses.replace(plain, has_functions=True)
        causal = dataclasses.replace(case, causal=True)
        yield causal
        yield dataclasses.replace(causal, window=(1024 if n > 1024 else 256, 0))
        yield from (dataclasses.replace(case, mask=mask) for mask in FUNCTION_MASKS)
        learned = (LEARNED,) if direction == "backward" else ()
        yield from (dataclasses.replace(causal, option=o) for o in (*FUNCTION_OPTIONS, *learned))


def _decode(quick: bool, device: str) -> Iterator[Case]:
    if quick:
        for batch, keys, queries, page in (
            (1, 8192, 1, None), (1, 65536, 1, None), (16, 8192, 1, None), (16, 8192, 4, None),
            (16, 8192, 1, 16), (16, 8192, 1, 256),
        ):  # fmt: skip
            yield decode("bfloat16", (32, 8), batch, keys, queries, page)
        return
    even = ((1, 2048), (1, 8192), (1, 65536), (1, 131072), (16, 8192), (64, 4096), (128, 2048), (128, 8192))
    for heads in ((32, 8), (64, 8)):
        for batch, keys in even:
            yield decode("bfloat16", heads, batch, keys)
        for queries in (2, 4, 8):
            for batch, keys in ((1, 65536), (16, 8192)):
                yield decode("bfloat16", heads, batch, keys, queries)
        for page in (16, 64, 256):
            for batch, keys in ((1, 65536), (16, 8192), (128, 2048)):
                yield decode("bfloat16", heads, batch, keys, page_size=page)
    yield decode("bfloat16", (32, 32), 8, 8192)


def _cpu(quick: bool, device: str) -> Iterator[Case]:
    """What two cores finish in about three minutes: heads shrink as sequences grow."""
    heads = {512: 8, 1024: 8, 4096: 2, 16384: 1}
    dims_and_masks = list(product((64, 128), (False, True)))
    lengths = (512, 1024) if quick else tuple(heads)
    for dtype, n, (head_dim, causal) in product(DTYPES, lengths, dims_and_masks):
        yield dense("forward", dtype, head_dim, heads[n], 1, n, causal=causal)
    lengths = (512,) if quick else (512, 2048)
    for dtype, n, (head_dim, causal) in product(DTYPES[:2], lengths, dims_and_masks):
        yield dense("backward", dtype, head_dim, 4, 1, n, causal=causal)
    for causal in (False, True):  # short: PyTorch's float16 gradients are slow on a CPU
        yield dense("backward", "float16", 64, 2, 1, 512, causal=causal)
    keys = 2048 if quick else 8192
    for dtype in DTYPES:
        yield decode(dtype, (32, 8), 1, keys)
    yield decode("float32", (32, 8), 1, keys, 4)
    yield decode("float32", (32, 8), 1, keys, page_size=64)
    for dtype in DTYPES[:2]:
        yield dense("forward", dtype, 64, 4, 1, keys, window=(256, 0))
    documents = document_lengths(keys, seed=0, longest=2048)
    yield packed("forward", "float32", 64, 4, documents, True)
    yield packed("backward", "float32", 64, 2, documents, True)


def _statistics(quick: bool, device: str) -> Iterator[Case]:
    """Causal forwards that also give statistics of their weights."""
    heads = 1 if device == "cpu" else 16
    dtypes = ("float32", "bfloat16") if device == "cpu" else ("bfloat16",)
    for dtype, n, name in product(dtypes, (1024,) if quick else (4096, 16384), STATISTICS):
        yield dataclasses.replace(dense("forward", dtype, 128, heads, 1, n, causal=True), statistics=name)


def _memory(quick: bool, device: str) -> Iterator[Case]:
    dtype, heads, head_dim = ("float32", 4, 64) if device == "cpu" else ("bfloat16", 16, 128)
    lengths = [1024 << i for i in range(3 if quick else 5 if device == "cpu" else 7)]
    for direction, n in product(("forward", "forward+backward"), lengths):
        yield dense(direction, dtype, head_dim, heads, 1, n, kind="memory")


def _distributed(quick: bool, device: str) -> Iterator[Case]:
    """One sequence over the ranks that torchrun has started."""
    if device == "cpu":
        dtype, heads, head_dim, lengths, window = "float32", 2, 64, (4096,) if quick else (4096, 16384), 512
    else:
        dtype, heads, head_dim, lengths, window = "bfloat16", 16, 128, (32768, 131072), 4096
    longest, source = lengths[-1], random.Random(0)
    documents: list[int] = []
    while (rest := longest - sum(documents)) > 0:
        documents.append(min(rest, source.randint(longest // 128, longest // 4)))
    for direction in ("forward", "forward+backward"):
        for n in lengths:
            yield dense(direction, dtype, head_dim, heads, 1, n, causal=True)
        yield packed(direction, dtype, head_dim, heads, tuple(documents), True)
        yield dense(direction, dtype, head_dim, heads, 1, longest, window=(window, 0))
    if device == "cuda" and not quick:
        yield dense("forward+backward", dtype, head_dim, heads, 1, 1 << 20, causal=True)


SUITES = {
    # The other peers of the CPU (--peers all) are far slower there.
    "cpu": Suite(_cpu, "cpu", ("tilewise", "sdpa-flash", "flex"), {"flex": r"^fwd-f32-d64-h8-b1-s1024-"}),
    "headline": Suite(_headline, "cuda"),
    "gqa": Suite(_gqa, "cuda"),
    "window": Suite(_window, "cuda"),
    "varlen": Suite(_varlen, "cuda"),
    "data": Suite(_data, "cuda", ("tilewise", "sdpa-cudnn")),
    "masks": Suite(_masks, "cuda", ("tilewise", "sdpa-cudnn", "sdpa-efficient", "flex")),
    "options": Suite(
        _options, "cuda", ("tilewise", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "flex", "flash-attn-2")
    ),
    "functions": Suite(_functions, None, ("tilewise", "tilewise-option", "flex", "standard")),
    "statistics": Suite(
        _statistics,
        None,
        ("tilewise", "tilewise-plain", "flex", "standard"),
        {"flex": r"-max_logit", "standard": r"-s(1024|4096)-"},
    ),
    "decode": Suite(_decode, "cuda"),
    "distributed": Suite(_distributed, None),
    "memory": Suite(
        _memory,
        None,
        ("tilewise", "tilewise:tiled", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "standard"),
    ),
}


def find_suite(name: str) -> Suite:
    if name not in SUITES:
        raise BenchError(f"suite {name!r} is unknown, must be one of {', '.join(SUITES)}")
    return SUITES[name]
