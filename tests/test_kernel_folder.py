"""A folder of compiled kernels: what is compiled on meta tensors is what a GPU's machine launches."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

pytest.importorskip("triton")
if sys.platform != "linux" or shutil.which("gcc") is None:
    pytest.skip("builds a library for Triton's launcher with gcc", allow_module_level=True)

SCRIPT = Path(__file__).parent / "launcher"
LOADED = ["loaded append_kernel", "loaded attn_fwd_kernel"]
Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """Runs the script over a libcuda of its own, with an empty cache of Triton's; its lines."""
    from triton.backends.nvidia import driver

    root = tmp_path_factory.mktemp("folder")
    include = Path(driver.__file__).parent / "include"
    library = root / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-I{include}", str(SCRIPT / "libcuda.c"), "-o", str(library)], check=True
    )
    count = 0

    def run(
        *arguments: str,
        folder: Path | None = None,
        error: str | None = None,
        compiler: str = "gcc",
        hidden: str = "",
    ) -> list[str]:
        nonlocal count
        count += 1
        environment = {name: value for name, value in os.environ.items() if name != "TILEWISE_KERNELS"} | {
            "LD_LIBRARY_PATH": str(root),
            "TRITON_LIBCUDA_PATH": str(root),
            "TRITON_CACHE_DIR": str(root / f"cache{count}"),
            "TRITON_INTERPRET": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "CC": compiler,
            "HIDDEN": hidden,
        }
        if folder is not None:
            environment["TILEWISE_KERNELS"] = str(folder)
        command = [sys.executable, str(SCRIPT / "folder.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if error is not None:
            assert done.returncode != 0 and re.search(error, done.stderr), done.stderr[-3000:]
        else:
            assert done.returncode == 0, done.stderr[-3000:]
        said = ("loaded", "compiled", "warning")
        return [line for line in done.stdout.splitlines() if line.startswith(said)]

    return run


@pytest.fixture(scope="module")
def filled(run: Run, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kernels") / "h200"
    run("fill", str(folder))
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    """A copy in another place."""
    return Path(shutil.copytree(filled, tmp_path / "moved"))


def entry_of(folder: Path, kernel: str) -> Path:
    return next(folder.glob(f"*/{kernel}.cubin")).parent


def test_a_moved_folder_is_loaded_and_nothing_compiled(run, folder):
    assert run("call", folder=folder, compiler="false") == LOADED  # nor C
    assert {path.suffix for path in folder.glob("*/*")} == {".cubin", ".json", ".so", ""}


def test_a_folder_has_the_hash_of_this_very_triton(folder, monkeypatch, tmp_path):
    from triton.runtime import cache

    from tilewise.gpu.launch import triton_key

    def refuse() -> str:
        raise AssertionError("it was computed")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    found = cache.triton_key()
    monkeypatch.setattr(cache, "triton_key", refuse)
    triton_key.keep.__wrapped__(folder)
    assert cache.triton_key() == found and not (tmp_path / "cache").exists()


def test_a_damaged_module_is_compiled(run, folder):
    module = next(folder.glob("cuda_utils/*.so"))
    module.write_bytes(module.read_bytes()[:-1])
    run("call", folder=folder, compiler="false", error="'false', '")
    assert run("call", folder=folder) == LOADED
    module.write_bytes(b"no library")  # such as one that needs a newer C library
    (module.parent / "checksums").write_text(json.dumps({module.name: sha256(b"no library").hexdigest()}))
    assert run("call", folder=folder) == LOADED


def test_without_a_compiler_kernels_alone_are_kept(run, tmp_path):
    run("fill", str(tmp_path / "kernels"), compiler="false")
    assert {path.suffix for path in tmp_path.glob("kernels/*/*")} == {".cubin", ".json", ""}


COMPILED = ["compiled append_kernel", "compiled attn_fwd_kernel"]
WITHOUT = {  # names of Triton's: hidden from who fills a folder, and from who calls; what the latter says
    "compiling together": ("active_mode", "active_mode", LOADED),
    "Triton's hash": ("_update_hash", "triton_key _update_hash", LOADED),
    "C modules": ("dirname make_launcher", "make_launcher", LOADED),
    "managers": ("CacheManager", "FileCacheManager", COMPILED),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("names", WITHOUT)
def test_a_triton_without_private_names_compiles_and_loads_the_same(run, tmp_path, names):
    filling, calling, said = WITHOUT[names]
    folder = tmp_path / "kernels"
    run("fill", str(folder), hidden=filling)
    found = run("call", folder=folder, hidden=calling)
    assert [line for line in found if not line.startswith("warning")] == said
    assert any("is not used: this Triton takes no cache but its own" in x for x in found) is (
        said == COMPILED
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "error"), [("GPUTarget", "the GPU that is here alone"), ("metadata_group", "has put a kernel")]
)
def test_a_folder_that_can_not_be_filled_is_refused(run, tmp_path, name, error):
    run("fill", str(tmp_path / "kernels"), hidden=name, error=f"NotImplementedError: this Triton .*{error}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", ["cubin", "json", "checksums", "gone", "mode"])
def test_a_damaged_kernel_is_compiled_and_the_rest_loaded(run, folder, damage):
    entry = entry_of(folder, "append_kernel")
    if damage == "checksums":
        (entry / "checksums").write_text("{")
    elif damage == "gone":
        shutil.rmtree(entry)
    elif damage == "mode":
        (entry / "append_kernel.cubin").chmod(0o666)
    else:
        path = entry / f"append_kernel.{damage}"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert run("call", folder=folder) == ["compiled append_kernel", LOADED[1]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["", "tilewise-kernels.json"], ids=["folder", "file"])
def test_a_place_that_others_may_write_to_is_refused(run, folder, name):
    (folder / name).chmod(0o777)
    run("call", folder=folder, error="must be a folder of compiled kernels")


@pytest.mark.parametrize(("mode", "is_refused"), [(0o777, True), (0o775, True), (0o1777, False)])
def test_a_folder_that_others_may_replace_is_refused(tmp_path, monkeypatch, mode, is_refused):
    """But not in a place like /tmp, nor for a link to it."""
    from triton import knobs

    from tilewise.gpu.launch import kernel_folder
    from tilewise.gpu.launch.gpus import GPUS

    monkeypatch.setattr(kernel_folder, "_folder", None)
    monkeypatch.setattr(knobs.cache, "manager_class", kernel_folder.FolderFirst)
    folder, link = tmp_path / "place" / "kernels", tmp_path / "link"
    kernel_folder.create(folder, GPUS["h200"])
    link.symlink_to(folder)
    folder.parent.chmod(mode)
    for path in (folder, link):
        if is_refused:
            with pytest.raises(ValueError, match=f"{path.name}' must .*others may write to .*place' and put"):
                kernel_folder.use(path, (9, 0))
        else:
            kernel_folder.use(path, (9, 0))
            assert kernel_folder._folder == folder


def test_what_is_no_folder_of_kernels_is_refused(run, tmp_path):
    run("call", folder=tmp_path, error="tilewise-kernels.json is not in it")


def test_a_folder_of_another_version_is_said_once(tmp_path, monkeypatch):
    from triton import knobs

    from tilewise.gpu.launch import kernel_folder, launch_plan
    from tilewise.gpu.launch.gpus import GPUS

    folder = tmp_path / "kernels"
    kernel_folder.create(folder, GPUS["h200"])
    about = folder / kernel_folder.ABOUT
    about.write_text(json.dumps(json.loads(about.read_text()) | {"triton": "3.0.0"}))
    monkeypatch.setenv("TILEWISE_KERNELS", str(folder))
    monkeypatch.setattr(launch_plan, "gpu_of", lambda index: GPUS["h200"])
    monkeypatch.setattr(launch_plan, "is_interpreted", lambda: False)
    launch_plan._use_kernel_folder.cache_clear()
    with pytest.warns(UserWarning, match=r"is not used: it has kernels of triton 3\.0\.0, not") as said:
        launch_plan._use_kernel_folder()
        launch_plan._use_kernel_folder()
    assert len(said) == 1 and knobs.cache.manager_class is None
    with pytest.raises(ValueError, match=r"must be a new folder: it has kernels of triton 3\.0\.0"):
        kernel_folder.create(folder, GPUS["h200"])
    kernel_folder.create(tmp_path / "other", GPUS["a100"])
    with pytest.warns(UserWarning, match=r"kernels of capability \[8, 0\], not \[9, 0\]"):
        kernel_folder.use(tmp_path / "other", (9, 0))
    launch_plan._use_kernel_folder.cache_clear()


def test_an_archive_of_other_sources_has_other_kernels(tmp_path, monkeypatch):
    from tilewise.gpu.launch import kernel_folder

    archive = tmp_path / "library.zip"
    monkeypatch.setattr(kernel_folder, "__file__", str(archive / "tilewise/gpu/launch/kernel_folder.py"))
    found = set()
    for content in (b"one", b"another"):
        archive.write_bytes(content)
        found.add(kernel_folder.versions()["kernels"])
    assert len(found) == 2


@pytest.mark.slow
def test_the_command_compiles_what_a_model_launches(tmp_path):
    from typer.testing import CliRunner

    from tilewise.cli import _app

    out = tmp_path / "kernels"
    options = ["--gpu", "a100", "--for", "2/1/32", "--batch", "1", "--seqlen", "64", "--no-backward"]
    done = CliRunner().invoke(_app(), ["warmup", *options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    names = [path.stem for path in out.glob("*/*.cubin")]
    assert {"attn_fwd_kernel", "append_kernel"} <= set(names) and f"{len(names)} kernels" in done.output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--gpu", "x", "must be one of"),
        ("--for", "x", "HEADS/KV_HEADS/HEAD_DIM"),
        ("--for", "64/7/128", "must have HEADS that KV_HEADS divide"),
        ("--batch", "x", "must be numbers from 1"),
        ("--seqlen", "99999999999999999999", "must be numbers from 1"),
        ("--out", __file__, "Not a directory"),
    ],
)
def test_wrong_arguments_of_the_command(option, value, message, tmp_path):
    from typer.testing import CliRunner

    from tilewise.cli import _app

    done = CliRunner().invoke(_app(), ["warmup", "--out", str(tmp_path / "kernels"), option, value])
    assert done.exit_code == 2 and message in done.output


def test_triton_hashes_itself_once_as_long_as_its_files_are_the_same(tmp_path, monkeypatch):
    import triton
    from triton.runtime import cache

    from tilewise.gpu.launch import triton_key

    code = tmp_path / "triton"
    code.mkdir()
    (code / "__init__.py").write_text("")
    monkeypatch.setattr(triton, "__file__", str(code / "__init__.py"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    key, computed = f"{triton.__version__}-abc", []

    def process() -> int:
        """How often one computes the key."""
        computed.clear()
        monkeypatch.setattr(cache, "triton_key", lambda: computed.append(1) or key)
        triton_key.keep.__wrapped__()
        assert cache.triton_key() == key
        return len(computed)

    assert [process() > 0 for _ in range(3)] == [True, False, False]
    kept = next((tmp_path / "cache").iterdir())
    kept.chmod(0o666)  # others could have written it
    assert process() > 0
    kept.write_text("another version")
    assert process() > 0 and process() == 0
    (code / "added.py").write_text("x = 1")
    assert process() > 0 and process() == 0
    (tmp_path / "backend").mkdir()
    (code / "backend").symlink_to(tmp_path / "backend")  # of an editable install
    (tmp_path / "backend" / "compiler.py").write_text("x = 1")
    assert process() > 0 and process() == 0
    (code / ".#gone.py").symlink_to(code / "gone.py")  # an editor's lock
    assert process() > 0
    monkeypatch.setenv("TRITON_CACHE_DIR", str(code / "__init__.py" / "no folder"))
    assert process() > 0
    monkeypatch.delattr(cache, "triton_key")  # a release that has none
    triton_key.keep.__wrapped__()


KEYS = """
import sys
from tilewise.gpu.launch import triton_key
triton_key.hash_callees_first()
from tilewise.gpu.hopper.backward.kernel import attn_bwd_kernel
from tilewise.gpu.hopper.decode.kernel import attn_decode_kernel
from tilewise.gpu.hopper.forward.kernel import attn_fwd_kernel
from tilewise.gpu.hopper.fp8.kernel import attn_fwd_fp8_kernel
kernels = [attn_bwd_kernel, attn_decode_kernel, attn_fwd_kernel, attn_fwd_fp8_kernel]
keys = {kernel.__name__: kernel.cache_key for kernel in (kernels if "forward" in sys.argv else kernels[::-1])}
print(sorted(keys.items()))
for kernel in kernels:
    values = {}
    for (name, _), (value, _) in kernel.used_global_vals.items():
        if type(value).__name__ == "constexpr":
            assert values.setdefault(name, repr(value)) == repr(value), (name, values[name], value)
"""


def test_a_kernel_has_the_same_key_in_every_process():
    """Whatever was hashed before. Constants of one name have one value: Triton sorts them by addresses."""
    found = [
        subprocess.run([sys.executable, "-c", KEYS, order], capture_output=True, text=True, check=True).stdout
        for order in ("forward", "backward")
    ]
    assert found[0] == found[1] and "attn_bwd_kernel" in found[0]
