"""Stand-ins for a score and its indices: what a user's function does to them becomes nodes of a graph."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from tilewise.core.functions.expression import BOOL, COMPARISONS, FLOAT, INT, Graph
from tilewise.core.torch_private import tree_leaves

METHODS: dict[str, Callable[..., Any]] = {}  # by name, of a recorder and operands: `operations` has them
_WHERE_OF = "Tensor.where"  # whose tensor comes before the condition, as that of torch.where does not
REDUCTIONS: dict[str, Callable[..., Any]] = {}  # likewise, of rows
OF_TENSORS = ("isin", "bucketize", "searchsorted", "gather", "embedding")  # which take them whole
MOST_IN_ROW = 16  # numbers, each of which is read for each score
_OWN = (os.path.dirname(__file__), os.path.dirname(torch.__file__))


def kind_of(dtype: torch.dtype) -> str:
    return FLOAT if dtype.is_floating_point else BOOL if dtype == torch.bool else INT


class Recorder:
    """One trace: its graph, the tensors met, and the line of the user's code that each load stands in."""

    def __init__(self, device: torch.device | None = None, graph: Graph | None = None) -> None:
        self.graph, self.device = Graph() if graph is None else graph, device
        self.tensors: list[Tensor] = []
        self.lines: dict[int, str] = {}
        self.asks_for_shapes = False  # the trace is of these sizes of tensors

    def index(self, name: str) -> Proxy:
        return Proxy(self, self.graph.add(name, kind=FLOAT if name == "score" else INT))

    def load(self, t: Tensor, indices: tuple[Any, ...]) -> Any:
        """t[indices]: a number, or with fewer indices than dimensions what still lacks some."""
        while indices and _is_whole(indices[-1]):  # as in table[h, :]
            indices = indices[:-1]
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
        if any(self.graph.nodes[n].kind == BOOL for n in numbers):  # which PyTorch takes for a mask
            raise TypeError("an index must be an integer, not a bool: use .long(), or torch.where")
        known = [n for n, other in enumerate(self.tensors) if other is t]
        if not known:
            self.tensors.append(t)
        place = known[0] if known else len(self.tensors) - 1
        node = self.graph.load(place, numbers, kind_of(t.dtype))
        self.lines.setdefault(node, line_of_frame(sys._getframe(1)))
        return Proxy(self, node)

    def row(self, x: Any) -> Row:
        """The numbers of a captured tensor, or of a part of one, that lacks one index."""
        if isinstance(x, Row):
            return x
        t, indices = (x.t, x.indices) if isinstance(x, PartOfTensor) else (x, ())
        self.asks_for_shapes = True
        if len(indices) != t.ndim - 1 or t.shape[-1] > MOST_IN_ROW:
            raise TypeError(_not_a_number(t))
        return Row(self, [self.load(t, (*indices, n)) for n in range(t.shape[-1])])

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """An operation by its name; of rows that of each number, or a reduction.

        In place, as "mul_" is, the first operand becomes the result, and whoever holds it sees that.
        """
        kwargs = dict(kwargs or {})
        if kwargs.pop("inplace", False) or name.endswith("_"):
            return self._write(args[0], self.call(name.removesuffix("_"), args, kwargs))
        if name not in OF_TENSORS and any(_is_row(a) for a in args):
            args = tuple(self.row(a) if _is_row(a) else a for a in args)
            if name in REDUCTIONS:
                return REDUCTIONS[name](*args, **kwargs)
            sizes = {len(a.items) for a in args if isinstance(a, Row)}
            if len(sizes) > 1:
                raise ValueError(f"rows of {sizes} numbers do not fit together")
            each = ([a.items[n] if isinstance(a, Row) else a for a in args] for n in range(sizes.pop()))
            return Row(self, [self.call(name, tuple(one), kwargs) for one in each])
        if name not in METHODS:
            raise NotImplementedError(f"a mask or score function has no operation {name!r}{_instead(name)}")
        return METHODS[name](self, *args, **kwargs)

    def _write(self, x: Any, found: Any) -> Any:
        """x, which is `found` from now on."""
        if isinstance(x, Proxy):
            x.node = self.number(found)
        elif isinstance(x, Row):
            x.items = self.row(found).items
        else:
            raise TypeError("a captured tensor can't be written to")
        return x

    def number(self, x: Any) -> int:
        """The node of an operand."""
        if isinstance(x, Proxy):
            return x.node
        if isinstance(x, Row):
            raise TypeError(f"a row of {len(x.items)} numbers must be made one, as by .sum() or [0]")
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
        if op in ("shl", "shr") and kinds == [BOOL, BOOL]:
            raise TypeError("a shift takes no two bools, as in PyTorch: use .int()")
        if op == "pow" and FLOAT not in kinds and (self.graph.value(numbers[1]) or 0) < 0:
            raise TypeError("an integer has no negative power: make it a float, as with .float()")
        if op in ("floordiv", "mod") and self.graph.value(numbers[1]) == 0:
            raise ZeroDivisionError("division by 0")
        if kinds == [BOOL, BOOL] and op in ("add", "mul"):  # as PyTorch has it
            op = "or" if op == "add" else "and"
        return Proxy(self, self.graph.add(op, *numbers))


