"""Run the Triton kernels in the interpreter on tensors that end where readable memory ends.

    TRITON_INTERPRET=1 python tests/gpu_triton/guarded_pages.py CASE

A read beyond a tensor's last element ends the process (SIGSEGV).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import torch

from tilewise.core.plan import Results
from tilewise.core.problem import Inputs, Options, describe
from tilewise.gpu.triton import launch

PAGE = mmap.PAGESIZE
HEADS, DIM = 2, 16

# seqlen_q, seqlen_k (no multiples of a tile), shapes of mask or bias, options; few queries: decoding
CASES: dict[str, tuple[int, int, dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "plain": (37, 45, {}, {}),
    "causal": (37, 45, {}, {"causal": True}),
    "mask": (37, 45, {"mask": (2, HEADS, 37, 45)}, {}),
    "mask_window": (37, 45, {"mask": (2, 1, 37, 45)}, {"window_left": 20}),
    "bias": (37, 45, {"bias": (2, HEADS, 37, 45)}, {}),
    "bias_causal": (37, 45, {"bias": (2, HEADS, 37, 45)}, {"causal": True}),
    "bias_shared": (37, 45, {"bias": (1, HEADS, 37, 45)}, {}),
    "bias_of_keys": (37, 45, {"bias": (2, 1, 1, 45)}, {}),
    "decode": (3, 301, {}, {"causal": True}),
    "decode_mask": (3, 301, {"mask": (2, HEADS, 3, 301)}, {}),
    "decode_bias": (3, 301, {"bias": (1, HEADS, 3, 301)}, {}),
}


def guarded(t: torch.Tensor) -> torch.Tensor:
    """A copy of t in whole pages, the last byte in front of a page that cannot be read."""
    size = -(-t.nbytes // PAGE) * PAGE
    pages = mmap.mmap(-1, size + PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    copy = torch.frombuffer(pages, dtype=t.dtype, count=t.numel(), offset=size - t.nbytes).view(t.shape)
    return copy.copy_(t)


def main(name: str) -> None:
    seqlen_q, seqlen_k, shapes, options = CASES[name]
    q, k, v = (guarded(torch.randn(2, n, HEADS, DIM)) for n in (seqlen_q, seqlen_k, seqlen_k))
    extras = {field: guarded(torch.randn(shape)) for field, shape in shapes.items()}
    if "mask" in extras:
        extras["mask"] = guarded(extras["mask"] > -1)
    if "bias" in extras:
        extras["bias"].requires_grad_()
    inputs = Inputs(q, k, v, **extras)
    problem = describe(inputs, Options(**options))
    with torch.no_grad():
        out, lse = launch.forward(problem, inputs)
        launch.backward(
            problem, inputs, Results(guarded(out), guarded(lse)), guarded(torch.randn_like(out)), None
        )


if __name__ == "__main__":
    main(sys.argv[1])
