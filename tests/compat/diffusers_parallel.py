"""One of two processes: diffusers' context parallelism over tilewise, compared with whole sequences."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ParallelConfig

from tilewise import reference
from tilewise.compat import diffusers as compat_diffusers
from tilewise.testing import compare

BATCH, TOKENS, HEADS, HEAD_DIM = 2, 26, 4, 16


def shard(t: torch.Tensor, dim: int = 1) -> torch.Tensor:
    return t.chunk(2, dim=dim)[dist.get_rank()].contiguous()


def config_of(**degrees: int) -> ParallelConfig:
    context = ContextParallelConfig(**degrees)
    mesh = dist.init_device_mesh("cpu", context.mesh_shape, mesh_dim_names=context.mesh_dim_names)
    config = ParallelConfig(context_parallel_config=context)
    config.setup(dist.get_rank(), 2, torch.device("cpu"), mesh=mesh)
    return config


def check(name: str, degrees: dict[str, int], mask: torch.Tensor | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(BATCH, TOKENS, HEADS, HEAD_DIM).to(dtype) for _ in range(4)]
    *given, dout = (shard(t).requires_grad_(n < 3) for n, t in enumerate(whole))
    with attention_dispatch.attention_backend("tilewise"):
        out = attention_dispatch.dispatch_attention_fn(
            *given, attn_mask=mask, scale=0.3, parallel_config=config_of(**degrees)
        )
    found = out, *torch.autograd.grad(out, given, dout)
    expected = []
    for precision in (torch.float64, dtype):
        options = {"scale": 0.3, "mask": mask, "dtype": precision}
        exact = reference.attention(*whole[:3], **options)[0]
        grads = reference.attention_backward(whole[3], *whole[:3], **options)[:3]
        expected.append([shard(t) for t in (exact, *grads)])
    for label, ours, *both in zip(("out", "dq", "dk", "dv"), found, *expected, strict=True):
        report = compare(label, ours, *both)
        assert report.max_error <= report.max_budget, f"{name} {report}"
    print("same", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
    compat_diffusers.register()
    padding = (torch.arange(TOKENS) < torch.tensor([[TOKENS], [17]]))[:, None, None]
    check("ring", {"ring_degree": 2}, None, torch.float32)
    check("ring in bfloat16", {"ring_degree": 2}, None, torch.bfloat16)
    check("Ulysses", {"ulysses_degree": 2}, None, torch.float32)
    check("Ulysses with padding", {"ulysses_degree": 2}, padding, torch.float32)
    dist.destroy_process_group()
