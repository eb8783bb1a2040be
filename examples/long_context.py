"""Train a small GPT on one long sequence of real text, over all GPUs or over processes of a CPU.

    torchrun --nproc-per-node gpu examples/long_context.py                          # 128k tokens, all GPUs
    torchrun --nproc-per-node gpu examples/long_context.py --seqlen 524288
    torchrun --nproc-per-node 2 examples/long_context.py --seqlen 1024 --width 64   # a CPU
    torchrun --nproc-per-node 2 examples/long_context.py --seqlen 1024 --width 64 --alone

The model knows of no ranks: inside of `context_parallel` its attention is that of the whole sequence, and
token ids, targets and positions are this rank's. What is left to do is to sum losses and gradients.
With --alone the first rank trains a second time, by itself on all tokens: losses must agree up to rounding.

The text is the source of Python's standard library, read as bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise
from tilewise.distributed import context_parallel
from tilewise.rotary import apply_rotary, rotary_tables


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out = tilewise.attention(apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v, causal=True)
        x = x + self.out(out.flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Rotary positions, LayerNorm before each part, and an output tied to the embedding of bytes."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """The sum of the losses of these tokens; all three (1, tokens)."""
        cos, sin = rotary_tables(positions[0], self.head_dim)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def read_text(num_bytes: int) -> Tensor:
    """The first bytes of the standard library's source, from its beginning again if it is too short."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    text *= -(-num_bytes // len(text))
    return torch.frombuffer(bytearray(text[:num_bytes]), dtype=torch.uint8).long()


def train(args: argparse.Namespace, device: torch.device, is_shared: bool) -> list[float]:
    """The loss of each step; `is_shared`: over all ranks."""
    torch.manual_seed(0)
    model = GPT(args.width, args.heads, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    text = read_text(args.steps * args.seqlen + 1)
    losses = []
    for step in range(args.steps):
        window = text[step * args.seqlen :][: args.seqlen + 1].to(device)
        tokens, targets = window[None, :-1].clone(), window[None, 1:].clone()
        buffers = [tokens, targets, torch.arange(args.seqlen, device=device)[None]]
        shards = context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 1], method=args.method)
        start = time.perf_counter()
        with shards if is_shared else contextlib.nullcontext():
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(*buffers) / args.seqlen
            optimizer.zero_grad()
            loss.backward()
        loss = loss.detach()
        if is_shared:
            for t in (loss, *(p.grad for p in model.parameters())):
                dist.all_reduce(t)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        speed = args.seqlen / (time.perf_counter() - start)
        say(f"step {step}: loss {losses[-1]:.5f}, {speed:,.0f} tokens/s")
    return losses


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def start_ranks() -> torch.device:
    """This rank's device, in a process group of those that torchrun has started."""
    if "RANK" not in os.environ:
        sys.exit("start it by torchrun, as torchrun --nproc-per-node 2 examples/long_context.py")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


Losses = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None, device: torch.device | None = None) -> Losses:
    """The losses of all steps, "together" and "alone". device: given where ranks have started already."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    for name, default in (("seqlen", 131072), ("steps", 10), ("width", 512), ("heads", 8), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--method", default="auto", help="of context_parallel")
    parser.add_argument("--alone", action="store_true", help="train on the first rank alone as well")
    args = parser.parse_args(arguments)
    owns_group = device is None
    device = device or start_ranks()
    say(f"{args.seqlen:,} tokens over {dist.get_world_size()} ranks")
    losses = {"together": train(args, device, is_shared=True)}
    if args.alone and dist.get_rank() == 0:
        say("alone")
        losses["alone"] = train(args, device, is_shared=False)
        gaps = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
        say(f"losses differ by at most {max(gaps):.1e}")
    dist.barrier()
    if owns_group:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
