"""The Triton kernels against the float64 reference: every option, forward and backward.

On a GPU at real shapes; with TRITON_INTERPRET=1 at tiny ones (tiles of 16 x 16), on the CPU.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from backends import Backend
from tilewise import reference
from tilewise.core.dropout import keep_mask, with_origin
from tilewise.core.plan import Results as Known
from tilewise.core.problem import AttentionProblem, Gradients, Inputs, Options, describe, spans
from tilewise.core.values import check_values
from tilewise.dispatch import choice as dispatch

pytest.importorskip("triton")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (IS_INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from tilewise.gpu.triton import launch  # noqa: E402
from tilewise.gpu.triton.call import Call, Results, launchable  # noqa: E402
from tilewise.gpu.triton.tuning_table import KernelTile  # noqa: E402

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
LONG, LONGER = (21, 37) if IS_INTERPRETED else (301, 458)
PACKED_Q, PACKED_K = ([17, 0, 1, 9], [20, 5, 0, 9]) if IS_INTERPRETED else ([257, 0, 1, 90], [300, 75, 0, 90])
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def dense(
    seqlen_q: int = LONG,
    seqlen_k: int = LONGER,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 16,
    dim_v: int = 16,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    **extras: Tensor,
) -> Inputs:
    return Inputs(
        randn(batch, seqlen_q, heads, dim, dtype=dtype),
        randn(batch, seqlen_k, kv_heads, dim, dtype=dtype),
        randn(batch, seqlen_k, kv_heads, dim_v, dtype=dtype),
        **extras,
    )


def seed() -> Tensor:
    return torch.randint(-(2**62), 2**62, (), device=DEVICE)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def bias(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return randn(*shape, dtype=dtype).requires_grad_()


def packed(heads: int = 2, **extras: Tensor) -> Inputs:
    return Inputs(
        randn(sum(PACKED_Q), heads, 16),
        randn(sum(PACKED_K), 1, 16),
        randn(sum(PACKED_K), 1, 16),
        cu_seqlens_q=offsets(PACKED_Q),
        cu_seqlens_k=offsets(PACKED_K),
        **extras,
    )


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE, dtype=torch.int32)


def mask(*shape: int) -> Tensor:
    visible = torch.rand(*shape, device=DEVICE) > 0.4
    if shape[2] > 3:
        visible[:, :, 3] = False  # a query that sees nothing
    return visible


CASES: dict[str, Any] = {
    "plain": lambda: (dense(), Options()),
    "batch_and_heads": lambda: (dense(batch=2, heads=4, kv_heads=2), Options(causal=True)),
    "causal": lambda: (dense(), Options(causal=True)),
    "causal_more_queries_than_keys": lambda: (dense(LONGER, LONG), Options(causal=True)),
    "window_left": lambda: (dense(), Options(window_left=5)),
    "window_right": lambda: (dense(), Options(window_right=3)),
    "window_both": lambda: (dense(LONGER, LONGER), Options(window_left=18, window_right=4)),
    "window_causal": lambda: (dense(LONGER, LONGER), Options(causal=True, window_left=17)),
    "window_of_one": lambda: (dense(), Options(window_left=0, window_right=0)),
    "softcap": lambda: (dense(), Options(softcap=1.5, causal=True)),
    "negative_scale": lambda: (dense(), Options(scale=-0.7, causal=True)),
    "zero_scale": lambda: (dense(), Options(scale=0.0, causal=True)),
    "large_logits": lambda: (dense(), Options(scale=300.0)),
    "alibi": lambda: (dense(alibi_slopes=randn(2).abs()), Options(causal=True)),
    "alibi_tiny_scale": lambda: (
        dense(dtype=torch.float16, alibi_slopes=randn(2).abs()),
        Options(scale=1e-38),
    ),
    "alibi_per_batch": lambda: (dense(batch=2, alibi_slopes=randn(2, 2).abs()), Options()),
    "mask": lambda: (dense(mask=mask(1, 2, LONG, LONGER)), Options()),
    "mask_of_keys": lambda: (dense(batch=2, mask=mask(2, 1, 1, LONGER)), Options(causal=True)),
    "bias": lambda: (dense(bias=bias(1, 2, LONG, LONGER)), Options()),
    "bias_full": lambda: (dense(batch=2, bias=bias(2, 2, LONG, LONGER)), Options(causal=True)),
    "bias_shared": lambda: (dense(batch=2, bias=bias(1, 1, LONG, LONGER)), Options(window_left=9)),
    "bias_hidden_peaks": lambda: (  # exp of what is hidden overflows
        dense(
            batch=2, bias=bias(1, 2, LONG, LONGER) + 3e4 * randn(LONG, LONGER).triu(LONGER - LONG + 1).sign()
        ),
        Options(causal=True),
    ),
    "bias_of_keys": lambda: (dense(batch=2, bias=bias(2, 1, 1, LONGER)), Options(softcap=3.0)),
    "bias_of_queries": lambda: (dense(bias=bias(1, 2, LONG, 1)), Options(causal=True)),
    "bias_scalar": lambda: (dense(batch=2, bias=bias(1, 1, 1, 1)), Options(causal=True)),
    "bias_half": lambda: (dense(bias=bias(1, 1, LONG, LONGER, dtype=torch.bfloat16)), Options()),
    "bias_half_apart": lambda: (dense(bias=bias(1, 2, LONG, LONGER, dtype=torch.bfloat16)), Options()),
    "sinks": lambda: (dense(LONGER, LONG, sinks=randn(2)), Options(causal=True)),
    "sink_absent": lambda: (dense(sinks=lengths(0, 1).log()), Options()),
    "sink_absent_no_tiles": lambda: (dense(LONGER, LONG, sinks=lengths(0, 1).log()), Options(causal=True)),
    "dropout": lambda: (dense(batch=2, dropout_seed=seed()), Options(dropout_p=0.3)),
    "dropout_high": lambda: (dense(dropout_seed=seed(), bias=bias(1, 1, LONG, 1)), Options(dropout_p=0.8)),
    "one_query": lambda: (dense(1), Options(causal=True)),
    "no_queries": lambda: (dense(0), Options()),
    "no_keys": lambda: (dense(LONG, 0, sinks=randn(2)), Options()),
    "no_batch": lambda: (dense(batch=0), Options()),
    "tiny_heads": lambda: (dense(dim=1, dim_v=3), Options(causal=True)),
    "odd_heads": lambda: (dense(dim=40, dim_v=24), Options(causal=True)),
    "wide_heads": lambda: (dense(5, 18, dim=288, dim_v=130), Options(causal=True)),
    "latent_heads": lambda: (dense(dim=192, dim_v=128, dtype=torch.float16), Options(causal=True)),
    "float16": lambda: (dense(dtype=torch.float16, dim=64, dim_v=64), Options(causal=True, window_left=11)),
    "packed": lambda: (packed(), Options(causal=True)),
    "packed_window": lambda: (packed(), Options(window_left=6, window_right=2)),
    "packed_everything": lambda: (
        packed(
            alibi_slopes=randn(4, 2).abs(),
            bias=bias(1, 2, max(PACKED_Q), max(PACKED_K)),
            mask=mask(4, 1, max(PACKED_Q), max(PACKED_K)),
            sinks=randn(2),
            dropout_seed=seed(),
        ),
        Options(causal=True, softcap=4.0, dropout_p=0.2),
    ),
    "cache": lambda: (dense(batch=3, seqlens_k=lengths(LONGER, 0, LONG - 4)), Options(causal=True)),
    "cache_padded": lambda: (
        dense(
            batch=2,
            seqlens_k=lengths(LONGER - 1, LONG),
            leftpad_k=lengths(5, 18),
            bias=bias(1, 2, LONG, LONGER),
            mask=mask(2, 1, LONG, LONGER),
            dropout_seed=seed(),
        ),
        Options(causal=True, dropout_p=0.4),
    ),
    "everything": lambda: (
        dense(
            batch=2,
            alibi_slopes=randn(2).abs(),
            bias=bias(2, 1, LONG, LONGER),
            mask=mask(1, 1, LONG, LONGER),
            sinks=randn(2),
            dropout_seed=seed(),
        ),
        Options(causal=True, window_left=25, softcap=4.0, dropout_p=0.2, scale=0.5),
    ),
}

if not IS_INTERPRETED:  # whose bfloat16 products are wrong in Triton 3.6 to 3.9
    CASES["bfloat16"] = lambda: (dense(dtype=torch.bfloat16, dim=64, dim_v=64), Options(causal=True))
    CASES["bfloat16_wide"] = lambda: (dense(dtype=torch.bfloat16, dim=256, dim_v=256), Options())


# The interpreter takes about two seconds a case: these cover every option in a minute.
def solve(inputs: Inputs, options: Options) -> AttentionProblem:
    problem = describe(inputs, options)
    check_values(problem, inputs, options)
    assert Backend("triton").supports(problem) is None
    return problem


def reference_options(options: Options) -> dict[str, Any]:
    named = {name: getattr(options, name) for name in ("causal", "softcap", "dropout_p", "scale")}
    return named | {"window": (options.window_left, options.window_right)}


def expected(
    problem: AttentionProblem, inputs: Inputs, options: Options, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Gradients]:
    """The reference's answer; a cache is taken apart into its sequences."""
    extras = {
        name: getattr(inputs, name) for name in ("mask", "bias", "alibi_slopes", "sinks", "dropout_seed")
    }
    named = reference_options(options)
    qkv = inputs[:3]
    if inputs.seqlens_k is None:
        named |= extras | {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
        gradients = reference.attention_backward(dout, *qkv, dlse=dlse, **named)
        return *reference.attention(*qkv, **named), Gradients(*gradients)
    total = Gradients(*(torch.zeros_like(t, dtype=torch.float64) for t in qkv))
    total = total._replace(bias=None if inputs.bias is None else torch.zeros_like(inputs.bias).double())
    outs, stats = [], []
    for n, span in enumerate(spans(problem, inputs)):
        one = slice(n, n + 1)
        part = (inputs.query[one], inputs.key[one, span.k0 : span.k1], inputs.value[one, span.k0 : span.k1])
        own = named | extras | {"first_sequence": n}
        for name in ("mask", "bias"):
            t = extras[name]
            if t is not None:
                own[name] = (t[one] if t.shape[0] > 1 else t)[..., span.k0 : span.k1]
        out, lse = reference.attention(*part, **own)
        g = reference.attention_backward(dout[one], *part, dlse=None if dlse is None else dlse[one], **own)
        outs.append(out)
        stats.append(lse)
        total.query[one] = g.query
        total.key[one, span.k0 : span.k1] = g.key
        total.value[one, span.k0 : span.k1] = g.value
        if total.bias is not None:
            total.bias[..., span.k0 : span.k1] += g.bias
    return torch.cat(outs), torch.cat(stats), total


def assert_close(actual: Tensor, wanted: Tensor, tolerance: float, name: str, floor: float = 1e-2) -> None:
    assert actual.shape == wanted.shape, name
    finite = wanted.isfinite()
    assert torch.equal(actual.isfinite(), finite), f"{name}: not finite in other places"
    assert torch.equal(actual[~finite].double(), wanted[~finite]), name
    error = (actual.double() - wanted)[finite].norm()
    scale = wanted[finite].norm() + wanted[finite].numel() ** 0.5 * floor
    assert error <= tolerance * scale, f"{name}: {error / scale:.2e} > {tolerance:.0e}"


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str):
    inputs, options = CASES[name]()
    problem = solve(inputs, options)
    with torch.no_grad():
        out, lse = launch.forward(problem, inputs)
        dout = torch.randn_like(out)
        # Not below 0: what one bias of all scores gets is the sum of dlse, which would nearly cancel.
        dlse = torch.rand_like(lse) if "half" not in name else None
        gradients = launch.backward(problem, inputs, Known(out, lse), dout, dlse)
        if dlse is not None:  # a row without keys has no gradient, whatever its lse's is
            dlse = dlse.where(lse.isfinite(), 0.0)
        wanted_out, wanted_lse, wanted = expected(problem, inputs, options, dout, dlse)
    tolerance = TOLERANCE[inputs.query.dtype] * (50 if name == "large_logits" else 1)
    assert out.dtype == inputs.query.dtype and lse.dtype == torch.float32
    assert_close(out, wanted_out, tolerance, "out")
    assert_close(lse, wanted_lse, tolerance, "lse")
    for field, tensor, actual, target in zip(
        Gradients._fields, (*inputs[:3], inputs.bias, inputs.sinks), gradients, wanted
    ):
        assert (actual is None) == (target is None), field
        if actual is not None and target is not None:
            assert tensor is not None and actual.dtype == tensor.dtype
            limit = max(tolerance, TOLERANCE[actual.dtype])
            is_long_sum = field == "bias" and actual.dtype == torch.float32  # of terms that may cancel
            assert_close(actual, target, limit, f"d{field}", 1.0 if is_long_sum else 1e-2)
            if field == "bias":
                with torch.no_grad():
                    alone = launch.bias_gradient(problem, inputs, Known(out, lse), dout, dlse).bias
                assert_close(alone, target, limit, "dbias alone", 1.0 if is_long_sum else 1e-2)


