"""Positions against their papers' formulas and transformers' code."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

from gradus.errors import UserError
from gradus.layers import (
    apply_rotary,
    interleaved_to_halves,
    relative_buckets,
    rotary_frequencies,
    rotary_table,
    sinusoidal,
)
from gradus.recipe.schema import RopeScaling


def test_sinusoidal_is_the_papers():
    table = sinusoidal(600, 10)
    assert table.shape == (600, 10) and table.dtype == torch.float32
    for position in (0, 1, 17, 599):
        for i in range(5):
            angle = position / 10_000 ** (2 * i / 10)
            assert table[position, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    halves = sinusoidal(600, 10, "halves")
    assert torch.equal(halves, torch.cat((table[:, 0::2], table[:, 1::2]), 1))


def test_sinusoidal_follows_the_device_and_refuses():
    with torch.device("meta"):
        assert sinusoidal(3, 4).device.type == "meta"
    assert sinusoidal(3, 4, device="meta").device.type == "meta"
    with pytest.raises(UserError, match="even d_model, not 7; use 8"):
        sinusoidal(3, 7)


SCALINGS = {
    "none": None,
    "llama 3.1": RopeScaling(),
    "llama 3.2": RopeScaling(factor=32.0),
    "short": RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, original_seq_len=64),
}


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_rotary_is_transformers(scaling):
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    if scaling is not None:
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": scaling.original_seq_len}
        rope |= {name: getattr(scaling, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(rotary_frequencies(128, 500_000.0, scaling), theirs.inv_freq, atol=0, rtol=1e-6)

    positions = torch.randint(0, 5000, (2, 9))
    q, k = torch.randn(2, 4, 9, 128), torch.randn(2, 2, 9, 128)
    cos, sin = rotary_table(positions[:, None], 128, 500_000.0, scaling)
    assert cos.shape == sin.shape == (2, 1, 9, 128)
    wanted = apply_rotary_pos_emb(q, k, *theirs(q, positions))
    for one, other in zip((apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)), wanted, strict=True):
        torch.testing.assert_close(one, other, atol=5e-3, rtol=0)  # positions near 5,000: fp32 angles differ by their own rounding
        assert (one - other).abs().mean() < 1e-4


def test_scaling_bends_only_long_waves():
    plain, bent = rotary_frequencies(128, 500_000.0), rotary_frequencies(128, 500_000.0, RopeScaling())
    wavelength = 2 * math.pi / plain
    torch.testing.assert_close(bent[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    torch.testing.assert_close(bent[wavelength > 8192], plain[wavelength > 8192] / 8)
    ratio = (plain / bent)[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(ratio) and (ratio > 1).all() and (ratio < 8).all() and (ratio.diff() > 0).all()


@settings(max_examples=30, derandomize=True)
@given(shift=st.integers(0, 50), i=st.integers(0, 20), j=st.integers(0, 20), half=st.integers(1, 6), seed=st.integers(0, 99))
def test_rotary_knows_only_distances(shift, i, j, half, seed):
    torch.manual_seed(seed)
    q, k = torch.randn(1, 1, 1, 2 * half), torch.randn(1, 1, 1, 2 * half)

    def at(x, position):
        return apply_rotary(x, *rotary_table(torch.tensor([position]), 2 * half, 100.0))

    def score(a, b):
        return (at(q, a) * at(k, b)).sum()

    torch.testing.assert_close(score(i, j), score(i + shift, j + shift), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(score(0, 0), (q * k).sum(), atol=1e-5, rtol=1e-5)


def test_rotary_in_half_precision():
    x = torch.randn(1, 2, 6, 8)
    table = rotary_table(torch.arange(4000, 4006), 8, 10_000.0)
    half = apply_rotary(x.bfloat16(), *table)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), apply_rotary(x.bfloat16().float(), *table).bfloat16().float(), atol=0, rtol=0)
    with pytest.raises(UserError, match=r"even head size \(d_model / n_heads\), not 7"):
        rotary_frequencies(7, 100.0)


def interleaved_rotary(x, positions, theta):
    """Meta's way: neighbours as complex numbers (Su et al. 2021, equation 12)."""
    angle = positions[:, None] * theta ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def test_layouts_convert():
    """Queries and keys of an interleaved model, with permuted rows, score the same under our rotation."""
    n_heads, head_dim, seq, d_model = 3, 8, 5, 12
    x, positions = torch.randn(1, seq, d_model), torch.arange(seq)
    wq, wk, bias = torch.randn(n_heads * head_dim, d_model), torch.randn(n_heads * head_dim, d_model), torch.randn(n_heads * head_dim)

    def heads(weight, bias):
        return (x @ weight.T + bias).unflatten(-1, (n_heads, head_dim)).transpose(1, 2)

    theirs = [interleaved_rotary(heads(w, bias), positions, 10_000.0) for w in (wq, wk)]
    table = rotary_table(positions, head_dim, 10_000.0)
    ours = [apply_rotary(heads(interleaved_to_halves(w, n_heads), interleaved_to_halves(bias, n_heads)), *table) for w in (wq, wk)]
    torch.testing.assert_close(ours[0] @ ours[1].mT, theirs[0] @ theirs[1].mT, atol=1e-4, rtol=1e-4)
    assert interleaved_to_halves(torch.arange(8)[:, None], 1).flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("n_buckets, max_distance", [(32, 128), (8, 20), (16, 64)])
def test_relative_buckets_are_t5s(bidirectional, n_buckets, max_distance):
    query, key = torch.arange(40, 300), torch.arange(0, 310)
    wanted = T5Attention._relative_position_bucket(key[None, :] - query[:, None], bidirectional, n_buckets, max_distance)
    got = relative_buckets(query, key, bidirectional, n_buckets, max_distance)
    assert got.dtype == torch.long and torch.equal(got, wanted)
    assert got.min() == 0 and got.max() == n_buckets - 1
    batched = relative_buckets(query.view(2, 1, 130), key[None, None], bidirectional, n_buckets, max_distance)
    assert torch.equal(batched[1, 0], wanted[130:])
