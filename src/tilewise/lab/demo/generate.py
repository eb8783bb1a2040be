"""Generate text with a KV cache and by computing everything anew for each token."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import tilewise
from tilewise.lab.demo.gpt import GPT, NUM_BYTES
from tilewise.lab.demo.methods import tiled
from tilewise.lab.demo.scale import Scale
from tilewise.lab.demo.text import Text
from tilewise.lab.demo.train import Advance

TEMPERATURE = 0.7
SCORE_BOUND = 1e-3  # in float32, where scores are of the order of 10; rounding was seen to give up to 3e-5


@dataclass(frozen=True)
class Run:
    """Tokens in order, the time since the start at which each was known, and each one's scores (n, 256)."""

    tokens: list[int]
    elapsed: list[float]
    scores: Tensor

    @property
    def seconds(self) -> float:
        return self.elapsed[-1]


@dataclass(frozen=True)
class Generation:
    prompt: bytes
    cached: Run
    recomputed: Run
    cache_bytes: int

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that is not the same in both, or None."""
        pairs = enumerate(zip(self.cached.tokens, self.recomputed.tokens, strict=True))
        return next((n for n, (a, b) in pairs if a != b), None)

    @property
    def score_difference(self) -> float:
        """The largest difference of a score, over the tokens that had the same past."""
        same = len(self.cached.tokens) if self.first_difference is None else self.first_difference + 1
        return (self.cached.scores[:same] - self.recomputed.scores[:same]).abs().max().item()

    @property
    def agrees(self) -> bool:
        """The tokens are the same, and not by luck: so are the scores, but for rounding."""
        return self.first_difference is None and self.score_difference <= SCORE_BOUND

    @property
    def closest_choice(self) -> float:
        """By how much the winning score beat the runner-up where the choice was closest."""
        best = self.cached.scores.topk(2, -1).values
        return (best[:, 0] - best[:, 1]).min().item()


NextLogits = Callable[[Tensor], Tensor]  # tokens so far (1, n) -> logits of the next one (256,)


@torch.no_grad()
def generate_both(
    model: GPT, text: Text, scale: Scale, device: torch.device, seed: int, advance: Advance
) -> Generation:
    """Sample from `model` twice with the same random numbers, in float32."""
    prompt = text.valid[: scale.prompt].long().to(device)[None]
    # Gumbel noise: the largest noisy score is a sample, so only the two largest scores can be confused.
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(scale.new_tokens, NUM_BYTES, generator=generator, dtype=torch.float64)
    noise = -torch.log(-torch.log(uniform.clamp_(1e-12, 1 - 1e-12))).float().to(device)

    def caches() -> list[tilewise.KVCache]:
        shape = (1, scale.prompt + scale.new_tokens, scale.heads, scale.head_dim)
        return [tilewise.KVCache(*shape, dtype=torch.float32, device=device) for _ in range(scale.layers)]

    for next_logits in (from_cache(model, caches()), from_scratch(model)):  # warm-up
        generate(next_logits, prompt, noise[:3], lambda: None)
    used = caches()
    cached = generate(from_cache(model, used), prompt, noise, advance)
    recomputed = generate(from_scratch(model), prompt, noise, advance)
    bytes_held = sum(cache.memory_bytes() for cache in used)
    return Generation(bytes(prompt[0].tolist()), cached, recomputed, bytes_held)


def from_cache(model: GPT, caches: list[tilewise.KVCache]) -> NextLogits:
    """Feeds only the tokens that the caches have not seen."""
    attends = [functools.partial(_attend_cached, cache) for cache in caches]
    seen = 0

    def next_logits(tokens: Tensor) -> Tensor:
        nonlocal seen
        hidden = model(tokens[:, seen:], attends, start=seen)
        seen = tokens.shape[1]
        return model.logits(hidden[0, -1])

    return next_logits


def from_scratch(model: GPT) -> NextLogits:
    """Feeds all tokens every time."""
    attends = [tiled] * len(model.blocks)
    return lambda tokens: model.logits(model(tokens, attends)[0, -1])


def _attend_cached(cache: tilewise.KVCache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return tilewise.attention_with_cache(query, cache, key, value)  # type: ignore[return-value]


def generate(next_logits: NextLogits, prompt: Tensor, noise: Tensor, advance: Advance) -> Run:
    tokens, chosen, elapsed, scores = prompt, [], [], []
    start = time.perf_counter()
    for gumbel in noise:
        score = next_logits(tokens) / TEMPERATURE + gumbel
        token = score.argmax()
        tokens = torch.cat((tokens, token.view(1, 1)), 1)
        chosen.append(int(token))  # waits for the device
        elapsed.append(time.perf_counter() - start)
        scores.append(score)
        advance()
    return Run(chosen, elapsed, torch.stack(scores).cpu())
