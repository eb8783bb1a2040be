"""Train one model twice, with tilewise and with standard attention, from the same seed and batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.lab.demo.gpt import GPT
from tilewise.lab.demo.methods import METHODS, STANDARD, TILEWISE, Method
from tilewise.lab.demo.scale import Scale
from tilewise.lab.demo.text import Text, sample, spread

# How far the two loss curves may lie apart: before the first update, in nats a byte; at any step, as a share
# of the fall of the held-out loss. Training amplifies rounding, so the second depends on the learning rate:
# at the CPU's sizes standard attention and torch SDPA came to lie at most 0.012 nats apart over 28 seeds
# (0.03 is allowed), and 0.034 over 8 seeds at twice the learning rate. In bfloat16 they reached 0.12 in one
# run of six, which would tell nothing: so training is in float32 on every device.
FIRST_BOUND = 1e-5
BOUND_SHARE = 0.01

Advance = Callable[[], None]


@dataclass(frozen=True)
class Curve:
    """One training run: the loss of each step before its update, the held-out loss before and after, and the
    time of all steps without compilation."""

    losses: list[float]
    valid_before: float
    valid_after: float
    seconds: float


@dataclass(frozen=True)
class Training:
    tilewise: Curve
    standard: Curve
    model: GPT  # the one trained with tilewise

    @property
    def bound(self) -> float:
        """How far the curves may lie apart at any step, in nats a byte."""
        return BOUND_SHARE * (self.standard.valid_before - self.standard.valid_after)

    @property
    def differences(self) -> list[float]:
        """|loss with tilewise - loss with standard attention| of each step, in nats a byte."""
        return [abs(a - b) for a, b in zip(self.tilewise.losses, self.standard.losses, strict=True)]

    @property
    def largest_difference(self) -> float:
        """Over all steps and the held-out loss. NaN if any is."""
        held_out = abs(self.tilewise.valid_after - self.standard.valid_after)
        return torch.tensor([*self.differences, held_out], dtype=torch.float64).max().item()

    @property
    def coincides(self) -> bool:
        return self.differences[0] <= FIRST_BOUND and self.largest_difference <= self.bound


def train_both(text: Text, scale: Scale, device: torch.device, seed: int, advance: Advance) -> Training:
    tilewise, model = train(METHODS[TILEWISE], text, scale, device, seed, advance)
    standard, _ = train(METHODS[STANDARD], text, scale, device, seed, advance)
    return Training(tilewise, standard, model)


def train(
    attend: Method, text: Text, scale: Scale, device: torch.device, seed: int, advance: Advance
) -> tuple[Curve, GPT]:
    """AdamW with clipped gradients, a warm-up and a linear decay; `advance` is called after each step."""
    torch.manual_seed(seed)
    model = GPT(scale).to(device)
    batches = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale.learning_rate, betas=(0.9, 0.95))
    warm_up = max(1, scale.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, 1 - 0.95 * step / scale.steps)
    )
    held_out = spread(text.valid, 4 * scale.batch, scale.context)
    before = _held_out_loss(model, attend, held_out, scale, device)
    _compile(model, attend, held_out, scale, device)
    losses = []
    start = time.perf_counter()
    for _ in range(scale.steps):
        loss = _loss(model, attend, sample(text.train, scale.batch, scale.context, batches), scale, device)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        advance()
    seconds = time.perf_counter() - start
    return Curve(losses, before, _held_out_loss(model, attend, held_out, scale, device), seconds), model


def _compile(
    model: GPT, attend: Method, windows: tuple[Tensor, Tensor], scale: Scale, device: torch.device
) -> None:
    """One step without an update, so that the time of training has no compilation in it."""
    first = (windows[0][: scale.batch], windows[1][: scale.batch])
    _loss(model, attend, first, scale, device).backward()
    model.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def _held_out_loss(
    model: GPT, attend: Method, windows: tuple[Tensor, Tensor], scale: Scale, device: torch.device
) -> float:
    chunks = zip(windows[0].split(scale.batch), windows[1].split(scale.batch))
    losses = [_loss(model, attend, chunk, scale, device) for chunk in chunks]
    return torch.stack(losses).mean().item()


def _loss(
    model: GPT, attend: Method, windows: tuple[Tensor, Tensor], scale: Scale, device: torch.device
) -> Tensor:
    """Mean cross-entropy in nats a byte."""
    tokens, following = (t.to(device) for t in windows)
    logits = model.logits(model(tokens, [attend] * scale.layers))
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())
