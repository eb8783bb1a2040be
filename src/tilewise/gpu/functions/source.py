"""Mask and score functions in Triton: an expression as the source of helpers, which the kernels inline.

    mask_mod(i, j, seq, captured) -> (whether the key is visible or may be, whether an index is wrong)
    score_mod(s, i, j, seq, captured) -> (score, d score / d s, whether an index is wrong)
    add_captured(total, g, s, i, j, i0, j0, seq, captured)

The last adds to `total` what g, the gradient of a tile's scores behind the function, is worth for the
captured floats: see `sums`. The tile begins at i0 and j0.

`i` and `j` are a tile's positions, [rows, 1] and [1, columns] or the other way round. Integers are of 32 bits
where these hold every value. Indices that a call's shapes don't keep in range are guarded: see
`KernelFunctions`.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tilewise.core.functions.captured import doubt, wide_integers
from tilewise.core.functions.derivative import derivative
from tilewise.core.functions.expression import BOOL, FLOAT, FUNCTIONS, INT, Functions, Graph, decode
from tilewise.core.functions.operations.elementary import formulas
from tilewise.core.kept import lock_for_forks
from tilewise.gpu.functions.axes import COLUMNS, DIAGONALS, EACH, NONE, ROWS, axes_of_loads

_making = lock_for_forks()  # others would find a module that is not yet filled


class KernelFunctions(NamedTuple):
    """What is compiled into kernels of a call's functions.

    guarded: the loads, by their number in `Functions.text`, whose indices are looked at.
    wanted: the captured tensors, by their number, whose gradient a kernel sums.
    """

    text: str
    guarded: frozenset[int]
    wanted: frozenset[int] = frozenset()

    @property
    def functions(self) -> Functions:
        return decode(self.text)


@functools.lru_cache(maxsize=1024)
def kernel_functions(text: str, wanted: frozenset[int] = frozenset()) -> KernelFunctions:
    """Of a `Functions.text`."""
    functions = decode(text)
    return KernelFunctions(functions.plain_text, functions.guarded, wanted)


@functools.lru_cache(maxsize=1024)
def wanted_tensors(text: str | None) -> frozenset[int]:
    """The captured tensors that want a gradient and that the score function reads: see `KernelFunctions`."""
    functions = None if text is None else decode(text)
    if functions is None or functions.score is None or not functions.wants_grad:
        return frozenset()
    read = {functions.graph.nodes[n].value for n in derivative(functions).loads}
    return frozenset(t for t in read if functions.tensors[t].wants_grad)


class Helpers(NamedTuple):
    """Functions for kernels to call, None where there is none.

    has_slope: the score's slope is not 1.
    is_guarded: an index may be wrong.
    add_captured: of the `wanted` tensors.
    """

    mask: Any = None
    score: Any = None
    has_slope: bool = False
    is_guarded: bool = False
    add_captured: Any = None


@functools.lru_cache(maxsize=512)
def helpers(kernel: KernelFunctions) -> Helpers:
    """The compiled module's functions; it is made once for an expression."""
    with _making:
        return _helpers(kernel)


def _helpers(kernel: KernelFunctions) -> Helpers:
    source, has_slope = _source(kernel)
    # By its name Triton knows a helper that is an argument, in its cache on disk too.
    digest = hashlib.sha256(source.encode() + _called()).hexdigest()[:16]
    name = f"tilewise.gpu.functions.generated_{digest}"
    source = source.replace("DIGEST", digest)
    module = sys.modules.get(name)
    if module is None:
        module = ModuleType(name)
        file = module.__file__ = f"<tilewise functions {digest}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # Triton reads it
        sys.modules[name] = module
        try:
            exec(compile(source, file, "exec"), module.__dict__)
        except BaseException:  # an interrupt: a half of it would pass for functions that hide nothing
            del sys.modules[name]
            raise
    mask, score, add_captured = (
        getattr(module, f"{part}_{digest}", None) for part in ("mask_mod", "score_mod", "add_captured")
    )
    return Helpers(mask, score, has_slope, bool(kernel.guarded), add_captured)


