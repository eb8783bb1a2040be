"""The forward kernel's own source, run on the CPU: barriers, tiles, masks, packed sequences; no deadlock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_kernel_source_computes_attention():
    """In a process of its own, where a module stands in for Gluon."""
    script = Path(__file__).with_name("emulated_forward.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert len(run.stdout.splitlines()) >= 20
