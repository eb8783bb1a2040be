"""What PyTorch imports while a first call's kernels are asked for: seconds of which nobody is told."""

import subprocess
import sys

import pytest
import torch

from tilewise.core.functions.call import with_functions
from tilewise.core.problem import Inputs, Options, describe
from tilewise.core.signature import Gpu, NoMemory, standing_in

pytest.importorskip("triton")

PROGRAM = """
import sys
import torch
from tilewise.core.functions.call import with_functions
from tilewise.core.problem import Inputs, Options
from tilewise.core.signature import Gpu, Request
from tilewise.dispatch import plans
from tilewise.gpu.launch import launcher

asked = []
launcher.compile_only = lambda kernel, *rest: asked.append(kernel.__name__)


def new(*shape, dtype=torch.bfloat16, **options):
    return torch.empty(shape, dtype=dtype, device="meta", **options)


def call(mask_mod=None, score_mod=None, causal=False, left=None, softcap=0.0, **tensors):
    # both directions, as autograd asks for them: its own `backward` imports sympy
    q, k, v = (new(2, 256, 4, 64) for _ in range(3))
    inputs, options = Inputs(q, k, v, **tensors), Options(causal, left, softcap=softcap)
    if mask_mod or score_mod:
        inputs, options = with_functions(inputs, options, mask_mod, score_mod, None)
    results = plans.attend(inputs, options, None, Request(residual=True))
    wants_bias = inputs.bias is not None
    plans.differentiate(inputs, results, new(2, 256, 4, 64), None, options, None, wants_bias)


table, ids = new(4, 1024, dtype=torch.float32, requires_grad=True), new(2, 256, dtype=torch.int64)
calls = {
    "causal": {"causal": True},
    "window": {"causal": True, "left": 100},
    "mask": {"mask": new(2, 1, 256, 256, dtype=torch.bool)},
    "bias": {"bias": new(1, 4, 256, 256, requires_grad=True)},
    "slopes": {"alibi_slopes": new(4, dtype=torch.float32), "softcap": 20.0},
    "distances": {"score_mod": lambda s, b, h, i, j: s + table[h, i - j + 511]},
    "scores": {"score_mod": lambda s, b, h, i, j: s * torch.tanh(s) + table[h, i]},
    "documents": {"mask_mod": lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (j <= i)},
}
capability = tuple(map(int, sys.argv[1:]))
with launcher.compiling_for(Gpu("", capability, 132), lambda kernel: None):
    for name, options in calls.items():
        if name != "documents" or capability == (9, 0):  # Triton's kernels want the map's numbers
            before = len(asked)
            call(**options)
            assert len(asked) > before
            assert not {"sympy", "torch._dynamo", "torch._inductor"} & sys.modules.keys(), name
"""


@pytest.mark.parametrize("capability", ["9 0", "8 0"])
def test_no_compiler_of_pytorch_is_imported(capability):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *capability.split()]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr[-2000:]


def test_no_map_is_made_without_values():
    """Triton's lists of tiles take hundreds of operations; for a GPU that stands in they are made."""
    from tilewise.gpu.triton.functions.visits import visits

    q = torch.empty(2, 256, 4, 64, dtype=torch.bfloat16, device="meta")
    inputs, options = with_functions(
        Inputs(q, q, q), Options(), lambda b, h, i, j: (i // 64 == j // 64) | (j == 0), None, None
    )
    with pytest.raises(NoMemory):
        visits(describe(inputs, options), inputs, 64, 64)
    with standing_in(Gpu("", (8, 0), 108)):
        order, counts = visits(describe(inputs, options), inputs, 64, 64)
    assert order.shape[-2:] == (4, 4) and counts.shape[-2:] == (4, 2)