@pytest.mark.parametrize("keys", [LONGER, 300])
@pytest.mark.parametrize("bound", [2**31 - 1, 2**31 + 5])
def test_a_window_longer_than_any_sequence_hides_nothing(bound: int, keys: int):
    """Positions are added to its edges in 32 bits."""
    inputs = dense(1, keys)
    options = Options(window_left=bound), Options(window_right=bound), Options()
    found = [launch.forward(solve(inputs, own), inputs) for own in options]
    for out, lse in found[:2]:
        assert_close(out, found[2][0].double(), 4e-6, "out")
        assert_close(lse, found[2][1].double(), 4e-6, "lse")


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(1, 2, 1, LONGER), (1, 2, LONG, LONGER)])
def test_wide_results_round_to_the_usual_ones(shape: tuple[int, ...]):
    """Of a bias that scores share; one that none shares is summed with nothing."""
    inputs = dense(dtype=torch.float16, bias=bias(*shape, dtype=torch.float16))
    problem, found = solve(inputs, Options(causal=True)), []
    with torch.no_grad():
        dout = randn(1, LONG, 2, 16, dtype=torch.float16)
        for is_wide in (False, True):
            problem = replace(problem, has_wide_results=is_wide)
            out, lse = launch.forward(problem, inputs)
            known = Known(out.half(), lse)
            found.append((out, *launch.backward(problem, inputs, known, dout, None)[: 4 - (shape[2] > 1)]))
    for usual, ours in zip(*found, strict=True):
        assert ours.dtype == torch.float32 and torch.equal(ours.half(), usual)
        assert not torch.equal(ours, usual.float())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["causal", "packed_everything"])
