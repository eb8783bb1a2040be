"""Plug-ins, which put tilewise into other packages. Each has a function `register`."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

MOST_KEYS = 1 << 15  # of 8-bit caches, that a call may copy to 16 bits at a time


class Package(NamedTuple):
    """What a plug-in plugs into."""

    distributions: tuple[str, ...]  # names of it, the first that of its modules and of tilewise's extra
    tested: str  # releases, as "1.0 to 1.2 are tested"
    lack: str = "has other interfaces"  # of releases that do not fit

    def modules(self, *names: str) -> list[Any]:
        """Modules of the package.

        Raises:
            ImportError: it is not installed.
            NotImplementedError: this release has no such modules; the message names releases that fit.
        """
        try:
            return [importlib.import_module(name) for name in names]
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != self.distributions[0]:
                raise
            raise self.unfit() from None

    def unfit(self) -> Exception:
        """Why there is nothing to register with."""
        for name in self.distributions:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            return NotImplementedError(f"{name} {version} {self.lack}; {self.tested}")
        name = self.distributions[0]
        return ImportError(f"{name} is not installed; {self.tested}: pip install 'tilewise[{name}]'")


def groups(lengths: Sequence[int], begin: int = 0) -> Iterator[tuple[int, int, int]]:
    """(first, end, longest): requests from `begin` on, in a row, that share a call on an 8-bit cache.

    GPUs copy the keys of such a call to 16 bits, each request's up to the longest one's length: `MOST_KEYS`
    in all, or one request.

    Example:
        >>> list(groups([9, 30000, 7, 8, 9], begin=1))
        [(1, 2, 30000), (2, 5, 9)]
    """
    first, longest = begin, 1
    for n in range(begin, len(lengths)):
        if n > first and max(longest, lengths[n]) * (n + 1 - first) > MOST_KEYS:
            yield first, n, longest
            first, longest = n, 1
        longest = max(longest, lengths[n])
    yield first, len(lengths), longest
