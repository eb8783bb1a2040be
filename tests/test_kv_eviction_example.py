"""examples/kv_eviction.py: what is kept, and that it stands where attention finds it."""

import pytest
import torch


@pytest.fixture(scope="module")
def example(load_example):
    return load_example("kv_eviction")


def test_it_runs(example, capsys):
    sizes = ["--steps", "10", "--texts", "2", "--prompt", "60", "--new", "20", "--budget", "15"]
    losses = example.main([*sizes, "--window", "5"])
    printed = capsys.readouterr().out
    assert "15 of 60 keys are kept: 75%" in printed and "layer 1" in printed
    assert set(losses) == {"whole cache", "SnapKV", "last keys"} and all(0 < x < 10 for x in losses.values())


def test_it_keeps_the_window_and_what_it_attended_to(example):
    sums = torch.zeros(1, 2, 40)
    sums[0, 0, 3], sums[0, 1, 20] = 2.0, 1.0
    kept = example.snapkv(sums, seqlen=30, budget=12, window=5)
    assert kept.shape == (1, 2, 12) and (kept.diff(dim=-1) > 0).all()
    assert kept[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, *range(25, 30)]  # seven neighbours of key 3
    assert kept[0, 1].tolist() == [*range(17, 24), *range(25, 30)]


def test_an_evicted_cache_attends_as_a_mask_would(example):
    """Dropping keys is hiding them: each head's own."""
    q, k, v = (torch.randn(2, 30, 3, 8) for _ in range(3))
    cache = example.KVCache(2, 40, 3, 8, dtype=torch.float32)
    with torch.no_grad():
        example.tilewise.attention_with_cache(q, cache, k, v)
        kept = torch.stack([torch.randperm(30)[:12].sort().values for _ in range(6)]).view(2, 3, 12)
        small = example.evicted(cache, kept, capacity=16)
        q, new_k, new_v = (torch.randn(2, 4, 3, 8) for _ in range(3))
        out = example.tilewise.attention_with_cache(q, small, new_k, new_v)
    mask = torch.zeros(2, 3, 1, 34, dtype=torch.bool).scatter_(-1, kept[:, :, None], True)
    mask[..., 30:] = True
    k, v = torch.cat([k, new_k], 1), torch.cat([v, new_v], 1)
    expected = example.tilewise.attention(q, k, v, causal=True, mask=mask)
    torch.testing.assert_close(out, expected)
