"""A few seconds of `make torture`, always the same ones, and that a failure becomes a script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.torture import minimise
from tests.torture.problems import Problem

ROOT = Path(__file__).parents[2]


def test_some_sequences():
    command = [sys.executable, "-m", "tests.torture", "--seed", "31", "--problems", "10", "--seconds", "60"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "10 sequences" in done.stdout and done.stdout.rstrip().endswith("0 failures")


@pytest.mark.slow
def test_a_failure_becomes_a_small_script():
    def run(problems):
        return ["wrong"] if any(p.causal and p.seqlen_q > 2 for p in problems) else []

    fine, bad = Problem(sinks=True), Problem(seqlen_q=40, causal=True, layout="bhsd", grads=("query",))
    small = minimise.smaller(run, [fine, bad, fine])
    assert len(small) == 1 and small[0].causal and small[0].layout == "bshd" and 2 < small[0].seqlen_q <= 4
    script = minimise.script([Problem()])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
