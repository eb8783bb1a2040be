"""The face against PyTorch's FlexAttention itself, and against the reference for gradients."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as theirs

from tilewise import flex_attention as ours, reference
from tilewise.core.functions import tile_map

torch.manual_seed(0)
DOCUMENTS = (torch.rand(300) < 1 / 60).cumsum(0)
TABLE = torch.randn(4, 600)
MASKS = {
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i - j).abs() <= 20 * (h + 1) + b,
    "documents": lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j),
    "scattered": lambda b, h, i, j: (i * 7 + j * 5) % 11 < 2,
    "combined": ours.or_masks(
        lambda b, h, i, j: j < 9, ours.and_masks(lambda b, h, i, j: i - j < 40, lambda b, h, i, j: j <= i)
    ),
    "all": ours.noop_mask,
}
SCORES = {
    "none": None,
    "alibi": lambda s, b, h, i, j: s - (j - i).abs() * torch.exp2(-(h + 1.0)),
    "softcap": lambda s, b, h, i, j: 5 * torch.tanh(s / 5),
    "relative": lambda s, b, h, i, j: s + TABLE[h, i - j + 300] * (b + 1),
}


@pytest.fixture(autouse=True)
def as_written(monkeypatch):
    """PyTorch's eager mode compiles for some seconds a call, unless it is told that somebody looks."""
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


def tensors(batch=2, heads=4, kv_heads=2, seqlen_q=300, seqlen_k=300, dim=16):
    return (
        torch.randn(batch, heads, seqlen_q, dim),
        torch.randn(batch, kv_heads, seqlen_k, dim),
        torch.randn(batch, kv_heads, seqlen_k, dim),
    )


@pytest.mark.parametrize("mask_mod", MASKS.values(), ids=MASKS)
def test_block_masks_are_pytorchs(mask_mod):
    for sizes in ((2, 4, 300, 300), (None, 4, 200, 300), (2, None, 256, 128)):
        known = inspect.signature(theirs.create_block_mask).parameters  # of PyTorch 2.12 on
        one_kind = {"separate_full_blocks": False} if "separate_full_blocks" in known else {}
        for kwargs in ({}, {"BLOCK_SIZE": (32, 64)}, one_kind):
            found = ours.create_block_mask(mask_mod, *sizes, device="cpu", **kwargs)
            exact = theirs.create_block_mask(mask_mod, *sizes, device="cpu", **kwargs)
            for a, b in zip(found.as_tuple(), exact.as_tuple(), strict=True):
                assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
            assert str(found) == str(exact) and found.shape == exact.shape


UNKNOWN = torch.rand(200, 200)


@pytest.mark.parametrize("mask_mod", [
    lambda b, h, i, j: (i - j) ** 2 <= 400,
    lambda b, h, i, j: (i * 0.5) % 3.0 > 1,
    lambda b, h, i, j: UNKNOWN[(i * 7) % 200, (j * 3) % 200] > 0.5,
])  # fmt: skip
def test_masks_of_whose_tiles_intervals_know_nothing(mask_mod):
    found, exact = (
        module.create_block_mask(mask_mod, None, None, 2048, 2048, device="cpu", BLOCK_SIZE=128)
        for module in (ours, theirs)
    )
    assert torch.equal(found.to_dense(), exact.to_dense())


