"""From LLVM IR to a function in memory: target features, code generation, the cache on disk.

A cache file holds the object code of one kernel behind a checksum of it and the key it was built for: this
package's kernel sources, llvmlite's version, the CPU with its features, and the kernel's parameters. A file
is used only if it belongs to this user, nobody else can write to it, and its checksum is that of the wanted
key; anything else is compiled again. Files appear by an atomic rename, so many processes may start at once.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from tilewise.core.kept import lock_for_forks
from tilewise.cpu.host.arguments import Target

CHECKSUM_BYTES = 32
WRITABLE = 0o022  # by a group or by everybody

WANTED_ISA = os.environ.get("TILEWISE_CPU_ISA", "")  # read once: plans are found without it


@dataclass(frozen=True)
class Kernel:
    """A compiled function `void f(char* arguments)` and what its builder says about it.

    Its code goes with the last plan that has it.
    """

    address: int
    call: Any
    facts: dict[str, int]


def unavailable() -> str | None:
    """Why no kernel can be compiled here, or None."""
    if importlib.util.find_spec("llvmlite") is None:
        return "the package llvmlite is not installed"
    try:
        found = target(WANTED_ISA)
    except (ImportError, OSError) as error:  # it was made for another Python, or its library is missing
        return f"the package llvmlite cannot be imported: {error}"
    return found if isinstance(found, str) else None


@functools.lru_cache
def target(wanted: str = "") -> Target | str:
    """This machine's widest supported instruction set, or `wanted` if the machine has it; else the reason."""
    import llvmlite.binding as llvm

    _initialize()
    name, has = llvm.get_host_cpu_name(), _host_features()
    candidates: list[Target] = []
    if platform.machine() in ("x86_64", "AMD64"):
        candidates = _x86_targets(name, has)
    elif platform.machine() in ("aarch64", "arm64"):
        candidates = neon_targets(name, _flat(has), has.get("bf16", False) or _arm_has_bf16())
    for candidate in candidates:
        if wanted in ("", candidate.isa):
            return replace(candidate, l2_bytes=_l2_bytes())
    if wanted and candidates:
        return f"TILEWISE_CPU_ISA={wanted} is not one of {[c.isa for c in candidates]} that this machine has"
    return f"{platform.machine()} lacks AVX2 with FMA and F16C, or NEON"


def _host_features() -> dict[str, bool]:
    import llvmlite.binding as llvm

    try:
        return llvm.get_host_cpu_features()  # type: ignore[no-any-return]
    except RuntimeError:  # LLVM does not ask some systems; the name of the processor implies what it has
        return {}


def _flat(features: dict[str, bool]) -> str:
    return ",".join(("+" if has else "-") + name for name, has in sorted(features.items()))


def _x86_targets(name: str, has: dict[str, bool]) -> list[Target]:
    """Best first."""
    candidates, features = [], _flat(has)
    if all(has.get(f) for f in ("avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl")):
        plain = Target("avx512", 64, 8, name, f"{features},-prefer-256-bit")
        if all(has.get(f) for f in ("amx-tile", "amx-bf16", "avx512bf16")) and may_use_amx():
            candidates.append(replace(plain, isa="amx"))
        dots = [replace(plain, isa="avx512_bf16")] if has.get("avx512bf16") else []
        # Twice as fast as multiply-adds on AMD's processors, no faster on Intel's.
        candidates += [*dots, plain] if name.startswith("znver") else [plain, *dots]
    if all(has.get(f) for f in ("avx2", "fma", "f16c")):
        narrow = ",".join(f for f in features.split(",") if "avx512" not in f and "avx10" not in f)
        candidates.append(Target("avx2", 32, 4, "x86-64-v3", f"{narrow},-avx512f"))
    return candidates


def neon_targets(name: str, features: str, has_bf16: bool) -> list[Target]:
    """Best first. Without SVE, which LLVM would take for a few operations of NEON's vectors."""
    plain = Target("neon", 16, 8, name, f"{features},-sve")
    dots = [replace(plain, isa="neon_bf16", features=f"{plain.features},+bf16")] if has_bf16 else []
    return [*dots, plain]


def _arm_has_bf16() -> bool:
    """What Linux and macOS say of `bfdot`: LLVM asks neither."""
    if sys.platform == "linux":
        hardware, bf16 = 26, 1 << 14  # AT_HWCAP2, HWCAP2_BF16
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
        return bool(getauxval(hardware) & bf16)
    if sys.platform == "darwin":
        found, size, name = ctypes.c_int(0), ctypes.c_size_t(4), b"hw.optional.arm.FEAT_BF16"
        sysctl = ctypes.CDLL(None).sysctlbyname
        failed = sysctl(name, ctypes.byref(found), ctypes.byref(size), None, ctypes.c_size_t(0))
        return not failed and found.value == 1
    return False


