"""The run: train, generate, measure, report; each part printed as it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from rich.text import Text as RichText

from tilewise.lab.demo import report
from tilewise.lab.demo.findings import Findings, facts, why_differences
from tilewise.lab.demo.generate import generate_both
from tilewise.lab.demo.lengths import PASSES, Table, measure
from tilewise.lab.demo.methods import METHODS
from tilewise.lab.demo.scale import Scale, scale_for
from tilewise.lab.demo.text import standard_library
from tilewise.lab.demo.train import train_both


def run(out: Path, seed: int, quick: bool, device: torch.device, console: Console) -> bool:
    """Do everything; True if all that was checked holds. `out` must exist."""
    start = time.perf_counter()
    scale = scale_for(device, quick)
    text = standard_library()
    about = facts(device, text.source)
    _say(console, f"{about['Device']}; {about['Versions']}\n{about['Text']}")
    with _bar(console, "training, twice", 2 * scale.steps) as advance:
        training = train_both(text, scale, device, seed, advance)
    with _bar(console, "generating, twice", 2 * scale.new_tokens) as advance:
        generation = generate_both(training.model, text, scale, device, seed, advance)
    with _bar(console, "measuring lengths", len(PASSES) * len(scale.lengths) * len(METHODS)) as advance:
        table = measure(scale, device, seed, advance)
    findings = Findings(about, _model(scale), training, generation, table, time.perf_counter() - start)
    _show(console, findings)
    path = out / "report.html"
    path.write_text(report.write(findings), encoding="utf-8")
    _say(console, f"\nReport: {path.resolve()}")
    if not findings.holds:
        console.print("FAILED: something checked does not hold; see above", style="bold red")
    return findings.holds


def _model(scale: Scale) -> str:
    return (
        f"a byte-level GPT of {scale.layers} layers, {scale.heads} heads of {scale.head_dim}, trained on "
        f"{scale.batch} x {scale.context} bytes a step in float32"
    )


def _show(console: Console, findings: Findings) -> None:
    sentences = findings.sentences()
    _section(console, "Training", sentences["loss"])
    _say(console, why_differences(findings.training), "dim")
    _say(console, report.training_time(findings), "dim")
    _section(console, "Generation", sentences["generation"])
    prompt, generated = report.sample_text(findings, 240)
    console.print(RichText.assemble((prompt, "dim"), generated))
    _section(console, "Sequence length", sentences["time"], sentences["memory"], sentences["error"])
    _show_table(console, findings.table)


def _section(console: Console, title: str, *sentences: tuple[str, bool]) -> None:
    console.print(f"\n{title}", style="bold")
    for text, holds in sentences:
        _say(console, text, "" if holds else "bold red")


def _show_table(console: Console, table: Table) -> None:
    found, reasons = report.rows(table)
    shown = RichTable(box=None, padding=(0, 1), pad_edge=False)
    shown.add_column("length", justify="right", no_wrap=True)
    shown.add_column("method", no_wrap=True)
    for name in ("forward", "fwd+bwd"):
        for heading in report.HEADINGS:
            shown.add_column(f"{name}\n{heading}", justify="right", no_wrap=True)
    for row in found:
        shown.add_row(*(RichText(cell) for cell in row))
    console.print(shown)
    for n, reason in enumerate(reasons, 1):
        _say(console, f"[{n}] {reason}.", "dim")
    _say(console, report.about(table), "dim")
    _say(console, f"memory: {table.memory_how}.", "dim")


def _say(console: Console, text: str, style: str = "") -> None:
    if text:
        console.print(RichText(text, style))


@contextmanager
def _bar(console: Console, label: str, total: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(f"{label:18}", total=total)
        yield lambda: progress.advance(task)
