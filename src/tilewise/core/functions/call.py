"""Functions in a call: from what users pass to what operators take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from tilewise.core.checks import check_tensors
from tilewise.core.functions.block_mask import check_block_mask, mask_function
from tilewise.core.functions.captured import check_indices, pack
from tilewise.core.functions.options import as_options, key_shift
from tilewise.core.functions.trace import check_function, trace
from tilewise.core.problem import Inputs, Options
from tilewise.core.torch_private import between_graphs, compiles_here, is_differentiated

MaskFunction = Callable[[Any, Any, Any, Any], Any]
ScoreFunction = Callable[[Any, Any, Any, Any, Any], Any]


Extent = tuple[int, int, int, int]  # batch, heads, and the most queries and keys of a sequence


class Cached(NamedTuple):
    """Where the queries of a cache's sequences stand."""

    first: Tensor  # (batch,) int64: the position of each sequence's first query
    longest: int  # tokens of the longest sequence; 0 where the host does not know it


def with_functions(
    inputs: Inputs,
    options: Options,
    mask_mod: MaskFunction | None,
    score_mod: ScoreFunction | None,
    block_mask: Any = None,
    cached: Cached | None = None,
    is_shard: bool = False,
    whole: Extent | None = None,
) -> tuple[Inputs, Options]:
    """Inputs and options with the functions' captured tensors and expression, or with options that say the
    same. Compiled code breaks here.

    q_idx counts a cache's queries by their positions in the sequence, others from 0.

    Args:
        is_shard: the call has some of a sequence's tokens, and its functions count all. Slopes are then part
            of the score function, as distances that a part of the keys is behind can't be taken from lse.
        whole: of a shard, what its functions count, if that is known.

    Raises:
        TypeError, NotImplementedError, IndexError, ValueError: a function is none that can be traced, or the
            block mask does not fit.
    """
    if mask_mod is None and score_mod is None and block_mask is None and not is_learned(inputs.alibi_slopes):
        return inputs, options
    return _added(inputs, options, mask_mod, score_mod, block_mask, cached, is_shard, whole)  # type: ignore[no-any-return]


def is_learned(alibi_slopes: Any) -> bool:
    """Whether slopes need a derivative, which captured tensors have."""
    if not isinstance(alibi_slopes, Tensor):
        return False
    if alibi_slopes.requires_grad and torch.is_grad_enabled():
        return True
    if compiles_here():
        return is_differentiated()
    try:
        return unpack_dual(alibi_slopes).tangent is not None
    except RuntimeError:  # vmap inside of forward mode has no rule for it: perhaps
        return True


@between_graphs
def _added(
    inputs: Inputs, options: Options, mask_mod: MaskFunction | None, score_mod: ScoreFunction | None,
    block_mask: Any, cached: Cached | None, is_shard: bool, whole: Extent | None,
) -> tuple[Inputs, Options]:  # fmt: skip
    check_tensors(query=inputs.query, key=inputs.key)
    extent, slopes = _extent(inputs), inputs.alibi_slopes
    is_scored = is_learned(slopes) or (is_shard and score_mod is not None)
    if slopes is not None and is_scored and extent is not None:
        shift, (batch, heads, *_) = key_shift(inputs), whole or extent
        if shift is None or tuple(getattr(slopes, "shape", ())) not in ((heads,), (batch, heads)):
            return inputs, options  # the checks say what is wrong
        score_mod, inputs = with_slopes(slopes, shift, score_mod), inputs._replace(alibi_slopes=None)
    if block_mask is not None and is_shard:
        raise NotImplementedError("block_mask is not served inside of context_parallel: its mask_mod is")
    if block_mask is not None and extent is not None:
        most = _longest(inputs, options, cached)
        lengths = extent[2:] if most is None else most
        check_block_mask(block_mask, extent[:2], lengths, most is not None, inputs.query.device)
        mask_mod = _both(mask_function(block_mask, extent[:2]), mask_mod)
    first = None if cached is None else cached.first
    found = trace(mask_mod, score_mod, torch.is_grad_enabled(), inputs.query.device, first)
    if extent is not None:
        found, inputs, options = as_options(found, inputs, options, is_shard)
        if not found.functions.roots:
            return inputs, options
    buffers = pack(found, inputs.query)
    functions, known = found.functions, whole if is_shard else extent
    if known is not None:
        checked = check_indices(found, known)
        functions = functions if is_shard else checked  # its parts are checked as they run
    floats, integers, layout = buffers
    inputs = inputs._replace(captured_floats=floats, captured_integers=integers, captured_layout=layout)
    return inputs, options._replace(functions=functions.text)


def _both(in_blocks: MaskFunction, mask_mod: MaskFunction | None) -> MaskFunction:
    """What a block mask and a mask function both let a query see."""
    if mask_mod is None:
        return in_blocks
    check_function("mask_mod", mask_mod)
    own = mask_mod
    return lambda b, h, i, j: in_blocks(b, h, i, j) & own(b, h, i, j)


def with_slopes(slopes: Tensor, shift: int, score_mod: ScoreFunction | None) -> ScoreFunction:
    """ALiBi as a function of captured slopes, and the user's of what that gives."""

    def score(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        score = score - (slopes[h] if slopes.ndim == 1 else slopes[b, h]) * (i + shift - j).abs()
        return score if score_mod is None else score_mod(score, b, h, i, j)

    if score_mod is not None:
        check_function("score_mod", score_mod)
    return score


def _extent(inputs: Inputs) -> Extent | None:
    """None of shapes that the checks refuse. Packed sequences may be as long as all tokens: a wrong
    `max_seqlen` leaves no index unguarded.
    """
    query, key, starts, table = inputs.query, inputs.key, inputs.cu_seqlens_q, inputs.page_table
    if query.ndim != (4 if starts is None else 3) or key.ndim not in (3, 4):
        return None
    batch = query.shape[0] if starts is None else max(0, starts.numel() - 1)
    seqlen_q, seqlen_k = query.shape[-3], key.shape[-3] if table is None else key.shape[1] * table.shape[-1]
    return batch, query.shape[-2], seqlen_q, seqlen_k


def _longest(inputs: Inputs, options: Options, cached: Cached | None) -> tuple[int, int] | None:
    """The most queries and keys of ragged sequences, 0 where the host does not know; None of dense ones."""
    if cached is not None:
        return cached.longest, cached.longest
    if inputs.cu_seqlens_q is None:
        return None
    pairs = (inputs.cu_seqlens_q, options.max_seqlen_q), (inputs.cu_seqlens_k, options.max_seqlen_k)
    most_q, most_k = (_length(*pair) for pair in pairs)
    return most_q, most_k


def _length(starts: Tensor | None, given: Any) -> int:
    if isinstance(given, int):
        return given
    is_known = starts is not None and starts.device.type == "cpu" and starts.ndim == 1 and len(starts) > 1
    return int(starts.diff().max()) if is_known else 0  # type: ignore[union-attr]
