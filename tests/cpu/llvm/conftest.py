"""A kernel cache of the test run's own, and no test where the machine has no kernels."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tilewise.cpu.host import compile as kernels

sys.path.insert(0, str(Path(__file__).parent))  # the tests share random_cases.py


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    if kernels.unavailable():
        pytest.skip(f"no LLVM kernels here: {kernels.unavailable()}")
    before = os.environ.get("TILEWISE_CACHE_DIR")
    os.environ["TILEWISE_CACHE_DIR"] = str(tmp_path_factory.mktemp("kernels"))
    yield
    os.environ.pop("TILEWISE_CACHE_DIR")
    if before is not None:
        os.environ["TILEWISE_CACHE_DIR"] = before
