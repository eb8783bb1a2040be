"""Without a GPU, the tests of this folder run under Triton's interpreter, in a process of their own.

The interpreter has to be chosen before triton is imported, which other tests may do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="the tests run in this process",
)
@pytest.mark.parametrize("name", ["test_attention.py", "test_decode.py"])
def test_under_the_interpreter(name: str):
    tests = Path(__file__).with_name(name)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", str(tests)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
