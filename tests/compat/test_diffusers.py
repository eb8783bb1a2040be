"""diffusers' dispatcher sends attention here: outputs and gradients are those of its native backend."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.compat import diffusers as compat_diffusers
from tilewise.testing import compare

BATCH, QUERIES, KEYS, HEADS, HEAD_DIM = 2, 9, 13, 4, 16


@pytest.fixture(scope="module")
def dispatch():
    """The module of the dispatcher, with "tilewise" in it."""
    pytest.importorskip("diffusers")
    from diffusers.models import attention_dispatch

    compat_diffusers.register()
    compat_diffusers.register()
    return attention_dispatch


@pytest.fixture
def calls(monkeypatch):
    """How many calls came here."""
    seen, real = [], tilewise.api.attention
    monkeypatch.setattr(tilewise.api, "attention", lambda *a, **k: seen.append(k) or real(*a, **k))
    return seen


def tensors(kv_heads=HEADS, queries=QUERIES, dtype=torch.float32):
    shapes = [(BATCH, queries, HEADS, HEAD_DIM)] + 2 * [(BATCH, KEYS, kv_heads, HEAD_DIM)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def run(dispatch, backend, given, **options):
    with dispatch.attention_backend(backend):
        out = dispatch.dispatch_attention_fn(*given, **options)
    return out, *torch.autograd.grad(out, given, torch.ones_like(out))


MASKS = {
    "none": lambda: None,
    "padding": lambda: torch.arange(KEYS) < torch.tensor([[KEYS], [5]]),
    "additive padding": lambda: torch.where(torch.arange(KEYS) < torch.tensor([[7], [KEYS]]), 0.0, -1e4),
    "pairs": lambda: (torch.rand(BATCH, 1, QUERIES, KEYS) < 0.6).index_fill(3, torch.tensor(0), True),
    "bias of heads": lambda: torch.randn(1, HEADS, QUERIES, KEYS),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_dispatcher_with_masks_and_groups(dispatch, calls, name, kv_heads):
    given, mask = tensors(kv_heads), MASKS[name]()
    options = {"attn_mask": mask, "enable_gqa": kv_heads != HEADS, "scale": 0.3}
    ours = run(dispatch, "tilewise", given, **options)
    if mask is not None and mask.ndim == 2:  # diffusers 0.36 has no such masks of its own
        options["attn_mask"] = mask[:, None, None]
    theirs = run(dispatch, "native", given, **options)
    assert len(calls) == 1
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("queries", [5, KEYS, 20])
def test_causal_is_aligned_at_the_beginning(dispatch, calls, queries):
    given = tensors(queries=queries)
    ours, theirs = (run(dispatch, backend, given, is_causal=True) for backend in ("tilewise", "native"))
    assert len(calls) == 1
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_lse_and_window(dispatch):
    q, k, v = (t.detach() for t in tensors())
    options = {"return_lse": True, "window_size": (3, 2)}
    with dispatch.attention_backend("tilewise"):
        found = dispatch.dispatch_attention_fn(q, k, v, attention_kwargs=options)
    exact, baseline = (
        reference.attention(q, k, v, window=(3, 2), dtype=t) for t in (torch.float64, torch.float32)
    )
    for report in map(compare, ("out", "lse"), found, exact, baseline):
        assert report.max_error <= report.max_budget, str(report)


def test_autocast(dispatch):
    given = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (run(dispatch, backend, given)[0] for backend in ("tilewise", "native"))
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_compiled_without_graph_breaks(dispatch):
    torch._dynamo.reset()
    member = dispatch.AttentionBackendName("tilewise")

    def layer(q, k, v):
        return dispatch.dispatch_attention_fn(q, k, v, backend=member).sin()

    given = [t.detach() for t in tensors()]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), layer(*given))


def test_refusals(dispatch):
    q, k, v = tensors(kv_heads=2)
    with pytest.raises(ValueError, match=r"key\.shape\[2\]=2 \(heads\) must equal query\.shape\[2\]=4"):
        compat_diffusers.attention(q, k, v)
    with pytest.raises(TypeError, match=r"attn_mask\.dtype=torch\.int64 must be torch\.bool"):
        compat_diffusers.attention(q, q, q, attn_mask=torch.ones(1, 1, 1, 13, dtype=torch.long))
    config = SimpleNamespace(context_parallel_config=SimpleNamespace(ring_degree=2))
    for name, value in {
        "dropout_p": 0.5,
        "window_size": (3, 0),
        "attn_mask": torch.ones(1, 1, 1, 13),
    }.items():
        with pytest.raises(NotImplementedError, match=f"{name} is not served under .* context parallelism"):
            compat_diffusers.attention(q, q, q, _parallel_config=config, **{name: value})


def test_versions_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", type(sys)("diffusers"))
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.30.0")
    with pytest.raises(NotImplementedError, match=r"diffusers 0\.30\.0 has no .*; 0\.36 to 0\.42 are tested"):
        compat_diffusers.register()

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"tilewise\[diffusers\]"):
        compat_diffusers.register()


# ---- models


def flux():
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=12, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(BATCH, 12, 4), "encoder_hidden_states": torch.randn(BATCH, 7, 12),
        "pooled_projections": torch.randn(BATCH, 8), "timestep": torch.rand(BATCH),
        "img_ids": torch.randint(4, (12, 3)).float(), "txt_ids": torch.zeros(7, 3),
    }  # fmt: skip


def wan():
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(BATCH, 4, 2, 8, 8), "timestep": torch.randint(1000, (BATCH,)),
        "encoder_hidden_states": torch.randn(BATCH, 7, 16),
    }  # fmt: skip


def hunyuan_video():
    """Text of two lengths: a mask over text and image together."""
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=False,
        text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    mask = torch.ones(BATCH, 7, dtype=torch.int64)
    mask[0, 4:] = 0
    return model, {
        "hidden_states": torch.randn(BATCH, 4, 1, 4, 4), "timestep": torch.randint(1000, (BATCH,)),
        "encoder_hidden_states": torch.randn(BATCH, 7, 16), "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(BATCH, 8),
    }  # fmt: skip


@pytest.mark.parametrize("make", [flux, wan, hunyuan_video])
def test_models_give_the_same(dispatch, calls, make):
    torch.manual_seed(0)
    model, given = make()
    given["hidden_states"].requires_grad_()
    found, counts = [], []
    for name in ("tilewise", "native"):
        model.set_attention_backend(name)
        out = model(**given).sample
        grads = torch.autograd.grad(out.square().sum(), (given["hidden_states"], *model.parameters()),
                                    allow_unused=True)  # fmt: skip
        found.append([out, *(g for g in grads if g is not None)])
        counts.append(len(calls))
    model.reset_attention_backend()
    assert counts[0] == counts[1] >= 2  # all of them in the first run
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4 * theirs.abs().max().item() + 1e-6, rtol=1e-4)


def test_a_model_that_calls_pytorch_is_told_by_its_processors(dispatch, calls):
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=8, out_channels=4,
    )  # fmt: skip
    model.set_attention_backend("tilewise")
    model(
        hidden_states=torch.randn(BATCH, 4, 8, 8), encoder_hidden_states=torch.randn(BATCH, 5, 12),
        pooled_projections=torch.randn(BATCH, 8), timestep=torch.rand(BATCH),
    )  # fmt: skip
    model.reset_attention_backend()
    assert not calls
    for asks, other in ((False, model), (True, flux()[0])):  # as the guide tells them apart
        processors = [getattr(module, "processor", None) for module in other.modules()]
        assert any(hasattr(processor, "_attention_backend") for processor in processors) is asks


# ---- a sequence in shards


def test_context_parallelism(dispatch, tmp_path):
    """Two processes: outputs and gradients of ring and Ulysses are those of one."""
    if not hasattr(dispatch, "_templated_context_parallel_attention"):
        pytest.skip("this diffusers has no context parallelism")
    script = Path(__file__).with_name("diffusers_parallel.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / "store", str(rank)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        told, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors[-4000:]
        assert told.count("same") == 4  # cases
