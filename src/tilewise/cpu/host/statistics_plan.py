"""The plan of a pass over the scores, when lse is known: its work items and where it writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.core.plan import Results
from tilewise.core.problem import AttentionProblem, Inputs
from tilewise.core.signature import Signature
from tilewise.core.statistics import GROUP, Measured, new_measured
from tilewise.cpu.host.arguments import UNBOUNDED
from tilewise.cpu.host.call_plan import CallPlan, Division, axes, longest, put_addresses
from tilewise.cpu.host.compile import current_target, load
from tilewise.cpu.host.configs import statistics_config

MOST_TILES = 16  # of queries, that share one converted block of keys
ITEMS_PER_THREAD = 4  # at least, of heads and parts of heads
IN_PLACE = ("row_max", "entropy", "expected_distance", "top_weights", "top_keys")  # each row has one writer


class StatisticsPlan(CallPlan):
    """All but single rows of weights: `Measured` of a call whose forward gave lse."""

    def __init__(self, problem: AttentionProblem, signature: Signature) -> None:
        super().__init__(problem, signature)
        self.aux = aux = signature.aux
        wanted = {
            "row_max": aux.needs_row_max,
            "entropy": aux.entropy,
            "expected_distance": aux.expected_distance,
            "column_sum": bool(aux.column_sum),
            "block_sum": aux.block_sum > 0,
            "top_k": aux.top_k > 0,
        }
        names = tuple(name for name, is_wanted in wanted.items() if is_wanted)
        self.kernel = load("statistics", statistics_config(problem, self.given, names, aux.top_k))
        last_rows = UNBOUNDED if aux.last_rows is None else min(aux.last_rows, UNBOUNDED)
        is_of_last_rows = aux.first_visited(UNBOUNDED) > 0
        self.template.update(
            last_rows=last_rows,
            visited_rows=last_rows if is_of_last_rows else UNBOUNDED,
            block_size=aux.block_sum,
        )

    def run(self, inputs: Inputs, results: Results | None = None, *_: Tensor | None) -> Measured:
        assert results is not None and results.lse is not None
        found = new_measured(self.aux, self.problem, inputs)
        q, k, v = self.rows_of(inputs)
        seqlen_q = longest(inputs.cu_seqlens_q) if self.problem.is_packed else self.problem.seqlen_q
        division = self.divide(seqlen_q)
        if not division.items or not self.problem.seqlen_k:
            return found
        residual = torch.zeros_like(results.lse) if results.residual is None else results.residual
        columns = self.new_columns(inputs, division.words["splits"])
        blocks = self.new_blocks(found.block_sum, division.words)
        block, scratch = self.take(division)
        put_addresses(
            block.words, 0, 0, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), 0,
            results.lse.data_ptr(), residual.data_ptr(), scratch, 0, 0,
        )  # fmt: skip
        block.update(**{name: _address(getattr(found, name)) for name in IN_PLACE})
        if columns is not None:
            strides = columns.stride() if columns.ndim == 4 else (columns.stride(0), 0, *columns.stride()[1:])
            block.update(column_sum=columns.data_ptr(), **axes("column", "pbh", strides))
        if blocks is not None:
            parts = {"block_parts": len(blocks), **axes("block", "pbhi", blocks.stride())}
            block.update(block_sum=blocks.data_ptr(), **parts)
        self.launch(block, inputs, division)
        if columns is not None:
            found = found._replace(column_sum=self.columns_of(columns))
        return found if blocks is None else found._replace(block_sum=blocks.sum(0))

    def divide(self, seqlen_q: int) -> Division:
        """Items are heads, or parts of them: every so many chunks, as late queries may see more keys."""
        facts, threads = self.kernel.facts, self.wanted_threads
        heads = self.problem.batch * self.problem.num_heads
        tiles_all = -(-seqlen_q // facts["block_q"])
        cache = current_target().l2_bytes * 5 // 8
        tiles = max(1, min(MOST_TILES, cache // facts["tile_bytes"], -(-tiles_all // threads)))
        chunks = -(-tiles_all // tiles)
        parts = min(chunks, -(-ITEMS_PER_THREAD * threads // max(1, heads)) if threads > 1 else 1)
        thread_bytes = facts["scratch_bytes"] + tiles * facts["tile_bytes"]
        return self.divided(heads * parts, thread_bytes, {"splits": parts, "chunks": chunks, "tiles": tiles})

    def new_columns(self, inputs: Inputs, parts: int) -> Tensor | None:
        """Zeros for the column sums of each part of a head: (parts, batch, heads, keys)."""
        if not self.aux.column_sum:
            return None
        problem, heads = self.problem, self.problem.num_heads
        shape = (problem.batch, heads, problem.seqlen_k)
        if problem.has_packed_keys:
            shape = (heads, inputs.key.shape[0])  # type: ignore[assignment]
        return inputs.query.new_zeros((parts, *shape), dtype=problem.compute_dtype)

    def columns_of(self, columns: Tensor) -> Tensor:
        """The sum of all parts, and of the query heads that share a key head if that is wanted."""
        total: Any = columns.sum(0)
        if self.aux.column_sum == GROUP:
            total = total.unflatten(-2, (self.problem.num_kv_heads, self.problem.group_size)).sum(-2)
        return total

    def new_blocks(self, found: Tensor | None, words: dict[str, int]) -> Tensor | None:
        """Zeros for block sums, once for each of the chunks of queries that may touch the same block."""
        if found is None:
            return None
        touching = 1
        if words["splits"] > 1:  # else one thread has all chunks of a head
            rows = words["tiles"] * self.kernel.facts["block_q"]
            touching = min(words["chunks"], (self.aux.block_sum - 2) // rows + 2)
        return found.new_zeros((max(1, touching), *found.shape))


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()
