"""Run the source of the Hopper kernels on the CPU: roles are threads, shared memory starts as NaN.

`install` puts a module of stand-ins in the place of `gpu.hopper.common.compat`, so it needs no triton and
belongs in a process of its own. What a stand-in models:

    mbarriers       counts, bytes and phases; a wait that nobody ends raises after TIMEOUT
    wgmma           runs when it is waited for: a tile that was released too early has other contents by then
    TMA copies out  likewise; copies in arrive at once, zero outside of the tensor's bounds
    descriptors     any strides, with the wrap-around of 64-bit addresses

Layouts, swizzles, registers and fences are not modelled: those the compiler and a GPU must judge.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

TIMEOUT = 60.0
ALONE = {
    "attn_decode_merge_kernel",
    "attn_bwd_prepare_kernel",
    "select_largest_kernel",
}  # programs that wait for no other
_local = threading.local()
_lock = threading.RLock()
_changed = threading.Condition(_lock)


def chosen(cases: Iterable[str]) -> list[str]:
    """The cases named on the command line, or so many at random with `--draw COUNT SEED`, or all."""
    match sys.argv[1:]:
        case ["--draw", count, seed]:
            return random.Random(seed).sample(sorted(cases), int(count))
        case names:
            return names or list(cases)


def draw_mask(kind: str, seqlen_q: int, seqlen_k: int, heads: int) -> torch.Tensor:
    """A boolean mask of one of the shapes that people have; one of them broadcasts over each dimension."""
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    match kind:
        case "random":
            return torch.rand(1, heads, seqlen_q, seqlen_k) < 0.7
        case "padding":
            return (j < seqlen_k * 3 // 4)[None, None]  # (1, 1, 1, seqlen_k)
        case "left_padding":
            return (j >= seqlen_k // 3)[None, None].expand(1, heads, seqlen_q, seqlen_k)
        case "prefix":
            return ((j <= i + seqlen_k - seqlen_q) | (j < 100))[None, None]
        case "rows":
            return (torch.rand(1, 1, seqlen_q, 1) < 0.5).clone()
        case "nothing":
            return torch.zeros(1, 1, seqlen_q, seqlen_k, dtype=torch.bool)
    blocks = torch.rand(1, heads, -(-seqlen_q // 128), -(-seqlen_k // 128)) < 0.5
    mask = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :seqlen_q, :seqlen_k]
    return mask.transpose(2, 3).contiguous().transpose(2, 3)  # queries side by side in memory


def draw_distances(seqlen_q: int, seqlen_k: int, heads: int) -> tuple[Any, torch.Tensor]:
    """A score function that adds a number for each head and distance, and the bias (1, heads, …) of these."""
    table, most = torch.randn(heads, 401), 200
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None]
    bias = table[:, distance.clamp(-most, most) + most][None]
    return lambda s, b, h, i, j: s + table[h, (j - i).clamp(-most, most) + most], bias


def draw_score(seqlen_q: int, seqlen_k: int, heads: int) -> Any:
    """A score function that kernels call: it reads by rows, columns and both, also where values say.

    Its slope has both signs, and of 0 it is NaN.
    """
    rows, columns, table = torch.randn(heads, seqlen_q), torch.randn(seqlen_k), torch.randn(heads, 8, 9)
    index = torch.randint(0, 9, (seqlen_q, seqlen_k))

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = torch.where((i + j) % 7 != 0, s * rows[h, i] + 0.1 * s * torch.log(s.abs()), -math.inf)
        return seen + columns[j] + table[h, (i - j // 2) % 8, index[i, j]]

    return score_mod


def plain_helpers(kernel: Any) -> Any:
    """`gpu.functions.source.helpers` as functions of Python."""
    from tilewise.gpu.functions import source

    found = source.helpers(kernel)
    return found._replace(mask=plain(found.mask), score=plain(found.score))


def plain(function: Any) -> Any:
    """A function of Triton's, with stand-ins for its operations."""
    from triton.runtime.jit import JITFunction

    if not isinstance(function, JITFunction):
        return function
    operations = vars(sys.modules["tilewise.gpu.hopper.common.compat"].gl)
    own = {
        "cast": lambda x, dtype: tile(torch.as_tensor(x).to(dtype)),
        "sqrt_rn": torch.sqrt,
        "store": lambda p, value, mask: _store(p, torch.full(mask.shape, value), mask),
    }
    code, values = function.fn.__code__, function.fn.__globals__
    names = {name: plain(values[name]) for name in code.co_names if name in values}
    return types.FunctionType(code, names | {"tl": types.SimpleNamespace(**operations | own)})


