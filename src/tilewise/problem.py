"""One attention problem: its tensors, its options, and all semantic validation.

Every face of the library ends here. `Inputs` holds the tensors in the canonical layout, `Options` the
scalars, and `describe` checks both and returns an `AttentionProblem`: a frozen, hashable description
that says everything a backend needs to know to accept or refuse, and nothing about values.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sized
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.mask import Visibility

PRECISIONS = ("ieee", "tf32", "fp8")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 576


class Inputs(NamedTuple):
    """The tensors of one call.

    Dense and cached: query (batch, seqlen_q, num_heads, head_dim), key (batch, seqlen_k, num_kv_heads,
    head_dim), value (..., head_dim_v). Packed: (total, heads, dim) with `cu_seqlens_*` (batch + 1,).
    Paged: key and value are (num_pages, page_size, num_kv_heads, dim) with `page_table` (batch, pages).
    Cached keys may have packed queries: `cu_seqlens_q` without `cu_seqlens_k`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqlens_k: Tensor | None = None  # (batch,) keys in use, counted from position 0
    leftpad_k: Tensor | None = None  # (batch,) leading keys to ignore
    page_table: Tensor | None = None
    mask: Tensor | None = None  # bool, 4-D, broadcastable to (batch, num_heads, seqlen_q, seqlen_k)
    bias: Tensor | None = None  # float, 4-D, broadcastable likewise
    alibi_slopes: Tensor | None = None  # (num_heads,) or (batch, num_heads)
    sinks: Tensor | None = None  # (num_heads,) logits
    dropout_seed: Tensor | None = None  # () int64
    key_scale: Tensor | None = None  # (num_pages, num_kv_heads): what float8 keys in pages stand for
    value_scale: Tensor | None = None


class Options(NamedTuple):
    """The scalars of one call. `None` bounds are unbounded; `max_seqlen_*` serve packed problems."""

    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    scale: float | None = None
    deterministic: bool = False
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    precision: str = "ieee"  # of products: see `tilewise.attention`


