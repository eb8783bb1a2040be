"""The kernel cache on disk: reused, never trusted, safe for many processes and after fork."""

from __future__ import annotations

import ast
import gc
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import tilewise
from tilewise.core.functions.trace import trace
from tilewise.cpu.host import compile as kernels, parallel
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.kernels import build as builder
from tilewise.cpu.kernels.common.functions import KernelFunctions

TESTS = Path(__file__).parents[2]
CALL = """
import sys, torch
from backends import Backend
llvm = Backend("llvm")
from tilewise.core.problem import Inputs, Options, describe
torch.manual_seed(0)
inputs = Inputs(*(torch.randn(1, 40, 2, 16) for _ in range(3)))
out, lse = llvm.forward(describe(inputs, Options()), inputs)
q, k, v = (t.transpose(1, 2) for t in inputs[:3])
torch.testing.assert_close(out.transpose(1, 2), torch.nn.functional.scaled_dot_product_attention(q, k, v))
"""


def start(code: str, cache) -> subprocess.Popen:
    environment = os.environ | {"TILEWISE_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment.get("PYTHONPATH", "")])
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> None:
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors


@pytest.mark.slow
def test_processes_may_start_at_once_and_later_ones_do_not_build(tmp_path):
    for process in [start(CALL, tmp_path) for _ in range(2)]:
        finish(process)
    assert [path.suffix for path in tmp_path.iterdir()] == [".kernel"]  # one file, nothing half-written
    finish(start(CALL + "assert 'tilewise.cpu.dsl.vector' not in sys.modules", tmp_path))


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    config = Config("f32", 8, 8, 1)
    kernels._load("forward", config, kernels.current_target())
    (path,) = tmp_path.iterdir()
    return config, path


def builds(config, monkeypatch) -> bool:
    """Whether loading the kernel compiles it."""
    calls, generate = [], kernels.generate
    monkeypatch.setattr(kernels, "generate", lambda *a: calls.append(1) or generate(*a))
    kernels._load("forward", config, kernels.current_target())
    return bool(calls)


def test_a_whole_file_is_loaded(stored, monkeypatch):
    assert not builds(stored[0], monkeypatch)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "garbage"])
def test_a_damaged_file_is_compiled_again(stored, monkeypatch, damage):
    config, path = stored
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(
        {"flip": bytes(content), "truncate": path.read_bytes()[:-9], "empty": b"", "garbage": b"x" * 999}[
            damage
        ]
    )
    assert builds(config, monkeypatch)
    assert not builds(config, monkeypatch)  # and the file is whole again


def test_a_file_of_a_checksum_without_the_key_is_compiled_again(stored, monkeypatch):
    config, path = stored
    body = path.read_bytes()[kernels.CHECKSUM_BYTES :]
    path.write_bytes(hashlib.sha256(body).digest() + body)
    assert builds(config, monkeypatch)
    assert not builds(config, monkeypatch)


def test_a_full_disk_leaves_nothing_behind(monkeypatch, tmp_path):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels.os, "replace", no_space)
    assert kernels._load("forward", Config("f32", 8, 8, 1), kernels.current_target()).address
    assert not list(tmp_path.iterdir())


