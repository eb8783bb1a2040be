"""What a caller may ask about the weights of an attention call, and the answer.

With P the softmax weights before dropout and S the scores that made them (scale, softcap, bias, ALiBi and
masks applied), one row i and one key j:

    row_max_i = max_j S_ij              max_logit = max over batch and rows, for each head
    entropy_i = -sum_j P_ij log P_ij    = lse_i - E[S_i]; a sink counts as one outcome more
    expected_distance_i = sum_j P_ij |i + seqlen_k - seqlen_q - j|; a sink adds nothing
    column_sum_j = sum_i P_ij           block_sum = sums over tiles of P
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.checks import check_flag, shown
from tilewise.core.problem import AttentionProblem, Inputs, spans

MAX_TOP_K = 64
MAX_BLOCK_SUM = 2**62
FOLD = 64  # numbers of a row of which the largest is found first
SCHEMA = (
    "bool wants_lse, bool row_max, bool max_logit, bool entropy, str column_sum, int? last_rows, int top_k, "
    "int[]? rows, int block_sum, bool expected_distance"
)
_INTEGERS = ("top_k", 0, MAX_TOP_K), ("block_sum", 0, MAX_BLOCK_SUM), ("last_rows", 1, None)
GROUP = "group"  # column sums of the query heads that share a KV head, added up


@dataclass(frozen=True)
class Aux:
    """Which statistics of the weights a call is to give besides its output: a request, of no cost by itself.

    Statistics are of the weights before dropout, with every option that shapes them. In shapes, packed
    sequences have (heads, total) instead of (batch, heads, seqlen), and caches their capacity as seqlen_k.

    Args:
        lse: log-sum-exp of each query's scores, (batch, heads, seqlen_q). Differentiable.
        row_max: the largest visible score of each query, (batch, heads, seqlen_q); sinks do not count.
        max_logit: the largest visible score of each head, over batch, queries and keys: (heads,).
        entropy: of each query's weights, in nats, (batch, heads, seqlen_q). A sink counts as one key more.
            Differentiable.
        column_sum: each key's weights, summed over queries: (batch, heads, seqlen_k). "group" also adds up
            the query heads that share a KV head: (batch, kv_heads, seqlen_k). Differentiable.
        last_rows: column_sum takes only this many last queries of each sequence; None takes all.
        top_k: the k <= 64 largest weights of each query and their keys, (batch, heads, seqlen_q, k) each,
            largest first; of equal scores, the lower key first.
        rows: the weights of these queries, (batch, heads, len(rows), seqlen_k); -1 is the last. Of packed
            sequences each has its own, up to the longest; a row that one does not have is 0. Differentiable.
        block_sum: weights summed over tiles of so many queries and keys, (batch, heads, tiles of queries,
            tiles of keys), as a coarse picture of each head. 0 is off. Differentiable.
        expected_distance: mean distance in tokens from a query, at its causal position, to the keys it
            attends to, (batch, heads, seqlen_q). Differentiable.

    Raises:
        TypeError, ValueError: a field is not what it must be; the message names it.

    Source of the uses: max_logit, QK-clip (Kimi K2, 2025); column_sum, H2O (2023) and SnapKV (2024).

    Example:
        >>> Aux(entropy=True, top_k=8)
        Aux(entropy=True, top_k=8)
    """

    lse: bool = False
    row_max: bool = False
    max_logit: bool = False
    entropy: bool = False
    column_sum: bool | str = False
    last_rows: int | None = None
    top_k: int = 0
    rows: tuple[int, ...] | None = None
    block_sum: int = 0
    expected_distance: bool = False

    def __post_init__(self) -> None:
        for name in ("lse", "row_max", "max_logit", "entropy", "expected_distance"):
            check_flag(name, getattr(self, name))
            object.__setattr__(self, name, bool(getattr(self, name)))
        if isinstance(self.column_sum, str):
            if self.column_sum != GROUP:
                raise ValueError(f"column_sum={self.column_sum!r} must be True, False or {GROUP!r}")
        else:
            check_flag("column_sum", self.column_sum)
            object.__setattr__(self, "column_sum", bool(self.column_sum))
        for name, least, most in _INTEGERS:
            given = getattr(self, name)
            if given is not None or name != "last_rows":
                _check_integer(name, given, least, most)
                object.__setattr__(self, name, int(given))  # graphs hold no integers of NumPy
        if self.last_rows is not None and not self.column_sum:
            raise ValueError(f"last_rows={self.last_rows} must be None without column_sum")
        if self.rows is not None:
            object.__setattr__(self, "rows", _row_numbers(self.rows))

    def __repr__(self) -> str:
        asked = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if self.asks(f.name))
        return f"Aux({', '.join(asked)})"

    def asks(self, name: str) -> bool:
        """Whether a field is other than its default."""
        return getattr(self, name) not in (False, None, 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The statistics asked for."""
        return tuple(f.name for f in fields(self) if f.name != "last_rows" and self.asks(f.name))

    @property
    def needs_row_max(self) -> bool:
        return self.row_max or self.max_logit

    @functools.cached_property
    def needs_pass(self) -> bool:
        """Whether scores have to be looked at once more: all but lse."""
        return any(name != "lse" for name in self.names)

    def scalars(self) -> tuple[Any, ...]:
        """The fields as an operator takes them: `SCHEMA`; `Aux.of` undoes it."""
        rows = None if self.rows is None else list(self.rows)
        return (
            self.lse, self.row_max, self.max_logit, self.entropy, str(self.column_sum), self.last_rows,
            self.top_k, rows, self.block_sum, self.expected_distance,
        )  # fmt: skip

    @staticmethod
    def of(scalars: Sequence[Any]) -> Aux:
        given = {f.name: value for f, value in zip(fields(Aux), scalars, strict=True)}
        column_sum = given.pop("column_sum")
        return Aux(column_sum=GROUP if column_sum == GROUP else column_sum == "True", **given)

    def only(self, names: Collection[str]) -> Aux:
        """The same request for some of its statistics."""
        left_out = {f.name: f.default for f in fields(self) if f.name not in (*names, "last_rows")}
        if "column_sum" in left_out:
            left_out["last_rows"] = None
        return replace(self, **left_out)  # type: ignore[arg-type]

    def first_row(self, seqlen_q: int) -> int:
        """The first query that column_sum counts."""
        return 0 if self.last_rows is None else max(0, seqlen_q - self.last_rows)

    def first_visited(self, seqlen_q: int) -> int:
        """The first query that has to be looked at, `rows` aside."""
        is_of_last_rows = set(self.names) <= {"lse", "column_sum", "rows"}
        return self.first_row(seqlen_q) if is_of_last_rows else 0

    def check(self, problem: AttentionProblem) -> None:
        """Raises ValueError if a problem has no such rows."""
        for row in () if problem.is_packed else self.rows or ():
            if not -problem.seqlen_q <= row < problem.seqlen_q:
                n = problem.seqlen_q
                raise ValueError(f"rows={self.rows} must be in [{-n}, {n}): seqlen_q={n}")


