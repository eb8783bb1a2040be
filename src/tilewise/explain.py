"""What a call would do: the backend and why, work, traffic and the bound that follows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.api import (
    attention,
    attention_with_cache,
    canonical_inputs,
    check_layout,
    products_of,
    to_bshd,
    window_bounds,
)
from tilewise.cache.contiguous import KVCache
from tilewise.cache.paged import PagedKVCache
from tilewise.cache.step import Rotary, cached_step
from tilewise.core.checks import check_flag, check_known, check_tensors
from tilewise.core.functions.call import Cached, with_functions
from tilewise.core.functions.expression import decode
from tilewise.core.problem import (
    AttentionProblem,
    Inputs,
    Options,
    Span,
    describe,
    in_layout,
    of_gradient,
    spans,
)
from tilewise.core.quantized import is_quantized
from tilewise.core.statistics import check_aux
from tilewise.core.values import check_values
from tilewise.device import Device, device_for
from tilewise.dispatch import choice as dispatch
from tilewise.dispatch.statistics import servers
from tilewise.gpu.functions.distances import of_distances
from tilewise.varlen import attention_varlen, read_length

READ_WHOLE = ("query", "mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k")


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`.

    Attributes:
        backend: the backend that serves the forward.
        backward_backend: the one that serves the backward; None if the one asked for has no such backward,
            of a call without gradients.
        reasons: for every backend, why it does not serve the call; None if it would.
        flops: of the forward: 2 for each multiply-add of the (query, key) pairs that lengths, causal and
            window leave. What only a mask, mask function or block mask hides is counted, also in bytes.
        bytes: the least the forward must move: each input and visible key read once, each output written
            once. Writing new tokens to a cache is not counted.
        device: the ceilings used; None for meta tensors, which no device computes with.
        seconds: the larger of flops and bytes over their ceilings. No kernel is faster than a datasheet's
            ceilings allow, with inputs in main memory; measured ceilings give about the best time.
        bound: "compute" or "memory", whichever that is. Both None without ceilings.
        from_functions: the options that mask_mod and score_mod say, by which they are served instead.
        statistics: which backend gives each statistic of `return_aux`; `tiled` gives their gradients.
    """

    backend: str
    backward_backend: str | None
    reasons: dict[str, str | None]
    flops: int
    bytes: int
    device: Device | None
    problem: AttentionProblem
    sequences: tuple[Span, ...]
    from_functions: tuple[str, ...] = ()
    statistics: dict[str, str] = field(default_factory=dict)

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / max(1, self.bytes)

    @property
    def bound(self) -> str | None:
        if self.device is None:
            return None
        return "compute" if self.intensity >= self.device.balance else "memory"

    @property
    def seconds(self) -> float | None:
        if self.device is None:
            return None
        return max(self.flops / self.device.flops_per_second, self.bytes / self.device.bytes_per_second)

    def __str__(self) -> str:
        p = self.problem
        queries, keys = (_shortest_to_longest(self.sequences, side) for side in "qk")
        rows = [
            f"attention {p.batch} x {queries} queries x {keys} keys, "
            f"{p.num_heads}/{p.num_kv_heads} heads of {p.head_dim}/{p.head_dim_v}, {p.dtype}".replace(
                "torch.", ""
            ),
            f"backend    {self.backend} (backward: {self.backward_backend or 'none'})",
        ]
        rows += [f"           not {name}: {why}" for name, why in self.reasons.items() if why is not None]
        if self.from_functions:
            rest = "" if p.functions is None else "; the rest stays a function"
            rows += [f"options    {', '.join(self.from_functions)}, as the functions say{rest}"]
        if self.backend in ("hopper", "triton") and of_distances(p) is not None:
            rows += ["functions  the score function is a number of each distance, read as a bias"]
        if self.statistics:
            served = ", ".join(f"{name} {backend}" for name, backend in self.statistics.items())
            rows += [f"statistics {served}; their gradients tiled"]
        rows += [
            f"work       {self.flops / 1e9:.4g} GFLOP, {self.bytes / 1e6:.4g} MB: "
            f"{self.intensity:.4g} FLOP/byte" + (", what the mask hides included" if _hides(p) else "")
        ]
        if p.device_type == "cuda" and torch.version.hip is not None:
            rows += [f"note       ROCm {torch.version.hip} is experimental: no such GPU was tried"]
        return "\n".join(rows + self._bound_rows())

    def _bound_rows(self) -> list[str]:
        d = self.device
        if d is None or self.seconds is None:
            return ["ceilings   none: no device computes with meta tensors"]
        gflops, gbytes = d.flops_per_second / 1e9, d.bytes_per_second / 1e9
        time = f"{self.seconds * 1e3:.4g} ms"
        return [
            f"ceilings   {d.name}: {gflops:.4g} GFLOP/s, {gbytes:.4g} GB/s, "
            f"balance {d.balance:.3g} FLOP/byte ({d.source})",
            f"bound      {self.bound}: "
            + (f"about {time} at the measured ceilings" if d.is_measured else f"at least {time}"),
        ]


