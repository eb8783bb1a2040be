"""Every number that explanations of these examples commonly print, at the precision they print it.

`shows` holds a correct number; `slip` holds an exact one and that the digits commonly printed are not it.
"""

import math

import pytest
import torch

from tilewise.lab.learn.examples import EXAMPLES, naive_softmax, weight_update
from tilewise.learn import trace

ALL_WAYS = [(order, normalize) for order in trace.ORDERS for normalize in trace.NORMALIZE]


def is_shown_as(value: float, text: str) -> bool:
    """Whether value, rounded to the decimals that text has, reads as text."""
    if "e" in text:
        mantissa, exponent = text.split("e")
        return is_shown_as(value / 10.0 ** int(exponent), mantissa)
    decimals = len(text.partition(".")[2])
    return abs(value - float(text)) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


def shows(value, *rows: str) -> None:
    """Each row of value reads as the numbers in the row's text."""
    value = torch.as_tensor(value, dtype=torch.float64)
    value = value.reshape(len(rows), -1)
    for row, text in zip(value.tolist(), rows, strict=True):
        for x, number in zip(row, text.split(), strict=True):
            assert is_shown_as(x, number), f"{x} does not read {number} in {text!r}"


def slip(value, *, printed: str, exact: str) -> None:
    shows(value, exact)
    assert not is_shown_as(float(value), printed), f"{float(value)} does read {printed}: no slip"


def traced(name: str, order: str = "fa2", normalize: str = "end") -> trace.Trace:
    example = EXAMPLES[name]
    query, key, value, _ = example.tensors()
    blocks = (example.block_q, example.block_k)
    return trace.forward(query, key, value, *blocks, order=order, normalize=normalize, scale=example.scale)


@pytest.fixture(params=ALL_WAYS, ids=lambda way: "-".join(way))
def way(request):
    return request.param


