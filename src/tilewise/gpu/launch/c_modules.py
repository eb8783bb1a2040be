"""The C modules that Triton launches kernels by, compiled ahead: a GPU's machine then needs no C compiler.

Triton compiles them as it meets them. `cuda_utils` calls CUDA's driver and, since Triton 3.7, launches every
kernel; before, each kernel has a launcher of its own. Both are linked to libcuda, which need not be here: an
empty library of its name is enough, as the linker only notes what is to be loaded.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from tilewise.gpu.launch.triton_private import INCLUDE_DIRS, LAUNCHER, UTILS, launcher_source, utils_source

SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
LIBCUDA = "libcuda.so.1"


def utils() -> bytes | None:
    """`UTILS`, compiled; None without a C compiler and Python's headers."""
    source = utils_source()
    return None if source is None else _compiled(source, UTILS)


def launcher(compiled: Any) -> tuple[str, bytes] | None:
    """The key of a kernel's own launcher in Triton's cache, and the launcher; None if there is none."""
    found = launcher_source(compiled)
    if found is None:
        return None
    key, source = found
    module = _compiled(source, LAUNCHER)
    return None if module is None else (key, module)


@functools.cache  # kernels of like arguments have the same launcher
def _compiled(source: str, name: str) -> bytes | None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        code, nothing, module = (Path(folder) / file for file in ("module.c", "nothing.c", name + SUFFIX))
        code.write_text(source)
        nothing.write_text("")
        shared = [compiler, "-shared", "-fPIC"]
        includes = [f"-I{path}" for path in (*INCLUDE_DIRS, sysconfig.get_config_var("INCLUDEPY"))]
        link = [f"-L{folder}", "-Wl,--no-as-needed", f"-l:{LIBCUDA}"]
        commands = (
            [*shared, str(nothing), f"-Wl,-soname,{LIBCUDA}", "-o", str(Path(folder) / LIBCUDA)],
            [*shared, "-O3", "-Wno-psabi", str(code), *includes, *link, "-o", str(module)],
        )
        try:
            for command in commands:
                subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return module.read_bytes()
