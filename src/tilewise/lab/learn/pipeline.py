"""The schedule of the Hopper forward kernel on one multiprocessor, as a timeline.

A small simulation of what `hopper.forward` does for one tile of queries: a producer warp fills rings of K
and V tiles by TMA, warpgroups of 64 query rows share the tensor cores and the arithmetic units. Barriers,
order and ring depth are the kernel's; durations are what the datasheet's rates make of a tile, so the
timeline shows what can overlap, and not what was measured.

    producer     waits for a free slot, starts the copy of K[0], K[1], V[0], K[2], V[1], ...
    warpgroup    S = Q K[0]^T, softmax; then for each next tile: starts Q K[j+1]^T and P V[j], waits for
                 the scores, softmax while P V[j] may run, waits for P V[j], frees its slots, rescales

`overlap=False` finishes P V[j] before Q K[j+1]^T is started. `ping_pong=True` adds the barriers of
FlashAttention-3: a warpgroup starts its products only when the one before it has started its own.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from tilewise.core.problem import Inputs, Options, describe
from tilewise.gpu.hopper.common.arguments import WARPGROUP_ROWS
from tilewise.gpu.hopper.forward.launch import forward_config
from tilewise.lab.learn.machines import MACHINES, Machine

VECTOR_OPS = 5  # a score: scale, maximum, subtraction, sum, conversion to 16 bits
VECTOR_LANES = 128  # of one multiprocessor, one operation a clock each


@dataclass(frozen=True)
class Pipeline:
    """What the schedule depends on. `stages` is the depth of the K ring and of the V ring.

    Example:
        >>> with_overlap, without = (Pipeline(128, 128, 2, 2, overlap=x).run() for x in (True, False))
        >>> with_overlap.cycles < without.cycles
        True
    """

    head_dim: int
    block_n: int
    warpgroups: int
    stages: int
    overlap: bool = True
    ping_pong: bool = False
    key_tiles: int = 8
    machine: Machine = MACHINES["H200"]

    def __post_init__(self) -> None:
        for name in ("head_dim", "block_n", "warpgroups", "stages", "key_tiles"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def of_kernel(cls, head_dim: int, key_tiles: int = 8) -> Pipeline:
        """As the kernel is configured for long, not causal sequences of that head_dim."""
        x = torch.empty(1, 1 << 14, 16, head_dim, dtype=torch.bfloat16, device="meta")
        config = forward_config(describe(Inputs(x, x, x), Options()))
        return cls(head_dim, config.BLOCK_N, config.WARPGROUPS, config.STAGES, key_tiles=key_tiles)

    @property
    def variant(self) -> str:
        return f"{'' if self.overlap else 'no '}overlap, {'' if self.ping_pong else 'no '}ping-pong"

    @property
    def product_cycles(self) -> float:
        """Of one warpgroup's Q K^T or P V, with the tensor cores to itself."""
        rate = self._per_cycle(self.machine.device.flops_per_second)
        return 2 * WARPGROUP_ROWS * self.block_n * self.head_dim / rate

    @property
    def softmax_cycles(self) -> float:
        """Exponentials, and the arithmetic around them, of one warpgroup's tile of scores."""
        special = self._per_cycle(self.machine.special_per_second)
        return WARPGROUP_ROWS * self.block_n * (1 / special + VECTOR_OPS / VECTOR_LANES)

    @property
    def rescale_cycles(self) -> float:
        """acc = alpha * acc."""
        return WARPGROUP_ROWS * self.head_dim / VECTOR_LANES

    @property
    def copy_cycles(self) -> float:
        """Of one tile of K or V at this multiprocessor's share of the L2 bandwidth."""
        cache = self.machine.cache
        of_cache = None if cache is None else cache.bytes_per_second
        rate = self._per_cycle(of_cache or self.machine.device.bytes_per_second)
        return self.block_n * self.head_dim * 2 / rate

    def _per_cycle(self, per_second: float) -> float:
        """One multiprocessor's share of a rate."""
        return per_second / self.machine.cores / (self.machine.clock_hz or 1.0)

    @property
    def copy_latency(self) -> float:
        """From the start of a copy to its first byte."""
        return self.machine.memory.latency_cycles or 0

    def run(self) -> Timeline:
        return _Run(self).run()


