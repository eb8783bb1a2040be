"""Worlds of gloo processes against the O(N^2) reference in float64."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from tilewise.core.mask import Visibility
from tilewise.distributed.layout import make_layout
from tilewise.distributed.parts import parts_of
from tilewise.distributed.schedule import Rules, make_schedule

CASES = str(Path(__file__).parent / "cases.py")
USER_CASES = str(Path(__file__).parent / "user_cases.py")
METHODS = ("ring", "all_gather", "ulysses", "2d", "auto")
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3)},
    "causal window": {"causal": True, "window": (5, None)},
    "softcap": {"causal": True, "softcap": 2.0},
    "sinks": {"causal": True, "sinks": True, "window": (9, None)},
    "alibi": {"causal": True, "alibi": True},
    "alibi both sides": {"alibi": True, "window": (20, 11)},
    "bias row": {"bias": "row"},
    "padding": {"mask": True, "causal": True},
    "dropout": {"causal": True, "dropout_p": 0.3, "sinks": True},
    "dropout window": {"window": (9, 2), "dropout_p": 0.5, "alibi": True, "softcap": 3.0},
    "alibi of 16 bits": {"causal": True, "alibi": torch.bfloat16},
    "alibi of 8 bits": {"alibi": torch.float8_e4m3fn, "bias": "row"},
}
DOCUMENTS = ([0, 50], [0, 1, 3, 40, 40, 50], [0, 6, 12, 18, 24, 30, 36, 43, 50])


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(pool, name, method, world):
    number = list(OPTIONS).index(name)
    balance = ("zigzag", "contiguous")[number % 2]
    kv_heads = (1, 3 if world == 3 else 4, 12)[number % 3]
    pool.run(world, CASES, "check", number, method, balance, OPTIONS[name], 37, 12, kv_heads)


@pytest.mark.sample(5)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS[:-1])
@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_that_read_each_others_memory(pool, name, method, world):
    """The same, with no message at all; copies are as late as they may be."""
    number = list(OPTIONS).index(name)
    balance = ("zigzag", "contiguous")[number % 2]
    kv_heads = (1, 3 if world == 3 else 4, 12)[number % 3]
    call = (number, method, balance, OPTIONS[name], 37, 12, kv_heads)
    for _, memories in pool.run(world, CASES, "reading", "check", *call):
        assert memories == ["keys"] if method == "ulysses" else memories == ["gradients", "keys"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", range(len(DOCUMENTS)))
@pytest.mark.parametrize("balance", ["contiguous", "zigzag", "documents"])
@pytest.mark.parametrize("method", METHODS[:-1])
def test_documents_that_ranks_read(pool, method, balance, number):
    options = {"causal": True, "window": (4, None) if number == 1 else None}
    call = (number, method, balance, options, 50, 12, 12, DOCUMENTS[number])
    pool.run(2 + number, CASES, "reading", "check", *call)


@pytest.mark.parametrize("seed", [2, 3])
def test_many_ranges_are_read_as_one(pool, seed):
    """In pieces of eight documents; with an even seed two ranges are many."""
    call = (seed, "ring", "documents", {"causal": True}, 50, 2, 2, DOCUMENTS[2])
    pool.run(3, CASES, "reading", "check", *call)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_room_makes_all_send_messages(pool, rank):
    for had_none, finds_none, keeps_none, warned in pool.run(2, CASES, "refused", rank):
        assert not had_none and finds_none and keeps_none
        assert len(warned) == 1 and "no room" in warned[0]


def test_a_mesh_of_two_dimensions(pool):
    for can_flatten in (True, False):  # by PyTorch's private method, or by what is public
        pool.run(4, CASES, "on_a_mesh", 3, can_flatten)


def test_ranks_of_a_mesh_that_read(pool):
    """Within its groups: keys of both, gradients of the ring."""
    for _, memories in pool.run(4, CASES, "reading", "on_a_mesh", 4):
        assert memories == ["gradients", "keys", "keys"]


def test_ranks_that_have_made_other_numbers_of_memories_send_messages(pool):
    assert all(pool.run(2, CASES, "other_counts"))


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(50, 80))
def test_random_problems_that_ranks_read(pool, seed):
    pool.run(2 + seed % 3, CASES, "reading", "random_check", seed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (37, 5)}])
@pytest.mark.parametrize("balance", ["contiguous", "zigzag"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses", "2d"])
def test_dropout_of_a_kernel(pool, method, balance, options):
    for message in pool.run(4, CASES, "dropout_by_a_kernel", method, balance, options):
        assert message is not None and "multiples of 16" in message


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_bias_by_rows(pool, method):
    options = {"bias": "rows", "causal": True, "alibi": True}
    pool.run(3, CASES, "check", 5, method, "zigzag", options, 29, 4, 2)


@pytest.mark.sample(4)
@pytest.mark.parametrize("number", range(len(DOCUMENTS)))
@pytest.mark.parametrize(
    "options", [{"causal": True}, {}, {"causal": True, "window": (4, None)}, {"dropout_p": 0.3}]
)
@pytest.mark.parametrize("balance", ["contiguous", "zigzag", "documents"])
@pytest.mark.parametrize("method", METHODS)
def test_documents(pool, method, balance, options, number):
    options = options | {"alibi": number == 1 and "window" in options}
    pool.run(2 + number, CASES, "check", number, method, balance, options, 50, 12, 12, DOCUMENTS[number])


@pytest.mark.parametrize(
    "balance, options, documents, sent",
    [
        ("zigzag", {"causal": True}, None, [2, 4]),
        ("contiguous", {"window": (5, 0)}, None, [2]),  # neighbours need the ends of shards only
        ("documents", {"causal": True}, (0, 3, 9, 40, 41, 61), [2, 4]),
    ],
)
def test_keys_of_all_ranks_in_two_steps(pool, balance, options, documents, sent):
    """Those of one of the other three ranks first. A message is a key and a value, or their gradients."""
    found = pool.run(4, CASES, "messages", 3, balance, options, documents)
    assert found[1] == 3 * sent  # the forward, the backward, and gradients


@pytest.mark.parametrize("method, exchanges", [("ring", 3 + 5), ("all_gather", 2 + 4)])
def test_messages_begin_before_work(pool, method, exchanges):
    """Of 4 ranks' ring the backward sends keys and gradients at once where it has both."""
    for done in pool.run(4, CASES, "order", method):
        starts = [n for n, name in enumerate(done) if name == "exchange"]
        assert len(starts) == exchanges
        assert all(done[n + 1] == "let_messages_begin" for n in starts)
        assert {"attend", "differentiate"} <= set(done)


