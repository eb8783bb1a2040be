"""Figures in files: the same file from the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save(figure: Any, path: Path, **options: Any) -> None:
    """Write a matplotlib figure, as the file's suffix says; `options` are those of `savefig`.

    Raises:
        ValueError: matplotlib has no such suffix. Without one it would write another file, of its own choice.
    """
    import matplotlib

    kind = path.suffix.removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else None
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, format=kind, metadata=metadata, **options)
