"""A user's mask and score functions as an expression, traced once for functions that compute the same."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilewise.core.checks import shown
from tilewise.core.functions.expression import BOOL, FLOAT, INDICES, LENGTH, Captured, Functions
from tilewise.core.functions.operations import methods as methods  # which stand-ins have
from tilewise.core.functions.proxy import PartOfTensor, Proxy, Recorder, Row, kind_of, line_of_error

MAX_TRACES = 1024


class Trace(NamedTuple):
    """What functions compute, and on which captured tensors in this call."""

    functions: Functions
    tensors: tuple[Tensor, ...]
    lines: dict[int, str]  # of each load, the user's line


class _Known(NamedTuple):
    functions: Functions
    places: tuple[int, ...]  # of each captured tensor, among those that the walk over the functions meets
    lines: dict[int, str]
    shapes: tuple[torch.Size, ...] | None  # of all tensors that the walk meets, if a function asks for one


_known: dict[Any, _Known] = {}
_latest: dict[str, tuple[Functions, dict[int, str]]] = {}  # by `plain_text`: what tiles know of a function


def trace(
    mask_mod: Callable[..., Any] | None,
    score_mod: Callable[..., Any] | None,
    wants_grad: bool = True,
    device: torch.device | None = None,
    first: Tensor | None = None,
) -> Trace:
    """The functions of one call.

    A trace is kept by the functions' code, what they close over, their defaults and the globals that they
    read; of tensors among these the dtype, rank, device, layout and attributes count, not the values; and by
    PyTorch's default dtype. Functions that hold something else, as objects with attributes or of a class made
    of `dict` or `tuple`, or ask a tensor for its numbers, are traced in every call.

    Args:
        wants_grad: of captured tensors that require a gradient; not under torch.no_grad.
        device: what the score and its indices say theirs is.
        first: (batch,) int64, each sequence's first query, from which q_idx counts; None is 0.

    Raises:
        TypeError, NotImplementedError, ...: see `tilewise.attention`; the message names the line.
    """
    walk = _Walk()
    try:
        kept_by = wants_grad, device, torch.get_default_dtype()
        key: Any = (walk.key(mask_mod), walk.key(score_mod), walk.key(first), *kept_by)
    except (_Unknown, RecursionError, ValueError):  # of what holds itself, and of an empty cell
        key = None
    known = _known.get(key) if key is not None else None
    if known is not None and (known.shapes is None or known.shapes == walk.shapes()):
        remember(known.functions, known.lines)
        tensors = tuple(walk.tensors[place] for place in known.places)
        return Trace(known.functions, tensors, known.lines)
    recorder = Recorder(device)
    with _Asked() as asked:
        found = _traced(recorder, mask_mod, score_mod, wants_grad, first)
    places = [n for t in found.tensors for n, other in enumerate(walk.tensors) if other is t]
    remember(found.functions, found.lines)
    if key is not None and not asked.anything and len(places) == len(found.tensors):
        if len(_known) >= MAX_TRACES:
            _known.clear()
        shapes = walk.shapes() if asked.for_shapes or recorder.asks_for_shapes else None
        _known[key] = _Known(found.functions, tuple(places), found.lines, shapes)
    return found


def remember(functions: Functions, lines: dict[int, str]) -> None:
    """For `line_of_load`."""
    text = functions.plain_text
    if len(_latest) >= MAX_TRACES and text not in _latest:
        _latest.clear()
    _latest[text] = functions, lines


def line_of_load(functions: Functions, node: int) -> str:
    """The user's line of a load of decoded functions, by the last trace of such a function."""
    traced, lines = _latest.get(functions.plain_text, (functions, {}))
    return lines.get(traced.graph.reachable(traced.roots)[node], "unknown")


