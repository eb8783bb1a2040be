"""Stand-ins for a score and its indices: what a user's function does to them becomes nodes of a graph."""

from __future__ import annotations

import linecache
import math
import os
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from tilewise.core.functions.expression import BOOL, COMPARISONS, FLOAT, FUNCTIONS, INT, Graph
from tilewise.core.torch_private import tree_leaves

BOUNDS_HAVE_SLOPES = torch.__version__ >= "2.14"  # of a clamp, whose slope there was x's before
_OWN = (os.path.dirname(__file__), os.path.dirname(torch.__file__))


def kind_of(dtype: torch.dtype) -> str:
    return FLOAT if dtype.is_floating_point else BOOL if dtype == torch.bool else INT


class Recorder:
    """One trace: its graph, the tensors met, and the line of the user's code that each load stands in."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.graph, self.device = Graph(), device
        self.tensors: list[Tensor] = []
        self.lines: dict[int, str] = {}

    def index(self, name: str) -> Proxy:
        return Proxy(self, self.graph.add(name, kind=FLOAT if name == "score" else INT))

    def load(self, t: Tensor, indices: tuple[Any, ...]) -> Any:
        """t[indices]: a number, or with fewer indices than dimensions what still lacks some."""
        if any(i is None or i is Ellipsis or isinstance(i, slice) for i in indices):
            raise NotImplementedError("a captured tensor takes one integer for each dimension, no slice")
        if len(indices) < t.ndim:
            return PartOfTensor(self, t, indices)
        if len(indices) > t.ndim:
            raise IndexError(f"{len(indices)} indices are too many for a tensor of {t.ndim} dimensions")
        if t.is_complex():
            raise TypeError(f"a captured tensor of {t.dtype} must be of floats, integers or booleans")
        if t.layout != torch.strided or t.is_quantized:
            raise TypeError(f"a captured tensor of {t.layout} and {t.dtype} must be dense, of plain numbers")
        numbers = [self.number(i) for i in indices]
        if any(self.graph.nodes[n].kind == FLOAT for n in numbers):
            raise TypeError("an index must be an integer: floor-divide with //, or use .long()")
        known = [n for n, other in enumerate(self.tensors) if other is t]
        if not known:
            self.tensors.append(t)
        place = known[0] if known else len(self.tensors) - 1
        node = self.graph.load(place, numbers, kind_of(t.dtype))
        self.lines.setdefault(node, line_of_frame(sys._getframe(1)))
        return Proxy(self, node)

    def number(self, x: Any) -> int:
        """The node of an operand."""
        if isinstance(x, Proxy):
            return x.node
        if isinstance(x, PartOfTensor):
            x = x.t
        if isinstance(x, Tensor):
            if x.ndim:
                raise TypeError(_not_a_number(x))
            return self.load(x, ()).node  # type: ignore[no-any-return]
        if isinstance(x, bool | int | float):
            if isinstance(x, int) and not -(1 << 63) <= x < 1 << 63:
                raise TypeError(f"{x} must be an integer of 64 bits")
            return self.graph.const(x)
        if hasattr(x, "item"):  # a number of NumPy's
            return self.graph.const(x.item())
        raise TypeError(f"{type(x).__name__} must be a number or a tensor")

    def add(self, op: str, *operands: Any) -> Proxy:
        numbers = [self.number(x) for x in operands]
        kinds = [self.graph.nodes[n].kind for n in numbers]
        if op in ("and", "or", "xor", "not", "shl", "shr") and FLOAT in kinds:
            raise TypeError(f"{op!r} takes booleans or integers, not floats")
        if op == "pow" and FLOAT not in kinds and (self.graph.value(numbers[1]) or 0) < 0:
            raise TypeError("an integer has no negative power: make it a float, as with .float()")
        if op in ("floordiv", "mod") and self.graph.value(numbers[1]) == 0:
            raise ZeroDivisionError("division by 0")
        if kinds == [BOOL, BOOL] and op in ("add", "mul"):  # as PyTorch has it
            op = "or" if op == "add" else "and"
        return Proxy(self, self.graph.add(op, *numbers))


class PartOfTensor:
    """A captured tensor that has been given some of its indices: `table[h]` of `table[h][i]`."""

    def __init__(self, recorder: Recorder, t: Tensor, indices: tuple[Any, ...]) -> None:
        self.recorder, self.t, self.indices = recorder, t, indices

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return self.recorder.load(self.t, self.indices + more)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise TypeError(_not_a_number(next(a for a in args if isinstance(a, cls)).t))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_not_a_number(self.t))


def _not_a_number(t: Tensor) -> str:
    return (
        f"a captured tensor of shape {tuple(t.shape)} must be indexed down to one number, as in "
        "table[h, i - j]: compute what takes whole rows before the call"
    )


class Proxy:
    """A number that is not known yet, of kind bool, int or float: Python and `torch` operators add nodes."""

    def __init__(self, recorder: Recorder, node: int) -> None:
        self.recorder, self.node = recorder, node

    @property
    def kind(self) -> str:
        return self.recorder.graph.nodes[self.node].kind

    @property
    def dtype(self) -> torch.dtype:
        return {BOOL: torch.bool, INT: torch.int64, FLOAT: torch.float32}[self.kind]

    @property
    def device(self) -> torch.device:
        return self.recorder.device or torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        return torch.Size(())

    ndim = 0

    def __bool__(self) -> bool:
        raise TypeError(
            "a branch of Python's (if, and, or, not, in, min, max, a chain of comparisons) can't depend on "
            "the score or its indices: use torch.where, &, |, ~, torch.minimum or torch.maximum"
        )

    def __index__(self) -> int:
        raise TypeError(
            "the score and its indices have no value while the function is traced: use torch's functions for "
            "math's, and tensors for lists and dicts that they index"
        )

    __int__ = __float__ = __iter__ = __hash__ = __index__  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name in ("item", "tolist", "numpy"):
            self.__index__()
        if name.startswith("__") or name not in METHODS:
            raise AttributeError(f"a mask or score function has no operation {name!r}{_known()}")

        def method(*args: Any, **kwargs: Any) -> Any:
            return METHODS[name](self.recorder, self, *args, **kwargs)

        return method

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, cls)).recorder
        name = getattr(func, "__name__", str(func)).strip("_").removeprefix("special_")
        if name == "getitem":
            t, index = args
            return recorder.load(t, index if isinstance(index, tuple) else (index,))
        if name not in METHODS:
            raise NotImplementedError(f"a mask or score function has no operation {name!r}{_known()}")
        return METHODS[name](recorder, *args, **{k: v for k, v in (kwargs or {}).items() if k != "inplace"})


def _known() -> str:
    return f"; it has tensor[index] of captured tensors, {', '.join(sorted(METHODS))}"


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
    return r.add("where", r.add("le" if BOUNDS_HAVE_SLOPES else "lt", low, high), bound, x)


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
    return lambda r, x: x if _proxy(r, x).kind != FLOAT else r.add(op, x)


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


_UNARY = {op: op for op in (*FUNCTIONS, "neg", "abs")} | {
    "negative": "neg", "absolute": "abs", "invert": "not", "bitwise_not": "not", "float": FLOAT,
    "double": FLOAT, "half": FLOAT, "bfloat16": FLOAT, "int": INT, "long": INT, "bool": BOOL,
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
METHODS: dict[str, Callable[..., Any]] = {
    "add": _scaled("add"), "sub": _scaled("sub"), "subtract": _scaled("sub"),
    "div": _div, "divide": _div, "fmod": _fmod, "where": _where, "clamp": _clamp, "clip": _clamp,
    "to": _to, "type_as": _to, "contiguous": lambda r, x: x, "clone": lambda r, x, **_: x,
    "zeros_like": _constant(0), "ones_like": _constant(1),
    "new_zeros": _constant(0), "new_ones": _constant(1),
    "full_like": lambda r, x, fill_value, **kwargs: _constant(fill_value)(r, x, **kwargs),
    "new_full": lambda r, x, size, fill_value, **kwargs: _constant(fill_value)(r, x, size, **kwargs),
    "new_tensor": lambda r, x, value, **kwargs: _constant(value)(r, x, **kwargs),
    "masked_fill": lambda r, x, mask, value: _where(r, mask, value, x),
    "square": lambda r, x: r.add("mul", x, x),
    "reciprocal": lambda r, x: r.add("div", 1.0, x),
    "rsqrt": lambda r, x: r.add("div", 1.0, r.add("sqrt", x)),
    "sigmoid": _sigmoid, "relu": _relu, "silu": lambda r, x, **_: r.add("mul", x, _sigmoid(r, x)),
    "tan": lambda r, x: r.add("div", r.add("sin", x), r.add("cos", x)),
    "max": _of_two("maximum"), "min": _of_two("minimum"), "isnan": lambda r, x: r.add("ne", x, x),
    "exp2": lambda r, x: r.add("exp", r.add("mul", x, math.log(2))),
    "log2": lambda r, x: r.add("mul", r.add("log", x), 1 / math.log(2)),
    "sign": lambda r, x: r.add("sub", r.add("int", r.add("lt", 0, x)), r.add("int", r.add("lt", x, 0))),
    "true_divide": _div, "truediv": _div, "pos": lambda r, x: x,
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_xor": _logical("xor"),
    "logical_not": _logical("not"),
    **{name: _unary(op) for name, op in _UNARY.items()},
    **{name: _binary(op) for name, op in _BINARY.items()},
    **{name: _binary(op, swap=True) for name, op in _SWAPPED.items()},
    **{op: _rounded(op) for op in ("floor", "ceil", "round", "trunc")},
}  # fmt: skip


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *operands: METHODS[name](self.recorder, self, *operands)


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne", "and", "or",
    "xor", "lshift", "rshift", "neg", "pos", "abs", "invert",
):  # fmt: skip
    setattr(Proxy, f"__{_name}__", _operator(_name))
for _name in ("sub", "truediv", "floordiv", "mod", "pow", "lshift", "rshift"):
    setattr(Proxy, f"__r{_name}__", _operator(f"r{_name}"))
for _name in ("add", "mul", "and", "or", "xor"):
    setattr(Proxy, f"__r{_name}__", _operator(_name))
for _name in ("add", "sub", "mul", "truediv", "matmul", "pow", "neg"):
    setattr(PartOfTensor, f"__{_name}__", lambda self, *_: self.recorder.number(self.t))


def line_of_frame(frame: FrameType | None) -> str:
    """The innermost line of the user's own code, as `file:line: source`."""
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return "" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def line_of_error(traceback: TracebackType | None) -> str:
    """The innermost line of the user's own code that an error passed."""
    lines = ""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith(_OWN):
            lines = _line(name, traceback.tb_lineno)
        traceback = traceback.tb_next
    return lines


def _line(name: str, number: int) -> str:
    source = linecache.getline(name, number).strip()
    return f"{name}:{number}" + (f": {source}" if source else "")
