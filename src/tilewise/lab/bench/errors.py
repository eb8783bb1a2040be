"""What goes wrong in a benchmark in a way that its user can correct; and a limit on the time to set up."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class BenchError(Exception):
    """Bad input: the command line shows the message in one line and exits with status 2."""


class Refusal(Exception):
    """A peer does not serve a case; the message is its reason."""


class _TimeUp(BaseException):
    """Not an Exception: compilers catch those and try something else."""


def _raise_time_up(number: int, frame: FrameType | None) -> None:
    raise _TimeUp


@contextlib.contextmanager
def setup_limit(seconds: float | None) -> Iterator[None]:
    """Stop what runs inside after so many seconds; None is no limit.

    Needs POSIX signals and the main thread: elsewhere there is no limit. One long call into C ends first.

    Raises:
        Refusal: the time was up.

    Example:
        >>> with setup_limit(60.0):
        ...     print("compiled")
        compiled
    """
    is_possible = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if seconds is None or not is_possible:
        yield
        return
    previous = signal.signal(signal.SIGALRM, _raise_time_up)
    try:
        # again and again: where a destructor runs, Python drops the exception
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 0.5)
        yield
    except _TimeUp:
        raise Refusal(f"setting up took more than {seconds:.3g} s; --setup-limit gives more") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)