def _hides(problem: AttentionProblem) -> bool:
    """Whether a mask or a mask function hides pairs that `flops` counts."""
    functions = problem.functions
    return problem.mask_shape is not None or (functions is not None and decode(functions).mask is not None)


def _shortest_to_longest(sequences: tuple[Span, ...], side: str) -> str:
    lengths = [s.q1 - s.q0 if side == "q" else s.k1 - s.k0 for s in sequences] or [0]
    return " to ".join(map(str, sorted({min(lengths), max(lengths)})))


def explain(query: Tensor, *args: Any, **options: Any) -> Explanation:
    """Say which backend a call would use and why, and what bounds its time. Computes no attention.

    Args:
        query, args, options: those of `tilewise.attention`, as `explain(query, key, value, causal=True)`.
            With `cu_seqlens_q` and `cu_seqlens_k`, those of `tilewise.attention_varlen`. With a cache, those
            of `tilewise.attention_with_cache`, as `explain(query, cache)`: the cache is left as it was.

    Raises:
        ValueError, TypeError, NotImplementedError: as the call itself would. Also NotImplementedError for
            lengths on the meta device, as the work depends on their values.

    Example:
        >>> x = torch.zeros(1, 128, 2, 64)
        >>> explanation = explain(x, x, x, window=(16, 0))
        >>> explanation.flops, explanation.bytes
        (1044480, 263168)
    """
    given = _arguments(_call(args, options), query, args, options)
    check_tensors(**({} if is_quantized(query) else {"query": query}))
    check_flag("return_lse", given["return_lse"])
    inputs, cached = _cached_inputs(given) if "cache" in given else (_inputs(given), None)
    call = _options(given)
    call = call._replace(precision=products_of(inputs, call.precision))
    mask_mod, score_mod, block_mask = (given[name] for name in ("mask_mod", "score_mod", "block_mask"))
    inputs, call, before = *with_functions(inputs, call, mask_mod, score_mod, block_mask, cached), call
    backend = given["backend"]
    problem = describe(inputs, call)
    _check_lengths(inputs)
    check_values(problem, inputs, call)
    sequences, forward = spans(problem, inputs), dispatch.choose(problem, backend)
    aux = check_aux(given["return_aux"])
    return Explanation(
        backend=forward,
        backward_backend=_backward_backend(problem, backend),
        reasons=dispatch.refusals(problem),
        flops=_flops(problem, sequences),
        bytes=_bytes(problem, inputs, sequences),
        device=device_for(inputs.query.device, problem.dtype, problem.precision),
        problem=problem,
        sequences=tuple(sequences),
        from_functions=_from_functions(before, call, inputs, given),
        statistics={} if aux is None else servers(problem, aux, backend, forward),
    )


def _backward_backend(problem: AttentionProblem, backend: str | None) -> str | None:
    try:
        return dispatch.choose(of_gradient(problem), backend, is_backward=True)
    except NotImplementedError:
        if problem.needs_grad:
            raise
        return None


def _from_functions(before: Options, call: Options, inputs: Inputs, given: dict[str, Any]) -> tuple[str, ...]:
    """What `with_functions` has made options of."""
    found = []
    if call.causal != before.causal:
        found.append("causal=True")
    window = (call.window_left, call.window_right)
    if window != (before.window_left, before.window_right):
        found.append(f"window={window}")
    if call.softcap != before.softcap:
        found.append(f"softcap={call.softcap}")
    tensors = ("bias", "alibi_slopes")
    return (*found, *(name for name in tensors if getattr(inputs, name) is not given[name]))


