"""Which tiles mask and score functions leave to a dense call's kernels: lists that their loops go through."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.core.functions.evaluate import Buffers
from tilewise.core.functions.expression import decode
from tilewise.core.functions.tile_map import EMPTY, FULL, PARTIAL, edges, hiding_numbers, kernel_map
from tilewise.core.kept import kept
from tilewise.core.mask import Visibility
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.signature import NoMemory, stand_in

Lists = tuple[Tensor | None, Tensor | None]


def visits(
    problem: AttentionProblem, inputs: Inputs, block_m: int, block_n: int, by_key: bool = False
) -> Lists:
    """`order` and `counts` of `arguments.Visits`; None where functions hide nothing or sequences have lengths
    that the host does not know.

    Args:
        block_m, block_n: queries and keys of a kernel's tile.
        by_key: rows are tiles of keys, and queries are looped over.
    """
    if problem.functions is None or problem.is_packed or problem.is_cached:
        return None, None
    functions = decode(problem.functions)
    if not functions.hiding:
        return None, None
    if inputs.query.is_meta and stand_in() is None:
        raise NoMemory("compiling side by side is not worth what PyTorch imports for a map without values")
    buffers = inputs.captured
    numbers, layout = hiding_numbers(functions, buffers)
    device = inputs.query.device
    call = (problem.functions, problem.extent, problem.visibility(), block_m, block_n, by_key)
    return kept(numbers, (*call, layout), lambda: _lists(*call, device, buffers), device)


def _lists(
    text: str, extent: tuple[int, int, int, int], visibility: Visibility, block_m: int, block_n: int,
    by_key: bool, device: torch.device, buffers: Buffers,
) -> Lists:  # fmt: skip
    found = kernel_map(decode(text), buffers, extent, block_m, block_n, device)
    kinds = torch.minimum(found.kinds, _kinds_of_ranges(visibility, found.block_q, found.block_k, device))
    kinds = kinds.mT.contiguous() if by_key else kinds
    order = kinds.sort(dim=-1, descending=True, stable=True).indices.to(torch.int32)
    counts = torch.stack([(kinds == FULL).sum(-1), (kinds != EMPTY).sum(-1)], -1)
    return order, counts.to(torch.int32)


def _kinds_of_ranges(visibility: Visibility, block_q: int, block_k: int, device: torch.device) -> Tensor:
    """EMPTY, PARTIAL or FULL of each tile by lengths, causal and window: see `Visibility.tile_kind`.

    A tile with rows or columns that don't exist is not FULL.
    """
    v, seqlen_k = visibility, visibility.seqlen_k
    rows, columns = edges(v.seqlen_q, block_q, device), edges(seqlen_k, block_k, device)
    q0, q_last = rows.first[:, None] + v.offset, rows.last[:, None] + v.offset
    k0, k_last = columns.first[None], columns.last[None]
    some = torch.ones((q0.shape[0], k0.shape[1]), dtype=torch.bool, device=device)
    every = (q_last - q0 == block_q - 1) & (k_last - k0 == block_k - 1)
    if v.left is not None:
        some, every = some & (k_last >= q0 - v.left), every & (k0 >= q_last - v.left)
    if v.right is not None:
        some, every = some & (k0 <= q_last + v.right), every & (k_last <= q0 + v.right)
    kinds = torch.where(some, PARTIAL, EMPTY) + (some & every)
    return kinds.to(torch.uint8)
