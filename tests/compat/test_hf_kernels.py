"""The repository for Hugging Face's kernels: written, loaded as they load it, and used by transformers.

`kernels` is no part of a development install; without it the repository is loaded by the same three lines.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import runpy
import subprocess
import sys

import pytest
import torch

from tilewise import reference
from tilewise.compat import hf_kernels
from tilewise.compat.hf_kernels import functions
from tilewise.testing import compare


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return hf_kernels.write(tmp_path_factory.mktemp("hub") / "tilewise")


def sinks_and_tensors(packed=False):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 13, 2, 16), torch.randn(2, 13, 2, 16)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    return sinks, *((t.flatten(0, 1) for t in (q, k, v)) if packed else (q, k, v))


def exact(q, k, v, **options):
    return [reference.attention(q, k, v, dtype=t, **options)[0] for t in (torch.float64, torch.float32)]


def within(out, expected):
    report = compare("out", out, *expected)
    assert report.max_error <= report.max_budget, str(report)


def test_repository_holds_what_the_loader_wants(repository):
    variants = sorted(path.name for path in (repository / "build").iterdir())
    assert variants == ["torch-cpu", "torch-cuda"]
    for variant in variants:
        metadata = json.loads((repository / "build" / variant / "metadata.json").read_text())
        assert f"torch-{metadata['backend']['type']}" == variant
    files = list(repository.rglob("*.py"))
    assert sum(path.stat().st_size for path in files) < 6 << 20
    absolute = re.compile(r"^\s*(from|import) tilewise", re.MULTILINE)
    assert not [path for path in files if absolute.search(path.read_text())]
    with pytest.raises(FileExistsError):
        hf_kernels.write(repository)


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(sys, "argv", ["", str(file)])
    with pytest.raises(SystemExit, match=r"torch-cuda: Not a directory"):
        runpy.run_module("tilewise.compat.hf_kernels", run_name="__main__")


LOAD = """
import importlib.util, json, sys, torch
from pathlib import Path
sys.modules["tilewise"] = None  # nothing here may import it
variant = Path(sys.argv[1]) / "build" / "torch-cpu"
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
q, k, v = (torch.randn(1, 9, 2, 8, requires_grad=True) for _ in "qkv")
def both(call, *heads):
    out = call(*heads)
    return out, *torch.autograd.grad(out.sin().sum(), (q, k, v))
ours = both(lambda: kernel.flash_attn_func(q, k, v, causal=True))
theirs = both(lambda: torch.nn.functional.scaled_dot_product_attention(
    *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2))
torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
packed = kernel.flash_attn_varlen_func(q[0], k[0], v[0], *2 * [torch.tensor([0, 4, 9])], 5, 5)
compiled = torch.compile(kernel.flash_attn_func, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(compiled(q, k, v, causal=True), ours[0])
assert f"{name}.cpu.host.plan" in sys.modules, "the CPU kernels were not asked"
assert hasattr(getattr(torch.ops, name), "attention")
"""


def run(code, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=os.environ | environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_it_runs_without_the_package(repository):
    run(LOAD, repository)


HUB = """
import sys, torch, kernels, transformers
kernel = kernels.get_kernel("someone/tilewise", version=1)
assert kernel.__name__.startswith("_tilewise_cpu_"), kernel
sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, initializer_range=0.3)
models = [transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes),
          attn_implementation=name).eval() for name in ("someone/tilewise", "sdpa")]
models[0].load_state_dict(models[1].state_dict())
calls = []
for name in ("flash_attn_func", "flash_attn_varlen_func"):
    def counted(*a, real=getattr(kernel.flash_attn, name), **k):
        calls.append(1)
        return real(*a, **k)
    setattr(kernel.flash_attn, name, counted)
