"""Decoding timed in CUDA graphs."""

from __future__ import annotations

import json
import types

import pytest
import torch
from typer.testing import CliRunner

from tilewise.cli import _app
from tilewise.lab.bench import run as runner
from tilewise.lab.bench.cases import decode
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.run import Settings
from tilewise.lab.bench.suites import SUITES, Suite
from tilewise.lab.bench.timing import MIN_CALLS, GraphStopwatch


@pytest.fixture
def clock(monkeypatch):
    class Event:
        made = 0

        def __init__(self, enable_timing):
            Event.made += 1
            self.number = Event.made

        def record(self):
            pass

        def elapsed_time(self, end):
            return 24.0 * (end.number - self.number)  # milliseconds

    properties = types.SimpleNamespace(L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: types.SimpleNamespace(zero_=lambda: None))
    return GraphStopwatch()


def test_a_sample_is_a_call_s_share_of_a_replay(clock):
    calls = []
    assert clock.sample(lambda: calls.append(1), 3, 12) == [0.002] * 3
    assert len(calls) == 3


def test_copies_are_four_times_the_cache(clock):
    small, large = decode("bfloat16", (8, 2), 1, 1024), decode("bfloat16", (8, 2), 8, 16384)
    assert clock.copies(small) * small.cache_bytes() >= 4 << 20
    assert (clock.copies(small) - 1) * small.cache_bytes() < 4 << 20
    assert clock.copies(large) == 1


@pytest.mark.parametrize("suite", ["cpu", "headline"])
def test_only_decoding_on_a_gpu(suite, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BenchError, match="--graph is for decoding"):
        runner.plan(Settings(suite, graph=True))
    cases = Suite(lambda quick, device: iter([decode("float32", (2, 2), 1, 64)]), "cpu")
    monkeypatch.setitem(SUITES, "tiny", cases)
    with pytest.raises(BenchError, match="needs a CUDA GPU"):
        runner.plan(Settings("tiny", graph=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_in_graphs(tmp_path):
    path = tmp_path / "found.json"
    arguments = ["--suite", "decode", "--quick", "--filter", "b1-q1-k8192|page16", "--graph"]
    arguments += ["--peers", "tilewise,sdpa-cudnn", "--json", str(path)]
    done = CliRunner().invoke(_app(), ["bench", "run", *arguments])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["graph"] and "replay" in found["method"] and "in CUDA graphs" in done.output
    for record in found["cases"]:
        entry = record["peers"]["tilewise"]
        assert entry["status"] == "ok" and entry["inner"] >= MIN_CALLS
