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

from interpreter import needs_interpreter

pytestmark = needs_interpreter

TOGETHER = (  # a process each, which takes seconds to start
    ("gpu_triton/decode", "gpu_triton/chunks", "gpu_triton/statistics", "hopper/quantize"),
    ("gpu_triton/attention", "gpu_triton/guards", "gpu_triton/large_scores"),
    ("gpu_triton/functions", "hopper/backward_rows"),
)


@pytest.mark.sample(1)
@pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="the tests run in this process",
)
@pytest.mark.parametrize("names", TOGETHER, ids=" ".join)
def test_under_the_interpreter(names: tuple[str, ...], request: pytest.FixtureRequest):
    tests = [str(Path(__file__).parents[1] / f"{name.replace('/', '/test_')}.py") for name in names]
    kind = request.config.getoption("-m")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-m", kind, *tests],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert re.search(r"[1-9]\d* passed", run.stdout)


@pytest.mark.sample(1)
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
