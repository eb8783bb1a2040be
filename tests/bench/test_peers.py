"""Every peer that runs here computes what it is timed for; the others are called as their packages ask."""

from __future__ import annotations

import shutil
import sys
import types
from dataclasses import replace

import pytest
import torch

from tilewise import reference
from tilewise.lab.bench import gate
from tilewise.lab.bench.cases import Case, decode, dense, packed
from tilewise.lab.bench.errors import BenchError, Refusal
from tilewise.lab.bench.inputs.masks import MASKS
from tilewise.lab.bench.inputs.options import FUNCTION_OPTIONS, OPTIONS
from tilewise.lab.bench.inputs.statistics import STATISTICS
from tilewise.lab.bench.peer import Data
from tilewise.lab.bench.peers import FlashAttention2, FlashAttention3, FlashAttention4, all_peers, find_peers

PEERS = ["tilewise", "tilewise:tiled", "sdpa-flash", "sdpa-math", "standard"]
CASES = [
    dense("forward", "float32", 32, 4, 2, 130, causal=True),
    dense("backward", "float32", 32, 4, 2, 130, causal=True),
    dense("forward", "bfloat16", 32, 4, 2, 130, num_kv_heads=2),
    dense("backward", "float32", 32, 4, 1, 130, num_kv_heads=2),
    dense("forward", "float32", 32, 2, 1, 200, window=(33, 0)),
    dense("backward", "float32", 32, 2, 1, 200, window=(33, 0)),
    packed("forward", "float32", 32, 2, (100, 1, 30), True),
    packed("backward", "float32", 32, 2, (100, 1, 30), False),
    decode("float32", (4, 2), 2, 100),
    decode("float32", (4, 2), 2, 100, 4),
    *(
        replace(dense(direction, "float32", 32, 2, 2, 256, causal=True), option=option)
        for option in OPTIONS
        for direction in ("forward", "backward")
    ),
    *(
        replace(dense(d, "float32", 32, 2, 2, 256), mask=m)
        for d, m in zip(("forward", "backward") * 2, MASKS)
    ),
]


EIGHT_BITS = [f"tilewise-{precision}{how}" for precision in ("fp8", "int8") for how in ("", "-quantized")]


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_8_bit_peers(name):
    """They compute what they are timed for, as exactly as 8 bits are: the dtype's gate refuses them."""
    for case in (
        dense("forward", "bfloat16", 64, 4, 2, 200, causal=True, num_kv_heads=2),
        packed("forward", "float16", 64, 2, (100, 1, 130), True),
    ):
        data, (peer,) = random_data(case), find_peers([name])
        found = peer.prepare(case, data, "bshd").results()
        verdict = gate.check(case, data, found, peer.limit)
        assert verdict.fault is None and 0.01 < verdict.error < verdict.limit == 0.08, verdict
        assert gate.check(case, data, found).fault is not None
    for case, reason in (
        (dense("forward", "float32", 32, 2, 2, 130), "are of float16 and bfloat16"),
        (dense("backward", "bfloat16", 32, 2, 2, 130), "are timed in plain dense and packed forwards"),
        (decode("bfloat16", (4, 2), 2, 100), "are timed in plain dense and packed forwards"),
    ):
        with pytest.raises(Refusal, match=reason):
            peer.prepare(case, random_data(case), "bshd")
    assert name not in {peer.name for peer in find_peers(["all"])}


def random_data(case: Case) -> Data:
    return Data(case, "cpu", int(torch.randint(2**31, ()).item()))


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_are_those_of_the_weights(name):
    """Of each peer that gives them; one that is off is found."""
    case = replace(dense("forward", "float32", 32, 2, 1, 640, causal=True, num_kv_heads=1), statistics=name)
    data = random_data(case)
    for peer in find_peers(["tilewise", "tilewise:tiled", "standard"]):
        results = peer.prepare(case, data, "bshd").results()
        assert set(STATISTICS[name].names) == results.keys() - {"out"}
        verdict = gate.check(case, data, results)
        assert verdict.fault is None, f"{peer.name}: {verdict.fault}"
    wrong = STATISTICS[name].names[-1]
    verdict = gate.check(case, data, results | {wrong: results[wrong] * 1.001})
    assert verdict.fault is not None and wrong in verdict.fault
    plain = find_peers(["tilewise-plain"])[0]
    assert plain.prepare(case, data, "bshd").results().keys() == {"out"}
    with pytest.raises(Refusal, match="cases with statistics"):
        plain.prepare(replace(case, statistics=""), data, "bshd")


@pytest.mark.parametrize("name", ["tilewise", "tilewise-option"])
@pytest.mark.parametrize("extra", ["window", "alibi", "softcap", "relative", "gated", "dilated"])
def test_functions_say_what_options_say(name, extra):
    case = replace(dense("forward", "float32", 32, 2, 2, 256, causal=True), has_functions=True)
    if extra in FUNCTION_OPTIONS:
        case = replace(case, option=extra)
    case = replace(case, window=(40, 0)) if extra == "window" else case
    case = replace(case, mask="dilated", causal=False) if extra == "dilated" else case
    data, (peer,) = random_data(case), find_peers([name])
    if name == "tilewise-option" and extra in ("relative", "gated", "dilated"):
        with pytest.raises(Refusal, match="an option says too"):
            peer.prepare(case, data, "bhsd")
        return
    assert gate.check(case, data, peer.prepare(case, data, "bhsd").results()).fault is None


