"""Running a suite: gate, then interleaved rounds, then a record of everything."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tilewise.lab.bench import gate, memory, results, torch_peers
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.errors import BenchError, Refusal, setup_limit
from tilewise.lab.bench.peer import Data, Peer, Prepared
from tilewise.lab.bench.peers import find_peers
from tilewise.lab.bench.suites import find_suite
from tilewise.lab.bench.timing import GraphStopwatch, Stopwatch, ThreadStopwatch, captured, stopwatch

MIN_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run.

    `budget` is seconds: no case is started after it. `setup_limit` is seconds too: a peer that takes longer
    to compile and warm up is skipped for that case. None is no limit. `graph` times calls in CUDA graphs,
    `thread_time` on a CPU what one thread computes.
    """

    suite: str
    filter: str | None = None
    peers: tuple[str, ...] = ()
    quick: bool = False
    rounds: int = MIN_ROUNDS
    seed: int | None = None
    json: Path | None = None
    budget: float | None = None
    setup_limit: float | None = None
    graph: bool = False
    thread_time: bool = False


@dataclasses.dataclass
class Plan:
    """A run with everything that can be refused already checked."""

    settings: Settings
    device: str
    cases: list[Case]
    peers: list[Peer]
    unavailable: dict[str, str]
    limits: Mapping[str, str]  # peers that run only on cases that a regular expression finds


def find_cases(settings: Settings) -> tuple[str, list[Case]]:
    """Check the settings; the type of device, and the cases.

    Raises:
        BenchError: unknown suite, no GPU for a GPU suite, no case left, or nowhere to write to.
    """
    suite = find_suite(settings.suite)
    device = suite.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchError(f"suite {settings.suite!r} needs a CUDA GPU, PyTorch sees none; try --suite cpu")
    cases = list(suite.build(settings.quick, device))
    if settings.filter is not None:
        try:
            cases = [case for case in cases if re.search(settings.filter, case.name)]
        except re.error as error:
            raise BenchError(f"--filter {settings.filter!r} is not a regular expression: {error}") from error
        if not cases:
            raise BenchError(f"--filter {settings.filter!r} leaves no case of suite {settings.suite!r}")
    if settings.graph and any(case.kind != "decode" for case in cases):
        raise BenchError(f"--graph is for decoding, not for suite {settings.suite!r}")
    if settings.graph and device != "cuda":
        raise BenchError("--graph needs a CUDA GPU")
    if settings.thread_time and (device != "cpu" or settings.suite in ("memory", "distributed")):
        raise BenchError("--thread-time is for suites that time one CPU")
    if settings.rounds < 1:
        raise BenchError(f"--rounds {settings.rounds} must be at least 1")
    if settings.json is not None:
        results.check_writable(settings.json)
    return device, cases


def plan(settings: Settings) -> Plan:
    """Check the settings and choose cases and peers."""
    suite = find_suite(settings.suite)
    peers = find_peers(settings.peers or suite.peers or ("all",))
    device, cases = find_cases(settings)
    unavailable = {peer.name: reason for peer in peers if (reason := peer.unavailable(device)) is not None}
    available = [peer for peer in peers if peer.name not in unavailable]
    limits = {} if settings.peers else suite.limits
    return Plan(settings, device, cases, available, unavailable, limits)


Report = Callable[[int, dict[str, Any]], None]  # (cases done, the record of the last one)


def run(plan: Plan, report: Report | None = None) -> results.Results:
    """Run every case; after each, write the file (if any) and call `report`."""
    with warnings.catch_warnings():  # PyTorch's on refused calls: their reasons are in the results
        warnings.filterwarnings("ignore", module=re.escape(torch_peers.__name__))
        gc.collect()
        gc.freeze()  # what is loaded by now need not be walked again before every case
        try:
            return _run(plan, report)
        finally:
            gc.unfreeze()


