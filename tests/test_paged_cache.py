"""The paged cache against a plain list of tokens a sequence, and against the float64 reference."""

import gc
import pickle
import re
import weakref

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import tilewise
from tilewise import PagedKVCache, api, reference
from tilewise.cache import contiguous, step as cache_step
from tilewise.core.signature import Gpu, standing_in
from tilewise.rotary import apply_rotary, rotary_tables
from tilewise.testing import compare

PAGE = 16
HEADS, DIM, DIM_V = 2, 3, 2


def bookkeeping(cache):
    """Lengths, pages, free pages and how many sequences share each."""
    lengths = {s: cache.length(s) for s in cache.sequences}
    tables = {s: list(p) for s, p in cache._table.pages.items()}
    return lengths, tables, sorted(cache._table.free_pages), list(cache._table.references)


class ListModel(RuleBasedStateMachine):
    """The same operations on a cache of 7 pages and on lists of tokens; each token is a fresh number."""

    @initialize(dtype=st.sampled_from([torch.float32, torch.float8_e4m3fn]))
    def start(self, dtype):
        self.cache = PagedKVCache(7, PAGE, HEADS, DIM, head_dim_v=DIM_V, max_seqlen=50, dtype=dtype)
        self.twin = PagedKVCache(7, PAGE, 1, 1, dtype=torch.float32, shares=self.cache)  # a second layer
        self.lists: dict[int, torch.Tensor] = {}  # (tokens, HEADS, DIM + DIM_V)
        self.ever: list[int] = []

    def some(self, data):
        return data.draw(st.sampled_from(sorted(self.lists)))

    @rule()
    def allocate(self):
        sequence = self.cache.allocate()
        assert sequence not in self.ever
        self.ever.append(sequence)
        self.lists[sequence] = torch.zeros(0, HEADS, DIM + DIM_V)

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def fork(self, data):
        sequence = self.some(data)
        free = self.cache.free_pages
        other = self.cache.fork(sequence)
        assert self.cache.free_pages == free, "a fork takes no pages"
        self.ever.append(other)
        self.lists[other] = self.lists[sequence]

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def free(self, data):
        sequence = self.some(data)
        self.cache.free(sequence)
        del self.lists[sequence]

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def truncate(self, data):
        sequence = self.some(data)
        length = data.draw(st.integers(0, len(self.lists[sequence])))
        self.cache.truncate(sequence, length)
        self.lists[sequence] = self.lists[sequence][:length]

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def append(self, data):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.lists)), unique=True, min_size=1, max_size=4))
        counts = [data.draw(st.sampled_from([0, 1, 1, 2, 15, 16, 17, 33])) for _ in chosen]
        tokens = [torch.randn(n, HEADS, DIM + DIM_V) for n in counts]
        k, v = [t[..., :DIM] for t in tokens], [t[..., DIM:] for t in tokens]
        before = bookkeeping(self.cache)
        try:
            batch = self.cache.reserve(chosen, counts)
        except ValueError as error:
            assert bookkeeping(self.cache) == before
            too_long = any(len(self.lists[s]) + n > 50 for s, n in zip(chosen, counts))
            assert too_long or "pages" in str(error)
            return
        self.cache.write(torch.cat(k), torch.cat(v), batch)
        numbers = torch.cat(tokens)[:, :1, :1]
        self.twin.write(numbers, numbers, batch)
        for s, t in zip(chosen, tokens):
            self.lists[s] = torch.cat((self.lists[s], t))
        assert batch.lengths.tolist() == [len(self.lists[s]) for s in chosen]

    @rule(data=st.data())
    def refuse(self, data):
        """Wrong calls are refused and change nothing."""
        dead = [s for s in (*self.ever, 10_000) if s not in self.lists]
        wrong = data.draw(st.sampled_from(dead))
        before = bookkeeping(self.cache)
        for call in (
            lambda: self.cache.free(wrong),
            lambda: self.cache.fork(wrong),
            lambda: self.cache.truncate(wrong, 0),
            lambda: self.cache.length(wrong),
            lambda: self.cache.gather(wrong),
            lambda: self.cache.reserve([wrong], 1),
        ):
            with pytest.raises(ValueError, match=str(wrong)):
                call()
        for sequence in self.lists:
            with pytest.raises(ValueError, match="twice"):
                self.cache.reserve([sequence, sequence], 1)
            with pytest.raises(ValueError, match="length"):
                self.cache.truncate(sequence, len(self.lists[sequence]) + 1)
            try:
                batch = self.cache.reserve([sequence], 1)
            except ValueError as error:
                assert re.search("do not fit|pages", str(error))
            else:
                self.cache.undo(batch)
            with pytest.raises(ValueError, match=r"into|do not fit|pages"):
                self.cache.reserve([sequence], 1, into=self.cache.reserve([], []))
        assert bookkeeping(self.cache) == before

    @precondition(lambda self: len(self.ever) > 4)
    @rule()
    def reset(self):
        self.cache.reset()
        self.lists.clear()
        assert self.cache.free_pages == 7

    @invariant()
    def contents_are_the_lists(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.sequences == sorted(self.lists)
        for sequence, tokens in self.lists.items():
            k, v = self.cache.gather(sequence)
            numbers, _ = self.twin.gather(sequence)
            assert torch.equal(numbers[:, 0, 0], tokens[:, 0, 0])
            if self.cache.key_scale is None:
                assert torch.equal(torch.cat((k, v), -1), tokens)
            else:
                largest = 8.0  # of normal numbers
                bound = tokens.abs() / 16 + largest / 114688
                assert ((torch.cat((k, v), -1) - tokens).abs() <= bound).all()

    @invariant()
    def pages_are_counted(self):
        if not hasattr(self, "cache"):
            return
        table = self.cache._table
        uses = [0] * 7
        for pages in table.pages.values():
            for page in pages:
                uses[page] += 1
        assert uses == table.references
        assert sorted(table.free_pages) == [p for p in range(7) if not uses[p]]
        for sequence, pages in table.pages.items():
            assert len(pages) == -(-table.lengths[sequence] // PAGE)


TestListModel = ListModel.TestCase


def filled(lengths, dtype=torch.float32, heads=2, dim=8, dim_v=6, page_size=16, **options):
    """A cache with sequences of these lengths, poisoned elsewhere, and their keys and values."""
    cache = PagedKVCache(40, page_size, heads, dim, head_dim_v=dim_v, dtype=dtype, **options)
    if dtype != torch.float8_e4m3fn:
        cache.key.fill_(float("nan"))
        cache.value.fill_(float("nan"))
    plain = torch.float32 if dtype == torch.float8_e4m3fn else dtype
    k = [torch.randn(n, heads, dim, dtype=plain) for n in lengths]
    v = [torch.randn(n, heads, dim_v, dtype=plain) for n in lengths]
    for _ in lengths:
        cache.allocate()
    cache.append(k, v)
    return cache, k, v


OPTIONS = [
    {},
    {"window": (5, None)},
    {"softcap": 2.0},
    {"sinks": torch.randn(4)},
    {"alibi_slopes": torch.rand(4)},
    {"causal": False, "window": (None, 0)},
]


def check(out, lse, q, k, v, **options):
    options = {"causal": True} | options
    exact, exact_lse = reference.attention(q[None], k[None], v[None], **options)
    base, base_lse = reference.attention(q[None], k[None], v[None], dtype=q.dtype, **options)
    assert compare("out", out[None], exact, base).is_within
    assert compare("lse", lse[None], exact_lse, base_lse).is_within


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "page_size"),
    [(torch.float32, 16), (torch.bfloat16, 64), (torch.float16, 128), (torch.float64, 256)],
)
def test_prefill_chunks_and_decoding_in_one_packed_call(options, dtype, page_size):
    held, new = [37, 0, 5, 16, 30], [1, 20, 7, 1, 0]
    cache, k, v = filled(held, dtype, page_size=page_size)
    q, new_k, new_v = (torch.randn(sum(new), h, d, dtype=dtype) for h, d in ((4, 8), (2, 8), (2, 6)))
    batch = cache.reserve(None, new)
    out, lse = tilewise.attention_with_cache(q, cache, new_k, new_v, batch=batch, return_lse=True, **options)
    assert out.shape == (sum(new), 4, 6) and lse.shape == (4, sum(new))
    for n, rows in enumerate(torch.arange(sum(new)).split(new)):
        own_k, own_v = torch.cat((k[n], new_k[rows])), torch.cat((v[n], new_v[rows]))
        check(out[rows], lse[:, rows], q[rows], own_k, own_v, **options)