@functools.cache
def _called() -> bytes:
    """The source of what helpers call."""
    return b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("operations", "sums"))


_HEAD = """import triton
import triton.language as tl
from tilewise.gpu.functions.operations import (
    absolute_power, exact_tanh, expm1, floor_quotient, fmod, larger, log10, log1p, remainder,
    round_to_even, shifted_left, shifted_right, smaller, trunc, whole_number
)
from tilewise.gpu.functions.sums import add_each, add_one, diagonal_sums, rotated, times

"""


def _source(kernel: KernelFunctions) -> tuple[str, bool]:
    functions, text, has_slope = kernel.functions, _HEAD, False
    if functions.mask is not None:
        graph = functions.graph.copy()
        unsure = doubt(graph, functions.mask, kernel.guarded)
        visible = functions.mask if unsure is None else graph.add("or", functions.mask, unsure)
        printer = _Printer(graph, kernel)
        text += printer.function("mask_mod_DIGEST(i, j, seq, captured)", printer.full(visible, BOOL))
    if functions.score is not None:
        graph, score, slope, _ = derivative(functions)
        graph = graph.copy()
        slope = graph.const(0.0) if slope is None else slope
        has_slope = graph.value(slope) != 1.0
        unsure = doubt(graph, score, kernel.guarded)
        if unsure is not None and not _is_nan_if_unsure(graph, score, kernel.guarded):  # and perhaps -inf
            score = graph.add("where", unsure, graph.const(0.0), score)
        printer = _Printer(graph, kernel)
        results = [printer.full(n, FLOAT) for n in (score, slope)]
        text += printer.function("score_mod_DIGEST(s, i, j, seq, captured)", *results)
    return text + _source_of_gradients(kernel), has_slope


def _is_nan_if_unsure(graph: Graph, score: int, guarded: frozenset[int]) -> bool:
    """Whether the NaN that a wrong index reads reaches the score wherever that depends on it."""
    found: set[int] = set()
    for n in graph.reachable([score]):
        if n in guarded or found.intersection(graph.nodes[n].args):
            found.add(n)
    return all(graph.nodes[n].kind == FLOAT for n in found)


def _source_of_gradients(kernel: KernelFunctions) -> str:
    """add_captured, and what it calls for each load: where in the floats it reads, and its sums."""
    if not kernel.wanted:
        return ""
    axes, (graph, *_, slopes) = axes_of_loads(kernel.functions), derivative(kernel.functions)
    text, slope_of = "", _Printer(graph, kernel)
    for n, slope in slopes.items():
        if graph.nodes[n].value not in kernel.wanted:
            continue
        place = _Printer(graph, kernel)
        found = place.place_of_load(n)
        place.lines.append(f"return {found}, {place.wrong_load(n)}")
        text += place.procedure(f"place_{n}_DIGEST(i, j, seq, captured)")
        text += _SUMS[axes[n]].replace("LOAD", str(n))
        slope_of.lines += [f"d{n} = times(g, {slope_of.operand(slope, FLOAT)})"]
        slope_of.lines += [f"add_{n}_DIGEST(total, d{n}, i, j, i0, j0, seq, captured)"]
    return text + slope_of.procedure("add_captured_DIGEST(total, g, s, i, j, i0, j0, seq, captured)")


