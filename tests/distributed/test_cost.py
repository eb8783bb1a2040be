"""The cost model: sums that can be done by hand, and choices that follow from them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import float16
from typer.testing import CliRunner

from tilewise.cli import _app
from tilewise.distributed import Network, explain
from tilewise.lab.bench import results
from tilewise.lab.distributed import plan

FREE = Network(flops=1e12, bandwidth=1e30, latency=0.0)


def methods(*arguments, **options):
    return {e.method: e for e in explain(*arguments, **options).estimates}


def test_even_work_without_waiting_is_efficient():
    for method, e in methods(4096, world=4, network=FREE, num_heads=8, causal=True).items():
        assert e.efficiency == pytest.approx(1.0, abs=1e-3), method
        assert e.limit == "none"


def test_contiguous_causal_work_is_uneven():
    """The last of 4 ranks has 7 of 16 parts of the work."""
    e = methods(4096, world=4, network=FREE, num_heads=8, causal=True, balance="contiguous")["ring"]
    assert e.efficiency == pytest.approx(4 / 7, abs=1e-3)
    assert e.limit == "uneven work"


def test_seconds_and_bytes():
    """No FLOPs to hide behind: the ring's forward takes 3 messages of a rank's keys and values."""
    network = Network(flops=1e30, bandwidth=1e6, latency=0.5)
    options = {"world": 4, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "dtype": float16}
    found = methods(4000, network=network, backward=False, **options)
    message = 1000 * 2 * 32 * 2
    assert found["ring"].bytes_received == 3 * message and found["ring"].bytes_held == 2 * message
    assert found["ring"].seconds == pytest.approx(3 * (0.5 + message / 1e6))
    assert found["all_gather"].bytes_held == 3 * message
    assert found["ulysses"].bytes_held == 0


def test_one_peer_may_be_slower_than_all_together_and_messages_take_multiprocessors():
    options = {"world": 4, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16, "dtype": float16}
    network = Network(flops=1e30, bandwidth=3e6, latency=0.0, peer_bandwidth=1e6)
    found = methods(4000, network=network, backward=False, **options)
    message = 1000 * 2 * 32 * 2
    assert found["ring"].seconds == pytest.approx(3 * message / 1e6)
    assert found["all_gather"].seconds == pytest.approx(
        2 * message / 1e6
    )  # one rank's, and then two's at once
    work = 4000 * 1000 * 2 * 8 * 32
    network = Network(flops=work, bandwidth=10 * message, latency=0.0, taken=0.5)
    found = methods(4000, network=network, backward=False, **options)
    assert found["ring"].seconds == pytest.approx(1 + 0.5 * 3 / 10)


def test_what_is_read_is_published_before():
    """Of half the heads one rank gets 3 tensors of the other's tokens, of half the tokens their results."""
    options = {"world": 2, "num_heads": 4, "head_dim": 16, "dtype": float16, "backward": False}
    work = 4000 * 2000 * 2 * 4 * 32
    moved = 2000 * 2 * 16 * 2  # bytes of a tensor
    network = Network(flops=work, bandwidth=moved, latency=0.0, publishing=0.25)
    found = methods(4000, network=network, **options)
    assert found["ulysses"].seconds == pytest.approx(1 + 4 * 1.25)
    slow = network._replace(bandwidth=10 * 4 * moved)
    assert methods(4000, network=slow, **options)["ring"].seconds == pytest.approx(1 + 0.25 / 10)
    waits = network._replace(waiting=3.0)  # before either exchange of heads; before keys are read
    assert methods(4000, network=waits, **options)["ulysses"].seconds == pytest.approx(1 + 4 * 1.25 + 2 * 3)
    waits = slow._replace(waiting=3.0)
    assert methods(4000, network=waits, **options)["ring"].seconds == pytest.approx(1 + 0.25 / 10 + 3)


def test_messages_that_start_together_wait_once():
    """A ring of 4: keys, keys, keys with gradients, and gradients twice; heads for tokens there and back."""
    network = Network(flops=1e30, bandwidth=1e30, latency=1.0, per_node=2, far_latency=1.0)
    found = methods(4096, world=4, network=network, num_heads=8)
    assert found["ring"].seconds == pytest.approx(3 + 5)
    assert found["all_gather"].seconds == pytest.approx(2 + 4)
    assert found["ulysses"].seconds == pytest.approx(2 + 2)
    slow = network._replace(far_latency=2.0)
    assert methods(4096, world=4, network=slow, num_heads=8)["ulysses"].seconds == pytest.approx(4 + 4)


def test_the_choice_follows_the_network():
    near = Network(flops=600e12, bandwidth=300e9, latency=1e-5)
    assert explain(32768, world=8, network=near, num_heads=16, causal=True).method == "ring"
    slow = near._replace(per_node=8, far_bandwidth=4e9, far_latency=2e-5)
    across_nodes = explain(131072, world=64, network=slow, num_heads=8, causal=True)
    assert across_nodes.method == "2d" and across_nodes.best.degree == 8
    assert "2d, 8" in str(across_nodes)


