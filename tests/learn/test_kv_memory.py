from __future__ import annotations

import pytest

from tilewise.lab.learn import kv_memory
from tilewise.lab.learn.kv_memory import MODELS, Model, Paging


def test_cache_adds_up_layer_by_layer():
    for model in MODELS.values():
        total = 0
        for layer in range(model.layers):
            seen = min(5000, model.window) if layer < model.windowed else 5000
            total += 3 * seen * model.numbers_per_token * 2
        assert model.cache_bytes(5000, batch=3) == total


def test_windows_stop_growth():
    mistral = MODELS["mistral-7b-v0.1"]
    assert (
        mistral.cache_bytes(4096) == mistral.cache_bytes(100_000) == MODELS["mixtral-8x7b"].cache_bytes(4096)
    )


def test_latent_cache():
    assert MODELS["deepseek-v3"].numbers_per_token == 576
    assert MODELS["deepseek-v3"].sharing == 128 * (192 + 128) / 576


def test_a_cache_of_this_package_is_as_large():
    import torch

    from tilewise import KVCache

    model = Model("tiny", layers=3, heads=8, kv_heads=2, head_dim=16, context=64)
    cache = KVCache(2, 100, 2, 16, dtype=torch.bfloat16)
    held = cache.key.nbytes + cache.value.nbytes
    assert model.layers * held == model.cache_bytes(context=100, batch=2)


def test_paging():
    paging = Paging(lengths=(1, 16, 17, 255), page_size=16, longest=256)
    assert paging.pages == (1, 1, 2, 16)
    assert (paging.used, paging.paged, paging.reserved) == (289, 320, 1024)
    assert paging.paged - paging.used < 16 * 4


def test_bad_input():
    with pytest.raises(ValueError, match=r"model must be one of gpt-2, .* got 'gpt-5'"):
        kv_memory.find_model("gpt-5")
    with pytest.raises(ValueError, match="context must be at least 1, got 0"):
        MODELS["gpt-2"].cache_bytes(0)
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        Paging((1,), 0, 1)
    with pytest.raises(ValueError, match="lengths must be from 0 to longest=4, got 5"):
        Paging((1, 5), 2, 4)