@pytest.mark.parametrize("option, other", [("learned", "standard"), ("bias-gradient", "sdpa-math")])
def test_a_learned_bias_gets_its_gradient(option, other):
    """Timed with those of query, key and value, which the gate looks at."""
    case = dense("backward", "float32", 32, 2, 2, 256, causal=option == "learned")
    case = replace(case, has_functions=option == "learned", option=option)
    data = random_data(case)
    found = []
    for peer in find_peers(["tilewise", other]):
        prepared = peer.prepare(case, data, "bhsd")
        assert gate.check(case, data, prepared.results()).fault is None
        with prepared.context():
            *_, dbias = prepared.call()
        found.append(dbias)
    assert [t.shape for t in data.option.leaves] == [found[0].shape]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3 * float(found[1].abs().max()))


@pytest.mark.sample(40)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", PEERS)
def test_peers_pass_the_gate_in_every_layout(name, case):
    (peer,) = find_peers([name])
    data = random_data(case)
    for layout in peer.layouts(case):
        try:
            prepared = peer.prepare(case, data, layout)
            with prepared.context():
                prepared.call()
        except Refusal:
            assert case.option or name == "sdpa-flash"  # the CPU kernel has no gradients under a dense mask
            continue
        with prepared.context():
            assert gate.check(case, data, prepared.results()).fault is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="FlexAttention needs a C++ compiler on the CPU")
def test_flex_passes_the_gate():
    case = dense("forward", "float32", 32, 2, 1, 256, window=(65, 0))
    (peer,) = find_peers(["flex"])
    data = random_data(case)
    prepared = peer.prepare(case, data, "bhsd")
    assert gate.check(case, data, prepared.results()).fault is None


