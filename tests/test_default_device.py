"""A default device of the user's that is not the tensors': every kind of call, in a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import torch, tilewise
from tilewise import Aux, KVCache

draw = torch.Generator("cpu").manual_seed(0)
new = lambda *shape: torch.randn(*shape, generator=draw, device="cpu")
q, k, v = new(2, 40, 4, 16), new(2, 50, 2, 16), new(2, 50, 2, 16)
ends = torch.tensor([0, 11, 40], device="cpu")
documents = torch.arange(50, device="cpu") // 7
table = new(4, 10)
same = lambda b, h, i, j: documents[i] == documents[j]
score = lambda s, b, h, i, j: torch.tanh(s) + table[h, (i - j).clamp(0, 9)]


def results():
    torch.manual_seed(1)
    options = [
        {}, {"causal": True, "window": (9, 0), "softcap": 3.0}, {"precision": "fp8"}, {"dropout_p": 0.5},
        {"mask": new(2, 1, 40, 50) > 0}, {"bias": new(1, 4, 40, 50)}, {"sinks": new(4)},
        {"alibi_slopes": new(4).abs()}, {"mask_mod": same}, {"score_mod": score},
    ]
    for given in options:
        for backend in (None, "tiled"):
            dtype = torch.bfloat16 if "precision" in given else torch.float32
            leaves = [t.to(dtype, copy=True).requires_grad_() for t in (q, k, v)]
            out = tilewise.attention(*leaves, backend=backend, **given)
            yield out
            yield from torch.autograd.grad(out.square().sum(), leaves)
    yield tilewise.attention_varlen(q[0], q[0], q[0], ends, ends, causal=True, mask_mod=same)
    cache = KVCache(2, 60, 2, 16, dtype=torch.float32, device="cpu")
    yield tilewise.attention_with_cache(q, cache, k[:, :40], v[:, :40])
    found = tilewise.attention_statistics(q, k, aux=Aux(entropy=True, column_sum=True, top_k=3, block_sum=8))
    yield from (found.entropy, found.column_sum, found.top_k[0], found.block_sum)


torch.set_default_device("meta")
draw.manual_seed(5)
found = list(results())
torch.set_default_device("cpu")
draw.manual_seed(5)
for number, (a, b) in enumerate(zip(found, results(), strict=True)):
    assert a.device.type == "cpu", number
    torch.testing.assert_close(a, b)
print(len(found), "as without it")
"""


@pytest.mark.slow
def test_calls_are_as_without_one():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "as without it" in done.stdout, done.stderr[-2000:]
