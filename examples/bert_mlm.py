"""Train BERT on masked bytes of real text, padded batches, with one or several of transformers' attentions.

    python examples/bert_mlm.py                                  # BERT-large, seqlen 512, tilewise
    python examples/bert_mlm.py --attention tilewise sdpa eager --dropout 0 --steps 50
    python examples/bert_mlm.py --steps 20000 --compile --checkpoint bert.pt
    python examples/bert_mlm.py --device cpu --layers 2 --width 128 --heads 2 --seqlen 128 --batch 4 --steps 9

The text is the source of Python's standard library, read as bytes and cut into documents of different
lengths. Every attention starts from the same weights and sees the same batches; without dropout their losses
agree up to rounding. A training with a checkpoint goes on from it when the command is given again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from tilewise.faces.transformers import register
from tilewise.lab.demo.text import Text, standard_library

ATTENTIONS = ("tilewise", "sdpa", "eager", "flash_attention_2")
PADDING, MASK, START = 256, 257, 258  # tokens behind the 256 bytes
VOCABULARY = 259
HIDDEN_SHARE = 0.15  # of the bytes, to be guessed: 80% become MASK, 10% any byte, 10% stay
IGNORED = -100  # the label of what is not to be guessed
HELD_OUT_BATCHES = 8
MODEL = {"layers": 24, "width": 1024, "heads": 16}  # BERT-large
TRAINING = {"seqlen": 512, "batch": 16, "steps": 200, "warmup": 100, "seed": 0}


def batch_of(data: Tensor, number: int, args: argparse.Namespace) -> dict[str, Tensor]:
    """Batch `number` of documents: the same whenever it is asked for, so that a training can go on."""
    draw = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
    shape = args.batch, args.seqlen
    lengths = torch.randint(args.seqlen // 2, args.seqlen + 1, (args.batch, 1), generator=draw)
    starts = torch.randint(len(data) - args.seqlen, (args.batch, 1), generator=draw)
    positions = torch.arange(args.seqlen)
    is_real = positions < lengths
    tokens = data[starts + positions].long().where(is_real, PADDING)
    tokens[:, 0] = START
    is_hidden = (torch.rand(shape, generator=draw) < HIDDEN_SHARE) & is_real & (positions > 0)
    is_hidden[0, 1] |= ~is_hidden.any()  # the loss of a batch with nothing to guess is NaN
    labels = tokens.where(is_hidden, IGNORED)
    fate = torch.rand(shape, generator=draw)
    other = torch.randint(256, shape, generator=draw)
    tokens = tokens.where(~(is_hidden & (fate < 0.9)), other).where(~(is_hidden & (fate < 0.8)), MASK)
    batch = {"input_ids": tokens, "labels": labels, "attention_mask": is_real.long()}
    return {name: t.to(args.device, non_blocking=True) for name, t in batch.items()}


@dataclass
class Run:
    """What one attention has come to. `seconds` are those of the `timed` steps."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    timed: int = 0
    held_out: float | None = None


