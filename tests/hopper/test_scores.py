"""Dropout, ALiBi and biases of the Hopper kernels against the float64 reference, on a Hopper GPU."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import reference
from tilewise.testing import check_attention

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA Hopper GPU")
OPTIONS: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (100, 10), "deterministic": True}]
LENGTHS = [(300, 290), (1, 400), (5, 1500), (257, 65), (700, 900)]


def draw(seqlen: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, seqlen, heads, dim, device="cuda").to(dtype)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_dropout_and_alibi(dim: int, lengths: tuple[int, int]):
    q, k, v = draw(lengths[0], 4, dim), draw(lengths[1], 2, dim), draw(lengths[1], 2, dim)
    slopes = torch.rand(2, 4, device="cuda")
    for n, options in enumerate(OPTIONS):
        check_attention(q, k, v, backend="hopper", holds_mean=False, dropout_p=0.1 + 0.3 * n, **options)
        check_attention(q, k, v, backend="hopper", holds_mean=False, alibi_slopes=slopes[n % 2], **options)
    check_attention(q, k, v, backend="hopper", holds_mean=False, alibi_slopes=slopes)
    both = {"dropout_p": 0.2, "alibi_slopes": slopes, "softcap": 5.0}
    check_attention(q, k, v, backend="hopper", holds_mean=False, **both)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_bias(dim: int, lengths: tuple[int, int]):
    """Forward, and all gradients: that of the bias has a kernel of its own, whatever is broadcast."""
    q, k, v = (draw(n, heads, dim, torch.float16) for n, heads in zip((*lengths, lengths[1]), (4, 2, 2)))
    full = torch.randn(2, 4, *lengths, device="cuda").half()
    by_queries, by_keys = full[:, :, :1], full[:1, :, :, :1]
    shapes = (
        full,
        full[:1],
        full[:, 1:2],
        full[:1, :1],
        by_queries,
        full[:, :1, :1],
        by_keys,
        by_keys[:, :, :1],
    )
    for n, bias in enumerate((*shapes, full.mT.contiguous().mT)):
        options = OPTIONS[n % len(OPTIONS)]
        check_attention(q, k, v, backend="hopper", holds_mean=False, bias=bias, **options)
        check_attention(q, k, v, backend="hopper", holds_mean=False, bias=bias, softcap=5.0, dropout_p=0.2)
    mask = torch.rand(2, 1, *lengths, device="cuda") < 0.7
    check_attention(q, k, v, backend="hopper", holds_mean=False, bias=full[:1], mask=mask, causal=True)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_a_score_function_of_the_distance(dim: int, lengths: tuple[int, int]):
    """Forward, and all gradients: that of what the function reads too, the same bits every time."""
    leaves = [draw(n, heads, dim) for n, heads in zip((*lengths, lengths[1]), (4, 2, 2))]
    table, shift = torch.randn(4, 101, device="cuda"), lengths[1] - lengths[0]

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h, (j - i - shift).clamp(-50, 50) + 50] * (b + 1)

    mask = torch.rand(2, 1, *lengths, device="cuda") < 0.7
    others = ({}, {"softcap": 5.0, "dropout_p": 0.2}, {"mask_mod": lambda b, h, i, j: (i + j) % 5 != 0})
    for options, more in itertools.product(OPTIONS[:2], (*others, {"mask": mask})):
        check_attention(*leaves, backend="hopper", holds_mean=False, score_mod=score_mod, **options, **more)
    leaves = [t.requires_grad_() for t in (*leaves, table)]
    grads = []
    for options in (OPTIONS[2], OPTIONS[2]):
        out = tilewise.attention(*leaves[:3], score_mod=score_mod, backend="hopper", **options)
        dout = torch.ones_like(out)
        grads.append(torch.autograd.grad(out, leaves, dout))
        assert all(map(torch.equal, grads[0], grads[-1]))
    with torch.no_grad():
        options = options | {"score_mod": score_mod, "captured": (table,)}
        exact = reference.attention_backward(dout, *leaves[:3], **options)
    assert_close = functools.partial(torch.testing.assert_close, rtol=2e-2)
    for ours, theirs in zip(grads[0], (*exact[:3], *exact.captured), strict=True):
        assert_close(ours.double(), theirs.double(), atol=2e-2 * theirs.abs().max().item())


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_any_score_function(dim: int, lengths: tuple[int, int]):
    """Compiled into the kernels: slopes of both signs, numbers of rows, columns and both, hidden keys."""
    leaves = [draw(n, heads, dim) for n, heads in zip((*lengths, lengths[1]), (4, 2, 2))]
    rows, columns = torch.randn(2, lengths[0], device="cuda"), torch.randn(2, lengths[1], device="cuda")
    table = torch.randn(4, 8, 9, device="cuda")
    index = torch.randint(0, 8, lengths, dtype=torch.int32, device="cuda")  # in range as far as values tell
    functions = (
        lambda s, b, h, i, j: s * (1 + rows[b, i] * columns[b, j]),
        lambda s, b, h, i, j: 30 * s / (30 + s.abs()) + table[h, index[i, j], (i + 2 * j) % 9],
        lambda s, b, h, i, j: torch.where(s > -1, s * table[h, 0, 0], -torch.inf),
    )
    mask = torch.rand(2, 1, *lengths, device="cuda") < 0.7
    others = ({"softcap": 5.0, "dropout_p": 0.2}, {"mask": mask}, {"window": (100, 10)})
    for score_mod, options in itertools.product(functions, ({"causal": True}, *others)):
        given = {"score_mod": score_mod, **options}
        assert tilewise.explain(*leaves, **given).backend == "hopper"
        if dim <= 128:
            check_attention(*leaves, backend="hopper", holds_mean=False, **given)
        elif "dropout_p" not in options:
            exact = reference.attention(*leaves, **given)[0]
            out = tilewise.attention(*leaves, backend="hopper", **given)
            assert (out - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize("dim", [64, 128])
def test_any_score_function_of_packed_sequences(dim: int):
    """Positions count from the start of a sequence, whose number is b."""
    starts = torch.tensor([0, 100, 100, 371, 500], device="cuda", dtype=torch.int32)
    q, k, v = (draw(250, heads, dim).view(500, heads, dim) for heads in (4, 2, 2))
    rows = torch.randn(4, 300, device="cuda")
    call = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True, "backend": "hopper"}
    gate = {"score_mod": lambda s, b, h, i, j: s * (1 + rows[b, i] * rows[h, j])}
    check_attention(q, k, v, holds_mean=False, **call, **gate)
    check_attention(q, k, v, holds_mean=False, **call, **gate, softcap=5.0, dropout_p=0.2)


def test_an_index_that_is_wrong_is_reported():
    """Of a visible score; other rows are right, if rounded otherwise: their tile is done again."""
    q = draw(200, 4, 64)
    table, index = torch.randn(10, device="cuda"), torch.zeros(200, 200, dtype=torch.int64, device="cuda")

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[index[i, j]]

    right = tilewise.attention(q, q, q, score_mod=score_mod, causal=True, backend="hopper")
    index[3, 150], index[70, 3] = 10, 10  # hidden, visible
    out = tilewise.attention(q, q, q, score_mod=score_mod, causal=True, backend="hopper")
    with pytest.raises(ValueError, match="captured tensor"):
        tilewise.check_errors()
    is_wrong = torch.zeros(200, dtype=torch.bool, device="cuda")
    is_wrong[70] = True
    assert torch.equal(out.isnan().any(-1).any(-1).any(0), is_wrong)
    torch.testing.assert_close(out[:, ~is_wrong], right[:, ~is_wrong], rtol=2e-2, atol=2e-2)


def test_the_gradient_of_a_bias_has_the_same_bits_every_time():
    q, bias = draw(700, 2, 64), torch.randn(1, 1, 700, 700, device="cuda").bfloat16().requires_grad_()
    grads = []
    for _ in range(5):
        out = tilewise.attention(q, q, q, bias=bias, causal=True, backend="hopper")
        grads += torch.autograd.grad(out, bias, torch.ones_like(out))
    assert all(torch.equal(grad, grads[0]) for grad in grads)


def test_dropout_has_the_mask_of_the_generator():
    """Unit matrices as values show which weights reach the output."""
    q, k = draw(300, 4, 128) * 0.1, draw(128, 2, 128) * 0.1
    v = torch.eye(128, device="cuda").bfloat16()[None, :, None].expand(2, -1, 2, -1)
    outs = []
    for backend in ("hopper", "triton"):
        generator = torch.Generator("cuda").manual_seed(7)
        outs.append(tilewise.attention(q, k, v, dropout_p=0.3, generator=generator, backend=backend))
    assert torch.equal(outs[0] != 0, outs[1] != 0)


def test_a_graph_replays_with_the_seed_of_its_time():
    q, k, v = (draw(500, 4, 64) for _ in range(3))
    given: dict[str, Any] = {"dropout_p": 0.5, "backend": "hopper"}
    tilewise.attention(q, k, v, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewise.attention(q, k, v, **given)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(out.clone())
    assert not torch.equal(*seen)
