"""Train GPT-2 (124M) on real text with several attentions: loss, tokens a second, peak memory.

    python examples/train_gpt2.py                         # every attention that the device has, seqlen 1024
    python examples/train_gpt2.py --seqlen 8192 --batch 2 --attention tilewise cudnn flash flex
    python examples/train_gpt2.py --device cpu --eager --layers 2 --width 64 --heads 2 --seqlen 64 --steps 9

The text is the source of Python's standard library, read as bytes (the vocabulary is GPT-2's in size only).
Every attention starts from the same weights and sees the same batches, so losses must agree up to rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tilewise

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # (batch, seqlen, heads, head_dim) each
WARMUP_STEPS = 5  # compilation and first allocations are not timed
RAMP_STEPS = 100  # of the learning rate: without, rounding alone decides when a run spikes


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's fused kernel, of the backend that is switched on."""
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula, with the N x N matrix in memory."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tilewise.attention(q, k, v, causal=True)  # type: ignore[return-value]


def flex(seqlen: int, device: str) -> Attention:
    """FlexAttention with the block mask of causal attention."""
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return flex_attention(*heads_first, block_mask=mask).transpose(1, 2)  # type: ignore[union-attr]

    return attend


ATTENTIONS = ("tilewise", "cudnn", "flash", "flex", "standard")
GPU_ONLY = ("cudnn", "flex")  # PyTorch trains with them on a GPU only
SDPA_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def make_attention(name: str, seqlen: int, device: str) -> Attention:
    if name == "flex":
        return flex(seqlen, device)
    return {"tilewise": tiled, "standard": standard}.get(name, sdpa)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attention) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Learned positions, LayerNorm before each part, and an output tied to the embedding, as in GPT-2."""

    def __init__(self, args: argparse.Namespace, attend: Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(args.seqlen, args.width)
        self.blocks = nn.Sequential(*(Block(args.width, args.heads, attend) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                depth = (2 * args.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * depth)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@dataclass
class Run:
    """What one attention came to."""

    losses: list[float]
    tokens_per_second: float
    peak_gib: float  # 0 on the CPU, where it is not measured


def read_text(num_bytes: int) -> Tensor:
    """The first bytes of the standard library's source."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b""
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Trainer:
    """One model with one attention; the same weights and batches whatever the attention."""

    def __init__(self, args: argparse.Namespace, name: str, text: Tensor) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()  # compile anew: the last model's code was another attention's
        self.args, self.backend = args, SDPA_BACKENDS.get(name)
        self.batches = torch.Generator().manual_seed(1)
        self.text = text.to(args.device)
        model = GPT2(args, make_attention(name, args.seqlen, args.device)).to(args.device)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.01, total_iters=RAMP_STEPS)
        self.model, self.loss_of = model, model if args.eager else torch.compile(model)
        self.losses: list[Tensor] = []

    def steps(self, count: int) -> float:
        """Train on `count` batches; the seconds they took. Losses are not read until then."""
        began = self._now()
        with sdpa_kernel(self.backend) if self.backend else contextlib.nullcontext():
            for _ in range(count):
                self._step()
        return self._now() - began

    def _step(self) -> None:
        args = self.args
        starts = torch.randint(len(self.text) - args.seqlen - 1, (args.batch, 1), generator=self.batches)
        window = self.text[(starts + torch.arange(args.seqlen + 1)).to(args.device)].long()
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            loss = self.loss_of(window[:, :-1], window[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def _now(self) -> float:
        if self.args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def train(args: argparse.Namespace, name: str, text: Tensor, ready: Callable[[], Any] = lambda: None) -> Run:
    """All steps of one attention. `ready` is called between those that warm up and those that are timed."""
    trainer = Trainer(args, name, text)
    trainer.steps(WARMUP_STEPS)
    ready()
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = trainer.steps(args.steps - WARMUP_STEPS)
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    tokens = args.batch * args.seqlen * (args.steps - WARMUP_STEPS)
    return Run(torch.stack(trainer.losses).tolist(), tokens / seconds, peak)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, help="default: all of the device's")
    sizes = {"seqlen": 1024, "batch": 16, "steps": 200, "layers": 12, "width": 768, "heads": 12}
    for name, default in (sizes | {"vocabulary": 50304}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json", type=Path, help="write sizes and results to this file")
    args = parser.parse_args(argv)
    if args.attention is None:
        args.attention = [n for n in ATTENTIONS if args.device == "cuda" or n not in GPU_ONLY]
    if args.steps <= WARMUP_STEPS:
        parser.error(f"--steps={args.steps} must be more than the {WARMUP_STEPS} that are not timed")
    return args


def report(runs: dict[str, Run]) -> str:
    """A table; `apart` is the largest difference of a loss to the first attention's."""
    first = next(iter(runs.values()))
    lines = [f"{'':10}{'tokens/s':>10}{'ratio':>7}{'peak GiB':>10}{'first loss':>12}{'last':>8}{'apart':>8}"]
    for name, run in runs.items():
        apart = max(abs(a - b) for a, b in zip(run.losses, first.losses))
        lines.append(
            f"{name:10}{run.tokens_per_second:10.0f}{run.tokens_per_second / first.tokens_per_second:7.2f}"
            f"{run.peak_gib:10.2f}{run.losses[0]:12.4f}{run.losses[-1]:8.4f}{apart:8.4f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    args = parse(argv)
    text = read_text(8 << 20)
    runs = {name: train(args, name, text) for name in args.attention}
    print(report(runs))
    if args.json:
        results = {name: asdict(run) for name, run in runs.items()}
        args.json.write_text(json.dumps({"arguments": vars(args) | {"json": None}, "runs": results}))
    return runs


if __name__ == "__main__":
    main()
