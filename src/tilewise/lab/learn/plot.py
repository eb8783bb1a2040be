"""Drawings: measured over predicted time, and where algorithms sit under a machine's roofline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.plot import colours
from tilewise.lab.learn.counts import Cost
from tilewise.lab.learn.machines import Machine
from tilewise.lab.learn.measured import Point
from tilewise.lab.learn.roofline import attainable, memory_intensity, predict

MARKERS = {"matrix products": "o", "special functions": "^", "HBM": "s", "memory": "s"}
GREY = "#777777"


def measured_over_predicted(points: Sequence[Point], path: Path) -> None:
    """One mark a peer and case, both axes logarithmic; a file of the kind that the suffix says.

    Raises:
        BenchError: there are no points, or the file cannot be written.
    """
    if not points:
        raise BenchError("no measured case to plot")
    title = f"Predicted against measured\n{', '.join(dict.fromkeys(p.device for p in points))}"
    with _axes(path, title, "predicted at least (ms)", "measured (ms)") as axes:
        for peer, colour in colours(list(dict.fromkeys(p.peer for p in points))).items():
            for bound, marker in MARKERS.items():
                group = [p for p in points if p.peer == peer and p.prediction.bound == bound]
                xs, ys = [p.prediction.seconds * 1e3 for p in group], [p.seconds * 1e3 for p in group]
                axes.scatter(xs, ys, color=colour, marker=marker, s=26, alpha=0.75, linewidths=0)
            axes.scatter([], [], color=colour, marker="o", label=peer)
        for bound in dict.fromkeys(p.prediction.bound for p in points):
            axes.scatter([], [], color=GREY, marker=MARKERS[bound], label=f"bound by {bound}")
        times = [p.prediction.seconds * 1e3 for p in points]
        span = [min(times) * 0.7, max(times) * 1.4]
        for share, style in ((1.0, "-"), (0.5, "--"), (0.1, ":")):
            label = "the bound" if share == 1 else f"{share:.0%} of it"
            axes.plot(span, [x / share for x in span], style, color=GREY, linewidth=1, label=label)


def under_the_roof(costs: Sequence[Cost], machine: Machine, path: Path) -> None:
    """FLOP/s over FLOPs a byte: the roof, and each algorithm at the speed that its binding resource allows.

    Raises:
        BenchError: the file cannot be written.
    """
    device = machine.device
    intensities = [memory_intensity(cost, machine) for cost in costs]
    span = [min(*intensities, device.balance) / 3, max(*intensities, device.balance) * 3]
    title = f"{machine.name}: balance {device.balance:.0f} FLOP/byte"
    with _axes(path, title, "FLOPs of products for each byte of main memory", "FLOP/s") as axes:
        corners = [span[0], device.balance, span[1]]
        axes.plot(corners, [attainable(x, device) for x in corners], color=GREY, label="the roof")
        for cost, intensity in zip(costs, intensities):
            prediction = predict(cost, machine)
            speed = cost.matmul_flops / prediction.seconds
            axes.scatter([intensity], [speed], s=60, label=f"{cost.algorithm}: {prediction.bound}")


@contextmanager
def _axes(path: Path, title: str, xlabel: str, ylabel: str) -> Iterator[Any]:
    """Logarithmic axes, saved to `path` when they are drawn."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 6.5))
    axes.set(xscale="log", yscale="log", title=title, xlabel=xlabel, ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    try:
        yield axes
        axes.legend(fontsize=8, frameon=False)
        figure.tight_layout()
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise BenchError(f"--plot {path}: {error}") from error
    finally:
        plt.close(figure)
