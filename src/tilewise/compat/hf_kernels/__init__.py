"""The package as a repository for Hugging Face's `kernels`: `python -m tilewise.compat.hf_kernels FOLDER`.

    LOCAL_KERNELS=org/tilewise=FOLDER python ...      # model: attn_implementation="org/tilewise"

Such a repository holds a folder for each kind of device, whose code imports itself by relative names alone:
it is loaded under a name of its own, beside an installed tilewise or without one. Two folders of the same
files are written, for CUDA and for CPUs. They need PyTorch, on GPUs Triton, and use llvmlite if it is there.
kernels 0.16 and 0.17 are tested.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import tilewise

PACKAGE = Path(tilewise.__file__).parent
# What a kernel has no use for: plug-ins, commands, and short names of modules.
LEFT_OUT = ("compat", "lab", "distributed", "__init__.py", "__main__.py", "_renamed.py", "cli.py", "nn.py")
BACKENDS = ("cuda", "cpu")

_IMPORT = re.compile(r"^([ ]*)from tilewise((?:\.\w+)*) import ", re.MULTILINE)
_OPERATORS = re.compile(r'torch\.ops\.tilewise\b|"tilewise(?=::|", "DEF")')
_MODULES = re.compile(r'"tilewise\.(?=(?:cpu|gpu|tiled)\.)')


def write(folder: Path | str) -> Path:
    """Write the repository's `build` into a folder, which holds none yet.

    Returns:
        folder, for `LOCAL_KERNELS=org/tilewise=FOLDER`.

    Raises:
        FileExistsError: folder has a `build`.
    """
    folder = Path(folder)
    files = dict(sources())
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:10]
    for backend in BACKENDS:
        variant, name = folder / "build" / f"torch-{backend}", f"_tilewise_{backend}_{digest}"
        variant.mkdir(parents=True)
        for path, text in files.items():
            target = variant / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(relative(text, path, name))
        metadata = {
            "id": name,
            "name": "tilewise",
            "version": 1,
            "license": "BSD-3-Clause",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return folder


def sources() -> Iterator[tuple[str, str]]:
    """Path and text of each file, as the package has it; the root's is `functions`."""
    yield "__init__.py", Path(__file__).with_name("functions.py").read_text()
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE)
        if part.parts[0] not in LEFT_OUT:
            yield part.as_posix(), path.read_text()


def relative(text: str, path: str, name: str) -> str:
    """A file's text with relative imports, and with operators and modules found by name under this name."""
    dots = "." * (path.count("/") + 1)

    def imported(match: re.Match[str]) -> str:
        return f"{match[1]}from {dots}{match[2].removeprefix('.')} import "

    text = _IMPORT.sub(imported, text)
    text = _MODULES.sub(f'"{name}.', text)
    return _OPERATORS.sub(lambda match: match[0].replace("tilewise", name), text)
