"""Benchmark cases, as data: each says what is computed and how much work that is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.core.mask import Visibility
from tilewise.lab.bench.inputs.masks import MASKS

SHORT_DTYPES = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
SHORT_DIRECTIONS = {"forward": "fwd", "backward": "bwd", "forward+backward": "fwdbwd"}
BACKWARD_FLOPS = 2.5  # five matrix products against the forward's two


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

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """The keys visible to the left and to the right of a query's own; None: all."""
        return self.window or (None, 0 if self.causal else None)

    def visible_pairs(self) -> int:
        """(query, key) pairs that are not masked, over the batch and all heads."""
        if self.mask:
            return self.num_heads * MASKS[self.mask](self, "cpu").pairs
        pairs = {n: Visibility(*n, *self.reach).visible_pairs() for n in set(self.sequences)}
        return self.num_heads * sum(pairs[n] for n in self.sequences)

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
        """JSON has lists for tuples."""
        read: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in fields.items()}
        return cls(**read)


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


def packed(
    direction: str, dtype: str, head_dim: int, heads: int, lengths: tuple[int, ...], causal: bool
) -> Case:
    """Documents of the given lengths in one packed batch, each attending to itself alone."""
    longest = max(lengths)
    return Case(
        "varlen", direction, dtype, len(lengths), longest, longest, heads, heads, head_dim, head_dim, causal,
        lengths=lengths,
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
