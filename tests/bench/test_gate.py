"""The gate passes what is right in every dtype, and nothing that is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewise import reference
from tilewise.lab.bench import gate
from tilewise.lab.bench.cases import Case, decode, dense, packed
from tilewise.lab.bench.inputs.masks import MASKS
from tilewise.lab.bench.inputs.options import OPTIONS
from tilewise.lab.bench.peer import Data

CASES = [
    dense("forward", "float32", 32, 4, 2, 300, causal=True, num_kv_heads=2),
    dense("forward", "float32", 32, 2, 1, 300, window=(37, 0)),
    dense("forward", "float32", 48, 2, 1, 300, head_dim_v=32),
    decode("float32", (4, 2), 3, 200, 5),
    packed("forward", "float32", 32, 2, (130, 3, 70), True),
    dense("backward", "float32", 32, 4, 1, 700, causal=True, num_kv_heads=2),
    packed("backward", "float32", 32, 2, (130, 3, 70), True),
]


def exact(case: Case, data: Data, **changes) -> dict[str, torch.Tensor]:
    """Results of the reference, rounded to the case's dtype; `changes` make them those of another problem."""
    options = {"causal": case.causal and case.window is None, "window": case.window}
    if case.kind == "varlen":
        options |= {"cu_seqlens_q": data.offsets, "cu_seqlens_k": data.offsets}
    options |= changes
    tensors = (data.query, data.key, data.value)
    found = {"out": reference.attention(*tensors, **options)[0]}
    if data.dout is not None:
        gradients = reference.attention_backward(data.dout, *tensors, **options)
        found |= {"dq": gradients.query, "dk": gradients.key, "dv": gradients.value}
    return {name: t.to(case.torch_dtype) for name, t in found.items()}


def random_data(case: Case) -> Data:
    return Data(case, "cpu", int(torch.randint(2**31, ()).item()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_passes_what_is_right(case):
    data = random_data(case)
    verdict = gate.check(case, data, exact(case, data))
    assert verdict.fault is None
    assert 0 < verdict.error < verdict.limit


@pytest.mark.parametrize("name", MASKS)
def test_holds_a_case_to_its_mask(name):
    case = replace(dense("backward", "float32", 32, 2, 2, 512), mask=name)
    data = random_data(case)
    assert gate.check(case, data, exact(case, data, mask=data.mask)).fault is None
    assert gate.check(case, data, exact(case, data)).fault is not None


@pytest.mark.parametrize("name", OPTIONS)
def test_holds_a_case_to_its_option(name):
    case = replace(dense("forward", "float32", 32, 2, 2, 512, causal=True), option=name)
    data = random_data(case)
    options = data.option.tilewise()
    if name == "dropout":
        options["dropout_seed"] = torch.tensor(1)
    assert gate.check(case, data, exact(case, data, **options)).fault is None
    assert gate.check(case, data, exact(case, data)).fault is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_passes_standard_attention_in_half_precision(dtype, direction):
    case = dense(direction, dtype, 64, 2, 1, 512, causal=True)
    data = random_data(case)
    q, k, v = (t.transpose(1, 2).detach().requires_grad_() for t in (data.query, data.key, data.value))
    hidden = torch.ones(512, 512, dtype=torch.bool).triu(1)
    out = torch.softmax(((q * 64**-0.5) @ k.mT).masked_fill(hidden, -torch.inf), -1) @ v
    found = {"out": out.detach().transpose(1, 2)}
    if data.dout is not None:
        gradients = torch.autograd.grad(out, (q, k, v), data.dout.transpose(1, 2))
        found |= {n: g.transpose(1, 2) for n, g in zip(("dq", "dk", "dv"), gradients)}
    assert gate.check(case, data, found).fault is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("wrong", ["scale", "mask"])
def test_stops_another_problem(case, wrong):
    data = random_data(case)
    changes = {"scale": {"scale": 1.01 * case.head_dim**-0.5}, "mask": {"causal": False, "window": (9, 0)}}
    assert "off by" in gate.check(case, data, exact(case, data, **changes[wrong])).fault


def test_stops_a_mask_that_is_one_key_too_wide():
    case = dense("forward", "float32", 32, 1, 1, 300, window=(37, 0))
    data = random_data(case)
    assert gate.check(case, data, exact(case, data, window=(38, 0))).fault is not None


def test_stops_top_left_alignment():
    case = decode("float32", (2, 2), 1, 100, 4)
    data = random_data(case)
    mask = torch.ones(4, 100, dtype=torch.bool).tril()
    assert gate.check(case, data, exact(case, data, causal=False, mask=mask[None, None])).fault is not None


@pytest.mark.parametrize("name", ["dk", "dv"])
def test_stops_a_gradient_that_leaves_out_a_tile_of_queries(name):
    case = dense("backward", "float32", 32, 2, 1, 400, causal=True)
    data = random_data(case)
    found = exact(case, data)
    dropped = data.dout.clone()
    dropped[:, 200:264] = 0
    partial = reference.attention_backward(dropped, data.query, data.key, data.value, causal=True)
    found[name] = getattr(partial, {"dk": "key", "dv": "value"}[name]).float()
    assert gate.check(case, data, found).fault.startswith(name)


def test_stops_one_wrong_row_of_a_gradient():
    case = dense("backward", "float32", 32, 1, 1, 400)
    data = random_data(case)
    found = exact(case, data)
    found["dq"][:, 123] *= 1.01
    assert "dq" in gate.check(case, data, found).fault


def test_stops_one_wrong_row_that_drowns_in_the_norm():
    case = dense("backward", "bfloat16", 32, 1, 1, 700)
    data = random_data(case)
    found = exact(case, data)
    norms = found["dq"].squeeze().float().norm(dim=-1)
    typical = norms.square().mean().sqrt()  # what rows are measured by
    found["dq"][:, (norms - typical).abs().argmin()] *= 1.3
    assert gate.check(case, data, found).fault.startswith("a row of dq")


def test_stops_the_last_rows_left_unwritten():
    case = dense("forward", "bfloat16", 32, 2, 2, 300)
    data = random_data(case)
    found = exact(case, data)
    found["out"][:, -1] = 0
    assert (
        "a row of out" in gate.check(case, data, found).fault
        or "out is off" in gate.check(case, data, found).fault
    )


def test_stops_nan_anywhere_and_wrong_shapes():
    case = dense("forward", "float32", 32, 2, 2, 300)
    data = random_data(case)
    found = exact(case, data)
    assert "shape" in gate.check(case, data, {"out": found["out"][:, :-1]}).fault
    found["out"][1, 150, 0, 7] = torch.nan
    assert "not finite" in gate.check(case, data, found).fault


def test_stops_heads_in_a_wrong_order():
    case = dense("forward", "float32", 32, 4, 1, 300, num_kv_heads=2)
    data = random_data(case)
    assert gate.check(case, data, {"out": exact(case, data)["out"][:, :, [1, 0, 3, 2]]}).fault is not None
