"""Kernels whose parameters are named tuples: Triton is given their fields one by one.

Triton 3.6 to 3.9 compiles a kernel anew for an integer that is 1, or a multiple of 16 for the first time, and
can be told not to only of a kernel's own parameters, not of what is in a tuple. So `entry` writes a kernel's
signature in full, as few people would like to read it, and puts the tuples together in its first line.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar, get_args, get_type_hints

Cls = TypeVar("Cls", bound=type)

_BY_FIELD: set[type] = set()


def by_field(cls: Cls) -> Cls:
    """Of a named tuple: kernels take its fields, and are not compiled anew for those that are `int`."""
    _BY_FIELD.add(cls)
    return cls


def fields_of(arguments: tuple[Any, ...]) -> list[Any]:
    """A kernel's arguments with the fields of tuples that are `by_field` in their place.

    Example:
        >>> from typing import NamedTuple
        >>> @by_field
        ... class Sizes(NamedTuple):
        ...     rows: int
        ...     columns: int
        >>> fields_of(("x", Sizes(3, 4), (5, 6)))
        ['x', 3, 4, (5, 6)]
    """
    return [field for x in arguments for field in (x if type(x) in _BY_FIELD else (x,))]


def entry(jit: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator of a kernel, compiled by `jit`: `triton.jit` or `gluon.jit`.

    A parameter annotated with a tuple that is `by_field` is given by its fields, `fields_of` a launch's
    arguments. For one annotated `int` the kernel is not compiled anew either.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        lines, first = inspect.getsourcelines(kernel)
        source = textwrap.dedent("".join(lines))
        tree = ast.parse(source).body[0]
        assert isinstance(tree, ast.FunctionDef) and not tree.args.defaults
        kinds = inspect.get_annotations(kernel, eval_str=True)
        parameters, tuples, integers = [], [], []
        for parameter in tree.args.args:
            name, kind = parameter.arg, kinds.get(parameter.arg)
            if parameter.annotation and isinstance(kind, type) and kind in _BY_FIELD:
                fields = get_type_hints(kind)
                parameters += [f"{name}_{field}" for field in fields]
                integers += [f"{name}_{field}" for field, its in fields.items() if _is_integer(its)]
                given = ", ".join(f"{name}_{field}" for field in fields)
                tuples.append(f"{name} = {ast.unparse(parameter.annotation)}({given})")
            elif _is_integer(kind):
                parameters.append(name)
                integers.append(name)
            else:
                parameters.append(ast.unparse(parameter))
        body = tree.body[0].lineno - 1
        head = f"def {tree.name}({', '.join(parameters)}):\n", f"    {'; '.join(tuples)}\n"
        # at the lines where it stands in its own file, for debuggers and profilers
        text = [*["\n"] * (first + body - 3), *head, *source.splitlines(keepends=True)[body:]]
        file = f"{inspect.getsourcefile(kernel)}, {tree.name} by fields"
        linecache.cache[file] = len(text), None, text, file  # Triton reads it
        found: dict[str, Any] = {}
        exec(compile("".join(text), file, "exec"), kernel.__globals__, found)
        flat = found[tree.name]
        flat.__doc__, flat.__module__ = kernel.__doc__, kernel.__module__
        return jit(do_not_specialize=integers)(flat)

    return decorate


def _is_integer(kind: Any) -> bool:
    return kind is int or int in get_args(kind)