@pytest.mark.parametrize("head_dim_v, tensors", [(8, 1), (6, 3)])
def test_ulysses_sends_tensors_that_are_alike_as_one(pool, head_dim_v, tensors):
    """Query, key and value to the other rank, out back; gradients likewise, that of out first."""
    for sent in pool.run(2, CASES, "sent_together", head_dim_v):
        assert sent == [tensors, 1, 1, tensors]


@pytest.mark.parametrize("wants_gradient, method", [(False, "ring"), (True, "ulysses")])
def test_the_method_is_that_of_a_forward_alone_where_no_gradient_is_wanted(pool, wants_gradient, method):
    assert pool.run(2, CASES, "chosen", wants_gradient) == [method, method]


def test_a_first_call_in_inference_mode(pool):
    pool.run(2, CASES, "first_call_in_inference_mode")


def test_a_first_call_in_a_checkpoint(pool):
    pool.run(2, CASES, "first_call_in_a_checkpoint")


@pytest.mark.parametrize("seed", range(50))
def test_random_problems(pool, seed):
    pool.run(2 + seed % 3, CASES, "random_check", seed)


@pytest.mark.parametrize("balance", ["contiguous", "zigzag", "documents"])
def test_layouts(pool, balance):
    for world, n, starts in ((2, 9, None), (3, 2, None), (4, 50, DOCUMENTS[1]), (4, 16, None)):
        lengths = pool.run(world, CASES, "round_trip", n, balance, starts)
        assert sum(lengths) == n and max(lengths) - min(lengths) <= 1 + (balance == "documents")


