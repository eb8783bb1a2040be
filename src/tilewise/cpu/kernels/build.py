"""The LLVM IR of a kernel: which class writes it."""

from __future__ import annotations

from typing import Any

from tilewise.cpu.dsl.vector import function
from tilewise.cpu.host.arguments import Config, Target
from tilewise.cpu.kernels.backward_bf16 import BFloat16BackwardKernel
from tilewise.cpu.kernels.backward_vectors import VectorBackwardKernel
from tilewise.cpu.kernels.common.tiles import Arguments, Shape
from tilewise.cpu.kernels.decode import DecodeKernel
from tilewise.cpu.kernels.decode_backward import DecodeBackwardKernel
from tilewise.cpu.kernels.decode_bf16 import AmxDecodeKernel
from tilewise.cpu.kernels.forward import ForwardKernel
from tilewise.cpu.kernels.forward_one_block import OneBlockForwardKernel
from tilewise.cpu.kernels.statistics import StatisticsKernel


def build(name: str, config: Config, target: Target) -> tuple[str, dict[str, int]]:
    """The kernel's IR, and the sizes its caller needs."""
    make = _kernel(name, config)
    shape = Shape(config, target, make.key_blocks)
    with function(name) as emitter:
        kernel = make(shape, Arguments(emitter))
        kernel.run()
        facts = {
            "block_q": shape.block_q,
            "cuts": int(config.terms > 1),
            "scratch_bytes": kernel.scratch.bytes,
        }
        return emitter.finish(), facts | kernel.facts()


def _kernel(name: str, config: Config) -> Any:
    match name:
        case "forward":
            return OneBlockForwardKernel if config.key_block else ForwardKernel
        case "backward":
            return BFloat16BackwardKernel if config.terms else VectorBackwardKernel
        case "decode":
            return AmxDecodeKernel if config.terms else DecodeKernel
    return {"decode_backward": DecodeBackwardKernel, "statistics": StatisticsKernel}[name]
