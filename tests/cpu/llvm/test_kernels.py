"""The LLVM kernels against float64, on random problems and on the ones that are easily wrong."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import random_cases
import torch
from random_cases import llvm

import tilewise
from tilewise import reference
from tilewise.core.dropout import keep_mask
from tilewise.core.problem import Inputs, Options, describe
from tilewise.cpu.host import backward_plan, compile as kernels, configs, forward_plan
from tilewise.cpu.host.arguments import Config
from tilewise.cpu.kernels.build import build
from tilewise.dispatch import plans
from tilewise.testing import check_attention

HERE = Path(__file__).parent
DEFAULT_ISA = getattr(kernels.target(), "isa", "")
ISA = getattr(kernels.target(kernels.WANTED_ISA), "isa", "")  # of this process: `make test-isa` asks for each
AVX512 = ("avx512", "avx512_bf16", "amx")
XEON = kernels.Target("amx", 64, 8, "sapphirerapids", "-prefer-256-bit")


def groups_of(*dtypes: torch.dtype) -> list[int]:
    """Groups of random problems, which have one type each."""
    return [group for group in range(12, 60) if random.Random(group).choice(random_cases.DTYPES) in dtypes]


BFLOAT16_GROUPS = groups_of(torch.bfloat16)[:8]  # with AMX, kernels of their own
# Dot products round each term, which float32's three terms, six times as many terms, do not stand.
CUT_GROUPS = groups_of(torch.float16)[:6] + groups_of(torch.float32)[: 6 * (ISA == "amx")]

DROPOUT_GROUP = 6


@pytest.mark.sample(2)
@pytest.mark.parametrize("group", [*range(12), *BFLOAT16_GROUPS])
def test_random_problems_meet_the_error_budget(group):
    first = group * random_cases.CASES_A_KERNEL
    failures = [
        line for seed in range(first, first + 8) for line in random_cases.check(random_cases.draw(seed))
    ]
    assert not failures, "\n".join(failures)


@pytest.mark.sample(1)
@pytest.mark.skipif(ISA not in AVX512[1:], reason="needs AVX-512's products of bfloat16")
@pytest.mark.parametrize("group", CUT_GROUPS)
def test_short_problems_in_terms_meet_the_error_budget(group, monkeypatch):
    """Numbers are cut for long calls; here for all, as the kernels' edges and tails are met by short ones."""
    monkeypatch.setattr(configs, "CUT_FEWEST", dict.fromkeys(configs.CUT, (1, 1, 1)))
    monkeypatch.setattr(configs, "CUTTING", configs.BF16_PRODUCTS)
    monkeypatch.setattr(configs, "BF16_TOO_SHORT", 0)
    for module in (configs, backward_plan):
        monkeypatch.setattr(module, "is_decoding", lambda problem, is_backward=False: False)
    cut, load = set(), kernels.load
    for module in (forward_plan, backward_plan):
        monkeypatch.setattr(
            module, "load", lambda name, config: (cut.add((name, config.terms)), load(name, config))[1]
        )
    plans.clear()
    first = group * random_cases.CASES_A_KERNEL
    cases = [random_cases.draw(seed) for seed in range(first, first + 8)]
    failures = [line for case in cases for line in random_cases.check(case)]
    plans.clear()
    assert not failures, "\n".join(failures)
    terms = configs.CUT[cases[0].inputs.query.dtype]
    assert ("forward", terms) in cut and (("backward", terms) in cut or cases[0].problem.is_paged)


@pytest.mark.skipif(ISA != "amx", reason="needs AMX")
@pytest.mark.parametrize(("heads", "seqlen", "terms"), [(4, 208, 0), (4, 209, 3), (3, 417, 0), (3, 418, 3)])
def test_float32_is_cut_from_so_many_queries_on(heads, seqlen, terms):
    inputs = qkv(1, seqlen, seqlen, heads, heads, 64)
    problem = describe(inputs, Options())
    assert configs.forward_config(problem, inputs).terms == terms
    assert configs.backward_config(problem, inputs).terms == terms


