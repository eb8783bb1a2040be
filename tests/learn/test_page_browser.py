"""Every control of the page in a real browser, its numbers against the trace's, and its accessibility."""

from __future__ import annotations

import itertools
import json
import random

import browser
import pytest
import torch
from browser import as_text, wait

from tilewise.lab.learn import kv_memory, page
from tilewise.lab.learn.examples import EXAMPLES, naive_softmax
from tilewise.lab.learn.machines import MACHINES
from tilewise.lab.learn.pipeline import Pipeline
from tilewise.learn import trace

if browser.unavailable():
    pytest.skip(browser.unavailable(), allow_module_level=True)

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

SECTIONS = ("tiles", "online", "memory", "backward", "pipeline", "cache", "eight")


def inputs_of(tensors) -> dict:
    return {name: t.tolist() for name, t in zip(("query", "key", "value"), tensors)}


def test_loads_without_network_or_errors(shown):
    assert [section.get_attribute("id") for section in shown.all("section")] == list(SECTIONS)
    for name in SECTIONS:
        assert shown.find(f"#{name}").size["height"] > 300
    assert shown.all("nav a")[4].get_attribute("href").endswith("#pipeline")


CASES = [
    (seed, order, normalize, causal)
    for seed, (order, normalize, causal) in enumerate(
        itertools.product(("fa1", "fa2"), ("each_step", "end"), (False, True))
    )
]


@pytest.mark.parametrize(("seed", "order", "normalize", "causal"), CASES)
def test_steps_are_the_traces(shown, seed, order, normalize, causal):
    """Every number of every step of the page's arithmetic is Python's, to 1e-6 and better."""
    source = random.Random(seed)
    n, k, d, dv = (source.randint(1, top) for top in (9, 9, 4, 4))
    block_q, block_k, scale = source.randint(1, 4), source.randint(1, 4), source.uniform(0.2, 2)
    tensors = [3 * torch.randn(*shape, dtype=torch.float64) for shape in ((n, d), (k, d), (k, dv))]
    settings = {
        "blockQ": block_q,
        "blockK": block_k,
        "order": order,
        "normalize": normalize,
        "scale": scale,
        "causal": causal,
    }
    found = shown.run(
        "const pass = arithmetic_module.forward(...arguments);"
        "const clean = (x) => JSON.parse(JSON.stringify(x, (_, v) => v === -Infinity ? '-inf' : v));"
        "return clean(pass)",
        inputs_of(tensors),
        settings,
    )
    expected = trace.forward(
        *tensors, block_q, block_k, order=order, normalize=normalize, scale=scale, causal=causal
    )
    assert len(found["steps"]) == len(expected.steps)
    assert sum(tile["isEmpty"] for tile in found["tiles"]) == len(expected.skipped)
    for ours, right in zip(found["steps"], expected.steps, strict=True):
        assert (ours["tile"]["i"], ours["tile"]["j"]) == (right.tile.i, right.tile.j)
        names = {"s": "s", "mTile": "m_tile", "mOld": "m_old", "m": "m", "correction": "correction", "p": "p"}
        names |= {"lOld": "l_old", "l": "l", "acc": "acc", "out": "out"}
        for name, attribute in names.items():
            close(ours[name], getattr(right, attribute))
    close(found["out"], expected.out)
    close(found["lse"], expected.lse)
    assert found["moved"]["read"] == sum(expected.loads().values())
    assert found["moved"]["written"] == sum(expected.stores().values())


def close(ours, right: torch.Tensor) -> None:
    ours = torch.tensor(as_floats(ours), dtype=torch.float64).reshape(right.shape)
    torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


def as_floats(value):
    return [as_floats(x) for x in value] if isinstance(value, list) else float(value)


@pytest.mark.parametrize("causal", [False, True])
def test_backward_is_the_traces(shown, causal):
    query, key, value = (torch.randn(n, 3, dtype=torch.float64) for n in (5, 7, 7))
    dout = torch.randn(5, 3, dtype=torch.float64)
    settings = {"blockQ": 2, "blockK": 3, "normalize": "end", "scale": 0.6, "causal": causal}
    found = shown.run(
        "const x = arithmetic_module.backward(...arguments);"
        "return JSON.parse(JSON.stringify(x, (_, v) => v === -Infinity ? '-inf' : v))",
        inputs_of((query, key, value)),
        dout.tolist(),
        settings,
    )
    expected = trace.backward(query, key, value, dout, 2, 3, scale=0.6, causal=causal)
    for name in ("delta", "dq", "dk", "dv"):
        close(found[name], getattr(expected, name))
    for ours, right in zip(found["steps"], expected.steps, strict=True):
        for name in ("s", "p", "dp", "ds"):
            close(ours[name], getattr(right, name))
        for name, span in (("dq", right.tile.rows), ("dk", right.tile.cols), ("dv", right.tile.cols)):
            close(ours[name][span.start : span.stop], getattr(right, name))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", ["fa2", "fa1"])
