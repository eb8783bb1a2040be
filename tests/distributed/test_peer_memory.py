"""When ranks read each other's memory, and in which order streams do."""

from __future__ import annotations

import itertools
import random
import sys
from datetime import timedelta
from unittest import mock

import pytest
import torch

from tilewise.core.kept import kept_on_device
from tilewise.core.torch_private import share, symmetric_tensor
from tilewise.distributed import peer_memory, wire
from tilewise.distributed.layout import make_layout
from tilewise.distributed.ranks import Ranks, to_device
from tilewise.distributed.schedule import Rules, traffic

RANKS = Ranks("group", 1, 3, (4, 5, 6))
DEVICE = torch.device("cuda", 1)


class Stream:
    """A stream that notes what is asked of it, and which it is told to wait for."""

    device, device_index = DEVICE, 1

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self):
        self.log.append(f"{self.name} records")
        return self.name

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


def may_read(hosts, devices, count=3, peers=True, agreed=True, allowed=True):
    """`_may_read` of the second of three ranks, the questions it asks, and what it tells the others."""
    told = []

    def gather(t, ranks):
        told.append(t.tolist())
        return torch.tensor(list(zip(hosts, devices)))

    tensor = torch.tensor
    with (
        mock.patch.object(peer_memory, "gather", gather),
        mock.patch.object(peer_memory, "_all_agree", lambda so, *_: so and agreed),
        mock.patch.object(peer_memory, "IS_ALLOWED", allowed),
        mock.patch.object(torch, "tensor", lambda data, device="cpu": tensor(data)),
        mock.patch("torch.cuda.device_count", return_value=count),
        mock.patch("torch.cuda.can_device_access_peer", return_value=peers) as asked,
    ):
        return peer_memory._may_read(RANKS, DEVICE), asked.call_count, told


def test_ranks_of_one_host_with_a_gpu_each_read():
    found, asked, [[host, device]] = may_read([9, 9, 9], [0, 1, 2])
    assert found and asked == 2 and host > 0 and device == 1


@pytest.mark.parametrize(
    "what",
    [
        {"hosts": [9, 9, 8]},
        {"devices": [0, 0, 2]},  # one GPU for two, or GPUs that do not see each other
        {"count": 2},
        {"peers": False},
        {"agreed": False},
        {"allowed": False},
    ],
)
def test_others_send_messages(what):
    assert not may_read(**({"hosts": [9, 9, 9], "devices": [0, 1, 2]} | what))[0]


def test_a_group_is_asked_once():
    with (
        mock.patch.object(peer_memory, "_may_read", return_value=False) as asked,
        mock.patch.object(peer_memory, "ranks_of"),
        mock.patch.object(peer_memory, "_can_read", {}),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
    ):
        for _ in range(2):
            assert peer_memory.memory_of(RANKS, DEVICE, "keys", [8]) is None
        assert asked.call_count == 1
        assert not peer_memory.can_read(RANKS, torch.device("cpu"))
        assert not peer_memory.can_read(Ranks(None, 0, 1, (0,)), DEVICE)
        assert asked.call_count == 1


def test_memory_grows_when_nobody_reads_it_and_slots_are_aligned():
    log, made = [], []
    streams = itertools.cycle([Stream("second", log)])

    def new(ranks, device, size):
        made.append(size)
        memory = peer_memory.PeerMemory(ranks, device, size, [], lambda: log.append("barrier"))
        memory.stream = Stream("first", log)
        return memory

    with (
        mock.patch.object(peer_memory, "_new_memory", new),
        mock.patch.object(peer_memory, "can_read", lambda *_: True),
        mock.patch.object(peer_memory, "ranks_of"),
        mock.patch.object(peer_memory, "stream_of", lambda device: next(streams)),
        mock.patch.object(peer_memory, "_memories", {}),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=False),
        mock.patch("torch.cuda.synchronize", lambda device: log.append("synchronize")),
    ):
        first = peer_memory.memory_of(RANKS, DEVICE, "keys", [1, 300])
        assert first.slots == [0, 256] and made == [peer_memory.STEP] and log == []
        assert peer_memory.memory_of(RANKS, DEVICE, "keys", [0, 7]) is first
        larger = peer_memory.memory_of(RANKS, DEVICE, "keys", [peer_memory.STEP, 1])
        assert larger is not first and made == [peer_memory.STEP, 2 * peer_memory.STEP]
        assert log == ["second waits for first", "barrier", "synchronize"]
        assert peer_memory.memory_of(RANKS, DEVICE, "gradients", [7]) is not larger


def test_what_a_graph_reads_stays_and_none_is_made_in_a_capture():
    memory = peer_memory.PeerMemory(RANKS, DEVICE, 8, [], lambda: None)
    with (
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=True),
        mock.patch("torch.cuda.synchronize"),
        mock.patch.object(peer_memory, "stream_of"),
        mock.patch.object(peer_memory, "_captured", []) as captured,
        mock.patch.object(peer_memory, "_can_read", {}),
    ):
        memory.publish([], Stream("capturing", []))
        memory.leave()
        assert captured == [memory]
        with pytest.raises(RuntimeError, match="outside of the capture"):
            peer_memory.can_read(RANKS, DEVICE)
        with pytest.raises(RuntimeError, match="first with its lengths"):
            to_device(torch.zeros(3), DEVICE)


