"""The figures of `explain` are those of the call."""

import torch

import tilewise


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