@pytest.mark.sample(2)
@pytest.mark.skipif(ISA not in configs.BF16_PRODUCTS, reason="needs products of bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("seqlen_k", "dim", "key_block"),
    [(128, 64, 128), (129, 64, 0), (128, 128, 128), (129, 128, 256), (256, 128, 256), (257, 128, 0)],
)
def test_few_weights_are_turned_instead_of_values(seqlen_k, dim, key_block, dtype, monkeypatch):
    monkeypatch.setattr(configs, "CUTTING", configs.BF16_PRODUCTS)
    inputs = qkv(1, 60, seqlen_k, 2, 2, dim, dtype)
    config = configs.forward_config(describe(inputs, Options()), inputs)
    assert config.terms and config.key_block == key_block


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (40, 3)}, {"sinks": torch.tensor([0.5, -1.0])}, {}], ids=str
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(15, 70), (17, 128), (97, 97), (209, 133), (100, 250)])
def test_one_block_of_keys_meets_the_error_budget(seqlen_q, seqlen_k, options, dtype):
    """Queries left over for one, two and three vectors; some that see no key."""
    inputs = qkv(2, seqlen_q, seqlen_k, 2, 1, 136, dtype)
    check_attention(*inputs[:3], backend="llvm", **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"alibi_slopes": torch.tensor([0.5, 0.1, 0.2, 0.4])}, {}], ids=str
)
@pytest.mark.parametrize(("seqlen_q", "kv_heads"), [(9, 4), (13, 4), (17, 4), (24, 4), (25, 4), (5, 1)])
def test_few_queries_and_keys_meet_the_error_budget(seqlen_q, kv_heads, options, dtype):
    inputs = qkv(2, seqlen_q, 30, 4, kv_heads, 72, dtype)
    check_attention(*inputs[:3], backend="llvm", **options)


@pytest.mark.parametrize(
    ("heads", "threads", "is_causal", "tiles"),
    [
        (2, 2, False, 6),  # whole heads: nothing is converted twice
        (2, 2, True, 6),
        (1, 2, False, 3),
        (1, 2, True, 1),  # later queries see more keys
        (3, 2, False, 3),
        (1, 1, True, 6),
        (64, 2, False, 6),
        (16, 16, False, 1),  # one of many is always late
    ],
)
def test_tiles_of_an_item(heads, threads, is_causal, tiles):
    facts = {"most_tiles": 16, "tile_bytes": 1 << 10, "converting": 8, "block_q": 48}
    assert forward_plan._tiles_per_item(6, heads, threads, is_causal, facts) == tiles
    assert forward_plan._tiles_per_item(0, heads, threads, is_causal, facts) == 1


def test_random_problems_have_dropout():
    for group in (DROPOUT_GROUP, *BFLOAT16_GROUPS[:1]):
        assert random_cases.draw(group * random_cases.CASES_A_KERNEL).options.dropout_p > 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("group", range(30))
def test_random_decoding_meets_the_error_budget(group):
    cases = [random_cases.draw_decoding(seed) for seed in range(group * 10, group * 10 + 5)]
    failures = [line for case in cases for line in random_cases.check(case)]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("option", ["mask", "bias"])
def test_masks_and_biases_leave_few_queries_their_kernels(option):
    """In tiles of queries one query took up to 14 times as long."""
    inputs = qkv(2, 1, 300, 4, 2, 64)
    given = torch.rand(2, 4, 1, 300) < 0.5 if option == "mask" else torch.randn(2, 4, 1, 300)
    problem = describe(inputs._replace(**{option: given}), Options())
    assert configs.is_decoding(problem) and configs.is_decoding(problem, is_backward=True)
    assert not configs.is_decoding(replace(problem, needs_grad=True, bias_needs_grad=True))


@pytest.mark.parametrize(
    ("queries", "heads", "rows"), [(1, 71, 24), (5, 8, 20), (8, 16, 32), (12, 8, 24), (4, 8, 32)]
)
def test_rows_of_many_heads_are_decoded_in_parts(queries, heads, rows):
    """In tiles of queries one query of 48 heads that share a key head took 14 times as long."""
    inputs = qkv(1, queries, 300, heads, 1, 64)
    problem = describe(inputs, Options())
    assert configs.is_decoding(problem) and configs.decode_config(problem, inputs).rows == rows
    assert configs.is_decoding(replace(problem, needs_grad=True)) == (queries * heads <= configs.DECODE_ROWS)


@pytest.mark.parametrize("are_lengths_known", [False, True])
@pytest.mark.parametrize(("longest", "served_by"), [(1, "decode"), (4, "decode"), (13, "forward")])
def test_packed_sequences_of_few_queries_are_decoded(longest, served_by, are_lengths_known, monkeypatch):
    """In tiles of queries one query each took 3 to 9 times as long as in a dense call."""
    used, load = [], kernels.load
    monkeypatch.setattr(forward_plan, "load", lambda name, config: (used.append(name), load(name, config))[1])
    plans.clear()
    lengths = [[0, longest, 1], [70, 300, 0]]
    starts = [torch.tensor([0, *n]).cumsum(0) for n in lengths]
    q, k, v = (torch.randn(sum(n), 4, 64) for n in (lengths[0], lengths[1], lengths[1]))
    most = map(max, lengths) if are_lengths_known else ()
    out = tilewise.attention_varlen(q, k, v, *starts, *most, causal=True, backend="llvm")
    for (q0, q1), (k0, k1) in zip(*(itertools.pairwise(offsets.tolist()) for offsets in starts)):
        own = (t[None, rows] for t, rows in ((q, slice(q0, q1)), (k, slice(k0, k1)), (v, slice(k0, k1))))
        exact, _ = reference.attention(*own, causal=True)
        torch.testing.assert_close(out[None, q0:q1].double(), exact, rtol=1e-5, atol=1e-5)
    assert used == [served_by]


