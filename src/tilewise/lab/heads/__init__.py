"""What the heads of a model attend to: one picture of exact statistics, at any length.

    layers = [attention(..., return_aux=Aux(block_sum=128, entropy=True))[1] for each layer]
    Heads(layers, block=128)               # in a notebook, the picture
    Heads(layers, block=128).save("heads.png")

`tilewise heads` draws those of a small model that it trains.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.core.statistics import Statistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RANGE = 10.0  # of the colours: a tenth of uniform attention to ten times as much
WIDTH, HEIGHT = 3.4, 2.6  # inches of a head
RESOLUTION = 110


@dataclass(frozen=True)
class Heads:
    """The heads of causal self-attention in one sequence, a row a layer. A notebook shows the picture.

    Of each head an image of its tiles, and beside it the entropy of each query's weights. A tile's colour
    compares its attention with that of a head which attends to all earlier keys alike.

    Args:
        layers: of each layer the `Statistics` that `Aux(block_sum=block, entropy=True)` asks for, of a batch
            of one: block_sum (1, heads, tiles of queries, tiles of keys), entropy (1, heads, seqlen_q).
        block: queries and keys of a tile, as in the request.
        title: written above the picture.

    Raises:
        TypeError, ValueError: a layer is not what it must be; the message names it.

    Example:
        >>> from tilewise import Aux, attention_statistics
        >>> q = torch.randn(1, 64, 2, 8)
        >>> aux = attention_statistics(q, q, Aux(block_sum=16, entropy=True), causal=True)
        >>> heads = Heads([aux], block=16)
        >>> heads.shares.shape, heads.entropy.shape
        (torch.Size([1, 2, 4, 4]), torch.Size([1, 2, 64]))
    """

    layers: Sequence[Statistics]
    block: int
    title: str = ""
    shares: Tensor = field(init=False, repr=False)  # (layers, heads, tiles, tiles), float32
    entropy: Tensor = field(init=False, repr=False)  # (layers, heads, seqlen_q), in nats

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers=[] must hold the statistics of at least one layer")
        for n, layer in enumerate(self.layers):
            if not isinstance(layer, Statistics):
                raise TypeError(f"layers[{n}]={type(layer).__name__} must be tilewise.Statistics")
            if layer.block_sum is None or layer.entropy is None:
                raise ValueError(f"layers[{n}] must have block_sum and entropy: ask for both in one Aux")
            if layer.entropy.ndim != 3 or len(layer.entropy) != 1:
                shape = tuple(layer.entropy.shape)
                raise ValueError(f"layers[{n}].entropy.shape={shape} must be (1, heads, seqlen_q)")
        sums, entropy = (
            torch.cat([getattr(layer, name).detach().float().cpu() for layer in self.layers])
            for name in ("block_sum", "entropy")
        )
        seqlen = entropy.shape[-1]
        tiles = -(-seqlen // self.block)
        if sums.shape[2:] != (tiles, tiles):
            found = " x ".join(map(str, sums.shape[2:]))
            raise ValueError(f"block={self.block} must be the request's: {found} tiles of {seqlen} queries")
        rows = torch.full((tiles, 1), float(self.block))
        rows[-1] = seqlen - (tiles - 1) * self.block
        object.__setattr__(self, "shares", sums / rows)
        object.__setattr__(self, "entropy", entropy)

    @property
    def seqlen(self) -> int:
        return self.entropy.shape[-1]

    @property
    def uniform(self) -> Tensor:
        """`shares` of a head that attends to all keys up to the query's own alike, (tiles, tiles)."""
        seen = torch.arange(1, self.seqlen + 1)[:, None]  # keys of each query
        first = torch.arange(0, self.seqlen, self.block)
        of_queries = (seen - first).clamp(0, self.block) / seen
        return torch.stack([rows.mean(0) for rows in of_queries.split(self.block)])

    @property
    def local(self) -> Tensor:
        """Share of each head's attention to the query's own tile and the one before, (layers, heads)."""
        own, before = (self.shares.diagonal(offset, 2, 3).sum(-1) for offset in (0, -1))
        return (own + before) / self.shares.shape[2]

    @property
    def first(self) -> Tensor:
        """Share of each head's attention that goes to the first tile of keys, (layers, heads)."""
        return self.shares[..., 0].mean(-1)

    def figure(self) -> Figure:
        """The picture: queries downwards, keys to the right; beside each image the entropy of its queries."""
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure

        layers, heads = self.shares.shape[:2]
        figure = Figure(figsize=(WIDTH * heads + 1.2, HEIGHT * layers + 0.8), layout="constrained")
        grid = figure.subplots(
            layers, 2 * heads, squeeze=False, sharey=True, gridspec_kw={"width_ratios": [3, 1] * heads}
        )
        norm = LogNorm(1 / RANGE, RANGE)
        image: Any = None  # any of them: they share their colours
        for layer in range(layers):
            for head in range(heads):
                picture, strip = grid[layer, 2 * head : 2 * head + 2]
                image = self._draw_tiles(picture, layer, head, norm)
                self._draw_entropy(strip, layer, head)
                if layer == layers - 1:
                    picture.set_xlabel("key")
                    strip.set_xlabel("entropy, nats")
            grid[layer, 0].set_ylabel(f"layer {layer}\nquery")
        bar = figure.colorbar(image, ax=list(grid.flat), shrink=0.6, pad=0.01)
        bar.set_label(f"attention to {self.block} keys, uniform attention to all earlier ones = 1")
        figure.suptitle(self.title or f"{layers} layers of {heads} heads, {self.seqlen} queries")
        return figure

    def _draw_tiles(self, axes: Axes, layer: int, head: int, norm: Any) -> Any:
        ratios = self.shares[layer, head] / self.uniform
        end = len(ratios) * self.block
        colours: Any = {"norm": norm, "cmap": "RdBu_r", "interpolation": "nearest"}
        image = axes.imshow(ratios.clamp(min=1e-9).numpy(), extent=(0, end, end, 0), aspect="auto", **colours)
        axes.set_facecolor("lightgray")  # keys that come later
        axes.set_title(
            f"head {head}: {self.local[layer, head]:.0%} near, {self.first[layer, head]:.0%} first",
            fontsize=9,
        )
        axes.tick_params(labelsize=7)
        return image

    def _draw_entropy(self, axes: Axes, layer: int, head: int) -> None:
        """Means of tiles; dotted, what attention to all earlier keys alike would have."""
        means = torch.stack([part.mean() for part in self.entropy[layer, head].split(self.block)])
        middles = (torch.arange(len(means)) + 0.5) * self.block
        axes.plot(means.numpy(), middles.numpy(), lw=1.2, color="#7a2182")
        axes.plot((middles + 1).log().numpy(), middles.numpy(), ":", lw=0.8, color="gray")
        axes.set_xlim(0, math.log(self.seqlen) * 1.05)
        axes.tick_params(labelsize=7)
        axes.set_title(f"mean {self.entropy[layer, head].mean():.1f}", fontsize=9)

    def save(self, path: str | Path) -> None:
        """Write the picture; the name's ending says how: .png, .svg, .pdf."""
        self.figure().savefig(path, dpi=RESOLUTION)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure().savefig(buffer, format="png", dpi=RESOLUTION)
        return buffer.getvalue()
