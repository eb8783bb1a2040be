"""What README.md and pages of docs hold that is made, not written: `make readme`.

The plot and the tables come from `benchmarks` and from `tilewise.dispatch.capability`; each table stands
between two comments that name it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tilewise.core.mask import TileKind, Visibility
from tilewise.dispatch import capability
from tilewise.lab.bench import plot, report, results
from tilewise.lab.claims import plots as claims_plots, report as claims_report
from tilewise.lab.distributed import plan
from tilewise.lab.learn import roofline
from tilewise.lab.mask import picture

ROOT = Path(__file__).parents[1]
API = ROOT / "docs" / "api.md"
CLAIMS = ROOT / "docs" / "claims.md"
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


def sections() -> dict[Path, dict[str, str]]:
    """The made parts of each page, by the names in its comments."""
    return {
        README: {"results": results_table(), "features": capability.table()},
        API: {"names": names_table()},
        CLAIMS: {"claims": claims_report.tables(claims_report.committed())},
        DISTRIBUTED: {"predictions": plan.table(plan.predict())},
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


def draw(path: Path) -> None:
    """Ours and the peers, on an H200 and on a CPU: head_dim 128, causal."""
    shown: Sequence[Any] = [results.load(RESULTS / name) for name in (HEADLINE, CPU)]
    plot.overview(shown, path)


def draw_tiles(path: Path) -> None:
    """The tiles of a causal call with a window, from the tile map that the backends follow."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    size, tiles, row, red = 64, 12, 8, "#d1495b"
    seen = Visibility(tiles * size, tiles * size, left=5 * size, right=0)
    colours = {TileKind.FULL: "#3d6cb9", TileKind.EDGE: "#a9c0e4", TileKind.EMPTY: "#eeeeee"}
    names = ("full: every score counts", "edge: scores beyond the mask are -inf", "empty: not visited")
    figure, axes = plt.subplots(figsize=(7.5, 4.6))
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
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, bbox_inches="tight")
    plt.close(figure)


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
    claims_plots.lengths(files, folder / "lengths.svg")
    claims_plots.losses(files, folder / "losses.svg")
    points = {
        name: [
            p for p in roofline.load_points([RESULTS / file]) if p.peer == peer and p.case.startswith(kind)
        ]
        for name, file, peer, kind in KERNELS
    }
    roofline.measured_under_the_roof(points, folder / "roofline.svg")


MASKS_OF_GUIDE = ("causal", "window", "prefix_lm", "documents", "neighbourhood", "dilated", "mixed")
SCORES_OF_GUIDE = ("alibi", "softcap", "relative")


def draw_recipes(folder: Path) -> None:
    """A picture of each recipe of the guide "Functions", by the code of the guide itself."""
    scope: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", FUNCTIONS.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, str(FUNCTIONS), "exec"), scope)
    for name in MASKS_OF_GUIDE:
        picture.draw_mask(scope[name], (256, 256), 16, folder / f"{name.replace('_', '-')}.svg")
    for name in SCORES_OF_GUIDE:
        picture.draw_score(scope[name], 256, folder / f"{name}.svg", h=1)


if __name__ == "__main__":
    for page, made in sections().items():
        page.write_text(with_sections(page.read_text(), made))
    draw(PLOT)
    draw_tiles(TILES)
    draw_recipes(PICTURES)
    draw_claims(CLAIMS.with_suffix(""))
    plan.draw(plan.predict(), PREDICTIONS)
    plan.draw_points(plan.compare(results.load(RESULTS / FOUR_GPUS), plan.NOMINAL), POINTS)