class Gradients(NamedTuple):
    """Gradients of `Inputs`; `bias` and `sinks` are None where the problem has none."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class AttentionProblem:
    """Shapes, dtypes and semantics of one attention call, without its values."""

    batch: int
    seqlen_q: int  # packed: the longest sequence if it was given, else the total
    seqlen_k: int  # cached and paged: the capacity
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device_type: str
    scale: float
    causal: bool = False
    window_left: int | None = None
    window_right: int | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    precision: str = "ieee"
    mask_shape: tuple[int, ...] | None = None
    bias_shape: tuple[int, ...] | None = None
    has_alibi: bool = False
    has_sinks: bool = False
    is_packed: bool = False
    is_cached: bool = False  # each sequence has its own range of keys: seqlens_k, leftpad_k or both
    has_leftpad: bool = False
    page_size: int | None = None
    is_quantized: bool = False  # keys and values are float8_e4m3fn, with a scale for each page and head
    is_value_in_key: bool = False  # the values are a view of the keys' first columns: latent attention
    needs_grad: bool = False  # of anything
    bias_needs_grad: bool = False
    lse_needs_grad: bool = False  # known in the backward only

    @functools.cached_property
    def _hash(self) -> int:
        return hash(dataclasses.astuple(self))

    def __hash__(self) -> int:
        return self._hash  # every call asks for it

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    @property
    def compute_dtype(self) -> torch.dtype:
        """Scores and accumulators: float64 for float64 inputs, float32 for everything else."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def has_packed_keys(self) -> bool:
        """Keys are packed as queries are, not held by a cache."""
        return self.is_packed and not self.is_cached

    @property
    def is_paged(self) -> bool:
        return self.page_size is not None

    @property
    def has_window(self) -> bool:
        return self.window_left is not None or self.window_right is not None

    def visibility(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Visibility:
        """The visible keys of one sequence; lengths default to the problem's own."""
        right = self.window_right
        if self.causal:
            right = 0 if right is None else min(0, right)
        return Visibility(
            self.seqlen_q if seqlen_q is None else seqlen_q,
            self.seqlen_k if seqlen_k is None else seqlen_k,
            self.window_left,
            right,
        )


def describe(inputs: Inputs, options: Options) -> AttentionProblem:
    """Validate a call and describe it.

    Checks everything that shapes, dtypes, devices and scalars can tell; `values.check_values` checks what
    only values can. The answer is cached on exactly what it depends on, so a repeated call costs one lookup.

    Raises:
        ValueError: an argument has a wrong shape or value; the message names it and says what is right.
        TypeError: an argument has a wrong dtype.
        NotImplementedError: a gradient that does not exist is asked for.
    """
    try:
        return _describe(_signatures(inputs), options, _is_value_in_key(inputs.key, inputs.value))
    except TypeError:
        _check_types(options)  # names what cannot be hashed
        raise


def validate(inputs: Inputs, options: Options) -> None:
    """The checks of `describe` for tensors that are being traced, whose sizes may be symbols."""
    _describe.__wrapped__(_signatures(inputs), options)


def _signatures(inputs: Inputs) -> tuple[Any, ...]:
    grad_enabled = torch.is_grad_enabled()
    return tuple(
        None if t is None else (t.shape, t.dtype, t.device, grad_enabled and t.requires_grad) for t in inputs
    )


class _Signature(NamedTuple):
    """What a tensor shows without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    needs_grad: bool

    @property
    def ndim(self) -> int:
        return len(self.shape)


def _is_value_in_key(key: Tensor, value: Tensor) -> bool:
    """Whether the values are a view of the keys' first columns."""
    return (
        key.shape[-1:] > value.shape[-1:]
        and key.stride() == value.stride()
        and key.storage_offset() == value.storage_offset()
        and key.untyped_storage()._cdata == value.untyped_storage()._cdata
    )


@functools.lru_cache(maxsize=4096)
def _describe(raw: tuple[Any, ...], options: Options, is_value_in_key: bool = False) -> AttentionProblem:
    signatures: Any = Inputs(*(None if s is None else _Signature(*s) for s in raw))  # type: ignore[arg-type]
    query, key, value = signatures.query, signatures.key, signatures.value
    _check_dtypes_and_devices(signatures)
    is_packed = signatures.cu_seqlens_q is not None
    is_paged = signatures.page_table is not None
    batch = _check_shapes(signatures, is_packed, is_paged)
    head_dim, head_dim_v = query.shape[-1], value.shape[-1]
    num_heads, num_kv_heads = query.shape[-2], key.shape[-2]
    page_size = key.shape[1] if is_paged else None
    if is_packed:
        seqlen_q = query.shape[0] if options.max_seqlen_q is None else options.max_seqlen_q
    else:
        seqlen_q = query.shape[1]
    if signatures.cu_seqlens_k is not None:
        seqlen_k = key.shape[0] if options.max_seqlen_k is None else options.max_seqlen_k
    else:
        pages = 1 if signatures.page_table is None else signatures.page_table.shape[1]
        seqlen_k = pages * key.shape[1]
    _check_scalars(options, signatures.dropout_seed is not None)
    if options.precision == "fp8":
        _check_fp8(signatures)
    _check_score_tensors(signatures, batch, num_heads, seqlen_q, seqlen_k, is_packed)
    return AttentionProblem(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=query.dtype,
        device_type=query.device.type,
        scale=head_dim**-0.5 if options.scale is None else float(options.scale),
        causal=options.causal,
        window_left=options.window_left,
        window_right=options.window_right,
        softcap=float(options.softcap),
        dropout_p=float(options.dropout_p),
        deterministic=options.deterministic,
        precision=options.precision,
        mask_shape=None if signatures.mask is None else tuple(signatures.mask.shape),
        bias_shape=None if signatures.bias is None else tuple(signatures.bias.shape),
        has_alibi=signatures.alibi_slopes is not None,
        has_sinks=signatures.sinks is not None,
        is_packed=is_packed,
        is_cached=signatures.seqlens_k is not None or signatures.leftpad_k is not None,
        has_leftpad=signatures.leftpad_k is not None,
        page_size=page_size,
        is_quantized=signatures.key_scale is not None,
        is_value_in_key=is_value_in_key,
        needs_grad=any(s is not None and s.needs_grad for s in signatures),
        bias_needs_grad=signatures.bias is not None and signatures.bias.needs_grad,
    )


def _check_dtypes_and_devices(s: Any) -> None:
    if s.query.dtype not in DTYPES:
        raise TypeError(f"query.dtype={s.query.dtype} must be float64, float32, bfloat16 or float16")
    for name, t, scale in (("key", s.key, s.key_scale), ("value", s.value, s.value_scale)):
        if scale is not None and t.dtype != torch.float8_e4m3fn:
            raise TypeError(f"{name}.dtype={t.dtype} must be float8_e4m3fn when {name}_scale is given")
        if scale is None and t.dtype != s.query.dtype:
            raise TypeError(f"{name}.dtype={t.dtype} must equal query.dtype={s.query.dtype}")
    for name, t in zip(Inputs._fields, s, strict=True):
        if t is not None and name != "dropout_seed" and t.device != s.query.device:
            raise ValueError(f"{name}.device={t.device} must equal query.device={s.query.device}")
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "leftpad_k", "page_table"):
        t = getattr(s, name)
        if t is not None and t.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}.dtype={t.dtype} must be int32 or int64")
    if s.mask is not None and s.mask.dtype != torch.bool:
        raise TypeError(
            f"mask.dtype={s.mask.dtype} must be torch.bool (True = attend); pass additive scores as bias"
        )
    for name in ("bias", "alibi_slopes", "sinks"):
        t = getattr(s, name)
        if t is not None and not t.dtype.is_floating_point:
            raise TypeError(f"{name}.dtype={t.dtype} must be a floating-point dtype")