@pytest.mark.parametrize("score_mod", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("mask_mod", MASKS.values(), ids=MASKS)
@pytest.mark.sample(4)
def test_results_are_pytorchs(mask_mod, score_mod):
    check(mask_mod, score_mod, ours.create_block_mask)


@pytest.mark.parametrize("mask_mod", MASKS.values(), ids=MASKS)
@pytest.mark.sample(1)
def test_block_masks_may_be_pytorchs(mask_mod):
    """Their blocks are read, which makes a larger kernel than the mask function alone."""
    check(mask_mod, SCORES["softcap"], theirs.create_block_mask)


def check(mask_mod, score_mod, create_block_mask):
    q, k, v = tensors()
    own, their = (
        f(mask_mod, 2, 4, 300, 300, device="cpu") for f in (create_block_mask, theirs.create_block_mask)
    )
    options = {"scale": 0.3, "enable_gqa": True, "return_aux": ours.AuxRequest(lse=True)}
    with torch.no_grad():
        out, aux = theirs.flex_attention(q, k, v, score_mod, their, **options)
    found, found_aux = ours.flex_attention(q, k, v, score_mod, own, **options)
    torch.testing.assert_close(found, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_aux.lse, aux.lse, rtol=1e-5, atol=1e-5)
    again, lse = ours.flex_attention(
        q, k, v, score_mod, own, 0.3, True, True, {"BLOCK_M": 32}
    )  # in their order
    assert torch.equal(again, found) and torch.equal(lse, found_aux.lse)
    with torch.no_grad():
        _, old = theirs.flex_attention(q, k, v, score_mod, their, 0.3, True, True, {"BLOCK_M": 32})
    torch.testing.assert_close(lse, old, rtol=1e-5, atol=1e-5)


def test_blocks_without_a_function():
    """Blocks that no mask function has made, of which one row has none, and a mask of one batch entry."""
    q, k, v = tensors(kv_heads=4)
    counts = torch.tensor([[[1, 0, 2]]], dtype=torch.int32)
    order = torch.tensor([[[[2, 0, 1], [0, 1, 2], [1, 0, 2]]]], dtype=torch.int32)
    mask = ours.BlockMask.from_kv_blocks(counts, order, mask_mod=MASKS["scattered"], seq_lengths=(300, 300))
    visible = torch.zeros(384, 384, dtype=torch.bool)
    for row, blocks in ((0, [2]), (2, [1, 0])):
        for block in blocks:
            visible[128 * row : 128 * row + 128, 128 * block : 128 * block + 128] = True
    i, j = torch.arange(300)[:, None], torch.arange(300)
    visible = visible[:300, :300] & MASKS["scattered"](0, 0, i, j)
    found, lse = ours.flex_attention(q, k, v, block_mask=mask, return_lse=True)
    exact, exact_lse = reference.attention(*(t.double().transpose(1, 2) for t in (q, k, v)), mask=visible)
    torch.testing.assert_close(found, exact.transpose(1, 2).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-5, atol=1e-5)
    assert (found[:, :, 128:256] == 0).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_sliced", [False, True])
def test_a_changed_mask_is_seen(is_sliced):
    """A mask function put in later counts in partial blocks only; PyTorch's eager mode ignores blocks."""
    q, k, v = (t[:1] for t in tensors(kv_heads=4))
    i, j = torch.arange(300)[:, None], torch.arange(300)
    if is_sliced:
        mask = ours.create_block_mask(MASKS["window"], 2, 4, 300, 300, device="cpu", BLOCK_SIZE=100)[1:, 2:3]
        mask.mask_mod = lambda b, h, i, j: MASKS["window"](1, 2, i, j)
        visible = MASKS["window"](1, 2, i, j)
    else:
        mask = ours.create_block_mask(MASKS["causal"], None, None, 300, 300, device="cpu", BLOCK_SIZE=100)
        mask.mask_mod = MASKS["scattered"]
        visible = (j // 100 < i // 100) | ((j // 100 == i // 100) & MASKS["scattered"](0, 0, i, j))
    assert isinstance(mask, ours.BlockMask)
    exact, _ = reference.attention(*(t.double().transpose(1, 2) for t in (q, k, v)), mask=visible)
    found = ours.flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(found, exact.transpose(1, 2).float(), rtol=1e-5, atol=1e-5)


def test_gradients():
    """PyTorch refuses them on a CPU."""
    q, k, v = (t.double().requires_grad_() for t in tensors())
    table = TABLE.double().requires_grad_()
    score_mod = lambda s, b, h, i, j: s + table[h, i - j + 300]  # noqa: E731
    mask = ours.create_block_mask(MASKS["documents"], 2, 4, 300, 300, device="cpu")
    out, lse = ours.flex_attention(q, k, v, score_mod, mask, enable_gqa=True, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), (q, k, v, table), (dout, dlse))
    with torch.no_grad():
        grads = reference.attention_backward(
            *(t.transpose(1, 2) for t in (dout, q, k, v)),
            mask_mod=MASKS["documents"], score_mod=score_mod, captured=(table,), dlse=dlse,
        )  # fmt: skip
    exact = (*(t.transpose(1, 2) for t in grads[:3]), *grads.captured)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_keys_of_one_batch_entry():
    q, k, v = tensors(kv_heads=4)
    mask = ours.create_block_mask(MASKS["window"], 2, 4, 300, 300, device="cpu")
    with torch.no_grad():
        exact = theirs.flex_attention(q, k[:1], v[:1], block_mask=mask)
    torch.testing.assert_close(ours.flex_attention(q, k[:1], v[:1], block_mask=mask), exact)


def test_autocast_and_narrow_keys():
    q, k, v = tensors(kv_heads=4)
    for is_on, keys, values in (
        (True, k, v.bfloat16()), (True, k, v), (False, k, v.bfloat16()), (False, k.half(), v.bfloat16())
    ):  # fmt: skip
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            exact = theirs.flex_attention(q, keys, values)
            found = ours.flex_attention(q, keys, values)
        torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)
    narrow = v.bfloat16().requires_grad_()
    ours.flex_attention(q, k, narrow).sum().backward()
    assert narrow.grad.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="dtype"):
        ours.flex_attention(q.bfloat16(), k, v)


