"""The backward of some of the keys, by out and lse of all of them: its shares add up to the gradients."""

from __future__ import annotations

import random

import pytest
import torch

from tilewise import reference
from tilewise.core.merge import merge
from tilewise.core.plan import Results
from tilewise.core.problem import Inputs, Options
from tilewise.core.signature import Request
from tilewise.dispatch import plans
from tilewise.testing import compare

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
SIZES = {"one query": (1, 2, 40), "short": (2, 24, 32), "few queries": (2, 12, 300), "tiles": (17, 60, 300)}


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend, softcap", [("llvm", 0.0), ("llvm", 2.0), ("aten", 0.0), ("tiled", 2.0)])
def test_shares_add_up(backend, softcap, size, dtype):
    least, most, keys = SIZES[size]
    draw = random.Random(torch.initial_seed())
    seqlen_q, seqlen_k = draw.randint(least, most), draw.randint(2, keys)
    cut = draw.randint(1, seqlen_k - 1)
    group = 1 if backend == "aten" else draw.choice([1, 2])
    q, dout = (torch.randn(2, seqlen_q, 2 * group, 16, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, seqlen_k, 2, 16, dtype=dtype) for _ in range(2))
    lse_dtype = torch.promote_types(dtype, torch.float32)
    dlse = None if backend == "aten" else torch.randn(2, 2 * group, seqlen_q, dtype=lse_dtype)
    options, cuts = Options(softcap=softcap), (cut, seqlen_k - cut)
    halves = list(zip(k.split(cuts, 1), v.split(cuts, 1)))
    out, lse = merge([plans.attend(Inputs(q, *half), options, backend)[:2] for half in halves])
    first, second = (
        plans.differentiate(
            Inputs(q, *half), Results(out, lse), dout, dlse, options, backend, False, is_partial=True
        )
        for half in halves
    )
    found = (
        (first.query.double() + second.query.double()).to(dtype),
        torch.cat((first.key, second.key), 1),
        torch.cat((first.value, second.value), 1),
    )
    exact, baseline = (
        reference.attention_backward(dout, q, k, v, dlse=dlse, dtype=kind, softcap=softcap)[:3]
        for kind in (torch.float64, dtype)
    )
    names = "dquery", "dkey", "dvalue"
    reports = [compare(*of) for of in zip(names, found, exact, baseline, strict=True)]
    budget = max(report.max_budget for report in reports)  # of few elements each, as in `check_attention`
    shares = sum(share.query.abs().max().item() for share in (first, second))
    rounding = torch.finfo(dtype).eps / 2 * shares  # what each share of dquery is rounded by
    for report in reports:
        assert report.max_error <= budget + rounding * (report.name == "dquery"), report


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, dim", [(1, 300, 64), (3, 2000, 128), (20, 20, 16), (300, 290, 80), (130, 200, 192)]
)
@pytest.mark.parametrize("backend", ["llvm", "tiled", "triton", "hopper"])
def test_wide_gradients_round_to_the_usual_ones(backend, seqlen_q, seqlen_k, dim, dtype):
    if (backend == "triton" and not torch.cuda.is_available()) or (backend == "hopper" and not IS_HOPPER):
        pytest.skip("needs a GPU")
    device = "cuda" if backend in ("triton", "hopper") else "cpu"
    lengths = ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2), (seqlen_q, 4))
    *given, dout = (torch.randn(2, n, h, dim, device=device).to(dtype) for n, h in lengths)
    starts = [torch.arange(0, 3 * n, n, dtype=torch.int32, device=device) for n in (seqlen_q, seqlen_k)]
    dense, packed = Inputs(*given), Inputs(*(t.flatten(0, 1) for t in given), *starts)
    bias = torch.randn(1, 4, 1, seqlen_k, device=device).to(dtype)
    options = Options(causal=True, deterministic=True)
    for inputs in (dense, packed, dense._replace(bias=bias)):
        results, grad = plans.attend(inputs, options, backend), dout.view(inputs.query.shape)
        call = (inputs, results, grad, None, options, backend, inputs.bias is not None, True)
        for _ in range(2):  # on a GPU the second is launched in another way
            narrow, wide = (plans.differentiate(*call, request=Request(wide=w)) for w in (False, True))
            for usual, ours in zip(narrow[:4], wide[:4], strict=True):
                if usual is not None:
                    assert ours.dtype == torch.float32 and torch.equal(ours.to(dtype), usual)
                    assert not torch.equal(ours, usual.float())
