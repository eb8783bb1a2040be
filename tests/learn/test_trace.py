import itertools
import math
from typing import Any

import pytest
import torch

from tilewise import reference
from tilewise.core.problem import Inputs, Options, describe
from tilewise.learn import trace
from tilewise.tiled import backend as tiled, tiles

ALL_WAYS = list(itertools.product(trace.ORDERS, trace.NORMALIZE))
# seqlen_q, seqlen_k, block_q, block_k, causal: blocks that divide and that do not, ragged, one, larger
CASES = [
    (6, 6, 2, 3, False),
    (7, 5, 3, 2, False),
    (7, 7, 3, 2, True),
    (5, 9, 2, 4, True),
    (9, 4, 4, 3, True),
    (1, 1, 1, 1, True),
    (3, 3, 8, 8, True),
]


def random_inputs(seqlen_q: int, seqlen_k: int, head_dim: int = 3, head_dim_v: int = 2):
    shapes = ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v), (seqlen_q, head_dim_v))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def one_head(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t[None, :, None] for t in tensors]


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("order", "normalize"), ALL_WAYS)
@pytest.mark.parametrize("scale", [None, 2.5])
def test_forward_matches_reference_and_backend(case, order, normalize, scale):
    seqlen_q, seqlen_k, block_q, block_k, causal = case
    query, key, value, _ = random_inputs(seqlen_q, seqlen_k)
    ours = trace.forward(
        query, key, value, block_q, block_k, order=order, normalize=normalize, scale=scale, causal=causal
    )
    inputs = Inputs(*one_head(query, key, value))
    backend = tiled.forward(describe(inputs, Options(causal=causal, scale=scale)), inputs)
    for out, lse in (reference.attention(*inputs[:3], scale=scale, causal=causal), backend):
        assert_close(ours.out, out[0, :, 0])
        assert_close(ours.lse, lse[0, 0])
    assert_close(ours.weights() @ value, ours.out)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("scale", [None, 2.5])
def test_backward_matches_reference_and_backend(case, scale):
    seqlen_q, seqlen_k, block_q, block_k, causal = case
    query, key, value, dout = random_inputs(seqlen_q, seqlen_k)
    ours = trace.backward(query, key, value, dout, block_q, block_k, scale=scale, causal=causal)
    inputs = Inputs(*one_head(query, key, value))
    problem = describe(inputs, Options(causal=causal, scale=scale))
    backend = tiled.backward(problem, inputs, *tiled.forward(problem, inputs), dout[None, :, None], None)
    oracle = reference.attention_backward(dout[None, :, None], *inputs[:3], scale=scale, causal=causal)
    for gradients in (backend, oracle):
        for mine, theirs in zip((ours.dq, ours.dk, ours.dv), gradients[:3]):
            assert_close(mine, theirs[0, :, 0])
    p, dp, ds = (ours.assemble(name) for name in ("p", "dp", "ds"))
    assert_close(p, ours.forward.weights())
    assert_close(p * (dp - ours.delta[:, None]), ds)
    assert_close((p * dp).sum(-1), ours.delta)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_way_has_the_same_state_after_every_tile(case):
    seqlen_q, seqlen_k, block_q, block_k, causal = case
    query, key, value, _ = random_inputs(seqlen_q, seqlen_k)
    ways = [
        trace.forward(query, key, value, block_q, block_k, order=order, normalize=normalize, causal=causal)
        for order, normalize in ALL_WAYS
    ]
    for other in ways[1:]:
        assert len(other.steps) == len(ways[0].steps)
        for step in ways[0].steps:
            again = other.step(step.tile.i, step.tile.j)
            for name in ("s", "m_tile", "m_old", "m", "correction", "p", "l_old", "l"):
                assert torch.equal(getattr(step, name), getattr(again, name)), name
            assert_close(step.acc, again.acc)
            assert_close(step.out, again.out)


