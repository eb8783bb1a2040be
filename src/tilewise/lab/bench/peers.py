"""What is measured side by side, by name: this library, packages of their own, PyTorch."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.attention import SDPBackend

import tilewise
from tilewise.core.checks import EIGHT_BIT
from tilewise.dispatch.choice import BACKENDS
from tilewise.lab.bench.cases import Case
from tilewise.lab.bench.errors import BenchError, Refusal
from tilewise.lab.bench.inputs import statistics
from tilewise.lab.bench.inputs.options import FUNCTIONS_ALONE
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
from tilewise.lab.bench.torch_peers import Flex, Sdpa, Standard, mask_mod_of

EIGHT_BIT_LIMIT = 0.08  # of the norm of out: of normal numbers it is off by 0.05
QUANTIZED = "-quantized"


def all_peers() -> dict[str, Peer]:
    """Every peer by name, in the order of the tables."""
    peers: list[Peer] = [
        Tilewise(),
        Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
        Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION),
        Sdpa("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION),
        Sdpa("sdpa-math", SDPBackend.MATH),
        Flex(),
        Standard(),
        FlashAttention2(),
        FlashAttention3(),
        FlashAttention4(),
        Xformers(),
    ]
    return {peer.name: peer for peer in peers}


def find_peers(names: Sequence[str]) -> list[Peer]:
    """The peers of these names; "tilewise:NAME" is tilewise with that backend, "all" is every peer."""
    usual, found = all_peers(), {}
    known = usual | eight_bit_peers() | _compared()
    for name in names:
        backend = name.removeprefix("tilewise:")
        if name == "all":
            found.update(usual)
        elif name in known:
            found[name] = known[name]
        elif name != backend and backend in BACKENDS:
            found[name] = Tilewise(backend)
        else:
            backends = ", ".join(f"tilewise:{b}" for b in BACKENDS)
            raise BenchError(f"peer {name!r} is unknown, must be all, {', '.join(known)} or {backends}")
    return list(found.values())


def eight_bit_peers() -> dict[str, Peer]:
    """By name: they are measured if they are asked for."""
    peers = [EightBit(precision, is_quantized) for precision in EIGHT_BIT for is_quantized in (False, True)]
    return {peer.name: peer for peer in peers}


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
        options = _masked(case) | {"backend": self.backend} | data.option.tilewise()
        if case.mask:
            options["mask"] = data.mask
        if case.has_functions:
            options = {"mask_mod": mask_mod_of(case, data), "score_mod": data.option.score_mod()}
            options["backend"] = self.backend
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
        if case.statistics:
            options["return_aux"] = statistics.STATISTICS[case.statistics]
            named = functools.partial(statistics.tensors, case.statistics)

            attend_watched = functools.partial(tilewise.attention, layout=layout, **options)
            return prepare_statistics(case, tensors, attend_watched, canonical, named)
        prepared = prepare_call(case, tensors, dout, attend, canonical, others=data.option.leaves)
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
        from tilewise.faces.flash_attn import flash_attn_with_kvcache

        pages = data.pages

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options: dict[str, Any] = {"cache_seqlens": pages.lengths, "block_table": pages.table}
            return _out(flash_attn_with_kvcache(q, k, v, causal=True, **options))

        return prepare_call(case, (data.query, pages.key, pages.value), None, attend, as_is)


def _masked(case: Case) -> dict[str, Any]:
    return {"window": case.window, "causal": case.causal and case.window is None}


class Changed(Tilewise):
    """This library on cases with a field changed, to compare with; other cases are refused."""

    def __init__(self, name: str, serves: Callable[[Case], bool], refusal: str, **field: Any) -> None:
        super().__init__()
        self.name, self.serves, self.refusal, self.field = name, serves, refusal, field

    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        if not self.serves(case):
            raise Refusal(self.refusal)
        return super().prepare(dataclasses.replace(case, **self.field), data, layout)


def _compared() -> dict[str, Peer]:
    """By name: with the option that says what functions say, and the forward that statistics are beside."""

    def has_option(case: Case) -> bool:
        return case.has_functions and not case.mask and case.option not in FUNCTIONS_ALONE

    def has_statistics(case: Case) -> bool:
        return bool(case.statistics)

    said_too, of_statistics = "is for functions that an option says too", "is for cases with statistics"
    peers = (
        Changed("tilewise-option", has_option, said_too, has_functions=False),
        Changed("tilewise-plain", has_statistics, of_statistics, statistics=""),
    )
    return {peer.name: peer for peer in peers}


class EightBit(Peer):
    """This library in 8 bits, `precision`, with rounding in the timed call or, `is_quantized`, before it."""

    limit = EIGHT_BIT_LIMIT

    def __init__(self, precision: str, is_quantized: bool) -> None:
        self.precision, self.is_quantized = precision, is_quantized
        self.name = f"tilewise-{precision}{QUANTIZED if is_quantized else ''}"

    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        is_plain = not (case.option or case.mask or case.has_functions)
        if case.kind not in ("dense", "varlen") or case.direction != "forward" or not is_plain:
            raise Refusal("8-bit products are timed in plain dense and packed forwards")
        if case.dtype not in ("bfloat16", "float16"):
            raise Refusal("8-bit products are of float16 and bfloat16 tensors")
        options = _masked(case)
        function: Callable[..., Any] = tilewise.attention
        offsets: tuple[Tensor, ...] = ()
        lengths: tuple[int, ...] = ()
        if case.kind == "varlen":
            function = tilewise.attention_varlen
            offsets, lengths = (data.offsets, data.offsets), (max(case.lengths),) * 2
        given: Any = None
        if self.is_quantized:
            from tilewise.fp8 import quantize

            given = quantize(data.query, data.key, data.value, *offsets, precision=self.precision)
        else:
            options["precision"] = self.precision

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _out(function(*(given or (q, k, v)), *offsets, *lengths, **options))

        return prepare_call(case, (data.query, data.key, data.value), None, attend, as_is)


def _out(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(result, Tensor)  # lse was not asked for
    return result


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
        if case.mask or (case.option and self.name != "flash-attn-2"):
            raise Refusal(f"{self.package} is not shown with {case.mask or case.option}")
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
        masked |= data.option.flash_attn()
        if case.kind == "varlen":
            return functools.partial(module.flash_attn_varlen_func, **_packed(case, data), **masked)
        if case.kind != "decode":
            return functools.partial(module.flash_attn_func, **masked)
        if case.page_size is not None:
            if case.page_size % self.page_multiple:
                raise Refusal(f"{self.package} needs pages of a multiple of {self.page_multiple} keys")
            masked |= {"cache_seqlens": data.pages.lengths, self.table_name: data.pages.table}
        return functools.partial(module.flash_attn_with_kvcache, **masked)


class FlashAttention3(FlashAttention2):
    name, module, package = "flash-attn-3", "flash_attn_interface", "FlashAttention-3"
    table_name, page_multiple = "page_table", 1


class FlashAttention4(External):
    name, module, package = "flash-attn-4", "flash_attn.cute", "FlashAttention-4"

    def bind(self, module: Any, case: Case, data: Data) -> Any:
        masked: dict[str, Any] = {"causal": case.causal, "window_size": case.window or (None, None)}
        if case.kind == "varlen":
            return functools.partial(module.flash_attn_varlen_func, **_packed(case, data), **masked)
        if case.page_size is not None:
            paged = {"seqused_k": data.pages.lengths, "page_table": data.pages.table}
            return functools.partial(module.flash_attn_varlen_func, **paged, **masked)
        splits = {"num_splits": 0} if case.kind == "decode" else {}  # 0: its own heuristic
        return functools.partial(module.flash_attn_func, **masked, **splits)


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
