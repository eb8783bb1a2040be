"""Train a small GPT on several processes by FSDP2, accelerate or Lightning, its blocks compiled.

    torchrun --nproc-per-node gpu examples/data_parallel.py fsdp2         # all GPUs
    torchrun --nproc-per-node 2 examples/data_parallel.py fsdp2           # two processes of a CPU
    torchrun --nproc-per-node 2 examples/data_parallel.py accelerate      # pip install accelerate
    torchrun --nproc-per-node 2 examples/data_parallel.py lightning       # pip install lightning
    python examples/data_parallel.py alone                                # the same batches, one process

Attention needs nothing from any of them: it is an operator of PyTorch's that computes on what it is given.
Each prints the mean loss of every step, which is that of `alone` up to rounding.

The text is the source of Python's standard library, read as bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tilewise


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(tilewise.attention(q, k, v, causal=True).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Learned positions, LayerNorm before each part, bytes in and out."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, args.width)
        self.positions = nn.Embedding(args.seqlen, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm, self.logits = nn.LayerNorm(args.width), nn.Linear(args.width, 256)
        for block in self.blocks:
            block.compile(fullgraph=True, backend=args.compiler)

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss; text: (batch, seqlen + 1) bytes."""
        tokens, targets = text[:, :-1], text[:, 1:]
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), targets.flatten())


def make(args: argparse.Namespace) -> tuple[GPT, TensorDataset]:
    """The same on every rank: the model, and as many rows of text as the steps of all ranks take."""
    torch.manual_seed(0)
    rows = args.steps * args.batch
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))[: rows * (args.seqlen + 1)]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(rows, -1)
    return GPT(args), TensorDataset(data)


def world_of(args: argparse.Namespace) -> tuple[int, int]:
    """How many ranks there are, and the batch of each."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch % world:
        raise SystemExit(f"--batch {args.batch} must divide by the {world} processes")
    return world, args.batch // world


def train(model: nn.Module, batches: Iterable[Sequence[Tensor]], lr: float) -> list[Tensor]:
    """Plain PyTorch: the losses of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for (text,) in batches:
        loss = model(text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def alone(args: argparse.Namespace) -> list[Tensor]:
    model, data = make(args)
    return train(model, DataLoader(data, args.batch), args.lr)


def fsdp2(args: argparse.Namespace) -> list[Tensor]:
    """Parameters, gradients and optimiser states in shards: each block is gathered when it is needed."""
    if "RANK" not in os.environ:
        sys.exit("start it by torchrun, as torchrun --nproc-per-node 2 examples/data_parallel.py fsdp2")
    _, batch = world_of(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    model, data = make(args)
    model.to(device)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    rows = DataLoader(data, batch, sampler=DistributedSampler(data, shuffle=False))
    return train(model, ([text.to(device)] for (text,) in rows), args.lr)


def accelerate(args: argparse.Namespace) -> list[Tensor]:
    from accelerate import Accelerator

    _, batch = world_of(args)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model, data = make(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer, rows = accelerator.prepare(model, optimizer, DataLoader(data, batch))
    losses = []
    for (text,) in rows:
        loss = model(text)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def lightning(args: argparse.Namespace) -> list[Tensor]:
    import lightning as L

    world, batch = world_of(args)
    gpt, data = make(args)

    class Training(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = gpt
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.gpt(batch[0])
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=args.lr)

    training = Training()
    trainer = L.Trainer(
        accelerator="auto", devices=world, strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    rows = DataLoader(
        data, batch, sampler=DistributedSampler(data, world, trainer.global_rank, shuffle=False)
    )
    trainer.fit(training, rows)
    return training.losses


WAYS = {way.__name__: way for way in (alone, fsdp2, accelerate, lightning)}


def main(argv: Sequence[str] | None = None) -> list[float]:
    """The mean loss of each step over all ranks, on every rank."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("way", choices=WAYS)
    for name, default in {
        "batch": 8,
        "seqlen": 256,
        "width": 128,
        "heads": 4,
        "layers": 4,
        "steps": 20,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--compiler", default="inductor", help="torch.compile's backend")
    args = parser.parse_args(argv)
    losses = torch.stack(WAYS[args.way](args))
    if dist.is_initialized():
        dist.all_reduce(losses, dist.ReduceOp.SUM)
        losses /= dist.get_world_size()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("losses", *(f"{loss:.6f}" for loss in losses.tolist()))
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses.tolist()


if __name__ == "__main__":
    main()
