"""The public functions on a GPU; skipped without one."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.problem import Inputs, Options
from tilewise.testing import check_attention, compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def draw(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "softcap": {"softcap": 5.0, "causal": True},
    "sinks": {"sinks": (4,)},
    "bias": {"bias": (1, 4, 300, 1)},
    "full bias": {"bias": (2, 4, 300, 333)},
    "mask": {"mask": (2, 1, 300, 333)},
    "alibi": {"alibi_slopes": (2, 4), "causal": True},
    "dropout": {"dropout_p": 0.2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, dtype):
    torch.manual_seed(0)
    options = {
        key: torch.randn(o, device="cuda") if isinstance(o, tuple) and key != "window" else o
        for key, o in OPTIONS[name].items()
    }
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options[
            "alibi_slopes"
        ].abs()  # negative slopes reward distance without bound
    if "mask" in options:
        options["mask"] = options["mask"] > -0.5
    q, k, v = (draw(2, n, h, 64, dtype=dtype) for n, h in ((300, 4), (333, 2), (333, 2)))
    check_attention(q, k, v, holds_mean=dtype != torch.float32, **options)


def test_packed_and_cached():
    starts = torch.tensor([0, 70, 70, 300], dtype=torch.int32, device="cuda")
    q, k, v = (draw(300, h, 64) for h in (4, 2, 2))
    check_attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True)
    x = draw(2, 40, 2, 64)
    cache = tilewise.KVCache(2, 64, 2, 64, dtype=torch.bfloat16, device="cuda")
    outs = [tilewise.attention_with_cache(t, cache, t, t) for t in x.split([30, 5, 1, 4], 1)]
    exact, _ = reference.attention(x, x, x, causal=True)
    base, _ = reference.attention(x, x, x, causal=True, dtype=torch.bfloat16)
    assert compare("out", torch.cat(outs, 1), exact, base).is_within


def test_bad_values_are_refused():
    x = draw(10, 2, 64)
    with pytest.raises(ValueError, match="must start at 0 and end at total=10"):
        bad = torch.tensor([0, 9], device="cuda")
        tilewise.attention_varlen(x, x, x, bad, bad)


def test_triton_serves_by_default():
    x = draw(1, 128, 2, 64)
    assert tilewise.explain(x, x, x, causal=True).backend == "triton"


def test_opcheck_and_compile():
    q, k, v = (draw(2, 64, 2, 64, dtype=torch.float32).requires_grad_() for _ in range(3))
    scalars = (*Options(causal=True), None)
    inputs = Inputs(q, k, v)
    torch.library.opcheck(torch.ops.tilewise.attention.default, (*inputs, *scalars))
    out, lse = (t.detach() for t in torch.ops.tilewise.attention(*inputs, *scalars))
    torch.library.opcheck(
        torch.ops.tilewise.attention_backward.default,
        (torch.randn_like(out), None, out, lse, *inputs, *scalars, False),
    )

    def loss(q, k, v):
        return tilewise.attention(q * 2, k, v, causal=True).square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    torch.testing.assert_close(
        torch.autograd.grad(compiled(q, k, v), q)[0],
        torch.autograd.grad(loss(q, k, v), q)[0],
        rtol=1e-4,
        atol=1e-5,
    )


def test_second_derivatives_agree_with_the_cpu():
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))

    def second(device):
        leaves = [t.to(device).requires_grad_() for t in (q, k, v)]
        out = tilewise.attention(*leaves, causal=True, softcap=2.0)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    for found, exact in zip(second("cuda"), second("cpu")):
        torch.testing.assert_close(found.cpu(), exact, rtol=1e-3, atol=1e-4)


def test_graph_capture_replays_with_new_values():
    q, k, v = (draw(1, 256, 4, 64) for _ in range(3))
    tilewise.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewise.attention(q, k, v, causal=True)
    for t in (q, k, v):
        t.copy_(draw(*t.shape))
    graph.replay()
    torch.testing.assert_close(out, tilewise.attention(q, k, v, causal=True))


def test_another_stream():
    q = draw(1, 512, 4, 64)
    expected = tilewise.attention(q, q, q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = tilewise.attention(q, q, q)
    stream.synchronize()
    assert torch.equal(found, expected)


def test_dropout_is_the_cpu_mask():
    q, k, v = (torch.randn(1, 100, 2, 32) for _ in range(3))
    seed = torch.tensor(99)
    inputs = Inputs(q, k, v, dropout_seed=seed)
    cpu, _ = torch.ops.tilewise.attention(*inputs, *Options(dropout_p=0.3), None)
    gpu, _ = torch.ops.tilewise.attention(
        *(None if t is None else t.cuda() for t in inputs), *Options(dropout_p=0.3), None
    )
    torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-4, atol=1e-5)
