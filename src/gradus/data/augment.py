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

    All that is random is drawn a sample, in `prepare`, from the sample's own generator: the crop and the flip, and for
    mixup and cutmix the weight and the partner, which is any training image with a crop and flip of its own. `apply`
    then works on whole batches, on the device. So neither micro-batches nor workers change a pixel.

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
        """A sample as it is drawn for training: cropped and mirrored, with what it is mixed with."""
        c = self.config
        sample = {**sample, "image": self._moved(sample["image"], rng)}
        if not (c.mixup or c.cutmix):
            return sample
        partner = self.train[int(rng.integers(len(self.train)))]
        sample |= {"other_image": self._moved(partner["image"], rng), "other_label": partner["label"]}
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

    def _moved(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """An image (channels, height, width), cropped and mirrored at random."""
        if pad := self.config.crop:
            (down, right), (channels, height, width) = rng.integers(0, 2 * pad + 1, size=2), image.shape
            padded = np.zeros((channels, height + 2 * pad, width + 2 * pad), image.dtype)  # np.pad is far slower
            padded[:, pad:-pad, pad:-pad] = image
            image = padded[:, down : down + height, right : right + width]
        return image[..., ::-1] if self.config.flip and rng.random() < 0.5 else image

    def apply(self, batch: dict[str, Any]) -> dict[str, Any]:
        """`image`, `label` and what `prepare` drew become `images` (batch, channels, image_size, image_size) float32
        and `labels` (batch,); when mixed also `other_labels` (batch,) and `share` (batch,), the weight of `labels`.
        Without draws (evaluation) images are only resized and normalised. Other keys stay."""
        batch = dict(batch)
        images = batch.pop("image").float()  # (batch, channels, height, width)
        done = {"labels": batch.pop("label")}
        if "box" in batch:
            top, bottom, left, right = (edge[:, None, None, None] for edge in batch.pop("box").unbind(1))
            y = torch.arange(images.shape[2], device=images.device)[:, None]
            x = torch.arange(images.shape[3], device=images.device)
            inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)  # (batch, 1, height, width)
            weight = torch.where(inside, 1.0, batch.pop("blend")[:, None, None, None])
            images = images + weight * (batch.pop("other_image").float() - images)
            done |= {"other_labels": batch.pop("other_label"), "share": batch.pop("share")}
        if self.image_size is not None:
            images = resize(images, self.image_size)
        return {**batch, "images": normalise(images, self.mean, self.std), **done}


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
