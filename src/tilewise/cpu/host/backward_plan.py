"""The plan of a backward: its work items, its scratch memory, and what a call tells the kernel."""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.core.functions.expression import decode
from tilewise.core.plan import Results, Retry
from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.core.signature import Signature, contiguous_strides, rows_dense
from tilewise.cpu.host.arguments import BLOCK_K, CHANGING_BACKWARD, COUNTER, SLOTS, WORD, Block
from tilewise.cpu.host.call_plan import CallPlan, Division, axes, broadcast_strides, dense, longest, lse_shape
from tilewise.cpu.host.compile import Kernel, load
from tilewise.cpu.host.configs import KINDS, backward_config, decode_config, is_decoding
from tilewise.cpu.host.pool import CPU

# Work items of a backward follow the process's cores, not a call's threads, which so do not change the bits.
GRADIENTS = "dq", "dk", "dv"

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SMALL_MACHINE, ITEMS_OF_CORE = 4, 2  # cores, on which as many work items are wanted, where the keys allow
SUM_BYTES = 1 << 20  # of dq: where all heads' would take more, some go after others,
ITEMS_OF_THREAD = 16  # so many at a time that each thread has this many work items
KEYS_OF_ITEM = 128, 64  # at least, or nearly, as each item converts all queries anew; on larger machines
LARGE_PAGE, MADV_HUGEPAGE = 2 << 20, 14  # Linux's

# The counters' cache lines and, right behind them, what changes from call to call.
put_addresses = struct.Struct(f"q56x q56x {len(CHANGING_BACKWARD)}q").pack_into