@pytest.mark.parametrize("seqlen_q", [1, 40])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_calls_in_turns_with_other_strides_of_a_mask_or_bias(name, seqlen_q):
    inputs = qkv(2, seqlen_q, 90)
    shape = (2, 2, seqlen_q, 90)
    given = torch.rand(shape) < 0.5 if name == "mask" else torch.randn(shape)
    expected = reference.attention(*inputs[:3], **{name: given})[0]
    by_key, by_head = (given.transpose(a, b).contiguous().transpose(a, b) for a, b in ((2, 3), (0, 1)))
    for t in (given, by_key, by_head, given, by_head, by_key):
        out = tilewise.attention(*inputs[:3], **{name: t}, backend="llvm")
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [990182, 990187])
def test_scores_of_wide_heads_are_short_sums(seed):
    """Few queries of head size 256: over the budget with lanes that sum 64 products in one chain."""
    case = random_cases.draw_decoding(seed)
    assert configs.is_decoding(case.problem) and case.problem.head_dim == 256
    assert not random_cases.check(case)


def test_scores_of_96_columns_are_two_sums():
    """float32, scores up to 14: over the budget with one chain of 96 products."""
    case = random_cases.draw(1012668)
    assert case.problem.head_dim == 96 and not configs.is_decoding(case.problem)
    assert not random_cases.check(case)


def run_script(*args: str, **environment: str) -> str:
    path = os.pathsep.join(filter(None, sys.path))  # the package that these tests import
    environment = os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run(
        [sys.executable, *args], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.sample(1)
@pytest.mark.skipif(DEFAULT_ISA not in AVX512, reason="the default target is AVX2 already, or NEON")
@pytest.mark.parametrize(
    "cases", [("5", "15"), ("4", str(DROPOUT_GROUP * random_cases.CASES_A_KERNEL)), ("3", "300", "decoding")]
)
def test_avx2_code_meets_the_error_budget(cases):
    run_script(str(HERE / "random_cases.py"), *cases, TILEWISE_CPU_ISA="avx2")


@pytest.mark.native
@pytest.mark.skipif(DEFAULT_ISA not in configs.BF16_PRODUCTS, reason="the default target has none already")
def test_code_without_products_of_bfloat16_meets_the_error_budget():
    first = BFLOAT16_GROUPS[0] * random_cases.CASES_A_KERNEL
    without = "neon" if DEFAULT_ISA == "neon_bf16" else "avx512"
    run_script(str(HERE / "random_cases.py"), "3", str(first), TILEWISE_CPU_ISA=without)


@pytest.mark.native
def test_no_amx_where_the_system_refuses_it(monkeypatch):
    monkeypatch.setattr(kernels, "may_use_amx", lambda: False)
    assert getattr(kernels.target.__wrapped__(""), "isa", "") != "amx"


def check_compiles(name, config, target=XEON):
    """A kernel for Linux on any machine."""
    processor, machine = ("aarch64", 183) if target.isa.startswith("neon") else ("x86_64", 62)
    ir_text, _ = build(name, config, target)
    code = kernels.generate(ir_text, target, triple=f"{processor}-unknown-linux-gnu")
    assert code[:4] == b"\x7fELF" and code[18] == machine


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "terms"), [("bf16", 1), ("f16", 2), ("f32", 3)])
@pytest.mark.parametrize(
    ("name", "vectors"), [("forward", 1), ("forward", 2), ("backward", 2), ("backward", 4)]
)
def test_amx_code_compiles(name, vectors, kind, terms):
    options = {"has_softcap": True, "has_alibi": True, "has_dropout": True}
    check_compiles(name, Config(kind, 40, 64, vectors, terms=terms, **options))


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize(
    "target",
    [
        kernels.Target("avx512_bf16", 64, 8, "znver4", "-prefer-256-bit"),
        kernels.Target("neon_bf16", 16, 8, "generic", "+bf16"),
    ],
)
def test_dot_products_of_bfloat16_compile(name, target):
    vectors = 32 * 4 // target.vector_bytes
    check_compiles(name, Config("bf16", 40, 64, vectors, has_dropout=True, terms=1), target)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "terms"), [("bf16", 1), ("f16", 2), ("f32", 3)])
