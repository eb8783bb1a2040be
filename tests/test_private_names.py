"""Private names of PyTorch and Triton stand in one file each, and what rests on them goes on without them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import library
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import BlockMask

import tilewise
import without_names

ROOT = Path(tilewise.__file__).parent
OTHERS = ("torch", "triton")
FILES = ("core/torch_private.py", "gpu/launch/triton_private.py", "gpu/hopper/common/compat.py")
PUBLIC_OF_TRITON = (
    "triton",
    "triton.language",
    "triton.experimental.gluon",
    "triton.tools.tensor_descriptor",
)
PYTHONS = {"_asdict", "_field_defaults", "_fields", "_getframe", "_make", "_replace"}
OF_TORCH = (
    torch, torch._C, torch.cuda, torch.Tensor, torch.UntypedStorage, torch.nn.Module, torch.autograd.Function,
    library.Library, forward_ad, BlockMask,
)  # fmt: skip
BY_NAME = {"attrgetter", "delattr", "getattr", "hasattr", "setattr"}  # which take names of attributes


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def sources() -> Iterator[tuple[str, ast.Module]]:
    """All but `lab`, which measures others."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("lab/"):
            yield name, ast.parse(path.read_text())


def own_names(tree: ast.Module) -> Iterator[str]:
    """Private names that a file defines: of functions, classes, variables, and of what its objects hold."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
            yield node.attr


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def imported(tree: ast.Module) -> Iterator[str]:
    """Names of PyTorch and Triton that a file imports, with dots, and also where it does so by a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def attributes(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Private attributes that a file asks for; whether of its own object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, is_of_self(node)
        elif isinstance(node, ast.Call) and called(node) in BY_NAME:
            names = (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
            yield from ((name, False) for name in names if is_private(name))


def is_public_import(name: str) -> bool:
    parts = name.split(".")
    if parts[0] not in OTHERS:
        return True
    if any(map(is_private, parts)):
        return False
    return parts[0] == "torch" or ".".join(parts[:-1]) in ("", *PUBLIC_OF_TRITON) or name in PUBLIC_OF_TRITON


def private_names(name: str, tree: ast.Module, own: set[str], theirs: set[str]) -> list[str]:
    """What a file takes of PyTorch or Triton that has no public name.

    A private attribute is the package's own if it defines one of this name, and PyTorch and Triton do not.
    `compat` may take those of other packages.
    """
    found = {module for module in imported(tree) if not is_public_import(module)}
    for attribute, is_own in attributes(tree):
        is_defined = attribute in own or attribute in PYTHONS or name.startswith("compat/")
        if not is_defined or (attribute in theirs and not is_own):
            found.add(attribute)
    return sorted(found)


def test_private_names_stand_in_one_file():
    trees = dict(sources())
    own = {name for tree in trees.values() for name in own_names(tree)}
    theirs = {name for owner in OF_TORCH for name in dir(owner) if is_private(name)} - PYTHONS
    found = {name: private_names(name, tree, own, theirs) for name, tree in trees.items()}
    assert all(found[name] for name in FILES)
    assert not {name: names for name, names in found.items() if names and name not in FILES}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("x._version", ["_version"]),
        ("self._lengths._version", ["_version"]),
        ("x.untyped_storage()._cdata", ["_cdata"]),
        ("getattr(x, '_base', None)", ["_base"]),
        ("self._buffers", ["_buffers"]),
        ("torch.ops.aten._fused_sdp_choice", ["_fused_sdp_choice"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch.utils import _pytree as trees", ["torch.utils._pytree"]),
        ("importlib.import_module('torch._dynamo')", ["torch._dynamo"]),
        ("from triton.runtime import driver", ["triton.runtime.driver"]),
        ("import triton.language as tl\nfrom triton import knobs\nself._lengths = x._replace(a=1)", []),
    ],
)
def test_a_private_name_is_found(code, found):
    assert private_names("a.py", ast.parse(code), {"_lengths", "_version"}, {"_version", "_base"}) == found


@pytest.mark.sample(2)
@pytest.mark.parametrize("hidden", [(), *((group,) for group in without_names.GROUPS), without_names.GROUPS])
def test_a_pytorch_without_private_names_gives_the_same(run_script, hidden):
    assert run_script("without_names.py", *hidden) == ["the same"]
