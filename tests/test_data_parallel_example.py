"""examples/data_parallel.py on two processes: each way of training has the losses of one process."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "examples" / "data_parallel.py"
SIZES = "--batch 4 --seqlen 33 --width 32 --heads 2 --layers 2 --steps 4 --lr 0.01 --compiler aot_eager"


def losses(*command: str) -> list[float]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command, *SIZES.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("losses"))
    return [float(loss) for loss in line.split()[1:]]


@functools.cache
def expected() -> list[float]:
    found = losses(str(PATH), "alone")
    assert len(found) == 4 and found[-1] < found[0] - 0.1  # it learns: wrong gradients would show
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["fsdp2", "accelerate", "lightning"])
def test_two_processes_learn_as_one(way):
    if way != "fsdp2" and importlib.util.find_spec(way) is None:
        pytest.skip(f"the package {way} is not installed")
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PATH), way)
    assert losses(*run) == pytest.approx(expected(), rel=2e-5)
