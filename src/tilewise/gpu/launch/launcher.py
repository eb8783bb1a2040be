"""How Triton launches a compiled kernel (3.6 to 3.9): what it does anew in every call is done once here.

Triton's own launch prepares what profilers are told and encodes every TMA descriptor, which takes several
times as long as the launch itself. Below all that is one C function; this module alone knows what it takes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any

from triton import AsyncCompileMode, FutureKernel, knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime._async_compile import active_mode

from tilewise.core.signature import Gpu, standing_in


class BoundKernel:
    """A compiled kernel and its grid, with the C function that launches it.

    Attributes:
        start: that function. It takes a stream of the current device, `rest`, and the kernel's arguments, as
            one list if `takes_list`. Pointers are integers or None; a TMA descriptor is the items that
            `encode` returns.
        current_stream: PyTorch's, of a device by its number.
        hooks: gives the two functions by which profilers are told of launches, or their lists in `calls`.
    """

    def __init__(
        self, compiled: Any, start: Callable[..., None], rest: tuple[Any, ...], takes_list: bool
    ) -> None:
        self._compiled, self.start, self.rest, self.takes_list = compiled, start, rest, takes_list
        self.current_stream = driver.active.get_current_stream
        self.hooks = partial(attrgetter("launch_enter_hook", "launch_exit_hook"), knobs.runtime)
        # what encodes one descriptor; releases differ in what else they hand it, which it does not read
        self._unused = (None,) * (len(inspect.signature(nvidia.make_tensordesc_arg).parameters) - 2)

    def encode(self, index: int, descriptor: Any) -> list[Any]:
        """The kernel's TMA descriptor number `index`: encoded, then shape and strides."""
        metadata = self._compiled.metadata.tensordesc_meta[index]
        return nvidia.make_tensordesc_arg(descriptor, metadata, *self._unused)


def bind(compiled: Any, grid: tuple[int, int, int]) -> BoundKernel | None:
    """The kernel, bound to what launches it; None if only Triton can."""
    launcher = compiled.run
    if not isinstance(launcher, nvidia.CudaLauncher) or getattr(launcher, "gsan_enabled", False):
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    no_scratch, no_hooks = (None, None), (None, None, None)
    rest: tuple[Any, ...]
    options = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    utils = driver.active.utils
    if hasattr(utils, "launch"):  # since 3.7: one C function for all kernels
        launch, kinds = utils.launch, (launcher.arg_annotations, launcher.kernel_signature)
        rest = (*options, compiled.packed_metadata, *no_hooks, *no_scratch, *kinds)
        return BoundKernel(compiled, partial(launch, *grid), rest, takes_list=True)
    launch, rest = _unwrapped(launcher.launch), (*options, *no_scratch, compiled.packed_metadata, *no_hooks)
    return BoundKernel(compiled, partial(launch, *grid), rest, takes_list=False)


def _unwrapped(launch: Any) -> Any:
    """The C function of a kernel, below the Python function that encodes its descriptors if it has any."""
    return inspect.getclosurevars(launch).nonlocals["launcher"] if inspect.isfunction(launch) else launch


# ---- compiling without a launch


_asked: ContextVar[list[tuple[Any, Any]] | None] = ContextVar("asked", default=None)


@contextlib.contextmanager
def compiling_together(leaves_errors: bool = False) -> Iterator[list[tuple[Any, Any]]]:
    """Inside, `compile_only` leaves new kernels to threads; at the end all are compiled.

    Triton's passes, LLVM and ptxas run side by side; its front end holds Python's lock. Keys are hashed, and
    kernels put into Triton's caches, by the thread that asks for them. The list is of what was asked for:
    functions, and what Triton answered.

    Raises:
        Exception: what Triton raises of a kernel that it can't compile, unless its launch is to raise that.
    """
    asked: list[tuple[Any, Any]] = []
    if active_mode.get() is not None:  # who called compiles together already
        yield asked
        return
    pool, token = _Compilers(), _asked.set(asked)
    try:
        with AsyncCompileMode(pool, ignore_errors=leaves_errors):
            yield asked
    finally:
        active_mode.set(None)  # which Triton 3.6 forgets after an error
        _asked.reset(token)
        pool.shutdown(cancel_futures=True)  # of an interrupt
        for kernel, _ in asked:
            _forget_failed(kernel)


class _Compilers(ThreadPoolExecutor):
    """Has no threads before something is submitted."""

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return super().submit(_with_launcher, compile_kernel)


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    """The kernel; before Triton 3.7 also its launcher in C, which a launch then finds in Triton's cache."""
    compiled = compile_kernel()
    make = getattr(driver.active, "launcher_cls", None)  # none of a GPU that is not here
    if make is not None and hasattr(nvidia, "make_launcher"):
        with contextlib.suppress(Exception):  # the launch will raise it
            make(compiled.src, compiled.metadata)
    return compiled


def _forget_failed(kernel: Any) -> None:
    """Have Triton compile anew what it could not: 3.7 and 3.8 keep the error, an interrupt leaves nothing."""
    for kernels, *_ in kernel.device_caches.values():
        for key, compiled in list(kernels.items()):
            if isinstance(compiled, FutureKernel):
                kernels.pop(key, None)


def compile_only(kernel: Any, arguments: list[Any], options: dict[str, Any]) -> None:
    """Compile what a launch with these arguments would start, which Triton specialises on in the same way."""
    compiled, asked = kernel.warmup(*arguments, **options, grid=(1,)), _asked.get()
    if asked is not None:
        asked.append((kernel, compiled))


class CompileOnlyDriver:
    """Stands where Triton asks which GPU there is."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

    def get_current_device(self) -> int:
        return -int(self._target.arch)  # kernels are kept by this number: each architecture has its own

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextlib.contextmanager
def compiling_for(gpu: Gpu, listener: Callable[[Any], None]) -> Iterator[None]:
    """Inside, calls on meta tensors compile what they would launch on `gpu`, together; at the end `listener`
    gets each kernel."""
    active = driver._active
    driver.set_active(CompileOnlyDriver(gpu.capability))
    try:
        with standing_in(gpu), compiling_together() as asked:
            yield
        for _, kernel in asked:
            listener(kernel.result() if isinstance(kernel, FutureKernel) else kernel)
    finally:
        driver._active = active
