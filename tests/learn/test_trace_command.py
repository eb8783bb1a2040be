import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tilewise.cli import _app
from tilewise.lab.learn.examples import EXAMPLES

OWN = {"--q": "1,0;0,1", "--k": "1,0;0,1;-1,2", "--v": "1;2;3"}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(_app(), ["trace", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def fails(*arguments: str) -> str:
    result = CliRunner().invoke(_app(), ["trace", *arguments])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())


def section(output: str, title: str) -> str:
    """The block under a title, up to the next blank line."""
    start = output.index(title)
    return output[start : output.index("\n\n", start)]


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"(?<![\w.])-?(?:\d+\.?\d*(?:e[+-]\d+)?|inf|nan)(?![\w.])", text)]


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("order", ["fa1", "fa2"])
@pytest.mark.parametrize("normalize", ["each_step", "end"])
def test_examples_print_and_agree(name, order, normalize):
    output = run("--example", name, "--order", order, "--normalize", normalize)
    assert name in output
    agreement = section(output + "\n\n", "the same numbers another way").splitlines()[1:]
    assert len(agreement) == (4 if EXAMPLES[name].dout else 3)
    for line in agreement:
        assert float(line.split()[-1]) < 1e-13


def test_tiling_prints_forward_backward_and_update():
    output = run("--example", "tiling-4x4")
    tile = section(output, "forward step 2: tile (0, 1), queries 0-1, keys 2-3")
    assert "11.8039  13.4425  15.0810  16.7196" in tile
    assert "16.1928  17.8313  19.4699  21.1084" in tile
    assert "1.6386" in tile
    final = section(output, "final division, query tile 0")
    assert "7.2039   8.2039   9.2039  10.2039" in final
    assert "34.8155        0  30.3031        0" in section(output, "backward: before the tiles")
    assert "-5.5715  -0.7281   4.3847   1.9149" in section(output, "backward: result")
    assert output.count("backward step") == 4
    update = section(output + "\n\n", "weight update, with X = I")
    assert "1.1187  -0.1187   0.5615  -0.1915" in update
    assert "2.2993        0   0.5571        0" in update
    assert "8.9024   9.9024  10.9024  11.9024" in update


def test_both_running_outputs_are_printed_and_the_kept_one_is_marked():
    at_end = section(run("--example", "by-hand-1x6"), "forward step 1")
    assert re.search(r"acc \(kept\) .* 3\.8711  3\.8711\n", at_end)
    assert re.search(r"out so far .* 2\.5752  2\.5752\n", at_end)
    each_step = section(run("--example", "by-hand-1x6", "--normalize", "each_step"), "forward step 1")
    assert re.search(r"out \(kept\) .* 2\.5752  2\.5752\n", each_step)
    assert re.search(r"acc so far .* 3\.8711  3\.8711\n", each_step)


def test_order_of_steps():
    tiles = {
        order: re.findall(
            r"forward step \d+: tile \((\d), (\d)\)", run("--example", "tiling-4x4", "--order", order)
        )
        for order in ("fa1", "fa2")
    }
    assert tiles["fa2"] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert tiles["fa1"] == [("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")]


def test_overflow_shows_both_softmaxes():
    output = run("--example", "overflow-100-90-80")
    naive = section(output, "softmax without subtracting the maximum")
    assert re.search(r"exp\(s\) / sum +nan +nan +0", naive)
    safe = section(output, "softmax with the maximum subtracted")
    assert "nan" not in safe
    assert re.search(r"softmax +0\.999955 +0\.000045 +2\.06106e-09", safe)
    assert re.search(r"sum +1\.000045\n", safe)
    assert "nan" not in output.replace(naive, "")


def test_underflow_shows_both_softmaxes():
    naive = section(run("--example", "underflow-100-200-300"), "softmax without subtracting the maximum")
    assert "3.78351e-44" in naive
    assert re.search(r"exp\(s\) / sum +1 +0 +0", naive)
    assert re.search(r"flushed to 0 +nan +nan +nan", naive)


def test_block_sizes():
    assert run("--example", "by-hand-1x6", "--block-k", "2").count("forward step") == 3
    assert run("--example", "tiling-4x4", "--block-q", "4", "--block-k", "4").count("forward step") == 1
    assert run("--example", "tiling-4x4", "--sram-size", "48").count("forward step") == 4  # 3 x 3
    assert "tiles      3 x 3  of 4 x 4" in run("--example", "tiling-4x4", "--sram-size", "48")


def test_random_inputs():
    output = run(
        "--seqlen", "5", "--seqlen-k", "7", "--head-dim", "3", "--causal", "--backward", "--seed", "4"
    )
    assert output == run(
        "--seqlen", "5", "--seqlen-k", "7", "--head-dim", "3", "--causal", "--backward", "--seed", "4"
    )
    assert output != run(
        "--seqlen", "5", "--seqlen-k", "7", "--head-dim", "3", "--causal", "--backward", "--seed", "5"
    )
    assert "skipped" in output
    assert "-inf" in output
    assert "backward step" in output
    assert "backward" not in run("--seqlen", "2")
    assert len(numbers(section(output, "inputs"))) == 5 * 3 + 7 * 3 + 7 * 3 + 5 * 3