def _check_shapes(s: Any, is_packed: bool, is_paged: bool) -> int:
    """Check ranks, head sizes and heads; return the batch size."""
    ranks = {3: "(total, heads, head_dim)", 4: "(batch, seqlen, heads, head_dim)"}
    rank_k = 3 if s.cu_seqlens_k is not None else 4
    for name, rank in (("query", 3 if is_packed else 4), ("key", rank_k), ("value", rank_k)):
        t, shape = getattr(s, name), ranks[rank]
        if t.ndim != rank:
            raise ValueError(
                f"{name}.shape={tuple(t.shape)} has {t.ndim} dimensions, must have {rank}: {shape}"
            )
    q, k, v = tuple(s.query.shape), tuple(s.key.shape), tuple(s.value.shape)
    for name, size in (("query", q[-1]), ("value", v[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}.shape[-1]={size} (head size) must be between 1 and {MAX_HEAD_DIM}")
    if k[-1] != q[-1]:
        raise ValueError(f"key.shape[-1]={k[-1]} (head size) must equal query.shape[-1]={q[-1]}")
    if v[:-1] != k[:-1]:
        raise ValueError(f"value.shape={v} must equal key.shape={k} in all but the last dimension")
    heads, kv_heads = q[-2], k[-2]
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"query heads {heads} must be divisible by key heads {kv_heads}")
    if is_packed and (s.cu_seqlens_k is not None or s.seqlens_k is None):
        return _check_packed_shapes(s)
    batch = s.cu_seqlens_q.shape[0] - 1 if is_packed else q[0]
    if not is_paged and k[0] != batch:
        raise ValueError(f"key.shape[0]={k[0]} (batch) must equal query.shape[0]={batch}")
    if is_paged and (s.page_table.ndim != 2 or s.page_table.shape[0] != batch or k[1] < 1):
        raise ValueError(
            f"page_table.shape={tuple(s.page_table.shape)} must be (batch={batch}, pages a sequence) "
            f"and the page size {k[1]} at least 1"
        )
    if is_paged and s.seqlens_k is None:
        raise ValueError("seqlens_k=None must give each sequence's length when page_table is given")
    for name in ("key_scale", "value_scale"):
        t = getattr(s, name)
        if t is not None and (not is_paged or tuple(t.shape) != (k[0], kv_heads)):
            raise ValueError(
                f"{name}.shape={tuple(t.shape)} must be (pages, kv heads)=({k[0]}, {kv_heads}), with pages"
            )
    if (s.key_scale is None) != (s.value_scale is None):
        raise ValueError("key_scale and value_scale must be given together, or neither")
    for name in ("seqlens_k", "leftpad_k"):
        t = getattr(s, name)
        if t is not None and tuple(t.shape) != (batch,):
            raise ValueError(f"{name}.shape={tuple(t.shape)} must be (batch,)=({batch},)")
    return batch


def _check_packed_shapes(s: Any) -> int:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        t = getattr(s, name)
        if t is None or t.ndim != 1 or t.shape[0] < 1:
            found = None if t is None else tuple(t.shape)
            raise ValueError(f"{name}.shape={found} must be (batch + 1,): offsets of each sequence's start")
    for name in ("seqlens_k", "leftpad_k", "page_table"):
        if getattr(s, name) is not None:
            raise ValueError(f"{name} must be None when keys are packed: it describes a cache")
    if s.cu_seqlens_q.shape != s.cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k.shape={tuple(s.cu_seqlens_k.shape)} must equal "
            f"cu_seqlens_q.shape={tuple(s.cu_seqlens_q.shape)}"
        )
    return s.cu_seqlens_q.shape[0] - 1


