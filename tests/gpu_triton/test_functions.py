"""Mask and score functions printed into the Triton kernels, against the reference."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

import tilewise
from test_random_functions import BATCH, HEADS, LENGTH, MASKS, SCORES, TABLE, as_mask, as_score
from tilewise import reference
from tilewise.core.functions.trace import trace
from tilewise.core.problem import Inputs, Options, describe
from tilewise.gpu.functions import source
from tilewise.gpu.functions.axes import axes_of_loads, bytes_of_loads
from tilewise.gpu.functions.source import KernelFunctions, helpers
from tilewise.gpu.triton import launch
from tilewise.gpu.triton.functions import visits as lists
from tilewise.gpu.triton.tuning_table import KernelTile

FEW = settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def check(leaves, **options):
    leaves = [t.detach().requires_grad_() for t in leaves]
    bias = options.get("bias")
    call = tilewise.attention_varlen if "cu_seqlens_q" in options else tilewise.attention
    out, lse = call(*leaves, return_lse=True, backend="triton", **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    wanted = [*leaves, *([] if bias is None else [bias])]
    found = torch.autograd.grad((out, lse), wanted, (dout, dlse))
    with torch.no_grad():
        exact = reference.attention(*leaves, **options)
        grads = reference.attention_backward(dout, *leaves, dlse=dlse, **options)
    theirs = (*exact, *grads[: len(wanted)])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv", "dbias"), (out, lse, *found), theirs):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def functions(documents, slopes, table):
    def mask_mod(b, h, i, j):
        return (documents[i] == documents[j]) & ((j <= i) | (j % 3 == b))

    def score_mod(score, b, h, i, j):
        return torch.tanh(score / 3) * slopes[h] + table[h, (i - j).clamp(0, 9)]

    return {"mask_mod": mask_mod, "score_mod": score_mod}


@pytest.mark.sample(1)
@pytest.mark.parametrize("bias", [(2, 2, 40, 50), (1, 2, 40, 50), (1, 1, 1, 50)], ids=str)
def test_with_other_options(bias):
    """Tiles that are empty, full and partial; the bias's gradient in each of its kernels."""
    q, k, v = randn(2, 40, 2, 16), randn(2, 50, 1, 16), randn(2, 50, 1, 16)
    documents = torch.arange(50, device=DEVICE) // 20
    options = functions(documents, torch.rand(2, device=DEVICE) + 0.5, randn(2, 10))
    options |= {"softcap": 8.0, "bias": randn(*bias).requires_grad_(), "window": (30, 12)}
    check((q, k, v), sinks=randn(2), **options)


def test_every_operation():
    numbers, flags = torch.randint(-9, 10, (40,), device=DEVICE), torch.rand(40, device=DEVICE) < 0.7
    big = torch.randint(-(2**40), 2**40, (40,), device=DEVICE)

    def mask_mod(b, h, i, j):
        whole = (i - 2 * j) // (j % 5 * 2 - 3) + (i * 7) % -3 + (i - j) // 7 + abs(numbers[i] - j) // 4
        whole = whole + (numbers[j] * i**2) % 11 + ((i << 3) >> 1) + (i & j) + (i | 5) + (i ^ j) - ~i
        whole = whole + (j << (i - 5)) % 7 + ((j - 8) >> (3 * i - 9))  # by any number of bits
        wide = torch.maximum(big[i] * 3, big[j]) // 1000 - (big[i] >> 5) % 77 + torch.minimum(big[j], i)
        return ((whole + wide) % 3 != 0) | (flags[i] & ~flags[j]) | (flags[j] ^ (i != j))

    def score_mod(s, b, h, i, j):
        x = s + 0.25 * (i - j)
        y = torch.exp(-x.abs()) + torch.log(x.abs() + 0.5) - torch.log1p(x * x) + torch.expm1(-x * x)
        y = y + torch.sqrt(x * x + 1) * torch.sin(x) + torch.cos(x - i) / (2 + x**2) + torch.tanh(y)
        steps = torch.floor(i * 0.375) + torch.ceil(j * 0.375) - torch.round((i - j) * 0.5)
        y = y + torch.where(i > 9, torch.minimum(x, y), torch.maximum(s, j * 0.125)) + steps * 0.25
        return y + torch.trunc(i * 0.3) + flags[j].double() - abs(numbers[i]).double() ** 0.5 / 9

    check([randn(1, 40, 2, 16) for _ in range(3)], mask_mod=mask_mod, score_mod=score_mod)