def _torch_function(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """What stand-ins have as `__torch_function__`."""
    recorder = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, cls)).recorder
    given = getattr(func, "__name__", str(func))
    name = given.strip("_").removeprefix("special_").removeprefix("linalg_")
    name += "_" if given.endswith("_") and not given.endswith("__") else ""
    name = _WHERE_OF if func is Tensor.where else name
    if name == "getitem":
        t, index = args
        return recorder.load(t, index if isinstance(index, tuple) else (index,))
    if name == "stack":
        return Row(recorder, [Proxy(recorder, recorder.number(x)) for x in args[0]])
    return recorder.call(name, args, kwargs)


class PartOfTensor:
    """A captured tensor that has been given some of its indices: `table[h]` of `table[h][i]`."""

    def __init__(self, recorder: Recorder, t: Tensor, indices: tuple[Any, ...]) -> None:
        self.recorder, self.t, self.indices = recorder, t, indices

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        return self.recorder.load(self.t, self.indices + more)

    __torch_function__ = classmethod(_torch_function)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorder.row(self), name)

    def __iter__(self) -> Iterator[Proxy]:
        return iter(self.recorder.row(self).items)

    def __bool__(self) -> bool:
        return bool(self.recorder.row(self))


class Row:
    """A few numbers, as `place[q_idx]` of a captured tensor of shape (seqlen, 3)."""

    def __init__(self, recorder: Recorder, items: list[Proxy]) -> None:
        self.recorder, self.items = recorder, items

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.items),))

    ndim = 1

    def __getitem__(self, index: Any) -> Any:
        found = self.items[index]
        return Row(self.recorder, found) if isinstance(found, list) else found

    def __bool__(self) -> bool:
        raise TypeError(_NO_BRANCH)

    __torch_function__ = classmethod(_torch_function)

    def __getattr__(self, name: str) -> Any:
        return _method(self, name, name in METHODS or name in REDUCTIONS)


def _method(x: Row | Proxy, name: str, is_known: bool) -> Callable[..., Any]:
    """x.name; raises AttributeError if that is no operation."""
    if name.startswith("__") or not is_known:
        raise AttributeError(f"a mask or score function has no operation {name!r}{_instead(name)}")
    called = _WHERE_OF if name == "where" else name
    return lambda *args, **kwargs: x.recorder.call(called, (x, *args), kwargs)


def _is_whole(index: Any) -> bool:
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _is_row(x: Any) -> bool:
    return isinstance(x, Row | PartOfTensor) or (isinstance(x, Tensor) and x.ndim > 0)


def _not_a_number(t: Tensor) -> str:
    return (
        f"a captured tensor of shape {tuple(t.shape)} must be indexed down to one number, as in "
        f"table[h, i - j], or a row of at most {MOST_IN_ROW}: {_ROWS}"
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

    def size(self) -> torch.Size:
        return torch.Size(())

    def dim(self) -> int:
        return 0

    def numel(self) -> int:
        return 1

    def is_floating_point(self) -> bool:
        return self.kind == FLOAT

    def __bool__(self) -> bool:
        raise TypeError(_NO_BRANCH)

    def __index__(self) -> int:
        raise TypeError(
            "the score and its indices have no value while the function is traced: use torch's functions for "
            "math's, and tensors for lists and dicts that they index"
        )

    __int__ = __float__ = __iter__ = __hash__ = __index__  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name in ("item", "tolist", "numpy"):
            self.__index__()
        return _method(self, name, name.removesuffix("_") in METHODS)

    __torch_function__ = classmethod(_torch_function)


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *operands: self.recorder.call(name, (self, *operands))


_SYMMETRIC = ("add", "mul", "and", "or", "xor")
_OTHERS = ("sub", "truediv", "floordiv", "mod", "pow", "lshift", "rshift")
for _class in (Proxy, PartOfTensor, Row):
    for _name in (*_SYMMETRIC, *_OTHERS, *COMPARISONS, "gt", "ge", "neg", "pos", "abs", "invert"):
        setattr(_class, f"__{_name}__", _operator(_name))
    for _name in (*_SYMMETRIC, *_OTHERS):
        setattr(_class, f"__r{_name}__", _operator(_name if _name in _SYMMETRIC else f"r{_name}"))
        if _class is not PartOfTensor:  # x += y writes to x, as in PyTorch
            setattr(_class, f"__i{_name}__", _operator(f"{_name}_"))
PartOfTensor.__matmul__ = Row.__matmul__ = _operator("matmul")  # type: ignore[attr-defined, operator]


_NO_BRANCH = (
    "a branch of Python's (if, and, or, not, in, min, max, a chain of comparisons) can't depend on "
    "the score or its indices: use torch.where, &, |, ~, torch.minimum or torch.maximum"
)
_ROWS = (
    "compute what takes whole rows before the call, as a table; for dot products append them to query and key"
)
_INSTEAD = {  # of what users write, other than METHODS
    _ROWS: ("dot", "sum", "mean", "prod", "norm", "matmul", "einsum", "cat", "cumsum", "softmax"),
    "a score and its indices are single numbers, which have no dimensions": (
        "view", "reshape", "unsqueeze", "flatten", "expand", "permute", "transpose", "broadcast_to",
    ),
    "gradients reach all that a score is computed from: compute before the call what shall have none": (
        "detach", "requires_grad_",
    ),
}  # fmt: skip


def _instead(name: str) -> str:
    for hint, names in _INSTEAD.items():
        if name in names:
            return f": {hint}"
    return f"; it has tensor[index] of captured tensors, {', '.join(sorted(METHODS))}"


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