class TestTiling4x4:
    name = "tiling-4x4"

    def backward(self) -> trace.BackwardTrace:
        query, key, value, dout = EXAMPLES[self.name].tensors()
        assert dout is not None
        return trace.backward(query, key, value, dout, 2, 2, scale=1.0)

    def test_scores_weights_and_output(self, way):
        forward = traced(self.name, *way)
        shows(forward.scores(), "1 0 2 0", "0 1 0 2", "1 0 1 0", "0 1 0 1")
        shows(torch.exp(forward.scores()[0]), "2.718 1 7.389 1")
        shows(torch.exp(forward.scores()[0]).sum(), "12.107")
        shows(
            forward.weights(),
            "0.225 0.083 0.610 0.083",
            "0.083 0.225 0.083 0.610",
            "0.366 0.134 0.366 0.134",
            "0.134 0.366 0.134 0.366",
        )
        slip(forward.weights()[0, 0], printed="0.224", exact="0.22452")  # 2.718 / 12.107 = 0.22450, cut
        slip(forward.weights()[1, 1], printed="0.224", exact="0.22452")
        shows(100 * forward.weights()[0], "22 8 61 8")  # percent
        shows(
            forward.out,
            "7.20 8.20 9.20 10.20",
            "9.88 10.88 11.88 12.88",
            "6.08 7.08 8.08 9.08",
            "7.92 8.92 9.92 10.92",
        )

    def test_first_tile(self, way):
        step = traced(self.name, *way).step(0, 0)
        assert (step.tile.rows, step.tile.cols) == (range(2), range(2))
        assert step.m_old.tolist() == [-math.inf, -math.inf]
        assert step.l_old.tolist() == [0, 0]
        shows(step.s, "1 0", "0 1")
        shows(step.m_tile, "1 1")
        shows(step.m, "1 1")
        shows(step.correction, "0 0")
        shows(step.p, "1 0.368", "0.368 1")
        shows(step.l, "1.368 1.368")
        shows(step.acc, "2.84 4.21 5.58 6.94", "5.37 6.74 8.10 9.47")
        slip(step.acc[0, 2], printed="5.57", exact="5.5752")

    def test_second_tile_raises_the_maximum(self, way):
        step = traced(self.name, *way).step(0, 1)
        assert (step.tile.rows, step.tile.cols) == (range(2), range(2, 4))
        shows(step.s, "2 0", "0 2")
        shows(step.m, "2 2")
        shows(step.correction, "0.368 0.368")
        shows(step.p, "1 0.135", "0.135 1")
        shows(step.l_old, "1.368 1.368")
        slip(step.l[0], printed="1.638", exact="1.6386")  # 1.368 * 0.368 + 1.135 from rounded factors
        slip(step.l[1], printed="1.638", exact="1.6386")
        shows(step.acc, "11.80 13.44 15.08 16.72", "16.19 17.83 19.47 21.11")
        slip(step.acc[0, 0], printed="11.81", exact="11.8039")
        slip(step.acc[0, 3], printed="16.71", exact="16.7196")
        slip(step.acc[1, 0], printed="16.20", exact="16.1928")
        slip(step.acc[1, 3], printed="21.10", exact="21.1084")
        shows(step.out, "7.20 8.20 9.20 10.20", "9.88 10.88 11.88 12.88")

    def test_final_division(self):
        final = traced(self.name).finals[0]
        torch.testing.assert_close(final.kept / final.l[:, None], final.out, rtol=0, atol=0)
        shows(final.out, "7.20 8.20 9.20 10.20", "9.88 10.88 11.88 12.88")

    def test_the_order_of_the_tiles(self):
        assert [step.tile[:2] for step in traced(self.name, "fa2").steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [step.tile[:2] for step in traced(self.name, "fa1").steps] == [(0, 0), (1, 0), (0, 1), (1, 1)]

    def test_backward(self):
        backward = self.backward()
        shows(backward.dv, *(" ".join([x] * 4) for x in ("0.590", "0.217", "0.976", "0.217")))
        shows(backward.assemble("dp"), "10 26 42 58", "0 0 0 0", "10 26 42 58", "0 0 0 0")
        shows(backward.delta[1:], "0 30.30 0")
        slip(backward.delta[0], printed="34.83", exact="34.8155")
        shows(backward.assemble("ds"), "-5.57 -0.73 4.38 1.91", "0 0 0 0", "-7.42 -0.58 4.28 3.72", "0 0 0 0")
        shows(backward.dq, "-1.19 1.19 4.38 1.91", "0 0 0 0", "-3.15 3.15 4.28 3.72", "0 0 0 0")
        slip(backward.dq[0, 1], printed="1.18", exact="1.1868")  # minus dQ[0, 0], which is printed as -1.19
        slip(backward.dq[2, 0], printed="-3.14", exact="-3.1458")
        slip(backward.dq[2, 1], printed="3.14", exact="3.1458")
        shows(backward.dk, "-12.99 0 -5.57 0", "-1.31 0 -0.73 0", "8.66 0 4.38 0", "5.64 0 1.91 0")

    def test_delta_is_also_the_sum_over_the_keys(self):
        backward = self.backward()
        by_keys = (backward.assemble("p") * backward.assemble("dp")).sum(-1)
        torch.testing.assert_close(backward.delta, by_keys, rtol=0, atol=1e-13)

    def test_recomputed_weights_are_those_of_the_forward_pass(self):
        found, expected = self.backward().assemble("p"), traced(self.name).weights()
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=0)

    def test_the_gradients_say_where_attention_should_go(self):
        signs = torch.sign(self.backward().assemble("ds")[0])
        assert signs.tolist() == [-1, -1, 1, 1]

    def test_weight_update(self):
        example, backward = EXAMPLES[self.name], self.backward()
        query, key, value, _ = example.tensors()
        identity = torch.eye(4, dtype=torch.float64)
        assert example.learning_rate == 0.1
        w_v = weight_update(value, identity, backward.dv, 0.1)
        shows(
            w_v,
            "0.94 1.94 2.94 3.94",
            "4.98 5.98 6.98 7.98",
            "8.90 9.90 10.90 11.90",
            "12.98 13.98 14.98 15.98",
        )
        shows((value - w_v)[2], "0.098 0.098 0.098 0.098")
        assert (value - w_v)[:, 0].argmax() == 2
        shows(weight_update(query, identity, backward.dq, 0.1)[0], "1.12 -0.12 0.56 -0.19")
        shows(weight_update(key, identity, backward.dk, 0.1)[0], "2.30 0 0.56 0")

    def test_weight_update_goes_through_the_layer_input(self):
        x, w, gradient = torch.randn(5, 3), torch.randn(3, 2), torch.randn(5, 2)
        weight = w.clone().requires_grad_()
        (x @ weight).backward(gradient)
        assert weight.grad is not None
        torch.testing.assert_close(weight_update(w, x, gradient, 0.3), w - 0.3 * weight.grad)


