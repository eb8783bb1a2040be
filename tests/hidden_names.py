"""Imports the module of private names as if PyTorch or Triton lacked some of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection
from pathlib import Path


def import_without(module: str, names: Collection[str]) -> None:
    """Import `tilewise.MODULE`, before anything else of it: its `getattr` and `hasattr` find no such name."""
    missing = object()

    def find(owner, name, default=missing):
        if name not in names:
            return getattr(owner, name) if default is missing else getattr(owner, name, default)
        if default is missing:
            raise AttributeError(name)
        return default

    full = f"tilewise.{module}"
    path = Path(importlib.util.find_spec("tilewise").origin).parent.joinpath(*module.split("."))
    spec = importlib.util.spec_from_file_location(full, path.with_suffix(".py"))
    found = sys.modules[full] = importlib.util.module_from_spec(spec)
    found.getattr, found.hasattr = find, lambda owner, name: name not in names and hasattr(owner, name)
    spec.loader.exec_module(found)
