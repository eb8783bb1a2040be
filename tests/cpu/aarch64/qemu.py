"""The NEON kernels on any machine: compiled for AArch64, linked with `run_kernel.c`, run by QEMU.

Plans are made and run as always. Only the function they call is another one: it writes the argument block and
all that the block points to into a file, lets an emulated processor run the kernel on it, and takes back what
the kernel wrote. Memory behind every tensor must stay as it is.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewise.cpu.host import compile as kernels, parallel
from tilewise.cpu.host.arguments import FIRST, POINTERS, WORDS

TRIPLE = "aarch64-unknown-linux-gnu"
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
HARNESS = Path(__file__).with_name("run_kernel.c")
GUARD = bytes([0xFF]) * 64  # between areas: NaN to those who read it
SPANS = POINTERS.index("spans")


def missing() -> str | None:
    """What this machine lacks, or None."""
    lacking = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found" if lacking else None


@dataclass(frozen=True)
class Processor:
    """One that LLVM compiles for and one that QEMU plays, which has no more than the first."""

    target: kernels.Target
    emulated: str

    def install(self, monkeypatch: Any, folder: Path) -> None:
        """Every kernel from here on is compiled for it and run on it."""
        make = functools.partial(Program, folder, self.emulated)
        monkeypatch.setattr(kernels, "target", lambda wanted="": self.target)
        monkeypatch.setattr(kernels, "generate", functools.partial(kernels.generate, triple=TRIPLE))
        monkeypatch.setattr(kernels, "_kernel", lambda name, code, facts, _: make(name, code, facts))
        monkeypatch.setattr(parallel, "run", lambda kernel, block, threads: kernel.call(block, threads))


class Program:
    """A kernel as a program for the emulator; to plans a `kernels.Kernel`."""

    numbers = itertools.count()

    def __init__(self, folder: Path, emulated: str, name: str, code: bytes, facts: dict[str, int]) -> None:
        self.address, self.facts = 0, facts
        self.command = [EMULATOR, "-cpu", emulated]
        stem = folder / f"{name}-{next(self.numbers)}"
        self.program, self.memory, compiled = (stem.with_suffix(end) for end in (".elf", ".memory", ".o"))
        compiled.write_bytes(code)
        options = ["-O1", "-static", "-pthread", f"-DKERNEL={name}", "-o", str(self.program)]
        subprocess.run([COMPILER, *options, str(HARNESS), str(compiled)], check=True)

    def call(self, block: int, threads: int = 1) -> None:
        image, places = _image(block)
        self.memory.write_bytes(image)
        arguments = [str(x) for x in (self.program, self.memory, FIRST, len(POINTERS), threads)]
        subprocess.run([*self.command, *arguments], check=True, timeout=100)
        written = self.memory.read_bytes()
        for offset, address, size in places:
            end = offset + size
            assert written[end : end + len(GUARD)] == GUARD, "a kernel wrote beyond a tensor"
            ctypes.memmove(address, written[offset:end], size)
        words = (ctypes.c_int64 * WORDS).from_address(block)
        words[:FIRST] = (ctypes.c_int64 * FIRST).from_buffer_copy(written)  # the counters


def _image(block: int) -> tuple[bytes, list[tuple[int, int, int]]]:
    """The block with offsets for pointers, and all areas of memory they point into: where in the image, where
    in memory, how many bytes."""
    words = (ctypes.c_int64 * WORDS).from_buffer_copy(ctypes.string_at(block, 8 * WORDS))
    image, places = bytearray(8 * WORDS) + GUARD, {}
    areas = _areas()
    for word, pointer in enumerate(words[FIRST : FIRST + len(POINTERS)]):
        if not pointer:
            continue
        found = ((start, size) for start, size in areas if start <= pointer < start + max(size, 1))
        start, size = next(found, (pointer, 32))
        assert (start, size) in areas or word == SPANS  # a dense call's is a ctypes array
        if start not in places:
            image += bytes(-len(image) % 64)
            places[start] = len(image), start, size
            image += ctypes.string_at(start, size) + GUARD
        words[FIRST + word] = places[start][0] + pointer - start
    image[: 8 * WORDS] = bytes(words)
    return bytes(image), list(places.values())


def _areas() -> set[tuple[int, int]]:
    """Address and bytes of every tensor's memory."""
    tensors = (x for x in gc.get_objects() if type(x) is torch.Tensor and x.device.type == "cpu")
    storages = (t.untyped_storage() for t in tensors if t.layout == torch.strided)
    return {(s.data_ptr(), s.nbytes()) for s in storages if s.nbytes()}
