"""The tile map of a boolean mask: what its scan writes, and when a mask is scanned again."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
from interpreter import needs_interpreter
from tilewise import reference
from tilewise.core import kept
from tilewise.core.functions.call import with_functions
from tilewise.core.problem import Inputs, Options, describe
from tilewise.dispatch import plans
from tilewise.gpu.hopper.backward import launch as backward_launch
from tilewise.gpu.hopper.common import functions
from tilewise.gpu.hopper.common.arguments import FLAG_BITS, MaskMap
from tilewise.gpu.hopper.common.functions import source_of
from tilewise.gpu.hopper.forward import launch as forward_launch
from tilewise.gpu.hopper.mask import tile_map
from tilewise.testing import check_attention, compare

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs an NVIDIA Hopper GPU")
WARPGROUPS = 2
MASKS = 6  # drawn for the interpreted scan


def draw(seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """A mask of a random broadcast shape, perhaps expanded or transposed, of random tiles and elements."""
    batch, heads, rows, keys = (
        random.choice([1, n]) for n in (random.randint(1, 2), random.randint(1, 2), seqlen_q, seqlen_k)
    )
    blocks = torch.rand(batch, heads, rows // 64 + 1, keys // 64 + 1)
    share = torch.where(blocks < 0.4, 0.0, torch.where(blocks < 0.8, 1.0, 0.5))
    share = share.repeat_interleave(64, 2).repeat_interleave(64, 3)[..., :rows, :keys]
    mask = torch.rand(share.shape) < share
    if random.random() < 0.3:
        mask = mask.mT.contiguous().mT
    return mask.expand(batch, heads, seqlen_q, seqlen_k) if random.random() < 0.3 else mask


def dense(found: MaskMap, b: int, h: int, seqlen_q: int, seqlen_k: int, block_n: int) -> torch.Tensor:
    """The mask of one (batch, head) that a map stands for, with each of its claims checked."""
    rows, key_tiles = 64 * WARPGROUPS, -(-seqlen_k // block_n)
    mask = torch.zeros(-(-seqlen_q // rows) * rows, key_tiles * block_n, dtype=torch.bool)
    for tile_q in range(len(mask) // rows):
        number = b * found.stride_batch + h * found.stride_head + tile_q * found.stride_tile
        line = found.tiles.view(-1, 2 * key_tiles + 1)[number].tolist()
        before, entries = line[: key_tiles + 1], line[key_tiles + 1 :]
        visited = [entry >> FLAG_BITS for entry in entries[: before[-1]]]
        assert before == [sum(v < j for v in visited) for j in range(key_tiles + 1)]
        assert visited == sorted(set(visited))
        for entry, j in zip(entries, visited, strict=False):
            words = found.bits[number * key_tiles + j].long()  # [rows, 4]
            column = torch.arange(block_n)
            bits = words[:, column % 8 // 2] >> (column // 8 * 2 + column % 2) & 1
            mask[tile_q * rows : (tile_q + 1) * rows, j * block_n : (j + 1) * block_n] = bits.bool()
            real = bits[:, : seqlen_k - j * block_n].bool()
            assert real[: seqlen_q - tile_q * rows].any()
            for w in range(WARPGROUPS):
                own = slice(64 * w, 64 * w + 64)
                assert (entry >> w & 1) == (not bits[own].all())
                assert (entry >> (WARPGROUPS + w) & 1) == real[own].any(1).all()
    return mask[:seqlen_q, :seqlen_k]


def check_scan() -> None:
    """Run by the test below in a process that interprets Triton."""
    for _ in range(MASKS):
        seqlen_q, seqlen_k = random.randint(1, 300), random.randint(1, 500)
        mask, block_n = draw(seqlen_q, seqlen_k), random.choice([64, 128])
        full = mask.expand(*mask.shape[:2], seqlen_q, seqlen_k)
        for source in (mask, as_function(mask, seqlen_q, seqlen_k)):
            found = tile_map.tile_map(source, seqlen_q, seqlen_k, WARPGROUPS, block_n)
            for b in range(mask.shape[0]):
                for h in range(mask.shape[1]):
                    assert torch.equal(dense(found, b, h, seqlen_q, seqlen_k, block_n), full[b, h])
            check_lists(mask, source, seqlen_q, seqlen_k, block_n)
        print(tuple(mask.shape))


def as_function(mask: torch.Tensor, seqlen_q: int, seqlen_k: int) -> Any:
    """A function that reads the mask, in a call that it fits."""
    table = mask.reshape([n for n in mask.shape if n > 1] or [1])
    is_used = [n > 1 for n in mask.shape]

    def mask_mod(b, h, i, j):
        at = [n for n, reads in zip((b, h, i, j), is_used, strict=True) if reads]
        return table[tuple(at) or 0]

    batch, heads = mask.shape[:2]
    q, k = (torch.empty(batch, n, heads, 64, dtype=torch.bfloat16) for n in (seqlen_q, seqlen_k))
    inputs, options = with_functions(Inputs(q, k, k), Options(), mask_mod, None)
    return source_of(describe(inputs, options), inputs)


def check_lists(mask: torch.Tensor, source: Any, seqlen_q: int, seqlen_k: int, block_m: int) -> None:
    """A source's transposed map against each tile of keys of the mask, causal or with a window or neither."""
    kv_heads, group = random.choice([(1, 2), (2, 1)]) if mask.shape[1] == 2 else (2, 3)
    q = torch.empty(mask.shape[0], seqlen_q, kv_heads * group, 64, dtype=torch.bfloat16)
    k = q.new_empty(mask.shape[0], seqlen_k, kv_heads, 64)
    options = random.choice([Options(), Options(causal=True), Options(window_left=70, window_right=9)])
    problem = describe(Inputs(q, k, k, mask=mask), options)
    found = tile_map.transposed_map(problem, source, block_m)
    key_tiles, tiles_q = -(-seqlen_k // 128), -(-seqlen_q // block_m)
    full = mask.expand(len(mask), kv_heads * group, seqlen_q, seqlen_k)
    visibility = problem.visibility()
    for b, head, tile_k in itertools.product(range(len(mask)), range(kv_heads), range(key_tiles)):
        line = found.lists[b * found.list_batch + head * found.list_head + tile_k].tolist()
        entries = line[1 : 1 + line[0]]
        slots = [entry >> FLAG_BITS for entry in entries]
        assert slots == sorted(set(slots))
        for g, tile in itertools.product(range(group), range(tiles_q)):
            rows, cols = slice(tile * block_m, (tile + 1) * block_m), slice(tile_k * 128, tile_k * 128 + 128)
            seen = full[b, head * group + g, rows, cols]
            edge = (rows.start, rows.start + seen.shape[0], cols.start, cols.start + seen.shape[1])
            is_visible = bool((seen & visibility.tile_mask(*edge)).any())
            assert not is_visible or g * tiles_q + tile in slots
            assert seen.any() or g * tiles_q + tile not in slots
            if g * tiles_q + tile in slots:
                flags = entries[slots.index(g * tiles_q + tile)]
                halves = seen[:, :64], seen[:, 64:]
                for w, half in enumerate(halves):
                    assert half.numel() == 0 or (flags >> w & 1) == (not half.all())


@needs_interpreter
def test_scan_writes_what_the_mask_says():
    environment = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", "import test_mask; test_mask.check_scan()"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and len(done.stdout.splitlines()) == MASKS, done.stderr[-2000:]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that are scanned, which needs no scan here."""
    scanned: list[Any] = []

    def scan(mask: torch.Tensor, *_: Any) -> MaskMap:
        scanned.append(mask.shape)
        return MaskMap()

    monkeypatch.setattr(tile_map, "_map_of", scan)
    kept._results.clear()
    return scanned


def test_a_mask_is_scanned_once_until_it_is_written_to(scans: list[Any]):
    mask = torch.ones(70, 90, dtype=torch.bool)
    for _ in range(3):  # a new view each time, as each call makes one
        tile_map.tile_map(mask[None, None], 70, 90, 2, 64)
    assert len(scans) == 1
    tile_map.tile_map(mask[None, None], 70, 90, 2, 128)  # other tiles
    tile_map.tile_map(mask[None, None, :60], 60, 90, 2, 64)  # another view
    assert len(scans) == 3
    mask[3, 5] = False
    tile_map.tile_map(mask[None, None], 70, 90, 2, 64)
    assert len(scans) == 4
    other = mask.clone()
    tile_map.tile_map(other[None, None], 70, 90, 2, 64)
    assert len(scans) == 5


def test_inference_tensors_are_scanned_in_every_call(scans: list[Any]):
    with torch.inference_mode():
        mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        for _ in range(2):
            tile_map.tile_map(mask, 8, 8, 2, 64)
    assert len(scans) == 2


@needs_hopper
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 20)}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_random_masks(dims: tuple[int, int], options: dict[str, Any]):
    for steepness in (1, 1, 1, 20):
        seqlen_q, seqlen_k = random.randint(1, 700), random.randint(1, 900)
        mask = draw(seqlen_q, seqlen_k).cuda()
        batch, heads = (max(2, n) for n in mask.shape[:2])
        q = torch.randn(batch, seqlen_q, heads, dims[0], device="cuda").bfloat16() * steepness
        k, v = (torch.randn(batch, seqlen_k, 1, d, device="cuda").bfloat16() for d in dims)
        options = options | {"mask": mask}
        found = tilewise.attention(q, k, v, return_lse=True, backend="hopper", **options)
        exact, baseline = (reference.attention(q, k, v, dtype=t, **options) for t in (torch.float64, q.dtype))
        for name, f, e, b in zip(("out", "lse"), found, exact, baseline, strict=True):
            report = compare(name, f, e, b)
            assert report.is_within, report


