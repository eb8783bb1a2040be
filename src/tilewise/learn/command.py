"""`tilewise trace`: print a worked example, or random inputs, tile by tile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tilewise.learn.examples import EXAMPLES

if TYPE_CHECKING:
    from tilewise.learn.examples import Example, Tensors

LARGEST = 64  # rows; everything is printed


def trace(
    example: Annotated[str | None, typer.Option(help=f"A worked example: {', '.join(EXAMPLES)}.")] = None,
    seqlen: Annotated[int | None, typer.Option(help="Random inputs with this many queries instead.")] = None,
    seqlen_k: Annotated[int | None, typer.Option(help="Keys of random inputs; default: as many.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head size of random inputs; default: 2.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of random inputs; default: 0.")] = None,
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
        bool | None, typer.Option("--backward/--no-backward", help="Default: where the example has one.")
    ] = None,
    digits: Annotated[int | None, typer.Option(min=0, max=15, help="Digits after the point.")] = None,
) -> None:
    """Print every number of tiled attention, tile by tile."""
    from rich.console import Console
    from rich.text import Text

    from tilewise.learn.show import as_rich
    from tilewise.learn.trace import BlockSizes, paper_block_sizes
    from tilewise.learn.walkthrough import Settings, walkthrough

    chosen = _chosen(example, seqlen, {"--seqlen-k": seqlen_k, "--head-dim": head_dim, "--seed": seed})
    tensors = (
        chosen.tensors()
        if chosen
        else _random(seqlen or 0, seqlen_k, 2 if head_dim is None else head_dim, seed or 0)
    )
    tensors = _with_dout(tensors, None if chosen else seed or 0, backward)
    if sram_size is not None and (block_q, block_k) != (None, None):
        raise typer.BadParameter("--sram-size sets both block sizes; leave out --block-q and --block-k")
    default = BlockSizes(chosen.block_q, chosen.block_k) if chosen else BlockSizes(2, 2)
    blocks = BlockSizes(
        default.block_q if block_q is None else block_q, default.block_k if block_k is None else block_k
    )
    settings = Settings(
        order=order,
        normalize=normalize,
        scale=chosen.scale if chosen and scale is None else scale,
        causal=causal,
        learning_rate=chosen.learning_rate if chosen else None,
        without_max=bool(chosen and chosen.without_max),
    )
    try:
        if sram_size is not None:
            blocks = paper_block_sizes(sram_size, tensors.query.shape[1])
        sections = list(walkthrough(tensors, blocks, settings))
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    console = Console(highlight=False)
    if chosen:
        console.print(Text(f"{chosen.name}: {chosen.summary}\n"), soft_wrap=True)
    shown_digits = digits if digits is not None else chosen.digits if chosen else 4
    for line in as_rich(sections, shown_digits):
        console.print(line, soft_wrap=True)  # a row of a matrix stays on one line


def _chosen(example: str | None, seqlen: int | None, only_random: dict[str, int | None]) -> Example | None:
    """The example asked for; None for random inputs."""
    names = ", ".join(EXAMPLES)
    if (example is None) == (seqlen is None):
        raise typer.BadParameter(f"give either --example NAME ({names}) or --seqlen N")
    if example is None:
        return None
    if example not in EXAMPLES:
        raise typer.BadParameter(f"--example must be one of {names}; got {example!r}")
    for option, value in only_random.items():
        if value is not None:
            raise typer.BadParameter(f"{option} goes with --seqlen; --example {example} has its own inputs")
    return EXAMPLES[example]


def _random(seqlen_q: int, seqlen_k: int | None, head_dim: int, seed: int) -> Tensors:
    import torch

    from tilewise.learn.examples import Tensors

    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    sizes = (("--seqlen", seqlen_q), ("--seqlen-k", seqlen_k), ("--head-dim", head_dim))
    for name, size in sizes:
        if not 1 <= size <= LARGEST:
            raise typer.BadParameter(
                f"{name} must be 1 to {LARGEST}, because every number is printed; got {size}"
            )
    generator = torch.Generator().manual_seed(seed)
    shapes = ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim))
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return Tensors(query, key, value, None)


def _with_dout(tensors: Tensors, seed: int | None, backward: bool | None) -> Tensors:
    """With the output gradient that is wanted: the example's own, ones, or random if there is a seed."""
    import torch

    if backward is False:
        return tensors._replace(dout=None)
    if backward is None or tensors.dout is not None:
        return tensors
    shape = (tensors.query.shape[0], tensors.value.shape[1])
    dout = torch.ones(shape, dtype=torch.float64)
    if seed is not None:
        dout.normal_(generator=torch.Generator().manual_seed(seed + 1))
    return tensors._replace(dout=dout)
