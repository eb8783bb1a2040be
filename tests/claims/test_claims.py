"""`tilewise claims`: the list, what counts as confirmed, the file that keeps results, the page."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from tilewise.cli import _app
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.claims import attention, models, report, run
from tilewise.lab.claims.claim import CLAIMS, Claim, Measured, Setting

CPU = Setting("cpu")


def command(*arguments: str):
    return CliRunner().invoke(_app(), ["claims", "--device", "cpu", *arguments])


def test_what_needs_no_clock_is_what_it_is_known_to_be():
    """Sizes and worked numbers, against formulas of their own."""
    found = {name: CLAIMS[name].measure(CPU).value for name in ("score-matrix", "kv-cache-70b", "gqa-saving")}
    assert found["score-matrix"] == pytest.approx(2 * 131072**2 / 1e9)
    assert found["kv-cache-70b"] == pytest.approx(2 * 2 * 80 * 8 * 128 * 4096 / 1e9)
    assert found["gqa-saving"] == 8
    q = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.float64)
    k = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]], dtype=torch.float64)
    v = torch.arange(1.0, 17.0, dtype=torch.float64).view(4, 4)
    dout = torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64).expand(4, 4)
    q.requires_grad_()
    out = torch.softmax(q @ k.T, -1) @ v
    (dq,) = torch.autograd.grad(out, q, dout)
    delta = (out.detach() * dout).sum(-1)
    assert CLAIMS["delta-by-hand"].measure(CPU).value == pytest.approx(float(delta[0]))
    assert CLAIMS["dq-by-hand"].measure(CPU).value == pytest.approx(float(dq[0, 1]))


def test_8_bit_errors_shrink_and_results_are_exact():
    assert CLAIMS["fp8-error"].measure(CPU).value > 1.3
    assert CLAIMS["exact"].holds(CLAIMS["exact"].measure(CPU).value)


@pytest.mark.slow
def test_a_training_step_has_the_loss_of_eager_attention(monkeypatch):
    pytest.importorskip("transformers")
    build = models._gpt2
    monkeypatch.setattr(models, "_gpt2", lambda size, layers, *rest: build(size, 1, *rest))
    monkeypatch.setattr(models, "STEPS", 1)
    measured = CLAIMS["gpt2-step"].measure(CPU)
    first, last, apart = map(float, re.findall(r"loss ([\d.]+) to ([\d.]+) .* (\S+) away", measured.note)[0])
    assert measured.value > 0.5 and apart <= 2e-4 and last < first


def test_the_longest_step_of_a_model_is_the_last_that_fits(monkeypatch):
    def step(build, inputs, setting, implementation):
        seqlen = inputs["input_ids"].shape[1]
        if seqlen > {"eager": 8192, "sdpa": 65536, "tilewise": 131072}[implementation]:
            raise torch.OutOfMemoryError
        return lambda: 0.0

    monkeypatch.setattr(models, "_tokens", lambda setting, *shape: torch.empty(shape, device="meta"))
    monkeypatch.setattr(models, "_training_step", step)
    measured = CLAIMS["gpt2-context"].measure(CPU)
    assert measured.value == 131072 and "eager: 8,192, sdpa: 65,536;" in measured.note


def test_claims_of_a_gpu_are_not_measured_on_a_cpu():
    names = {claim.name for claim in run.chosen(None, CPU)}
    assert "fa3-speed" not in names and "attention-2k" in names
    assert "fa3-speed" in {claim.name for claim in run.chosen(None, Setting("cuda"))}
    with pytest.raises(BenchError, match="leaves none of io-forward"):
        run.chosen("fa3-speed", CPU)
    with pytest.raises(BenchError, match="not a regular expression"):
        run.chosen("(", CPU)


def test_a_file_is_taken_up_where_it_ended(tmp_path):
    path, calls = tmp_path / "claims.json", []

    def measure(setting: Setting) -> Measured:
        calls.append(setting)
        return Measured(3.0, "here", "seen")

    claims = [Claim(name, f"{name} says.", "a paper", 2, "×", "at least", measure) for name in ("a", "b")]
    first = run.run(claims[:1], CPU, path, lambda claim, row: None)
    shown: list[str] = []
    both = run.run(claims, CPU, path, lambda claim, row: shown.append(claim.name))
    assert len(calls) == 2 and shown == ["a", "b"] and both["rows"]["a"] == first["rows"]["a"]
    assert report.line(claims[0], both["rows"]["a"]) == [
        "a says.",
        "a paper",
        "2×",
        "3×",
        "1.50",
        "yes",
        "here; seen",
    ]
    stale = json.loads(path.read_text()) | {"source_sha256": "another"}
    path.write_text(json.dumps(stale))
    with pytest.raises(BenchError, match="another source_sha256: name a new file"):
        run.run(claims, CPU, path, lambda claim, row: None)
    assert json.loads(path.read_text()) == stale and len(calls) == 2  # nothing was lost
    path.write_text("{}")
    with pytest.raises(BenchError, match="holds no claims"):
        run.run(claims, CPU, path, lambda claim, row: None)
    with pytest.raises(BenchError, match="there is no folder"):
        run.run(claims, CPU, tmp_path / "nowhere" / "claims.json", lambda claim, row: None)
    assert len(calls) == 2


def test_what_could_not_be_measured_and_trainings_are_measured_again(tmp_path):
    answers = iter([BenchError("needs something"), Measured(3.0, "here"), Measured(4.0, "a", "", {"ms": {}})])

    def measure(setting: Setting) -> Measured:
        answer = next(answers)
        if isinstance(answer, BenchError):
            raise answer
        return answer

    claims = [
        Claim(n, "", "", 2, "×", "at least", measure, is_training=n == "training") for n in ("a", "training")
    ]
    path = tmp_path / "claims.json"
    rows = run.run(claims[:1], CPU, path, lambda claim, row: None)["rows"]
    assert rows["a"] == {"refused": "needs something"}
    rows = run.run(claims[:1], CPU, path, lambda claim, row: None)["rows"]
    assert rows["a"]["value"] == 3 and "curves" not in rows["a"]
    rows = run.run(claims, CPU, path, lambda claim, row: None)["rows"]
    assert rows["a"]["value"] == 3 and rows["training"]["curves"] == {"ms": {}}
    answers = iter([Measured(5.0, "more")])
    assert run.run(claims, CPU, path, lambda claim, row: None)["rows"]["training"]["value"] == 5


def test_files_keep_six_digits_and_nothing_that_is_counted(tmp_path):
    path, claims = tmp_path / "claims.json", [CLAIMS["score-matrix"], CLAIMS["exact"]]
    rows = run.run(claims, CPU, path, lambda claim, row: None)["rows"]
    assert set(rows) == {"score-matrix", "exact"}
    assert run.load(path)["rows"]["exact"]["value"] == float(f"{rows['exact']['value']:.6g}")
    for found in (run.load(path), *report.committed()):
        assert found["rows"] and not any(name in CLAIMS and CLAIMS[name].is_counted for name in found["rows"])


def test_what_other_kernels_gave_is_marked():
    found = run.run([CLAIMS["exact"]], CPU, None, lambda claim, row: None)
    assert "with older kernels" not in str(report.sections([found]))
    assert "with older kernels" in str(report.sections([found | {"kernels_sha256": "another"}]))


def test_a_claim_that_cannot_be_measured_says_why():
    def refuse(setting: Setting) -> Measured:
        raise BenchError("needs something")

    claim = Claim("a", "a says.", "a paper", 2, "×", "at least", refuse)
    row = run.run([claim], CPU, None, lambda claim, row: None)["rows"]["a"]
    assert report.line(claim, row)[3:] == ["–", "–", "–", "needs something"]


def test_a_memory_that_is_too_small_ends_one_claim():
    def too_much(setting: Setting) -> Measured:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    claim = Claim("a", "", "", 2, "×", "at least", too_much)
    assert run.measured(claim, CPU) == {"refused": "CUDA out of memory."}


def test_what_does_not_hold_has_a_reason():
    for title, rows in report.sections(report.committed()):
        for row in rows:
            assert len(row) == len(report.HEADER)
            reason = next(c for c in CLAIMS.values() if c.says == row[0]).why
            assert row[5] != "**no**" or (reason and row[6].startswith(reason)), (title, row)


def test_both_orders_of_work_are_exact():
    q, k, v = (torch.randn(3, 300, 16, dtype=torch.double) for _ in range(3))
    exact = torch.softmax(q @ k.mT / 4, -1) @ v
    for order in (attention.keys_outside, attention.queries_outside):
        torch.testing.assert_close(order(q, k, v), exact, rtol=1e-12, atol=1e-12)


def test_command():
    listed = command("--list").output
    assert all(name in listed for name in CLAIMS)
    done = command("--filter", "kv-cache-70b|gqa")
    assert done.exit_code == 0 and "does not hold" in done.output and "8× measured: holds" in done.output
    wrong = command("--filter", "nothing-of-this-name")
    assert (
        wrong.exit_code == 2 and "tilewise claims: --filter" in wrong.output and "leaves none" in wrong.output
    )
