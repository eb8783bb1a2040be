"""Triton's hash of itself, kept between processes.

Triton names a compiled kernel by a hash that its own files are part of, so each process reads and hashes all
of them, 400 MB, before its first kernel. Here the outcome lies in Triton's cache folder, under the names,
sizes and times of those files: a process that finds them unchanged takes it from there. `triton_key` is a
private name, checked for Triton 3.6 to 3.9; without it all is as Triton does it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from pathlib import Path

import triton
from triton import knobs
from triton.runtime import cache

from tilewise.gpu.launch.kernel_folder import is_safe, write


@functools.cache
def keep() -> None:
    """Have Triton take its key from the file; write the file if there is none. Once a process."""
    compute = getattr(cache, "triton_key", None)
    if compute is None:
        return
    try:
        path = Path(knobs.cache.dir) / f"tilewise-triton-{state_of_files()}"
    except OSError:  # a file that goes, or a link to nothing
        return
    with contextlib.suppress(OSError):
        if is_safe(path) and (key := path.read_text()).startswith(triton.__version__):
            cache.triton_key = lambda: key
            return
    with contextlib.suppress(OSError):  # a cache that can't be written to
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, compute().encode())


def state_of_files() -> str:
    """A hash of the names, sizes and times of Triton's code: more files than the key reads, not one less.

    Links are followed: an editable install has its backends behind them.
    """
    root, found = Path(triton.__file__).parent, []
    for folder, _, names in os.walk(root, followlinks=True):
        for name in names:
            if name.endswith((".py", ".so", ".pyd")):
                path = os.path.join(folder, name)
                state = os.stat(path)
                found.append((os.path.relpath(path, root), state.st_size, state.st_mtime_ns))
    return hashlib.sha256(repr((str(root), sorted(found))).encode()).hexdigest()[:32]
