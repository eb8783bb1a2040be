"""`tilewise mask`: what a mask function lets queries see, as a picture on the terminal or in a file."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

SIDE = 32  # lines of a picture on the terminal
SIGNS = " ░█"  # of EMPTY, PARTIAL and FULL


def mask(
    function: Annotated[
        str,
        typer.Argument(
            help='An expression of b, h, q_idx and kv_idx, as "kv_idx <= q_idx", or FILE.py:NAME, the '
            "mask_mod of that name."
        ),
    ],
    seqlen: Annotated[int, typer.Option(min=1, help="Queries.")] = 256,
    seqlen_k: Annotated[int | None, typer.Option(min=1, help="Keys; default: as many.")] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="Queries and keys of a tile; default: 1/16.")
    ] = None,
    b: Annotated[int, typer.Option(min=0, help="The batch entry.")] = 0,
    h: Annotated[int, typer.Option(min=0, help="The head.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw into this file: .svg, .png or .pdf.")] = None,
) -> None:
    """Show the tiles that a mask function leaves."""
    from tilewise.lab.mask.picture import draw_mask, kinds_of, shares

    lengths = seqlen, seqlen if seqlen_k is None else seqlen_k
    size = max(1, -(-max(lengths) // 16)) if block is None else block
    try:
        mask_mod = read(function)
        kinds = kinds_of(mask_mod, lengths, size, b, h)
        if plot is not None:
            draw_mask(mask_mod, lengths, size, plot, b, h)
    except OSError as error:
        sys.exit(f"tilewise mask: {error.filename}: {error.strerror}")
    except (TypeError, ValueError, IndexError, NotImplementedError) as error:
        sys.exit(f"tilewise mask: {error}")
    typer.echo(as_text(kinds))
    full, partial, empty = shares(kinds)
    typer.echo(
        f"{lengths[0]:,} queries, {lengths[1]:,} keys, tiles of {size} x {size}: "
        f"{full:.1%} full, {partial:.1%} partial, {empty:.1%} empty"
    )
    if plot is not None:
        typer.echo(f"drawn: {plot}")


def read(function: str) -> Callable[..., Any]:
    """The mask function that the command names.

    Raises:
        ValueError: it is neither an expression nor FILE.py:NAME, or the file has no such function.

    Example:
        >>> read("kv_idx <= q_idx")(0, 0, 2, 1)
        True
    """
    path, _, name = function.rpartition(":")
    if path.endswith(".py"):
        found = runpy.run_path(path)
        if not callable(found.get(name)):
            raise ValueError(f"{path} has no function {name!r}")
        return found[name]  # type: ignore[no-any-return]
    import torch

    try:
        code = compile(f"lambda b, h, q_idx, kv_idx: ({function})", "<the expression>", "eval")
    except SyntaxError as error:
        raise ValueError(f"{function!r} is no expression, and no FILE.py:NAME: {error.msg}") from None
    return eval(code, {"torch": torch})  # type: ignore[no-any-return]


def as_text(kinds: Any) -> str:
    """A line for each tile of queries, two signs for each tile of keys; of many tiles, for some together.

    Example:
        >>> import torch
        >>> print(as_text(torch.tensor([[1, 0], [2, 1]])))
        ░░
        ██░░
    """
    rows, columns = kinds.shape
    step = max(1, -(-max(rows, columns) // SIDE))
    lines = []
    for r in range(0, rows, step):
        cells = [kinds[r : r + step, c : c + step] for c in range(0, columns, step)]
        ends = [(int(x.min()), int(x.max())) for x in cells]  # several tiles are partial unless all are alike
        lines.append("".join(2 * SIGNS[most if least == most else 1] for least, most in ends).rstrip())
    return "\n".join(lines)
