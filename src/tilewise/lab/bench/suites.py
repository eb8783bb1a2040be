"""The benchmark suites: which cases they have, and who runs them unless asked."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tilewise.lab.bench.cases import Case, decode, dense, packed
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.inputs.data import DATA
from tilewise.lab.bench.inputs.masks import BOOLEAN_MASKS, FUNCTION_MASKS, document_lengths
from tilewise.lab.bench.inputs.options import BIAS_GRADIENT, FUNCTION_OPTIONS, LEARNED, OPTIONS
from tilewise.lab.bench.inputs.statistics import STATISTICS

TOKENS = 16384  # a batch of the headline suite


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
    for head_dim, head_dim_v, heads, n in shapes:
        for direction in ("forward", "backward"):
            for causal in (False, True):
                yield dense(
                    direction,
                    "bfloat16",
                    head_dim,
                    heads,
                    TOKENS // n,
                    n,
                    causal=causal,
                    head_dim_v=head_dim_v,
                )


def _gqa(quick: bool, device: str) -> Iterator[Case]:
    for n in (4096,) if quick else (1024, 4096, 16384):
        for direction in ("forward", "backward"):
            for causal in (False, True):
                yield dense(direction, "bfloat16", 128, 64, TOKENS // n, n, causal=causal, num_kv_heads=8)


def _window(quick: bool, device: str) -> Iterator[Case]:
    for n in (8192,) if quick else (8192, 65536):
        for head_dim, heads in ((64, 32), (128, 16)):
            for direction in ("forward", "backward"):
                for left in (128, 1024):
                    batch = max(1, TOKENS // n)
                    yield dense(direction, "bfloat16", head_dim, heads, batch, n, window=(left, 0))


def _varlen(quick: bool, device: str) -> Iterator[Case]:
    lengths = document_lengths(16384 if quick else 65536, seed=0)
    for head_dim, heads in ((64, 32), (128, 16)):
        for direction in ("forward", "backward"):
            for causal in (False, True):
                yield packed(direction, "bfloat16", head_dim, heads, lengths, causal)


def _data(quick: bool, device: str) -> Iterator[Case]:
    """The same shapes with numbers of every kind."""
    for head_dim, heads in ((128, 16),) if quick else ((64, 32), (128, 16), (256, 8)):
        for n in (4096,) if quick else (4096, 16384):
            for dtype in ("bfloat16", "float16"):
                for causal in (False, True):
                    case = dense("forward", dtype, head_dim, heads, TOKENS // n, n, causal=causal)
                    for data in DATA:
                        yield dataclasses.replace(case, data=data)


def _masks(quick: bool, device: str) -> Iterator[Case]:
    """Boolean masks that are made beforehand, and block masks of them for FlexAttention."""
    for n in (4096,) if quick else (4096, 16384):
        for head_dim, heads in ((64, 32), (128, 16)):
            for direction in ("forward", "backward"):
                case = dense(direction, "bfloat16", head_dim, heads, TOKENS // n, n)
                for mask in BOOLEAN_MASKS:
                    yield dataclasses.replace(case, mask=mask)


def _options(quick: bool, device: str) -> Iterator[Case]:
    """What is added to causal scores, or taken from their weights; to all scores, a bias with a gradient."""
    for n in (4096,) if quick else (4096, 16384):
        for head_dim, heads in ((64, 32), (128, 16)):
            for direction in ("forward", "backward"):
                case = dense(direction, "bfloat16", head_dim, heads, TOKENS // n, n, causal=True)
                for option in OPTIONS:
                    yield dataclasses.replace(case, option=option)
                if direction == "backward":
                    yield dataclasses.replace(case, causal=False, option=BIAS_GRADIENT)


def _functions(quick: bool, device: str) -> Iterator[Case]:
    """Mask and score functions; those of causal, window, ALiBi and softcap say what options say too."""
    shapes = [(dtype, 64, 4, 1024 if quick else 4096) for dtype in ("float32", "bfloat16")]
    if device != "cpu":
        lengths = (4096,) if quick else (4096, 16384)
        shapes = [("bfloat16", d, h, n) for d, h in ((64, 32), (128, 16)) for n in lengths]
    for dtype, head_dim, heads, n in shapes:
        for direction in ("forward", "backward"):
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
    for dtype in ("float32", "bfloat16", "float16"):
        for n in (512, 1024) if quick else heads:
            for head_dim in (64, 128):
                for causal in (False, True):
                    yield dense("forward", dtype, head_dim, heads[n], 1, n, causal=causal)
    for dtype in ("float32", "bfloat16"):
        for n in (512,) if quick else (512, 2048):
            for head_dim in (64, 128):
                for causal in (False, True):
                    yield dense("backward", dtype, head_dim, 4, 1, n, causal=causal)
    for causal in (False, True):  # short: PyTorch's float16 gradients are slow on a CPU
        yield dense("backward", "float16", 64, 2, 1, 512, causal=causal)
    keys = 2048 if quick else 8192
    for dtype in ("float32", "bfloat16", "float16"):
        yield decode(dtype, (32, 8), 1, keys)
    yield decode("float32", (32, 8), 1, keys, 4)
    yield decode("float32", (32, 8), 1, keys, page_size=64)
    for n in (2048,) if quick else (8192,):
        yield dense("forward", "float32", 64, 4, 1, n, window=(256, 0))
        yield dense("forward", "bfloat16", 64, 4, 1, n, window=(256, 0))
    lengths = document_lengths(2048 if quick else 8192, seed=0, longest=2048)
    yield packed("forward", "float32", 64, 4, lengths, True)
    yield packed("backward", "float32", 64, 2, lengths, True)


def _statistics(quick: bool, device: str) -> Iterator[Case]:
    """Causal forwards that also give statistics of their weights."""
    heads = 1 if device == "cpu" else 16
    for dtype in ("float32", "bfloat16") if device == "cpu" else ("bfloat16",):
        for n in (1024,) if quick else (4096, 16384):
            for name in STATISTICS:
                case = dense("forward", dtype, 128, heads, 1, n, causal=True)
                yield dataclasses.replace(case, statistics=name)


def _memory(quick: bool, device: str) -> Iterator[Case]:
    dtype, heads, head_dim = ("float32", 4, 64) if device == "cpu" else ("bfloat16", 16, 128)
    lengths = [1024 << i for i in range(3 if quick else 5 if device == "cpu" else 7)]
    for direction in ("forward", "forward+backward"):
        for n in lengths:
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
    """The suite of that name.

    Raises:
        BenchError: there is none.
    """
    if name not in SUITES:
        raise BenchError(f"suite {name!r} is unknown, must be one of {', '.join(SUITES)}")
    return SUITES[name]
