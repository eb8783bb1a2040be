"""A call whose plan is in the cache gives what a first one gives, and nobody can tell but by the clock."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import tilewise
from tilewise.core import kept
from tilewise.dispatch import plans
from tilewise.testing import check_attention


@pytest.fixture(autouse=True)
def _no_plans():
    plans.clear()
    yield
    plans.clear()


def qkv(seqlen_q=5, seqlen_k=5, heads=4, kv_heads=2, dim=16, dtype=torch.float32):
    shapes = (seqlen_q, heads), (seqlen_k, kv_heads), (seqlen_k, kv_heads)
    return [torch.randn(2, n, h, dim, dtype=dtype) for n, h in shapes]


def number_of_plans():
    return len(plans.entries())


def with_a_new_plan(q, k, v, **options):
    """What a call gives that finds no plan."""
    plans.clear()
    return tilewise.attention(q, k, v, **options)


@pytest.fixture
def known():
    """Query, key and value of calls whose plan is in the cache."""
    q, k, v = qkv()
    for _ in range(3):
        tilewise.attention(q, k, v)
    assert number_of_plans() == 1
    return q, k, v


@pytest.mark.sample(8)
@pytest.mark.parametrize("backend", [None, "llvm", "aten"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("seqlen", [1, 7, 130])
def test_second_call_equals_a_first(backend, layout, return_lse, seqlen):
    def call(q, k, v):
        if layout == "bhsd":
            q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        found = tilewise.attention(
            q, k, v, causal=True, layout=layout, return_lse=return_lse, backend=backend
        )
        return found if return_lse else (found,)

    first, second = qkv(seqlen, seqlen), qkv(seqlen, seqlen)
    before = call(*first)
    assert number_of_plans() == 1
    repeated = call(*second)
    again = call(*first)
    plans.clear()
    whole = call(*second)
    for a, b, c, d in zip(before, again, repeated, whole, strict=True):
        assert torch.equal(a, b) and torch.equal(c, d)
        assert c.stride() == d.stride() and c.dtype == d.dtype and c.data_ptr() != d.data_ptr()


@pytest.mark.sample(12)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seqlen", [1, 7, 150])
def test_known_calls_equal_a_first(layout, return_lse, threads, dtype, seqlen):
    options = {"layout": layout, "return_lse": return_lse, "causal": True}
    axes = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    sets = [[t.permute(axes).contiguous() for t in qkv(seqlen, seqlen, dtype=dtype)] for _ in range(5)]
    torch.set_num_threads(threads)
    found = [tilewise.attention(*tensors, **options) for tensors in sets]
    expected = [with_a_new_plan(*tensors, **options) for tensors in sets]
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(*((t if return_lse else (t,)) for t in (a, b)), strict=True):
            assert torch.equal(x, y) and x.stride() == y.stride() and x.dtype == y.dtype


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("how", ["length", "stride", "dtype", "offset", "dimensions", "meta"])
def test_tensors_unlike_those_of_a_known_call(known, which, how):
    tensors = list(known)
    t = tensors[which]
    same_size = {torch.float32: torch.int32}
    tensors[which] = {
        "length": torch.randn(2, 6, *t.shape[2:]),
        "stride": torch.randn(*t.shape[:3], 20)[..., :16],
        "dtype": t.view(same_size[t.dtype]),
        "offset": torch.randn(t.numel() + 3)[3:].view_as(t),
        "dimensions": t[..., 0],
        "meta": t.to("meta"),
    }[how]
    if how in ("dtype", "dimensions", "meta") or (how == "length" and which):
        if how == "length":
            tensors[1], tensors[2] = (torch.randn(2, 6, *t.shape[2:]) for t in tensors[1:])
        else:
            with pytest.raises((TypeError, ValueError)):
                tilewise.attention(*tensors)
            return
    found = tilewise.attention(*tensors)
    assert torch.equal(found, with_a_new_plan(*tensors))


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_types_of_one_size_are_two(dtypes):
    first, second = (qkv(dtype=dtype) for dtype in dtypes)
    for _ in range(4):
        tilewise.attention(*first)
    found = tilewise.attention(*second)
    assert found.dtype == dtypes[1] and torch.equal(found, with_a_new_plan(*second))


def check_transforms(q, k, v, plain):
    """vmap, forward mode and the compiler see a call that has become a repeated one."""
    assert torch.equal(torch.vmap(lambda x: tilewise.attention(x, k, v))(q[None])[0], plain)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        assert forward_ad.unpack_dual(tilewise.attention(dual, k, v)).tangent is not None
    compiled = torch.compile(lambda *t: tilewise.attention(*t), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), plain)


def test_known_calls_see_who_watches(known):
    q, k, v = known
    plain = tilewise.attention(q, k, v)
    assert tilewise.attention(q.clone().requires_grad_(), k, v).grad_fn is not None
    check_transforms(q, k, v, plain)
    with torch.inference_mode():
        for _ in range(4):
            assert torch.equal(tilewise.attention(q, k, v), plain)
            assert tilewise.attention(q, k, v).is_inference()
    assert not tilewise.attention(q, k, v).is_inference()


def test_a_known_call_takes_only_tensors_with_memory(known):
    q, k, v = known
    outlived = []
    torch.func.grad(lambda x: (outlived.append(x), x.sum())[1])(q)
    for _ in range(2):
        assert torch.equal(tilewise.attention(outlived[0], k, v), tilewise.attention(q, k, v))


def test_a_known_call_follows_the_number_of_threads(known):
    q, k, v = known
    plain = tilewise.attention(q, k, v)
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        for _ in range(3):
            assert torch.equal(tilewise.attention(q, k, v), plain)


def test_calls_that_take_turns_keep_their_signatures():
    first, second = qkv(3, 5), qkv(4, 6)
    expected = [with_a_new_plan(*tensors) for tensors in (first, second)]
    for _ in range(4):
        for tensors, out in zip((first, second), expected, strict=True):
            assert torch.equal(tilewise.attention(*tensors), out)
    assert number_of_plans() == 2


def test_no_known_call_compares_a_mask_with_none(monkeypatch):
    """Which takes longer than to find a plan: calls with and without a mask take turns."""
    q, k, v = qkv()
    ways = [{"mask": torch.ones(1, 1, 1, 5, dtype=torch.bool)}, {}]
    expected = [tilewise.attention(q, k, v, **way) for way in ways]
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__eq__", lambda t, other: asked.append(other))
        found = [tilewise.attention(q, k, v, **way) for way in ways]
    assert not asked and number_of_plans() == 2
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_an_argument_that_cannot_be_hashed_is_named(needs_grad):
    q, k, v = qkv()
    with pytest.raises(ValueError, match="layout="):
        tilewise.attention(q.requires_grad_(needs_grad), k, v, layout=["bshd"])


def gradients(tensors, layout, dout, options, of_lse=False):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out, lse = tilewise.attention(*leaves, layout=layout, return_lse=True, **options)
    if of_lse:
        return torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    return torch.autograd.grad(out, leaves, dout)


@pytest.mark.sample(12)
@pytest.mark.parametrize("backend", [None, "llvm", "aten", "tiled"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (7, 7), (90, 20), (20, 150), (3, 0)])
def test_gradients_of_a_second_call_equal_a_first(backend, layout, dtype, seqlen_q, seqlen_k):
    options = {"backend": backend, "causal": seqlen_q >= seqlen_k and backend != "aten"}
    if backend == "aten" and not seqlen_k:
        pytest.skip("takes no empty tensors")
    axes = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    wide = torch.randn(2, 4, seqlen_q, 32, dtype=dtype)
    douts = (
        wide[:, ::2].repeat(1, 2, 1, 1)[..., ::2],
        wide[:, :1, :, :1].expand(2, 4, seqlen_q, 16),
        wide[..., :16],
    )
    first = qkv(seqlen_q, seqlen_k, dtype=dtype)
    if layout == "bhsd":
        first = [t.transpose(1, 2).contiguous() for t in first]
    second = [torch.randn_like(t) for t in first]
    for dout in douts:
        dout = dout.transpose(1, 2).permute(axes)
        for of_lse in (False, True):
            if of_lse and backend == "aten":
                continue
            plans.clear()
            whole = gradients(second, layout, dout, options, of_lse)
            plans.clear()
            gradients(first, layout, dout, options)
            assert number_of_plans() == 2
            for a, b in zip(gradients(second, layout, dout, options, of_lse), whole, strict=True):
                assert torch.equal(a, b) and a.isfinite().all()
                assert a.stride() == b.stride() or a.numel() == 0 or 1 in a.shape
                assert a.permute(axes).is_contiguous()


def test_repeated_gradients_of_tensors_that_were_saved_elsewhere():
    """A hook may give back what was saved with other strides."""
    q, k, v = (torch.randn(2, 4, 9, 16).transpose(1, 2).requires_grad_() for _ in range(3))
    expected = torch.autograd.grad(tilewise.attention(q, k, v).square().sum(), (q, k, v))
    scattered = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t.detach().repeat_interleave(2, -1)[..., ::2]
    )
    for hooks in (torch.autograd.graph.save_on_cpu(), scattered):
        with hooks:
            out = tilewise.attention(q, k, v)
        for a, b in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, strict=True):
            assert torch.equal(a, b)


@pytest.fixture
def known_gradients():
    """Leaves and dout of calls whose backward's plan is in the cache too, and their gradients."""
    leaves, dout = [t.requires_grad_() for t in qkv()], torch.randn(2, 5, 4, 16)
    for _ in range(4):
        expected = torch.autograd.grad(tilewise.attention(*leaves), leaves, dout)
    assert number_of_plans() == 2
    return leaves, dout, expected


