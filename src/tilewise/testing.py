"""Error budgets: is a result as accurate as PyTorch would be? For this library's tests and for yours.

The rule: the largest error against float64 is at most 2 times, and the mean error at most 1.1 times,
that of the same formula computed by PyTorch in the input's own precision.

Both errors are chances. In float32 gradients the largest belongs to one row in which one key outweighs the
others: two computations whose errors are distributed alike differed there by more than 2 in 1 of 12 draws.
Means differ too, as the errors of a row go together: by 1% where all rows are alike, by 20% on steep scores,
where a few rows make the mean. So the mean's budget has three standard errors, over rows, above the rule.
And where a result is over a budget, `check_attention` has PyTorch compute the formula a few times more, with
the coordinates of heads in another order. That rounds every sum anew, and the largest of all these errors
counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewise import reference
from tilewise.api import attention
from tilewise.varlen import attention_varlen

MAX_FACTOR, MEAN_FACTOR = 2.0, 1.1
STANDARD_ERRORS = 3  # of the mean, above its budget
FEW = 1 << 16  # elements: a baseline's error on fewer is chance
ORDERS = 4  # of coordinates in which a baseline is computed once more, if an error is over its budget


@dataclass(frozen=True)
class ErrorReport:
    """Errors of one tensor against float64, with the budget each had to meet."""

    name: str
    max_error: float
    max_budget: float
    mean_error: float
    mean_budget: float

    @property
    def is_within(self) -> bool:
        return self.max_error <= self.max_budget and self.mean_error <= self.mean_budget

    def __str__(self) -> str:
        return (
            f"{self.name}: max error {self.max_error:.2e} (budget {self.max_budget:.2e}), "
            f"mean error {self.mean_error:.2e} (budget {self.mean_budget:.2e})"
        )


def compare(name: str, found: Tensor, exact: Tensor, baseline: Tensor) -> ErrorReport:
    """Hold `found` against the float64 value `exact`, with PyTorch's `baseline` setting the budget.

    Infinities must match exactly and NaN must stand where the exact value is NaN. Below the budget lies a
    floor, because on a few elements the baseline may be exact by luck: one rounding to the result's
    dtype and eight of float32, of the largest value. For float64 nothing more exact is at hand: the
    budget is that floor, with 64 roundings.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> compare("x", x, x.double(), x).is_within
        True
    """
    same_kind = (
        found.shape == exact.shape
        and torch.equal(found.isnan(), exact.isnan())
        and torch.equal(found.isposinf(), exact.isposinf())
        and torch.equal(found.isneginf(), exact.isneginf())
    )
    if not same_kind:
        return ErrorReport(name, float("inf"), 0.0, float("inf"), 0.0)
    finite = exact.isfinite()
    error, base = ((t.double() - exact).abs().masked_fill(~finite, 0.0) for t in (found, baseline))
    base = base.nan_to_num(0.0, posinf=0.0)  # where the baseline overflows it allows nothing
    chance = _standard_error(error - MEAN_FACTOR * base) * exact.numel()
    error, base, exact = error[finite], base[finite], exact[finite].double()
    if exact.numel() == 0:
        return ErrorReport(name, 0.0, 0.0, 0.0, 0.0)
    rounding = _rounding(found.dtype)
    max_budget = max(MAX_FACTOR * base.max().item(), rounding * exact.abs().max().item())
    mean_budget = MEAN_FACTOR * base.mean().item() + STANDARD_ERRORS * chance / exact.numel()
    mean_budget = max(mean_budget, rounding / 16 * exact.abs().mean().item())
    if found.dtype == torch.float64 or exact.numel() < FEW:
        mean_budget = max_budget
    return ErrorReport(name, error.max().item(), max_budget, error.mean().item(), mean_budget)


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    backend: str | None = None,
    seed: int = 0,
    holds_mean: bool = True,
    lse_gradient: bool = True,
    **options: Any,
) -> list[ErrorReport]:
    """Run attention forward and backward and hold everything against the float64 reference.

    Args:
        query, key, value, options: as `tilewise.attention` or, with `cu_seqlens_q` and `cu_seqlens_k`, as
            `tilewise.attention_varlen`.
        backend: the backend to check.
        seed: of the random gradients of out and lse.
        holds_mean: whether mean errors count. With a handful of keys the errors of a row go together, so
            that their mean is chance however many elements there are.
        lse_gradient: whether lse has a gradient, which not all backends serve.

    Returns:
        One report a tensor: out, lse, dquery, dkey, dvalue, and dbias, dsinks where given. One of fewer than
        65,536 numbers has a larger budget, a rounding of the largest products: give more to hold the rule.

    Raises:
        AssertionError: a tensor is over its budget; the message lists all.

    Example:
        >>> q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
        >>> [report.name for report in check_attention(q, k, v, causal=True)]
        ['out', 'lse', 'dquery', 'dkey', 'dvalue']
    """
    options = {name: option for name, option in options.items() if option is not None}
    leaves = {"query": query, "key": key, "value": value}
    leaves |= {name: options[name] for name in ("bias", "sinks") if name in options}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    given = options | {name: leaves[name] for name in ("bias", "sinks") if name in leaves}
    dropout_seed = None
    if options.get("dropout_p"):
        generator = torch.Generator(query.device).manual_seed(seed)
        dropout_seed = torch.randint(2**63 - 1, (), generator=generator, device=query.device)
        given["generator"] = torch.Generator(query.device).manual_seed(seed)
    run: Any = attention_varlen if "cu_seqlens_q" in options else attention
    out, lse = run(*(leaves[n] for n in ("query", "key", "value")), return_lse=True, backend=backend, **given)
    torch.manual_seed(seed)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if lse_gradient else None
    results, gradients = ((out, lse), (dout, dlse)) if lse_gradient else ((out,), (dout,))
    grads = torch.autograd.grad(results, tuple(leaves.values()), gradients)
    found = {"out": out.detach(), "lse": lse.detach()}
    found |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    options["dropout_seed"] = dropout_seed
    exact, baseline = (
        _reference(dtype, query, key, value, dout, dlse, options) for dtype in (torch.float64, query.dtype)
    )
    reports = [compare(name, found[name], exact[name], baseline[name]) for name in found]
    reports = _in_other_orders(reports, found, exact, query, key, value, dout, dlse, options)
    steps = [t.abs().max().item() if t.numel() else 0.0 for t in (query, key)]
    scale = options.get("scale", query.shape[-1] ** -0.5)
    values = (dout.abs().max() * value.abs().max()).item() if dout.numel() and value.numel() else 0.0
    magnitude = values * max(1.0, *(scale * step for step in steps))
    reports = _allow_chance(reports, found, magnitude, scale * steps[0] * steps[1])
    if not holds_mean:
        reports = [replace(report, mean_budget=report.max_budget) for report in reports]
    assert all(report.is_within for report in reports), "\n".join(map(str, reports))
    return reports


def _in_other_orders(
    reports: list[ErrorReport], found: dict[str, Tensor], exact: dict[str, Tensor], *call: Any
) -> list[ErrorReport]:
    """The reports; if one is over its budget, with the largest budgets of sums in other orders too.

    `call`: the arguments of `_reference` after the dtype.
    """
    if not all(report.is_within for report in reports):
        for order in range(ORDERS):
            other = _reordered(order, *call)
            again = [compare(name, found[name], exact[name], other[name]) for name in found]
            both = zip(reports, again, strict=True)
            reports = [_raised(report, other.max_budget, other.mean_budget) for report, other in both]
    return reports


def _raised(report: ErrorReport, largest: float, mean: float) -> ErrorReport:
    """The report with at least these budgets."""
    return replace(
        report, max_budget=max(report.max_budget, largest), mean_budget=max(report.mean_budget, mean)
    )


def _allow_chance(
    reports: list[ErrorReport], found: dict[str, Tensor], magnitude: float, score: float
) -> list[ErrorReport]:
    """Gradients of few elements, or of few queries, whose errors go together, share the largest budget among
    the gradients, at least two roundings of `magnitude`, the size of the products that cancel in
    dS = P * (dP - delta): alone, a baseline of three numbers is exact by luck as often as not. So do those
    of float64, which have no baseline. In a sum over `rows` of dS, as dbias is, so many errors add up as
    their square root. lse may be off by a rounding of `score`, the size of the products that cancel in it.
    """
    rounding, rows = _rounding(found["out"].dtype) * magnitude, found["out"][..., :1].numel()
    gradients = [r for r in reports if r.name.startswith("d")]
    largest = max([2 * rounding, *(r.max_budget for r in gradients)])
    counts = {r.name: found[r.name].numel() for r in gradients}
    budgets = {
        name: max(largest, rounding * (rows / max(count, 1)) ** 0.5 / 2)
        for name, count in counts.items()
        if min(count, found["out"].numel()) < FEW or found["out"].dtype == torch.float64
    }
    if found["out"].numel() < FEW:
        budgets["out"] = rounding
    if "lse" in found and found["lse"].numel() < FEW:
        budgets["lse"] = _rounding(found["lse"].dtype) * score
    return [_raised(r, b, b) for r in reports for b in [budgets.get(r.name, 0.0)]]


def _standard_error(errors: Tensor) -> float:
    """Of their mean, if rows are independent and the elements of a row are not."""
    rows = errors.flatten(0, -2).mean(-1) if errors.ndim > 1 and errors.numel() else errors.flatten()
    return rows.std().item() / len(rows) ** 0.5 if len(rows) > 1 else 0.0


def _rounding(dtype: torch.dtype) -> float:
    """One rounding to the dtype and eight of float32, relative; 64 for float64."""
    if dtype == torch.float64:
        return 64 * torch.finfo(dtype).eps
    return torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float32).eps


def _reordered(
    seed: int, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, options: dict[str, Any]
) -> dict[str, Tensor]:
    """The formula in the inputs' precision, its sums over coordinates of a head in a random order."""
    generator = torch.Generator(q.device).manual_seed(seed)
    qk, of_v = (torch.randperm(t.shape[-1], generator=generator, device=q.device) for t in (q, v))
    given = (q[..., qk], k[..., qk], v[..., of_v], dout[..., of_v])
    values = _reference(q.dtype, *given, dlse, {"scale": q.shape[-1] ** -0.5} | options)
    orders = {"out": of_v, "dquery": qk, "dkey": qk, "dvalue": of_v}
    return {name: t[..., orders[name].argsort()] if name in orders else t for name, t in values.items()}


def _reference(
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    options: dict[str, Any],
) -> dict[str, Tensor]:
    out, lse = reference.attention(q, k, v, dtype=dtype, **options)
    g = reference.attention_backward(dout, q, k, v, dlse=dlse, dtype=dtype, **options)
    values = {"out": out, "lse": lse, "dquery": g.query, "dkey": g.key, "dvalue": g.value}
    return values | {n: t for n, t in (("dbias", g.bias), ("dsinks", g.sinks)) if t is not None}
