"""What a call's mask and score functions tell a kernel: captured tensors and the tile map."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewise.core.functions.captured import out_of_range
from tilewise.core.functions.evaluate import Buffers
from tilewise.core.functions.expression import Functions, decode
from tilewise.core.functions.tile_map import EMPTY, KernelMap, kernel_map
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.cpu.host.arguments import CAPTURED, DIMENSION_BITS, INDEX_BITS, WORD, WRONG_INDEX, Block
from tilewise.cpu.host.pool import CPU

MAP_KEYS = 32  # of a tile of the map, which blocks and groups of keys are multiples and parts of


def bind_functions(
    problem: AttentionProblem, block: Block, inputs: Inputs, lengths: tuple[int, int], block_q: int,
    counts_visits: bool,
) -> list[Any]:  # fmt: skip
    """Write a call's functions into the block; the result must outlive the kernel.

    Args:
        lengths: the most queries and keys of a sequence.
        block_q: queries of a kernel's tile; 0 for a kernel without a tile map.
        counts_visits: for a backward, whose blocks of keys take turns.
    """
    assert problem.functions is not None
    functions = decode(problem.functions)
    given = inputs.captured
    held = _with_room(functions, given)
    block.update(**{name: 0 if t is None else t.data_ptr() for name, t in zip(CAPTURED, held)})
    kept: list[Any] = [held]
    if functions.hiding and block_q:
        extent = (problem.batch, problem.num_heads, *lengths)
        tiles = kernel_map(functions, given, extent, block_q, MAP_KEYS, CPU)
        block.update(
            map=tiles.kinds.data_ptr(),
            map_q=tiles.block_q,
            map_k=tiles.block_k.bit_length() - 1,
            **dict(zip(("map_b", "map_h", "map_i"), tiles.strides())),
        )
        kept.append(tiles)
        if counts_visits:
            kept.append(_bind_visits(block, tiles))
    return kept


def _bind_visits(block: Block, tiles: KernelMap) -> Tensor:
    """Whether a tile of queries visits each block of `split_keys` keys: uint8, 0 or 1."""
    keys, splits = (int(block.words[WORD[name]]) for name in ("split_keys", "splits"))
    columns = tiles.kinds.shape[-1]
    counts = torch.nn.functional.pad((tiles.kinds != EMPTY).cumsum(-1), (1, 0))
    starts = torch.arange(splits, device=CPU) * keys
    first = (starts // tiles.block_k).clamp(max=columns)
    last = (-(-(starts + keys) // tiles.block_k)).clamp(max=columns)
    visits = (counts[..., last] > counts[..., first]).to(torch.uint8)
    found = tiles._replace(kinds=visits)
    block.update(visits=visits.data_ptr(), **dict(zip(("visits_b", "visits_h", "visits_i"), found.strides())))
    return visits


def _with_room(functions: Functions, given: Buffers) -> Buffers:
    """The buffers; with numbers behind them if a tensor is empty, which a wrong index then reads."""
    places = given.places(functions.tensors)
    room = max((math.prod(max(1, n) for n in shape) for _, shape in places if 0 in shape), default=0)
    if not room:
        return given
    floats, integers = (
        torch.zeros(room, dtype=dtype, device=CPU)
        if t is None
        else torch.cat([t.detach(), t.new_zeros(room)])
        for t, dtype in ((given.floats, torch.float64), (given.integers, torch.int64))
    )
    return given._replace(floats=floats, integers=integers)


def raise_wrong_index(problem: AttentionProblem, block: Block, inputs: Inputs) -> None:
    """Raises IndexError if the kernel has read a captured tensor out of range for a visible score."""
    word = int(block.words[WRONG_INDEX])
    if word:
        assert problem.functions is not None
        functions = decode(problem.functions)
        low = word & ((1 << INDEX_BITS) - 1)
        index = low - ((low >> (INDEX_BITS - 1)) << INDEX_BITS)
        dimension = (word >> INDEX_BITS) & ((1 << DIMENSION_BITS) - 1)
        load = (word >> (INDEX_BITS + DIMENSION_BITS)) - 1
        shape = inputs.captured.places(functions.tensors)[functions.graph.nodes[load].value][1]
        raise IndexError(out_of_range(functions, load, dimension, index, shape))
