"""The page's part on 8 bits in a real browser: every control, and its numbers against `tilewise.fp8`."""

from __future__ import annotations

import pytest
import torch
from browser import as_text

from tilewise.core import fp8
from tilewise.lab.learn import eight_bits, page


def as_numbers(cells: list[str]) -> list[float]:
    return [float(x.replace("−", "-")) for x in cells]


def check(shown, walk, query):
    """What is shown of a walk: tables, errors and factors."""
    for name in ("plain", "rotated"):
        way = getattr(walk, name)
        scaled, rounded, _ = shown.cells(f"#eight-{name}-numbers")
        expected = (way.q[query] / way.q8.factors)[: len(scaled)].tolist()
        assert as_numbers(scaled) == pytest.approx(expected, rel=0, abs=0.00501)
        assert rounded == [as_text(x, 2) for x in way.q8.values[query].float()[: len(scaled)].tolist()]
        label = shown.find(f"#eight-{name}-errors svg").get_attribute("aria-label")
        size = " × ".join(map(str, walk.scores.shape))
        error = as_text(eight_bits.rms(way.scores - walk.scores), 4)
        assert label.startswith(f"Errors of {size} scores: root mean square {error}, ")
        assert len(shown.all(f"#eight-{name}-columns rect")) == 2 * way.q.shape[1]
        assert len(shown.all(f"#eight-{name}-errors title")) == walk.scores.numel()
    errors = walk.rms_errors()
    for row, name in zip(shown.cells("#eight-gain"), ("scores", "out"), strict=True):
        plain, rotated = errors[f"plain {name}"], errors[f"rotated {name}"]
        exact = eight_bits.rms(getattr(walk, name))
        assert row == [*(as_text(x, 4) for x in (exact, plain, rotated)), eight_bits._gain(plain, rotated)]
    weights = walk.rotated.weights[query].float()
    rounded = (weights.to(fp8.FP8), fp8.round_weights(weights))
    for row, expected in zip(shown.cells("#eight-weights")[1:], rounded, strict=True):
        assert as_numbers(row) == pytest.approx(expected.float().tolist(), rel=5e-4, abs=5.01e-6)


@pytest.mark.parametrize(("outlier", "query"), [(8, 0), (1, 5), (32, 15)])
def test_sizes_of_the_outliers(shown, outlier, query):
    shown.set("eight-size", outlier)
    shown.set("eight-query", query)
    walk = eight_bits.walk(*eight_bits.example(outlier))
    check(shown, walk, query)
    assert shown.text("eight-size-says") == f"times {outlier}"
    assert "largest difference of 0. " in shown.text("eight-exact")
    shares = [way.error_shares().max().item() for way in (walk.plain, walk.rotated)]
    assert [b.text for b in shown.all("#eight-exact b")] == ["0", *(f"{100 * x:.3g}%" for x in shares)]
    assert shown.find("#eight-check b").get_attribute("class") == "good"
    command = f"tilewise fp8 --outlier {outlier} --query {query}"
    assert shown.find("#eight-command code").text == command
    weights = walk.rotated.weights.float()
    zeros = [(rounded == 0).sum() for rounded in (weights.to(fp8.FP8).float(), fp8.round_weights(weights))]
    assert [int(b.text) for b in shown.all("#eight-zeros b")] == zeros


def test_every_size_agrees_with_python(shown):
    for outlier in page.OUTLIERS:
        shown.set("eight-size", outlier)
        assert shown.find("#eight-check b").get_attribute("class") == "good", outlier


def test_ones_own_numbers(shown):
    shapes = (3, 5), (4, 5), (4, 2)
    tensors = [torch.randn(*shape, dtype=torch.float64).mul(100).round().div(100) for shape in shapes]
    tensors[0][:, 1] *= 10
    tensors[1][:, 1] *= 10
    for field, tensor in zip(("q", "k", "v"), tensors):
        shown.set(f"eight-{field}", "\n".join(" ".join(f"{x:.2f}" for x in row) for row in tensor.tolist()))
    assert shown.find("#eight-inputs").get_attribute("value") == "own"
    assert shown.find("#eight-size").get_attribute("disabled") and shown.text("eight-size-says") == "as typed"
    shown.set("eight-query", 2)
    walk = eight_bits.walk(*tensors)
    label = shown.find("#eight-plain-errors svg").get_attribute("aria-label")
    assert label.startswith("Errors of 3 × 4 scores: ")
    plain = walk.rms_errors()["plain scores"]
    assert shown.cells("#eight-gain")[0][1] == as_text(plain, 4)
    assert "in this page alone" in shown.text("eight-check")
    command = shown.find("#eight-command code").text
    assert command.startswith('python -c "import torch; from tilewise.learn import eight_bits')
    shown.set("eight-k", "1 2")
    assert shown.find("#eight-error").text == "Q has 5 columns and K has 2; they must have as many"
    assert shown.find("#eight-command code").text == command
    shown.set("eight-k", "1 2 3 4 1e7\n" * 4)
    assert shown.find("#eight-error").text == "Numbers must be at most a million in size."
    shown.set("eight-inputs", "random")
    assert shown.find("#eight-error").get_attribute("hidden")
    check(shown, eight_bits.walk(*eight_bits.example(8)), 2)


def test_own_command_runs(shown, capsys):
    import shlex

    shown.set("eight-inputs", "own")
    assert shown.find("#eight-own").get_attribute("open")
    words = shlex.split(shown.find("#eight-command code").text)
    exec(compile(words[2], "page", "exec"), {})
    gain = shown.cells("#eight-gain")[0][3]
    assert f"rotated: {gain}\n" in capsys.readouterr().out


@pytest.mark.parametrize("x", [0.3, 1, -448, 464, 465, 2**-6, 2**-7, 2**-9, 1e-4, 0, -0.1, 17])
def test_bits_of_a_number(shown, x):
    shown.set("eight-number", x)
    expected = torch.tensor(float(x)).clamp(-448, 448).to(fp8.FP8).float().item()
    assert "".join(shown.cells("#eight-bits")[0]) == eight_bits.bits(expected).replace(" ", "")
    said = shown.find("#eight-number-says b").text.replace("−", "-")
    assert float(said) == expected
    assert ("Nothing is larger than 448" in shown.text("eight-number-says")) == (abs(x) > 464)
    assert ("exponent field is 0" in shown.text("eight-number-says")) == (abs(expected) < 2**-6)
    before = shown.text("eight-bits")
    shown.set("eight-number", "")
    assert shown.text("eight-bits") == before
