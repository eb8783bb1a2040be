"""Tile arithmetic against the definition, pair by pair."""

import torch
from hypothesis import given, settings, strategies as st

from tilewise.core.mask import TileKind, Visibility

# Between them is a key at least; blocks of a sequence in shards have negative ones.
bounds = st.tuples(*[st.none() | st.integers(-9, 9)] * 2).filter(lambda b: None in b or sum(b) >= 0)
lengths = st.integers(0, 20)
many = settings(max_examples=200)  # in `make test` too: pure arithmetic takes no time


def by_definition(v: Visibility) -> torch.Tensor:
    visible = torch.zeros(v.seqlen_q, v.seqlen_k, dtype=torch.bool)
    for i in range(v.seqlen_q):
        for j in range(v.seqlen_k):
            position = i + v.seqlen_k - v.seqlen_q
            visible[i, j] = (v.left is None or j >= position - v.left) and (
                v.right is None or j <= position + v.right
            )
    return visible


@many
@given(lengths, lengths, bounds, st.data())
def test_tiles_agree_with_the_definition(seqlen_q, seqlen_k, window, data):
    v = Visibility(seqlen_q, seqlen_k, *window)
    full = by_definition(v)
    assert v.visible_pairs() == int(full.sum())
    q0 = data.draw(st.integers(0, seqlen_q))
    q1 = data.draw(st.integers(q0, seqlen_q))
    k0 = data.draw(st.integers(0, seqlen_k))
    k1 = data.draw(st.integers(k0, seqlen_k))
    tile = full[q0:q1, k0:k1]
    assert torch.equal(v.tile_mask(q0, q1, k0, k1), tile)
    # exactly: a tile that is computed, or masked, where that is not needed costs time
    expected = TileKind.EMPTY if not tile.any() else TileKind.FULL if tile.all() else TileKind.EDGE
    assert v.tile_kind(q0, q1, k0, k1) is expected


@many
@given(lengths, lengths, bounds, st.data())
def test_ranges_are_tight(seqlen_q, seqlen_k, window, data):
    v = Visibility(seqlen_q, seqlen_k, *window)
    full = by_definition(v)
    q0 = data.draw(st.integers(0, seqlen_q))
    q1 = data.draw(st.integers(q0, seqlen_q))
    seen = full[q0:q1].any(0).nonzero().flatten().tolist()
    k0, k1 = v.key_range(q0, q1)
    if seen:
        assert (k0, k1) == (seen[0], seen[-1] + 1)
    elif q0 < q1:
        assert k0 >= k1
    c0 = data.draw(st.integers(0, seqlen_k))
    c1 = data.draw(st.integers(c0, seqlen_k))
    seeing = full[:, c0:c1].any(1).nonzero().flatten().tolist()
    r0, r1 = v.query_range(c0, c1)
    if seeing:
        assert (r0, r1) == (seeing[0], seeing[-1] + 1)
    elif c0 < c1:
        assert r0 >= r1
