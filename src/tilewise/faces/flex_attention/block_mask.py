"""`BlockMask` and `create_block_mask` with PyTorch's arguments."""

from __future__ import annotations

import operator
from numbers import Integral
from typing import Any, Never

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

from tilewise.core.checks import check_known, shown
from tilewise.core.functions.block_mask import block_kinds, versions
from tilewise.core.functions.call import MaskFunction
from tilewise.core.functions.captured import check_indices, pack
from tilewise.core.functions.expression import decode
from tilewise.core.functions.tile_map import EMPTY, FULL, PARTIAL, edges, refined, tile_kinds
from tilewise.core.functions.trace import check_function, trace


class BlockMask(theirs.BlockMask):
    """PyTorch's `BlockMask`, with a picture in notebooks.

    Example:
        >>> mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, device="cpu")
        >>> print(mask.to_string())
        (0, 0)
        ██
        ████
        ██████
    """

    # mask_mod, if the blocks are just what it says, the index tensors, and which of b, h, i, j it reads
    _origin: tuple[Any, tuple[Tensor | None, ...], frozenset[str], tuple[Any, ...]] | None = None

    def __getitem__(self, index: Any) -> BlockMask:
        return _own(super().__getitem__(index))

    def to(self, device: torch.device | str) -> BlockMask:
        return _own(super().to(device))

    def _repr_html_(self) -> str:
        """Up to four batch entries and heads as pictures: full blocks dark, partial ones light."""
        kinds = block_kinds(self).flatten(0, -3).cpu()
        pictures = "".join(_svg(k) for k in kinds[:4])
        rest = f"<p>and {len(kinds) - 4} more</p>" if len(kinds) > 4 else ""
        empty = (kinds == EMPTY).float().mean().item()
        sizes = f"shape {tuple(self.shape)}, blocks {tuple(self.BLOCK_SIZE)}, {empty:.0%} empty"
        return f"<div><p>BlockMask: {sizes}</p>{pictures}{rest}</div>"


def _own(mask: theirs.BlockMask) -> BlockMask:
    return BlockMask(**vars(mask))


def create_block_mask(
    mask_mod: MaskFunction,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
    **unknown: Never,
) -> BlockMask:
    """Drop-in for `torch.nn.attention.flex_attention.create_block_mask`, without its Q_LEN × KV_LEN tensor.

    Blocks are decided by interval arithmetic, and by their elements, some blocks at once, where that can't
    tell. The result is PyTorch's.

    Args:
        mask_mod: (b, h, q_idx, kv_idx) -> bool, True = attend. It is traced: see `tilewise.attention`.
        B, H: batch entries and query heads; None is 1, which all share.
        Q_LEN, KV_LEN: lengths of query and key.
        device: of the mask; None is the accelerator, or the CPU where there is none.
        BLOCK_SIZE: of queries and keys, or one for both.
        _compile: as in PyTorch; it changes nothing here.
        separate_full_blocks: False: blocks without a hidden key count as partial too.
        compute_dq_write_order, dq_kv_order: an index of PyTorch's flash backend, which is not made.

    Raises:
        IndexError: the function reads a tensor out of range for a key that only that could hide.
        ValueError, TypeError: a size is not an integer of at least 1; or as `tilewise.attention`.
        NotImplementedError: compute_dq_write_order; or a function that can't be traced.

    Example:
        >>> window = lambda b, h, i, j: (i - j).abs() < 100
        >>> create_block_mask(window, None, None, 100_000, 100_000, device="cpu").sparsity() > 99
        True
    """
    check_known(create_block_mask, unknown)
    check_function("mask_mod", mask_mod)
    if compute_dq_write_order:
        raise NotImplementedError("compute_dq_write_order=True: torch.nn.attention.flex_attention makes it")
    blocks: Any = BLOCK_SIZE if isinstance(BLOCK_SIZE, tuple | list) else (BLOCK_SIZE, BLOCK_SIZE)
    blocks = [_size("BLOCK_SIZE", n) for n in blocks]
    given = {"B": 1 if B is None else B, "H": 1 if H is None else H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
    sizes = {name: _size(name, n) for name, n in given.items()}
    if len(blocks) != 2:
        raise ValueError(f"BLOCK_SIZE={shown(BLOCK_SIZE)} must be an integer or two")
    device = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
    found = trace(mask_mod, None, wants_grad=False, device=device)
    functions = decode(check_indices(found, tuple(sizes.values())).text)  # type: ignore[arg-type]
    buffers = pack(found, torch.empty(0, device=device))
    steps = (1, 1, *blocks)
    spans = [edges(n, step, device) for n, step in zip(sizes.values(), steps)]
    kinds = refined(tile_kinds(functions, buffers, *spans), functions, buffers, *spans)
    kinds = kinds.expand([len(span.first) for span in spans]).clone()
    for axis, (n, step) in enumerate(zip(sizes.values(), steps)):
        if n % step:  # PyTorch has it that a block which ends behind the last position is not full
            kinds.select(axis, -1).clamp_(max=PARTIAL)
    partial, full = (kinds == PARTIAL, kinds == FULL) if separate_full_blocks else (kinds > 0, None)
    index = (*_ordered(partial), *_ordered(full))
    by_key = (*_ordered(partial.mT), *_ordered(None if full is None else full.mT))
    lengths = (sizes["Q_LEN"], sizes["KV_LEN"])
    mask = BlockMask(lengths, *index, *by_key, BLOCK_SIZE=tuple(blocks), mask_mod=mask_mod)
    mask._origin = (mask_mod, index, functions.hides_by, versions(index))
    return mask


def _size(name: str, n: Any) -> int:
    """A size as an int, which may be NumPy's, or a tensor's."""
    is_whole = isinstance(n, Integral) or (
        isinstance(n, Tensor) and n.numel() == 1 and not n.is_floating_point()
    )
    if not is_whole or isinstance(n, bool) or n < 1:
        raise ValueError(f"{name}={shown(n)} must be an integer of at least 1")
    return operator.index(n)


def _ordered(dense: Tensor | None) -> tuple[Any, Any]:
    """Of each row of blocks, how many are set, and the numbers of these before those of the others."""
    if dense is None:
        return None, None
    counts = dense.sum(-1, dtype=torch.int32)
    rest = counts[..., None] + (~dense).cumsum(-1, dtype=torch.int32)
    place = torch.where(dense, dense.cumsum(-1, dtype=torch.int32), rest) - 1
    numbers = torch.arange(dense.shape[-1], dtype=torch.int32, device=dense.device)
    order = torch.empty(dense.shape, dtype=torch.int32, device=dense.device)
    return counts, order.scatter_(-1, place.long(), numbers.expand(dense.shape))


def _svg(kinds: Tensor, cells: int = 64) -> str:
    """A picture of one map of kinds, of at most `cells` a side."""
    rows, columns = kinds.shape
    step = max(1, -(-max(rows, columns) // cells))
    shapes = []
    for r in range(0, rows, step):
        for c in range(0, columns, step):
            shade = kinds[r : r + step, c : c + step].float().mean().item() / FULL
            if shade:
                shapes.append(
                    f'<rect x="{c // step}" y="{r // step}" width="1" height="1" fill-opacity="{shade:.2f}"/>'
                )
    height, width = -(-rows // step), -(-columns // step)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{min(256, 8 * width)}" fill="#3949ab" role="img" '
        f'aria-label="block mask" style="outline:1px solid; margin:2px">{"".join(shapes)}</svg>'
    )
