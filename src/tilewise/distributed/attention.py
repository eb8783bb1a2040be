"""`context_parallel_attention`: attention over one sequence that many ranks share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.api import Window, canonical_inputs, check_layout, draw_seed, to_bshd, window_bounds
from tilewise.core.checks import check_flag, check_number, check_tensors, shown
from tilewise.core.dropout import SQUARE
from tilewise.core.functions.call import Extent, MaskFunction, ScoreFunction, with_functions
from tilewise.core.problem import Inputs, Options
from tilewise.core.torch_private import between_graphs
from tilewise.distributed import engine
from tilewise.distributed.cost import choose as choose_method, sizes_of
from tilewise.distributed.faults import batch_of_one, check_call, facts_of
from tilewise.distributed.heads import Exchange, heads_of, heads_to_tokens, swap_of
from tilewise.distributed.layout import Layout, group_of, joined, layout_of, shards_of
from tilewise.distributed.network import Network, check_network, measured
from tilewise.distributed.parts import Origin
from tilewise.distributed.ranks import Ranks, agree, flat_ranks, is_dtensor, mesh_degree, ranks_of
from tilewise.distributed.schedule import Rules, make_schedule
from tilewise.distributed.wire import reach_of

METHODS = ("auto", "ring", "all_gather", "ulysses", "2d")


@between_graphs
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Any = None,
    mesh: Any = None,
    method: str = "auto",
    network: Network | None = None,
    balance: str | None = None,
    seqlen: int | None = None,
    cu_seqlens: Any = None,
    causal: bool = False,
    window: Window | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    mask_mod: MaskFunction | None = None,
    score_mod: ScoreFunction | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str = "ieee",
    backend: str | None = None,
    generator: torch.Generator | None = None,
    dropout_seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over one sequence, of which each rank has the tokens that `shard` gives it.

    Every rank of the group has to call it, with the same options. The result is that of `tilewise.attention`
    on one device, this rank's rows of it; partial results are merged in float32.

    Args:
        query: (batch, tokens of the rank, num_heads, head_dim), or packed (tokens of the rank, num_heads,
            head_dim) with cu_seqlens. Or all three DTensors that one dimension of their mesh shards along the
            sequence, in shards that differ by a token at most; other dimensions may shard batch and heads,
            and what else has heads is of this rank's.
        key: likewise with num_kv_heads, of the same tokens.
        value: likewise with num_kv_heads and head_dim_v.
        group: the ranks that share the sequence; None is the default group, or this process alone.
        mesh: the same as a DeviceMesh of one dimension; or of two, (ring, ulysses), for method="2d".
        method: "ring": keys of one rank travel a step. "all_gather": of all ranks in two steps, in more
            memory. "ulysses": heads are exchanged for tokens; the group's size must divide num_heads. "2d":
            ulysses within ranks that follow each other, a ring across. "auto" is what `explain` says to be
            fastest, with a backward if query, key or value wants a gradient: on all ranks, or on none.
        network: for "auto", the speed of messages and of a device, the same on all ranks; None: measured in
            the first call of a group, which takes some messages and a small attention more.
        balance: how `shard` dealt the tokens out; None: "zigzag", of DTensors "contiguous", as they are.
        seqlen: the total number of tokens; None: all ranks have as many as this one.
        cu_seqlens: (documents + 1,) offsets of packed documents in the whole sequence, the same on all ranks:
            a list or a tensor. A tensor on a GPU is read in every call, which waits.
        causal, window, softcap, scale, layout, deterministic, precision, backend: as of `tilewise.attention`;
            positions are those in the whole sequence, or in the document.
        mask, bias: with a row for each of the rank's tokens (or one for all) and a column for each token of
            the whole sequence (or one): (batch or 1, num_heads or 1, tokens of the rank or 1, seqlen or 1).
            Not with cu_seqlens; with "ulysses" and "2d" of one row only.
        mask_mod, score_mod: as of `tilewise.attention`; indices are those in the whole sequence, or in the
            document, and captured tensors those of the whole call.
        alibi_slopes: (num_heads,) or, without cu_seqlens, (batch, num_heads). Has a gradient.
        sinks: (num_heads,).
        dropout_p: as of `tilewise.attention`, with the mask of one device. Kernels for it take pieces of
            documents that begin at multiples of 16 tokens; others are left to the backends "triton" and
            "tiled". DTensors are to have a mesh of one dimension.
        generator, dropout_seed: what draws the seed, or the seed itself, () int64. That of the group's first
            rank is sent to all: with its random state, or its seed, one device drops the same weights.

    Returns:
        out like query with head_dim_v; with return_lse also lse (batch, num_heads, tokens of the rank), or
        packed (num_heads, tokens of the rank), float32 (float64 for float64).

        Gradients of query, key and value are those of this rank's tokens. What every rank has, as sinks,
        slopes, captured tensors and a bias of one row, gets this rank's share: summed over ranks as the
        gradients of parameters are.

    Raises:
        ValueError, TypeError: an argument does not fit. Where ranks disagree, each of them raises, on CPU
            groups in every call, on others if TILEWISE_DEBUG=1.
        NotImplementedError: an option that the method does not serve; the message names one that does.

    Source: Liu et al., Ring Attention (2023); Jacobs et al., DeepSpeed Ulysses (2023); Fang and Zhao, Unified
        Sequence Parallelism (2024).

    Example:
        >>> from tilewise.distributed import shard
        >>> q = k = v = torch.ones(1, 6, 2, 8)
        >>> context_parallel_attention(shard(q), shard(k), shard(v), causal=True).shape  # alone: all tokens
        torch.Size([1, 6, 2, 8])
    """
    wrap, dimensions, refusal = None, 1, None
    if is_dtensor(query):
        if group is not None or mesh is not None:
            raise ValueError("group and mesh must be None for DTensors, which have a mesh")
        dimensions = query.device_mesh.ndim  # type: ignore[attr-defined]
        form = "packed" if cu_seqlens is not None else "bhsd" if layout == "bhsd" else "bshd"
        group, told = group_of(query, form), seqlen
        try:
            check_layout(layout)
            query, key, value, seqlen, wrap = shards_of(query, key, value, form)
            if told not in (None, seqlen):
                raise ValueError(f"seqlen={shown(told)} must be the DTensors' {seqlen}, or None")
        except Exception as found:
            refusal = found
        balance = "contiguous" if balance is None else balance
    balance = "zigzag" if balance is None else balance
    inner = mesh_degree(mesh, method)
    ranks = ranks_of(group, mesh) if inner is None else flat_ranks(mesh, group)

    def describe() -> Call:
        if refusal is not None:
            raise refusal
        check_tensors(query=query, key=key, value=value)
        q, k, v = to_bshd(layout, query=query, key=key, value=value)
        if cu_seqlens is not None:
            q, k, v = batch_of_one(q, k, v)
        inputs = canonical_inputs(q, k, v, mask, bias, alibi_slopes, sinks)
        inputs = inputs._replace(dropout_seed=_seed(q, dropout_p, generator, dropout_seed, dimensions))
        options = Options(
            causal, *window_bounds(window), softcap, dropout_p, scale, deterministic, None, None, precision
        )
        if q.ndim != 4:
            raise ValueError(f"query.shape={tuple(q.shape)} must be (batch, tokens of the rank, heads, dim)")
        tokens = layout_of(ranks, balance, seqlen, cu_seqlens, q.shape[1])
        whole = _extent(inputs, tokens, cu_seqlens is not None)
        inputs, options = with_functions(inputs, options, mask_mod, score_mod, is_shard=True, whole=whole)
        return Call(inputs, options, tokens)

    where = Where(ranks, method, balance, seqlen, cu_seqlens is not None, inner, network, backend)
    device = query.device if isinstance(query, Tensor) else torch.device("cpu")
    out, lse = attend(where, describe, return_lse, device)
    if cu_seqlens is not None:
        out, lse = out[0], None if lse is None else lse[0]
    elif layout == "bhsd":
        out = out.transpose(1, 2)
    if wrap is not None:
        out, lse = wrap(out, lse)
    return (out, lse) if return_lse else out  # type: ignore[return-value]


