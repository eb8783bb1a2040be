"""`context_parallel`: code that knows of no ranks, on shards, against the whole sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

CASES = str(Path(__file__).parent / "context_cases.py")
DOCUMENTS = [0, 10, 11, 43]


@pytest.mark.parametrize("face", ["sdpa", "attention", "varlen"])
@pytest.mark.parametrize("balance, cu_seqlens", [("zigzag", None), ("documents", DOCUMENTS)])
def test_calls_are_those_of_the_whole_sequence(pool, face, balance, cu_seqlens):
    world = 3 if balance == "documents" else 2
    pool.run(world, CASES, "inside_context", world, face, balance, cu_seqlens)


def test_buffers_may_share_memory(pool):
    pool.run(2, CASES, "buffers_that_share_memory")


@pytest.mark.parametrize("face", ["sdpa", "attention"])
@pytest.mark.parametrize("kind", ["mask", "mask rows", "bias", "bias rows"])
def test_masks_and_biases_have_columns_of_the_whole_sequence(pool, face, kind):
    pool.run(2, CASES, "scores_in_context", face, kind)


@pytest.mark.parametrize("face", ["sdpa", "attention"])
def test_compiled_code(pool, face):
    pool.run(2, CASES, "compiled_in_context", face)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_packed_call_of_few_tokens(pool, n):
    pool.run(3, CASES, "packed_call_of_few_tokens", n)


REFUSED = {
    "documents": "cu_seqlens", "documents of keys": "cu_seqlens_k",
    "documents written": "cu_seqlens_q=[0, 2, 5]", "function": "packed calls", "statistics": "return_aux",
    "chunks": "attention_chunk", "weights": "return_attn_probs", "cache": "kvcache",
    "block mask": "block_mask",
}  # fmt: skip


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_not_served_raises(pool, change):
    for message in pool.run(2, CASES, "refused_in_context", change):
        assert message is not None and REFUSED[change] in message


REFUSED_BY_ONE = {
    "window": "window", "statistics": "return_aux", "name": "casual", "mask": "mask.shape", "dimensions": "",
    "documents": "cu_seqlens", "dropout": "dropout_p", "dtensor": "DTensors",
    "flash": "window_size", "flash 3": "attention_chunk", "flex": "kernel_options",
}  # fmt: skip
CONTEXTS = {
    "balance": "balance",
    "other balance": "balance must",
    "seqlen": "seqlen",
    "buffers": "buffer_seq",
}


@pytest.mark.parametrize("change", [*REFUSED_BY_ONE, *CONTEXTS])
def test_what_one_rank_refuses_raises_on_all(pool, change):
    for rank, found in enumerate(pool.run(2, CASES, "refused_on_a_rank", change)):
        assert len(found) == 1 + (change in REFUSED_BY_ONE)
        for message in found:
            assert (REFUSED_BY_ONE | CONTEXTS)[change] in message and (rank == 1 or "rank 1" in message)


@pytest.mark.parametrize("method, cu_seqlens", [("ring", [0, 37]), ("ulysses", [0, 37]), ("auto", DOCUMENTS)])
def test_functions_of_a_call(pool, method, cu_seqlens):
    pool.run(2, CASES, "functions_in_context", method, cu_seqlens)


def test_slopes_before_a_function(pool):
    pool.run(2, CASES, "slopes_before_a_function_in_context")


def test_dropout_is_that_of_one_device(pool):
    pool.run(2, CASES, "dropout_in_context")


@pytest.mark.parametrize("implementation", ["tilewise", "wide", "sdpa"])
def test_a_transformers_model(pool, implementation):
    pytest.importorskip("transformers")
    pool.run(2, CASES, "transformers_model", implementation)


@pytest.mark.parametrize("n, causal", [(21, True), (21, False), (3, True), (4, False)])
def test_a_padded_transformers_model(pool, n, causal):
    pytest.importorskip("transformers")
    pool.run(3, CASES, "padded_model", n, causal)


def test_the_example_learns_as_one_device_does(pool):
    path = Path(__file__).parents[2] / "examples" / "long_context.py"
    found = pool.run(4, CASES, "long_context", str(path))
    for losses in found:
        assert losses["together"] == found[0]["together"]
    assert found[0]["together"] == pytest.approx(found[0]["alone"], rel=1e-4)
    assert found[0]["together"][-1] < found[0]["together"][0]