def test_dk_and_dv_apart_are_as_together(name: str):
    inputs, options = CASES[name]()
    problem = solve(inputs, options)
    with torch.no_grad():
        out, lse = launch.forward(problem, inputs)
        dout, tile = torch.randn_like(out), KernelTile(16, 32, 4, 1)
        together = launch.backward(problem, inputs, Known(out, lse), dout, None, {"dkdv": tile})
        apart = launch.backward(problem, inputs, Known(out, lse), dout, None, {"dk": tile, "dv": tile})
    assert_close(apart.key, together.key.double(), 4e-6, "dkey")
    assert_close(apart.value, together.value.double(), 4e-6, "dvalue")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["causal", "latent_heads", "bias"])
def test_boxes_hold_the_same_rows_as_addresses(name: str):
    inputs, options = CASES[name]()
    problem = solve(inputs, options)
    results = []
    for has_tma in (False, True):
        tile = KernelTile(16, 16, 4, 1, has_tma)
        call = Call(problem, (*launchable(inputs), *Results()))
        can_tma = IS_INTERPRETED or torch.cuda.get_device_capability() >= (9, 0)
        assert (call.source(inputs.key, 16, has_tma).desc is not None) == (has_tma and can_tma)
        with torch.no_grad():
            out, lse = launch.forward(problem, inputs, tile)
            tiles = dict.fromkeys(("dkdv", "dq"), tile)
            gradients = launch.backward(problem, inputs, Known(out, lse), out, None, tiles)
        results.append((out, lse, *gradients[:3]))
    for by_address, by_box in zip(*results):
        assert_close(by_box, by_address.double(), TOLERANCE[inputs.query.dtype] / 4, "by box")


