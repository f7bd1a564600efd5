"""What happens to images between the data set and the model: crops, flips, mixtures, resizing, normalising."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gradus.data.collate import stack
from gradus.data.images import channel_stats
from gradus.errors import UserError
from gradus.recipe.schema import ImagesData


class Augment:
    """What happens to images between the data set and the model.

    All that is random is drawn a sample, in `prepare`, from the sample's own generator: offsets of the crop, the flip,
    and for mixup and cutmix the weight and the partner, which is any training image with a crop and flip of its own.
    `apply` then works on whole batches, on the device. So neither micro-batches nor workers change a pixel.

    Random crop after padding with black by `crop` pixels, and horizontal flip with probability 1/2; mixup (Zhang et al.
    2018): share ~ Beta(mixup, mixup), image = share · own + (1 - share) · partner; cutmix (Yun et al. 2019): a box of
    the partner, share = what is left of the own image; with both set, each sample takes one of them with probability
    1/2. Then resizing (bilinear, antialiased, shorter side to image_size, centre cut out), and (x / 255 - mean) / std.

    train: the data set that partners, and mean and std where not given, come from. Raises UserError when mean or std do
    not fit.
    """

    collate = staticmethod(stack)

    def __init__(self, config: ImagesData, image_size: int | None, train: Any):
        self.config, self.image_size, self.train = config, image_size, train
        n_channels = train[0]["image"].shape[0]
        for key in ("mean", "std"):
            values = getattr(config, key)
            if values is not None and len(values) != n_channels:
                raise UserError(f"data.{key} has {len(values)} values, but the images have {n_channels} channels")
        if config.std is not None and min(config.std) <= 0:
            raise UserError(f"data.std={config.std}: every value must be above 0")
        measured = (None, None) if config.mean and config.std else channel_stats(train)
        self.mean: list[float] = config.mean or measured[0]
        self.std: list[float] = config.std or measured[1]

    def prepare(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Add to a sample what is drawn for it in training."""
        c = self.config
        sample = {**sample, **self._draw(rng)}
        if not (c.mixup or c.cutmix):
            return sample
        partner = self.train[int(rng.integers(len(self.train)))]
        sample |= {f"other_{k}": v for k, v in {**partner, **self._draw(rng)}.items()}
        height, width = sample["image"].shape[1:]
        cut = bool(c.cutmix) and (not c.mixup or rng.random() < 0.5)
        alpha = c.cutmix if cut else c.mixup
        share = rng.beta(alpha, alpha)
        box = (0, 0, 0, 0)  # top, bottom, left, right
        if cut:
            side = math.sqrt(1 - share) / 2
            y, x = rng.integers(height), rng.integers(width)
            dy, dx = int(side * height), int(side * width)
            box = (max(y - dy, 0), min(y + dy, height), max(x - dx, 0), min(x + dx, width))
            share = 1 - (box[1] - box[0]) * (box[3] - box[2]) / (height * width)
        blend = 0.0 if cut else 1 - share  # the partner's weight outside the box
        return sample | {"share": np.float32(share), "blend": np.float32(blend), "box": np.array(box, dtype=np.int64)}

    def _draw(self, rng: np.random.Generator) -> dict[str, Any]:
        c = self.config
        drawn: dict[str, Any] = {}
        if c.crop:
            drawn["offset"] = rng.integers(0, 2 * c.crop + 1, size=2)
        if c.flip:
            drawn["flip"] = bool(rng.random() < 0.5)
        return drawn

    def apply(self, batch: dict[str, Any]) -> dict[str, Any]:
        """`image`, `label` and what `prepare` drew become `images` (batch, channels, image_size, image_size) float32
        and `labels` (batch,); when mixed also `other_labels` (batch,) and `share` (batch,), the weight of `labels`.
        Without draws (evaluation) images are only resized and normalised. Other keys stay."""
        batch = dict(batch)
        images = self._moved(batch, "").float()  # (batch, channels, height, width)
        done = {"labels": batch.pop("label")}
        if "box" in batch:
            top, bottom, left, right = (edge[:, None, None, None] for edge in batch.pop("box").unbind(1))
            y = torch.arange(images.shape[2], device=images.device)[:, None]
            x = torch.arange(images.shape[3], device=images.device)
            inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)  # (batch, 1, height, width)
            weight = torch.where(inside, 1.0, batch.pop("blend")[:, None, None, None])
            images = images + weight * (self._moved(batch, "other_").float() - images)
            done |= {"other_labels": batch.pop("other_label"), "share": batch.pop("share")}
        if self.image_size is not None:
            images = resize(images, self.image_size)
        return {**batch, "images": normalise(images, self.mean, self.std), **done}

    def _moved(self, batch: dict[str, Any], which: str) -> Tensor:
        images = batch.pop(which + "image")
        offset, flip = batch.pop(which + "offset", None), batch.pop(which + "flip", None)
        return images if offset is None and flip is None else crop_and_flip(images, offset, flip, self.config.crop)


def crop_and_flip(images: Tensor, offset: Tensor | None, flip: Tensor | None, pad: int) -> Tensor:
    """Pad with zeros by `pad` pixels, cut out the old size at each image's offset, mirror where flip says so.

    images (batch, channels, height, width); offset (batch, 2), (down, right) in 0 .. 2 pad; flip (batch,) bool.
    """
    batch, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device).expand(batch, -1)
    columns = torch.arange(width, device=images.device).expand(batch, -1)
    if flip is not None:
        columns = torch.where(flip[:, None], columns.flip(1), columns)
    if offset is not None:
        images = F.pad(images, (pad, pad, pad, pad))
        rows, columns = rows + offset[:, :1], columns + offset[:, 1:]
    one, channel = torch.arange(batch, device=images.device), torch.arange(channels, device=images.device)
    return images[one[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]]


def resize(images: Tensor, size: int) -> Tensor:
    """Scale the shorter side to `size` (bilinear, antialiased) and cut out the centre. images (batch, channels, height,
    width) float."""
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    sides = [size * side // min(height, width) for side in (height, width)]
    images = F.interpolate(images, sides, mode="bilinear", antialias=True)
    top, left = (images.shape[-2] - size) // 2, (images.shape[-1] - size) // 2
    return images[..., top : top + size, left : left + size]


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Values 0..255 → (x / 255 - mean) / std, float32, mean and std a channel. images (batch, channels, height,
    width)."""
    mean, std = (torch.tensor(v, dtype=torch.float32, device=images.device)[:, None, None] for v in (mean, std))
    return (images.float() / 255 - mean) / std
