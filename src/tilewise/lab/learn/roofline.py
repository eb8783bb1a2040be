"""Which resource binds a call on a machine, and the time that follows: predicted, beside measured, drawn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.device import Device
from tilewise.lab.bench import results
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.peers import QUANTIZED, eight_bit_peers
from tilewise.lab.bench.plot import colours
from tilewise.lab.bench.report import seconds
from tilewise.lab.bench.results import Results
from tilewise.lab.distributed.peers import ONE
from tilewise.lab.figures import save
from tilewise.lab.learn.io_model import Cost
from tilewise.lab.learn.machines import MACHINES, Machine

MATMUL, VECTOR, SPECIAL = "matrix products", "vector arithmetic", "special functions"
EIGHT_BIT = frozenset(eight_bit_peers())


@dataclass(frozen=True)
class Prediction:
    """Seconds that each resource needs on its own. No run is faster than the largest of them.

    Example:
        >>> Prediction({"matrix products": 2e-3, "HBM": 1e-3}).bound
        'matrix products'
    """

    times: Mapping[str, float]

    @property
    def bound(self) -> str:
        return max(self.times, key=lambda resource: self.times[resource])

    @property
    def seconds(self) -> float:
        return max(self.times.values())

    @property
    def one_after_the_other(self) -> float:
        """Seconds if nothing overlapped."""
        return sum(self.times.values())


def predict(cost: Cost, machine: Machine) -> Prediction:
    """Time of a `io_model` cost, all cores at work.

    A machine with a cache between the tiles and main memory serves repeated loads from it: main memory moves
    `once_bytes`, the cache every byte that the loops load and store. Without one, main memory moves it all.

    Example:
        >>> from tilewise.learn import io_model, machines
        >>> shape = io_model.Shape(4096, 4096, 128, num_heads=16, batch=4)
        >>> h200 = machines.MACHINES["H200"]
        >>> predict(io_model.standard(shape), h200).bound, predict(io_model.fa2(shape), h200).bound
        ('HBM', 'matrix products')
    """
    times = {
        MATMUL: cost.matmul_flops / machine.device.flops_per_second,
        VECTOR: cost.vector_flops / machine.vector_per_second,
        SPECIAL: cost.special_ops / machine.special_per_second,
    }
    fast, cache = machine.fast_level, machine.cache
    if fast.bytes_per_second is not None:
        times[fast.name] = cost.fast_read / fast.bytes_per_second
    if cache is not None and cache.bytes_per_second is not None:
        times[cache.name] = cost.slow_bytes / cache.bytes_per_second
    times[machine.memory.name] = memory_bytes(cost, machine) / machine.device.bytes_per_second
    return Prediction(times)


def memory_bytes(cost: Cost, machine: Machine) -> int:
    """What main memory moves: each element once in each kernel if there is a cache, else every load."""
    return cost.slow_bytes if machine.cache is None else cost.once_bytes


def memory_intensity(cost: Cost, machine: Machine) -> float:
    """FLOPs of matrix products for each byte that main memory moves: where the roofline has the algorithm."""
    return cost.matmul_flops / memory_bytes(cost, machine)


def is_compute_bound(intensity: float, device: Device) -> bool:
    """Whether a kernel of `intensity` FLOPs a byte sits right of the roofline's ridge.

    Example:
        >>> from tilewise.lab.learn.machines import MACHINES
        >>> is_compute_bound(1.0, MACHINES["A100"].device)
        False
    """
    return intensity >= device.balance


def attainable(intensity: float, device: Device) -> float:
    """FLOP/s at that intensity: the roof."""
    return min(device.flops_per_second, intensity * device.bytes_per_second)


def least(case: Case, machine: Machine | None, device: Device, peer: str = "") -> Prediction:
    """The bound of a benchmark case: visible pairs only, each tensor moved once.

    `machine` adds its special functions: one exponential a visible pair, in either direction. A peer's
    products of 8 bits are twice as fast as those of 16, which are `device`'s.
    """
    flops_per_second = device.flops_per_second * (2 if peer in EIGHT_BIT else 1)
    moved = least_bytes(case, peer.endswith(QUANTIZED))
    times = {
        MATMUL: case.flops() / flops_per_second,
        "HBM" if machine is not None else "memory": moved / device.bytes_per_second,
    }
    if machine is not None:
        times[SPECIAL] = case.visible_pairs() / machine.special_per_second
    return Prediction(times)


def least_bytes(case: Case, is_quantized: bool = False) -> int:
    """Every input read once and every output written once; lse is float32.

    The backward reads Q, K, V, O, dO and lse and writes dQ, dK and dV. Quantized inputs have a byte a number.
    """
    size = case.torch_dtype.itemsize
    read = 1 if is_quantized else size
    queries = case.num_heads * sum(n for n, _ in case.sequences)
    keys = case.num_kv_heads * sum(n for _, n in case.sequences)
    d, dv = case.head_dim, case.head_dim_v
    forward = ((queries + keys) * d + keys * dv) * read + queries * (dv * size + 4)
    if case.direction == "forward":
        return forward
    return forward + (queries * (d + dv) + keys * (d + dv)) * size


@dataclass(frozen=True)
class Point:
    """One peer on one case."""

    case: str
    peer: str
    device: Device
    prediction: Prediction
    seconds: float
    flops: int
    bytes: int  # that memory moves at least

    @property
    def share(self) -> float:
        """Of the bound that was reached: 1 is as fast as the machine allows."""
        return self.prediction.seconds / self.seconds


def load_points(paths: Iterable[Path]) -> list[Point]:
    """The points of result files of `tilewise bench`; memory cases have no time and are left out."""
    found = []
    for path in paths:
        found += points(results.load(path))
    return found


def points(found: Results) -> list[Point]:
    """Of the calls of one device: many share the work of a case that is distributed."""
    machine, device = _limits(found)
    made = []
    for record in found["cases"]:
        case = results.case_of(record)
        if case.kind == "memory":
            continue
        for peer in [ONE] if found["suite"] == "distributed" else record["peers"]:
            taken = seconds(record, peer)
            if taken is not None:
                prediction = least(case, machine, device, peer)
                moved = least_bytes(case, peer.endswith(QUANTIZED))
                made.append(Point(record["name"], peer, device, prediction, taken, case.flops(), moved))
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


def compared(made: Sequence[Point]) -> list[list[str]]:
    """Rows of text: case, peer, bound by, predicted, measured, share of the bound."""
    return [
        [p.case, p.peer, p.prediction.bound, _time(p.prediction.seconds), _time(p.seconds), f"{p.share:.0%}"]
        for p in made
    ]


COMPARED = ["case", "peer", "bound by", "at least", "measured", "of the bound"]


def _time(value: float) -> str:
    return f"{value * 1e3:.3g} ms"


MARKERS = {"matrix products": "o", "special functions": "^", "HBM": "s", "memory": "s"}
GREY = "#777777"


def measured_over_predicted(points: Sequence[Point], path: Path) -> None:
    """One mark a peer and case, both axes logarithmic; a file of the kind that the suffix says."""
    if not points:
        raise BenchError("no measured case to plot")
    title = f"Predicted against measured\n{', '.join(dict.fromkeys(p.device.name for p in points))}"
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
    """FLOP/s over FLOPs a byte: the roof, and each algorithm at what its binding resource allows."""
    title = f"{machine.name}: balance {machine.device.balance:.0f} FLOP/byte"
    intensities = [memory_intensity(cost, machine) for cost in costs]
    with roof(
        path, title, "FLOPs of products for each byte of main memory", machine.device, intensities, 3
    ) as axes:
        for cost, intensity in zip(costs, intensities):
            prediction = predict(cost, machine)
            speed = cost.matmul_flops / prediction.seconds
            axes.scatter([intensity], [speed], s=60, label=f"{cost.algorithm}: {prediction.bound}")


@contextmanager
def roof(
    path: Path, title: str, xlabel: str, device: Device, intensities: Sequence[float], margin: float
) -> Iterator[Any]:
    """The axes of a roofline and its roof, `margin` times as far as the intensities on each side."""
    span = min(*intensities, device.balance) / margin, max(*intensities, device.balance) * margin
    with _axes(path, title, xlabel, "FLOP/s") as axes:
        corners = [span[0], device.balance, span[1]]
        axes.plot(corners, [attainable(x, device) for x in corners], color=GREY, label="the roof")
        yield axes


@contextmanager
def _axes(path: Path, title: str, xlabel: str, ylabel: str) -> Iterator[Any]:
    """Logarithmic axes, saved to `path` when they are drawn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 6.5))
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", title=title, xlabel=xlabel, ylabel=ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    try:
        yield axes
        axes.legend(fontsize=8, frameon=False)
        figure.tight_layout()
        save(figure, path, dpi=130)
    except (OSError, ValueError) as error:
        raise BenchError(f"--plot {path}: {error}") from error