def _traced(
    recorder: Recorder,
    mask_mod: Callable[..., Any] | None,
    score_mod: Callable[..., Any] | None,
    wants_grad: bool,
    first: Tensor | None,
) -> Trace:
    indices = [recorder.index(name) for name in INDICES]
    if first is not None:  # within bounds that leave sums 32 bits; what is before a sequence counts as at 0
        begin, i = recorder.load(first, (indices[0],)).clamp(1 - LENGTH, LENGTH - 1), INDICES.index("i")
        indices[i] = (indices[i] + begin).clamp(0)
    mask = score = None
    if mask_mod is not None:
        mask = recorder.add("bool", _call("mask_mod", mask_mod, recorder, indices)).node
    if score_mod is not None:
        operands = [recorder.index("score"), *indices]
        score = recorder.add(FLOAT, _call("score_mod", score_mod, recorder, operands)).node
    captured = tuple(
        Captured(kind_of(t.dtype), t.ndim, wants_grad and t.dtype.is_floating_point and t.requires_grad)
        for t in recorder.tensors
    )
    return Trace(Functions(recorder.graph, score, mask, captured), tuple(recorder.tensors), recorder.lines)


def _call(name: str, function: Callable[..., Any], recorder: Recorder, operands: list[Proxy]) -> Any:
    """The function's result on proxies, one number."""
    check_function(name, function)
    try:
        found = function(*(Proxy(recorder, x.node) for x in operands))  # which x.add_(1) would change
        if found is None or isinstance(found, tuple | list) or callable(found):
            raise TypeError(f"it returns a {type(found).__name__}, must return one number")
        _check_kind(name, recorder.graph.nodes[recorder.number(found)].kind)
    except Exception as error:
        line = line_of_error(error.__traceback__) or _definition(function)
        kind = type(error) if type(error) in (NotImplementedError, IndexError, ValueError) else TypeError
        raise kind(f"{name} can't be traced: {error} (line {line})") from error
    return found


def _check_kind(name: str, kind: str) -> None:
    """Raises TypeError for a truth value as a score, or a floating-point number as a mask."""
    if name == "score_mod" and kind == BOOL:
        raise TypeError(
            "it returns a bool, must return a score: a function that says what is visible is a mask_mod"
        )
    if name == "mask_mod" and kind == FLOAT:
        raise TypeError("it returns a float, must return a bool, True where a query sees a key")


def check_function(name: str, function: Any) -> None:
    """Raises TypeError if it is none, or takes another number of arguments."""
    arguments = {"mask_mod": "(b, h, q_idx, kv_idx)", "score_mod": "(score, b, h, q_idx, kv_idx)"}[name]
    if not callable(function):
        tensor = "mask" if name == "mask_mod" else "bias"
        place = {"Tensor": tensor, "BlockMask": "block_mask"}.get(type(function).__name__)
        hint = "" if place is None else f": pass it as {place}"
        raise TypeError(f"{name}={shown(function)} must be a function of {arguments}{hint}")
    try:
        inspect.signature(function).bind(*range(arguments.count(",") + 1))
    except ValueError:  # a built-in one, which does not say
        return
    except TypeError as error:
        raise TypeError(
            f"{name}={getattr(function, '__name__', shown(function))} must take {arguments}: {error} "
            f"(line {_definition(function)})"
        ) from None


def _definition(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else shown(function)


class _Asked(TorchFunctionMode):
    """Whether a function asks tensors for their shapes, or for what a trace is not kept by, as numbers.

    Raises NotImplementedError for random numbers, which a trace would draw once for all scores.
    """

    def __init__(self) -> None:
        super().__init__()
        self.for_shapes = self.anything = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if _is_random(name):
            raise NotImplementedError(
                f"a mask or score function can't draw random numbers, as {name!r} does: dropout_p drops "
                "weights, and a tensor that was drawn before the call can be indexed"
            )
        if func in _OF_SHAPE:
            self.for_shapes = True
        elif func not in _KEPT_BY and not any(issubclass(t, Proxy | PartOfTensor | Row) for t in types):
            self.anything = True
        return func(*args, **(kwargs or {}))


@functools.lru_cache(maxsize=MAX_TRACES)
def _is_random(name: str) -> bool:
    """Whether PyTorch's operator of this name draws random numbers."""
    operator = getattr(torch.ops.aten, name, None)
    overloads: list[str] = getattr(operator, "overloads", list)()
    return any(torch.Tag.nondeterministic_seeded in getattr(operator, one).tags for one in overloads)


_OF_SHAPE = frozenset({Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.__len__})  # type: ignore[attr-defined]
_KEPT_BY = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in ("dtype", "ndim", "device", "requires_grad", "layout", "is_quantized")
    }
    | {Tensor.dim, Tensor.is_complex, Tensor.is_floating_point}
)


