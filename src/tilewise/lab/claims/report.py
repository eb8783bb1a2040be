"""What was measured, as rows of tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from tilewise.lab.bench import results
from tilewise.lab.claims import run
from tilewise.lab.claims.claim import CLAIMS, Claim, Setting

HEADER = ["claim", "of", "claimed", "measured", "ratio", "holds", "why not, and on what"]


def committed() -> list[dict[str, Any]]:
    """What was measured and is kept beside this file, GPUs first."""
    folder = resources.files("tilewise.lab.claims") / "results"
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.iterdir()]
    return sorted(found, key=lambda f: (f["device"]["type"] == "cpu", f["device"]["name"], f["date"]))


def figure(value: float, unit: str, digits: int = 4) -> str:
    """A value with so many digits and its unit.

    Example:
        >>> figure(7.634, "×"), figure(34.36, "GB"), figure(65536, "tokens")
        ('7.634×', '34.36 GB', '65,536 tokens')
    """
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.{digits}g}"
    return f"{text}{unit if unit.startswith(('×', '%')) else ' ' + unit}".strip()


def line(claim: Claim, row: dict[str, Any]) -> list[str]:
    claimed = figure(claim.claimed, claim.unit, 6)
    if "refused" in row:
        return [claim.says, claim.source, claimed, "–", "–", "–", row["refused"]]
    holds, ratio = claim.holds(row["value"]), f"{row['value'] / claim.claimed:.2f}"
    said = "; ".join(part for part in (row["what"], row["note"]) if part)
    if not holds:
        said = f"{claim.why} {said}"
    measured = figure(row["value"], claim.unit, 6 if claim.kind == "equal" else 4)
    return [claim.says, claim.source, claimed, measured, ratio, "yes" if holds else "**no**", said]


def sections(files: Sequence[dict[str, Any]]) -> list[tuple[str, list[list[str]]]]:
    """Titles and rows: what is counted, measured now; then of each file, and if kernels have changed."""
    counted = [claim for claim in CLAIMS.values() if claim.is_counted]
    rows = [line(claim, run.measured(claim, Setting("cpu"))) for claim in counted]
    parts = [("Counted: the same on any machine", rows)]
    for found in files:
        timed = [c for name, c in CLAIMS.items() if name in found["rows"] and not c.is_counted]
        rows = [line(claim, found["rows"][claim.name]) for claim in timed]
        device, threads = found["device"], found["threads"]
        where = device["name"] + (f", {threads} threads" if device["type"] == "cpu" else "")
        title = f"{where}, {found['date'][:10]}, torch {found['versions']['torch']}"
        if found.get("kernels_sha256") != results.kernels_digest(device["type"]):
            title += ", with older kernels"
        parts.append((title, rows))
    return parts
