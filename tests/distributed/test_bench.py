"""`tilewise bench --suite distributed`: every peer is right and timed, and the report has efficiencies."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from tilewise.cli import _app
from tilewise.lab.bench import results
from tilewise.lab.bench.cases import dense, packed
from tilewise.lab.bench.report import tables
from tilewise.lab.bench.run import Settings
from tilewise.lab.bench.timing import CpuStopwatch
from tilewise.lab.distributed.bench import run
from tilewise.lab.distributed.one_rank import ranks_of_peer
from tilewise.lab.distributed.peers import Group

CASES = str(Path(__file__).parent / "user_cases.py")


def test_the_suite(pool):
    found = pool.run(4, CASES, "bench_suite")[0]
    assert found["world"] == 4 and found["complete"] and len(found["cases"]) == 2
    for record in found["cases"]:
        assert {name.split(":")[-1] for name in record["peers"]} >= {
            "auto",
            "ring",
            "all_gather",
            "ulysses",
            "2d",
        }
        for name, entry in record["peers"].items():
            if name == "torch-cp":
                assert entry["status"] == "refused"
            else:
                assert entry["status"] == "ok" and len(entry["samples"]) == 2, (record["name"], name, entry)
    text = tables(found)
    row = next(line for line in text.splitlines() if found["cases"][0]["name"] in line)
    one, ring = (found["cases"][0]["peers"][name] for name in ("one-device", "tilewise:ring"))
    assert len(re.findall(r"[0-9.]+ \([0-9.e+]+ ms\)", row)) == 7
    assert f"| {results.ratio(one, ring):.3f} (" in row


def test_a_peer_that_fails_on_one_rank_is_left_by_all(pool):
    first, *others = pool.run(4, CASES, "bench_with_faults")
    assert first == {"tilewise:ring": "wrong", "tilewise:all_gather": "failed", "zigzag-ring": "ok"}
    for found in others:
        assert found == {"tilewise:ring": "failed", "tilewise:all_gather": "failed", "zigzag-ring": "ok"}


def test_one_device_does_the_work_of_one_rank_of_many(monkeypatch):
    """Without torchrun: results of every method are right, so what ranks read of each other is."""
    monkeypatch.setattr(CpuStopwatch, "most", 3)
    cases = [
        dense("forward+backward", "float32", 16, 8, 1, 1040, causal=True),
        packed("forward+backward", "float32", 16, 8, (70, 1, 160, 33), True),
        dense("forward", "float32", 16, 8, 1, 515, window=(100, 0)),
    ]
    found = run(Settings("distributed", rounds=2), cases, Group(0, 1, "cpu"))
    assert found["complete"] and found["world"] == 1 and "copies" in found["method"]
    for record in found["cases"]:
        assert len(record["peers"]) == 12
        for name, entry in record["peers"].items():
            assert entry["status"] == "ok" and entry["ranks"] == ranks_of_peer(name), (name, entry)
    row = next(line for line in tables(found).splitlines() if found["cases"][0]["name"] in line)
    one, ring = (found["cases"][0]["peers"][name] for name in ("one-device", "ring, 1 of 4"))
    assert f"| {results.ratio(one, ring) / 4:.3f} (" in row


def test_the_command_runs_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    options = ["--quick", "--rounds", "5", "--peers", "one-device", "--budget", "1e-9"]
    done = CliRunner().invoke(_app(), ["bench", "--suite", "distributed", *options])
    assert done.exit_code == 0 and "not run" in done.stdout, done.output