@pytest.mark.parametrize("queries", [1, 3, 8])
@pytest.mark.parametrize("options", OPTIONS)
def test_decoding_some_of_the_sequences(queries, options):
    cache, k, v = filled([33, 17, 64])
    q, new_k, new_v = (torch.randn(2, queries, h, d) for h, d in ((4, 8), (2, 8), (2, 6)))
    out, lse = tilewise.attention_with_cache(q, cache, new_k, new_v, batch=[2, 0], return_lse=True, **options)
    for row, n in enumerate([2, 0]):
        own = torch.cat((k[n], new_k[row])), torch.cat((v[n], new_v[row]))
        check(out[row], lse[row], q[row], *own, **options)
    assert [cache.length(n) for n in range(3)] == [33 + queries, 17, 64 + queries]


def test_padding_rows_see_nothing_and_write_nothing():
    cache, k, v = filled([9, 20])
    q, new_k, new_v = (torch.randn(3, 1, h, d) for h, d in ((4, 8), (2, 8), (2, 6)))
    batch = cache.reserve([1, -1, 0], 1)
    out, lse = tilewise.attention_with_cache(q, cache, new_k, new_v, batch=batch, return_lse=True)
    assert (out[1] == 0).all() and (lse[1] == float("-inf")).all()
    for row, n in ((0, 1), (2, 0)):
        own = torch.cat((k[n], new_k[row])), torch.cat((v[n], new_v[row]))
        check(out[row], lse[row], q[row], *own)
    again = cache.reserve([0, 1, -1], 1, into=batch)
    assert again.block is batch.block and batch.lengths.tolist() == [11, 22, 0]
    cache.reserve([-1, 0, -1], 1, into=batch)  # other rows are padding
    assert batch.lengths.tolist() == [0, 12, 0] and batch.slots.tolist() == [-1, 11, -1]
    third = cache.allocate()
    full = cache.reserve([0, 1, third], 1, into=cache.reserve([-1, 1, -1], 1))
    assert full.lengths.tolist() == [13, 24, 1] and full.kept.tolist() == [12, 7, 0]
    with pytest.raises(ValueError, match="into"):
        cache.reserve([0, 1], 1, into=batch)
    assert cache.length(0) == 13


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_by_position(interleaved):
    """Chunks of different lengths give what turning the whole sequence gives."""
    cos, sin = rotary_tables(torch.arange(64), 6)
    whole = [torch.randn(n, 4, 8) for n in (30, 12)]
    keys, values = [torch.randn(n, 2, 8) for n in (30, 12)], [torch.randn(n, 2, 6) for n in (30, 12)]
    cache = PagedKVCache(8, 16, 2, 8, head_dim_v=6, dtype=torch.float32)
    for _ in whole:
        cache.allocate()
    outs = [[], []]
    for ends in ((20, 1), (29, 11), (30, 12)):
        done = [cache.length(0), cache.length(1)]
        parts = [[t[n][a:b] for n, (a, b) in enumerate(zip(done, ends))] for t in (whole, keys, values)]
        batch = cache.reserve([0, 1], [b - a for a, b in zip(done, ends)])
        out = tilewise.attention_with_cache(
            *(torch.cat(parts[0]), cache), *map(torch.cat, parts[1:]), batch=batch,
            rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved,
        )  # fmt: skip
        for n, part in enumerate(out.split(list(batch.new_tokens))):
            outs[n].append(part)
    for n, q in enumerate(whole):
        q, k = (apply_rotary(t, cos[: len(t)], sin[: len(t)], interleaved=interleaved) for t in (q, keys[n]))
        exact, _ = reference.attention(q[None], k[None], values[n][None], causal=True)
        torch.testing.assert_close(torch.cat(outs[n]).double(), exact[0], rtol=1e-5, atol=1e-5)


