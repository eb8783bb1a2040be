"""Everything of Triton below its public functions, with a plain way where it is missing.

Checked with Triton 3.6 to 3.9; names of Gluon stand in `gpu/hopper/common/compat`. Where a name is missing,
Triton launches, compiles and caches as it does by itself: `tests/test_private_names.py` sees that no name
stands elsewhere, `tests/test_launcher.py` hides them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from triton import FutureKernel, knobs


def _found(module: str, name: str = "") -> Any:
    """A module of Triton's, or a name in it; None where there is none."""
    try:
        found = importlib.import_module(f"triton.{module}")
        return getattr(found, name) if name else found
    except (ImportError, AttributeError):
        return None


_nvidia, _cache = _found("backends.nvidia.driver"), _found("runtime.cache")
_Launcher: Any = getattr(_nvidia, "CudaLauncher", None)
_encode: Any = getattr(_nvidia, "make_tensordesc_arg", None)
_driver = _found("runtime.driver", "driver")
_GPUTarget = _found("backends.compiler", "GPUTarget")


# ---- launching


class CLaunch(NamedTuple):
    """The C function below Triton's launch of a kernel, on a grid.

    It takes a stream of the current device, `rest`, and the kernel's arguments, as one list if `takes_list`.
    Of these pointers are integers or None; a TMA descriptor is the items that `encode` returns. Triton's own
    launch prepares what profilers are told and encodes every descriptor: several times as long as the rest.
    """

    start: Callable[..., None]
    rest: tuple[Any, ...]
    takes_list: bool
    current_stream: Callable[[int], int]  # of a device by its number
    encode: Callable[[int, Any], list[Any]]  # descriptor number n: what was encoded, then shape and strides
    # gives the two functions by which profilers are told of launches, or their lists in `calls`
    hooks: Callable[[], Any] = partial(attrgetter("launch_enter_hook", "launch_exit_hook"), knobs.runtime)


def c_launch(compiled: Any, grid: tuple[int, int, int]) -> CLaunch | None:
    """None if only Triton can launch the kernel, or keeps what this takes elsewhere."""
    try:
        return _c_launch(compiled, grid)
    except (AttributeError, KeyError):
        return None


def _c_launch(compiled: Any, grid: tuple[int, int, int]) -> CLaunch | None:
    launcher = compiled.run
    if None in (_Launcher, _encode, _driver):
        return None
    if not isinstance(launcher, _Launcher) or getattr(launcher, "gsan_enabled", False):
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    no_scratch, no_hooks = (None, None), (None, None, None)
    rest: tuple[Any, ...]
    is_shared = hasattr(_driver.active.utils, "launch")  # since 3.7: one C function for all kernels
    options = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    if is_shared:
        launch, kinds = _driver.active.utils.launch, (launcher.arg_annotations, launcher.kernel_signature)
        rest = (*options, compiled.packed_metadata, *no_hooks, *no_scratch, *kinds)
    else:
        launch = _unwrapped(launcher.launch)
        rest = (*options, *no_scratch, compiled.packed_metadata, *no_hooks)
    current_stream = _driver.active.get_current_stream
    return CLaunch(partial(launch, *grid), rest, is_shared, current_stream, _encoder(compiled))


def _unwrapped(launch: Any) -> Any:
    """The C function of a kernel, below the Python function that encodes its descriptors if it has any."""
    return inspect.getclosurevars(launch).nonlocals["launcher"] if inspect.isfunction(launch) else launch


def _encoder(compiled: Any) -> Callable[[int, Any], list[Any]]:
    # releases differ in what else they hand it, which it does not read
    unused = (None,) * (len(inspect.signature(_encode).parameters) - 2)
    return lambda index, descriptor: _encode(descriptor, compiled.metadata.tensordesc_meta[index], *unused)


# ---- compiling


# Holds the `AsyncCompileMode` that is on; without it kernels are compiled in turn.
active_mode = _found("runtime._async_compile", "active_mode")