def test_long_masks_take_no_square_of_memory(monkeypatch):
    """Of 2^20 x 2^20 elements, a few tiles are looked at together."""
    looked = []
    elements = tile_map._elements
    monkeypatch.setattr(
        tile_map, "_elements", lambda f, b, r: looked.append(r.i[0].numel()) or elements(f, b, r)
    )
    mask = ours.create_block_mask(
        lambda b, h, i, j: (i % 1000 <= j) & (j <= i),
        None,
        None,
        1 << 20,
        1 << 20,
        device="cpu",
        BLOCK_SIZE=4096,
    )
    assert looked and max(looked) * 4096 < 1 << 26 and mask.shape == (1, 1, 1 << 20, 1 << 20)


def block_mask(batch, seqlen):
    return ours.create_block_mask(MASKS["causal"], batch, 1, seqlen, seqlen, device="cpu")


@pytest.mark.parametrize("has_lse", [False, True])
def test_largest_scores(has_lse):
    q, k, v = tensors()
    mask = ours.create_block_mask(lambda b, h, i, j: j < i, None, None, q.shape[2], k.shape[2], device="cpu")
    request = ours.AuxRequest(lse=has_lse, max_scores=True)
    out, aux = ours.flex_attention(
        q.requires_grad_(), k, v, lambda s, b, h, i, j: 2 * s + i, mask, enable_gqa=True, return_aux=request
    )
    s = 2 * q.detach() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    expected = (s + i).masked_fill(j >= i, -torch.inf).amax(-1)
    torch.testing.assert_close(aux.max_scores, expected, check_dtype=False)
    assert (aux.lse is not None) == has_lse and not aux.max_scores.requires_grad
    out.sum().backward()
    assert q.grad.isfinite().all()


def test_picture():
    picture = ours.create_block_mask(MASKS["causal"], 2, 4, 384, 384, device="cpu")._repr_html_()
    assert picture.count("<svg") == 4 and "33% empty" in picture and "and 4 more" in picture
    assert picture.count('fill-opacity="0.50"') == 4 * 3 and picture.count('fill-opacity="1.00"') == 4 * 3