def test_dropout_is_the_library_s_mask_bit_for_bit():
    """With identity values the output is the dropped weights themselves."""
    keys = 32 if IS_INTERPRETED else 512
    inputs = dense(LONG, keys, heads=2, kv_heads=1, dim_v=keys, batch=2, dropout_seed=seed())
    inputs = inputs._replace(value=torch.eye(keys, device=DEVICE)[None, :, None].expand(2, -1, 1, -1))
    for p in (0.1, 0.5, 0.9):
        options = Options(dropout_p=p)
        out, _ = launch.forward(solve(inputs, options), inputs)
        keep = keep_mask(inputs.dropout_seed, p, range(2), 2, 0, LONG, 0, keys)
        assert torch.equal(out.transpose(1, 2) != 0, keep)


@pytest.mark.parametrize("step, query, key", [(16, 48, 1 << 20), (1, 21, 37)])
def test_a_part_of_a_call_drops_what_the_call_does(step, query, key):
    inputs = dense(LONG, 40, heads=2, kv_heads=1, batch=2, dropout_seed=with_origin(seed(), query, key, 9, 5))
    options = Options(causal=True, dropout_p=0.3, dropout_step=step)
    problem = solve(inputs, options)
    with torch.no_grad():
        out, lse = launch.forward(problem, inputs)
        dout = torch.randn_like(out)
        grads = launch.backward(problem, inputs, Known(out, lse), dout, None)
    exact, _, wanted = expected(problem, inputs, options, dout, None)
    for found, right in zip((out, *grads[:3]), (exact, *wanted[:3])):
        assert_close(found, right, 4e-6, f"step {step}")


