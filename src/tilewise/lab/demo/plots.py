"""The plots, as SVG that takes its text colour from the page it is put into."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from tilewise.lab.demo.findings import Findings
from tilewise.lab.demo.generate import Generation
from tilewise.lab.demo.lengths import PASSES, Cell, Table
from tilewise.lab.demo.methods import SDPA, STANDARD, TILEWISE
from tilewise.lab.demo.train import Training

INK, GRID = "#010203", "#040506"  # stand-ins, replaced by the page's own colours
COLOURS = {STANDARD: "#d9822b", SDPA: "#3aa17e", TILEWISE: "#4c86e0"}
WIDTHS = {STANDARD: 2, SDPA: 3.5, TILEWISE: 1.5}  # where two lines coincide, both are seen
MARKERS = {STANDARD: "s", SDPA: "^", TILEWISE: "o"}
STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def draw(findings: Findings) -> dict[str, str]:
    """SVG by the name of the plot, in the order of `Findings.sentences`."""
    table = findings.table
    plots: dict[str, Callable[[Figure], None]] = {
        "loss": lambda figure: draw_loss(figure, findings.training),
        "generation": lambda figure: draw_generation(figure, findings.generation),
        "time": lambda figure: draw_table(figure, table, "seconds", lambda cell: cell.time),
        "memory": lambda figure: draw_table(
            figure, table, "peak extra memory, MiB", lambda cell: cell.extra_bytes / 2**20
        ),
        "error": lambda figure: draw_table(figure, table, "largest relative error", lambda cell: cell.error),
    }
    return {name: _svg(name, plot) for name, plot in plots.items()}


def draw_loss(figure: Figure, training: Training) -> None:
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = range(1, len(training.differences) + 1)
    curves.plot(steps, training.tilewise.losses, color=COLOURS[TILEWISE], lw=3.5, alpha=0.6, label=TILEWISE)
    curves.plot(steps, training.standard.losses, color=COLOURS[STANDARD], lw=1, label=STANDARD)
    ends = (0, len(steps))
    for curve, name, size in ((training.tilewise, TILEWISE, 9), (training.standard, STANDARD, 5)):
        held_out = (curve.valid_before, curve.valid_after)
        curves.plot(ends, held_out, "D", ms=size, color=COLOURS[name], label=f"{name}, held-out text")
    curves.set_ylabel("loss, nats a byte")
    curves.legend()
    # A logarithm has no zero: steps without any difference are left out.
    drawn = [(step, d) for step, d in zip(steps, training.differences) if d > 0]
    differences.plot([s for s, _ in drawn], [d for _, d in drawn], ".", color=COLOURS[TILEWISE])
    highest = max((d for _, d in drawn), default=1e-8)
    if training.bound > 0:
        differences.axhline(training.bound, color=INK, ls="--", lw=1)
        differences.text(1, training.bound, "bound", va="bottom")
        highest = max(highest, training.bound)
    differences.set(yscale="log", ylabel="|difference|", xlabel="step", ylim=(1e-8, 20 * highest))


def draw_generation(figure: Figure, generation: Generation) -> None:
    axes = figure.subplots()
    runs = {
        "without a cache": (generation.recomputed, COLOURS[STANDARD]),
        "with tilewise.KVCache": (generation.cached, COLOURS[TILEWISE]),
    }
    for name, (run, colour) in runs.items():
        axes.plot(range(1, len(run.elapsed) + 1), run.elapsed, color=colour, lw=2, label=name)
    axes.set(xlabel="tokens generated", ylabel="seconds", ylim=(0, None))
    axes.legend()


def draw_table(figure: Figure, table: Table, label: str, value: Callable[[Cell], float]) -> None:
    for axes, (is_backward, title) in zip(figure.subplots(1, 2, sharey=True), PASSES.items()):
        for name in (STANDARD, SDPA, TILEWISE):
            shown = {n: value(cell) for n, cell in table.series(is_backward, name).items()}
            shown = {n: v for n, v in shown.items() if v > 0}
            style: Any = {"marker": MARKERS[name], "color": COLOURS[name], "lw": WIDTHS[name]}
            axes.plot(list(shown), list(shown.values()), ms=3 + 2 * WIDTHS[name], label=name, **style)
        axes.set(xscale="log", yscale="log", xlabel="sequence length", title=title)
        axes.set_xticks(table.lengths, [str(n) for n in table.lengths], rotation=45)
        axes.minorticks_off()
        axes.yaxis.set_tick_params(labelleft=True)
    low, high = (math.log10(limit) for limit in figure.axes[0].get_ylim())
    figure.axes[0].set_ylim(10.0 ** math.floor(low), 10.0 ** math.ceil(high))  # whole decades have labels
    figure.axes[0].set_ylabel(label)
    figure.axes[0].legend()


def _svg(name: str, plot: Callable[[Figure], None]) -> str:
    style: Any = {**STYLE, "svg.hashsalt": name}  # ids must differ between plots on one page
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8, 4))
        plot(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)  # names of groups, the same in every plot
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', _opening(name), svg, count=1)
    return svg.replace(INK, "currentColor").replace(GRID, "var(--grid)")


def _opening(name: str) -> str:
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return rf'<svg \1 role="img" aria-labelledby="says-{name}" {namespaces}>'
