"""What is measured side by side: tilewise, PyTorch's own attention pinned to each backend, and others.

A peer prepares a case outside the timing (layout, masks, compilation, page tables) and returns the call
to be timed. One that does not serve a case raises `Refusal`, and its reason is shown in the results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise.bench.cases import Case
from tilewise.bench.errors import BenchError, Refusal
from tilewise.bench.inputs import Data


@dataclass(frozen=True)
class Prepared:
    """A case, ready to be timed."""

    call: Callable[[], Any]  # the timed region
    results: Callable[[], dict[str, Tensor]]  # one more call: canonical "out", and gradients if any
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    detail: str | None = None  # what served the case, where the peer chooses


class Peer(ABC):
    """One implementation of attention."""

    name: str

    def unavailable(self, device: str) -> str | None:
        """Why this peer cannot run at all here, or None."""
        return None

    def layouts(self, case: Case) -> tuple[str, ...]:
        """Memory layouts worth trying; the faster one is timed."""
        return ("bshd",)

    @abstractmethod
    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        """Set up everything that is not attention itself.

        Raises:
            Refusal: the peer does not serve the case.
        """


def prepare_call(
    case: Case,
    tensors: Sequence[Tensor],
    dout: Tensor | None,
    attend: Callable[..., Tensor],
    canonical: Callable[[Tensor], Tensor],
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Prepared:
    """Time `attend(query, key, value)`, or its gradients alone with the forward done beforehand."""
    if case.direction == "forward":

        def call() -> Tensor:
            return attend(*tensors)

        return Prepared(call, lambda: {"out": canonical(call())}, context)

    leaves = [t.detach().requires_grad_() for t in tensors]
    if case.direction == "forward+backward":

        def both() -> tuple[Tensor, tuple[Tensor, ...]]:
            out = attend(*leaves)
            return out, torch.autograd.grad(out, leaves, dout)

        return Prepared(both, lambda: _named(*both(), canonical), context)

    with context():
        out = attend(*leaves)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return Prepared(backward, lambda: _named(out, backward(), canonical), context)


def _named(
    out: Tensor, gradients: Sequence[Tensor], canonical: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    return {
        name: canonical(t.detach())
        for name, t in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True)
    }


def _as_is(t: Tensor) -> Tensor:
    return t


def _from_bhsd(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


def _dense_tensors(data: Data, layout: str) -> tuple[list[Tensor], Tensor | None]:
    """query, key, value and dout as (batch, heads, seqlen, dim)."""
    tensors = [data.placed(name, layout) for name in ("query", "key", "value")]
    return tensors, None if data.dout is None else data.placed("dout", layout)


def _by_document(
    lengths: Sequence[int], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[..., Tensor]:
    """Packed attention as a loop over documents, for what knows only dense tensors."""

    def attend_packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(t.split(lengths) for t in (query, key, value)))
        outs = [attend(*(t.transpose(0, 1)[None] for t in part))[0].transpose(0, 1) for part in parts]
        return torch.cat(outs)

    return attend_packed


class Standard(Peer):
    """Attention by the formula in PyTorch operations: the scores are stored."""

    name = "standard"

    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        if case.page_size is not None:
            raise Refusal("has no page tables")
        _refuse_too_large(case, 4 if case.direction == "forward" else 8)
        tensors, dout = _dense_tensors(data, layout)
        group, scale = case.num_heads // case.num_kv_heads, case.head_dim**-0.5
        hidden = None if case.kind == "varlen" or data.mask is None else ~data.mask

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if group > 1:
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            s = (q * scale) @ k.mT
            unseen = hidden
            if case.kind == "varlen" and case.causal:
                unseen = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
            if unseen is not None:
                s = s.masked_fill(unseen, -math.inf)
            return torch.softmax(s, -1) @ v

        if case.kind == "varlen":
            return prepare_call(case, tensors, dout, _by_document(case.lengths, attend), _as_is)
        return prepare_call(case, tensors, dout, attend, _from_bhsd)


class Sdpa(Peer):
    """`torch.nn.functional.scaled_dot_product_attention`, pinned to one backend."""

    def __init__(self, name: str, backend: SDPBackend) -> None:
        self.name, self.backend = name, backend

    def unavailable(self, device: str) -> str | None:
        if device == "cpu" and self.backend not in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            return "PyTorch has no such CPU kernel"
        return None

    def layouts(self, case: Case) -> tuple[str, ...]:
        return ("bshd", "bhsd") if case.kind != "varlen" else ("bshd",)

    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        if case.page_size is not None:
            raise Refusal("has no page tables")
        if self.backend is SDPBackend.MATH:
            _refuse_too_large(case, 8 if case.direction == "forward" else 16)
        tensors, dout = _dense_tensors(data, layout)
        gqa: dict[str, Any] = {"enable_gqa": True} if case.num_heads != case.num_kv_heads else {}
        canonical = _as_is if case.kind == "varlen" else _from_bhsd
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
        return prepare_call(case, tensors, dout, attend, canonical, lambda: sdpa_kernel(self.backend))

    def _attend(self, options: dict[str, Any]) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            try:
                return F.scaled_dot_product_attention(q, k, v, **options)
            except RuntimeError as error:
                if "No available kernel" in str(error) or "No viable backend" in str(error):
                    raise Refusal("PyTorch has no kernel of this backend for the case") from error
                raise

        return attend

    def _mask(self, case: Case, data: Data) -> dict[str, Any]:
        """SDPA's own causal mask is aligned top-left, so it serves only as many queries as keys."""
        if data.mask is None:
            return {}
        if case.window is None and case.seqlen_q == case.seqlen_k:
            return {"is_causal": True}
        if case.window is None and self.backend is SDPBackend.FLASH_ATTENTION and data.device == "cuda":
            from torch.nn.attention.bias import causal_lower_right

            return {"attn_mask": causal_lower_right(case.seqlen_q, case.seqlen_k)}
        return {"attn_mask": data.mask}


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
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if case.page_size is not None:
            raise Refusal("PyTorch's FlexAttention has no page tables")
        if data.device == "cpu" and case.direction != "forward":
            raise Refusal("FlexAttention has no backward on the CPU")
        tensors, dout = _dense_tensors(data, layout)
        if case.kind == "varlen":
            tensors = [t.transpose(0, 1)[None] for t in tensors]
            dout = None if dout is None else dout.transpose(0, 1)[None]
        mask_mod = self._mask_mod(case, data)
        total = tensors[0].shape[2]
        block_mask = None
        if mask_mod is not None:
            block_mask = create_block_mask(
                mask_mod, None, None, total, tensors[1].shape[2], device=data.device,
                _compile=data.device == "cuda",
            )  # fmt: skip
        torch._dynamo.reset()  # a cache of other shapes would count against the recompilation limit
        torch._functorch.config.donated_buffer = False  # donated buffers forbid a second backward
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        gqa = case.num_heads != case.num_kv_heads

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return compiled(q, k, v, block_mask=block_mask, enable_gqa=gqa)

        canonical = (lambda t: t[0].transpose(0, 1)) if case.kind == "varlen" else _from_bhsd
        return prepare_call(case, tensors, dout, attend, canonical)

    def _mask_mod(self, case: Case, data: Data) -> Callable[..., Tensor] | None:
        offset = case.seqlen_k - case.seqlen_q
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


