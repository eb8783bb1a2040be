"""`tilewise trace`: print an example, or random inputs, tile by tile. `tilewise fp8`: print 8-bit attention.
`tilewise learn`: write the page. `tilewise pipeline`: draw the Hopper kernel's schedule.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tilewise.core.checks import MAX_HEAD_DIM
from tilewise.core.fp8 import BLOCK_ROWS
from tilewise.lab.learn import eight_bits
from tilewise.lab.learn.examples import (
    EXAMPLES,
    LARGEST,
    Example,
    Tensors,
    own_example,
    random_example,
    walkthrough,
)
from tilewise.lab.learn.show import as_rich, counted
from tilewise.lab.learn.trace import BlockSizes, paper_block_sizes

DEFAULT = "scores-2-5-3"  # the example that a bare `trace` prints
LARGEST_OUTLIER = 1e6
LARGEST_SEED = 2**63 - 1  # of torch.Generator


def trace(
    example: Annotated[
        str | None, typer.Option(help=f"A worked example: {', '.join(EXAMPLES)}. Default: {DEFAULT}.")
    ] = None,
    q: Annotated[
        str | None,
        typer.Option(help='Your own queries, as "1,0;0,1" or a file .csv, .npy or .pt; with --k, --v.'),
    ] = None,
    k: Annotated[str | None, typer.Option(help="Your own keys, a row each.")] = None,
    v: Annotated[str | None, typer.Option(help="Your own values, a row for each key.")] = None,
    seqlen: Annotated[int | None, typer.Option(help="Random inputs with this many queries instead.")] = None,
    seqlen_k: Annotated[int | None, typer.Option(help="Keys of random inputs; default: as many.")] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Elements of a head of random inputs; default: 2.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=LARGEST_SEED, help="Seed of random inputs; default: 0.")
    ] = None,
    order: Annotated[str, typer.Option(help="fa1: keys outer. fa2: queries outer.")] = "fa2",
    normalize: Annotated[str, typer.Option(help="each_step, or end.")] = "end",
    block_q: Annotated[
        int | None, typer.Option(help="Queries in a tile; default: the example's, or 2.")
    ] = None,
    block_k: Annotated[int | None, typer.Option(help="Keys in a tile; default: the example's, or 2.")] = None,
    sram_size: Annotated[
        int | None,
        typer.Option(help="Block sizes from a fast memory of so many elements, as the paper has it."),
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Default: the example's, or 1/sqrt(head_dim).")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Mask the future.")] = False,
    backward: Annotated[
        bool | None,
        typer.Option("--backward/--no-backward", help="Default: where the example has one; else dO = 1."),
    ] = None,
    digits: Annotated[int | None, typer.Option(min=0, max=15, help="Digits after the point.")] = None,
) -> None:
    """Print every number of tiled attention, tile by tile."""
    from rich.console import Console
    from rich.text import Text

    only_random = {"--seqlen-k": seqlen_k, "--head-dim": head_dim, "--seed": seed}
    chosen = _chosen(example, {"--q": q, "--k": k, "--v": v}, seqlen, only_random)
    blocks = BlockSizes(
        chosen.block_q if block_q is None else block_q, chosen.block_k if block_k is None else block_k
    )
    if sram_size is not None and (block_q, block_k) != (None, None):
        raise typer.BadParameter("--sram-size sets both block sizes; leave out --block-q and --block-k")
    if scale is not None:
        chosen = replace(chosen, scale=scale)
    try:
        tensors = _with_dout(chosen, backward)
        if sram_size is not None:
            blocks = paper_block_sizes(sram_size, tensors.query.shape[1])
        sections = list(walkthrough(chosen, tensors, blocks, order, normalize, causal))
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(highlight=False)
    console.print(Text(f"{chosen.name}: {chosen.summary}\n"), soft_wrap=True)
    for line in as_rich(sections, chosen.digits if digits is None else digits):
        console.print(line, soft_wrap=True)  # a row of a matrix stays on one line
    if example is None and seqlen is None and q is None:
        typer.echo("Other inputs: --example NAME, --seqlen N, or your own with --q, --k and --v; see --help.")


def fp8(
    outlier: Annotated[float, typer.Option(help="Column 0 of q and k is multiplied by this.")] = 8.0,
    rows: Annotated[int, typer.Option(help="Queries, and keys.")] = eight_bits.ROWS,
    head_dim: Annotated[int, typer.Option(help="Elements of a head.")] = eight_bits.HEAD_DIM,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the random inputs.")
    ] = eight_bits.SEED,
    query: Annotated[int, typer.Option(help="The query whose numbers are printed.")] = 0,
    digits: Annotated[int, typer.Option(min=0, max=15, help="Digits after the point.")] = 4,
) -> None:
    """Print every number of 8-bit attention.

    Inputs are quantized as they are, then rotated; beside each, how far it is off.
    """
    from rich.console import Console
    from rich.text import Text

    for option, value, largest in (("--rows", rows, BLOCK_ROWS), ("--head-dim", head_dim, 512)):
        if not 1 <= value <= largest:
            raise typer.BadParameter(f"{option} must be 1 to {largest}; got {value}")
    if not 0 <= query < rows:
        raise typer.BadParameter(f"--query must be 0 to {rows - 1}; got {query}")
    if not abs(outlier) <= LARGEST_OUTLIER:
        raise typer.BadParameter(f"--outlier must be at most {LARGEST_OUTLIER:g} in size; got {outlier:g}")
    walk = eight_bits.walk(*eight_bits.example(outlier, rows, head_dim, seed))
    console = Console(highlight=False)
    inputs = f"{rows} queries and keys, head_dim {head_dim}, seed {seed}"
    console.print(Text(f"{inputs}, column 0 of q and k times {outlier:g}\n"), soft_wrap=True)
    for line in as_rich(eight_bits.sections(walk, query), digits):
        console.print(line, soft_wrap=True)


def learn(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("tilewise-learn.html"),
    is_opened: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a page that shows tiles at work.

    One HTML file, for any browser and without network: tiles, memory, backward, caches, 8-bit numbers.
    """
    from tilewise.lab.learn.page import build

    try:
        out.write_text(build(), encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"--out {out}: {error.strerror or error}") from None
    typer.echo(f"wrote {out}: open {out.resolve().as_uri()}")
    if is_opened:
        typer.launch(str(out))