def test_heads_that_do_not_divide_leave_no_exchange():
    assert set(methods(64, world=4, network=FREE, num_heads=3)) == {"ring", "all_gather"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 1000}, "window=1000 must be (left, right)"),
        ({"dtype": "bf16"}, "dtype='bf16' must be a torch.dtype"),
        ({"network": {"flops": 1}}, "network={'flops': 1} must be a tilewise.distributed.Network"),
        ({"network": Network(0, 0, 0)}, "network.flops=0 must be finite and positive"),
        ({"network": FREE._replace(flops=-1)}, "network.flops=-1 must be finite and positive"),
        ({"network": FREE._replace(latency=None)}, "network.latency=None must be a number"),
        ({"network": FREE._replace(per_node=0)}, "network.per_node=0 must be an integer of at least 1"),
        ({"head_dim": -4}, "head_dim=-4 must be an integer of at least 1"),
        ({"num_heads": 0}, "num_heads=0 must be an integer of at least 1"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=16"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 must be an integer of at least 1"),
        ({"causal": "yes"}, "causal='yes' must be True or False"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        explain(4096, **{"world": 8, "network": FREE, "num_heads": 16, **change})
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["plan.foo", "plan", "none/plan.svg"])
def test_a_plot_that_cannot_be_written_is_refused_before_the_table(tmp_path, name):
    result = CliRunner().invoke(_app(), ["distributed", "--world", "8", "--plot", str(tmp_path / name)])
    assert result.exit_code == 2 and "--plot" in result.output and "auto:" not in result.output


def test_worlds_that_take_too_long_to_predict():
    result = CliRunner().invoke(_app(), ["distributed", "--world", "1000000"])
    assert result.exit_code == 2 and "Invalid value for '--world'" in result.output


def test_a_window_is_sent_to_neighbours_only():
    options = {"world": 8, "network": FREE, "num_heads": 1, "causal": True, "balance": "contiguous"}
    everything, some = (methods(8192, window=w, **options)["ring"] for w in ((None, None), (16, 0)))
    assert some.bytes_received < everything.bytes_received / 100


def test_the_command_prints_and_draws(tmp_path):
    plot = tmp_path / "plan.svg"
    arguments = ["--world", "2", "--world", "16", "--seqlen", "8192", "--heads", "4", "--plot", str(plot)]
    done = CliRunner().invoke(_app(), ["distributed", *arguments])
    assert done.exit_code == 0, done.output
    assert done.output.count("GPUs, 8,192 tokens") == 2 and done.output.count("\nall_gather ") == 2
    assert plot.read_text().count('<g id="axes_') == 2


ROOT = Path(__file__).parents[2]
MEASURED = {  # as the page calls them
    "two H100s": "h100-x2-distributed-quick-2026-11-28",
    "four H100s": "h100-x4-distributed-quick-2026-11-28",
    "four H200s": "h200-x4-distributed-quick-2026-11-28",
    "two H200s": "h200-x2-distributed-quick-2026-11-28",
    "two H200s, by messages": "h200-x2-distributed-quick-2026-11-26",
    "four H100s, by messages": "h100-x4-distributed-quick-2026-11-27",
}


def file_of(name):
    return ROOT / "benchmarks" / "results" / f"{MEASURED[name]}.json"


def compared(name):
    points = plan.compare(results.load(file_of(name)), plan.NOMINAL)
    by_collectives = name == "four H100s, by messages"  # which the page does not count
    return [p for p in points if not (by_collectives and p.method == "all_gather")]


@pytest.mark.parametrize("name", MEASURED)
def test_the_page_says_how_the_model_is_off(name):
    done = plan.check(results.load(file_of(name)), compared(name))
    middle, highest = re.search(r"measured: ([\d.]+) \([\d.]+ to ([\d.]+)\)", done).groups()
    assert f"\n| {name} | {middle} | {highest} |\n" in (ROOT / "docs" / "distributed.md").read_text()


def test_the_model_is_put_beside_what_was_measured(tmp_path):
    plot, file = tmp_path / "points.svg", str(file_of("two H200s, by messages"))
    done = CliRunner().invoke(_app(), ["distributed", "--measured", file])
    assert "fwd-bf16-d128-h16-b1-s32768-causal | *0.84 (0.90)* | 0.74 (0.82) | 0.82 (0.90)" in done.output
    four = str(file_of("four H100s"))
    CliRunner().invoke(_app(), ["distributed", "--measured", four, "--plot", str(plot)])
    assert all(f"<!-- {method} -->" in plot.read_text() for method in ("ring", "ulysses", "2d", "all_gather"))
    slow = CliRunner().invoke(_app(), ["distributed", "--measured", file, "--bandwidth", "0.001"])
    assert "0.84 (0.00)" in slow.output
    other = str(ROOT / "benchmarks" / "results" / "cpu-amd-2026-11-29.json")
    done = CliRunner().invoke(_app(), ["distributed", "--measured", other])
    assert done.exit_code == 2 and "nothing to compare with" in done.output


@pytest.mark.parametrize("name", MEASURED)
def test_the_choice_is_the_best_measured_or_near(name):
    points = compared(name)
    cases = {p.case: p for p in points if p.is_chosen}
    assert set(cases) == {p.case for p in points}
    for case, chosen in cases.items():
        assert chosen.measured > max(p.measured for p in points if p.case == case) / 1.03, chosen


def test_the_command_names_a_wrong_argument():
    done = CliRunner().invoke(_app(), ["distributed", "--world", "0"])
    assert done.exit_code == 2 and "--world" in done.output
