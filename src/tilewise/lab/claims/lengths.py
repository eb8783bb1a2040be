"""How long a sequence may be before its step no longer fits in memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

FIRST_TOKENS = 1 << 12


def longest_that(fits: Callable[[int], bool], most: int) -> int:
    """The last length that fits: 4,096 and its doubles up to `most` are tried; 2,048 if none does.

    Example:
        >>> longest_that(lambda tokens: tokens < 20_000, 65_536)
        16384
    """
    seqlen = FIRST_TOKENS
    while seqlen <= most and fits(seqlen):
        seqlen *= 2
    return seqlen // 2


def in_memory(step: Callable[[], Any]) -> bool:
    """Whether a step runs within the GPU's memory, of which it leaves nothing in use."""
    try:
        step()
    except torch.OutOfMemoryError:
        return False
    finally:
        gc.collect()  # models have cycles
        torch.cuda.empty_cache()
    return True
