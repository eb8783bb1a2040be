"""No test where the machine has no kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilewise.cpu.host import compile as kernels

sys.path.insert(0, str(Path(__file__).parent))  # the tests share random_cases.py


@pytest.fixture(autouse=True, scope="session")
def _has_kernels():
    if kernels.unavailable():
        pytest.skip(f"no LLVM kernels here: {kernels.unavailable()}")
