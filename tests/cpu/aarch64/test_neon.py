"""The NEON kernels, run by an emulated processor, against float64."""

from __future__ import annotations

import llvmlite.binding
import pytest
import qemu
import random_cases
import torch
from random_cases import Case, llvm

import tilewise
from tilewise import Aux, reference
from tilewise.core.problem import Inputs, Options, describe
from tilewise.cpu.host import compile as kernels, configs
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.kernels.build import build

# One of 2015, with neither bfloat16 nor arithmetic of float16, where any later instruction is an illegal one;
# and the code for an Apple M2 on a processor that has every extension.
OLD = qemu.Processor(kernels.neon_targets("cortex-a72", "", has_bf16=False)[0], "cortex-a72")
NEW = qemu.Processor(kernels.neon_targets("apple-m2", "", has_bf16=True)[0], "max")
needs_emulator = pytest.mark.skipif(qemu.missing() is not None, reason=f"{qemu.missing()}")
on_both = pytest.mark.parametrize(
    ("processor", "dtype"),
    [(OLD, torch.float32), (OLD, torch.float16), (OLD, torch.bfloat16), (NEW, torch.bfloat16)],
    ids=["a72-float32", "a72-float16", "a72-bfloat16", "m2-bfloat16"],
)


def case(seqlen_q, seqlen_k, heads, kv_heads, dim, dtype, options, **scores):
    query, key, value = (
        torch.randn(2, n, h, dim).to(dtype)
        for n, h in ((seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads))
    )
    inputs = Inputs(query, key, value, **scores)
    return Case(0, inputs, options, torch.randn_like(query), torch.randn(2, heads, seqlen_q))


@needs_emulator
@pytest.mark.sample(2)
@on_both
def test_forward_and_backward(install, processor, dtype):
    """Lengths that fill neither tiles nor vectors, queries without a key, heads that share a key head."""
    install(processor)
    has_products = processor is NEW
    for seqlen_q, seqlen_k, options in (
        (45, 33, Options(causal=True)),
        (37, 131, Options(window_left=20, window_right=3)),
        (19, 80, Options()),
    ):
        drawn = case(seqlen_q, seqlen_k, 4, 2, 40, dtype, options)
        assert configs.backward_config(drawn.problem, drawn.inputs).terms == has_products
        assert not random_cases.check(drawn)


@needs_emulator
@pytest.mark.sample(2)
@on_both
def test_statistics(install, processor, dtype):
    """Those of the forward and of the second pass, of rows without a key too."""
    install(processor)
    query, key = torch.randn(1, 75, 2, 40).to(dtype), torch.randn(1, 70, 1, 40).to(dtype)
    ask = Aux(row_max=True, entropy=True, column_sum=True, block_sum=13, top_k=4, expected_distance=True)
    options = {"causal": True, "sinks": torch.randn(2)}
    _, found = tilewise.attention(query, key, key, return_aux=ask, backend="llvm", **options)
    exact = reference.attention_statistics(query, key, ask, **options)
    assert torch.equal(found.top_k.keys, exact.top_k.keys)
    torch.testing.assert_close(found.top_k.weights.double(), exact.top_k.weights, rtol=0, atol=1e-5)
    for name in set(ask.names) - {"top_k"}:
        a, b = (getattr(statistics, name).double() for statistics in (found, exact))
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@needs_emulator
@pytest.mark.sample(2)
@on_both
def test_few_queries(install, processor, dtype):
    install(processor)
    seqlen_q = 3 if dtype == torch.float16 else 1  # 4 or 12 rows
    for seqlen_k in (65, 1333):
        drawn = case(seqlen_q, seqlen_k, 8, 2, 64, dtype, Options(causal=True))
        assert configs.is_decoding(drawn.problem)
        assert not random_cases.check(drawn)


@needs_emulator
@pytest.mark.sample(1)
@pytest.mark.parametrize("processor", [OLD, NEW], ids=["a72", "m2"])
def test_options(install, processor):
    install(processor)
    options = Options(causal=True, softcap=5.0, dropout_p=0.3)
    scores = {
        "bias": torch.randn(1, 4, 37, 90).bfloat16().requires_grad_(),
        "alibi_slopes": torch.rand(4),
        "sinks": torch.randn(4).bfloat16(),
        "mask": torch.rand(2, 1, 37, 90) < 0.8,
        "dropout_seed": torch.randint(2**63 - 1, ()),
    }
    assert not random_cases.check(case(37, 90, 4, 2, 24, torch.bfloat16, options, **scores))


@needs_emulator
@pytest.mark.sample(1)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1500), (50, 400)])
def test_any_number_of_threads_gives_the_same_bits(install, seqlen_q, seqlen_k):
    install(NEW)
    inputs = Inputs(*(torch.randn(1, n, 2, 32).bfloat16() for n in (seqlen_q, seqlen_k, seqlen_k)))
    problem, dout = describe(inputs, Options()), torch.randn_like(inputs.query)

    def results():
        out, lse = llvm.forward(problem, inputs)
        return out, lse, *llvm.backward(problem, inputs, out, lse, dout, None)[:3]

    random_cases.check_threads(results, (1, 3))


@needs_emulator
def test_an_instruction_that_the_processor_lacks_is_found(install):
    """That the tests above can fail: dot products of bfloat16 do not run on a processor of 2015."""
    install(qemu.Processor(NEW.target, OLD.emulated))
    inputs = Inputs(*(torch.randn(1, 40, 1, 32).bfloat16() for _ in range(3)))
    with pytest.raises(qemu.subprocess.CalledProcessError):
        llvm.forward(describe(inputs, Options()), inputs)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_code_for_macos_is_made(name):
    config = Config("bf16", 40, 64, 8, has_softcap=True, terms=1)
    ir_text, _ = build(name, config, NEW.target)
    code = kernels.generate(ir_text, NEW.target, triple="arm64-apple-darwin")
    assert code[:8] == bytes.fromhex("cffaedfe0c000001")  # Mach-O, ARM64


def test_which_instructions_a_processor_gets(monkeypatch):
    """LLVM knows nothing of the features of some systems' processors, and asks nobody for bfloat16."""

    def refuse():
        raise RuntimeError

    find = kernels.target.__wrapped__
    monkeypatch.setattr(kernels.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", refuse)
    for has_bf16, expected in ((False, "neon"), (True, "neon_bf16")):
        monkeypatch.setattr(kernels, "_arm_has_bf16", lambda found=has_bf16: found)
        assert find().isa == expected
        assert find("neon").isa == "neon"
    assert find("neon_bf16").features.endswith("+bf16")
    assert find("avx2") == ("TILEWISE_CPU_ISA=avx2 is not one of ['neon_bf16', 'neon'] that this machine has")