def _run(plan: Plan, report: Report | None) -> results.Results:
    settings = seeded(plan.settings)
    clock = GraphStopwatch() if settings.graph else stopwatch(plan.device)
    clock = ThreadStopwatch() if settings.thread_time else clock
    ceilings = [] if settings.suite == "memory" else clock.ceilings()
    for ceiling in ceilings:
        clock.warm_up(ceiling.call)
    reached: dict[str, Any] = {c.name: {"what": c.what, c.unit: c.amount, "samples": []} for c in ceilings}

    def measure(case: Case) -> dict[str, Any]:
        for ceiling in ceilings:  # once a case: clocks drift, and other programs come and go
            samples = reached[ceiling.name]["samples"]
            samples += clock.sample(ceiling.call, 1 if samples else 3)
        return run_case(case, plan.peers, plan.device, clock, settings, plan.limits)

    method = memory.method(plan.device) if settings.suite == "memory" else clock.method
    said = {"method": method, "ceilings": reached, "unavailable": plan.unavailable}
    return run_cases(settings, plan.cases, results.environment(plan.device) | said, measure, report)


def seeded(settings: Settings) -> Settings:
    if settings.seed is not None:
        return settings
    return dataclasses.replace(settings, seed=random.SystemRandom().randrange(2**31))


def run_cases(
    settings: Settings,
    cases: Sequence[Case],
    said: dict[str, Any],
    measure: Callable[[Case], dict[str, Any]],
    report: Report | None,
    is_late: Callable[[bool], bool] = bool,
) -> results.Results:
    """Measure cases until the time is up; after each, write the file (if any) and call `report`.

    `said` goes into the file: what was measured where and how. `is_late` may ask other processes too.
    """
    names = ("suite", "quick", "graph", "thread_time", "rounds", "seed")
    found: results.Results = {"schema_version": results.SCHEMA_VERSION, "kind": results.KIND}
    found |= {name: getattr(settings, name) for name in names} | {"complete": False}
    found |= said | {"cases": [], "not_run": []}
    started = time.monotonic()
    for number, case in enumerate(cases, 1):
        if is_late(settings.budget is not None and time.monotonic() - started > settings.budget):
            found["not_run"].append(case.name)
            continue
        found["cases"].append(measure(case))
        if settings.json is not None:
            results.save(found, settings.json)
        if report is not None:
            report(number, found["cases"][-1])
    found |= {"complete": not found["not_run"], "seconds": round(time.monotonic() - started, 1)}
    if settings.json is not None:
        results.save(found, settings.json)
    return found


