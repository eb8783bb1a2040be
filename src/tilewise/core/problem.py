"""One attention problem: its tensors, its options, and what they mean together.

Every face of the library ends here. `Inputs` holds the tensors in the canonical layout, `Options` the
scalars, and `describe` checks both and returns an `AttentionProblem`: a frozen, hashable description
that says everything a backend needs to know to accept or refuse, and nothing about values.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilewise.core.checks import (
    EIGHT_BIT,
    check_8_bit,
    check_blocks,
    check_dtypes_and_devices,
    check_scalars,
    check_score_tensors,
    check_shapes,
)
from tilewise.core.functions.evaluate import Buffers
from tilewise.core.functions.expression import decode
from tilewise.core.mask import Visibility
from tilewise.core.signature import Signature, TensorSignature, compute_dtype
from tilewise.core.torch_private import compiles_here


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
    seqlens_k: Tensor | None = None  # (batch,) rows in use, counted from the first, left padding too
    leftpad_k: Tensor | None = None  # (batch,) rows before the first key, which may hold anything
    page_table: Tensor | None = None
    mask: Tensor | None = None  # bool, 4-D, broadcastable to (batch, num_heads, seqlen_q, seqlen_k)
    bias: Tensor | None = None  # float, 4-D, broadcastable likewise
    alibi_slopes: Tensor | None = None  # (num_heads,) or (batch, num_heads)
    sinks: Tensor | None = None  # (num_heads,) logits
    dropout_seed: Tensor | None = None  # () int64, or (5,): `core.dropout.with_origin`
    key_scale: Tensor | None = None  # (num_pages, num_kv_heads): of float8 keys in pages; or (heads, blocks)
    value_scale: Tensor | None = None
    captured_floats: Tensor | None = None  # of mask and score functions: see `core.functions.captured`
    captured_integers: Tensor | None = None
    captured_layout: Tensor | None = None  # on the CPU
    query_scale: Tensor | None = None  # (heads, blocks)
    query_blocks: Tensor | None = None  # 8-bit numbers, see `core.quantized`: query, key and value
    key_blocks: Tensor | None = None  # are then stand-ins, that show shapes and dtype and hold nothing
    value_blocks: Tensor | None = None

    @property
    def captured(self) -> Buffers:
        """What mask and score functions read."""
        return Buffers(self.captured_floats, self.captured_integers, self.captured_layout)


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
    functions: str | None = None  # mask and score functions: `core.functions.expression.Functions.text`
    dropout_step: int = 0  # 16 or 1: dropout_seed has an origin, whose query and key are multiples of this


class Gradients(NamedTuple):
    """Gradients of `Inputs`; those after `value` are None where the problem has none."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None
    captured_floats: Tensor | None = None


T = TypeVar("T", Inputs, Gradients)


def in_layout(tensors: T, layout: str) -> T:
    """query, key and value, or their gradients: from "bshd" to a layout, or from the layout to "bshd"."""
    if layout == "bshd":
        return tensors
    query, key, value = (
        t.transpose(1, 2) if isinstance(t, Tensor) and t.ndim == 4 else t for t in tensors[:3]
    )
    return tensors._replace(query=query, key=key, value=value)


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
    bias_dtype: torch.dtype | None = None
    bias_of_distances: bool = False  # it is a number of key - query: see `gpu.functions.distances`
    has_alibi: bool = False
    has_sinks: bool = False
    is_packed: bool = False
    is_cached: bool = False  # each sequence has a number of keys, seqlens_k: also with pages and left padding
    has_leftpad: bool = False
    page_size: int | None = None
    is_quantized: bool = False  # keys and values are float8_e4m3fn, with a scale for each page and head
    is_in_blocks: bool = False  # query, key and value come in 8 bits: `core.quantized`
    is_value_in_key: bool = False  # the values are a view of the keys' first columns: latent attention
    needs_grad: bool = False  # of anything
    bias_needs_grad: bool = False
    lse_needs_grad: bool = False  # known in the backward only
    is_partial: bool = False  # backward: out and lse are those of more keys, so weights need not add up to 1
    has_wide_results: bool = False  # out, or gradients that several calls add up, are in the scores' dtype
    functions: str | None = None
    num_captured: int = 0  # floats that functions read
    dropout_step: int = 0  # as in `Options`

    @functools.cached_property
    def _hash(self) -> int:
        return hash(_fields_of(self))

    def __hash__(self) -> int:
        return self._hash  # plans of launches and configurations are found by it, in many calls

    @property
    def extent(self) -> tuple[int, int, int, int]:
        """What b, h, i and j of functions are below."""
        return self.batch, self.num_heads, self.seqlen_q, self.seqlen_k

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    @functools.cached_property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.dtype)

    @property
    def out_dtype(self) -> torch.dtype:
        return self.gradient_dtype(self.dtype)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the gradient of a query, key, value or shared bias of this dtype."""
        return self.compute_dtype if self.has_wide_results else dtype

    @property
    def has_score_function(self) -> bool:
        return self.functions is not None and decode(self.functions).score is not None

    @property
    def is_8_bit(self) -> bool:
        """Both products are of 8-bit numbers."""
        return self.precision in EIGHT_BIT

    @property
    def has_packed_keys(self) -> bool:
        """Keys are packed as queries are, not held by a cache."""
        return self.is_packed and not self.is_cached

    @property
    def has_values(self) -> bool:
        """Whether offsets, lengths or pages have values to be checked in every call."""
        return self.is_packed or self.is_cached

    @property
    def is_paged(self) -> bool:
        return self.page_size is not None

    @property
    def has_window(self) -> bool:
        return self.window_left is not None or self.window_right is not None

    def visibility(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Visibility:
        """The visible keys of one sequence; lengths default to the problem's own."""
        return Visibility(
            self.seqlen_q if seqlen_q is None else seqlen_q,
            self.seqlen_k if seqlen_k is None else seqlen_k,
            self.window_left,
            0 if self.causal else self.window_right,
        )


