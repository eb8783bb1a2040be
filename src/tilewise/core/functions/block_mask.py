"""A `BlockMask` of FlexAttention's as a mask function: what its blocks and their function let queries see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.core.checks import shown
from tilewise.core.functions.expression import LENGTH
from tilewise.core.functions.tile_map import EMPTY, FULL, PARTIAL
from tilewise.core.torch_private import is_of_a_slice, version_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

INDEX = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def check_block_mask(
    mask: Any, sizes: tuple[int, int], lengths: tuple[int, int], are_most: bool, device: torch.device
) -> None:
    """Raise TypeError or ValueError unless a block mask fits a call.

    Args:
        sizes: batch entries and query heads.
        lengths: of queries and keys; `are_most`: of the longest sequence, 0 where that is not known.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"block_mask={shown(mask)} must be None or a BlockMask, as create_block_mask makes of a mask_mod"
        )
    given = tuple(int(n) for n in mask.seq_lengths)
    if is_of_a_slice(mask.mask_mod):
        raise ValueError("block_mask is a slice, which has no mask_mod: set its mask_mod and its seq_lengths")
    if min(mask.BLOCK_SIZE) >= LENGTH:  # PyTorch's mask of one block, for any lengths
        given = lengths
    if are_most and any(n < most for n, most in zip(given, lengths)):
        raise ValueError(f"block_mask is of lengths {given}, must be of at least {lengths}")
    if not are_most and given != lengths:
        raise ValueError(f"block_mask is of lengths {given}, must be of {lengths}")
    if mask.kv_indices.device != device:
        raise ValueError(f"block_mask is on {mask.kv_indices.device}, must be on {device} as query")
    shared = batch_and_heads(mask)
    if any(n not in (1, size) for n, size in zip(shared, sizes)):
        raise ValueError(
            f"block_mask is of (batch, heads)={shared}, each must be 1 or that of query: {sizes}"
        )


def batch_and_heads(mask: BlockMask) -> tuple[int, int]:
    """Of a mask, which may lack these dimensions."""
    batch, heads = ((1,) * 4 + tuple(mask.kv_num_blocks.shape))[-3:-1]
    return batch, heads


def mask_function(mask: BlockMask, sizes: tuple[int, int]) -> Any:
    """A block mask as (b, h, q_idx, kv_idx) -> bool: in full blocks all is visible, in partial ones what its
    mask_mod says, elsewhere nothing.

    A mask that `create_block_mask` has made here, and nobody changed, is its mask_mod.
    """
    origin, shared = getattr(mask, "_origin", None), batch_and_heads(mask)
    if origin is not None and mask.mask_mod is origin[0]:
        covers = all(n == size or name not in origin[2] for n, size, name in zip(shared, sizes, "bh"))
        is_same = all(getattr(mask, name) is t for name, t in zip(INDEX, origin[1]))
        if covers and is_same and versions(origin[1]) == origin[3]:
            return origin[0]
    return _by_blocks(mask, shared)


def versions(index: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """How often each of the index tensors was written to; None of inference tensors, which do not say."""
    return tuple(None if t is None or t.is_inference() else version_of(t) for t in index)


def _by_blocks(mask: BlockMask, shared: tuple[int, int]) -> Any:
    kinds, mask_mod, (rows, columns) = block_kinds(mask), mask.mask_mod, mask.BLOCK_SIZE
    own_b, own_h = (n > 1 for n in shared)
    kinds = kinds.view([n for n in shared if n > 1] + list(kinds.shape[-2:]))

    def in_blocks(b: Any, h: Any, i: Any, j: Any) -> Any:
        kind = kinds[(*((b,) if own_b else ()), *((h,) if own_h else ()), i // rows, j // columns)]
        return (kind == FULL) | ((kind == PARTIAL) & mask_mod(b, h, i, j))

    return in_blocks


def block_kinds(mask: BlockMask) -> Tensor:
    """EMPTY, PARTIAL or FULL of each block: uint8, shaped like kv_indices but for all blocks of keys."""
    columns = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    kinds = mask.kv_indices.new_full((*mask.kv_indices.shape[:-1], columns + 1), EMPTY, dtype=torch.uint8)
    pairs = (
        (mask.kv_num_blocks, mask.kv_indices, PARTIAL),
        (mask.full_kv_num_blocks, mask.full_kv_indices, FULL),
    )
    for counts, indices, kind in pairs:
        if counts is not None and indices is not None:
            is_set = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
            kinds.scatter_(-1, torch.where(is_set, indices, columns).long(), kind)
    return kinds[..., :columns].contiguous()