@pytest.mark.sample(12)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (7, 7), (3, 60), (150, 150)])
def test_known_gradients_equal_a_first(layout, threads, dtype, seqlen_q, seqlen_k):
    axes = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    sets = [[t.permute(axes).contiguous() for t in qkv(seqlen_q, seqlen_k, dtype=dtype)] for _ in range(5)]
    dout = torch.randn_like(sets[0][0])
    torch.set_num_threads(threads)
    found = [gradients(tensors, layout, dout, {"causal": True}) for tensors in sets]
    for tensors, grads in zip(sets, found, strict=True):
        plans.clear()
        for a, b in zip(grads, gradients(tensors, layout, dout, {"causal": True}), strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()


def test_known_gradients_of_tensors_unlike_the_last(known_gradients):
    leaves, dout, expected = known_gradients
    wide, turned = (
        torch.empty(2, 5, 4, 32)[..., :16].copy_(dout),
        dout.transpose(1, 2).clone().transpose(1, 2),
    )
    for other in (wide, dout, turned, dout.half().float(), dout):
        grads = torch.autograd.grad(tilewise.attention(*leaves), leaves, other)
        if torch.equal(other, dout):
            assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
        else:
            assert not torch.equal(grads[0], expected[0])
    out = tilewise.attention(*leaves)
    with torch.no_grad():
        leaves[0].add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.grad(out, leaves, dout)


def test_known_gradients_can_be_differentiated(known_gradients):
    leaves, dout, expected = known_gradients
    grads = torch.autograd.grad(tilewise.attention(*leaves), leaves, dout, create_graph=True)
    torch.testing.assert_close(grads, expected)
    second = torch.autograd.grad(grads[0].square().sum(), leaves)
    plans.clear()
    grads = torch.autograd.grad(tilewise.attention(*leaves), leaves, dout, create_graph=True)
    for a, b in zip(second, torch.autograd.grad(grads[0].square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_repeated_gradients_in_another_thread():
    leaves = [t.requires_grad_() for t in qkv()]
    first = torch.autograd.grad(tilewise.attention(*leaves).sum(), leaves)
    out, found = tilewise.attention(*leaves), []
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(out.sum(), leaves)))
    thread.start()
    thread.join()
    assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_repeated_calls_meet_the_error_rule():
    for _ in range(3):
        q, k, v = qkv(70, 90)
        check_attention(q, k, v, window=(20, 3))
        tilewise.attention(q, k, v, window=(20, 3))
    assert number_of_plans() == 3  # with gradients and lse, their backward, and neither


@pytest.mark.parametrize(
    "changed",
    [
        {"causal": True}, {"window": (2, None)}, {"softcap": 2.0}, {"scale": 0.3}, {"return_lse": True},
        {"backend": "tiled"}, {"sinks": torch.zeros(4)}, {"mask": torch.zeros(5, dtype=torch.bool)},
        {"dropout_p": 0.5},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_every_argument_counts(changed):
    q, k, v = qkv()
    plain = tilewise.attention(q, k, v)
    other = tilewise.attention(q, k, v, **changed)
    if changed == {"backend": "tiled"}:
        torch.testing.assert_close(other, plain)
    elif "return_lse" in changed:
        assert torch.equal(other[0], plain)
    else:
        assert not torch.allclose(other, plain)
    assert torch.equal(tilewise.attention(q, k, v), plain)


def test_dropout_draws_anew_in_each_call():
    q, k, v = qkv()
    outs = [tilewise.attention(q, k, v, dropout_p=0.5) for _ in range(3)]
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
    assert number_of_plans() == 1


def test_strides_and_dtypes_count():
    q, k, v = qkv()
    plain = tilewise.attention(q, k, v)
    wide = torch.randn(2, 5, 2, 40)
    assert not torch.equal(tilewise.attention(q, wide[..., :16], v), plain)
    scattered = torch.randn(2, 5, 2, 32)[..., ::2]
    expected = tilewise.attention(q, scattered.contiguous(), v)
    for _ in range(2):
        assert torch.equal(tilewise.attention(q, scattered, v), expected)
    with pytest.raises(TypeError, match=r"key\.dtype=torch\.float64"):
        tilewise.attention(q, k.double(), v)


@pytest.mark.parametrize("place", ["key", "value"])
def test_a_tensor_given_twice_is_not_two(place):
    """The second is not looked at where it is the first, so another in its place is another call."""
    query = torch.randn(2, 9, 2, 16)
    other = torch.randn(2, 9, 2, 32)[..., ::2]
    call = {"query": query, "key": query, "value": query}
    expected = tilewise.attention(**call | {place: other.contiguous()})
    plans.clear()
    tilewise.attention(**call)
    assert torch.equal(tilewise.attention(**call | {place: other}), expected)


def test_bad_arguments_are_refused_after_good_calls():
    q, k, v = qkv()
    for _ in range(2):
        tilewise.attention(q, k, v)
    for bad in ({"window": (1.0, None)}, {"layout": "sbhd"}, {"softcap": -1.0}, {"backend": "none"}):
        with pytest.raises(ValueError):
            tilewise.attention(q, k, v, **bad)
    with pytest.raises(TypeError, match="key=list"):
        tilewise.attention(q, [k], v)


@pytest.mark.parametrize(
    ("name", "good", "wrong"),
    [
        *(("scale", 1, x) for x in (True, np.True_, 1 + 0j, Decimal(1))),
        *(("softcap", 0.0, x) for x in (False, np.False_)),
        *((name, value, float(value)) for name in ("causal", "deterministic") for value in (True, False)),
    ],
)
def test_what_equals_a_good_argument_is_refused_after_it(name, good, wrong):
    q, k, v = qkv()
    tilewise.attention(q, k, v, **{name: good})
    with pytest.raises(TypeError, match=f"{name}=.* must be"):
        tilewise.attention(q, k, v, **{name: wrong})


def test_whoever_watches_sees_the_call():
    q, k, v = qkv(dtype=torch.float64)
    plain = tilewise.attention(q, k, v)
    leaf = q.clone().requires_grad_()
    assert tilewise.attention(leaf, k, v).grad_fn is not None
    with torch.no_grad():
        assert torch.equal(tilewise.attention(leaf, k, v), plain)
    check_transforms(q, k, v, plain)


@pytest.mark.parametrize("is_first_watched", [False, True])
def test_the_grad_mode_of_each_call_counts(is_first_watched):
    leaves, starts = [t.requires_grad_() for t in qkv()], torch.tensor([0, 3, 5], dtype=torch.int32)
    packed = [t.detach()[0].requires_grad_() for t in leaves]
    for is_enabled in (is_first_watched, not is_first_watched) * 2:
        with torch.set_grad_enabled(is_enabled):
            outs = [
                tilewise.attention(*leaves, score_mod=lambda s, b, h, i, j: s * 2),
                tilewise.attention(*leaves),
                tilewise.scaled_dot_product_attention(*(t.transpose(1, 2) for t in leaves), enable_gqa=True),
                tilewise.attention_varlen(*packed, starts, starts, 5, 5),
            ]
        assert [out.requires_grad for out in outs] == [is_enabled] * 4


@pytest.mark.parametrize("is_first", [False, True])
def test_gradients_that_are_enabled_in_inference_mode(is_first):
    """Autograd records nothing there, as in PyTorch's own attention."""
    leaves, layer = [t.requires_grad_() for t in qkv()], tilewise.nn.FlashAttention(16, 2)
    if not is_first:
        tilewise.attention(*leaves, return_lse=True)
    x = torch.randn(1, 5, 16)
    with torch.inference_mode(), torch.enable_grad():
        out, lse = tilewise.attention(*leaves, return_lse=True)
        _, aux = tilewise.attention(*leaves, return_aux=tilewise.Aux(entropy=True))
        y = layer(x)
    assert not any(t.requires_grad for t in (out, lse, aux.entropy, y))
    expected = tilewise.attention(*leaves, return_lse=True)
    assert expected[0].requires_grad
    torch.testing.assert_close((out, lse), expected)


def test_a_tensor_that_outlives_its_transform_is_a_tensor():
    (q, k, v), outlived = qkv(), []
    torch.func.grad(lambda x: (outlived.append(x), x.sum())[1])(q)
    k.requires_grad_()
    for _ in range(2):
        expected = tilewise.attention(q, k, v)
    assert torch.equal(tilewise.attention(outlived[0], k, v), expected)


def test_a_default_device_changes_nothing():
    q, k, v = qkv()
    plain = tilewise.attention(q, k, v)
    with torch.device("meta"):
        assert torch.equal(tilewise.attention(q, k, v), plain)
        plans.clear()
        assert torch.equal(tilewise.attention(q, k, v), plain)


def test_a_default_device_changes_nothing_for_packed_and_cached_tokens():
    x, starts = torch.randn(6, 2, 8), torch.tensor([0, 2, 6])
    contiguous = tilewise.KVCache(1, 16, 2, 8, dtype=torch.float32)
    paged = tilewise.PagedKVCache(2, 16, 2, 8, dtype=torch.float32)
    paged.allocate()
    plain = tilewise.attention_varlen(x, x, x, starts, starts)
    expected = tilewise.attention_with_cache(
        x[None], tilewise.KVCache(1, 16, 2, 8, dtype=x.dtype), x[None], x[None]
    )
    with torch.device("meta"):
        assert torch.equal(tilewise.attention_varlen(x, x, x, starts, starts), plain)
        found = [tilewise.attention_with_cache(x[None], c, x[None], x[None]) for c in (contiguous, paged)]
    assert all(torch.equal(out, expected) for out in found)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_records_what_is_computed():
    q, k, v = qkv()
    for _ in range(3):
        tilewise.attention(q, k, v)
    traced = torch.jit.trace(lambda x: tilewise.attention(x, k, v), (q,), check_trace=False)
    other = torch.randn_like(q)
    assert torch.equal(traced(other), tilewise.attention(other, k, v))


def test_saved_tensors_may_come_back_with_other_strides():
    leaves, dout = [t.requires_grad_() for t in qkv()], torch.randn(2, 5, 4, 16)
    expected = torch.autograd.grad(tilewise.attention(*leaves), leaves, dout)

    def turned(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 3 else t  # lse

    for _ in range(4):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, turned):
            out = tilewise.attention(*leaves)
        for a, b in zip(torch.autograd.grad(out, leaves, dout), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_threads_share_plans():
    tensors = [qkv() for _ in range(8)]
    expected = [with_a_new_plan(*t) for t in tensors]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            found = list(pool.map(lambda t: tilewise.attention(*t), tensors))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert number_of_plans() == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("lock", [plans._lock, kept._lock])
def test_a_forked_child_does_not_wait_for_a_thread_that_it_does_not_have(lock):
    held = threading.Event()

    def hold():
        with lock:
            held.set()
            time.sleep(0.2)

    q = torch.ones(1, 3, 1, 16)
    tilewise.attention(q, q, q)
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(5)
        with lock:
            tilewise.attention(q[:, :2], q, q)
        os._exit(0)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_plans_not_used_for_the_longest_time_make_room(monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 16)
    q, k, v = qkv()
    tilewise.attention(q, k, v)
    (known,) = plans.entries()
    for n in range(1, 60):
        tilewise.attention(q[:, :1], k[:, :1].expand(-1, n, -1, -1), v[:, :1].expand(-1, n, -1, -1))
        tilewise.attention(q, k, v)
        assert number_of_plans() <= 16 and known in plans.entries()


def test_sdpa_face_finds_its_plan_too():
    q, k, v = (t.transpose(1, 2) for t in qkv(kv_heads=4))
    first = tilewise.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert number_of_plans() == 1
    other = [torch.randn_like(t) for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*other, is_causal=True)
    torch.testing.assert_close(tilewise.scaled_dot_product_attention(*other, is_causal=True), expected)
    assert torch.equal(tilewise.scaled_dot_product_attention(q, k, v, is_causal=True), first)
    with pytest.raises(ValueError, match="heads"):
        tilewise.scaled_dot_product_attention(q, k[:, :3], v[:, :3], is_causal=True)


def test_sdpa_face_repeats_dropout_and_rectangular_masks_as_they_are():
    """Neither can be said by the options that a repeated call would take."""
    q, k, v = (t.transpose(1, 2) for t in qkv(kv_heads=4))
    plain = tilewise.scaled_dot_product_attention(q, k, v)
    for _ in range(3):
        assert not torch.equal(tilewise.scaled_dot_product_attention(q, k, v, dropout_p=0.9), plain)
    short = [t[:, :, :3] for t in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q, *short, is_causal=True)
    for _ in range(3):
        found = tilewise.scaled_dot_product_attention(q, *short, is_causal=True)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("warn_only", [False, True])
def test_pytorchs_deterministic_mode_is_in_the_signature(warn_only):
    """As in PyTorch's own attention, warn_only keeps the faster gradient."""
    x = torch.randn(1, 5, 2, 8, requires_grad=True)
    plans.clear()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    tilewise.attention(x, x, x).sum().backward()
    tilewise.scaled_dot_product_attention(x, x, x).sum().backward()
    tilewise.flash_attn.flash_attn_func(x, x, x).sum().backward()
    torch.func.grad(lambda t: tilewise.attention(t, t, t).sum())(x)
    cache, aux = tilewise.KVCache(1, 8, 2, 8, dtype=torch.float32), tilewise.Aux(entropy=True)
    with torch.no_grad():
        cache.append(x, x)
    tilewise.attention_with_cache(x, cache).sum().backward()
    tilewise.attention_with_cache(x, cache, return_aux=aux)[0].sum().backward()
    tilewise.attention(x, x, x, return_aux=aux)[0].sum().backward()
    compiled = torch.compile(tilewise.attention, backend="aot_eager", fullgraph=True)
    compiled(x, x, x).sum().backward()
    found = {entry.signature.options.deterministic for entry in plans.entries()}
    assert found == {not warn_only}
    plans.clear()
    torch.use_deterministic_algorithms(True, warn_only=not warn_only)
    compiled(x, x, x).sum().backward()  # compiled again
    assert {entry.signature.options.deterministic for entry in plans.entries()} == {warn_only}
