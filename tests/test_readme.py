"""README's code runs and its commands work; the wheel holds what an install needs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewise.cli import _app

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


def load_script():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "docs" / "readme.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_what_is_made_is_in_step():
    """`make readme` would change nothing; the plot is drawn."""
    script, text = load_script(), (ROOT / "README.md").read_text()
    made = script.sections()
    assert len(made) == 4 and len(made[script.README]) == 2
    for page, parts in made.items():
        assert page.read_text() == script.with_sections(page.read_text(), parts)
    assert "docs/speed.svg" in text and script.PLOT.stat().st_size > 1000
    with pytest.raises(LookupError, match="has no lines"):
        script.with_sections(text, {"no such part": ""})


def test_claims_are_drawn(tmp_path):
    load_script().draw_claims(tmp_path)
    drawn = {name: (tmp_path / f"{name}.svg").read_text() for name in ("lengths", "losses", "roofline")}
    assert "peak extra memory" in drawn["lengths"] and "gpt2-step" in drawn["losses"]
    assert "H200: measured" in drawn["roofline"] and "decoding" in drawn["roofline"]


def test_it_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 140


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(_app(), command[1:])
    assert done.exit_code == 0, done.output
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