@pytest.mark.parametrize("normalize", trace.NORMALIZE)
def test_running_output_is_attention_over_the_keys_seen_so_far(normalize):
    query, key, value, _ = random_inputs(4, 10)
    steps = trace.forward(query, key, value, 4, 3, normalize=normalize, scale=1.0).steps
    for step in steps:
        seen = step.tile.cols.stop
        s = query @ key[:seen].T
        assert_close(step.out, torch.softmax(s, -1) @ value[:seen])
        assert_close(step.m + step.l.log(), torch.logsumexp(s, -1))
        assert_close(step.kept, step.acc if normalize == "end" else step.out)
        assert_close(step.acc, torch.exp(s - step.m[:, None]) @ value[:seen])


def test_step_follows_the_papers_lines_10_to_12():
    query, key, value, _ = random_inputs(6, 9)
    for step in trace.forward(query, key, value, 2, 3, order="fa1", normalize="each_step", causal=True).steps:
        m_tile = step.s.amax(-1)
        assert torch.equal(step.m_tile, m_tile)
        assert torch.equal(step.m, torch.maximum(step.m_old, m_tile))
        seen = step.m_tile > -math.inf
        assert_close(step.p_tile[seen], torch.exp(step.s - m_tile[:, None])[seen])
        assert step.p_tile[~seen].eq(0).all()
        assert_close(step.p, step.tile_correction[:, None] * step.p_tile)
        l_new = step.correction * step.l_old + step.tile_correction * step.p_tile.sum(-1)
        assert_close(step.l, l_new)
    steps = trace.forward(query, key, value, 2, 3, order="fa1", normalize="each_step").steps
    old = {i: torch.zeros(2, 2, dtype=torch.float64) for i in range(3)}
    for step in steps:
        new = (step.l_old * step.correction)[:, None] * old[step.tile.i]
        new += step.tile_correction[:, None] * step.p_tile @ value[step.tile.cols.start : step.tile.cols.stop]
        assert_close(step.kept, new / step.l[:, None])
        old[step.tile.i] = step.kept


