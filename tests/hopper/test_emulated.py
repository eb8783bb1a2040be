"""The Hopper kernels' own source, run on the CPU: barriers, tiles, masks, splits, pages; no deadlock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

ALL = {  # at least so many
    "emulated_forward.py": 20,
    "emulated_prefill.py": 20,
    "emulated_fp8.py": 20,
    "emulated_backward.py": 14,
    "emulated_decode.py": 27,
    "emulated_statistics.py": 25,
}
DRAWN = 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("script", ALL)
def test_kernel_source_is_right(
    script: str, run_script: Callable[..., list[str]], request: pytest.FixtureRequest
):
    """In a process of its own, where a module stands in for Gluon; `make test` draws some of the cases."""
    assert len(run_script(script, "--draw", str(DRAWN), request.config.option.sample)) >= DRAWN


@pytest.mark.slow
@pytest.mark.parametrize("script", ALL)
def test_every_case(script: str, run_script: Callable[..., list[str]]):
    assert len(run_script(script)) >= ALL[script]
