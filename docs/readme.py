"""What README.md holds that is made, not written: `python docs/readme.py`, or `make readme`.

Its plot, its table of results and its table of features come from `benchmarks/results` and from
`tilewise.dispatch.capability`; each stands between two comments that name it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewise.dispatch import capability
from tilewise.lab.bench import plot, report, results

ROOT = Path(__file__).parents[1]
README, PLOT = ROOT / "README.md", ROOT / "docs" / "speed.svg"
RESULTS = ROOT / "benchmarks" / "results"
HEADLINE, DECODE, CPU = (
    "h200-headline-quick-2026-11-23.json",
    "h200-decode-graph-2026-11-22.json",
    "cpu-2026-11-23.json",
)
TABLE = (  # what, file, whose cases
    ("H200, forward, bf16", HEADLINE, "fwd-"),
    ("H200, backward, bf16", HEADLINE, "bwd-"),
    ("H200, decoding, bf16, 1 query", DECODE, r"decode-.*-q1-k\d+$"),
    ("2 cores of a Xeon, float32, bf16 and f16", CPU, ""),
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


def sections() -> dict[str, str]:
    """The made parts of the README, by the names in its comments."""
    return {"results": results_table(), "features": capability.table()}


def with_sections(text: str, made: dict[str, str]) -> str:
    """The README with its made parts put in. Raises LookupError if one has no place."""
    for name, content in made.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found and found_end):
            raise LookupError(f"README.md has no lines {begin!r} and {end!r}")
        text = f"{before}{begin}\n{content}\n{end}{after}"
    return text


def draw(path: Path) -> None:
    """Ours and the peers, on an H200 and on a CPU: head size 128, causal."""
    shown: Sequence[Any] = [results.load(RESULTS / name) for name in (HEADLINE, CPU)]
    plot.overview(shown, path)


if __name__ == "__main__":
    README.write_text(with_sections(README.read_text(), sections()))
    draw(PLOT)
