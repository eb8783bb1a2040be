"""`tilewise bench --suite distributed`: every peer is right and timed, and the report has efficiencies."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from tilewise.cli import _app
from tilewise.lab.bench import results
from tilewise.lab.bench.report import tables

CASES = str(Path(__file__).parent / "cases.py")


def test_the_suite(pool):
    found = pool.run(4, CASES, "bench_suite")[0]
    assert found["world"] == 4 and found["complete"] and len(found["cases"]) == 3
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


def test_without_torchrun_it_says_how(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    done = CliRunner().invoke(_app(), ["bench", "--suite", "distributed"])
    assert done.exit_code == 2 and "torchrun --nproc-per-node" in done.stderr
