"""What a thread's calls share: scratch memory and an argument block, each for one call at a time."""

from __future__ import annotations

import threading

import torch

from tilewise.cpu.host.arguments import Block

CPU = torch.device("cpu")
KEPT_SCRATCH = 64 << 20  # bytes; a call that takes more releases them when it is done


class ThreadBlock(Block):
    """The argument block of a call, and its scratch memory."""

    def __init__(self) -> None:
        super().__init__()
        self.release()

    def release(self) -> None:
        """Give the scratch back."""
        self.memory, self.size, self.scratch = torch.empty(0, device=CPU), -1, 0

    def grow(self, size: int) -> None:
        """Have at least `size` bytes of scratch, until the next `grow` or `release`."""
        self.release()  # before there is more
        self.memory = torch.empty(size + 64, dtype=torch.uint8, device=CPU)
        self.size, self.scratch = size, -(-self.memory.data_ptr() // 64) * 64


class Pool(threading.local):
    """Each thread has its own, so that two threads may run one plan at once.

    A call takes the block and puts it back when it is done. None: a call is under way, in which a signal
    handler or a finalizer makes another, or it was interrupted.
    """

    block: ThreadBlock | None = None


pool = Pool()