def run_case(
    case: Case,
    peers: Sequence[Peer],
    device: str,
    clock: Stopwatch,
    settings: Settings,
    limits: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The record of one case: what every peer did, or why it did not."""
    record: dict[str, Any] = {"name": case.name, "case": case.to_json()}
    record |= {"bytes": case.cache_bytes()} if case.kind == "decode" else {"flops": case.flops()}
    entries: dict[str, results.Entry] = {}
    seed = settings.seed or 0
    data = Data(case, device, seed)
    more = clock.copies(case) - 1 if isinstance(clock, GraphStopwatch) else 0
    copies = [data, *(Data(case, device, seed + n + 1) for n in range(more))]
    ready: dict[str, tuple[Prepared, int, int]] = {}
    if case.kind == "memory":
        for peer in peers:
            entries[peer.name] = attempt(partial(_measure_memory, case, peer, data))
    else:
        for peer in peers:
            if re.search(limits.get(peer.name, ""), case.name):
                work = partial(_prepare, case, peer, copies, clock, settings, ready)
                entries[peer.name] = attempt(work)
            else:
                reason = f"takes long here: some cases only; --peers {peer.name} for all"
                entries[peer.name] = {"status": "refused", "reason": reason}
        _measure_rounds(ready, entries, clock, settings.rounds)
    record["peers"] = entries
    del data, copies, ready
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return record


def attempt(work: Callable[[], results.Entry]) -> results.Entry:
    """An entry, whatever happens: refusals and failures are results too."""
    try:
        return work()
    except (Refusal, NotImplementedError) as refusal:
        return {"status": "refused", "reason": _one_line(refusal)}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"status": "refused", "reason": "out of memory"}
    except Exception as error:  # whatever a foreign kernel raises must not end the run
        return {"status": "failed", "reason": f"{type(error).__name__}: {_one_line(error)}"}


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _measure_memory(case: Case, peer: Peer, data: Data) -> results.Entry:
    return {"status": "ok", "samples": [[memory.measure(case, peer.name, data)]]}


def _prepare(
    case: Case,
    peer: Peer,
    copies: Sequence[Data],
    clock: Stopwatch,
    settings: Settings,
    ready: dict[str, tuple[Prepared, int, int]],
) -> results.Entry:
    """Set up, pick the better layout, warm up, check. Only what passes is put into `ready`."""
    data = copies[0]
    with setup_limit(settings.setup_limit):
        layout, prepared, found, seconds = _best_layout(case, peer, data, clock)
    verdict = gate.check(case, data, found, peer.limit)
    entry: results.Entry = {"layout": layout, "error": verdict.error, "limit": verdict.limit}
    if prepared.detail is not None:
        entry["detail"] = prepared.detail
    if verdict.fault is not None:
        return {"status": "wrong", "reason": verdict.fault, **entry}
    count, inner = clock.plan(seconds, settings.quick)
    if settings.graph:
        replay, inner = captured(case, peer, copies, layout)
        prepared, count = dataclasses.replace(prepared, call=replay), max(5, count // inner)
    ready[peer.name] = (prepared, count, inner)
    return {"status": "ok", **entry, "inner": inner, "samples": []}


def _best_layout(
    case: Case, peer: Peer, data: Data, clock: Stopwatch
) -> tuple[str, Prepared, dict[str, torch.Tensor], float]:
    """The layout with the fastest call, its results (of the call that also warmed it up), and that time."""
    candidates: list[tuple[str, Prepared, dict[str, torch.Tensor], float]] = []
    refusal: Exception | None = None
    for layout in peer.layouts(case):
        try:
            prepared = peer.prepare(case, data, layout)
            with prepared.context():
                found = prepared.results()
                seconds = clock.warm_up(prepared.call)
            candidates.append((layout, prepared, found, seconds))
        except Exception as error:
            if len(peer.layouts(case)) == 1:
                raise
            refusal = refusal or error
    if not candidates:
        assert refusal is not None
        raise refusal
    return min(candidates, key=lambda candidate: candidate[-1])


def _measure_rounds(
    ready: dict[str, tuple[Prepared, int, int]],
    entries: dict[str, results.Entry],
    clock: Stopwatch,
    rounds: int,
) -> None:
    with no_garbage_collection():
        for number in range(rounds):
            for name in in_turn(list(ready), number):
                found = attempt(partial(_sample, *ready[name], clock))
                if found["status"] == "ok":
                    entries[name]["samples"] += found["samples"]
                else:
                    entries[name] = found
                    del ready[name]


def in_turn(names: list[str], number: int) -> list[str]:
    """Peers take turns, another one first each round and every other round backwards."""
    shift = number % max(1, len(names))
    return (names[shift:] + names[:shift])[:: -1 if number % 2 else 1]


def _sample(prepared: Prepared, count: int, inner: int, clock: Stopwatch) -> results.Entry:
    with prepared.context():
        samples = clock.sample(prepared.call, count, inner)
    return {"status": "ok", "samples": [[float(f"{s:.6g}") for s in samples]]}


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def is_sound(found: results.Results) -> bool:
    """Whether tilewise was right on every case that it did not refuse."""
    return not any(
        entry["status"] in ("wrong", "failed")
        for record in found["cases"]
        for name, entry in record["peers"].items()
        if name.split(":")[0] == "tilewise"
    )


def describe_record(record: dict[str, Any], said: set[str]) -> str:
    """A line for a person who waits, and one for each refusal that was not `said` before."""
    from tilewise.lab.bench.report import cell

    parts, notes = [], []
    for name, entry in record["peers"].items():
        is_refused = entry["status"] == "refused"
        parts.append(f"{name} refused" if is_refused else f"{name} {cell(record, entry)}")
        if is_refused:
            notes.append(f"  {name} refused: {entry['reason']}")
    new = [note for note in notes if note not in said]
    said.update(new)
    return "\n".join([f"{record['name']}: " + ", ".join(parts), *new])