def pipeline(
    head_dim: Annotated[int, typer.Option(min=1, max=MAX_HEAD_DIM, help="Elements of a head.")] = 128,
    block_n: Annotated[int | None, typer.Option(min=1, help="Keys in a tile; default: the kernel's.")] = None,
    warpgroups: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Consumer warpgroups, of 64 queries each; default: the kernel's."),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(
            min=1, help="Pipeline stages: slots for K tiles, and for V tiles; default: the kernel's."
        ),
    ] = None,
    overlap: Annotated[bool, typer.Option(help="Start the next Q K^T before P V has ended.")] = True,
    ping_pong: Annotated[
        bool,
        typer.Option("--ping-pong", help="Barriers that make warpgroups take turns with their products."),
    ] = False,
    key_tiles: Annotated[
        int, typer.Option(min=1, max=1 << 12, help="Key tiles that each query tile visits.")
    ] = 8,
    spans: Annotated[
        bool, typer.Option("--spans", help="List every copy, product, softmax and wait instead.")
    ] = False,
) -> None:
    """Draw the schedule of the Hopper kernel.

    The forward's timeline is simulated from an H200's datasheet rates: no kernel is run. The drawing shows
    what overlaps and what waits.
    """
    from tilewise.lab.learn.pipeline import Pipeline, drawing, variants

    try:
        kernel = Pipeline.of_kernel(head_dim, key_tiles)
        given = {"block_n": block_n, "warpgroups": warpgroups, "stages": stages}
        changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        timeline = replace(kernel, overlap=overlap, ping_pong=ping_pong, **changed).run()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    p = timeline.pipeline
    typer.echo(
        f"{counted(p.key_tiles, 'key tile')} of {p.block_n}, "
        f"{counted(p.warpgroups, 'warpgroup')} of 64 queries, {counted(p.stages, 'pipeline stage')}, "
        f"head_dim {p.head_dim}\n{p.variant}: "
        f"{timeline.cycles:.0f} cycles, tensor cores busy {timeline.tensor_core_use:.0%}"
    )
    if spans:
        for span in timeline.spans:
            typer.echo(
                f"  {span.start:8.0f} {span.end:8.0f}  {span.lane:<12} {span.kind:<8} tile {span.tile}"
            )
        return
    for line in drawing(timeline, shutil.get_terminal_size((100, 24)).columns):
        typer.echo(line)
    typer.echo("\nWith and without overlap (--no-overlap) and ping-pong (--ping-pong):")
    for other in variants(p):
        mark = "  <- above" if other.pipeline == p else ""
        use = f"tensor cores busy {other.tensor_core_use:.0%}"
        typer.echo(f"  {other.pipeline.variant:<24} {other.cycles:8.0f} cycles, {use}{mark}")


def _chosen(
    example: str | None, own: dict[str, str | None], seqlen: int | None, only_random: dict[str, int | None]
) -> Example:
    """The example asked for, or one of random inputs or of one's own matrices."""
    given = [option for option, value in own.items() if value is not None]
    kinds = {"--example": example is not None, "--seqlen": seqlen is not None, "--q": bool(given)}
    if sum(kinds.values()) > 1:
        raise typer.BadParameter(
            f"{' and '.join(name for name, is_given in kinds.items() if is_given)} each give the inputs: "
            "leave out all but one"
        )
    if seqlen is not None:
        return _random(seqlen, only_random)
    for option, value in only_random.items():
        if value is not None:
            raise typer.BadParameter(f"{option} goes with --seqlen N, for random inputs")
    if given:
        if len(given) < len(own):
            raise typer.BadParameter(f"--q, --k and --v go together; got only {' and '.join(given)}")
        try:
            return own_example(*(str(text) for text in own.values()))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    name = DEFAULT if example is None else example
    if name not in EXAMPLES:
        raise typer.BadParameter(f"--example must be one of {', '.join(EXAMPLES)}; got {name!r}")
    return EXAMPLES[name]


def _random(seqlen: int, given: dict[str, int | None]) -> Example:
    default = {"--seqlen": seqlen, "--seqlen-k": seqlen, "--head-dim": 2, "--seed": 0}
    chosen = default | {option: value for option, value in given.items() if value is not None}
    for option in ("--seqlen", "--seqlen-k", "--head-dim"):
        if not 1 <= chosen[option] <= LARGEST:
            limits = f"1 to {LARGEST}, because every number is printed"
            raise typer.BadParameter(f"{option} must be {limits}; got {chosen[option]}")
    return random_example(seqlen, chosen["--seqlen-k"], chosen["--head-dim"], chosen["--seed"])


def _with_dout(example: Example, backward: bool | None) -> Tensors:
    """With the output gradient that is wanted: ones where the example has none of its own."""
    tensors = example.tensors()
    if backward is False:
        return tensors._replace(dout=None)
    if backward is None or tensors.dout is not None:
        return tensors
    return tensors._replace(dout=torch.ones(len(tensors.query), tensors.value.shape[1], dtype=torch.float64))
