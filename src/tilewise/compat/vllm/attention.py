"""vLLM's classes for an attention backend, served by tilewise: what `tilewise.compat.vllm` registers.

vLLM keeps keys and values of a layer in one tensor (blocks, KV heads, block size, 2 * head_dim), of any
strides: keys are the first head_dim columns. They are read where they lie, through the block table. vLLM
puts requests with one new token first. Those are one dense call, for split-KV kernels, and the others, of any
number of new tokens each, one packed call.

8-bit caches have a scale for all keys of a layer and one for all values. A scale of the keys is one of the
scores, and that of the values one of the result: both are exact, and the cache's own scales are ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from tilewise.compat import groups
from tilewise.core.kept import unit_scales
from tilewise.core.problem import Inputs, Options
from tilewise.core.signature import Request
from tilewise.dispatch import plans
from tilewise.faces.fp8 import FP8, to_fp8

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
EIGHT_BIT = ("fp8", "fp8_e4m3")  # two names for float8_e4m3fn


class TilewiseBackend(AttentionBackend):
    """What this backend can do, and its classes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *EIGHT_BIT]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TilewiseImpl]:
        return TilewiseImpl

    @staticmethod
    def get_builder_cls() -> type[TilewiseMetadataBuilder]:
        return TilewiseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= 576

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) >= (8, 0)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *others: Any
    ) -> str | None:
        capability = others[-1]
        if kv_cache_dtype in EIGHT_BIT and (capability.major, capability.minor) < (8, 9):
            return f"kv_cache_dtype={kv_cache_dtype} wants compute capability 8.9 or newer"
        return None


@dataclass
class Part:
    """Requests that one call serves, and where their tokens are."""

    first: int  # token
    tokens: int
    starts: Tensor | None  # (requests + 1,) each one's first token, from `first` on; None: one token each
    lengths: Tensor  # (requests,) keys, the new ones among them
    pages: Tensor  # (requests, blocks)
    longest: int  # new tokens of a request, at most


@dataclass
class TilewiseMetadata(AttentionMetadata):
    """Of one step; shared by all layers of a group."""

    num_actual_tokens: int
    slot_mapping: Tensor  # (tokens,) block * block size + row of each new token; -1 is written nowhere
    causal: bool
    query_start_loc: Tensor
    max_query_len: int
    parts: list[Part]  # that do not overlap


