"""The Hopper kernels' own source, run on the CPU: barriers, tiles, masks, splits, pages; no deadlock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CASES = {  # at least so many
    "emulated_forward.py": 20,
    "emulated_prefill.py": 20,
    "emulated_fp8.py": 16,
    "emulated_backward.py": 14,
    "emulated_decode.py": 27,
}


@pytest.mark.parametrize("script", CASES)
def test_kernel_source_is_right(script: str, run_script: Callable[..., list[str]]):
    """In a process of its own, where a module stands in for Gluon."""
    assert len(run_script(script)) >= CASES[script]
