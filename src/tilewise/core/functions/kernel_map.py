"""The tile map that a call's kernels read: made once for the same functions, lengths and captured numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.core.functions.evaluate import Buffers
from tilewise.core.functions.expression import FLOAT, Functions
from tilewise.core.functions.tile_map import TILES_AT_ONCE, edges, tile_kinds

MAX_KEPT, MAX_KEPT_NUMBERS = 64, 1 << 22  # maps, and captured numbers of one


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
    while several * -(-seqlen_q // block_q) * -(-seqlen_k // block_k) > TILES_AT_ONCE:
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
