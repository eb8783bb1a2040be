"""Figures in files: the same file from the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save(figure: Any, path: Path, **options: Any) -> None:
    """Write a matplotlib figure, as the file's suffix says; `options` are those of `savefig`."""
    import matplotlib

    metadata = {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata=metadata, **options)
