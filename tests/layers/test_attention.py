"""The attention module against torch.nn.MultiheadAttention; its cache; feed-forward networks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradus.errors import UserError
from gradus.layers import KERNELS, Attention, Cache, FeedForward, GatedFeedForward, get_kernel, rotary_table

BATCH, SEQ, D_MODEL, HEADS = 3, 7, 24, 4


def twins(bias: bool = True) -> tuple[Attention, nn.MultiheadAttention]:
    """Ours and PyTorch's with the same weights, in float64: no processor's sums are compared."""
    ours = Attention(D_MODEL, HEADS, bias=bias).double()
    theirs = nn.MultiheadAttention(D_MODEL, HEADS, bias=bias, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for kind in ("weight", "bias") if bias else ("weight",):
            parts = [getattr(layer, kind).uniform_(-0.5, 0.5) for layer in (ours.to_q, ours.to_k, ours.to_v)]
            getattr(theirs, f"in_proj_{kind}").copy_(torch.cat(parts))
            getattr(theirs.out_proj, kind).copy_(getattr(ours.to_out, kind).uniform_(-0.5, 0.5))
    return ours, theirs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("case", ["self", "cross", "causal", "padding", "cross padding"])
def test_equals_torch(case, name, bias):
    ours, theirs = twins(bias)
    ours.kernel = get_kernel(name, 3)
    wide = {"dtype": torch.float64, "requires_grad": True}
    x = torch.randn(BATCH, SEQ, D_MODEL, **wide)
    context = torch.randn(BATCH, 5, D_MODEL, **wide) if "cross" in case else x
    keep = torch.arange(context.shape[1]) < torch.tensor([5, 3, 1])[:, None] if "padding" in case else None
    triangle = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1) if case == "causal" else None
    expected, _ = theirs(x, context, context, key_padding_mask=None if keep is None else ~keep, attn_mask=triangle, need_weights=False)
    out = ours(x, None if context is x else context, mask=None if keep is None else keep[:, None, None], causal=case == "causal")
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)

    probe = torch.randn_like(out)
    inputs = [x] if context is x else [x, context]
    got = torch.autograd.grad((out * probe).sum(), [*inputs, ours.to_q.weight, ours.to_k.weight, ours.to_v.weight, ours.to_out.weight])
    wanted = torch.autograd.grad((expected * probe).sum(), [*inputs, theirs.in_proj_weight, theirs.out_proj.weight])
    got = [*got[: len(inputs)], torch.cat(got[-4:-1]), got[-1]]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_dropout_only_in_training():
    attention = Attention(D_MODEL, HEADS, dropout=0.5)
    x = torch.randn(BATCH, SEQ, D_MODEL)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


def test_sizes():
    grouped = Attention(D_MODEL, HEADS, n_kv_heads=2, head_dim=10, bias=True, out_bias=False)
    assert {name: tuple(p.shape) for name, p in grouped.named_parameters()} == {
        "to_q.weight": (40, 24), "to_q.bias": (40,), "to_k.weight": (20, 24), "to_k.bias": (20,),
        "to_v.weight": (20, 24), "to_v.bias": (20,), "to_out.weight": (24, 40),
    }  # fmt: skip
    assert grouped(torch.randn(2, 3, D_MODEL)).shape == (2, 3, D_MODEL)
    with pytest.raises(AssertionError, match="n_kv_heads=3 does not divide n_heads=4"):
        Attention(D_MODEL, HEADS, n_kv_heads=3)


@pytest.mark.filterwarnings("error")
def test_norms_of_heads_under_autocast():
    """Each head by itself, before its rotation; of bf16 products in fp32, and given back in bf16, without the slow way that PyTorch warns of."""
    attention = Attention(D_MODEL, HEADS, n_kv_heads=2, head_dim=10, head_norm=lambda head_dim: nn.RMSNorm(head_dim, eps=1e-6))
    assert attention.q_norm.weight.shape == attention.k_norm.weight.shape == (10,)
    seen = {}
    attention.kernel = lambda q, k, v, **_: (seen.update(q=q, k=k, v=v) or q, None)
    x = torch.randn(BATCH, SEQ, D_MODEL)
    with torch.no_grad():
        attention.q_norm.weight.uniform_(0.5, 2.0)
        attention.k_norm.weight.uniform_(0.5, 2.0)
        for bf16 in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                attention(x, rotary=rotary_table(torch.zeros(1, SEQ), 10, 1e4))  # at position 0 nothing turns
            for name, linear, norm in (("q", attention.to_q, attention.q_norm), ("k", attention.to_k, attention.k_norm)):
                heads = linear(x).view(BATCH, SEQ, -1, 10).transpose(1, 2)
                wanted = heads / heads.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * norm.weight
                torch.testing.assert_close(seen[name].float(), wanted, atol=0.05 if bf16 else 1e-5, rtol=0.05 if bf16 else 1e-5)
            assert {x.dtype for x in seen.values()} == {torch.bfloat16 if bf16 else torch.float32}


@settings(max_examples=25, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 4), st.sampled_from(sorted(KERNELS)), st.integers(0, 99))
def test_cache_equals_no_cache_for_ragged_rows(lengths, new, name, seed):
    """Prompts padded on the right, then one token a row at a time, against each whole row alone without a cache."""
    torch.manual_seed(seed)
    batch, longest = len(lengths), max(lengths)
    attention = Attention(D_MODEL, HEADS, n_kv_heads=2, bias=False).requires_grad_(False)
    attention.kernel = get_kernel(name, 2)
    rows = [torch.randn(n + new, D_MODEL) for n in lengths]

    def rotary(positions):
        return rotary_table(positions[:, None], attention.head_dim, 100.0)

    cache = Cache(1, batch, 2, attention.head_dim, longest + new)
    start = torch.arange(longest).expand(batch, -1)
    prompt = torch.stack([F.pad(row[:n], (0, 0, 0, longest - n), value=9.0) for row, n in zip(rows, lengths, strict=True)])
    first = attention(prompt, mask=cache.mask(start), rotary=rotary(start), cache=cache.layers[0], positions=start)
    outs = [[first[i, :n]] for i, n in enumerate(lengths)]
    for step in range(new):
        places = torch.tensor([[n + step] for n in lengths])
        token = torch.stack([row[n + step] for row, n in zip(rows, lengths, strict=True)])[:, None]
        out = attention(token, mask=cache.mask(places), rotary=rotary(places), cache=cache.layers[0], positions=places)
        for i in range(batch):
            outs[i].append(out[i])
    assert cache.length == longest + new
    for row, out in zip(rows, outs, strict=True):
        alone = attention(row[None], causal=True, rotary=rotary(torch.arange(len(row))[None]))[0]
        torch.testing.assert_close(torch.cat(out), alone, atol=1e-5, rtol=1e-4)


def test_cross_keys_are_projected_once():
    attention = Attention(D_MODEL, HEADS)
    layer = Cache(1, BATCH, HEADS, attention.head_dim, 4).layers[0]
    x, context = torch.randn(BATCH, 2, D_MODEL), torch.randn(BATCH, SEQ, D_MODEL)
    first = attention(x, context, cache=layer)
    torch.testing.assert_close(first, attention(x, context))
    torch.testing.assert_close(attention(x, torch.zeros_like(context), cache=layer), first)
    assert layer.cross[0].shape == (BATCH, HEADS, SEQ, attention.head_dim)


def test_cache_says_what_does_not_fit():
    cache = Cache(1, 2, 1, 4, max_len=5)
    with pytest.raises(UserError, match="holds 5 tokens per row, not 0 tokens per row and 6 more"):
        cache.mask(torch.arange(6).expand(2, -1))
    with pytest.raises(UserError, match="batch of 2, not 3"):
        cache.mask(torch.zeros(3, 1, dtype=torch.long))
    first = cache.mask(torch.tensor([[0, 1, 2], [0, 1, 2]]))
    assert first[0, 0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert cache.next_positions(2, 2).tolist() == [[3, 4], [3, 4]]
    assert cache.mask(torch.tensor([[1], [3]])).tolist() == [[[[True, True, False, False]]], [[[True, True, True, True]]]]
    cache.fix()
    for _ in range(3):
        assert cache.mask(torch.tensor([[1], [3]])).shape == (2, 1, 1, 5), "shapes stay"


def test_rows_of_a_cache_change_places():
    cache = Cache(2, 3, 1, 4, max_len=5)
    cache.mask(torch.arange(2).expand(3, -1))
    kept = torch.randn(3, 1, 5, 4)
    for layer in cache.layers:
        layer.k.copy_(kept), layer.v.copy_(-kept)
    cache.reorder(torch.tensor([2, 2, 0]))
    for layer in cache.layers:
        assert torch.equal(layer.k[:, :, :2], kept[[2, 2, 0], :, :2])
        assert torch.equal(layer.v[:, :, :2], -kept[[2, 2, 0], :, :2])


@pytest.mark.parametrize("name, function", [("relu", nn.ReLU()), ("gelu", nn.GELU()), ("gelu_tanh", nn.GELU("tanh")), ("silu", nn.SiLU())])
def test_feed_forward(name, function):
    x = torch.randn(2, 3, 8)
    plain = FeedForward(8, 20, name)
    torch.testing.assert_close(plain(x), function(x @ plain.up.weight.T + plain.up.bias) @ plain.down.weight.T + plain.down.bias)
    gated = GatedFeedForward(8, 20, name)
    torch.testing.assert_close(gated(x), (function(x @ gated.gate.weight.T) * (x @ gated.up.weight.T)) @ gated.down.weight.T)
    assert gated.up.bias is None