class TestByHand1x6:
    name = "by-hand-1x6"

    def test_standard_softmax(self, way):
        forward = traced(self.name, *way)
        shows(forward.scores(), "1 2 3 6 2 1")
        shows(forward.finals[0].m, "6")
        shows(forward.scores() - 6, "-5 -4 -3 0 -4 -5")
        shows(torch.exp(forward.scores() - 6), "0.0067 0.0183 0.0498 1 0.0183 0.0067")
        slip(forward.finals[0].l, printed="1.0998", exact="1.09989")  # the rounded exponentials were summed
        shows(forward.weights(), "0.0061 0.0167 0.0453 0.9092 0.0167 0.0061")
        shows(forward.out, "3.932 3.932")
        slip(forward.out[0, 0], printed="3.9323", exact="3.93196")

    def test_weighted_values(self):
        """The terms of the sum; commonly printed from weights rounded to four digits before."""
        forward, value = traced(self.name), EXAMPLES[self.name].tensors().value
        terms = forward.weights()[0] * value[:, 0]
        shows(terms, "0.0061 0.0333 0.1358 3.6367 0.0833 0.0368")
        slip(terms[1], printed="0.0334", exact="0.03330")
        slip(terms[2], printed="0.1359", exact="0.13580")
        slip(terms[3], printed="3.6368", exact="3.63671")
        slip(terms[4], printed="0.0835", exact="0.08326")
        slip(terms[5], printed="0.0366", exact="0.03676")

    def test_first_tile(self, way):
        step = traced(self.name, *way).step(0, 0)
        assert step.tile.cols == range(3)
        assert step.m_old.item() == -math.inf
        assert step.l_old.item() == 0
        shows(step.s, "1 2 3")
        shows(step.m_tile, "3")
        shows(step.m, "3")
        shows(step.correction, "0")
        shows(step.p, "0.1353 0.3679 1")
        shows(step.p.sum(), "1.5032")
        shows(step.p[0] * torch.tensor([1.0, 2.0, 3.0]), "0.1353 0.7358 3")
        shows(step.l, "1.5032")
        shows(step.acc, "3.8711 3.8711")

    def test_second_tile(self, way):
        forward = traced(self.name, *way)
        step, value = forward.step(0, 1), EXAMPLES[self.name].tensors().value
        assert step.tile.cols == range(3, 6)
        shows(step.s, "6 2 1")
        shows(step.m_old, "3")
        shows(step.m_tile, "6")
        shows(step.m, "6")
        shows(step.correction, "0.04979")
        shows(step.p, "1 0.0183 0.0067")
        shows(step.p.sum(), "1.025")
        shows(step.p[0] * value[3:, 0], "4 0.0916 0.0404")
        slip(step.p[0, 1] * 5, printed="0.0915", exact="0.09158")
        slip(step.p[0, 2] * 6, printed="0.0402", exact="0.04043")
        slip((step.p @ value[3:])[0, 0], printed="4.1317", exact="4.13201")
        shows(step.l_old * step.correction, "0.0748")
        slip(step.l, printed="1.0998", exact="1.09989")
        shows(forward.step(0, 0).acc * step.correction, "0.1927 0.1927")
        slip(step.acc[0, 0], printed="4.3244", exact="4.32474")
        shows(step.out, "3.932 3.932")

    def test_keeping_the_output_normalized(self):
        """The paper's o' after each tile is acc / l of the other way, and its last is the result."""
        by_step, at_end = traced(self.name, "fa2", "each_step"), traced(self.name, "fa2", "end")
        for a, b in zip(by_step.steps, at_end.steps, strict=True):
            torch.testing.assert_close(a.kept, b.kept / b.l[:, None], rtol=1e-15, atol=0)
        shows(by_step.steps[-1].kept, "3.932 3.932")
        assert torch.equal(by_step.steps[-1].kept, by_step.out)


class TestScores253:
    name = "scores-2-5-3"

    def test_blocks(self, way):
        forward = traced(self.name, *way)
        first, second = forward.steps
        shows(first.s, "2 5")
        shows(first.m, "5")
        shows(first.p, "0.05 1.0")
        shows(first.l, "1.05")
        shows(second.s, "3")
        shows(second.m, "5")
        shows(second.correction, "1.0")
        shows(second.p, "0.14")
        shows(second.l, "1.19")
        everything = torch.exp(forward.scores() - 5)
        shows(everything, "0.05 1.0 0.14")
        shows(everything.sum(), "1.19")
        torch.testing.assert_close(forward.out[0], torch.softmax(forward.scores()[0], -1), rtol=1e-15, atol=0)