def make_launcher(compiled: Any) -> None:
    """Before Triton 3.7: compile a kernel's launcher in C, which a launch then finds in Triton's cache."""
    active = getattr(_driver, "active", None)
    make = getattr(active, "launcher_cls", None)  # none of a GPU that is not here
    if make is not None and hasattr(_nvidia, "make_launcher"):
        with contextlib.suppress(Exception):  # the launch will raise it
            make(compiled.src, compiled.metadata)


def forget_failed(kernel: Any) -> None:
    """Have Triton compile anew what it could not: 3.7 and 3.8 keep the error, an interrupt leaves nothing."""
    for kernels, *_ in getattr(kernel, "device_caches", {}).values():
        for key, compiled in list(kernels.items()):
            if isinstance(compiled, FutureKernel):
                kernels.pop(key, None)


class CompileOnlyDriver:
    """Stands where Triton asks which GPU there is."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = _GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_device(self) -> int:
        return -int(self._target.arch)  # kernels are kept by this number: each architecture has its own

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


@contextlib.contextmanager
def target(capability: tuple[int, int]) -> Iterator[None]:
    """Inside, Triton compiles for such a GPU.

    Raises:
        NotImplementedError: this Triton takes no other GPU than the one that is here.
    """
    if _GPUTarget is None or not hasattr(_driver, "_active"):
        raise NotImplementedError("this Triton compiles for the GPU that is here alone")
    before = _driver._active
    _driver.set_active(CompileOnlyDriver(capability))
    try:
        yield
    finally:
        _driver._active = before


# ---- what is compiled, and Triton's cache of it

UTILS, LAUNCHER = "cuda_utils", "__triton_launcher"  # C modules
INCLUDE_DIRS: list[str] = getattr(_nvidia, "include_dirs", [])  # of their headers
# The interface of a cache, and the usual one; without both, kernels of a folder cannot be given to Triton.
CacheManager: Any = getattr(_cache, "CacheManager", object)
FileCacheManager: Any = getattr(_cache, "FileCacheManager", None)
HAS_MANAGERS = CacheManager is not object and FileCacheManager is not None


def files_of(compiled: Any) -> tuple[str, dict[str, str]]:
    """A kernel's hash, and by their names the paths of the files that it was compiled to.

    Raises:
        NotImplementedError: this Triton does not tell.
    """
    files = getattr(compiled, "metadata_group", None)
    if files is None or not hasattr(compiled, "hash"):
        raise NotImplementedError("this Triton does not tell where it has put a kernel")
    return compiled.hash, files


def utils_source() -> str | None:
    """The C source of `UTILS`."""
    folder = getattr(_nvidia, "dirname", None)
    path = None if folder is None else Path(folder) / "driver.c"
    return path.read_text() if path is not None and path.is_file() else None


def launcher_source(compiled: Any) -> tuple[str, str] | None:
    """Of a kernel's own `LAUNCHER`, before Triton 3.7: its key in the cache, and its C source."""
    make, platform = getattr(_nvidia, "make_launcher", None), _found("runtime.build", "platform_key")
    if make is None or platform is None:
        return None
    names = compiled.src.fn.arg_names
    constants = {(names.index(i),) if isinstance(i, str) else i: x for i, x in compiled.src.constants.items()}
    source = make(constants, compiled.src.signature, getattr(compiled.metadata, "tensordesc_meta", None))
    return hashlib.sha256((source + platform()).encode()).hexdigest(), source


# ---- how Triton names what it compiles


def own_hash() -> Callable[[], str] | None:
    """What computes Triton's hash of itself."""
    return getattr(_cache, "triton_key", None)


def set_own_hash(key: str) -> None:
    _cache.triton_key = lambda: key


def before_hashing(call: Callable[[Any], None]) -> None:
    """Have `call` called with each function that another calls, before the key of that one is made."""
    finder = _found("runtime.jit", "DependenciesFinder")
    update = getattr(finder, "_update_hash", None)
    if update is None:
        return

    def update_hash(self: Any, func: Any) -> None:
        call(func)
        update(self, func)

    finder._update_hash = update_hash
