"""What a user's function may do to a score and its indices, by the names of methods and of `torch` functions.

Most are put together of the expression's own operations, so that all backends and derivatives have them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.core.functions.expression import BOOL, COMPARISONS, FLOAT, FUNCTIONS, INT
from tilewise.core.functions.operations.formulas import FORMULAS
from tilewise.core.functions.proxy import METHODS, REDUCTIONS, PartOfTensor, Proxy, Recorder, Row, kind_of

BOUNDS_HAVE_SLOPES = torch.__version__ >= "2.14"  # of a clamp, whose slope there was x's before


def _unary(op: str) -> Callable[..., Proxy]:
    return lambda r, x: r.add(op, x)


def _binary(op: str, swap: bool = False) -> Callable[..., Proxy]:
    def method(r: Recorder, a: Any, b: Any) -> Proxy:
        return r.add(op, b, a) if swap else r.add(op, a, b)

    return method


def _of_two(op: str) -> Callable[..., Proxy]:
    """torch.max and torch.min, whose second operand may be a dimension."""

    def method(r: Recorder, input: Any, other: Any = None, **dim: Any) -> Proxy:
        if dim or not isinstance(other, Proxy | PartOfTensor | Tensor):
            raise NotImplementedError(f"{op[:3]} takes two tensors here, as torch.{op}")
        return r.add(op, input, other)

    return method


def _scaled(op: str) -> Callable[..., Proxy]:
    """add and sub, which have an alpha."""

    def method(r: Recorder, a: Any, b: Any, *, alpha: Any = 1) -> Proxy:
        return r.add(op, a, b if alpha == 1 else r.add("mul", b, alpha))

    return method


def _without_bools(method: Callable[..., Proxy]) -> Callable[..., Proxy]:
    """Minus, which PyTorch refuses of booleans."""

    def checked(r: Recorder, *operands: Any, **alpha: Any) -> Proxy:
        if any(_proxy(r, x).kind == BOOL for x in operands):
            raise TypeError("minus takes no bool, as in PyTorch: use ~, ^ or .int()")
        return method(r, *operands, **alpha)

    return checked


def _div(r: Recorder, a: Any, b: Any, *, rounding_mode: str | None = None) -> Proxy:
    if rounding_mode == "floor":
        return r.add("floordiv", a, b)
    if rounding_mode == "trunc" and all(p.kind != FLOAT for p in (_proxy(r, a), _proxy(r, b))):
        floor = r.add("floordiv", a, b)
        is_negative = r.add("xor", r.add("lt", a, 0), r.add("lt", b, 0))
        has_rest = r.add("ne", r.add("mul", floor, b), a)
        return r.add("add", floor, r.add("int", r.add("and", is_negative, has_rest)))
    quotient = r.add("div", a, b)
    return quotient if rounding_mode is None else r.add("trunc", quotient)


def _proxy(r: Recorder, x: Any) -> Proxy:
    return Proxy(r, r.number(x))


def _fmod(r: Recorder, a: Any, b: Any) -> Proxy:
    if FLOAT in (_proxy(r, a).kind, _proxy(r, b).kind):
        return r.add("fmod", r.add(FLOAT, a), r.add(FLOAT, b))
    return r.add("sub", a, r.add("mul", b, _div(r, a, b, rounding_mode="trunc")))


def _where(r: Recorder, condition: Any, a: Any, b: Any) -> Proxy:
    return r.add("where", r.add("bool", condition), a, b)


def _clamp(r: Recorder, x: Any, min: Any = None, max: Any = None) -> Any:
    """At a bound the slope is PyTorch's: that of x, from 2.14 on 0, or half where it is a tensor."""
    if min is not None:
        x = _bounded(r, x, min, "maximum")
    if max is not None:
        x = _bounded(r, x, max, "minimum")
    return x


