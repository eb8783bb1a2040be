"""What was measured, as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.lab.bench import results
from tilewise.lab.bench.report import markdown
from tilewise.lab.claims.claim import CLAIMS, Claim

HEADER = ["claim", "of", "claimed", "measured", "holds", "on what"]


def figure(value: float, unit: str) -> str:
    """A value with four digits and its unit.

    Example:
        >>> figure(7.634, "×"), figure(34.36, "GB"), figure(65536, "tokens")
        ('7.634×', '34.36 GB', '65,536 tokens')
    """
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
    return f"{digits}{unit if unit.startswith(('×', '%')) else ' ' + unit}".strip()


def line(claim: Claim, row: dict[str, Any]) -> list[str]:
    """The cells of one claim."""
    claimed = figure(claim.claimed, claim.unit)
    if "refused" in row:
        return [claim.says, claim.source, claimed, "–", "–", row["refused"]]
    what = row["what"] + (f"; {row['note']}" if row["note"] else "")
    measured = figure(row["value"], claim.unit)
    return [claim.says, claim.source, claimed, measured, "yes" if row["holds"] else "**no**", what]


def tables(files: Sequence[dict[str, Any]]) -> str:
    """A section for each file: where and when, if kernels have changed since, and its claims in order."""
    parts = []
    for found in files:
        rows = [line(claim, found["rows"][name]) for name, claim in CLAIMS.items() if name in found["rows"]]
        device, threads = found["device"], found["threads"]
        where = device["name"] + (f", {threads} threads" if device["type"] == "cpu" else "")
        title = f"### {where}, {found['date'][:10]}, torch {found['versions']['torch']}"
        if found.get("kernels_sha256") != results.kernels_digest(device["type"]):
            title += ", **with older kernels**"
        parts.append("\n".join([title, "", *markdown(HEADER, rows)]))
    return "\n\n".join(parts)
