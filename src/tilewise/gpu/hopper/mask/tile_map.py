"""The tile map of a boolean mask: which tiles have visible scores, and the bits of each.

A map row stands for the queries of one work tile in one (batch, head), or for all that share its mask. Of key
tiles 0 to n it holds, as int32 in `tiles`,

    before[n + 1]   tiles before each that are visited
    entries[n]      of those that are: tile << FLAG_BITS, and a flag for each warpgroup
                      bit w                 some score is hidden: its bits are to be read
                      bit WARPGROUPS + w    every row sees a key

and in `bits` one word for each row and each of the four threads that share it, in the order in which they
hold scores: bit 2e + c is column 8e + 2t + c of thread t. Causal masks and windows are no part of a map.

A mask that many layers use is scanned once: its map is kept while the tensor lives and is not written to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise.core.problem import AttentionProblem
from tilewise.core.torch_private import base_and_version, raw_stream
from tilewise.gpu.hopper.common import host
from tilewise.gpu.hopper.common.arguments import WARPGROUP_ROWS, MaskMap, TransposedMap
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

MAX_MASKS = 16  # tensors whose maps are kept
Map = tuple[int, Any]  # of a version of the mask

_maps: Any = WeakTensorKeyDictionary()  # by the tensor that owns a mask's memory: maps by view and tiles
_lock = threading.Lock()


def tile_map(mask: Tensor, seqlen_q: int, seqlen_k: int, warpgroups: int, block_n: int) -> MaskMap:
    """The map of a mask (batch, heads, seqlen_q, seqlen_k), each of them possibly 1."""
    choices = (seqlen_q, seqlen_k, warpgroups, block_n)
    return _kept(mask, choices, lambda: _map_of(mask, *choices))  # type: ignore[no-any-return]


def transposed_map(problem: AttentionProblem, mask: Tensor, block_m: int) -> TransposedMap:
    """The map by tiles of keys, which the backward visits; causal masks and windows shorten its lists."""
    visibility = problem.visibility()
    edges = (problem.seqlen_k - problem.seqlen_q, host.edge(visibility.left), host.edge(visibility.right))
    choices = (problem.seqlen_q, problem.seqlen_k, problem.num_kv_heads, problem.group_size, block_m, edges)
    return _kept(mask, choices, lambda: _transposed(mask, *choices))  # type: ignore[no-any-return]


def _kept(mask: Tensor, choices: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What `make` makes of a mask, kept for those choices.

    In a CUDA graph the scan is captured, as a replay may find another mask in this memory. Inference tensors
    do not count what is written to them, so they are scanned in every call.
    """
    if mask.is_inference() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make()
    stream = raw_stream(mask.device) if mask.is_cuda else 0
    view = (mask.storage_offset(), mask.shape, mask.stride(), choices, stream)
    base, version = base_and_version(mask)
    with _lock:
        found: Map | None = _maps.get(base, {}).get(view)
    if found is not None and found[0] == version:
        return found[1]
    made = make()
    with _lock:
        if base not in _maps and len(_maps) >= MAX_MASKS:
            del _maps[next(iter(_maps))]
        views = _maps.setdefault(base, {})
        if len(views) >= MAX_MASKS:
            views.clear()
        views[view] = (version, made)
    return made


class Scan(NamedTuple):
    """What the scan of a mask has written, a row of tiles after another."""

    states: Tensor
    bits: Tensor
    rows: int
    strides: tuple[int, int, int]  # in rows, from a batch entry, head and tile of queries to the next


def _scanned(mask: Tensor, seqlen_q: int, seqlen_k: int, warpgroups: int, block_n: int) -> Scan:
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:  # expanded: all of it is one
            mask = mask.narrow(dim, 0, 1)
    batch, heads, mask_rows, _ = mask.shape
    row_tiles = -(-mask_rows // (warpgroups * WARPGROUP_ROWS))
    rows, key_tiles = batch * heads * row_tiles, -(-seqlen_k // block_n)
    states = torch.empty(rows * key_tiles, dtype=torch.int32, device=mask.device)
    words = (rows * key_tiles, warpgroups * WARPGROUP_ROWS, 4)
    bits = torch.empty(words, dtype=torch.int32 if block_n == 128 else torch.int16, device=mask.device)
    lengths = (seqlen_q, seqlen_k)
    run(scan_launch, lengths, (mask.view(torch.uint8),), warpgroups, block_n, fresh=(states, bits))
    strides = (heads * row_tiles, row_tiles, 1)
    used = [0 if n == 1 else stride for n, stride in zip((batch, heads, mask_rows), strides, strict=True)]
    return Scan(states, bits, rows, (used[0], used[1], used[2]))


def _map_of(mask: Tensor, seqlen_q: int, seqlen_k: int, warpgroups: int, block_n: int) -> MaskMap:
    scan = _scanned(mask, seqlen_q, seqlen_k, warpgroups, block_n)
    key_tiles = -(-seqlen_k // block_n)
    tiles = scan.states.new_empty(scan.rows * (2 * key_tiles + 1))
    run(list_launch, key_tiles, (scan.states,), fresh=(tiles,))
    return MaskMap(tiles, scan.bits, *scan.strides)


def _transposed(
    mask: Tensor,
    seqlen_q: int,
    seqlen_k: int,
    kv_heads: int,
    group: int,
    block_m: int,
    edges: tuple[int, int, int],
) -> TransposedMap:
    scan = _scanned(mask.mT, seqlen_k, seqlen_q, 2, block_m)
    key_tiles, tiles_q = -(-seqlen_k // (2 * WARPGROUP_ROWS)), -(-seqlen_q // block_m)
    heads = kv_heads if scan.strides[1] else 1
    batch = mask.shape[0] if scan.strides[0] else 1
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


def clear() -> None:
    """Forget all maps."""
    with _lock:
        _maps.clear()
