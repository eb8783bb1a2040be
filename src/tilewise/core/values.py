"""What only values can tell of a call: that offsets, lengths and page indices are right."""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

from tilewise.core.problem import AttentionProblem, Inputs, Options, spans
from tilewise.core.torch_private import version_of


def check_values(problem: AttentionProblem, inputs: Inputs, options: Options) -> None:
    """Check what only values can tell: offsets, lengths and page indices. Reads length tensors only.

    Those of a cache on a GPU are not read: that would wait for the GPU in every call. There, kernels cut
    lengths to the capacity. The offsets of packed sequences on a GPU are read when a tensor is first seen and
    when PyTorch has changed it since, and not while a CUDA graph is captured.

    Raises:
        ValueError: naming the tensor, the offending value and what is right.
    """
    if problem.is_cached and problem.device_type != "cpu":
        return
    if problem.is_packed and problem.device_type == "cuda" and _were_checked(problem, inputs):
        return
    if problem.is_packed:
        _check_cu_seqlens("q", inputs.cu_seqlens_q, inputs.query.shape[0], options.max_seqlen_q)
    if problem.has_packed_keys:
        _check_cu_seqlens("k", inputs.cu_seqlens_k, inputs.key.shape[0], options.max_seqlen_k)
    if problem.is_cached:
        _check_cached(problem, inputs)
    if problem.is_packed and (inputs.mask is not None or inputs.bias is not None):
        found = spans(problem, inputs)
        longest_q = max((s.q1 - s.q0 for s in found), default=0)
        longest_k = max((s.k1 - s.k0 for s in found), default=0)
        check_coverage(inputs, longest_q, problem.seqlen_k if problem.is_cached else longest_k)
    if problem.is_packed and problem.device_type == "cuda":
        _checked[inputs.cu_seqlens_q] = _identity(problem, inputs)


def check_coverage(inputs: Inputs, longest_q: int, longest_k: int) -> None:
    """Raise ValueError unless mask and bias of packed queries are as long as the longest sequence."""
    for name, t in (("mask", inputs.mask), ("bias", inputs.bias)):
        if not isinstance(t, Tensor) or t.ndim != 4:  # which `describe` refuses
            continue
        if (t.shape[2] != 1 and t.shape[2] < longest_q) or (t.shape[3] != 1 and t.shape[3] < longest_k):
            longest = (longest_q, longest_k)
            raise ValueError(f"{name}.shape={tuple(t.shape)} must cover the longest sequence: {longest}")


# Offsets on a GPU, and how they were found right.
_checked: MutableMapping[Any, Any] = WeakTensorKeyDictionary()
_MADE_HERE = object()


def vouch_for(cu_seqlens_q: Tensor) -> None:
    """Offsets that the library has made of checked ones, with those of the keys: they need not be read."""
    _checked[cu_seqlens_q] = _MADE_HERE


def _were_checked(problem: AttentionProblem, inputs: Inputs) -> bool:
    """Whether the offsets need not be read, or can't: reading waits for the GPU."""
    if torch.cuda.is_current_stream_capturing():
        return True
    known = _checked.get(inputs.cu_seqlens_q)
    return known is _MADE_HERE or (known is not None and known == _identity(problem, inputs))


def _identity(problem: AttentionProblem, inputs: Inputs) -> Any:
    """All that the checks of packed offsets depend on; None if changes can't be seen."""
    offsets = inputs[3:5]
    if any(t.is_inference() for t in offsets):  # type: ignore[union-attr]
        return None
    seen = ((WeakIdRef(t), version_of(t)) for t in offsets)  # type: ignore[arg-type]
    return problem, inputs.query.shape[0], inputs.key.shape[0], *seen


def _check_cached(problem: AttentionProblem, inputs: Inputs) -> None:
    found = spans(problem, inputs)
    for i, span in enumerate(found):
        if not 0 <= span.k0 <= span.k1 <= problem.seqlen_k:
            pad = "" if inputs.leftpad_k is None else f"leftpad_k[{i}]={span.k0}, "
            raise ValueError(
                f"{pad}seqlens_k[{i}]={span.k1} must satisfy 0 <= leftpad <= length <= "
                f"capacity={problem.seqlen_k}: these are the cache's lengths"
            )
    if inputs.page_table is not None:
        check_pages("page_table", inputs.page_table, [span.k1 for span in found], inputs.key)


def check_pages(name: str, table: Tensor, lengths: list[int], cache: Tensor) -> None:
    """Only the pages in use: entries behind a sequence's end may hold anything."""
    if cache.shape[1] < 1:
        raise ValueError(f"the page size {cache.shape[1]} must be at least 1")
    most, page_size = cache.shape[:2]
    for i, (length, pages) in enumerate(zip(lengths, table.tolist())):
        used = pages[: -(-length // page_size)]
        if used and not 0 <= min(used) <= max(used) < most:
            raise ValueError(f"{name}[{i}]={used} must index pages in [0, {most})")


def _check_cu_seqlens(side: str, cu_seqlens: Tensor | None, total: int, longest: int | None) -> None:
    offsets = cu_seqlens.tolist()  # type: ignore[union-attr]
    name = f"cu_seqlens_{side}"
    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(
            f"{name}=[{offsets[0]}, ..., {offsets[-1]}] must start at 0 and end at total={total}"
        )
    for i, (a, b) in enumerate(itertools.pairwise(offsets)):
        if b < a:
            raise ValueError(f"{name}[{i + 1}]={b} must be at least {name}[{i}]={a}: offsets never decrease")
        if longest is not None and b - a > longest:
            raise ValueError(f"max_seqlen_{side}={longest} must be at least the longest sequence, {b - a}")