def test_rotary_in_a_contiguous_cache():
    cos, sin = rotary_tables(torch.arange(16), 8)
    q, k, v = (torch.randn(2, 9, h, 8) for h in (4, 2, 2))
    cache = tilewise.KVCache(2, 16, 2, 8, dtype=torch.float32)
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    outs = []
    for parts in zip(*(t.transpose(1, 2).split([5, 1, 3], 2) for t in (q, k, v))):
        outs.append(tilewise.attention_with_cache(parts[0], cache, *parts[1:], layout="bhsd", **rotary))
    turned = [apply_rotary(t, cos[:9], sin[:9]) for t in (q, k)]
    exact, _ = reference.attention(*turned, v, causal=True)
    torch.testing.assert_close(torch.cat(outs, 2).transpose(1, 2).double(), exact, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="rotary_cos"):
        tilewise.attention_with_cache(q, cache, rotary_cos=cos[:5], rotary_sin=sin[:5])
    with pytest.raises(TypeError, match="given together"):
        tilewise.attention_with_cache(q, cache, rotary_cos=cos)


@pytest.mark.parametrize("paged", [False, True])
def test_absorbed_latent_attention_stores_values_in_keys(paged):
    q, latent = torch.randn(2, 3, 8, 24), torch.randn(2, 20, 1, 24)
    if paged:
        cache = PagedKVCache(4, 16, 1, 24, head_dim_v=16, value_in_key=True, dtype=torch.float32)
        cache.allocate(), cache.allocate()
        assert cache.bytes_per_token() == 24 * 4
    else:
        cache = tilewise.KVCache(2, 32, 1, 24, head_dim_v=16, value_in_key=True, dtype=torch.float32)
        assert cache.memory_bytes() == 2 * 32 * 24 * 4
    cache.append(latent[:, :17])
    out = tilewise.attention_with_cache(q, cache, latent[:, 17:], scale=0.3)
    exact, _ = reference.attention(q, latent, latent[..., :16], causal=True, scale=0.3)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="value must be None"):
        cache.append(latent[:, :1], latent[:, :1, :, :16])


