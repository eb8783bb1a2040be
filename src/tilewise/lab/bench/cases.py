"""The benchmark suites, as data: every case says what is computed and how much work that is."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tilewise.core.mask import Visibility
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.inputs.data import DATA
from tilewise.lab.bench.inputs.masks import BOOLEAN_MASKS, FUNCTION_MASKS, MASKS, document_lengths
from tilewise.lab.bench.inputs.options import BIAS_GRADIENT, FUNCTION_OPTIONS, LEARNED, OPTIONS
from tilewise.lab.bench.inputs.statistics import STATISTICS

SHORT_DTYPES = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
SHORT_DIRECTIONS = {"forward": "fwd", "backward": "bwd", "forward+backward": "fwdbwd"}
BACKWARD_FLOPS = 2.5  # five matrix products against the forward's two
TOKENS = 16384  # a batch of the headline suite


@dataclass(frozen=True)
class Case:
    """One benchmark case.

    `kind` is "dense", "varlen" (documents of `lengths`, packed), "decode" (few queries against a cache)
    or "memory" (a dense call whose peak memory is measured). `direction` "backward" times the gradients
    alone; "forward+backward" is for memory, and for many devices.
    """

    kind: str
    direction: str
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: tuple[int, int] | None = None  # keys visible to the left and to the right of a query's own
    page_size: int | None = None
    lengths: tuple[int, ...] = ()
    data: str = "randn"  # of `bench.inputs.data`, for dense calls
    mask: str = ""  # of `bench.inputs.masks`, for dense calls
    option: str = ""  # of `bench.inputs.options`, for dense calls
    statistics: str = ""  # of `bench.inputs.statistics`, for dense calls
    has_functions: bool = False  # tilewise is given mask, window and option as functions

    @property
    def name(self) -> str:
        """Unique within a suite and stable across runs: what `--filter` searches and `compare` matches.

        Example:
            >>> dense("forward", "bfloat16", 64, 32, 4, 4096, causal=True).name
            'fwd-bf16-d64-h32-b4-s4096-causal'
        """
        shape = f"{SHORT_DTYPES[self.dtype]}-{self.head_label}"
        direction, batch = SHORT_DIRECTIONS[self.direction], f"b{self.batch}"
        if self.kind == "varlen":
            documents = f"docs{len(self.lengths)}-t{sum(self.lengths)}"
            return f"varlen-{direction}-{shape}-{documents}-{self.mask_label}"
        if self.kind == "decode":
            page = "" if self.page_size is None else f"-page{self.page_size}"
            return f"decode-{shape}-{batch}-q{self.seqlen_q}-k{self.seqlen_k}{page}"
        if self.kind == "memory":
            return f"memory-{direction}-{shape}-{batch}-s{self.seqlen_q}"
        words = (self.data, self.option, self.statistics)
        extra = "".join(f"-{word}" for word in words if word not in ("", "randn"))
        return f"{direction}-{shape}-{batch}-s{self.seqlen_q}-{self.mask_label}{extra}"

    @property
    def head_label(self) -> str:
        dims = f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        return f"{dims}-h{self.num_heads}" + (
            f"kv{self.num_kv_heads}" if self.num_kv_heads != self.num_heads else ""
        )

    @property
    def has_one_layout(self) -> bool:
        """With one head, (batch, seqlen, heads, dim) and (batch, heads, seqlen, dim) are the same memory."""
        return self.num_heads == self.num_kv_heads == 1

    @property
    def mask_label(self) -> str:
        if self.mask:
            return self.mask
        if self.window is not None:
            left, right = self.window
            return f"window{left}" if right == 0 else f"window{left}+{right}"
        return "causal" if self.causal else "full"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(seqlen_q, seqlen_k) of every sequence."""
        if self.kind == "varlen":
            return [(n, n) for n in self.lengths]
        return [(self.seqlen_q, self.seqlen_k)] * self.batch

    def visible_pairs(self) -> int:
        """(query, key) pairs that are not masked, over the batch and all heads."""
        if self.mask:
            return self.num_heads * MASKS[self.mask](self, "cpu").pairs
        left, right = (None, 0 if self.causal else None) if self.window is None else self.window
        per_length = {
            lengths: Visibility(*lengths, left, right).visible_pairs() for lengths in set(self.sequences)
        }
        return self.num_heads * sum(per_length[lengths] for lengths in self.sequences)

    def flops(self) -> int:
        """Floating-point operations of the visible pairs: two products forward, 2.5 times that backward."""
        forward = 2 * self.visible_pairs() * (self.head_dim + self.head_dim_v)
        factors = {"forward": 1.0, "backward": BACKWARD_FLOPS, "forward+backward": 1.0 + BACKWARD_FLOPS}
        return int(forward * factors[self.direction])

    def cache_bytes(self) -> int:
        """Bytes of the keys and values, each read once: what bounds decoding."""
        per_key = self.num_kv_heads * (self.head_dim + self.head_dim_v) * self.torch_dtype.itemsize
        return self.batch * self.seqlen_k * per_key

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        window = fields.get("window")
        return cls(
            **{
                **fields,
                "window": None if window is None else (window[0], window[1]),
                "lengths": tuple(fields.get("lengths", ())),
            }
        )


class Suite(NamedTuple):
    """Named cases; `device` None means the GPU if there is one, `peers` those that run unless asked.

    `limits`: of a peer that is slow to set up, the cases it runs on unless it is asked for by name.
    """

    build: Callable[[bool, str], Iterator[Case]]  # (quick, device type) -> cases
    device: str | None
    peers: tuple[str, ...] | None = None
    limits: Mapping[str, str] = MappingProxyType({})  # regular expressions that search case names


def dense(
    direction: str,
    dtype: str,
    head_dim: int,
    num_heads: int,
    batch: int,
    seqlen: int,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    num_kv_heads: int | None = None,
    head_dim_v: int | None = None,
    kind: str = "dense",
) -> Case:
    """Self-attention of `batch` sequences of one length."""
    return Case(
        kind, direction, dtype, batch, seqlen, seqlen, num_heads, num_kv_heads or num_heads, head_dim,
        head_dim_v or head_dim, causal or window is not None, window,
    )  # fmt: skip


def decode(
    dtype: str,
    heads: tuple[int, int],
    batch: int,
    seqlen_k: int,
    seqlen_q: int = 1,
    page_size: int | None = None,
    head_dim: int = 128,
) -> Case:
    """`seqlen_q` new tokens a sequence against `seqlen_k` cached keys; `heads` of queries and of keys."""
    return Case(
        "decode", "forward", dtype, batch, seqlen_q, seqlen_k, *heads, head_dim, head_dim, True,
        page_size=page_size,
    )  # fmt: skip


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


def packed(
    direction: str, dtype: str, head_dim: int, heads: int, lengths: tuple[int, ...], causal: bool
) -> Case:
    """Documents of the given lengths in one packed batch, each attending to itself alone."""
    longest = max(lengths)
    return Case(
        "varlen", direction, dtype, len(lengths), longest, longest, heads, heads, head_dim, head_dim, causal,
        lengths=lengths,
    )  # fmt: skip


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
        _statistics, None, ("tilewise", "tilewise-plain", "standard"), {"standard": r"-s(1024|4096)-"}
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
