"""Gradients of queries that see few keys, where dP and delta nearly cancel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise
from tilewise.core.problem import Inputs, Options, describe
from tilewise.cpu.host import compile as kernels, configs
from tilewise.flash_attn_3 import flash_attn_func
from tilewise.testing import check_attention

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture
def _no_tile_registers(monkeypatch):
    machine = kernels.current_target()
    monkeypatch.setattr(kernels, "target", lambda wanted="": replace(machine, isa="vectors"))


def gradients(attend, *tensors):
    tensors = [t.requires_grad_() for t in tensors]
    out = attend(*tensors)
    return torch.autograd.grad(out, tensors, torch.randn_like(out))


@pytest.mark.sample(6)
@pytest.mark.usefixtures("_no_tile_registers")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "dim_v"), [(8, 8), (40, 72), (64, 64), (128, 128), (200, 96), (256, 256)])
@pytest.mark.parametrize("seqlen", [8, 33, 60])
def test_one_key_leaves_nothing_to_choose(seqlen, dim, dim_v, dtype):
    """Out is v whatever q and k are: their gradients are 0 to the last bit. So in row 0 of a causal call."""
    q, k, v = (torch.randn(2, seqlen, heads, d).to(dtype) for heads, d in ((4, dim), (2, dim), (2, dim_v)))
    dq, dk, _ = gradients(
        lambda *x: tilewise.attention(*x, causal=True, window=(0, 0), backend="llvm"), q, k, v
    )
    assert not dq.any() and not dk.any()
    dq, _, _ = gradients(lambda *x: tilewise.attention(*x, causal=True, backend="llvm"), q, k, v)
    assert not dq[:, 0].any() and dq[:, 1].any()


@pytest.mark.parametrize("chunk", [17, 31, 64])
def test_the_first_query_of_a_chunk(chunk):
    q, k, v = (torch.randn(1, 200, heads, 64) for heads in (4, 2, 2))
    dq, _, _ = gradients(lambda *x: flash_attn_func(*x, causal=True, attention_chunk=chunk), q, k, v)
    assert not dq[:, ::chunk].any() and dq[:, 1::chunk].any()


@pytest.mark.sample(3)
@pytest.mark.parametrize("window", [(0, 1), (3, 0)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_short_windows_meet_the_error_budget(has_sinks, dropout_p, window):
    """The mean error of dq was up to 1.7 times PyTorch's."""
    q, k, v = (torch.randn(3, 200, 4, 64) for _ in range(3))
    sinks = torch.randn(4) if has_sinks else None
    check_attention(q, k, v, backend="llvm", window=window, dropout_p=dropout_p, sinks=sinks)


@pytest.mark.sample(2)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_few_queries_with_short_windows_meet_the_error_budget(seqlen_q, has_sinks, softcap):
    """The mean errors of dq and dk were up to 1.5 times PyTorch's, 1.7 with sinks."""
    q, k, v = (torch.randn(512, n, 4, 64) for n in (seqlen_q, 40, 40))
    sinks = torch.randn(4) if has_sinks else None
    check_attention(q, k, v, backend="llvm", causal=True, window=(1, 0), softcap=softcap, sinks=sinks)


@pytest.mark.usefixtures("_no_tile_registers")
def test_the_rounding_of_a_large_lse_is_divided_out():
    """Scores near -60, two keys: what a row gives to dv adds up to its dout, with lse rounded by 2e-6."""
    q, k, v = (torch.randn(16, n, 8, 64, requires_grad=True) for n in (124, 2, 2))
    slopes = torch.linspace(0.4, 0.6, 8)
    out = tilewise.attention(q, k, v, alibi_slopes=slopes, backend="llvm")
    dout = torch.zeros_like(out)
    dout[:, 0] = 1.0
    (dv,) = torch.autograd.grad(out, v, dout)
    assert (dv.double().sum(1) - 1.0).abs().max() < 4e-7


def test_short_windows_stay_in_vectors():
    inputs = Inputs(*(torch.randn(1, 300, 8, 64) for _ in range(3)))
    is_cut = kernels.current_target().isa == "amx"
    assert bool(configs.backward_config(describe(inputs, Options()), inputs).terms) == is_cut
    for options in (Options(window_left=3, window_right=3), Options(window_left=9, causal=True)):
        assert configs.backward_config(describe(inputs, options), inputs).terms == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_no_query_of_a_tile_sees_stays_out_of_its_gradients(bad):
    """The key lies behind the last that the first tile's queries see, in the same group of 8 rows."""
    machine = kernels.current_target()
    inputs = Inputs(*(torch.randn(1, n, 2, 32) for n in (128, 129, 129)))
    problem = describe(inputs, Options(window_left=4, window_right=1))
    tile = machine.vector_bytes // 4 * configs.backward_config(problem, inputs).vectors
    q, k, v = inputs[:3]
    v[0, tile + 5, 0, 3] = bad
    for t in (q, k, v):
        t.requires_grad_()
    out = tilewise.attention(q, k, v, window=(4, 1), backend="llvm")
    dq, dk, _ = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    for t, rows in ((out, tile), (dq, tile), (dk, tile - 8)):
        assert t[0, :rows].isfinite().all()
    assert not dq[0, tile + 5, 0].isfinite().all()


def test_a_sink_of_no_weight_has_no_gradient():
    """Queries that see no key have lse -inf then, as the sink's logit is."""
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 2, 2, 8)
    sinks = torch.tensor([-torch.inf, 0.3], requires_grad=True)
    out = tilewise.attention(q, k, k, causal=True, sinks=sinks, backend="llvm")
    (dsinks,) = torch.autograd.grad(out.sum(), sinks)
    assert dsinks[0] == 0 and dsinks[1].isfinite()