class TilewiseMetadataBuilder(AttentionMetadataBuilder[TilewiseMetadata]):
    """Cuts a step into its parts, on the host."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    supports_update_block_table = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        self.is_8_bit = kv_cache_spec.dtype.itemsize == 1

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TilewiseMetadata:
        common = common_attn_metadata
        if not isinstance(common.causal, bool):
            raise NotImplementedError(f"causal={common.causal} must be one flag for all requests")
        if common.rswa_prefix_lens is not None or common.mm_req_doc_ranges:
            raise NotImplementedError("windows with a prefix that all see must be served by another backend")
        num_decodes, num_others, decode_tokens, _ = split_decodes_and_prefills(common)
        if decode_tokens != num_decodes:  # some have no new token
            num_decodes, num_others, decode_tokens = 0, common.num_reqs, 0
        parts = []
        if num_decodes:
            lengths, pages = common.seq_lens[:num_decodes], common.block_table_tensor[:num_decodes]
            parts.append(Part(0, num_decodes, None, lengths, pages, 1))
        if num_others:
            parts += self._others(common, num_decodes)
        return TilewiseMetadata(
            common.num_actual_tokens, common.slot_mapping, common.causal, common.query_start_loc,
            common.max_query_len, parts,
        )  # fmt: skip

    def _others(self, common: CommonAttentionMetadata, begin: int) -> Iterator[Part]:
        """Requests from `begin` on: one call; of 8-bit caches, which a GPU copies to 16 bits, `groups`."""
        starts, lengths = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound
        spans: Iterable[tuple[int, int, int | None]] = [(begin, common.num_reqs, None)]
        if self.is_8_bit and lengths is not None:
            spans = groups(lengths[: common.num_reqs].tolist(), begin)
        for first, last, longest in spans:
            pages, token = common.block_table_tensor[first:last], starts[first]
            if longest is not None:
                pages = pages[:, : -(-longest // self.kv_cache_spec.block_size)]
            end = common.num_actual_tokens if last == common.num_reqs else starts[last]
            begins = common.query_start_loc[first : last + 1]
            yield Part(
                token, end - token, begins - token if token else begins, common.seq_lens[first:last], pages,
                common.max_query_len,
            )  # fmt: skip


class TilewiseImpl(AttentionImpl[TilewiseMetadata]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if kv_cache_dtype not in TilewiseBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"kv_cache_dtype={kv_cache_dtype!r} must be one of "
                f"{', '.join(TilewiseBackend.supported_kv_cache_dtypes)} for tilewise"
            )
        if self.dcp_world_size > 1 or self.pcp_world_size > 1:
            raise NotImplementedError("tilewise has no context parallelism in vLLM: set it to 1")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window, self.kv_cache_dtype, self.attn_type = sliding_window, kv_cache_dtype, attn_type
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks, self.is_8_bit = sinks, kv_cache_dtype in EIGHT_BIT

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TilewiseMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's new tokens, into output.

        Args:
            layer: read for its scales, of 8-bit caches.
            query: (tokens, num_heads, head_dim), with any number of rows behind the step's.
            key, value: (tokens, num_kv_heads, head_dim): read by encoders, whose keys are in no cache.
            kv_cache: (blocks, num_kv_heads, block size, 2 * head_dim), with the new tokens; 8 bits as uint8.
            attn_metadata: None when vLLM measures memory: output is zeroed.
            output: (tokens, num_heads, head_dim).

        Raises:
            NotImplementedError: output_scale or output_block_scale.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale and output_block_scale must be None: out is exact")
        if attn_metadata is None:
            return output.zero_()
        options, extra = self._options(attn_metadata.causal), self._tensors(query.device)
        if self.attn_type in ENCODERS:
            starts, n = attn_metadata.query_start_loc, attn_metadata.num_actual_tokens
            options = options._replace(
                max_seqlen_q=attn_metadata.max_query_len, max_seqlen_k=attn_metadata.max_query_len
            )
            _attend(Inputs(query[:n], key[:n], value[:n], starts, starts, **extra), options, output[:n])
            return output
        factor = 1.0
        if self.is_8_bit:
            kv_cache, factor = kv_cache.view(FP8), layer._v_scale_float
            options = options._replace(scale=self.scale * layer._k_scale_float)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        if self.is_8_bit:
            extra["key_scale"] = extra["value_scale"] = unit_scales(keys)
        for part in attn_metadata.parts:
            rows = slice(part.first, part.first + part.tokens)
            q, out = query[rows], output[rows]
            if part.starts is None:
                q, out = q[:, None], out[:, None]
            else:
                options = options._replace(max_seqlen_q=part.longest)
            inputs = Inputs(q, keys, values, part.starts, None, part.lengths, page_table=part.pages, **extra)
            _attend(inputs, options, out, factor)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values to their slots; those of slot -1 nowhere.

        On a GPU vLLM's kernel does, which a captured graph can replay.
        """
        if self.attn_type in ENCODERS:
            return
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        if kv_cache.device.type == "cpu":
            tokens = (slot_mapping >= 0).nonzero()[:, 0]  # key and value may have more rows than slots
            slots = slot_mapping[tokens]
            block, row = slots // keys.shape[1], slots % keys.shape[1]
            k, v = key[tokens], value[tokens]
            if self.is_8_bit:
                k, v = (
                    to_fp8(t.float() / scale).view(keys.dtype)
                    for t, scale in ((k, layer._k_scale_float), (v, layer._v_scale_float))
                )
            keys[block, row], values[block, row] = k, v
            return
        _custom_ops.reshape_and_cache_flash(
            key, value, keys, values, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )

    def _options(self, causal: bool) -> Options:
        width = None if self.sliding_window is None else self.sliding_window - 1
        return Options(causal, width, None if causal else width, self.logits_soft_cap, scale=self.scale)

    def _tensors(self, device: torch.device) -> dict[str, Tensor | None]:
        """Slopes, on the device since the first call, and sinks, which are weights."""
        if self.alibi_slopes is not None and self.alibi_slopes.device != device:
            self.alibi_slopes = self.alibi_slopes.to(device)
        return {"alibi_slopes": self.alibi_slopes, "sinks": self.sinks}


def _attend(inputs: Inputs, options: Options, out: Tensor, factor: float = 1.0) -> None:
    """Attention times a factor, into out. vLLM has checked its table and lengths: nothing waits for them."""
    results = plans.attend(inputs, options, None, Request(lse=False), are_values_known=True)
    assert results.out is not None
    if factor == 1.0:
        out.copy_(results.out)
    else:
        torch.mul(results.out, factor, out=out)
