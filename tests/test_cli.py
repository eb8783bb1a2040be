"""The `tilewise` command as a whole; each command has a test of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
@pytest.mark.sample(1)
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["io"], ["kv-memory"], ["pipeline"]])
def test_output_that_can_not_be_written_is_said_in_one_line(arguments):
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tilewise", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "tilewise: the output cannot be written: No space left on device\n"
