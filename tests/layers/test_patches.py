"""Patches three ways, and a convolutional stem."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradus.errors import UserError
from gradus.layers import ConvolutionalStem, Patches, extract
from gradus.layers.patches import How


@settings(max_examples=25, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_extract_cuts_row_by_row(batch, channels, rows, columns, p, seed):
    torch.manual_seed(seed)
    images = torch.randn(batch, channels, rows * p, columns * p)
    for how in ("unfold", "rearrange"):
        patches = extract(images, p, how)
        assert patches.shape == (batch, rows * columns, channels * p * p)
        for i in range(rows):
            for j in range(columns):
                square = images[:, :, i * p : (i + 1) * p, j * p : (j + 1) * p]
                torch.testing.assert_close(patches[:, i * columns + j], square.flatten(1), atol=1e-6, rtol=0)


def test_three_ways_give_the_same_tokens_and_gradients():
    images = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    reference = nn.Conv2d(3, 10, 4, stride=4, dtype=torch.float64)
    expected = reference(images).flatten(2).transpose(1, 2)
    probe = torch.randn_like(expected)
    (expected * probe).sum().backward()
    for how in get_args(How):
        patches = Patches(12, 4, 3, 10, how).double()
        patches.load_state_dict(reference.state_dict())
        tokens = patches(images)
        assert tokens.shape == (2, patches.n_patches, 10) == (2, 9, 10)
        torch.testing.assert_close(tokens, expected, atol=1e-5, rtol=1e-5)
        (tokens * probe).sum().backward()
        torch.testing.assert_close(patches.weight.grad, reference.weight.grad, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(patches.bias.grad, reference.bias.grad, atol=1e-4, rtol=1e-4)


def test_wrong_sizes_are_named():
    with pytest.raises(UserError, match=r"images of 10 × 12 pixels do not divide into patches of 4 × 4"):
        extract(torch.zeros(1, 3, 10, 12), 4)
    for made in (Patches(12, 4, 3, 10), ConvolutionalStem(12, 4, 3, 10)):
        with pytest.raises(UserError, match=r"images of 1 × 12 × 12 .* given to a model for 3 × 12 × 12"):
            made(torch.zeros(2, 1, 12, 12))


@pytest.mark.parametrize(("patch_size", "widths"), [(2, [3, 16]), (4, [3, 8, 16]), (8, [3, 4, 8, 16])])
def test_a_stem_is_convolutions_relu_and_max_pooling(patch_size, widths):
    """Against torch's modules in the paper's order, ReLU before the maximum: tokens and gradients, in float64."""
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    theirs = nn.Sequential(*layers, nn.Flatten(2)).double()
    ours = ConvolutionalStem(24, patch_size, 3, 16).double()
    convolutions = [layer for layer in theirs if isinstance(layer, nn.Conv2d)]
    for mine, other in zip(ours.convolutions, convolutions, strict=True):
        mine.load_state_dict(other.state_dict())
    images = torch.randn(2, 3, 24, 24, dtype=torch.float64)
    tokens, expected = ours(images), theirs(images).transpose(1, 2)
    assert tokens.shape == (2, ours.n_patches, 16) and ours.n_patches == (24 // patch_size) ** 2
    torch.testing.assert_close(tokens, expected)
    probe = torch.randn_like(expected)
    (tokens * probe).sum().backward()
    (expected * probe).sum().backward()
    for mine, other in zip(ours.convolutions, convolutions, strict=True):
        torch.testing.assert_close(mine.weight.grad, other.weight.grad)
        torch.testing.assert_close(mine.bias.grad, other.bias.grad)
