"""Triton's hash of itself, kept between processes.

Triton names a compiled kernel by a hash that its own files are part of, so each process reads and hashes all
of them, 400 MB, before its first kernel. Here the outcome lies in Triton's cache folder, under the names,
sizes and times of those files: a process that finds them unchanged takes it from there.

Before 3.8 a function's key has the constants of functions that it calls only if those have a key already: it
depends on what else a process has compiled. Here they get theirs first, as in 3.8.

Where Triton lacks what `triton_private` takes for that, all is as Triton does it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from pathlib import Path

import triton
from triton import knobs

from tilewise.gpu.launch.files import is_safe, write
from tilewise.gpu.launch.triton_private import before_hashing, own_hash, set_own_hash


@functools.cache
def keep(folder: Path | None = None) -> None:
    """Have Triton take its key from a file; write it into the cache if there is none. Once a process.

    folder: of kernels, where the file may be too.
    """
    hash_callees_first()
    compute = own_hash()
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
                set_own_hash(key)
                return
    with contextlib.suppress(OSError):  # a cache that can't be written to
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        write(paths[-1], compute().encode())


def put(folder: Path) -> None:
    """Write the file into a folder of kernels."""
    keep()
    if (compute := own_hash()) is not None:
        write(folder / file_name(), compute().encode())


@functools.cache
def hash_callees_first() -> None:
    """Of this library's functions."""
    before_hashing(lambda func: func.cache_key if func.fn.__module__.startswith("tilewise.") else None)


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
