"""Plans: one kernel call's tiles, threads and argument block, worked out once and run many times.

What does not change between two calls of one problem with one set of strides is kept; a call then allocates
its outputs, writes their addresses into the block, and runs.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from typing import Any

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.cpu.host import parallel
from tilewise.cpu.host.arguments import CHANGING, NOT_CUT, UNBOUNDED, Block
from tilewise.cpu.host.compile import Kernel, current_target, load
from tilewise.cpu.host.configs import decode_config, forward_config, short_config, waiting_share

CPU = torch.device("cpu")
BLOCK_K = 64  # a split of the keys is a multiple
DECODE_KEYS, DECODE_ITEMS = 512, 64  # a split has at least so many keys; so many work items are enough
NEAR_BYTES = 48 << 20  # of keys and values at most, that may come from a cache
ASKED_NEAR, ASKED_FAR = 2 << 10, 16  # bytes of them, or rows, to ask for at each of 16 keys
GRAIN = 1 << 15  # multiply-adds that are worth a thread: so many take as long as a fork and a join, or less
KEPT_SCRATCH = 64 << 20  # bytes; larger scratch is given back after the call


class Scratch:
    """Memory for one call at a time."""

    def __init__(self) -> None:
        self.release()

    def release(self) -> None:
        self.memory, self.size, self.address = torch.empty(0), -1, 0

    def reserve(self, size: int) -> int:
        """The address of at least `size` bytes, until the next `reserve`, `trim` or `release`."""
        if size > self.size:
            self.release()  # before there is more
            self.memory = torch.empty(size + 64, dtype=torch.uint8, device=CPU)
            self.size, self.address = size, -(-self.memory.data_ptr() // 64) * 64
        return self.address

    def trim(self) -> None:
        """After a call: give back what is too much to keep."""
        if self.size > KEPT_SCRATCH:
            self.release()


class Local(threading.local):
    """A thread's own plans and scratch memory, so that two threads may call at once."""

    def __init__(self) -> None:
        self.plans: dict[tuple, Any] = {}
        self.quick_backwards: dict[Any, Any] = {}  # see `repeated.py`
        self.scratch = Scratch()


local = Local()