def test_formulas():
    """What kernels have no instruction for."""

    def mask_mod(b, h, i, j):
        return (((i - j) ** (j % 5) + 2**h) % 7 < 5) | (i == j)

    def score_mod(s, b, h, i, j):
        y = torch.erf(s) + torch.erfc(s) * torch.atan2(s, i - 9.5) + torch.asinh(s) + torch.exp2(-s.abs())
        y = y + s.abs() ** (1.3 + j % 2) / 9 + torch.log10(s * s + 1) + (s + 0.7) % -1.3
        return y + (i * 0.37) // 1.1 * 0.1 + torch.fmod(j * -0.37, 1.1)

    check([randn(1, 40, 2, 16) for _ in range(3)], mask_mod=mask_mod, score_mod=score_mod)


def test_a_function_of_zero_may_be_nan():
    """Rows that fill up a tile have scores of 0."""
    check([randn(1, 40, 2, 16) for _ in range(3)], score_mod=lambda s, *_: s * s / s)


def test_packed_sequences():
    starts = torch.tensor([0, 20, 20, 50], device=DEVICE)
    options = {
        "mask_mod": lambda b, h, i, j: (i - j) % (b + 2) == 0,
        "score_mod": lambda s, b, *_: s * (b + 1),
    }
    check([randn(50, 2, 16) for _ in range(3)], cu_seqlens_q=starts, cu_seqlens_k=starts, **options)


@torch.no_grad()
def test_caches_count_from_the_sequences_start():
    """Contiguous, a block mask beside the function; pages, packed, of two lengths."""
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = randn(2, 30, 2, 16), randn(2, 30, 1, 16), randn(2, 30, 1, 16)
    documents = torch.arange(32, device=DEVICE) // 11
    options = functions(documents, torch.rand(2, device=DEVICE) + 0.5, randn(2, 10))
    exact = reference.attention(q, k, v, causal=True, **options)[0].float()
    blocks = create_block_mask(options["mask_mod"], 2, None, 32, 32, device=DEVICE, BLOCK_SIZE=16)
    cache = tilewise.KVCache(2, 40, 1, 16, dtype=torch.float32, device=DEVICE)
    for new in (slice(0, 20), slice(20, 21), slice(21, 30)):
        found = tilewise.attention_with_cache(
            q[:, new], cache, k[:, new], v[:, new], backend="triton", block_mask=blocks, **options
        )
        torch.testing.assert_close(found, exact[:, new], rtol=1e-4, atol=2e-5)
    paged = tilewise.PagedKVCache(8, 16, 1, 16, dtype=torch.float32, device=DEVICE)
    names, at = [paged.allocate(), paged.allocate()], [0, 0]
    for counts in ([3, 20], [1, 1]):
        rows = [slice(a, a + n) for a, n in zip(at, counts)]
        tokens = [torch.cat([t[n, r] for n, r in enumerate(rows)]) for t in (q, k, v)]
        step = paged.reserve(names, counts)
        found = tilewise.attention_with_cache(
            tokens[0], paged, *tokens[1:], batch=step, backend="triton", **options
        )
        packed = torch.cat([exact[n, r] for n, r in enumerate(rows)])
        torch.testing.assert_close(found, packed, rtol=1e-4, atol=2e-5)
        at = [r.stop for r in rows]