def test_what_is_shown_at_every_step(shown, order, causal):
    example = EXAMPLES["tiling-4x4"]
    query, key, value, _ = example.tensors()
    expected = trace.forward(query, key, value, 2, 2, order=order, scale=1.0, causal=causal)
    shown.click(f"input[name=order][value={order}]")
    if causal:
        shown.click("#tiles-causal")
    shown.click("#tiles-stepper button:first-child")
    assert shown.text("tiles-says").startswith("Before the first tile")
    for number, step in enumerate(expected.steps, 1):
        shown.click("#tiles-stepper button:nth-child(4)")
        assert shown.text("tiles-says").startswith(f"Step {number}: ")
        state = shown.cells("#tiles-state")
        for r, row in enumerate(step.tile.rows):
            m, c, l, acc, out = state[row]
            assert m.split("→")[-1].strip() == as_text(step.m[r].item(), 4)
            assert c == as_text(step.correction[r].item(), 4)
            assert l.split("→")[-1].strip() == as_text(step.l[r].item(), 4)
            assert acc.split() == [as_text(x, 3) for x in step.acc[r].tolist()]
            assert out.split() == [as_text(x, 3) for x in step.out[r].tolist()]
        scores = shown.cells("#tiles-scores")
        rows = [scores[r][step.tile.cols.start : step.tile.cols.stop] for r in step.tile.rows]
        assert rows == [[as_text(x, 3) for x in row] for row in step.s.tolist()]
        shown_p = shown.cells("#tiles-operands table:last-child")
        assert shown_p == [[as_text(x, 3) for x in row] for row in step.p.tolist()]
    assert len(shown.all("#tiles-scores td.skipped")) == sum(
        len(tile.rows) * len(tile.cols) for tile in expected.skipped
    )
    shown.click("#tiles-stepper button:nth-child(5)")
    for row, (out, lse) in zip(
        shown.cells("#tiles-state"), zip(expected.out.tolist(), expected.lse.tolist())
    ):
        assert row[4].split() == [as_text(x, 3) for x in out]
        assert row[5] == as_text(lse, 4)
    reads, writes = sum(expected.loads().values()), sum(expected.stores().values())
    assert f"{reads} numbers read, {writes} written" in shown.text("tiles-moved")
    assert "Largest difference from Python's trace: " in shown.text("tiles-check")
    assert shown.find("#tiles-check b").get_attribute("class") == "good"
    flag = " --causal" if causal else ""
    assert (
        shown.find("#tiles-command code").text == f"tilewise trace --example tiling-4x4 --order {order}{flag}"
    )
    shown.click("#tiles-stepper button:nth-child(2)")
    assert shown.text("tiles-says").startswith(f"Step {len(expected.steps)}: ")


@pytest.mark.parametrize("name", [example["name"] for example in page.page_data()["examples"]])
def test_every_example_agrees_with_python(shown, name):
    shown.set("tiles-example", name)
    for order, _ in itertools.product(("fa1", "fa2"), (False, True)):
        shown.click("#tiles-causal")
        shown.click(f"input[name=order][value={order}]")
        for check in ("tiles-check", "backward-check"):
            assert shown.find(f"#{check} b").get_attribute("class") == "good", shown.text(check)
    assert shown.find("#tiles-error").get_attribute("hidden")