@needs_hopper
def test_a_graph_replays_with_a_new_mask():
    q, k, v = (torch.randn(1, 300, 2, 64, device="cuda").bfloat16() for _ in range(3))
    mask = torch.rand(300, 300, device="cuda") < 0.5
    tilewise.attention(q, k, v, mask=mask, backend="hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tilewise.attention(q, k, v, mask=mask, backend="hopper")
    mask.copy_(torch.rand(300, 300, device="cuda") < 0.5)
    graph.replay()
    assert torch.equal(out, tilewise.attention(q, k, v, mask=mask, backend="hopper"))


@needs_hopper
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 20), "softcap": 8.0}], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("lengths", [(300, 300), (65, 577), (640, 129)], ids=str)
def test_mask_functions_are_the_masks_that_they_say(
    lengths: tuple[int, int], dims: tuple[int, int], options: dict[str, Any]
):
    """Bit for bit, gradients too, and again with other numbers in the same tensors."""
    q = torch.randn(2, lengths[0], 4, dims[0], device="cuda").bfloat16()
    k, v = (torch.randn(2, lengths[1], 2, d, device="cuda").bfloat16() for d in dims)
    for t in (q, k, v):
        t.requires_grad_(dims[0] <= 128)
    of_query, of_key = (torch.randint(3, (n,), device="cuda") for n in lengths)
    prefix = torch.tensor([17, 200], device="cuda", dtype=torch.int32)
    b, h, i, j = torch.meshgrid(*(torch.arange(n, device="cuda") for n in (2, 4, *lengths)), indexing="ij")

    def mask_mod(b, h, i, j):
        return (of_query[i] == of_key[j]) & ((h != 1) | (j % 3 < 2)) | (j < prefix[b])

    for _ in range(2):
        given = options | {"backend": "hopper"}
        out = tilewise.attention(q, k, v, mask_mod=mask_mod, **given)
        expected = tilewise.attention(q, k, v, mask=mask_mod(b, h, i, j), **given)
        assert torch.equal(out, expected)
        if dims[0] <= 128:
            dout = torch.randn_like(out)
            ours, theirs = (torch.autograd.grad(o, (q, k, v), dout) for o in (out, expected))
            for a, e in zip(ours[1:], theirs[1:], strict=True):
                assert torch.equal(a, e)
            torch.testing.assert_close(ours[0], theirs[0], rtol=1e-2, atol=1e-2)  # summed in any order
        of_query.copy_(of_query.roll(1))
        prefix += 5


