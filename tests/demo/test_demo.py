"""`tilewise demo`: what it measures, what it says, and that a wrong attention cannot pass."""

import re
import statistics
import sys
import threading
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import tilewise
from tilewise import cli
from tilewise.lab.demo import findings, generate, lengths, memory, report, run, text, train
from tilewise.lab.demo.methods import METHODS, SDPA, STANDARD, TILEWISE, standard
from tilewise.lab.demo.scale import CPU, CUDA, QUICK

DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny problems on a busy machine: waiting for a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def demo(*arguments):
    return CliRunner().invoke(cli._app(), ["demo", "--quick", "--device", "cpu", *map(str, arguments)])


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """One quick run through the command: its result, its findings and its page."""
    seen = []

    class Recorded(findings.Findings):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            seen.append(self)

    folder = tmp_path_factory.mktemp("demo") / "made" / "here"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Findings", Recorded)
        result = demo("--out", folder)
    assert result.exit_code == 0, result.output
    return result, seen[0], (folder / "report.html").read_text(encoding="utf-8")


def test_the_curves_coincide_and_training_learns(good):
    training = good[1].training
    assert len(training.differences) == QUICK.steps
    assert training.differences[0] <= train.FIRST_BOUND
    assert max(training.differences) <= training.bound < 0.02
    assert abs(training.tilewise.valid_after - training.standard.valid_after) <= training.bound
    assert training.tilewise.valid_after < training.tilewise.valid_before - 0.5


def test_the_time_of_training_has_no_compilation_in_it(monkeypatch):
    """A forward and a backward of the timed kind come before the clock is read."""
    grads_before, passes = [], []

    def attend(query, key, value):
        if torch.is_grad_enabled():
            query.register_hook(lambda grad: passes.append(grad.shape))
        return METHODS[STANDARD](query, key, value)

    def clock():
        grads_before.append(len(passes))
        return 0.0

    monkeypatch.setattr(train.time, "perf_counter", clock)
    scale = replace(QUICK, steps=2)
    train.train(attend, text.standard_library(), scale, DEVICE, 0, lambda: None)
    assert grads_before == [scale.layers, 3 * scale.layers]
    assert len(set(passes)) == 1


def test_the_tokens_are_the_same(good):
    generation = good[1].generation
    assert generation.cached.tokens == generation.recomputed.tokens
    assert len(generation.cached.tokens) == QUICK.new_tokens
    assert len(set(generation.cached.tokens)) > 3
    for made in (generation.cached, generation.recomputed):
        assert made.elapsed == sorted(made.elapsed) and made.elapsed[0] > 0
    assert generation.cache_bytes == 2 * 4 * QUICK.layers * QUICK.width * (QUICK.prompt + QUICK.new_tokens)


def test_the_table_is_complete_and_positive(good):
    table = good[1].table
    assert set(table.cells) == {(n, b, m) for n in QUICK.lengths for b in (False, True) for m in METHODS}
    for (n, b, _), cell in table.cells.items():
        assert cell.skipped is None
        assert cell.time > 0 and cell.extra_bytes > 0
        assert 0 < cell.error <= table.bound(n, b) < 1e-5
    longest = QUICK.lengths[-1]
    scores = 4 * QUICK.table_heads * longest**2
    assert scores < table.cells[longest, False, STANDARD].extra_bytes < lengths.SCORE_MATRICES[False] * scores
    assert table.cells[longest, False, TILEWISE].extra_bytes < scores


def test_the_console_says_what_the_page_says(good):
    result, found, page = good
    flat = " ".join(result.output.split())
    for sentence, holds in found.sentences().values():
        assert holds
        assert " ".join(sentence.split()) in flat
        assert sentence.replace("'", "&#x27;") in page
    assert "report.html" in flat and "FAILED" not in flat
    assert memory.HOW["cpu"] in flat and memory.HOW["cpu"].replace("'", "&#x27;") in page


def test_the_sentences_carry_the_measured_figures(good):
    found = good[1]
    says = {name: sentence for name, (sentence, _) in found.sentences().items()}
    assert f"{found.training.largest_difference:.1e}" in says["loss"] or "at most 0" in says["loss"]
    assert findings.duration(found.generation.cached.seconds) in says["generation"]
    assert findings.duration(found.generation.recomputed.seconds) in says["generation"]
    longest = QUICK.lengths[-1]
    assert findings.duration(found.table.cells[longest, True, SDPA].time) in says["time"]
    assert findings.mebibytes(found.table.cells[longest, True, STANDARD].extra_bytes) in says["memory"]
    worst = max(cell.error for (_, _, name), cell in found.table.cells.items() if name == TILEWISE)
    assert f"{worst:.1e}" in says["error"]


