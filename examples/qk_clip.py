"""QK-clip: training whose attention logits are kept in bounds, by the exact maximum that attention gives.

    python examples/qk_clip.py                 # both runs
    python examples/qk_clip.py --optimizer muon

A small byte-level GPT learns the source of Python's standard library, at a learning rate that is too large
for its queries and keys. Their logits diverge: they pass a thousand, the softmax is one-hot, and the loss
stays higher. With QK-clip, after each step every head whose largest logit passed the threshold has its
query and key weights shrunk by the square root of what it is over (MuonClip, Kimi K2, 2025). The maximum
comes with the output, by `return_aux=Aux(max_logit=True)`, without an N × N matrix.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise import Aux
from tilewise.lab.demo.gpt import GPT
from tilewise.lab.demo.scale import QUICK
from tilewise.lab.demo.text import sample, standard_library

SCALE = replace(QUICK, layers=2, heads=4, head_dim=16, context=64, batch=8)
REST_LR = 5e-3


class Watched:
    """One layer's attention; keeps the largest logit of each of its heads since the last step."""

    max_logit: Tensor

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, aux = tilewise.attention(q, k, v, causal=True, return_aux=Aux(max_logit=True))
        self.max_logit = aux.max_logit
        return out


@torch.no_grad()
def clip(qkv: Tensor, max_logit: Tensor, threshold: float) -> None:
    """Shrink the query and key rows of qkv (3 * heads * head_dim, width) of heads that are over.

    Logits are products of both, so each takes the square root of threshold / max_logit.
    """
    factor = (threshold / max_logit).clamp(max=1.0).sqrt()
    factor[max_logit <= threshold] = 1.0  # also where all logits are negative
    query, key, _ = qkv.view(3, len(factor), -1, qkv.shape[-1]).unbind()
    for weight in (query, key):
        weight *= factor[:, None, None]


@dataclass
class Run:
    """Of each step, the loss and the largest logit of any head."""

    losses: list[float] = field(default_factory=list)
    max_logits: list[float] = field(default_factory=list)

    @property
    def last(self) -> float:
        """Mean of the last ten losses."""
        return sum(self.losses[-10:]) / len(self.losses[-10:])


def train(steps: int, lr: float, threshold: float | None, optimizer: str, seed: int = 0) -> Run:
    """Train for so many steps, with QK-clip if there is a threshold."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, text, run = GPT(SCALE), standard_library().train, Run()
    attends = [Watched() for _ in model.blocks]
    step = optimizers(model, optimizer, lr)
    for _ in range(steps):
        tokens, targets = sample(text, SCALE.batch, SCALE.context, generator)
        loss = F.cross_entropy(model.logits(model(tokens, attends)).flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        for each in step:
            each.step()
        if threshold is not None:
            for block, attend in zip(model.blocks, attends, strict=True):
                clip(block.qkv.weight, attend.max_logit, threshold)
        run.losses.append(loss.item())
        run.max_logits.append(max(attend.max_logit.max().item() for attend in attends))
    return run


def optimizers(model: GPT, name: str, lr: float) -> list[torch.optim.Optimizer]:
    """AdamW or Muon at `lr` for queries, keys and values; AdamW at a rate that suits for the rest."""
    qkv = [block.qkv.weight for block in model.blocks]
    rest = [p for p in model.parameters() if all(p is not weight for weight in qkv)]
    kind = {"adamw": torch.optim.AdamW, "muon": torch.optim.Muon}[name]
    return [kind(qkv, lr=lr, weight_decay=0.0), torch.optim.AdamW(rest, lr=REST_LR, weight_decay=0.0)]


def main(arguments: Sequence[str] | None = None) -> dict[str, Run]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--lr", type=float, default=None, help="of qkv; default: 0.1 for adamw, 0.3 for muon")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threshold", type=float, default=15.0, help="of the largest logit")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    lr = chosen.lr or {"adamw": 0.1, "muon": 0.3}[chosen.optimizer]
    runs = {}
    print(f"{'':14} {'largest logit':>14} {'loss, first':>12} {'last ten':>9}")
    for name, threshold in (("without clip", None), ("with QK-clip", chosen.threshold)):
        run = runs[name] = train(chosen.steps, lr, threshold, chosen.optimizer, chosen.seed)
        print(f"{name:14} {run.max_logits[-1]:14.1f} {run.losses[0]:12.3f} {run.last:9.3f}")
    return runs


if __name__ == "__main__":
    main()
