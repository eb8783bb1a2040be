"""The memory of a cache of either kind, and what may be written to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.cache.quantized_pages import QUANTIZED
from tilewise.core.checks import DTYPES, MAX_HEAD_DIM, check_flag, shown


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless all are integers of at least 0, head_dim* from 1 to MAX_HEAD_DIM."""
    for name, size in sizes.items():
        is_integer = isinstance(size, int) and not isinstance(size, bool)
        if name.startswith("head_dim"):
            if not is_integer or not 1 <= size <= MAX_HEAD_DIM:
                raise ValueError(f"{name}={shown(size)} must be an integer from 1 to {MAX_HEAD_DIM}")
        elif not is_integer or size < 0:
            raise ValueError(f"{name}={shown(size)} must be an integer of at least 0")


def mark_static(*tensors: Tensor | None) -> None:
    """Tell `torch.compile` that these stay where they are, so that mode="reduce-overhead" may write to them.

    As `torch._dynamo.mark_static_address` does without a guard; its import takes a second.
    """
    for t in tensors:
        if t is not None:
            t._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


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
        check_sizes(head_dim=head_dim, head_dim_v=head_dim_v)
        check_flag("value_in_key", value_in_key)
        if value_in_key and head_dim_v > head_dim:
            raise ValueError(
                f"head_dim_v={head_dim_v} must be at most head_dim={head_dim} with value_in_key=True"
            )
        self.value_in_key = value_in_key
        with torch.inference_mode(False):  # tensors of inference mode could not be changed outside of it
            self.key = torch.zeros(*rows, head_dim, dtype=dtype, device=device)
            if dtype == QUANTIZED:
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
            if t.dtype != storage.dtype and not (storage.dtype == QUANTIZED and t.dtype in DTYPES):
                raise TypeError(f"{name}.dtype={t.dtype} must equal the cache's dtype={storage.dtype}")
            if t.device != storage.device:
                raise ValueError(f"{name}.device={t.device} must equal the cache's device={storage.device}")
            if t.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name}.requires_grad=True must be False: a cache keeps no history")


def layout_hint(t: Tensor, heads: int, dim: int) -> str:
    """For new tokens whose heads stand before their tokens."""
    is_by_head = t.ndim == 4 and t.shape[1] == heads != t.shape[2] and t.shape[3] == dim
    return "; (batch, heads, new_tokens, dim) wants layout='bhsd', or transpose(1, 2)" if is_by_head else ""
