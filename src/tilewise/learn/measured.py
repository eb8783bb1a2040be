"""Predicted against measured: the bound of every benchmark case beside what was achieved, in one plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewise.bench import results
from tilewise.bench.errors import BenchError
from tilewise.bench.plot import colours
from tilewise.bench.report import seconds
from tilewise.bench.results import Results
from tilewise.device import Device
from tilewise.learn.machines import MACHINES, Machine
from tilewise.learn.roofline import Prediction, least

MARKERS = {"matrix products": "o", "special functions": "^", "HBM": "s", "memory": "s"}


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


def plot(made: Sequence[Point], path: Path) -> None:
    """Measured over predicted time, both logarithmic; a file of the kind that the suffix says.

    Raises:
        BenchError: there are no points, or the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not made:
        raise BenchError("no measured case to plot")
    figure, axes = plt.subplots(figsize=(7.5, 6.5))
    palette = colours(list(dict.fromkeys(p.peer for p in made)))
    for peer, colour in palette.items():
        for bound, marker in MARKERS.items():
            group = [p for p in made if p.peer == peer and p.prediction.bound == bound]
            if group:
                xs, ys = [p.prediction.seconds * 1e3 for p in group], [p.seconds * 1e3 for p in group]
                axes.scatter(xs, ys, color=colour, marker=marker, s=26, alpha=0.75, linewidths=0)
        axes.scatter([], [], color=colour, marker="o", label=peer)
    for bound in dict.fromkeys(p.prediction.bound for p in made):
        axes.scatter([], [], color="#777777", marker=MARKERS[bound], label=f"bound by {bound}")
    span = [min(p.prediction.seconds for p in made) * 700, max(p.prediction.seconds for p in made) * 1400]
    for share, style in ((1.0, "-"), (0.5, "--"), (0.1, ":")):
        label = "the bound" if share == 1 else f"{share:.0%} of it"
        axes.plot(span, [x / share for x in span], style, color="#777777", linewidth=1, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("predicted at least (ms)")
    axes.set_ylabel("measured (ms)")
    axes.set_title(f"Predicted against measured\n{', '.join(dict.fromkeys(p.device for p in made))}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise BenchError(f"--plot {path}: {error}") from error
    finally:
        plt.close(figure)


def _time(value: float) -> str:
    return f"{value * 1e3:.3g} ms"
