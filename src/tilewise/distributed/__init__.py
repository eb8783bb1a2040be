"""One sequence across many devices, over `torch.distributed`: NCCL on GPUs, gloo on CPUs."""

from tilewise.distributed.attention import context_parallel_attention
from tilewise.distributed.context import context_parallel
from tilewise.distributed.cost import explain
from tilewise.distributed.decode import attention_with_split_cache
from tilewise.distributed.layout import positions, shard, unshard
from tilewise.distributed.network import Network

__all__ = [
    "Network",
    "attention_with_split_cache",
    "context_parallel",
    "context_parallel_attention",
    "explain",
    "positions",
    "shard",
    "unshard",
]
