"""Result files: what is read from samples, and what is refused."""

from __future__ import annotations

import itertools
import json

import pytest

from tilewise.lab.bench import results
from tilewise.lab.bench.cases import dense
from tilewise.lab.bench.errors import BenchError

CASE = dense("forward", "float32", 16, 1, 1, 32)


def entry(*rounds):
    return {"status": "ok", "samples": [list(samples) for samples in rounds]}


def test_median_and_spread_are_of_the_rounds():
    found = entry((1.0, 9.0, 2.0), (4.0,), (3.0, 3.0))
    assert results.round_medians(found) == [2.0, 4.0, 3.0]
    assert results.median(found) == 3.0
    assert results.spread(found) == pytest.approx(2 / 3)


def test_ratio_is_taken_within_rounds_so_that_drift_cancels():
    ours, other = entry((1.0,), (2.0,), (8.0,)), entry((1.5,), (3.0,), (12.0,))
    assert results.ratio(other, ours) == 1.5
    assert results.ratio(ours, other) == pytest.approx(1 / 1.5)


def test_ceilings(results_of):
    found = results_of((CASE, {"tilewise": [1.0]}))
    assert results.ceiling(found, "flops") == 100e9
    assert results.ceiling(found, "bytes") == 20e9
    assert results.ceiling({**found, "ceilings": {}}, "flops") is None
    found["ceilings"]["matmul-bfloat16"] = {"what": "a half matmul", "flops": 300e9, "samples": [1.0]}
    assert results.ceiling(found, "flops", "bfloat16") == 300e9
    assert results.ceiling(found, "flops", "float16") == 100e9


def test_files_come_back_as_they_were(results_of, tmp_path):
    found = results_of((CASE, {"tilewise": [1.0], "flex": "too old"}))
    results.save(found, tmp_path / "run.json")
    assert results.load(tmp_path / "run.json") == json.loads(json.dumps(found))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "is not JSON"),
        ("[1]", "is not a result file"),
        (json.dumps({"schema_version": 1}), "is not a result file"),
        (json.dumps({"kind": "tilewise-bench", "schema_version": 2}), "schema_version=2 must be 1"),
        (json.dumps({"kind": "tilewise-bench"}), "schema_version=None must be 1"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BenchError, match=message) as error:
        results.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_digests_change_with_their_sources(monkeypatch, tmp_path):
    for folder in ("lab/bench", "core", "cpu", "gpu"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(results, "__file__", str(tmp_path / "lab" / "bench" / "results.py"))

    def digests():
        return results._digest("."), results.kernels_digest("cpu"), results.kernels_digest("cuda")

    found = [digests()]
    for path in ("lab/bench/a.py", "core/a.py", "cpu/a.py", "gpu/a.py"):
        (tmp_path / path).write_text("a = 1\n")
        found.append(digests())
    changed = [tuple(a != b for a, b in zip(*pair)) for pair in itertools.pairwise(found)]
    assert changed == [(True, False, False), (True, True, True), (True, True, False), (True, False, True)]
