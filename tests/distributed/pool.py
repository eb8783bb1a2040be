"""Processes that run test functions as the ranks of a gloo group; started once for all tests."""

from __future__ import annotations

import importlib.util
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MOST = 4
TIMEOUT = 60  # seconds


def serve(rank: int, store: str, inbox: Any, outbox: Any) -> None:
    """One process: functions come by file and name, with their world size."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=MOST, timeout=timedelta(seconds=TIMEOUT)
    )
    groups = {world: dist.new_group(range(world)) for world in range(1, MOST + 1)}
    while (job := inbox.get()) is not None:
        path, name, world, arguments = job
        try:
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            outbox.put((rank, None, getattr(module, name)(groups[world], *arguments)))
        except Exception:
            outbox.put((rank, traceback.format_exc(), None))


class Pool:
    """Worlds of up to `MOST` ranks."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.store = tempfile.NamedTemporaryFile(delete=False).name
        Path(self.store).unlink()
        self.inboxes = [context.Queue() for _ in range(MOST)]
        self.outbox = context.Queue()
        self.processes = [
            context.Process(target=serve, args=(r, self.store, self.inboxes[r], self.outbox), daemon=True)
            for r in range(MOST)
        ]
        for process in self.processes:
            process.start()

    def run(self, world: int, path: str, name: str, *arguments: Any) -> list[Any]:
        """What a function of a file returns on each rank. Raises AssertionError with the tracebacks."""
        for inbox in self.inboxes[:world]:
            inbox.put((path, name, world, arguments))
        answers = sorted(self.outbox.get(timeout=2 * TIMEOUT) for _ in range(world))
        failures = [f"rank {rank}:\n{error}" for rank, error, _ in answers if error]
        assert not failures, "\n".join(failures)
        return [value for _, _, value in answers]

    def close(self) -> None:
        for inbox in self.inboxes:
            inbox.put(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.terminate()