def shown(value: Any) -> str:
    """A value in the line of an error."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 80 else f"{line[:77]}..."


def check_tensors(**tensors: Any) -> None:
    """Raises TypeError if something is no tensor, or one of another layout than strided."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}={type(t).__name__} must be a torch.Tensor")
        if t.is_nested:
            kind = f"nested of layout={t.layout}"
            raise TypeError(
                f"{name} is {kind}, must not be nested: attention_varlen takes values() and offsets()"
            )
        if t.layout != torch.strided:
            raise TypeError(f"{name}.layout={t.layout} must be torch.strided: pass to_dense()")


def check_number(name: str, value: Any) -> None:
    """Raises TypeError if value is no number; a tensor is none, as it can change after it was looked at."""
    if not isinstance(value, Real | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{name}={shown(value)} must be a number")


def _check_types(options: Options) -> None:
    for name in ("softcap", "dropout_p"):
        check_number(name, getattr(options, name))
    if options.scale is not None:
        check_number("scale", options.scale)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        value = getattr(options, name)
        if value is not None and not isinstance(value, Integral | torch.SymInt):
            raise TypeError(f"{name}={shown(value)} must be an integer")
    if not isinstance(options.precision, str):
        raise TypeError(f"precision={shown(options.precision)} must be a string")
    for name in ("causal", "deterministic"):
        value = getattr(options, name)
        if isinstance(value, Sized):  # strings, lists, tensors
            raise TypeError(f"{name}={shown(value)} must be True or False")


def _check_scalars(options: Options, has_seed: bool) -> None:
    _check_types(options)
    for name, bound in (("left", options.window_left), ("right", options.window_right)):
        if bound is not None and bound < 0:
            raise ValueError(f"window {name}={bound} must be None (unbounded) or at least 0")
    if not (math.isfinite(options.softcap) and options.softcap >= 0):
        raise ValueError(f"softcap={options.softcap} must be 0 (off) or a positive finite number")
    if not 0 <= options.dropout_p < 1:
        raise ValueError(f"dropout_p={options.dropout_p} must be in [0, 1)")
    if options.dropout_p > 0 and not has_seed:
        raise ValueError(f"dropout_seed=None must be a () int64 tensor when dropout_p={options.dropout_p}")
    if options.scale is not None and not math.isfinite(options.scale):
        raise ValueError(f"scale={options.scale} must be a finite number, or None for 1/sqrt(head_dim)")
    if options.precision not in PRECISIONS:
        raise ValueError(f"precision={options.precision!r} must be 'ieee', 'tf32' or 'fp8'")
    for name in ("max_seqlen_q", "max_seqlen_k"):
        bound = getattr(options, name)
        if bound is not None and bound < 0:
            raise ValueError(f"{name}={bound} must be at least 0")


def _check_fp8(s: Any) -> None:
    """What 8-bit products are not made of."""
    if s.query.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"query.dtype={s.query.dtype} must be bfloat16 or float16 when precision='fp8'")
    if s.seqlens_k is not None or s.leftpad_k is not None or s.page_table is not None:
        raise NotImplementedError("precision='fp8' takes no cache: 'ieee' does, with pages of float8_e4m3fn")
    if any(t is not None and t.needs_grad for t in s):
        refuse_gradient("fp8")


