"""Batches of a paged cache that are used too late: refused, and nothing is written."""

import copy

import pytest
import torch

import tilewise
from tilewise import PagedKVCache


def tokens(n, value=1.0):
    return torch.full((n, 1, 4), value)


def paged(num_pages=8, **options):
    return PagedKVCache(num_pages, 16, 1, 4, **({"dtype": torch.float32} | options))


def check_refused(cache, batch, match="out of date"):
    """No use of the batch is accepted, and none changes anything."""
    new = tokens(batch.total, 9.0)
    before = cache.key.clone(), cache.sequences, [cache.length(s) for s in cache.sequences]
    free = cache.free_pages
    for use in (
        lambda: cache.write(new, new, batch),
        lambda: tilewise.attention_with_cache(new, cache, new, new, batch=batch),
        lambda: tilewise.attention_with_cache(new, cache, batch=batch),
        lambda: cache.undo(batch),
    ):
        with pytest.raises(ValueError, match=match):
            use()
    assert torch.equal(cache.key, before[0]) and cache.free_pages == free
    assert (cache.sequences, [cache.length(s) for s in cache.sequences]) == before[1:]


def test_another_sequence_has_the_pages_after_truncation_and_growth():
    cache = paged()
    s = cache.allocate()
    batch = cache.reserve([s], [20])
    cache.truncate(s, 0)
    t = cache.allocate()
    cache.append(tokens(20)[None], tokens(20)[None], [t])
    cache.reserve([s], [30])
    check_refused(cache, batch, "sequence=0 was freed or truncated")
    assert (cache.gather(t)[0] == 1).all()


@pytest.mark.parametrize("change", ["truncate", "free", "reset", "fork", "into", "undo"])
def test_a_batch_is_out_of_date_after(change):
    cache = paged()
    s = cache.allocate()
    batch = cache.reserve([s], [20])
    if change == "truncate":
        cache.truncate(s, 19)
        cache.reserve([s], 1)
    elif change == "free":
        cache.free(s)
        cache.reserve([cache.allocate()], [20])
    elif change == "reset":
        cache.reset()
        cache.reserve([cache.allocate()], [20])
    elif change == "fork":
        cache.fork(s)
    elif change == "into":
        other = cache.allocate()
        cache.reserve([other], [20], into=batch)
    elif change == "undo":
        cache.undo(batch)
        cache.reserve([s], [20])
    check_refused(cache, batch)


def test_what_changes_nothing_of_a_sequence_leaves_its_batches():
    cache = paged()
    s, t = cache.allocate(), cache.allocate()
    batch = cache.reserve([s], [20])
    cache.append(tokens(3)[None], tokens(3)[None], [t])
    cache.truncate(s, 20)  # to the length it has
    cache.truncate(t, 1)
    cache.free(cache.fork(t))
    cache.free(t)
    later = cache.reserve([s], [1])
    new = tokens(1)[:, None]
    with pytest.raises(ValueError, match="softcap"):
        tilewise.attention_with_cache(new, cache, new, new, batch=[s], softcap=-1.0)
    cache.write(tokens(1, 2.0), tokens(1, 2.0), later)
    cache.write(tokens(20), tokens(20), batch)
    cache.write(tokens(20, 3.0), tokens(20, 3.0), batch)  # again: its tokens are replaced
    assert cache.gather(s)[0][:, 0, 0].tolist() == [3.0] * 20 + [2.0]


def test_no_token_is_lost_when_a_sequence_is_forked_before_its_tokens_are_written():
    cache = paged()
    s = cache.allocate()
    cache.append(tokens(20)[None], tokens(20)[None], [s])
    early = cache.reserve([s], 1)
    f = cache.fork(s)
    late = cache.reserve([s], 1)
    check_refused(cache, early, "forked")
    cache.write(tokens(1, 2.0), tokens(1, 2.0), late)
    for sequence in (s, f):  # as the error says
        cache.truncate(sequence, 20)
        again = cache.reserve([sequence], 1)
        cache.write(tokens(1, 5.0 + sequence), tokens(1, 5.0 + sequence), again)
    assert cache.gather(s)[0][20, 0, 0] == 5 and cache.gather(f)[0][20, 0, 0] == 6


def test_a_batch_written_again_after_a_fork_would_change_the_fork():
    cache = paged()
    s = cache.allocate()
    batch = cache.reserve([s], [20])
    cache.write(tokens(20), tokens(20), batch)
    f = cache.fork(s)
    check_refused(cache, batch, "forked")
    assert (cache.gather(f)[0] == 1).all()


def test_a_batch_without_new_tokens_does_not_read_pages_that_its_sequence_has_left():
    cache = paged()
    s = cache.allocate()
    cache.append(tokens(20)[None], tokens(20)[None], [s])
    f = cache.fork(s)
    reading = cache.reserve([f], 0)
    cache.reserve([f], 1)  # copies the last page
    cache.free(s)
    check_refused(cache, reading, "copied")


def test_batches_of_another_cache():
    cache = paged()
    cache.append(tokens(20)[None], tokens(20)[None], [cache.allocate()])
    for other in (paged(), copy.deepcopy(cache)):
        if not other.sequences:
            other.allocate()
        check_refused(cache, other.reserve(None, 1), "another cache")
    layer = paged(shares=cache)
    batch = cache.reserve(None, 1)
    layer.write(tokens(1), tokens(1), batch)
    cache.write(tokens(1), tokens(1), batch)


def test_layers_that_share_pages_reserve_once():
    """Each layer that reserved would count the tokens again, and read rows that it never wrote."""
    cache = paged()
    layer = paged(shares=cache)
    s = cache.allocate()
    new = tokens(3)[None]
    for each in (cache, layer):
        for sequences in ([s], None):
            with pytest.raises(ValueError, match=r"2 layers share these pages.*reserve\(\) once"):
                tilewise.attention_with_cache(new, each, new, new, batch=sequences)
            with pytest.raises(ValueError, match="2 layers share these pages"):
                each.append(new, new, sequences)
    assert cache.length(s) == 0 and cache.free_pages == 8
    batch = cache.reserve([s], 3)
    for each in (cache, layer):
        out = tilewise.attention_with_cache(new, each, new, new, batch=batch)
        assert torch.equal(tilewise.attention_with_cache(new, each, batch=[s]), out)  # nothing is new


def test_eight_bit_pages_are_written_before_more_is_reserved():
    """A page is quantized as a whole: what stands behind a batch's tokens would be lost."""
    cache = paged(dtype=torch.float8_e4m3fn)
    s = cache.allocate()
    first, second = cache.reserve([s], 1), cache.reserve([s], 1)
    with pytest.raises(ValueError, match="quantized as a whole"):
        cache.write(tokens(1), tokens(1), first)
    cache.write(tokens(1), tokens(1), second)
    with pytest.raises(ValueError, match="batch ends at 1 tokens"):
        tilewise.attention_with_cache(tokens(1), cache, tokens(1), tokens(1), batch=first)
    assert cache.gather(s)[0][:, 0, 0].tolist() == [0.0, 1.0]