class Span(NamedTuple):
    """One piece of work, or of waiting: a copy, a product, a softmax. Times are in cycles."""

    lane: str  # "producer" or "warpgroup N"
    kind: str  # copy K, copy V, Q K, P V, softmax, rescale, wait
    tile: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    pipeline: Pipeline
    spans: tuple[Span, ...]

    @property
    def cycles(self) -> float:
        return max(span.end for span in self.spans)

    @property
    def tensor_core_use(self) -> float:
        """Share of the time in which the tensor cores work."""
        return sum(s.end - s.start for s in self.spans if s.kind in ("Q K", "P V")) / self.cycles


def variants(pipeline: Pipeline) -> list[Timeline]:
    """With and without overlap, with and without ping-pong."""
    pairs = itertools.product((False, True), (False, True))
    return [replace(pipeline, overlap=overlap, ping_pong=ping_pong).run() for overlap, ping_pong in pairs]


MARKS = {"copy K": "k", "copy V": "v", "Q K": "Q", "P V": "P", "softmax": "s", "rescale": "r"}
LEGEND = "k, v: copy of a K or V tile; Q: Q K^T; P: P V; s: softmax; r: rescale; each with its tile; .: wait"
COLUMNS_OF_PRODUCT = 4
MAX_BANDS = 4


def drawing(timeline: Timeline, width: int) -> list[str]:
    """The timeline as text, cut into bands of `width` columns: a line for each unit that a role uses."""
    lanes: dict[str, list[Span]] = {"copies of K": [], "copies of V": []}
    for w in range(timeline.pipeline.warpgroups):
        lanes |= {f"warpgroup {w} products": [], f"warpgroup {w} softmax": []}
    for span in timeline.spans:
        lanes[_lane(span)].append(span)
    label = max(map(len, lanes)) + 4
    columns = max(20, width - label)
    scale = max(1.0, timeline.pipeline.product_cycles / COLUMNS_OF_PRODUCT)  # cycles in a column
    total = math.ceil(timeline.cycles / scale)
    rows = {name: _row(spans, scale, total) for name, spans in lanes.items()}
    shown = min(total, MAX_BANDS * columns)
    lines = [f"  {LEGEND}", f"  a column is {scale:.0f} cycles"]
    for start in range(0, shown, columns):
        lines += ["", f"  {'cycles':<{label - 4}}  {start * scale:.0f}"]
        lines += [
            f"  {name:<{label - 4}}  {row[start : start + columns]}".rstrip() for name, row in rows.items()
        ]
    if shown < total:
        lines.append(f"  ... and so on to {timeline.cycles:.0f}: --spans lists everything")
    return lines


def _lane(span: Span) -> str:
    if span.lane == "producer":
        return "copies of V" if span.kind == "copy V" else "copies of K"
    return f"{span.lane} {'products' if span.kind in ('Q K', 'P V') else 'softmax'}"


def _row(spans: Sequence[Span], scale: float, total: int) -> str:
    """One line: each span as its mark, its tile and a rule; waits where nothing else is."""
    row = [" "] * total
    for span in sorted(spans, key=lambda s: s.kind != "wait"):
        start, end = round(span.start / scale), min(total, round(span.end / scale))
        mark = "." if span.kind == "wait" else f"{MARKS[span.kind]}{span.tile}"
        rule = "." if span.kind == "wait" else "-"
        row[start:end] = mark[: end - start].ljust(end - start, rule)
    return "".join(row)


class _Event:
    """Happens once; remembers who waits."""

    def __init__(self) -> None:
        self.has_happened = False
        self.waiting: list[Callable[[], None]] = []


Role = Generator[_Event, None, None]


@dataclass
class _Unit:
    """The tensor cores, the arithmetic units or the copy engine: one job at a time, in order of arrival."""

    free_at: float = 0.0


