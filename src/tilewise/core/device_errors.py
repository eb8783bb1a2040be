"""What kernels find wrong in lengths, page numbers and functions' indices, which the host does not read: it
would have to wait.

A kernel neither reads nor writes what such a number points to. It makes the rows concerned NaN and sets a
flag, in memory of the host that every GPU can write to: looking at it waits for nothing. One flag serves all
devices and streams, and CUDA graphs too.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import torch
from torch import Tensor

from tilewise.core.torch_private import compiles_here

# The numbers of the flags; kernels know them as well.
PAGE, LENGTH, INDEX = 0, 1, 2
_WRONG = {
    PAGE: "a page number (page_table, block_table or cache_batch_idx) must be at least 0 and less than the "
    "number of pages, or of the cache's sequences",
    LENGTH: "a length (cache_seqlens, cache_leftpad or a cache's lengths) must be at least 0 and, with the "
    "new tokens, at most the capacity",
    INDEX: "an index of a mask or score function must lie in its captured tensor where the score is visible",
}
IS_DEBUG = os.environ.get("TILEWISE_DEBUG") == "1"
_devices: set[torch.device] = set()  # whose kernels know the flags


@functools.cache
def _flags() -> Tensor:
    with torch.inference_mode(False):
        flags = torch.zeros(len(_WRONG), dtype=torch.int32, device="cpu")
        return flags.pin_memory() if torch.cuda.is_available() else flags


@functools.cache
def _view() -> Any:
    """The flags as the host reads them in no time."""
    return (ctypes.c_int32 * len(_WRONG)).from_address(_flags().data_ptr())


def error_flags(device: torch.device) -> Tensor:
    """The flags, as an argument of kernels on a device: int32, 1 where something was wrong."""
    _devices.add(device)
    return _flags()


def raise_errors() -> None:
    """Raise what is known by now: kernels that are still running may yet find more."""
    if not _devices or not any(_view()):
        return
    found = [n for n in _WRONG if _view()[n]]
    for n in found:
        _view()[n] = 0
    raise ValueError(f"rows of an earlier call's output are NaN: {'; '.join(_WRONG[n] for n in found)}")


def check_errors() -> None:
    """Wait for the GPUs, and raise what their kernels have found wrong since the last time.

    Lengths and page tables that live on a GPU are checked there: what they point to outside of a cache is
    neither read nor written, and the output of the sequences concerned is NaN. So are scores for which a mask
    or score function reads a captured tensor out of range. `PagedKVCache.reserve` and
    `KVCache.lengths` raise the same without waiting; with TILEWISE_DEBUG=1 in the environment every call with
    a cache waits and raises at once, except while a CUDA graph is captured.

    Raises:
        ValueError: a page number, a length or an index of an earlier call was wrong. It is raised once.

    Example:
        >>> check_errors()  # nothing was wrong
    """
    for device in list(_devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    raise_errors()


def check_if_debugging() -> None:
    """`check_errors`, if TILEWISE_DEBUG=1 asks for it after every call."""
    if IS_DEBUG and not compiles_here():
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        check_errors()
