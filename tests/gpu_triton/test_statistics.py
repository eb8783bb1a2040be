"""Statistics of the weights by the Triton kernels against float64: every option, packed sequences, caches.

Without a GPU under Triton's interpreter, as `test_attention.py`.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from tilewise import reference
from tilewise.core.plan import Results
from tilewise.core.problem import Inputs, Options, describe
from tilewise.core.statistics import Aux
from tilewise.tiled import backend as tiled, statistics as tiled_statistics

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (IS_INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from tilewise.gpu.triton.statistics.plan import StatisticsPlan  # noqa: E402

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
LONG = 40 if IS_INTERPRETED else 700
AUX = Aux(row_max=True, entropy=True, column_sum=True, expected_distance=True, block_sum=13, top_k=3)


def measured(inputs: Inputs, options: Options, aux: Aux) -> tuple:
    """What the kernels give, and what PyTorch tiles give in float64 after an exact forward."""
    problem = describe(inputs, options)
    exact_inputs = inputs._replace(
        **{
            name: t.double()
            for name in ("query", "key", "value", "bias", "sinks", "alibi_slopes")
            if (t := getattr(inputs, name)) is not None
        }
    )
    exact_problem = describe(exact_inputs, options)
    _, lse, *_ = tiled.forward(exact_problem, exact_inputs)
    exact = tiled_statistics.measure(exact_problem, exact_inputs, lse, None, aux)
    rounded = lse.float()
    residual = torch.where(lse.isfinite(), lse - rounded, 0.0).float()
    found = StatisticsPlan(problem, aux).run(inputs, Results(None, rounded, residual))
    return found, exact


def hold(inputs: Inputs, options: Options, aux: Aux = AUX) -> None:
    found, exact = measured(inputs, options, aux)
    tolerance = 3e-5 if inputs.query.dtype == torch.float32 else 4e-3
    for name, a, e in zip(found._fields, found, exact, strict=True):
        assert (a is None) == (e is None), name
        if a is None:
            continue
        if name == "top_keys":  # of nearly equal scores either
            differ = a != e
            close = (found.top_weights - exact.top_weights).abs() <= tolerance
            assert close[differ].all() and torch.equal(a == -1, e == -1)
            continue
        assert torch.equal(a.isinf(), e.isinf()), name
        size = e[e.isfinite()].abs().max().clamp(min=1.0) if e.isfinite().any() else 1.0
        difference = (a.double() - e).masked_fill(~e.isfinite(), 0.0).abs().max()
        assert difference <= tolerance * size, f"{name} is off by {difference:.1e} of {size:.1e}"


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_every_mixture_of_options(seed: int, dtype: torch.dtype):
    source = random.Random(seed)
    batch, kv_heads, group = source.randint(1, 2), source.randint(1, 2), source.randint(1, 3)
    heads, dim = kv_heads * group, source.choice([8, 24, 40])
    seqlen_q, seqlen_k = (source.choice([1, 7, 16, 17, 33, LONG]) for _ in "qk")
    shape = [source.choice([1, n]) for n in (batch, heads, seqlen_q, seqlen_k)]
    given, options = {}, {"causal": source.random() < 0.4}
    if source.random() < 0.4:
        options |= {"window_left": source.choice([None, 0, 9]), "window_right": source.choice([0, 5])}
    if source.random() < 0.4:
        given["mask"] = torch.rand(shape, device=DEVICE) > 0.3
    if source.random() < 0.4:
        given["bias"] = drawn(*shape)
    if source.random() < 0.4:
        given["alibi_slopes"] = 0.2 * torch.rand(heads, device=DEVICE)
    if source.random() < 0.4:
        given["sinks"] = drawn(heads)
    if source.random() < 0.4:
        options["softcap"] = 3.0
    if source.random() < 0.3:
        options["scale"] = source.choice([-0.3, 1.0])
    q, k = drawn(batch, seqlen_q, heads, dim, dtype=dtype), drawn(batch, seqlen_k, kv_heads, dim, dtype=dtype)
    last_rows = source.choice([None, None, 1, 20])
    aux = Aux(
        row_max=source.random() < 0.7, entropy=source.random() < 0.7, expected_distance=source.random() < 0.5,
        column_sum=source.choice([True, "group"]), last_rows=last_rows,
        block_sum=source.choice([0, 1, 9, 16, 100]), top_k=source.choice([0, 1, 5, 64]),
    )  # fmt: skip
    hold(Inputs(q, k, k, **given), Options(**options), aux)


@pytest.mark.sample(1)
@pytest.mark.parametrize("column_sum", [True, "group"])
def test_packed_sequences(column_sum: bool | str):
    lengths_q, lengths_k = [17, 0, 1, 9], [20, 5, 0, 9]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=DEVICE)
        for n in (lengths_q, lengths_k)
    )
    q, k = drawn(sum(lengths_q), 4, 24), drawn(sum(lengths_k), 2, 24)
    inputs = Inputs(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    aux = Aux(row_max=True, entropy=True, column_sum=column_sum, last_rows=5, block_sum=8, top_k=2)
    hold(inputs, Options(causal=True), aux)


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_paged", [False, True])
def test_caches(is_paged: bool):
    """Lengths and left padding of each sequence; columns are where the cache has its keys."""
    lengths = torch.tensor([37, 0, 20], dtype=torch.int32, device=DEVICE)
    leftpad = torch.tensor([3, 0, 0], dtype=torch.int32, device=DEVICE)
    q, k = drawn(3, 4, 4, 24), drawn(3, 48, 2, 24)
    inputs = Inputs(q, k, k, seqlens_k=lengths, leftpad_k=leftpad)
    if is_paged:
        order = torch.randperm(9, device=DEVICE)
        pages = torch.empty(9, 16, 2, 24, device=DEVICE)
        pages[order] = k.view(9, 16, 2, 24)
        inputs = Inputs(q, pages, pages, seqlens_k=lengths, page_table=order.view(3, 3).int())
    hold(inputs, Options(causal=True))


@pytest.mark.parametrize("k", [1, 3, 16])
def test_of_equal_scores_the_lower_key_comes_first(k: int):
    """Scores of a few small integers, so that many are equal, exactly so."""
    q, key = (torch.randint(-1, 2, (1, n, 1, 16), device=DEVICE).float() for n in (20, LONG))
    inputs = Inputs(q, key, key)
    found, exact = measured(inputs, Options(causal=True, scale=0.5), Aux(top_k=k))
    assert torch.equal(found.top_keys, exact.top_keys)


def test_without_what_rounding_took_and_the_same_bits():
    inputs = Inputs(*(drawn(1, LONG, 2, 24) for _ in range(3)))
    problem = describe(inputs, Options(causal=True))
    _, lse = reference.attention(*inputs[:3], causal=True, dtype=torch.float32)
    plan = StatisticsPlan(problem, AUX)
    first, again = (plan.run(inputs, Results(None, lse.contiguous(), None)) for _ in range(2))
    _, exact = measured(inputs, Options(causal=True), AUX)
    for a, b, e in zip(first, again, exact, strict=True):
        if a is not None and a.dtype != torch.int64:
            assert torch.equal(a, b)
            torch.testing.assert_close(a.double(), e, atol=1e-3, rtol=1e-3)