def test_which_tokens_the_appending_kernel_takes(monkeypatch):
    """Whole rows, which it copies bit by bit or rounds to 8 bits: not other strides, nor what has 8 bits."""
    monkeypatch.setattr(contiguous, "HAS_TRITON", True)

    def takes(*tokens, dtype=torch.bfloat16):
        cache = PagedKVCache(2, PAGE, 4, 4, dtype=dtype, device="meta")
        batch = cache.reserve([cache.allocate()], 3)
        return cache_step.PagedStep(cache, batch, is_reserved=True)._is_fusible(*tokens, None)

    plain = [torch.empty(1, 3, 4, 4, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    with standing_in(Gpu("H200", (9, 0), 132)):
        assert takes(*plain) and takes(*plain[:2], None)
        for n in range(3):
            assert not takes(*(t.mT if i == n else t for i, t in enumerate(plain)))
        query, *others = plain
        assert takes(query, *others, dtype=torch.float8_e4m3fn)
        bits = [t.to(torch.float8_e4m3fn) for t in others]
        assert not takes(query, *bits, dtype=torch.float8_e4m3fn)


def test_eight_bit_storage_keeps_its_error():
    """Every number within |x| / 16 + a / 114688, also after many appends that raise the scale."""
    cache = PagedKVCache(4, 16, 2, 8, dtype=torch.float8_e4m3fn)
    sequence = cache.allocate()
    tokens = torch.randn(60, 2, 8) * torch.logspace(-4, 3, 60)[:, None, None]
    for part in tokens.split([1, 3, 1, 20, 1, 1, 30, 3]):
        cache.append(part[None], -part[None], [sequence])
    for found, exact in zip(cache.gather(sequence), (tokens, -tokens)):
        pages = torch.nn.functional.pad(exact, (0, 0, 0, 0, 0, 4)).view(4, 16, 2, 8)
        largest = pages.abs().amax((1, 3), keepdim=True).expand_as(pages).flatten(0, 1)[:60]
        assert ((found - exact).abs() <= exact.abs() / 16 + largest / 114688).all()
    scales = cache.key_scale[cache.key_scale != 1]
    assert len(scales) and torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5)), "powers of two"
    assert cache.memory_bytes() == 4 * 16 * 2 * 8 * 2 + 2 * 4 * 2 * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_eight_bit_pages_keep_what_stands_beside_nan_and_infinity(bad):
    """Also numbers over 448, which need a scale."""
    cache = PagedKVCache(2, 16, 2, 8, dtype=torch.float8_e4m3fn)
    sequence, tokens = cache.allocate(), 1000 * torch.randn(9, 2, 8)
    tokens[3, 1, 2] = bad
    cache.append(tokens[None], tokens[None], [sequence])
    is_bad = torch.zeros_like(tokens, dtype=torch.bool)
    is_bad[3, 1, 2] = True
    for found in cache.gather(sequence):
        assert torch.equal(found.isnan(), is_bad)
        error = (found - tokens).abs()[~is_bad]
        assert (error <= tokens.abs()[~is_bad] / 16 + tokens[~is_bad].abs().max() / 114688).all()


