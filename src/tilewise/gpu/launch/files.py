"""Files that run as code, or say what does: written at once, read only if nobody else could write them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

WRITABLE = 0o022  # by a group or by everybody


def is_safe(path: Path) -> bool:
    """Whether it is this user's, or root's, as in a container's image, and nobody else can write to it."""
    if not hasattr(os, "getuid"):
        return True
    state = path.stat(follow_symlinks=False)
    return state.st_uid in (os.getuid(), 0) and not state.st_mode & WRITABLE


def write(path: Path, content: bytes) -> None:
    """At once, so that nobody reads a half; readable for all, writable for its owner."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
