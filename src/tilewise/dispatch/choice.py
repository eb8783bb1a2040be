"""Which backend serves a problem. A backend asked for by name never falls back to another."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from tilewise.core.checks import shown
from tilewise.core.problem import AttentionProblem

# In order of preference; a module is imported when it is first considered.
BACKENDS = {
    "hopper": "tilewise.gpu.hopper.forward.launch",
    "triton": "tilewise.gpu.triton.launch",
    "llvm": "tilewise.cpu.host.launch",
    "aten": "tilewise.cpu.aten",
    "tiled": "tilewise.tiled.backend",
}


@functools.cache
def load(name: str) -> ModuleType:
    """The backend's module.

    Raises:
        ValueError: no backend has this name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r} must be None or one of {', '.join(map(repr, BACKENDS))}")
    return importlib.import_module(BACKENDS[name])


def refusals(problem: AttentionProblem, is_backward: bool = False) -> dict[str, str | None]:
    """Each backend's reason not to serve the problem, None where it would; in order of preference."""
    return {
        name: _refusal(name, problem, is_backward) or _slower(name, problem, is_backward) for name in BACKENDS
    }


def choose(problem: AttentionProblem, backend: str | None = None, is_backward: bool = False) -> str:
    """The name of the backend that serves the problem: the first that can, or the one asked for.

    Raises:
        ValueError, TypeError: unknown backend.
        NotImplementedError: the backend asked for refuses; the message names what would serve.
    """
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend={shown(backend)} must be None or a string")
    return _choose(problem, backend, is_backward)


@functools.lru_cache(maxsize=4096)
def _choose(problem: AttentionProblem, backend: str | None, is_backward: bool) -> str:
    if backend is None:
        return next(name for name, reason in refusals(problem, is_backward).items() if reason is None)
    reason = _refusal(backend, problem, is_backward)
    if reason is not None:
        serving = [name for name, other in refusals(problem, is_backward).items() if other is None]
        would_serve = " or ".join(map(repr, serving))
        raise NotImplementedError(f"backend={backend!r} {reason}; {would_serve} would serve")
    return backend


def _refusal(name: str, problem: AttentionProblem, is_backward: bool) -> str | None:
    reason = load(name).supports(problem)
    if reason is None and is_backward and name != "tiled":
        if problem.is_paged:
            return "has no gradient of keys in pages"
        if problem.is_packed and problem.is_cached:
            return "has no gradient of packed queries with a cache"
        if name == "hopper" and problem.is_cached:
            return "has no gradient of keys in a cache"
    return reason


def _slower(name: str, problem: AttentionProblem, is_backward: bool) -> str | None:
    if name == "aten" and not load(name).is_faster(problem, is_backward):
        return "is measured slower than the tiles for this problem"
    if (
        name == "llvm"
        and load("aten").supports(problem) is None
        and load("aten").beats_llvm(problem, is_backward)
    ):
        return "is measured slower than PyTorch's own kernel for this problem"
    return None
