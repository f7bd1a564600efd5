"""What preprocessor_config.json says is done to pictures as transformers' own class does it, or refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from image_parts import picture, random_images
from PIL import Image

from gradus.data.augment import normalise
from gradus.data.images import fit, read_image
from gradus.data.preprocessor import CLASSES, FILE, RESAMPLE, read
from gradus.errors import UserError

SQUARE, SHORTER, CUT = {"height": 32, "width": 32}, {"shortest_edge": 32}, {"crop_size": {"height": 32, "width": 32}}
MEAN = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.25, 0.3]}
CASES = {
    **{f"squeezed, {name}": ("ViT", {"size": SQUARE, "resample": number}) for number, name in enumerate(RESAMPLE)},
    **{f"cut, {name}": ("CLIP", {"size": SHORTER, "resample": number, **CUT}) for number, name in enumerate(RESAMPLE)},
    "a number is a square's side": ("ViT", {"size": 32}),
    "a number is the shorter side": ("CLIP", {"size": 32, "crop_size": 32}),
    "two numbers": ("Beit", {"size": [32, 32]}),
    "larger, then cut": ("DeiT", {"size": {"height": 36, "width": 40}, **CUT}),
    "the shorter side larger, then cut": ("Bit", {"size": {"shortest_edge": 37}, **CUT}),
    "Siglip": ("Siglip", {"size": SQUARE, "resample": 3}),
    "one mean for all": ("ViT", {"size": SQUARE, "image_mean": 0.5, "image_std": 0.25}),
    "no rescaling": ("ViT", {"size": SQUARE, "do_rescale": False, "image_mean": [127.5] * 3, "image_std": [60.0] * 3}),
    "another factor": ("ViT", {"size": SQUARE, "rescale_factor": 1 / 127.5}),
    "no normalisation": ("ViT", {"size": SQUARE, "do_normalize": False}),
    "not scaled, cut": ("CLIP", {"do_resize": False, **CUT}),
    "ConvNext": ("ConvNext", {"size": SHORTER}),
    "ConvNext, crop_pct": ("ConvNext", {"size": SHORTER, "crop_pct": 0.8, "resample": 2}),
    "ConvNext of 384": ("ConvNext", {"size": {"shortest_edge": 384}}),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Files of many kinds and shapes."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, (height, width) in {"wide": (40, 121), "tall": (97, 41), "small": (10, 14), "square": (32, 32)}.items():
        smooth = picture(random_images(1, 3, 5, 7)[0]).resize((width, height), Image.Resampling.BICUBIC)
        smooth.save(folder / f"{name}.png")
    noise = picture(random_images(1, 3, 50, 38)[0])
    for mode, kind in {"L": "png", "1": "png", "LA": "png", "P": "png", "RGBA": "png", "CMYK": "jpg", "RGB": "tif", "YCbCr": "jpg"}.items():
        noise.convert(mode).save(folder / f"{mode}.{kind}")
    noise.save(folder / "noise.webp")
    return sorted(folder.iterdir())


def theirs(processor, path) -> np.ndarray:
    return processor(Image.open(path).convert("RGB"), return_tensors="np")["pixel_values"][0]


def processor_of(kind, settings):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{kind}ImageProcessorPil", None) or getattr(transformers, f"{kind}ImageProcessor")


@pytest.mark.parametrize("name", CASES)
def test_pixels_are_those_of_transformers(name, pictures, tmp_path):
    kind, settings = CASES[name]
    processor = processor_of(kind, settings)(**MEAN | settings)
    processor.save_pretrained(tmp_path)
    size = 384 if name == "ConvNext of 384" else 32
    published = read(tmp_path / FILE, 3, size, size)
    level = 1 / 255 / min(published["std"])  # of 255, once it is normalised
    for path in pictures:
        image = fit(read_image(path, str(path), 3), size, published["preprocess"], str(path))
        ours = normalise(torch.tensor(image)[None], published["mean"], published["std"])[0].numpy()
        expected = theirs(processor, path)
        assert ours.shape == expected.shape == (3, size, size)
        assert np.abs(ours - expected).max() < 0.01 * level, path.name  # bit for bit before normalisation
