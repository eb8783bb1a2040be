"""One figure a head size, mask and direction, with a bar for every measured speed."""

from __future__ import annotations

import pytest

from tilewise.lab.bench.cases import decode, dense
from tilewise.lab.bench.errors import BenchError
from tilewise.lab.bench.plot import plots

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch):
    """The axes of every figure that was saved."""
    from matplotlib.figure import Figure

    kept, save = [], Figure.savefig

    def keep(self, path, **options):
        kept.append(self.axes[0])
        save(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def test_figures_bars_and_numbers(results_of, drawn, tmp_path):
    rows = []
    for head_dim in (64, 128):
        for causal in (False, True):
            for n in (1024, 2048):
                case = dense("forward", "bfloat16", head_dim, 2, 1, n, causal=causal)
                seconds = case.flops() / 123e12
                told = {"tilewise": [seconds] * 3, "sdpa-flash": [seconds * 2] * 3}
                rows.append((case, {**told, "flex": [seconds * 3] * 3 if n == 1024 else "refused"}))
    written = plots(results_of(*rows), tmp_path / "plots")
    names = [f"fwd-bf16-d{d}-{mask}.png" for d in (128, 64) for mask in ("causal", "full")]
    assert sorted(path.name for path in written) == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    for axes in drawn:
        assert [text.get_text() for text in axes.texts] == ["123", "123", "62", "62", "41"]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1k", "2k"]
        assert "TFLOP/s" in axes.get_ylabel() and "Test CPU" in axes.get_title()


def test_decoding_is_drawn_as_bandwidth(results_of, drawn, tmp_path):
    case = decode("bfloat16", (32, 8), 16, 8192, page_size=64)
    (path,) = plots(results_of((case, {"tilewise": [case.cache_bytes() / 2e12] * 3})), tmp_path)
    assert path.name == "decode-bf16-d128-h32kv8-paged.png"
    assert [text.get_text() for text in drawn[0].texts] == ["2000"]
    assert "GB/s" in drawn[0].get_ylabel()


def test_memory_is_drawn_as_lines(results_of, drawn, tmp_path):
    cases = [dense("forward", "float32", 64, 4, 1, n, kind="memory") for n in (1024, 2048)]
    rows = [(case, {"tilewise": [2**20], "standard": [case.seqlen_q**2]}) for case in cases]
    (path,) = plots(results_of(*rows), tmp_path)
    assert path.name == "memory-fwd-f32-d64-full.png"
    assert [list(line.get_ydata()) for line in drawn[0].get_lines()] == [[1.0, 1.0], [1.0, 4.0]]


def test_a_folder_that_cannot_be_made(results_of, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="--plots"):
        plots(results_of(), tmp_path / "file" / "plots")
