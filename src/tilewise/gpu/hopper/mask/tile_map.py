"""The tile map of a boolean mask or a mask function: which tiles have visible scores, and the bits of each.

A map row stands for the queries of one work tile in one (batch, head), or for all that share its mask. Of key
tiles 0 to n it holds, as int32 in `tiles`,

    before[n + 1]   tiles before each that are visited
    entries[n]      of those that are: tile << FLAG_BITS, and a flag for each warpgroup
                      bit w                 some score is hidden: its bits are to be read
                      bit WARPGROUPS + w    every row sees a key

and in `bits` one word for each row and each of the four threads that share it, in the order in which they
hold scores: bit 2e + c is column 8e + 2t + c of thread t. Causal masks and windows are no part of a map. That
of a function which kernels inline has no bits.

A mask that many layers use is scanned once: see `core.kept`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilewise.core.device_errors import error_flags
from tilewise.core.functions.tile_map import EMPTY, FULL, kernel_map
from tilewise.core.kept import kept
from tilewise.core.problem import AttentionProblem
from tilewise.gpu.functions.captured import Captured
from tilewise.gpu.functions.source import KernelFunctions, helpers
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.common.arguments import FLAG_BITS, WARPGROUP_ROWS, MaskMap, TransposedMap
from tilewise.gpu.hopper.common.functions import MaskFunction
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

Map = TypeVar("Map")


def tile_map(
    source: Tensor | MaskFunction, seqlen_q: int, seqlen_k: int, warpgroups: int, block_n: int
) -> MaskMap:
    """The map of a mask (batch, heads, seqlen_q, seqlen_k), each of them possibly 1, or of a function."""
    choices = (seqlen_q, seqlen_k, warpgroups, block_n)
    return _kept(source, choices, lambda: _map_of(source, *choices))


def transposed_map(problem: AttentionProblem, source: Tensor | MaskFunction, block_m: int) -> TransposedMap:
    """The map by tiles of keys, which the backward visits; causal masks and windows shorten its lists."""
    visibility = problem.visibility()
    edges = (problem.seqlen_k - problem.seqlen_q, host.edge(visibility.left), host.edge(visibility.right))
    choices = (problem.seqlen_q, problem.seqlen_k, problem.num_kv_heads, problem.group_size, block_m, edges)
    return _kept(source, choices, lambda: _transposed(source, *choices))


def _kept(source: Tensor | MaskFunction, choices: tuple[Any, ...], make: Callable[[], Map]) -> Map:
    if isinstance(source, Tensor):
        return kept((source,), choices, make, source.device)
    made_of = (source.kernel, source.shape, source.lengths, source.layout, source.is_inlined)
    return kept(source.numbers, (*made_of, *choices), make, source.device)


class Scan(NamedTuple):
    """What a scan has written, a row of tiles after another."""

    states: Tensor
    bits: Tensor | None
    batch: int
    rows: int
    strides: tuple[int, int, int]  # in rows, from a batch entry, head and tile of queries to the next


def _scanned(
    source: Tensor | MaskFunction,
    is_transposed: bool,
    seqlen_q: int,
    seqlen_k: int,
    warpgroups: int,
    block_n: int,
) -> Scan:
    """seqlen_q: rows, which are keys if it is transposed; seqlen_k: columns."""
    if isinstance(source, Tensor):
        for dim, stride in enumerate(source.stride()):
            if stride == 0:  # expanded: all of it is one
                source = source.narrow(dim, 0, 1)
    elif source.is_inlined:
        return _by_intervals(source, is_transposed, warpgroups, block_n)
    batch, heads, *sides = source.shape
    mask_rows = sides[1 if is_transposed else 0]
    row_tiles = -(-mask_rows // (warpgroups * WARPGROUP_ROWS))
    rows, key_tiles = batch * heads * row_tiles, -(-seqlen_k // block_n)
    states = torch.empty(rows * key_tiles, dtype=torch.int32, device=source.device)
    words = (rows * key_tiles, warpgroups * WARPGROUP_ROWS, 4)
    bits = torch.empty(words, dtype=torch.int32 if block_n == 128 else torch.int16, device=source.device)
    lengths = (seqlen_q, seqlen_k)
    if isinstance(source, Tensor):
        mask = source.mT if is_transposed else source
        run(scan_launch, lengths, (mask.view(torch.uint8),), warpgroups, block_n, fresh=(states, bits))
    else:
        choices = (source.kernel, source.lengths, mask_rows > 1, heads, row_tiles, warpgroups, block_n)
        given, fresh = (states, *source.captured), (bits,)
        run(scan_function_launch, lengths, given, *choices, is_transposed, fresh=fresh)
    strides = (heads * row_tiles, row_tiles, 1)
    used = [0 if n == 1 else stride for n, stride in zip((batch, heads, mask_rows), strides, strict=True)]
    return Scan(states, bits, batch, rows, (used[0], used[1], used[2]))


def _by_intervals(source: MaskFunction, is_transposed: bool, warpgroups: int, block_n: int) -> Scan:
    """Of a function that has no bits: a tile is partial, for all warpgroups, if intervals can't tell."""
    tile = (warpgroups * WARPGROUP_ROWS, block_n)
    blocks = tile[::-1] if is_transposed else tile
    found = kernel_map(source.kernel.functions, source.buffers, source.extent, *blocks, source.device)
    kinds = found.kinds
    for dim, (block, large) in enumerate(zip(blocks, (found.block_q, found.block_k), strict=True), 2):
        tiles = -(-source.lengths[dim - 2] // block)
        kinds = kinds.repeat_interleave(large // block, dim).narrow(dim, 0, tiles) if large > block else kinds
    kinds = kinds.mT if is_transposed else kinds
    hidden = (1 << warpgroups) - 1
    seen = hidden << warpgroups
    is_visited, is_full = ((kinds != EMPTY).to(torch.int32), (kinds == FULL).to(torch.int32))
    states = is_visited * (hidden + (1 << FLAG_BITS)) + is_full * (seen - hidden)
    batch, heads, rows, _ = kinds.shape
    strides = (heads * rows if batch > 1 else 0, rows if heads > 1 else 0, 1)
    return Scan(states.flatten(), None, batch, batch * heads * rows, strides)


def _map_of(
    source: Tensor | MaskFunction, seqlen_q: int, seqlen_k: int, warpgroups: int, block_n: int
) -> MaskMap:
    scan = _scanned(source, False, seqlen_q, seqlen_k, warpgroups, block_n)
    key_tiles = -(-seqlen_k // block_n)
    tiles = scan.states.new_empty(scan.rows * (2 * key_tiles + 1))
    run(list_launch, key_tiles, (scan.states,), fresh=(tiles,))
    return MaskMap(tiles, scan.bits, *scan.strides)


def _transposed(
    source: Tensor | MaskFunction,
    seqlen_q: int,
    seqlen_k: int,
    kv_heads: int,
    group: int,
    block_m: int,
    edges: tuple[int, int, int],
) -> TransposedMap:
    scan = _scanned(source, True, seqlen_k, seqlen_q, 2, block_m)
    key_tiles, tiles_q = -(-seqlen_k // (2 * WARPGROUP_ROWS)), -(-seqlen_q // block_m)
    heads = kv_heads if scan.strides[1] else 1
    batch = scan.batch if scan.strides[0] else 1
    lists = scan.states.new_empty((batch * heads * key_tiles, 1 + group * tiles_q))
    choices = (heads, group, key_tiles, tiles_q, block_m, *edges)
    run(transposed_list_launch, choices, (scan.states,), scan.strides, fresh=(lists,))
    strides = (heads * key_tiles if batch > 1 else 0, key_tiles if heads > 1 else 0)
    return TransposedMap(lists, scan.bits, *strides, *scan.strides)


def scan_launch(lengths: tuple[int, int], tensors: Tensors, warpgroups: int, block_n: int) -> Launch:
    from tilewise.gpu.hopper.mask.scan import scan_mask_kernel

    mask, states, bits = tensors
    assert mask is not None and states is not None
    rows = warpgroups * WARPGROUP_ROWS
    _, heads, mask_rows, _ = mask.shape
    has_rows, has_keys = mask_rows > 1, mask.shape[3] > 1
    strides = (*mask.stride()[:2], mask.stride(2) if has_rows else 0, mask.stride(3) if has_keys else 0)
    seqlen_q, seqlen_k = (lengths[0] if has_rows else rows), lengths[1]
    counts = (heads, -(-mask_rows // rows), seqlen_q, seqlen_k, -(-seqlen_k // block_n))
    arguments = (mask, states, bits, *strides, *counts, warpgroups, block_n)
    return Launch(scan_mask_kernel, states.shape[0], arguments, num_warps=block_n // 8)


def scan_function_launch(
    lengths: tuple[int, int],
    tensors: Tensors,
    kernel: KernelFunctions,
    call_lengths: tuple[int, int],
    has_rows: bool,
    heads: int,
    row_tiles: int,
    warpgroups: int,
    block_n: int,
    is_transposed: bool,
) -> Launch:
    from tilewise.gpu.hopper.mask.scan import scan_function_kernel

    states, floats, integers, layout, bits = tensors
    assert states is not None
    captured = None if layout is None else Captured(floats, integers, layout, error_flags(states.device))
    rows = lengths[0] if has_rows else warpgroups * WARPGROUP_ROWS
    counts = (heads, row_tiles, rows, lengths[1], -(-lengths[1] // block_n))
    constants = (warpgroups, block_n, is_transposed, helpers(kernel).mask)
    arguments = (captured, states, bits, *call_lengths, *counts, *constants)
    # few warps: a thread has several rows, which share what it loads of a column
    return Launch(scan_function_kernel, states.shape[0], arguments, num_warps=4)


def list_launch(key_tiles: int, tensors: Tensors) -> Launch:
    from tilewise.gpu.hopper.mask.scan import list_tiles_kernel

    states, tiles = tensors
    assert states is not None
    return Launch(
        list_tiles_kernel, states.shape[0] // key_tiles, (states, tiles, key_tiles, 256), num_warps=4
    )


def transposed_list_launch(
    choices: tuple[int, ...], tensors: Tensors, strides: tuple[int, int, int]
) -> Launch:
    from tilewise.gpu.hopper.mask.scan import list_queries_kernel

    states, lists = tensors
    assert lists is not None
    arguments = (states, lists, *strides, *choices, 256)
    return Launch(list_queries_kernel, lists.shape[0], arguments, num_warps=4)
