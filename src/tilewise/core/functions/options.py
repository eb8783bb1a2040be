"""A call whose functions say what options say, as the call with the options, which more kernels serve.

Functions count i and j from the start of a sequence; options align the last query with the last key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.core.checks import window_bound
from tilewise.core.functions.evaluate import Buffers, Evaluator, Values
from tilewise.core.functions.expression import INDICES, Functions
from tilewise.core.functions.patterns import Alibi, Score, said
from tilewise.core.functions.trace import Trace, remember
from tilewise.core.problem import Inputs, Options
from tilewise.core.signature import compute_dtype
from tilewise.core.torch_private import is_plain_eager


def as_options(
    found: Trace, inputs: Inputs, options: Options, is_shard: bool = False
) -> tuple[Trace, Inputs, Options]:
    """The call with options in the place of what its functions say of them, and what functions are left.

    Where sequences have lengths of their own (caches, queries and keys packed differently), windows and
    distances stay with the functions. Beside the same options of the user's, softcap, bias and ALiBi do too.

    Args:
        is_shard: the call has some of a sequence's tokens, of which functions count all: a bias stays.
    """
    known = said(found.functions)
    if known is None:
        return found, inputs, options
    shift, kept = key_shift(inputs), found.functions
    if kept is not known.masked:
        window = _with_window(options, known.left, known.right, shift)
        if window is None:
            return found, inputs, options
        options, kept = window, known.masked
    score = known.score
    if is_shard and score is not None and score.bias is not None:
        score = None
    scored = None if score is None else _with_score(score, found, inputs, options, shift)
    if scored is not None:
        inputs, options = scored
        kept = known.rest
    kept, numbers = kept.trimmed
    if kept.roots:
        remember(kept, found.lines)
    tensors = tuple(found.tensors[n] for n in numbers)
    return found._replace(functions=kept, tensors=tensors), inputs, options


def key_shift(inputs: Inputs) -> int | None:
    """Keys less queries of every sequence; None where they differ, or are not known."""
    if inputs.seqlens_k is not None:
        return None
    if inputs.cu_seqlens_q is not None:
        return 0 if inputs.cu_seqlens_q is inputs.cu_seqlens_k else None
    shift = inputs.key.shape[1] - inputs.query.shape[1]
    return shift if isinstance(shift, int) else None


def _with_window(options: Options, left: float, right: float, shift: int | None) -> Options | None:
    """What both windows let a query see, the options' and the functions'; None if no option says it."""
    if left == right == math.inf:
        return options
    if shift is None or left + shift < 0 or right - shift < 0:  # a window has the query's own position in it
        return None
    causal, aligned_left = options.causal, _smaller(options.window_left, left + shift)
    aligned_right = options.window_right if causal is True else _smaller(options.window_right, right - shift)
    if causal is False and (aligned_left, aligned_right) == (None, 0):
        causal, aligned_right = True, None
    return options._replace(causal=causal, window_left=aligned_left, window_right=aligned_right)


def _smaller(given: int | None, found: float) -> int | None:
    bound = None if found == math.inf else window_bound(found)
    return given if bound is None else bound if given is None else min(given, bound)


def _with_score(
    score: Score, found: Trace, inputs: Inputs, options: Options, shift: int | None
) -> tuple[Inputs, Options] | None:
    """None if other options come between, or a bias or ALiBi has other sizes or distances than functions."""
    if score.softcap is not None:
        if type(options.softcap) not in (int, float) or options.softcap != 0:
            return None
        if inputs.bias is not None or inputs.alibi_slopes is not None:
            return None
        options = options._replace(softcap=score.softcap)
    if score.bias is not None:
        bias = _bias(score.bias, found, inputs)
        if bias is None:
            return None
        inputs = inputs._replace(bias=bias)
    if score.alibi is not None:
        is_causal = options.causal is True or options.window_right == 0
        if inputs.alibi_slopes is not None or shift != 0 or (score.alibi.is_causal and not is_causal):
            return None
        slopes = _slopes(score.alibi, found, inputs)
        if slopes is None:
            return None
        inputs = inputs._replace(alibi_slopes=slopes)
    return inputs, options


def _bias(load: int, found: Trace, inputs: Inputs) -> Tensor | None:
    """A captured tensor as a bias (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1) of a dense call."""
    query, graph = inputs.query, found.functions.graph
    others = (inputs.bias, inputs.cu_seqlens_q, inputs.seqlens_k)
    bias = found.tensors[graph.nodes[load].value]
    is_other = bias.device != query.device or bias.dtype.itemsize == 1
    if is_other or any(t is not None for t in others):
        return None
    (batch, seqlen_q, heads, _), seqlen_k = query.shape, inputs.key.shape[1]
    lengths = {"b": batch, "h": heads, "i": seqlen_q, "j": seqlen_k}
    order: list[str] = []
    for argument in graph.nodes[load].args:
        name, number = graph.nodes[argument].op, graph.value(argument)
        dim = len(order)
        if number is not None:
            if not -bias.shape[dim] <= number < bias.shape[dim]:
                return None
            bias = bias.select(dim, number)
        elif bias.shape[dim] < lengths[name]:
            return None
        else:
            bias = bias.narrow(dim, 0, lengths[name])
            order.append(name)
    bias = bias.permute([order.index(name) for name in INDICES if name in order])
    for dim, name in enumerate(INDICES):
        bias = bias if name in order else bias.unsqueeze(dim)
    return bias


def _slopes(alibi: Alibi, found: Trace, inputs: Inputs) -> Tensor | None:
    """Those of all heads: a captured tensor of that size, or computed from the heads' numbers."""
    graph, query = found.functions.graph, inputs.query
    node, heads = graph.nodes[alibi.slope], query.shape[-2]
    if node.op == "load":
        slopes = found.tensors[node.value]
        if slopes.dtype.itemsize == 1:  # PyTorch does not negate 8 bits
            return None
        batch = query.shape[0] if inputs.cu_seqlens_q is None else len(inputs.cu_seqlens_q) - 1
        if slopes.device != query.device or tuple(slopes.shape) not in ((heads,), (batch, heads)):
            return None
        if not is_plain_eager(slopes):  # its derivative may be wanted
            return None
    else:
        h = torch.arange(heads, device=query.device)
        dtype = compute_dtype(query.dtype)
        reads_none = Functions(graph, None, None, ())
        evaluate = Evaluator(graph, reads_none, Buffers(None, None, None), Values(h, h, h, h, h, dtype))
        slopes = evaluate(alibi.slope).to(dtype).expand(heads).contiguous()
    return -slopes if alibi.is_negated else slopes