def test_tensors_of_a_batch_are_aligned_for_any_number_of_sequences():
    """Else Triton compiles the kernels anew for some numbers of sequences and tokens."""
    cache = tilewise.PagedKVCache(64, 16, 1, 8, max_seqlen=1000, dtype=torch.float32)
    for batch in range(1, 7):
        cache.allocate()
        found = cache.reserve(None, [*range(1, batch), 33])
        tensors = {name: t for name, t in vars(found).items() if isinstance(t, torch.Tensor)}
        assert len(tensors) == 8 and all(t.data_ptr() % 16 == 0 for t in tensors.values())
        again = cache.reserve(None, [*range(1, batch), 33], into=found)
        assert again.block is found.block
        for n, sequence in enumerate(cache.sequences):
            assert int(again.lengths[n]) == again.ends[n] == cache.length(sequence)


def test_a_batch_in_earlier_memory_may_write_to_more_pages():
    """As many tokens, otherwise shared out: from the fewest pages to the most."""
    for rows in range(1, 7):
        for total in range(0, 16 * rows + 3, 3):
            cache = PagedKVCache(60, 16, 1, 4, dtype=torch.float32, max_seqlen=160)
            for _ in range(rows):
                cache.allocate()
            # behind 15 tokens 2 more go to 2 pages, 18 more to 3; behind none 16 to 1
            many = [min(18 if total >= 18 * rows else 2, max(0, total - 2 * n)) for n in range(rows)]
            many[-1] += total - sum(many)
            few = [total // rows] * (rows - 1) + [total - total // rows * (rows - 1)]
            first = cache.reserve(None, few)
            cache.reset()
            sequences = [cache.allocate() for _ in range(rows)]
            cache.reserve(sequences, 15)
            batch = cache.reserve(sequences, many, into=first)
            fresh = cache._table.batch(sequences, many, (), cache.key.device, None)
            for name in ("lengths", "page_table", "positions", "slots", "written", "kept"):
                assert torch.equal(getattr(batch, name), getattr(fresh, name)), name


@pytest.mark.parametrize("counts", [[18, 18, 18, 6], [2, 2, 2, 54], [17, 17, 13, 13]])
def test_earlier_memory_has_room_for_any_share_of_the_tokens(counts):
    cache = PagedKVCache(64, 16, 1, 4, dtype=torch.float32, max_seqlen=80)
    sequences = [cache.allocate() for _ in range(4)]
    first = cache.reserve(sequences, 15)
    batch = cache.reserve(sequences, counts, into=first)
    x = torch.randn(60, 1, 4)
    cache.write(x, x, batch)
    for sequence, rows in zip(sequences, x.split(counts)):
        assert torch.equal(cache.gather(sequence)[0][15:], rows)


def test_a_batch_of_inference_mode_serves_outside_of_it():
    cache = PagedKVCache(8, 16, 1, 4, dtype=torch.float32)
    cache.allocate()
    with torch.inference_mode():
        batch = cache.reserve(None, 3)
    batch = cache.reserve(None, 3, into=batch)
    cache.write(torch.ones(3, 1, 4), torch.ones(3, 1, 4), batch)
    assert batch.lengths.tolist() == [6]


def test_batches_that_are_out_of_date():
    cache, _, _ = filled([20, 9])
    tokens = [torch.randn(2, 1, h, d) for h, d in ((4, 8), (2, 8), (2, 6))]

    def call(batch):
        return tilewise.attention_with_cache(tokens[0], cache, *tokens[1:], batch=batch)

    early = cache.reserve([0, 1], 1)
    third = cache.allocate()
    cache.reserve([0, 1, third], 1)
    cache.free(third)  # as when another sequence ends
    call(early)
    other = PagedKVCache(40, 16, 2, 8, head_dim_v=6, dtype=torch.float32)
    other.allocate(), other.allocate()
    with pytest.raises(ValueError, match="another cache"):
        call(other.reserve([0, 1], 1))
    batch = cache.reserve([1, 0], 1)
    cache.free(1)
    cache.append(torch.ones(1, 20, 2, 8), torch.ones(1, 20, 2, 6), [cache.allocate()])  # takes its page
    before = bookkeeping(cache), cache.key.clone()
    for step in (lambda: call(batch), lambda: cache.write(*tokens[1:], batch)):
        with pytest.raises(ValueError, match="sequence=1 was freed or truncated"):
            step()
    with pytest.raises(ValueError, match="sequence=1 was freed or truncated"):
        tilewise.attention_with_cache(tokens[0], cache, batch=batch)
    assert bookkeeping(cache) == before[0] and torch.equal(cache.key.nan_to_num(), before[1].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_eight_bit_pages_is_exact_for_what_they_hold(dtype):
    held, new = [40, 3], [1, 5]
    cache, _, _ = filled(held, torch.float8_e4m3fn)
    q, new_k, new_v = (torch.randn(sum(new), h, d, dtype=dtype) for h, d in ((4, 8), (2, 8), (2, 6)))
    batch = cache.reserve(None, new)
    out, lse = tilewise.attention_with_cache(q, cache, new_k, new_v, batch=batch, return_lse=True)
    for n, rows in enumerate(torch.arange(sum(new)).split(new)):
        k, v = (t.to(dtype) for t in cache.gather(n))
        check(out[rows], lse[:, rows], q[rows], k, v)


def test_memory_of_llama_2_70b():
    """80 layers, 64 heads of size 128, float16: 32 KiB a token and layer, 10 GiB at 4096 tokens."""
    one_layer = PagedKVCache(4096 // 16, 16, 64, 128, dtype=torch.float16, device="meta")
    assert one_layer.bytes_per_token() == 32 << 10
    assert 80 * one_layer.memory_bytes() == 10 << 30
    grouped = PagedKVCache(4096 // 16, 16, 8, 128, dtype=torch.float16, device="meta")
    assert 8 * grouped.memory_bytes() == one_layer.memory_bytes()


def test_used_bytes_count_shared_pages_once():
    cache, _, _ = filled([40])
    cache.fork(0)
    assert cache.used_bytes() == 3 * 16 * cache.bytes_per_token()
    cache.append(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 6), [1])
    assert cache.used_bytes() == 4 * 16 * cache.bytes_per_token()


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        ((4, 17, 2, 8), {}, "page_size=17"),
        ((4, 16, 2, 0), {}, "head_dim=0"),
        ((4, 16, 2, 577), {}, "head_dim=577"),
        ((True, 16, 2, 8), {}, "num_pages=True"),
        ((-1, 16, 2, 8), {}, "num_pages=-1"),
        ((4, 16, 2, 8), {"head_dim_v": 9, "value_in_key": True}, "head_dim_v=9"),
    ],
)
def test_wrong_sizes(arguments, options, match):
    with pytest.raises(ValueError, match=match):
        PagedKVCache(*arguments, dtype=torch.float32, **options)


TABLE = torch.ones(64, 4)


def test_wrong_tokens_leave_the_cache_unchanged():
    cache, _, _ = filled([20, 9])
    good = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 6)
    wrong = [
        ((good[0], good[1].double(), good[2]), {}, TypeError, "key.dtype"),
        ((good[0], good[1], good[2][..., :5]), {}, ValueError, "value.shape"),
        ((good[0], good[1]), {}, TypeError, "value"),
        ((good[0][:1], *good[1:]), {}, ValueError, "query.shape"),
        (good, {"batch": [0]}, ValueError, "sequences"),
        (good, {"batch": [0, 7]}, ValueError, "sequence=7"),
        (good, {"scale": float("nan")}, ValueError, "scale"),
        ((None, *good[1:]), {}, TypeError, "query=NoneType"),
        (good, {"rotary_cos": TABLE}, TypeError, "rotary_sin=NoneType"),
        (good, {"rotary_cos": [1.0], "rotary_sin": TABLE}, TypeError, "rotary_cos=list"),
        (
            good,
            {"rotary_cos": TABLE.int(), "rotary_sin": TABLE.int()},
            TypeError,
            "rotary_cos.dtype=torch.int32",
        ),
        (good, {"rotary_cos": TABLE, "rotary_sin": TABLE.to("meta")}, ValueError, "rotary_sin.device=meta"),
        (
            good,
            {"rotary_cos": TABLE[:, :0], "rotary_sin": TABLE[:, :0]},
            ValueError,
            r"rotary_cos.shape=\(64, 0\)",
        ),
        (good, {"rotary_cos": TABLE[:20], "rotary_sin": TABLE[:20]}, ValueError, "at least 21 positions"),
        (good, {"mask": torch.ones(3, 3, 3, 3, dtype=torch.bool)}, ValueError, "mask"),
        ((good[0][:, 0], good[1][:, 0], good[2][:, 0]), {}, ValueError, "reserve"),
    ]
    before = [t.clone() for n in range(2) for t in cache.gather(n)]
    for (q, *kv), options, error, match in wrong:
        with pytest.raises(error, match=match):
            tilewise.attention_with_cache(q, cache, *kv, **options)
        assert [cache.length(0), cache.length(1)] == [20, 9]
        for a, b in zip(before, [t for n in range(2) for t in cache.gather(n)]):
            assert torch.equal(a, b)
    assert cache.free_pages == 40 - 3