def test_ones_own_numbers(shown):
    tensors = [torch.randn(*shape).double().mul(100).round().div(100) for shape in ((3, 2), (5, 2), (5, 4))]
    for field, tensor in zip(("q", "k", "v"), tensors):
        shown.set(f"tiles-{field}", "\n".join(", ".join(f"{x:.2f}" for x in row) for row in tensor.tolist()))
    assert shown.find("#tiles-example").get_attribute("value") == "own"
    shown.set("tiles-block-q", 2)
    shown.set("tiles-block-k", 3)
    shown.set("tiles-scale", 0.5)
    shown.click("#tiles-stepper button:nth-child(5)")
    expected = trace.forward(*tensors, 2, 3, scale=0.5)
    found = [row[4].split() for row in shown.cells("#tiles-state")]
    assert found == [[as_text(x, 3) for x in row] for row in expected.out.tolist()]
    assert "in this page alone" in shown.text("tiles-check")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tiles-q", "", "Query has no numbers."),
        ("tiles-q", "1 2\n3", "Query has rows of different lengths."),
        ("tiles-k", "1 x 3 4", "Key holds something that is not a number."),
        ("tiles-v", "\n".join(["1"] * 17), "Value has 17 rows; at most 16 can be shown."),
        ("tiles-v", "1 2 3 4 5 6 7 8 9", "Value has 9 columns; at most 8 can be shown."),
        ("tiles-q", "1 2", "Q has 2 columns and K has 4; they must have as many."),
        ("tiles-v", "1 2", "K has 4 rows and V has 1; they must have as many."),
        ("tiles-block-q", "0", "Queries a tile must be a whole number of at least 1."),
        ("tiles-block-k", "1.5", "Keys a tile must be a whole number of at least 1."),
        ("tiles-scale", "", "Scale must be a number."),
    ],
)
def test_wrong_input_is_said_and_the_last_good_one_stays(shown, field, value, message):
    before = shown.text("tiles-state")
    shown.set(field, value)
    error = shown.find("#tiles-error")
    assert error.get_attribute("hidden") is None
    assert error.text.rstrip(".") == message.rstrip(".")
    assert shown.text("tiles-state") == before
    shown.set("tiles-example", "by-hand-1x6")
    assert shown.find("#tiles-error").get_attribute("hidden")


def test_keyboard_moves_the_walk(shown):
    slider = shown.find("#tiles-stepper input")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert shown.text("tiles-says").startswith("Step 2")
    slider.send_keys(Keys.END)
    assert shown.text("tiles-says").startswith("The end")
    slider.send_keys(Keys.ARROW_LEFT)
    assert shown.text("tiles-says").startswith("Step 4")
    assert slider.get_attribute("aria-valuetext").startswith("Step 4")
    assert shown.text("announcer").startswith("Step 4")
    slider.send_keys(Keys.HOME)
    assert shown.text("tiles-says").startswith("Before")


@pytest.mark.parametrize("part", ["tiles", "online", "backward"])
def test_play_and_pause(shown, part):
    play = f"#{part}-stepper button:nth-child(3)"
    shown.click(f"#{part}-stepper button:first-child")
    shown.click(play)
    assert shown.find(play).text == "Pause" and shown.find(play).get_attribute("aria-pressed") == "true"
    wait(shown, f"return Number(document.querySelector('#{part}-stepper input').value) > 0")
    shown.click(play)
    assert shown.find(play).text == "Play"


def test_online_softmax(shown):
    example = EXAMPLES["by-hand-1x6"]
    query, key, value, _ = example.tensors()
    expected = trace.forward(query, key, value, 1, 3, scale=1.0)
    for number, step in enumerate(expected.steps, 1):
        shown.set_slider = shown.driver.execute_script(
            "const x = document.querySelector('#online-stepper input'); x.value = arguments[0];"
            "x.dispatchEvent(new Event('input'))",
            number,
        )
        assert shown.all("#online-says b")[0].text == as_text(step.m[0].item(), 4)
        assert shown.all("#online-says b")[1].text == as_text(step.correction[0].item(), 4)
        assert shown.all("#online-says b")[2].text == as_text(step.l[0].item(), 4)
    label = shown.find("#online-line svg").get_attribute("aria-label")
    assert "6 scores, 6 of them seen; m is 6" in label


@pytest.mark.parametrize("name", ["overflow-100-90-80", "underflow-100-200-300"])
def test_float32_with_and_without_the_maximum(shown, name):
    shown.set("online-example", name)
    logits = EXAMPLES[name].tensors().key[:, 0].float()
    naive = naive_softmax(logits, flush_subnormal=False)
    found = shown.cells("#online-float32")[1]
    expected = ["NaN" if x != x else as_text(x, 6) for x in naive.tolist()]
    assert found == expected
    shown.click("input[name=shift][value=with]")
    safe = torch.softmax(logits, 0)
    found = [float(x.replace("−", "-")) for x in shown.cells("#online-float32")[1]]
    torch.testing.assert_close(torch.tensor(found), safe, rtol=1e-4, atol=1e-6)
    assert shown.find("#online-verdict .good")
    if name.startswith("overflow"):
        shown.click("input[name=shift][value=without]")
        assert "∞ / ∞ is not a number" in shown.find("#online-verdict .bad").text
    assert shown.find("#online-command code").text == f"tilewise trace --example {name}"


