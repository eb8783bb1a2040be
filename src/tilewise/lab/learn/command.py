"""`tilewise trace`: print an example, or random inputs, tile by tile. `tilewise fp8`: print 8-bit attention.
`tilewise learn`: write the page. `tilewise pipeline`: lay out the Hopper kernel's schedule.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tilewise.core.checks import MAX_HEAD_DIM
from tilewise.core.fp8 import BLOCK_ROWS
from tilewise.lab.learn import eight_bits
from tilewise.lab.learn.examples import EXAMPLES, Example, Settings, Tensors, random_example, walkthrough
from tilewise.lab.learn.show import as_rich
from tilewise.lab.learn.trace import BlockSizes, paper_block_sizes

LARGEST = 64  # rows; everything is printed
LARGEST_OUTLIER = 1e6
LARGEST_SEED = 2**63 - 1  # of torch.Generator


def trace(
    example: Annotated[str | None, typer.Option(help=f"A worked example: {', '.join(EXAMPLES)}.")] = None,
    seqlen: Annotated[int | None, typer.Option(help="Random inputs with this many queries instead.")] = None,
    seqlen_k: Annotated[int | None, typer.Option(help="Keys of random inputs; default: as many.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head size of random inputs; default: 2.")] = None,
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

    chosen = _chosen(example, seqlen, {"--seqlen-k": seqlen_k, "--head-dim": head_dim, "--seed": seed})
    blocks = BlockSizes(
        chosen.block_q if block_q is None else block_q, chosen.block_k if block_k is None else block_k
    )
    if sram_size is not None and (block_q, block_k) != (None, None):
        raise typer.BadParameter("--sram-size sets both block sizes; leave out --block-q and --block-k")
    settings = Settings(
        order=order,
        normalize=normalize,
        scale=chosen.scale if scale is None else scale,
        causal=causal,
        learning_rate=chosen.learning_rate,
        without_max=chosen.without_max,
    )
    try:
        tensors = _with_dout(chosen, backward)
        if sram_size is not None:
            blocks = paper_block_sizes(sram_size, tensors.query.shape[1])
        sections = list(walkthrough(tensors, blocks, settings))
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(highlight=False)
    console.print(Text(f"{chosen.name}: {chosen.summary}\n"), soft_wrap=True)
    for line in as_rich(sections, chosen.digits if digits is None else digits):
        console.print(line, soft_wrap=True)  # a row of a matrix stays on one line


def fp8(
    outlier: Annotated[float, typer.Option(help="Column 0 of q and k is multiplied by this.")] = 8.0,
    rows: Annotated[int, typer.Option(help="Queries, and keys.")] = eight_bits.ROWS,
    head_dim: Annotated[int, typer.Option(help="Head size.")] = eight_bits.HEAD_DIM,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the random inputs.")
    ] = eight_bits.SEED,
    query: Annotated[int, typer.Option(help="The query whose numbers are printed.")] = 0,
    digits: Annotated[int, typer.Option(min=0, max=15, help="Digits after the point.")] = 4,
) -> None:
    """Print 8-bit attention's numbers, as they are and rotated, and how far each is off."""
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
    inputs = f"{rows} queries and keys, head size {head_dim}, seed {seed}"
    console.print(Text(f"{inputs}, column 0 of q and k times {outlier:g}\n"), soft_wrap=True)
    for line in as_rich(eight_bits.sections(walk, query), digits):
        console.print(line, soft_wrap=True)


def learn(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("tilewise-learn.html"),
    is_opened: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write one HTML page, for any browser and without network, that shows tiles and memory at work."""
    from tilewise.lab.learn.page import build

    try:
        out.write_text(build(), encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"--out {out}: {error.strerror or error}") from None
    typer.echo(f"wrote {out}: open {out.resolve().as_uri()}")
    if is_opened:
        typer.launch(str(out))


def pipeline(
    head_dim: Annotated[int, typer.Option(min=1, max=MAX_HEAD_DIM, help="Head size.")] = 128,
    block_n: Annotated[int | None, typer.Option(help="Keys in a tile; default: the kernel's.")] = None,
    warpgroups: Annotated[
        int | None, typer.Option(max=64, help="Of 64 queries; default: the kernel's.")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Depth of the rings; default: the kernel's.")] = None,
    overlap: Annotated[bool, typer.Option(help="Start the next scores before P V.")] = True,
    ping_pong: Annotated[
        bool, typer.Option("--ping-pong", help="Barriers that make products alternate.")
    ] = False,
    key_tiles: Annotated[int, typer.Option(max=1 << 16, help="Key tiles that each query tile visits.")] = 8,
    spans: Annotated[bool, typer.Option("--spans", help="Every piece of work and of waiting.")] = False,
) -> None:
    """Lay out the Hopper forward kernel's schedule as a timeline of cycles, from datasheet rates."""
    from tilewise.lab.learn.pipeline import Pipeline

    try:
        kernel = Pipeline.of_kernel(head_dim, key_tiles)
        given = {"block_n": block_n, "warpgroups": warpgroups, "stages": stages}
        changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        timeline = replace(kernel, overlap=overlap, ping_pong=ping_pong, **changed).run()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    p = timeline.pipeline
    typer.echo(
        f"{p.key_tiles} key tiles of {p.block_n}, {p.warpgroups} warpgroups, rings of {p.stages}, "
        f"{'' if p.overlap else 'no '}overlap, {'' if p.ping_pong else 'no '}ping-pong: "
        f"{timeline.cycles:.0f} cycles, tensor cores busy {timeline.tensor_core_use:.0%}"
    )
    for span in timeline.spans if spans else ():
        typer.echo(f"  {span.start:8.0f} {span.end:8.0f}  {span.lane:<12} {span.kind:<8} tile {span.tile}")


def _chosen(example: str | None, seqlen: int | None, only_random: dict[str, int | None]) -> Example:
    """The example asked for, or one of random inputs."""
    names = ", ".join(EXAMPLES)
    if seqlen is None and example is not None:
        if example not in EXAMPLES:
            raise typer.BadParameter(f"--example must be one of {names}; got {example!r}")
        for option, value in only_random.items():
            if value is not None:
                raise typer.BadParameter(f"{option} goes with --seqlen; {example} has its own inputs")
        return EXAMPLES[example]
    if seqlen is None or example is not None:
        raise typer.BadParameter(f"give either --example NAME ({names}) or --seqlen N")
    default = {"--seqlen": seqlen, "--seqlen-k": seqlen, "--head-dim": 2, "--seed": 0}
    chosen = default | {option: value for option, value in only_random.items() if value is not None}
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
