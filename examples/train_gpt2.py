"""Train GPT-2 (124M) on real text with several attentions: loss, tokens a second, peak memory.

    python examples/train_gpt2.py                         # tilewise, SDPA and standard attention, seqlen 1024
    python examples/train_gpt2.py --seqlen 8192 --batch 2 --attention tilewise sdpa
    python examples/train_gpt2.py --device cpu --eager --layers 2 --width 64 --heads 2 --seqlen 64 --steps 5

The text is the source of Python's standard library, read as bytes (the vocabulary is GPT-2's in size only).
Every attention starts from the same weights and sees the same batches, so losses must agree up to rounding.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # (batch, seqlen, heads, head_dim) each
WARMUP_STEPS = 5  # compilation and first allocations are not timed


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own choice of a fused kernel."""
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula, with the N x N matrix in memory."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tilewise.attention(q, k, v, causal=True)


ATTENTIONS: dict[str, Attention] = {"tilewise": tiled, "sdpa": sdpa, "standard": standard}


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


def train(args: argparse.Namespace, attend: Attention, text: Tensor) -> Run:
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = GPT2(args, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    loss_of = model if args.eager else torch.compile(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for step in range(args.steps):
        starts = torch.randint(len(text) - args.seqlen - 1, (args.batch, 1))
        window = text[starts + torch.arange(args.seqlen + 1)].long().to(device)
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(window[:, :-1], window[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())  # waits for the device
        if step >= min(WARMUP_STEPS, args.steps - 1):
            seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return Run(losses, args.batch * args.seqlen / statistics.median(seconds), peak)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    sizes = {"seqlen": 1024, "batch": 16, "steps": 200, "layers": 12, "width": 768, "heads": 12}
    for name, default in (sizes | {"vocabulary": 50304}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    args = parse(argv)
    text = read_text(8 << 20)
    runs = {name: train(args, ATTENTIONS[name], text) for name in args.attention}
    first = next(iter(runs.values()))
    print(
        f"{'attention':10} {'tokens/s':>10} {'peak GiB':>9} {'first loss':>10} {'last loss':>10} {'apart':>8}"
    )
    for name, run in runs.items():
        apart = max(abs(a - b) for a, b in zip(run.losses, first.losses, strict=True))
        numbers = (
            f"{run.tokens_per_second:10.0f} {run.peak_gib:9.2f} {run.losses[0]:10.4f} {run.losses[-1]:10.4f}"
        )
        print(f"{name:10} {numbers} {apart:8.4f}")
    return runs


if __name__ == "__main__":
    main()