_fields_of = attrgetter(*(field.name for field in dataclasses.fields(AttentionProblem)))


def describe(inputs: Inputs, options: Options) -> AttentionProblem:
    """Validate a call and describe it.

    Checks everything that shapes, dtypes, devices and scalars can tell, of tensors that are being traced too;
    `values.check_values` checks what only values can.

    Raises:
        ValueError: an argument has a wrong shape or value; the message names it and says what is right.
        TypeError: an argument has a wrong dtype.
        NotImplementedError: a gradient that does not exist is asked for.
    """
    return describe_tensors(seen(inputs), options, _is_value_in_key(inputs.key, inputs.value))


def seen(inputs: Inputs) -> Any:
    """`Inputs` of what the tensors show without their values, memory aside; it can be hashed."""
    grad_enabled = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    signatures: Any = (
        t
        if t is None
        else TensorSignature(t.shape, (), t.dtype, t.device, 0, grad_enabled and t.requires_grad)
        for t in inputs
    )
    return Inputs(*signatures)


def describe_signature(signature: Signature) -> AttentionProblem:
    """The problem of a call's signature. Raises as `describe`."""
    tensors: Any = Inputs(*signature.inputs)  # type: ignore[arg-type]
    key, value = tensors.key, tensors.value
    is_value_in_key = (
        signature.shares_memory and key.shape[-1:] > value.shape[-1:] and key.strides == value.strides
    )
    problem = describe_tensors(tensors, signature.options, is_value_in_key)
    if signature.request.wide and problem.dtype != problem.compute_dtype:
        problem = replace(problem, has_wide_results=True)
    if signature.direction != "backward":
        return problem
    return of_gradient(
        replace(
            problem,
            bias_needs_grad=signature.needs_bias_gradient,
            lse_needs_grad=signature.results[-1] is not None,
            is_partial=signature.is_partial,
        )
    )


def of_gradient(problem: AttentionProblem) -> AttentionProblem:
    """The problem whose formula gives the gradients: rounding to 8 bits passes them straight through.

    Its weights come from the 8-bit forward's lse, so they need not add up to 1.
    """
    return replace(problem, precision="ieee", is_partial=True) if problem.is_8_bit else problem


def _is_value_in_key(key: Tensor, value: Tensor) -> bool:
    """Whether the values are a view of the keys' first columns."""
    try:
        return (
            not compiles_here()
            and key.shape[-1:] > value.shape[-1:]
            and key.stride() == value.stride()
            and key.storage_offset() == value.storage_offset()
            and key.untyped_storage() is value.untyped_storage()
        )
    except NotImplementedError:  # tensors of torch.func have no memory: those that they stand for are asked
        return False


def describe_tensors(signatures: Any, options: Options, is_value_in_key: bool) -> AttentionProblem:
    """`describe` for the `TensorSignature`s of `Inputs`."""
    query, key, value = signatures.query, signatures.key, signatures.value
    check_dtypes_and_devices(signatures)
    check_scalars(options, signatures.dropout_seed is not None, query.dtype)
    is_packed = signatures.cu_seqlens_q is not None
    is_paged = signatures.page_table is not None
    batch = check_shapes(signatures, is_packed, is_paged)
    head_dim, head_dim_v = query.shape[-1], value.shape[-1]
    num_heads, num_kv_heads = query.shape[-2], key.shape[-2]
    page_size = key.shape[1] if is_paged else None
    seqlen_q = _longest(query.shape[0], options.max_seqlen_q) if is_packed else query.shape[1]
    if signatures.cu_seqlens_k is not None:
        seqlen_k = _longest(key.shape[0], options.max_seqlen_k)
    else:
        seqlen_k = key.shape[1] * (signatures.page_table.shape[1] if is_paged else 1)
    if options.precision in EIGHT_BIT:
        check_8_bit(signatures, options.precision)
    if signatures.query_blocks is not None:
        check_blocks(signatures, options.precision)
    check_score_tensors(signatures, batch, num_heads, seqlen_q, seqlen_k, is_packed)
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
        causal=bool(options.causal),
        window_left=options.window_left,
        window_right=options.window_right,
        softcap=float(options.softcap),
        dropout_p=float(options.dropout_p),
        deterministic=bool(options.deterministic),
        precision=options.precision,
        mask_shape=None if signatures.mask is None else tuple(signatures.mask.shape),
        bias_shape=None if signatures.bias is None else tuple(signatures.bias.shape),
        bias_dtype=None if signatures.bias is None else signatures.bias.dtype,
        has_alibi=signatures.alibi_slopes is not None,
        has_sinks=signatures.sinks is not None,
        is_packed=is_packed,
        is_cached=signatures.seqlens_k is not None,
        has_leftpad=signatures.leftpad_k is not None,
        page_size=page_size,
        is_quantized=signatures.key_scale is not None and signatures.key_blocks is None,
        is_in_blocks=signatures.query_blocks is not None,
        is_value_in_key=is_value_in_key,
        needs_grad=any(s is not None and s.needs_grad for s in signatures),
        bias_needs_grad=signatures.bias is not None and signatures.bias.needs_grad,
        functions=options.functions,
        num_captured=0 if signatures.captured_floats is None else signatures.captured_floats.shape[0],
        dropout_step=options.dropout_step,
    )


def _longest(total: int, given: int | None) -> int:
    """No packed sequence is longer; a negative number is left to `check_scalars`."""
    return total if given is None else min(total, given)


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
