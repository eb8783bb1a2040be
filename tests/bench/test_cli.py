"""The commands, and one clear line for each kind of bad input."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from tilewise.lab.bench.cases import dense
from tilewise.lab.bench.cli import app
from tilewise.lab.bench.suites import SUITES, Suite
from tilewise.lab.bench.timing import CpuStopwatch

CASE = dense("forward", "float32", 16, 1, 1, 64, causal=True)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(SUITES, "tiny", Suite(lambda quick, device: iter([CASE]), "cpu"))
    monkeypatch.setattr(CpuStopwatch, "target", 0.002)


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [["run"], []], ids=["bench run", "bench"])
def test_run_prints_a_table_and_writes_every_sample(tiny, tmp_path, command):
    path = tmp_path / "run.json"
    done = call(*command, "--suite", "tiny", "--peers", "tilewise,sdpa-flash", "--json", path)
    assert done.exit_code == 0, done.output
    assert f"| {CASE.name} |" in done.stdout and "tilewise / best peer" in done.stdout
    record = json.loads(path.read_text())["cases"][0]
    assert list(record["peers"]) == ["tilewise", "sdpa-flash"]
    assert f"{CASE.name}: tilewise" in done.stderr


def test_exit_status_1_where_tilewise_is_wrong(tiny, monkeypatch):
    import tilewise

    monkeypatch.setattr(tilewise, "attention", lambda q, k, v, **options: v.clone())
    done = call("run", "--suite", "tiny", "--peers", "tilewise,sdpa-flash")
    assert done.exit_code == 1
    assert "WRONG" in done.stdout


def write(path, found):
    path.write_text(json.dumps(found))
    return path


def test_report_and_compare(tiny, tmp_path, results_of):
    old = write(tmp_path / "old.json", results_of((CASE, {"tilewise": [1.0] * 3, "flex": [2.0] * 3})))
    new = write(tmp_path / "new.json", results_of((CASE, {"tilewise": [1.5] * 3, "flex": [2.0] * 3})))
    done = call("report", old, "--reference", new, "--plots", tmp_path / "plots")
    assert done.exit_code == 0 and "2.00×" in done.stdout and "Recorded elsewhere" in done.stdout
    assert len(list((tmp_path / "plots").glob("*.png"))) == 1
    done = call("compare", old, new)
    assert done.exit_code == 1 and f"slower  {CASE.name} tilewise: 1.500 ×" in done.stdout
    assert call("compare", old, old).exit_code == 0


BAD = {
    "suite": (["run", "--suite", "fast"], "suite 'fast' is unknown, must be one of cpu, headline, gqa"),
    "suite without run": (["--suite", "fast"], "suite 'fast' is unknown"),
    "no suite": (["run"], "--suite is missing, must be one of"),
    "no suite without run": (["--budget", "nan"], "--suite is missing, must be one of"),
    "peer": (
        ["run", "--suite", "cpu", "--peers", "tilewise,fa2"],
        "peer 'fa2' is unknown, must be all, tilewise",
    ),
    "no GPU": (["run", "--suite", "headline"], "suite 'headline' needs a CUDA GPU, PyTorch sees none"),
    "rounds": (["run", "--suite", "cpu", "--rounds", "2"], "--rounds 2 must be at least 5"),
    "no budget": (
        ["run", "--suite", "cpu", "--budget", "0"],
        "--budget 0.0 must be a positive finite number",
    ),
    "budget nan": (["run", "--suite", "cpu", "--budget", "nan"], "--budget nan must be a positive finite"),
    "budget inf": (["run", "--suite", "cpu", "--budget", "inf"], "--budget inf must be a positive finite"),
    "limit inf": (["run", "--suite", "cpu", "--setup-limit", "inf"], "--setup-limit inf must be a finite"),
    "filter": (["run", "--suite", "cpu", "--filter", "["], "is not a regular expression"),
    "filter of nothing": (["run", "--suite", "cpu", "--filter", "d99"], "leaves no case of suite 'cpu'"),
    "json": (["run", "--suite", "cpu", "--json", "/no/such/folder/a.json"], "folder that exists"),
    "missing file": (["report", "nowhere.json"], "nowhere.json: No such file"),
    "missing file to compare": (["compare", "nowhere.json", "other.json"], "nowhere.json: No such file"),
    "missing reference": (["report", "{old}", "--reference", "nowhere.json"], "nowhere.json: No such file"),
    "another schema": (["report", "{other}"], "schema_version=7 must be 1"),
    "another schema to compare": (["compare", "{old}", "{other}"], "schema_version=7 must be 1"),
    "no JSON": (["report", "{text}"], "is not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_status_2(name, tmp_path, results_of):
    if name == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    good = results_of((CASE, {"tilewise": [1.0]}))
    files = {
        "old": write(tmp_path / "old.json", good),
        "other": write(tmp_path / "other.json", {**good, "schema_version": 7}),
        "text": tmp_path / "text",
    }
    files["text"].write_text("just text")
    arguments, message = BAD[name]
    done = call(*(argument.format(**files) for argument in arguments))
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert done.stderr.startswith("tilewise bench: ") and done.stderr.count("\n") == 1
    assert not done.stdout


def test_the_command_has_bench():
    from tilewise.cli import _app

    done = CliRunner().invoke(_app(), ["bench", "run", "--suite", "fast"])
    assert done.exit_code == 2 and "suite 'fast' is unknown" in done.stderr
    assert "--suite" in CliRunner().invoke(_app(), ["bench"]).stdout