def draw_documents(seqlen_q: int, seqlen_k: int) -> Any:
    """A mask function that leaves empty, full and partial tiles, and some rows without a key; by head."""
    documents = (torch.rand(max(seqlen_q, seqlen_k)) < 1 / 150).cumsum(0)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return ((documents[i] == documents[j]) | (j < 64 * h)) & (i != 7)

    return mask_mod


def as_kernels_see(inputs: Any, options: Any, mask_mod: Any, score_mod: Any, arrange: Any) -> tuple[Any, Any]:
    """The problem and inputs of a call with functions, or None; one of the distance is a bias."""
    from tilewise.core.functions.call import with_functions
    from tilewise.core.problem import describe
    from tilewise.gpu.functions.distances import as_bias
    from tilewise.gpu.hopper.common.functions import as_served

    inputs, options = with_functions(inputs, options, mask_mod, score_mod)
    problem, inputs = as_bias(describe(inputs, options), inputs, arrange)
    return as_served(problem), inputs


def draw_bias(kind: str, seqlen_q: int, seqlen_k: int, heads: int) -> torch.Tensor:
    """A bias of one of the shapes and strides that people have."""
    match kind:
        case "full":
            return torch.randn(1, heads, seqlen_q, seqlen_k)
        case "keys":
            return torch.randn(1, heads, 1, seqlen_k).expand(1, heads, seqlen_q, seqlen_k)
        case "all_queries":
            return torch.randn(1, heads, 1, seqlen_k)
        case "all_keys":
            return torch.randn(1, 1, seqlen_q, 1)
        case "one":
            return torch.randn(1, heads, 1, 1)
        case "hides":
            return torch.where(torch.rand(1, 1, seqlen_q, seqlen_k) < 0.02, 0.0, -math.inf)
        case "transposed":
            return torch.randn(1, heads, seqlen_k, seqlen_q).mT
    return torch.randn(1, heads, seqlen_q, seqlen_k + 1)[..., 1:]


class Tile(torch.Tensor):
    """A tensor in registers; its layout is of no consequence here."""

    type = property(lambda self: types.SimpleNamespace(layout=None))

    def split(self) -> Any:  # type: ignore[override]
        return self.unbind(-1)


def tile(x: torch.Tensor) -> Tile:
    return x.as_subclass(Tile)