def test_an_interrupt_leaves_nothing_behind(monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernels._load("forward", Config("f32", 8, 8, 1), kernels.current_target())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_in_call", [True, False])
def test_an_interrupt_waits_for_the_threads_of_a_call(is_in_call):
    """They write to memory that its caller then frees. As in a forked child, where OpenMP has no threads."""
    done, main, is_sent = [], threading.current_thread(), threading.Event()

    def interrupt():
        signal.pthread_kill(main.ident, signal.SIGINT)
        is_sent.set()

    def call(_):
        if threading.current_thread() is not main:
            is_sent.wait()
            time.sleep(0.1)
            done.append(1)
        elif is_in_call:
            is_sent.set()
            raise KeyboardInterrupt
        else:  # comes while the main thread waits for the others
            threading.Timer(0.1, interrupt).start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's `&`
    try:
        with pytest.raises(KeyboardInterrupt):
            parallel._Pool()(call, 0, 4)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(done) == 3


def test_code_stays_where_it_is_at_exit(stored, monkeypatch):
    """Daemon threads may be inside of it."""
    kernel = kernels._load("forward", stored[0], kernels.current_target())
    engines = [e for e in kernels._engines if e.get_function_address("forward") == kernel.address]
    monkeypatch.setattr(kernels, "_engines", engines)
    kernels._leave_code()
    assert len(engines) == 1 and engines[0].closed


def test_a_file_made_for_something_else_is_not_loaded(stored, monkeypatch):
    config, path = stored
    machine = kernels.current_target()
    kernels._load("forward", Config("f32", 9, 9, 1), machine)
    (other,) = set(path.parent.iterdir()) - {path}
    path.write_bytes(other.read_bytes())
    assert builds(config, monkeypatch)


def test_another_llvmlite_or_cpu_gets_its_own_file(stored, monkeypatch):
    monkeypatch.setattr(kernels, "_llvmlite_version", lambda: "0.0.1")
    assert builds(stored[0], monkeypatch)
    assert len(list(stored[1].parent.iterdir())) == 2


def test_garbage_is_not_looked_for_while_a_kernel_is_built(monkeypatch, tmp_path):
    seen, build = [], builder.build
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(builder, "build", lambda *a: (seen.append(gc.isenabled()), build(*a))[1])
    kernels._load("forward", Config("f32", 8, 8, 1), kernels.current_target())
    assert seen == [False] and gc.isenabled()


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_to_is_compiled_again(stored, monkeypatch, mode):
    stored[1].chmod(mode)
    assert builds(stored[0], monkeypatch)
    assert not builds(stored[0], monkeypatch)


def test_nothing_of_a_builder_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))
    text = trace(lambda b, h, i, j: i >= j, lambda s, *_: s * 1.5).functions.text
    kernels._load("forward", Config("f32", 8, 8, 1, functions=text), kernels.current_target())
    gc.collect()
    assert not [found for found in gc.get_objects() if type(found) is KernelFunctions]


def test_a_broken_llvmlite_leaves_the_other_backends(monkeypatch):
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    monkeypatch.delattr("llvmlite.binding")
    kernels.target.cache_clear()
    assert "llvmlite cannot be imported" in str(kernels.unavailable())


def test_no_home_is_no_error(monkeypatch):
    """Of a user whom the system does not know, as in containers."""

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    for name in ("TILEWISE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert kernels._load("forward", Config("f32", 8, 8, 1), kernels.current_target()).address


def test_no_place_to_write_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert kernels._load("forward", Config("f32", 8, 8, 1), kernels.current_target()).address


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_calls_and_answers(tmp_path):
    threads = torch.get_num_threads()
    assert threads >= 1
    code = CALL + (
        "import os\n"
        "torch.set_num_threads(2)\n"
        "llvm.forward(describe(inputs, Options()), inputs)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    again, _ = llvm.forward(describe(inputs, Options()), inputs)\n"
        "    os._exit(0 if torch.equal(again, out) else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    finish(start(code, tmp_path))


@pytest.mark.parametrize(
    ("said", "expected"),
    [("2048K\n", 2 << 20), ("1024K\n", 1 << 20), ("64K\n", 512 << 10), ("65536K\n", 2 << 20), ("", 1 << 20)],
)
def test_blocks_are_cut_to_the_l2_cache_of_the_machine(tmp_path, said, expected):
    size_file = tmp_path / "size"
    size_file.write_text(said)
    assert kernels._l2_bytes(size_file) == expected
    assert kernels._l2_bytes(tmp_path / "missing") == 1 << 20


def test_a_stored_kernel_is_known_by_all_that_it_is_made_from():
    """Whatever module of ours the generator imports counts: a stored kernel is not that of other sources."""
    known = set(kernels.kernel_sources())
    package = Path(tilewise.__file__).parent
    for path in (*(package / "cpu" / "kernels").rglob("*.py"), *(package / "cpu" / "dsl").rglob("*.py")):
        assert path in known
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tilewise."):
                module = package.joinpath(*str(node.module).split(".")[1:])
                found = {module.with_suffix(".py"), *(module / f"{n.name}.py" for n in node.names)} & known
                assert found, (path, node.module)


def test_an_archive_of_other_sources_has_other_kernels(tmp_path, monkeypatch):
    archive = tmp_path / "library.zip"
    archive.write_bytes(b"")
    monkeypatch.setattr(kernels, "__file__", str(archive / "tilewise" / "cpu" / "host" / "compile.py"))
    assert kernels.kernel_sources() == [archive]
