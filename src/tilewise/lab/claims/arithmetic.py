"""Claims that need no clock: sizes, counts of bytes and operations, worked numbers, rounding errors."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import tilewise
from tilewise.core import fp8
from tilewise.lab.claims.claim import FA1, FA3, TUTORIAL, Measured, Setting, claim
from tilewise.lab.learn import io_model, kv_memory, trace
from tilewise.lab.learn.counts import Shape
from tilewise.lab.learn.examples import EXAMPLES
from tilewise.lab.learn.machines import MACHINES

ONE_HEAD = Shape(4096, 4096, 64)


@claim("io-forward", "The forward moves 10 times fewer bytes to and from device memory.", TUTORIAL, 10, "×")
def io_forward(setting: Setting) -> Measured:
    standard, tiled = io_model.standard(ONE_HEAD), io_model.fa2(ONE_HEAD)
    return Measured(
        standard.slow_bytes / tiled.slow_bytes,
        "counted from the loops: 4,096 tokens, head size 64, tiles 128 × 128",
        f"{standard.once_bytes / tiled.once_bytes:.0f}× where K and V stay in the L2 cache",
    )  # fmt: skip


@claim(
    "score-matrix", "A score matrix of 131,072 tokens takes 34 GB in float16.", TUTORIAL, 34, "GB", "equal"
)
def score_matrix(setting: Setting) -> Measured:
    return Measured(kv_memory.score_matrix_bytes(131072) / 1e9, "counted", "32 GiB")


@claim(
    "kv-cache-70b", "The cache of Llama 2 70B takes 10.5 GB at 4,096 tokens.", TUTORIAL, 10.5, "GB", "equal"
)
def kv_cache_70b(setting: Setting) -> Measured:
    model = kv_memory.MODELS["llama-2-70b"]
    every_head = model.with_every_head().cache_bytes(4096) / 1e9
    return Measured(
        model.cache_bytes(4096) / 1e9,
        "counted, 16 bits",
        f"{every_head:.1f} GB if each of its 64 heads had keys",
    )


@claim("gqa-saving", "Shared key heads make a cache 8 times smaller.", TUTORIAL, 8, "×", "equal")
def gqa_saving(setting: Setting) -> Measured:
    sizes = [
        tilewise.KVCache(1, 4096, heads, 128, dtype=torch.float16, device=setting.device).memory_bytes()
        for heads in (64, 8)
    ]
    return Measured(sizes[0] / sizes[1], "two caches in memory: 64 and 8 key heads, 4,096 tokens")


def _balance(setting: Setting, gpu: str) -> Measured:
    return Measured(MACHINES[gpu].device.balance, "from the datasheet")


for _gpu, _flops in (("A100", 156), ("H100", 295)):
    _says = f"An {_gpu} needs {_flops} FLOPs for each byte to be busy."
    claim(f"balance-{_gpu.lower()}", _says, TUTORIAL, _flops, "FLOP/byte", "equal")(
        partial(_balance, gpu=_gpu)
    )


@claim("running-sum", "The running sum of the scores 2, 5 and 3 is 1.19.", TUTORIAL, 1.19, "", "equal")
def running_sum(setting: Setting) -> Measured:
    query, key = torch.ones(1, 1), torch.tensor([[2.0], [5.0], [3.0]])
    steps = trace.forward(query, key, torch.eye(3), 1, 2, scale=1.0).steps
    return Measured(float(steps[-1].l), "traced in float64")


def _four_tokens() -> trace.BackwardTrace:
    t = EXAMPLES["tiling-4x4"].tensors()
    assert t.dout is not None
    return trace.backward(t.query, t.key, t.value, t.dout, 2, 2, scale=EXAMPLES["tiling-4x4"].scale)


@claim(
    "delta-by-hand",
    "The first row sum of dO ∘ O in the 4 × 4 example is 34.83.",
    TUTORIAL,
    34.83,
    "",
    "equal",
)
def delta_by_hand(setting: Setting) -> Measured:
    return Measured(float(_four_tokens().delta[0]), "traced in float64")


@claim("dq-by-hand", "dQ[0, 1] in the 4 × 4 example is 1.18.", TUTORIAL, 1.18, "", "equal")
def dq_by_hand(setting: Setting) -> Measured:
    return Measured(float(_four_tokens().dq[0, 1]), "traced in float64")


@claim(
    "fp8-error", "Incoherent processing makes the error of 8-bit attention 2.6 times smaller.", FA3, 2.6, "×"
)
def fp8_error(setting: Setting) -> Measured:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1024, 4, 128)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    for t in (q, k, v):
        t[torch.rand(shape, generator=generator) < 1e-3] *= 10.0
    exact = tilewise.attention(q.double(), k.double(), v.double())
    ours = tilewise.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), precision="fp8", backend="tiled")
    errors = [float((out.double() - exact).square().mean().sqrt()) for out in (_one_scale(q, k, v), ours)]
    return Measured(
        errors[0] / errors[1], "1 in 1,000 entries × 10, 1,024 tokens, head size 128",
        "beside one scale for each head and no rotation",
    )  # fmt: skip


def _one_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """8-bit attention without blocks or rotation, sums in float64."""
    q, k, v = (_rounded_per_head(t).double().transpose(1, 2) for t in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    rounded = fp8.round_weights(weights.float()).double()
    return (rounded @ v / weights.sum(-1, keepdim=True)).transpose(1, 2)


def _rounded_per_head(x: Tensor) -> Tensor:
    """x (batch, seqlen, heads, dim) in 8 bits with one scale for each head."""
    scale = x.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@claim("exact", "The result is that of standard attention, not an approximation.", FA1, 1, "× its error")
def exact(setting: Setting) -> Measured:
    q, k, v = (torch.randn(1, 2048, 4, 64, device=setting.device) for _ in range(3))
    double = tilewise.reference.attention(q, k, v, dtype=torch.float64)[0]
    ours = tilewise.attention(q, k, v, causal=False).double()
    standard = tilewise.reference.attention(q, k, v, dtype=torch.float32)[0].double()
    errors = [float((out - double).abs().mean()) for out in (standard, ours)]
    return Measured(errors[0] / errors[1], "mean error of PyTorch's formula over ours, float32, 2,048 tokens")
