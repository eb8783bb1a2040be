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
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise.core.torch_private import base_and_version
from tilewise.gpu.hopper.common.arguments import WARPGROUP_ROWS, MaskMap
from tilewise.gpu.launch.launch_plan import Launch, Tensors, run

MAX_MASKS = 16  # tensors whose maps are kept
Map = tuple[int, MaskMap]  # of a version of the mask

_maps: Any = WeakTensorKeyDictionary()  # by the tensor that owns a mask's memory: maps by view and tiles
_lock = threading.Lock()


def tile_map(mask: Tensor, seqlen_q: int, seqlen_k: int, warpgroups: int, block_n: int) -> MaskMap:
    """The map of a mask (batch, heads, seqlen_q, seqlen_k), each of them possibly 1.

    In a CUDA graph the scan is captured, as a replay may find another mask in this memory. Inference tensors
    do not count what is written to them, so they are scanned in every call.
    """

    def make() -> MaskMap:
        return _scanned(mask, seqlen_q, seqlen_k, warpgroups, block_n)

    if mask.is_inference() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make()
    stream = torch._C._cuda_getCurrentRawStream(mask.device.index) if mask.is_cuda else 0
    view = (mask.storage_offset(), mask.shape, mask.stride(), seqlen_q, seqlen_k, warpgroups, block_n, stream)
    return _kept(mask, view, make)


def _kept(mask: Tensor, view: tuple[Any, ...], make: Callable[[], MaskMap]) -> MaskMap:
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


def _scanned(mask: Tensor, seqlen_q: int, seqlen_k: int, warpgroups: int, block_n: int) -> MaskMap:
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:  # expanded: all of it is one
            mask = mask.narrow(dim, 0, 1)
    batch, heads, rows, _ = mask.shape
    row_tiles = -(-rows // (warpgroups * WARPGROUP_ROWS))
    key_tiles = -(-seqlen_k // block_n)
    map_rows = batch * heads * row_tiles
    states, tiles = (
        torch.empty(map_rows * count, dtype=torch.int32, device=mask.device)
        for count in (key_tiles, 2 * key_tiles + 1)
    )
    words = (map_rows * key_tiles, warpgroups * WARPGROUP_ROWS, 4)
    bits = torch.empty(words, dtype=torch.int32 if block_n == 128 else torch.int16, device=mask.device)
    lengths = (seqlen_q, seqlen_k)
    tensors = (mask.view(torch.uint8),)
    run(scan_launch, lengths, tensors, warpgroups, block_n, fresh=(states, bits))
    run(list_launch, key_tiles, (states,), fresh=(tiles,))
    strides = (heads * row_tiles, row_tiles, 1)
    counts = (batch, heads, rows)
    return MaskMap(tiles, bits, *(0 if n == 1 else stride for n, stride in zip(counts, strides, strict=True)))


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


def clear() -> None:
    """Forget all maps."""
    with _lock:
        _maps.clear()
