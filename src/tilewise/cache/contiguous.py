"""Storage for the keys and values of sequences that grow token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.core.checks import DTYPES, MAX_HEAD_DIM, check_flag, check_integers, shown
from tilewise.core.device_errors import raise_errors
from tilewise.core.fp8 import FP8
from tilewise.core.signature import device_of
from tilewise.core.torch_private import compiles_here, mark_static, version_of
from tilewise.gpu.launch.launch_plan import HAS_TRITON


def normal(t: Any) -> Any:
    """A tensor that can be changed outside of inference mode too; anything else as it is."""
    if not (isinstance(t, Tensor) and t.is_inference()):
        return t
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty_like(t, memory_format=torch.preserve_format).copy_(t)


class Storage:
    """Keys (entries, rows, num_kv_heads, head_dim), values likewise with head_dim_v; scales of 8-bit ones."""

    key_scale: Tensor | None = None  # (entries, num_kv_heads)
    value_scale: Tensor | None = None

    def __init__(
        self,
        rows: tuple[int, int, int],
        head_dim: int,
        head_dim_v: int | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
        value_in_key: bool,
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        check_integers(1, MAX_HEAD_DIM, head_dim=head_dim, head_dim_v=head_dim_v)
        check_flag("value_in_key", value_in_key)
        if value_in_key and head_dim_v > head_dim:
            raise ValueError(
                f"head_dim_v={head_dim_v} must be at most head_dim={head_dim} with value_in_key=True"
            )
        self.value_in_key = value_in_key
        with torch.inference_mode(False):  # tensors of inference mode could not be changed outside of it
            self.key = torch.zeros(*rows, head_dim, dtype=dtype, device=device)
            if dtype == FP8:
                self.key_scale = torch.ones(rows[0], rows[2], dtype=torch.float32, device=device)
            if value_in_key:
                self.value, self.value_scale = self.key[..., :head_dim_v], self.key_scale
            else:
                self.value = torch.zeros(*rows, head_dim_v, dtype=dtype, device=device)
                self.value_scale = None if self.key_scale is None else torch.ones_like(self.key_scale)
        mark_static(self.key, self.value, self.key_scale, self.value_scale)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy: its tensors count their versions anew, and pickled ones share no memory."""
        self.__dict__.update({name: normal(t) for name, t in state.items()})
        if self.value_in_key:
            self.value, self.value_scale = self.key[..., : self.value.shape[-1]], self.key_scale
        mark_static(self.key, self.value, self.key_scale, self.value_scale)

    def _tensors(self) -> list[Tensor]:
        """The memory, without views of it."""
        own = (self.key, self.key_scale, *(() if self.value_in_key else (self.value, self.value_scale)))
        return [t for t in own if t is not None]

    def memory_bytes(self) -> int:
        """Bytes of storage, used or not, scales included."""
        return sum(t.nbytes for t in self._tensors())

    def _described(self, first: str, last: str) -> str:
        """The repr of a cache: what it was made of, and what it holds."""
        head_dim, head_dim_v = self.key.shape[-1], self.value.shape[-1]
        dims = f"head_dim={head_dim}" + (f", head_dim_v={head_dim_v}" if head_dim_v != head_dim else "")
        where = f"dtype={self.key.dtype}, device={str(self.key.device)!r}"
        return f"{type(self).__name__}({first}, num_kv_heads={self.key.shape[2]}, {dims}, {where}): {last}"

    def _check_tensors(self, key: Any, value: Any) -> None:
        """Raise ValueError or TypeError unless these are tensors that the cache can take, but for shapes."""
        if self.value_in_key and value is not None:
            raise ValueError("value must be None: this cache's values lie in its keys")
        for name, t, storage in (("key", key, self.key), ("value", value, self.value)):
            if name == "value" and self.value_in_key:
                continue
            if not isinstance(t, Tensor):
                raise TypeError(
                    f"{name}={type(t).__name__} must be a torch.Tensor when the other one is given"
                )
            if t.dtype != storage.dtype and not (storage.dtype == FP8 and t.dtype in DTYPES):
                raise TypeError(f"{name}.dtype={t.dtype} must equal the cache's dtype={storage.dtype}")
            if t.device != storage.device:
                raise ValueError(f"{name}.device={t.device} must equal the cache's device={storage.device}")
            if t.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name}.requires_grad=True must be False: a cache keeps no history, call under "
                    "torch.no_grad()"
                )