class BackwardPlan(CallPlan):
    """A backward. Each work item has some heads' keys, or a split of them."""

    def __init__(self, problem: AttentionProblem, signature: Signature, may_cut: bool = True) -> None:
        super().__init__(problem, signature)
        self.has_few_rows = is_decoding(problem, is_backward=True)
        self.dbias_dtype = _dbias_dtype(problem)
        self.kernel = self._load(may_cut)
        shared_batches, shared_heads = _sharing(problem)
        self.owners = problem.batch // shared_batches * (problem.num_kv_heads // shared_heads)
        self.template.update(
            own_heads=problem.num_kv_heads // shared_heads,
            shared_heads=shared_heads,
            sharing=shared_batches * shared_heads,
        )
        self._allocate()
        results: Any = signature.results
        out, *statistics, dout, _ = results
        for name, t in (("out", out), ("do", dout)):
            self.set_strides(name, dense(t).strides)
        are_rows_dense = out.strides[-1] == dout.strides[-1] == 1
        self.are_results_dense = are_rows_dense and all(
            t is None or t.strides == contiguous_strides(t.shape) for t in statistics
        )
        visible = problem.visibility()
        first, end = visible.key_range(0, 1)
        self.has_unreached = self.is_ragged or first == end  # if the first query sees a key, all do
        self.has_captured_gradient = problem.functions is not None and decode(problem.functions).wants_grad
        self.may_hide_rows = problem.functions is not None and bool(decode(problem.functions).hiding)
        if self.has_few_rows:  # keys that no query sees are left out
            self.has_unreached |= visible.key_range(0, problem.seqlen_q) != (0, problem.seqlen_k)
            self.has_unreached |= problem.mask_shape is not None
        if not problem.is_packed:
            self.division = self.divide(problem.seqlen_q, problem.seqlen_k)
            self.template.update(**self.division.words)

    def _load(self, may_cut: bool) -> Kernel:
        problem, inputs = self.problem, self.given
        config = (
            decode_config(problem, inputs, may_cut=False)
            if self.has_few_rows
            else backward_config(problem, inputs, may_cut)
        )
        config = replace(config, wide=GRADIENTS if problem.has_wide_results else ())
        if self.dbias_dtype is not None:
            config = replace(config, dbias_kind=KINDS[self.dbias_dtype])
        return load("decode_backward" if self.has_few_rows else "backward", config)

    def _allocate(self) -> None:
        """What allocates the gradients, and their strides."""
        problem, self.new = self.problem, []
        for name, t in zip(GRADIENTS, self.given[:3], strict=True):
            self.set_strides(name, contiguous_strides(t.shape))
            self.new.append(self.allocator(t.shape, problem.gradient_dtype(t.dtype)))
        if problem.bias_needs_grad:
            shape = problem.bias_shape
            assert shape is not None
            strides = broadcast_strides(shape, contiguous_strides(shape))
            self.template.update(**axes("dbias", "bhij", strides))
        self.lse_bytes = math.prod(lse_shape(problem, self.given.query)) * problem.compute_dtype.itemsize

    def divide(self, seqlen_q: int, seqlen_k: int) -> Division:
        """Work items for sequences of at most these lengths. Blocks of keys depend on the problem alone."""
        problem, facts = self.problem, self.kernel.facts
        keys = self.owners * seqlen_k  # of all items, as many times as they are read
        if problem.is_packed:
            keys = self.given.key.shape[0] * self.owners // max(1, problem.batch)
        items = ITEMS_OF_CORE * max(SMALL_MACHINE, CORES)
        fewest = KEYS_OF_ITEM[CORES > SMALL_MACHINE]
        wanted = min(-(-items * seqlen_k // max(1, keys)), round(seqlen_k / fewest))
        split = seqlen_k / max(1, wanted, -(-seqlen_k // facts["key_block"]))
        split = max(1, math.ceil(split / BLOCK_K)) * BLOCK_K
        if -(-seqlen_k // split) < wanted:  # a little less, rather than a little more, to each
            split -= BLOCK_K
        splits, tiles = -(-seqlen_k // split), -(-seqlen_q // facts["block_q"])
        item_heads = self.item_heads(self.owners * splits) if self.has_few_rows else 1
        items, tickets = self.owners * splits // item_heads, problem.batch * problem.num_heads * tiles
        owners = self.owners_at_once(splits, tickets * facts["sum_bytes"], min(self.wanted_threads, items))
        sum_tiles = tickets * owners // max(1, self.owners)
        words = {
            "splits": splits, "split_keys": split, "tiles": tiles, "item_heads": item_heads, "owners": owners,
            "sum_tiles": sum_tiles,
        }  # fmt: skip
        # Behind the threads' own: tickets, an absent statistic, sums of dq.
        behind = 8 * tickets, self.lse_bytes, sum_tiles * facts["sum_bytes"] if splits > 1 else 0
        return self.divided(items, facts["scratch_bytes"], words, *behind)

    def owners_at_once(self, splits: int, sum_bytes: int, threads: int) -> int:
        """Owners whose sums of dq are kept at once: all, or, of many bytes, as few as leave work for all."""
        are_alike = not (self.is_ragged or self.has_few_rows or self.problem.bias_needs_grad)
        if sum_bytes <= SUM_BYTES or splits <= 1 or not are_alike:
            return self.owners
        fewest = max(-(-ITEMS_OF_THREAD * threads // splits), -(-SUM_BYTES * self.owners // sum_bytes))
        return next((n for n in range(fewest, self.owners) if self.owners % n == 0), self.owners)

    def run(
        self,
        inputs: Inputs,
        results: Results | None = None,
        dout: Tensor | None = None,
        dlse: Tensor | None = None,
    ) -> Gradients | Retry:
        assert results is not None and dout is not None
        dtype, (out, lse, residual) = self.problem.compute_dtype, results
        assert out is not None and lse is not None
        gradients = [new() for new in self.new]
        if self.has_unreached:  # stays 0 where no item reaches
            for gradient in gradients:
                gradient.zero_()
        elif self.may_hide_rows:  # no item has a tile of queries that sees nothing
            gradients[0].zero_()
        dlse = None if dlse is None else dlse.to(dtype).contiguous()
        dbias = delta = None
        if self.dbias_dtype is not None:
            dbias = new_large(inputs.bias.shape, self.dbias_dtype)  # type: ignore[union-attr]
            dbias.zero_()
        if self.problem.has_sinks:  # a query that sees no key has delta = -dlse
            delta = torch.zeros(lse.shape, dtype=dtype, device=CPU) if dlse is None else -dlse
        division = self.division or self.divide(longest(inputs.cu_seqlens_q), longest(inputs.cu_seqlens_k))
        dcaptured = None
        if self.has_captured_gradient:  # a sum for each head's split of keys: the same bits for any threads
            slots = self.problem.batch * self.problem.num_kv_heads * division.words["splits"]
            dcaptured = torch.zeros((slots, self.problem.num_captured), dtype=torch.float64, device=CPU)
        if not self.are_results_dense:
            dout, out, lse = rows_dense(dout), rows_dense(out), lse.contiguous()
            residual = None if residual is None else residual.contiguous()
        results, sums = Results(out, lse, residual), (dbias, delta, dcaptured)
        if division.items and not self._launch(inputs, results, dout, gradients, dlse, sums, division):
            return Retry(self.uncut)
        if dbias is not None:
            dbias = dbias.to(self.problem.gradient_dtype(inputs.bias.dtype))  # type: ignore[union-attr]
        dq, dk, dv = gradients
        if dcaptured is not None:
            dcaptured = dcaptured.sum(0).to(inputs.captured_floats.dtype)  # type: ignore[union-attr]
        return Gradients(dq, dk, dv, dbias, _sink_gradient(inputs.sinks, lse, residual, delta), dcaptured)

    def _launch(
        self,
        inputs: Inputs,
        results: Results,
        dout: Tensor,
        gradients: list[Tensor],
        dlse: Tensor | None,
        sums: tuple[Tensor | None, Tensor | None, Tensor | None],
        division: Division,
    ) -> bool:
        """Fill the block and run the kernel; False if its numbers cannot be cut.

        sums: dbias, delta and the sums of captured floats.
        """
        dbias, delta, dcaptured = sums
        zeros, absent, dq_sum = division.areas
        block, scratch = self.take(division)
        if dcaptured is not None:
            block.update(dcaptured=dcaptured.data_ptr(), num_captured=self.problem.num_captured)
        q, k, v = inputs[:3] if self.are_rows_dense else self.rows_of(inputs)
        ctypes.memset(scratch + zeros, 0, dq_sum - zeros)
        zeros, absent = scratch + zeros, scratch + absent
        out, lse, residual = results
        assert out is not None and lse is not None
        put_addresses(
            block.words, 0, 0, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(),
            absent if residual is None else residual.data_ptr(), scratch, 0, zeros, dout.data_ptr(),
            absent if dlse is None else dlse.data_ptr(),
            *(t.data_ptr() for t in gradients), 0 if dbias is None else dbias.data_ptr(),
            0 if delta is None else delta.data_ptr(), scratch + dq_sum,
        )  # fmt: skip
        return self.launch(block, inputs, division)

    def run_kernel(self, block: Block, division: Division) -> None:
        """The owners whose sums of dq are kept at once, and then the next ones."""
        step = division.words["owners"] * division.words["splits"]
        for first in range(0, division.items, step):
            end = min(first + step, division.items)
            block.words[COUNTER], block.words[SLOTS], block.words[WORD["items"]] = first, 0, end
            super().run_kernel(block, division)


def new_large(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Empty memory in large pages, where there are some: small ones take longer to map than to fill."""
    t = torch.empty(shape, dtype=dtype, device=CPU)
    first = -(-t.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    size = (t.data_ptr() + t.nbytes - first) // LARGE_PAGE * LARGE_PAGE
    if sys.platform == "linux" and size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), MADV_HUGEPAGE)
    return t


def _sharing(problem: AttentionProblem) -> tuple[int, int]:
    """How many sequences, and how many key heads, add to the same gradient of a bias."""
    if not problem.bias_needs_grad or problem.bias_shape is None:
        return 1, 1
    of_batches, of_heads = problem.bias_shape[:2]
    batches, heads = max(1, problem.batch), max(1, problem.num_kv_heads)
    return (batches if of_batches == 1 else 1), (heads if of_heads == 1 else 1)


def _dbias_dtype(problem: AttentionProblem) -> torch.dtype | None:
    """Of the gradient of the bias while it is summed: the compute type where entries may have several terms,
    of sequences, heads or queries that share them; a single row is taken as shared."""
    if problem.bias_shape is None or not problem.bias_needs_grad:
        return None
    shape = problem.batch, problem.num_heads, problem.seqlen_q
    is_shared = problem.seqlen_q == 1 or problem.bias_shape[:3] != shape
    return problem.compute_dtype if is_shared else problem.bias_dtype


def _sink_gradient(
    sinks: Tensor | None, lse: Tensor, residual: Tensor | None, delta: Tensor | None
) -> Tensor | None:
    """dsink = -sum of p_sink * delta over the head's queries."""
    if sinks is None or delta is None:
        return None
    # lse is -inf where the sink's logit is, too: its weight is 0
    log_p = sinks.to(lse.dtype)[:, None] - lse.masked_fill(lse == -math.inf, math.inf)
    p_sink = torch.exp(log_p if residual is None else log_p - residual)
    summed = -(p_sink * delta).sum(-1)
    return (summed if summed.ndim == 1 else summed.sum(0)).to(sinks.dtype)