def _bounded(r: Recorder, x: Any, bound: Any, op: str) -> Proxy:
    is_float = FLOAT in (_proxy(r, x).kind, _proxy(r, bound).kind)
    if not is_float or (BOUNDS_HAVE_SLOPES and isinstance(bound, Proxy | Tensor)):
        return r.add(op, x, bound)
    low, high = (x, bound) if op == "maximum" else (bound, x)
    is_beyond = r.add("le" if BOUNDS_HAVE_SLOPES else "lt", low, high)
    return r.add(
        "where", r.add("or", is_beyond, r.add("ne", bound, bound)), bound, x
    )  # NaN of a bound of NaN


def _relu(r: Recorder, x: Any) -> Proxy:
    """Its slope at 0 is 0."""
    is_float = _proxy(r, x).kind == FLOAT
    return r.add("where", r.add("le", x, 0), 0, x) if is_float else r.add("maximum", x, 0)


def _sigmoid(r: Recorder, x: Any) -> Proxy:
    """By exp(-|x|), which does not overflow; its slope would be 0 times infinity."""
    is_negative = r.add("lt", x, 0)
    decay = r.add("exp", r.add("where", is_negative, x, r.add("neg", x)))
    return r.add("div", r.add("where", is_negative, decay, 1.0), r.add("add", 1.0, decay))


def _logical(op: str) -> Callable[..., Proxy]:
    return lambda r, *operands: r.add(op, *(r.add("bool", x) for x in operands))


def _rounded(op: str) -> Callable[..., Any]:
    """floor and its relatives, which leave integers alone."""

    def method(r: Recorder, x: Any, *, decimals: int = 0) -> Proxy:
        if _proxy(r, x).kind != FLOAT:
            return _proxy(r, x)
        if decimals == 0:
            return r.add(op, x)
        scale = 10.0 ** abs(decimals)
        there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
        return r.add(back, r.add(op, r.add(there, x, scale)), scale)

    return method


def _to(r: Recorder, x: Any, *args: Any, **kwargs: Any) -> Any:
    dtypes = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    dtypes += [a.dtype for a in args if isinstance(a, Proxy | Tensor)]
    return _cast(r, x, dtypes[0]) if dtypes else x


def _cast(r: Recorder, x: Any, dtype: torch.dtype) -> Proxy:
    return r.add(kind_of(dtype), x)


def _constant(value: Any) -> Callable[..., Proxy]:
    """zeros_like and new_zeros, whose size is that of a number."""

    def method(r: Recorder, x: Any, size: Any = (), **kwargs: Any) -> Proxy:
        if tuple(size):
            raise TypeError(f"a tensor of size {tuple(size)} can't be made here, only a number: ()")
        return _cast(r, _proxy(r, value), kwargs.get("dtype") or _proxy(r, x).dtype)

    return method


MOST_NUMBERS = 128  # of a sorted or other list that each score would be compared with


def _numbers(r: Recorder, t: Any) -> list[Any]:
    """Those of a captured tensor of one dimension."""
    r.asks_for_shapes = True
    if t.ndim != 1 or t.numel() > MOST_NUMBERS:
        raise NotImplementedError(
            f"a tensor of shape {tuple(t.shape)} must have one dimension and at most {MOST_NUMBERS} numbers: "
            "compute a table of all results before the call, and index it"
        )
    return [r.load(t, (n,)) for n in range(t.numel())]


def _isin(r: Recorder, elements: Any, test_elements: Any, *, invert: bool = False, **_: Any) -> Any:
    found: Any = False
    for number in _numbers(r, test_elements):
        found = found | (elements == number)
    return _proxy(r, found).logical_not() if invert else found


def _place(r: Recorder, x: Any, bounds: Any, right: bool = False, **_: Any) -> Any:
    """How many of the sorted bounds are smaller than x or, `right`, not larger."""
    found = _proxy(r, 0)
    for bound in _numbers(r, bounds):
        found = found + (bound <= x if right else bound < x).int()
    return found


def _searchsorted(
    r: Recorder, bounds: Any, x: Any, *, right: bool = False, side: str | None = None, **_: Any
) -> Any:
    return _place(r, x, bounds, right or side == "right")


