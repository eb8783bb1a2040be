"""Peers that come with PyTorch: standard attention, SDPA pinned to each backend, FlexAttention."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.errors import Refusal
from tilewise.lab.bench.inputs import statistics
from tilewise.lab.bench.inputs.masks import MASKS
from tilewise.lab.bench.inputs.options import LEARNED
from tilewise.lab.bench.peer import (
    Data,
    Peer,
    Prepared,
    as_is,
    dense_tensors,
    from_bhsd,
    prepare_call,
    prepare_statistics,
)
from tilewise.lab.demo.memory import free_bytes


class Standard(Peer):
    """Attention by the formula in PyTorch operations: the scores are stored."""

    name = "standard"

    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        if case.page_size is not None:
            raise Refusal("has no page tables")
        if case.option not in ("", LEARNED):
            raise Refusal("is shown without options, but for a learned bias")
        _refuse_too_large(case, data, 3 if case.direction == "forward" else 4)
        tensors, dout = dense_tensors(data, layout)
        group, scale = case.num_heads // case.num_kv_heads, case.head_dim**-0.5
        hidden = None if case.kind == "varlen" or data.mask is None else ~data.mask
        learned, distances = data.option.leaves, data.option.distances if case.option == LEARNED else None

        def watch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            s = (q @ k.repeat_interleave(group, 1).mT).float() * scale
            s = s if hidden is None else s.masked_fill(hidden, -math.inf)
            p = torch.softmax(s, -1)
            return p.to(q.dtype) @ v.repeat_interleave(group, 1), statistics.formula(case.statistics, s, p)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if group > 1:
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            s = (q * scale) @ k.mT
            for table in learned:
                s = s + table[:, distances]
            unseen = hidden
            if case.kind == "varlen" and case.causal:
                unseen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
            if unseen is not None:
                s = s.masked_fill(unseen, -math.inf)
            return torch.softmax(s, -1) @ v

        if case.statistics:
            return prepare_statistics(case, tensors, watch, from_bhsd, dict)
        if case.kind == "varlen":
            return prepare_call(case, tensors, dout, _by_document(case.lengths, attend), as_is)
        return prepare_call(case, tensors, dout, attend, from_bhsd, others=learned)


class Sdpa(Peer):
    """`torch.nn.functional.scaled_dot_product_attention`, pinned to one backend."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name, self.backend = name, backend

    def unavailable(self, device: str) -> str | None:
        if device == "cpu" and self.backend not in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            return "PyTorch has no such CPU kernel"
        return None

    def layouts(self, case: Case) -> tuple[str, ...]:
        is_indifferent = case.kind == "varlen" or case.has_one_layout or self.backend is SDPBackend.MATH
        return ("bshd",) if is_indifferent else ("bshd", "bhsd")

    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        if case.page_size is not None:
            raise Refusal("has no page tables")
        if self.backend is SDPBackend.MATH:
            _refuse_too_large(case, data, 4 if case.direction == "forward" else 6)
        tensors, dout = dense_tensors(data, layout)
        gqa: dict[str, Any] = {"enable_gqa": True} if case.num_heads != case.num_kv_heads else {}
        canonical = as_is if case.kind == "varlen" else from_bhsd
        if case.kind != "varlen":
            attend = self._attend({**gqa, **self._mask(case, data)})
        elif data.device == "cpu":  # PyTorch has no packed kernel there
            attend = _by_document(case.lengths, self._attend({**gqa, "is_causal": case.causal}))
        else:
            attend = self._attend({**gqa, "is_causal": case.causal})
            if case.direction == "forward":  # wrapping the tensors is not attention
                tensors, canonical = [_jagged(t, case, data) for t in tensors], _from_jagged
            else:
                attend = _through_jagged(attend, case, data)
        leaves = data.option.leaves
        return prepare_call(case, tensors, dout, attend, canonical, lambda: sdpa_kernel(self.backend), leaves)

    def _attend(self, options: dict[str, Any]) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            try:
                return F.scaled_dot_product_attention(q, k, v, **options)
            except RuntimeError as error:
                if "No available kernel" in str(error) or "No viable backend" in str(error):
                    raise Refusal(_why_not(q, k, v, options)) from error
                raise

        return attend

    def _mask(self, case: Case, data: Data) -> dict[str, Any]:
        """SDPA's own causal mask is aligned top-left, so it serves only as many queries as keys."""
        if case.option:
            return data.option.sdpa()
        if data.mask is None:
            return {}
        if case.mask:
            return {"attn_mask": data.mask}
        if case.window is None and case.seqlen_q == case.seqlen_k:
            return {"is_causal": True}
        if case.window is None and self.backend is SDPBackend.FLASH_ATTENTION and data.device == "cuda":
            from torch.nn.attention.bias import causal_lower_right

            return {"attn_mask": causal_lower_right(case.seqlen_q, case.seqlen_k)}
        return {"attn_mask": data.mask}


