"""SnapKV on a `KVCache`: after a prompt, keep the keys that its last queries attended to.

    python examples/kv_eviction.py                        # trains a small byte-level GPT, then compares
    python examples/kv_eviction.py --budget 64 --window 16

The prompt fills one cache a layer. Each call also gives the column sums of its last `window` queries,
exactly and without an N × N matrix: `return_aux=Aux(column_sum=True, last_rows=window)`. Each head keeps
the keys with the largest sums, smoothed over neighbours, and the window itself (SnapKV, 2024); the rest is
dropped. Then the loss on the text that follows is compared with that of a whole cache, and of one that
keeps only the last keys. The text is the source of Python's standard library, held out from training.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise import Aux, KVCache
from tilewise.lab.demo.gpt import GPT
from tilewise.lab.demo.scale import CPU
from tilewise.lab.demo.text import Text, sample, spread, standard_library

SCALE = replace(CPU, layers=2, heads=4, head_dim=16, context=256, batch=4)
NEIGHBOURS = 7  # keys over which sums are smoothed, by their maximum


class Prefill(NamedTuple):
    """One layer's cache after the prompt, and what its last queries attended to, (batch, heads, capacity)."""

    cache: KVCache
    column_sum: Tensor


def train(text: Text, steps: int) -> GPT:
    generator = torch.Generator().manual_seed(0)
    model = GPT(SCALE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    attends = [lambda q, k, v: tilewise.attention(q, k, v, causal=True)] * SCALE.layers
    for _ in range(steps):
        tokens, targets = sample(text.train, SCALE.batch, SCALE.context, generator)
        loss = F.cross_entropy(model.logits(model(tokens, attends)).flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def prefill(model: GPT, prompt: Tensor, capacity: int, window: int) -> list[Prefill]:
    """Run the prompt (batch, seqlen) into new caches."""
    found: list[Prefill] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = KVCache(len(prompt), capacity, k.shape[2], k.shape[3], dtype=k.dtype)
        aux = Aux(column_sum=True, last_rows=window)
        out, statistics = tilewise.attention_with_cache(q, cache, k, v, return_aux=aux)
        found.append(Prefill(cache, statistics.column_sum))
        return out

    model(prompt, [attend] * SCALE.layers)
    return found


def snapkv(column_sum: Tensor, seqlen: int, budget: int, window: int) -> Tensor:
    """The keys that each head keeps, ascending (batch, heads, budget): the window, and the most attended."""
    earlier = column_sum[..., : seqlen - window]
    smoothed = F.max_pool1d(earlier, NEIGHBOURS, stride=1, padding=NEIGHBOURS // 2)
    best = smoothed.topk(budget - window, -1).indices.sort(-1).values
    last = torch.arange(seqlen - window, seqlen).expand(*best.shape[:2], -1)
    return torch.cat([best, last], -1)


def last_keys(column_sum: Tensor, seqlen: int, budget: int) -> Tensor:
    return torch.arange(seqlen - budget, seqlen).expand(*column_sum.shape[:2], -1)


def evicted(cache: KVCache, kept: Tensor, capacity: int) -> KVCache:
    """A cache of the kept keys alone, (batch, heads, budget). Keys have their rotation, so they may move."""
    batch, _, budget = kept.shape
    small = KVCache(batch, capacity, *cache.key.shape[2:], dtype=cache.key.dtype)
    index = kept.transpose(1, 2)[..., None].expand(-1, -1, -1, cache.key.shape[-1])
    small.key[:, :budget] = cache.key.gather(1, index)
    small.value[:, :budget] = cache.value.gather(1, index)
    small.lengths.fill_(budget)
    return small


@torch.no_grad()
def continuation_loss(
    model: GPT, caches: Sequence[KVCache], tokens: Tensor, targets: Tensor, start: int
) -> float:
    """Mean loss, in nats a byte, of the text from position `start` on, with the caches before it."""
    attends = [lambda q, k, v, cache=cache: tilewise.attention_with_cache(q, cache, k, v) for cache in caches]
    logits = model.logits(model(tokens, attends, start))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=192, help="bytes")
    parser.add_argument("--new", type=int, default=64, help="bytes that follow, whose loss is measured")
    parser.add_argument("--budget", type=int, default=48, help="keys that each head keeps")
    parser.add_argument("--window", type=int, default=16, help="last queries that choose them")
    chosen = parser.parse_args(arguments)
    seqlen, new, budget, window = chosen.prompt, chosen.new, chosen.budget, chosen.window
    if not 0 < window < budget <= seqlen:
        parser.error("--window must be below --budget, and that at most --prompt")
    torch.manual_seed(0)
    text = standard_library()
    model = train(text, chosen.steps)
    tokens, targets = spread(text.valid, chosen.texts, seqlen + new)
    layers = prefill(model, tokens[:, :seqlen], seqlen + new, window)
    kept = {
        "last keys": [last_keys(layer.column_sum, seqlen, budget) for layer in layers],
        "SnapKV": [snapkv(layer.column_sum, seqlen, budget, window) for layer in layers],
    }
    caches = {
        name: [
            evicted(layer.cache, keys, budget + new) for layer, keys in zip(layers, of_layers, strict=True)
        ]
        for name, of_layers in kept.items()
    }
    caches["whole cache"] = [layer.cache for layer in layers]  # last: it is written to
    losses = {
        name: continuation_loss(model, of_layers, tokens[:, seqlen:], targets[:, seqlen:], seqlen)
        for name, of_layers in caches.items()
    }
    print(f"{budget} of {seqlen} keys are kept: {1 - budget / seqlen:.0%} of the cache's memory saved")
    for layer, keys in enumerate(kept["SnapKV"]):
        ages = [f"{(seqlen - head).double().mean():.0f}" for head in keys[0]]
        print(
            f"layer {layer}: mean age in bytes of the keys that each head keeps, first text: {' '.join(ages)}"
        )
    for name in ("whole cache", "SnapKV", "last keys"):
        print(f"{name:12} loss {losses[name]:.4f}  ({losses[name] - losses['whole cache']:+.4f})")
    return losses


if __name__ == "__main__":
    main()
