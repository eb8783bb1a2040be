"""Train an encoder on a task in the manner of the Long Range Arena, with one attention or several.

    python examples/long_range_arena.py listops                       # 2,048 tokens; a GPU if there is one
    python examples/long_range_arena.py path-x --batch 16 --steps 20000 --checkpoint path-x.pt --workers 8
    python examples/long_range_arena.py text --attention tilewise sdpa standard --steps 20 --batch 4

A training with a checkpoint goes on from it when the command is given again. The tasks are made as they
are needed: see `tilewise.lab.long_range.tasks`. All attentions see the same examples and begin with the same
weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from tilewise.lab.long_range.tasks import TASKS
from tilewise.lab.long_range.training import ATTENTIONS, Progress, Settings, Training

DEFAULTS = Settings("listops")
NUMBERS = ("steps", "batch", "layers", "width", "heads", "lr", "warmup", "held_out", "workers", "seed")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=["tilewise"])
    for name in NUMBERS:
        default = getattr(DEFAULTS, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--seqlen", type=int, help="tokens of a document; default: the task's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="with torch.compile")
    parser.add_argument("--checkpoint", type=Path, help="written to, and gone on from; of one attention")
    parser.add_argument("--every", type=int, default=100, help="steps between lines, and checkpoints")
    parser.add_argument("--json", type=Path, help="write settings, losses and accuracies to this file")
    args = parser.parse_args(argv)
    if args.checkpoint and len(args.attention) > 1:
        parser.error("--checkpoint is of one attention: give one --attention")
    return args


def show(progress: Progress) -> None:
    latest = progress.losses[-20:]
    speed = progress.seconds / progress.steps
    print(f"step {progress.steps:6}  loss {sum(latest) / len(latest):.4f}  {speed:.3f} s a step", flush=True)


def main(argv: Sequence[str] | None = None) -> dict[str, Progress]:
    args = parse(argv)
    runs, settings = {}, {}
    for name in args.attention:
        numbers = {number: getattr(args, number) for number in NUMBERS}
        settings[name] = Settings(
            args.task, name, seqlen=args.seqlen, device=args.device, compiles=args.compile, **numbers
        )
        print(f"{args.task}, {name}")
        try:
            training = Training(settings[name], args.checkpoint)
        except ValueError as error:  # a checkpoint of other settings
            raise SystemExit(str(error)) from None
        runs[name] = training.run(args.every, show)
        chance = 1 / settings[name].what.classes
        print(f"accuracy of held-out examples {runs[name].accuracy:.3f}; by chance {chance:.3f}")
    if args.json:
        found = {name: {"settings": asdict(settings[name]), **asdict(run)} for name, run in runs.items()}
        args.json.write_text(json.dumps(found, indent=1))
    return runs


if __name__ == "__main__":
    main()