def _why_not(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> str:
    """What PyTorch warns of when the pinned backend does not serve a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(RuntimeError):
            F.scaled_dot_product_attention(q, k, v, **options)
    said = [str(warning.message).split(" (Triggered internally")[0].strip() for warning in caught]
    reasons = [text for text in said if not text.endswith(("because:", "runtime disabled."))]
    return f"PyTorch: {reasons[0]}" if reasons else "PyTorch has no kernel of this backend for the case"


def _jagged(t: Tensor, case: Case, data: Data) -> Tensor:
    """Packed (total, heads, dim) as a nested (documents, heads, length, dim)."""
    nested = torch.nested.nested_tensor_from_jagged(
        t, data.offsets, min_seqlen=min(case.lengths), max_seqlen=max(case.lengths)
    )
    return nested.transpose(1, 2)


def _from_jagged(t: Tensor) -> Tensor:
    return t.transpose(1, 2).values()


def _through_jagged(attend: Callable[..., Tensor], case: Case, data: Data) -> Callable[..., Tensor]:
    return lambda *packed: _from_jagged(attend(*(_jagged(t, case, data) for t in packed)))


class Flex(Peer):
    """FlexAttention, compiled for the case's exact shapes, with a block mask."""

    name = "flex"

    def unavailable(self, device: str) -> str | None:
        if device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
            return "FlexAttention needs a C++ compiler on the CPU"
        if sys.platform == "win32":
            return "FlexAttention is not compiled on Windows"
        return None

    def layouts(self, case: Case) -> tuple[str, ...]:
        return ("bhsd",)

    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        import torch._functorch.config
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        if case.page_size is not None:
            raise Refusal("PyTorch's FlexAttention has no page tables")
        if data.device == "cpu" and case.direction != "forward":
            raise Refusal("FlexAttention has no backward on the CPU")
        if case.statistics and (case.statistics != "max_logit" or data.device == "cpu"):
            raise Refusal("FlexAttention gives largest scores alone, and on GPUs only")
        tensors, dout = dense_tensors(data, layout)
        if case.kind == "varlen":
            tensors = [t.transpose(0, 1)[None] for t in tensors]
            dout = None if dout is None else dout.transpose(0, 1)[None]
        mask_mod, batch = mask_mod_of(case, data), case.batch if case.mask else None
        total = tensors[0].shape[2]
        block_mask = None
        if mask_mod is not None:
            block_mask = create_block_mask(
                mask_mod, batch, None, total, tensors[1].shape[2], device=data.device,
                _compile=total >= 32768,  # uncompiled, it stores several integers a (query, key) pair
            )  # fmt: skip
        torch._dynamo.reset()  # a cache of other shapes would count against the recompilation limit
        torch._functorch.config.donated_buffer = False  # donated buffers forbid a second backward
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        gqa, score_mod = case.num_heads != case.num_kv_heads, data.option.score_mod()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compiled(q, k, v, score_mod, block_mask, enable_gqa=gqa)

        def watch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            options: dict[str, Any] = {"enable_gqa": gqa, "return_aux": AuxRequest(max_scores=True)}
            out, found = compiled(q, k, v, score_mod, block_mask, **options)
            return out, {"max_logit": found.max_scores.amax((0, 2))}

        if case.statistics:
            return prepare_statistics(case, tensors, watch, from_bhsd, dict)
        canonical = (lambda t: t[0].transpose(0, 1)) if case.kind == "varlen" else from_bhsd
        return prepare_call(case, tensors, dout, attend, canonical, others=data.option.leaves)


def mask_mod_of(case: Case, data: Data) -> Callable[..., Tensor] | None:
    """What of a case's mask, window, causality and documents a mask function says; None if all is visible."""
    offset = case.seqlen_k - case.seqlen_q
    if case.mask:
        return MASKS[case.mask](case, data.device).mask_mod
    if case.kind == "varlen":
        lengths = torch.tensor(case.lengths, device=data.device)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=data.device), lengths)

        def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            same = document[i] == document[j]
            return same & (i >= j) if case.causal else same

        return same_document
    if case.window is not None:
        left, right = case.window
        return lambda b, h, i, j: (j >= i + offset - left) & (j <= i + offset + right)
    if case.causal and case.seqlen_q > 1:
        return lambda b, h, i, j: j <= i + offset
    return None


def _by_document(
    lengths: Sequence[int], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[..., Tensor]:
    """Packed attention as a loop over documents, for what knows only dense tensors."""

    def attend_packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(t.split(lengths) for t in (query, key, value)))
        outs = [attend(*(t.transpose(0, 1)[None] for t in part))[0].transpose(0, 1) for part in parts]
        return torch.cat(outs)

    return attend_packed


def _refuse_too_large(case: Case, data: Data, copies: int) -> None:
    """Refuse on the CPU what would not fit: there, the system kills a process that asks for too much.

    `copies` of the scores, in the dtype that holds them, exist at once. A GPU's allocator refuses itself.
    """
    if data.device != "cpu":
        return
    at_once = 1 if case.kind == "varlen" else case.batch
    pairs = max(q * k for q, k in case.sequences) * case.num_heads * at_once
    needed, free = pairs * copies * case.torch_dtype.itemsize, free_bytes(torch.device("cpu"))
    if needed > 0.8 * free:
        raise Refusal(f"would store {needed / 2**30:.0f} GiB of scores, {free / 2**30:.0f} GiB are free")
