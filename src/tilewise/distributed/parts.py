"""The blocks of a step as calls of one-device attention, dense or packed, and their results put together.

Results are put together in few passes over memory, by sums in float32 and one rounding. They wait until there
are six, or more than four's memory, or nothing comes after them. Where the first has all rows and the right
dtype, the others are added to it in place, in their rows only: what a single part gives is never copied.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.core.dropout import SQUARE, with_origin
from tilewise.core.functions.captured import with_shift
from tilewise.core.functions.expression import shifted
from tilewise.core.kept import kept_on_device
from tilewise.core.merge import merge_into
from tilewise.core.plan import Results
from tilewise.core.problem import Gradients, Inputs, Options
from tilewise.core.signature import Request, compute_dtype
from tilewise.dispatch import plans
from tilewise.distributed.ranks import to_device
from tilewise.distributed.schedule import Block, Range, Step
from tilewise.gpu.launch.launch_plan import HAS_TRITON

NEG_INF = float("-inf")
MOST = 6  # that wait: as many as one launch takes
MOST_WHOLE = 4  # or as many rows of them as so many whole ones have


class Origin(NamedTuple):
    """How a rank's heads and documents are numbered in the whole call."""

    first_head: int
    num_heads: int  # of all ranks
    starts: tuple[int, ...]  # of the documents, as `Layout` has them

    def places(self, block: Block) -> tuple[int, int, int]:
        """The document of a block, and the places of its first query and first key in it."""
        document = bisect.bisect_right(self.starts, block.row, hi=len(self.starts) - 1) - 1
        start = self.starts[document]
        return document, block.row - start, block.column - start


class Shard(NamedTuple):
    """What all parts of a call have of a rank.

    Rows of a mask or bias are the rank's own tokens, columns all tokens.
    """

    inputs: Inputs  # (batch, tokens of the rank, heads, dim); a part's keys and values are given beside it
    options: Options  # its window is the schedule's
    backend: str | None
    origin: Origin  # what numbers functions and dropout count heads, queries and keys by


