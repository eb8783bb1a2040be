"""`tilewise heads`: a small model, trained here, and what its heads attend to in a long text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from tilewise.api import attention
from tilewise.core.statistics import Aux, Statistics
from tilewise.lab.demo.gpt import GPT
from tilewise.lab.demo.methods import METHODS, TILEWISE
from tilewise.lab.demo.scale import CPU, QUICK
from tilewise.lab.demo.text import NoText, standard_library
from tilewise.lab.demo.train import train
from tilewise.lab.heads import Heads

DEFAULT_OUT = Path("heads.png")
ENDINGS = (".png", ".svg", ".pdf")
LEAST_TOKENS, MOST_TOKENS, MOST_TILES = 256, 1 << 18, 1 << 12
SCALE = replace(CPU, layers=2, context=1024, batch=2, steps=400, learning_rate=4e-3)


def heads(
    out: Annotated[Path, typer.Option(help="The picture: .png, .svg or .pdf.")] = DEFAULT_OUT,
    tokens: Annotated[
        int, typer.Option(min=LEAST_TOKENS, max=MOST_TOKENS, help="Bytes of held-out text to attend in.")
    ] = 16384,
    block: Annotated[int, typer.Option(min=1, help="Queries and keys of a tile.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Of training.")] = SCALE.steps,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of the model and its batches.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A tiny model: seconds, not minutes.")] = False,
) -> None:
    """Draw what heads attend to in a long text.

    Trains on Python's standard library, on the CPU. What is drawn is exact, and takes O(N) memory.
    """
    if out.suffix not in ENDINGS:
        raise typer.BadParameter(f"--out {out} must end in {', '.join(ENDINGS)}")
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"--out {out}: there is no folder {out.absolute().parent}")
    if block * MOST_TILES < tokens:
        raise typer.BadParameter(f"--block {block} makes more than {MOST_TILES} tiles a side")
    scale = replace(QUICK, steps=min(steps, QUICK.steps)) if quick else replace(SCALE, steps=steps)
    try:
        text = standard_library()
    except NoText as error:
        raise typer.BadParameter(str(error)) from None
    if len(text.valid) < tokens:
        raise typer.BadParameter(
            f"{len(text.valid)} bytes of text are held out, fewer than --tokens {tokens}"
        )
    curve, model = train(METHODS[TILEWISE], text, scale, torch.device("cpu"), seed, lambda: None)
    title = f"{tokens} bytes of Python sources; trained on windows of {scale.context} for {scale.steps} steps"
    found = statistics(model, text.valid[None, :tokens].long(), Aux(block_sum=block, entropy=True))
    drawn = Heads(found, block, title)
    drawn.save(out)
    before, after = curve.valid_before, curve.valid_after
    typer.echo(f"text: {text.source}")
    typer.echo(
        f"held-out loss: {before:.2f} nats a byte before training, {after:.2f} after {scale.steps} steps"
    )
    for line in _table(drawn):
        typer.echo(line)
    typer.echo(f"picture: {out}")


@torch.no_grad()
def statistics(model: GPT, tokens: Tensor, aux: Aux) -> list[Statistics]:
    """Of each layer's causal attention in a text (1, seqlen)."""
    found: list[Statistics] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, answer = attention(q, k, v, causal=True, return_aux=aux)  # type: ignore[misc]
        found.append(answer)  # type: ignore[arg-type]
        return out

    model(tokens, [attend] * len(model.blocks))
    return found


def _table(drawn: Heads) -> list[str]:
    lines = [
        f"{'head':12} {'entropy, nats':>14} {'near':>6} {'first':>6}   near: own tile and the one before"
    ]
    for layer, of_layer in enumerate(drawn.entropy.mean(-1)):
        for head, entropy in enumerate(of_layer):
            shares = f"{drawn.local[layer, head]:6.0%} {drawn.first[layer, head]:6.0%}"
            lines.append(f"layer {layer}, {head:<3} {entropy:14.2f} {shares}")
    return lines
