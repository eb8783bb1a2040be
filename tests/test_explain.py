"""The figures of `explain` are those of the call."""

import dataclasses
import sys

import pytest
import torch

import tilewise
from tilewise.core.signature import standing_in
from tilewise.device import DATASHEET, best_time, device_for
from tilewise.dispatch.statistics import servers
from tilewise.gpu.launch.gpus import GPUS


def test_counts_follow_the_visible_pairs():
    q, k, v = torch.zeros(2, 10, 4, 16), torch.zeros(2, 14, 2, 16), torch.zeros(2, 14, 2, 8)
    e = tilewise.explain(q, k, v, causal=True)
    pairs = sum(i + 1 + 4 for i in range(10))
    assert e.flops == 2 * 2 * 4 * pairs * (16 + 8)
    assert e.bytes == 4 * (q.numel() + k.numel() + v.numel() + 2 * 10 * 4 * 8 + 2 * 10 * 4)
    assert e.intensity == e.flops / e.bytes


def test_reasons_and_choice():
    x = torch.zeros(1, 64, 2, 16)
    e = tilewise.explain(x, x, x, window=(3, 0), sinks=torch.zeros(2))
    assert e.reasons["aten"] == "has no window" and e.reasons[e.backend] is None
    assert tilewise.explain(x, x, x, backend="tiled").backend == "tiled"


def test_positions_that_32_bits_do_not_hold():
    q, k = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8).expand(1, 1 << 30, 1, 8)
    assert "32 bits" in tilewise.explain(q, k, k).reasons["llvm"]
    assert tilewise.explain(q, k[:, 1:], k[:, 1:]).backend == "llvm"
    assert torch.equal(tilewise.attention(q, k, k, causal=True, window=(2, 0)), q)  # looks at three keys


def test_a_backend_that_has_no_backward_serves_calls_without_gradients():
    cache = tilewise.PagedKVCache(4, 16, 2, 16, dtype=torch.float32)
    cache.allocate()
    query = torch.zeros(1, 1, 2, 16)
    e = tilewise.explain(query, cache, backend="tiled")
    assert (e.backend, e.backward_backend) == ("tiled", "tiled")
    e = tilewise.explain(query, cache, backend="llvm")
    assert (e.backend, e.backward_backend) == ("llvm", None) and "(backward: none)" in str(e)
    with pytest.raises(NotImplementedError, match="has no gradient of keys in pages"):
        tilewise.explain(query.requires_grad_(), cache, backend="llvm")


def test_it_reads_well():
    x = torch.zeros(9, 2, 16)
    cu = torch.tensor([0, 4, 9])
    text = str(tilewise.explain(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True))
    for words in ("backend", "not aten: has no packed sequences", "GFLOP", "FLOP/byte", "bound"):
        assert words in text


def test_bound_and_time_come_from_the_ceilings():
    x = torch.zeros(1, 2048, 2, 64)
    e = tilewise.explain(x, x, x)
    assert e.device.flops_per_second > 1e9 and e.device.bytes_per_second > 1e8
    assert e.bound == "compute"
    assert e.seconds == max(e.flops / e.device.flops_per_second, e.bytes / e.device.bytes_per_second)
    decode = tilewise.explain(torch.zeros(1, 1, 2, 64), x, x)
    assert decode.bound == "memory"


def test_a_measured_ceiling_is_no_bound_and_is_not_called_one():
    x = torch.zeros(1, 256, 2, 64)
    e = tilewise.explain(x, x, x)
    assert e.device.is_measured
    assert "about" in str(e) and "at least" not in str(e)