class Barrier:
    """One mbarrier."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self, bytes_expected: int = 0) -> None:
        self.pending -= 1
        self.bytes += bytes_expected
        assert self.pending >= 0, "more arrivals than the barrier counts"
        self.settle()

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phase ^= 1
            _changed.notify_all()


class Shared:
    """A view of shared memory, or of an array of mbarriers."""

    def __init__(self, data: torch.Tensor, barriers: list[Barrier] | None = None) -> None:
        self.data = data
        self.barriers = barriers

    shape = property(lambda self: list(self.data.shape))
    numel = property(lambda self: self.data.numel())
    dtype = property(lambda self: self.data.dtype)

    def index(self, i: Any) -> Shared:
        barriers = None if self.barriers is None else [self.barriers[int(i)]]
        return Shared(self.data[int(i)], barriers)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(*shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def load(self, layout: Any = None) -> Tile:
        return tile(self.data.clone())

    def store(self, value: torch.Tensor) -> None:
        assert list(value.shape) == self.shape and value.is_floating_point() == self.dtype.is_floating_point
        self.data.copy_(value)


@dataclass
class Descriptor:
    """A TMA descriptor: `block_shape` boxes of a strided tensor."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any = None

    dtype = property(lambda self: self.base.dtype)

    @property
    def block_type(self) -> Any:
        return types.SimpleNamespace(nbytes=math.prod(self.block_shape) * self.base.itemsize)

    def locate(self, coords: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(whether each element of a box exists, its index in the storage)."""
        exists, offset = torch.ones(self.block_shape, dtype=torch.bool), torch.zeros((), dtype=torch.int64)
        for dim, (first, size, stride, width) in enumerate(
            zip(coords, self.shape, self.strides, self.block_shape, strict=True)
        ):
            position = int(first) + torch.arange(width)
            view = [-1 if d == dim else 1 for d in range(len(self.shape))]
            exists = exists & ((position >= 0) & (position < size)).view(view)
            offset = offset + (position * stride).view(view)  # int64 wraps around, as an address does
        wrap = 1 << 62  # of elements: the descriptors that wrap have 2 or 4 bytes an element
        place = (offset + self.base.storage_offset()).expand(self.block_shape) % wrap
        return exists, torch.where(exists, place, 0)

    @property
    def flat(self) -> torch.Tensor:
        return torch.as_strided(
            self.base, (self.base.untyped_storage().size() // self.base.itemsize,), (1,), 0
        )


@dataclass
class Pending:
    """An asynchronous operation that has not run."""

    run: Callable[[], None]


class Product:
    """The result of a wgmma: there once it was waited for."""

    def __init__(self) -> None:
        self.value: Tile | None = None

    def get(self) -> Tile:
        assert self.value is not None, "an accumulator was used before wgmma was waited for"
        return self.value


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False) -> Product:
    result = Product()

    def run() -> None:
        left, right = (x.data if isinstance(x, Shared) else x for x in (a, b))
        value = left.float() @ right.float()
        before = acc.get() if isinstance(acc, Product) else acc
        result.value = tile(before + value if use_acc else value + 0 * before)

    assert is_async
    _local.products.append(Pending(run))
    return result


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    while len(_local.products) > num_outstanding:
        _local.products.pop(0).run()
    values = tuple(x.get() if isinstance(x, Product) else x for x in deps)
    return values if len(values) > 1 else values[0]


def load_tile(desc: Descriptor, coords: Sequence[Any], bar: Shared, smem: Shared) -> None:
    exists, offset = desc.locate(coords)
    with _lock:
        box = desc.flat.view(torch.uint8)[offset] if desc.base.itemsize == 1 else desc.flat[offset]
        box = torch.where(exists, box, 0).reshape(smem.data.shape)
        smem.data.copy_(box.view(smem.data.dtype) if desc.base.itemsize == 1 else box)
        (barrier,) = bar.barriers  # type: ignore[misc]
        barrier.bytes -= smem.data.numel() * smem.data.itemsize
        barrier.settle()


def _copy_out(desc: Descriptor, coords: Sequence[Any], smem: Shared, adds: bool) -> None:
    exists, offset = desc.locate(coords)

    def run() -> None:
        with _lock:
            source = smem.data.reshape(desc.block_shape)[exists]
            before = desc.flat[offset[exists]]
            assert not adds or not before.isnan().any(), "added to what nobody has stored"
            desc.flat[offset[exists]] = source + before if adds else source

    _local.stores.append(Pending(run))


def wait_for_stores(pendings: int) -> None:
    while len(_local.stores) > pendings:
        _local.stores.pop(0).run()


def _expect(bar: Shared, num_bytes: int) -> None:
    with _lock:
        bar.barriers[0].arrive(num_bytes)  # type: ignore[index]


def _init(bar: Shared, count: int) -> None:
    bar.barriers[0].count = bar.barriers[0].pending = count  # type: ignore[index]


def _arrive(bar: Shared, *, count: int = 1, pred: Any = True) -> None:
    with _lock:
        for _ in range(count if pred else 0):
            bar.barriers[0].arrive()  # type: ignore[index]


def _wait(bar: Shared, phase: Any) -> None:
    (barrier,) = bar.barriers  # type: ignore[misc]
    with _lock:
        if not _changed.wait_for(lambda: barrier.phase != int(phase) or _failures, TIMEOUT):
            raise TimeoutError("a wait on an mbarrier did not end")
        if _failures:
            raise RuntimeError("another role failed")


def _pingpong_wait(W: int) -> None:
    with _lock:
        if not _changed.wait_for(lambda: W in _local.pingpong or _failures, TIMEOUT):
            raise TimeoutError("nobody arrived at a ping-pong barrier")
        _local.pingpong.discard(W)


def _pingpong_arrive(W: int) -> None:
    with _lock:
        assert 1 - W not in _local.pingpong, "two arrivals at a named barrier before a wait"
        _local.pingpong.add(1 - W)
        _changed.notify_all()


class Pointer:
    """Pointers to scalars in global memory: one, or one for each element of a tile of offsets."""

    def __init__(self, base: torch.Tensor, offset: Any = 0) -> None:
        if base.storage_offset() or not base.is_contiguous():  # a view, before which a kernel may read
            offset = offset + base.storage_offset()
            base = base.as_strided((base.untyped_storage().nbytes() // base.itemsize,), (1,), 0)
        self.base, self.offset = base.view(-1), offset

    dtype = property(lambda self: types.SimpleNamespace(element_ty=self.base.dtype))

    def __add__(self, n: Any) -> Pointer:
        return Pointer(self.base, self.offset + n)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.base, self.offset[key])

    def to(self, dtype: torch.dtype) -> Pointer:
        return self


def _load(p: Pointer, mask: Any = None, other: Any = None) -> Tile:
    if mask is None:
        assert (torch.as_tensor(p.offset) >= 0).all()  # PyTorch would count from the end
        return tile(p.base[p.offset].clone())
    mask = torch.as_tensor(mask)
    return tile(torch.where(mask, p.base[torch.where(mask, p.offset, 0)], other))


def _store(p: Pointer, value: Any, mask: Any = None, eviction_policy: str = "") -> None:
    if mask is None:
        p.base[p.offset] = value
    else:
        mask = mask.expand(p.offset.shape)
        p.base[p.offset[mask]] = value[mask].to(p.base.dtype)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, torch.Tensor) else torch.tensor(x).to(dtype).item()


def _atomic_add(p: Pointer, value: Any, mask: Any = None, sem: str = "acq_rel") -> Any:
    if mask is not None and not mask.any():
        return tile(torch.zeros_like(mask, dtype=torch.int32))
    place = int(p.offset if mask is None else p.offset[mask])
    with _lock:
        before = int(p.base[place])
        p.base[place] += value if mask is None else value[mask].sum()
    if mask is not None:
        return tile(torch.where(mask, before, 0))
    if value == 0:
        time.sleep(1e-3)  # a spinning reader lets others run
    return before


def _atomic_max(p: Pointer, value: Any) -> None:
    offset, value = p.offset.flatten().long(), value.flatten()
    is_number = ~value.isnan()  # another is neither positive nor negative, as whose bits it would be added
    with _lock:
        kept = p.base[offset[is_number]].isnan()
        p.base.scatter_reduce_(0, offset[is_number][~kept], value[is_number][~kept], "amax")


def _append(x: Tile, bound: Tile, held: Tile, starts: Pointer, key: Tile, size: int) -> Tile:
    """`statistics.largest.append`."""
    held, key = held[..., 0], key.expand(x.shape)
    for e in range(2):
        is_in = x[..., e] >= bound[..., 0]
        entry = key[..., e].long() << 32 | x[..., e].contiguous().view(torch.int32).long() & 0xFFFFFFFF
        _store(Pointer(starts.base, starts.offset[..., 0] + held), entry, is_in & (held < size))
        held = held + is_in
    return tile(torch.stack((held, held), -1))


def _flushed(x: torch.Tensor) -> torch.Tensor:
    """x with 0 in place of what float32 has with fewer digits, as `.ftz` says."""
    return torch.where(x.abs() < 2.0**-126, 0.0, x)


def _inline_asm(asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    for name, function in (("ex2", torch.exp2), ("lg2", torch.log2), ("rcp", torch.reciprocal)):
        if f"{name}.approx" in asm:
            is_tile = isinstance(args[0], torch.Tensor)
            found = _flushed(function(_flushed(torch.as_tensor(args[0]))))
            return found if is_tile else found.item()
    if "mul.rn" in asm or "fma.rn" in asm:  # in float64 products are exact
        x, y, *z = (torch.as_tensor(x, dtype=torch.float32).double() for x in args)
        return tile((x * y + z[0] if z else x * y).float())
    if "st.global.v2" in asm:
        return _append(*args)
    if "mul.wide" in asm:
        p = args[0] * int(asm.split("$2, ")[1].split(";")[0])  # int64 wraps around, as uint64 does
        return tile((p >> 32) & 0xFFFFFFFF), tile(p & 0xFFFFFFFF)
    if "prmt.b32" in asm:  # masks of the signs of bytes
        p, words, select = args
        return tile(torch.where((words >> ((select & 7) * 8 + 7)) & 1 != 0, p, 0.0))
    if "relu" in asm:
        return tile(args[0].clamp(min=0).to(dtype))
    if "e4m3x2" in asm:
        return tile(args[0].to(dtype))
    return 0 if "$0, 0;" in asm else args[0]


_failures: list[BaseException] = []


def _named_barrier_arrive(number: int, when: Any = 1) -> None:
    if when:
        with _lock:
            assert number not in _local.arrived, "two arrivals at a named barrier before a wait"
            _local.arrived.add(number)
            _changed.notify_all()


def _named_barrier_sync(number: int, when: Any = 1) -> None:
    if when:
        with _lock:
            if not _changed.wait_for(lambda: number in _local.arrived or _failures, TIMEOUT):
                raise TimeoutError("nobody arrived at a named barrier")
            _local.arrived.discard(number)


def _specialize(roles: Sequence[tuple[Any, ...]], *_: Any) -> None:
    both = threading.Barrier(2)
    arrived: set[int] = set()
    pingpong: set[int] = set()

    def run(function: Any, arguments: tuple[Any, ...], program: tuple[int, int]) -> None:
        _local.products, _local.stores, _local.program = [], [], program
        _local.both, _local.arrived, _local.pingpong = both, arrived, pingpong
        try:
            function(*arguments)
            assert not _local.products, "products that nobody waited for"
            wait_for_stores(0)
        except BaseException as error:
            with _lock:
                _failures.append(error)
                _changed.notify_all()

    threads = [threading.Thread(target=run, args=(*role, _local.program), daemon=True) for role in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not arrived or _failures, "an arrival at a named barrier that nobody waited for"


def _specialize_warpgroups(consumer: tuple[Any, Any], producer: tuple[Any, Any], cfg: Any) -> None:
    role, arguments = consumer
    _specialize([*((role, (w, *arguments)) for w in range(cfg.WARPGROUPS)), producer])


def run_grid(kernel: Any, num_programs: int, *args: Any, is_alone: bool = False) -> None:
    """Run a kernel's programs at the same time, or one after another, which is faster for many small ones."""
    _failures.clear()

    def run(program: int) -> None:
        _local.program = (program, num_programs)
        try:
            kernel(*args)
        except BaseException as error:
            _failures.append(error)

    for first in range(0, num_programs, 1 if is_alone else num_programs):
        together = range(first, first + 1 if is_alone else num_programs)
        threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in together]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if _failures:
        raise next((e for e in _failures if not isinstance(e, RuntimeError)), _failures[0])