class Page(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.links, self.ids = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("href", "src", "xlink:href"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)


def test_the_page_is_complete_and_asks_for_nothing(good):
    page = good[2]
    parsed = Page(page)
    assert parsed.tags.count("svg") == 5
    assert all(link.startswith("#") and link[1:] in parsed.ids for link in parsed.links)
    assert not {"script", "link", "iframe", "img"} & set(parsed.tags)
    without_namespaces = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert "http" not in without_namespaces and "@import" not in page
    for url in re.findall(r"url\(([^)]*)\)", page):
        assert url.startswith("#") and url[1:] in parsed.ids
    assert len(parsed.ids) == len(set(parsed.ids))
    assert "prefers-color-scheme: dark" in page and "currentColor" in page
    facts = good[1].facts
    for fact in (facts["Device"], facts["Date"], facts["Text"].split(":")[0], f"torch {torch.__version__}"):
        assert fact.replace("'", "&#x27;") in page
    assert page.index("<ol>") < page.index("<svg")


def sees_the_future(query, key, value):
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda q, k, v: standard(q, k, v * 1.001), id="values"),
        pytest.param(lambda q, k, v: standard(q * 1.05, k, v), id="scale"),
        pytest.param(sees_the_future, id="leak"),
        pytest.param(lambda q, k, v: standard(q, k, v) * float("nan"), id="nan"),
    ],
)
def test_a_wrong_attention_fails(wrong, monkeypatch, tmp_path):
    monkeypatch.setattr(tilewise, "attention", lambda q, k, v, **_: wrong(q, k, v))
    result = demo("--out", tmp_path)
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output and "OUTSIDE" in " ".join(result.output.split())
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "does NOT hold" in page and "Everything checked holds" not in page


def test_a_wrong_curve_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tilewise, "attention", lambda q, k, v, **_: standard(q, k, v.flip(1)))
    result = demo("--out", tmp_path)
    assert result.exit_code == 1
    assert "DO NOT coincide" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (-100.0, r"the tokens DIFFER from number \d+ on"),
        (1.1, "are the same, but their scores DIFFER"),
    ],
)
def test_a_wrong_cache_is_named(factor, says, monkeypatch, tmp_path):
    right = tilewise.attention_with_cache

    def forgets(query, cache, key, value, **options):
        return right(query, cache, key, value * factor, **options)

    monkeypatch.setattr(tilewise, "attention_with_cache", forgets)
    result = demo("--out", tmp_path)
    assert result.exit_code == 1
    assert re.search(says, " ".join(result.output.split()))


def test_the_seed_is_heard():
    source = text.standard_library()
    makes = [
        train.train_both(source, QUICK, DEVICE, seed, lambda: None).standard.losses for seed in (1, 1, 2)
    ]
    assert makes[0] == makes[1] != makes[2]


def test_standard_attention_is_skipped_where_it_would_not_fit(monkeypatch):
    table_bytes = 4 * QUICK.table_heads * QUICK.lengths[-1] ** 2
    free = 3.5 * table_bytes / lengths.SAFE_SHARE  # enough for the longest forward, not for its backward
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    table = lengths.measure(QUICK, DEVICE, 0, lambda: None)
    skipped = {key for key, cell in table.cells.items() if cell.skipped}
    assert skipped == {(QUICK.lengths[-1], True, STANDARD)}
    shown, reasons = report.rows(table)
    assert len(reasons) == 1 and "GiB" in reasons[0] and "25%" in reasons[0]
    assert sum("skip [1]" in row for row in shown) == 1
    assert f"standard attention needs {findings.mebibytes(table.cells[128, True, STANDARD].extra_bytes)}" in (
        findings.memory_sentence(table)
    )


