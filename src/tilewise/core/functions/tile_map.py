"""Which tiles of the score matrix functions leave empty, full or partial, by intervals.

What kernels read of that is made once for the same functions, lengths and captured numbers: `kernel_map`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.functions.captured import doubt, raise_if_wrong
from tilewise.core.functions.evaluate import Buffers, Evaluator, Values
from tilewise.core.functions.expression import FLOAT, Functions
from tilewise.core.functions.interval import Blocks, Intervals, Ranges

EMPTY, PARTIAL, FULL = 0, 1, 2
TILES_AT_ONCE = 1 << 20  # whose intervals are in memory together
MAX_KEPT, MAX_KEPT_NUMBERS = 64, 1 << 22  # maps, and captured numbers of one
PART = 16  # rows and columns of the parts that a tile is looked at by


def edges(n: int, block: int, device: torch.device | str | None = None) -> Blocks:
    """The blocks of a length n."""
    first = torch.arange(0, n, block, device=device)
    last = first if block == 1 else (first + (block - 1)).clamp(max=n - 1)
    return Blocks(first, last, n, min(block, max(1, n)))


def tile_kinds(
    functions: Functions, buffers: Buffers | None, b: Blocks, h: Blocks, i: Blocks, j: Blocks
) -> Tensor:
    """EMPTY, PARTIAL or FULL of every tile that the ranges of b, h, i and j span.

    EMPTY and FULL are certain: no key, or every key, is visible to every query of the tile. No index of a
    FULL one is out of range, and an EMPTY one is that whatever such an index reads. A key is hidden too where
    the score function makes its score -inf for certain.

    Args:
        b, h, i, j: ranges, whose first and last positions are 1-D int64 tensors.

    Returns:
        uint8 [ranges of b, of h, of i, of j]; of size 1 where the functions don't depend on an index.

    Example:
        >>> from tilewise.core.functions.trace import trace
        >>> causal = trace(lambda b, h, i, j: j <= i, None).functions
        >>> one, blocks = edges(1, 1), edges(6, 2)
        >>> tile_kinds(causal, Buffers(None, None, None), one, one, blocks, blocks)[0, 0].tolist()
        [[1, 0, 0], [2, 1, 0], [2, 2, 1]]
    """
    needs = functions.hides_by
    spans = {"b": b, "h": h, "i": i, "j": j}
    sizes = [len(span.first) if name in needs else 1 for name, span in spans.items()]
    kinds = torch.empty(sizes, dtype=torch.uint8, device=i.first.device)
    for rows in _chunks(sizes):
        ranges = [_within(span, n, name in needs, rows) for n, (name, span) in enumerate(spans.items())]
        always, sometimes, _ = _visible(functions, buffers, Ranges(*ranges))
        kinds[rows] = sometimes.to(torch.uint8) + (always & sometimes)
    return kinds


def _chunks(sizes: list[int]) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of b, h and i whose tiles are few enough."""
    *outer, row = sizes
    room, steps = max(1, TILES_AT_ONCE // max(1, row)), []
    for n in reversed(outer):
        steps.append(max(1, min(n, room)))
        room //= steps[-1]
    for starts in itertools.product(*map(range, (0, 0, 0), outer, reversed(steps))):
        yield tuple(slice(n, n + step) for n, step in zip(starts, reversed(steps)))  # type: ignore[misc]


def _within(span: Blocks, axis: int, is_needed: bool, rows: tuple[slice, ...]) -> Blocks:
    """The part of a span, in its own dimension of four; all of it as one range where it is not needed."""
    shape = [1, 1, 1, 1]
    shape[axis] = -1
    first, last, end, widest = span
    if first is last and (is_needed or len(first) == 1):  # points, as `interval` knows by their being one
        first = (first[rows[axis]] if axis < 3 else first).view(shape)
        return Blocks(first, first, end, widest)
    if not is_needed and len(first):
        first, last, widest = first[:1], last[-1:], end
    elif axis < 3:
        first, last = first[rows[axis]], last[rows[axis]]
    return Blocks(first.view(shape), last.view(shape), end, widest)


def _visible(functions: Functions, buffers: Buffers | None, ranges: Ranges) -> tuple[Tensor, Tensor, Tensor]:
    """Whether keys are always visible, whether sometimes, and whether an index may be out of range."""
    intervals = Intervals(functions.graph, functions, buffers, ranges)
    always = sometimes = torch.ones((), dtype=torch.bool, device=ranges.i.first.device)
    if functions.mask is not None:
        always, sometimes = intervals(functions.mask)
        always = always & ~intervals.may_be_outside
    if functions.score in functions.hiding:
        sometimes = sometimes & ~(intervals(functions.score)[1] == -torch.inf)
    return always, sometimes, intervals.may_be_outside


def refined(
    kinds: Tensor, functions: Functions, buffers: Buffers, b: Blocks, h: Blocks, i: Blocks, j: Blocks
) -> Tensor:
    """`tile_kinds` of a mask function at single b and h, in which PARTIAL is certain too.

    A partial tile is looked at by intervals of its parts; where these can't tell, by elements.

    Raises:
        IndexError: an index is out of range, and what it reads says whether a key is visible.
    """
    kinds = kinds.clone()
    unsure = (kinds == PARTIAL).nonzero()
    widths = [span.widest for span in (b, h, i, j)]
    for size in (PART, 1):
        starts = [torch.arange(0, width, size, device=kinds.device) for width in widths]
        left = [unsure[:0]]
        for tiles in unsure.split(max(1, TILES_AT_ONCE // (len(starts[2]) * len(starts[3])))):
            ranges = Ranges(*(
                _parts(span, n, start, size, axis)
                for axis, (span, n, start) in enumerate(zip((b, h, i, j), tiles.T, starts))
            ))  # fmt: skip
            look = _visible if size > 1 else _elements
            found = (t if t.ndim else t.view(1, 1, 1, 1, 1) for t in look(functions, buffers, ranges))
            every, seldom, outside = (t.expand(len(tiles), -1, -1, -1, -1).flatten(1) for t in found)
            is_full, is_empty = every.all(1), ~seldom.any(1)
            is_partial = every.any(1) & ~seldom.all(1) & ~outside.any(1)
            is_sure = is_full | is_empty | is_partial | (size == 1)
            kind = PARTIAL + is_full.to(torch.uint8) - is_empty.to(torch.uint8)
            kinds[tuple(tiles[is_sure].T)] = kind[is_sure]
            left.append(tiles[~is_sure])
        unsure = torch.cat(left)
    return kinds


def _parts(span: Blocks, n: Tensor, start: Tensor, size: int, axis: int) -> Blocks:
    """Ranges of at most `size` positions of the n-th ranges of a span: [tiles, parts], in five dimensions."""
    first, last = (t[n][:, None] for t in (span.first, span.last))
    first = torch.minimum(first + start, last)
    last = torch.minimum(first + (size - 1), last)
    shape = [len(n), 1, 1, 1, 1]
    shape[axis + 1] = len(start)
    return Blocks(first.view(shape), last.view(shape), span.end, size)


def _elements(functions: Functions, buffers: Buffers, ranges: Ranges) -> tuple[Tensor, Tensor, Tensor]:
    """`_visible` of ranges that are single positions. Raises IndexError if one depends on a wrong index."""
    assert functions.mask is not None
    b, h, i, j = (span.first for span in ranges)
    graph = functions.graph.copy()
    unsure = doubt(graph, functions.mask, functions.guarded)
    evaluate = Evaluator(graph, functions, buffers, Values(None, b, h, i, j, torch.float32))
    visible = evaluate(functions.mask)
    if unsure is not None:
        raise_if_wrong(evaluate, evaluate(unsure))
    return visible, visible, torch.zeros_like(visible)


class KernelMap(NamedTuple):
    """EMPTY, PARTIAL or FULL of tiles of `block_q` queries and `block_k` keys.

    kinds: uint8, contiguous: (batch or 1, heads or 1, tiles of queries, tiles of keys).
    """

    kinds: Tensor
    block_q: int
    block_k: int

    def strides(self) -> tuple[int, int, int]:
        """Of batch, head and tile of queries, 0 where all share one."""
        shape, steps = self.kinds.shape, self.kinds.stride()
        return (steps[0] if shape[0] > 1 else 0), (steps[1] if shape[1] > 1 else 0), steps[2]


class _Kept(NamedTuple):
    numbers: tuple[Tensor, ...]  # copies of those that the map was made of
    layout: tuple[int, ...]
    map: KernelMap


_kept: dict[tuple[object, ...], _Kept] = {}


def kernel_map(
    functions: Functions, buffers: Buffers | None, extent: tuple[int, int, int, int],
    block_q: int, block_k: int, device: torch.device,
) -> KernelMap:  # fmt: skip
    """The map of a call of `extent`: batch, heads, seqlen_q and seqlen_k.

    Tiles are larger, by powers of 2, where there would be more than `TILES_AT_ONCE`. The map is kept for the
    next call, and used if that has the same captured numbers. On GPUs to compare numbers would wait: there
    those who ask keep what they make of a map (`core.kept`).
    """
    buffers = buffers if captured_kinds(functions) else None
    batch, heads, seqlen_q, seqlen_k = (max(1, n) for n in extent)
    needs = functions.hides_by
    several = (batch if "b" in needs else 1) * (heads if "h" in needs else 1)
    while -(-seqlen_q // block_q) * -(-seqlen_k // block_k) > max(1, TILES_AT_ONCE // several):
        block_q, block_k = 2 * block_q, 2 * block_k
    extent = (batch, heads, seqlen_q, seqlen_k)
    if device.type != "cpu":
        return _made(functions, buffers, extent, block_q, block_k, device)
    numbers, layout = hiding_numbers(functions, buffers)
    key = (functions.text, extent, block_q, block_k, device)
    kept = _kept.get(key)
    if kept is not None and kept.layout == layout and all(map(torch.equal, numbers, kept.numbers)):
        return kept.map
    found = _made(functions, buffers, extent, block_q, block_k, device)
    if sum(t.numel() for t in numbers) <= MAX_KEPT_NUMBERS:
        if len(_kept) >= MAX_KEPT:
            _kept.clear()
        _kept[key] = _Kept(tuple(t.detach().clone() for t in numbers), layout, found)
    return found


def captured_kinds(functions: Functions) -> set[str]:
    """Of the captured tensors that say what is hidden."""
    nodes = (functions.graph.nodes[n] for n in functions.graph.reachable(functions.hiding))
    return {functions.tensors[node.value].kind for node in nodes if node.op == "load"}


def hiding_numbers(
    functions: Functions, buffers: Buffers | None
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The captured numbers that say what is hidden, and the layout of `Buffers`."""
    loads = captured_kinds(functions)
    if buffers is None or not loads:
        return (), ()
    given = (buffers.floats if FLOAT in loads else None, buffers.integers if loads - {FLOAT} else None)
    layout = () if buffers.layout is None else tuple(buffers.layout.tolist())
    return tuple(t for t in given if t is not None), layout


def _made(
    functions: Functions, buffers: Buffers | None, extent: tuple[int, int, int, int],
    block_q: int, block_k: int, device: torch.device,
) -> KernelMap:  # fmt: skip
    spans = (edges(n, step, device) for n, step in zip(extent, (1, 1, block_q, block_k)))
    kinds = tile_kinds(functions, buffers, *spans)
    rows, columns = -(-extent[2] // block_q), -(-extent[3] // block_k)
    return KernelMap(kinds.expand(-1, -1, rows, columns).contiguous(), block_q, block_k)
