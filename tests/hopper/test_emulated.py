"""The Hopper kernels' own source, run on the CPU: barriers, tiles, masks, splits, pages; no deadlock."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

SCRIPTS = (
    "emulated_forward.py",
    "emulated_prefill.py",
    "emulated_fp8.py",
    "emulated_backward.py",
    "emulated_decode.py",
    "emulated_statistics.py",
)
DRAWN = 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("script", SCRIPTS)
def test_kernel_source_is_right(
    script: str, run_script: Callable[..., list[str]], request: pytest.FixtureRequest
):
    """In a process of its own, where a module stands in for Gluon; `make test` draws some of the cases."""
    assert len(run_script(script, "--draw", str(DRAWN), request.config.option.sample)) >= DRAWN


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_case(script: str, run_script: Callable[..., list[str]]):
    assert run_script(script)
