"""Processes that run test functions as the ranks of a gloo group; started once for all tests."""

from __future__ import annotations

import importlib.util
import queue
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tilewise.cpu.host import compile as kernels

MOST = 4
TIMEOUT = 20  # seconds of a message
STARTING = 120  # and until the processes are there


def serve(rank: int, store: str, inbox: Any, outbox: Any, compiling: Any) -> None:
    """One process: functions come by file and name, with their world size."""
    torch.set_num_threads(1)
    load = kernels._load

    def load_in_turn(*arguments: Any) -> kernels.Kernel:
        with compiling:  # the first rank compiles, the others find its file
            return load(*arguments)

    kernels._load = load_in_turn
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=MOST, timeout=timedelta(seconds=TIMEOUT)
    )
    groups = {world: dist.new_group(range(world)) for world in range(1, MOST + 1)}
    while (job := inbox.get()) is not None:
        number, path, name, world, arguments = job
        try:
            spec = importlib.util.spec_from_file_location(Path(path).stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            outbox.put((number, rank, None, getattr(module, name)(groups[world], *arguments)))
        except Exception:
            outbox.put((number, rank, traceback.format_exc(), None))


class Pool:
    """Worlds of up to `MOST` ranks. After a failure new processes start: the old may wait for each other."""

    def __init__(self) -> None:
        self.number = 0
        self.processes: list[Any] = []

    def start(self) -> None:
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        self.inboxes = [context.Queue() for _ in range(MOST)]
        self.outbox, self.compiling = context.Queue(), context.Lock()
        self.processes = [
            context.Process(target=serve, args=(r, store, inbox, self.outbox, self.compiling), daemon=True)
            for r, inbox in enumerate(self.inboxes)
        ]
        for process in self.processes:
            process.start()

    def run(self, world: int, path: str, name: str, *arguments: Any) -> list[Any]:
        """What a function of a file returns on each rank. Raises AssertionError with the tracebacks."""
        if not self.processes:
            self.start()
        self.number += 1
        for inbox in self.inboxes[:world]:
            inbox.put((self.number, path, name, world, arguments))
        answers = self._answers(world)
        failures = [f"rank {rank}:\n{error}" for rank, (error, _) in sorted(answers.items()) if error]
        failures += [f"rank {rank}: no answer" for rank in range(world) if rank not in answers]
        if failures:
            self.close()
        assert not failures, "\n".join(failures)
        return [answers[rank][1] for rank in range(world)]

    def _answers(self, world: int) -> dict[int, tuple[str | None, Any]]:
        """By rank. Once a rank has failed, the others have the time of a message."""
        answers: dict[int, tuple[str | None, Any]] = {}
        end = time.monotonic() + (STARTING if self.number == 1 else 3 * TIMEOUT)
        while len(answers) < world:
            try:
                number, rank, error, value = self.outbox.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                break
            if number == self.number:
                answers[rank] = error, value
                end = min(end, time.monotonic() + 2) if error else end
        return answers

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(10)
        if self.processes:
            self.folder.cleanup()
        self.processes = []