def test_a_datasheet_gives_a_bound(monkeypatch):
    monkeypatch.setattr(sys.modules["tilewise.explain"], "device_for", lambda *call: DATASHEET[2])
    x = torch.zeros(1, 256, 2, 64)
    assert "bound      memory: at least" in str(tilewise.explain(x, x, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ceilings_are_not_below_a_matrix_product(dtype):
    """One product in float32, which pays for its first call, gave half of what bfloat16 reaches."""
    device, a = device_for(torch.device("cpu"), dtype), torch.rand(768, 768).to(dtype)
    reached = 2 * 768**3 / best_time(lambda: a @ a, a.device, 2)
    assert device.flops_per_second > 0.5 * reached


def test_ceilings_follow_the_number_of_threads():
    cpu, threads = torch.device("cpu"), torch.get_num_threads()
    assert f"{threads} threads" in device_for(cpu, torch.float64).name
    try:
        torch.set_num_threads(threads + 1)
        assert f"{threads + 1} threads" in device_for(cpu, torch.float64).name
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "name, dtype, precision, flops, words",
    [
        ("NVIDIA H200", torch.bfloat16, "ieee", 989e12, "16-bit"),
        ("NVIDIA H200", torch.bfloat16, "fp8", 1978e12, "8-bit"),
        ("NVIDIA H100 80GB HBM3", torch.float32, "tf32", 494.5e12, "TF32"),
        ("NVIDIA A100-SXM4-80GB", torch.float16, "fp8", 312e12, "16-bit"),
    ],
)
def test_datasheet_rates_are_those_of_the_products(monkeypatch, name, dtype, precision, flops, words):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = device_for(torch.device("cuda"), dtype, precision)
    assert device.flops_per_second == flops and words in device.source


def test_meta_tensors_have_no_ceilings():
    x = torch.empty(1, 1 << 16, 8, 128, device="meta")
    e = tilewise.explain(x, x, x, causal=True)
    assert e.flops == 4 * 128 * 8 * (1 << 15) * ((1 << 16) + 1)
    assert e.device is None and e.seconds is None and e.bound is None
    assert "ceilings   none" in str(e) and "measured" not in str(e)
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    with pytest.raises(NotImplementedError, match=r"cu_seqlens_q\.device=meta"):
        tilewise.explain(*3 * [torch.empty(9, 2, 64, device="meta")], offsets, offsets)


def test_a_cache_is_taken_as_the_call_takes_it():
    cache = tilewise.KVCache(2, 512, 2, 16, dtype=torch.float32)
    q, new = torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 2, 16)
    cache.append(new, new)
    for e in (tilewise.explain(q, cache, new, new), tilewise.explain(q, cache=cache, key=new, value=new)):
        pairs = 2 * 4 * (4 + 5 + 6)  # causal by default, over 3 held keys and 3 new ones
        assert e.flops == 2 * pairs * 32 and "2 x 3 queries x 6 keys" in str(e)
    assert cache.lengths.tolist() == [3, 3]
    one = tilewise.explain(q[:, :1], cache, causal=False)
    assert one.flops == 2 * 2 * 4 * 3 * 32
    keys = 2 * 3 * 2 * (16 + 16)  # those in use, not the 512 that there is room for
    assert one.bytes == 4 * (2 * 2 * 4 * 16 + keys + 2 + 2 * 4)


