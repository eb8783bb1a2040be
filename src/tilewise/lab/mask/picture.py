"""Pictures of mask functions: what a query sees, and which tiles that leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.core.functions.block_mask import block_kinds
from tilewise.core.functions.tile_map import EMPTY, FULL, PARTIAL
from tilewise.core.functions.trace import check_function
from tilewise.faces.flex_attention import create_block_mask
from tilewise.lab.figures import save

CELLS = 256  # a side of a picture at most; of longer masks a cell is several queries and keys
FIGURE = 4.6, 2.6  # inches
COLOURS = {"full": "#3d6cb9", "visible": "#8fafdf", "hidden": "#e6e6e6", "empty": "#ffffff"}
MEANINGS = {
    "full": "tile that is full",
    "visible": "visible, tile is partial",
    "hidden": "hidden, tile is partial",
    "empty": "empty tile: skipped",
}


def kinds_of(mask_mod: Callable[..., Any], lengths: tuple[int, int], block: int, b: int, h: int) -> Tensor:
    """EMPTY, PARTIAL or FULL: uint8 (tiles of queries, tiles of keys), of batch entry b and head h."""
    check_function("mask_mod", mask_mod)
    own = wraps(mask_mod)(lambda _b, _h, i, j: mask_mod(b, h, i, j))
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
