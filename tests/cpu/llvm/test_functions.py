"""Mask and score functions printed into the LLVM kernels."""

from __future__ import annotations

import itertools
import math
import operator
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import tilewise
from test_random_functions import BATCH, HEADS, LENGTH, MASKS, SCORES, TABLE, as_mask, as_score
from tilewise import reference
from tilewise.core.functions import tile_map as maps
from tilewise.core.functions.trace import trace
from tilewise.core.problem import Inputs, Options, describe
from tilewise.cpu.host import compile as kernels, configs
from tilewise.testing import check_attention

FEW = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))


def functions(documents, slopes, table):
    def mask_mod(b, h, i, j):
        return (documents[i] == documents[j]) & ((j <= i) | (j % 3 == b))

    def score_mod(score, b, h, i, j):
        return torch.tanh(score / 3) * slopes[h] + table[h, (i - j).clamp(0, 19)]

    return {"mask_mod": mask_mod, "score_mod": score_mod}


def check(leaves, tolerance=1e-9, captured=(), **options):
    """Against the reference, forward and backward, in float64, with gradients of captured tensors."""
    leaves = [t.detach().requires_grad_() for t in leaves]
    call = tilewise.attention_varlen if "cu_seqlens_q" in options else tilewise.attention
    out, lse = call(*leaves, return_lse=True, backend="llvm", **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad(
        (out, lse), (*leaves, *captured), (dout, dlse), allow_unused=True, materialize_grads=True
    )
    with torch.no_grad():
        exact = reference.attention(*leaves, **options)
        grads = reference.attention_backward(dout, *leaves, dlse=dlse, captured=captured, **options)
    for ours, theirs in zip((out, lse, *found), (*exact, *grads[:3], *grads.captured), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def check_forward(leaves, tolerance=1e-9, **options):
    """The same without gradients, where few queries have a kernel of their own."""
    query, key, _ = leaves
    problem = describe(Inputs(*leaves), Options(functions="[[],[null,null],[]]"))
    assert configs.is_decoding(problem) and query.shape[1] < key.shape[1]
    found = tilewise.attention(*leaves, return_lse=True, backend="llvm", **options)
    for ours, theirs in zip(found, reference.attention(*leaves, **options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@FEW
@given(MASKS, SCORES)
def test_random_functions(mask, score):
    """With the gradient of the table that they read."""
    leaves = [torch.randn(BATCH, LENGTH, HEADS, 4, dtype=torch.double) for _ in range(3)]
    reads = {"captured": (TABLE,)} if "table" in repr(score) else {}
    check(leaves, 1e-8, mask_mod=as_mask(mask), score_mod=as_score(score), **reads)


@FEW
@given(MASKS, SCORES)
def test_random_functions_of_few_queries(mask, score):
    """Keys are in lanes; three queries of two heads share each key."""
    TABLE.requires_grad_(False)
    try:
        q, k, v = (
            torch.randn(BATCH, *n, 4, dtype=torch.double) for n in ((3, HEADS), (LENGTH, 1), (LENGTH, 1))
        )
        options = {"mask_mod": as_mask(mask), "score_mod": as_score(score), "softcap": 3.0}
        check_forward((q, k, v), 1e-8, **options)
    finally:
        TABLE.requires_grad_()


def every_operation():
    """A mask and a score function of integers, in vectors of 32 and 64 bits, and of floats."""
    numbers, flags = torch.randint(-9, 10, (40,)), torch.rand(40) < 0.7
    big = torch.randint(-(2**40), 2**40, (40,))
    least, minus_1 = torch.full((40,), -(2**63)), torch.full((40,), -1)  # a quotient of no 64 bits

    def mask_mod(b, h, i, j):
        whole = (i - 2 * j) // (j % 5 * 2 - 3) + (i * 7) % -3 + (i - j) // 7 + abs(numbers[i] - j) // 4
        whole = whole + (numbers[j] * i**2) % 11 + ((i << 3) >> 1) + (i & j) + (i | 5) + (i ^ j) - ~i
        wide = torch.maximum(big[i] * 3, big[j]) // 1000 - (big[i] >> 5) % 77 + torch.minimum(big[j], i)
        wide = wide + (least[i] // minus_1[j] < 0) + least[j] % minus_1[i]
        return ((whole + wide) % 3 != 0) | (flags[i] & ~flags[j]) | (flags[j] ^ (i != j))

    def score_mod(s, b, h, i, j):
        x = s + 0.25 * (i - j)
        y = torch.exp(-x.abs()) + torch.log(x.abs() + 0.5) - torch.log1p(x * x) + torch.expm1(-x * x)
        y = y + torch.sqrt(x * x + 1) * torch.sin(3 * x) + torch.cos(x - i) / (2 + x**2) + torch.tanh(y)
        steps = torch.floor(x) + torch.ceil(x / 3) - torch.round(x * 2) + torch.trunc(x)
        y = y + torch.where(x > 0.3, torch.minimum(x, y), torch.maximum(s, j * 0.125)) + steps * 0.25
        return (
            y
            + (x.long() % 4) * 0.5
            + (s * 4).bool()
            + flags[j].double()
            - abs(numbers[i]).double() ** 0.5 / 9
        )

    return {"mask_mod": mask_mod, "score_mod": score_mod}


def test_every_operation():
    check([torch.randn(1, 40, 2, 8, dtype=torch.double) for _ in range(3)], **every_operation())


def test_formulas():
    """What kernels have no instruction for."""

    def mask_mod(b, h, i, j):
        return (((i - j) ** (j % 5) + 2**h) % 7 < 5) | (i == j)

    def score_mod(s, b, h, i, j):
        return torch.erf(s) + s.abs() ** (1.3 + h) / 9 + (s + 0.7) % -1.3

    leaves = [torch.randn(1, 40, 2, 8, dtype=torch.double) for _ in range(3)]
    check(leaves, mask_mod=mask_mod, score_mod=score_mod)


def test_powers_and_rests_of_any_numbers():
    """As PyTorch's, of float32: exact rests however large the quotient, and NaN where there is no power."""
    numbers = torch.tensor([0.0, 0.5, -0.5, 1, -1, 2, -3, 1e5, -1e20, math.inf, -math.inf, math.nan])
    a, b = torch.cartesian_prod(numbers, numbers).T.contiguous()
    q = torch.zeros(1, len(a), 1, 8)

    def found(function):
        def score_mod(s, batch, h, i, j):
            return torch.nan_to_num(function(a[i], b[i]), 3e37, 1e37, -1e37)

        one = q[:, :1]
        return tilewise.attention(q, one, one, score_mod=score_mod, backend="llvm", return_lse=True)[1][0, 0]

    rests = [math.fmod(x, y) if abs(x) < math.inf and y else math.nan for x, y in zip(a.tolist(), b.tolist())]
    for function, exact in (
        (torch.pow, torch.pow(a, b)), (torch.fmod, torch.tensor(rests)), (torch.floor_divide, a // b),
    ):  # fmt: skip
        exact = torch.nan_to_num(exact, 3e37, 1e37, -1e37)
        torch.testing.assert_close(found(function), exact, rtol=3e-7, atol=0)


def test_every_operation_of_few_queries():
    q, k, v = (torch.randn(1, *n, 8, dtype=torch.double) for n in ((6, 4), (40, 2), (40, 2)))
    check_forward((q, k, v), **every_operation(), window=(30, 3), sinks=torch.randn(4).double())


def test_functions_of_extreme_numbers():
    numbers = torch.tensor([-900.0, -1, 0, 1e-9, 39.9, 40.1, 500, 708.5, 709.7, -0.5]).double()
    x = torch.randn(1, len(numbers), 1, 4).double()
    logs = {"score_mod": lambda s, b, h, i, j: s + torch.log(torch.expm1(numbers[j]) + 2)}
    check_forward((x[:, :4], x, x), **logs)
    large = torch.tensor([2.0**50, 2.0**52, 1e30, torch.inf]).double()

    def few(b, h, i, j):
        return (j < 3) | (torch.sin(large[i]) ** 2 + torch.cos(large[i]) ** 2 > 0.5)

    out = tilewise.attention(x[:, :4], x, x, backend="llvm", mask_mod=few)
    mask = (torch.arange(4) < 1)[:, None] | (torch.arange(10) < 3)
    expected = tilewise.attention(x[:, :4], x, x, mask=mask)
    torch.testing.assert_close(out, expected)  # NaN is larger than nothing


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_errors_stay_in_budget(dtype):
    """With all other options; several items of work, and blocks of keys that take turns."""
    n = 400
    q, k, v = (torch.randn(1, n + 40 * (heads < 4), heads, 24).to(dtype) for heads in (4, 2, 2))
    documents = (torch.rand(n + 40) < 1 / 100).cumsum(0)
    options = functions(documents, torch.rand(4) + 0.5, torch.randn(4, 20))
    options |= {"softcap": 20.0, "bias": torch.randn(1, 1, 1, n + 40), "sinks": torch.randn(4)}
    options |= {"dropout_p": 0.2, "mask": torch.rand(1, 4, 1, n + 40) < 0.9, "window": (250, 100)}
    check_attention(q, k, v, backend="llvm", **options)


def test_packed_sequences():
    """Indices count from each sequence's start; some sequences are empty."""
    starts_q, starts_k = (
        torch.tensor([0, *itertools.accumulate(n)]) for n in ((70, 0, 40, 9), (90, 5, 0, 33))
    )
    q, k, v = (torch.randn(int(s[-1]), 2, 8, dtype=torch.double) for s in (starts_q, starts_k, starts_k))
    options = functions((torch.arange(90) // 13), torch.rand(2).double(), torch.randn(2, 20).double())
    check((q, k, v), cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, **options)


def test_empty_tiles_are_skipped():
    """Keys that no query sees may be NaN, which would show where a tile is computed."""
    q, k, v = (torch.randn(1, 500, 2, 8) for _ in range(3))
    k[:, 128:256], v[:, 128:256] = torch.nan, torch.nan
    out = tilewise.attention(
        q, k, v, backend="llvm", mask_mod=lambda b, h, i, j: (j < 128) | (j >= 256) & (j <= i)
    )  # fmt: skip
    assert out.isfinite().all()


def test_new_values_and_lengths_run_the_same_kernel(monkeypatch):
    generated = []
    original = kernels.generate
    monkeypatch.setattr(kernels, "generate", lambda *a, **o: generated.append(1) or original(*a, **o))
    constant = random.SystemRandom().random()  # a kernel that no file has
    for n in (40, 70):
        table = torch.randn(n)
        x = torch.randn(1, n, 1, 8, dtype=torch.double)
        options = {"score_mod": lambda s, b, h, i, j, t=table: s * constant + t[i]}
        found = tilewise.attention(x, x, x, backend="llvm", **options)
        torch.testing.assert_close(found, reference.attention(x, x, x, **options)[0], rtol=1e-9, atol=1e-9)
    assert len(generated) == 1


def test_indices_out_of_range():
    """Raise where the score is visible; what is hidden may read anything."""
    x, table = torch.randn(1, 60, 1, 8), torch.randn(40)

    def run(causal_at, table=table):
        options = {
            "score_mod": lambda s, b, h, i, j: s + table[j],
            "mask_mod": lambda b, h, i, j: j < causal_at,
        }
        return tilewise.attention(x, x, x, backend="llvm", **options)

    assert run(40).isfinite().all()
    for wrong in (lambda: run(41), lambda: run(60, torch.empty(0))):
        with pytest.raises(IndexError, match=r"captured tensor of shape \(\d+,\)"):
            wrong()
    two = torch.randn(60, 4)
    with pytest.raises(IndexError, match=r"index -\d+ in dimension 1 .* \(60, 4\) is out of .*i - j"):
        options = {"score_mod": lambda s, b, h, i, j: s + two[i, torch.where(i - j < -60, i - j - 2, 0)]}
        tilewise.attention(x, torch.cat([x, x], 1), torch.cat([x, x], 1), backend="llvm", **options)
    with pytest.raises(IndexError, match=r"out of range \(line .*test_functions.py.*table\[i\] < 99"):
        tilewise.attention(x, x, x, backend="llvm", mask_mod=lambda b, h, i, j: table[i] < 99)


def test_few_queries_skip_what_is_hidden_and_report_what_is_not():
    """Hidden keys may be NaN, which would show where their block is read, and may read out of range."""
    q, k, v = (torch.randn(1, *n, 8, dtype=torch.double) for n in ((2, 4), (300, 2), (300, 2)))
    k[:, :192], v[:, :192] = torch.nan, torch.nan
    table = torch.randn(108, dtype=torch.double)
    options = {
        "mask_mod": lambda b, h, i, j: j >= 192 + 2 * h + i,
        "score_mod": lambda s, b, h, i, j: s * table[j - 192],
    }
    found = tilewise.attention(q, k, v, backend="llvm", **options)
    k[:, :192], v[:, :192] = 0, 0
    long = torch.cat([table[:0].new_zeros(192), table])
    exact = reference.attention(
        q, k, v, mask_mod=options["mask_mod"], score_mod=lambda s, b, h, i, j: s * long[j]
    )[0]
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)
    short = table[:100]
    for wrong in (
        {"score_mod": lambda s, b, h, i, j: s * short[j - 192], "mask_mod": options["mask_mod"]},
        {"mask_mod": lambda b, h, i, j: (short[j // 2] > 9) | (j > 1)},
        {"mask_mod": lambda b, h, i, j: (short[i + 99] > 9) | (j > 1)},
    ):
        with pytest.raises(IndexError, match=r"index 1\d\d in dimension 0 .* \(100,\) is out of .*short"):
            tilewise.attention(q, k, v, backend="llvm", **wrong)


def test_kept_maps_see_new_numbers():
    x, documents = torch.randn(1, 100, 1, 8, dtype=torch.double), torch.zeros(100, dtype=torch.long)
    options = {"mask_mod": lambda b, h, i, j: documents[i] == documents[j]}
    for start in (50, 20):
        documents[:] = torch.arange(100) >= start
        found = tilewise.attention(x, x, x, backend="llvm", **options)
        torch.testing.assert_close(found, reference.attention(x, x, x, **options)[0], rtol=1e-9, atol=1e-9)


def test_maps_do_not_grow_with_the_square(monkeypatch):
    """A million tokens have a map of larger tiles."""
    monkeypatch.setattr(maps, "TILES_AT_ONCE", 1 << 12)
    found = trace(lambda b, h, i, j: (j <= i) & (i - j < 1024), None).functions
    made = maps.kernel_map(
        found, maps.Buffers(None, None, None), (2, 3, 1 << 20, 1 << 20), 48, 32, torch.device("cpu")
    )
    assert made.kinds.numel() <= 1 << 12 and made.kinds.shape[:2] == (1, 1)
    assert made.block_q == 48 << (made.block_k // 32).bit_length() - 1


def test_maps_of_more_heads_than_tiles(monkeypatch):
    """Each head has one tile at least, and their kinds do not depend on how many are found at once."""
    found = trace(lambda b, h, i, j: (i >= j + 30 * h) & (j + 50 > 40 * b), None).functions
    call = found, maps.Buffers(None, None, None), (3, 5, 100, 100), 128, 128, torch.device("cpu")
    exact = maps.kernel_map(*call)
    monkeypatch.setattr(maps, "TILES_AT_ONCE", 8)
    monkeypatch.setattr(maps, "_kept", {})
    for extent, block in (((3, 5, 100, 100), 128), ((3, 5, 200, 300), 512)):
        made = maps.kernel_map(call[0], call[1], extent, 128, 128, call[-1])
        assert made.kinds.shape == (3, 5, 1, 1) and made[1:] == (block, block)
    assert torch.equal(maps.kernel_map(*call).kinds, exact.kinds) and len(exact.kinds.unique()) == 2


def test_what_is_not_printed_is_refused():
    x, table = torch.randn(1, 6, 1, 4, requires_grad=True), torch.ones(6, requires_grad=True)
    large = torch.ones(1 << 12, (1 << 10) + 1, requires_grad=True)
    for said, wrong in (
        (r"of \d+ numbers", lambda s, b, h, i, j: s * large[i, j]),
        ("at an index that depends on the score", lambda s, b, h, i, j: s + table[s.long().clamp(0, 5)]),
    ):
        with pytest.raises(NotImplementedError, match=rf"no gradient .*{said}.*'tiled' would serve"):
            tilewise.attention(x, x, x, backend="llvm", score_mod=wrong)
        with torch.no_grad():
            tilewise.attention(x, x, x, backend="llvm", score_mod=wrong)
    out = tilewise.attention(x, x, x, score_mod=lambda s, b, h, i, j: s + table[s.long().clamp(0, 5)])
    assert torch.autograd.grad(out.sin().sum(), table)[0].isfinite().all()


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_no_index_is_wrong_where_there_are_no_scores(lengths):
    """The map of tiles, which has one query and one key at least, reads no further than the tensor."""
    table, (q, k) = torch.arange(3), (torch.randn(1, n, 2, 8, requires_grad=True) for n in lengths)
    for mask_mod in (lambda b, h, i, j: table[j + 2] > 0, lambda b, h, i, j: table[i - 9] < j):
        out, lse = tilewise.attention(q, k, k, mask_mod=mask_mod, return_lse=True, backend="llvm")
        assert not out.any() and lse.isneginf().all()
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k)))


def learned():
    """A score function with three learned tensors, read by head and distance, by head, and by key."""
    shapes = (4, 41), (4,), (330,)
    table, slopes, weights = (torch.randn(s, dtype=torch.double, requires_grad=True) for s in shapes)

    def score_mod(s, b, h, i, j):
        return torch.tanh(s * slopes[h]) + table[h, (i - j).clamp(-20, 20) + 20] * 0.5 + weights[j] * s

    return score_mod, (table, slopes, weights)


def test_gradients_of_captured_tensors():
    """Several splits of keys, tiles that a mask leaves empty, and the other options."""
    score_mod, captured = learned()
    q, k, v = (torch.randn(2, *n, 8, dtype=torch.double) for n in ((300, 4), (330, 2), (330, 2)))
    options = {"mask_mod": lambda b, h, i, j: ((i - j) % 3 != b) & ((i // 70 + j // 90) % 3 != 1)}
    options |= {"softcap": 5.0, "window": (250, 100), "sinks": torch.randn(4).double()}
    check((q, k, v), captured=captured, score_mod=score_mod, **options)


@pytest.mark.parametrize("seqlen", [5, 70])
def test_gradients_of_what_is_added_before_another_function(seqlen):
    """The slope of the score is that of the captured number too: one area of memory serves both."""
    table, factor = (torch.randn(s, dtype=torch.double, requires_grad=True) for s in ((4, 7), ()))
    tensors = [torch.randn(1, seqlen, 4, 8, dtype=torch.double) for _ in range(3)]
    check(tensors, captured=(table,), score_mod=lambda s, b, h, i, j: torch.tanh(s + table[h, j % 7]))
    check(tensors, captured=(table, factor), causal=True,
          score_mod=lambda s, b, h, i, j: (s + table[h, i % 7]) * factor)  # fmt: skip


def test_gradients_of_captured_tensors_of_packed_sequences():
    score_mod, captured = learned()
    starts = torch.tensor([0, 70, 70, 230])
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    check([torch.randn(230, 4, 8, dtype=torch.double) for _ in range(3)],
          captured=captured, score_mod=score_mod, **options)  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_captured_tensors_are_the_same_bits_on_any_number_of_threads(dtype):
    """And with dropout about as near to float64 as those of tiles."""
    score_mod, captured = learned()
    leaves = [torch.randn(1, 300, 4, 8).to(dtype).requires_grad_() for _ in range(3)]
    dout, results = torch.randn(1, 300, 4, 8).to(dtype), []
    options = {"score_mod": score_mod, "dropout_p": 0.2, "causal": True}
    for threads, backend in ((1, "llvm"), (2, "llvm"), (2, "tiled")):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            generator = torch.Generator().manual_seed(3)
            out = tilewise.attention(*leaves, generator=generator, backend=backend, **options)
            results.append(torch.autograd.grad(out, captured, dout))
        finally:
            torch.set_num_threads(before)
    seed = torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        exact = reference.attention_backward(
            dout, *leaves, captured=captured, dropout_seed=seed, **options
        ).captured

    def error(found):
        return sum(float((a - b).norm() / b.norm()) for a, b in zip(found, exact))

    one, two, tiles = results
    assert all(map(torch.equal, one, two))
    assert error(one) <= 3 * error(tiles) + 1e-6


def test_statistics():
    q, k, v = (torch.randn(1, 150, 2, 8, dtype=torch.double) for _ in range(3))
    options = functions(torch.arange(150) // 60, torch.rand(2).double(), torch.randn(2, 20).double())
    aux = tilewise.Aux(row_max=True, entropy=True, column_sum=True)
    ours, tiled = (
        tilewise.attention(q, k, v, return_aux=aux, backend=name, **options)[-1] for name in ("llvm", "tiled")
    )
    for name in ("row_max", "entropy", "column_sum"):
        torch.testing.assert_close(
            *(operator.attrgetter(name)(x) for x in (ours, tiled)), rtol=1e-9, atol=1e-9
        )
