"""Whether memory stays flat over many varied calls: caches of plans, blocks and results must be bounded."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from tests.torture import draw
from tests.torture.problems import Call, by_mode, said

CALLS, FIRST = 50_000, 5_000
LIMIT = 20 << 20  # bytes that may be added after the first calls
LIGHT = ("plain", "no_grad", "inference", "autocast")


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@torch.backends.mkldnn.flags(enabled=False)  # oneDNN keeps machine code for each shape that PyTorch has met
def growth(seed: int, calls: int = CALLS, first: int = FIRST) -> int:
    """Bytes by which the process grows in `calls` calls after the first ones."""
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
                gc.collect()
                start = resident()
        number += 1
    gc.collect()
    return resident() - start