def scan_mask(
    mask: torch.Tensor, states: torch.Tensor, bits: torch.Tensor, stride_b: int, stride_h: int,
    stride_row: int, stride_key: int, heads: int, row_tiles: int, rows: int, keys: int, key_tiles: int,
    warpgroups: int, block_n: int,
) -> None:  # fmt: skip
    """What `mask.scan.scan_mask_kernel` writes, a tile at a time in plain loops."""
    for number in range(len(states)):
        map_row, tile_k = divmod(number, key_tiles)
        bh, tile_q = divmod(map_row, row_tiles)
        b, h = divmod(bh, heads)
        seen = torch.ones(warpgroups, 64, block_n, dtype=torch.bool)
        row0, key0 = tile_q * warpgroups * 64, tile_k * block_n
        count_q, count_k = min(warpgroups * 64, rows - row0), min(block_n, keys - key0)
        strides = (stride_row, stride_key)
        first = mask.storage_offset() + b * stride_b + h * stride_h + row0 * stride_row + key0 * stride_key
        real = torch.as_strided(mask, (count_q, count_k), strides, first).bool()
        seen.view(-1, block_n)[:count_q, :count_k] = real
        flags = 0
        for w in range(warpgroups):
            flags |= int(not seen[w].all()) << w
            flags |= int(seen[w, :, :count_k].any(1).all()) << (warpgroups + w)
        states[number] = flags | int(real.any()) << 4
        words = torch.zeros(warpgroups * 64, 4, dtype=torch.int64)
        for column in range(block_n):
            bit = column // 8 * 2 + column % 2
            words[:, column % 8 // 2] |= seen.view(-1, block_n)[:, column].long() << bit
        size = 8 * bits.itemsize
        bits[number] = torch.where(words >> (size - 1) > 0, words - (1 << size), words).to(bits.dtype)


def list_tiles(states: torch.Tensor, tiles: torch.Tensor, key_tiles: int, _: int) -> None:
    """What `mask.scan.list_tiles_kernel` writes."""
    tiles.fill_(-(1 << 20))  # entries that nobody may read
    for line, row in zip(states.view(-1, key_tiles).tolist(), tiles.view(-1, 2 * key_tiles + 1), strict=True):
        visited = [j for j, state in enumerate(line) if state >> 4]
        for j in range(key_tiles + 1):
            row[j] = sum(v < j for v in visited)
        for n, j in enumerate(visited):
            row[key_tiles + 1 + n] = j << 4 | line[j] & 15


def list_queries(
    states: torch.Tensor, lists: torch.Tensor, stride_b: int, stride_h: int, stride_tile: int, heads: int,
    group: int, key_tiles: int, tiles_q: int, block_m: int, offset: int, left: int, right: int, _: int,
) -> None:  # fmt: skip
    """What `mask.scan.list_queries_kernel` writes."""
    lists.fill_(-(1 << 20))
    for number, line in enumerate(lists):
        rest, tile_k = divmod(number, key_tiles)
        b, head_k = divmod(rest, heads)
        entries = []
        for g in range(group):
            map_row = b * stride_b + (head_k * group + g) * stride_h + tile_k * stride_tile
            for tile in range(tiles_q):
                state = int(states[map_row * tiles_q + tile])
                ahead = tile_k * 128 - tile * block_m - offset  # from the first query to the first key
                if state >> 4 and -left - 127 <= ahead <= right + block_m - 1:
                    entries.append((g * tiles_q + tile) << 4 | state & 15)
        line[0] = len(entries)
        line[1 : 1 + len(entries)] = torch.tensor(entries)


def copy_bias(bias: torch.Tensor, padded: torch.Tensor, *rest: int) -> None:
    """What `biases.copy_bias_kernel` writes."""
    *_, least, most, size = rest
    for row, column in itertools.product(range(0, bias.shape[2], size), range(0, padded.shape[3], size)):
        if least < column - row + size and column - row - size < most:
            tile = padded[:, :, row : row + size, column : column + size]
            tile.zero_()
            own = bias[:, :, row : row + size, column : column + size]
            tile[..., : own.shape[3]] = own


def order_sequences(tiled: Any, other: Any, order: Any, first_tile: Any, *numbers: int) -> None:
    """What `scheduler.order_sequences_kernel` writes."""
    batch, seqlen_q, rows, has_offsets = numbers
    order.copy_(torch.argsort(other.diff() if has_offsets else other, descending=True, stable=True))
    lengths = torch.full((batch,), seqlen_q) if tiled is None else tiled.diff()
    first_tile[0] = 0
    first_tile[1:] = ((lengths[order.long()] + rows - 1) // rows).cumsum(0)


PLAIN = (scan_mask, list_tiles, list_queries, copy_bias, order_sequences)
STAND_INS = {f"{function.__name__}_kernel": function for function in PLAIN}


def _as_kernels_take(x: Any) -> Any:
    if isinstance(x, tuple):
        items = map(_as_kernels_take, x)
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    return Pointer(x) if isinstance(x, torch.Tensor) else x


def start(launched: Any, num_programs: int) -> None:
    """Run what `tilewise.gpu.launch.launch_plan.start` would launch on a GPU."""
    name = launched.kernel.__name__
    if name in STAND_INS:
        STAND_INS[name](*launched.arguments)
        return
    arguments = map(_as_kernels_take, launched.fields)
    run_grid(launched.kernel, num_programs, *arguments, is_alone=name in ALONE)


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
    if layout == "mbarrier":
        return Shared(torch.zeros(*shape), [Barrier() for _ in range(shape[0])])
    filler = float("nan") if dtype.is_floating_point else max(-(1 << 20), torch.iinfo(dtype).min)
    return Shared(torch.full(tuple(shape), filler, dtype=dtype))


def _both(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The function on tensors; numbers become tensors, and scalar answers numbers."""

    def call(*args: Any) -> Any:
        if not any(isinstance(x, torch.Tensor) and x.ndim for x in args):
            return function(*(torch.as_tensor(x) for x in args)).item()
        return tile(function(*(torch.as_tensor(x) for x in args)))

    return call


def _reduction(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """The function along an axis; of one dimension a number comes out."""
    return lambda x, axis: function(x, axis).item() if x.ndim == 1 else function(x, axis)


def _largest(x: torch.Tensor, axis: int) -> torch.Tensor:
    """As a GPU has it: NaN only where all are."""
    if not x.is_floating_point():
        return torch.amax(x, axis)
    is_nan = x.isnan()
    return x.masked_fill(is_nan, -torch.inf).amax(axis).masked_fill(is_nan.all(axis), torch.nan)


def _as_blocks(smem: Shared, count: int, desc: Descriptor) -> Shared:
    return Shared(smem.data.view(-1).view(desc.dtype).view(count, *desc.block_shape))


def _as_tiles(smem: Shared, count: int, tile: Shared) -> Shared:
    return Shared(smem.data.view(-1).view(tile.dtype).view(count, *tile.shape))


class Boxes(Shared):
    """Tiles [n, rows, columns] as boxes of a descriptor: by tile, then by columns and rows or the reverse."""

    def __init__(self, smem: Shared, desc: Descriptor, is_by_rows: bool = False) -> None:
        super().__init__(smem.data)
        self.block_shape = [d for d in desc.block_shape if d > 1]
        self.is_by_rows = is_by_rows

    def index(self, i: Any) -> Shared:
        _, rows, columns = self.data.shape
        box_rows, box_columns = self.block_shape
        counts = rows // box_rows, columns // box_columns
        tile, rest = divmod(int(i), counts[0] * counts[1])
        n, part = divmod(rest, counts[1]) if self.is_by_rows else divmod(rest, counts[0])[::-1]
        rows_of_tile = self.data[tile].narrow(0, n * box_rows, box_rows)
        return Shared(rows_of_tile.narrow(1, part * box_columns, box_columns))


class Pages(Shared):
    """Tiles [n, rows, columns] as pages [groups of rows, 1, parts of the columns, 8, 64]."""

    def __init__(self, smem: Shared, desc: Descriptor) -> None:
        super().__init__(smem.data)
        self.block_shape = desc.block_shape

    def index(self, i: Any) -> Shared:
        groups, _, parts, rows, columns = self.block_shape
        pages = self.data.shape[1] // (groups * rows)
        tile, n = divmod(int(i), pages)
        page = self.data[tile].narrow(0, n * groups * rows, groups * rows)
        return Shared(page.view(groups, 1, rows, parts, columns).transpose(2, 3))


def _as_block(smem: Shared, desc: Descriptor) -> Shared:
    size = math.prod(desc.block_shape)
    return Shared(smem.data.view(-1).view(desc.dtype)[:size].view(*desc.block_shape))


def _halves(words: torch.Tensor, dtype: torch.dtype) -> Any:
    """Of int32 numbers: each as two of 16 bits."""
    return _pairs(words.to(torch.int32).contiguous().view(dtype).float())


def _pairs(numbers: torch.Tensor) -> Any:
    """Two tiles of a tile of twice as many numbers: those in even places, and those behind them."""
    return tuple(tile(numbers[..., i::2]) for i in range(2))


class constexpr:
    def __new__(cls, value: Any) -> Any:
        return value


def _jit(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _jit


def _layout(*_: Any, **__: Any) -> None:
    return None


def install() -> None:
    """Stand in for `tilewise.gpu.hopper.common.compat` in this process."""
    _layout.get_default_for = _layout  # type: ignore[attr-defined]
    gl = types.SimpleNamespace(
        constexpr=constexpr, tensor=Tile, shared_memory_descriptor=Shared,
        float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16,
        float8e4nv=torch.float8_e4m3fn, int8=torch.int8, int32=torch.int32, int64=torch.int64,
        uint32=torch.int64, uint64=torch.int64,  # whose products keep the low 64 bits
        where=_both(lambda c, a, b: torch.where(c, a, b)),
        minimum=_both(torch.fmin), maximum=_both(torch.fmax),
        arange=lambda a, b, layout=None: tile(torch.arange(a, b)),
        full=lambda shape, value, dtype, layout: tile(torch.full(tuple(shape), value, dtype=dtype)),
        sum=_reduction(torch.sum), max=_reduction(_largest), min=_reduction(torch.amin),
        log=torch.log, log2=torch.log2, abs=torch.abs,
        cast=_cast,
        expand_dims=torch.unsqueeze, associative_scan=lambda x, axis, add: x.cumsum(axis),
        convert_layout=lambda x, layout, **_: x, permute=torch.permute,
        join=lambda a, b: torch.stack((a, b), -1),
        load=_load, store=_store, atomic_add=_atomic_add, atomic_max=_atomic_max,
        inline_asm_elementwise=_inline_asm,
        program_id=lambda axis: _local.program[0], num_programs=lambda axis: _local.program[1],
        static_range=range, allocate_shared_memory=_allocate, warp_specialize=_specialize,
        SliceLayout=_layout, BlockedLayout=_layout, SwizzledSharedLayout=_layout, DotOperandLayout=_layout,
        DistributedLinearLayout=_layout, NVMMADistributedLayout=_layout, NVMMASharedLayout=_layout,
        SharedLinearLayout=_layout,
    )  # fmt: skip
    compat = types.ModuleType("tilewise.gpu.hopper.common.compat")
    compat.__dict__.update(
        gl=gl, gluon=types.SimpleNamespace(jit=_jit, constexpr_function=_jit), aggregate=dataclass,
        HOLDS_NEXT_S=True, specialize=_specialize_warpgroups,
        TensorDescriptor=Descriptor, as_blocks=_as_blocks, as_block=_as_block, as_tiles=_as_tiles,
        as_boxes=lambda smem, count, desc: Boxes(smem, desc),
        as_boxes_by_rows=lambda smem, count, desc: Boxes(smem, desc, is_by_rows=True),
        as_pages=lambda smem, count, desc: Pages(smem, desc),
        bits_of=lambda x: tile(x.view(torch.int32)), float_of=lambda x: tile(x.view(torch.float32)),
        halves=_halves, float_pair=lambda words: _pairs(words.contiguous().view(torch.float32)),
        start_next_kernel=lambda: None, wait_for_previous_kernel=lambda: None,
        load_tile=load_tile, warpgroup_mma=warpgroup_mma,
        mma_v2=lambda a, b, acc: acc + a.float() @ b.float(),
        store_tile=lambda d, c, s: _copy_out(d, c, s, False),
        add_tile=lambda d, c, s: _copy_out(d, c, s, True),
        wait_for_stores=wait_for_stores,
        wait_for_writes=lambda: wait_for_stores(0), wait_for_own_stores=lambda: wait_for_stores(0),
        sync_warpgroups=lambda: _local.both.wait(TIMEOUT),
        named_barrier_arrive=_named_barrier_arrive, named_barrier_sync=_named_barrier_sync,
        pingpong_wait=_pingpong_wait, pingpong_arrive=_pingpong_arrive,
        fence_async_shared=lambda: None, unhoisted=lambda x: x, warpgroup_mma_wait=warpgroup_mma_wait,
        mbarrier=types.SimpleNamespace(
            MBarrierLayout=lambda: "mbarrier", init=_init, expect=_expect, arrive=_arrive, wait=_wait
        ),
    )  # fmt: skip
    sys.modules["tilewise.gpu.hopper.common.compat"] = compat