def test_indices_out_of_range_are_reported():
    """Visible scores become NaN; what is hidden may read anything."""
    x, table = randn(1, 40, 1, 16), randn(30)

    def run(end):
        options = {"score_mod": lambda s, b, h, i, j: s + table[j], "mask_mod": lambda b, h, i, j: j < end}
        return tilewise.attention(x, x, x, backend="triton", **options)

    tilewise.check_errors()
    assert run(30).isfinite().all()
    tilewise.check_errors()
    assert run(31).isnan().all()
    with pytest.raises(ValueError, match="mask or score function must lie in its captured tensor"):
        tilewise.check_errors()
    tilewise.check_errors()


@pytest.mark.parametrize("queries", [40, 2])
def test_a_wrong_index_cannot_hide_its_own_key(queries):
    """Where the other operand hides the key, whatever is read, the index may be wrong."""
    x, places = randn(1, 40, 1, 16), torch.arange(40, device=DEVICE)
    keep = places[:30] > 0

    def run(end, **options):
        def seen(j):
            return (j < end) & keep[places[j]]

        masked = {"mask_mod": lambda b, h, i, j: seen(j)}
        scored = {"score_mod": lambda s, b, h, i, j: torch.where(seen(j), s * s, -float("inf"))}
        for functions in (masked, scored):
            yield tilewise.attention(x[:, :queries], x, x, backend="triton", **functions, **options)

    for out in run(31):
        assert out.isnan().all()
        with pytest.raises(ValueError, match="mask or score function must lie in its captured tensor"):
            tilewise.check_errors()
    for out in (*run(30), *run(31, mask=(places < 30).expand(queries, 40))):
        assert out.isfinite().all()
    tilewise.check_errors()