def test_online_own_scores_and_errors(shown):
    shown.set("online-scores", "0.5 -1 2")
    assert shown.find("#online-example").get_attribute("value") == "own"
    shown.set("online-block", 1)
    assert shown.find("#online-stepper input").get_attribute("max") == "3"
    shown.set("online-scores", "1 b")
    assert "holds something that is not a number" in shown.find("#online-error").text


def test_memory_levels_by_focus_hover_and_touch(shown):
    levels = MACHINES["H200"].levels
    buttons = shown.all("#memory-levels button")
    assert [b.text.split()[0] for b in buttons] == [level.name for level in levels]
    for button, level in zip(buttons, levels):
        shown.driver.execute_script("arguments[0].focus()", button)
        assert shown.text("memory-level-says").startswith(f"{level.name}: ")
        assert button.get_attribute("aria-pressed") == "true"
    assert "4.8 TB/s" in shown.text("memory-level-says") and "480 cycles" in shown.text("memory-level-says")
    ActionChains(shown.driver).scroll_to_element(buttons[1]).move_to_element(buttons[1]).perform()
    assert "30.9 TB/s, 6.4 times HBM" in shown.text("memory-level-says")
    buttons[0].click()
    assert "a bandwidth that nobody publishes" in shown.text("memory-level-says")


def test_memory_bytes_follow_the_controls(shown):
    costs = page.page_data()["io"]["costs"]
    for n, dim, machine in ((128, 64, "A100"), (131072, 128, "H100")):
        shown.set("memory-machine", machine)
        shown.set("memory-dim", dim)
        shown.set("memory-length", page.LENGTHS.index(n))
        found = costs[str(dim)][n if n in costs[str(dim)] else str(n)]
        expected = [found["standard"], found["fa1"][machine], found["fa2"]]
        shares = [float(x.get_attribute("data-share")) for x in shown.all("#memory-bars .fill")]
        largest = max(cost["slow_bytes"] for cost in expected)
        assert shares == pytest.approx([cost["slow_bytes"] / largest for cost in expected])
        assert shown.text("memory-n") == f"N = {n:,}"
        kib = MACHINES[machine].fast_level.bytes // 1024
        command = f"tilewise io --seqlen {n} --head-dim {dim} --sram {kib} --detail"
        assert shown.find("#memory-command code").text == command


def test_bytes_move(shown):
    widths = (
        "return [...document.querySelectorAll('#memory-bars .fill')].map((x) => parseFloat(x.style.width))"
    )
    before = shown.driver.execute_script(widths)
    shown.click("#memory-play")
    wait(shown, f"return (() => {{ {widths} }})().every((x) => x < 30)")
    wait(shown, "return parseFloat(document.querySelector('#memory-bars .fill').style.width) === 100")
    assert shown.driver.execute_script(widths) == pytest.approx(before)


def test_backward_steps(shown):
    example = EXAMPLES["tiling-4x4"]
    query, key, value, dout = example.tensors()
    expected = trace.backward(query, key, value, dout, 2, 2, scale=1.0)
    shown.click("#backward-stepper button:first-child")
    found = [row[0] for row in shown.cells("#backward-tile table:first-child")]
    assert found == [as_text(x, 3) for x in expected.delta.tolist()]
    for step in expected.steps:
        shown.click("#backward-stepper button:nth-child(4)")
        for n, name in enumerate(("s", "p", "dp", "ds"), 1):
            shown_tile = shown.cells(f"#backward-tile table:nth-child({n})")
            assert shown_tile == [[as_text(x, 3) for x in row] for row in getattr(step, name).tolist()]
    for n, name in enumerate(("dq", "dk", "dv"), 1):
        shown_sum = shown.cells(f"#backward-sums table:nth-child({n})")
        assert shown_sum == [[as_text(x, 3) for x in row] for row in getattr(expected, name).tolist()]
    shown.set("backward-length", page.LENGTHS.index(1024))
    assert "1.25 times" in shown.text("backward-fact")
    assert shown.find("#backward-command code").text.startswith("tilewise io --seqlen 1024")


