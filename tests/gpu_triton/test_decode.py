"""The decoding and appending kernels against the float64 reference and PyTorch.

On a GPU at real shapes; with TRITON_INTERPRET=1 at tiny ones, on the CPU.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import PagedKVCache, check_errors, reference
from tilewise.cache.quantized_pages import write_quantized
from tilewise.core.problem import Inputs, Options, describe
from tilewise.rotary import apply_rotary, rotary_tables
from tilewise.testing import compare

triton = pytest.importorskip("triton")
tl = triton.language

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (IS_INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from tilewise.gpu.launch.eight_bit_pages import dequantized, write_pages  # noqa: E402
from tilewise.gpu.triton import launch, launch_decode  # noqa: E402
from tilewise.gpu.triton.append import Heads, Tokens, append, head_pointers  # noqa: E402
from tilewise.gpu.triton.arguments import ScoreTensor, Sequence  # noqa: E402
from tilewise.gpu.triton.call import Call, Results  # noqa: E402
from tilewise.gpu.triton.primitives import score_ptrs  # noqa: E402
from tilewise.gpu.triton.tuning_table import DecodeTile  # noqa: E402

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
# The interpreter's products are wrong in bfloat16.
DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
LENGTHS = [37, 0, 50, 1] if IS_INTERPRETED else [1500, 0, 5000, 1, 257]
PAGE = 16
NO_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
NAN = float("nan")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def cached(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], is_paged: bool, **extras: Tensor) -> Inputs:
    """Keys (batch, longest, heads, dim) in a cache that holds NaN wherever no sequence has a token."""
    lengths_k = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    beyond = (torch.arange(k.shape[1], device=DEVICE) >= lengths_k[:, None])[..., None, None]
    k, v = (t.masked_fill(beyond, NAN) for t in (k, v))
    if not is_paged:
        return Inputs(q, k, v, seqlens_k=lengths_k, **extras)
    pages = -(-k.shape[1] // PAGE)
    table = torch.randperm(len(lengths) * pages, device=DEVICE).view(len(lengths), pages).int()
    storage = []
    for t in (k, v):
        padded = torch.nn.functional.pad(t, (0, 0, 0, 0, 0, pages * PAGE - t.shape[1]), value=NAN)
        pool = torch.empty(len(lengths) * pages, PAGE, *t.shape[2:], dtype=t.dtype, device=DEVICE)
        pool[table.flatten().long()] = padded.view(-1, PAGE, *t.shape[2:])
        storage.append(pool)
    return Inputs(q, *storage, seqlens_k=lengths_k, page_table=table, **extras)


def check(
    inputs: Inputs, k: Tensor, v: Tensor, lengths: list[int], tile: DecodeTile | None, **options: Any
) -> None:
    windows = {"window_left": options.pop("left", None), "window_right": options.pop("right", None)}
    problem = describe(inputs, Options(**windows, **options))
    out, lse = launch_decode.forward(problem, inputs, tile)
    extras = {n: getattr(inputs, n) for n in ("sinks", "alibi_slopes", "bias", "mask")}
    for b, length in enumerate(lengths):
        start = 0 if inputs.leftpad_k is None else int(inputs.leftpad_k[b])
        own = {n: t for n, t in extras.items() if t is not None}
        for name in ("bias", "mask"):
            if name in own:
                own[name] = own[name][b : b + 1, ..., start:length]
        if "alibi_slopes" in own and own["alibi_slopes"].ndim == 2:
            own["alibi_slopes"] = own["alibi_slopes"][b : b + 1]
        tensors = inputs.query[b : b + 1], k[b : b + 1, start:length], v[b : b + 1, start:length]
        window = windows["window_left"], windows["window_right"]
        exact, base = (
            reference.attention(*tensors, dtype=dtype, window=window, **options, **own)
            for dtype in (torch.float64, out.dtype)
        )
        assert compare("out", out[b : b + 1], exact[0], base[0]).is_within
        assert compare("lse", lse[b : b + 1], exact[1], base[1]).is_within


CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"left": 9, "right": 2},
    "softcap": {"causal": True, "softcap": 2.0},
    "scale": {"scale": -0.3},
    "sinks": {"causal": True, "extras": ("sinks",)},
    "alibi": {"causal": True, "extras": ("alibi",)},
    "bias_mask": {"extras": ("bias", "mask")},
    "leftpad": {"causal": True, "extras": ("leftpad",)},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(("queries", "is_paged"), [(1, True), (3, False)])
@pytest.mark.parametrize("case", CASES)
def test_every_option(case: str, queries: int, is_paged: bool, dtype: torch.dtype = DTYPES[-1]):
    options = dict(CASES[case])
    batch, heads, kv_heads, dim, dim_v = len(LENGTHS), 6, 2, 24, 40
    q = randn(batch, queries, heads, dim, dtype=dtype)
    k, v = (randn(batch, max(LENGTHS), kv_heads, d, dtype=dtype) for d in (dim, dim_v))
    capacity = -(-max(LENGTHS) // PAGE) * PAGE if is_paged else max(LENGTHS)
    given = {
        "sinks": torch.cat([torch.tensor([-torch.inf], device=DEVICE), randn(heads - 1)]),
        "alibi_slopes": torch.rand(batch, heads, device=DEVICE),
        "bias": randn(batch, heads, queries, capacity),
        "mask": torch.rand(batch, 1, queries, capacity, device=DEVICE) < 0.7,
        "leftpad_k": torch.tensor([n // 3 for n in LENGTHS], device=DEVICE),
    }
    wanted = options.pop("extras", ())
    extras = {name: t for name, t in given.items() if name.startswith(wanted)} if wanted else {}
    check(cached(q, k, v, LENGTHS, is_paged, **extras), k, v, LENGTHS, None, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype):
    test_every_option("causal", 3, True, dtype)


TILES = [(16, 16, 1, False), (16, 32, 2, True), (32, 16, 1, True), (32, 32, 1, False)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("heads", "queries"), [(8, 1), (8, 5), (3, 16)])
def test_every_cut(tile: tuple[int, int, int, bool], heads: int, queries: int):
    """Rows that fill several tiles, segments over many workers and workers over many segments."""
    block_m, block_n, workers, is_transposed = tile
    if not IS_INTERPRETED and is_transposed:
        block_n = 64
    choice = DecodeTile(block_m, block_n, workers, 4, 2, is_transposed)
    dtype = DTYPES[-1]
    q = randn(len(LENGTHS), queries, heads, 16, dtype=dtype)
    k, v = (randn(len(LENGTHS), max(LENGTHS), 1, 16, dtype=dtype) for _ in range(2))
    check(cached(q, k, v, LENGTHS, True), k, v, LENGTHS, choice, causal=True)


@pytest.mark.parametrize(
    "dim", [(40, 32), (48, 16)] if IS_INTERPRETED else [(576, 512), (192, 128), (96, 96)]
)
@pytest.mark.parametrize("is_shared", [False, True])
def test_absorbed_latent_attention(dim: tuple[int, int], is_shared: bool):
    """One key head, values apart or in the keys' first columns, columns in two parts."""
    lengths = [70, 33]
    q, k = randn(2, 2, 5, dim[0], dtype=DTYPES[-1]), randn(2, 70, 1, dim[0], dtype=DTYPES[-1])
    v = k[..., : dim[1]] if is_shared else randn(2, 70, 1, dim[1], dtype=DTYPES[-1])
    inputs = cached(q, k, v, lengths, False)
    if is_shared:
        inputs = inputs._replace(value=inputs.key[..., : dim[1]])
    check(inputs, k, v, lengths, None, causal=True)


