"""What is made once and kept: of tensors' values, while they live and are not written to; of numbers."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from tilewise.core.torch_private import base_and_version, is_plain_eager, raw_stream

MAX_TENSORS = 16  # whose results are kept
MAX_RESULTS, MAX_BYTES = 16, 256 << 20  # of each

Result = TypeVar("Result")


def lock_for_forks() -> threading.RLock:  # type: ignore[valid-type]
    """A lock that is free in a forked child, whoever held it, and that its holder may take again, as a signal
    handler or a finalizer that calls attention does."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


_results: Any = WeakTensorKeyDictionary()  # by the first tensor's memory: results by views and choices
_nothing = torch.empty(0, device="cpu")  # lives for ever
_lock = lock_for_forks()


class _Kept(NamedTuple):
    versions: tuple[Any, ...]
    storages: tuple[weakref.ref[Any], ...]  # of all tensors: `t.data = other` changes no version
    others: tuple[TensorWeakRef, ...]  # the memory of the tensors behind the first
    result: Any
    size: int  # bytes


def kept(
    tensors: Sequence[Tensor], choices: tuple[Any, ...], make: Callable[[], Result], device: torch.device
) -> Result:
    """What `make` makes of tensors, perhaps none, and choices, on a device's current stream.

    `make` is called every time in a CUDA graph, whose replay may find other numbers in this memory, of
    inference tensors, which do not count what is written to them, and in transforms, which hide numbers.
    Writes that PyTorch does not count, as those to `t.data`, are not seen.

    Example:
        >>> t = torch.ones(3)
        >>> total = lambda: kept((t,), ("sum",), lambda: print("computed") or float(t.sum()), t.device)
        >>> total(), total()
        computed
        (3.0, 3.0)
        >>> t[0] = 5
        >>> total()
        computed
        7.0
    """
    is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if is_captured or not all(is_plain_eager(t) and not t.is_inference() for t in tensors):
        return make()
    views = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors)
    key = (views, choices, device, raw_stream(device.index) if device.type == "cuda" else 0)
    bases, versions = zip(*map(base_and_version, tensors or (_nothing,)), strict=True)
    with _lock:
        found: _Kept | None = _results.get(bases[0], {}).get(key)
    if (
        found is not None
        and found.versions == versions
        and all(reference() is t for reference, t in zip(found.others, bases[1:], strict=True))
        and all(reference() is t.untyped_storage() for reference, t in zip(found.storages, tensors))
    ):
        return found.result  # type: ignore[no-any-return]
    storages, result = tuple(weakref.ref(t.untyped_storage()) for t in tensors), _made(make)
    with _lock:
        if bases[0] not in _results and len(_results) >= MAX_TENSORS:
            del _results[next(iter(_results))]
        of_first = _results.setdefault(bases[0], {})
        size = _bytes(result)
        if len(of_first) >= MAX_RESULTS or sum(x.size for x in of_first.values()) + size > MAX_BYTES:
            of_first.clear()
        of_first[key] = _Kept(versions, storages, tuple(map(TensorWeakRef, bases[1:])), result, size)
    return result


def _made(make: Callable[[], Result]) -> Result:
    """What `make` makes, for calls in any mode: no backward can save tensors of inference mode."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()


def kept_on_device(most: int) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A cache of what a function makes of numbers on a device, its last argument; all can be hashed.

    What the calls of a captured graph have taken is never forgotten, as its replays read it: a few numbers
    for each length or layout that graphs were captured with. What such a call makes is not kept: its numbers
    are there from the graph's first replay on.
    """

    def decorate(make: Callable[..., Result]) -> Callable[..., Result]:
        cached: dict[tuple[Any, ...], Result] = {}  # the one not used for the longest time first
        captured: dict[tuple[Any, ...], Result] = {}

        @functools.wraps(make)
        def find(*arguments: Any) -> Result:
            found = captured.get(arguments)
            if found is not None:
                return found
            is_captured = arguments[-1].type == "cuda" and torch.cuda.is_current_stream_capturing()
            with _lock:
                found = cached.pop(arguments, None)
                if found is not None:
                    cached[arguments] = found
            if found is None:
                found = make(*arguments)
                if is_captured:
                    return found
                with _lock:
                    cached[arguments] = found
                    if len(cached) > most:
                        del cached[next(iter(cached))]
            if is_captured:
                captured[arguments] = found
            return found

        return find

    return decorate


@kept_on_device(1024)
def integers_on(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 numbers on a device: kept, as a copy to a GPU waits for it."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device=device)


def unit_scales(pages: Tensor) -> Tensor:
    """Scales of 8-bit pages that need none: ones, float32, of (pages, rows, heads, dim) as (pages, heads).

    Example:
        >>> unit_scales(torch.zeros(3, 16, 2, 64).to(torch.float8_e4m3fn)).shape
        torch.Size([3, 2])
    """
    if not is_plain_eager(pages):
        return torch.ones(pages.shape[0], pages.shape[2], dtype=torch.float32, device=pages.device)
    return _ones(pages.shape[0], pages.shape[2], pages.device)


@kept_on_device(64)
def _ones(rows: int, columns: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        ones = torch.ones(rows, columns, dtype=torch.float32, device=device)
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream(device).synchronize()  # calls on any stream read them from now on
    return ones


def _bytes(result: Any) -> int:
    """Of a tensor, or of those in a tuple."""
    parts = result if isinstance(result, tuple) else (result,)
    return sum(t.nbytes for t in parts if isinstance(t, Tensor))