class Packing(NamedTuple):
    """Several blocks in one packed call. Rows between them are sequences without keys, or without queries."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest_q: int
    longest_k: int


@dataclass(frozen=True)
class Part:
    """One call: `block` says which rows and which window; with a packing it is the hull of many blocks."""

    block: Block
    packing: Packing | None = None


@kept_on_device(1024)
def parts_of(step: Step, packs: bool, rows: int, device: Any) -> tuple[Part, ...]:
    """The calls of a step. `packs`: blocks that have the same window share one, as far as rows ascend.

    rows: of the rank. What most rows get from one block alone comes first, and as one call of all rows: the
    others see no key in it, and what they get elsewhere is added in place.
    """
    if not packs:
        return tuple(Part(block) for block in step.blocks)
    calls: dict[tuple[Any, ...], list[list[Block]]] = {}
    for block in sorted(step.blocks):
        waves = calls.setdefault((block.window, block.is_alone), [])
        for wave in waves:
            if wave[-1].q1 <= block.q0 and wave[-1].k1 <= block.k0:
                wave.append(block)
                break
        else:
            waves.append([block])
    found = sorted(itertools.chain(*calls.values()), key=_rows_alone, reverse=True)
    first = [(0, rows)] if found and 2 * _rows_alone(found[0]) > rows else []
    spans = first + [(wave[0].q0, wave[-1].q1) for wave in found[len(first) :]]
    return tuple(_packed(wave, span, device) for wave, span in zip(found, spans, strict=True))


def _rows_alone(wave: Sequence[Block]) -> int:
    return sum(block.q1 - block.q0 for block in wave if block.is_alone)


def _packed(wave: Sequence[Block], rows: Range, device: Any) -> Part:
    """Blocks whose queries and keys ascend as one call of some rows."""
    first, last = wave[0], wave[-1]
    if len(wave) == 1 and rows == (first.q0, first.q1):
        return Part(first)
    starts = [(rows[0], first.k0)]  # of sequences, in queries and keys
    for block in wave:
        starts += [(block.q0, starts[-1][1]), (block.q0, block.k0), (block.q1, block.k1)]
    starts = list(dict.fromkeys([*starts, (rows[1], last.k1)]))
    lengths = [(c - a, d - b) for (a, b), (c, d) in itertools.pairwise(starts)]
    offsets = torch.tensor([(q - rows[0], k - first.k0) for q, k in starts], dtype=torch.int32, device="cpu")
    cu_q, cu_k = (to_device(t.contiguous(), device) for t in offsets.unbind(1))
    longest_q, longest_k = map(max, zip(*lengths, strict=True))
    hull = first._replace(q0=rows[0], q1=rows[1], k1=last.k1)
    return Part(hull, Packing(cu_q, cu_k, longest_q, longest_k))


def attend(part: Part, shard: Shard, key: Tensor, value: Tensor, is_final: bool) -> tuple[Tensor, Tensor]:
    """out (batch, q1 - q0, heads, head_dim_v) and lse (batch, heads, q1 - q0) of the part's keys alone.

    key, value (batch, keys of the step, KV heads, dim). Unless it `is_final`, out is in float32 where the
    kernel can give it.
    """
    inputs, options = _call(part, shard, key, value)
    request = Request(wide=not is_final)
    out, lse, _ = plans.attend(inputs, options, shard.backend, request, are_values_known=True)
    assert out is not None and lse is not None
    if part.packing is not None:
        return out[None], lse[None]
    distance = _row_distance(part.block, shard.inputs.alibi_slopes, lse)
    return out, lse if distance is None else lse - distance


def differentiate(
    part: Part,
    shard: Shard,
    key: Tensor,
    value: Tensor,
    results: Results,
    dout: Tensor,
    dlse: Tensor | None,
    needs_bias_gradient: bool,
    is_all: bool,
) -> Gradients:
    """The part's share of the gradients: with out and lse of all keys the backward of some keys is exact.

    Unless the share `is_all`, it is in float32 where the kernel can give it.
    """
    block, out, lse = part.block, results.out, results.lse
    assert out is not None and lse is not None
    inputs, options = _call(part, shard, key, value)
    q0, q1 = block.q0, block.q1
    out, dout, lse = _tokens(out, q0, q1), _tokens(dout, q0, q1), _tokens(lse, q0, q1, 2)
    dlse = None if dlse is None else _tokens(dlse, q0, q1, 2)
    if part.packing is not None:
        out, dout, lse, dlse = out[0], dout[0], lse[0], None if dlse is None else dlse[0]
    else:
        distance = _row_distance(block, shard.inputs.alibi_slopes, lse)
        lse = lse if distance is None else lse + distance
    call = (inputs, Results(out, lse), dout, dlse, options, shard.backend, needs_bias_gradient)
    grads = plans.differentiate(*call, is_partial=True, request=Request(wide=not is_all))
    if part.packing is not None:
        grads = Gradients(*(g[None] for g in grads[:3]))
    return grads


def _call(part: Part, shard: Shard, key: Tensor, value: Tensor) -> tuple[Inputs, Options]:
    block, packing = part.block, part.packing
    given, options, _, origin = shard
    q = _tokens(given.query, block.q0, block.q1)
    k, v = (_tokens(t, block.k0, block.k1) for t in (key, value))
    options = _with_window(options, block.left, block.right)
    if packing is not None:
        inputs = Inputs(q[0], k[0], v[0], packing.cu_seqlens_q, packing.cu_seqlens_k)
        return inputs, options._replace(max_seqlen_q=packing.longest_q, max_seqlen_k=packing.longest_k)
    mask, bias = (None if t is None else tile(t, block) for t in (given.mask, given.bias))
    slopes = given.alibi_slopes
    if slopes is not None and not _is_aligned(block):
        columns = _column_distance(block, slopes, torch.promote_types(q.dtype, torch.float32))
        bias, slopes = -columns if bias is None else bias - columns, None
    inputs = Inputs(q, k, v, mask=mask, bias=bias, alibi_slopes=slopes)
    if given.dropout_seed is not None:
        inputs, options = _with_dropout(inputs, options, given.dropout_seed, block, origin)
    if options.functions is None:
        return inputs, options
    document, first_query, first_key = origin.places(block)
    first = document, origin.first_head, first_query, first_key
    floats, integers, places = with_shift(given.captured, first, q.device)
    inputs = inputs._replace(captured_floats=floats, captured_integers=integers, captured_layout=places)
    return inputs, options._replace(functions=shifted(options.functions))


@functools.lru_cache(maxsize=256)
def _with_window(options: Options, left: int | None, right: int | None) -> Options:
    is_causal = right == 0
    return options._replace(causal=is_causal, window_left=left, window_right=None if is_causal else right)


def _with_dropout(
    inputs: Inputs, options: Options, seed: Tensor, block: Block, origin: Origin
) -> tuple[Inputs, Options]:
    """Dropout numbers weights as one device would: by their document, and by their places in it."""
    document, query, key = origin.places(block)
    step = SQUARE if query % SQUARE == key % SQUARE == 0 else 1
    head = document * origin.num_heads + origin.first_head
    seed = with_origin(seed, query, key, head, origin.num_heads)
    return inputs._replace(dropout_seed=seed), options._replace(dropout_step=step)


def _tokens(t: Tensor, start: int, stop: int, dim: int = 1) -> Tensor:
    """Some tokens; of all of them no view need be made."""
    return t if start == 0 and stop == t.shape[dim] else t.narrow(dim, start, stop - start)


def tile(t: Tensor, block: Block) -> Tensor:
    """The block's part of a mask or bias."""
    if t.shape[2] > 1:
        t = t[:, :, block.q0 : block.q1]
    return t[..., block.column : block.column + block.k1 - block.k0] if t.shape[3] > 1 else t


