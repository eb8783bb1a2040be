"""How kernels are compiled without a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from triton import AsyncCompileMode, FutureKernel

from tilewise.core.signature import Gpu, standing_in
from tilewise.gpu.launch.triton_private import active_mode, forget_failed, make_launcher, target

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
    if active_mode is not None and active_mode.get() is not None:  # who called compiles together already
        yield asked
        return
    token = _asked.set(asked)
    try:
        with contextlib.nullcontext() if active_mode is None else _side_by_side(asked, leaves_errors):
            yield asked
    finally:
        _asked.reset(token)


@contextlib.contextmanager
def _side_by_side(asked: list[tuple[Any, Any]], leaves_errors: bool) -> Iterator[None]:
    pool = _Compilers()
    try:
        with AsyncCompileMode(pool, ignore_errors=leaves_errors):
            yield
    finally:
        active_mode.set(None)  # which Triton 3.6 forgets after an error
        pool.shutdown(cancel_futures=True)  # of an interrupt
        for kernel, _ in asked:
            forget_failed(kernel)


class _Compilers(ThreadPoolExecutor):
    """Has no threads before something is submitted."""

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return super().submit(_with_launcher, compile_kernel)


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    compiled = compile_kernel()
    make_launcher(compiled)
    return compiled


def compile_only(kernel: Any, arguments: list[Any], options: dict[str, Any]) -> None:
    """Compile what a launch with these arguments would start, which Triton specialises on in the same way."""
    compiled, asked = kernel.warmup(*arguments, **options, grid=(1,)), _asked.get()
    if asked is not None:
        asked.append((kernel, compiled))


@contextlib.contextmanager
def compiling_for(gpu: Gpu, listener: Callable[[Any], None]) -> Iterator[None]:
    """Inside, calls on meta tensors compile what they would launch on `gpu`, together; at the end `listener`
    gets each kernel.

    Raises:
        NotImplementedError: see `triton_private.target`.
    """
    with target(gpu.capability):
        with standing_in(gpu), compiling_together() as asked:
            yield
        for _, kernel in asked:
            listener(kernel.result() if isinstance(kernel, FutureKernel) else kernel)