@pytest.mark.parametrize("asked", [None, ours.AuxRequest(max_scores=True)])
@pytest.mark.parametrize("by_head", [True, False])
def test_out_has_the_memory_order_of_query(by_head, asked):
    q = torch.randn(2, 3, 40, 16)
    q = q if by_head else q.transpose(1, 2).contiguous().transpose(1, 2)
    for options in ({}, {"score_mod": SCORES["softcap"]}):
        found = ours.flex_attention(q, q, q, return_aux=asked, **options)
        assert (found if asked is None else found[0]).stride() == q.stride()


def test_a_mask_of_one_block_for_any_lengths():
    q, k, v = tensors(kv_heads=4)
    mask = theirs._create_empty_block_mask(q, k)
    torch.testing.assert_close(ours.flex_attention(q, k, v, block_mask=mask), ours.flex_attention(q, k, v))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block_mask": MASKS["causal"]}, TypeError, "create_block_mask"),
        ({"block_mask": block_mask(1, 64)}, ValueError, "lengths"),
        ({"block_mask": block_mask(3, 300)}, ValueError, "batch"),
        ({"block_mask": block_mask(2, 64)[0]}, ValueError, "a slice"),
        ({"enable_gqa": False}, ValueError, "enable_gqa=True"),
        ({"return_aux": True}, TypeError, "AuxRequest"),
        ({"return_aux": ours.AuxRequest(lse=True), "return_lse": True}, ValueError, "return_lse"),
        ({"kernel_options": 3}, TypeError, "kernel_options"),
    ],
)  # fmt: skip
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        ours.flex_attention(*tensors(), **({"enable_gqa": True} | options))


def test_names_are_pytorchs():
    assert set(theirs.__all__) == set(ours.__all__) and all(hasattr(ours, name) for name in ours.__all__)


def test_sizes_may_be_numpys_or_tensors():
    found = ours.create_block_mask(
        MASKS["window"], 2, np.int32(3), np.int64(381), torch.tensor(381), "cpu", np.int64(64)
    )
    exact = ours.create_block_mask(MASKS["window"], 2, 3, 381, 381, "cpu", 64)
    assert torch.equal(found.to_dense(), exact.to_dense()) and found.shape == exact.shape
    assert all(type(n) is int for n in (*found.shape, *found.BLOCK_SIZE))


@pytest.mark.parametrize("place", [40, 63])
def test_a_wrong_index_raises_as_in_the_call(place):
    """Beside keys that are hidden for certain, and keys that are visible; not where others hide the key."""
    keep, places = torch.ones(40, dtype=torch.bool), torch.arange(64)
    keep[3], places[40:] = False, 0
    places[place] = 40
    with pytest.raises(
        IndexError, match=r"index 40 in dimension 0 .*\(40,\) is out of range \(line .*keep\["
    ):
        ours.create_block_mask(lambda b, h, i, j: keep[places[j]], None, None, 64, 64, "cpu", 64)
    mask = ours.create_block_mask(
        lambda b, h, i, j: (j != place) & keep[places[j]], None, None, 64, 64, "cpu", 32
    )
    assert mask.sparsity() == 0


def test_bad_arguments_of_block_masks():
    for sizes in ((None, None, 0, 8), (None, True, 8, 8), (None, None, 8, 8.0)):
        with pytest.raises(ValueError, match="at least 1"):
            ours.create_block_mask(MASKS["causal"], *sizes, device="cpu")
    with pytest.raises(NotImplementedError, match="compute_dq_write_order"):
        ours.create_block_mask(MASKS["causal"], 1, 1, 8, 8, device="cpu", compute_dq_write_order=True)
    for wrong in (None, "causal"):  # None is a function that is not given in a call, and wrong here
        with pytest.raises(TypeError, match=f"mask_mod={wrong!r} must be a function of .b, h, q_idx, kv_idx"):
            ours.create_block_mask(wrong, None, None, 8, 8, device="cpu")
