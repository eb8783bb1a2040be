"""Plug-ins, which put tilewise into other packages. Each has a function `register`."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, NamedTuple


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
