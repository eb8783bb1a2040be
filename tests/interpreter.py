"""Triton's interpreter, which some tests run kernels by."""

from __future__ import annotations

import numpy as np
import pytest

triton = pytest.importorskip("triton")


def _version(module: object) -> tuple[int, ...]:
    return tuple(map(int, module.__version__.split(".")[:2]))  # type: ignore[attr-defined]


needs_interpreter = pytest.mark.skipif(
    _version(triton) < (3, 7) and _version(np) >= (2, 4),
    reason=f"the interpreter of Triton {triton.__version__} does not run with NumPy {np.__version__}",
)
