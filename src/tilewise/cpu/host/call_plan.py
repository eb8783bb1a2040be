"""What plans of the CPU share: the argument block, how a call fills it, and the run of a forward."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import operator
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.dropout import rate, threshold
from tilewise.core.plan import Results, Retry, Watched
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.signature import Signature, TensorSignature, contiguous_strides, rows_dense, swapped
from tilewise.core.torch_private import empty_strided_cpu
from tilewise.cpu.host import parallel
from tilewise.cpu.host.arguments import CHANGING, NOT_CUT, UNBOUNDED, WORD, Block
from tilewise.cpu.host.compile import Kernel
from tilewise.cpu.host.functions import bind_functions, raise_wrong_index
from tilewise.cpu.host.pool import KEPT_SCRATCH, ThreadBlock, pool

# The counters' cache lines, zeros beside each, and right behind them what changes from call to call.
put_addresses = struct.Struct(f"q56x q56x {len(CHANGING)}q").pack_into

GRAIN = 1 << 15  # multiply-adds that are worth a thread: so many take as long as a fork and a join, or less


class Division(NamedTuple):
    """How the work of a call is divided; of packed sequences, which differ in every call, found anew."""

    items: int  # of work
    threads: int
    words: dict[str, int]  # of the argument block
    areas: list[int]  # offsets of what lies in the scratch behind each thread's own
    size: int  # of the scratch


class CallPlan:
    """The words of a call that follow from its signature, in `template`, and the kernel that reads them."""

    kernel: Kernel
    division: Division | None = None  # None: of packed sequences, whose lengths differ in each call
    has_tile_map = True  # of functions

    def __init__(self, problem: AttentionProblem, signature: Signature) -> None:
        self.problem, self.signature = problem, signature
        self.given = inputs = dense_inputs(signature)
        self.are_rows_dense = are_rows_dense(signature.inputs[:3])
        results = signature.results[::3] if signature.direction == "backward" else ()  # out, dout
        can_take_any = self.are_rows_dense and are_rows_dense(results)
        self.layout = signature.layout if can_take_any else "bshd"
        self.is_ragged = problem.is_packed or problem.is_cached
        options = (inputs.mask, inputs.bias, inputs.alibi_slopes, inputs.sinks, inputs.page_table)
        self.has_options = (
            self.is_ragged
            or problem.dropout_p > 0
            or problem.functions is not None
            or any(t is not None for t in options)
        )
        rows = 0 if problem.is_packed else problem.batch * problem.num_heads * problem.seqlen_q
        work = rows * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
        is_worth = signature.threads if problem.is_packed else work // GRAIN
        self.wanted_threads = max(1, min(signature.threads, is_worth))
        self.are_heads_adjacent = inputs.key.strides[-2] <= inputs.key.strides[-3]
        self.dense_span = (ctypes.c_int64 * 4)(0, problem.seqlen_q, 0, problem.seqlen_k)
        self.template = Block()
        self._describe_problem()
        for name, t in zip("qkv", inputs[:3]):
            self.set_strides(name, t.strides)
        for name, t in (("mask", inputs.mask), ("bias", inputs.bias)):
            if t is not None:
                strides = t.strides if _is_last_dense(t.shape, t.strides) else contiguous_strides(t.shape)
                self.template.update(**axes(name, "bhij", broadcast_strides(t.shape, strides)))

    def _describe_problem(self) -> None:
        problem, visibility = self.problem, self.problem.visibility()
        slopes, table = self.given.alibi_slopes, self.given.page_table
        self.template.update(
            slopes_b=problem.num_heads if slopes is not None and len(slopes.shape) == 2 else 0,
            page_b=0 if table is None else table.shape[1],
            num_heads=problem.num_heads,
            num_kv_heads=problem.num_kv_heads,
            group=problem.group_size,
            parts=1,
            part_heads=problem.group_size,
            left=UNBOUNDED if visibility.left is None else min(visibility.left, UNBOUNDED),
            right=UNBOUNDED if visibility.right is None else min(visibility.right, UNBOUNDED),
            spans=ctypes.addressof(self.dense_span),
            span_stride=4 * self.is_ragged,
            scale=problem.scale,
            q_factor=problem.scale / problem.softcap if problem.softcap else problem.scale,
            softcap=problem.softcap,
            lse_b=0 if problem.is_packed else problem.num_heads * problem.seqlen_q,
            lse_h=self.given.query.shape[0] if problem.is_packed else problem.seqlen_q,
            score_k0=int(not problem.has_packed_keys),
            threshold=threshold(problem.dropout_p) << 24,
            drop_heads=problem.num_heads,
            inverse_keep=1 / (1 - rate(problem.dropout_p)),
        )

    def set_strides(self, name: str, strides: tuple[int, ...]) -> None:
        """Strides of a query- or key-shaped tensor; a packed one has a single batch entry."""
        strides = (0, *strides) if len(strides) == 3 else strides
        self.template.update(**axes(name, "bnh", strides))

    def item_heads(self, items: int, parts: int = 1) -> int:
        """Key heads whose rows lie side by side are read together, as far as that leaves work for all."""
        most = self.kernel.facts["item_heads"] // parts if self.are_heads_adjacent else 1
        if self.wanted_threads > 1:
            most = min(most, items // (4 * self.wanted_threads))
        return max((c for c in range(1, most + 1) if self.problem.num_kv_heads % c == 0), default=1)

    def divided(self, items: int, thread_bytes: int, words: dict[str, int], *behind: int) -> Division:
        """`thread_bytes` of scratch are each thread's own; `behind`: bytes of what lies behind them."""
        threads = max(1, min(self.wanted_threads, items))
        sizes = (-(-size // 64) * 64 for size in behind)
        *areas, size = itertools.accumulate(sizes, initial=threads * thread_bytes)
        return Division(items, threads, {"items": items, "scratch_bytes": thread_bytes} | words, areas, size)

    def allocator(
        self, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
    ) -> Callable[[], Tensor]:
        """Makes new tensors in the plan's layout; shape and strides, by default contiguous, are of "bshd"."""
        strides = contiguous_strides(shape) if strides is None else strides
        if self.layout == "bhsd":
            shape, strides = swapped(shape), swapped(strides)
        return allocator(shape, dtype, strides)

    def rows_of(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """query, key and value with a contiguous last dimension."""
        return inputs[:3] if self.are_rows_dense else tuple(map(rows_dense, inputs[:3]))

    def bind(self, block: Block, inputs: Inputs) -> list[Any]:
        """Write what a call's optional tensors say into the block; the result must outlive the kernel."""
        problem, dtype = self.problem, self.problem.compute_dtype
        kept: list[Any] = []
        if self.is_ragged:
            spans = _spans(problem, inputs)
            block.words[WORD["spans"]] = spans.buffer_info()[0]
            kept.append(spans)
        for name, t in (("mask", inputs.mask), ("bias", inputs.bias)):
            if t is not None:
                t = t if _is_last_dense(t.shape, t.stride()) else t.contiguous()
                block.words[WORD[name]] = t.data_ptr()
                kept.append(t)
        others = ("slopes", inputs.alibi_slopes, dtype), ("sinks", inputs.sinks, dtype)
        for name, t, kind in (*others, ("page_table", inputs.page_table, torch.int32)):
            if t is not None:
                t = t.to(kind).contiguous()
                block.words[WORD[name]] = t.data_ptr()
                kept.append(t)
        if problem.dropout_p > 0:
            names = ("seed", "drop_q", "drop_k", "drop_head", "drop_heads")
            block.update(**dict(zip(names, inputs.dropout_seed.view(-1).tolist())))  # type: ignore[union-attr]
        if problem.functions is not None:
            most = problem.seqlen_q, problem.seqlen_k
            if self.is_ragged and problem.batch:
                most = max(spans[1::4]), max(spans[3::4])
            is_backward = self.signature.direction == "backward"
            block_q = self.kernel.facts["block_q"] if self.has_tile_map else 0
            kept += bind_functions(problem, block, inputs, most, block_q, is_backward)
        return kept

    def take(self, division: Division) -> tuple[ThreadBlock, int]:
        """The thread's argument block, with the plan's words, and the address of its scratch."""
        block, pool.block = pool.block or ThreadBlock(), None
        if block.template is not self.template:
            block.fill(self.template)
        if self.division is None:
            block.update(**division.words)
        if division.size > block.size:
            block.grow(division.size)
        return block, block.scratch

    def launch(self, block: ThreadBlock, inputs: Inputs, division: Division) -> bool:
        """Run the kernel; False if it met numbers that tile registers cannot take: what it wrote is void.

        Raises:
            IndexError: a function has read out of range.
        """
        _read_by_kernel = self.bind(block, inputs) if self.has_options else None
        self.run_kernel(block, division)
        if division.size > KEPT_SCRATCH:
            block.release()
        if self.has_options and self.problem.functions is not None:
            raise_wrong_index(self.problem, block, inputs)
        pool.block, is_void = block, self.cuts and block.words[NOT_CUT]
        return not is_void

    def run_kernel(self, block: Block, division: Division) -> None:
        if division.threads == 1:
            self.kernel.call(block.address)
        else:
            parallel.run(self.kernel, block.address, division.threads)

    @functools.cached_property
    def cuts(self) -> bool:
        """Whether the kernel cuts numbers in terms for tile registers."""
        return bool(self.kernel.facts["cuts"])

    @functools.cached_property
    def uncut(self) -> Any:
        """The plan for numbers that cannot be cut."""
        return type(self)(self.problem, self.signature, may_cut=False)  # type: ignore[call-arg]


class OutputPlan(CallPlan):
    """What plans of out and lse share.

    The scratch of a call: each thread's own, partial results of splits and counters of those that are done,
    lse if it is not wanted.
    """

    ticket_bytes = 0
    statistics: tuple[str, ...] = ()  # of the weights, that the kernel gives in its pass

    def __init__(self, problem: AttentionProblem, signature: Signature) -> None:
        super().__init__(problem, signature)
        self.wants_lse, self.wants_residual, order, *_ = signature.request
        query = self.given.query
        out_shape = (*query.shape[:-1], problem.head_dim_v)
        out_strides = contiguous_strides(out_shape)
        if order == "bhsd" and len(out_shape) == 4:
            _, rows, heads, dim = out_shape
            out_strides = (heads * rows * dim, dim, rows * dim, 1)
        self.set_strides("out", out_strides)
        self.new_out = self.allocator(out_shape, problem.out_dtype, out_strides)
        shape = lse_shape(problem, query)
        self.lse_bytes = math.prod(shape) * problem.compute_dtype.itemsize
        self.new_lse = allocator(shape, problem.compute_dtype, contiguous_strides(shape))

    def divide(self, seqlen_q: int) -> Division:
        """Work items for packed sequences of at most seqlen_q queries."""
        raise NotImplementedError

    def run(self, inputs: Inputs, *_: Any) -> Results | Watched | Retry:
        q, k, v = inputs[:3] if self.are_rows_dense else self.rows_of(inputs)
        out = self.new_out()
        lse = self.new_lse() if self.wants_lse else None
        residual = self.new_lse() if self.wants_residual else None
        division = self.division or self.divide(longest(inputs.cu_seqlens_q))
        partial, ticket, spare_lse = division.areas
        block, scratch = self.take(division)
        found = Results(out, lse, residual)
        watched = self.watch(block, found) if self.statistics else found
        if not division.items:
            return watched
        put_addresses(
            block.words, 0, 0, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
            scratch + spare_lse if lse is None else lse.data_ptr(),
            0 if residual is None else residual.data_ptr(), scratch, scratch + partial, scratch + ticket,
        )  # fmt: skip
        if self.ticket_bytes:
            ctypes.memset(scratch + ticket, 0, self.ticket_bytes)
        return watched if self.launch(block, inputs, division) else Retry(self.uncut)

    def watch(self, block: Block, results: Results) -> Watched:
        """Results, with tensors for the statistics that the kernel is to give."""
        found = {name: self.new_lse() for name in self.statistics}
        block.update(**{name: t.data_ptr() for name, t in found.items()})
        return Watched(results, found.get("row_max"), found.get("entropy"))


def dense_inputs(signature: Signature) -> Any:
    """`Inputs` of signatures as kernels read them: query, key and value with a contiguous last dimension."""
    tensors: Any = signature.inputs
    return Inputs(*map(dense, tensors[:3]), *tensors[3:])  # type: ignore[arg-type]


def are_rows_dense(tensors: Sequence[TensorSignature | None]) -> bool:
    return all(t is not None and t.strides[-1] == 1 for t in tensors)


def dense(t: TensorSignature) -> TensorSignature:
    """Of what `rows_dense` gives."""
    return t if t.strides[-1] == 1 else t._replace(strides=contiguous_strides(t.shape))


def allocator(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> Callable[[], Tensor]:
    """Makes new tensors."""
    return functools.partial(empty_strided_cpu, tuple(shape), strides, dtype)  # which takes no `torch.Size`


def broadcast_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Of a mask, a bias or its gradient."""
    return [0 if size == 1 else stride for size, stride in zip(shape, strides)]


def lse_shape(problem: AttentionProblem, query: TensorSignature) -> tuple[int, ...]:
    if problem.is_packed:
        return problem.num_heads, query.shape[0]
    return problem.batch, problem.num_heads, problem.seqlen_q


def axes(name: str, letters: str, strides: Any) -> dict[str, int]:
    """Words of a tensor's strides."""
    return {f"{name}_{axis}": stride for axis, stride in zip(letters, strides)}


def longest(cu_seqlens: Tensor | None) -> int:
    assert cu_seqlens is not None
    return max(_differences(cu_seqlens.tolist()), default=0)


def _differences(offsets: list[int]) -> Iterator[int]:
    return map(operator.sub, offsets[1:], offsets)


def _spans(problem: AttentionProblem, inputs: Inputs) -> array[int]:
    """Each sequence's first query row, queries, first key row and keys: 64 bits each."""
    batch = problem.batch
    spans = array("q", bytes(32 * batch))  # PyTorch's operations take 20 us more

    def fill(column: int, lengths: Iterable[int]) -> None:
        spans[column::4] = array("q", lengths)

    if inputs.cu_seqlens_q is None:
        fill(1, [problem.seqlen_q] * batch)
    for column, offsets in ((0, inputs.cu_seqlens_q), (2, inputs.cu_seqlens_k)):
        if offsets is not None:
            rows = offsets.tolist()
            fill(column, rows[:-1])
            fill(column + 1, _differences(rows))
    if inputs.cu_seqlens_k is None:
        ends = [problem.seqlen_k] * batch if inputs.seqlens_k is None else inputs.seqlens_k.tolist()
        starts = [0] * batch if inputs.leftpad_k is None else inputs.leftpad_k.tolist()
        fill(2, starts)
        fill(3, map(operator.sub, ends, starts))
    return spans


def _is_last_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the last dimension of a mask or bias, if there is more than one entry, has stride 1."""
    return shape[3] == 1 or strides[3] == 1
