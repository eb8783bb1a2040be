"""Which backend serves a problem. A backend asked for by name never falls back to another."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

from tilewise.core.checks import shown
from tilewise.core.problem import AttentionProblem
from tilewise.dispatch.capability import BACKENDS, refusal

# Each has `plan(problem, signature) -> Plan` and `saves(problem) -> Saves`, and no other entry.
MODULES = {
    "hopper": "tilewise.gpu.hopper.plan",
    "triton": "tilewise.gpu.triton.plan",
    "llvm": "tilewise.cpu.host.plan",
    "aten": "tilewise.cpu.aten",
    "tiled": "tilewise.tiled.backend",
}
# Of backends whose backward leaves the gradient of a bias to a kernel of another.
BIAS_GRADIENTS = {"hopper": "triton"}


@functools.cache
def load(name: str) -> ModuleType:
    """The backend's module, imported when it is first asked for.

    Raises:
        ValueError: no backend has this name.
    """
    if name not in MODULES:
        raise ValueError(f"backend={name!r} must be None or one of {', '.join(map(repr, BACKENDS))}")
    return importlib.import_module(MODULES[name])


def refusals(problem: AttentionProblem) -> dict[str, str | None]:
    """Each backend's reason not to serve a forward, None where it would; in order of preference."""
    return {name: refusal(name, problem) for name in BACKENDS}


def choose(problem: AttentionProblem, backend: str | None = None, is_backward: bool = False) -> str:
    """The name of the backend that serves the problem: the first that can, or the one asked for.

    Raises:
        ValueError, TypeError: unknown backend.
        NotImplementedError: the backend asked for refuses; the message names what would serve.
    """
    return first_able(backend, lambda name: refusal(name, problem, is_backward))


def first_able(backend: str | None, refuses: Callable[[str], str | None]) -> str:
    """The first backend that does not refuse, or the one asked for. Raises as `choose`."""
    able = (name for name in BACKENDS if refuses(name) is None)
    if backend is None:
        return next(able)
    if not isinstance(backend, str):
        raise TypeError(f"backend={shown(backend)} must be None or a string")
    load(backend)
    reason = refuses(backend)
    if reason is not None:
        raise NotImplementedError(f"backend={backend!r} {reason}; {' or '.join(map(repr, able))} would serve")
    return backend
