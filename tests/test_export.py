"""`torch.export` of models with attention, with lengths left open; AOTInductor from what was exported."""

from __future__ import annotations

import io

import pytest
import torch

import tilewise
from tilewise import flash_attn_3


class Block(torch.nn.Module):
    """Both functions with options of their own, in one layer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
        windowed = tilewise.attention(q, k, v, causal=True, window=(5, 0), softcap=20.0)
        turned = (t.transpose(1, 2) for t in (q, k, v))
        causal = tilewise.scaled_dot_product_attention(*turned, is_causal=True)
        return self.out((windowed + causal.transpose(1, 2)).flatten(2))


@pytest.fixture(scope="module")
def exported():
    model, x = Block(), torch.randn(2, 16, 32)
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("seqlen", min=2, max=4096)}
    return model, torch.export.export(model, (x,), dynamic_shapes=(sizes,))


@pytest.mark.parametrize("shape", [(2, 16), (3, 29), (5, 70)])
def test_other_lengths_than_the_traced(exported, shape):
    model, program = exported
    x = torch.randn(*shape, 32)
    torch.testing.assert_close(program.module()(x), model(x))
    torch.testing.assert_close(program.run_decompositions().module()(x), model(x))


def test_saved_and_loaded(exported):
    model, program = exported
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(2, 33, 32)
    torch.testing.assert_close(torch.export.load(file).module()(x), model(x))


def test_gradients_of_the_exported_module(exported):
    model, program = exported
    x = torch.randn(2, 19, 32, requires_grad=True)
    grads = [torch.autograd.grad(call(x).square().sum(), x)[0] for call in (program.module(), model)]
    torch.testing.assert_close(*grads)


@pytest.mark.slow
def test_aot_inductor(exported, tmp_path):
    """Compiles C++, which takes a minute; the package loads where this library is imported."""
    model, program = exported
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(path)
    for shape in ((2, 16), (3, 50)):
        x = torch.randn(*shape, 32)
        torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize("strict", [False, True])
def test_faces_with_any_batch(strict):
    """Three dimensions, chunks of positions, a cache: no batch becomes a constant."""

    class Faces(torch.nn.Module):
        def forward(self, x, cache, lengths):
            chunks = flash_attn_3.flash_attn_func(x, x, x, causal=True, attention_chunk=4)
            first = tilewise.scaled_dot_product_attention(x[:, :, 0], x[:, :, 0], x[:, :, 0])
            return chunks, first, flash_attn_3.flash_attn_with_kvcache(x, cache, cache, cache_seqlens=lengths)

    def given(batch):
        lengths = torch.full((batch,), 7, dtype=torch.int32)
        return torch.randn(batch, 9, 2, 8), torch.randn(batch, 16, 2, 8), lengths

    sizes = ({0: torch.export.Dim.DYNAMIC},) * 3
    program = torch.export.export(Faces(), given(2), dynamic_shapes=sizes, strict=strict)
    for batch in (3, 5):
        torch.testing.assert_close(program.module()(*(x := given(batch))), Faces()(*x))


def test_a_window_of_a_symbol():
    class Half(torch.nn.Module):
        def forward(self, x):
            return tilewise.attention(x, x, x, window=(x.shape[1] // 2, 0))

    x, dynamic = torch.randn(2, 8, 4, 8), {1: torch.export.Dim("seqlen", min=4, max=64)}
    for strict in (False, True):
        program = torch.export.export(Half(), (x,), dynamic_shapes=(dynamic,), strict=strict)
        longer = torch.randn(2, 21, 4, 8)
        torch.testing.assert_close(program.module()(longer), Half()(longer))
