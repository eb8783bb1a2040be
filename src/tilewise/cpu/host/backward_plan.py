"""The plan of a backward: its work items, its scratch memory, and what a call tells the kernel."""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.core.problem import AttentionProblem, Gradients, Inputs
from tilewise.cpu.host.arguments import CHANGING_BACKWARD
from tilewise.cpu.host.compile import load
from tilewise.cpu.host.configs import (
    KINDS,
    backward_config,
    decode_backward_config,
    is_decoding,
    recomputes,
    short_config,
)
from tilewise.cpu.host.plans import (
    BLOCK_K,
    CPU,
    Plan,
    broadcast_strides,
    local,
    longest,
    lse_shape,
    named,
    rows_dense,
)

WANTED_ITEMS = 8  # work items of a backward, where the keys allow: enough for the threads of a small machine
KEYS_OF_ITEM = 128  # at least, or nearly: each item converts all queries anew

# The counters' cache lines and, right behind them, what changes from call to call.
put_addresses_backward = struct.Struct(f"q56x q56x {len(CHANGING_BACKWARD)}q").pack_into


class BackwardPlan(Plan):
    """A backward of one problem, with one set of strides and one number of threads.

    The scratch of a call: each thread's own, sums of dq, and zeros: turns, and dlse if there is none.
    """

    def __init__(
        self, problem: AttentionProblem, inputs: tuple[Any, ...], threads: int, layout: str = "bshd",
        may_cut: bool = True,
    ) -> None:  # fmt: skip
        """`layout`: of the tensors that `differentiate` is given, and of `inputs`, then the first three."""
        inputs = Inputs(*(t.transpose(1, 2) if layout == "bhsd" else t for t in inputs))
        super().__init__(problem, inputs)
        self.dbias_dtype = _dbias_dtype(problem, inputs)
        dbias_kind = "" if self.dbias_dtype is None else KINDS[self.dbias_dtype]
        self.has_few_rows = is_decoding(problem)
        if recomputes(problem):
            self.kernel = load("short", short_config(problem, inputs, "backward"))
        elif self.has_few_rows:
            self.kernel = load("decode_backward", decode_backward_config(problem, inputs))
        else:
            config = backward_config(problem, inputs, may_cut)
            self.kernel = load("backward", replace(config, dbias_kind=dbias_kind))
        shared_batches, shared_heads = _sharing(problem)
        self.owners = problem.batch // shared_batches * (problem.num_kv_heads // shared_heads)
        self.block.update(
            own_heads=problem.num_kv_heads // shared_heads,
            shared_heads=shared_heads,
            sharing=shared_batches * shared_heads,
        )
        self.wanted_threads, self.axes = self.worth(threads), "bhn" if layout == "bhsd" else "bnh"
        for name, t in zip(("dq", "dk", "dv"), inputs[:3], strict=True):
            self.set_strides(name, torch.empty(t.shape, device="meta").stride())
        if problem.bias_needs_grad:
            assert problem.bias_shape is not None
            dbias = torch.empty(problem.bias_shape, device="meta")
            self.block.update(**named("dbias", "bhi", broadcast_strides(dbias)))
        visible = problem.visibility()
        first, end = visible.key_range(0, 1)
        self.has_unreached = self.is_ragged or first == end  # if the first query sees a key, all do
        if self.has_few_rows and not recomputes(problem):  # keys that no query sees are left out
            self.has_unreached |= visible.key_range(0, problem.seqlen_q) != (0, problem.seqlen_k)
        self.dlse_bytes = math.prod(lse_shape(problem, inputs)) * problem.compute_dtype.itemsize
        self.strides: tuple[Any, ...] = ()  # of out and dout in the last call
        self.cut(problem.seqlen_q, problem.seqlen_k)

    def cut(self, seqlen_q: int, seqlen_k: int) -> None:
        """Work items for sequences of at most these lengths. Blocks of keys depend on the problem alone."""
        problem, facts = self.problem, self.kernel.facts
        wanted = min(-(-WANTED_ITEMS // max(1, self.owners)), round(seqlen_k / KEYS_OF_ITEM))
        split = seqlen_k / max(1, wanted, -(-seqlen_k // facts["key_block"]))
        split = max(1, math.ceil(split / BLOCK_K)) * BLOCK_K
        splits, tiles = -(-seqlen_k // split), -(-seqlen_q // facts["block_q"])
        item_heads = self.item_heads(self.owners * splits, self.wanted_threads) if self.has_few_rows else 1
        self.items, self.lengths = self.owners * splits // item_heads, (seqlen_q, seqlen_k)
        self.threads = max(1, min(self.wanted_threads, self.items))
        self.thread_bytes = facts["scratch_bytes"]
        self.block.update(
            items=self.items,
            splits=splits,
            split_keys=split,
            tiles=tiles,
            item_heads=item_heads,
            scratch_bytes=self.thread_bytes,
        )
        turns = problem.batch * problem.num_heads * tiles
        self.turn_offset = self.threads * self.thread_bytes
        self.dlse_offset = self.turn_offset + 8 * turns
        self.sum_offset = -(-(self.dlse_offset + self.dlse_bytes) // 64) * 64
        self.scratch_bytes = self.sum_offset + (turns * facts["tile_bytes"] if splits > 1 else 0)

    def __call__(
        self, inputs: Inputs, out: Tensor | None, lse: Tensor | None, dout: Tensor, dlse: Tensor | None
    ) -> Gradients:
        problem, dtype = self.problem, self.problem.compute_dtype
        if problem.is_packed:
            lengths = longest(inputs.cu_seqlens_q), longest(inputs.cu_seqlens_k)
            if lengths != self.lengths:
                self.cut(*lengths)
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=CPU) for t in inputs[:3])
        dlse = None if dlse is None else dlse.to(dtype).contiguous()
        dbias = delta = None
        if problem.bias_needs_grad:
            assert inputs.bias is not None
            dbias = torch.zeros(inputs.bias.shape, dtype=self.dbias_dtype, device=CPU)
        if problem.has_sinks and lse is not None:  # a query that sees no key has delta = -dlse
            delta = torch.zeros(lse.shape, dtype=dtype, device=CPU) if dlse is None else -dlse
        kept = self.bind(inputs) if self.has_options else None
        self.differentiate(*inputs[:3], out, lse, dout, dq, dk, dv, dlse, dbias, delta)
        del kept
        if dbias is not None and inputs.bias is not None:
            dbias = dbias.to(inputs.bias.dtype)
        return Gradients(dq, dk, dv, dbias, _sink_gradient(inputs, lse, delta))

    def differentiate(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor | None,
        lse: Tensor | None,
        dout: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dlse: Tensor | None = None,
        dbias: Tensor | None = None,
        delta: Tensor | None = None,
    ) -> None:
        """Run the kernel on tensors of the plan's layout; query, key and value with its strides.

        out and lse may be None where the kernel takes the softmax again.
        """
        if self.has_unreached:  # stays 0 where no item reaches
            for gradient in (dq, dk, dv):
                gradient.zero_()
        if not self.items:
            return
        dout = rows_dense(dout)
        out, lse = (dout, dout) if out is None or lse is None else (rows_dense(out), lse.contiguous())
        if self.strides != (strides := (out.stride(), dout.stride())):
            self.strides = strides
            self.set_strides("out", strides[0], self.axes)
            self.set_strides("do", strides[1], self.axes)
        scratch = local.scratch.reserve(self.scratch_bytes)
        zeros = scratch + self.turn_offset
        ctypes.memset(zeros, 0, self.sum_offset - self.turn_offset)
        put_addresses_backward(
            self.block.words, 0, 0, 0, query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
            lse.data_ptr(), scratch, 0, dout.data_ptr(),
            scratch + self.dlse_offset if dlse is None else dlse.data_ptr(),
            dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), 0 if dbias is None else dbias.data_ptr(),
            0 if delta is None else delta.data_ptr(), scratch + self.sum_offset, zeros,
        )  # fmt: skip
        self.run()


def _sharing(problem: AttentionProblem) -> tuple[int, int]:
    """How many sequences, and how many key heads, add to the same gradient of a bias."""
    if not problem.bias_needs_grad or problem.bias_shape is None:
        return 1, 1
    of_batches, of_heads = problem.bias_shape[:2]
    batches, heads = max(1, problem.batch), max(1, problem.num_kv_heads)
    return (batches if of_batches == 1 else 1), (heads if of_heads == 1 else 1)


def _dbias_dtype(problem: AttentionProblem, inputs: Inputs) -> torch.dtype | None:
    """Of the gradient of the bias while it is summed: the compute type where it has more than one term."""
    if inputs.bias is None or not problem.bias_needs_grad:
        return None
    return problem.compute_dtype if 1 in inputs.bias.shape[:3] else inputs.bias.dtype


def _sink_gradient(inputs: Inputs, lse: Tensor | None, delta: Tensor | None) -> Tensor | None:
    """dsink = -sum of p_sink * delta over the head's queries."""
    sinks = inputs.sinks
    if sinks is None or lse is None or delta is None:
        return None
    p_sink = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    summed = -(p_sink * delta).sum(-1)
    return (summed if summed.ndim == 1 else summed.sum(0)).to(sinks.dtype)
