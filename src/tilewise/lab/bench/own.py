"""This library as a peer, through its public functions."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

import tilewise
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.errors import Refusal
from tilewise.lab.bench.inputs import Data
from tilewise.lab.bench.peer import Peer, Prepared, as_is, dense_tensors, from_bhsd, prepare_call


class Tilewise(Peer):
    """This library, through its public functions; `backend` names one backend, None lets it choose."""

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend
        self.name = "tilewise" if backend is None else f"tilewise:{backend}"

    def layouts(self, case: Case) -> tuple[str, ...]:
        has_two = case.kind in ("dense", "memory") and not case.has_one_layout
        return ("bshd", "bhsd") if has_two else ("bshd",)

    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        if case.kind == "decode":
            return self._prepare_decode(case, data)
        options: dict[str, Any] = {"window": case.window, "backend": self.backend}
        options["causal"] = case.causal and case.window is None
        tensors, dout = dense_tensors(data, layout)
        if case.kind == "varlen":
            lengths = (data.offsets, data.offsets, max(case.lengths), max(case.lengths))

            def attend_varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return _out(tilewise.attention_varlen(q, k, v, *lengths, **options))

            return prepare_call(case, tensors, dout, attend_varlen, as_is)
        if layout == "bshd":
            tensors = [t.transpose(1, 2) for t in tensors]
            dout = None if dout is None else dout.transpose(1, 2)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _out(tilewise.attention(q, k, v, layout=layout, **options))

        canonical = as_is if layout == "bshd" else from_bhsd
        prepared = prepare_call(case, tensors, dout, attend, canonical)
        if case.kind == "memory":
            return prepared
        explanation = tilewise.explain(*tensors, layout=layout, **options)
        is_forward = case.direction == "forward"
        backend = explanation.backend if is_forward else explanation.backward_backend
        return dataclasses.replace(prepared, detail=f"backend {backend}")

    def _prepare_decode(self, case: Case, data: Data) -> Prepared:
        if case.page_size is not None:
            return self._prepare_paged(case, data)
        cache = tilewise.KVCache(
            case.batch, case.seqlen_k, case.num_kv_heads, case.head_dim, head_dim_v=case.head_dim_v,
            dtype=case.torch_dtype, device=data.device,
        )  # fmt: skip
        cache.append(data.key, data.value)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _out(tilewise.attention_with_cache(q, cache, causal=True, backend=self.backend))

        return prepare_call(case, (data.query, data.key, data.value), None, attend, as_is)

    def _prepare_paged(self, case: Case, data: Data) -> Prepared:
        """Through the flash-attn face, whose page table is the one interface that every version keeps."""
        if self.backend is not None:
            raise Refusal("the flash-attn interface to page tables takes no backend")
        try:
            from tilewise.faces.flash_attn import flash_attn_with_kvcache
        except ImportError as error:
            raise Refusal(f"has no page tables yet: {error}") from error
        pages = data.pages

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options: dict[str, Any] = {"cache_seqlens": pages.lengths, "block_table": pages.table}
            return _out(flash_attn_with_kvcache(q, k, v, causal=True, **options))

        return prepare_call(case, (data.query, pages.key, pages.value), None, attend, as_is)


def _out(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(result, Tensor)  # lse was not asked for
    return result