class _Printer:
    """Statements that compute nodes of a graph, each in a variable of its own."""

    def __init__(self, graph: Graph, kernel: KernelFunctions) -> None:
        self.graph, self.kernel, self.functions = graph.copy(), kernel, kernel.functions
        self.formulas = formulas(self.graph)
        self.wide = wide_integers(self.graph, kernel.functions)
        self.lines: list[str] = []
        self.wrong: list[str] = []
        self.done: set[int] = set()

    def function(self, signature: str, *results: str) -> str:
        as_large = "((i < 0) & (j < 0))"  # as a tile; Triton 3.6 returns no None
        wrong = " | ".join([as_large, *self.wrong]) if self.wrong else "i < 0"
        self.lines.append(f"return {', '.join(results)}, {wrong}")
        return self.procedure(signature)

    def procedure(self, signature: str) -> str:
        return f"@triton.jit\ndef {signature}:\n" + "".join(f"    {line}\n" for line in self.lines) + "\n"

    def full(self, root: int, kind: str) -> str:
        """A root as large as the tile."""
        zero = "(i * 0 + j * 0)"
        constant = self.graph.value(root)
        if kind == BOOL and constant is None:
            return f"(({zero} == 0) & {self.operand(root, kind)})"
        if kind == BOOL:
            return f"({zero} == 0)" if constant else f"({zero} != 0)"
        return f"({zero}.to(tl.float32) + {self.operand(root, kind)})"

    def operand(self, n: int, kind: str, bits: int = 64) -> str:
        """A node as an operand of a kind; `bits`: of integers."""
        constant = self.graph.value(n)
        if constant is not None:
            return _literal(constant, kind)
        self._print(n)
        was = self.graph.nodes[n].kind
        if was == kind:
            return f"n{n}.to(tl.int{bits})" if kind == INT and bits == 64 and n not in self.wide else f"n{n}"
        if kind == BOOL:
            return f"(n{n} != 0)"
        if kind == FLOAT:
            return f"n{n}.to(tl.float32)"
        found = f"whole_number(n{n})" if was == FLOAT else f"n{n}"
        return f"{found}.to(tl.int{bits})"

    def _print(self, root: int) -> None:
        for n in self.graph.reachable([root]):
            if n not in self.done and self.graph.nodes[n].op != "const":
                self.done.add(n)
                self.lines.append(f"n{n} = {self._expression(n)}")

    def _expression(self, n: int) -> str:
        node = self.graph.nodes[n]
        if node.op == "load":
            return self._load(n)
        if node.op == "is_wrong":
            return f"w{node.args[0]}"
        if not node.args:
            return _LEAVES[node.op]
        if n in self.formulas:
            return self.operand(self.formulas[n], node.kind)
        is_wide = node.op in ("shl", "shr") or any(m in self.wide for m in (n, *node.args))
        bits = 64 if is_wide else 32
        args = [self.operand(a, kind, bits) for a, kind in zip(node.args, self.graph.argument_kinds(n))]
        found = self._operation(n, args)
        if node.kind == INT and bits == 64 and n not in self.wide:
            return f"({found}).to(tl.int32)"
        return f"({found}).to(tl.int64)" if n in self.wide else found

    def _operation(self, n: int, args: list[str]) -> str:
        node = self.graph.nodes[n]
        is_float = FLOAT in (node.kind, *(self.graph.nodes[a].kind for a in node.args))
        if node.op in (BOOL, INT, FLOAT):
            return args[0]
        if node.op == "pow":
            return _power(args[0], self.graph.value(node.args[1]))
        if node.op in ("minimum", "maximum"):
            name = {"minimum": "smaller", "maximum": "larger"}[node.op] if is_float else f"tl.{node.op}"
            return f"{name}({args[0]}, {args[1]})"
        if node.op == "not":
            return f"({args[0]} == 0)" if node.kind == BOOL else f"~{args[0]}"
        if node.op in _CALLS:
            return f"{_CALLS[node.op]}({', '.join(args)})"
        if node.op == "neg":
            return f"-{args[0]}"
        return f"({args[0]} {_INFIX[node.op]} {args[1]})"

    def _load(self, n: int) -> str:
        """A captured number; NaN, or 0 of integers, where an index is wrong."""
        kind = self.functions.tensors[self.graph.nodes[n].value].kind
        place = f"{'captured.floats' if kind == FLOAT else 'captured.integers'} + {self.place_of_load(n)}"
        other = 'float("nan")' if kind == FLOAT else "0"
        found = f"tl.load({place}{f', mask=w{n} == 0, other={other}' if n in self.kernel.guarded else ''})"
        return f"({found} != 0)" if kind == BOOL else found

    def wrong_load(self, n: int) -> str:
        """Whether an index of a load is out of range, after its `place_of_load`."""
        return f"w{n}" if n in self.kernel.guarded else f"o{n} < 0"

    def place_of_load(self, n: int) -> str:
        """Where in its buffer a load reads."""
        node, tensors = self.graph.nodes[n], self.functions.tensors
        first = sum(1 + t.ndim for t in tensors[: node.value])
        wrong = []
        self.lines.append(f"o{n} = tl.cast(0, tl.int64)")
        for axis, argument in enumerate(node.args):
            index = f"i{n}_{axis}"
            self.lines.append(f"s{n}_{axis} = tl.load(captured.layout + {first + 1 + axis})")
            self.lines.append(f"{index} = tl.cast(0, tl.int64) + {self.operand(argument, INT)}")
            if n in self.kernel.guarded:
                self.lines.append(f"{index} = tl.where({index} < 0, {index} + s{n}_{axis}, {index})")
                wrong.append(f"({index} < 0) | ({index} >= s{n}_{axis})")
            self.lines.append(f"o{n} = o{n} * s{n}_{axis} + {index}")
        if wrong:
            self.lines.append(f"w{n} = {' | '.join(wrong)}")
            self.wrong.append(f"w{n}")
        return f"tl.load(captured.layout + {first}) + o{n}"