def _gather(r: Recorder, t: Any, dim: int, index: Any, **_: Any) -> Any:
    if t.ndim != 1:
        raise NotImplementedError("gather takes a tensor of one dimension here: index it, as in table[h, i]")
    return r.load(t, (index,))


def _embedding(r: Recorder, index: Any, weight: Any, *more: Any, **options: Any) -> Any:
    unknown = [options.get(name) for name in ("padding_idx", "max_norm", "scale_grad_by_freq")]
    if more or any(x is not None and x is not False for x in unknown):
        raise NotImplementedError("embedding takes an index and a table here: write table[index]")
    return r.load(weight, (index,))


_OF_ANY_KIND = (  # which leave integers integers, or compare them
    "isclose", "nan_to_num", "hardtanh", "relu6", "threshold", "frac", "signbit", "lerp", "addcmul",
    "heaviside", "fmax", "fmin", "isinf", "isfinite", "isposinf", "isneginf", "prelu",
)  # fmt: skip


def _formula(name: str) -> Callable[..., Proxy]:
    function, keeps = FORMULAS[name], name in _OF_ANY_KIND

    def method(r: Recorder, *operands: Any, **options: Any) -> Proxy:
        if not keeps:
            operands = tuple(r.add(FLOAT, x) if isinstance(x, Proxy) else x for x in operands)
        return _proxy(r, function(*operands, **options))

    return method


_UNARY = {op: op for op in (*FUNCTIONS, "neg", "abs")} | {
    "negative": "neg", "absolute": "abs", "arcsin": "asin", "arccos": "acos", "arctan": "atan",
    "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh", "all": BOOL, "any": BOOL,
    "invert": "not", "bitwise_not": "not", "float": FLOAT, "double": FLOAT, "half": FLOAT, "bfloat16": FLOAT,
    "int": INT, "long": INT, "short": INT, "char": INT, "byte": INT, "bool": BOOL,
}  # fmt: skip
_BINARY = {op: op for op in ("mul", "pow", "minimum", "maximum", *COMPARISONS, "and", "or", "xor")} | {
    "multiply": "mul", "floordiv": "floordiv", "floor_divide": "floordiv", "mod": "mod", "remainder": "mod",
    "less": "lt", "less_equal": "le", "not_equal": "ne", "bitwise_and": "and", "bitwise_or": "or",
    "bitwise_xor": "xor", "lshift": "shl", "rshift": "shr", "bitwise_left_shift": "shl",
    "bitwise_right_shift": "shr",
}  # fmt: skip
_SWAPPED = {
    "gt": "lt", "ge": "le", "greater": "lt", "greater_equal": "le", "rsub": "sub", "rtruediv": "div",
    "rdiv": "div", "rfloordiv": "floordiv", "rmod": "mod", "rpow": "pow", "rlshift": "shl", "rrshift": "shr",
}  # fmt: skip
METHODS |= {
    "add": _scaled("add"), "sub": _scaled("sub"), "subtract": _scaled("sub"),
    "div": _div, "divide": _div, "fmod": _fmod, "where": _where, "clamp": _clamp, "clip": _clamp,
    "to": _to, "type_as": _to, "type": _to, "contiguous": lambda r, x: x, "squeeze": lambda r, x: x,
    "clone": lambda r, x, **_: _proxy(r, x), "positive": lambda r, x: x,
    "clamp_min": lambda r, x, min: _clamp(r, x, min), "clamp_max": lambda r, x, max: _clamp(r, x, None, max),
    "isin": _isin, "bucketize": _place, "searchsorted": _searchsorted, "gather": _gather,
    "embedding": _embedding,
    "zeros_like": _constant(0), "ones_like": _constant(1),
    "new_zeros": _constant(0), "new_ones": _constant(1),
    "full_like": lambda r, x, fill_value, **kwargs: _constant(fill_value)(r, x, **kwargs),
    "new_full": lambda r, x, size, fill_value, **kwargs: _constant(fill_value)(r, x, size, **kwargs),
    "new_tensor": lambda r, x, value, **kwargs: _constant(value)(r, x, **kwargs),
    "Tensor.where": lambda r, x, condition, other: _where(r, condition, x, other),
    "masked_fill": lambda r, x, mask, value: _where(r, mask, r.add(_proxy(r, x).kind, value), x),
    "square": lambda r, x: r.add("mul", x, x),
    "reciprocal": lambda r, x: r.add("div", 1.0, x),
    "rsqrt": lambda r, x: r.add("div", 1.0, r.add("sqrt", x)),
    "sigmoid": _sigmoid, "expit": _sigmoid, "relu": _relu,
    "silu": lambda r, x, **_: r.add("mul", x, _sigmoid(r, x)),
    "tan": lambda r, x: r.add("div", r.add("sin", x), r.add("cos", x)),
    "max": _of_two("maximum"), "min": _of_two("minimum"), "isnan": lambda r, x: r.add("ne", x, x),
    **dict.fromkeys(("sign", "sgn"), lambda r, x: r.add(
        "sub", r.add("int", r.add("lt", 0, x)), r.add("int", r.add("lt", x, 0))
    )),
    "true_divide": _div, "truediv": _div, "pos": lambda r, x: x,
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    **{name: _formula(name) for name in FORMULAS},
    **{name: _unary(op) for name, op in _UNARY.items()},
    **{name: _binary(op) for name, op in _BINARY.items()},
    **{name: _binary(op, swap=True) for name, op in _SWAPPED.items()},
    "arctan2": _formula("atan2"),
    **{op: _rounded(op) for op in ("floor", "ceil", "round", "trunc")}, "fix": _rounded("trunc"),
}  # fmt: skip
METHODS |= {name: _without_bools(METHODS[name]) for name in ("neg", "negative", "sub", "subtract", "rsub")}