class Tilewise(Peer):
    """This library, through its public functions; `backend` names one backend, None lets it choose."""

    def __init__(self, backend: str | None = None) -> None:
        self.backend = backend
        self.name = "tilewise" if backend is None else f"tilewise:{backend}"

    def layouts(self, case: Case) -> tuple[str, ...]:
        return ("bshd", "bhsd") if case.kind in ("dense", "memory") else ("bshd",)

    def prepare(self, case: Case, data: Data, layout: str) -> Prepared:
        import tilewise

        if case.kind == "decode":
            return self._prepare_decode(case, data)
        options: dict[str, Any] = {"window": case.window, "backend": self.backend}
        options["causal"] = case.causal and case.window is None
        tensors, dout = _dense_tensors(data, layout)
        if case.kind == "varlen":
            lengths = (data.offsets, data.offsets, max(case.lengths), max(case.lengths))

            def attend_varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return tilewise.attention_varlen(q, k, v, *lengths, **options)

            return prepare_call(case, tensors, dout, attend_varlen, _as_is)
        if layout == "bshd":
            tensors = [t.transpose(1, 2) for t in tensors]
            dout = None if dout is None else dout.transpose(1, 2)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tilewise.attention(q, k, v, layout=layout, **options)

        canonical = _as_is if layout == "bshd" else _from_bhsd
        prepared = prepare_call(case, tensors, dout, attend, canonical)
        explanation = tilewise.explain(*tensors, layout=layout, **options)
        is_forward = case.direction == "forward"
        backend = explanation.backend if is_forward else explanation.backward_backend
        return dataclasses.replace(prepared, detail=f"backend {backend}")

    def _prepare_decode(self, case: Case, data: Data) -> Prepared:
        import tilewise

        if case.page_size is not None:
            return self._prepare_paged(case, data)
        cache = tilewise.KVCache(
            case.batch, case.seqlen_k, case.num_kv_heads, case.head_dim, head_dim_v=case.head_dim_v,
            dtype=case.torch_dtype, device=data.device,
        )  # fmt: skip
        cache.append(data.key, data.value)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tilewise.attention_with_cache(q, cache, causal=True, backend=self.backend)

        return prepare_call(case, (data.query, data.key, data.value), None, attend, _as_is)

    def _prepare_paged(self, case: Case, data: Data) -> Prepared:
        """Through the flash-attn face, whose page table is the one interface that every version keeps."""
        if self.backend is not None:
            raise Refusal("the flash-attn interface to page tables takes no backend")
        try:
            from tilewise.flash_attn import flash_attn_with_kvcache
        except ImportError as error:
            raise Refusal(f"has no page tables yet: {error}") from error
        pages = data.pages

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attn_with_kvcache(
                q, k, v, cache_seqlens=pages.lengths, block_table=pages.table, causal=True
            )

        return prepare_call(case, (data.query, pages.key, pages.value), None, attend, _as_is)


