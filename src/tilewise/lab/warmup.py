"""`tilewise warmup`: compile the kernels that models launch, for a GPU that need not be here, into a folder.

A model is calls of the public functions on tensors without memory. Which kernels those launch, the library's
own plans say; compiling takes the place of starting.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from tilewise.api import attention, attention_with_cache
from tilewise.cache.contiguous import KVCache
from tilewise.cache.paged import PagedKVCache
from tilewise.core.signature import Gpu
from tilewise.dispatch import plans
from tilewise.gpu.launch.gpus import GPUS
from tilewise.gpu.launch.launch_plan import HAS_TRITON

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PAGE_SIZE = 16
MOST = 1 << 24  # sequences, or tokens of one


@dataclass(frozen=True)
class Model:
    """What decides the kernels of a transformer: its heads, and the options of its attention."""

    heads: int
    kv_heads: int
    head_dim: int
    is_decoder: bool = True
    dropout_p: float = 0.0  # in training
    options: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "bert": Model(12, 12, 64, is_decoder=False, dropout_p=0.1),
    "gpt2": Model(12, 12, 64, dropout_p=0.1),
    "llama": Model(32, 8, 128),
    "mistral": Model(32, 8, 128, options={"window": (4095, 0)}),
}


@dataclass(frozen=True)
class Shape:
    """The tensors of a model's calls."""

    model: Model
    batch: int
    seqlen: int
    dtype: torch.dtype

    def tensors(self, seqlen_q: int, needs_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """query, key, value on the meta device; only queries may be fewer."""
        m = self.model
        sizes = (seqlen_q, m.heads), (self.seqlen, m.kv_heads), (self.seqlen, m.kv_heads)
        q, k, v = (
            torch.empty(
                self.batch, n, h, m.head_dim, dtype=self.dtype, device="meta", requires_grad=needs_grad
            )
            for n, h in sizes
        )
        return q, k, v


# ---- calls, each of the kind that a model makes


def training(shape: Shape) -> Iterator[Callable[[], Any]]:
    """A forward and its gradients, with the model's dropout and without."""
    model = shape.model
    for dropout_p in {0.0, model.dropout_p}:
        for mask in _masks(shape):
            q, k, v = shape.tensors(shape.seqlen, needs_grad=True)
            options = model.options | {"causal": model.is_decoder, "mask": mask, "dropout_p": dropout_p}
            yield functools.partial(_differentiate, q, k, v, options)


def inference(shape: Shape) -> Iterator[Callable[[], Any]]:
    """A forward without gradients; of a decoder also the last token alone, on keys as they are."""
    model = shape.model
    for seqlen_q in (shape.seqlen, 1) if model.is_decoder else (shape.seqlen,):
        for mask in _masks(shape):
            q, k, v = shape.tensors(seqlen_q)
            options = model.options | {"causal": model.is_decoder, "mask": mask}
            yield functools.partial(attention, q, k, v, **options)


def generation(shape: Shape) -> Iterator[Callable[[], Any]]:
    """A prompt and a token into each kind of cache."""
    model = shape.model
    if not model.is_decoder:
        return
    sizes: dict[str, Any] = {"num_kv_heads": model.kv_heads, "head_dim": model.head_dim}
    sizes |= {"dtype": shape.dtype, "device": "meta"}
    for is_paged, seqlen in itertools.product((False, True), (-(-shape.seqlen // 2), 1)):
        cache: Any
        if is_paged:
            cache = PagedKVCache(-(-shape.seqlen // PAGE_SIZE) * shape.batch, PAGE_SIZE, **sizes)
            for _ in range(shape.batch):
                cache.allocate()
        else:
            cache = KVCache(shape.batch, shape.seqlen, **sizes)
        q, k, v = (t[:, :seqlen] for t in shape.tensors(shape.seqlen))
        yield functools.partial(attention_with_cache, q, cache, k, v, **model.options)


def _differentiate(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> None:
    out: Any = attention(query, key, value, **options)
    out.sum().backward()


def _masks(shape: Shape) -> tuple[Tensor | None, ...]:
    """None, and an encoder's padding."""
    if shape.model.is_decoder:
        return (None,)
    return None, torch.empty(shape.batch, 1, 1, shape.seqlen, dtype=torch.bool, device="meta")


# ---- the folder


def fill(folder: Path, gpu: Gpu, shapes: Iterator[Shape], backward: bool) -> dict[str, str]:
    """Compile what calls of these shapes launch; name by hash of all kernels that they need."""
    from tilewise.gpu.launch import kernel_folder, launcher

    kernel_folder.create(folder, gpu)
    kernels: dict[str, str] = {}

    def keep(compiled: Any) -> None:
        if compiled.hash not in kernels:
            kernels[compiled.hash] = compiled.metadata.name
            kernel_folder.add(folder, compiled)

    plans.clear()
    with launcher.compiling_for(gpu, keep):
        for shape in shapes:
            for kind in (training, inference, generation) if backward else (inference, generation):
                for call in kind(shape):
                    call()
    plans.clear()
    return kernels


def warmup(
    out: Annotated[Path, typer.Option(help="Folder for the kernels; a new one, or one of the same GPU.")],
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}; it need not be here.")] = "h100",
    models: Annotated[
        str,
        typer.Option(
            "--for", help=f"Of {', '.join(MODELS)}, or a decoder's HEADS/KV_HEADS/HEAD_DIM; joined by commas."
        ),
    ] = "llama",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    batch: Annotated[str, typer.Option(help="Batch sizes, joined by commas.")] = "1,8",
    seqlen: Annotated[str, typer.Option(help="Lengths of sequences, joined by commas.")] = "512,4096",
    backward: Annotated[bool, typer.Option(help="Compile what training launches, too.")] = True,
) -> None:
    """Compile the kernels of models ahead, for a named GPU.

    On the GPU's machine TILEWISE_KERNELS=OUT has them loaded instead of compiled.
    """
    if not HAS_TRITON:
        raise typer.BadParameter("GPU kernels are compiled by Triton, which is not installed")
    target: Gpu = _chosen("--gpu", gpu, GPUS)
    kind: torch.dtype = _chosen("--dtype", dtype, DTYPES)
    found = [_model(name.strip()) for name in models.split(",")]
    sizes = _numbers("--batch", batch), _numbers("--seqlen", seqlen)
    shapes = (Shape(m, b, n, kind) for m, b, n in itertools.product(found, *sizes))
    start = time.perf_counter()
    try:
        kernels = fill(out, target, shapes, backward)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    seconds = time.perf_counter() - start
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    typer.echo(f"{len(kernels)} kernels for {target.name} in {seconds:.0f} s; {out}: {size / 1e6:.1f} MB")
    if not (out / "cuda_utils").exists():
        typer.echo("without a C compiler and Python's headers here, the GPU's machine needs a C compiler")
    typer.echo(f"use them with TILEWISE_KERNELS={out}")


def _chosen(name: str, value: str, table: dict[str, Any]) -> Any:
    if value not in table:
        raise typer.BadParameter(f"{name}={value!r} must be one of {', '.join(table)}")
    return table[value]


def _model(name: str) -> Model:
    if name in MODELS:
        return MODELS[name]
    parts = name.split("/")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(
            f"--for={name!r} must be one of {', '.join(MODELS)}, or HEADS/KV_HEADS/HEAD_DIM as in 64/8/128"
        )
    heads, kv_heads, head_dim = map(int, parts)
    if heads % kv_heads:
        raise typer.BadParameter(f"--for={name!r} must have HEADS that KV_HEADS divide, as in 64/8/128")
    return Model(heads, kv_heads, head_dim)


def _numbers(name: str, value: str) -> list[int]:
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= MOST for part in parts):
        raise typer.BadParameter(f"{name}={value!r} must be numbers from 1 to {MOST} joined by commas")
    return [int(part) for part in parts]