def check_aux(aux: Any) -> Any:
    """The request itself, or None; raises TypeError if it is neither."""
    if aux is not None and not isinstance(aux, Aux):
        raise TypeError(f"return_aux={shown(aux)} must be a tilewise.Aux, as Aux(entropy=True)")
    return aux


def _check_integer(name: str, value: Any, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={shown(value)} must be an integer")
    if int(value) < least or (most is not None and int(value) > most):
        bound = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{name}={value} must be {bound}")


def _row_numbers(rows: Any) -> tuple[int, ...]:
    is_list = isinstance(rows, tuple | list | range)
    if not is_list or any(isinstance(r, bool) or not isinstance(r, Integral) for r in rows):
        raise TypeError(f"rows={shown(rows)} must be a tuple of integers, as (0, -1)")
    if not rows:
        raise ValueError("rows=() must name at least one query, or be None")
    return tuple(int(r) for r in rows)


class TopK(NamedTuple):
    """The k largest weights of each query and their keys, (batch, heads, seqlen_q, k) each.

    Where a query sees fewer keys, weight 0 and key -1. Keys count from their sequence's start.
    """

    weights: Tensor
    keys: Tensor  # int64


@dataclass(frozen=True)
class Statistics:
    """The answer to an `Aux`: attributes of the same names; None for what was not asked for.

    A query that sees no key has row_max -inf, lse -inf (its sink's logit if it has one), entropy and
    expected_distance 0, weights 0 and keys -1.
    Floating-point statistics are float32 (float64 for float64).
    """

    lse: Tensor | None = None
    row_max: Tensor | None = None
    max_logit: Tensor | None = None
    entropy: Tensor | None = None
    column_sum: Tensor | None = None
    top_k: TopK | None = None
    rows: Tensor | None = None
    block_sum: Tensor | None = None
    expected_distance: Tensor | None = None

    @property
    def argmax(self) -> Tensor | None:
        """The key of each query's largest weight, -1 if it sees none: (batch, heads, seqlen_q)."""
        return None if self.top_k is None else self.top_k.keys[..., 0]

    def __repr__(self) -> str:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        shapes = (
            f"{name}: {tuple((t if isinstance(t, Tensor) else t.weights).shape)}"
            for name, t in found.items()
            if t is not None
        )
        return f"Statistics({', '.join(shapes)})"


class Measured(NamedTuple):
    """What passes over the scores give, as tensors; None for what was not asked for."""

    row_max: Tensor | None
    entropy: Tensor | None
    expected_distance: Tensor | None
    column_sum: Tensor | None
    block_sum: Tensor | None
    rows: Tensor | None
    top_weights: Tensor | None
    top_keys: Tensor | None
    max_logit: Tensor | None  # of a forward that gives it without row_max

    def asked(self, aux: Aux) -> Measured:
        """What a request names, with `max_logit` of `row_max`; None for the rest."""
        largest = self.max_logit
        if aux.max_logit and self.row_max is not None:
            largest = largest_of_heads(self.row_max)
        return self._replace(row_max=self.row_max if aux.row_max else None, max_logit=largest)

    def answer(self, aux: Aux, lse: Tensor | None) -> Statistics:
        """Of what was `asked`."""
        found: dict[str, Any] = self._asdict() | {"lse": lse}
        found["top_k"] = TopK(found.pop("top_weights"), found.pop("top_keys"))
        return Statistics(**{name: t for name, t in found.items() if aux.asks(name)})


def merged(parts: Iterable[Measured]) -> Measured:
    """What several passes have found, of different statistics."""
    return Measured(*(next((t for t in of_one if t is not None), None) for of_one in zip(*parts)))


NOTHING = Measured(*(None,) * len(Measured._fields))


def largest_of_heads(row_max: Tensor) -> Tensor:
    """max_logit; heads are the last dimension but one."""
    row_max, heads = row_max.detach(), row_max.shape[-2]
    if not row_max.numel():
        return row_max.new_full((heads,), float("-inf"))
    if row_max.shape[-1] % FOLD == 0:  # a long row would be one block's work on a GPU
        row_max = row_max.unflatten(-1, (-1, FOLD)).amax(-1)
    return row_max.amax([dim for dim in range(row_max.ndim) if dim != row_max.ndim - 2])


def new_measured(aux: Aux, problem: AttentionProblem, inputs: Inputs) -> Measured:
    """Tensors for a pass to fill: what stands in them is right where nothing is visible."""
    heads, query = problem.num_heads, inputs.query

    def full(shape: tuple[int, ...], value: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        return query.new_full(shape, value, dtype=dtype or problem.compute_dtype)

    of_rows = (heads, query.shape[0]) if problem.is_packed else (problem.batch, heads, problem.seqlen_q)
    column_heads = problem.num_kv_heads if aux.column_sum == GROUP else heads
    of_keys = (problem.batch, column_heads, problem.seqlen_k)
    if problem.has_packed_keys:
        of_keys = (column_heads, inputs.key.shape[0])  # type: ignore[assignment]
    longest_q, longest_k = _longest(aux, problem, inputs)
    block = max(1, aux.block_sum)
    tiles = (problem.batch, heads, -(-longest_q // block), -(-longest_k // block))
    return Measured(
        row_max=full(of_rows, float("-inf")) if aux.needs_row_max else None,
        entropy=full(of_rows) if aux.entropy else None,
        expected_distance=full(of_rows) if aux.expected_distance else None,
        column_sum=full(of_keys) if aux.column_sum else None,
        block_sum=full(tiles) if aux.block_sum else None,
        rows=full((problem.batch, heads, len(aux.rows), longest_k)) if aux.rows else None,
        top_weights=full((*of_rows, aux.top_k)) if aux.top_k else None,
        top_keys=full((*of_rows, aux.top_k), -1, torch.int64) if aux.top_k else None,
        max_logit=None,
    )


def _longest(aux: Aux, problem: AttentionProblem, inputs: Inputs) -> tuple[int, int]:
    """Of the sequences' queries and keys; read from the offsets if packed and needed."""
    if not problem.is_packed or not (aux.block_sum or aux.rows):
        return problem.seqlen_q, problem.seqlen_k
    lengths = [(s.q1 - s.q0, s.k1 - s.k0) for s in spans(problem, inputs)]
    longest_q = max((q for q, _ in lengths), default=0)
    return longest_q, max((k for _, k in lengths), default=0) if problem.has_packed_keys else problem.seqlen_k
