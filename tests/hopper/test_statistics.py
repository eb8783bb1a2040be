"""Statistics of the weights on a Hopper GPU, of the forward and of the second pass, against float64."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import tilewise
from tilewise import Aux
from tilewise.core.problem import Inputs, Options, describe
from tilewise.dispatch.statistics import statistics_refusal

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_statistics import hold

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA Hopper GPU")
OF_FORWARD = (
    "row_max",
    "max_logit",
)  # with a softcap they have the forward's tanh, held to the inputs' precision
EVERYTHING = Aux(row_max=True, max_logit=True, entropy=True, column_sum=True, block_sum=128, top_k=8)
LENGTHS = [1, 63, 64, 128, 129, 300, 511, 1100]


def draw(source: random.Random, dtype: torch.dtype) -> tuple:
    """query, key and options that the Hopper kernels take."""
    batch, kv_heads, group = source.randint(1, 2), source.randint(1, 2), source.randint(1, 3)
    heads, dim = kv_heads * group, source.choice([64, 80, 128, 192, 256])
    options: dict = {"causal": source.random() < 0.5}
    if source.random() < 0.3:
        options["window"] = (source.choice([None, 0, 90]), source.choice([None, 0, 30]))
    if source.random() < 0.3:
        options["softcap"] = source.choice([3.0, 30.0])
    if source.random() < 0.3:
        options["sinks"] = torch.randn(heads, device="cuda")
    if source.random() < 0.3:
        options["scale"] = source.choice([0.02, 1.0])
    n, m = (source.choice(LENGTHS) for _ in "qk")
    q, k = (torch.randn(batch, *s, dim, device="cuda").to(dtype) for s in ((n, heads), (m, kv_heads)))
    return q, k, options


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", range(40))
def test_every_mixture_of_options(seed: int, dtype: torch.dtype):
    torch.manual_seed(seed)
    source = random.Random(seed)
    q, k, options = draw(source, dtype)
    column_sum = source.choice([True, "group"])
    aux = Aux(
        row_max=True, max_logit=True, entropy=True, column_sum=column_sum,
        block_sum=source.choice([128, 384]), top_k=source.choice([1, 5, 8, 32]),
    )  # fmt: skip
    backend = "hopper" if q.shape[1] > 1 else None  # of one query, the decoding kernels have no statistics
    out, found = tilewise.attention(q, k, k, return_aux=aux, backend=backend, **options)
    of_forward = OF_FORWARD if "softcap" in options else ()
    hold(found, q, k, aux, of_forward, **options)
    assert_close(out, tilewise.attention(q, k, k, **options), atol=2e-2, rtol=2e-2)
    hold(tilewise.attention_statistics(q, k, aux, **options), q, k, aux, of_forward, **options)
    for alone in (Aux(max_logit=True), Aux(max_logit=True, entropy=True)):  # without row_max: another kernel
        _, of_heads = tilewise.attention(q, k, k, return_aux=alone, backend=backend, **options)
        hold(of_heads, q, k, alone, of_forward, **options)


@pytest.mark.parametrize("kind", ["equal", "period", "mixed"])
def test_more_candidates_than_the_lists_hold(kind: str):
    """Equal scores, the largest in one class of keys, and both of them beside random ones."""
    q, k = torch.randn(2, 1, 700, 2, 64, device="cuda").to(torch.bfloat16)
    if kind == "period":
        k[:, ::128] *= 8
    else:
        q[:, :: 1 if kind == "equal" else 200] = 0
    aux = Aux(top_k=8)
    hold(tilewise.attention_statistics(q, k, aux, causal=True, backend="hopper"), q, k, aux, causal=True)
    found = tilewise.attention_statistics(torch.zeros_like(q), k, aux, backend="hopper").top_k
    assert torch.equal(found.keys, torch.arange(8, device="cuda").expand(found.keys.shape))


def test_a_mask_is_watched_by_the_forward_and_padding_hides():
    q, k = torch.randn(2, 2, 300, 4, 128, device="cuda").to(torch.bfloat16)
    mask = (torch.arange(300, device="cuda") < 200)[None, None, None, :]
    aux = Aux(row_max=True, entropy=True)
    _, found = tilewise.attention(q, k, k, mask=mask, return_aux=aux, backend="hopper")
    hold(found, q, k, aux, mask=mask)


def test_the_forward_watches_mask_functions_and_caches_and_weights_before_dropout():
    q, k = torch.randn(2, 1, 300, 4, 128, device="cuda").to(torch.bfloat16)
    aux = Aux(row_max=True, max_logit=True, entropy=True)
    call = {"return_aux": aux, "backend": "hopper"}
    _, found = tilewise.attention(q, k, k, mask_mod=lambda b, h, i, j: j <= i, **call)
    hold(found, q, k, aux, causal=True)
    _, found = tilewise.attention(q, k, k, causal=True, dropout_p=0.5, **call)
    hold(found, q, k, aux, causal=True)
    cache = tilewise.KVCache(1, 400, 4, 128, dtype=torch.bfloat16, device="cuda")
    _, found = tilewise.attention_with_cache(q, cache, k, k, causal=True, **call)
    hold(found, q, k, aux, causal=True)


def test_scores_that_are_infinite_or_no_number_are_the_largest():
    q, k = torch.randn(2, 1, 300, 4, 64, device="cuda").to(torch.bfloat16)
    q[..., 0], k[..., 0] = 0, 0  # what the infinite score comes from alone
    q[0, 200, 1, 0], k[0, 100, 1, 0], q[0, 30, 2, 3] = 1e30, 1e30, torch.nan
    for aux in (Aux(max_logit=True), Aux(max_logit=True, entropy=True), Aux(max_logit=True, row_max=True)):
        _, found = tilewise.attention(q, k, k, return_aux=aux, backend="hopper")
        assert found.max_logit.isinf().tolist() == [False, True, False, False]
        assert found.max_logit.isnan().tolist() == [False, False, True, False]


def test_layouts_and_block_sizes_in_turn():
    """Calls that differ only in what must tell launches apart."""
    q, k = torch.randn(2, 1, 4, 1000, 64, device="cuda").to(torch.bfloat16)
    for size in (128, 384, 256, 128):
        for count in (1, 8, 3):
            aux = Aux(entropy=True, column_sum=True, block_sum=size, top_k=count)
            _, found = tilewise.attention(
                q, k, k, causal=True, layout="bhsd", return_aux=aux, backend="hopper"
            )
            hold(found, q.transpose(1, 2), k.transpose(1, 2), aux, causal=True)


def test_packed_sequences():
    lengths = [300, 0, 1, 129]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")
    q, k = torch.randn(sum(lengths), 4, 64, device="cuda"), torch.randn(sum(lengths), 2, 64, device="cuda")
    q, k = q.to(torch.bfloat16), k.to(torch.bfloat16)
    aux = Aux(row_max=True, entropy=True, column_sum=True, top_k=4)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    hold(tilewise.attention_statistics(q, k, aux, backend="hopper", **options), q, k, aux, **options)


def test_the_same_bits_every_time_and_nothing_else_is_written():
    q, k = torch.randn(2, 1, 1000, 4, 128, device="cuda").to(torch.bfloat16)
    first, again = (tilewise.attention_statistics(q, k, EVERYTHING, causal=True) for _ in range(2))
    for name in ("row_max", "entropy", "column_sum", "block_sum"):
        assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert all(map(torch.equal, first.top_k, again.top_k))


def test_what_is_refused_says_why():
    q = torch.empty(1, 300, 2, 64, dtype=torch.bfloat16, device="cuda")
    for options, aux, word in (
        ({}, Aux(column_sum=True, last_rows=9), "last_rows=9"),
        ({}, Aux(block_sum=100), "block_sum=100"),
        ({}, Aux(top_k=64), "top_k=64"),
        ({"alibi_slopes": torch.ones(2, device="cuda")}, Aux(column_sum=True), "ALiBi"),
    ):
        problem = describe(Inputs(q, q, q, **options), Options())
        assert word in str(statistics_refusal("hopper", problem, aux))
        with pytest.raises(NotImplementedError, match=f"{word}.*'triton'"):
            tilewise.attention_statistics(q, q, aux, backend="hopper", **options)
