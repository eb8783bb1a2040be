"""Predicted against measured: the bound of every benchmark case beside what was achieved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewise.device import Device
from tilewise.lab.bench import results
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.report import seconds
from tilewise.lab.bench.results import Results
from tilewise.lab.learn.machines import MACHINES, Machine
from tilewise.lab.learn.roofline import Prediction, least


@dataclass(frozen=True)
class Point:
    """One peer on one case."""

    case: str
    peer: str
    device: str
    prediction: Prediction
    seconds: float

    @property
    def share(self) -> float:
        """Of the bound that was reached: 1 is as fast as the machine allows."""
        return self.prediction.seconds / self.seconds


def load_points(paths: Iterable[Path]) -> list[Point]:
    """The points of result files of `tilewise bench`; memory cases have no time and are left out.

    Raises:
        BenchError: a file is no result file, or says nothing about its machine's limits.
    """
    found = []
    for path in paths:
        found += points(results.load(path))
    return found


def points(found: Results) -> list[Point]:
    machine, device = _limits(found)
    made = []
    for record in found["cases"]:
        case = results.case_of(record)
        if case.kind == "memory":
            continue
        prediction = least(case, machine, device)
        for peer in record["peers"]:
            taken = seconds(record, peer)
            if taken is not None:
                made.append(Point(record["name"], peer, device.name, prediction, taken))
    return made


def _limits(found: Results) -> tuple[Machine | None, Device]:
    """A known GPU by its name; else what the run's own matmul and read reached."""
    name = found["device"]["name"]
    for known, machine in MACHINES.items():
        if known in name:
            return machine, machine.device
    flops, read = results.ceiling(found, "flops"), results.ceiling(found, "bytes")
    if flops is None or read is None:
        raise BenchError(f"{name}: its limits are unknown: not in the table, and no ceilings in the file")
    return None, Device(name, flops, read, "ceilings of the same run")


def table(made: Sequence[Point]) -> list[list[str]]:
    """Rows of text: case, peer, bound by, predicted, measured, share of the bound."""
    return [
        [p.case, p.peer, p.prediction.bound, _time(p.prediction.seconds), _time(p.seconds), f"{p.share:.0%}"]
        for p in made
    ]


HEADER = ["case", "peer", "bound by", "at least", "measured", "of the bound"]


def _time(value: float) -> str:
    return f"{value * 1e3:.3g} ms"