@pytest.mark.parametrize("queries", [1, 4, 40])
def test_eight_bit_pages(queries: int):
    """Exact for what the pages hold, in the decoding and in the general kernel."""
    dtype = DTYPES[-1]
    lengths = [300 if queries <= launch_decode.MAX_QUERIES else 90, 17]
    cache = PagedKVCache(48, 16, 2, 16, head_dim_v=32, dtype=torch.float8_e4m3fn, device=DEVICE)
    for n in lengths:
        cache.append(randn(1, n, 2, 16) * 3, randn(1, n, 2, 32), [cache.allocate()])
    batch = cache.reserve(None, 0)
    q = randn(2, queries, 4, 16, dtype=dtype)
    inputs = Inputs(
        q, cache.key, cache.value, seqlens_k=batch.lengths, page_table=batch.page_table,
        key_scale=cache.key_scale, value_scale=cache.value_scale,
    )  # fmt: skip
    run = launch_decode.forward if queries <= launch_decode.MAX_QUERIES else launch.forward
    out, lse = run(describe(inputs, Options(causal=True)), inputs)
    for n in range(2):
        own = [t[None].to(dtype) for t in cache.gather(n)]
        exact, base = (
            reference.attention(q[n : n + 1], *own, causal=True, dtype=d) for d in (torch.float64, dtype)
        )
        assert compare("out", out[n : n + 1], exact[0], base[0]).is_within
        assert compare("lse", lse[n : n + 1], exact[1], base[1]).is_within


