"""Run a compiled function on torch's threads.

The function takes one pointer and asks an atomic counter for work, so all threads run the same call. On
Linux the team is OpenMP's own, the one torch uses (`GOMP_parallel`, found among the loaded libraries):
a fork-join costs some 7 us. Elsewhere, and in a forked child, where OpenMP's threads no longer exist, a
small pool of Python threads does it; ctypes releases the interpreter lock while a kernel runs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import sys
import threading
from typing import Any

from tilewise.cpu.host.compile import Kernel

_is_forked = False


def _after_fork() -> None:
    global _is_forked, _pool
    _is_forked, _pool = True, _Pool()


def run(kernel: Kernel, arguments: int, num_threads: int) -> None:
    """Call the kernel on `num_threads` threads; `arguments` is the address of its argument block."""
    if num_threads == 1:
        kernel.call(arguments)
    elif not _is_forked and (team := _openmp()) is not None:
        team(kernel.address, arguments, num_threads, 0)
    else:
        _pool(kernel.call, arguments, num_threads)


@functools.cache
def _openmp() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "omp" in line and ".so" in line}
    for path in sorted(paths, key=lambda p: "gomp" not in p):
        try:
            team = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        team.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        team.restype = None
        return team
    return None


class _Pool:
    """Python threads that wait for calls; grows to the largest count asked for."""

    def __init__(self) -> None:
        self.calls: list[queue.SimpleQueue] = []
        self.lock = threading.Lock()

    def __call__(self, function: Any, arguments: int, count: int) -> None:
        with self.lock:
            while len(self.calls) < count - 1:
                waiting: queue.SimpleQueue = queue.SimpleQueue()
                threading.Thread(target=self._serve, args=(waiting,), daemon=True).start()
                self.calls.append(waiting)
        ends = [threading.Event() for _ in range(count - 1)]
        calls = [(function, arguments, end) for end in ends]
        sent: list[None] = []
        try:  # an interrupt must not free what others still write to; none comes within `extend`
            sent.extend(map(queue.SimpleQueue.put, self.calls, calls))
            function(arguments)
        finally:
            _wait_for(ends[: len(sent)])

    @staticmethod
    def _serve(calls: queue.SimpleQueue) -> None:
        while True:
            function, arguments, end = calls.get()
            function(arguments)
            end.set()


def _wait_for(ends: list[threading.Event]) -> None:
    """Until all are set; what interrupts that is raised then."""
    try:
        for end in ends:
            end.wait()
    except BaseException:
        _wait_for(ends)
        raise


_pool = _Pool()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