def test_wrong_arguments_are_named_and_change_nothing():
    cache, _, _ = filled([3, 5])
    k, v = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 2, 6)
    lists = [torch.randn(n, 2, 8) for n in (3, 5)], [torch.randn(n, 2, 6) for n in (5, 3)]
    wrong = [
        (lambda: cache.append(*lists), ValueError, r"value has \[5, 3\]"),
        (lambda: cache.append([*lists[0][:1], k[0, ..., :5]], lists[1]), ValueError, "of the same heads"),
        (lambda: cache.append("k", v, [0]), TypeError, "key"),
        (lambda: cache.append(k, 3, [0]), TypeError, "value"),
        (lambda: cache.append(k[0, 0], v, [0]), ValueError, "key"),
        (lambda: cache.append(k, v, 0), TypeError, "sequences=0"),
        (lambda: cache.reserve([0], 1.5), TypeError, "new_tokens=1.5"),
        (lambda: cache.reserve(["a"], 1), TypeError, "sequences"),
        (lambda: cache.truncate(0, "2"), ValueError, "length='2'"),
        (
            lambda: tilewise.attention_with_cache(torch.randn(1, 1, 4, 8), cache, batch=5),
            TypeError,
            "batch=5",
        ),
        (lambda: PagedKVCache(4, 16, 2, 8, dtype=torch.float32, shares=cache.key), TypeError, "shares"),
    ]
    for call, error, match in wrong:
        with pytest.raises(error, match=match):
            call()
        assert [cache.length(0), cache.length(1)] == [3, 5] and cache.free_pages == 38