def _refuse_too_large(case: Case, bytes_a_score: int) -> None:
    """Refuse on the CPU what would not fit: there, the system kills a process instead of refusing memory."""
    if torch.cuda.is_available():
        return  # the allocator refuses by itself
    pairs = (
        max(q * k for q, k in case.sequences) * case.num_heads * (1 if case.kind == "varlen" else case.batch)
    )
    needed, free = pairs * bytes_a_score, _free_bytes()
    if needed > 0.7 * free:
        raise Refusal(f"would store {needed / 2**30:.0f} GiB of scores, {free / 2**30:.0f} GiB are free")


def _free_bytes() -> float:
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return math.inf


def all_peers() -> dict[str, Peer]:
    """Every peer by name, in the order of the tables."""
    from tilewise.bench.external import FlashAttention2, FlashAttention3, FlashAttention4, Xformers

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
    """The peers of these names; "tilewise:NAME" is tilewise with that backend, "all" is every peer.

    Raises:
        BenchError: a name is unknown.
    """
    from tilewise.dispatch import BACKENDS

    known, found = all_peers(), {}
    for name in names:
        backend = name.removeprefix("tilewise:")
        if name == "all":
            found.update(known)
        elif name in known:
            found[name] = known[name]
        elif name != backend and backend in BACKENDS:
            found[name] = Tilewise(backend)
        else:
            backends = ", ".join(f"tilewise:{b}" for b in BACKENDS)
            raise BenchError(f"peer {name!r} is unknown, must be all, {', '.join(known)} or {backends}")
    return list(found.values())
