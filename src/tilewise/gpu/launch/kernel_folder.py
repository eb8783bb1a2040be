"""A folder of compiled kernels: filled on any machine, read on a GPU's by `TILEWISE_KERNELS=DIR`.

Triton finds a compiled kernel by a hash of all that makes it: sources, argument types, constants, options,
the GPU's architecture, the versions of Triton and ptxas. The folder has a folder for each hash, with the
machine code, Triton's description, and checksums of both. Beside them are the C modules that launch kernels,
and Triton's hash of itself, for machines whose Triton is the very same, as in copies of an image.
No path is read from it: it may be moved. Triton's cache looks there first; what is lacking or in no good
state, Triton compiles into its usual cache.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import platform
import stat
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton import knobs

from tilewise.core.signature import Gpu
from tilewise.gpu.launch import c_modules, triton_key
from tilewise.gpu.launch.files import WRITABLE, is_safe, write
from tilewise.gpu.launch.triton_private import (
    HAS_MANAGERS,
    LAUNCHER,
    UTILS,
    CacheManager,
    FileCacheManager,
    files_of,
)

SUFFIXES = (".cubin", ".json")  # of what a launch reads; the steps before are left out
CHECKSUMS, ABOUT = "checksums", "tilewise-kernels.json"


# ---- filling


def create(folder: Path, gpu: Gpu) -> None:
    """Make the folder for a GPU's kernels, or find it again.

    Raises:
        ValueError: it holds something else, or kernels of other versions.
    """
    about = folder / ABOUT
    if about.exists():
        if reason := _mismatch(folder, gpu.capability):
            raise ValueError(f"out={str(folder)!r} must be a new folder: {reason}")
        return
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"out={str(folder)!r} must be a new folder or one of compiled kernels")
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    write(about, json.dumps(versions() | {"capability": gpu.capability}, indent=1).encode())
    if (utils := c_modules.utils()) is not None:
        _put(folder / UTILS, {UTILS + c_modules.SUFFIX: utils})
    triton_key.put(folder)


def add(folder: Path, compiled: Any) -> None:
    """Put in a kernel that Triton has compiled, and its launcher.

    Raises:
        NotImplementedError: see `triton_private.files_of`.
    """
    its_hash, files = files_of(compiled)
    kernel = {name: Path(path).read_bytes() for name, path in files.items() if name.endswith(SUFFIXES)}
    _put(folder / _entry_name(its_hash), kernel)
    if (launcher := c_modules.launcher(compiled)) is not None:
        key, module = launcher
        _put(folder / _entry_name(key), {LAUNCHER + c_modules.SUFFIX: module})


def _put(entry: Path, files: Mapping[str, bytes]) -> None:
    """Write an entry, with checksums, unless it is there in a good state."""
    if _good_files(entry) is not None:
        return
    entry.mkdir(mode=0o755, exist_ok=True)
    for name, content in files.items():
        write(entry / name, content)
    checksums = {name: _digest(content) for name, content in files.items()}
    write(entry / CHECKSUMS, json.dumps(checksums).encode())


def _entry_name(key: str) -> str:
    """What Triton hands a cache manager for this hash."""
    return base64.b32encode(bytes.fromhex(key)).decode().rstrip("=")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def versions() -> dict[str, str]:
    """What kernels depend on besides the GPU: a folder of other versions would never be read."""
    return {
        "kernels": _digest(b"".join(path.read_bytes() for path in _sources()))[:16],
        "triton": triton.__version__,
        "python": sys.implementation.cache_tag or "",
        "machine": platform.machine(),
    }


def _sources() -> list[Path]:
    """All that kernels are made from here."""
    package = Path(__file__).parents[1]
    if not package.exists():  # inside of a ZIP archive
        return [path for path in package.parents if path.is_file()]
    return sorted(package.rglob("*" + Path(__file__).suffix))  # .pyc where there are no sources


# ---- reading


class FolderFirst(CacheManager):  # type: ignore[misc]
    """Triton's cache of one kernel, which looks into the folder first and writes to the usual one."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._arguments = (key, override, dump)
        self._entry = None if override or dump or _folder is None else _folder / key

    @functools.cached_property
    def _rest(self) -> Any:
        """The usual cache, which makes a folder when it is asked."""
        return _usual(*self._arguments)

    def get_group(self, filename: str) -> dict[str, str] | None:
        found = None if self._entry is None else _good_files(self._entry)
        if found is not None and filename in found:
            return found
        return self._rest.get_group(filename)

    def get_file(self, filename: str) -> str | None:
        return self._kept_module(filename) or self._rest.get_file(filename)

    def _kept_module(self, filename: str) -> str | None:
        """Of `cuda_utils` there is one: since Triton 3.8 its hash depends on where libcuda is."""
        if self._entry is None or not filename.endswith(c_modules.SUFFIX):
            return None
        is_utils = filename == UTILS + c_modules.SUFFIX
        entry = self._entry.parent / UTILS if is_utils else self._entry
        return (_good_files(entry) or {}).get(filename)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        return self._rest.put(data, filename, binary=binary)

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        return self._rest.put_group(filename, group)


