"""`tilewise mask` and the pictures of the guide "Functions"."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewise.cli import _app
from tilewise.lab import mask
from tilewise.lab.mask import as_text, read

DOCS = Path(__file__).parents[1] / "docs"


def run(*words):
    result = CliRunner().invoke(_app(), ["mask", *words])
    return result.exit_code, result.output


def banded(b, h, i, j):
    return ((i - j).abs() <= 9 + b) & ((i * 3 + j) % 5 != h)


@pytest.mark.parametrize(("lengths", "block"), [((60, 45), 8), ((600, 700), 64)], ids=str)
def test_cells_say_what_the_function_says(lengths, block):
    """Element by element, or, where a cell is several, whether one of them is visible."""
    found = mask.cells(banded, lengths, block, 1, 2)
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    visible = banded(1, 2, i, j)
    step = -(-max(lengths) // mask.CELLS)
    names = list(mask.COLOURS)
    shown = (found == names.index("visible")) | (found == names.index("full"))
    padded = torch.nn.functional.pad(visible, (0, -lengths[1] % step, 0, -lengths[0] % step))
    cells = padded.unflatten(1, (-1, step)).unflatten(0, (-1, step)).any(3).any(1)
    assert torch.equal(shown, cells)
    tiles = mask.kinds_of(banded, lengths, block, 1, 2)
    for r, row in enumerate(tiles.tolist()):
        for c, kind in enumerate(row):
            tile = visible[block * r : block * r + block, block * c : block * c + block]
            assert (kind > 0) == bool(tile.any()) and (kind < 2 or bool(tile.all()))


def test_on_the_terminal(tmp_path):
    code, output = run("kv_idx <= q_idx", "--seqlen", "64", "--seqlen-k", "48", "--block", "16")
    assert code == 0 and output.splitlines()[:4] == ["░░", "██░░", "████░░", "██████"]
    assert "64 queries, 48 keys, tiles of 16 x 16: 50.0% full, 25.0% partial, 25.0% empty" in output
    file, drawn = tmp_path / "masks.py", tmp_path / "mask.svg"
    file.write_text(
        "LEFT = 8\ndef near(b, h, q_idx, kv_idx):\n    return (q_idx - kv_idx).abs() <= LEFT * (h + 1)\n"
    )
    code, output = run(f"{file}:near", "--seqlen", "64", "--h", "1", "--plot", str(drawn))
    assert code == 0 and f"drawn: {drawn}" in output and drawn.read_text().startswith("<?xml")
    assert as_text(mask.kinds_of(read(f"{file}:near"), (64, 64), 4, 0, 1)) in output


def test_batch_entry_and_head_are_stand_ins_as_in_attention():
    code, output = run("torch.where(h > 0, q_idx < b, kv_idx < 1)", "--seqlen", "3", "--b", "2", "--h", "1")
    assert code == 0 and output.splitlines()[:3] == ["██████", "██████", ""]


def test_a_function_of_other_arguments(tmp_path):
    file = tmp_path / "scores.py"
    file.write_text("def relative(score, b, h, q_idx, kv_idx):\n    return score\n")
    code, output = run(f"{file}:relative")
    assert code != 0 and "mask_mod=relative must take (b, h, q_idx, kv_idx)" in output
    assert "scores.py:1" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["q_idx kv_idx"], "is no expression, and no FILE.py:NAME"),
        (["q_idx and kv_idx"], "can't be traced: a branch of Python's"),
        (["nothing.py"], "'nothing.py' names no function: FILE.py:NAME"),
        (["nothing.py:f"], "nothing.py: No such file or directory"),
        (["q_idx", "--seqlen", "0"], "seqlen"),
        (["q_idx", "--seqlen-k", "1000000000000"], "Invalid value for '--seqlen-k'"),
        (["q_idx", "--seqlen", "1000000", "--block", "1"], "--block 1 makes more than 4096 tiles a side"),
        (["q_idx", "--plot", "picture"], "Format '' is not supported"),
    ],
)
def test_bad_words(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output = run(*words)
    assert code != 0 and message in output and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [("import nothing", "ModuleNotFoundError: No module named 'nothing'"), ("def f(:", "SyntaxError: ")],
)
def test_a_file_that_does_not_run(text, message, tmp_path):
    file = tmp_path / "masks.py"
    file.write_text(text)
    code, output = run(f"{file}:f")
    assert code != 0 and f"{file} does not run: {message}" in output


def test_every_recipe_has_its_picture():
    """Drawn by the code of the guide, which another test runs."""
    spec = importlib.util.spec_from_file_location("readme", DOCS / "readme.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    names = (*script.MASKS_OF_GUIDE, *script.SCORES_OF_GUIDE)
    text = script.FUNCTIONS.read_text()
    defined = set(re.findall(r"^def (\w+)\((?:score, )?b, h, q_idx, kv_idx\)", text, re.MULTILINE))
    assert defined == set(names) and len(names) == 10
    for name in names:
        file = f"functions/{name.replace('_', '-')}.svg"
        assert f"]({file})" in text and (DOCS / file).stat().st_size > 1000