@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("options", [{}, {"bias_kind": "f32", "has_mask": True}])
def test_amx_code_with_and_without_options_compiles(name, kind, terms, options):
    check_compiles(name, Config(kind, 40, 64, 2, terms=terms, **options))


@pytest.mark.sample(3)
@pytest.mark.parametrize("rows", [4, 12, 32])
@pytest.mark.parametrize("is_paged", [False, True])
def test_amx_decoding_compiles(rows, is_paged):
    config = Config("bf16", 40, 64, 1, has_softcap=True, page_size=16 * is_paged, rows=rows, terms=1)
    check_compiles("decode", config)


TILE_CONFIGURATION = """
declare void @llvm.x86.{0}(ptr)
define void @{0}(ptr %place) {{ call void @llvm.x86.{0}(ptr %place) ret void }}
"""


@pytest.mark.native
@pytest.mark.skipif(ISA != "amx", reason="needs AMX")
def test_the_tile_configuration_is_what_it_was_before():
    found = (ctypes.c_uint8 * 64)()
    set_, get = (
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
            kernels._link(
                name,
                kernels.generate(TILE_CONFIGURATION.format(name), kernels.current_target()),
                kernels.current_target(),
            )
        )
        for name in ("ldtilecfg", "sttilecfg")
    )
    inputs = qkv(dtype=torch.bfloat16)
    problem = describe(inputs, Options())
    few = qkv(seqlen_q=8, seqlen_k=300, dtype=torch.bfloat16)
    for config in (bytes(64), bytes([1] + [0] * 15 + [32, 0] * 4 + [0] * 24 + [7] * 4 + [0] * 12)):
        set_((ctypes.c_uint8 * 64)(*config))
        llvm.forward(describe(few, Options()), few)
        get(found)
        assert bytes(found) == config
        out, lse = llvm.forward(problem, inputs)
        llvm.backward(problem, inputs, out, lse, torch.randn_like(out), None)
        get(found)
        assert bytes(found) == config
    set_((ctypes.c_uint8 * 64)())


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_no_access_out_of_bounds(count):
    assert "no access" in run_script(str(HERE / "guarded.py"), str(count))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["forward", "backward", "decode", "decode_backward"])
@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "f64"])
def test_neon_code_compiles(name, kind):
    options = {"rows": 8} if name.startswith("decode") else {"has_dropout": True}
    neon = kernels.Target("neon", 16, 8, "generic", "+neon,+fullfp16")
    check_compiles(name, Config(kind, 40, 64, 3, has_softcap=True, has_alibi=True, **options), neon)


def qkv(batch=1, seqlen_q=70, seqlen_k=90, heads=2, kv_heads=2, dim=16, dtype=torch.float32):
    return Inputs(
        torch.randn(batch, seqlen_q, heads, dim).to(dtype),
        torch.randn(batch, seqlen_k, kv_heads, dim).to(dtype),
        torch.randn(batch, seqlen_k, kv_heads, dim).to(dtype),
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 130, 200), (2, 1, 130, 200)])
def test_gradient_of_a_bias_under_one_key_head(shape, dtype):
    """Stored where each entry has one score, added where the key head's query heads share it."""
    inputs = qkv(2, 130, 200, 3, 1, 32, dtype)._replace(bias=torch.randn(shape).to(dtype).requires_grad_())
    dout, dlse = torch.randn_like(inputs.query), torch.randn(2, 3, 130)
    assert not random_cases.check(random_cases.Case(0, inputs, Options(), dout, dlse))


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 4, 130, 700), (3, 1, 130, 700), (3, 4, 1, 700), (1, 1, 1, 700)])
def test_gradient_of_a_broadcast_bias(shape, dtype):
    """One item sums what sequences, heads or queries add, in the same order on any number of threads."""
    inputs = qkv(3, 130, 700, 4, 2, 32, dtype)._replace(bias=torch.randn(shape).to(dtype).requires_grad_())
    dout, dlse = torch.randn_like(inputs.query), torch.randn(3, 4, 130)
    found = random_cases.check(random_cases.Case(0, inputs, Options(causal=True), dout, dlse))
    assert not [line for line in found if "dbias" in line]
    problem = describe(inputs, Options(causal=True))
    inputs = inputs._replace(bias=inputs.bias.detach())
    out, lse = llvm.forward(problem, inputs)
    random_cases.check_threads(lambda: [llvm.backward(problem, inputs, out, lse, dout, dlse).bias])


