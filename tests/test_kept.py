"""Results of tensors' values: kept while the tensors live and nobody writes to them."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import torch

import tilewise
from tilewise.core import kept
from tilewise.core.kept import MAX_BYTES, MAX_TENSORS

CPU = torch.device("cpu")


def sums(*tensors: torch.Tensor) -> float:
    return kept.kept(tensors, ("sum",), lambda: float(sum(t.sum() for t in tensors)), CPU)


def test_made_again_after_a_write_to_any_of_them():
    a, b = torch.ones(3), torch.ones(4)
    assert sums(a, b) == 7
    b[0] = 3
    assert sums(a, b) == 9
    a.view(-1)[1:].zero_()
    assert sums(a, b) == 7
    assert sums(a, torch.ones(4)) == 5  # another tensor
    assert sums(a[:1], b) == 7 and sums(a, b) == 7  # another view


def test_made_of_other_memory_behind_the_same_tensor():
    a = torch.ones(3)
    assert sums(a) == 3
    a.data = torch.zeros(3)
    assert sums(a) == 0


def test_they_go_with_their_tensors_and_are_few():
    kept.clear()
    for _ in range(5):
        sums(torch.ones(3), torch.ones(2))
    gc.collect()
    assert len(kept._results) == 0
    tensors = [torch.ones(3) for _ in range(MAX_TENSORS + 3)]
    for t in tensors:
        sums(t)
    assert len(kept._results) == MAX_TENSORS


def test_large_results_leave_together():
    a, made = torch.ones(3), []

    def large(n: int) -> tuple[torch.Tensor, int]:
        def make() -> tuple[torch.Tensor, int]:
            made.append(n)
            return torch.empty(MAX_BYTES // 2, dtype=torch.uint8, device="meta"), n

        return kept.kept((a,), (n,), make, CPU)

    for n in (1, 2, 1, 2, 3, 3, 1):
        assert large(n)[1] == n
    assert made == [1, 2, 3, 1]


def test_inference_tensors_and_transforms_are_looked_at_every_time():
    with torch.inference_mode():
        a = torch.ones(3)
        for expected in (3, 6):
            assert sums(a) == expected
            a.mul_(2)
    calls: list[torch.Tensor] = []
    torch.vmap(lambda t: kept.kept((t,), (), lambda: calls.append(t), CPU) or t)(torch.ones(2, 3))
    torch.vmap(lambda t: kept.kept((t,), (), lambda: calls.append(t), CPU) or t)(torch.ones(2, 3))
    assert len(calls) == 2


def test_what_graphs_may_read_is_in_no_cache_that_forgets():
    """A function that makes a tensor on a device from numbers, and is cached, is `kept_on_device`."""
    forgetting = []
    for path in Path(tilewise.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "device" in [a.arg for a in node.args.args]:
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                returns = ast.unparse(node.returns) if node.returns else ""
                if "cache" in decorators and ("Tensor" in returns or "Part" in returns):
                    forgetting.append(f"{path.name}: {node.name}")
    assert not forgetting
