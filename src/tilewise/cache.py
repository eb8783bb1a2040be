"""Storage for the keys and values of sequences that grow token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.problem import DTYPES


class KVCache:
    """A contiguous cache: (batch, max_seqlen, num_kv_heads, head_dim) for keys, likewise for values.

    Args:
        batch: sequences held.
        max_seqlen: capacity of each, in tokens.
        num_kv_heads: key heads.
        head_dim: head size of the keys, 1 to 576.
        head_dim_v: head size of the values; None is head_dim.
        dtype: float64, float32, bfloat16 or float16.
        device: where it lives; None is torch's default device.

    Attributes:
        key, value: the storage; rows from `lengths` on hold no tokens.
        lengths: (batch,) int32, tokens held by each sequence, on the cache's device.

    Raises:
        ValueError, TypeError: a size or dtype does not fit.

    Example:
        >>> cache = KVCache(2, 16, 4, 8, dtype=torch.float32)
        >>> cache.append(torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4, 8))
        >>> cache.lengths.tolist(), cache.memory_bytes()
        ([3, 3], 8192)
    """

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
    ) -> None:
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {"batch": batch, "max_seqlen": max_seqlen, "num_kv_heads": num_kv_heads}
        for name, size in (*sizes.items(), ("head_dim", head_dim), ("head_dim_v", head_dim_v)):
            least = 1 if name.startswith("head_dim") else 0
            if not isinstance(size, int) or size < least:
                raise ValueError(f"{name}={size!r} must be an integer of at least {least}")
        if dtype not in DTYPES:
            raise TypeError(f"dtype={dtype} must be float64, float32, bfloat16 or float16")
        self.key = torch.zeros(batch, max_seqlen, num_kv_heads, head_dim, dtype=dtype, device=device)
        self.value = torch.zeros(batch, max_seqlen, num_kv_heads, head_dim_v, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write new tokens behind those each sequence holds.

        Args:
            k: (batch, new_tokens, num_kv_heads, head_dim) in the cache's dtype and on its device.
            v: (batch, new_tokens, num_kv_heads, head_dim_v).

        Raises:
            ValueError, TypeError: k or v does not fit, requires grad (a cache keeps no history; call it
                under torch.no_grad()), or a sequence would outgrow max_seqlen. Nothing is written then.
        """
        self._check(k, v)
        with torch.no_grad():
            self._write(k, v)

    def _write(self, k: Tensor, v: Tensor) -> None:
        new_tokens = k.shape[1]
        starts = self.lengths.long()
        if starts.numel() and bool((starts == starts[0]).all()):
            start = int(starts[0])
            self.key[:, start : start + new_tokens] = k
            self.value[:, start : start + new_tokens] = v
        elif starts.numel():
            row = torch.arange(len(starts), device=starts.device)[:, None]
            position = starts[:, None] + torch.arange(new_tokens, device=starts.device)
            self.key[row, position] = k
            self.value[row, position] = v
        self.lengths += new_tokens

    def reset(self) -> None:
        """Forget every token; the memory stays."""
        self.lengths.zero_()

    def memory_bytes(self) -> int:
        """Bytes of key and value storage, used or not."""
        return self.key.nbytes + self.value.nbytes

    def _check(self, k: Tensor, v: Tensor) -> None:
        for name, t, storage in (("key", k, self.key), ("value", v, self.value)):
            if not isinstance(t, Tensor):
                raise TypeError(
                    f"{name}={type(t).__name__} must be a torch.Tensor when the other one is given"
                )
            right = (storage.shape[0], "new_tokens", *storage.shape[2:])
            if t.ndim != 4 or (t.shape[0], *t.shape[2:]) != (storage.shape[0], *storage.shape[2:]):
                raise ValueError(f"{name}.shape={tuple(t.shape)} must be {right} for this cache")
            if t.dtype != storage.dtype:
                raise TypeError(f"{name}.dtype={t.dtype} must equal the cache's dtype={storage.dtype}")
            if t.device != storage.device:
                raise ValueError(f"{name}.device={t.device} must equal the cache's device={storage.device}")
            if t.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name}.requires_grad=True must be False: a cache keeps no history")
        if k.shape[1] != v.shape[1]:
            raise ValueError(f"value.shape[1]={v.shape[1]} (new tokens) must equal key.shape[1]={k.shape[1]}")
        longest = int(self.lengths.max()) if self.lengths.numel() else 0
        if longest + k.shape[1] > self.key.shape[1]:
            raise ValueError(
                f"key.shape[1]={k.shape[1]} new tokens do not fit: a sequence holds {longest} of "
                f"max_seqlen={self.key.shape[1]}"
            )
