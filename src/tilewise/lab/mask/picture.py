"""Pictures of mask and score functions: what a query sees, and which tiles that leaves."""

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

CELLS = 256  # a side of a picture at most; of longer masks a cell is several queries and keys
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
    """A picture of a mask function and its tiles."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure, axes = _figure(path)
    shown = cells(mask_mod, lengths, block, b, h)
    colours = ListedColormap(list(COLOURS.values()))
    extent = (0, lengths[1], lengths[0], 0)
    axes.imshow(shown.numpy(), cmap=colours, vmin=-0.5, vmax=3.5, interpolation="nearest", extent=extent)
    handles = [Patch(facecolor=c, edgecolor="#999999", label=MEANINGS[n]) for n, c in COLOURS.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    axes.set_xlabel("keys")
    axes.set_ylabel("queries")
    _save(figure, path)


def draw_score(score_mod: Callable[..., Any], length: int, path: Path, h: int = 0) -> None:
    """What a score function adds to a score of 0 at each query and key; a curve where these don't matter."""
    figure, axes = _figure(path)
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    zero, head = torch.zeros((), dtype=torch.long), torch.tensor(h)
    with torch.no_grad():
        added = score_mod(torch.zeros(length, length), zero, head, i, j).expand(length, length)
        scores = torch.linspace(-80, 80, 161)
        curve = score_mod(scores, zero, head, zero, zero).expand(161)
    if bool((added == added[0, 0]).all()):
        axes.plot(scores.numpy(), curve.numpy(), color=COLOURS["full"])
        axes.plot(scores.numpy(), scores.numpy(), color="#999999", linewidth=0.8, linestyle=":")
        axes.set(xlabel="score", ylabel="new score", aspect="equal", ylim=(-80, 80))
    else:
        shown = axes.imshow(
            added.numpy(), cmap="viridis", interpolation="nearest", extent=(0, length, length, 0)
        )
        figure.colorbar(shown, label=f"added to scores of head {h}")
        axes.set(xlabel="keys", ylabel="queries")
    _save(figure, path)


def _figure(path: Path) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = path.name  # the same file from the same function
    figure = Figure(figsize=(4.6, 2.6))
    return figure, figure.subplots()


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, bbox_inches="tight")


def shares(kinds: Tensor) -> tuple[float, float, float]:
    """Of all tiles, how much is full, partial and empty: each 0 to 1."""
    full, partial, empty = ((kinds == kind).double().mean().item() for kind in (FULL, PARTIAL, EMPTY))
    return full, partial, empty