def test_what_a_mask_hides_is_counted_and_the_words_say_so():
    q = torch.zeros(1, 64, 2, 16)
    every, blocks = tilewise.explain(q, q, q), torch.eye(4) > 0
    for hidden in ({"mask": torch.eye(64) > 0}, {"mask_mod": lambda b, h, i, j: blocks[i // 16, j // 16]}):
        e = tilewise.explain(q, q, q, **hidden)
        assert e.flops == every.flops and "FLOP/byte, what the mask hides included" in str(e)
    served = tilewise.explain(q, q, q, mask_mod=lambda b, h, i, j: j <= i)
    assert served.flops < 0.6 * every.flops and "what the mask hides" not in str(served) + str(every)


def test_a_paged_cache_is_left_as_it_was():
    cache = tilewise.PagedKVCache(32, 16, 2, 16, dtype=torch.float32)
    first = cache.allocate()
    cache.append(torch.zeros(1, 20, 2, 16), torch.zeros(1, 20, 2, 16))
    second = cache.fork(first)
    free, q = cache.free_pages, torch.zeros(2, 1, 2, 16)
    e = tilewise.explain(q, cache, q, q)
    assert e.flops == 2 * 2 * 2 * 21 * 32
    shared = tilewise.explain(q, cache)  # both sequences read the same two pages
    assert shared.bytes == 4 * (2 * 2 * 2 * 16 + 20 * 2 * 32 + 2 + 2 * 2)
    assert cache.free_pages == free and cache.length(first) == cache.length(second) == 20
    batch = cache.reserve([first, second], [1, 2])
    packed = tilewise.explain(torch.zeros(3, 2, 16), cache, batch=batch)
    assert "2 x 1 to 2 queries x 21 to 22 keys" in str(packed)


def test_packed_arguments_may_be_given_as_to_the_call():
    x, offsets = torch.zeros(9, 2, 16), torch.tensor([0, 4, 9])
    by_name = tilewise.explain(x, x, x, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert tilewise.explain(x, x, x, offsets, offsets, 5, 5).flops == by_name.flops


@pytest.mark.parametrize(
    "option, call, words",
    [
        ("sofcap", "attention", "did you mean softcap?"),
        ("casual", "attention", "did you mean causal?"),
        ("wibble", "attention", "it has query, key, value"),
        ("max_seqlen", "attention_varlen", "did you mean max_seqlen_"),
        ("page_batch", "attention_with_cache", "did you mean batch?"),
    ],
)
def test_a_wrong_option_is_named(option, call, words):
    x, offsets = torch.zeros(4, 2, 16), torch.tensor([0, 4])
    cache = tilewise.KVCache(1, 4, 2, 16, dtype=torch.float32)
    args = {
        "attention": (x[None], x[None], x[None]),
        "attention_varlen": (x, x, x, offsets, offsets),
        "attention_with_cache": (x[None], cache),
    }[call]
    with pytest.raises(TypeError, match=f"{option}=1 is no argument of {call}: ") as caught:
        tilewise.explain(*args, **{option: 1})
    assert words in str(caught.value)


def test_a_missing_argument_is_named():
    x = torch.zeros(1, 4, 2, 16)
    with pytest.raises(TypeError, match="arguments of attention: missing a required argument: 'value'"):
        tilewise.explain(x, x)


def test_no_random_number_is_drawn():
    x, state = torch.zeros(1, 4, 2, 16), torch.get_rng_state()
    tilewise.explain(x, x, x, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_gives_each_statistic():
    x, aux = torch.zeros(1, 40, 2, 16), tilewise.Aux(lse=True, entropy=True, rows=(-1,), column_sum=True)
    found = tilewise.explain(x, x, x, return_aux=aux, backend="tiled")
    assert found.statistics == dict.fromkeys(("entropy", "column_sum", "rows"), "tiled")
    assert "statistics entropy tiled, column_sum tiled, rows tiled; their gradients tiled" in str(found)
    assert not tilewise.explain(x, x, x).statistics
    with pytest.raises(NotImplementedError, match="does not give entropy"):
        tilewise.explain(x, x, x, return_aux=aux, backend="aten")
    with pytest.raises(TypeError, match=r"must be a tilewise\.Aux"):
        tilewise.explain(x, x, x, return_aux=True)
    pytest.importorskip("triton")
    y = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16)
    problem = dataclasses.replace(tilewise.explain(y, y, y).problem, device_type="cuda")
    with standing_in(GPUS["h200"]):
        served = servers(problem, aux, None, "hopper")
    assert served == {"entropy": "hopper", "column_sum": "hopper", "rows": "tiled"}


def test_rocm_is_called_experimental(monkeypatch):
    x = torch.zeros(1, 8, 2, 16)
    found = tilewise.explain(x, x, x)
    assert "experimental" not in str(found)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert "experimental" not in str(found)
    on_gpu = dataclasses.replace(found, problem=dataclasses.replace(found.problem, device_type="cuda"))
    assert "ROCm 7.1 is experimental" in str(on_gpu)
