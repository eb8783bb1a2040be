"""Plans of a forward: its work items, its scratch memory, and what a call tells the kernel."""

from __future__ import annotations

from tilewise.core.problem import AttentionProblem
from tilewise.core.signature import Signature
from tilewise.cpu.host.arguments import BLOCK_K
from tilewise.cpu.host.call_plan import Division, OutputPlan
from tilewise.cpu.host.compile import current_target, load
from tilewise.cpu.host.configs import decode_config, forward_config, heads_of_part

DECODE_KEYS, DECODE_ITEMS = 512, 64  # a split has at least so many keys; so many work items are enough


class ForwardPlan(OutputPlan):
    """A forward in tiles of queries."""

    def __init__(self, problem: AttentionProblem, signature: Signature, may_cut: bool = True) -> None:
        super().__init__(problem, signature)
        asked = signature.request.statistics
        statistics = tuple("row_max" if name == "max_logit" else name for name in asked)
        config = forward_config(problem, self.given, may_cut, statistics)
        self.kernel, self.statistics = load("forward", config), config.statistics
        if not problem.is_packed:
            self.division = self.divide(problem.seqlen_q)
            self.template.update(**self.division.words)

    def divide(self, seqlen_q: int) -> Division:
        facts, heads = self.kernel.facts, self.problem.batch * self.problem.num_heads
        tiles_all = -(-seqlen_q // facts["block_q"])
        tiles = _tiles_per_item(tiles_all, heads, self.wanted_threads, self.problem.causal, facts)
        chunks = -(-tiles_all // tiles)
        thread_bytes = facts["scratch_bytes"] + tiles * facts["tile_bytes"]
        return self.divided(
            heads * chunks, thread_bytes, {"chunks": chunks, "tiles": tiles}, 0, 0, self.lse_bytes
        )


class DecodePlan(OutputPlan):
    """Few queries, split over keys. Which blocks of keys functions hide, the kernel finds as it goes."""

    has_tile_map = False

    def __init__(self, problem: AttentionProblem, signature: Signature, may_cut: bool = True) -> None:
        super().__init__(problem, signature)
        config, part_heads = decode_config(problem, self.given, may_cut), heads_of_part(problem)
        parts = max(1, -(-problem.group_size // part_heads))
        self.kernel = load("decode", config)
        heads = problem.batch * problem.num_kv_heads
        splits = max(1, min(DECODE_ITEMS // max(1, heads), problem.seqlen_k // DECODE_KEYS))
        split_keys = -(-problem.seqlen_k // splits // BLOCK_K) * BLOCK_K
        splits = max(1, -(-problem.seqlen_k // max(1, split_keys)))
        item_heads = self.item_heads(heads * splits, parts)
        partial_bytes = heads * parts * splits * config.rows * self.kernel.facts["partial_bytes"]
        tickets = 8 * heads  # splits that are done of each group of heads: counted where there is one, too
        self.ticket_bytes = tickets if splits > 1 else 0  # that have to be 0 before
        words = {
            "splits": splits, "split_keys": split_keys, "item_heads": item_heads * parts, "parts": parts,
            "part_heads": part_heads,
        }  # fmt: skip
        items, thread_bytes = heads * splits // item_heads, self.kernel.facts["scratch_bytes"]
        behind = partial_bytes, tickets, self.lse_bytes
        self.division = self.divided(items, thread_bytes, words, *behind)
        self.template.update(**self.division.words)


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
        waiting = max(0.0, 1 - (2 if is_even else 1) / threads)  # many threads never run at one speed
        return (heads * tiles_all + items * converting) / threads + largest * waiting

    most_chunks = max(fewest_chunks, min(tiles_all, 4 * threads))
    return max(1, -(-tiles_all // min(range(fewest_chunks, most_chunks + 1), key=time)))
