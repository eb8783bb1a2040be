"""`context_parallel_attention`: attention over one sequence that many ranks share."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.api import Window, canonical_inputs, to_bshd, window_bounds
from tilewise.core.checks import check_flag, check_tensors, shown
from tilewise.core.functions.call import MaskFunction, ScoreFunction
from tilewise.core.functions.captured import check_indices, pack
from tilewise.core.functions.trace import trace
from tilewise.core.problem import Inputs, Options, describe
from tilewise.dispatch.choice import choose
from tilewise.distributed import engine
from tilewise.distributed.cost import Network, Sizes, choose as choose_method, fits, measured
from tilewise.distributed.dtensor import is_dtensor, shards_of
from tilewise.distributed.faults import agree
from tilewise.distributed.heads import Swap, heads_to_tokens, tokens_to_heads
from tilewise.distributed.layout import Layout, layout_of
from tilewise.distributed.parts import Extras
from tilewise.distributed.ranks import Ranks, ranks_of
from tilewise.distributed.schedule import Rules, make_schedule

METHODS = ("auto", "ring", "all_gather", "ulysses", "2d")


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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over one sequence, of which each rank has the tokens that `shard` gives it.

    Every rank of the group has to call it, with the same options. The result is that of `tilewise.attention`
    on one device, this rank's rows of it; partial results are merged in float32.

    Args:
        query: (batch, tokens of the rank, num_heads, head_dim), or packed (tokens of the rank, num_heads,
            head_dim) with cu_seqlens. Or all three DTensors that one dimension of their mesh shards along the
            sequence, which that dimension must divide; other dimensions may shard batch and heads, and what
            else has heads is of this rank's.
        key: likewise with num_kv_heads, of the same tokens.
        value: likewise with num_kv_heads and head_dim_v.
        group: the ranks that share the sequence; None is the default group, or this process alone.
        mesh: the same as a DeviceMesh of one dimension; or of two, (ring, ulysses), for method="2d".
        method: "ring": keys travel a step at a time. "all_gather": all at once, in more memory. "ulysses":
            heads are exchanged for tokens; the group's size must divide num_heads. "2d": ulysses within
            ranks that follow each other, a ring across. "auto" is what `explain` says to be fastest.
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
        mask_mod, score_mod: as of `tilewise.attention`; indices are those in the whole sequence, and captured
            tensors those of the whole call. Not with cu_seqlens.
        alibi_slopes: (num_heads,) or (batch, num_heads).
        sinks: (num_heads,).
        dropout_p: must be 0: the mask of one device is not served yet.

    Returns:
        out like query with head_dim_v; with return_lse also lse (batch, num_heads, tokens of the rank), or
        packed (num_heads, tokens of the rank), float32 (float64 for float64).

        Gradients of query, key and value are those of this rank's tokens. What every rank has, as sinks,
        captured tensors and a bias of one row, gets this rank's share: summed over ranks as the gradients of
        parameters are.

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
    wrap = None
    if is_dtensor(query):
        if group is not None or mesh is not None:
            raise ValueError("group and mesh must be None for DTensors, which have a mesh")
        form = layout if cu_seqlens is None else "packed"
        query, key, value, group, seqlen, wrap = shards_of(query, key, value, form)
        balance = balance or "contiguous"
    balance = balance or "zigzag"
    inner, mesh = _mesh_degree(mesh, method)
    ranks = ranks_of(group, mesh) if inner is None else _flat_ranks(mesh, group)
    error = call = None
    try:
        check_flag("return_lse", return_lse)
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(f"method={shown(method)} must be one of {', '.join(map(repr, METHODS))}")
        q, k, v = to_bshd(layout, query=query, key=key, value=value)
        if cu_seqlens is not None:
            q, k, v = _batch_of_one(q, k, v)
        inputs = canonical_inputs(q, k, v, mask, bias, alibi_slopes, sinks)
        options = Options(
            causal, *window_bounds(window), softcap, dropout_p, scale, deterministic, None, None, precision
        )
        tokens = layout_of(ranks, balance, seqlen, cu_seqlens, q.shape[1])
        if mask_mod is not None or score_mod is not None:
            inputs, options = _with_functions(inputs, options, tokens, cu_seqlens, mask_mod, score_mod)
        _check(inputs, options, tokens, cu_seqlens is not None, backend)
        if network is not None and not isinstance(network, Network):
            raise TypeError(f"network={shown(network)} must be a tilewise.distributed.Network")
        degree = _ulysses_degree(method, inner, ranks, inputs)
        call = inputs, options, tokens
    except (ValueError, TypeError, NotImplementedError) as found:
        error = found
    facts = {
        "query": _fact(query), "key": _fact(key), "value": _fact(value), "cu_seqlens": _offsets(cu_seqlens),
        "sinks": _fact(sinks), "alibi_slopes": _fact(alibi_slopes), "bias": bias is not None,
        "mask": mask is not None, "causal": causal, "window": window, "softcap": softcap, "scale": scale,
        "method": method, "balance": balance, "seqlen": seqlen, "layout": layout, "return_lse": return_lse,
        "precision": precision, "network": network,
        "mask_mod and score_mod": None if call is None else call[1].functions,
    }  # fmt: skip
    if seqlen is None and cu_seqlens is None and isinstance(query, Tensor):
        facts["tokens of a rank (seqlen gives their sum where they differ)"] = _tokens(query, layout)
    agree(ranks, facts, error, query.device if isinstance(query, Tensor) else torch.device("cpu"))
    assert call is not None
    if method == "auto" and inner is None and ranks.world > 1:
        method, degree = _fastest_method(*call, ranks, network)
    out, lse = _run(*call, degree, ranks, method, backend, return_lse)
    if cu_seqlens is not None:
        out, lse = out[0], None if lse is None else lse[0]
    elif layout == "bhsd":
        out = out.transpose(1, 2)
    if wrap is not None:
        out, lse = wrap(out, lse)
    return (out, lse) if return_lse else out  # type: ignore[return-value]


def _run(
    inputs: Inputs,
    options: Options,
    tokens: Layout,
    degree: int,
    ranks: Ranks,
    method: str,
    backend: str | None,
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """out and, if wanted, lse: heads for tokens, the schedule, tokens for heads."""
    ranks.connect(inputs.query.device)
    inner, outer = ranks.grid(degree)
    extras = Extras(*(getattr(inputs, name) for name in Extras._fields))
    query, key, value, sinks = inputs.query, inputs.key, inputs.value, inputs.sinks
    first_head = 0
    if degree > 1:
        swap = Swap.of(inner, tokens, ranks.rank // degree * degree)
        heads, kv_heads = (swap.heads(query.shape[2], key.shape[2], of_keys) for of_keys in (False, True))
        extras, sinks = _of_heads(extras, sinks, heads[inner.rank])
        first_head = heads[inner.rank].start
        query, key, value = tokens_to_heads(swap, (query, key, value), (heads, kv_heads, kv_heads))
    is_single = len(tokens.starts) == 2
    pattern = "all_gather" if method == "all_gather" else "ring"
    schedule = functools.partial(
        make_schedule, tokens.joined(degree), outer.rank, rules := _rules(options, extras), pattern
    )
    packs = not is_single and not rules.needs_tokens
    work = engine.Work(outer, schedule(), schedule(is_backward=True), options, backend, packs, first_head)
    out, lse = engine.run(work, query, key, value, extras, sinks)
    if degree == 1:
        return out, lse
    (out,) = heads_to_tokens(swap, (out,), (heads,))
    if not wants_lse:
        return out, None
    (lse,) = heads_to_tokens(swap, (lse.transpose(1, 2)[..., None],), (heads,))
    return out, lse[..., 0].transpose(1, 2)


def _of_heads(extras: Extras, sinks: Tensor | None, heads: slice) -> tuple[Extras, Tensor | None]:
    """What of these belongs to some heads."""
    mask, bias = (None if t is None else t[:, heads] if t.shape[1] > 1 else t for t in extras[:2])
    slopes = extras.alibi_slopes
    slopes = None if slopes is None else slopes[..., heads]
    return extras._replace(mask=mask, bias=bias, alibi_slopes=slopes), None if sinks is None else sinks[heads]


def _fastest_method(
    inputs: Inputs, options: Options, tokens: Layout, ranks: Ranks, network: Network | None
) -> tuple[str, int]:
    """What `method="auto"` takes, and how many ranks exchange heads for tokens: the same on all ranks."""
    query, scores = inputs.query, (inputs.mask, inputs.bias)
    if network is None:
        ranks.connect(query.device)
        network = measured(ranks, query.dtype, query.device)
    may_swap = all(t is None or t.shape[2] == 1 for t in scores)
    rules = _rules(options, Extras(*scores, inputs.alibi_slopes))
    # not what only some ranks may have: whether gradients are wanted
    best = choose_method(tokens, rules, _sizes(inputs), network, True, may_swap).best
    return best.method, best.degree


def _sizes(inputs: Inputs) -> Sizes:
    query, key, value = inputs[:3]
    heads = query.shape[2], key.shape[2]
    return Sizes(query.shape[0], *heads, query.shape[3], value.shape[3], query.element_size())


def _rules(options: Options, extras: Extras) -> Rules:
    left, right = options.window_left, options.window_right
    if options.causal:
        right = 0 if right is None else min(0, right)
    needs_tokens = options.functions is not None or any(t is not None for t in extras)
    return Rules(left, right, needs_tokens, extras.alibi_slopes is not None)


def _ulysses_degree(method: str, inner: int | None, ranks: Ranks, inputs: Inputs) -> int:
    """How many ranks exchange heads for tokens: 1 is none.

    Raises:
        ValueError, NotImplementedError: the heads do not divide, or a bias has rows.
    """
    if method in ("ring", "all_gather") or (method == "auto" and inner is None) or ranks.world == 1:
        return 1
    heads, kv_heads = inputs.query.shape[2], inputs.key.shape[2]
    if method == "ulysses":
        inner = ranks.world
    elif inner is None:
        sizes = _sizes(inputs)
        inner = max(d for d in range(1, ranks.world) if ranks.world % d == 0 and fits(d, sizes))
    if heads % inner:
        raise ValueError(
            f"query heads {heads} must be divisible by the {inner} ranks that exchange heads: "
            "method='ring' serves"
        )
    if kv_heads % inner and inner % kv_heads:
        raise ValueError(
            f"KV heads {kv_heads} must divide, or be divisible by, the {inner} ranks that exchange heads: "
            "method='ring' serves"
        )
    for name, t in (("mask", inputs.mask), ("bias", inputs.bias)):
        if t is not None and t.shape[2] > 1 and inner > 1:
            raise NotImplementedError(
                f"{name}.shape={tuple(t.shape)} has a row for each token, which method={method!r} does not "
                "exchange: method='ring' serves"
            )
    return inner


def _with_functions(
    inputs: Inputs,
    options: Options,
    tokens: Layout,
    cu_seqlens: Any,
    mask_mod: MaskFunction | None,
    score_mod: ScoreFunction | None,
) -> tuple[Inputs, Options]:
    """As `core.functions.call.with_functions`, with indices of the whole sequence."""
    if cu_seqlens is not None:
        raise NotImplementedError("mask_mod and score_mod with cu_seqlens are not served over several ranks")
    query = inputs.query
    found = trace(mask_mod, score_mod, torch.is_grad_enabled(), query.device)
    check_indices(found, (query.shape[0], query.shape[2], tokens.total, tokens.total))
    floats, integers, layout = pack(found, query)
    if inputs.alibi_slopes is not None and found.functions.score is not None:
        raise NotImplementedError(
            "alibi_slopes with score_mod is not served over ranks: score_mod may add it"
        )
    inputs = inputs._replace(captured_floats=floats, captured_integers=integers, captured_layout=layout)
    return inputs, options._replace(functions=found.functions.text)


def _check(inputs: Inputs, options: Options, tokens: Layout, is_packed: bool, backend: str | None) -> None:
    """What `describe` cannot see: masks have columns for the whole sequence."""
    query, key = inputs.query, inputs.key
    if options.dropout_p:
        raise NotImplementedError(
            f"dropout_p={shown(options.dropout_p)} is not served over several ranks: 0 is; dropout "
            "outside of attention needs no mask of one device"
        )
    problem = describe(inputs._replace(mask=None, bias=None), options)
    if backend is not None:
        mask, bias = (None if t is None else tuple(t.shape) for t in (inputs.mask, inputs.bias))
        problem = replace(problem, mask_shape=mask, bias_shape=bias, has_sinks=False)
        choose(problem, backend)
        if problem.needs_grad:
            choose(problem, backend, is_backward=True)
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            f"key has {key.shape[1]} tokens, must have those of query, {query.shape[1]}: each rank holds "
            "the same tokens of both"
        )
    if problem.is_8_bit:
        raise NotImplementedError(
            f"precision={problem.precision!r} is not served over several ranks: 'ieee' is"
        )
    for name, t, right in (("mask", inputs.mask, "bool"), ("bias", inputs.bias, "floating point")):
        if t is None:
            continue
        check_tensors(**{name: t})
        if is_packed:
            raise NotImplementedError(f"{name} with cu_seqlens is not served over several ranks: window is")
        if (t.dtype == torch.bool) != (name == "mask") or (name == "bias" and not t.dtype.is_floating_point):
            raise TypeError(f"{name}.dtype={t.dtype} must be {right}")
        shape = (query.shape[0], query.shape[2], query.shape[1], tokens.total)
        if t.ndim != 4 or any(size not in (1, full) for size, full in zip(t.shape, shape)):
            raise ValueError(
                f"{name}.shape={tuple(t.shape)} must broadcast to (batch, heads, tokens of the rank, seqlen)="
                f"{shape}"
            )


def _batch_of_one(*tensors: Tensor) -> list[Tensor]:
    for name, t in zip(("query", "key", "value"), tensors):
        if t.ndim != 3:
            raise ValueError(
                f"{name}.shape={tuple(t.shape)} must be (tokens of the rank, heads, dim) with cu_seqlens"
            )
    return [t[None] for t in tensors]


def _mesh_degree(mesh: Any, method: str) -> tuple[int | None, Any]:
    """(ranks that exchange heads, mesh) of a mesh of two dimensions; (None, mesh) of any other."""
    if getattr(mesh, "ndim", 1) != 2:
        return None, mesh
    if method not in ("2d", "auto"):
        raise ValueError(f"mesh.ndim=2 must be 1 for method={method!r}: (ring, ulysses) is for '2d'")
    return int(mesh.size(1)), mesh


def _flat_ranks(mesh: Any, group: Any) -> Ranks:
    if group is not None:
        raise ValueError(f"mesh={shown(mesh)} must be None when group is given")
    return ranks_of(mesh=mesh._flatten())


def _fact(t: Any) -> str:
    """What must be equal of a tensor on all ranks: all but its tokens."""
    if not isinstance(t, Tensor):
        return type(t).__name__
    shape = tuple(t.shape)
    shape = (shape[0], *shape[2:]) if t.ndim == 4 else shape[1:] if t.ndim == 3 else shape
    return f"{str(t.dtype).removeprefix('torch.')} {shape} on {t.device.type}"


def _tokens(query: Tensor, layout: str) -> int | None:
    return query.shape[2 if layout == "bhsd" else 1] if query.ndim == 4 else None


def _offsets(cu_seqlens: Any) -> Any:
    return cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens and list(cu_seqlens)
