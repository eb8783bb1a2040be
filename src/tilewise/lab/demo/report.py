"""The report: one HTML file that needs nothing else."""

from __future__ import annotations

import html

from tilewise.lab.demo import plots
from tilewise.lab.demo.findings import Findings, figure, mebibytes, why_differences
from tilewise.lab.demo.lengths import PASSES, Table
from tilewise.lab.demo.methods import METHODS
from tilewise.lab.learn.show import duration

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --page: #ffffff; --quiet: #5b6472; --grid: #e3e6ea;
  --panel: #f5f6f8; --good: #1a7f4b; --bad: #c4321c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --page: #14181e; --quiet: #9aa4b2;
  --grid: #2e3540; --panel: #1c222a; --good: #4cc38a; --bad: #ff7a66; } }
body { color: var(--ink); background: var(--page); font: 16px/1.55 system-ui, sans-serif; max-width: 56rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.6rem; }
.quiet, dl, caption { color: var(--quiet); font-size: .9rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
li { margin: .5rem 0; } .good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
svg { width: 100%; height: auto; } svg text { font-family: system-ui, sans-serif !important; }
pre { background: var(--panel); padding: .8rem 1rem; white-space: pre-wrap; border-radius: 6px; }
pre b { color: var(--quiet); font-weight: normal; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; width: 100%; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { text-align: right; padding: .2rem .6rem; white-space: nowrap; border-bottom: 1px solid var(--grid);
  font-variant-numeric: tabular-nums; } th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
"""
TITLES = {
    "loss": "Training loss",
    "generation": "Generation with and without a cache",
    "time": "Time over sequence length",
    "memory": "Peak extra memory over sequence length",
    "error": "Error against float64",
}
HEADINGS = ("time", "memory", "error")


def write(findings: Findings) -> str:
    drawn = plots.draw(findings)
    notes = {
        "loss": _paragraph(why_differences(findings.training)) + _paragraph(training_time(findings)),
        "generation": _sample(findings),
        "memory": _paragraph(f"How memory was measured: {findings.table.memory_how}."),
    }
    sections = "".join(
        f'<h2 id="{name}">{TITLES[name]}</h2>{svg}{notes.get(name, "")}' for name, svg in drawn.items()
    )
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>tilewise demo</title><style>{STYLE}</style></head><body>"
        f"<h1>tilewise demo</h1>{_opening(findings)}{_facts(findings)}{sections}"
        f"<h2 id='table'>The table</h2>{_table(findings.table)}</body></html>\n"
    )


def training_time(findings: Findings) -> str:
    ours, standard = findings.training.tilewise.seconds, findings.training.standard.seconds
    return (
        f"Training took {duration(ours)} with tilewise and {duration(standard)} with standard attention: "
        f"{findings.model}."
    )


def rows(table: Table) -> tuple[list[list[str]], list[str]]:
    """The table's rows, (length, method, three figures a pass), and the reasons for what was skipped."""
    reasons: list[str] = []
    found = []
    for seqlen in table.lengths:
        for name in METHODS:
            row = [str(seqlen), name]
            for is_backward in PASSES:
                cell = table.cells[seqlen, is_backward, name]
                if cell.skipped is None:
                    row += [duration(cell.time), mebibytes(cell.extra_bytes), figure(cell.error)]
                else:
                    reasons.append(f"{name}, {PASSES[is_backward]} at {seqlen}: {cell.skipped}")
                    row += [f"skip [{len(reasons)}]", "", ""]
            found.append(row)
    return found, reasons


def about(table: Table) -> str:
    return (
        f"{table.shape}; times are medians; memory: at the peak, beyond inputs, output and "
        f"gradients; error: largest difference from float64 over largest value. "
        f"tilewise chose the backend {table.backends}."
    )


def _opening(findings: Findings) -> str:
    items = "".join(
        f'<li id="says-{name}"><a href="#{name}">{TITLES[name]}</a>: '
        f'<span class="{"" if holds else "bad"}">{html.escape(text)}</span></li>'
        for name, (text, holds) in findings.sentences().items()
    )
    verdict = (
        "<p class='good'>Everything checked holds.</p>"
        if findings.holds
        else "<p class='bad'>Something checked does NOT hold.</p>"
    )
    return f"<ol>{items}</ol>{verdict}"


def _facts(findings: Findings) -> str:
    shown = findings.facts | {"Took": duration(findings.seconds)}
    return "<dl>" + "".join(f"<dt>{k}</dt><dd>{html.escape(v)}</dd>" for k, v in shown.items()) + "</dl>"


def _sample(findings: Findings) -> str:
    prompt, generated = sample_text(findings)
    return (
        f"{_paragraph('What it wrote, after a prompt from the held-out text:')}"
        f"<pre><b>{html.escape(prompt)}</b>{html.escape(generated)}</pre>"
    )


def sample_text(findings: Findings, length: int | None = None) -> tuple[str, str]:
    """The prompt and what followed; bytes that are no text are shown as replacement characters."""
    generation = findings.generation
    return _readable(generation.prompt), _readable(bytes(generation.cached.tokens[:length]))


def _readable(data: bytes) -> str:
    text = data.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def _table(table: Table) -> str:
    found, reasons = rows(table)
    groups = "".join(f"<th colspan='3'>{name}</th>" for name in PASSES.values())
    headings = "".join(f"<th>{h}</th>" for h in ("length", "method", *HEADINGS * len(PASSES)))
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in found)
    return (
        f"<div class='wide'><table><caption>{html.escape(about(table))}</caption>"
        f"<thead><tr><th></th><th></th>{groups}</tr><tr>{headings}</tr></thead><tbody>{body}</tbody></table></div>"
        + "".join(_paragraph(f"[{n}] {reason}.") for n, reason in enumerate(reasons, 1))
    )


def _paragraph(text: str) -> str:
    return f"<p class='quiet'>{html.escape(text)}</p>" if text else ""
