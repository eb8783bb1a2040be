"""examples/generate.py runs, and generates what a pass without a cache chooses."""

import re

import pytest
import torch


@pytest.fixture(scope="module")
def example(load_example):
    return load_example("generate")


@pytest.mark.parametrize("model", ["gpt", "tiny"])
def test_it_runs(example, model, capsys):
    sizes = ["--requests", "4", "--prompt", "30", "--new", "6", "--most", "2"]
    example.main(["--model", model, *sizes])
    printed = capsys.readouterr().out
    same, total = re.search(r"(\d+) of (\d+) tokens are those", printed).groups()
    assert same == total and int(total) > 4
    assert float(re.search(r"([\d.]+) tokens/s", printed)[1]) > 0


@pytest.mark.parametrize("option", ["--requests", "--prompt", "--new", "--most"])
def test_nothing_to_do_is_refused(example, option, capsys):
    with pytest.raises(SystemExit):
        example.main(["--model", "tiny", option, "0"])
    assert f"{option} must be at least 1, got 0" in capsys.readouterr().err


def test_sequences_join_and_leave_as_pages_allow(example):
    """Five pages of 16 tokens: a third request waits until one of two has left; chunks of 7 tokens."""
    torch.manual_seed(0)
    model = example.Llama(example.TINY).eval()
    engine = example.Engine(model, num_pages=5, page_size=16, most=3, longest=80, chunk=7)
    requests = [
        example.Request(torch.randint(100, (n,)).tolist(), new) for n, new in ((20, 5), (9, 20), (30, 3))
    ]
    seen = []
    step = engine.step
    engine.step = lambda: (seen.append([len(r.prompt) for r in engine.rows if r]), step())
    engine.run(requests)
    assert [20, 9] in seen and [30, 9] in seen and all(len(lengths) <= 2 for lengths in seen)
    assert [r.generated for r in requests] == example.uncached_tokens(model, requests)
    assert [len(r.generated) for r in requests] == [5, 20, 3]
    assert engine.caches[0].free_pages == 5 and engine.caches[0].sequences == []
    with pytest.raises(ValueError, match="does not fit"):
        engine.run([example.Request([1] * 80, 2)])