class Call(NamedTuple):
    """What a rank computes: tensors (batch, tokens of the rank, heads, dim), packed ones a batch of one."""

    inputs: Inputs
    options: Options
    tokens: Layout


class Where(NamedTuple):
    """How a call is spread over ranks: the arguments of `context_parallel_attention` that say so."""

    ranks: Ranks
    method: str
    balance: str
    seqlen: int | None
    is_packed: bool
    inner: int | None = None  # ranks of a mesh of two dimensions that exchange heads
    network: Network | None = None
    backend: str | None = None


def attend(
    where: Where, describe: Callable[[], Call], wants_lse: bool, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """out and, if wanted, lse of the call that `describe` gives, or refuses. All ranks take part.

    Raises:
        ValueError, TypeError, NotImplementedError: as `context_parallel_attention`.
    """
    ranks, method, _, seqlen, is_packed, inner, network, backend = where
    error = call = None
    try:
        check_flag("return_lse", wants_lse)
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(f"method={shown(method)} must be one of {', '.join(map(repr, METHODS))}")
        if network is not None:
            check_network(network)
        call = describe()
        degree = check_call(*call, is_packed, backend, method, inner)
    except Exception as found:  # also of a function that is traced: the others have to hear of it
        error = found

    def facts() -> dict[str, Any]:
        inputs, options, tokens = call  # type: ignore[misc]
        found = facts_of(inputs, options) | {
            "method": method, "balance": where.balance, "seqlen": seqlen, "network": network,
            "return_lse": wants_lse, "cu_seqlens": tokens.starts if is_packed else None,
        }  # fmt: skip
        if method == "auto" and inner is None:
            found["requires_grad"] = _wants_gradients(inputs)
        if seqlen is None and not is_packed:
            name = "tokens of a rank (seqlen gives their sum where they differ)"
            found[name] = inputs.query.shape[1]
        return found

    agree(ranks, facts, error, device)
    assert call is not None
    if method == "auto" and inner is None and ranks.world > 1:
        method, degree = _fastest_method(call, ranks, network)
    return _run(call, degree, ranks, method, backend, wants_lse)


def _seed(
    query: Tensor, dropout_p: float, generator: torch.Generator | None, given: Tensor | None, dimensions: int
) -> Tensor | None:
    """The seed of this rank's dropout, if there is any. dimensions: of the mesh that shards query.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument does not fit.
    """
    if given is None:
        seed = draw_seed(query, dropout_p, generator)
    else:
        if not isinstance(given, Tensor):
            raise TypeError(f"dropout_seed={shown(given)} must be a () int64 tensor: torch.tensor(1)")
        check_number("dropout_p", dropout_p)
        if given.ndim or given.dtype != torch.int64 or generator is not None:
            raise ValueError(
                f"dropout_seed of {given.dtype} and shape {tuple(given.shape)} must be a () int64 tensor, "
                "without a generator"
            )
        seed = given if dropout_p > 0 else None
    if seed is not None and dimensions > 1:
        raise NotImplementedError(
            f"dropout_p={shown(dropout_p)} of DTensors on a mesh of {dimensions} dimensions is not served: "
            "of one dimension, or of each rank's own tensors, is"
        )
    return seed


def _run(
    call: Call, degree: int, ranks: Ranks, method: str, backend: str | None, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """out and, if wanted, lse: heads for tokens, the schedule, tokens for heads."""
    inputs, options, tokens = call
    inner, outer = ranks.grid(degree)
    for those in (ranks, inner, outer):
        those.connect(inputs.query.device)
    if inputs.dropout_seed is not None:
        seed = ranks.of_first(inputs.dropout_seed.to(inputs.query.device))
        inputs = inputs._replace(dropout_seed=seed)
    num_heads = inputs.query.shape[2]
    heads, kv_heads = heads_of(degree, num_heads, inputs.key.shape[2])
    exchange = None
    if degree > 1:
        swap = swap_of(inner, tokens, ranks.rank // degree * degree)
        exchange = Exchange(swap, (heads, kv_heads, kv_heads))
        inputs = _of_heads(inputs, heads[inner.rank])
    origin = Origin(heads[inner.rank].start, num_heads, tokens.starts)
    pattern = "all_gather" if method == "all_gather" else "ring"
    rules = _rules(inputs, options)
    schedule = joined(tokens, degree), outer.rank, rules, pattern
    steps, backward_steps = (make_schedule(*schedule, is_backward) for is_backward in (False, True))
    packs = inputs.query.shape[0] == 1 and not rules.needs_tokens
    make_reach = functools.partial(reach_of, *schedule)
    most_heads = max(h.stop - h.start for h in kv_heads)
    work = engine.Work(
        outer, steps, backward_steps, options, backend, packs, origin, make_reach, most_heads, exchange
    )
    out, lse = engine.run(work, inputs)
    if degree == 1:
        return out, lse
    out = heads_to_tokens(swap, out, heads)
    if not wants_lse:
        return out, None
    lse = heads_to_tokens(swap, lse.transpose(1, 2)[..., None], heads)
    return out, lse[..., 0].transpose(1, 2)


def _of_heads(inputs: Inputs, heads: slice) -> Inputs:
    """What belongs to some heads of all but query, key and value."""
    mask, bias = (
        None if t is None else t[:, heads] if t.shape[1] > 1 else t for t in (inputs.mask, inputs.bias)
    )
    slopes, sinks = (None if t is None else t[..., heads] for t in (inputs.alibi_slopes, inputs.sinks))
    return inputs._replace(mask=mask, bias=bias, alibi_slopes=slopes, sinks=sinks)


def _fastest_method(call: Call, ranks: Ranks, network: Network | None) -> tuple[str, int]:
    """What `method="auto"` takes, and how many ranks exchange heads for tokens: the same on all ranks."""
    inputs, options, tokens = call
    if network is None:
        ranks.connect(inputs.query.device)
        network = measured(ranks, inputs.query.dtype, inputs.query.device)
    # A row of a rank with one token may be for that token or for all: then all ranks take it for the former.
    is_unclear = min(map(tokens.length, range(ranks.world))) < 2
    may_swap = all(t is None or (t.shape[2] == 1 and not is_unclear) for t in (inputs.mask, inputs.bias))
    rules, wants_gradients = _rules(inputs, options), _wants_gradients(inputs)
    best = choose_method(tokens, rules, sizes_of(inputs), network, wants_gradients, may_swap).best
    return best.method, best.degree


def _wants_gradients(inputs: Inputs) -> bool:
    """Of query, key or value: a backward will follow."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in inputs[:3])


def _rules(inputs: Inputs, options: Options) -> Rules:
    left, right = options.window_left, 0 if options.causal else options.window_right
    by_token = (options.functions, inputs.mask, inputs.bias, inputs.alibi_slopes, inputs.dropout_seed)
    needs_tokens = any(x is not None for x in by_token)
    multiple = 1 if inputs.dropout_seed is None else SQUARE
    return Rules(left, right, needs_tokens, inputs.alibi_slopes is not None, multiple)


def _extent(inputs: Inputs, tokens: Layout, is_packed: bool) -> Extent:
    """What functions of the whole call count."""
    batch, heads = len(tokens.starts) - 1 if is_packed else inputs.query.shape[0], inputs.query.shape[2]
    longest = max(b - a for a, b in itertools.pairwise(tokens.starts))
    return batch, heads, longest, longest