def test_what_a_graph_has_taken_is_never_forgotten():
    made = []

    @kept_on_device(2)
    def index(number, device):
        made.append(number)
        return torch.full((3,), number)

    def find(number, is_capturing):
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=is_capturing):
            return index(number, DEVICE)

    first = find(0, False)
    assert find(0, True) is first and made == [0]
    for number in range(1, 5):
        find(number, False)
    assert find(0, False) is first and find(0, True) is first and made == [0, 1, 2, 3, 4]
    find(1, False)
    assert made == [0, 1, 2, 3, 4, 1]  # no graph has taken it


def test_copies_come_behind_what_was_asked_before_and_are_waited_for():
    log = []
    side, current = Stream("side", log), Stream("current", log)
    target = mock.Mock()
    target.copy_ = lambda source: log.append("copy")
    with (
        mock.patch.object(peer_memory, "_streams", {DEVICE: side}),
        mock.patch("torch.cuda.current_device", return_value=0),
        mock.patch("torch.cuda.set_stream", lambda stream: log.append(f"on {stream.name}")),
        mock.patch("torch.cuda.set_device", lambda device: log.append(f"device {device}")),
    ):
        [arrival] = peer_memory.copy_beside([("source", target)], current)
        arrival.wait()
    assert log == [
        "current records", "side waits for current", "on side", "copy", "on current", "device 0",
        "side records", "current waits for side",
    ]  # fmt: skip
    target.record_stream.assert_called_once_with(side)


@pytest.mark.parametrize("width, copies", [(4, 1), (1 << 18, 20)])
def test_many_ranges_travel_each_by_itself_where_they_are_long(width, copies):
    """20 ranges of one row, with as much between. Short ones are read as one, and then taken apart."""
    source, target = torch.arange(39.0)[:, None].expand(-1, width), torch.empty(20, width)
    reads = mock.Mock(ranks=RANKS)
    memory = mock.Mock(read=lambda *_: source)
    there = tuple((2 * n, 2 * n + 1) for n in range(20))
    transfer = wire.Transfer()
    wire.Reads._read(reads, transfer, memory, 0, 0, there, target, ((0, 20),))
    assert len(transfer.receives) == copies
    for where, to in transfer.receives:
        to.copy_(where)
    transfer.wait()
    assert target[:, 0].tolist() == list(range(0, 40, 2))


@pytest.mark.parametrize("seed", range(12))
def test_both_ends_of_a_read_are_the_same_tokens(seed):
    draw = random.Random(seed)
    world, total = draw.choice([2, 3, 4, 8]), draw.randint(1, 300)
    starts = (0, *sorted(draw.randint(0, total) for _ in range(draw.choice([0, 0, 5]))), total)
    layout = make_layout(starts, world, draw.choice(["contiguous", "zigzag", "documents"]))
    window = draw.choice([(None, 0), (None, None), (9, 0), (20, 30)])
    rules, method = Rules(*window, False), draw.choice(["ring", "all_gather"])
    reaches = [wire.reach_of(layout, rank, rules, method) for rank in range(world)]

    def arriving(rank, number):
        pieces = traffic(layout, rank, rules, method)[number].pieces
        return [t for p in pieces for t in range(p.start, p.stop)]

    def own(rank):
        return layout.tokens(rank).tolist()

    def of(tokens, ranges):
        return [t for a, b in ranges for t in tokens[a:b]]

    for rank, number in itertools.product(range(world), range(len(reaches[0].steps))):
        step, ends = traffic(layout, rank, rules, method)[number], reaches[rank].steps[number]
        for message, there in zip(step.receives, ends.receives, strict=True):
            first, end = reaches[message.peer].published
            assert of(own(message.peer)[first:end], there) == of(arriving(rank, number), message.rows)
            assert end - first <= reaches[rank].most_published
        for message, there in zip(step.sends, ends.sends, strict=True):
            assert of(arriving(message.peer, number), there) == of(own(rank), message.rows)
        assert step.keys <= reaches[rank].most_arriving


@pytest.mark.parametrize("name", ["torch.distributed._symmetric_memory", None])
def test_a_pytorch_without_it_has_none(name):
    """Nor has a CPU."""
    with mock.patch.dict(sys.modules, {name: None} if name else {}), mock.patch("torch.cuda.empty_cache"):
        assert symmetric_tensor(8, torch.device("cpu")) is None


@pytest.mark.parametrize("is_known", [True, False])
def test_ranks_wait_for_each_other_as_long_as_their_group_does(is_known):
    own, buffers = torch.zeros(8, dtype=torch.uint8), ["first", "second"]
    handle = mock.Mock(rank=1, world_size=2, get_buffer=lambda rank, shape, dtype: buffers[rank])
    module = mock.Mock(rendezvous=lambda t, group: handle if t is own else None)
    options = mock.Mock(_timeout=timedelta(seconds=5)) if is_known else mock.Mock(spec=[])
    group = mock.Mock(_get_backend=lambda device: mock.Mock(options=options))
    with mock.patch("importlib.import_module", return_value=module):
        found, wait_for_all = share(own, group)
    wait_for_all()
    assert found == ["first", own]
    handle.barrier.assert_called_once_with(0, 5000 if is_known else 600_000)


def test_a_backend_without_a_barrier_has_none():
    module = mock.Mock(get_backend=lambda device: "NVSHMEM")
    with mock.patch("importlib.import_module", return_value=module):
        assert symmetric_tensor(8, DEVICE) is None and not module.empty.called
