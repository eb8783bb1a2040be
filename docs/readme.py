"""What README.md and pages of docs hold that is made, not written: `make readme`.

The plot and the tables come from `benchmarks` and from `tilewise.dispatch.capability`; each table stands
between two comments that name it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from matplotlib.figure import Figure

from tilewise.core.mask import TileKind, Visibility
from tilewise.dispatch import capability
from tilewise.lab import mask
from tilewise.lab.bench import plot, report, results
from tilewise.lab.bench.cases import SHORT_DTYPES
from tilewise.lab.claims import report as claims_report
from tilewise.lab.claims.claim import CLAIMS
from tilewise.lab.distributed import plan
from tilewise.lab.figures import save
from tilewise.lab.learn import roofline

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api.md"
MEASURED = ROOT / "docs" / "claims.md"
DISTRIBUTED, PREDICTIONS = ROOT / "docs" / "distributed.md", ROOT / "docs" / "distributed.svg"
POINTS, FOUR_GPUS = ROOT / "docs" / "distributed-measured.svg", "h200-x4-distributed-quick-2026-11-28.json"
README, PLOT, TILES = ROOT / "README.md", ROOT / "docs" / "speed.svg", ROOT / "docs" / "tiles.svg"
FUNCTIONS, PICTURES = ROOT / "docs" / "functions.md", ROOT / "docs" / "functions"
RESULTS = ROOT / "benchmarks" / "results"
HEADLINE, OPTIONS, DECODE, CPU = (
    "h200-headline-quick-2026-11-23.json",
    "h100-options-quick-2026-11-26.json",
    "h200-decode-graph-2026-11-22.json",
    "cpu-amd-2026-11-29.json",
)
TABLE = (  # what, file, whose cases
    ("H200, forward and backward, bf16", HEADLINE, ""),
    ("H100, ALiBi, bias, softcap, dropout, bf16", OPTIONS, ""),
    ("H200, decoding, bf16, 1 query", DECODE, r"decode-.*-q1-k\d+$"),
    ("2 cores of an EPYC (Zen 4), float32, bf16 and f16", CPU, ""),
)


def results_table() -> str:
    """A row for each of `TABLE`: geometric means of what `tilewise bench` measured."""
    header = ["what", "cases", "tilewise / fastest peer", "lowest", "every sample"]
    rows = []
    for what, name, pattern in TABLE:
        found = results.load(RESULTS / name)
        ours = report.subject(found)
        cases = [r for r in found["cases"] if re.match(pattern, r["name"])]
        ratios = [report.ratio_to(r, ours, report.best_peer(r)) for r in cases]
        known = [ratio for ratio in ratios if ratio is not None]
        mean, lowest = report.times(report.geometric_mean(known)), report.times(min(known))
        rows.append(
            [what, str(len(known)), mean, lowest, f"[{found['date'][:10]}](benchmarks/results/{name})"]
        )
    return "\n".join(report.markdown(header, rows))


def names_table() -> str:
    """The public names, functions and classes before modules, with the first line of each docstring."""
    import tilewise

    def about(name: str) -> str:
        return (getattr(tilewise, name).__doc__ or "").strip().splitlines()[0]

    is_module = {name: isinstance(getattr(tilewise, name), ModuleType) for name in tilewise.__all__}
    names = sorted(tilewise.__all__, key=lambda name: (is_module[name], name[0].isupper(), name))
    return "\n".join(
        ["| in `tilewise` | what it is |", "|---|---|", *(f"| `{n}` | {about(n)} |" for n in names)]
    )


def claims_tables() -> str:
    """What is counted, and what each device measured, under a heading each."""
    parts = []
    for title, rows in claims_report.sections(claims_report.committed()):
        header, _, *body = report.markdown(claims_report.HEADER, rows)
        parts.append("\n".join([f"### {title}", "", header, "|---|---|---:|---:|---:|---|---|", *body]))
    return "\n\n".join(parts)


def predictions_table(found: plan.Predictions) -> str:
    """Markdown: the efficiency of each method, the one that is taken, and what limits it."""
    rows = []
    for world, choices in found.items():
        for seqlen, choice in choices.items():
            by_method = {e.method: f"{e.efficiency:.2f}" for e in choice.estimates}
            efficiencies = [by_method.get(method, "–") for method in plan.METHODS]
            rows.append([str(world), f"{seqlen:,}", *efficiencies, choice.method, choice.best.limit])
    return "\n".join(report.markdown(["GPUs", "tokens", *plan.METHODS, "taken", "limited by"], rows))


def sections() -> dict[Path, dict[str, str]]:
    """The made parts of each page, by the names in its comments."""
    return {
        README: {"results": results_table(), "features": capability.table()},
        API: {"names": names_table()},
        MEASURED: {"claims": claims_tables()},
        DISTRIBUTED: {"predictions": predictions_table(plan.predict())},
    }


def with_sections(text: str, made: dict[str, str]) -> str:
    """A page with its made parts put in. Raises LookupError if one has no place."""
    for name, content in made.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise LookupError(f"the page has no lines {begin!r} and {end!r}")
        text = f"{before}{begin}\n{content}\n{end}{after}"
    return text


def draw(path: Path, head_dim: int = 128) -> None:
    """Ours and the peers, a panel a device: dense causal cases of a head_dim."""
    shown = [results.load(RESULTS / name) for name in (HEADLINE, CPU)]
    figure = Figure(figsize=(11, 3.6 * len(shown)))
    for axes, found in zip(figure.subplots(len(shown), squeeze=False)[:, 0], shown):
        cases = [(r, results.case_of(r)) for r in found["cases"] if r["case"]["kind"] == "dense"]
        chosen = [
            (r, c) for r, c in cases if c.mask_label == "causal" and c.head_dim == c.head_dim_v == head_dim
        ]
        chosen.sort(key=lambda both: (both[1].direction != "forward", SHORT_DTYPES[both[1].dtype]))
        names = [
            n
            for n in report.peer_names(found)
            if any(results.is_measured(r["peers"].get(n)) for r, _ in chosen)
        ]
        scale, unit = report.scale_and_unit([r for r, _ in chosen])
        width = 0.84 / len(names)
        for index, (name, colour) in enumerate(plot.colours(names).items()):
            entries = [
                (x, r, e) for x, (r, _) in enumerate(chosen) if results.is_measured(e := r["peers"].get(name))
            ]
            at = [x + (index - (len(names) - 1) / 2) * width for x, _, _ in entries]
            axes.bar(
                at,
                [report.speed(r, e) / scale for _, r, e in entries],
                width * 0.94,
                label=name,
                color=colour,
            )
        ticks = [f"{c.direction}\n{SHORT_DTYPES[c.dtype]}, {plot.tick(c)}" for _, c in chosen]
        axes.set_xticks(range(len(chosen)), ticks, fontsize=7)
        axes.set_ylabel(unit)
        axes.set_title(f"{found['device']['name']}: head_dim {head_dim}, causal", fontsize=10)
        plot.bare(axes)
        axes.margins(y=0.2)
        axes.legend(frameon=False, fontsize=8, ncols=len(names), loc="upper left")
    figure.tight_layout()
    save(figure, path)


def draw_tiles(path: Path) -> None:
    """The tiles of a causal call with a window, from the tile map that the backends follow."""
    from matplotlib.patches import Patch, Rectangle

    size, tiles, row, red = 64, 12, 8, "#d1495b"
    seen = Visibility(tiles * size, tiles * size, left=5 * size, right=0)
    colours = {TileKind.FULL: "#3d6cb9", TileKind.EDGE: "#a9c0e4", TileKind.EMPTY: "#eeeeee"}
    names = ("full: every score counts", "edge: scores beyond the mask are -inf", "empty: not visited")
    figure = Figure(figsize=(7.5, 4.6))
    axes = figure.subplots()
    for i in range(tiles):
        for j in range(tiles):
            kind = seen.tile_kind(i * size, (i + 1) * size, j * size, (j + 1) * size)
            axes.add_patch(Rectangle((j, i), 0.94, 0.94, color=colours[kind]))
    first = seen.key_range(row * size, (row + 1) * size)[0] // size
    axes.add_patch(
        Rectangle((first - 0.03, row - 0.03), row - first + 1, 1, fill=False, color="#d1495b", lw=2)
    )
    axes.annotate(
        "one tile of queries:\nits keys and values are read tile by tile;\n"
        "m, l and the running output stay in registers",
        (row + 1, row + 0.4), (tiles + 0.6, row - 0.6), color=red, fontsize=9, va="center",
        arrowprops={"arrowstyle": "->", "color": red},
    )  # fmt: skip
    axes.legend(
        handles=[Patch(color=c, label=n) for c, n in zip(colours.values(), names, strict=True)],
        loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9,
    )  # fmt: skip
    axes.set(xlim=(-0.2, tiles), ylim=(tiles, -0.2), aspect="equal", xticks=[], yticks=[])
    axes.set_xlabel("keys")
    axes.set_ylabel("queries")
    axes.spines[:].set_visible(False)
    figure.tight_layout()
    save(figure, path, bbox_inches="tight")


LENGTHS = {"attention-short": ("ms", "forward (ms)"), "memory-linear": ("MiB", "peak extra memory (MiB)")}
COLUMNS = 3


def draw_lengths(files: Iterable[results.Results], path: Path) -> None:
    """Time and memory over the length, all axes logarithmic: a row of two for each device that has them."""
    shown = [f for f in files if all("curves" in f["rows"].get(name, {}) for name in LENGTHS)]
    with _panels(path, len(shown), 2) as axes:
        for found, row in zip(shown, axes):
            for one, (name, (axis, label)) in zip(row, LENGTHS.items()):
                _lines(one, found["rows"][name]["curves"][axis], f"{found['device']['name']}: {label}")
                one.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)


def draw_losses(files: Iterable[results.Results], path: Path) -> None:
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
    for n, (name, colour) in enumerate(plot.colours(list(curves)).items()):
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
    """Axes in rows and columns. The figure is saved in the end."""
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows))
    yield figure.subplots(rows, columns, squeeze=False)
    figure.tight_layout()
    save(figure, path)


def draw_roofline(kernels: Mapping[str, Sequence[roofline.Point]], path: Path) -> None:
    """FLOP/s over FLOPs for each byte that memory moves at least: the roof, and each case of each kernel."""
    points = [point for group in kernels.values() for point in group]
    device, intensities = points[0].device, [point.flops / point.bytes for point in points]
    title = f"{device.name}: measured, and the roof for 16 bits"
    with roofline.roof(path, title, "FLOPs for each byte of main memory", device, intensities, 2) as axes:
        for name, group in kernels.items():
            xs, ys = [p.flops / p.bytes for p in group], [p.flops / p.seconds for p in group]
            axes.scatter(xs, ys, s=26, alpha=0.75, linewidths=0, label=name)


KERNELS = (  # name, file, peer, whose cases
    ("forward", "h200-headline-quick-2026-11-28.json", "tilewise", "fwd"),
    ("backward", "h200-headline-quick-2026-11-28.json", "tilewise", "bwd"),
    ("forward in 8 bits, quantised before", "h200-fp8-2026-11-28.json", "tilewise-fp8-quantized", "fwd"),
    ("decoding", DECODE, "tilewise", "decode"),
    ("Triton's forward", "h200-triton-forward-quick-2026-11-22.json", "tilewise:triton", "fwd"),
    ("Triton's backward", "h200-triton-backward-quick-2026-11-22.json", "tilewise:triton", "bwd"),
)


def draw_claims(folder: Path) -> None:
    """What claims measured over lengths and steps, and the roofline with each kernel's cases."""
    files = claims_report.committed()
    draw_lengths(files, folder / "lengths.svg")
    draw_losses(files, folder / "losses.svg")
    points = {
        name: [
            p for p in roofline.load_points([RESULTS / file]) if p.peer == peer and p.case.startswith(kind)
        ]
        for name, file, peer, kind in KERNELS
    }
    draw_roofline(points, folder / "roofline.svg")