def _l2_bytes(size_file: Path = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")) -> int:
    """Of this machine, or 1 MB where it does not say; between 512 KB and 2 MB, as large ones are shared."""
    try:
        found = int(size_file.read_text().strip().removesuffix("K")) << 10
    except (OSError, ValueError):
        return 1 << 20
    return min(max(found, 512 << 10), 2 << 20)


def may_use_amx() -> bool:
    """Ask Linux for the tile registers, which it gives to a process that says it wants them."""
    if sys.platform != "linux":
        return False
    arch_prctl, ask_for_state, tile_data = 158, 0x1023, 18  # x86-64
    return ctypes.CDLL(None).syscall(arch_prctl, ask_for_state, tile_data) == 0


def current_target() -> Target:
    found = target(WANTED_ISA)
    if isinstance(found, str):
        raise NotImplementedError(f"no LLVM kernel here: {found}; backend 'tiled' serves")
    return found


@functools.cache
def _initialize() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


_lock = lock_for_forks()  # for all that is asked of LLVM: a child must not find it at work for another thread
_loaded: weakref.WeakValueDictionary[tuple, Kernel] = weakref.WeakValueDictionary()  # plans own them
_unused: list[Any] = []  # engines of kernels that no plan has any more
_engines: weakref.WeakSet[Any] = weakref.WeakSet()  # all that there are


@atexit.register
def _leave_code() -> None:
    """At exit a daemon thread may be inside of a kernel: its code stays where it is."""
    for engine in list(_engines):
        engine.detach()


def load(name: str, config: Any) -> Kernel:
    """The kernel `name` for `config` (a frozen dataclass): from memory, from disk, or from LLVM."""
    machine = current_target()
    key = (name, config, machine)
    kernel = _loaded.get(key)
    if kernel is None:
        with _lock:
            _unused.clear()
            kernel = _loaded.get(key) or _load(name, config, machine)
            _loaded[key] = kernel
    return kernel


def _load(name: str, config: Any, machine: Target) -> Kernel:
    text = json.dumps(
        [_sources_hash(), _llvmlite_version(), sys.platform, name, astuple(machine), astuple(config)]
    )
    path = cache_dir() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}.kernel"
    stored = _read(path, text)
    if stored is None:
        from tilewise.cpu.kernels.build import build

        with _no_collection():
            ir_text, facts = build(name, config, machine)
        stored = facts, generate(ir_text, machine)
        _write(path, text, *stored)
    facts, code = stored
    return _kernel(name, code, facts, machine)


def _kernel(name: str, code: bytes, facts: dict[str, int], machine: Target) -> Kernel:
    engine = _link(code, machine)
    address = engine.get_function_address(name)
    kernel = Kernel(address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), facts)
    weakref.finalize(kernel, _unused.append, engine).atexit = False
    return kernel


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's search for garbage, which the many objects of IR start again and again.

    It looks at the whole program's objects: beside transformers it takes longer than all the rest.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def generate(ir_text: str, machine: Target, triple: str | None = None) -> bytes:
    """Object code. The only pass run on the IR is SROA: the kernels are written as they should come out."""
    import llvmlite.binding as llvm

    if triple is not None:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(ir_text)
    module.verify()
    machine_code = _target_machine(machine, triple)
    tuning = llvm.create_pipeline_tuning_options(speed_level=1)
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.run(module, llvm.create_pass_builder(machine_code, tuning))
    return machine_code.emit_object(module)


def _target_machine(machine: Target, triple: str | None = None) -> Any:
    import llvmlite.binding as llvm

    found = llvm.Target.from_triple(triple) if triple else llvm.Target.from_default_triple()
    return found.create_target_machine(cpu=machine.cpu, features=machine.features, opt=2, jit=triple is None)


def _link(code: bytes, machine: Target) -> Any:
    """An engine that owns the code of one kernel: it frees all, where a shared one would keep a part."""
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(machine))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.add(engine)
    return engine


@functools.cache
def _sources_hash() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in kernel_sources())).hexdigest()


def kernel_sources() -> list[Path]:
    """All that kernels are made from: the generator's files, and those of the core that it reads."""
    here = Path(__file__)
    package, files = here.parents[2], "*" + here.suffix  # .pyc where there are no sources
    if not package.exists():  # inside of a ZIP archive
        return [path for path in package.parents if path.is_file()]
    return [path for name in ("cpu", "core") for path in sorted((package / name).rglob(files))]


@functools.cache
def _llvmlite_version() -> str:
    return importlib.metadata.version("llvmlite")


def cache_dir() -> Path:
    """`$TILEWISE_CACHE_DIR`, or `tilewise` in the user's cache directory."""
    if os.environ.get("TILEWISE_CACHE_DIR"):
        return Path(os.environ["TILEWISE_CACHE_DIR"])
    try:
        home = Path.home()
    except RuntimeError:  # of a user whom the system does not know: in no file is a folder
        home = Path(os.devnull)
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData/Local")) / "tilewise"
    if sys.platform == "darwin":
        return home / "Library/Caches/tilewise"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "tilewise"


def _checksum(key: str, body: bytes) -> bytes:
    return hashlib.sha256(key.encode() + body).digest()


def _read(path: Path, key: str) -> tuple[dict[str, int], bytes] | None:
    """Facts and code of a cache file that is whole, only this user's, and made for this key; else None."""
    try:
        with open(path, "rb") as file:
            state = os.fstat(file.fileno())
            if hasattr(os, "getuid") and (state.st_uid != os.getuid() or state.st_mode & WRITABLE):
                return None
            checksum, body = file.read(CHECKSUM_BYTES), file.read()
    except OSError:
        return None
    if checksum != _checksum(key, body):
        return None
    facts, _, code = body.partition(b"\n")
    return json.loads(facts), code


def _write(path: Path, key: str, facts: dict[str, int], code: bytes) -> None:
    body = json.dumps(facts).encode() + b"\n" + code
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "wb") as file:
            file.write(_checksum(key, body) + body)
        os.replace(temporary, path)
        temporary = None
    except OSError:  # no cache directory to write to, or a full one: every process compiles for itself
        pass
    finally:  # of an interrupt too
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