def test_pages_hold_the_same_keys_as_a_cache():
    page, pages = 8, 40
    ends = lengths(LONG + 9, 13, 0)
    table = torch.randperm(pages, device=DEVICE)[: 3 * 12].view(3, 12).int()
    if not IS_INTERPRETED:
        page, ends = 64, lengths(700, 65, 0)
    for padding in (None, lengths(3, 9, 0)):
        for options in (Options(causal=True), Options(window_left=7, softcap=2.0)):
            query = randn(3, 5, 4, 24)
            key, value = randn(pages, page, 2, 24), randn(pages, page, 2, 72)
            paged = Inputs(query, key, value, seqlens_k=ends, leftpad_k=padding, page_table=table)
            flat_key, flat_value = (t[table.long()].flatten(1, 2) for t in (key, value))
            flat = paged._replace(key=flat_key, value=flat_value, page_table=None)
            with torch.no_grad():
                actual = launch.forward(solve(paged, options), paged)
                problem = solve(flat, options)
                dout = torch.randn_like(actual[0])
                out, lse, _ = expected(problem, flat, options, dout, None)
            assert_close(actual[0], out, 4e-6, "out")
            assert_close(actual[1], lse, 4e-6, "lse")


def strided_inputs() -> dict[str, Inputs]:
    batch, rows, heads, dim = 2, 18 if IS_INTERPRETED else LONG, 2, 16
    qkv = randn(batch, rows, 3, heads, dim)
    wide = [randn(batch, heads, rows, dim).transpose(1, 2) for _ in range(3)]
    return {
        "slices of one tensor": Inputs(*qkv.unbind(2)),
        "heads before rows": Inputs(*wide),
        "keys shared by the batch": Inputs(
            randn(batch, rows, heads, dim), *randn(2, 1, rows, heads, dim).expand(-1, batch, -1, -1, -1)
        ),
        "gaps in the last dimension": Inputs(*randn(3, batch, rows, heads, 2 * dim)[..., ::2]),
        "sequence first": Inputs(*randn(3, rows, batch, heads, dim).transpose(1, 2)),
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", strided_inputs())
def test_strides_are_taken_as_they_are(name: str):
    inputs = strided_inputs()[name]
    options = Options(causal=True)
    problem = solve(inputs, options)
    out, lse = launch.forward(problem, inputs)
    assert out.is_contiguous()
    douts = [torch.randn_like(out)]
    if "last" in name or not IS_INTERPRETED:
        douts.append(torch.ones((), device=DEVICE).expand_as(out))
    for dout in douts:
        gradients = launch.backward(problem, inputs, Known(out, lse), dout, None)
        wanted_out, _, wanted = expected(problem, inputs, options, dout, None)
        assert_close(out, wanted_out, 4e-6, "out")
        for field, actual, target in zip("qkv", gradients, wanted):
            assert_close(actual, target, 4e-6, f"d{field}")


def test_the_same_bits_every_time():
    inputs, options = CASES["bias_of_queries" if IS_INTERPRETED else "everything"]()
    problem = solve(inputs, options)
    runs = []
    for _ in range(2 if IS_INTERPRETED else 20):
        with torch.no_grad():
            out, lse = launch.forward(problem, inputs)
            gradients = launch.backward(problem, inputs, Known(out, lse), torch.ones_like(out), None)
        runs.append([out, lse, *(g for g in gradients if g is not None)])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run))


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["query", "key"])
def test_nan_and_inf_spread_as_in_standard_attention(which: str, value: float):
    inputs = dense(LONG, LONG)
    getattr(inputs, which)[0, 7, 0, 2] = value
    inputs.key[0, :2, 0, 2] = torch.tensor([1.0, -1.0])  # else an infinite query's scores may all be -inf
    out, _ = launch.forward(solve(inputs, Options(causal=True)), inputs)
    wanted, _ = reference.attention(*inputs[:3], causal=True)
    assert torch.equal(out.isnan(), wanted.isnan())
    assert out.isnan().any() and out.isfinite().any()


