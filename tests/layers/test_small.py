"""Frozen weights stored small: their values, their error, and the product that computes them anew."""

from __future__ import annotations

import contextlib
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradus.layers import LoRALinear, small
from gradus.layers.small import (
    BLOCK,
    dequantize_int8,
    dequantize_nf4,
    nf4_values,
    quantize_int8,
    quantize_nf4,
)

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 40))


def drawn(shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def made(kind: str, out: int = 12, into: int = 20, rank: int | None = None, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """(a Linear, the same stored small)."""
    torch.manual_seed(0)
    linear = nn.Linear(into, out, bias=bias).requires_grad_(False)
    if rank:
        linear = LoRALinear(linear, rank, 0.5)
        nn.init.normal_(linear.b.weight)
    stored = small(linear, kind)
    for name, value in stored.stored(linear.weight).items():
        setattr(stored, name, value)
    return linear, stored


@pytest.mark.parametrize(("into", "out"), [(400, 25), (25, 400)])
def test_an_adapter_begins_as_a_linear_of_pytorch_that_reads_the_same(into, out):
    adapter = LoRALinear(nn.Linear(into, out), 64, 0.5)
    for weight, draw in adapter.initialisation():
        draw(weight.data, torch.Generator().manual_seed(0))
    theirs = float(nn.Linear(into, 64).weight.detach().abs().max())
    assert float(adapter.a.weight.detach().abs().max()) == pytest.approx(theirs, rel=0.01) and not adapter.b.weight.any()


def test_nf4_values_are_quantiles_of_the_normal_distribution():
    outermost = (1 - 1 / 32 + 1 - 1 / 30) / 2
    sides = [[NormalDist().inv_cdf(outermost - (outermost - 0.5) * i / n) for i in range(n)] for n in (7, 8)]
    values = sorted([-x for x in sides[0]] + [0.0] + sides[1])
    assert nf4_values().tolist() == pytest.approx([x / max(values) for x in values], abs=1e-7)
    # Dettmers et al. 2023, appendix E
    assert nf4_values()[[1, 6, 8, 14]].tolist() == pytest.approx([-0.6961928009986877, -0.09105003625154495, 0.07958029955625534, 0.7229568362236023], abs=1e-6)


@pytest.mark.parametrize("shape", [(64, 64), (30, 50), (7, 9), (1, 1), (128, 100)])
def test_nf4_is_that_of_bitsandbytes(shape):
    theirs = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is no dependency: it is compared with where it is installed")
    weight = drawn(shape, 1)
    codes, absmax = quantize_nf4(weight)
    packed, state = theirs.quantize_4bit(weight, quant_type="nf4", blocksize=BLOCK, compress_statistics=False)
    assert torch.equal(codes.flatten()[: weight.numel() // 2], packed.flatten()[: weight.numel() // 2]) and torch.equal(absmax, state.absmax)
    torch.testing.assert_close(dequantize_nf4(codes, absmax, shape), theirs.dequantize_4bit(packed, state), atol=1e-7, rtol=1e-6)


@given(SHAPES, st.integers(0, 1000), st.sampled_from([0.0, 1e-20, 1.0, 1e20]))
def test_nf4_is_within_half_a_step_and_stable(shape, seed, scale):
    weight = drawn(shape, seed) * scale
    codes, absmax = quantize_nf4(weight)
    assert codes.shape == (-(-weight.numel() // BLOCK), BLOCK // 2) and codes.dtype == torch.uint8
    back = dequantize_nf4(codes, absmax, shape)
    each = absmax.repeat_interleave(BLOCK)[: weight.numel()].view(shape)
    widest = nf4_values().diff().max() / 2
    assert back.shape == weight.shape and ((back - weight).abs() <= each * widest * (1 + 1e-5)).all()
    again, same = quantize_nf4(back)
    assert torch.equal(again, codes) and torch.equal(same, absmax)


@given(SHAPES, st.integers(0, 1000))
def test_int8_is_within_half_a_step_and_stable(shape, seed):
    weight = drawn(shape, seed)
    codes, scale = quantize_int8(weight)
    back = dequantize_int8(codes, scale)
    assert ((back - weight).abs() <= scale[:, None] * 0.5 * (1 + 1e-4)).all()
    assert torch.equal(quantize_int8(back)[0], codes)


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_outputs_and_gradients_are_those_of_the_dequantized_weight(kind, rank, half):
    plain, stored = made(kind, rank=rank)
    plain.weight.data = stored.weight
    found = []
    for linear in (plain, stored):
        linear.zero_grad()
        x = drawn((5, 20), 2).requires_grad_()
        with torch.autocast("cpu", half) if half else contextlib.nullcontext():
            y = linear(x)
        y.float().square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in linear.parameters() if p.requires_grad)])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, **({"atol": 0.02, "rtol": 0.05} if half else {"atol": 1e-6, "rtol": 1e-5}))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_what_is_kept_for_the_backward_pass_is_what_is_stored(kind):
    _, stored = made(kind)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        stored(drawn((5, 20), 2).requires_grad_())
    assert {t.data_ptr() for t in kept} == {b.data_ptr() for b in stored.buffers()}


def test_a_checked_gradient():
    """Of the input, against finite differences."""
    _, stored = made("int8")
    stored.double()
    assert torch.autograd.gradcheck(stored, drawn((3, 20), 4).double().requires_grad_())
    assert stored.codes.dtype == torch.int8 and not stored.state_dict().keys() & {"codes", "scales", "weight"}
    weight = stored.weight
    torch.testing.assert_close(stored(torch.eye(20).double()) - stored.bias, weight.T.double() @ torch.eye(12).double(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(F.linear(torch.ones(20), weight), weight.sum(1))
