"""Continuous batching in transformers gives the tokens of its own eager attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version

from tilewise import reference
from tilewise.integrations.transformers import register
from tilewise.integrations.transformers_paged import paged_attention_forward

transformers = pytest.importorskip("transformers")
paging = pytest.importorskip("transformers.generation.continuous_batching.cache")

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.19"), reason="wants a kernel of kernels since 5.19"
)
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_continuous_batching_gives_the_tokens_of_eager(kind, monkeypatch):
    """Five prompts for at most 64 tokens a step: sequences join as others leave; a window in Mistral."""
    register()
    transformers.utils.logging.set_verbosity_error()
    memory = torch.device("cpu"), 1 << 30, 0, 0  # transformers asks psutil, which need not be there
    if not torch.cuda.is_available():
        monkeypatch.setattr(paging, "get_device_and_memory_breakdown", lambda: memory)
    name = kind.capitalize()
    config = {"sliding_window": 9} if kind == "mistral" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **config)
    generation = transformers.GenerationConfig(
        max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(num_blocks=12, max_batch_tokens=64, block_size=16)
    prompts = [torch.randint(2, 40, (n,)).tolist() for n in (5, 2, 29, 40, 17)]
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    tokens = {}
    for implementation in ("paged|eager", "paged|tilewise"):
        model.set_attn_implementation(implementation)
        outputs = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching
        )
        tokens[implementation] = {tuple(o.prompt_ids): o.generated_tokens for o in outputs.values()}
    assert len(tokens["paged|eager"]) == len(prompts)
    assert tokens["paged|tilewise"] == tokens["paged|eager"]


@pytest.mark.parametrize("window", [None, 6])
def test_a_table_of_pages_is_read_where_it_lies(window):
    held, heads, kv_heads, dim, page_size = [5, 0, 9], 4, 2, 8, 4
    storage = [torch.randn(12 * page_size, kv_heads, dim) for _ in range(2)]
    cache = SimpleNamespace(
        key_cache=[storage[0].clone()],
        value_cache=[storage[1].clone()],
        block_size=page_size,
        layer_index_to_group_indices={3: (0, 0)},
    )
    table = torch.randperm(12, dtype=torch.int32)[:9].view(1, 3, 3)
    q, k, v = (torch.randn(1, h, 3, dim) for h in (heads, kv_heads, kv_heads))
    offsets = torch.tensor([0, *(n + 1 for n in held)]).cumsum(0)
    module = SimpleNamespace(layer_idx=3, sliding_window=window)
    out, weights = paged_attention_forward(
        module, q, k, v, scaling=0.4, cache=cache, cu_seq_lens_q=torch.arange(4), cu_seq_lens_k=offsets,
        block_table=table,
    )  # fmt: skip
    assert out.shape == (1, 3, heads, dim) and weights is None
    for n, length in enumerate(held):
        rows = (table[0, n].long()[:, None] * page_size + torch.arange(page_size)).flatten()
        own = [torch.cat((s[rows[:length]], t[0, :, n][None]))[None] for s, t in zip(storage, (k, v))]
        options = {"window": (window - 1, None)} if window else {}
        exact, _ = reference.attention(q[:, :, n][:, None], *own, causal=True, scale=0.4, **options)
        torch.testing.assert_close(out[:, n].double(), exact[:, 0], rtol=1e-5, atol=1e-5)
        assert torch.equal(cache.key_cache[0][rows[length]], k[0, :, n])


def test_only_in_continuous_batching():
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="continuous batching"):
        paged_attention_forward(SimpleNamespace(), x, x, x)


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_sparse_attention_is_refused(name):
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=f"{name} .*attn_implementation='eager'"):
        paged_attention_forward(SimpleNamespace(), x, x, x, **{name: torch.zeros(1, 3, 2)})
