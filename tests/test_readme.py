"""README's code runs and its commands work; the wheel holds what an install needs."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [
    line.split("#")[0].split()
    for language, code in BLOCKS
    if language == "sh"
    for line in code.splitlines()
    if line.startswith("tilewise ")
]


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command(command, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tilewise.cli", *command[1:]], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)", "\n".join(code for _, code in BLOCKS), re.MULTILINE)
    assert targets and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_wheel(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("tilewise-*-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "tilewise/py.typed" in names and "tilewise/tiled/backend.py" in names
    assert "tilewise/lab/learn/page/page.html" in names and "tilewise/lab/learn/page/main.js" in names
    assert not any(name.startswith(("tests", "benchmarks")) for name in names)
