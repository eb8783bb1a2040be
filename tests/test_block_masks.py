"""`block_mask=`: a BlockMask of PyTorch's or of ours in tilewise's own functions."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as theirs

import tilewise
from tilewise import flex_attention as ours, reference

N = 150
torch.manual_seed(0)
DOCUMENTS = (torch.rand(N) < 1 / 40).cumsum(0)


def documents(b, h, i, j):
    return (DOCUMENTS[i] == DOCUMENTS[j]) & ((i - j).abs() <= 20 * (h + 1) + b)


def odd(b, h, i, j):
    return (i + j) % 3 != 1


def shifted(s, b, h, i, j):
    return s - 0.05 * (i - j).abs() * (h + 1)


def tensors(*lead, heads=(4, 2, 2)):
    return [torch.randn(*lead, h, 16, dtype=torch.double) for h in heads]


def close(found, exact):
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("module", [theirs, ours], ids=["torch", "tilewise"])
@pytest.mark.parametrize("backend", ["llvm", "tiled"])
def test_with_functions_and_options(module, backend):
    """Gradients too; a mask function that comes with it hides more."""
    mask = module.create_block_mask(documents, 2, 4, N, N, device="cpu", BLOCK_SIZE=32)
    leaves = [t.requires_grad_() for t in tensors(2, N)]
    options = {"score_mod": shifted, "sinks": torch.randn(4).double(), "window": (90, 60), "softcap": 9.0}
    for more in (None, odd):
        own = {"mask_mod": documents if more is None else ours.and_masks(documents, odd)}
        out, lse = tilewise.attention(
            *leaves, block_mask=mask, mask_mod=more, return_lse=True, backend=backend, **options
        )
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        with torch.no_grad():
            exact = reference.attention(*leaves, **own, **options)
            grads = reference.attention_backward(dout, *leaves, dlse=dlse, **own, **options)
        for a, b in zip((out, lse, *found), (*exact, *grads[:3]), strict=True):
            close(a, b)


def test_blocks_say_more_than_the_function():
    """Blocks that somebody has chosen by hand, with 2 queries' less than a block at the end."""
    counts = torch.tensor([[[1, 2, 1]]], dtype=torch.int32)
    order = torch.tensor([[[[1, 0, 2], [2, 0, 1], [0, 1, 2]]]], dtype=torch.int32)
    mask = theirs.BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=50, mask_mod=odd, seq_lengths=(148, N))
    visible = torch.zeros(3, 3, dtype=torch.bool)
    visible[[0, 1, 1, 2], [1, 2, 0, 0]] = True
    i, j = torch.arange(148)[:, None], torch.arange(N)
    seen = visible[i // 50, j // 50] & odd(0, 0, i, j)
    q, k, v = tensors(1, N)
    q = q[:, :148]
    close(tilewise.attention(q, k, v, block_mask=mask), reference.attention(q, k, v, mask=seen)[0])


def test_layouts_transforms_and_second_derivatives():
    mask = theirs.create_block_mask(documents, None, 4, N, N, device="cpu", BLOCK_SIZE=32)
    q, k, v = tensors(1, N)
    exact = reference.attention(q, k, v, mask_mod=documents)[0]
    by_head = tilewise.attention(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=mask, layout="bhsd")
    close(by_head.transpose(1, 2), exact)
    two = torch.vmap(lambda x: tilewise.attention(x, k, v, block_mask=mask))(torch.stack([q, q]))
    close(two, torch.stack([exact, exact]))
    small = theirs.create_block_mask(odd, None, None, 5, 5, device="cpu", BLOCK_SIZE=2)
    leaves = [torch.randn(1, 5, 1, 3, dtype=torch.double, requires_grad=True) for _ in range(3)]

    def call(*leaves):
        return tilewise.attention(*leaves, block_mask=small)

    assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", ["llvm", "tiled"])
def test_packed_sequences(backend):
    """Positions count from each sequence's start; b is the sequence."""
    starts = torch.tensor([0, 60, 60, 140])
    q, k, v = tensors(140)
    exact = reference.attention(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, mask_mod=documents, score_mod=shifted
    )[0]
    mask = theirs.create_block_mask(documents, 3, 4, 90, 99, device="cpu", BLOCK_SIZE=16)
    for lengths in ((None, None), (80, 80)):
        found = tilewise.attention_varlen(
            q, k, v, starts, starts, *lengths, block_mask=mask, score_mod=shifted, backend=backend
        )
        close(found, exact)


def test_statistics_and_explain():
    mask = theirs.create_block_mask(documents, None, 4, N, N, device="cpu", BLOCK_SIZE=32)
    q, k, v = tensors(1, N)
    aux = tilewise.Aux(entropy=True)
    found = tilewise.attention_statistics(q, k, aux, block_mask=mask)
    close(found.entropy, reference.attention_statistics(q, k, aux, mask_mod=documents).entropy)
    assert tilewise.explain(q, k, v, block_mask=mask).backend == "llvm"


def of_size(batch, heads, seqlen_q, seqlen_k):
    return theirs.create_block_mask(odd, batch, heads, seqlen_q, seqlen_k, device="cpu")


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (odd, TypeError, "block_mask=.* must be None or a BlockMask, as create_block_mask makes"),
        (of_size(1, 1, N, 64), ValueError, r"lengths \(150, 64\), must be of \(150, 150\)"),
        (of_size(3, 1, N, N), ValueError, r"\(batch, heads\)=\(3, 1\), each must be 1 or .*: \(2, 4\)"),
        (of_size(1, 2, N, N), ValueError, r"\(batch, heads\)=\(1, 2\)"),
        (of_size(1, 1, N, N).to("meta"), ValueError, "block_mask is on meta, must be on cpu as query"),
    ],
)
def test_bad_masks(mask, error, message):
    with pytest.raises(error, match=message):
        tilewise.attention(*tensors(2, N), block_mask=mask)


def test_bad_masks_of_packed_sequences():
    starts = torch.tensor([0, 60, 140])
    with pytest.raises(ValueError, match=r"lengths \(79, 80\), must be of at least \(80, 80\)"):
        tilewise.attention_varlen(*tensors(140), starts, starts, block_mask=of_size(1, 1, 79, 80))
    with pytest.raises(TypeError, match="must take"):
        tilewise.attention(*tensors(2, N), block_mask=of_size(1, 1, N, N), mask_mod=lambda b, h: b)


def test_blocks_that_are_changed_in_place():
    mask = ours.create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    q = torch.randn(1, 64, 1, 8)
    assert tilewise.attention(q, q, q, block_mask=mask)[0, 32:48].all()
    mask.kv_num_blocks[..., 2] = mask.full_kv_num_blocks[..., 2] = 0
    out = tilewise.attention(q, q, q, block_mask=mask)[0]
    assert not out[32:48].any() and out[48:].all()
