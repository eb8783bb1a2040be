"""`tilewise mask`: what a mask function lets queries see, as a picture on the terminal or in a file."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from tilewise.core.functions.block_mask import block_kinds
from tilewise.core.functions.tile_map import EMPTY, FULL, PARTIAL
from tilewise.core.functions.trace import check_function
from tilewise.faces.flex_attention import create_block_mask
from tilewise.lab.figures import save

SIDE = 32  # lines of a picture on the terminal
SIGNS = " ░█"  # of EMPTY, PARTIAL and FULL
LONGEST, MOST_TILES = 1 << 20, 1 << 12  # tokens; tiles of the longer side
CELLS = 256  # a side of a picture at most; of longer masks a cell is several queries and keys
FIGURE = 4.6, 2.6  # inches
COLOURS = {"full": "#3d6cb9", "visible": "#8fafdf", "hidden": "#e6e6e6", "empty": "#ffffff"}
MEANINGS = {
    "full": "tile that is full",
    "visible": "visible, tile is partial",
    "hidden": "hidden, tile is partial",
    "empty": "empty tile: skipped",
}


def mask(
    function: Annotated[
        str,
        typer.Argument(
            help='An expression of b, h, q_idx and kv_idx, as "kv_idx <= q_idx", or FILE.py:NAME, the '
            "mask_mod of that name."
        ),
    ],
    seqlen: Annotated[int, typer.Option(min=1, max=LONGEST, help="Queries.")] = 256,
    seqlen_k: Annotated[int | None, typer.Option(min=1, max=LONGEST, help="Keys; default: as many.")] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="Queries and keys of a tile; default: 1/16.")
    ] = None,
    b: Annotated[int, typer.Option(min=0, help="The batch entry.")] = 0,
    h: Annotated[int, typer.Option(min=0, help="The head.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw into this file: .svg, .png or .pdf.")] = None,
) -> None:
    """Show the tiles that a mask function leaves."""
    lengths = seqlen, seqlen if seqlen_k is None else seqlen_k
    size = -(-max(lengths) // 16) if block is None else block
    if size * MOST_TILES < max(lengths):
        raise typer.BadParameter(f"--block {size} makes more than {MOST_TILES} tiles a side")
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
        ValueError: it is neither an expression nor FILE.py:NAME, or the file does not run, or has no such
            function.

    Example:
        >>> read("kv_idx <= q_idx")(0, 0, 2, 1)
        True
    """
    path, _, name = function.rpartition(":")
    if name.endswith(".py"):
        raise ValueError(f"{function!r} names no function: FILE.py:NAME")
    if path.endswith(".py"):
        try:
            found = runpy.run_path(path)
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"{path} does not run: {type(error).__name__}: {error}") from None
        if not callable(found.get(name)):
            raise ValueError(f"{path} has no function {name!r}")
        return found[name]  # type: ignore[no-any-return]
    try:
        code = compile(f"lambda b, h, q_idx, kv_idx: ({function})", "<the expression>", "eval")
    except SyntaxError as error:
        raise ValueError(f"{function!r} is no expression, and no FILE.py:NAME: {error.msg}") from None
    return eval(code, {"torch": torch})  # type: ignore[no-any-return]


def as_text(kinds: Tensor) -> str:
    """A line for each tile of queries, two signs for each tile of keys; of many tiles, for some together.

    Example:
        >>> print(as_text(torch.tensor([[1, 0], [2, 1]])))
        ░░
        ██░░
    """
    rows, columns = kinds.shape
    step = max(1, -(-max(rows, columns) // SIDE))
    lines = []
    for r in range(0, rows, step):
        parts = [kinds[r : r + step, c : c + step] for c in range(0, columns, step)]
        ends = [(int(x.min()), int(x.max())) for x in parts]  # several tiles are partial unless all are alike
        lines.append("".join(2 * SIGNS[most if least == most else 1] for least, most in ends).rstrip())
    return "\n".join(lines)


def kinds_of(mask_mod: Callable[..., Any], lengths: tuple[int, int], block: int, b: int, h: int) -> Tensor:
    """EMPTY, PARTIAL or FULL: uint8 (tiles of queries, tiles of keys), of batch entry b and head h."""
    check_function("mask_mod", mask_mod)
    # b and h stay stand-ins, as in attention: b0 and h0 are 0
    own = wraps(mask_mod)(lambda b0, h0, i, j: mask_mod(b0 + b, h0 + h, i, j))
    return block_kinds(create_block_mask(own, None, None, *lengths, device="cpu", BLOCK_SIZE=block))[0, 0]


def cells(mask_mod: Callable[..., Any], lengths: tuple[int, int], block: int, b: int, h: int) -> Tensor:
    """What each cell of a picture is: int64 (rows, columns), a place in `COLOURS`.

    Example:
        >>> cells(lambda b, h, i, j: j <= i, (4, 4), 2, 0, 0).tolist()
        [[1, 2, 3, 3], [1, 1, 3, 3], [0, 0, 1, 2], [0, 0, 1, 1]]
    """
    step = max(1, -(-max(lengths) // CELLS))
    small = kinds_of(mask_mod, lengths, step, b, h)
    tiles = kinds_of(mask_mod, lengths, block, b, h)
    rows, columns = (torch.arange(n) * step // block for n in small.shape)
    around = tiles[rows][:, columns]
    names = list(COLOURS)
    found = torch.where(small == EMPTY, names.index("hidden"), names.index("visible"))
    found[around == FULL] = names.index("full")
    found[around == EMPTY] = names.index("empty")
    return found


def draw_mask(
    mask_mod: Callable[..., Any], lengths: tuple[int, int], block: int, path: Path, b: int = 0, h: int = 0
) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=FIGURE)
    axes = figure.subplots()
    shown = cells(mask_mod, lengths, block, b, h)
    colours = ListedColormap(list(COLOURS.values()))
    extent = (0, lengths[1], lengths[0], 0)
    axes.imshow(shown.numpy(), cmap=colours, vmin=-0.5, vmax=3.5, interpolation="nearest", extent=extent)
    handles = [Patch(facecolor=c, edgecolor="#999999", label=MEANINGS[n]) for n, c in COLOURS.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    axes.set_xlabel("keys")
    axes.set_ylabel("queries")
    save(figure, path, bbox_inches="tight")


def shares(kinds: Tensor) -> tuple[float, float, float]:
    """Of all tiles, how much is full, partial and empty: each 0 to 1."""
    full, partial, empty = ((kinds == kind).double().mean().item() for kind in (FULL, PARTIAL, EMPTY))
    return full, partial, empty
