"""An encoder and its training on a long-range task, with one of several attentions."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tilewise.api import attention
from tilewise.lab.long_range.tasks import HELD_OUT, PADDING, TASKS, TRAIN, Batch, Task

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # query, key, value and which keys are real


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in tensors)


def tilewise(q: Tensor, k: Tensor, v: Tensor, is_real: Tensor) -> Tensor:
    return attention(q, k, v, mask=is_real[:, None, None])  # type: ignore[return-value]


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_real: Tensor) -> Tensor:
    mask = is_real[:, None, None]
    q, k, v = _heads_first(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def standard(q: Tensor, k: Tensor, v: Tensor, is_real: Tensor) -> Tensor:
    """The formula, with the N x N matrix in memory."""
    q, k, v = _heads_first(q, k, v)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (scores.masked_fill(~is_real[:, None, None], -math.inf).softmax(-1) @ v).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {"tilewise": tilewise, "sdpa": sdpa, "standard": standard}


@dataclass(frozen=True)
class Settings:
    """Of a training. `seqlen`: the task's own if None. `workers`: processes that make examples.

    `seconds`: those after which it ends even if steps are left; the rate falls in time for that.
    """

    task: str
    attention: str = "tilewise"
    steps: int = 1000
    seconds: float | None = None
    batch: int = 32
    layers: int = 4
    width: int = 256
    heads: int = 4
    lr: float = 5e-4
    warmup: int = 100
    seqlen: int | None = None
    held_out: int = 256
    device: str = "cpu"
    compiles: bool = False
    workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (("task", self.task, TASKS), ("attention", self.attention, ATTENTIONS)):
            if value not in known:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")

    @property
    def what(self) -> Task:
        return TASKS[self.task]

    @property
    def tokens(self) -> int:
        return self.seqlen or self.what.seqlen


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attention) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, is_real: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attend(q, k, v, is_real).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Encoder(nn.Module):
    """Learned positions, layers with LayerNorm first, the mean of real tokens; documents meet in the end."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        task, width = settings.what, settings.width
        self.embedding = nn.Embedding(task.vocabulary, width)
        self.positions = nn.Embedding(settings.tokens, width)
        attend = ATTENTIONS[settings.attention]
        self.layers = nn.ModuleList(Layer(width, settings.heads, attend) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(width)
        features = width if task.documents == 1 else 4 * width
        self.classifier = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, task.classes))
        for embedding in (self.embedding, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Class scores (batch, classes) of tokens (batch, documents, seqlen)."""
        documents = tokens.flatten(0, 1)
        is_real = documents != PADDING
        x = self.embedding(documents) + self.positions.weight
        for layer in self.layers:
            x = layer(x, is_real)
        x = self.norm(x) * is_real[..., None]
        x = (x.sum(1) / is_real.sum(1, keepdim=True)).unflatten(0, tokens.shape[:2])
        first, last = x[:, 0], x[:, -1]
        both = first if x.shape[1] == 1 else torch.cat((first, last, first * last, first - last), -1)
        return self.classifier(both)  # type: ignore[no-any-return]


class _Batches(Dataset[Batch]):
    def __init__(self, settings: Settings, split: str, first: int, last: int) -> None:
        self.settings, self.split, self.first, self.last = settings, split, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, n: int) -> Batch:
        batch = self.settings.batch
        return self.settings.what.batch(
            self.split, (self.first + n) * batch, batch, seqlen=self.settings.tokens
        )


@dataclass
class Progress:
    """What a training has come to; `seconds` are those of its steps."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    accuracy: float | None = None  # of held-out examples, in the end

    @property
    def steps(self) -> int:
        return len(self.losses)


class Training:
    """A model on its way. With a checkpoint that exists, it goes on from there."""

    def __init__(self, settings: Settings, checkpoint: Path | None = None) -> None:
        """Raises ValueError if the checkpoint is of other settings."""
        self.settings, self.checkpoint, self.progress = settings, checkpoint, Progress()
        self.start = time.perf_counter()
        torch.manual_seed(settings.seed)
        self.model = Encoder(settings).to(settings.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        if checkpoint is not None and checkpoint.exists():
            self._load(torch.load(checkpoint, weights_only=True))
        self.scores = torch.compile(self.model) if settings.compiles else self.model

    def run(self, every: int = 100, report: Callable[[Progress], Any] = lambda progress: None) -> Progress:
        """All steps that are left, then the accuracy. `every`: steps between checkpoints, and reports."""
        settings = self.settings
        losses: list[Tensor] = []
        self.start = self._now()
        for batch in self._batches(TRAIN, self.progress.steps, settings.steps):
            if self._time_used(self.progress.seconds + time.perf_counter() - self.start) >= 1:
                break
            losses.append(self.step(batch))
            done = self.progress.steps + len(losses)
            if done % every == 0 or done == settings.steps:
                self._keep(losses, report)
        if losses:
            self._keep(losses, report)
        self.progress.accuracy = self._accuracy()
        return self.progress

    def _keep(self, losses: list[Tensor], report: Callable[[Progress], Any]) -> None:
        """A checkpoint after these steps, which are then forgotten."""
        self.progress.losses += torch.stack(losses).tolist()
        losses.clear()
        self.progress.seconds += self._now() - self.start
        self._save()
        report(self.progress)
        self.start = self._now()

    def _rate(self, step: int) -> float:
        """Linear to the top, then a cosine down to a tenth."""
        warmup, steps = self.settings.warmup, self.settings.steps
        if step < warmup:
            return (step + 1) / warmup
        used = self._time_used(self.progress.seconds + time.perf_counter() - self.start)
        done = max((step - warmup) / max(1, steps - warmup), used)
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, done))

    def _time_used(self, seconds: float) -> float:
        """Which share of the time that the settings give has passed."""
        return 0.0 if self.settings.seconds is None else seconds / self.settings.seconds

    def _batches(self, split: str, first: int, last: int) -> DataLoader[Batch]:
        examples = _Batches(self.settings, split, first, last)
        return DataLoader(examples, batch_size=None, num_workers=self.settings.workers)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss, and how many were right."""
        device = self.settings.device
        tokens, labels = batch.tokens.to(device), batch.labels.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            scores = self.scores(tokens)
        return F.cross_entropy(scores.float(), labels), (scores.argmax(-1) == labels).sum()

    def step(self, batch: Batch) -> Tensor:
        """Train on one batch; its loss."""
        loss, _ = self._loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def _accuracy(self) -> float:
        batches = max(1, self.settings.held_out // self.settings.batch)
        right = [self._loss(batch)[1] for batch in self._batches(HELD_OUT, 0, batches)]
        return float(torch.stack(right).sum()) / (batches * self.settings.batch)

    def _now(self) -> float:
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        parts |= {"settings": asdict(self.settings), "progress": asdict(self.progress)}
        beside = self.checkpoint.with_name(self.checkpoint.name + ".new")
        torch.save(parts, beside)
        os.replace(beside, self.checkpoint)  # whoever is stopped while writing keeps the last one

    def _load(self, parts: dict[str, Any]) -> None:
        free = ("device", "workers", "compiles", "held_out", "seconds")
        for name, value in asdict(self.settings).items():
            if name not in free and parts["settings"][name] != value:
                was = parts["settings"][name]
                raise ValueError(f"{name}={value!r}, but {self.checkpoint} is of a training with {was!r}")
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(parts[name])
        self.progress = Progress(**parts["progress"])
