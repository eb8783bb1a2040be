"""`tilewise demo`: the whole library at work on real text, with a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_OUT = Path("tilewise-demo")


def demo(
    out: Annotated[Path, typer.Option(help="Folder for report.html; made if absent.")] = DEFAULT_OUT,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of the model, batches and inputs.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: seconds, not minutes.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: cuda if present.")] = None,
) -> None:
    """Train, generate and measure on this machine.

    Writes a report. Exit status 1 if anything checked does not hold.
    """
    from rich.console import Console

    from tilewise.lab.demo.run import run
    from tilewise.lab.demo.text import NoText

    chosen = _device(device)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"--out {out}: {error.strerror or error}") from None
    try:
        holds = run(out, seed, quick, chosen, Console(highlight=False))
    except NoText as error:
        raise typer.BadParameter(str(error)) from None
    if not holds:
        raise typer.Exit(1)


def _device(name: str | None):  # type: ignore[no-untyped-def]
    import torch

    count = torch.cuda.device_count()
    if name is None:
        name = "cuda" if count else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device must be cpu, cuda or cuda:N; got {name!r}")
    if device.type == "cuda":
        if (device.index or 0) >= count:
            raise typer.BadParameter(f"--device {name!r}: this machine has {count} usable CUDA GPUs")
        torch.cuda.set_device(device)
    return device