class Trainer:
    """One model with one attention. With a checkpoint that exists, it goes on from there."""

    def __init__(self, args: argparse.Namespace, attention: str, text: Text) -> None:
        self.args, self.text, self.run = args, text, Run()
        torch.manual_seed(args.seed)
        config = BertConfig(
            vocab_size=VOCABULARY, pad_token_id=PADDING, max_position_embeddings=args.seqlen,
            hidden_size=args.width, num_hidden_layers=args.layers, num_attention_heads=args.heads,
            intermediate_size=4 * args.width, attn_implementation=attention,
            hidden_dropout_prob=args.dropout, attention_probs_dropout_prob=args.dropout,
        )  # fmt: skip
        self.model: Any = BertForMaskedLM(config).to(args.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        if args.checkpoint and args.checkpoint.exists():
            self._load()
        self.forward = torch.compile(self.model) if args.compile else self.model

    def train(self) -> Run:
        """All steps that are left, then the loss of held-out text."""
        self._steps(1)  # not timed: compilation and first allocations
        while len(self.run.losses) < self.args.steps:
            start = self._now()
            self.run.timed += self._steps(self.args.every)
            self.run.seconds += self._now() - start
            recent = self.run.losses[-20:]
            speed = self.run.seconds / self.run.timed
            loss = sum(recent) / len(recent)
            print(f"step {len(self.run.losses):6}  loss {loss:.4f}  {speed:.3f} s a step", flush=True)
            self._save()
        self.run.held_out = self._held_out()
        self._save()  # also where one step was left, or none
        return self.run

    def _steps(self, most: int) -> int:
        """How many there were: fewer than `most` at the end. Losses are not read until then."""
        done = len(self.run.losses)
        losses = [self._step(number) for number in range(done, min(done + most, self.args.steps))]
        self.run.losses += torch.stack(losses).tolist() if losses else []
        return len(losses)

    def _step(self, number: int) -> Tensor:
        loss = self._loss(self.text.train, number)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _loss(self, data: Tensor, number: int) -> Tensor:
        device = self.args.device
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return self.forward(**batch_of(data, number, self.args)).loss  # type: ignore[no-any-return]

    @torch.no_grad()
    def _held_out(self) -> float:
        self.model.eval()
        losses = [self._loss(self.text.valid, number) for number in range(HELD_OUT_BATCHES)]
        self.model.train()
        return float(torch.stack(losses).mean())

    def _rate(self, step: int) -> float:
        """Linear to the top, then linear to nothing, as BERT's."""
        warmup, steps = self.args.warmup, self.args.steps
        return min((step + 1) / max(1, warmup), (steps - step) / max(1, steps - warmup), 1.0)

    def _now(self) -> float:
        if self.args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _save(self) -> None:
        """With the state of dropout's generators, so that a training in two parts is the same training."""
        if not self.args.checkpoint:
            return
        parts = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}
        states = {"cpu": torch.get_rng_state()}
        if self.args.device == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        settings = {name: getattr(self.args, name) for name in (*MODEL, *TRAINING, "lr", "dropout")}
        parts |= {"run": asdict(self.run), "settings": settings, "generators": states}
        beside = self.args.checkpoint.with_name(self.args.checkpoint.name + ".new")
        torch.save(parts, beside)
        os.replace(beside, self.args.checkpoint)  # whoever is stopped while writing keeps the last one

    def _load(self) -> None:
        parts = torch.load(self.args.checkpoint, weights_only=True)
        for name, was in parts["settings"].items():
            if getattr(self.args, name) != was:
                path, now = self.args.checkpoint, getattr(self.args, name)
                raise SystemExit(f"--{name}={now}, but {path} is of a training with {was}")
        for name in ("model", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(parts[name])
        self.run = Run(**parts["run"])
        torch.set_rng_state(parts["generators"]["cpu"])
        if self.args.device == "cuda" and "cuda" in parts["generators"]:
            torch.cuda.set_rng_state(parts["generators"]["cuda"])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=["tilewise"])
    for name, default in (MODEL | TRAINING).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--dropout", type=float, default=0.1, help="of attention weights and of layers")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--checkpoint", type=Path, help="written to, and gone on from; of one attention")
    parser.add_argument("--every", type=int, default=100, help="steps between lines, and checkpoints")
    parser.add_argument("--json", type=Path, help="write settings and results to this file")
    args = parser.parse_args(argv)
    if args.checkpoint and len(args.attention) > 1:
        parser.error("--checkpoint is of one attention: give one --attention")
    return args


def main(argv: Sequence[str] | None = None) -> dict[str, Run]:
    args = parse(argv)
    register()
    text = standard_library()
    runs = {}
    for attention in args.attention:
        print(attention)
        runs[attention] = run = Trainer(args, attention, text).train()
        print(f"loss of held-out text {run.held_out:.4f}; by chance {math.log(256):.4f}")
    if args.json:
        settings = {name: str(value) for name, value in vars(args).items()}
        found = {"settings": settings, "runs": {name: asdict(run) for name, run in runs.items()}}
        args.json.write_text(json.dumps(found, indent=1))
    return runs


if __name__ == "__main__":
    main()
