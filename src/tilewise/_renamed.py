"""Short import paths, and those of earlier releases: they name the same modules.

Pickled caches and people's code have them: each is looked up only when it is imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

MODULES = {
    "tilewise.flash_attn": "tilewise.faces.flash_attn",
    "tilewise.flash_attn_3": "tilewise.faces.flash_attn_3",
    "tilewise.flex_attention": "tilewise.faces.flex_attention",
    "tilewise.integrations": "tilewise.faces",
    "tilewise.learn": "tilewise.lab.learn",
    "tilewise.merge": "tilewise.core.merge",
    "tilewise.paged_cache": "tilewise.cache.paged",
    "tilewise.pages": "tilewise.cache.pages",
    "tilewise.rotary": "tilewise.cache.rotary",
}


class Renamed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module by its earlier name, or a submodule of a package that has one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return None if _current(name) is None else importlib.machinery.ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        current = _current(module.__name__)
        assert current is not None
        sys.modules[module.__name__] = importlib.import_module(current)


def _current(name: str) -> str | None:
    """Today's name of a module; None if it never had another."""
    package, _, rest = name.rpartition(".")
    return MODULES.get(name) or (f"{MODULES[package]}.{rest}" if package in MODULES else None)


sys.meta_path.insert(0, Renamed())  # before files are looked for: each module is loaded once