_folder: Path | None = None
_usual: Any = FileCacheManager


def use(folder: Path, capability: tuple[int, int]) -> Path | None:
    """Have Triton look into the folder first; where that is. None if the folder is of other versions, or
    Triton looks into no other cache than its own: it warns.

    Raises:
        ValueError: there is no such folder, or others than its owner may write to it or exchange it: kernels
            run as code.
    """
    global _folder, _usual
    given, folder = folder, folder.resolve()  # what a link points to is read, and is what has to be safe
    if reason := _refusal(folder):
        raise ValueError(f"TILEWISE_KERNELS={str(given)!r} must be a folder of compiled kernels: {reason}")
    reason = _mismatch(folder, capability) if HAS_MANAGERS else "this Triton takes no cache but its own"
    if reason:
        warnings.warn(f"TILEWISE_KERNELS={str(given)!r} is not used: {reason}", stacklevel=2)
        return None
    if knobs.cache.manager_class is not FolderFirst:
        _usual = knobs.cache.manager_class or FileCacheManager
        knobs.cache.manager_class = FolderFirst
    _folder = folder
    return folder


def _refusal(folder: Path) -> str | None:
    """Why nothing of a folder may be run, or None."""
    if not (folder / ABOUT).is_file():
        return f"{ABOUT} is not in it; `tilewise warmup --out` writes one"
    for path in (folder, folder / ABOUT):
        if not is_safe(path):
            return f"{path.name} belongs to someone else, or others may write to it: see its owner and mode"
    if hasattr(os, "getuid"):
        mode = folder.parent.stat().st_mode
        if mode & WRITABLE and not mode & stat.S_ISVTX:
            return f"others may write to {str(folder.parent)!r} and put another in its place: see its mode"
    return None


def _mismatch(folder: Path, capability: tuple[int, int]) -> str | None:
    """In what the folder's kernels differ from those that would be compiled here, or None."""
    try:
        there = json.loads((folder / ABOUT).read_bytes())
    except ValueError:
        there = None
    if not isinstance(there, dict):
        return f"{ABOUT} in it is damaged"
    here: Mapping[str, Any] = versions() | {"capability": list(capability)}
    different = [f"{name} {there.get(name)}, not {of}" for name, of in here.items() if there.get(name) != of]
    return f"it has kernels of {'; '.join(different)}" if different else None


def _good_files(entry: Path) -> dict[str, str] | None:
    """The files of a kernel by name; None if there are none, or one is damaged or not safe to run."""
    try:
        checksums = json.loads((entry / CHECKSUMS).read_bytes())
        for path in (entry, *(entry / name for name in (CHECKSUMS, *checksums))):
            if not is_safe(path):
                return None
        found = {name: str(entry / name) for name in checksums}
        is_whole = all(_digest(Path(path).read_bytes()) == checksums[name] for name, path in found.items())
    except (OSError, ValueError, TypeError):
        return None
    return found if is_whole else None