@pytest.mark.parametrize("forks", [1, 2])
def test_a_refused_step_shares_its_pages_again(forks):
    cache, _, _ = filled([20])
    others = [cache.fork(0) for _ in range(forks)]
    before = bookkeeping(cache)
    q, k, v = (torch.randn(2, 13, h, d) for h, d in ((4, 8), (2, 8), (2, 6)))
    with pytest.raises(ValueError, match="softcap"):
        tilewise.attention_with_cache(q, cache, k, v, batch=[0, others[-1]], softcap=-1.0)
    with pytest.raises(ValueError, match="into"):
        cache.reserve([others[0], 0], [13, 1], into=cache.reserve([], []))
    assert bookkeeping(cache) == before


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", [(7, 64), (20, 3), (1, 3), (7, 1)])
def test_a_mask_that_does_not_cover_packed_queries_is_refused(name, shape):
    """Kernels would read behind its end."""
    cache = PagedKVCache(8, 16, 1, 8, dtype=torch.float32, max_seqlen=64)
    sequences, x = [cache.allocate(), cache.allocate()], torch.randn(33, 1, 8)
    batch, before = cache.reserve(sequences, [20, 13]), cache.key.clone()
    t = torch.ones(shape, dtype=torch.bool) if name == "mask" else torch.zeros(shape)
    with pytest.raises(ValueError, match=rf"{name}\.shape.* must cover the longest sequence: \(20, 64\)"):
        tilewise.attention_with_cache(x, cache, x, x, batch=batch, **{name: t})
    assert torch.equal(cache.key, before)
    whole = t.new_ones(20, 64) if name == "mask" else t.new_zeros(20, 64)
    out = tilewise.attention_with_cache(x, cache, x, x, batch=batch, **{name: whole})
    assert torch.equal(out, tilewise.attention_with_cache(x, cache, batch=batch))


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_scales_of_eight_bit_pages_are_float32(default):
    """Whatever PyTorch's default dtype is: float16 has no number for the scale of small ones."""
    tokens, before = torch.randn(1, 20, 2, 8) * 1e-6, torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        cache = PagedKVCache(4, 16, 2, 8, dtype=torch.float8_e4m3fn)
        cache.append(tokens, tokens, [cache.allocate()])
        key, value = cache.gather(0)
    finally:
        torch.set_default_dtype(before)
    assert cache.key_scale.dtype == cache.value_scale.dtype == key.dtype == value.dtype == torch.float32
    assert ((key - tokens[0]).abs() <= tokens[0].abs() / 16 + tokens.abs().max() / 114688).all()


