"""`tilewise io`, `tilewise roofline`, `tilewise kv-memory`."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewise.cli import _app
from tilewise.lab.learn import io_model
from tilewise.lab.learn.io_model import Shape
from tilewise.lab.learn.machines import human_bytes
from tilewise.lab.learn.pipeline import Pipeline

H200 = Path(__file__).parents[2] / "benchmarks/results/h200-peers-quick-2026-11-21.json"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(_app(), list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def row(output: str, name: str) -> list[str]:
    line = next(line for line in output.splitlines() if line.strip().startswith(name))
    return re.split(r"\s{2,}", line.strip())


def test_io_prints_the_models_counts():
    output = run("io", "--seqlen", "1000", "--head-dim", "64", "--heads", "3", "--causal", "--detail")
    cost = io_model.fa2(Shape(1000, 1000, 64, num_heads=3, causal=True))
    fields = row(output, "fa2")
    assert fields[1] == human_bytes(cost.slow_bytes)
    assert fields[3] == f"{cost.matmul_flops:.3e}"
    assert fields[5] == f"{cost.intensity:.1f}"
    for name in ("standard", "fa1", "backward_storing", "backward_recompute", "decode"):
        assert row(output, name)
    assert row(output[output.index("\nbackward_recompute") :], "dq_sum")


def test_sram_size_matters_to_fa1_alone():
    small, large = (run("io", "--sram", size) for size in ("64", "192"))
    assert row(small, "fa1") != row(large, "fa1")
    assert row(small, "fa2") == row(large, "fa2")


def test_io_says_how_often_each_order_of_loops_reads():
    output = run("io")
    standard, fa1, fa2 = (row(output, name)[1] for name in ("standard", "fa1", "fa2"))
    assert (standard, fa1, fa2) == ("138 MB", "64.2 MB", "69.2 MB")
    assert "fa1 (keys outer) reads K and V once, reads Q and O and writes O 19 times: " in output
    assert "fa2 (queries outer) reads Q and writes O once, reads K and V 32 times: " in output
    assert "more than standard" not in output
    counted = run("io", "--detail")
    assert row(counted[counted.index("\nfa2") :], "k")[1] == human_bytes(32 * 4096 * 128 * 2)
    assert row(counted[counted.index("\nfa1") :], "q")[1] == human_bytes(19 * 4096 * 128 * 2)
    assert "fa1 moves more than standard here" in run("io", "--sram", "96")


def test_numbers_and_nouns_agree():
    assert "1 sequence, 4096 x 4096 keys, 1 query head of 128, 2 bytes a number" in run("io")
    options = ("--heads", "4", "--kv-heads", "1", "--dtype", "fp8", "--batch", "2")
    assert "2 sequences, 4096 x 4096 keys, 4 query heads and 1 KV head of 128, 1 byte a" in run(
        "io", *options
    )
    assert "1 query, 1 key, head_dim 2" in run("trace", "--seqlen", "1")


def test_lengths_beyond_a_models_context_are_marked():
    output = run("kv-memory", "--model", "gpt-2", "--context", "131072")
    assert "gpt-2 *" in output and "*: longer than the model's context: gpt-2 1024 tokens" in output
    assert "*" not in run("kv-memory", "--model", "gpt-2", "--context", "1024")


@pytest.mark.parametrize("command", ["io", "roofline", "kv-memory"])
def test_every_column_has_a_title(command):
    lines = run(command).splitlines()
    for title, below in itertools.pairwise(lines):
        if title.startswith("  ") and below.startswith("  ") and re.search(r"\d", below):
            assert len(re.split(r"\s{2,}", title.strip())) >= len(re.split(r"\s{2,}", below.strip()))


def test_every_command_is_described_in_whole_words():
    commands = run("--help").split("Commands:")[1]
    assert "..." not in commands and "kv-memory" in commands


def test_roofline():
    output = run("roofline", "--device", "a100", "--seqlen", "8192")
    assert "balance 156.0 FLOP/byte" in output
    assert row(output, "standard")[3] == "HBM"
    assert row(output, "fa2")[3] == "matrix products"
    assert "balance 295.2" in run("roofline", "--device", "H100")


def test_roofline_plot(tmp_path):
    path = tmp_path / "roof.svg"
    assert f"drew {path}" in run("roofline", "--plot", str(path))
    assert "decode: HBM" in path.read_text()


def test_predicted_against_measured(tmp_path):
    path = tmp_path / "compared.png"
    output = run("roofline", "--results", str(H200), "--plot", str(path))
    assert path.read_bytes()[:4] == b"\x89PNG"
    fields = row(output, "fwd-bf16-d128-h16-b4-s4096-full")
    assert fields[2] == "matrix products" and fields[5].endswith("%")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "command",
    [
        ["roofline"],
        ["io"],
        ["kv-memory"],
        ["pipeline"],
        ["trace", "--seqlen", "3"],
        ["fp8"],
        ["bench", "--help"],
    ],
    ids=" ".join,
)
def test_a_terminal_of_few_characters(command):
    call = "import sys; from tilewise.cli import main; sys.argv[1:] = sys.argv[2:]; main()"
    for encoding in ("latin-1", "ascii"):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run(
            [sys.executable, "-c", call, "", *command], capture_output=True, env=environment
        )
        assert done.returncode == 0, done.stderr[-999:]


def test_units_do_not_run_out():
    assert human_bytes(2e18) == "2.0 EB" and human_bytes(10**40).endswith(" QB")


def test_kv_memory():
    output = run("kv-memory", "--model", "llama-2-70b", "--context", "4096")
    assert row(output, "llama-2-70b")[1:] == ["328 kB", "1.3 GB", "1.25 GiB", "10.7 GB", "8x"]
    assert [row(output, n)[-1] for n in ("512 ", "2048 ", "8192 ", "32768 ", "131072 ")] == [
        "0.5 MiB", "8 MiB", "128 MiB", "2048 MiB", "32768 MiB",
    ]  # fmt: skip
    assert "gpt-3-175b" in run("kv-memory")


def test_pages():
    output = run("kv-memory", "--lengths", "37,9,62,20", "--page-size", "16", "--longest", "96")
    assert run("kv-memory", "--lengths", "37,9,62,20", "--longest", "96") == output
    assert row(output, "2")[1:] == ["62", "4", "2"]
    assert "128 tokens lie in 160 slots, 32 of them empty; reserving 96 for each takes 384, 256" in output


def test_pipeline():
    timeline = Pipeline.of_kernel(128).run()
    output = run("pipeline", "--spans")
    assert f"{timeline.cycles:.0f} cycles" in output
    assert output.count("\n") == 2 + len(timeline.spans)
    changed = Pipeline(64, 64, 1, 3, overlap=False, ping_pong=True, key_tiles=4).run()
    options = "--head-dim 64 --block-n 64 --warpgroups 1 --stages 3 --no-overlap --ping-pong --key-tiles 4"
    output = run("pipeline", *options.split())
    assert f"no overlap, ping-pong: {changed.cycles:.0f} cycles" in output
    assert "1 warpgroup of 64 queries, 3 pipeline stages" in output


def test_pipeline_is_drawn(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    timeline = Pipeline.of_kernel(128).run()
    output = run("pipeline")
    assert max(map(len, output.splitlines()[3:])) <= 80
    products = "".join(line[24:] for line in output.splitlines() if "warpgroup 1 products" in line)
    order = [s.kind for s in timeline.spans if s.lane == "warpgroup 1" and s.kind in ("Q K", "P V")]
    assert re.findall("[QP]", products) == [kind[0] for kind in order]
    for variant in ("no overlap, no ping-pong", "overlap, ping-pong"):
        assert re.search(rf"  {variant} +\d+ cycles, tensor cores busy \d+%", output)
    assert re.search(rf"  overlap, no ping-pong +{timeline.cycles:.0f} cycles, .*  <- above\n", output)
    assert "... and so on to" in run("pipeline", "--key-tiles", "200")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["io", "--seqlen", "0"], "Invalid value for '--seqlen'"),
        (
            ["io", "--dtype", "int8"],
            "dtype must be one of float64, float32, bfloat16, float16, fp8, got 'int8'",
        ),
        (["io", "--block-q", "0"], "Invalid value for '--block-q'"),
        (["io", "--sram", "0"], "Invalid value for '--sram'"),
        (["roofline", "--device", "TPU"], "device must be one of A100, H100, H200 or cpu, got 'TPU'"),
        (["roofline", "--plot", "missing/x.png"], "--plot missing/x.png: "),
        (["roofline", "--plot", "missing/x"], "Format '' is not supported"),
        (["roofline", "--results", "missing.json"], "missing.json: No such file"),
        (["kv-memory", "--model", "eliza"], "model must be one of gpt-2"),
        (["kv-memory", "--lengths", "1,x"], "lengths must be whole numbers with commas between, got '1,x'"),
        (["kv-memory", "--longest", "96"], "--page-size and --longest count pages of --lengths"),
        (["kv-memory", "--page-size", "16"], "--page-size and --longest count pages of --lengths"),
        (["pipeline", "--stages", "0"], "Invalid value for '--stages'"),
        (["io", "--seqlen", "99999999999999999999"], "Invalid value for '--seqlen'"),
        (["roofline", "--heads", "9999999999"], "Invalid value for '--heads'"),
        (["pipeline", "--head-dim", "-1"], "Invalid value for '--head-dim'"),
        (["pipeline", "--key-tiles", "999999999"], "Invalid value for '--key-tiles'"),
        (["fp8", "--seed", "99999999999999999999"], "Invalid value for '--seed'"),
        (["trace", "--seqlen", "3", "--seed", "99999999999999999999"], "Invalid value for '--seed'"),
        (["kv-memory", "--context", "0"], "Invalid value for '--context'"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, message):
    result = CliRunner().invoke(_app(), arguments)
    assert result.exit_code == 2
    assert message in " ".join(re.sub("[│╭╮╰╯─]", " ", result.output).split())