def has_kernels(t: Tensor) -> bool:
    """Whether Triton kernels write tokens like these into caches."""
    is_on_gpu = not t.is_cpu and device_of(t).type == "cuda" and HAS_TRITON
    return is_on_gpu and t.dtype.itemsize in (2, 4) and not compiles_here()


def layout_hint(t: Tensor, heads: int, dim: int) -> str:
    """For new tokens whose heads stand before their tokens."""
    is_by_head = t.ndim == 4 and t.shape[1] == heads != t.shape[2] and t.shape[3] == dim
    return "; (batch, heads, new_tokens, dim) wants layout='bhsd', or transpose(1, 2)" if is_by_head else ""


class KVCache(Storage):
    """A contiguous cache: (batch, max_seqlen, num_kv_heads, head_dim) for keys, likewise for values.

    Args:
        batch: sequences held.
        max_seqlen: capacity of each, in tokens.
        num_kv_heads: heads of the keys and values.
        head_dim: of the keys, 1 to 576.
        head_dim_v: of the values; None is head_dim.
        dtype: float64, float32, bfloat16 or float16.
        device: where it lives; None is torch's default device.
        value_in_key: the values are the keys' first head_dim_v coordinates, as in absorbed latent attention,
            and are stored and read once.

    Attributes:
        key, value: the storage; rows from `lengths` on hold no tokens.
        lengths: (batch,) int32, tokens held by each sequence, on the cache's device. May be written, or set
            to a tensor of that shape and device, int32 or int64, which is copied, as to forget padding at a
            prompt's end. Reading it raises ValueError if an earlier call on a GPU has found a wrong length or
            page: see `check_errors`.

    Raises:
        ValueError, TypeError: a size or dtype does not fit.

    Example:
        >>> cache = KVCache(2, 16, 4, 8, dtype=torch.float32)
        >>> cache.append(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4, 8))
        >>> cache.lengths.tolist(), cache.memory_bytes()
        ([3, 3], 8192)
    """

    _held: list[int] | None  # the lengths, as far as the host knows
    _known: Tensor | None  # what they were read from, at its version `_version`

    def __init__(
        self,
        batch: int,
        max_seqlen: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        value_in_key: bool = False,
    ) -> None:
        check_integers(0, batch=batch, max_seqlen=max_seqlen, num_kv_heads=num_kv_heads)
        if dtype not in DTYPES:
            raise TypeError(f"dtype={shown(dtype)} must be float64, float32, bfloat16 or float16")
        rows = (batch, max_seqlen, num_kv_heads)
        super().__init__(rows, head_dim, head_dim_v, dtype, device, value_in_key)
        with torch.inference_mode(False):
            self._lengths = torch.zeros(batch, dtype=torch.int32, device=device)
            self.arrivals = torch.zeros_like(self._lengths)  # for the kernel that appends and counts
        mark_static(self._lengths, self.arrivals)
        self._know([0] * batch)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._known = None
        mark_static(self._lengths, self.arrivals)

    @property
    def lengths(self) -> Tensor:
        if not compiles_here():
            raise_errors()
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: Tensor) -> None:
        if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
            found = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
            raise TypeError(f"lengths of {found} must be an int32 or int64 tensor")
        if lengths.shape != self._lengths.shape:
            batch = self._lengths.shape[0]
            raise ValueError(f"lengths.shape={tuple(lengths.shape)} must be (batch,)=({batch},)")
        if lengths.device != self._lengths.device:
            where = self._lengths.device
            raise ValueError(f"lengths.device={lengths.device} must equal the cache's device={where}")
        if lengths is not self._lengths:
            self._lengths.copy_(lengths)  # in place: captured graphs count there, and others keep theirs

    def append(self, k: Tensor, v: Tensor | None = None) -> None:
        """Write new tokens behind those each sequence holds.

        While a CUDA graph is captured, and in compiled code, room cannot be checked. `lengths` then counts
        on: on a GPU attention to a sequence over its capacity then gives NaN, and `check_errors` raises it.
        Tokens for which there is no room are not written; in compiled code they overwrite the last rows.

        Args:
            k: (batch, new_tokens, num_kv_heads, head_dim) in the cache's dtype and on its device.
            v: (batch, new_tokens, num_kv_heads, head_dim_v); None with `value_in_key`.

        Raises:
            ValueError, TypeError: k or v does not fit, requires grad (a cache keeps no history; call it
                under torch.no_grad()), or a sequence would outgrow max_seqlen. Nothing is written then.
        """
        self.check_new(k, v)
        self.write(k, v)

    @torch.no_grad()
    def write(self, k: Tensor, v: Tensor | None) -> None:
        """`append` without its checks."""
        new_tokens, held = k.shape[1], self.held()
        if held is not None and len(set(held)) == 1:
            where: Any = (slice(None), slice(held[0], held[0] + new_tokens))
        else:
            row = torch.arange(len(k), device=k.device)[:, None]
            first = self._lengths
            if held is None:
                first = first.clamp(0, max(0, self.key.shape[1] - new_tokens))
            where = (row, first.long()[:, None] + torch.arange(new_tokens, device=k.device))
        self.key[where] = k
        if v is not None:
            self.value[where] = v
        self.advance(new_tokens)

    def advance(self, new_tokens: int) -> None:
        """Count tokens that were written."""
        held = self.held()
        self._lengths += new_tokens
        self.mirror(held, new_tokens)

    @torch.no_grad()
    def restore(self, held: list[int]) -> None:
        """Count as many tokens as sequences held before."""
        self._lengths.copy_(torch.tensor(held, dtype=self._lengths.dtype, device="cpu"))
        self._know(held)

    def mirror(self, held: list[int] | None, new_tokens: int) -> None:
        """Follow `lengths`, which were counted from `held` on."""
        if held is not None and self._held is not None:
            self._know([n + new_tokens for n in held])

    def _know(self, held: list[int]) -> None:
        self._held = held
        is_inference = self._lengths.is_inference()  # such tensors do not tell when they change
        self._known = None if is_inference else self._lengths
        self._version = 0 if is_inference else version_of(self._lengths)

    @property
    def is_mirrored(self) -> bool:
        """Whether the host knows the lengths: nothing but this class has changed or replaced them."""
        if compiles_here():  # the graph serves all lengths
            return False
        return (
            self._held is not None
            and self._known is self._lengths
            and self._version == version_of(self._lengths)
        )

    def held(self) -> list[int] | None:
        """The lengths, without waiting for the device if nothing but this class changed them.

        None while a CUDA graph is captured: its replays will not be seen, so lengths are read from then on.
        None in compiled code, after which they are read once.
        """
        if compiles_here():
            return None
        if self._lengths.is_cuda and torch.cuda.is_current_stream_capturing():
            self._held = None
            return None
        return self._held if self.is_mirrored else self._lengths.tolist()

    def reset(self) -> None:
        """Forget every token; the memory stays."""
        self._lengths.zero_()
        if not compiles_here() and self._held is not None:  # in a graph as of any other change
            self._know([0] * len(self._held))

    def __repr__(self) -> str:
        is_known = self.is_mirrored or self._lengths.is_cpu
        lengths = shown(self.held()) if is_known else "on the device"
        return self._described(f"batch={len(self.key)}, max_seqlen={self.key.shape[1]}", f"lengths={lengths}")

    def check_new(self, k: Tensor, v: Tensor | None) -> None:
        """Raise ValueError or TypeError unless k and v are new tokens for which there is room."""
        self._check_tensors(k, v)
        for name, t, storage in (("key", k, self.key), ("value", v, self.value)):
            if t is None:
                continue
            batch, _, heads, dim = storage.shape
            if t.ndim != 4 or (t.shape[0], *t.shape[2:]) != (batch, heads, dim):
                right = f"({batch}, new_tokens, {heads}, {dim}) for this cache{layout_hint(t, heads, dim)}"
                raise ValueError(f"{name}.shape={tuple(t.shape)} must be {right}")
        if v is not None and k.shape[1] != v.shape[1]:
            raise ValueError(f"value.shape[1]={v.shape[1]} (new tokens) must equal key.shape[1]={k.shape[1]}")
        held = self.held() or [0]
        if min(held) < 0:
            raise ValueError(f"lengths={held} of the cache must be at least 0")
        longest = max(held)
        if longest + k.shape[1] > self.key.shape[1]:
            raise ValueError(
                f"key.shape[1]={k.shape[1]} new tokens do not fit: a sequence holds {longest} of "
                f"max_seqlen={self.key.shape[1]}"
            )
