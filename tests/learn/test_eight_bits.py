"""8-bit attention step by step: the command, and the page's arithmetic against Python's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import resources

import pytest
import torch
from typer.testing import CliRunner

import tilewise
from tilewise.cli import _app
from tilewise.core import fp8
from tilewise.lab.learn import eight_bits

NODE = shutil.which("node")


def javascript(code: str, *arguments):
    """What `code` returns in Node, with the page's fp8.js at hand."""
    if NODE is None:
        pytest.skip("no node here")
    source = (resources.files("tilewise.lab.learn") / "page" / "fp8.js").read_text()
    call = f"((...given) => {{ {code} }})(...{json.dumps(arguments)})"
    script = f"{source}\nconsole.log(JSON.stringify({call}));"
    run = subprocess.run(
        [NODE, "--input-type=module"], input=script, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def tensor(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def walked(tensors) -> dict:
    """The page's walk of (q, k, v)."""
    inputs = {name: x.tolist() for name, x in zip(("query", "key", "value"), tensors)}
    signs = fp8.hadamard(fp8.padded_dim(tensors[0].shape[1]))[:, 0].tolist()
    return javascript("return walk(...given)", inputs, signs)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(_app(), ["fp8", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(("name", "precision"), [("rotated", "fp8"), ("integers", "int8")])
def test_rotated_is_what_the_library_computes(name: str, precision: str):
    q, k, v = eight_bits.example(outlier=8)
    expected = tilewise.attention(*(x.half()[None, :, None] for x in (q, k, v)), precision=precision)
    found = getattr(eight_bits.walk(q, k, v), name).out
    torch.testing.assert_close(found, expected[0, :, 0].double(), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("outlier", [1, 7, 32])
def test_exact_numbers_of_the_page_are_pythons(outlier):
    """Rotated and rounded numbers and scores, bit for bit; what has exponentials to the last digits."""
    tensors = eight_bits.example(outlier)
    expected, found = eight_bits.walk(*tensors), walked(tensors)
    assert torch.equal(tensor(found["scores"]), expected.scores)
    for name in ("plain", "rotated"):
        ours, right = found[name], getattr(expected, name)
        for letter in "qk":
            assert torch.equal(tensor(ours[letter]), getattr(right, letter).double())
            quantized = getattr(right, f"{letter}8")
            assert torch.equal(tensor(ours[f"{letter}8"]["values"]), quantized.values.double())
            assert torch.equal(tensor(ours[f"{letter}8"]["numbers"]), quantized.dequantize().double())
            assert ours[f"{letter}8"]["factor"] == quantized.factors.item()
        assert torch.equal(tensor(ours["scores"]), right.scores)
        assert torch.equal(tensor(ours["unrounded"]), expected.scores)  # the rotation changes no score
        assert torch.equal(tensor(ours["errors"]), right.scores - expected.scores)
        torch.testing.assert_close(tensor(ours["weights"]), right.weights, rtol=1e-12, atol=1e-300)
        torch.testing.assert_close(tensor(ours["out"]), right.out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(tensor(ours["shares"]), right.error_shares(), rtol=1e-9, atol=1e-12)


def test_any_numbers_of_the_page_are_near_pythons():
    """float32 rotates these with rounding errors, in another order than the page's."""
    q, k, v = torch.randn(5, 6), torch.randn(7, 6), torch.randn(7, 3)
    q[:, 2] *= 20
    k[:, 2] *= 20
    expected, found = eight_bits.walk(q, k, v), walked((q, k, v))
    torch.testing.assert_close(tensor(found["scores"]), expected.scores, rtol=1e-12, atol=1e-12)
    assert torch.equal(tensor(found["plain"]["q8"]["values"]), expected.plain.q8.values.double())
    rotated, scale = found["rotated"], expected.scores.abs().max().item()
    torch.testing.assert_close(tensor(rotated["q"]), expected.rotated.q.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(tensor(rotated["unrounded"]), expected.scores, rtol=0, atol=1e-5 * scale)


def test_every_8_bit_number_and_what_lies_between():
    bytes_ = torch.arange(256, dtype=torch.uint8)
    numbers = bytes_.view(fp8.FP8).float()
    numbers = numbers[numbers.isfinite()]
    ordered = numbers.unique()
    between = torch.cat([(ordered[:-1] + ordered[1:]) / 2, torch.randn(2000) * 50, torch.randn(500) * 0.01])
    x = torch.cat([numbers, between, between.nextafter(torch.tensor(9e9)), torch.tensor([463.9, -464.0])])
    found = tensor(javascript("return given[0].map(roundE4m3)", x.tolist()))
    assert torch.equal(found, x.to(fp8.FP8).double())
    assert javascript("return given.map(roundE4m3)", 465, -1e30) == [448, -448]
    fields = javascript("return given[0].map((x) => bitsOf(x))", ordered.tolist())
    for x, field in zip(ordered.tolist(), fields):
        assert f"{field['sign']} {field['exponent']} {field['fraction']}" == eight_bits.bits(x)
        assert (1 - 2 * int(field["sign"])) * field["significand"] * 2 ** field["power"] == x
        assert (field["significand"] < 1) == (field["exponent"] == "0000")


def test_factors():
    for largest in (0.0, 1.0, 448.0, 448.0000305, 449.0, 0.875, 2.0**-130, 3e38):
        x = torch.tensor([[largest, -largest / 3]])
        found = javascript("return quantize(given[0])", x.double().tolist())
        expected = fp8.round_rows(x)
        assert found["factor"] == expected.factors.item(), largest
        assert torch.equal(tensor(found["values"]), expected.values.double()), largest


def test_weights():
    p = torch.cat([torch.rand(500), torch.exp(-30 * torch.rand(500)), torch.tensor([0.0, 1.0, 2.0**-18])])
    found = javascript("return given[0].map(roundWeight)", p.double().tolist())
    assert torch.equal(tensor(found), fp8.round_weights(p).double())


def test_what_is_printed():
    output, walk = run("--outlier", "20", "--query", "3"), eight_bits.walk(*eight_bits.example(20))
    errors = walk.rms_errors()
    for name in ("scores", "out"):
        plain, rotated = errors[f"plain {name}"], errors[f"rotated {name}"]
        assert f"{plain:.4g} as they are, {rotated:.4g} rotated: " in output
    assert f"rotated: {errors['plain scores'] / errors['rotated scores']:.2f} times less\n" in output
    assert f"{errors['integers scores']:.4g} in integers: " in output
    assert errors["integers scores"] < errors["rotated scores"]
    integers = walk.integers.q8.values[3, :3].tolist()
    assert re.search("int8 .*" + " +".join(map(str, integers)), output), output
    assert re.search(r"difference .* 0\.0e\+00\n", output)
    rounded = walk.plain.q8.values[3, :3].tolist()
    assert ", ".join(eight_bits.bits(x) for x in rounded) in output
    assert run() == run("--outlier", "8", "--query", "0")
    assert "8 queries and keys, head_dim 40" in run("--rows", "8", "--head-dim", "40")
    assert "columns 0 to 0 of 1\n" in run("--rows", "1", "--head-dim", "1")
    assert "of (q H)(k H)^T / 128 " in run("--head-dim", "96")


def test_where_there_is_no_error():
    zeros = str(eight_bits.walk(*torch.zeros(3, 2, 4)))
    assert zeros.count("the same") == 4 and "nan" not in zeros
    exact = eight_bits.walk(torch.eye(4)[:2] + 0.0625, torch.eye(4)[:2], torch.ones(2, 1))
    assert "nan" not in str(exact)
    assert eight_bits._gain(1.0, 2.0) == "2.00 times more" and eight_bits._gain(1.0, 0.0) == "inf times less"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows must be 1 to 128; got 0"),
        (["--rows", "129"], "--rows must be 1 to 128; got 129"),
        (["--head-dim", "0"], "--head-dim must be 1 to 512; got 0"),
        (["--query", "16"], "--query must be 0 to 15; got 16"),
        (["--outlier", "nan"], "--outlier must be at most 1e+06 in size; got nan"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message):
    result = CliRunner().invoke(_app(), ["fp8", *arguments])
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert message in " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4,), (4, 2), (4, 2)), "query, key and value must be 2-D"),
        (((4, 2), (4, 3), (4, 2)), r"do not fit together: \(4, 2\), \(4, 3\), \(4, 2\)"),
        (((4, 2), (4, 2), (3, 2)), "do not fit together"),
        (((129, 2), (4, 2), (4, 2)), "rows must be 1 to 128, one block; got 129 and 4"),
    ],
)
def test_wrong_shapes(shapes, message):
    with pytest.raises(ValueError, match=message):
        eight_bits.walk(*(torch.zeros(shape) for shape in shapes))
