"""A run gates, interleaves, records everything, and survives whatever a peer does."""

from __future__ import annotations

import dataclasses
import gc
import json
import time

import pytest
import torch

from tilewise.lab.bench import run as runner
from tilewise.lab.bench.cases import dense
from tilewise.lab.bench.errors import BenchError, Refusal
from tilewise.lab.bench.peer import Peer, Prepared
from tilewise.lab.bench.run import Settings
from tilewise.lab.bench.suites import SUITES, Suite
from tilewise.lab.bench.timing import CpuStopwatch

CASE = dense("forward", "float32", 16, 1, 1, 32)


@pytest.fixture(autouse=True)
def little_garbage():
    """What other tests have loaded is not walked at each of a measurement's collections."""
    gc.freeze()
    yield
    gc.unfreeze()


class Scripted(Peer):
    """Computes what `attend` says, and logs its calls."""

    def __init__(self, name, attend=None, log=None):
        self.name, self.attend, self.log = name, attend, [] if log is None else log

    def prepare(self, case, data, layout):
        q, k, v = (t.transpose(1, 2) for t in (data.query, data.key, data.value))

        def call():
            self.log.append(self.name)
            if self.attend is not None:
                return self.attend(q, k, v)
            return torch.softmax(q @ k.mT * case.head_dim**-0.5, -1) @ v

        return Prepared(call, lambda: {"out": call().transpose(1, 2)})


class OneCall(CpuStopwatch):
    """One sample a peer and round, so that logs are short."""

    def plan(self, seconds, quick):
        return 1, 1

    def warm_up(self, call):
        call()
        return 0.001

    def ceilings(self):
        return []


def run_case(*peers, rounds=6):
    return runner.run_case(CASE, peers, "cpu", OneCall(), Settings("cpu", rounds=rounds))


def test_a_wrong_peer_reports_no_speed():
    record = run_case(Scripted("tilewise", lambda q, k, v: v * 1.001 + q), Scripted("right"))
    wrong, right = record["peers"]["tilewise"], record["peers"]["right"]
    assert wrong["status"] == "wrong" and "off by" in wrong["reason"] and "samples" not in wrong
    assert right["status"] == "ok" and len(right["samples"]) == 6
    assert 0 <= right["error"] <= right["limit"]
    assert not runner.is_sound({"cases": [record]})


def test_refusals_and_failures_are_recorded_with_their_reasons():
    def refuse(*_):
        raise Refusal("no such kernel")

    def unserved(*_):
        raise NotImplementedError("backend='x' has no window; 'tiled' would serve\nmore")

    def crash(*_):
        raise RuntimeError("first line\nsecond line")

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB")

    scripts = {"a": refuse, "tilewise": unserved, "c": crash, "d": out_of_memory, "e": None}
    record = run_case(*(Scripted(name, script) for name, script in scripts.items()))
    told = {name: (e["status"], e.get("reason")) for name, e in record["peers"].items()}
    assert told == {
        "a": ("refused", "no such kernel"),
        "tilewise": ("refused", "backend='x' has no window; 'tiled' would serve"),
        "c": ("failed", "RuntimeError: first line"),
        "d": ("refused", "out of memory"),
        "e": ("ok", None),
    }
    assert runner.is_sound({"cases": [record]})  # refusing is no error; another peer's failure is not ours


def test_a_peer_that_fails_while_it_is_timed_ends_only_itself():
    calls = []

    def third_time_unlucky(q, k, v):
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("lost")
        return torch.softmax(q @ k.mT * 0.25, -1) @ v

    record = run_case(Scripted("tilewise", third_time_unlucky), Scripted("steady"))
    assert record["peers"]["tilewise"] == {"status": "failed", "reason": "RuntimeError: lost"}
    assert len(record["peers"]["steady"]["samples"]) == 6
    assert not runner.is_sound({"cases": [record]})