ids = torch.randint(3, 40, (2, 12))
mask = torch.ones_like(ids); mask[0, :5] = 0
given = {"input_ids": ids, "attention_mask": mask}
ours, theirs = (model(**given).logits[mask.bool()] for model in models)
torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
given |= {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
ours, theirs = (model.generate(**given) for model in models)
assert torch.equal(ours, theirs)
print(len(calls))
"""


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs kernels")
def test_transformers_loads_it(repository):
    pytest.importorskip("transformers")
    calls = run(HUB, LOCAL_KERNELS=f"someone/tilewise={repository}", HF_HUB_OFFLINE="1")
    assert int(calls.splitlines()[-1]) == 14  # two layers: once, and at six steps of generation


# ---- sinks


def test_sinks(repository):
    sinks, q, k, v = sinks_and_tensors()
    window = {"causal": True, "window_size": (5, 5), "softcap": 2.0}
    expected = exact(q, k, v, causal=True, window=(5, None), softcap=2.0, sinks=sinks)
    within(functions.flash_attn_func(q, k, v, s_aux=sinks, **window), expected)
    starts_q, starts_k = torch.tensor([0, 9, 18]), torch.tensor([0, 13, 26])
    _, *packed = sinks_and_tensors(packed=True)
    out = functions.flash_attn_varlen_func(*packed, starts_q, starts_k, 9, 13, s_aux=sinks, **window)
    within(out.view(2, 9, 4, 16), expected)
    out = functions.flash_attn_with_kvcache(q, k, v, cache_seqlens=13, s_aux=sinks, **window)
    within(out, expected)


def test_sinks_of_rows_that_see_nothing():
    sinks, q, k, v = sinks_and_tensors()
    out = functions.flash_attn_with_kvcache(q, k, v, cache_seqlens=5, causal=True, s_aux=sinks)
    assert not out[:, :4].any()
    within(out, exact(q, k[:, :5], v[:, :5], causal=True, sinks=sinks))


def test_sinks_of_a_cache_in_float64():
    sinks, q, k, v = (t.double() for t in sinks_and_tensors())
    sinks = sinks + 1e-9
    out = functions.flash_attn_with_kvcache(q, k, v, cache_seqlens=13, s_aux=sinks)
    torch.testing.assert_close(out, exact(q, k, v, sinks=sinks)[0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(1,), (3,), (1, 9), (4, 1)])
def test_sinks_that_do_not_fit_leave_the_cache_as_it_was(shape):
    _, q, k, v = sinks_and_tensors()
    caches = torch.zeros_like(k), torch.zeros_like(v)
    with pytest.raises(ValueError, match=r"s_aux of shape .* must be \(heads,\)=\(4,\)"):
        functions.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=0, s_aux=torch.zeros(shape))
    assert not caches[0].any()


def test_without_sinks_it_is_flash_attn():
    sinks, q, k, v = sinks_and_tensors()
    out, *_ = functions.flash_attn_func(q, k, v, return_attn_probs=True)
    within(out, exact(q, k, v))
    with pytest.raises(NotImplementedError, match="return_attn_probs=True must be False with s_aux"):
        functions.flash_attn_func(q, k, v, return_attn_probs=True, s_aux=sinks)
    with pytest.raises(NotImplementedError, match="must be None with s_aux"):
        lengths = torch.tensor([0, 9]), torch.tensor([0, 13]), 9, 13
        table = torch.zeros(1, 1, dtype=torch.int32)
        functions.flash_attn_varlen_func(q[0], k[0], v[0], *lengths, block_table=table, s_aux=sinks)
    for function in (functions.flash_attn_func, functions.flash_attn_varlen_func):  # transformers asks so
        assert {"s_aux", "window_size", "softcap"} <= set(inspect.signature(function).parameters)
    for aux in (None, sinks):
        with pytest.raises(
            TypeError, match="casual=True is no argument of flash_attn_func: did you mean causal"
        ):
            functions.flash_attn_func(q, k, v, casual=True, s_aux=aux)
    with pytest.raises(NotImplementedError, match="return_softmax_lse=True must be False with s_aux"):
        functions.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, s_aux=sinks)
