"""Results of tensors' values: kept while the tensors live and nobody writes to them."""

from __future__ import annotations

import ast
import gc
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

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


def test_made_of_memory_that_was_freed_and_used_again():
    """`a.data = b` leaves a's version, and the next b may lie where the last but one did."""
    a, memory = torch.ones(64), bytearray(256)
    for n in range(4):
        a.data = torch.frombuffer(memory, dtype=torch.float32)  # other storage at the same address
        memory[:] = torch.full((64,), float(n)).numpy().tobytes()
        assert sums(a) == 64.0 * n


def test_what_inference_mode_has_made_serves_a_backward():
    a = torch.arange(3, dtype=torch.int32)
    with torch.inference_mode():
        made = kept.kept((a,), ("double",), lambda: 2.0 * a, CPU)
    assert kept.kept((a,), ("double",), lambda: 2.0 * a, CPU) is made
    x = torch.ones(3, requires_grad=True)
    (x * made).sum().backward()
    assert torch.equal(x.grad, made)


def test_captured_tensors_of_inference_and_training():
    documents, order = torch.arange(8, dtype=torch.int32) // 4, torch.arange(8)

    def visible(b, h, i, j):
        return (documents[i] == documents[j]) & (order[i] >= order[j])

    x = torch.randn(1, 8, 2, 16)
    with torch.inference_mode():
        expected = tilewise.attention(x, x, x, mask_mod=visible)
    leaf = x.clone().requires_grad_()
    out = tilewise.attention(leaf, leaf, leaf, mask_mod=visible)
    out.sum().backward()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("write", ["data", "assigned", "numpy", "in place"])
def test_captured_numbers_are_those_of_the_call(write):
    documents = torch.arange(8, dtype=torch.int32) // 4
    x = torch.randn(1, 8, 2, 16)
    for n in range(20):
        new = (torch.arange(8, dtype=torch.int32) + n) // (2 + n % 3)
        if write == "data":
            documents.data.copy_(new)
        elif write == "assigned":
            documents.data = new.clone()
        elif write == "numpy":
            documents.numpy()[:] = new.numpy()
        else:
            documents.copy_(new)
        out = tilewise.attention(x, x, x, mask_mod=lambda b, h, i, j: documents[i] == documents[j])
        expected = tilewise.attention(x, x, x, mask=new[:, None] == new)
        torch.testing.assert_close(out, expected)


def test_they_go_with_their_tensors_and_are_few():
    kept._results.clear()
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


def test_scales_of_ones_are_made_once_and_by_each_captured_graph_that_comes_first():
    pages = torch.zeros(5, 16, 3, 8).to(torch.float8_e4m3fn)
    scales = kept.unit_scales(pages)
    assert torch.equal(scales, torch.ones(5, 3)) and kept.unit_scales(pages[:, :4]) is scales
    with torch.inference_mode():
        other = kept.unit_scales(pages[:4])
    assert other.shape == (4, 3) and not other.is_inference()
    with FakeTensorMode() as mode:
        assert isinstance(kept.unit_scales(mode.from_tensor(pages)), FakeTensor)
    assert kept.unit_scales(pages) is scales

    @kept.kept_on_device(2)
    def made(number, device):
        return [number]

    def find(is_captured):
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=is_captured):
            return made(1, torch.device("cuda", 0))

    first = find(True)
    assert find(True) is not first and (eager := find(False)) is not first
    assert find(True) is find(False) is eager


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