@pytest.fixture
def short_vectors(monkeypatch):
    """The sizes that an ARM processor has, compiled for this one."""
    short = replace(kernels.current_target(), isa="short", vector_bytes=16, rows=8)
    monkeypatch.setattr(kernels, "target", lambda wanted="": short)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("short_vectors")
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 96), (torch.bfloat16, 192), (torch.float64, 192)])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_decoding_with_vectors_as_short_as_neon(dtype, dim, rows):
    torch.manual_seed(0)
    inputs = qkv(1, rows, 200, 1, 1, dim, dtype)
    problem = describe(inputs, Options())
    assert configs.is_decoding(problem)
    out, _ = llvm.forward(problem, inputs)
    exact, _ = reference.attention(*inputs[:3], dtype=torch.float64)
    baseline, _ = reference.attention(*inputs[:3], dtype=dtype)
    report = random_cases._compare("out", out, exact, baseline)
    assert report.is_within, report


@pytest.mark.sample(3)
@pytest.mark.usefixtures("short_vectors")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "dim"), [(13, 50, 12), (17, 50, 12), (40, 130, 12), (35, 300, 20)]
)
def test_tiles_with_vectors_as_short_as_neon(dtype, seqlen_q, seqlen_k, dim):
    """A step of 8 rows may be more than a tile has; with dim 12 it goes through scratch."""
    check_attention(*qkv(2, seqlen_q, seqlen_k, 2, 1, dim, dtype)[:3], backend="llvm", causal=True)
    check_attention(*qkv(2, seqlen_q, seqlen_k, 2, 1, dim, dtype)[:3], backend="llvm")


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (6, 2)])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_decoding_rows_at_odd_addresses(heads, dim):
    """Pairs of bfloat16 that are multiplied need not begin where a word may."""
    q, k, v = (
        torch.randn(1 + n * h * dim).bfloat16()[1:].view(1, n, h, dim)
        for n, h in ((2, heads[0]), (300, heads[1]), (300, heads[1]))
    )
    assert q.data_ptr() % 4 == k.data_ptr() % 4 == 2
    check_attention(q, k, v, causal=True, backend="llvm")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("seqlen_q", "heads"), [(1, 1), (4, 1), (8, 1), (12, 1), (5, 4)])
def test_decoding_where_scores_rise_and_fall(seqlen_q, heads):
    """Whether weights count from the largest score so far, or from one a little below it."""
    torch.manual_seed(0)
    inputs = qkv(2, seqlen_q, 900, heads, 1, 160, torch.bfloat16)
    strength = torch.tensor([0.1, 1.0, 4.0, 2.0]).repeat_interleave(225)[:, None, None]
    inputs = inputs._replace(key=(inputs.key * strength).to(torch.bfloat16))
    dlse = torch.randn(2, heads, seqlen_q)
    case = random_cases.Case(0, inputs, Options(), torch.randn_like(inputs.query), dlse)
    assert configs.is_decoding(case.problem)
    assert not random_cases.check(case)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dim", [64, 200])
def test_more_keys_than_are_loaded_at_once(dim):
    inputs = qkv(1, 300, 1500, 2, 1, dim, torch.bfloat16)
    options = Options(causal=True, window_left=1300)
    case = random_cases.Case(0, inputs, options, torch.randn_like(inputs.query), torch.randn(1, 2, 300))
    assert not random_cases.check(case)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "rows"), [(600, 1), (600, 600), (3, 1), (3, 3)])
def test_what_a_mask_hides_from_all_is_not_computed(queries, rows, dtype):
    """Keys that no query sees may be NaN, which would show: 0 times NaN is NaN."""
    q, k, v = (torch.randn(1, n, 2, 16, dtype=dtype) for n in (queries, 600, 600))
    k[:, 128:384], v[:, 128:384] = torch.nan, torch.nan
    mask = torch.ones(1, 1, rows, 600, dtype=torch.bool).tril(600 - rows + 500)
    mask[..., 128:384] = False
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out = tilewise.attention(q, k, v, mask=mask, backend="llvm")
    gradients = torch.autograd.grad(out, tensors, torch.randn_like(out))
    with torch.no_grad():
        alone = tilewise.attention(q, k, v, mask=mask, backend="llvm")
    assert all(x.isfinite().all() for x in (out, *gradients, alone))


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(1, 200, 700, 2, 1), (2, 1, 3000, 4, 2), (1, 3, 5000, 1, 1), (1, 2, 3000, 32, 8)]
)
def test_any_number_of_threads_gives_the_same_bits(shape, dtype):
    batch, seqlen_q, seqlen_k, heads, kv_heads = shape
    inputs = qkv(batch, seqlen_q, seqlen_k, heads, kv_heads, dtype=dtype)
    problem = describe(inputs, Options(window_left=300, window_right=200))
    dout = torch.randn_like(inputs.query)

    def results():
        out, lse = llvm.forward(problem, inputs)
        return out, lse, *llvm.backward(problem, inputs, out, lse, dout, None)[:3]

    random_cases.check_threads(results)


