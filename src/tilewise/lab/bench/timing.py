"""Stopwatches, of calls and of CUDA graphs, and ceilings."""

from __future__ import annotations

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.peer import Data, Peer

Call = Callable[[], Any]


class Ceiling(NamedTuple):
    """A call that does `amount` of `unit` ("flops" or "bytes") and nothing that attention has besides."""

    name: str
    what: str
    unit: str
    amount: int
    call: Call


class Stopwatch(ABC):
    """Times calls on one kind of device. All times are seconds."""

    method: str  # said in the result file
    target: float  # seconds of measuring a peer and round should take
    most: int  # samples a peer and round at most

    @abstractmethod
    def sample(self, call: Call, count: int, inner: int = 1) -> list[float]:
        """`count` timings of one call; each the mean of `inner` calls in a row where that is needed."""

    @abstractmethod
    def plan(self, seconds: float, quick: bool) -> tuple[int, int]:
        """(count, inner) for a call that takes about `seconds`."""

    @abstractmethod
    def ceilings(self) -> list[Ceiling]:
        """A matrix product and a large read: what this device reaches at best."""

    def warm_up(self, call: Call) -> float:
        """Of a call made before: call until caches, allocators and clocks have settled; its time then."""
        seconds = self.sample(call, 1)[0]
        if seconds < 0.1:
            self.sample(call, min(20, math.ceil(0.02 / max(seconds, 1e-6))))
            seconds = min(self.sample(call, 3))
        return seconds


class CpuStopwatch(Stopwatch):
    method = (
        "time.perf_counter_ns; calls shorter than 0.2 ms are timed several in a row; inputs stay in the "
        "CPU's caches where they fit"
    )
    target, most = 0.03, 50

    def sample(self, call: Call, count: int, inner: int = 1) -> list[float]:
        times = []
        for _ in range(count):
            start = self.now()
            for _ in range(inner):
                call()
            times.append((self.now() - start) / inner * 1e-9)
        return times

    def now(self) -> int:
        return time.perf_counter_ns()

    def plan(self, seconds: float, quick: bool) -> tuple[int, int]:
        inner = max(1, math.ceil(2e-4 / seconds))
        count = round(self.target * (0.4 if quick else 1.0) / (seconds * inner))
        return min(self.most, max(1, count)), inner

    def ceilings(self) -> list[Ceiling]:
        a, b = torch.randn(1536, 1536), torch.randn(1536, 1536)
        a_half, b_half = a.bfloat16(), b.bfloat16()
        block = torch.randn(64 << 20)
        flops = 2 * 1536**3
        found = [
            Ceiling("matmul", "float32 matmul 1536³", "flops", flops, lambda: a @ b),
            Ceiling("matmul-bfloat16", "bfloat16 matmul 1536³", "flops", flops, lambda: a_half @ b_half),
            Ceiling("read", "sum of 256 MiB of float32", "bytes", block.nbytes, lambda: block.sum()),
        ]
        small, small_half = a[:256, :256], a_half[:256, :256]
        times = [min(self.sample(functools.partial(torch.mm, x, x), 3)) for x in (small, small_half)]
        # Without instructions for it PyTorch takes 100 times as long, which is no ceiling.
        return [c for c in found if c.name != "matmul-bfloat16" or times[1] < 10 * times[0]]


class ThreadStopwatch(CpuStopwatch):
    """Counts what one thread computes: on a machine that others use too, only ratios of it mean something."""

    method = "time.thread_time_ns of one thread: what others do on the machine counts little"

    def sample(self, call: Call, count: int, inner: int = 1) -> list[float]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return super().sample(call, count, inner)
        finally:
            torch.set_num_threads(before)

    def now(self) -> int:
        return time.thread_time_ns()


class CudaStopwatch(Stopwatch):
    method = (
        "CUDA events around each call; before each, 512 MiB or four times the L2 cache are written, so that "
        "inputs come from memory and launch overhead hides behind the writing; of several calls in a row one "
        "that is not timed comes first, as the host needs longer for it"
    )
    target, most = 0.02, 50

    def __init__(self) -> None:
        cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)
        self.flush = torch.empty(max(512 << 20, 4 * cache), dtype=torch.int8, device="cuda")

    def sample(self, call: Call, count: int, inner: int = 1) -> list[float]:
        if count > 1:  # the host has been at something else: a first backward took up to 0.8 ms more
            self.flush.zero_()
            call()
        return self.events(call, count, self.flush.zero_)

    def events(self, call: Call, count: int, before: Call = lambda: None) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in pairs:
            before()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]

    def plan(self, seconds: float, quick: bool) -> tuple[int, int]:
        count = round(self.target * (0.4 if quick else 1.0) / seconds)
        return min(self.most, max(2 if seconds < 0.05 else 1, count)), 1

    def ceilings(self) -> list[Ceiling]:
        a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        block = torch.randn(1 << 29, device="cuda")
        return [
            Ceiling("matmul", "bfloat16 matmul 8192³", "flops", 2 * 8192**3, lambda: a @ b),
            Ceiling("read", "sum of 2 GiB of float32", "bytes", block.nbytes, lambda: block.sum()),
        ]


def stopwatch(device: str) -> Stopwatch:
    return CudaStopwatch() if device == "cuda" else CpuStopwatch()


MIN_CALLS = 12  # in a graph: what is around them counts little


class GraphStopwatch(CudaStopwatch):
    """Times replays of a graph; of calls that stand alone, such as those that choose a layout, as usual."""

    method = (
        f"CUDA events around each replay of a graph of {MIN_CALLS} calls or more that take turns with copies "
        "of the inputs, together four times the L2 cache, so that they come from memory; a call's share"
    )

    def sample(self, call: Call, count: int, inner: int = 1) -> list[float]:
        if inner == 1:
            return super().sample(call, count)
        return [seconds / inner for seconds in self.events(call, count)]

    def copies(self, case: Case) -> int:
        """How many inputs of a decoding case are four times the L2 cache."""
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        return max(1, math.ceil(4 * cache / case.cache_bytes()))


def captured(case: Case, peer: Peer, copies: Sequence[Data], layout: str) -> tuple[Callable[[], Any], int]:
    """The replay of a graph of the peer's calls, and how many they are."""
    prepared = [peer.prepare(case, data, layout) for data in copies]
    calls = [p.call for p in prepared] * math.ceil(MIN_CALLS / len(prepared))
    with prepared[0].context():
        for p in prepared:
            p.call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()

    def replay() -> Any:
        graph.replay()
        return prepared  # the graph keeps none of the tensors that it reads

    replay()
    return replay, len(calls)
