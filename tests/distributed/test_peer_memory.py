"""When ranks read each other's memory, and when they send messages."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch

from tilewise.core.torch_private import symmetric_memory
from tilewise.distributed import peer_memory
from tilewise.distributed.ranks import Ranks

RANKS = Ranks("group", 1, 3, (4, 5, 6))
DEVICE = torch.device("cuda", 1)


def may_read(facts, count=3, peers=True, agreed=True, allowed=True):
    """`_may_read` of the second of three ranks, each of which tells its host, its memories and its device."""
    told = iter([torch.tensor(facts), torch.tensor([agreed])])
    with (
        mock.patch.object(peer_memory, "gather", lambda t, ranks: next(told)),
        mock.patch.object(peer_memory, "_all_agree", lambda so, *_: so and agreed),
        mock.patch.object(peer_memory, "IS_ALLOWED", allowed),
        mock.patch.object(torch, "tensor", return_value=None),
        mock.patch("torch.cuda.device_count", return_value=count),
        mock.patch("torch.cuda.can_device_access_peer", return_value=peers) as asked,
    ):
        found = peer_memory._may_read(RANKS, DEVICE)
    return found, asked.call_count


def test_ranks_of_one_host_with_a_gpu_each_read():
    assert may_read([[9, 2, 0], [9, 2, 1], [9, 2, 2]]) == (True, 2)


@pytest.mark.parametrize(
    "what",
    [
        {"facts": [[9, 2, 0], [9, 2, 1], [8, 2, 2]]},  # hosts
        {"facts": [[9, 2, 0], [9, 2, 1], [9, 3, 2]]},  # one has made more memories
        {"facts": [[9, 2, 0], [9, 2, 0], [9, 2, 2]]},  # one GPU for two, or GPUs that do not see each other
        {"count": 2},
        {"peers": False},
        {"agreed": False},
        {"allowed": False},
    ],
)
def test_others_send_messages(what):
    assert not may_read(**({"facts": [[9, 2, 0], [9, 2, 1], [9, 2, 2]]} | what))[0]


def test_a_group_that_cannot_is_asked_once():
    with (
        mock.patch.object(peer_memory, "_new_memory", return_value=None) as new,
        mock.patch.object(peer_memory, "_without", set()),
    ):
        for _ in range(2):
            assert peer_memory.memory_of(RANKS, DEVICE, "keys", [8]) is None
        assert new.call_count == 1 and not peer_memory.may_be(RANKS, DEVICE)
    assert not peer_memory.may_be(RANKS, torch.device("cpu"))
    assert not peer_memory.may_be(Ranks(None, 0, 1, (0,)), DEVICE)


def test_memory_grows_and_places_are_aligned():
    made = []

    def new(ranks, device, size):
        made.append(size)
        return peer_memory.PeerMemory(ranks, device, size, [], mock.Mock())

    with (
        mock.patch.object(peer_memory, "_new_memory", new),
        mock.patch.object(peer_memory, "_memories", {}),
        mock.patch.object(peer_memory, "_synchronize") as synchronize,
    ):
        first = peer_memory.memory_of(RANKS, DEVICE, "keys", [1, 300])
        assert first.places == [0, 256] and made == [peer_memory.STEP] and not synchronize.called
        assert peer_memory.memory_of(RANKS, DEVICE, "keys", [7]) is first
        larger = peer_memory.memory_of(RANKS, DEVICE, "keys", [peer_memory.STEP, 1])
        assert larger is not first and made == [peer_memory.STEP, 2 * peer_memory.STEP]
        assert first.wait_for_all.called and synchronize.called  # nobody reads what goes
        assert peer_memory.memory_of(RANKS, DEVICE, "gradients", [7]) is not larger


@pytest.mark.parametrize("name", ["torch.distributed._symmetric_memory", None])
def test_a_pytorch_without_it_has_none(name):
    """Nor has a CPU."""
    with mock.patch.dict(sys.modules, {name: None} if name else {}):
        assert symmetric_memory(8, torch.device("cpu"), None) is None