@pytest.mark.parametrize(("dtype", "mib"), [(torch.float32, 3), (torch.bfloat16, 4), (torch.float16, 4)])
def test_a_long_backward_has_no_copy_of_dq_in_float32(dtype, mib, monkeypatch):
    """The copy would take 16 MiB; PyTorch's SDPA takes 2.8 in float32 and 7.5 in bfloat16."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    inputs = Inputs(*(torch.empty(1, 16384, 4, 64, dtype=dtype) for _ in range(3)))
    problem, lse = describe(inputs, Options()), torch.empty(1, 4, 16384)
    results = inputs.query, lse, lse, inputs.query, None
    plan = backward_plan.BackwardPlan(problem, llvm.signature("backward", problem, inputs, results))
    zeros, *_ = plan.division.areas
    assert plan.division.size - zeros + 2 * plan.division.words["scratch_bytes"] <= mib << 20


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "threads"), [(4, 4, 1), (4, 4, 2), (6, 3, 2)])
def test_heads_whose_sums_share_memory_get_the_same_bits(heads, kv_heads, threads, dtype, monkeypatch):
    inputs = qkv(2, 300, 700, heads, kv_heads, dtype=dtype)
    problem, dout = describe(inputs, Options(window_right=0)), torch.randn_like(inputs.query)
    out, lse = llvm.forward(problem, inputs)
    expected = llvm.backward(problem, inputs, out, lse, dout, None)[:3]
    monkeypatch.setattr(backward_plan, "SUM_BYTES", 1)
    monkeypatch.setattr(backward_plan, "ITEMS_OF_THREAD", 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    plan = backward_plan.BackwardPlan(
        problem, llvm.signature("backward", problem, inputs, (out, lse, lse, dout, None))
    )
    assert plan.division.words["owners"] < plan.owners
    for gradient, same in zip(llvm.backward(problem, inputs, out, lse, dout, None), expected):
        assert torch.equal(gradient, same)


@pytest.mark.sample(4)
@pytest.mark.parametrize("window", [(None, None), (60, 30), (150, 0)])
@pytest.mark.parametrize(("heads", "seqlen_k"), [(1, 128), (3, 128), (1, 200), (3, 300)])
def test_tiles_that_threads_share_give_the_same_bits(heads, seqlen_k, window):
    inputs = qkv(1, 128, seqlen_k, heads, heads, 64, torch.float32)
    problem = describe(inputs, Options(window_left=window[0], window_right=window[1]))
    random_cases.check_threads(lambda: llvm.forward(problem, inputs))


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seqlen_q", [1, 70, 140])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_and_inf_go_where_standard_attention_puts_them(where, poison, seqlen_q, dtype):
    inputs = qkv(seqlen_q=seqlen_q, dtype=dtype)
    getattr(inputs, where)[0, 0 if where == "query" else 33, 1, 5] = poison
    out, _ = llvm.forward(describe(inputs, Options()), inputs)
    q, k, v = (t.float().transpose(1, 2) for t in inputs[:3])
    standard = (torch.softmax(q @ k.mT * 16**-0.5, -1) @ v).transpose(1, 2)
    rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (2e-2, 1e-2)
    torch.testing.assert_close(out.float(), standard, equal_nan=True, rtol=rtol, atol=atol)


@pytest.mark.parametrize("group", [4, 12])
def test_an_infinite_value_stays_in_its_column(group):
    """In tile registers two columns share a product: such a call is done again, a finite one after it not."""
    finite = qkv(1, 1, 700, 2 * group, 2, 64, torch.bfloat16)
    infinite = finite._replace(value=finite.value.clone())
    infinite.value[0, 33, 1, 5] = float("inf")
    for inputs in (finite, infinite, infinite, infinite, finite):
        out = tilewise.attention(*inputs[:3], backend="llvm")
        where = torch.zeros_like(out, dtype=torch.bool)
        where[:, :, group:, 5] = inputs is infinite
        assert torch.equal(out.isinf(), where) and not out.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_keys_have_no_weight_whatever_they_hold(dtype):
    inputs = qkv(seqlen_q=70, seqlen_k=70, dtype=dtype)
    clean = describe(inputs, Options(causal=True))
    expected, _ = llvm.forward(clean, inputs)
    inputs.key[0, 40:] = float("nan")
    out, lse = llvm.forward(clean, inputs)
    assert torch.equal(out[:, :40], expected[:, :40])
    assert out[:, 40:].isnan().all() and not lse[:, :, :40].isnan().any()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", random_cases.DTYPES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "pad"), [(100, 147, 0), (100, 147, 70), (1, 130, 0)])
def test_dropout_has_the_mask_of_the_generator(seqlen_q, seqlen_k, pad, dtype):
    """Unit matrices as values and as dout show which weights reach out and dV."""
    batch, heads, dim = 2, 3, 160
    n, seed, p = seqlen_k - pad, torch.tensor(2**62 + 12345), 0.3
    value = torch.zeros(batch, seqlen_k, heads, dim)
    value[:, pad:] = torch.eye(n, dim)[:, None]
    inputs = qkv(batch, seqlen_q, seqlen_k, heads, heads, dtype=dtype)
    inputs = inputs._replace(value=value.to(dtype), dropout_seed=seed)
    if pad:
        ends = torch.full((batch,), seqlen_k, dtype=torch.int32)
        inputs = inputs._replace(seqlens_k=ends, leftpad_k=torch.full_like(ends, pad))
    problem = describe(inputs, Options(dropout_p=p, scale=0.05))
    dout = torch.eye(seqlen_q, dim, dtype=dtype)[None, :, None].expand(batch, -1, heads, -1)
    out, lse = llvm.forward(problem, inputs)
    dv = llvm.backward(problem, inputs, out, lse, dout, None).value
    mask = keep_mask(seed, p, range(batch), heads, 0, seqlen_q, 0, n)  # [batch, heads, seqlen_q, n]
    assert torch.equal(out[..., :n].transpose(1, 2) != 0, mask)
    assert torch.equal(dv[:, pad:, :, :seqlen_q].permute(0, 2, 3, 1) != 0, mask)


def test_dropout_of_packed_sequences_counts_from_their_starts():
    lengths_q, lengths_k, heads, dim, seed, p = (33, 0, 100), (147, 5, 61), 2, 160, torch.tensor(7), 0.4
    starts_q, starts_k = (torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (lengths_q, lengths_k))
    value = torch.cat([torch.eye(n, dim) for n in lengths_k])[:, None].repeat(1, heads, 1)
    q, k = (torch.randn(sum(n), heads, 16) for n in (lengths_q, lengths_k))
    inputs = Inputs(q, k, value, starts_q, starts_k, dropout_seed=seed)
    out, _ = llvm.forward(describe(inputs, Options(dropout_p=p, scale=0.05)), inputs)
    for i, rows in enumerate(out.split(lengths_q)):
        mask = keep_mask(seed, p, range(i, i + 1), heads, 0, lengths_q[i], 0, lengths_k[i])[0]
        assert torch.equal(rows[..., : lengths_k[i]].transpose(0, 1) != 0, mask)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1e4, 1e8])
def test_logits_far_apart_and_rows_without_keys(dtype, factor):
    inputs = qkv(seqlen_q=100, seqlen_k=60, dtype=dtype)
    inputs.query.mul_(factor)
    problem = describe(inputs, Options(causal=True))  # the first 40 queries see no key
    out, lse = llvm.forward(problem, inputs)
    exact, exact_lse = reference.attention(*inputs[:3], causal=True)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    assert (out[:, :40] == 0).all() and (lse[:, :, :40] == float("-inf")).all()
    # Scores may cancel: what they lose is measured by the terms that they are sums of.
    magnitudes = (x.double().abs() for x in (inputs.query[:, 40:], inputs.key))
    terms = problem.scale * torch.einsum("bqhd,bkhd->bhqk", *magnitudes).amax(-1)
    assert ((lse[:, :, 40:].double() - exact_lse[:, :, 40:]).abs() <= 2**-21 * terms).all()
    grads = llvm.backward(problem, inputs, out, lse, torch.randn_like(out), None)
    assert (grads.query[:, :40] == 0).all() and all(g.isfinite().all() for g in grads[:3])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 3, 4, 2), (2, 0, 4, 2), (2, 3, 0, 2), (2, 3, 4, 0)])
def test_empty_tensors(shape, has_bias):
    batch, seqlen_q, seqlen_k, heads = shape
    inputs = qkv(batch, seqlen_q, seqlen_k, heads, heads)
    if has_bias:
        inputs = inputs._replace(bias=torch.randn(1, 1, seqlen_q, seqlen_k, requires_grad=True))
    problem = describe(inputs, Options())
    inputs = inputs._replace(bias=inputs.bias.detach() if has_bias else None)
    out, lse = llvm.forward(problem, inputs)
    assert ((out == 0).all() and (lse == float("-inf")).all()) or seqlen_k
    grads = llvm.backward(problem, inputs, out, lse, torch.randn_like(out), None)
    assert [g.shape for g in grads[:3]] == [t.shape for t in inputs[:3]]
    assert all((g == 0).all() for g in grads[:3])
    assert not has_bias or (grads.bias.shape == inputs.bias.shape and (grads.bias == 0).all())


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, bias, sinks, options):
        inputs = Inputs(query, key, value, bias=bias, sinks=sinks)
        with torch.enable_grad():  # so that the problem says that the bias has a gradient
            ctx.problem = describe(inputs._replace(bias=bias.detach().requires_grad_()), options)
        out, lse = llvm.forward(ctx.problem, inputs)
        ctx.save_for_backward(*inputs[:3], bias, sinks, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        query, key, value, bias, sinks, out, lse = ctx.saved_tensors
        inputs = Inputs(query, key, value, bias=bias, sinks=sinks)
        return (*llvm.backward(ctx.problem, inputs, out, lse, dout, dlse), None)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(2, 5), (3, 40)])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 3.0, "window": (30, None)}])
def test_gradients_of_few_queries_pass_gradcheck(seqlen_q, seqlen_k, options):
    inputs = qkv(2, seqlen_q, seqlen_k, 4, 2, 3, torch.float64)
    leaves = [t.requires_grad_() for t in inputs[:3]]

    def attend(*tensors):
        return tilewise.attention(*tensors, return_lse=True, backend="llvm", **options)

    assert torch.autograd.gradcheck(attend, leaves)


def test_gradients_in_float64_pass_gradcheck():
    inputs = qkv(1, 5, 7, 2, 1, 3, torch.float64)
    with torch.enable_grad():
        leaves = [t.requires_grad_() for t in inputs[:3]]
        leaves += [torch.randn(n).double().requires_grad_() for n in ((1, 2, 5, 7), (2,))]
    assert torch.autograd.gradcheck(lambda *t: Attention.apply(*t, Options(causal=True, softcap=3.0)), leaves)


def test_refusals_say_why(monkeypatch):
    problem = describe(qkv(), Options())
    assert llvm.supports(problem) is None
    biased = qkv()._replace(bias=torch.zeros(1, 1, 70, 1, requires_grad=True))
    assert "broadcast over keys" in llvm.supports(describe(biased, Options()), is_backward=True)
    padded = qkv(2)._replace(
        bias=torch.zeros(1, 1, 70, 90, requires_grad=True), seqlens_k=torch.tensor([90, 90]),
        leftpad_k=torch.tensor([0, 3], dtype=torch.int32),
    )  # fmt: skip
    assert "left padding" in llvm.supports(describe(padded, Options()), is_backward=True)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert "llvmlite" in llvm.supports(problem)


def test_threads_of_one_process_may_call_at_once():
    from concurrent.futures import ThreadPoolExecutor

    problems = [qkv(seqlen_q=n, seqlen_k=300) for n in (10, 100, 200)] * 4
    expected = [llvm.forward(describe(i, Options()), i)[0] for i in problems]
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda i: llvm.forward(describe(i, Options()), i)[0], problems)
        assert all(torch.equal(a, b) for a, b in zip(expected, found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_calls_with_infinite_numbers_are_what_vectors_make_of_them(dtype, monkeypatch):
    """With tile registers such a call is done again, in vectors; a finite one after it is not."""
    finite = [torch.randn(1, 300, 8, 40).to(dtype) for _ in range(4)]
    infinite = [t.clone() for t in finite]
    infinite[2][0, 33, 1, 5] = float("inf")

    def results(tensors):
        q, k, v = (t.requires_grad_() for t in tensors[:3])
        out = tilewise.attention(q, k, v, causal=True, backend="llvm")
        with torch.no_grad():
            alone = tilewise.attention(q, k, v, causal=True, backend="llvm")
        return [out, alone, *torch.autograd.grad(out, (q, k, v), tensors[3])]

    rounds = [results(tensors) for tensors in (finite, infinite, finite, infinite)]
    monkeypatch.setattr(configs, "CUT_FEWEST", dict.fromkeys(configs.CUT, (1 << 20,) * 3))
    plans.clear()
    in_vectors = results(infinite)
    plans.clear()
    assert not all(torch.isfinite(t).all() for t in in_vectors)
    for a, b in ((rounds[0], rounds[2]), (rounds[1], in_vectors), (rounds[3], in_vectors)):
        for x, y in zip(a, b):
            assert torch.equal(x.nan_to_num(), y.nan_to_num()) and torch.equal(x.isnan(), y.isnan())


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "scale"), [(1e-36, None), (1.0, 10.0)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(100, 300), (200, 200)])
def test_tiny_numbers_and_large_scores(seqlen_q, seqlen_k, size, scale):
    inputs = qkv(1, seqlen_q, seqlen_k, 8, 8, 64)
    inputs.value.mul_(size)
    dout, dlse = torch.randn_like(inputs.query), torch.zeros(1, 8, seqlen_q)
    assert not random_cases.check(random_cases.Case(0, inputs, Options(scale=scale), dout, dlse))
