"""`tilewise heads`: shares and entropies of the weights, and a picture of them."""

import math

import pytest
import torch
from typer.testing import CliRunner

import tilewise
from tilewise import Aux
from tilewise.lab.demo.gpt import GPT
from tilewise.lab.demo.scale import QUICK
from tilewise.lab.heads import Heads
from tilewise.lab.heads.command import statistics

pytest.importorskip("matplotlib")
ASK = Aux(block_sum=16, entropy=True)
PNG = b"\x89PNG"


def drawn(seqlen: int = 70, layers: int = 2) -> Heads:
    q = torch.randn(layers, 1, seqlen, 3, 8)
    return Heads([tilewise.attention_statistics(x, x, ASK, causal=True) for x in q], block=16)


def test_shares_are_of_a_query():
    heads = drawn()
    assert heads.shares.shape == (2, 3, 5, 5) and heads.seqlen == 70
    torch.testing.assert_close(heads.shares.sum(-1), torch.ones(2, 3, 5))  # the last tile has fewer queries
    assert not heads.shares.triu(1).any()
    same = torch.zeros(1, 70, 1, 8)
    alike = Heads([tilewise.attention_statistics(same, same, ASK, causal=True)], block=16)
    torch.testing.assert_close(alike.shares[0, 0], alike.uniform)
    by_tile = heads.shares[1, 2]
    near = sum(by_tile[i, j] for i in range(5) for j in range(5) if j in (i, i - 1)) / 5
    assert math.isclose(heads.local[1, 2], near, rel_tol=1e-5)
    torch.testing.assert_close(heads.first, heads.shares[..., 0].mean(-1))


def test_the_picture_has_an_image_and_a_curve_for_each_head(tmp_path):
    heads = drawn()
    axes = [a for a in heads.figure().axes if a.get_label() != "<colorbar>"]
    images, strips = axes[::2], axes[1::2]
    assert len(images) == len(strips) == 6
    assert all(len(a.images) == 1 for a in images) and all(len(a.lines) == 2 for a in strips)
    curve = strips[4].lines[0].get_xdata()  # layer 1, head 1
    assert curve[0] == pytest.approx(heads.entropy[1, 1, :16].mean().item(), rel=1e-5)
    assert heads._repr_png_()[:4] == PNG
    heads.save(tmp_path / "heads.svg")
    assert "<svg" in (tmp_path / "heads.svg").read_text()


def test_statistics_of_a_model_are_those_of_its_layers():
    model, tokens = GPT(QUICK), torch.randint(256, (1, 50))
    found = statistics(model, tokens, ASK)
    assert [tuple(layer.block_sum.shape) for layer in found] == [(1, QUICK.heads, 4, 4)] * QUICK.layers
    seen = []

    def attend(q, k, v):
        seen.append(tilewise.reference.attention_statistics(q, k, ASK, causal=True))
        return tilewise.attention(q, k, v, causal=True)

    with torch.no_grad():
        model(tokens, [attend] * QUICK.layers)
    for a, b in zip(found, seen, strict=True):
        torch.testing.assert_close(a.entropy.double(), b.entropy.double(), rtol=1e-4, atol=1e-4)


def run(*arguments: str):
    from tilewise.cli import _app

    return CliRunner().invoke(_app(), ["heads", *arguments])


def test_the_command_writes_the_picture(tmp_path):
    out = tmp_path / "heads.png"
    result = run("--quick", "--tokens", "300", "--block", "32", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert out.read_bytes()[:4] == PNG
    assert "nats a byte before training" in result.output and "layer 1, 1" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "heads.gif"), "must end in .png, .svg, .pdf"),
        (("--out", "nowhere/heads.png"), "there is no folder"),
        (("--tokens", "5"), "--tokens"),
        (("--tokens", "16384", "--block", "2"), "--block 2 makes more than 4096 tiles a side"),
    ],
)
def test_wrong_arguments(arguments, message):
    result = run("--quick", *arguments)
    assert result.exit_code == 2 and message in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("layers", "block", "error", "message"),
    [
        ([], 16, ValueError, "at least one layer"),
        ([3], 16, TypeError, r"layers\[0\]=int"),
        ([tilewise.Statistics()], 16, ValueError, "block_sum and entropy"),
    ],
)
def test_wrong_layers(layers, block, error, message):
    with pytest.raises(error, match=message):
        Heads(layers, block=block)


def test_a_wrong_block_is_told():
    q = torch.randn(1, 70, 1, 8)
    with pytest.raises(ValueError, match=r"block=8 must be the request's: 5 x 5 tiles"):
        Heads([tilewise.attention_statistics(q, q, ASK)], block=8)
