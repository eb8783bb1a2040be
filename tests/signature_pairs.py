"""Every ordered pair of calls that differ in one property of one tensor, each held against a fresh process.

    python tests/signature_pairs.py BACKEND [TENSOR]

Prints a line for each call whose bits depend on what was called before it, then how many were compared. A
property is a dtype, a broadcast shape, strides, a storage offset, whether gradients are asked for, or
PyTorch's lazy negation. On a GPU, where a process takes seconds to start, all plans are forgotten instead.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

import tilewise
from tilewise.dispatch import plans

BATCH, SEQLEN_Q, SEQLEN_K, HEADS, KV_HEADS, DIM = 2, 21, 50, 4, 2, 16
FULL = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
SHAPES = {
    "query": [(BATCH, SEQLEN_Q, HEADS, DIM)],
    "key": [(BATCH, SEQLEN_K, KV_HEADS, DIM)],
    "value": [(BATCH, SEQLEN_K, KV_HEADS, DIM)],
    "mask": [FULL, (1, 1, SEQLEN_Q, SEQLEN_K), (BATCH, 1, 1, SEQLEN_K), (1, HEADS, SEQLEN_Q, 1)],
    "bias": [FULL, (1, 1, SEQLEN_Q, SEQLEN_K), (BATCH, 1, 1, SEQLEN_K), (1, HEADS, SEQLEN_Q, 1)],
    "alibi_slopes": [(HEADS,), (BATCH, HEADS)],
    "sinks": [(HEADS,)],
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
UNDIFFERENTIABLE = ("mask", "alibi_slopes")
REFUSED = {"aten": ("alibi_slopes", "sinks")}  # and gradients of a bias
ON_GPU = ("hopper", "triton")


def fresh(shape: tuple[int, ...], name: str, backend: str) -> Tensor:
    t = torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + sum(shape)))
    if backend in ON_GPU:
        t = t.cuda().bfloat16() if name in ("query", "key", "value") else t.cuda()
    return t > -1 if name == "mask" else t


def groups(name: str, backend: str) -> Iterator[list[tuple[str, Tensor]]]:
    """One tensor in forms that differ in one property: of each shape all the others, and all shapes."""
    for shape in SHAPES[name]:
        yield list(variants(name, shape, backend))
    yield [(f"{shape}", fresh(shape, name, backend)) for shape in SHAPES[name]]


def variants(name: str, shape: tuple[int, ...], backend: str) -> Iterator[tuple[str, Tensor]]:
    """One tensor of one shape in every form that a call may have it in."""
    t = fresh(shape, name, backend)
    yield f"{shape}", t
    yield f"{shape} turned", t.transpose(0, -1).contiguous().transpose(0, -1)
    yield f"{shape} wide", torch.cat((t, t), -1)[..., : shape[-1]]
    yield f"{shape} offset", torch.cat((t.flatten()[:3], t.flatten()))[3:].view(shape)
    if name == "mask":
        return
    yield f"{shape} negated", torch._neg_view(-t)
    if name in ("bias", "alibi_slopes", "sinks"):
        for dtype in DTYPES[1:]:
            yield f"{shape} {dtype}", t.to(dtype)
    is_refused = name == "bias" and (backend == "aten" or (backend == "llvm" and shape[-1] == 1))
    if name not in UNDIFFERENTIABLE and not is_refused:
        yield f"{shape} requires grad", t.clone().requires_grad_()
        if name == "bias":
            for dtype in DTYPES[1:]:
                yield f"{shape} {dtype} requires grad", t.to(dtype).requires_grad_()


def all_pairs(n: int) -> Iterator[int]:
    """Numbers below n in an order that has every ordered pair side by side."""
    for a in range(n):
        yield a
        for b in range(a + 1, n):
            yield from (a, b)
    yield 0


def call(name: str, tensor: Tensor, backend: str) -> list[Tensor]:
    """Outputs and all gradients."""
    tensors = {n: fresh(SHAPES[n][0], n, backend) for n in ("query", "key", "value")} | {name: tensor}
    differentiable = [t for t in tensors.values() if t.requires_grad]
    if name not in ("query", "key", "value"):
        tensors["value"].requires_grad_()
        differentiable.append(tensors["value"])
    causal = backend != "aten"
    out = tilewise.attention(**tensors, backend=backend or None, causal=causal, deterministic=True)
    grads = torch.autograd.grad(out.square().sum(), differentiable) if out.requires_grad else ()
    return [t.detach().cpu() for t in (out, *grads)]


def call_alone(name: str, tensor: Tensor, backend: str) -> list[Tensor]:
    """The same in a process that has made no call, or as if it had made none."""
    if backend in ON_GPU:
        plans.clear()
        return [t.double() for t in call(name, tensor, backend)]
    reader, writer = os.pipe()
    if os.fork() == 0:
        with os.fdopen(writer, "wb") as file:
            pickle.dump([t.double().numpy() for t in call(name, tensor, backend)], file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        found = pickle.load(file)
    os.wait()
    return [torch.from_numpy(array) for array in found]


def main(backend: str, *only: str) -> None:
    torch.set_num_threads(1)
    names = [name for name in only or SHAPES if name not in REFUSED.get(backend, ())]
    cases = [(name, forms) for name in names for forms in groups(name, backend)]
    expected = [
        [call_alone(name, t, backend) for _, t in forms] for name, forms in cases
    ]  # all of them before this process makes its first call
    compared = 0
    for (name, forms), wanted in zip(cases, expected, strict=True):
        before = "nothing"
        for n in all_pairs(len(forms)):
            form, tensor = forms[n]
            found = call(name, tensor, backend)
            compared += 1
            if not all(torch.equal(a.double(), b) for a, b in zip(found, wanted[n], strict=True)):
                print(f"{backend} {name} {form} after {before}")
            before = form
    print(f"{compared} compared")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # PyTorch's autograd threads may crash a process that ends behind a backward: issue 38230