class TestFloat32Range:
    def test_limits(self):
        limits = torch.finfo(torch.float32)
        shows(limits.max, "3.4e38")
        shows(limits.tiny, "1.2e-38")  # commonly called the smallest positive number: the smallest normal
        smallest = torch.tensor(limits.smallest_normal) * 2.0**-23
        shows(smallest.double(), "1.4e-45")
        slip(math.exp(88.7), printed="3.4e38", exact="3.33e38")  # log(largest) is 88.7228
        shows(math.log(limits.max), "88.72")
        assert torch.exp(torch.tensor(88.73)).isinf()
        assert torch.exp(torch.tensor([100.0, 1000.0])).isinf().all()
        assert math.exp(100) > 1e38

    def test_where_exponentials_vanish(self):
        """Commonly printed: exp(-88) is about the limit and what is smaller becomes 0. It becomes
        subnormal from -87.34 on, and 0 only from -103.98 on; hardware that flushes subnormals zeroes it."""
        shows(math.log(torch.finfo(torch.float32).tiny), "-87.34")
        assert torch.exp(torch.tensor([-88.0, -100.0, -103.9])).gt(0).all()
        assert torch.exp(torch.tensor([-104.0, -200.0, -300.0])).eq(0).all()

    def test_overflow_without_the_maximum(self):
        weights = naive_softmax(torch.tensor([100.0, 90.0, 80.0]))
        assert weights[:2].isnan().all()  # inf / inf
        assert weights[2] == 0  # 5.5e34 / inf
        assert not torch.softmax(torch.tensor([100.0, 90.0, 80.0]), -1).isnan().any()

    def test_overflow_with_the_maximum(self, way):
        forward = traced("overflow-100-90-80", *way)
        shows(forward.scores(), "100 90 80")
        shows(forward.finals[0].m, "100")
        shows(forward.scores() - 100, "0 -10 -20")
        shows(torch.exp(forward.scores() - 100), "1.0 0.000045 0.000000002")
        shows([step.p.item() for step in forward.steps], "1.0 0.000045 0.000000002")
        shows(forward.finals[0].l, "1.000045")
        slip(forward.out[0, 0], printed="0.9999", exact="0.999955")  # to four digits it is 1.0000
        assert forward.out.isfinite().all()

    def test_underflow_without_the_maximum(self):
        """Commonly printed: exp(-100) is 0 in float32, so 0 / 0. exp(-100) is 3.8e-44, a subnormal number,
        and the quotient is right; NaN comes where subnormals are flushed, and below -104 everywhere."""
        logits = torch.tensor([-100.0, -200.0, -300.0])
        shows(torch.exp(logits)[0].double(), "3.8e-44")
        assert naive_softmax(logits).tolist() == [1, 0, 0]
        assert naive_softmax(logits, flush_subnormal=True).isnan().all()
        assert naive_softmax(logits - 10).isnan().all()

    def test_underflow_with_the_maximum(self, way):
        forward = traced("underflow-100-200-300", *way)
        shows(forward.finals[0].m, "-100")
        shows(forward.out, "1 0 0")
        assert (forward.finals[0].l >= 1).all()


def test_how_many_tiles():
    """8 x 8 scores in tiles of 2 x 2: 16 tiles of 4."""
    query = torch.randn(8, 2)
    steps = trace.forward(query, query, query, 2, 2).steps
    assert len(steps) == 16
    assert all(step.s.numel() == 4 for step in steps)


def test_logits_are_reproduced():
    for name, example in EXAMPLES.items():
        assert example.name == name
        query, key, value, _ = example.tensors()
        assert key.shape[0] == value.shape[0]
        assert query.dtype == torch.float64
    one_query = {
        "by-hand-1x6": [1, 2, 3, 6, 2, 1],
        "scores-2-5-3": [2, 5, 3],
        "overflow-100-90-80": [100, 90, 80],
        "underflow-100-200-300": [-100, -200, -300],
    }
    for name, logits in one_query.items():
        query, key, _, _ = EXAMPLES[name].tensors()
        assert (query @ key.T).tolist() == [logits]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_way_agrees_with_standard_attention(name, way):
    query, key, value, _ = EXAMPLES[name].tensors()
    expected = torch.softmax(query @ key.T, -1) @ value
    torch.testing.assert_close(traced(name, *way).out, expected, rtol=1e-14, atol=1e-14)
