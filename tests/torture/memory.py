"""Whether memory stays flat over many varied calls: caches of plans, blocks and results must be bounded."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch
from tests.torture import draw
from tests.torture.problems import Call, by_mode, said

CALLS, FIRST = 50_000, 5_000
LIMIT = 20 << 20  # bytes that may be added after the first calls
LIGHT = ("plain", "no_grad", "inference", "autocast")


def resident() -> int:
    """Bytes in memory, without what is free but kept by malloc."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def growth(seed: int, calls: int = CALLS, first: int = FIRST) -> int:
    """Bytes by which the process grows in `calls` calls after the first ones.

    Without oneDNN, which keeps machine code for each shape that PyTorch has met.
    """
    torch.backends.mkldnn.enabled = False  # type: ignore[misc]
    done = number = start = 0
    while done < calls:
        for p in draw.sequence(seed, 0, number):
            if p.mode not in LIGHT or p.dtype == "float64":
                continue
            call = Call(p)
            try:
                by_mode(call, call)
            except NotImplementedError as error:
                if said(p, error):
                    raise
            done += 1
            if done == first:
                start = resident()
        number += 1
    return resident() - start