def refuse_gradient(precision: str) -> None:
    """Raises NotImplementedError if products of this precision have no derivative."""
    if precision == "fp8":
        raise NotImplementedError(
            "precision='fp8' has no gradient: 'ieee' has, and torch.no_grad() needs none"
        )


def _check_score_tensors(
    s: Any, batch: int, heads: int, seqlen_q: int, seqlen_k: int, is_packed: bool
) -> None:
    """mask, bias, alibi_slopes and sinks: everything that changes scores."""
    full = (batch, heads, seqlen_q, seqlen_k)
    for name in ("mask", "bias"):
        t = getattr(s, name)
        if t is None:
            continue
        fits = t.ndim == 4 and all(a in (1, b) for a, b in zip(t.shape[:2], full[:2]))
        if fits and not is_packed:  # packed: lengths are known only to check_values
            fits = all(a in (1, b) for a, b in zip(t.shape[2:], full[2:]))
        if not fits:
            raise ValueError(
                f"{name}.shape={tuple(t.shape)} must be broadcastable to "
                f"(batch, heads, seqlen_q, seqlen_k)={full}"
            )
    if s.alibi_slopes is not None:
        if tuple(s.alibi_slopes.shape) not in ((heads,), (batch, heads)):
            raise ValueError(
                f"alibi_slopes.shape={tuple(s.alibi_slopes.shape)} must be "
                f"(heads,)=({heads},) or (batch, heads)=({batch}, {heads})"
            )
        if s.alibi_slopes.needs_grad:
            raise NotImplementedError(
                "alibi_slopes.requires_grad=True has no gradient here: pass -slope * distance as bias"
            )
    if s.sinks is not None and tuple(s.sinks.shape) != (heads,):
        raise ValueError(f"sinks.shape={tuple(s.sinks.shape)} must be (heads,)=({heads},): one logit a head")


class Span(NamedTuple):
    """One sequence of a ragged problem: its rows in query and in key."""

    q0: int
    q1: int
    k0: int
    k1: int


def spans(problem: AttentionProblem, inputs: Inputs) -> list[Span]:
    """The rows of each sequence, read from the length tensors (which must be valid: `check_values`).

    Packed: rows of the packed tensors. Otherwise rows of that batch entry, `k0` being its left padding.
    """
    if problem.is_packed:
        q = inputs.cu_seqlens_q.tolist()  # type: ignore[union-attr]
        rows_q = list(itertools.pairwise(q))
    else:
        rows_q = [(0, problem.seqlen_q)] * problem.batch
    if problem.has_packed_keys:
        k = inputs.cu_seqlens_k.tolist()  # type: ignore[union-attr]
        return [Span(*row, *keys) for row, keys in zip(rows_q, itertools.pairwise(k))]
    ends = [problem.seqlen_k] * problem.batch if inputs.seqlens_k is None else inputs.seqlens_k.tolist()
    starts = [0] * problem.batch if inputs.leftpad_k is None else inputs.leftpad_k.tolist()
    return [Span(*row, k0, k1) for row, k0, k1 in zip(rows_q, starts, ends)]