@pytest.mark.parametrize("head_dim", page.HEAD_DIMS)
def test_timeline_is_the_pipelines(shown, head_dim):
    shown.set("pipeline-dim", head_dim)
    kernel = Pipeline.of_kernel(head_dim)
    assert f"{round(kernel.run().cycles):,} cycles" in shown.text("pipeline-summary")
    assert "the kernel's own configuration" in shown.text("pipeline-summary")
    assert shown.find("#pipeline-groups").get_attribute("value") == str(kernel.warpgroups)
    shown.set("pipeline-groups", 1)
    shown.set("pipeline-stages", 3)
    shown.click("#pipeline-overlap")
    shown.click("#pipeline-pingpong")
    changed = Pipeline(
        head_dim, kernel.block_n, 1, 3, overlap=False, ping_pong=True, key_tiles=kernel.key_tiles
    ).run()
    assert f"{round(changed.cycles):,} cycles" in shown.text("pipeline-summary")
    assert len(shown.all("#pipeline-chart rect")) == len(changed.spans)
    shown.click("#pipeline-reset")
    assert "the kernel's own configuration" in shown.text("pipeline-summary")


def test_timeline_by_keyboard_and_pointer(shown):
    chart = shown.find("#pipeline-chart svg")
    shown.driver.execute_script("arguments[0].focus()", chart)
    chart = ActionChains(shown.driver)
    chart.send_keys(Keys.HOME, Keys.ARROW_RIGHT).perform()
    first = shown.text("pipeline-says")
    assert "cycle 0 to" in first and shown.text("announcer") == first
    ActionChains(shown.driver).send_keys(Keys.END).perform()
    assert "P V on the tensor cores, tile 7" in shown.text("pipeline-says")
    assert len(shown.all("#pipeline-chart .chosen")) == 1
    shown.driver.execute_script(
        "document.querySelectorAll('#pipeline-chart rect')[40].dispatchEvent(new MouseEvent('mouseenter'))"
    )
    assert "P V on the tensor cores, tile 7" not in shown.text("pipeline-says")


def test_cache_sizes(shown):
    for name, context, batch in (
        ("llama-2-70b", 4096, 1),
        ("gemma-2-27b", 65536, 3),
        ("deepseek-v3", 2**20, 2),
    ):
        shown.set("cache-model", name)
        shown.set("cache-context", page.CONTEXTS.index(context))
        shown.set("cache-batch", batch)
        expected = kv_memory.MODELS[name].cache_bytes(context, batch)
        said = shown.all("#cache-fact b")
        assert said[1].text == decimal_bytes(expected)
        every = kv_memory.MODELS[name].with_every_head().cache_bytes(context, batch)
        assert said[2].text == decimal_bytes(every)
        fits = MACHINES["H200"].memory.bytes // kv_memory.MODELS[name].cache_bytes(context)
        assert said[3].text == f"{fits:,}"
        command = f"tilewise kv-memory --model {name} --context {context} --batch {batch}"
        assert shown.find("#cache-command code").text == command


def decimal_bytes(count: int) -> str:
    from tilewise.lab.learn.machines import human_bytes

    return human_bytes(count)


def test_pages(shown):
    def state() -> tuple[list[int], list[list[int]]]:
        rows = shown.cells("#cache-table")
        return [int(row[0]) for row in rows], [[int(x) for x in row[1].split()] for row in rows]

    def check(size: int) -> None:
        lengths, tables = state()
        paging = kv_memory.Paging(tuple(lengths), size, max(96, *lengths))
        assert [len(pages) for pages in tables] == list(paging.pages)
        taken = [number for pages in tables for number in pages]
        assert len(set(taken)) == len(taken)
        slots = f"{paging.used} tokens lie in {paging.paged} slots: {paging.paged - paging.used} empty"
        said = shown.text("cache-waste").replace(",", "")
        assert slots in said
        assert f"takes {paging.reserved} slots" in said
        assert len(shown.all("#cache-pool .taken")) == len(taken)

    check(16)
    before, _ = state()
    for n in range(4):
        shown.click(f"#cache-sequences button:nth-child({n + 1})")
    assert state()[0] == [length + 1 for length in before]
    shown.click("#cache-all")
    assert state()[0] == [length + 9 for length in before]
    check(16)
    shown.click("#cache-clear")
    assert state()[0] == before
    shown.set("cache-page", 4)
    check(4)
    for _ in range(50):
        shown.click("#cache-all")
    check(4)
    assert shown.text("cache-waste")


