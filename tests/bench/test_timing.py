"""Stopwatches measure what they say."""

from __future__ import annotations

import time
import types

import pytest
import torch

from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.run import Settings, find_cases
from tilewise.lab.bench.timing import CpuStopwatch, CudaStopwatch, ThreadStopwatch


def test_cpu_samples_are_seconds_of_one_call(monkeypatch):
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])

    def call():
        now[0] += 10_000_000

    assert CpuStopwatch().sample(call, 4, inner=3) == [0.01] * 4
    assert now[0] == 12 * 10_000_000


def test_thread_time_is_what_one_thread_computes():
    before, seen, clock = torch.get_num_threads(), [], ThreadStopwatch()

    def call():
        seen.append(torch.get_num_threads())
        time.sleep(0.05)

    assert max(clock.sample(call, 2)) < 0.04
    assert seen == [1, 1] and torch.get_num_threads() == before
    with pytest.raises(BenchError, match="--thread-time is for suites that time one CPU"):
        find_cases(Settings("memory", thread_time=True))


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("seconds", [1e-6, 1e-4, 1e-3, 0.02, 3.0])
def test_cpu_plan_is_long_enough_for_the_clock_and_bounded(seconds, quick):
    count, inner = CpuStopwatch().plan(seconds, quick)
    assert count >= 1 and inner >= 1
    assert inner * seconds >= 1.9e-4
    assert count * inner * seconds <= max(0.06, seconds * 1.01)


def test_cpu_ceilings_are_a_matmul_and_a_read():
    ceilings = {ceiling.name: ceiling for ceiling in CpuStopwatch().ceilings()}
    matmul, read = ceilings["matmul"], ceilings["read"]
    n = matmul.call().shape[0]
    assert matmul.unit == "flops" and matmul.amount == 2 * n**3
    assert read.unit == "bytes" and read.amount >= 2**28 and read.call().shape == ()


def test_warm_up_calls_before_it_measures():
    calls = []

    def slow_at_first():
        calls.append(1)
        time.sleep(0.05 if len(calls) == 1 else 0.001)

    assert CpuStopwatch().warm_up(slow_at_first) < 0.02
    assert len(calls) >= 5


def test_cuda_samples_flush_the_cache_before_each_call_and_time_all_but_the_first(monkeypatch):
    log: list[str] = []

    class Event:
        made = 0

        def __init__(self, enable_timing):
            assert enable_timing
            Event.made += 1
            self.number = Event.made

        def record(self):
            log.append(f"event {self.number}")

        def elapsed_time(self, end):
            assert log[-1] == "synchronize"
            return 2.5 * (end.number - self.number)  # milliseconds

    properties = types.SimpleNamespace(L2_cache_size=1 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    flush = types.SimpleNamespace(zero_=lambda: log.append("flush"))
    sizes = []
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: sizes.append(size) or flush)
    samples = CudaStopwatch().sample(lambda: log.append("call"), 2)
    assert samples == [0.0025, 0.0025]
    assert log == [
        "flush",
        "call",
        "flush",
        "event 1",
        "call",
        "event 2",
        "flush",
        "event 3",
        "call",
        "event 4",
        "synchronize",
    ]
    assert sizes[0] >= 256 << 20
    log.clear()
    CudaStopwatch().sample(lambda: log.append("call"), 1)
    assert log.count("call") == 1
