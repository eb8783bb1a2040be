"""Mask and score functions printed into the Triton kernels, against the reference."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

import tilewise
from tilewise import reference
from tilewise.core.problem import Inputs, Options, describe
from tilewise.gpu.triton.functions import visits as lists
from tilewise.gpu.triton.functions.source import KernelFunctions, helpers

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


@pytest.mark.sample(2)
@pytest.mark.parametrize("bias", [(2, 4, 40, 50), (1, 4, 40, 50), (1, 1, 1, 50)], ids=str)
def test_with_other_options(bias):
    """Tiles that are empty, full and partial; the bias's gradient in each of its kernels."""
    q, k, v = randn(2, 40, 4, 16), randn(2, 50, 2, 16), randn(2, 50, 2, 16)
    documents = torch.arange(50, device=DEVICE) // 20
    options = functions(documents, torch.rand(4, device=DEVICE) + 0.5, randn(4, 10))
    options |= {"softcap": 8.0, "bias": randn(*bias).requires_grad_(), "window": (30, 12)}
    check((q, k, v), sinks=randn(4), **options)


def test_every_operation():
    numbers, flags = torch.randint(-9, 10, (40,), device=DEVICE), torch.rand(40, device=DEVICE) < 0.7
    big = torch.randint(-(2**40), 2**40, (40,), device=DEVICE)

    def mask_mod(b, h, i, j):
        whole = (i - 2 * j) // (j % 5 * 2 - 3) + (i * 7) % -3 + (i - j) // 7 + abs(numbers[i] - j) // 4
        whole = whole + (numbers[j] * i**2) % 11 + ((i << 3) >> 1) + (i & j) + (i | 5) + (i ^ j) - ~i
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

    q, k, v = randn(2, 30, 4, 16), randn(2, 30, 2, 16), randn(2, 30, 2, 16)
    documents = torch.arange(32, device=DEVICE) // 11
    options = functions(documents, torch.rand(4, device=DEVICE) + 0.5, randn(4, 10))
    exact = reference.attention(q, k, v, causal=True, **options)[0].float()
    blocks = create_block_mask(options["mask_mod"], 2, None, 32, 32, device=DEVICE, BLOCK_SIZE=16)
    cache = tilewise.KVCache(2, 40, 2, 16, dtype=torch.float32, device=DEVICE)
    for new in (slice(0, 20), slice(20, 21), slice(21, 30)):
        found = tilewise.attention_with_cache(
            q[:, new], cache, k[:, new], v[:, new], backend="triton", block_mask=blocks, **options
        )
        torch.testing.assert_close(found, exact[:, new], rtol=1e-4, atol=2e-5)
    paged = tilewise.PagedKVCache(8, 16, 2, 16, dtype=torch.float32, device=DEVICE)
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
