"""Fills a folder of kernels, or makes the same calls as on a GPU, over a libcuda that records; run by
test_kernel_folder.py.

    python folder.py fill DIR       # calls on meta tensors, which compile
    python folder.py call           # calls on tensors with memory, which launch; prints what is compiled
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from record import Driver, int_of
from triton import knobs

import tilewise
from tilewise.core import signature
from tilewise.gpu.launch import gpus, kernel_folder, launcher, plan
from tilewise.gpu.triton.append import Tokens, append


def calls(device: str) -> None:
    """A kernel of Triton's, and one of Gluon's with TMA descriptors."""
    key, storage = (torch.zeros(2, n, 2, 64, dtype=torch.bfloat16, device=device) for n in (1, 32))
    lengths = torch.zeros(2, dtype=torch.int32, device=device)
    append(key, key, key.clone(), storage, storage.clone(), Tokens(None, None, lengths), None)
    x = torch.zeros(1, 256, 2, 64, dtype=torch.bfloat16, device=device)
    tilewise.attention(x, x.clone(), x.clone(), backend="hopper")


def fill(folder: Path) -> None:
    gpu = gpus.GPUS["h200"]
    kernel_folder.create(folder, gpu)
    with launcher.compiling_for(gpu, lambda compiled: kernel_folder.add(folder, compiled)):
        calls("meta")


def call_on_gpu() -> None:
    """The way that calls take on a GPU: only what asks PyTorch's CUDA is answered here."""
    sys.modules["triton.runtime.driver"]._create_driver = Driver  # when it is first asked for, as on a GPU
    signature.device_of = lambda t: torch.device("cuda", 0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    gpus._at_hand = lambda index: gpus.GPUS["h200"]
    plan.raw_stream = lambda index: 0
    found = []
    knobs.compilation.listener = lambda src, cache_hit, **rest: found.append((src.name, cache_hit))
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *rest: print("warning:", message)
    calls("cpu")
    calls("cpu")
    assert int_of("launches").value == 4
    for name, is_hit in found:
        print("loaded" if is_hit else "compiled", name)


if __name__ == "__main__":
    fill(Path(sys.argv[2])) if sys.argv[1] == "fill" else call_on_gpu()