# ---- rows


def _reduction(function: Callable[[list[Any]], Any]) -> Callable[..., Proxy]:
    def found(row: Row, dim: Any = None, keepdim: bool = False) -> Proxy:
        if dim not in (None, 0, -1, (0,), (-1,)) or keepdim or not row.items:
            raise NotImplementedError("a row is reduced to one number here, whole: dim=-1, keepdim=False")
        return function(row.items)

    return found


def _sum(items: list[Any]) -> Any:
    return sum(x.int() if x.kind == BOOL else x for x in items)


def _norm(row: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, ord: Any = 2, **_: Any) -> Any:
    """Its slope at 0 is 0."""
    if p not in (2, None, "fro") or ord not in (2, None):
        raise NotImplementedError("the norm of a row is the Euclidean one here")
    squares = REDUCTIONS["sum"](row * row, dim, keepdim)
    is_zero = squares == 0
    return torch.where(is_zero, 0.0, torch.sqrt(torch.where(is_zero, 1.0, squares)))


def _folded(op: str, kind: str | None = None) -> Callable[..., Proxy]:
    def found(items: list[Any]) -> Any:
        add = items[0].recorder.add
        return functools.reduce(functools.partial(add, op), [add(kind, x) if kind else x for x in items])

    return _reduction(found)


def _dot(a: Any, b: Any) -> Any:
    return REDUCTIONS["sum"](a * b)


REDUCTIONS |= {
    "sum": _reduction(_sum), "mean": _reduction(lambda items: _sum(items) / len(items)),
    "prod": _folded("mul"), "all": _folded("and", BOOL), "any": _folded("or", BOOL),
    "max": _folded("maximum"), "amax": _folded("maximum"),
    "min": _folded("minimum"), "amin": _folded("minimum"),
    "norm": _norm, "vector_norm": lambda row, ord=2, dim=None, keepdim=False: _norm(row, ord, dim, keepdim),
    **dict.fromkeys(("dot", "matmul", "vecdot", "inner"), _dot),
}  # fmt: skip
