"""A kernel launched by a plan is given, byte for byte, what Triton itself gives it; this needs no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
if sys.platform != "linux" or shutil.which("gcc") is None:
    pytest.skip("builds a library for Triton's launcher with gcc", allow_module_level=True)

FOLDER = Path(__file__).parent / "launcher"


def test_a_plan_gives_kernels_what_triton_gives_them(tmp_path):
    record(tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize("hidden", ["CudaLauncher", "make_tensordesc_arg", "driver"])
def test_a_triton_without_private_names_gives_kernels_the_same(tmp_path, hidden):
    """It launches by itself then."""
    record(tmp_path, hidden)


def record(tmp_path: Path, hidden: str = "") -> None:
    from triton.backends.nvidia import driver

    library = tmp_path / "libcuda.so.1"
    include = Path(driver.__file__).parent / "include"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-I{include}", str(FOLDER / "libcuda.c"), "-o", str(library)], check=True
    )
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_INTERPRET": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "HIDDEN": hidden,
    }
    done = subprocess.run(
        [sys.executable, str(FOLDER / "record.py")], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and "equal with triton" in done.stdout, done.stderr[-3000:]
