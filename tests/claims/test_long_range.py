"""Long-range tasks say what they claim to, and their training goes on where it stopped."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from tilewise.cli import _app
from tilewise.lab.claims import long_range
from tilewise.lab.long_range import tasks
from tilewise.lab.long_range.tasks import HELD_OUT, TASKS, TRAIN
from tilewise.lab.long_range.training import ATTENTIONS, Settings, Training

SMALL = Settings("listops", steps=4, batch=3, layers=1, width=16, heads=2, seqlen=48, held_out=6)


def evaluated(tokens: list[int]) -> int:
    """Of an expression's tokens, with a stack."""
    stack: list[list[int]] = [[]]
    for token in tokens:
        if token < tasks.OPEN:
            stack[-1].append(token - tasks.DIGIT)
        elif token < tasks.CLOSE:
            stack.append([token])
        else:
            operation, *values = stack.pop()
            middle = int(statistics.median(values))
            stack[-1].append([min(values), max(values), middle, sum(values) % 10][operation - tasks.OPEN])
    ((value,),) = stack
    return value


def test_expressions_have_their_values():
    batch = TASKS["listops"].batch(TRAIN, 0, 40, seqlen=200)
    for tokens, label in zip(batch.tokens[:, 0].tolist(), batch.labels.tolist()):
        used = [t for t in tokens if t]
        assert 50 < len(used) <= 200 and evaluated(used) == label
    assert len(set(batch.labels.tolist())) > 5


def are_joined(pixels: torch.Tensor) -> bool:
    """Whether steps of at most a space lead from one mark along dashes to the other."""
    marks = [tuple(p) for p in (pixels == 3).nonzero().tolist()]
    dashes = {tuple(p) for p in (pixels == 2).nonzero().tolist()}
    near = lambda a, b, most: max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= most  # noqa: E731
    first = [m for m in marks if near(m, marks[0], 2)]
    second = [m for m in marks if m not in first]
    assert len(first) == len(second) == 9
    reached, waiting = set(), list(first)
    while waiting:
        at = waiting.pop()
        found = {d for d in dashes if near(d, at, 3)} - reached
        reached |= found
        waiting += found
    return any(near(d, m, 3) for d in reached for m in second)


@pytest.mark.parametrize("side", [28, 64])
def test_drawings_are_joined_as_they_say(side):
    batch = TASKS["pathfinder"].batch(TRAIN, 0, 24, seqlen=side * side)
    found = [are_joined(pixels.view(side, side)) for pixels in batch.tokens[:, 0]]
    assert found == batch.labels.bool().tolist() and len(set(found)) == 2


def test_lengths_without_room_are_refused():
    for task, seqlen, wrong in (
        ("pathfinder", 64, "28 or more"),
        ("path-x", 1000, "the square"),
        ("listops", 8, "16"),
    ):
        with pytest.raises(ValueError, match=wrong):
            TASKS[task].batch(TRAIN, 0, 1, seqlen=seqlen)


def test_examples_are_the_same_each_time_and_held_out_ones_are_others():
    for name in ("text", "retrieval", "listops"):
        task = TASKS[name]
        first, again = (task.batch(TRAIN, 5, 4, seqlen=256) for _ in range(2))
        assert torch.equal(first.tokens, again.tokens) and torch.equal(first.labels, again.labels)
        assert torch.equal(first.tokens[2:], task.batch(TRAIN, 7, 2, seqlen=256).tokens)
        assert not torch.equal(first.tokens, task.batch(HELD_OUT, 5, 4, seqlen=256).tokens)
    assert not set(tasks._files("xml", TRAIN)) & set(tasks._files("xml", HELD_OUT))


@pytest.mark.parametrize("task", ["listops", "retrieval"])
def test_every_attention_learns_alike(task):
    losses = {name: Training(replace(SMALL, task=task, attention=name)).run().losses for name in ATTENTIONS}
    for found in losses.values():
        assert found == pytest.approx(losses["standard"], rel=1e-4)


def test_a_stopped_training_goes_on_where_it_was(tmp_path):
    whole = Training(SMALL).run()
    path = tmp_path / "training.pt"
    stopped = Training(SMALL, path)

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.run(every=2, report=stop)
    rest = Training(SMALL, path)
    assert rest.progress.steps == 2
    assert rest.run().losses == whole.losses and rest.progress.accuracy == whole.accuracy
    with pytest.raises(ValueError, match=r"width=32, but .*training.pt is of a training with 16"):
        Training(replace(SMALL, width=32), path)
    with pytest.raises(ValueError, match="task='listop' must be one of listops, text"):
        replace(SMALL, task="listop")


def test_it_learns():
    """Which of two digits comes first is what two tokens tell."""
    easy = replace(SMALL, task="text", seqlen=32, steps=60, batch=16, lr=3e-3, warmup=5)
    progress = Training(easy).run()
    assert sum(progress.losses[-10:]) < 0.97 * sum(progress.losses[:10])


def test_the_example(load_example, tmp_path):
    example = load_example("long_range_arena")
    sizes = "--seqlen 1024 --layers 1 --width 16 --heads 2 --steps 3 --batch 2 --held-out 4 --device cpu"
    file = tmp_path / "runs.json"
    runs = example.main(f"pathfinder {sizes} --attention tilewise sdpa --json {file}".split())
    written = json.loads(file.read_text())
    assert written["sdpa"]["losses"] == runs["sdpa"].losses and len(runs["tilewise"].losses) == 3


def test_a_claim_trains(tmp_path, monkeypatch):
    small = lambda task, setting: replace(SMALL, warmup=1)  # noqa: E731
    monkeypatch.setattr(long_range, "_settings", small)
    monkeypatch.setitem(long_range.STEPS, "listops", 2)
    arguments = ["claims", "--device", "cpu", "--train", "listops", "--checkpoints", str(tmp_path)]
    ran = CliRunner().invoke(_app(), arguments)
    assert ran.exit_code == 0 and "37.6% claimed" in ran.output, ran.output
    assert (tmp_path / "listops-cpu.pt").exists()
    timed = CliRunner().invoke(_app(), [*arguments[:3], "--filter", "gqa", "--budget", "9"])
    assert timed.exit_code == 2 and "--budget 9 is that of a training" in timed.output
    wrong = CliRunner().invoke(_app(), [*arguments[:4], "path"])
    assert wrong.exit_code == 2 and "must be one of listops, pathfinder, path-x" in wrong.output


def test_a_training_ends_with_its_time(tmp_path):
    """The rate has fallen by then; what is left can be trained later, with more time."""
    steps = 10_000
    brief = replace(SMALL, steps=steps, seconds=0.5, warmup=2)
    training = Training(brief, tmp_path / "training.pt")
    progress = training.run(every=5)
    assert 0 < progress.steps < steps and progress.accuracy is not None
    assert training.schedule.get_last_lr()[0] < 0.5 * brief.lr
    longer = Training(replace(brief, seconds=2 * progress.seconds), tmp_path / "training.pt")
    assert longer.run(every=5).steps > progress.steps
    again = Training(brief, tmp_path / "training.pt")
    done = again.progress.steps
    assert again.run().steps == done