def _literal(constant: Any, kind: str) -> str:
    if kind == BOOL:
        return str(bool(constant))
    if kind == INT:
        return f"({int(constant)})"
    found = float(constant)
    return f"({found!r})" if found - found == 0 else f'float("{found}")'


def _power(x: str, exponent: Any) -> str:
    if exponent == 0.5:
        return f"tl.sqrt({x})"
    product = " * ".join([x] * abs(int(exponent))) or f"({x} * 0 + 1)"
    return f"({product})" if exponent >= 0 else f"(1.0 / ({product}))"


_LEAVES = {
    "score": "s", "b": "(seq.b + tl.cast(0, tl.int32))", "h": "(seq.h + tl.cast(0, tl.int32))",
    "i": "tl.maximum(tl.minimum(i, seq.seqlen_q - 1), 0)",
    "j": "tl.maximum(tl.minimum(j, seq.seqlen_k - 1), 0)",
}  # fmt: skip
_CALLS = {
    **{name: f"tl.{name}" for name in FUNCTIONS}, "sqrt": "tl.sqrt_rn",
    "tanh": "exact_tanh", "expm1": "expm1", "log10": "log10", "log1p": "log1p", "trunc": "trunc",
    "round": "round_to_even",
    "floordiv": "floor_quotient", "mod": "remainder", "abs": "tl.abs", "where": "tl.where",
    "shl": "shifted_left", "shr": "shifted_right", "fmod": "fmod", "absolute_power": "absolute_power",
}  # fmt: skip
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|", "xor": "^",
}  # fmt: skip
# What is done with the terms of a load, [rows, columns]: for each way in which its place may change.
_SUMMED = """@triton.jit
def add_LOAD_DIGEST(total, terms, i, j, i0, j0, seq, captured):
    place, wrong = place_LOAD_DIGEST(i, j, seq, captured)
    ADDED

"""
_SUMS = {
    NONE: _SUMMED.replace("ADDED", "add_one(total, tl.sum(terms, None), place, wrong)"),
    ROWS: _SUMMED.replace("ADDED", "add_one(total, tl.sum(terms, 1, keep_dims=True), place, wrong)"),
    COLUMNS: _SUMMED.replace("ADDED", "add_one(total, tl.sum(terms, 0, keep_dims=True), place, wrong)"),
    EACH: _SUMMED.replace("ADDED", "add_each(total, terms, place, wrong)"),
    DIAGONALS: """@triton.jit
def add_LOAD_DIGEST(total, terms, i, j, i0, j0, seq, captured):
    terms = rotated(terms)
    for n in tl.static_range((terms.shape[0] + terms.shape[1] - 1) // terms.shape[1] + 1):
        sums, difference = diagonal_sums(terms, n)  # the first score of a diagonal exists if any does
        i, j = i0 + tl.maximum(difference, 0), j0 - tl.minimum(difference, 0)
        place, wrong = place_LOAD_DIGEST(i, j, seq, captured)
        add_each(total, sums, place, wrong)

""",
}
