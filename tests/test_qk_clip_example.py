"""examples/qk_clip.py: logits run away without the clip and do not with it."""

import pytest
import torch


@pytest.fixture(scope="module")
def example(load_example):
    return load_example("qk_clip")


def test_logits_diverge_without_the_clip_alone(example, capsys):
    runs = example.main(["--steps", "60"])
    without, clipped = runs["without clip"], runs["with QK-clip"]
    assert without.losses[0] == clipped.losses[0]
    assert without.max_logits[-1] > 500 and max(clipped.max_logits) < 0.2 * without.max_logits[-1]
    assert clipped.last < without.last and clipped.last < clipped.losses[0] - 2
    assert "with QK-clip" in capsys.readouterr().out


def test_a_clipped_head_has_the_threshold(example):
    """Of two heads the one that is over is scaled to the threshold, the other is left alone."""
    qkv, x = torch.randn(3 * 2 * 8, 12), torch.randn(1, 30, 12)

    def max_logit():
        q, k, _ = (x @ qkv.T).unflatten(-1, (3, 2, 8)).unbind(2)
        return example.tilewise.attention_statistics(q, k, example.Aux(max_logit=True)).max_logit

    before = max_logit()
    threshold = before.mean().item()
    example.clip(qkv, before, threshold)
    torch.testing.assert_close(max_logit(), before.clamp(max=threshold))
    before, values = max_logit(), qkv.clone()
    example.clip(qkv, -before, threshold)  # negative logits are under it
    assert torch.equal(qkv, values)
