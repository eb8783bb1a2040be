"""Without a GPU, tests of Triton kernels run under Triton's interpreter, in a process of their own.

The interpreter has to be chosen before triton is imported, which other tests may do.
"""

from __future__ import annotations

import os
import re
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
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton/test_attention.py", "not slow"),
        pytest.param("triton/test_attention.py", "slow", marks=pytest.mark.slow),
        ("triton/test_decode.py", "not slow"),
        pytest.param("triton/test_decode.py", "slow", marks=pytest.mark.slow),
        ("triton/test_chunks.py", "not slow"),
        ("triton/test_large_scores.py", "not slow"),
        ("triton/test_guards.py", "not slow"),
        ("triton/test_functions.py", "not slow"),
        ("hopper/test_backward_rows.py", "not slow"),
        ("hopper/test_quantize.py", "not slow"),
    ],
)
def test_under_the_interpreter(name: str, kind: str):
    tests = Path(__file__).parents[1] / name
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-m", kind, str(tests)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert re.search(r"[1-9]\d* passed", run.stdout)


@pytest.mark.sample(4)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guards pages by mprotect")
@pytest.mark.parametrize(
    "name",
    [
        *("plain", "causal", "mask", "mask_window", "bias", "bias_causal", "bias_shared", "bias_of_keys"),
        *("decode", "decode_mask", "decode_bias"),
    ],
)
def test_nothing_is_read_beyond_a_tensor(name: str):
    script = str(Path(__file__).with_name("guarded_pages.py"))
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, script, name], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, f"exit status {run.returncode}\n{run.stderr[-2000:]}"
