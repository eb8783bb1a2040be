"""examples/train_gpt2.py runs, and every attention learns alike."""

import json

import pytest


def test_every_attention_learns_alike(load_example, tmp_path):
    example = load_example("train_gpt2")
    sizes = "--layers 2 --width 32 --heads 2 --vocabulary 256 --seqlen 48 --batch 2 --steps 30 --lr 0.03"
    path = tmp_path / "runs.json"
    runs = example.main(f"--device cpu --eager {sizes} --json {path}".split())
    assert set(runs) == set(example.ATTENTIONS) - set(example.GPU_ONLY)
    written = json.loads(path.read_text())["runs"]
    expected = runs["standard"].losses
    assert expected[-1] < expected[0]
    for name, run in runs.items():
        assert run.losses == pytest.approx(expected, rel=1e-3), name
        assert written[name]["losses"] == run.losses and run.tokens_per_second > 0
