"""Images as sequences of patches, or of what convolutions see."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.errors import UserError

How = Literal["convolution", "unfold", "rearrange"]


def extract(images: Tensor, patch_size: int, how: Literal["unfold", "rearrange"] = "rearrange") -> Tensor:
    """Cut images into patches, row by row.

    images: (batch, channels, height, width), both sides multiples of patch_size.
    Returns (batch, n_patches, channels · patch_size · patch_size): within a patch channel, then row, then column.
    how: two ways to the same; rearrange is a reshape.
    """
    batch, channels, height, width = images.shape
    p = patch_size
    if height % p or width % p:
        raise UserError(
            f"images of {height} × {width} pixels do not divide into patches of {p} × {p}; resize them or change "
            "patch_size"
        )
    if how == "unfold":
        return F.unfold(images, p, stride=p).transpose(1, 2)
    grid = images.reshape(batch, channels, height // p, p, width // p, p)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * p * p)


class Patches(nn.Module):
    """A linear embedding of each patch of an image (Dosovitskiy et al. 2021, equation 1), in one of three ways of one
    result and one parameter layout: weight (d_model, channels, patch_size, patch_size), bias (d_model,)."""

    def __init__(self, image_size: int, patch_size: int, n_channels: int, d_model: int, how: How = "convolution"):
        super().__init__()
        self.image_size, self.patch_size, self.how = image_size, patch_size, how
        self.n_patches = (image_size // patch_size) ** 2
        self.weight = nn.Parameter(torch.empty(d_model, n_channels, patch_size, patch_size))
        self.bias = nn.Parameter(torch.empty(d_model))
        bound = 1 / math.sqrt(self.weight[0].numel())  # as nn.Conv2d
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, n_patches, d_model). Raises UserError for images of another
        size."""
        check_size(images, self.weight.shape[1], self.image_size)
        if self.how == "convolution":
            return F.conv2d(images, self.weight, self.bias, stride=self.patch_size).flatten(2).transpose(1, 2)
        return F.linear(extract(images, self.patch_size, self.how), self.weight.flatten(1), self.bias)


class ConvolutionalStem(nn.Module):
    """Convolutions in place of the linear embedding; neighbouring tokens then see overlapping parts of the image.

    Each of log2(patch_size) convolutions of 3 × 3 is followed by ReLU and the maximum over 3 × 3 with stride 2 (Hassani
    et al. 2021, section 3); their widths double up to d_model (Xiao et al. 2021, section 3, with stride 2 and batch
    norm in place of the maximum). There are as many tokens as patches of that size. patch_size: a power of 2, at least
    2; d_model: a multiple of half of it.
    """

    def __init__(self, image_size: int, patch_size: int, n_channels: int, d_model: int):
        super().__init__()
        self.image_size, self.n_patches = image_size, (image_size // patch_size) ** 2
        n = patch_size.bit_length() - 1
        widths = (n_channels, *(d_model >> i for i in reversed(range(n))))  # ..., d_model / 4, d_model / 2, d_model
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, n_patches, d_model). Raises UserError for images of another
        size."""
        check_size(images, self.convolutions[0].in_channels, self.image_size)
        x = images.contiguous(memory_format=torch.channels_last)  # faster on a CPU, and tokens are then no copy
        for convolution in self.convolutions:
            x = convolution(x)  # (batch, width, side, side)
            x = F.relu(F.max_pool2d(x, 3, stride=2, padding=1))  # (batch, width, side / 2, side / 2); the two commute
        return x.flatten(2).transpose(1, 2)


def check_size(images: Tensor, n_channels: int, image_size: int) -> None:
    """Raises UserError unless images are (batch, n_channels, image_size, image_size)."""
    wanted = (n_channels, image_size, image_size)
    if tuple(images.shape[1:]) != wanted:
        size, wanted = (" × ".join(map(str, shape)) for shape in (images.shape[1:], wanted))
        raise UserError(
            f"images of {size} (channels × height × width) given to a model for {wanted}; resize them or change "
            "model.image_size"
        )