@pytest.mark.parametrize(
    "page_size, dtype", [(5, torch.float32), (16, DTYPES[-1]), (40, torch.float16)], ids=str
)
def test_pages_become_a_cache(page_size: int, dtype: torch.dtype):
    """Every 8-bit number, times scales that are no powers of two; side by side in memory as vLLM has them."""
    numbers = torch.arange(7 * page_size * 3 * 48, device=DEVICE) * 7 % 256
    pool = numbers.view(7, 3, page_size, 48).to(torch.uint8).view(torch.float8_e4m3fn).transpose(1, 2)
    key, value = pool[..., :20], pool[..., 20:]
    scales = [randn(7, 3).abs(), randn(3, 7).abs().T]
    table = torch.tensor([[3, 6, 0], [99, 99, 99], [1, -1, 7]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([2 * page_size + 1, 0, 3 * page_size], device=DEVICE)
    inputs = Inputs(
        randn(3, 50, 6, 20, dtype=dtype), key, value, seqlens_k=lengths, page_table=table,
        key_scale=scales[0], value_scale=scales[1],
    )  # fmt: skip
    problem, found = dequantized(describe(inputs, Options()), inputs)
    assert problem == describe(found, Options()) and found.page_table is None
    for t, pages, scale in zip(found[1:3], (key, value), scales):
        held = (pages.float() * scale[:, None, :, None]).to(dtype)
        tokens = t.unflatten(1, (3, page_size))
        for b, n, page in ((0, 0, 3), (0, 1, 6), (0, 2, 0), (2, 0, 1)):
            assert torch.equal(tokens[b, n].nan_to_num(-1.0), held[page].nan_to_num(-1.0))
            assert torch.equal(tokens[b, n].isnan(), held[page].isnan())
        assert tokens[2, 1:].isnan().all()
    with pytest.raises(ValueError, match="a page"):
        check_errors()


@pytest.mark.parametrize("page_size, dim_v", [(16, 24), (64, None)])
def test_pages_are_quantized_as_pytorch_does_it(page_size: int, dim_v: int | None):
    """Steps of sequences that share pages, padding, numbers of any size, infinity and NaN."""
    make = {"head_dim_v": dim_v, "dtype": torch.float8_e4m3fn, "device": DEVICE}
    if dim_v is None:
        make = make | {"head_dim_v": 12, "value_in_key": True}
    cache = PagedKVCache(40, page_size, 3, 16, **make)
    one, two = cache.allocate(), cache.allocate()
    held = [(cache.key, cache.key_scale), (cache.value, cache.value_scale)]
    pools = [(pages.clone(), scale.clone()) for pages, scale in held]
    for step, counts in enumerate([(13, 20), (1, 1), (1, 7), (30, 0), (1, 1)]):
        sequences, counts = ((one, two), counts) if step != 2 else ((one, -1, two), (1, 1, 7))
        batch = cache.reserve(sequences, counts)
        for source, copy in batch.copies:
            for pages, scale in pools:
                pages[copy], scale[copy] = pages[source], scale[source]
        n = batch.total
        sizes = 10.0 ** torch.randint(-4 - 10 * step, 5, (n, 1, 1), device=DEVICE)
        key, value = randn(n, 3, 16) * sizes, None if dim_v is None else randn(3, n, dim_v).transpose(0, 1)
        key[0, 1, 3] = (float("inf"), -448.0, float("nan"), 0.0, 7 * 2.0**-9)[step]
        if step == 1:
            key[1] = 0.0
        write_pages(
            (cache.key, None if value is None else cache.value), (cache.key_scale, cache.value_scale),
            (key, value), (batch.slots, batch.written, batch.kept),
        )  # fmt: skip
        real = batch.slots >= 0
        for (pages, scale), new in zip(pools, (key, value)):
            if new is not None:
                write_quantized(pages, scale, new[real], batch.slots[real].long(), batch)
        for (pages, scale), (other, other_scale) in list(zip(held, pools))[: 1 if value is None else 2]:
            assert torch.equal(scale, other_scale)
            found, exact = pages.float(), other.float()
            assert torch.equal(found.isnan(), exact.isnan())
            assert torch.equal(found.nan_to_num(0.0), exact.nan_to_num(0.0))
        if step == 1:
            two = cache.fork(one)


def test_the_same_bits_every_time():
    q, k, v = (randn(3, n, h, 16, dtype=DTYPES[-1]) for n, h in ((1, 4), (80, 2), (80, 2)))
    inputs = cached(q, k, v, [80, 3, 41], False)
    problem = describe(inputs, Options(causal=True))
    first = launch_decode.forward(problem, inputs)
    for _ in range(2 if IS_INTERPRETED else 20):
        for a, b in zip(first, launch_decode.forward(problem, inputs)):
            assert torch.equal(a, b)


@pytest.mark.sample(2)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ["packed", "dense", "contiguous"])
def test_appending_turns_and_writes(form: str, interleaved: bool):
    """The fused kernel does what `apply_rotary` and indexing do; slots of -1 are written nowhere."""
    tables = (torch.cat((t, t), 1).to(DEVICE) for t in rotary_tables(torch.arange(50), 12))
    cos, sin = (t[:, :6] for t in tables)  # views, as of a model's tables, which have each angle twice
    shape = {"packed": (6,), "dense": (3, 2), "contiguous": (3, 2)}[form]
    q, k, v = (randn(*shape, h, d) for h, d in ((18, 16), (2, 16), (2, 20)))
    storages = [torch.zeros(3, 16, 2, d, device=DEVICE) for d in (16, 20)]
    expected = [t.clone() for t in storages]
    if form == "contiguous":
        lengths = torch.tensor([0, 14, 5], dtype=torch.int32, device=DEVICE)
        at = lengths[:, None] + torch.arange(2, device=DEVICE)
        slots = torch.arange(3, device=DEVICE)[:, None] * 16 + at
        tokens = Tokens(None, None, lengths)
    else:
        at = torch.tensor([3, 4, 0, 49, 7, 8], dtype=torch.int32, device=DEVICE)
        slots = torch.tensor([40, 41, -1, 0, 17, 16], dtype=torch.int32, device=DEVICE)
        tokens = Tokens(slots, at, None)
    turned = append(q, k, v, *storages, tokens, (cos, sin, interleaved))
    at = at.view(shape)
    exact = [apply_rotary(t, cos[at], sin[at], interleaved=interleaved) for t in (q, k)]
    torch.testing.assert_close(turned, exact[0], rtol=1e-6, atol=1e-6)
    slots = slots.flatten().long()
    for storage, new in zip(expected, (exact[1], v)):
        rows = storage.flatten(0, 1)
        rows[slots[slots >= 0]] = new.flatten(0, -3)[slots >= 0]
    torch.testing.assert_close(storages[0], expected[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(storages[1], expected[1])
    assert append(q, k, v, *storages, tokens, None) is q


@pytest.mark.sample(3)
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("new_tokens", [1, 2])
@pytest.mark.parametrize("in_place", [False, True])
def test_appending_counts(in_place: bool, new_tokens: int, rotary: bool):
    """The launch that writes tokens leaves the lengths with them, here of pages in any order."""
    q, k, v = (randn(3, new_tokens, heads, dim) for heads, dim in ((36, 16), (18, 16), (18, 20)))
    storages = [torch.zeros(12, 4, 18, d, device=DEVICE) for d in (16, 20)]
    table = torch.randperm(12, device=DEVICE).int().view(3, 4)
    held = [0, 3, 12]
    lengths = torch.tensor(held, dtype=torch.int32, device=DEVICE)
    new_lengths = lengths if in_place else torch.full_like(lengths, -9)
    arrivals = torch.zeros_like(lengths) if in_place else None
    cos, sin = (t.to(DEVICE) for t in rotary_tables(torch.arange(20), 12))
    for _ in range(2):
        if not in_place:
            lengths = torch.tensor(held, dtype=torch.int32, device=DEVICE)
        tokens = Tokens(None, None, lengths, table, new_lengths, arrivals)
        turned = append(q, k, v, *storages, tokens, (cos, sin, False) if rotary else None)
        at = torch.tensor(held, device=DEVICE)[:, None] + torch.arange(new_tokens, device=DEVICE)
        expected = [apply_rotary(t, cos[at], sin[at]) if rotary else t for t in (q, k)]
        torch.testing.assert_close(turned, expected[0], rtol=1e-6, atol=1e-6)
        for storage, new in zip(storages, (expected[1], v)):
            for b, n in enumerate(held):
                rows = storage[table[b].long()].flatten(0, 1)
                torch.testing.assert_close(rows[n : n + new_tokens], new[b], rtol=1e-6, atol=1e-6)
        held = [n + new_tokens for n in held]
        assert new_lengths.tolist() == held
        assert arrivals is None or not arrivals.any()


def test_packed_queries_with_a_cache():
    """Prefill, a chunk and a token in one launch of the general kernel, keys in pages."""
    new, held = [20, 1, 0, 5], [20, 30, 7, 9]
    q = randn(sum(new), 4, 16)
    k, v = randn(4, 30, 2, 16), randn(4, 30, 2, 16)
    dense = cached(randn(4, 1, 4, 16), k, v, held, True)
    offsets = torch.tensor([0, *new], device=DEVICE).cumsum(0).int()
    inputs = dense._replace(query=q, cu_seqlens_q=offsets)
    out, lse = launch.forward(describe(inputs, Options(causal=True)), inputs)
    for n, rows in enumerate(torch.arange(sum(new)).split(new)):
        own = q[rows][None], k[n : n + 1, : held[n]], v[n : n + 1, : held[n]]
        exact, base = (reference.attention(*own, causal=True, dtype=d) for d in (torch.float64, q.dtype))
        assert compare("out", out[rows][None], exact[0], base[0]).is_within
        assert compare("lse", lse[:, rows][None], exact[1], base[1]).is_within


@triton.jit
def offsets_kernel(out, scores, heads):
    """Bytes from a tensor's start to some columns of a score tensor, and to heads of a token."""
    n = tl.arange(0, 16)
    first_row = tl.load(out).to(tl.int32)  # of a cache: 0
    columns = score_ptrs(scores, n * 0, n, Sequence(first_row, first_row, 1, 16, 15, first_row))
    tl.store(out + n, columns.to(tl.int64) - scores.ptr.to(tl.int64))
    rows, _ = head_pointers(heads, first_row, first_row, 1)
    tl.store(out + 16 + n, rows.to(tl.int64) - heads.ptr.to(tl.int64))


def test_offsets_have_64_bits():
    """Columns of a transposed matrix, and heads that come before a long sequence, lie far apart."""
    t, out = torch.zeros(1, device=DEVICE), torch.zeros(32, dtype=torch.int64, device=DEVICE)
    step = 1 << 29
    offsets_kernel[(1,)](out, ScoreTensor(t, 0, 0, 0, step), Heads(t, 0, 0, step, 32, 1))
    assert out.tolist() == [4 * step * n for n in range(32)]


def test_rows_of_8_bit_pages_have_64_bits():
    """A page may be a whole sequence, of which rows and heads lie far apart in memory that nobody touches."""
    if IS_INTERPRETED:
        memory = torch.frombuffer(mmap.mmap(-1, 1 << 34, NO_RESERVE), dtype=torch.uint8)
    elif torch.cuda.mem_get_info()[0] < 1 << 35:
        pytest.skip("needs 32 GB of free memory")
    else:
        memory = torch.zeros(1 << 34, dtype=torch.uint8, device=DEVICE)
    pool = memory[1 << 32 :].as_strided((1, 4, 4, 16), (1, 1 << 30, 3 << 28, 1))
    held = torch.randint(0, 120, pool.shape, device=DEVICE).to(torch.uint8)
    pool.copy_(held)
    extras = {"seqlens_k": torch.tensor([4], device=DEVICE)}
    extras["page_table"] = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    extras |= dict.fromkeys(("key_scale", "value_scale"), torch.ones(1, 4, device=DEVICE))
    far, near = (t.view(torch.float8_e4m3fn) for t in (pool, held))
    inputs = Inputs(randn(1, 20, 4, 16), far, far, **extras)
    _, found = dequantized(describe(inputs, Options()), inputs)
    assert torch.equal(found.key, near.float()) and torch.equal(found.value, near.float())


def test_many_queries_of_few_keys():
    """Heads whose tiles take turns, times tiles, fit 32 bits: here few keys suggest millions of heads."""
    q, k = torch.empty(1, 1 << 20, 8, 16, device="meta"), torch.empty(1, 1, 1, 16, device="meta")
    problem = describe(Inputs(q, k, k), Options())
    call = Call(problem, (*Inputs(q, k, k), *Results()))
    sizes = call.sizes(call.tiles_q(64), call.bh_q, 8 * call.l2_swizzle(1, 1))
    assert sizes.l2_swizzle * sizes.num_tiles < 1 << 31
