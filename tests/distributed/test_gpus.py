"""Ranks on as many GPUs as there are, over NCCL; skipped where there are fewer than two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORLD = max(w for w in (0, 2, 4, 8) if w <= torch.cuda.device_count())
pytestmark = pytest.mark.skipif(WORLD < 2, reason="needs two GPUs")


@pytest.mark.parametrize("reads", ["1", "0"])
def test_every_method(reads):
    """By reading each other's memory where these GPUs can, and by messages."""
    file = str(Path(__file__).with_name("gpu_ranks.py"))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD}", file],
        env={**os.environ, "TILEWISE_PEER_MEMORY": reads},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "calls are right" in done.stdout
    can_read = all(torch.cuda.can_device_access_peer(0, other) for other in range(1, WORLD))
    expected = "gradients, keys" if reads == "1" and can_read else "none"
    assert f"memory that ranks read: {expected}" in done.stdout, done.stderr[-2000:]
