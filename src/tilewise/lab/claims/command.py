"""`tilewise claims`: what documents say of FlashAttention, measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def claims(
    filter: Annotated[
        str | None, typer.Option(help="Measure claims whose name this regular expression finds.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Keep results in this file; what it has is not measured again."),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(help="Measure this one, a training of hours, instead; it can be stopped and goes on."),
    ] = None,
    checkpoints: Annotated[
        Path, typer.Option(help="The folder where a training keeps its checkpoint.")
    ] = Path(),
    budget: Annotated[
        float | None, typer.Option(min=1, help="End a training after so many seconds of steps.")
    ] = None,
    names: Annotated[bool, typer.Option("--list", help="Print the claims and measure nothing.")] = False,
) -> None:
    """Measure what is claimed of FlashAttention on this machine.

    On a CPU, sizes are smaller than the papers'.
    """
    import torch

    from tilewise.lab.bench.cli import one_line_errors
    from tilewise.lab.bench.errors import BenchError
    from tilewise.lab.claims import report, run
    from tilewise.lab.claims.claim import CLAIMS, Claim, Setting

    chosen: list[Claim] = []
    done: list[Claim] = []

    def show(claim: Claim, row: run.Results) -> None:
        _, _, claimed, measured, _, holds, what = report.line(claim, row)
        verdict = {"yes": "holds", "**no**": "does not hold"}.get(holds, "not measured")
        done.append(claim)
        place = f"{len(done)} of {len(chosen)}"
        typer.echo(f"{place:>10} {claim.name:18} {claimed:>14} claimed {measured:>14} measured: {verdict}")
        typer.echo(f"    {what}")

    with one_line_errors("claims"):
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        setting = Setting(where, checkpoints, budget, typer.echo)
        if setting.device not in ("cpu", "cuda") or (setting.is_gpu and not torch.cuda.is_available()):
            raise BenchError(f"--device {device!r} must be cpu, or cuda where PyTorch sees a GPU")
        if budget is not None and train is None:
            raise BenchError(f"--budget {budget:g} is that of a training: add --train")
        if names:
            for claim in CLAIMS.values():
                typer.echo(f"{claim.name:18} {claim.says} ({claim.source})")
            return
        chosen += run.chosen(filter, setting) if train is None else [run.training(train)]
        run.run(chosen, setting, json, show)
