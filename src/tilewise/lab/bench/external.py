"""Peers that are packages of their own; each is measured wherever it can be imported."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.errors import Refusal
from tilewise.lab.bench.inputs import Data
from tilewise.lab.bench.peer import Peer, Prepared, as_is, prepare_call


class External(Peer):
    """A peer in `module`, which takes (batch, seqlen, heads, dim)."""

    module: str
    package: str

    def unavailable(self, device: str) -> str | None:
        if device != "cuda":
            return f"{self.package} needs a GPU"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a broken binary raises whatever its loader raises
            return f"cannot import {self.module}: {type(error).__name__}: {str(error).splitlines()[0]}"
        return None

    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        if case.dtype not in ("bfloat16", "float16"):
            raise Refusal(f"{self.package} serves float16 and bfloat16")
        module = importlib.import_module(self.module)
        keys = (data.pages.key, data.pages.value) if case.page_size is not None else (data.key, data.value)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = call(q, k, v)
            return out[0] if isinstance(out, tuple) else out  # some versions return the lse as well

        call = self.bind(module, case, data)
        return prepare_call(case, (data.query, *keys), data.dout, attend, as_is)

    def bind(self, module: Any, case: Case, data: Data) -> Any:
        """The package's function of (query, key, value) for this case."""
        raise NotImplementedError


def _packed(case: Case, data: Data) -> dict[str, Any]:
    longest = max(case.lengths)
    return {"cu_seqlens_q": data.offsets, "cu_seqlens_k": data.offsets,
            "max_seqlen_q": longest, "max_seqlen_k": longest}  # fmt: skip


class FlashAttention2(External):
    name, module, package = "flash-attn-2", "flash_attn", "flash-attn"
    table_name, page_multiple = "block_table", 256

    def bind(self, module: Any, case: Case, data: Data) -> Any:
        masked: dict[str, Any] = {"causal": case.causal, "window_size": case.window or (-1, -1)}
        if case.kind == "varlen":
            packed = _packed(case, data)
            return lambda q, k, v: module.flash_attn_varlen_func(q, k, v, **packed, **masked)
        if case.kind != "decode":
            return lambda q, k, v: module.flash_attn_func(q, k, v, **masked)
        if case.page_size is None:
            return lambda q, k, v: module.flash_attn_with_kvcache(q, k, v, **masked)
        if case.page_size % self.page_multiple:
            raise Refusal(f"{self.package} needs pages of a multiple of {self.page_multiple} keys")
        masked.update({"cache_seqlens": data.pages.lengths, self.table_name: data.pages.table})
        return lambda q, k, v: module.flash_attn_with_kvcache(q, k, v, **masked)


class FlashAttention3(FlashAttention2):
    name, module, package = "flash-attn-3", "flash_attn_interface", "FlashAttention-3"
    table_name, page_multiple = "page_table", 1


class FlashAttention4(External):
    name, module, package = "flash-attn-4", "flash_attn.cute", "FlashAttention-4"

    def bind(self, module: Any, case: Case, data: Data) -> Any:
        masked: dict[str, Any] = {"causal": case.causal, "window_size": case.window or (None, None)}
        if case.kind == "varlen":
            packed = _packed(case, data)
            return lambda q, k, v: module.flash_attn_varlen_func(q, k, v, **packed, **masked)
        if case.page_size is not None:
            masked.update(seqused_k=data.pages.lengths, page_table=data.pages.table)
            return lambda q, k, v: module.flash_attn_varlen_func(q, k, v, **masked)
        splits = {"num_splits": 0} if case.kind == "decode" else {}  # 0: its own heuristic
        return lambda q, k, v: module.flash_attn_func(q, k, v, **masked, **splits)


class Xformers(External):
    name, module, package = "xformers", "xformers.ops", "xformers"

    def bind(self, module: Any, case: Case, data: Data) -> Any:
        if case.page_size is not None:
            raise Refusal("xformers' paged masks need a cache laid out for them")
        if case.num_heads != case.num_kv_heads:
            raise Refusal("xformers takes grouped heads only as expanded keys")
        bias, is_packed = self._bias(case), case.kind == "varlen"

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not is_packed:
                return module.memory_efficient_attention(q, k, v, attn_bias=bias)
            return module.memory_efficient_attention(q[None], k[None], v[None], attn_bias=bias)[0]

        return attend

    def _bias(self, case: Case) -> Any:
        masks = importlib.import_module("xformers.ops.fmha.attn_bias")
        if case.kind == "varlen":
            kind = masks.BlockDiagonalCausalMask if case.causal else masks.BlockDiagonalMask
            return kind.from_seqlens(case.lengths)
        if case.window is not None:
            if case.window[1] != 0:
                raise Refusal("xformers' window is causal")
            return masks.LowerTriangularFromBottomRightLocalAttentionMask(_window_size=case.window[0] + 1)
        if case.causal and case.seqlen_q > 1:
            return masks.LowerTriangularFromBottomRightMask()
        return None
