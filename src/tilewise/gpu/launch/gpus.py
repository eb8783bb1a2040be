"""The GPU that kernels are for: the one at hand, or one by name that stands in for it."""

from __future__ import annotations

import functools

import torch

from tilewise.core.signature import Gpu, stand_in

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", (8, 0), 108),
        Gpu("l40s", (8, 9), 142),
        Gpu("rtx4090", (8, 9), 128),
        Gpu("h100", (9, 0), 132),
        Gpu("h200", (9, 0), 132),
        Gpu("b200", (10, 0), 148),
    )
}


def gpu_of(index: int | None) -> Gpu:
    """A GPU by its number, None for the current one; the one that stands in, if one does."""
    return stand_in() or _at_hand(index)


@functools.cache
def _at_hand(index: int | None) -> Gpu:
    """Other vendors' GPUs take the portable tiles."""
    found = torch.cuda.get_device_properties(index)
    capability = (8, 0) if torch.version.hip else (found.major, found.minor)
    return Gpu(found.name, capability, found.multi_processor_count)
