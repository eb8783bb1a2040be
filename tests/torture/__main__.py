"""`python -m tests.torture [--seconds N] [--problems N] [--seed N] [--device cuda] [--memory]`.

Two processes run random sequences of calls; the first failure is made smaller and printed as a script.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import random
import sys
import time
import traceback
from typing import Any

from tests.torture import bad_inputs, draw, memory, minimise, problems

HANG = 180  # seconds that one sequence may take
BAD_A_SEQUENCE = 4  # bad inputs tried for each
REPLAYED = 300  # sequences before a failure that may be its cause


def main() -> int:
    arguments = _arguments()
    seed = random.SystemRandom().randrange(1 << 31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    if arguments.memory:
        grown = memory.growth(seed)
        print(f"{memory.CALLS} calls: {grown / 2**20:.1f} MiB after the first {memory.FIRST}")
        return int(grown > memory.LIMIT)
    start = time.monotonic()
    share = (
        0.1 if importlib.util.find_spec("tests.torture.cache_model") and arguments.device == "cpu" else 0.0
    )
    totals, failures = _workers(arguments, seed, arguments.seconds * (1 - share))
    steps = 0
    if share:
        model = importlib.import_module("tests.torture.cache_model")
        try:
            steps = model.run(arguments.seconds * share, seed)
        except Exception:
            failures.append(("cache model", traceback.format_exc(), None))
    for name, what, _ in failures:
        print(f"{name}: {what}")
    first = next((where for _, _, where in failures if where is not None), None)
    if first is not None:
        _print_script(seed, *first, arguments.device)
    print(
        f"{totals['sequences']} sequences, {totals['calls']} calls, {totals['bad']} bad inputs, "
        f"{steps} steps of caches, seed {seed}, {time.monotonic() - start:.0f} s, {len(failures)} failures"
    )
    return int(bool(failures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--problems", type=int, help="stop after so many sequences")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, help="default: 2, on a GPU 1")
    parser.add_argument("--memory", action="store_true", help="measure memory over many calls instead")
    parser.add_argument("--keep-going", action="store_true", help="after failures, to list more of them")
    return parser.parse_args()


def _workers(arguments: argparse.Namespace, seed: int, seconds: float) -> tuple[dict[str, int], list[Any]]:
    """Fork the workers and follow them; a worker that crashes or hangs is a failure too."""
    count = arguments.processes or (1 if arguments.device == "cuda" else 2)
    most = None if arguments.problems is None else -(-arguments.problems // count)
    context = multiprocessing.get_context("fork")
    workers = []
    for number in range(count):
        reader, writer = context.Pipe(duplex=False)
        given = (seed, number, seconds, most, arguments.device, arguments.keep_going, writer)
        process = context.Process(target=_work, args=given)
        process.start()
        writer.close()
        workers.append((number, process, reader))
    totals, failures = {"sequences": 0, "calls": 0, "bad": 0}, []
    state = {number: (0, time.monotonic()) for number, _, _ in workers}
    running = list(workers)
    while running:
        for worker in list(running):
            number, process, reader = worker
            try:
                while reader.poll(0.05):
                    kind, payload = reader.recv()
                    if kind == "start":
                        state[number] = (payload, time.monotonic())
                    elif kind == "done":
                        totals = {name: totals[name] + payload[name] for name in totals}
                        running.remove(worker)
                    else:
                        failures.append(payload)
            except EOFError:
                if worker in running:
                    running.remove(worker)
                    process.join()
                    at = state[number][0]
                    failures.append((f"worker {number}", f"ended with {process.exitcode}", (number, at)))
            hangs = worker in running and time.monotonic() - state[number][1] > HANG
            if hangs:
                process.kill()
                running.remove(worker)
                failures.append(
                    (f"worker {number}", f"hangs in sequence {state[number][0]}", (number, state[number][0]))
                )
        if failures and not arguments.keep_going:
            for _, process, _ in running:
                process.kill()
            break
    return totals, failures


def _work(
    seed: int, number: int, seconds: float, most: int | None, device: str, keeps: bool, pipe: Any
) -> None:
    """Sequences until time is up."""
    end, n = time.monotonic() + seconds, 0
    done = {"sequences": 0, "calls": 0, "bad": 0}
    while time.monotonic() < end and (most is None or n < most):
        pipe.send(("start", n))
        sequence = draw.sequence(seed, number, n, device)
        wrong = problems.run(sequence)
        done["sequences"] += 1
        done["calls"] += len(sequence)
        if wrong:
            pipe.send(("failure", (f"worker {number}, sequence {n}", wrong[0], (number, n))))
        rng = random.Random(f"{seed}/{number}/{n}/bad")
        for _ in range(BAD_A_SEQUENCE if device == "cpu" else 0):
            bad = bad_inputs.attempt(rng)
            done["bad"] += 1
            if bad is not None:
                pipe.send(("failure", (f"worker {number}, bad input of sequence {n}", ": ".join(bad), None)))
        n += 1
    pipe.send(("done", done))
    pipe.close()
    sys.stdout.flush()
    os._exit(0)


def _print_script(seed: int, worker: int, n: int, device: str) -> None:
    """The failing sequence alone, or, where that is right, with those before it; as small as it gets."""
    found = draw.sequence(seed, worker, n, device)
    if not minimise.outcome(problems.run, found):
        before = range(max(0, n - REPLAYED), n + 1)
        found = [p for k in before for p in draw.sequence(seed, worker, k, device)]
        if not minimise.outcome(problems.run, found, seconds=10 * HANG):
            print("it does not fail again in a process of its own")
            return
    small = minimise.smaller(problems.run, found)
    print(f"--- a script that fails: {minimise.outcome(problems.run, small)}")
    print(minimise.script(small))
    print("--- end of the script")


if __name__ == "__main__":
    sys.exit(main())
