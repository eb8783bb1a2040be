"""Calls in a CUDA graph: their time where no host is in the way, as a server decodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.inputs import Data
from tilewise.lab.bench.peer import Peer
from tilewise.lab.bench.timing import Call, CudaStopwatch

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
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in pairs:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 / inner for start, end in pairs]

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
