"""SGLang's backend: its own pools and batches, served here, against float64 and its torch_native backend.

SGLang is no part of a development install: what needs it is skipped without.
"""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewise import reference
from tilewise.compat import sglang as compat_sglang
from tilewise.testing import compare

ROOT = Path(__file__).parents[2]
HEADS, KV_HEADS, HEAD_DIM, SLOTS = 4, 2, 16, 512
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def classes():
    """The module of the backend."""
    pytest.importorskip("sglang.srt.layers.attention.torch_native_backend", exc_type=ImportError)
    from tilewise.compat.sglang import attention

    return attention


def runner_of(page_size, dtype=torch.float32):
    """What backends read of a model runner: SGLang's own pools."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    requests = ReqToTokenPool(size=8, max_context_len=96, device="cpu", enable_memory_saver=False)
    pool = MHATokenToKVPool(
        size=SLOTS, page_size=page_size, dtype=dtype, head_num=KV_HEADS, head_dim=HEAD_DIM, layer_num=2,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    return SimpleNamespace(
        req_to_token_pool=requests, token_to_kv_pool=pool, page_size=page_size, device="cpu"
    )


def layer_of(**options):
    from sglang.srt.layers.radix_attention import RadixAttention

    return RadixAttention(HEADS, HEAD_DIM, 0.2, KV_HEADS, layer_id=1, **options)


def batch_of(runner, new, lengths):
    """A step: each request's tokens in pages drawn at random, and the slots of the new ones."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    page = runner.page_size
    rows = 1 + torch.randperm(7)[: len(new)]
    free = 1 + torch.randperm(SLOTS // page - 1)
    table, slots = runner.req_to_token_pool.req_to_token, []
    for row, n, length in zip(rows, new, lengths, strict=True):
        own, free = free[: -(-length // page)], free[-(-length // page) :]
        tokens = (own[:, None] * page + torch.arange(page)).flatten()[:length]
        table[row, :length] = tokens.to(table.dtype)
        slots.append(tokens[length - n :])
    is_decode = set(new) == {1}
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.EXTEND, batch_size=len(new),
        input_ids=torch.zeros(sum(new), dtype=torch.int64), req_pool_indices=rows,
        seq_lens=torch.tensor(lengths), out_cache_loc=torch.cat(slots), seq_lens_sum=sum(lengths),
    )  # fmt: skip
    batch.seq_lens_cpu = batch.seq_lens
    if not is_decode:
        batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(new), list(new)
        batch.extend_prefix_lens = batch.seq_lens - batch.extend_seq_lens
    return batch


def fill(runner, batch, new, lengths):
    """Keys and values of each request, the earlier ones in the cache; and the new tokens' q, k, v."""
    pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    dtype = pool.get_key_buffer(1).dtype
    keys, values = ([torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype) for n in lengths] for _ in "kv")
    buffers = pool.get_key_buffer(1), pool.get_value_buffer(1)
    for buffer in buffers:
        buffer.copy_(torch.tensor(float("nan")).to(dtype))
    for row, n, k, v in zip(batch.req_pool_indices, new, keys, values, strict=True):
        old = table[row, : len(k) - n].long()
        buffers[0][old], buffers[1][old] = k[: len(k) - n], v[: len(v) - n]
    q = torch.randn(sum(new), HEADS * HEAD_DIM).to(dtype)
    k, v = (torch.cat([t[len(t) - n :] for t, n in zip(ts, new)]) for ts in (keys, values))
    return keys, values, (q, k, v)


def check(out, q, new, keys, values, **options):
    first = 0
    out, q = (t.view(-1, HEADS, HEAD_DIM) for t in (out, q))
    for n, k, v in zip(new, keys, values, strict=True):
        rows = slice(first, first + n)
        first += n
        expected = [
            reference.attention(*(x[None].to(t) for x in (q[rows], k, v)), dtype=t, scale=0.2, **options)[0]
            for t in (torch.float64, q.dtype)
        ]
        report = compare("out", out[None, rows], *expected)
        assert report.max_error <= report.max_budget, str(report)


STEPS = {
    "prefill": ([7, 33], [7, 33]),
    "decode": ([1, 1, 1], [40, 1, 17]),
    "mixed": ([1, 20, 3], [50, 20, 3]),
    "cached prefix": ([5, 30], [37, 62]),
}
OPTIONS = {
    "plain": ({}, {}),
    "window": ({"sliding_window_size": 9}, {"window": (9, None)}),
    "softcap": ({"logit_cap": 3.0}, {"softcap": 3.0}),
}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step(classes, page_size, step, name):
    torch.manual_seed(0)
    (layer_options, options), (new, lengths) = OPTIONS[name], STEPS[step]
    runner = runner_of(page_size, torch.bfloat16 if name == "window" else torch.float32)
    batch, layer = batch_of(runner, new, lengths), layer_of(**layer_options)
    keys, values, (q, k, v) = fill(runner, batch, new, lengths)
    backend = compat_sglang.make(runner)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, layer, batch)
    check(out, q, new, keys, values, causal=True, **options)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("scales", [None, (1.0, 1.0), (0.37, 2.9)])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_over_8_bits(classes, monkeypatch, page_size, scales, step, name):
    """Against float64 on what the pool holds, 8 bits times a layer's scales; what is too large saturates."""
    monkeypatch.setattr("tilewise.compat.MOST_KEYS", 64)
    torch.manual_seed(0)
    (layer_options, options), (new, lengths) = OPTIONS[name], STEPS[step]
    runner = runner_of(page_size, FP8)
    batch, layer = batch_of(runner, new, lengths), layer_of(**layer_options)
    _, _, (q, k, v) = fill(runner, batch, new, lengths)
    if scales is not None:  # as SGLang keeps those of a checkpoint
        layer.k_scale, layer.v_scale = (torch.nn.Parameter(torch.tensor(x), False) for x in scales)
        layer.k_scale_float, layer.v_scale_float = scales
    dtype = torch.bfloat16 if name == "window" else torch.float32
    q, k, v = (x.to(dtype) for x in (q, k, v))
    v[-1] *= 1000.0
    last = v[-1].double()
    backend = compat_sglang.make(runner)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, layer, batch)
    pool, table, held = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token, []
    for buffer, scale in zip((pool.get_key_buffer(1), pool.get_value_buffer(1)), scales or (1.0, 1.0)):
        rows = zip(batch.req_pool_indices, lengths, strict=True)
        held.append([buffer[table[row, :n].long()].double() * scale for row, n in rows])
    most = 448.0 * (1.0 if scales is None else scales[1])
    torch.testing.assert_close(held[1][-1][-1], last.clamp(-most, most), rtol=0.07, atol=0.01)
    check(out, q, new, *held, causal=True, **options)