class Plan:
    """What forward and backward plans share: the argument block and how a call fills it."""

    kernel: Kernel
    items: int  # of work
    threads: int
    thread_bytes: int  # of scratch

    def __init__(self, problem: AttentionProblem, inputs: Inputs) -> None:
        self.problem = problem
        self.is_ragged = problem.is_packed or problem.is_cached or inputs.leftpad_k is not None
        self.has_options = self.is_ragged or any(
            (
                problem.mask_shape, problem.bias_shape, problem.has_alibi, problem.has_sinks,
                problem.is_paged, problem.dropout_p > 0,
            )
        )  # fmt: skip
        rows = 0 if problem.is_packed else problem.batch * problem.num_heads * problem.seqlen_q
        self.work = rows * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)  # 0 if packed
        self.block = Block()
        self.dense_span = (ctypes.c_int64 * 4)(0, problem.seqlen_q, 0, problem.seqlen_k)
        visibility = problem.visibility()
        softcap = problem.softcap
        self.block.update(
            num_heads=problem.num_heads,
            num_kv_heads=problem.num_kv_heads,
            group=problem.group_size,
            left=UNBOUNDED if visibility.left is None else min(visibility.left, UNBOUNDED),
            right=UNBOUNDED if visibility.right is None else min(visibility.right, UNBOUNDED),
            spans=ctypes.addressof(self.dense_span),
            scale=problem.scale,
            q_factor=problem.scale / softcap if softcap else problem.scale,
            softcap=softcap,
            lse_b=0 if problem.is_packed else problem.num_heads * problem.seqlen_q,
            lse_h=inputs.query.shape[0] if problem.is_packed else problem.seqlen_q,
            score_k0=int(not problem.has_packed_keys),
            threshold=int(problem.dropout_p * 2**32),
            inverse_keep=1 / (1 - problem.dropout_p),
        )
        self.are_heads_adjacent = inputs.key.stride(-2) <= inputs.key.stride(-3)
        for name, t in zip("qkv", (inputs.query, inputs.key, inputs.value)):
            self.set_strides(name, t.stride())

    def set_strides(self, name: str, strides: tuple[int, ...], axes: str = "bnh") -> None:
        """Strides of a query- or key-shaped tensor; a packed one has a single batch entry."""
        strides = (0, *strides) if len(strides) == 3 else strides
        self.block.update(**named(name, axes, strides))

    def item_heads(self, items: int, threads: int) -> int:
        """Key heads whose rows lie side by side are read together, as far as that leaves work for all."""
        most = self.kernel.facts["item_heads"] if self.are_heads_adjacent else 1
        if threads > 1:
            most = min(most, items // (4 * threads))
        return max((c for c in range(1, most + 1) if self.problem.num_kv_heads % c == 0), default=1)

    def worth(self, threads: int) -> int:
        """How many of so many threads the work is worth."""
        return threads if self.problem.is_packed else max(1, min(threads, self.work // GRAIN))

    def bind(self, inputs: Inputs) -> list[Any]:
        """Write the addresses of optional tensors into the block; the result must outlive the call."""
        problem, dtype, kept = self.problem, self.problem.compute_dtype, []
        if self.is_ragged:
            spans = _spans(problem, inputs)
            self.block.update(spans=spans.data_ptr(), span_stride=4)
            kept.append(spans)
        for name, t in (("mask", inputs.mask), ("bias", inputs.bias)):
            if t is not None:
                t = _last_dimension_dense(t, problem, inputs)
                self.block.update(**{name: t.data_ptr()}, **named(name, "bhi", broadcast_strides(t)))
                kept.append(t)
        if inputs.alibi_slopes is not None:
            slopes = inputs.alibi_slopes.to(dtype).contiguous()
            self.block.update(slopes=slopes.data_ptr(), slopes_b=problem.num_heads if slopes.ndim == 2 else 0)
            kept.append(slopes)
        if inputs.sinks is not None:
            sinks = inputs.sinks.to(dtype).contiguous()
            self.block.update(sinks=sinks.data_ptr())
            kept.append(sinks)
        if inputs.page_table is not None:
            table = inputs.page_table.to(torch.int32).contiguous()
            self.block.update(page_table=table.data_ptr(), page_b=table.shape[1])
            kept.append(table)
        if problem.dropout_p > 0:
            self.block.update(seed=int(inputs.dropout_seed))  # type: ignore[arg-type]
        return kept

    @property
    def failed_to_cut(self) -> bool:
        """Whether the last call met numbers that tile registers cannot take: what it wrote is void."""
        return self.cuts and self.block.words[NOT_CUT] != 0

    @property
    def cuts(self) -> bool:
        return bool(self.kernel.facts.get("cuts"))

    def run(self) -> None:
        if self.threads == 1:
            self.kernel.call(self.block.address)
        else:
            parallel.run(self.kernel, self.block.address, self.threads)
        local.scratch.trim()


class OutputPlan(Plan):
    """What plans of out and lse share: a call allocates both, or writes lse where nobody reads it.

    The scratch of a call: each thread's own, the partial results of splits, lse if it is not wanted.
    """

    partial_bytes = 0

    def __init__(self, problem: AttentionProblem, inputs: Inputs) -> None:
        super().__init__(problem, inputs)
        self.out_shape, self.out_stride = _out_layout(problem, inputs.query)
        self.lse_shape = lse_shape(problem, inputs)
        self.set_strides("out", self.out_stride)

    def size_scratch(self) -> None:
        self.partial_offset = self.threads * self.thread_bytes
        self.lse_offset = self.partial_offset + self.partial_bytes
        self.scratch_bytes = self.lse_offset + math.prod(self.lse_shape) * self.problem.compute_dtype.itemsize

    def cut(self, seqlen_q: int) -> None:
        """Work items for sequences of at most seqlen_q queries."""

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if self.problem.is_packed:
            self.cut(longest(inputs.cu_seqlens_q))
        out, lse = self.allocate()
        kept = self.bind(inputs) if self.has_options else None
        self.attend(*inputs[:3], out, lse)
        del kept
        return out, lse

    def allocate(self) -> tuple[Tensor, Tensor]:
        out = torch.empty_strided(self.out_shape, self.out_stride, dtype=self.problem.dtype, device=CPU)
        return out, torch.empty(self.lse_shape, dtype=self.problem.compute_dtype, device=CPU)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Run the kernel on tensors with the plan's strides; with `lse` None only out is wanted."""
        if not self.items:
            return
        scratch = local.scratch.reserve(self.scratch_bytes)
        put_addresses(
            self.block.words, 0, 0, 0, query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
            scratch + self.lse_offset if lse is None else lse.data_ptr(), scratch,
            scratch + self.partial_offset,
        )  # fmt: skip
        self.run()


class ForwardPlan(OutputPlan):
    """A forward of one problem, with one set of strides and one number of threads."""

    def __init__(self, problem: AttentionProblem, inputs: Inputs, threads: int, may_cut: bool = True) -> None:
        super().__init__(problem, inputs)
        self.wanted_threads, self.seqlen_q = self.worth(threads), -1
        self.kernel = load("forward", forward_config(problem, inputs, may_cut, self.wanted_threads))
        self.cut(problem.seqlen_q)

    def cut(self, seqlen_q: int) -> None:
        if seqlen_q == self.seqlen_q:
            return
        facts, heads = self.kernel.facts, self.problem.batch * self.problem.num_heads
        tiles_all = -(-seqlen_q // facts["block_q"])
        tiles = _tiles_per_item(tiles_all, heads, self.wanted_threads, self.problem.causal, facts)
        chunks = -(-tiles_all // tiles)
        self.items, self.seqlen_q = heads * chunks, seqlen_q
        self.threads = max(1, min(self.wanted_threads, self.items))
        self.thread_bytes = facts["scratch_bytes"] + tiles * facts["tile_bytes"]
        self.block.update(items=self.items, chunks=chunks, tiles=tiles, scratch_bytes=self.thread_bytes)
        self.size_scratch()


class DecodePlan(OutputPlan):
    """Few queries, split over keys, with one set of strides and one number of threads."""

    def __init__(self, problem: AttentionProblem, inputs: Inputs, threads: int, may_cut: bool = True) -> None:
        super().__init__(problem, inputs)
        config, threads = decode_config(problem, inputs, may_cut), self.worth(threads)
        self.kernel = load("decode", config)
        heads = problem.batch * problem.num_kv_heads
        row_bytes = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
        is_far = heads * problem.seqlen_k * row_bytes > NEAR_BYTES
        splits = max(1, min(DECODE_ITEMS // max(1, heads), problem.seqlen_k // DECODE_KEYS))
        split_keys = -(-problem.seqlen_k // splits // BLOCK_K) * BLOCK_K
        splits = max(1, -(-problem.seqlen_k // max(1, split_keys)))
        item_heads = self.item_heads(heads * splits, threads)
        self.items = heads * splits // item_heads
        self.threads = max(1, min(threads, self.items))
        self.thread_bytes = self.kernel.facts["scratch_bytes"]
        self.partial_bytes = heads * splits * config.rows * self.kernel.facts["partial_bytes"]
        # splits that are done of each group of heads; the kernel leaves zeros
        self.turns = (ctypes.c_int64 * heads)()
        self.block.update(
            items=self.items,
            splits=splits,
            split_keys=split_keys,
            item_heads=item_heads,
            asked=ASKED_FAR if is_far else max(1, ASKED_NEAR // row_bytes),
            scratch_bytes=self.thread_bytes,
            turn=ctypes.addressof(self.turns),
        )
        self.size_scratch()


class ShortPlan(OutputPlan):
    """So few queries and keys that a key head is one work item."""

    def __init__(self, problem: AttentionProblem, inputs: Inputs, threads: int) -> None:
        super().__init__(problem, inputs)
        self.kernel = load("short", short_config(problem, inputs, "forward"))
        self.items = problem.batch * problem.num_kv_heads
        self.threads = max(1, min(self.worth(threads), self.items))
        self.thread_bytes = self.kernel.facts["scratch_bytes"]
        self.block.update(items=self.items, scratch_bytes=self.thread_bytes)
        self.size_scratch()


def rows_dense(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


# The counters' cache lines, zeros beside each, and right behind them what changes from call to call.
put_addresses = struct.Struct(f"q56x q56x {len(CHANGING)}q").pack_into


def _tiles_per_item(tiles_all: int, heads: int, threads: int, is_causal: bool, facts: dict[str, int]) -> int:
    """As many tiles as share a K/V block well and fit the cache, in items that keep all threads at work."""
    cache = current_target().l2_bytes * 5 // 8  # for query tiles, beside a block of K and V
    most = max(1, min(facts["most_tiles"], tiles_all, cache // facts["tile_bytes"]))
    fewest_chunks = max(1, -(-tiles_all // most))

    def time(chunks: int) -> float:
        """At most, in tiles, where a thread that is free takes the next item."""
        converting = facts["converting"] / facts["block_q"]
        tiles, items = -(-tiles_all // chunks), heads * chunks
        largest = tiles * (2 if is_causal and chunks > 1 else 1) + converting
        is_even = items % threads == 0 and (chunks == 1 or not is_causal)
        return (heads * tiles_all + items * converting) / threads + largest * waiting_share(threads, is_even)

    most_chunks = max(fewest_chunks, min(tiles_all, 4 * threads))
    return max(1, -(-tiles_all // min(range(fewest_chunks, most_chunks + 1), key=time)))


def _out_layout(problem: AttentionProblem, query: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of out: query's shape with head_dim_v, contiguous."""
    out = torch.empty((*query.shape[:-1], problem.head_dim_v), device="meta")
    return tuple(out.shape), out.stride()


def broadcast_strides(t: Tensor) -> list[int]:
    """Of a mask, a bias or its gradient, but for the last dimension."""
    return [0 if size == 1 else stride for size, stride in zip(t.shape[:3], t.stride())]


def lse_shape(problem: AttentionProblem, inputs: Inputs) -> tuple[int, ...]:
    if problem.is_packed:
        return problem.num_heads, inputs.query.shape[0]
    return problem.batch, problem.num_heads, problem.seqlen_q


def named(name: str, axes: str, strides: Any) -> dict[str, int]:
    return {f"{name}_{axis}": stride for axis, stride in zip(axes, strides)}


def _spans(problem: AttentionProblem, inputs: Inputs) -> Tensor:
    """int64 (batch, 4): each sequence's first query row, queries, first key row and keys."""
    spans = torch.zeros((problem.batch, 4), dtype=torch.int64, device=CPU)
    cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if cu_q is None:
        spans[:, 1] = problem.seqlen_q
    else:
        spans[:, 0], spans[:, 1] = cu_q[:-1], cu_q.diff()
    if cu_k is not None:
        spans[:, 2], spans[:, 3] = cu_k[:-1], cu_k.diff()
        return spans
    spans[:, 3] = problem.seqlen_k if inputs.seqlens_k is None else inputs.seqlens_k
    if inputs.leftpad_k is not None:
        spans[:, 2] = inputs.leftpad_k
        spans[:, 3] -= spans[:, 2]
    return spans


def longest(cu_seqlens: Tensor | None) -> int:
    assert cu_seqlens is not None
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0


def _last_dimension_dense(t: Tensor, problem: AttentionProblem, inputs: Inputs) -> Tensor:
    """A mask or bias whose last dimension spans the keys with stride 1."""
    if t.shape[3] == 1:
        t = t.expand(-1, -1, -1, max(1, problem.seqlen_k))
    return t if t.stride(3) == 1 else t.contiguous()
