"""The import law, by which calls and imports go down, never up or across; and how large what may be."""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = Path(tilewise.__file__).parent

# Each module may import those of lower layers; packages of a layer import nothing of each other.
LAYERS = [
    ["_renamed", "core", "device"],
    ["reference"],
    ["tiled", "cpu", "gpu"],
    ["dispatch"],
    ["autograd"],
    ["cache"],
    ["api"],
    ["varlen"],
    ["fp8"],
    ["explain", "faces", "nn", "statistics", "testing", "warmup"],
    ["distributed"],
    ["compat"],
    ["lab"],
    ["cli"],
    ["__main__"],
]
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_FILES = 400, 80, 15
BACKENDS = {"cpu.aten", "tiled", "cpu", "gpu.triton", "gpu.hopper"}


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__":
            yield name, path


def imports(path: Path, inside_functions: bool) -> set[str]:
    """tilewise modules that a file imports, as dotted names below the package."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if inside_functions else tree.body
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tilewise":
            base = node.module.removeprefix("tilewise").removeprefix(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".strip(".")
                is_module = (ROOT / (full.replace(".", "/") + ".py")).exists() or (
                    ROOT / full.replace(".", "/")
                ).is_dir()
                found.add(full if is_module else base)
        elif isinstance(node, ast.Import):
            found |= {
                a.name.removeprefix("tilewise").removeprefix(".")
                for a in node.names
                if a.name.split(".")[0] == "tilewise"
            }
    return found - {""}


def layer(name: str) -> int:
    top = name.split(".")[0]
    matches = [n for n, group in enumerate(LAYERS) if top in group]
    assert matches, f"{name} has no layer: add it to LAYERS"
    return matches[0]


def test_no_arrow_goes_up():
    wrong = []
    for name, path in modules():
        for other in imports(path, inside_functions=True):
            here, there = layer(name), layer(other)
            same_package = name.split(".")[0] == other.split(".")[0]
            if there > here or (there == here and not same_package):
                wrong.append(f"{name} -> {other}")
    assert not wrong, wrong


def backend_of(name: str) -> str | None:
    return next((b for b in BACKENDS if name == b or name.startswith(b + ".")), None)


def test_backends_import_neither_each_other_nor_the_reference():
    wrong = []
    for name, path in modules():
        own = backend_of(name)
        for other in imports(path, inside_functions=True):
            if own and (backend_of(other) not in (None, own) or other.split(".")[0] == "reference"):
                wrong.append(f"{name} -> {other}")
    assert not wrong, wrong


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside of functions count, as those of kernels, and those of types: what is put off is a circle
    all the same. `lab` has two, of a record and what shows it."""
    arrows = {
        name: imports(path, inside_functions=True) - {name}
        for name, path in modules()
        if layer(name) != layer("lab")
    }
    while leaves := {name for name, others in arrows.items() if not others & arrows.keys()}:
        arrows = {name: others for name, others in arrows.items() if name not in leaves}
    assert not arrows, {name: sorted(others & arrows.keys()) for name, others in arrows.items()}


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> bool:
    """Whether a function is compiled for a GPU, or writes code for a CPU."""
    decorators = " ".join(ast.unparse(d) for d in function.decorator_list)
    return bool(re.search(r"\b(triton|gluon)\.jit\b", decorators)) or "cpu/kernels/" in path.as_posix()


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its decorators and signature among them, but for its docstring."""
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    lines = function.end_lineno - first + 1
    if ast.get_docstring(function) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    return lines


def too_large(root: Path) -> list[str]:
    """What is larger than it may be below a folder, as sentences."""
    found, files = [], collections.Counter()
    for path in sorted(root.rglob("*.py")):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        files[path.parent] += 1
        if (lines := len(text.splitlines())) > MOST_LINES:
            found.append(f"{name} has {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_kernel(node, path):
                continue
            if (lines := code_lines(node)) > MOST_LINES_OF_A_FUNCTION:
                found.append(f"{name}: {node.name} has {lines} lines")
    for folder, count in files.items():
        if count > MOST_FILES:
            found.append(f"{folder.relative_to(root).as_posix()} has {count} files")
    return found


def test_nothing_is_too_large():
    assert not too_large(ROOT)


def test_what_is_too_large_is_found(tmp_path):
    long = "    x = 1\n" * 79
    docstring = '    """A.\n' + "\n" * 30 + '    """\n'
    (tmp_path / "long.py").write_text("x = 1\n" * 401)
    (tmp_path / "just.py").write_text("x = 1\n" * 400)
    (tmp_path / "functions.py").write_text(
        f"def just():\n{docstring}{long}"
        f"@functools.cache\ndef cached():\n{long}"
        f"class C:\n    async def method(\n    self):\n{long.replace('    ', '        ')}"
    )
    (tmp_path / "kernels.py").write_text(
        f"@gluon.jit\ndef role():\n{long}@entry(triton.jit)\ndef kernel():\n{long}"
    )
    (tmp_path / "cpu" / "kernels").mkdir(parents=True)
    (tmp_path / "cpu" / "kernels" / "forward.py").write_text(f"def build(a, b):\n    x = a\n{long}")
    for folder, count in (("full", 15), ("fuller", 16)):
        (tmp_path / folder).mkdir()
        for n in range(count):
            (tmp_path / folder / f"{n}.py").touch()
    assert too_large(tmp_path) == [
        "functions.py: cached has 81 lines",
        "functions.py: method has 81 lines",
        "long.py has 401 lines",
        "fuller has 16 files",
    ]


def test_importing_tilewise_is_light():
    code = (
        "import sys; import torch; before = set(sys.modules); import tilewise; "
        "print([m for m in ('triton', 'matplotlib', 'transformers', 'llvmlite', 'rich', 'typer') "
        "if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["compat", "distributed", "fp8", "testing"])
def test_modules_are_attributes(name):
    code = f"import tilewise; print(tilewise.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().startswith("tilewise.")


def test_public_names_are_documented():
    for name in tilewise.__all__:
        assert (getattr(tilewise, name).__doc__ or "").strip(), name


def test_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "tilewise", "--version"], capture_output=True, text=True)
    assert done.stdout == f"tilewise {tilewise.__version__}\n", done.stderr


def test_no_folder_of_tests_has_the_name_of_a_package():
    """Theirs is on the path of tests: without Triton, Python would import a folder tests/triton for it."""
    folders = {path.name for path in Path(__file__).parent.iterdir() if path.is_dir()}
    assert not folders & {"triton", "torch", "llvmlite", "numpy", "transformers", "diffusers", "kernels"}
