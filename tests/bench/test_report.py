"""Tables say what the samples say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewise.lab.bench import results
from tilewise.lab.bench.cases import decode, dense
from tilewise.lab.bench.report import best_peer, recorded_mean, tables

ROOT = Path(__file__).parents[2]
SHORT = dense("forward", "float32", 64, 1, 1, 1000)
LONG = dense("forward", "float32", 64, 1, 1, 2000)
FLOPS = 4 * 1000 * 1000 * 64  # of SHORT


def rows_of(text: str, start: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.fixture
def run(results_of):
    second = FLOPS / 10e9  # 10 GFLOP/s
    return results_of(
        (SHORT, {"tilewise": [second / 4] * 3, "sdpa-flash": [second / 2] * 3, "flex": [second] * 3}),
        (LONG, {"tilewise": [second, 2 * second, second], "sdpa-flash": [second * 4] * 3, "flex": "too old"}),
    )


def test_speeds_ratios_ceilings_and_means(run):
    text = tables(run)
    header = rows_of(text, "case")[0]
    assert header == ["case (GFLOP/s)", "tilewise", "sdpa-flash", "flex", "best peer",
                      "tilewise / best peer", "of ceiling"]  # fmt: skip
    assert rows_of(text, SHORT.name) == [
        [SHORT.name, "40.0 ±0.0%", "20.0 ±0.0%", "10.0 ±0.0%", "sdpa-flash", "2.00×", "40%"]
    ]
    # 40 GFLOP/s at the median; one of three rounds took twice as long
    assert rows_of(text, LONG.name) == [
        [LONG.name, "40.0 ±50%", "10.0 ±0.0%", "– [1]", "sdpa-flash", "4.00×", "40%"]
    ]
    assert rows_of(text, "geometric") == [
        ["geometric mean, tilewise / peer", "–", "2.83×", "4.00×", "", "2.83×", ""]
    ]
    assert "[1] flex: refused (too old)" in text
    assert "Not measured: flash-attn-2: flash-attn needs a GPU." in text
    for said in (
        "Test CPU",
        "2026-11-21",
        "torch 2.13.0",
        "2 threads",
        "0123456789ab",
        "a matmul 100 GFLOP/s",
    ):
        assert said in text


def test_a_run_that_was_cut_short_says_so(run):
    assert "cut short" not in tables(run)
    assert "cut short, not every case was run" in tables({**run, "complete": False})


def test_wrong_results_shout_and_show_no_speed(results_of):
    wrong = {"status": "wrong", "reason": "out is off by 1.0e+00", "error": 1.0, "limit": 1e-2}
    text = tables(results_of((SHORT, {"tilewise": wrong, "sdpa-flash": [1.0]})))
    assert rows_of(text, SHORT.name)[0][1] == "WRONG [1]"
    assert rows_of(text, SHORT.name)[0][-2:] == ["–", "–"]
    assert "[1] tilewise: wrong (out is off by 1.0e+00)" in text


def test_decoding_is_bandwidth(results_of):
    case = decode("float32", (4, 2), 1, 1000)
    text = tables(results_of((case, {"tilewise": [case.cache_bytes() / 5e9], "flex": [1.0]})))
    assert rows_of(text, case.name)[0][1] == "5.00 ±0.0%"
    assert rows_of(text, case.name)[0][-1] == "25%"


def test_without_tilewise_peers_are_compared_with_the_best(results_of):
    text = tables(results_of((SHORT, {"sdpa-flash": [1.0], "flex": [4.0]})))
    assert rows_of(text, "geometric") == [["geometric mean, peer / best", "1.00×", "0.25×", ""]]


def test_tilewise_is_never_its_own_best_peer(results_of):
    found = results_of((SHORT, {"tilewise": [1.0], "tilewise:tiled": [0.5], "flex": [4.0]}))
    assert best_peer(found["cases"][0]) == "flex"


def test_memory_table(results_of):
    case = dense("forward", "float32", 64, 1, 1, 1000, kind="memory")
    text = tables(results_of((case, {"tilewise": [3 * 2**20], "standard": [2**30], "flex": "no"})))
    assert rows_of(text, case.name) == [[case.name, "3.0", "1024.0", "– [1]"]]


@pytest.fixture
def reference(results_of):
    recorded = {"status": "recorded", "ratio_to": "sdpa-cudnn", "ratio": 1.5}
    slower = {"status": "recorded", "ratio_to": "sdpa-cudnn", "ratio": 0.5}
    row = (SHORT, {"sdpa-cudnn": [1.0], "flash-attn-3": recorded, "flex": slower})
    return results_of(row, device={"type": "cuda", "name": "Other GPU"}, recorded="Read off a poster.")


def test_reference_column_is_labelled_as_recorded_elsewhere(results_of, reference):
    found = results_of(
        (SHORT, {"tilewise": [1.0], "sdpa-cudnn": [1.25]}), (LONG, {"tilewise": [1.0], "sdpa-cudnn": [1.0]})
    )
    text = tables(found, reference)
    assert rows_of(text, "case")[0][-2:] == ["tilewise / sdpa-cudnn", "recorded elsewhere / sdpa-cudnn"]
    assert rows_of(text, SHORT.name)[0][-2:] == ["1.25×", "flash-attn-3 1.50, flex 0.50"]
    assert rows_of(text, LONG.name)[0][-2:] == ["1.00×", "–"]
    assert rows_of(text, "geometric")[0][-2:] == ["1.12×", "best peer 1.50"]
    assert "Recorded elsewhere: Other GPU, 2026-11-21. Read off a poster." in text
    assert recorded_mean(reference, found["cases"], "sdpa-cudnn") == pytest.approx(1.5)


def test_a_recorded_file_is_a_table_of_its_own(reference):
    text = tables(reference)
    assert "1.50 × sdpa-cudnn" in text
    assert rows_of(text, SHORT.name)[0][-1] == "flash-attn-3"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results").rglob("*.json")), ids=lambda p: p.name)
def test_every_committed_file_can_be_reported(path):
    found = results.load(path)
    assert found["cases"] and tables(found)
    for record in found["cases"]:
        assert results.case_of(record).name == record["name"]
    assert ("recorded" in found) == (path.parent.name == "recorded")