def test_a_dropped_layer_gives_its_memory_back():
    first = PagedKVCache(8, 16, 2, 4, dtype=torch.float32)
    second = PagedKVCache(8, 16, 2, 4, dtype=torch.float32, shares=first)
    copied, other = pickle.loads(pickle.dumps((first, second)))
    for layers in ((first, second), (copied, other)):
        assert set(layers[0]._table.layers) == set(layers)
    dropped = weakref.ref(second)
    del second, layers
    gc.collect()
    assert dropped() is None and copied._table is other._table
    first.append(torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2, 4), [first.allocate()])  # it is the only layer


@pytest.mark.parametrize("kind", ["pages", "contiguous"])
def test_an_interrupt_leaves_the_cache_unchanged(kind, monkeypatch):
    cache = PagedKVCache(8, 16, 1, 4, dtype=torch.float32)
    sequence = cache.allocate()
    x = torch.ones(1, 3, 1, 4)
    if kind == "contiguous":
        cache = tilewise.KVCache(1, 16, 1, 4, dtype=torch.float32)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    tilewise.attention_with_cache(x, cache, x, x)
    for place, name in ((api.functions, "attention"), (tilewise.KVCache, "mirror")):
        if name == "mirror" and kind == "pages":
            continue
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(place, name, interrupted)
            tilewise.attention_with_cache(x, cache, x, x)
        assert (cache.length(sequence) if kind == "pages" else int(cache.lengths)) == 3
    assert kind == "pages" or cache.is_mirrored


@pytest.mark.parametrize("is_reserved", [False, True], ids=["a list", "a batch"])
def test_a_step_that_fails_leaves_earlier_tokens_of_8_bits(is_reserved):
    """Beside large new tokens they had been rounded to 0 when the run found a wrong index."""
    cache = PagedKVCache(4, 16, 1, 8, dtype=torch.float8_e4m3fn)
    sequence = cache.allocate()
    small, large, table = torch.randn(1, 5, 1, 8) / 1000, torch.randn(1, 2, 1, 8) * 10000, torch.zeros(6)
    cache.append(small, small, [sequence])
    before = cache.gather(sequence)
    batch = cache.reserve([sequence], 2) if is_reserved else [sequence]
    with pytest.raises(IndexError, match="index 6 in dimension 0"):
        tilewise.attention_with_cache(
            large, cache, large, large, batch=batch, score_mod=lambda s, b, h, i, j: s + table[j]
        )
    if is_reserved:
        cache.undo(batch)
    assert all(map(torch.equal, cache.gather(sequence), before))