# ALiBi adds -slope * |query - key|. A kernel counts distances from the aligned ends of its queries and keys,
# so where these ends are one token it is right. Any other block's keys are all before, or all behind, its
# queries: the distance is that of the key from the nearest key of the block, a bias of one row, and the rest,
# which is equal for all keys of a query and so only shifts lse.


def _is_aligned(block: Block) -> bool:
    return block.row + block.q1 - block.q0 == block.column + block.k1 - block.k0


def _column_distance(block: Block, slopes: Tensor, dtype: torch.dtype) -> Tensor:
    """slope * distance of each key from the nearest one: (1 or batch, heads, 1, keys).

    In the dtype of scores, as slopes of 16 bits times a distance would be rounded by whole numbers.
    """
    keys = torch.arange(block.k1 - block.k0, device=slopes.device)
    distance = keys.flip(0) if block.column < block.row else keys
    return slopes.to(dtype).view(-1, slopes.shape[-1], 1, 1) * distance


def _row_distance(block: Block, slopes: Tensor | None, lse: Tensor) -> Tensor | None:
    """slope * distance of each query from the nearest key: (1 or batch, heads, queries); None if aligned."""
    if slopes is None or _is_aligned(block):
        return None
    nearest = block.column + block.k1 - block.k0 - 1 if block.column < block.row else block.column
    queries = torch.arange(block.row, block.row + block.q1 - block.q0, device=lse.device)
    return slopes.to(lse.dtype).view(-1, slopes.shape[-1], 1) * (queries - nearest).abs()


class Share(NamedTuple):
    """Rows [start, start + tokens) of a result."""

    start: int
    out: Tensor  # (batch, tokens, heads, dim)
    lse: Tensor | None  # (batch, heads, tokens)

    @property
    def stop(self) -> int:
        return self.start + self.out.shape[1]


class Totals:
    """out and lse over disjoint keys, merged; or, without lse, gradients, added."""

    def __init__(self, like: Tensor, dim: int, has_lse: bool = False) -> None:
        """like: (batch, tokens, heads, any), in the dtype of the results."""
        batch, tokens, heads, _ = like.shape
        self.like, self.shape, self.has_lse = like, (batch, tokens, heads, dim), has_lse
        self.wide = compute_dtype(like.dtype)
        self.waiting: list[Share] = []

    def add(self, start: int, out: Tensor, lse: Tensor | None = None) -> None:
        """Rows from `start` on; the tensors may be written to."""
        rows = sum(part.out.shape[1] for part in self.waiting) + out.shape[1]
        if len(self.waiting) == MOST or (self.waiting and rows > MOST_WHOLE * self.shape[1]):
            self._put_together(self.wide)
        self.waiting.append(Share(start, out, lse))

    def add_at(self, index: Tensor, out: Tensor) -> None:
        """Gradients of rows that do not follow each other: index (tokens,)."""
        self._put_together(self.wide)
        self.waiting[0].out.index_add_(1, index, out.to(self.wide))

    def finish(self, is_wide: bool = False) -> tuple[Tensor, Tensor | None]:
        """(out, lse). Rows that no part has are 0, their lse -inf. `is_wide`: out is not rounded."""
        return self._put_together(self.wide if is_wide else self.like.dtype)

    def _put_together(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        first = self.waiting[0] if self.waiting else None
        is_whole = first is not None and first.out.shape[1] == self.shape[1]
        if first is None or len(self.waiting) > 1 or not is_whole or first.out.dtype != dtype:
            is_served = self.like.is_cuda and self.wide == torch.float32 and HAS_TRITON
            put = self._by_kernel if is_served and self.waiting else self._by_pytorch
            first = Share(0, *put(dtype, is_whole))
            self.waiting = [first]
        return first.out, first.lse

    def _by_kernel(self, dtype: torch.dtype, is_whole: bool) -> tuple[Tensor, Tensor | None]:
        from tilewise.gpu.launch.combine import combine

        if is_whole and self.waiting[0].out.dtype == dtype:
            (_, target, lse), *others = self.waiting
            start, stop = min(p.start for p in others), max(p.stop for p in others)
        else:
            target = self.like.new_empty(self.shape, dtype=dtype)
            lse, (start, stop) = self._new_lse(), (0, self.shape[1])
        combine(target, lse, tuple(self.waiting), start, stop)
        return target, lse

    def _by_pytorch(self, dtype: torch.dtype, is_whole: bool) -> tuple[Tensor, Tensor | None]:
        parts = self.waiting
        if is_whole:
            (_, out, lse), *parts = parts
            out = out.to(self.wide)
        else:
            out, lse = self.like.new_zeros(self.shape, dtype=self.wide), self._new_lse()
        for part in parts:
            rows = slice(part.start, part.stop)
            if lse is None or part.lse is None:
                out[:, rows] += part.out
            else:
                merge_into(out[:, rows], lse[..., rows], part.out, part.lse)
        return out.to(dtype), lse

    def _new_lse(self) -> Tensor | None:
        batch, tokens, heads, _ = self.shape
        return self.like.new_full((batch, heads, tokens), NEG_INF, dtype=self.wide) if self.has_lse else None