def test_peers_take_turns_and_not_always_in_the_same_order():
    log: list[str] = []
    run_case(*(Scripted(name, log=log) for name in "abc"), rounds=6)
    rounds = ["".join(log[i : i + 3]) for i in range(len(log) - 18, len(log), 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert {turn[0] for turn in rounds} == {"a", "b", "c"} and {turn[-1] for turn in rounds} == {
        "a",
        "b",
        "c",
    }


def test_the_faster_layout_is_timed():
    class TwoLayouts(Scripted):
        def layouts(self, case):
            return ("slow", "fast")

        def prepare(self, case, data, layout):
            prepared = super().prepare(case, data, layout)
            if layout == "fast":
                return prepared
            return dataclasses.replace(prepared, call=lambda: (time.sleep(0.02), prepared.call())[1])

    record = runner.run_case(CASE, [TwoLayouts("x")], "cpu", CpuStopwatch(), Settings("cpu"))
    assert record["peers"]["x"]["layout"] == "fast"


@pytest.fixture
def tiny(monkeypatch):
    """A suite of three cases and cheap ceilings."""
    cases = [dense("forward", "float32", 16, 1, 1, n) for n in (16, 32, 64)]
    monkeypatch.setitem(SUITES, "tiny", Suite(lambda quick, device: iter(cases), "cpu", ("sdpa-flash",)))
    monkeypatch.setitem(SUITES, "gpu", Suite(lambda quick, device: iter(cases), "cuda"))
    monkeypatch.setattr(CpuStopwatch, "target", 0.002)
    return cases


def test_a_run_records_where_and_how(tiny, tmp_path):
    path = tmp_path / "run.json"
    seen = []
    settings = Settings("tiny", json=path, peers=("tilewise", "sdpa-flash", "sdpa-cudnn"), seed=7)
    found = runner.run(
        runner.plan(settings), lambda done, record: seen.append((done, len(read(path)["cases"])))
    )
    assert seen == [(1, 1), (2, 2), (3, 3)]  # written after every case
    assert read(path) == json.loads(json.dumps(found))
    assert found["schema_version"] == 1 and found["complete"] and found["seed"] == 7
    assert found["device"]["type"] == "cpu" and found["device"]["name"]
    assert found["threads"] == torch.get_num_threads()
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["python"]
    assert found["date"].endswith("+00:00") and found["command"].startswith("tilewise")
    assert len(found["source_sha256"]) == 64
    assert found["unavailable"] == {"sdpa-cudnn": "PyTorch has no such CPU kernel"}
    assert all(len(ceiling["samples"]) == 5 for ceiling in found["ceilings"].values())
    assert {"matmul", "read"} <= set(found["ceilings"]) <= {"matmul", "matmul-bfloat16", "read"}
    for record in found["cases"]:
        for entry in record["peers"].values():
            assert entry["status"] == "ok" and len(entry["samples"]) == 5
            assert all(sample > 0 for samples in entry["samples"] for sample in samples)
    assert runner.is_sound(found)


def read(path):
    return json.loads(path.read_text())


def test_filter_and_budget(tiny):
    planned = runner.plan(Settings("tiny", filter="s(16|64)-"))
    assert planned.cases == [tiny[0], tiny[2]]
    found = runner.run(dataclasses.replace(planned, settings=Settings("tiny", budget=-1.0)))
    assert found["cases"] == [] and not found["complete"]
    assert found["not_run"] == [tiny[0].name, tiny[2].name]


def test_a_peer_that_sets_up_for_too_long_sits_the_case_out():
    def compile_stubbornly(*_):
        while True:
            try:
                time.sleep(10.0)
            except Exception:  # as compilers do, which then try something else
                continue

    started = time.monotonic()
    settings = Settings("cpu", setup_limit=0.2)
    peers = [Scripted("flex", compile_stubbornly), Scripted("tilewise")]
    record = runner.run_case(CASE, peers, "cpu", OneCall(), settings)
    assert time.monotonic() - started < 5.0
    slow, right = record["peers"]["flex"], record["peers"]["tilewise"]
    assert slow["status"] == "refused" and "took more than 0.2 s; --setup-limit" in slow["reason"]
    assert right["status"] == "ok"
    time.sleep(0.6)  # no alarm is left over


def test_default_peers_are_the_suites(tiny):
    assert [peer.name for peer in runner.plan(Settings("tiny")).peers] == ["sdpa-flash"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings("nope"), "suite 'nope' is unknown"),
        (Settings("tiny", peers=("fa9",)), "peer 'fa9' is unknown"),
        (Settings("tiny", filter="("), "is not a regular expression"),
        (Settings("tiny", filter="d512"), "leaves no case"),
        (Settings("tiny", rounds=0), "--rounds 0 must be at least 1"),
        pytest.param(
            Settings("gpu"),
            "needs a CUDA GPU, PyTorch sees none",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_settings(tiny, settings, message):
    with pytest.raises(BenchError, match=message):
        runner.plan(settings)


def test_a_file_that_cannot_be_written_is_found_out_before_the_run(tiny, tmp_path):
    with pytest.raises(BenchError, match="folder that exists"):
        runner.plan(Settings("tiny", json=tmp_path / "missing" / "run.json"))
    with pytest.raises(BenchError, match="must be a file"):
        runner.plan(Settings("tiny", json=tmp_path))


@pytest.mark.slow
def test_a_peer_that_is_slow_to_set_up_runs_on_some_cases(monkeypatch, tmp_path):
    cases = [dense("forward", "float32", 16, 1, 1, n) for n in (16, 32)]
    suite = Suite(lambda quick, device: iter(cases), "cpu", ("sdpa-flash", "standard"), {"standard": "s32-"})
    monkeypatch.setitem(SUITES, "limited", suite)
    monkeypatch.setattr(CpuStopwatch, "target", 0.002)
    for peers, expected in (((), "refused"), (("standard",), "ok")):
        found = runner.run(runner.plan(Settings("limited", peers=peers)))
        first, second = (record["peers"]["standard"] for record in found["cases"])
        assert first["status"] == expected and second["status"] == "ok"
        assert peers or "--peers standard" in first["reason"]


def test_a_refusal_is_explained_once():
    def record(name, reason):
        ok = {"status": "ok", "samples": [[1e-3]]}
        case = dense("forward", "float32", 16, 1, 1, 64)
        peers = {"tilewise": ok, "flex": {"status": "refused", "reason": reason}}
        return {"name": name, "case": case.to_json(), "flops": case.flops(), "peers": peers}

    said: set[str] = set()
    first, second, third = (
        runner.describe_record(record(name, reason), said)
        for name, reason in (("a", "compiles for seconds"), ("b", "compiles for seconds"), ("c", "no memory"))
    )
    assert first.splitlines()[1:] == ["  flex refused: compiles for seconds"]
    assert second.startswith("b: tilewise ") and second.endswith("%, flex refused") and "\n" not in second
    assert third.splitlines()[1:] == ["  flex refused: no memory"]
