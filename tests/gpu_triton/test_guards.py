"""Lengths, pages and slots that lead outside of a cache: nothing there is written, and it is reported."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (IS_INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

import tilewise  # noqa: E402
from tilewise.core import device_errors  # noqa: E402
from tilewise.core.problem import Inputs, Options, describe  # noqa: E402
from tilewise.flash_attn import flash_attn_with_kvcache  # noqa: E402
from tilewise.gpu.triton import launch, launch_decode  # noqa: E402
from tilewise.gpu.triton.append import Tokens, append  # noqa: E402

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
NAN = float("nan")
FAR = 1 << 30


def integers(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def randn(*shape):
    return torch.randn(*shape).to(DEVICE)


@pytest.fixture(autouse=True)
def _starts_and_ends_without_errors():
    tilewise.check_errors()
    yield
    tilewise.check_errors()


WRONG_TOKENS = {  # held, page table, slots; which of the three sequences are written
    "contiguous": ([0, 4, -1], None, None, [True, False, False], "length"),
    "overflow": ([3, 4, 2**31 - 1], None, None, [True, False, False], "length"),
    "far_back": ([-FAR, -5, 2], None, None, [False, False, True], "length"),
    "pages": ([0, 3, 7], [[0, 1], [-1, 2], [3, FAR]], None, [True, False, False], "page"),
    "full_pages": ([0, 8, -3], [[0, 1], [2, 3], [4, 5]], None, [True, False, False], "length"),
    "slots": (None, None, [3, -2, 24], [True, False, False], "page"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("name", WRONG_TOKENS)
def test_tokens_are_written_nowhere_else(name: str, counts: bool):
    held, table, slots, is_written, what = WRONG_TOKENS[name]
    q, k, v = (randn(3, 1, heads, dim) for heads, dim in ((18, 16), (2, 16), (2, 20)))
    # the storage lies between rows that nobody may touch
    pools = [torch.full((14, 4, 2, d), NAN, device=DEVICE) for d in (16, 20)]
    entries = 3 if table is None and slots is None else 6
    storages = [pool[4 : 4 + entries] for pool in pools]
    lengths = None if held is None else integers(*held)
    if counts and lengths is None:
        pytest.skip("slots come without lengths")
    arrivals = torch.zeros_like(lengths) if counts else None
    places = (
        None if slots is None else integers(*slots),
        None if slots is None else integers(0, 0, 0),
        lengths,
        None if table is None else integers(*table),
        lengths if counts else None,
        arrivals,
    )
    append(q, k, v, *storages, Tokens(*places), None)
    for pool, new in zip(pools, (k, v)):
        rows = pool.flatten(0, 1)
        written = ~rows.isnan().any((1, 2))
        assert written.sum() == sum(is_written)
        assert torch.equal(rows[written], new[torch.tensor(is_written)][:, 0])
    if counts:  # wrong lengths stay wrong, so that attention sees it
        assert [int(n) for n in lengths] == [h if h < 0 else (h + 1 + 2**31) % 2**32 - 2**31 for h in held]
    with pytest.raises(ValueError, match=f"a {what}"):
        tilewise.check_errors()


def hostile(kind: str, queries, packed: bool):
    """Inputs of four sequences of which the second and the fourth are wrong; their keys."""
    lengths, capacity, page = [300, 290, 1, 310], 320, 16
    q = randn(4, queries, 4, 16)
    k, v = randn(4, capacity, 2, 16), randn(4, capacity, 2, 16)
    extras = {"seqlens_k": integers(*lengths)}
    stored = [k, v]
    if "pages" in kind:
        table = torch.randperm(4 * capacity // page).to(DEVICE).int().view(4, -1)
        stored = []
        for t in (k, v):
            pool = torch.empty_like(t).view(-1, page, 2, 16)
            pool[table.flatten().long()] = t.view(-1, page, 2, 16)
            stored.append(pool)
        table[2, 1:] = -7  # behind the end: never looked at
        table[1, 3], table[3, 0] = (FAR, -FAR) if kind == "far_pages" else (-1, len(stored[0]))
        extras["page_table"] = table
        if kind == "8_bit_pages":
            scales = torch.ones(len(stored[0]), 2, device=DEVICE)
            stored = [t.to(torch.float8_e4m3fn) for t in stored]
            extras |= {"key_scale": scales, "value_scale": scales}
    elif kind == "lengths":
        extras["seqlens_k"] = integers(300, capacity + 1, 1, -1)
    elif kind == "far_lengths":
        extras["seqlens_k"] = torch.tensor([300, 2**32 + 5, 1, -(2**31)], device=DEVICE)
    elif kind == "leftpads":
        extras["leftpad_k"] = integers(0, -1, 0, 311)
    if packed:
        q = q.flatten(0, 1)
        extras["cu_seqlens_q"] = torch.arange(5, dtype=torch.int32, device=DEVICE) * queries
    return Inputs(q, *stored, **extras)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["pages", "far_pages", "8_bit_pages", "lengths", "far_lengths", "leftpads"])
@pytest.mark.parametrize(("queries", "packed"), [(1, False), (3, False), (20, False), (20, True)])
def test_rows_of_wrong_sequences_are_nan(kind: str, queries: int, packed: bool):
    inputs = hostile(kind, queries, packed)
    run = launch_decode.forward if queries <= launch_decode.MAX_QUERIES else launch.forward
    out, lse = run(describe(inputs, Options(causal=True)), inputs)
    if packed:
        out = out.unflatten(0, (4, queries))
        lse = lse.unflatten(1, (4, queries)).transpose(0, 1)
    for n, is_wrong in enumerate([False, True, False, True]):
        seen = lse[n].isfinite()
        assert out[n].isnan().all() == out[n].isnan().any() == is_wrong
        assert lse[n].isnan().all() == lse[n].isnan().any() == is_wrong
        assert is_wrong or seen.any()
    with pytest.raises(ValueError, match="a page" if "pages" in kind else "a length"):
        tilewise.check_errors()


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["pages", "8_bit_pages"])
@pytest.mark.parametrize(("queries", "packed"), [(2, False), (20, False), (20, True)])
def test_pages_outside_of_the_window_are_not_looked_at(kind: str, queries: int, packed: bool):
    inputs = hostile(kind, queries, packed)
    inputs.page_table[1, : 10 if queries == 2 else 7] = -1
    inputs.page_table[3, 0] = 0
    problem = describe(inputs, Options(causal=True, window_left=40))
    out, _ = launch.forward(problem, inputs)
    assert not out.isnan().any()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["pages", "8_bit_pages"])
@pytest.mark.parametrize("queries", [2, 20])
def test_pages_of_left_padding_are_not_looked_at(kind: str, queries: int):
    inputs = hostile(kind, queries, False)._replace(leftpad_k=integers(0, 65, 0, 16))
    out, _ = launch.forward(describe(inputs, Options()), inputs)
    assert not out.isnan().any()


def test_8_bit_pages_of_a_wrong_length_are_not_looked_at():
    """Who is told of the length is not told of pages as well."""
    inputs = hostile("8_bit_pages", 20, False)._replace(seqlens_k=integers(300, 321, 1, -1))
    out, _ = launch.forward(describe(inputs, Options()), inputs)
    assert out.isnan().any((1, 2, 3)).tolist() == [False, True, False, True]
    with pytest.raises(ValueError, match="NaN: a length"):
        tilewise.check_errors()


def test_reserve_and_lengths_tell_of_errors():
    cache = tilewise.KVCache(2, 8, 2, 16, dtype=torch.float32, device=DEVICE)
    pages = tilewise.PagedKVCache(2, 16, 2, 16, dtype=torch.float32, device=DEVICE)
    q, k, v = (randn(2, 1, 2, 16) for _ in range(3))
    for tell in (lambda: cache.lengths, lambda: pages.reserve([], []), tilewise.check_errors):
        append(q, k, v, cache.key, cache.value, Tokens(None, None, integers(0, 8)), None)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        with pytest.raises(ValueError, match="a length"):
            tell()
        tell()  # once


def test_debugging_raises_at_once(monkeypatch: pytest.MonkeyPatch):
    """On a GPU by the wrong call; on a CPU, whose lengths are checked first, by the one after it."""
    cache = tilewise.KVCache(2, 8, 2, 16, dtype=torch.float32, device=DEVICE)
    q, k, v = (randn(2, 1, 2, 16) for _ in range(3))
    lengths = integers(0, 8)
    if DEVICE == "cpu":
        append(q, k, v, cache.key, cache.value, Tokens(None, None, lengths), None)
        lengths = integers(0, 4)
    monkeypatch.setattr(device_errors, "IS_DEBUG", True)
    with pytest.raises(ValueError, match="a length"):
        flash_attn_with_kvcache(q, cache.key, cache.value, k, v, cache_seqlens=lengths)
    monkeypatch.setattr(device_errors, "IS_DEBUG", False)
    flash_attn_with_kvcache(q, cache.key, cache.value, k, v, cache_seqlens=integers(0, 4))
