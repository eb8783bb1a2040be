"""Which backend serves a problem. A backend asked for by name never falls back to another."""

from __future__ import annotations

import importlib
from types import ModuleType

from tilewise.problem import AttentionProblem

# In order of preference; a module is imported when it is first considered.
BACKENDS = {
    "aten": "tilewise.cpu.aten",
    "tiled": "tilewise.cpu.tiled",
}


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
    reasons: dict[str, str | None] = {}
    for name in BACKENDS:
        module = load(name)
        reason = module.supports(problem)
        if reason is None and name == "aten" and not module.is_faster(problem, is_backward):
            reason = "measured slower than the tiles for this problem"
        reasons[name] = reason
    return reasons


def choose(problem: AttentionProblem, backend: str | None = None, is_backward: bool = False) -> str:
    """The name of the backend that serves the problem: the first that can, or the one asked for.

    Raises:
        ValueError: unknown backend.
        NotImplementedError: the backend asked for refuses; the message names what would serve.
    """
    if backend is None:
        return next(name for name, reason in refusals(problem, is_backward).items() if reason is None)
    reason = load(backend).supports(problem)
    if reason is not None:
        serving = [name for name, other in refusals(problem).items() if other is None]
        raise NotImplementedError(
            f"backend={backend!r} {reason}; {' or '.join(map(repr, serving))} would serve"
        )
    return backend
