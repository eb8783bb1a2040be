"""What kernels find wrong in lengths and page numbers: the host does not read them, as it would have to wait.

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

# The numbers of the flags; kernels know them as well.
PAGE, LENGTH = 0, 1
_WRONG = {
    PAGE: "a page number (page_table, block_table or cache_batch_idx) must be at least 0 and less than the "
    "number of pages, or of the cache's sequences",
    LENGTH: "a length (cache_seqlens, cache_leftpad or a cache's lengths) must be at least 0 and, with the "
    "new tokens, at most the capacity",
}
IS_DEBUG = os.environ.get("TILEWISE_DEBUG") == "1"
_devices: set[torch.device] = set()  # whose kernels know the flags


@functools.cache
def _flags() -> Tensor:
    with torch.inference_mode(False):
        flags = torch.zeros(2, dtype=torch.int32, device="cpu")
        return flags.pin_memory() if torch.cuda.is_available() else flags


@functools.cache
def _view() -> Any:
    """The flags as the host reads them in no time."""
    return (ctypes.c_int32 * 2).from_address(_flags().data_ptr())


def error_flags(device: torch.device) -> Tensor:
    """The flags, as an argument of kernels on a device: int32, 1 where something was wrong."""
    _devices.add(device)
    return _flags()


def raise_errors() -> None:
    """Raise what is known by now: kernels that are still running may yet find more."""
    if not _devices or not (_view()[PAGE] or _view()[LENGTH]):
        return
    found = [sentence for n, sentence in _WRONG.items() if _view()[n]]
    _view()[PAGE] = _view()[LENGTH] = 0
    raise ValueError(
        f"an earlier call with a cache has left rows out, whose output is NaN: {'; '.join(found)}"
    )


def check_errors() -> None:
    """Wait for the GPUs, and raise what their kernels have found wrong since the last time.

    Lengths and page tables that live on a GPU are checked there: what they point to outside of a cache is
    neither read nor written, and the output of the sequences concerned is NaN. `PagedKVCache.reserve` and
    `KVCache.lengths` raise the same without waiting; with TILEWISE_DEBUG=1 in the environment every call with
    a cache waits and raises at once, except while a CUDA graph is captured.

    Raises:
        ValueError: a page number or a length of an earlier call was wrong. It is raised once.

    Example:
        >>> check_errors()  # nothing was wrong
    """
    for device in list(_devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    raise_errors()


def check_if_debugging() -> None:
    """`check_errors`, if TILEWISE_DEBUG=1 asks for it after every call."""
    if IS_DEBUG and not torch.compiler.is_compiling():
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        check_errors()