def test_a_second_derivative_through_unshard(pool):
    pool.run(3, CASES, "twice_through_unshard")


def test_compiled_code(pool):
    pool.run(2, CASES, "compiled")


@pytest.mark.parametrize(
    "change, words",
    [
        ("dtype", "query must"),
        ("option", "causal must"),
        ("length", "seqlen"),
        ("requires_grad", "requires_grad must"),
        ("error", "window"),
        ("dimensions", "query.shape"),
        ("meta", "meta device"),
        ("function", ""),
    ],
)
def test_ranks_that_disagree_all_raise(pool, change, words):
    for rank, message in enumerate(pool.run(2, CASES, "disagree", change)):
        assert message is not None and words in message and ("rank 1" in message or rank == 1)


@pytest.mark.parametrize("method, n", [("ring", 1), ("ring", 2), ("all_gather", 2)])
def test_gradients_of_what_all_have_on_a_rank_without_tokens(pool, method, n):
    pool.run(3, CASES, "few_tokens", "learned", method, n)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_masks_of_few_tokens(pool, n):
    """Methods that exchange heads serve no rows; "auto" takes them on no rank."""
    assert pool.run(3, CASES, "few_tokens", "mask", "auto", n) == [None] * 3
    for message in pool.run(3, CASES, "few_tokens", "mask", "ulysses", n):
        assert message is not None and "has a row for each token" in message


CHANGES = ("heads", "dtype", "length", "kind", "balance", "dim", "seqlen", "documents")


@pytest.mark.parametrize("change", CHANGES)
def test_shards_that_differ_raise_on_all_ranks(pool, change):
    for message in pool.run(2, CASES, "shards_that_differ", change):
        assert message is not None and ("must be" in message or "refused" in message)


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_rank_that_stops_leaves_the_others_with_a_timeout(pool, when):
    found = pool.run(4, CASES, "silent_rank", when)[:3]
    assert all(message is not None and seconds < 10 for message, seconds in found), found
    assert any("Timed out" in message for message, _ in found)  # the first of them hangs up on the others


def test_a_backend_asked_for_by_name_refuses(pool):
    for message in pool.run(2, CASES, "disagree", "backend"):
        assert "backend='hopper'" in message


@pytest.mark.parametrize("method, cu_seqlens", [("auto", None), ("ulysses", None), ("ring", [0, 9, 20, 32])])
def test_a_second_call_looks_nothing_up_again(pool, method, cu_seqlens):
    pool.run(2, CASES, "second_call", method, cu_seqlens)


@pytest.mark.parametrize("layout, packed", [("bshd", False), ("bhsd", False), ("bshd", True)])
def test_dtensors(pool, layout, packed):
    for message in pool.run(4, USER_CASES, "on_dtensors", layout, packed):
        assert message is not None and "must shard the sequence" in message


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "packed"])
def test_dtensors_of_odd_lengths(pool, layout):
    words = ("layout='sbhd'", "seqlen=10", "sinks is a DTensor", "x is a DTensor")
    for found in pool.run(2, USER_CASES, "on_odd_dtensors", layout):
        assert len(found) == 4 and all(w in message for w, message in zip(words, found))


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_sixteen_bits_err_as_one_device_does(pool, method, dtype, world):
    pool.run(world, CASES, "rounding", 1, method, getattr(torch, dtype))


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses", "2d"])
def test_mask_and_score_functions(pool, method, seed):
    options = {"softcap": 3.0} if method == "ring" else {"causal": method == "2d"}
    world = 2 if method == "ulysses" else 4
    pool.run(world, CASES, "with_functions", seed, method, ("zigzag", "contiguous")[seed], options)


@pytest.mark.parametrize("in_context", [False, True])
def test_functions_that_say_a_bias(pool, in_context):
    pool.run(2, CASES, "biases_by_function", in_context)


