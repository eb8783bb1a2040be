"""Calls over many ranks that are refused, and what ranks have to agree on."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.core.dropout import SQUARE
from tilewise.core.problem import Inputs, Options, describe_tensors, seen
from tilewise.dispatch.choice import choose
from tilewise.distributed.cost import fits, sizes_of
from tilewise.distributed.layout import Layout
from tilewise.distributed.ranks import check_plain

_GIVEN = ("mask", "bias", "alibi_slopes", "sinks")


def check_call(inputs: Inputs, options: Options, *call: Any) -> int:
    """How many ranks exchange heads for tokens. Checks the call: once for all that differ only in values.

    Args:
        call: layout, whether it is packed, backend, method, and how many ranks of a mesh exchange heads.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument does not fit.
    """
    given = ("query", "key", "value", *_GIVEN)
    check_plain(**{name: t for name in given if (t := getattr(inputs, name)) is not None})
    try:
        return _checked(seen(inputs), options, *call)
    except TypeError:  # an option that cannot be hashed: the checks name it
        return _checked.__wrapped__(seen(inputs), options, *call)


@functools.lru_cache(maxsize=512)
def _checked(
    inputs: Any,
    options: Options,
    tokens: Layout,
    is_packed: bool,
    backend: str | None,
    method: str,
    inner: int | None,
) -> int:
    """`check_call` of what is `seen` of tensors: masks have columns for the whole sequence."""
    query, key = inputs.query, inputs.key
    problem = describe_tensors(inputs._replace(mask=None, bias=None), options, is_value_in_key=False)
    if backend is not None:
        mask, bias = (None if t is None else tuple(t.shape) for t in (inputs.mask, inputs.bias))
        step = 0 if problem.dropout_p == 0 else SQUARE if tokens.is_cut_at(SQUARE) else 1
        problem = replace(problem, mask_shape=mask, bias_shape=bias, has_sinks=False, dropout_step=step)
        choose(problem, backend)
        if problem.needs_grad:
            choose(problem, backend, is_backward=True)
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            f"key has {key.shape[1]} tokens, must have those of query, {query.shape[1]}: each rank holds "
            "the same tokens of both"
        )
    if problem.is_8_bit:
        raise NotImplementedError(
            f"precision={problem.precision!r} is not served over several ranks: 'ieee' is"
        )
    for name, t, right in (("mask", inputs.mask, "bool"), ("bias", inputs.bias, "floating point")):
        if t is None:
            continue
        if is_packed:
            raise NotImplementedError(f"{name} with cu_seqlens is not served over several ranks: window is")
        if (t.dtype == torch.bool) != (name == "mask") or (name == "bias" and not t.dtype.is_floating_point):
            raise TypeError(f"{name}.dtype={t.dtype} must be {right}")
        shape = (query.shape[0], query.shape[2], query.shape[1], tokens.total)
        if t.ndim != 4 or any(size not in (1, full) for size, full in zip(t.shape, shape)):
            raise ValueError(
                f"{name}.shape={tuple(t.shape)} must broadcast to (batch, heads, tokens of the rank, seqlen)="
                f"{shape}"
            )
    longest = max(map(tokens.length, range(tokens.world)))
    return _ulysses_degree(method, inner, tokens.world, inputs, longest)


def batch_of_one(*tensors: Tensor) -> list[Tensor]:
    for name, t in zip(("query", "key", "value"), tensors):
        if t.ndim != 3:
            raise ValueError(
                f"{name}.shape={tuple(t.shape)} must be (tokens of the rank, heads, dim) with cu_seqlens"
            )
    return [t[None] for t in tensors]


def _ulysses_degree(method: str, inner: int | None, world: int, inputs: Any, longest: int) -> int:
    """How many ranks exchange heads for tokens: 1 is none. longest: tokens of the rank that has most.

    Raises:
        ValueError, NotImplementedError: the heads do not divide, or a bias has rows.
    """
    if method in ("ring", "all_gather") or (method == "auto" and inner is None) or world == 1:
        return 1
    heads, kv_heads = inputs.query.shape[2], inputs.key.shape[2]
    if method == "ulysses":
        inner = world
    elif inner is None:
        sizes = sizes_of(inputs)
        inner = max(d for d in range(1, world) if world % d == 0 and fits(d, sizes))
    if heads % inner:
        raise ValueError(
            f"query heads {heads} must be divisible by the {inner} ranks that exchange heads: "
            "method='ring' serves"
        )
    if kv_heads % inner and inner % kv_heads:
        raise ValueError(
            f"KV heads {kv_heads} must divide, or be divisible by, the {inner} ranks that exchange heads: "
            "method='ring' serves"
        )
    for name, t in (("mask", inputs.mask), ("bias", inputs.bias)):
        # A rank without tokens has 0 rows; where none has two tokens, a row may be a token's or all tokens'.
        if t is not None and inner > 1 and (t.shape[2] != 1 or longest < 2):
            raise NotImplementedError(
                f"{name}.shape={tuple(t.shape)} has a row for each token, which method={method!r} does not "
                "exchange: method='ring' serves"
            )
    return inner


def facts_of(inputs: Inputs, options: Options) -> dict[str, Any]:
    """What must be equal of a call on all ranks: all but tokens and values."""
    facts = {name: _tensor_fact(getattr(inputs, name)) for name in ("query", "key", "value", *_GIVEN[2:])}
    scalars = options._asdict()
    scalars["window"] = scalars.pop("window_left"), scalars.pop("window_right")
    scalars["mask_mod and score_mod"] = scalars.pop("functions")
    return facts | {name: getattr(inputs, name) is not None for name in _GIVEN[:2]} | scalars


def _tensor_fact(t: Tensor | None) -> str:
    """Of a tensor all but its tokens."""
    if t is None:
        return "None"
    shape = (t.shape[0], *t.shape[2:]) if t.ndim == 4 else tuple(t.shape)
    return f"{str(t.dtype).removeprefix('torch.')} {shape} on {t.device.type}"
