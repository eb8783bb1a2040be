"""Pictures of what claims measured: time and memory over the length, and losses over the steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tilewise.lab.bench.plot import colours
from tilewise.lab.claims.claim import CLAIMS

LENGTHS = {"attention-short": ("ms", "forward (ms)"), "memory-linear": ("MiB", "peak extra memory (MiB)")}
COLUMNS = 3


def lengths(files: Iterable[dict[str, Any]], path: Path) -> None:
    """Time and memory over the length, all axes logarithmic: a row of two for each device that has them."""
    shown = [f for f in files if all("curves" in f["rows"].get(name, {}) for name in LENGTHS)]
    with _panels(path, len(shown), 2) as axes:
        for found, row in zip(shown, axes):
            for one, (name, (axis, label)) in zip(row, LENGTHS.items()):
                _lines(one, found["rows"][name]["curves"][axis], f"{found['device']['name']}: {label}")
                one.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)


def losses(files: Iterable[dict[str, Any]], path: Path) -> None:
    """Losses of training steps with each attention: of the first device that has a step's."""
    shown: dict[str, tuple[str, Any]] = {}
    for found in files:
        for name, row in found["rows"].items():
            if "loss" in row.get("curves", {}):
                shown.setdefault(name, (found["device"]["name"], row["curves"]["loss"]))
    names = [name for name in CLAIMS if name in shown]
    with _panels(path, -(-len(names) // COLUMNS), COLUMNS) as axes:
        for name, one in zip(names, axes.flat):
            device, curves = shown[name]
            _lines(one, curves, f"{name}: {device}")
            one.set(xlabel="step", ylabel="loss")
        for one in list(axes.flat)[len(names) :]:
            one.set_visible(False)


def _lines(axes: Any, curves: dict[str, dict[str, float]], title: str) -> None:
    """Later curves are thinner, so that those below are seen where both are the same."""
    for n, (name, colour) in enumerate(colours(list(curves)).items()):
        xs = [float(x) for x in curves[name]]
        axes.plot(
            xs,
            list(curves[name].values()),
            marker="o",
            markersize=3,
            linewidth=3 - n,
            color=colour,
            label=name,
        )
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


@contextmanager
def _panels(path: Path, rows: int, columns: int) -> Iterator[Any]:
    """Axes in rows and columns. The figure is saved in the end: the same file from the same numbers."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "tilewise"
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows))
    yield figure.subplots(rows, columns, squeeze=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