@pytest.fixture
def without_bits(monkeypatch: pytest.MonkeyPatch):
    """No mask function has bits. What is known of problems is forgotten before and after."""
    monkeypatch.setattr(functions, "MOST_BITS", 0)
    configs = forward_launch.forward_config, backward_launch.backward_config
    known = (*(config.cache_clear for config in configs), plans.clear)
    for forget in known:
        forget()
    yield
    for forget in known:
        forget()


@needs_hopper
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_mask_functions_that_kernels_inline(dims: tuple[int, int], without_bits: None):
    """As those of long sequences, whose bits would be too many."""
    documents = (torch.rand(800, device="cuda") < 1 / 150).cumsum(0)

    def mask_mod(b, h, i, j):
        return ((documents[i] == documents[j]) | (j < 64 * h)) & (i != 7)

    for lengths in ((300, 300), (65, 577), (640, 129), (800, 700)):
        q = torch.randn(2, lengths[0], 4, dims[0], device="cuda").bfloat16()
        k, v = (torch.randn(2, lengths[1], 2, d, device="cuda").bfloat16() for d in dims)
        more = {"score_mod": lambda s, b, h, i, j: s * (1 + 0.01 * j)}
        for options in ({}, {"causal": True}, {"window": (300, 20), "softcap": 8.0}, more):
            given = {"mask_mod": mask_mod, **options}
            assert tilewise.explain(q, k, v, **given).backend == "hopper"
            if dims[0] <= 128:
                check_attention(q, k, v, backend="hopper", holds_mean=False, **given)
            else:
                exact = reference.attention(q, k, v, **given)[0]
                out = tilewise.attention(q, k, v, backend="hopper", **given)
                assert (out - exact).norm() <= 5e-3 * exact.norm()  # a window may hide all keys


@needs_hopper
def test_functions_that_may_read_out_of_range_are_refused_by_name():
    """The Triton kernels serve, which look at indices."""
    q = torch.randn(1, 300, 2, 64, device="cuda").bfloat16()
    table = torch.ones(301, device="cuda", dtype=torch.bool)
    index = torch.arange(300, device="cuda")
    given = {"mask_mod": lambda b, h, i, j: table[index[i]] & (j <= i)}
    with pytest.raises(NotImplementedError, match="in range for certain; 'triton'"):
        tilewise.attention(q, q, q, backend="hopper", **given)
    assert torch.equal(
        tilewise.attention(q, q, q, **given), tilewise.attention(q, q, q, backend="triton", **given)
    )