def test_options_change_what_is_printed():
    assert "backward" not in run("--example", "tiling-4x4", "--no-backward").split("inputs")[1]
    assert "backward step" in run("--example", "scores-2-5-3", "--backward")
    assert "7.204  " in run("--example", "tiling-4x4", "--digits", "3")
    assert "scale             0.5" in run("--example", "tiling-4x4", "--scale", "0.5")


def test_rows_are_not_broken_in_a_narrow_terminal():
    output = (
        CliRunner()
        .invoke(_app(), ["trace", "--seqlen", "12", "--block-k", "12"], env={"COLUMNS": "40"})
        .output
    )
    score_row = section(output, "forward step 1").splitlines()[1]
    assert len(numbers(score_row)) == 12


def test_without_options_a_small_example_is_printed():
    output = run()
    assert output.startswith("scores-2-5-3: ") and output.count("\n") < 70
    assert "Other inputs: --example NAME, --seqlen N, or your own with --q, --k and --v" in output


def test_own_matrices():
    options = [word for pair in OWN.items() for word in pair]
    output = run(*options)
    assert numbers(section(output, "inputs")) == [1, 0, 0, 1, 1, 0, 0, 1, -1, 2, 1, 2, 3]
    q, k, v = (torch.tensor(rows) for rows in ([[1.0, 0], [0, 1]], [[1.0, 0], [0, 1], [-1, 2]], [1.0, 2, 3]))
    out = ((q @ k.T / 2**0.5).softmax(-1) @ v).tolist()
    assert re.search(rf"O +softmax\(S\) V +{out[0]:.4f}\n +{out[1]:.4f}\n", output)
    assert "forward step 2" not in run(*options, "--block-k", "3")


def test_own_matrices_from_files(tmp_path):
    q, k = torch.tensor([[1.0, 0], [0, 1]]), torch.tensor([[1.0, 0], [0, 1], [-1, 2]])
    torch.save(q, tmp_path / "q.pt")
    np.save(tmp_path / "k.npy", k.numpy())
    (tmp_path / "v.csv").write_text("1\n2\n3\n")
    files = [str(tmp_path / name) for name in ("q.pt", "k.npy", "v.csv")]
    text = run(*(word for pair in OWN.items() for word in pair))
    assert run("--q", files[0], "--k", files[1], "--v", files[2]) == text
    torch.save({"q": q}, tmp_path / "q.pt")
    assert "--q must be numbers as" in fails("--q", files[0], "--k", files[1], "--v", files[2])


def test_help_names_the_examples():
    result = CliRunner().invoke(_app(), ["trace", "--help"], env={"COLUMNS": "200"})
    for name in EXAMPLES:
        assert name in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--example", "tiling-4x4", "--seqlen", "4"], "--example and --seqlen each give the inputs"),
        (["--seqlen", "4", "--k", "1"], "--seqlen and --q each give the inputs"),
        (["--q", "1", "--v", "1"], "--q, --k and --v go together; got only --q and --v"),
        (["--head-dim", "4"], "--head-dim goes with --seqlen N"),
        (OWN | {"--q": "1,x"}, "--q must be numbers as 1,0;0,1 or a file .csv, .npy or .pt"),
        (OWN | {"--q": "1;2,3"}, "--q must have rows of one length; got [1, 2]"),
        (OWN | {"--q": "nan,1"}, "--q must have finite numbers only"),
        (OWN | {"--q": ""}, "--q must be numbers as"),
        (OWN | {"--q": ";".join("1" * 65)}, "--q must have 1 to 64 rows and columns"),
        (OWN | {"--q": "missing.npy"}, "--q missing.npy: No such file"),
        (OWN | {"--k": "1;0;1"}, "--k has 1 columns (head_dim), must have as many as --q: 2"),
        (OWN | {"--v": "1"}, "--v has 1 rows (keys), must have as many as --k: 3"),
        (["--example", "tiling"], "--example must be one of tiling-4x4,"),
        (["--example", "tiling-4x4", "--seed", "1"], "--seed goes with --seqlen"),
        (["--seqlen", "0"], "--seqlen must be 1 to 64, because every number is printed; got 0"),
        (
            ["--seqlen", "4", "--head-dim", "0"],
            "--head-dim must be 1 to 64, because every number is printed; got 0",
        ),
        (["--seqlen", "4", "--order", "fa3"], "order must be one of ('fa1', 'fa2'), got 'fa3'"),
        (["--seqlen", "4", "--normalize", "x"], "normalize must be one of ('each_step', 'end'), got 'x'"),
        (["--seqlen", "4", "--block-q", "0"], "block_q must be an integer of at least 1, got 0"),
        (["--seqlen", "4", "--sram-size", "0"], "sram_size must be at least 1, got 0"),
        (["--seqlen", "4", "--sram-size", "9", "--block-k", "1"], "--sram-size sets both block sizes"),
        (["--seqlen", "4", "--scale", "nan"], "scale=nan must be a finite number"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message):
    if isinstance(arguments, dict):
        arguments = [word for pair in arguments.items() for word in pair]
    assert message in fails(*arguments)
