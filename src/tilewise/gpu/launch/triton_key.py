"""Triton's hash of itself, kept between processes.

Triton names a compiled kernel by a hash that its own files are part of, so each process reads and hashes all
of them, 400 MB, before its first kernel. Here the outcome lies in Triton's cache folder, under the names,
sizes and times of those files: a process that finds them unchanged takes it from there.

Before 3.8 a function's key has the constants of functions that it calls only if those have a key already: it
depends on what else a process has compiled. Here they get theirs first, as in 3.8.

`triton_key` and `_update_hash` are private names, checked for Triton 3.6 to 3.9; without them all is as
Triton does it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime import cache, jit

from tilewise.gpu.launch.files import is_safe, write


@functools.cache
def keep(folder: Path | None = None) -> None:
    """Have Triton take its key from a file; write it into the cache if there is none. Once a process.

    folder: of kernels, where the file may be too.
    """
    hash_callees_first()
    compute = getattr(cache, "triton_key", None)
    if compute is None:
        return
    try:
        name = file_name()
    except OSError:  # a file that goes, or a link to nothing
        return
    paths = [place / name for place in (folder, Path(knobs.cache.dir)) if place is not None]
    for path in paths:
        with contextlib.suppress(OSError):
            if is_safe(path) and (key := path.read_text()).startswith(triton.__version__):
                cache.triton_key = lambda: key
                return
    with contextlib.suppress(OSError):  # a cache that can't be written to
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        write(paths[-1], compute().encode())


def put(folder: Path) -> None:
    """Write the file into a folder of kernels."""
    keep()
    if hasattr(cache, "triton_key"):
        write(folder / file_name(), cache.triton_key().encode())


@functools.cache
def hash_callees_first() -> None:
    """Of this library's functions."""
    finder: Any = getattr(jit, "DependenciesFinder", None)
    if not hasattr(finder, "_update_hash"):
        return
    update = finder._update_hash

    def update_hash(self: Any, func: Any) -> None:
        if func.fn.__module__.startswith("tilewise."):
            _ = func.cache_key
        update(self, func)

    finder._update_hash = update_hash


def file_name() -> str:
    """With a hash of names, sizes and times of Triton's code: more files than the key reads, not one less.

    Links are followed: an editable install has its backends behind them.
    """
    root, found = Path(triton.__file__).parent, []
    for folder, _, names in os.walk(root, followlinks=True):
        for name in names:
            if name.endswith((".py", ".so", ".pyd")):
                path = os.path.join(folder, name)
                state = os.stat(path)
                found.append((os.path.relpath(path, root), state.st_size, state.st_mtime_ns))
    digest = hashlib.sha256(repr((str(root), sorted(found))).encode()).hexdigest()
    return f"tilewise-triton-{digest[:32]}"
