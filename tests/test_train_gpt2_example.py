"""examples/train_gpt2.py runs, and every attention learns alike."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "examples" / "train_gpt2.py"


def test_every_attention_learns_alike(tmp_path):
    spec = importlib.util.spec_from_file_location("train_gpt2_example", PATH)
    example = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = example  # where dataclasses look their annotations up
    spec.loader.exec_module(example)
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
