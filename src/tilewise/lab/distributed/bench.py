"""The suite "distributed": one sequence over the ranks that torchrun has started, beside one device.

    torchrun --nproc-per-node 8 -m tilewise bench --suite distributed --json results.json

Without torchrun one device does the work of one rank of 2, 4 and 8: see `one_rank`.

Every rank makes the same tensors from one seed and takes its shard. A sample is the time of the slowest rank,
in calls in a row that all begin together. One device is rank 0 while the others wait; on a CPU it has the
threads of all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import torch
import torch.distributed as dist

from tilewise.distributed.network import measured
from tilewise.distributed.ranks import ranks_of
from tilewise.lab.bench import gate, results
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.peer import Data, Prepared
from tilewise.lab.bench.run import (
    Report,
    Settings,
    attempt,
    in_turn,
    no_garbage_collection,
    run_cases,
    seeded,
)
from tilewise.lab.bench.timing import Stopwatch, stopwatch
from tilewise.lab.distributed.one_rank import one_rank_peers, ranks_of_peer
from tilewise.lab.distributed.peers import ONE, Group, Prepare, peers

ONE_RANK = (
    "of so many ranks the one with most to do, alone on the device, on a GPU in CUDA graphs; what it "
    "receives are copies"
)
LONGEST_GRADIENTS = {"cpu": 4096, "cuda": 32768}  # tokens: of longer cases the gate looks at outputs alone


def join(device: str) -> Group:
    """The ranks of this run: those that torchrun has started, or this process alone."""
    if "RANK" not in os.environ:
        return Group(0, 1, device)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
        dist.init_process_group("gloo")
    return Group(rank, world, device)


def run(settings: Settings, cases: list[Case], group: Group, report: Report | None = None) -> results.Results:
    """Run every case on all ranks. Rank 0 writes the file (if any) and calls `report`."""
    chosen, clock = _chosen(settings.peers, group.world), stopwatch(group.device)
    how = ONE_RANK if group.world == 1 else f"the slowest of {group.world} ranks"
    seed = int(_largest(float(seeded(settings).seed or 0 if group.rank == 0 else 0), group))
    said: dict[str, Any] = {"world": group.world, "ceilings": {}, "unavailable": {}}
    said["gradients"] = "float32"  # on their way; of files that do not say it, in the tensors' dtype
    said["method"] = f"{how}, after a call not timed; on each: {clock.method}"
    if group.world > 1 and cases:  # what `auto` goes by
        said["network"] = measured(ranks_of(), cases[0].torch_dtype, torch.device(group.place))._asdict()
    settings = dataclasses.replace(settings, seed=seed, json=None if group.rank else settings.json)

    def measure(case: Case) -> dict[str, Any]:
        return _run_case(case, chosen, group, clock, settings)

    def is_late(late: bool) -> bool:
        return bool(_largest(float(late), group))

    report = None if group.rank else report
    return run_cases(settings, cases, _environment(group) | said, measure, report, is_late)


def _environment(group: Group) -> dict[str, Any]:
    found = results.environment(group.device)
    if not dist.is_initialized():
        return found
    return found | {"command": f"torchrun --nproc-per-node {group.world} -m {found['command']}"}


def leave() -> None:
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _chosen(names: tuple[str, ...], world: int) -> dict[str, Prepare]:
    known = peers(world) if world > 1 else one_rank_peers() | {ONE: peers(1)[ONE]}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchError(f"peer {unknown[0]!r} is unknown, must be one of {', '.join(known)}")
    return {name: known[name] for name in names or known}


class _Ready:
    """A peer that may be timed, on this rank."""

    def __init__(self, prepared: Prepared | None, threads: int) -> None:
        self.prepared, self.threads, self.count = prepared, threads, 1

    def samples(self, group: Group, clock: Stopwatch, count: int) -> list[float]:
        """Seconds of calls in a row, each of the slowest rank. One that is not timed comes first: a rank may
        have been idle, in the call of one device."""
        if group.world > 1:
            dist.barrier()
        seconds = [0.0] * count
        if self.prepared is not None:
            before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
            with self.prepared.context():
                self.prepared.call()
                seconds = clock.sample(self.prepared.call, count)
            torch.set_num_threads(before)
        return _slowest(seconds, group)


def _run_case(
    case: Case, chosen: dict[str, Prepare], group: Group, clock: Stopwatch, settings: Settings
) -> dict[str, Any]:
    data = Data(case, group.place, settings.seed or 0)
    entries: dict[str, results.Entry] = {}
    ready: dict[str, _Ready] = {}
    for name, prepare in chosen.items():
        found = attempt(functools.partial(_prepare, name, prepare, data, group, clock, ready))
        if _largest(float(found["status"] != "ok"), group):
            ready.pop(name, None)
            if found["status"] == "ok":
                found = {"status": "failed", "reason": "on another rank"}
        entries[name] = found
    with no_garbage_collection():
        for number in range(settings.rounds):
            for name in in_turn(list(ready), number):
                seconds = ready[name].samples(group, clock, ready[name].count)
                entries[name]["samples"].append([float(f"{s:.6g}") for s in seconds])
    del data, ready
    if group.device == "cuda":
        torch.cuda.empty_cache()
    return {"name": case.name, "case": case.to_json(), "flops": case.flops(), "peers": entries}


def _prepare(
    name: str, prepare: Prepare, data: Data, group: Group, clock: Stopwatch, ready: dict[str, _Ready]
) -> results.Entry:
    """Set up, check, warm up. Only what passes is put into `ready`."""
    entry: results.Entry = {"layout": "bshd", "inner": 1}
    if group.world == 1:
        entry["ranks"] = ranks_of_peer(name)
    prepared, error = None, None
    try:
        prepared = prepare(data.case, data, group)
        if prepared is not None:
            entry |= _check(data, group, prepared)
    except Exception as caught:
        error = caught
    if _largest(float(error is not None or "status" in entry), group):  # all ranks stop
        if error is not None:
            raise error
        return {"status": "failed", "reason": "on another rank", **entry}
    peer = _Ready(prepared, torch.get_num_threads() * (group.world if name == ONE else 1))
    (seconds,) = peer.samples(group, clock, 1)
    peer.count, _ = clock.plan(seconds, quick=False)
    ready[name] = peer
    return {"status": "ok", **entry, "samples": []}


def _check(data: Data, group: Group, prepared: Prepared) -> results.Entry:
    """The error that the first rank finds; with a status if it is too large."""
    case = data.case
    with prepared.context():
        found = prepared.results()
    if group.rank:
        return {}
    if case.seqlen_q > LONGEST_GRADIENTS[group.device]:
        case = dataclasses.replace(case, direction="forward")
    verdict = gate.check(case, data, found)
    entry: results.Entry = {"error": verdict.error, "limit": verdict.limit}
    return entry if verdict.fault is None else {"status": "wrong", "reason": verdict.fault, **entry}


def _slowest(values: list[float], group: Group) -> list[float]:
    """Of each value the largest on any rank."""
    if group.world == 1:
        return values
    t = torch.tensor(values, dtype=torch.float64, device=group.device)
    dist.all_reduce(t, dist.ReduceOp.MAX)
    return t.tolist()  # type: ignore[no-any-return]


def _largest(value: float, group: Group) -> float:
    return _slowest([value], group)[0]
