"""examples/eight_bits.py: the error of 8-bit attention over FlashAttention-3's way, and the perplexity."""

import pytest


@pytest.fixture(scope="module")
def example(load_example):
    return load_example("eight_bits")


def shares(errors: dict[str, float]) -> dict[str, float]:
    return {name: error / errors["a scale a head"] for name, error in errors.items()}


# At most so many times the error of one scale a head; what blocks and the rotation lower it by, at least.
DRAWN = {
    "normal": ({"fp8": 1.02, "int8": 0.8}, {}),
    "0.1% of entries x 10": ({"fp8": 0.8, "int8": 0.6}, {"int8, not rotated": 1.5}),
    "2 columns of q, k x 8": ({"fp8": 0.5, "int8": 0.3}, {"int8, not rotated": 1.3}),
    "1 token in 256 of q, k x 8": ({"fp8": 1.02, "int8": 1.02}, {"int8, a scale a head": 1.3}),
}


@pytest.mark.parametrize("name", DRAWN)
def test_errors_of_drawn_numbers(name: str, example):
    most, gains = DRAWN[name]
    found = shares(example.errors(*example.drawn(name, 512)))
    for precision, bound in most.items():
        assert found[precision] <= bound, found
    for without, gain in gains.items():
        assert found[without] > gain * found["int8"], found
    assert found["ieee"] < 0.1


def test_perplexity_is_that_of_16_bits(example, capsys, tmp_path):
    given = ["--steps", "10", "--windows", "2", "--seqlen", "100", "--save", str(tmp_path / "qkv.pt")]
    table, perplexity = example.main(given)
    for precision in ("fp8", "int8"):
        assert perplexity[precision] == pytest.approx(perplexity["ieee"], rel=0.01)
        assert perplexity[precision] != perplexity["ieee"]
    assert set(example.DRAWN) < set(table) and "trained, layer 2" in table
    assert len(example.torch.load(tmp_path / "qkv.pt")) == 3
    assert "perplexity: ieee" in capsys.readouterr().out


@pytest.mark.slow
def test_errors_of_a_trained_model(example):
    model = example.train(300)
    kept = example.read(model, "ieee", 8)[1]
    found = [shares(example.errors(*qkv, causal=True)) for qkv in kept]
    assert all(share["int8"] <= 0.87 and share["fp8"] <= 1.02 for share in found), found
    assert sum(share["int8"] for share in found) / len(found) <= 0.85, found