def test_backward_times_the_gradients_alone(monkeypatch):
    import tilewise

    calls = []
    attention = tilewise.attention
    monkeypatch.setattr(tilewise, "attention", lambda *a, **k: calls.append(1) or attention(*a, **k))
    case = dense("backward", "float32", 16, 1, 1, 20)
    (peer,) = find_peers(["tilewise"])
    prepared = peer.prepare(case, random_data(case), "bshd")
    for _ in range(3):
        prepared.call()
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("flex", dense("backward", "float32", 16, 1, 1, 20), "no backward on the CPU"),
        ("flex", decode("float32", (1, 1), 1, 64, page_size=16), "no page tables"),
        (
            "flex",
            replace(dense("forward", "float32", 16, 1, 1, 20), statistics="max_logit"),
            "on GPUs only",
        ),
        ("sdpa-flash", decode("float32", (1, 1), 1, 64, page_size=16), "has no page tables"),
        ("standard", decode("float32", (1, 1), 1, 64, page_size=16), "has no page tables"),
        ("tilewise:tiled", decode("float32", (1, 1), 1, 64, page_size=16), "takes no backend"),
        ("xformers", decode("bfloat16", (4, 2), 1, 64), "grouped heads"),
        ("flash-attn-2", dense("forward", "float32", 16, 1, 1, 20), "serves float16 and bfloat16"),
    ],
)
def test_refusals_have_reasons(name, case, reason, monkeypatch):
    for module in ("flash_attn", "xformers", "xformers.ops"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    with pytest.raises(Refusal, match=reason):
        find_peers([name])[0].prepare(case, random_data(case), "bshd")


def test_standard_attention_refuses_what_does_not_fit(monkeypatch):
    from tilewise.lab.bench import torch_peers

    case = dense("forward", "float32", 16, 1, 1, 64)
    monkeypatch.setattr(torch_peers, "free_bytes", lambda device: 64 * 64 * 4 * 3.0)
    with pytest.raises(Refusal, match="GiB of scores"):
        find_peers(["standard"])[0].prepare(case, random_data(case), "bshd")


def test_paged_decoding_of_tilewise_is_served_or_refused_with_a_reason():
    case = decode("float32", (4, 2), 2, 100, page_size=16)
    data = random_data(case)
    try:
        prepared = find_peers(["tilewise"])[0].prepare(case, data, "bshd")
        results = prepared.results()
    except (Refusal, NotImplementedError) as refusal:
        assert str(refusal)
    else:
        assert gate.check(case, data, results).fault is None


def test_pages_hold_the_cache():
    case = decode("float32", (4, 2), 3, 100, page_size=16)
    data = random_data(case)
    pages = data.pages
    assert pages.table.shape == (3, 7) and sorted(pages.table.flatten().tolist()) == list(range(21))
    for pool, whole in ((pages.key, data.key), (pages.value, data.value)):
        assert torch.equal(pool[pages.table.long()].flatten(1, 2)[:, :100], whole)


def test_dense_mask():
    data = random_data(decode("float32", (1, 1), 1, 6, 3))
    assert data.mask[0, 0].int().tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    assert random_data(decode("float32", (1, 1), 1, 6, 1)).mask is None
    window = random_data(dense("forward", "float32", 8, 1, 1, 1500, window=(2, 1))).mask[0, 0]
    i, j = torch.arange(1500)[:, None], torch.arange(1500)
    assert torch.equal(window, (j >= i - 2) & (j <= i + 1))


def test_inputs_are_shared_fresh_and_never_zero():
    case = dense("backward", "bfloat16", 16, 2, 1, 64)
    one, same, other = Data(case, "cpu", 1), Data(case, "cpu", 1), Data(case, "cpu", 2)
    assert torch.equal(one.query, same.query) and not torch.equal(one.query, other.query)
    assert not torch.equal(one.key, one.value)
    assert all(t.float().std() > 0.9 for t in (one.query, one.key, one.value, one.dout))
    placed = one.placed("key", "bhsd")
    assert placed.is_contiguous() and placed is one.placed("key", "bhsd")
    assert torch.equal(placed, one.placed("key", "bshd"))


def test_find_peers():
    assert [peer.name for peer in find_peers(["sdpa-flash", "tilewise:tiled"])] == [
        "sdpa-flash",
        "tilewise:tiled",
    ]
    assert [peer.name for peer in find_peers(["all"])] == list(all_peers())
    for name in ("fa2", "tilewise:", "tilewise:nothing", "aten"):
        with pytest.raises(BenchError, match=f"peer '{name}' is unknown, must be all, tilewise"):
            find_peers([name])


def test_packages_that_are_not_here_say_why():
    reasons = {name: peer.unavailable("cpu") for name, peer in all_peers().items()}
    assert reasons["tilewise"] is None and reasons["sdpa-flash"] is None
    assert "no such CPU kernel" in reasons["sdpa-cudnn"]
    assert "needs a GPU" in reasons["flash-attn-3"]
    assert "cannot import flash_attn_interface" in all_peers()["flash-attn-3"].unavailable("cuda")


def _fake_package(calls: list, table: str, unbounded: int | None, returns_lse: bool) -> types.ModuleType:
    """The functions of a flash-attn package with its argument names, computed by the reference."""

    def attend(q, k, v, causal=False, window_size=(unbounded, unbounded), **options):
        window = tuple(None if bound == unbounded else bound for bound in window_size)
        out, lse = reference.attention(q, k, v, causal=causal, window=window, **options)
        return (out.to(q.dtype), lse) if returns_lse else out.to(q.dtype)

    def flash_attn_func(q, k, v, **options):
        calls.append("dense")
        options.pop("num_splits", None)
        return attend(q, k, v, **options)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, **options
    ):
        calls.append("varlen")
        if cu_seqlens_q is None:  # FlashAttention-4's paged call
            return flash_attn_with_kvcache(q, k, v, options.pop("seqused_k"), **options)
        assert cu_seqlens_q.dtype == torch.int32 and max_seqlen_q == int(cu_seqlens_q.diff().max())
        return attend(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)

    def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=None, causal=False, **options):
        calls.append("cache")
        pages = options.pop(table, None)
        if pages is not None:
            assert pages.dtype == cache_seqlens.dtype == torch.int32
            n = int(cache_seqlens[0])
            k_cache, v_cache = (t[pages.long()].flatten(1, 2)[:, :n] for t in (k_cache, v_cache))
        return attend(q, k_cache, v_cache, causal=causal, **options)

    module = types.ModuleType("fake")
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(module, function.__name__, function)
    return module


EXTERNAL_CASES = {
    "dense": dense("forward", "bfloat16", 32, 2, 1, 80, causal=True),
    "window": dense("forward", "bfloat16", 32, 2, 1, 80, window=(9, 0)),
    "varlen": packed("forward", "bfloat16", 32, 2, (50, 3), True),
    "decode": decode("bfloat16", (4, 2), 2, 64, 2),
    "paged": decode("bfloat16", (4, 2), 2, 512, 1, page_size=256),
}


@pytest.mark.parametrize("kind", EXTERNAL_CASES)
@pytest.mark.parametrize(
    ("peer", "table", "unbounded", "returns_lse"),
    [
        (FlashAttention2(), "block_table", -1, False),
        (FlashAttention3(), "page_table", -1, True),
        (FlashAttention4(), "page_table", None, True),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_other_packages_are_asked_for_the_same_problem(
    peer, table, unbounded, returns_lse, kind, monkeypatch
):
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, peer.module, _fake_package(calls, table, unbounded, returns_lse))
    if "." in peer.module:
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    case = EXTERNAL_CASES[kind]
    data = random_data(case)
    assert gate.check(case, data, peer.prepare(case, data, "bshd").results()).fault is None
    assert calls


def test_flash_attention_2_refuses_small_pages(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    case = decode("bfloat16", (4, 2), 2, 512, 1, page_size=16)
    with pytest.raises(Refusal, match="multiple of 256"):
        FlashAttention2().prepare(case, random_data(case), "bshd")