@pytest.mark.parametrize("step", STEPS)
def test_torch_native_gives_the_same(classes, step):
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    torch.manual_seed(0)
    new, lengths = STEPS[step]
    runner = runner_of(16)
    batch, layer = batch_of(runner, new, lengths), layer_of()
    *_, (q, k, v) = fill(runner, batch, new, lengths)
    runner.token_to_kv_pool.get_key_buffer(1).nan_to_num_(0.0)
    runner.token_to_kv_pool.get_value_buffer(1).nan_to_num_(0.0)
    found = []
    for backend in (compat_sglang.make(runner), TorchNativeAttnBackend(runner)):
        backend.init_forward_metadata(batch)
        found.append(backend.forward(q, k, v, layer, batch))
    torch.testing.assert_close(*found, atol=2e-6, rtol=1e-5)


def test_sinks_and_encoders(classes):
    from sglang.srt.layers.radix_attention import AttentionType

    torch.manual_seed(0)
    new, lengths = STEPS["prefill"]
    runner = runner_of(16)
    batch, sinks = batch_of(runner, new, lengths), torch.tensor([0.3, -1.0, 2.0, 0.0])
    keys, values, (q, k, v) = fill(runner, batch, new, lengths)
    backend = compat_sglang.make(runner)
    backend.init_forward_metadata(batch)
    check(
        backend.forward(q, k, v, layer_of(), batch, sinks=sinks),
        q,
        new,
        keys,
        values,
        causal=True,
        sinks=sinks,
    )
    encoder = layer_of(attn_type=AttentionType.ENCODER_ONLY)
    check(backend.forward(q, k, v, encoder, batch), q, new, keys, values)


def test_what_a_graph_would_replay(classes):
    """As of a capture: nothing is read on the host between the buffers that change and the result."""
    torch.manual_seed(0)
    runner, new = runner_of(16), [1, 1]
    batch = batch_of(runner, new, [40, 3])
    backend = compat_sglang.make(runner)
    backend.init_cuda_graph_state(8, 8)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    batch.seq_lens_cpu = None
    for lengths in ([40, 3], [17, 80]):
        fresh = batch_of(runner, new, lengths)
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(batch, name).copy_(getattr(fresh, name))
        keys, values, (q, k, v) = fill(runner, batch, new, lengths)
        backend.init_forward_metadata_in_graph(batch)
        check(backend.forward(q, k, v, layer_of(), batch), q, new, keys, values, causal=True)
    with pytest.raises(NotImplementedError, match="one token a request"):
        backend.init_forward_metadata_out_graph(batch_of(runner, [3, 2], [3, 2]), in_capture=True)


def test_what_is_refused(classes):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = runner_of(16)
    batch, backend = batch_of(runner, [2], [2]), compat_sglang.make(runner)
    backend.init_forward_metadata(batch)
    q, k = torch.randn(2, HEADS * HEAD_DIM), torch.randn(2, KV_HEADS, HEAD_DIM)
    with pytest.raises(NotImplementedError, match="k_rope: tilewise takes sinks only"):
        backend.forward(q, k, k, layer_of(), batch, k_rope=k)
    with pytest.raises(NotImplementedError, match="cross-attention"):
        backend.forward(q, k, k, layer_of(is_cross_attention=True), batch)
    with pytest.raises(NotImplementedError, match=r"--kv-cache-dtype is torch\.float32"):
        backend.forward(q.half(), None, None, layer_of(), batch)
    other = compat_sglang.make(runner_of(16, torch.float8_e5m2))
    with pytest.raises(NotImplementedError, match=r"float8_e5m2, must be that of queries, .* or fp8_e4m3"):
        other.forward(q, None, None, layer_of(), batch)
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    with pytest.raises(NotImplementedError, match="TARGET_VERIFY"):
        backend.init_forward_metadata(batch)


def test_sglang_knows_the_name(classes):
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry

    compat_sglang.plugin()
    compat_sglang.plugin()
    assert choices.ATTENTION_BACKEND_CHOICES.count("tilewise") == 1
    backend = attention_registry.ATTENTION_BACKENDS["tilewise"](runner_of(16))
    assert isinstance(backend, classes.TilewiseAttnBackend)


# ---- without SGLang


def test_entry_point_is_declared():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    point = importlib.metadata.EntryPoint("", points["sglang.srt.plugins"]["tilewise"], "")
    assert point.load() is compat_sglang.plugin


def test_versions_are_named(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.attention_registry", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.0")
    with pytest.raises(NotImplementedError, match=r"sglang 0\.4\.0 has other interfaces; 0\.5\.23 is tested"):
        compat_sglang.register()
    compat_sglang.plugin()
    assert "sglang 0.4.0" in caplog.text

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r"tilewise\[sglang\]"):
        compat_sglang.register()
