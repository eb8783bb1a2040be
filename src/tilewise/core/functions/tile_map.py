"""Which tiles of the score matrix functions leave empty, full or partial: by intervals, never by elements."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.core.functions.evaluate import Buffers
from tilewise.core.functions.expression import Functions
from tilewise.core.functions.interval import Interval, Intervals, Ranges

EMPTY, PARTIAL, FULL = 0, 1, 2
TILES_AT_ONCE = 1 << 20  # whose intervals are in memory together


def edges(n: int, block: int, device: torch.device | str | None = None) -> Interval:
    """First and last positions of blocks of a length n."""
    first = torch.arange(0, n, block, device=device)
    return first, (first + (block - 1)).clamp(max=n - 1)


def tile_kinds(
    functions: Functions, buffers: Buffers, b: Interval, h: Interval, i: Interval, j: Interval
) -> Tensor:
    """EMPTY, PARTIAL or FULL of every tile that the ranges of b, h, i and j span.

    EMPTY and FULL are certain: no key, or every key, is visible to every query of the tile. A key is hidden
    too where the score function makes its score -inf for certain.

    Args:
        b, h, i, j: the first and last positions of each range: pairs of 1-D int64 tensors.

    Returns:
        uint8 [ranges of b, of h, of i, of j]; of size 1 where the functions don't depend on an index.

    Example:
        >>> from tilewise.core.functions.trace import trace
        >>> causal = trace(lambda b, h, i, j: j <= i, None).functions
        >>> one, blocks = edges(1, 1), edges(6, 2)
        >>> tile_kinds(causal, Buffers(None, None, None), one, one, blocks, blocks)[0, 0].tolist()
        [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
    """
    needs = functions.depends_on
    spans = {"b": b, "h": h, "i": i, "j": j}
    sizes = [len(span[0]) if name in needs else 1 for name, span in spans.items()]
    kinds = torch.empty(sizes, dtype=torch.uint8, device=i[0].device)
    for rows in _chunks(sizes):
        ranges = [_within(span, n, name in needs, rows) for n, (name, span) in enumerate(spans.items())]
        always, sometimes = _visible(functions, buffers, Ranges(*ranges))
        kinds[rows] = sometimes.to(torch.uint8) + (always & sometimes)
    return kinds


def _chunks(sizes: list[int]) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of b, h and i whose tiles are few enough."""
    row = max(1, sizes[3])
    step = max(1, TILES_AT_ONCE // row)
    whole = sizes[0] * sizes[1] * sizes[2] <= step
    for b in range(1 if whole else sizes[0]):
        for h in range(1 if whole else sizes[1]):
            for i in range(0, sizes[2], sizes[2] if whole else step):
                outer = slice(None) if whole else slice(b, b + 1)
                yield (
                    outer,
                    slice(None) if whole else slice(h, h + 1),
                    slice(i, i + step if not whole else None),
                )


def _within(span: Interval, axis: int, is_needed: bool, rows: tuple[slice, ...]) -> Interval:
    """The part of a span, in its own dimension of four; all of it as one range where it is not needed."""
    shape = [1, 1, 1, 1]
    shape[axis] = -1
    first, last = span
    if not is_needed and len(first):
        first, last = first[:1], last[-1:]
    elif axis < 3:
        first, last = first[rows[axis]], last[rows[axis]]
    return first.view(shape), last.view(shape)


def _visible(functions: Functions, buffers: Buffers, ranges: Ranges) -> Interval:
    """Whether keys are always visible, and whether sometimes."""
    intervals = Intervals(functions.graph, functions, buffers, ranges)
    always = sometimes = torch.ones((), dtype=torch.bool, device=ranges.i[0].device)
    if functions.mask is not None:
        always, sometimes = intervals(functions.mask)
    if functions.score is not None:
        sometimes = sometimes & ~(intervals(functions.score)[1] == -torch.inf)
    return always, sometimes
