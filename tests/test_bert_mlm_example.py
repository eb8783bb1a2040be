"""examples/bert_mlm.py: every attention learns alike, and a stopped training goes on where it was."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")

SIZES = "--device cpu --layers 2 --width 32 --heads 2 --seqlen 48 --batch 3 --every 2 --warmup 2 --lr 0.01"


@pytest.fixture(scope="module")
def example(load_example):
    return load_example("bert_mlm")


def test_every_attention_learns_alike(example, tmp_path):
    path = tmp_path / "runs.json"
    command = f"{SIZES} --steps 25 --dropout 0 --json {path} --attention eager sdpa tilewise"
    runs = example.main(command.split())
    expected = runs["eager"]
    assert expected.losses[-1] < expected.losses[0] - 0.5
    for run in runs.values():
        assert run.losses == pytest.approx(expected.losses, rel=1e-3)
        assert run.held_out == pytest.approx(expected.held_out, rel=1e-3) and run.timed == 24
    assert json.loads(path.read_text())["runs"]["tilewise"]["losses"] == runs["tilewise"].losses


def test_a_stopped_training_goes_on_where_it_was(example, tmp_path, monkeypatch):
    path = tmp_path / "bert.pt"
    command = f"{SIZES} --steps 6"
    whole = example.main(command.split())["tilewise"]
    save = example.Trainer._save

    def stop(trainer):
        save(trainer)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(example.Trainer, "_save", stop)
        example.main(f"{command} --checkpoint {path}".split())
    torch.rand(7)  # whatever drew numbers meanwhile
    rest = example.main(f"{command} --checkpoint {path}".split())["tilewise"]
    assert rest.losses == whole.losses and rest.held_out == whole.held_out
    with pytest.raises(SystemExit, match=r"--width=64, but .*bert.pt is of a training with 32"):
        example.main(f"{command} --checkpoint {path} --width 64".split())


def test_what_is_hidden_is_guessed_and_nothing_else(example):
    args = example.parse(["--seqlen", "400", "--batch", "50", "--device", "cpu"])
    data = torch.randint(256, (9000,), dtype=torch.uint8)
    batch, again = (example.batch_of(data, 3, args) for _ in range(2))
    tokens, labels = batch["input_ids"], batch["labels"]
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    is_hidden, is_real = labels != example.IGNORED, batch["attention_mask"].bool()
    assert not (is_hidden & ~is_real).any() and (tokens[~is_real] == example.PADDING).all()
    assert 0.13 < is_hidden.sum() / is_real.sum() < 0.17
    became = tokens[is_hidden]
    assert 0.77 < (became == example.MASK).float().mean() < 0.83
    assert 0.08 < (became == labels[is_hidden]).float().mean() < 0.13


def test_every_batch_has_something_to_guess(example):
    args = example.parse(["--seqlen", "4", "--batch", "1", "--device", "cpu"])
    data = torch.randint(256, (99,), dtype=torch.uint8)
    for number in range(20):
        batch = example.batch_of(data, number, args)
        assert (batch["labels"][batch["attention_mask"] == 1] != example.IGNORED).any()