def test_a_short_method_is_timed_when_it_is_steady():
    """At 128 tokens the first calls of a thread made the median: 165 us where a loop took 36."""
    data = lengths.Data(QUICK, QUICK.lengths[0], False, DEVICE, 0)
    slow = iter([0.01] * 4)

    def unsteady(query, key, value):
        time.sleep(next(slow, 0.0))
        return query

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, TILEWISE, unsteady)
        column = {TILEWISE: lengths.Cell(), STANDARD: lengths.Cell(skipped="too large")}
        lengths._time(data, column, QUICK)
    assert statistics.median(column[TILEWISE].seconds) < 5e-3 and not column[STANDARD].seconds


def test_the_sliced_float64_result_is_the_whole_one():
    data = lengths.Data(QUICK, 96, True, DEVICE, 3)
    q, k, v = (t.detach().double() for t in data.inputs)
    out, _ = tilewise.reference.attention(q, k, v, causal=True)
    whole = tilewise.reference.attention_backward(data.checked_dout.double(), q, k, v, causal=True)
    expected_out, *expected = data.expected
    torch.testing.assert_close(expected_out, torch.cat([out[:, s] for s in data.slices], 1))
    for part, full in zip(expected, whole[:3]):
        torch.testing.assert_close(part, full)
    assert data.error(data.call(METHODS[TILEWISE], data.checked_dout)) < 2e-6


def test_peak_memory_is_that_of_the_allocations():
    def call():
        first = torch.ones(1 << 20)  # 4 MiB
        second = torch.ones(1 << 19)  # 2 MiB more at the peak
        del first
        return (second + 1,)  # 2 + 2 MiB

    _, extra = memory.peak_extra(call, DEVICE)
    assert extra == (6 << 20) - (2 << 20)


def test_scratch_that_a_thread_keeps_counts_every_time():
    kept = threading.local()

    def call():
        if not hasattr(kept, "scratch"):
            kept.scratch = torch.empty(1 << 20, dtype=torch.uint8)
        return (torch.ones(4),)

    call()
    assert [memory.peak_extra(call, DEVICE)[1] for _ in range(2)] == [1 << 20] * 2


def test_a_call_that_raises_leaves_the_error_stream(capfd):
    with pytest.raises(ZeroDivisionError):
        memory.peak_extra(lambda: (torch.ones(1 // 0),), DEVICE)
    print("heard", file=sys.stderr)
    assert "heard" in capfd.readouterr().err


def test_memory_that_is_free():
    assert 1 << 20 < memory.free_bytes(DEVICE) < 1 << 50


@pytest.mark.parametrize("scale", [CPU, CUDA, QUICK])
def test_scales_fit_together(scale):
    assert scale.prompt + scale.new_tokens <= scale.context
    assert scale.head_dim % 2 == 0 and list(scale.lengths) == sorted(scale.lengths)
    assert 3 * scale.checked_rows <= scale.lengths[0]


def test_text_is_deterministic_and_held_out():
    one, two = text.standard_library(), text.standard_library()
    assert torch.equal(one.train, two.train) and torch.equal(one.valid, two.valid)
    sources = bytes(one.train.tolist())
    assert b"import" in sources and bytes(one.valid[:2000].tolist()) not in sources
    tokens, following = text.sample(one.train, 3, 17, torch.Generator().manual_seed(0))
    assert tokens.shape == following.shape == (3, 17)
    assert torch.equal(tokens[:, 1:], following[:, :-1])


def test_a_machine_without_sources(tmp_path, monkeypatch):
    (tmp_path / "os.py").write_text("pass\n")
    with pytest.raises(text.NoText, match="found 5 bytes"):
        text.standard_library([tmp_path / "absent", tmp_path])


def test_first_difference():
    scores = torch.zeros(3, 4)
    runs = [generate.Run(tokens, [1.0, 2.0, 3.0], scores) for tokens in ([1, 2, 3], [1, 7, 3])]
    assert generate.Generation(b"", *runs, 1).first_difference == 1
    same = generate.Generation(b"", runs[0], runs[0], 1)
    assert same.first_difference is None and same.agrees


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--device", "tpu"), "--device must be cpu, cuda or cuda:N; got 'tpu'"),
        (("--device", "cuda:99"), "this machine has"),
        (("--seed", "-1"), "Input should be greater than or equal to 0"),
    ],
)
def test_bad_input(arguments, says, tmp_path):
    result = CliRunner().invoke(cli._app(), ["demo", "--quick", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_out_that_is_a_file(tmp_path):
    (tmp_path / "taken").write_text("")
    result = demo("--out", tmp_path / "taken")
    assert result.exit_code == 2 and "taken" in result.output