def _call(args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
    """The public function that takes these arguments."""
    if "cache" in options or isinstance(args[0] if args else None, KVCache | PagedKVCache):
        return attention_with_cache
    if len(args) > 2 or any(options.get(f"cu_seqlens_{side}") is not None for side in "qk"):
        return attention_varlen
    return attention


def _arguments(
    call: Callable[..., Any], query: Tensor, args: tuple[Any, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """All arguments of `call` by name.

    Raises:
        TypeError: it does not take them, or lacks one.
    """
    check_known(call, options)
    try:
        bound = inspect.signature(call).bind(query, *args, **options)
    except TypeError as error:
        raise TypeError(f"explain takes the arguments of {call.__name__}: {error}") from None
    bound.apply_defaults()
    return bound.arguments


def _inputs(given: dict[str, Any]) -> Inputs:
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")
    tensors = {name: given[name] for name in names if name in given}
    check_tensors(**{name: t for name, t in tensors.items() if not is_quantized(t)})
    query, key, value, *offsets = tensors.values()
    inputs = canonical_inputs(query, key, value, *_score_tensors(given), generator=given["generator"])
    check_layout(layout := given.get("layout", "bshd"))
    if inputs.query_blocks is None:
        inputs = in_layout(inputs, layout)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # any: none is drawn
    return inputs._replace(**dict(zip(names[3:], offsets)), dropout_seed=seed)


def _cached_inputs(given: dict[str, Any]) -> tuple[Inputs, Cached]:
    """With the lengths that the cache would have, which it does not get; where the queries stand."""
    cache, cos, sin = given["cache"], given["rotary_cos"], given["rotary_sin"]
    tensors = {name: given[name] for name in ("query", "key", "value")}
    query, key, value = to_bshd(given["layout"], **tensors)
    step = cached_step(cache, given["batch"], query, key, value)
    try:
        if cos is not None or sin is not None:
            step.check_rotary(Rotary(cos, sin, given["rotary_interleaved"]))
        inputs = step.inputs(canonical_inputs(query, cache.key, cache.value, *_score_tensors(given)))
        cached = step.standing(query)
    finally:
        step.undo()
    if isinstance(cache, KVCache) and key is not None:
        inputs = inputs._replace(seqlens_k=cache.lengths + key.shape[1])
    return inputs, cached


def _score_tensors(given: dict[str, Any]) -> list[Tensor | None]:
    tensors = {name: given[name] for name in ("mask", "bias", "alibi_slopes", "sinks")}
    check_tensors(**{name: t for name, t in tensors.items() if t is not None})
    return list(tensors.values())


def _options(given: dict[str, Any]) -> Options:
    return Options(
        given["causal"],
        *window_bounds(given["window"]),
        given["softcap"],
        given.get("dropout_p", 0.0),
        given["scale"],
        given.get("deterministic", False),
        read_length("max_seqlen_q", given.get("max_seqlen_q")),
        read_length("max_seqlen_k", given.get("max_seqlen_k")),
        given["precision"],
    )


def _check_lengths(inputs: Inputs) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k"):
        t = getattr(inputs, name)
        if t is not None and t.is_meta:
            raise NotImplementedError(
                f"{name}.device=meta holds no lengths, by which explain counts: put all on the CPU"
            )


def _flops(problem: AttentionProblem, sequences: list[Span]) -> int:
    pairs = sum(problem.visibility(s.q1 - s.q0, s.k1 - s.k0).visible_pairs() for s in sequences)
    return 2 * (problem.head_dim + problem.head_dim_v) * problem.num_heads * pairs


def _bytes(problem: AttentionProblem, inputs: Inputs, sequences: list[Span]) -> int:
    queries = inputs.query.numel() // problem.head_dim
    out = queries * problem.head_dim_v * problem.dtype.itemsize
    lse = queries * problem.compute_dtype.itemsize
    dims = problem.head_dim + (0 if problem.is_value_in_key else problem.head_dim_v)
    keys = _visible_keys(problem, inputs, sequences)
    if inputs.query_blocks is not None and inputs.key_blocks is not None:
        inputs = inputs._replace(query=inputs.query_blocks, key=inputs.key_blocks)
    visible = keys * problem.num_kv_heads * dims * inputs.key.element_size()
    others = (getattr(inputs, name) for name in READ_WHOLE)
    return sum(t.numel() * t.element_size() for t in others if t is not None) + visible + out + lse


def _visible_keys(problem: AttentionProblem, inputs: Inputs, sequences: list[Span]) -> int:
    """Keys that some query sees; a page that sequences share counts once."""
    lengths = [(s.q1 - s.q0, s.k1 - s.k0) for s in sequences]
    ranges = [problem.visibility(q, k).key_range(0, q) if q else (0, 0) for q, k in lengths]
    size = problem.page_size
    if inputs.page_table is None or size is None:
        return sum(end - start for start, end in ranges)
    rows: dict[int, int] = {}
    for pages, (start, end) in zip(inputs.page_table.tolist(), ranges):
        for n in range(start // size, -(-end // size)):
            seen = min(end, (n + 1) * size) - max(start, n * size)
            rows[pages[n]] = max(rows.get(pages[n], 0), seen)
    return sum(rows.values())