class Recorder:
    """Stands in for a function: keeps copies of its arguments and of what it returned."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, *args):
        before = [a.clone() for a in args if a is not None]
        result = self.function(*args)
        after = [r.clone() for r in (result if isinstance(result, tuple) else (result,))]
        self.calls.append((before, after))
        return result


def record_calls(monkeypatch, run) -> dict[str, list]:
    names = ("online_softmax_step", "recompute_step", "gradient_step")
    with monkeypatch.context() as patch:
        recorders = {name: Recorder(getattr(tiled, name)) for name in names}
        for name, recorder in recorders.items():
            patch.setattr(tiled, name, recorder)
        run()
    return {name: recorder.calls for name, recorder in recorders.items()}


def test_trace_and_backend_make_the_same_calls(monkeypatch):
    """Bit for bit the same arguments and results of the same functions, in the same order."""
    query, key, value, dout = random_inputs(7, 8)
    monkeypatch.setattr(tiles, "tiled_plan", lambda problem: tiles.TileConfig(block_q=3, block_k=2))
    inputs = Inputs(*one_head(query, key, value))
    problem = describe(inputs, Options())

    def backend():
        tiled.backward(problem, inputs, *tiled.forward(problem, inputs), dout[None, :, None], None)

    theirs = record_calls(monkeypatch, backend)
    ours = record_calls(monkeypatch, lambda: trace.backward(query, key, value, dout, 3, 2))
    for name in theirs:
        assert len(ours[name]) == len(theirs[name]) == 3 * 4
        for mine, other in zip(ours[name], theirs[name], strict=True):
            for a, b in zip(mine[0] + mine[1], other[0] + other[1], strict=True):
                assert torch.equal(a, b), name


def test_records_are_not_overwritten_by_later_tiles():
    query, key, value, dout = random_inputs(4, 6)
    whole = trace.backward(query, key, value, dout, 2, 2, scale=1.0)
    for step in whole.forward.steps:
        rows, cols = (slice(r.start, r.stop) for r in (step.tile.rows, step.tile.cols))
        assert torch.equal(step.s, query[rows] @ key[cols].T)
    dk = torch.zeros_like(key)
    for back in whole.steps:
        rows, cols = (slice(r.start, r.stop) for r in (back.tile.rows, back.tile.cols))
        dk[cols] += back.ds.T @ query[rows]
        assert_close(back.dk, dk[cols])
        assert_close(back.dp, dout[rows] @ value[cols].T)
        seen = slice(0, back.tile.cols.stop)
        assert_close(back.dq, whole.assemble("ds")[rows, seen] @ key[seen])


def test_causal_tiles_are_skipped_or_masked():
    query, key, value, _ = random_inputs(6, 6)
    ours = trace.forward(query, key, value, 2, 2, causal=True)
    assert [step.tile[:2] for step in ours.steps] == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    assert [tile[:2] for tile in ours.skipped] == [(0, 1), (0, 2), (1, 2)]
    assert (ours.step(1, 1).s == -math.inf).tolist() == [[False, True], [False, False]]
    assert (ours.scores() == -math.inf).equal(torch.ones(6, 6).triu(1).bool())
    with pytest.raises(KeyError):
        ours.step(0, 1)


def test_queries_without_keys():
    query, key, value, dout = random_inputs(5, 2)
    for order, normalize in ALL_WAYS:
        ours = trace.forward(query, key, value, 4, 2, order=order, normalize=normalize, causal=True)
        assert ours.out[:3].eq(0).all()
        assert ours.lse[:3].eq(-math.inf).all()
        assert ours.weights()[:3].eq(0).all()
        assert not any(step.out.isnan().any() or step.acc.isnan().any() for step in ours.steps)
        assert not any(step.p_tile.isnan().any() for step in ours.steps)
    backward = trace.backward(query, key, value, dout, 4, 2, causal=True)
    assert backward.dq[:3].eq(0).all()
    assert not any(t.isnan().any() for t in (backward.dq, backward.dk, backward.dv))


@pytest.mark.parametrize(("order", "normalize"), ALL_WAYS)
@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)])
def test_empty(order, normalize, lengths):
    query, key, value, dout = random_inputs(*lengths)
    ours = trace.forward(query, key, value, 2, 2, order=order, normalize=normalize)
    assert ours.out.shape == dout.shape
    assert ours.out.eq(0).all()
    assert ours.lse.eq(-math.inf).all()
    assert ours.steps == ()
    assert str(ours)
    backward = trace.backward(query, key, value, dout, 2, 2)
    assert backward.dk.shape == key.shape
    assert str(backward)


def test_large_logits_and_half_types():
    query, key, value, _ = random_inputs(4, 6)
    huge = trace.forward(1e4 * query, key, value, 2, 2, scale=1.0)
    assert huge.out.isfinite().all()
    q, k, v = (t.bfloat16().requires_grad_() for t in (query, key, value))
    ours = trace.forward(q, k, v, 2, 2)
    assert ours.out.dtype == torch.float64
    assert_close(ours.out, reference.attention(*one_head(q, k, v))[0][0, :, 0].detach())


def test_traffic_of_a_query_outer_walk():
    """Q once, K and V once a query tile, the result once."""
    n_q, n_k, d, d_v = 7, 10, 3, 2
    query, key, value, _ = random_inputs(n_q, n_k, d, d_v)
    ours = trace.forward(query, key, value, 3, 4, order="fa2")
    assert ours.loads() == {"q": n_q * d, "k": 3 * n_k * d, "v": 3 * n_k * d_v}
    assert ours.stores() == {"out": n_q * d_v, "lse": n_q}


def test_traffic_of_a_key_outer_walk():
    """Algorithm 1: K and V once; Q, O, l, m once a key tile; O, l, m written as often, and once before."""
    n_q, n_k, d, d_v, key_tiles = 7, 10, 3, 2, 3
    query, key, value, _ = random_inputs(n_q, n_k, d, d_v)
    state = {"o": n_q * d_v, "l": n_q, "m": n_q}
    ours = trace.forward(query, key, value, 3, 4, order="fa1", normalize="each_step")
    visits = {name: key_tiles * count for name, count in state.items()}
    assert ours.loads() == {"k": n_k * d, "v": n_k * d_v, "q": key_tiles * n_q * d, **visits}
    assert ours.stores() == {name: count + state[name] for name, count in visits.items()}
    at_end = trace.forward(query, key, value, 3, 4, order="fa1", normalize="end")
    assert at_end.loads() - ours.loads() == {"o": n_q * d_v, "l": n_q}  # the division is a pass of its own
    assert at_end.stores() - ours.stores() == {"o": n_q * d_v}


def test_skipped_tiles_move_nothing():
    query, key, value, _ = random_inputs(8, 8, 2, 2)
    ours = trace.forward(query, key, value, 2, 2, causal=True)
    assert ours.loads() == {"q": 16, "k": 10 * 4, "v": 10 * 4}  # 10 of 16 tiles


@pytest.mark.parametrize(
    ("sram_size", "head_dim", "expected"),
    [(1024, 64, (4, 4)), (1025, 64, (5, 5)), (100_000, 64, (64, 391)), (1, 64, (1, 1)), (96, 2, (2, 12))],
)
def test_paper_block_sizes(sram_size, head_dim, expected):
    assert trace.paper_block_sizes(sram_size, head_dim) == expected
    block_q, block_k = expected
    assert block_k == math.ceil(sram_size / (4 * head_dim))
    assert block_q == min(block_k, head_dim)


def test_paper_block_sizes_cut_a_trace():
    query, key, value, _ = random_inputs(5, 9, 2)
    ours = trace.forward(query, key, value, *trace.paper_block_sizes(30, 2), order="fa1")
    assert ours.blocks == (2, 4)
    assert [len(step.tile.cols) for step in ours.steps if step.tile.i == 0] == [4, 4, 1]


def test_str_shows_every_step_and_number():
    query, key, value, dout = random_inputs(4, 4)
    ours = trace.backward(query, key, value, dout, 2, 2, causal=True)
    for text, steps in ((str(ours.forward), ours.forward.steps), (str(ours), ours.steps)):
        for step in steps:
            assert f"tile ({step.tile.i}, {step.tile.j})" in text
            names = (
                ("s", "p", "acc", "out", "l") if hasattr(step, "acc") else ("p", "dp", "ds", "dq", "dk", "dv")
            )
            for name in names:
                for x in getattr(step, name).flatten().tolist():
                    assert x in (0, 1, -math.inf) or abs(x) < 1e-4 or f"{x:.4f}" in text, (name, x)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"order": "fa3"}, ValueError, "order must be one of ('fa1', 'fa2'), got 'fa3'"),
        ({"normalize": "never"}, ValueError, "normalize must be one of ('each_step', 'end'), got 'never'"),
        ({"block_q": 0}, ValueError, "block_q must be an integer of at least 1, got 0"),
        ({"block_k": 1.5}, ValueError, "block_k must be an integer of at least 1, got 1.5"),
        ({"query": torch.zeros(3)}, ValueError, "query must be 2-D (seqlen, head_dim), got shape (3,)"),
        ({"key": torch.zeros(4, 5)}, ValueError, "key"),
        ({"value": torch.zeros(3, 2)}, ValueError, "value"),
        ({"value": torch.zeros(4, 2, dtype=torch.int64)}, TypeError, "value"),
        ({"scale": math.nan}, ValueError, "scale"),
    ],
)
def test_bad_input(change, error, message):
    arguments: dict[str, Any] = {
        "query": torch.zeros(3, 2),
        "key": torch.zeros(4, 2),
        "value": torch.zeros(4, 2),
    }
    arguments |= {"block_q": 2, "block_k": 2} | change
    with pytest.raises(error) as caught:
        trace.forward(**arguments)
    assert message in str(caught.value)


def test_bad_dout_and_sram_size():
    query = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"dout must have the output's shape \(3, 2\), got \(2, 2\)"):
        trace.backward(query, query, query, torch.zeros(2, 2), 1, 1)
    with pytest.raises(ValueError, match="sram_size must be at least 1, got 0"):
        trace.paper_block_sizes(0, 64)