def test_hidden_values_are_never_read():
    """Rows outside a sequence hold NaN; a product with them would show it."""
    inputs = dense(batch=2, seqlens_k=lengths(LONG, 3), leftpad_k=lengths(2, 0))
    for t in (inputs.key, inputs.value):
        t[0, :2], t[0, LONG:], t[1, 3:] = float("nan"), float("nan"), float("nan")
    problem = solve(inputs, Options())
    out, lse = launch.forward(problem, inputs)
    gradients = launch.backward(problem, inputs, Known(out, lse), torch.ones_like(out), None)
    assert out.isfinite().all() and lse.isfinite().all()
    assert all(t.isfinite().all() for t in gradients[:3])
    assert not gradients.key[1, 3:].any() and not gradients.value[0, :2].any()


def test_float64_and_page_gradients_are_refused_by_name():
    double = Inputs(*(t.double() for t in dense()[:3]))
    assert "float64" in str(Backend("triton").supports(describe(double, Options())))
    pages = Inputs(
        randn(1, 1, 1, 8).requires_grad_(), randn(4, 8, 1, 8), randn(4, 8, 1, 8),
        seqlens_k=lengths(9), page_table=torch.zeros(1, 2, device=DEVICE, dtype=torch.int32),
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="no gradient of keys in pages"):
        dispatch.choose(describe(pages, Options()), "triton", is_backward=True)


@pytest.mark.skipif(IS_INTERPRETED, reason="compilation")
def test_a_new_length_runs_what_is_already_compiled():
    from tilewise.gpu.triton.backward import attn_bwd_dkdv_kernel, attn_bwd_dq_kernel
    from tilewise.gpu.triton.forward import attn_fwd_kernel

    def variants() -> list[int]:
        kernels = (attn_fwd_kernel, attn_bwd_dkdv_kernel, attn_bwd_dq_kernel)
        return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

    def call(batch: int, seqlen_q: int, seqlen_k: int) -> None:
        inputs = dense(seqlen_q, seqlen_k, batch=batch, dim=64, dim_v=64, dtype=torch.float16)
        problem = solve(inputs, Options(causal=True, window_left=64))
        out, lse = launch.forward(problem, inputs)
        launch.backward(problem, inputs, Known(out, lse), out, None)

    call(2, 128, 128)
    before = variants()
    for batch, seqlen_q, seqlen_k in ((1, 17, 1), (3, 129, 255), (2, 1000, 1024)):
        call(batch, seqlen_q, seqlen_k)
    assert variants() == before


@pytest.mark.skipif(IS_INTERPRETED, reason="needs 30 GB")
def test_more_elements_than_32_bits_can_count():
    rows = 2**31 // (64 * 128) + 300
    if torch.cuda.mem_get_info()[0] < 12 * rows * 64 * 128:
        pytest.skip("needs 30 GB of free memory")
    query = torch.randn(1, 256, 64, 128, device=DEVICE, dtype=torch.float16)
    key, value = (torch.zeros(1, rows, 64, 128, device=DEVICE, dtype=torch.float16) for _ in range(2))
    for t in (key, value):
        t[:, -512:] = torch.randn_like(t[:, -512:])
    inputs, options = Inputs(query, key, value), Options(causal=True, window_left=128)
    problem = solve(inputs, options)
    out, lse = launch.forward(problem, inputs)
    gradients = launch.backward(problem, inputs, Known(out, lse), out, None)
    tail = Inputs(query, key[:, -512:], value[:, -512:])
    wanted_out, _, wanted = expected(problem, tail, options, out, None)
    assert_close(out, wanted_out, 2e-3, "out")
    assert_close(gradients.query, wanted.query, 2e-3, "dquery")
    assert_close(gradients.key[:, -512:], wanted.key, 2e-3, "dkey")
    assert not gradients.key[:, :-512].any()