def test_commands_can_be_copied(shown):
    buttons = shown.all(".command .copy")
    assert len(buttons) == 10
    for button in buttons:
        shown.driver.execute_script("arguments[0].click()", button)
    wait(
        shown,
        "const done = ['Copied', 'Selected'];"
        "return [...document.querySelectorAll('.copy')].every((x) => done.includes(x.textContent))",
    )


def test_commands_of_every_example(shown):
    from typer.testing import CliRunner

    from tilewise.cli import _app

    for example in page.page_data()["examples"]:
        shown.set("tiles-example", example["name"])
        words = shown.find("#tiles-command code").text.split()
        result = CliRunner().invoke(_app(), [*words[1:], "--digits", "12"])
        assert result.exit_code == 0, (words, result.output)
        out = example["traces"]["fa2 false"]["out"][0][0]
        assert as_text(out, 12).replace("−", "-") in result.output


def test_commands_shown_are_real(shown):
    import shlex

    from typer.testing import CliRunner

    from tilewise.cli import _app

    shown.set("tiles-q", "1 2\n3 4.5\n-1 0")
    shown.set("tiles-k", "1 2\n0.25 -1")
    shown.set("tiles-v", "1\n2")
    shown.click("#tiles-causal")
    shown.set("online-scores", "1 -2.5 3e2")
    shown.set("pipeline-stages", 3)
    shown.click("#pipeline-overlap")
    shown.click("#pipeline-pingpong")
    shown.set("eight-size", 20)
    shown.set("eight-query", 3)
    for code in shown.all(".command code"):
        words = shlex.split(code.text)
        if words[0] == "tilewise":
            result = CliRunner().invoke(_app(), words[1:])
            assert result.exit_code == 0, (words, result.output)
        else:
            assert words[:2] == ["python", "-c"]
            exec(compile(words[2], "page", "exec"), {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(shown, scheme):
    selenium_axe = pytest.importorskip(
        "axe_core_python.selenium", reason="the package axe-core-python is not installed"
    )
    browser.set_scheme(shown.driver, scheme)
    shown.click("#tiles-own summary")
    shown.click("#tiles-causal")
    shown.set("online-example", "overflow-100-90-80")
    found = selenium_axe.Axe().run(shown.driver)["violations"]
    shown_as = [(v["id"], [node["target"] for node in v["nodes"]][:5]) for v in found]
    assert not found, json.dumps(shown_as, indent=1)


@pytest.mark.parametrize("width", [360, 768])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_screens(shown, width, scheme):
    browser.set_scheme(shown.driver, scheme)
    browser.set_width(shown.driver, width)
    wait(shown, f"return innerWidth === {width}")
    assert shown.driver.execute_script("return document.documentElement.scrollWidth") <= width
    small = shown.driver.execute_script(
        "return [...document.querySelectorAll('button, select, summary, input[type=number]')]"
        ".filter((x) => x.offsetParent !== null && x.getBoundingClientRect().height < 24)"
        ".map((x) => x.outerHTML)"
    )
    assert small == []
    shown.click("#tiles-stepper button:nth-child(4)")
    assert shown.text("tiles-says").startswith("Step 2")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [None, 390])
def test_every_section_can_be_seen(shown, scheme, width, tmp_path):
    """A screenshot of each section holds text and colours, not an empty card."""
    image = pytest.importorskip("PIL.Image", reason="the package pillow is not installed")
    browser.set_scheme(shown.driver, scheme)
    browser.set_width(shown.driver, width)
    for name in SECTIONS:
        path = tmp_path / f"{name}.png"
        path.write_bytes(browser.screenshot(shown.driver, name))
        colours = image.open(path).convert("RGB").getcolors(1 << 24)
        largest = max(count for count, _ in colours) / sum(count for count, _ in colours)
        assert len(colours) > 100 and largest < 0.97, (name, len(colours), largest)


def test_colours_follow_the_scheme(shown):
    colour = "return getComputedStyle(document.body).backgroundColor"
    light = shown.driver.execute_script(colour)
    browser.set_scheme(shown.driver, "dark")
    assert shown.driver.execute_script(colour) != light