def test_lists_of_tiles_leave_out_what_is_hidden():
    """Of the function and of the other options; tiles with rows that don't exist are not full."""
    x = torch.randn(1, 70, 1, 16, device=DEVICE)
    inputs = Inputs(x, x, x)
    from tilewise.core.functions.trace import trace

    text = trace(lambda b, h, i, j: (j <= i) & (j // 32 != 1), None).functions.text
    problem = describe(inputs, Options(window_left=40, functions=text))
    for by_key in (False, True):
        order, counts = lists.visits(problem, inputs, 16, 16, by_key)
        i, j = torch.arange(80)[:, None], torch.arange(80)
        visible = (j <= i) & (j // 32 != 1) & (j >= i - 40) & (i < 70) & (j < 70)
        tiles = visible.view(5, 16, 5, 16)
        some, every = tiles.any(3).any(1), tiles.all(3).all(1)
        some, every = (some.T, every.T) if by_key else (some, every)
        assert torch.equal(counts[0, 0].cpu(), torch.stack([every.sum(1), some.sum(1)], 1).int())
        for row, (full, count) in enumerate(counts[0, 0].tolist()):
            listed = order[0, 0, row].tolist()
            assert set(listed[:full]) == set(every[row].nonzero().flatten().tolist())
            assert set(listed[:count]) == set(some[row].nonzero().flatten().tolist())


def test_a_helper_is_made_once():
    from tilewise.core.functions.trace import trace

    text = trace(lambda b, h, i, j: j <= i + 3, None).functions.text
    first = helpers(KernelFunctions(text, frozenset()))
    helpers.cache_clear()
    assert helpers(KernelFunctions(text, frozenset())).mask is first.mask


def learned():
    """A score function whose numbers change along every axis of a tile, read from the end on too; the tensors
    that it reads, with gradients."""
    shapes = (2,), (2, 9), (40,), (52,), (3, 4)
    captured = tuple(randn(*shape).requires_grad_() for shape in shapes)
    slopes, table, rows, columns, grid = captured

    def score_mod(s, b, h, i, j):
        s = torch.tanh(s * slopes[h]) + table[h, (i - j).clamp(-3, 5) + 3] * 0.5 + rows[i] * s
        return s + torch.sin(columns[j - 4]) + grid[i // 16, j // 16] * table[1 - h, j % 9]

    return score_mod, captured


def check_learned(leaves, captured, score_mod, dropout_p=0.0, **options):
    leaves = [t.requires_grad_() for t in leaves]
    call = tilewise.attention_varlen if "cu_seqlens_q" in options else tilewise.attention
    seed = torch.Generator(DEVICE).manual_seed(3)
    out, lse = call(
        *leaves, return_lse=True, backend="triton", score_mod=score_mod, dropout_p=dropout_p, generator=seed,
        **options,
    )  # fmt: skip
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (*leaves, *captured), (dout, dlse))
    if dropout_p:
        seed = torch.Generator(DEVICE).manual_seed(3)
        options |= {
            "dropout_p": dropout_p,
            "dropout_seed": torch.randint(2**63 - 1, (), generator=seed, device=DEVICE),
        }
    with torch.no_grad():
        options |= {"score_mod": score_mod, "dlse": dlse, "captured": captured}
        exact = reference.attention_backward(dout, *leaves, **options)
    for ours, theirs in zip(found, (*exact[:3], *exact.captured), strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=5e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("block_m, block_n", [(16, 16), (32, 16), (16, 32)])
def test_gradients_of_captured_tensors(block_m, block_n, monkeypatch):
    """In tiles of every shape, with the other options, tiles that a mask leaves empty, and empty rows."""
    tile = KernelTile(block_m, block_n, 4, 1)
    monkeypatch.setattr(launch, "table_tile", lambda name, *_: None if name in ("dk", "dv") else tile)
    score_mod, captured = learned()
    options = {"mask_mod": lambda b, h, i, j: (j < 48) & ((i // 11 + j // 13) % 3 != 1) & (i != 5)}
    options |= {"softcap": 5.0, "window": (30, 12), "sinks": randn(2), "dropout_p": 0.2}
    leaves = [randn(1, n, h, 16) for n, h in ((40, 2), (50, 1), (50, 1))]
    check_learned(leaves, captured, score_mod, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("block_m, block_n", [(16, 16), (16, 32)])
@pytest.mark.parametrize("lengths", [(40, 53), (53, 40), (1, 30), (30, 1), (0, 0), None], ids=str)
def test_a_number_of_each_distance(lengths, block_m, block_n, monkeypatch):
    """Kernels read such numbers as a bias; the same bits every time. `None`: packed."""
    tile = KernelTile(block_m, block_n, 4, 1)
    monkeypatch.setattr(launch, "table_tile", lambda name, *_: None if name in ("dk", "dv") else tile)
    slopes, table = captured = randn(2, 2).requires_grad_(), randn(2, 21).requires_grad_()

    def score_mod(s, b, h, i, j):
        return s + table[h, (j - i).clamp(-9, 9) + 9] - slopes[b, h] * (1 + (i - j).abs()).log()

    options = {"score_mod": score_mod, "deterministic": True}
    if lengths is None:
        starts = torch.tensor([0, 30, 56], device=DEVICE)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
        check_learned([randn(56, 2, 16) for _ in range(3)], captured, **options)
        return
    leaves = [randn(2, n, h, 16) for n, h in ((lengths[0], 2), (lengths[1], 1), (lengths[1], 1))]
    if lengths == (0, 0):
        out = tilewise.attention(*leaves, backend="triton", **options)
        assert out.shape == leaves[0].shape
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), captured))
        return
    check_learned(leaves, captured, **options)
    assert "read as a bias" in str(tilewise.explain(*leaves, backend="triton", **options))
    options |= {"mask_mod": lambda b, h, i, j: (i + j) % 4 != 1, "softcap": 5.0, "window": (20, 9)}
    check_learned(leaves, captured, sinks=randn(2), dropout_p=0.2, **options)


@pytest.mark.skipif(DEVICE == "cuda", reason="their table is on the CPU")
@FEW
@given(MASKS, SCORES)
def test_random_functions(mask, score):
    """With the gradient of the table that they read, within 1/1000 of each gradient's largest number."""
    leaves = [(randn(BATCH, LENGTH, HEADS, 16) / 2).requires_grad_() for _ in range(3)]
    out = tilewise.attention(*leaves, backend="triton", mask_mod=as_mask(mask), score_mod=as_score(score))
    captured = (TABLE,) if "table" in repr(score) else ()
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, (*leaves, *captured), dout, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        options = {"mask_mod": as_mask(mask), "score_mod": as_score(score), "captured": captured}
        exact = reference.attention_backward(dout, *leaves, **options)
    for ours, theirs in zip(found, (*exact[:3], *(exact.captured or ())), strict=True):
        limit = 1e-3 * max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=limit)


def test_gradients_of_captured_tensors_of_packed_sequences():
    score_mod, captured = learned()
    starts = torch.tensor([0, 17, 17, 56], device=DEVICE)
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
    check_learned([randn(56, 2, 16) for _ in range(3)], captured, score_mod, **options)


def test_gradients_of_tensors_that_are_read_out_of_range():
    """Where nothing is visible nothing is added, and to nothing else."""
    x, long = randn(1, 40, 1, 16), randn(40)
    dout, hidden, found = torch.randn_like(x), {"mask_mod": lambda b, h, i, j: j < 30}, []
    for table in (long[:30].clone().requires_grad_(), long.clone().requires_grad_()):
        out = tilewise.attention(
            x, x, x, backend="triton", score_mod=lambda s, b, h, i, j, t=table: s * t[j] + t[j], **hidden
        )
        found.append(torch.autograd.grad(out, table, dout)[0])
    tilewise.check_errors()
    torch.testing.assert_close(found[0], found[1][:30])
    assert found[0].any() and not found[1][30:].any()


def test_deterministic_gradients_of_captured_tensors_are_refused():
    x, table = randn(1, 8, 1, 16), randn(8).requires_grad_()
    options = {"score_mod": lambda s, b, h, i, j: s * table[j]}
    with pytest.raises(NotImplementedError, match=r"in any order.*'tiled' would serve"):
        tilewise.attention(x, x, x, backend="triton", deterministic=True, **options)
    with pytest.raises(NotImplementedError, match="index that depends on the score"):
        tilewise.attention(x, x, x, backend="triton", score_mod=lambda s, *_: s + table[s.long().clamp(0, 7)])


def test_what_a_tile_reads_of_captured_tensors():
    """Where indices are rounded floats a diagonal has more than one number."""
    from tilewise.core.functions.trace import trace

    floats, integers = torch.zeros(9), torch.zeros(9, dtype=torch.long)
    for expected, axes, score_mod in (
        (4 * 16 * 32, "diagonals", lambda s, b, h, i, j: s + floats[(3 - (j - b) + i).clamp(0, 8)]),
        (8 * 16 * 32, "each", lambda s, b, h, i, j: s + integers[(i + j) // 9]),
        (4 * 16 * 32, "each", lambda s, b, h, i, j: s + floats[(i * 0.3 - j * 0.3).long()]),
        (4 * 16 * 32, "each", lambda s, b, h, i, j: s + floats[((i + 0.1) - (j + 0.1)).long().clamp(0, 8)]),
        (4 * 16 * 32, "diagonals", lambda s, b, h, i, j: s + floats[(i + 1.0 - j).long().clamp(0, 8)]),
        (8 * 16, "rows", lambda s, b, h, i, j: s + integers[i % 9]),
        (4 * 32, "columns", lambda s, b, h, i, j: s + floats[j // 9]),
        (0, "none", lambda s, b, h, i, j: s + floats[h]),
    ):
        functions = trace(None, score_mod).functions
        assert list(axes_of_loads(functions).values()) == [axes]
        assert bytes_of_loads(functions.text, 16, 32) == expected


def test_an_interrupt_leaves_no_half_of_a_module(monkeypatch):
    """It would pass for functions that hide nothing."""

    def interrupted(*_):
        raise KeyboardInterrupt

    functions = trace(lambda b, h, i, j: (i * 31 + j) % 77 > 3, None).functions
    kernel = KernelFunctions(functions.plain_text, functions.guarded)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(source, "exec", interrupted, raising=False)
        helpers(kernel)
    assert helpers(kernel).mask is not None
