"""Score functions that add a number of each distance: which are known as such, and their gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise
from tilewise.core.functions.captured import pack
from tilewise.core.functions.distances import captured_gradient, distance_bias, numbers
from tilewise.core.functions.trace import trace
from tilewise.dispatch.capability import ROWS

EXTENT = BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 3, 11, 14
TABLE = torch.randn(HEADS, 33, requires_grad=True)
SLOPES = torch.rand(BATCH, HEADS, requires_grad=True)
QUERY = torch.randn(BATCH, SEQLEN_Q, HEADS, 8)


def bucket(distance):
    """T5's: exact up to 8, then logarithmic."""
    far = (8 + torch.log((distance.abs() + 1) / 8) * 4).floor().clamp(8, 15).long()
    return torch.where(distance.abs() < 8, distance.abs(), far)


OF_DISTANCE = {
    "learned": lambda s, b, h, i, j: s + TABLE[h, (j - i).clamp(-16, 16) + 16],
    "buckets": lambda s, b, h, i, j: TABLE[h, bucket(i - j) + 16 * (j > i)] * 2 + s,
    "of a sequence": lambda s, b, h, i, j: s - SLOPES[b, h] * (1 + (i - j).abs()).log(),
    "several": lambda s, b, h, i, j: s + TABLE[h, (3 * j - 3 * i).clamp(0, 20)] - (j - i) * 0.5 + h,
    "of no distance": lambda s, b, h, i, j: s - SLOPES[b, h] * 3,
    "steps": lambda s, b, h, i, j: s + torch.where(j - i > 2, 1.0, (i + 4 - j) % 3),
}
OTHERS = {
    "a key": lambda s, b, h, i, j: s + TABLE[h, j],
    "both": lambda s, b, h, i, j: s + (i + j) * 0.5,
    "rounded": lambda s, b, h, i, j: s + TABLE[h, ((i + 0.1) - (j + 0.1)).long().clamp(0, 32)],
    "halves": lambda s, b, h, i, j: s + (i // 2 - j // 2),
    "a factor": lambda s, b, h, i, j: s * TABLE[h, (i - j).clamp(0, 5)],
    "twice the score": lambda s, b, h, i, j: s + s + (i - j),
    "taken from": lambda s, b, h, i, j: (i - j) - s,
    "a softcap": lambda s, b, h, i, j: 5 * torch.tanh(s / 5) + (i - j),
    "hidden": lambda s, b, h, i, j: s + torch.where(i - j > 3, -torch.inf, 0.0),
    "no score": lambda s, b, h, i, j: 0.5 * (i - j),
}


def traced(score_mod, mask_mod=None):
    return trace(mask_mod, score_mod, True, QUERY.device, None)


@pytest.mark.parametrize("name", OF_DISTANCE)
def test_numbers_are_what_the_function_adds(name):
    score_mod = OF_DISTANCE[name]
    found = traced(score_mod)
    known, buffers = distance_bias(found.functions.text), pack(found, QUERY)
    assert known is not None
    given = numbers(known, buffers, EXTENT, QUERY.device)
    shape, given = given.shape, given.expand(BATCH, HEADS, -1)
    i, j = torch.arange(SEQLEN_Q)[:, None], torch.arange(SEQLEN_K)
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    added = score_mod(torch.zeros(BATCH, HEADS, SEQLEN_Q, SEQLEN_K), b, h, i, j)
    torch.testing.assert_close(given[:, :, j - i + SEQLEN_Q - 1], added.detach(), rtol=1e-5, atol=1e-5)
    if buffers.floats is None:
        return
    weights = torch.randn(given.shape)
    exact = torch.autograd.grad((added * weights[:, :, j - i + SEQLEN_Q - 1]).sum(), found.tensors)
    times = torch.bincount((j - i + SEQLEN_Q - 1).flatten())  # pairs of each distance
    gradient = captured_gradient(known, buffers, EXTENT, (weights * times).sum_to_size(shape))
    flat = torch.cat([g.flatten() for g in exact])
    torch.testing.assert_close(gradient, flat, rtol=1e-4, atol=1e-4)
    assert gradient.any()


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_not_taken_for_them(name):
    assert distance_bias(traced(OTHERS[name]).functions.text) is None


def refused(**options):
    """The directions that the support table refuses of a call, by backend."""
    problem = tilewise.explain(*[QUERY.bfloat16()] * 3, **options).problem
    names = {name for row in ROWS if row.applies(problem) for name in row.reasons}
    return names & {"hopper", "hopper backward", "triton", "triton backward"}


def test_what_the_support_table_says_of_them():
    """Gradients by distance are served, deterministic too; others not by Hopper, nor deterministic."""
    gate = torch.randn(HEADS, requires_grad=True)
    learned, table = OF_DISTANCE["learned"], torch.randn(HEADS, 40, requires_grad=True)
    assert not refused(score_mod=learned, deterministic=True)
    assert refused(score_mod=lambda s, b, h, i, j: s * table[h, j], deterministic=True) == {
        "hopper backward", "triton backward",
    }  # fmt: skip
    assert refused(score_mod=lambda s, b, h, i, j: s * table.detach()[h, j], deterministic=True) == set()
    assert refused(mask_mod=lambda b, h, i, j: (gate[h] > 0) | (i > j)) == {"hopper backward"}


def test_a_mask_function_is_left():
    found = distance_bias(traced(OF_DISTANCE["learned"], lambda b, h, i, j: (i + j) % 3 != 0).functions.text)
    left = distance_bias(None)
    assert left is None and found is not None and found.rest is not None and '"score"' not in found.rest


def test_numbers_that_may_be_out_of_range_stay_with_the_function():
    """A kernel reports such an index where it is read."""
    found = traced(lambda s, b, h, i, j: s + TABLE[h, j - i])
    assert distance_bias(found.functions.text) is not None
    loads = (n for n, node in enumerate(found.functions.graph.nodes) if node.op == "load")
    assert distance_bias(replace(found.functions, guarded=frozenset(loads)).text) is None
