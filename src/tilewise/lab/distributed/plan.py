"""`tilewise distributed`: what one sequence over many GPUs would take, by `tilewise.distributed.explain`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from tilewise.distributed import Network, explain
from tilewise.distributed.cost import Choice, Sizes, choose, itemsizes
from tilewise.distributed.layout import layout_of
from tilewise.distributed.network import PUBLISHING, TAKEN_BY_NCCL, WAITING
from tilewise.distributed.ranks import Ranks
from tilewise.distributed.schedule import Rules
from tilewise.lab.bench import results
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.cli import one_line_errors
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.report import markdown
from tilewise.lab.distributed.peers import ONE, balance_of, offsets
from tilewise.lab.figures import save

WORLDS, SEQLENS = (8, 64, 1024), (1 << 17, 1 << 20, 10 << 20)
# NVLink in nodes of 8, near what four H100s gave, and InfiniBand NDR between nodes
NOMINAL = Network(600e12, 320e9, 110e-6, 8, 50e9, 120e-6, taken=TAKEN_BY_NCCL)
Predictions = dict[int, dict[int, Choice]]  # by GPUs, then by tokens
MOST_GPUS = 1 << 12  # the time to predict grows with their square
METHODS = ("ring", "ulysses", "2d", "all_gather")


def distributed(
    worlds: Annotated[
        list[int] | None, typer.Option("--world", min=1, max=MOST_GPUS, help="GPUs; may be repeated.")
    ] = None,
    seqlens: Annotated[
        list[int] | None, typer.Option("--seqlen", min=1, help="Tokens; may be repeated.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 16,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads; all if left out.")] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 128,
    full: Annotated[bool, typer.Option("--full", help="Not causal.")] = False,
    flops: Annotated[float, typer.Option(min=1e-3, help="TFLOP/s of one GPU's forward.")] = 600.0,
    bandwidth: Annotated[float, typer.Option(min=1e-3, help="GB/s into a GPU from its node.")] = 320.0,
    latency: Annotated[float, typer.Option(min=0.0, help="Microseconds of an exchange.")] = 110.0,
    per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    far_bandwidth: Annotated[float, typer.Option(min=1e-3, help="GB/s into a GPU from other nodes.")] = 50.0,
    far_latency: Annotated[
        float, typer.Option(min=0.0, help="Microseconds of an exchange between nodes.")
    ] = 120.0,
    plot: Annotated[Path | None, typer.Option(help="Also draw the efficiencies: .svg, .png.")] = None,
    measured: Annotated[Path | None, typer.Option(help="Compare with this file of `bench` instead.")] = None,
) -> None:
    """Predict the time of one sequence over many GPUs.

    Forward and backward: the best method, its efficiency and what limits it.

    The speeds are assumptions, near those of NVLink 4 and InfiniBand NDR unless given; nothing runs. With
    --measured the speed of a GPU is that of one device in the file, and cases are those of the file; so are
    messages, if it says how fast they were.
    """
    if plot is not None:
        _check_plot(plot)
    near, far = (bandwidth * 1e9, latency * 1e-6), (far_bandwidth * 1e9, far_latency * 1e-6)
    network = Network(flops * 1e12, *near, per_node, *far, taken=TAKEN_BY_NCCL)
    if measured is not None:
        with one_line_errors("distributed"):
            file = results.load(measured)
            points = compare(file, network)
            typer.echo(check(file, points))
            if plot is not None:
                draw_points(points, plot)
        return
    typer.echo(
        f"assumed: {flops:g} TFLOP/s a GPU, {bandwidth:g} GB/s and {latency:g} us in a node of {per_node}, "
        f"{far_bandwidth:g} GB/s and {far_latency:g} us between nodes"
    )
    try:
        found = predict(
            network, worlds or WORLDS, seqlens or SEQLENS,
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, causal=not full,
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    for world, choices in found.items():
        for seqlen, choice in choices.items():
            typer.echo(f"\n{world} GPUs, {seqlen:,} tokens\n{choice}")
    if plot is not None:
        draw(found, plot)


def predict(
    network: Network = NOMINAL,
    worlds: Iterable[int] = WORLDS,
    seqlens: Iterable[int] = SEQLENS,
    **options: Any,
) -> Predictions:
    """`tilewise.distributed.explain` for each number of GPUs and of tokens."""
    options = {"num_heads": 16, "causal": True} | options
    lengths = list(seqlens)
    return {w: {n: explain(n, world=w, network=network, **options) for n in lengths} for w in worlds}


class Point(NamedTuple):
    """The efficiency of a method in a case of a file, and what the model says of it."""

    case: str
    method: str
    measured: float
    predicted: float
    is_chosen: bool  # by `method="auto"`


def compare(found: results.Results, network: Network) -> list[Point]:
    """Each case and method of a file of the suite "distributed".

    The speed of a device is its own in the case; messages are as fast as those of `network`, or of the file
    if it has them. On a CPU one device has the threads of all ranks.

    Raises:
        BenchError: the file is of another suite, or of one device.
    """
    world = found.get("world", 1)
    if world < 2:
        raise BenchError(f"a file of suite {found['suite']!r} on one device has nothing to compare with")
    if "network" in found:
        recorded = Network(**found["network"])  # the model's constants are today's
        publishing, waiting = (PUBLISHING, WAITING) if recorded.publishing else (0.0, 0.0)
        taken = 0.0 if publishing or found["device"]["type"] != "cuda" else network.taken
        network = recorded._replace(taken=taken, publishing=publishing, waiting=waiting)
    devices = world if found["device"]["type"] == "cuda" else 1
    points = []
    for record in found["cases"]:
        alone = record["peers"].get(ONE)
        if not results.is_measured(alone):
            continue
        speed = record["flops"] * devices / world / results.median(alone)
        of_case = network._replace(flops=speed, backward_flops=None)
        choice = _explain_case(Case.from_json(record["case"]), world, of_case, "gradients" in found)
        for e in choice.estimates:
            entry = record["peers"].get(f"tilewise:{e.method}")
            if results.is_measured(entry):
                efficiency = results.ratio(alone, entry) / devices
                is_chosen = e.method == choice.method
                points.append(Point(record["name"], e.method, efficiency, e.efficiency, is_chosen))
    return points


def check(found: results.Results, points: list[Point]) -> str:
    """Markdown: measured efficiencies, each with the predicted one behind it; in italics those of "auto"."""
    methods = [method for method in METHODS if any(p.method == method for p in points)]
    rows: dict[str, list[str]] = {}
    for p in points:
        row = rows.setdefault(p.case, [p.case, *("–" for _ in methods)])
        mark = "*" if p.is_chosen else ""
        row[1 + methods.index(p.method)] = f"{mark}{p.measured:.2f} ({p.predicted:.2f}){mark}"
    ratios = [p.predicted / p.measured for p in points]
    low, high = min(ratios, default=1.0), max(ratios, default=1.0)
    note = f"predicted / measured: {statistics.median(ratios or [1.0]):.2f} ({low:.2f} to {high:.2f})"
    header = [f"case (efficiency of {found['world']} ranks, predicted)", *methods]
    return "\n".join([*markdown(header, list(rows.values())), "", note])


def draw_points(points: list[Point], path: Path) -> None:
    """Measured efficiencies as points, predicted ones as bars, by case."""
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(p.case for p in points))
    figure = Figure(figsize=(9, 1.5 + 0.5 * len(cases)), layout="constrained")
    axes = figure.subplots()
    for number, method in enumerate(METHODS):
        own = [p for p in points if p.method == method]
        places = [cases.index(p.case) + (number - 1.5) * 0.2 for p in own]
        color = f"C{number}"
        axes.barh(places, [p.predicted for p in own], 0.18, color=color, alpha=0.35)
        axes.plot([p.measured for p in own], places, "o", color=color, label=method)
    axes.set(
        yticks=range(len(cases)), yticklabels=cases, xlabel="efficiency: measured (points), predicted (bars)"
    )
    axes.set_xlim(0, 1.05)
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    _save(figure, path)


def _explain_case(case: Case, world: int, network: Network, has_wide_gradients: bool) -> Choice:
    starts = offsets(case)
    seqlen = case.seqlen_q if starts is None else None
    layout = layout_of(Ranks(None, 0, world, ()), balance_of(case), seqlen, starts)
    rules = Rules(*case.reach, needs_tokens=False)
    number, gradient = itemsizes(case.torch_dtype)
    heads, dims = (case.num_heads, case.num_kv_heads), (case.head_dim, case.head_dim)
    sizes = Sizes(case.batch, *heads, *dims, number, gradient if has_wide_gradients else number)
    return choose(layout, rules, sizes, network, case.direction != "forward")


def _check_plot(path: Path) -> None:
    """Before the table is printed: whether matplotlib is there and can write such a file there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise typer.BadParameter("--plot needs matplotlib: pip install 'tilewise[cli]'") from None
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in kinds:
        raise typer.BadParameter(f"--plot {path}: its suffix must be one of .{', .'.join(kinds)}")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"--plot {path}: there is no folder {path.parent}")


def draw(found: Predictions, path: Path) -> None:
    """One panel for each number of GPUs: efficiency of each method by the number of tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found), 3.5), layout="constrained")
    axes: Any = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for panel, (world, choices) in zip(axes, found.items(), strict=True):
        for method in METHODS:
            points = [
                (n, e.efficiency) for n, c in choices.items() for e in c.estimates if e.method == method
            ]
            if points:
                panel.plot(
                    *zip(*points, strict=True), marker="o", color=f"C{METHODS.index(method)}", label=method
                )
        panel.set(title=f"{world} GPUs", xscale="log", xlabel="tokens", ylim=(0, 1.05))
        panel.legend()
    axes[0].set_ylabel("predicted efficiency, forward and backward")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        save(figure, path)
    except OSError as error:
        raise typer.BadParameter(f"--plot {path}: {error.strerror or error}") from None