def draw_score(score_mod: Callable[..., Any], length: int, path: Path, h: int = 0) -> None:
    """What a score function adds to a score of 0 at each query and key; a curve where these don't matter."""
    figure = Figure(figsize=mask.FIGURE)
    axes = figure.subplots()
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    zero, head = torch.zeros((), dtype=torch.long), torch.tensor(h)
    with torch.no_grad():
        added = score_mod(torch.zeros(length, length), zero, head, i, j).expand(length, length)
        scores = torch.linspace(-80, 80, 161)
        curve = score_mod(scores, zero, head, zero, zero).expand(161)
    if bool((added == added[0, 0]).all()):
        axes.plot(scores.numpy(), curve.numpy(), color=mask.COLOURS["full"])
        axes.plot(scores.numpy(), scores.numpy(), color="#999999", linewidth=0.8, linestyle=":")
        axes.set(xlabel="score", ylabel="new score", aspect="equal", ylim=(-80, 80))
    else:
        shown = axes.imshow(
            added.numpy(), cmap="viridis", interpolation="nearest", extent=(0, length, length, 0)
        )
        figure.colorbar(shown, label=f"added to scores of head {h}")
        axes.set(xlabel="keys", ylabel="queries")
    save(figure, path, bbox_inches="tight")


MASKS_OF_GUIDE = ("causal", "window", "prefix_lm", "documents", "neighbourhood", "dilated", "mixed")
SCORES_OF_GUIDE = ("alibi", "softcap", "relative")


def draw_recipes(folder: Path) -> None:
    """A picture of each recipe of the guide "Functions", by the code of the guide itself."""
    scope: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", FUNCTIONS.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, str(FUNCTIONS), "exec"), scope)
    for name in MASKS_OF_GUIDE:
        mask.draw_mask(scope[name], (256, 256), 16, folder / f"{name.replace('_', '-')}.svg")
    for name in SCORES_OF_GUIDE:
        draw_score(scope[name], 256, folder / f"{name}.svg", h=1)


if __name__ == "__main__":
    for page, made in sections().items():
        page.write_text(with_sections(page.read_text(), made))
    draw(PLOT)
    draw_tiles(TILES)
    draw_recipes(PICTURES)
    draw_claims(MEASURED.with_suffix(""))
    plan.draw(plan.predict(), PREDICTIONS)
    plan.draw_points(plan.compare(results.load(RESULTS / FOUR_GPUS), plan.NOMINAL), POINTS)