class _Unknown(Exception):
    """Something in a function's reach is not known to stay the same."""


class _Walk:
    """Over all that functions can read: their code and constants make the key, tensors are collected."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.open: list[int] = []  # functions being walked, as they may call themselves

    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(t.shape for t in self.tensors)

    def key(self, value: Any) -> Any:
        # Of these types themselves: classes made of them may hold or compute something else beside.
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is float:
            return float, value.hex()
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is tuple or kind is list:
            return kind, tuple(map(self.key, value))
        if kind is dict:
            return dict, tuple((self.key(k), self.key(v)) for k, v in value.items())
        if kind is functools.partial:
            return kind, self.key((value.func, value.args, value.keywords, vars(value)))
        if isinstance(value, FunctionType):
            return self._function(value)
        # A method of an object, as a dict's `get`, gives another result when that changes.
        is_function = isinstance(value, BuiltinFunctionType) and isinstance(
            value.__self__, ModuleType | type | None
        )
        is_known = is_function or type(value) in _DESCRIPTORS
        if is_known or _is_constant(value):
            return type(value), value
        raise _Unknown

    def _tensor(self, t: Tensor) -> Any:
        place = next((n for n, other in enumerate(self.tensors) if other is t), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(t)
        attributes = self.key(t.__dict__) if t.__dict__ else None
        return type(t), place, t.dtype, t.ndim, t.device, t.requires_grad, t.layout, attributes

    def _function(self, function: FunctionType) -> Any:
        if id(function) in self.open:
            return FunctionType, self.open.index(id(function))
        self.open.append(id(function))
        cells = [self.key(cell.cell_contents) for cell in function.__closure__ or ()]
        names, imports = _reads(function.__code__)
        if any(name.split(".")[0] not in _CONSTANT for name in imports) or _READ_ANYTHING & set(names):
            raise _Unknown
        scope = function.__globals__
        own = [(name, self.key(scope[name])) for name in names if name in scope]
        missing = [name for name in names if name not in scope and not hasattr(builtins, name)]
        if missing:
            raise _Unknown
        defaults = self.key(function.__defaults__), self.key(function.__kwdefaults__)
        attributes = self.key(function.__dict__) if function.__dict__ else None
        return FunctionType, function.__code__, tuple(cells), tuple(own), defaults, attributes


def _is_constant(value: Any) -> bool:
    """Whether it is a module or class whose attributes don't change: PyTorch's and Python's own."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(value, ModuleType | type) and str(name).split(".")[0] in _CONSTANT


_CONSTANT = ("torch", "math", "builtins")
_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device)
_READ_ANYTHING = {"eval", "exec", "globals", "vars", "__import__"}
_DESCRIPTORS = (type(Tensor.add), type(Tensor.__getitem__))


@functools.lru_cache(maxsize=MAX_TRACES)
def _reads(code: CodeType) -> tuple[list[str], list[str]]:
    """(the globals that code reads, the modules that it imports), with those of functions defined in it."""
    found: tuple[set[str], set[str]] = set(), set()
    for i in dis.get_instructions(code):
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found[0].add(i.argval)
        elif i.opname == "IMPORT_NAME":
            found[1].add(i.argval)
    for inner in (constant for constant in code.co_consts if isinstance(constant, CodeType)):
        for names, more in zip(found, _reads(inner)):
            names.update(more)
    return sorted(found[0]), sorted(found[1])