def test_a_function_that_says_a_window_sends_few_keys(pool):
    assert pool.run(4, CASES, "window_by_function") == [[20, 0], [20, 4], [20, 4], [20, 4]]


def test_most_rows_with_a_window_are_final_at_once():
    """A rank's first step as calls: one of 16 bits has all rows, and most have their result from it."""
    layout, rules = make_layout((0, 4000), 4, "zigzag"), Rules(99, 0, needs_tokens=False)
    for rank in range(4):
        first = make_schedule(layout, rank, rules, "ring")[0]
        whole, *parts = parts_of(first, True, 1000, torch.device("cpu"))
        assert whole.block.is_alone and (whole.block.q0, whole.block.q1) == (0, 1000)
        assert not any(part.block.is_alone for part in parts)
        assert sum(b.q1 - b.q0 for b in first.blocks if b.is_alone) == (901 if rank in (0, 3) else 802)


def test_a_window_with_alibi_keeps_its_own_keys_in_one_block():
    """Rows cut off would see keys before them in a block more."""
    layout, rules = make_layout((0, 4000), 4, "contiguous"), Rules(99, 0, True, has_alibi=True)
    for rank in range(4):
        (block,) = make_schedule(layout, rank, rules, "ring")[0].blocks
        assert (block.q0, block.q1, block.is_alone) == (0, 1000, rank == 0)


@pytest.mark.parametrize("seed", range(40))
def test_rows_alone_are_in_one_block(seed):
    draw = random.Random(seed)
    starts = (0, *sorted(draw.sample(range(1, 60), draw.choice([0, 0, 3]))), 60)
    balance = draw.choice(["zigzag", "contiguous", "documents"])
    layout = make_layout(starts, draw.choice([1, 2, 3, 4]), balance)
    window = draw.choice([(None, None), (None, 0), (3, 0), (9, 0), (4, 5)])
    rules = Rules(*window, draw.random() < 0.5, draw.random() < 0.3, draw.choice([1, 1, 4]))
    pairs = alone = 0
    for rank in range(layout.world):
        blocks = [b for step in make_schedule(layout, rank, rules, "ring") for b in step.blocks]
        counts = Counter(row for b in blocks for row in range(b.q0, b.q1))
        of_alone = [counts[row] for b in blocks if b.is_alone for row in range(b.q0, b.q1)]
        assert set(of_alone) <= {1}
        pairs, alone = pairs + sum(b.pairs for b in blocks), alone + len(of_alone)
    lengths = map(int.__sub__, starts[1:], starts)
    assert pairs == sum(Visibility(n, n, *window).visible_pairs() for n in lengths)
    assert alone == 60 or layout.world > 1 or rules.needs_tokens or len(set(counts.values())) > 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 4)}])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses", "2d"])
def test_functions_of_documents(pool, method, options):
    balance = "documents" if "causal" in options else "contiguous"
    world = 2 if method == "ulysses" else 4
    pool.run(world, CASES, "functions_of_documents", method, balance, DOCUMENTS[1], options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("with_score", [False, True])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses", "2d", "auto"])
def test_learned_slopes(pool, method, with_score):
    world = 2 if method == "ulysses" else 4
    pool.run(world, CASES, "learned_slopes", method, ("zigzag", "contiguous")[with_score], with_score)


@pytest.mark.parametrize("kind", ["ring", "zigzag_ring", "zigzag_ring_varlen"])
def test_names_of_ring_flash_attn(pool, kind):
    name = f"{kind.removesuffix('_varlen')}_flash_attn_{'varlen_' * ('varlen' in kind)}func"
    pool.run(3, USER_CASES, "ring_flash_attn_names", name)


def test_a_sink_of_no_weight_has_no_gradient(pool):
    pool.run(2, USER_CASES, "sink_of_no_weight")


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_second_derivatives_are_refused(pool, method):
    for message in pool.run(2, USER_CASES, "gradient_penalty", method):
        assert message is not None and "second derivatives" in message
