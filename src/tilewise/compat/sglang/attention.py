"""SGLang's class for an attention backend, served by tilewise: what `tilewise.compat.sglang` registers.

SGLang keeps keys and values of a layer as (slots, KV heads, head_dim) and, for each request, the slots of its
tokens. Slots are given out in pages, so every page_size-th names a page: keys are read where they lie.

8-bit caches have a scale for all keys of a layer and one for all values. A scale of the keys is one of the
scores, and that of the values one of the result: both are exact, and the cache's own scales are ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from tilewise.compat import groups
from tilewise.core.kept import unit_scales
from tilewise.core.problem import Inputs, Options
from tilewise.core.signature import Request
from tilewise.dispatch import plans
from tilewise.faces.fp8 import FP8

MODES = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL, ForwardMode.DECODE)


@dataclass
class Call:
    """Requests of a step that one call serves, and where their keys are, for all layers."""

    tokens: slice  # new ones
    lengths: Tensor  # (requests,) int32: keys, the new ones among them
    pages: Tensor  # (requests, pages) int32
    starts: Tensor | None  # (requests + 1,) int32: each one's first new token; None: one token each
    longest: int  # new tokens of a request


class TilewiseAttnBackend(AttentionBackend):  # type: ignore[misc]
    """Decoding, prefill on cached prefixes, and both in one step."""

    def __init__(self, model_runner: Any) -> None:
        """Raises NotImplementedError for pools with windowed layers apart, or with scales of few numbers."""
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size = model_runner.page_size
        self.forward_metadata: list[Call] = []
        self.is_8_bit = self.token_to_kv_pool.dtype == FP8
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            raise NotImplementedError(
                "tilewise reads windowed layers from the pool of all layers: set --disable-hybrid-swa-memory"
            )
        if self.is_8_bit and getattr(self.token_to_kv_pool, "k_scale_buffer", None) is not None:
            raise NotImplementedError("--kv-cache-dtype is mxfp8, must be fp8_e4m3 or that of queries")
        if self.is_8_bit and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
            raise NotImplementedError("--kv-cache-dtype fp8_e4m3 wants compute capability 8.9 or newer")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a step that is not captured: pages up to the longest request."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if mode not in MODES or forward_batch.spec_info is not None:
            raise NotImplementedError(f"tilewise does not serve speculative or diffusion steps ({mode.name})")
        if forward_batch.encoder_lens is not None:
            raise NotImplementedError("tilewise does not serve cross-attention in SGLang")
        lengths = forward_batch.seq_lens_cpu
        longest = int((forward_batch.seq_lens if lengths is None else lengths).max())
        self.forward_metadata = self._calls(forward_batch, longest)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: what a captured step needs is computed inside of the graph."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Refuse what cannot be captured."""
        if not forward_batch.forward_mode.is_decode_or_idle() or forward_batch.spec_info is not None:
            raise NotImplementedError("tilewise captures decoding of one token a request only")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The whole width of the table, as lengths are on the device."""
        self.forward_metadata = self._calls(forward_batch, self.req_to_token_pool.req_to_token.shape[1])

    def _calls(self, batch: Any, longest: int) -> list[Call]:
        """One; of new tokens on 8-bit caches, which a GPU copies to 16 bits, `groups`."""
        table = self.req_to_token_pool.req_to_token[:, : longest : self.page_size]
        pages = (table[batch.req_pool_indices] // self.page_size).to(torch.int32)
        lengths = batch.seq_lens.to(torch.int32)
        if batch.forward_mode.is_decode_or_idle():
            return [Call(slice(None), lengths, pages, None, 1)]
        starts = torch.nn.functional.pad(batch.extend_seq_lens.cumsum(0), (1, 0)).to(torch.int32)
        counts, known = batch.extend_seq_lens_cpu, batch.seq_lens_cpu
        if not self.is_8_bit or counts is None or known is None:
            most = int(batch.extend_seq_lens.max()) if counts is None else max(counts)
            return [Call(slice(None), lengths, pages, starts, most)]
        calls, ends = [], [0, *accumulate(counts)]
        for first, last, longest in groups(known.tolist()):
            tokens, width = slice(ends[first], ends[last]), -(-longest // self.page_size)
            begins, most = starts[first : last + 1] - ends[first], max(counts[first:last])
            calls.append(Call(tokens, lengths[first:last], pages[first:last, :width], begins, most))
        return calls

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> Tensor:
        """Attention of new tokens, any number for each request.

        Args:
            q: (tokens, num_heads * head_dim) or (tokens, num_heads, head_dim).
            k, v: (tokens, num_kv_heads, dim) new keys and values; None if the cache has them.
            layer: SGLang's RadixAttention.
            save_kv_cache: write k and v to the cache first.
            sinks: (num_heads,); any other option raises NotImplementedError.

        Returns:
            (tokens, num_heads * head_dim_v).
        """
        _check(layer, unknown)
        pool, factors = self.token_to_kv_pool, _scales(layer) if self.is_8_bit else (1.0, 1.0)
        if save_kv_cache and k is not None and v is not None:
            divisors = [None if factor == 1.0 else factor for factor in factors] if self.is_8_bit else []
            pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v, *divisors)
        buffers = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        keys, values = (t.view(-1, self.page_size, *t.shape[1:]) for t in buffers)
        if keys.dtype not in (q.dtype, FP8):
            raise NotImplementedError(
                f"--kv-cache-dtype is {keys.dtype}, must be that of queries, {q.dtype}, or fp8_e4m3"
            )
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        scales = unit_scales(keys) if self.is_8_bit else None
        inputs = Inputs(query, keys, values, key_scale=scales, value_scale=scales, sinks=sinks)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        # A request's last token sees its last sliding_window_size keys and itself.
        left = layer.sliding_window_size if causal and layer.sliding_window_size > -1 else None
        options = Options(causal, left, None, layer.logit_cap, scale=layer.scaling * factors[0])
        parts = [_attend(inputs, options, call) for call in self.forward_metadata]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if factors[1] != 1.0:
            out.mul_(factors[1])
        return out.reshape(len(q), layer.tp_q_head_num * layer.v_head_dim)

    forward_decode = forward_extend  # with one new token for each request

    def support_triton(self) -> bool:
        return torch.cuda.is_available()


def _attend(inputs: Inputs, options: Options, call: Call) -> Tensor:
    """(tokens, num_heads, head_dim_v) of one call. SGLang has checked its table: nothing waits for it."""
    query = inputs.query[call.tokens]
    if call.starts is None:
        query = query[:, None]
    else:
        options = options._replace(max_seqlen_q=call.longest)
    inputs = inputs._replace(
        query=query, cu_seqlens_q=call.starts, seqlens_k=call.lengths, page_table=call.pages
    )
    results = plans.attend(inputs, options, None, Request(lse=False), are_values_known=True)
    assert results.out is not None
    return results.out if call.starts is not None else results.out[:, 0]


def _scales(layer: Any) -> tuple[float, float]:
    """What an 8-bit cache's keys and values are to be multiplied by."""
    given = ((layer.k_scale_float, layer.k_scale), (layer.v_scale_float, layer.v_scale))
    key, value = (1.0 if x is y is None else float(y if x is None else x) for x, y in given)
    return key, value


def _check(layer: Any, unknown: dict[str, Any]) -> None:
    """Refuse what a layer may have and this backend has not."""
    given = [name for name, value in unknown.items() if value is not None]
    if given:
        raise NotImplementedError(f"{', '.join(given)}: tilewise takes sinks only, not latent attention")
    if layer.is_cross_attention:
        raise NotImplementedError("tilewise does not serve cross-attention in SGLang")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise NotImplementedError(f"logit_capping_method={layer.logit_capping_method!r} must be 'tanh'")
    if layer.xai_temperature_len > 0:
        raise NotImplementedError(f"xai_temperature_len={layer.xai_temperature_len} must be -1 for tilewise")
