"""8-bit attention on a trained model: the error of its Q, K and V, and the perplexity on held-out text.

    python examples/eight_bits.py                     # trains a small GPT first, some minutes on a CPU
    python examples/eight_bits.py --save qkv.pt       # and keeps what its layers attend with

A byte-level GPT learns the source of Python's standard library in float32. Then it reads modules that it has
not seen, its attention in bfloat16, in precision="fp8" and in precision="int8". Errors are RMS against
float64, over that of FlashAttention-3's way: float8_e4m3fn, one scale for each head, nothing rotated.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise.core import fp8
from tilewise.lab.demo.gpt import GPT
from tilewise.lab.demo.scale import QUICK
from tilewise.lab.demo.text import sample, spread, standard_library

SCALE = replace(QUICK, layers=3, heads=2, head_dim=64, context=256, batch=8, learning_rate=3e-3)
PRECISIONS = ("ieee", "fp8", "int8")

Qkv = tuple[Tensor, Tensor, Tensor]
Round = Callable[[Tensor], Tensor]


def train(steps: int) -> GPT:
    torch.manual_seed(0)
    model, text = GPT(SCALE), standard_library().train
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    attends = [lambda q, k, v: tilewise.attention(q, k, v, causal=True)] * SCALE.layers
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = SCALE.learning_rate * min(1, (step + 1) / 20) * max(0.05, 1 - step / steps)
        tokens, targets = sample(text, SCALE.batch, SCALE.context, generator)
        loss = F.cross_entropy(model.logits(model(tokens, attends)).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@torch.no_grad()
def read(model: GPT, precision: str, windows: int) -> tuple[float, list[Qkv]]:
    """Perplexity of a byte of held-out text, and q, k and v (windows, context, heads, 64) of each layer."""
    kept: list[Qkv] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.bfloat16() for t in (q, k, v))
        kept.append((q, k, v))
        return tilewise.attention(q, k, v, causal=True, precision=precision).float()

    tokens, targets = spread(standard_library().valid, windows, SCALE.context)
    logits = model.logits(model(tokens, [attend] * SCALE.layers))
    return math.exp(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()), kept


# ---- errors


def errors(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> dict[str, float]:
    """RMS errors of the output, by the way in which q, k and v (batch, seqlen, heads, dim) are rounded."""
    exact = tilewise.attention(q.double(), k.double(), v.double(), causal=causal)

    def error(out: Tensor) -> float:
        return (out.double() - exact).square().mean().sqrt().item()

    turned, width = (fp8.rotate(q), fp8.rotate(k)), fp8.padded_dim(q.shape[-1])
    ways = {
        "a scale a head": attend(q, k, v, causal, per_head, per_head, 1),
        "int8, a scale a head": attend(*turned, v, causal, integers_per_head, in_blocks, width),
        "int8, not rotated": attend(q, k, v, causal, integers_in_blocks, in_blocks, 1),
    }
    ours = {p: tilewise.attention(q, k, v, causal=causal, precision=p) for p in PRECISIONS}
    return {name: error(out) for name, out in (ways | ours).items()}


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, qk: Round, of_v: Round, width: int) -> Tensor:
    """Attention of rounded numbers and weights, sums in float64, O(N^2); q k^T is `width` times too large."""
    scale = v.shape[-1] ** -0.5 / width
    q, k, v = (round_(t).double().transpose(1, 2) for round_, t in ((qk, q), (qk, k), (of_v, v)))
    s = scale * (q @ k.mT)
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    p = torch.exp(s - s.amax(-1, keepdim=True))
    return (fp8.round_weights(p.float()).double() @ v / p.sum(-1, keepdim=True)).transpose(1, 2)


def per_head(x: Tensor) -> Tensor:
    scale = x.float().abs().amax((1, 3), keepdim=True) / fp8.LARGEST
    return (x / scale).to(fp8.FP8).float() * scale


def integers_per_head(x: Tensor) -> Tensor:
    scale = x.float().abs().amax((1, 3), keepdim=True) / fp8.LARGEST_INTEGER
    return (x / scale).round() * scale


def in_blocks(x: Tensor, dtype: torch.dtype = fp8.FP8) -> Tensor:
    return fp8.round_rows(x.transpose(1, 2), dtype).dequantize().transpose(1, 2)


def integers_in_blocks(x: Tensor) -> Tensor:
    return in_blocks(x, torch.int8)


def drawn(name: str, seqlen: int) -> Qkv:
    """q, k and v (1, seqlen, 4, 128), bfloat16, normal but for what the name says."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, seqlen, 4, 128, generator=generator) for _ in range(3)]
    for n, t in enumerate(tensors):
        if name == "0.1% of entries x 10":
            t[torch.rand(t.shape, generator=generator) < 1e-3] *= 10
        elif name == "2 columns of q, k x 8" and n < 2:
            t[..., :2] *= 8
        elif name == "1 token in 256 of q, k x 8" and n < 2:
            t[:, ::256] *= 8
    q, k, v = (t.bfloat16() for t in tensors)
    return q, k, v


DRAWN = ("normal", "0.1% of entries x 10", "2 columns of q, k x 8", "1 token in 256 of q, k x 8")


def main(arguments: Sequence[str] | None = None) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--windows", type=int, default=16, help="of held-out text")
    parser.add_argument("--seqlen", type=int, default=1024, help="of the drawn tensors")
    parser.add_argument("--save", help="file for q, k and v of each layer")
    chosen = parser.parse_args(arguments)
    model = train(chosen.steps)
    perplexity, kept = {}, []
    for precision in PRECISIONS:
        perplexity[precision], qkv = read(model, precision, chosen.windows)
        kept = kept or qkv
    if chosen.save:
        torch.save(kept, chosen.save)
    table = {name: errors(*drawn(name, chosen.seqlen)) for name in DRAWN}
    table |= {f"trained, layer {n}": errors(*qkv, causal=True) for n, qkv in enumerate(kept)}
    names = [name for name in next(iter(table.values())) if name != "a scale a head"]
    print(f"{'RMS error, over a scale a head':32}", *(f"{name:>20}" for name in names))
    for row, found in table.items():
        print(f"{row:32}", *(f"{found[name] / found['a scale a head']:20.3f}" for name in names))
    print("perplexity:", ", ".join(f"{p} {value:.4f}" for p, value in perplexity.items()))
    return table, perplexity


if __name__ == "__main__":
    main()