@dataclass
class _Run:
    pipeline: Pipeline
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        p = self.pipeline
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.tensor_cores, self.arithmetic, self.copies = _Unit(), _Unit(), _Unit()
        tiles, groups = range(p.key_tiles), range(p.warpgroups)
        self.full = {(name, j): _Event() for name in "KV" for j in tiles}
        self.empty = {(name, j, w): _Event() for name in "KV" for j in tiles for w in groups}
        self.turn = {(w, n): _Event() for w in groups for n in range(p.key_tiles + 1)}

    def run(self) -> Timeline:
        self._resume(self._producer())
        for w in range(self.pipeline.warpgroups):
            self._resume(self._warpgroup(w))
        while self.queue:
            self.now, _, act = heapq.heappop(self.queue)
            act()
        return Timeline(self.pipeline, tuple(sorted(self.spans, key=lambda s: (s.start, s.lane))))

    def _resume(self, role: Role) -> None:
        """Run a role until it waits for something that has not happened."""
        for event in role:
            if not event.has_happened:
                event.waiting.append(lambda: self._resume(role))
                return

    def _happen(self, event: _Event) -> None:
        event.has_happened = True
        for resume in event.waiting:
            self.queue_at(self.now, resume)
        event.waiting.clear()

    def queue_at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (time, next(self.order), act))

    def _start(
        self, unit: _Unit, cycles: float, lane: str, kind: str, tile: int, latency: float = 0.0
    ) -> _Event:
        """Hand a job to a unit and go on; the event happens when it is done."""
        start = max(self.now, unit.free_at)
        unit.free_at = start + cycles
        done, end = _Event(), start + cycles + latency
        self.spans.append(Span(lane, kind, tile, start, end))
        self.queue_at(end, lambda: self._happen(done))
        return done

    def _wait(self, event: _Event, lane: str, tile: int) -> Role:
        since = self.now
        yield event
        if self.now > since:
            self.spans.append(Span(lane, "wait", tile, since, self.now))

    def _producer(self) -> Role:
        p = self.pipeline
        order = [("K", 0)]
        for j in range(1, p.key_tiles):
            order += [("K", j), ("V", j - 1)]
        for name, j in [*order, ("V", p.key_tiles - 1)]:
            if j >= p.stages:  # the slot's last tile must have been read by every warpgroup
                for w in range(p.warpgroups):
                    yield from self._wait(self.empty[name, j - p.stages, w], "producer", j)
            arrived = self._start(self.copies, p.copy_cycles, "producer", f"copy {name}", j, p.copy_latency)
            self._when(arrived, self.full[name, j])

    def _when(self, cause: _Event, effect: _Event) -> None:
        cause.waiting.append(lambda: self._happen(effect))

    def _warpgroup(self, w: int) -> Role:
        p, lane = self.pipeline, f"warpgroup {w}"
        for j in range(p.key_tiles):
            yield from self._my_turn(w, j)
            if j and not p.overlap:
                yield from self._finish_tile(w, lane, j - 1)
            scores = yield from self._product(lane, "K", j)
            product = (yield from self._product(lane, "V", j - 1)) if j and p.overlap else None
            self._pass_turn(w, j)
            yield from self._wait(scores, lane, j)
            self._happen(self.empty["K", j, w])
            yield self._start(self.arithmetic, p.softmax_cycles, lane, "softmax", j)
            if product is not None:
                yield from self._wait(product, lane, j - 1)
                self._happen(self.empty["V", j - 1, w])
            if j:
                yield self._start(self.arithmetic, p.rescale_cycles, lane, "rescale", j)
        yield from self._my_turn(w, p.key_tiles)
        yield from self._finish_tile(w, lane, p.key_tiles - 1)
        self._pass_turn(w, p.key_tiles)

    def _product(self, lane: str, name: str, j: int) -> Generator[_Event, None, _Event]:
        """Q K^T or P V, once the tile of K or V has arrived."""
        yield from self._wait(self.full[name, j], lane, j)
        kind = {"K": "Q K", "V": "P V"}[name]
        return self._start(self.tensor_cores, self.pipeline.product_cycles, lane, kind, j)

    def _finish_tile(self, w: int, lane: str, j: int) -> Role:
        product = yield from self._product(lane, "V", j)
        yield from self._wait(product, lane, j)
        self._happen(self.empty["V", j, w])

    def _my_turn(self, w: int, n: int) -> Role:
        """With ping-pong: after warpgroup w - 1 in the same round, or the last one in the round before."""
        if not self.pipeline.ping_pong:
            return
        before = (w - 1, n) if w > 0 else (self.pipeline.warpgroups - 1, n - 1)
        if before[1] >= 0:
            yield from self._wait(self.turn[before], f"warpgroup {w}", n)

    def _pass_turn(self, w: int, n: int) -> None:
        self._happen(self.turn[w, n])
