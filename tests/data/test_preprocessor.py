"""What preprocessor_config.json says is done to pictures as transformers' own class does it, or refused by name."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
import torch
from image_parts import picture, random_images
from PIL import Image

from gradus.data.augment import normalise
from gradus.data.images import fit, read_image
from gradus.data.preprocessor import FILE, RESAMPLE, read
from gradus.errors import UserError
from gradus.recipe.schema import Preprocess

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


def weights(image_size=32, n_channels=3):
    return types.SimpleNamespace(image_size=image_size, n_channels=n_channels)


def theirs(processor, path) -> np.ndarray:
    return processor(Image.open(path).convert("RGB"), return_tensors="np")["pixel_values"][0]


@pytest.mark.parametrize("name", CASES)
def test_pixels_are_those_of_transformers(name, pictures, tmp_path):
    kind, settings = CASES[name]
    processor = getattr(pytest.importorskip("transformers"), f"{kind}ImageProcessorPil")(**MEAN | settings)
    processor.save_pretrained(tmp_path)
    size = 384 if name == "ConvNext of 384" else 32
    published = read(tmp_path / FILE, weights(size), size)
    level = 1 / 255 / min(published["std"])  # of 255, once it is normalised
    for path in pictures:
        image = fit(read_image(path, str(path), 3), size, published["preprocess"], str(path))
        ours = normalise(torch.tensor(image)[None], published["mean"], published["std"])[0].numpy()
        expected = theirs(processor, path)
        assert ours.shape == expected.shape == (3, size, size)
        assert np.abs(ours - expected).max() < 0.01 * level, path.name  # bit for bit before normalisation


@pytest.mark.parametrize("kind", ["ViT", "DeiT", "Beit", "Siglip", "CLIP", "Bit"])
def test_what_a_file_leaves_out_is_its_class_s_default(kind, tmp_path):
    """Of 224 pixels, as those classes have it; older versions named them otherwise."""
    processor = getattr(pytest.importorskip("transformers"), f"{kind}ImageProcessorPil")(**MEAN)
    path = tmp_path / "a.png"
    picture(random_images(1, 3, 9, 14)[0]).save(path)
    for name in ({"image_processor_type": f"{kind}ImageProcessorFast"}, {"feature_extractor_type": f"{kind}FeatureExtractor"}):
        (tmp_path / FILE).write_text(json.dumps(MEAN | name | {"do_convert_rgb": True, "do_pad": False, "pad_size": None}))
        published = read(tmp_path / FILE, weights(224), 224)
        image = fit(read_image(path, "x", 3), 224, published["preprocess"], "x")
        assert np.array_equal(processor(Image.open(path), do_normalize=False, do_rescale=False, return_tensors="np")["pixel_values"][0], image)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"image_processor_type": "MobileViTImageProcessor"}, "MobileViTImageProcessor is not supported; the image processors of ViT, DeiT"),
        ({"size": {"shortest_edge": 32, "longest_edge": 64}}, r"size=\{'shortest_edge': 32, 'longest_edge': 64\}: this field is not supported"),
        ({"size": {"height": 32}}, r"size=\{'height': 32\}"),
        ({"size": "large"}, "size='large'"),
        ({"do_pad": True, "pad_size": 40}, "do_pad=True: this field is not supported"),
        ({"do_flip_channel_order": True}, "do_flip_channel_order=True: this field is not supported"),
        ({"crop_pct": "no"}, "crop_pct='no': this field is not supported, or not with this value"),
        ({"resample": 6}, "resample=6: this field is not supported, or not with this value"),
        ({"do_center_crop": True, "crop_size": 28}, r"it crops images to 28 × 28 pixels, and the model reads 32 × 32"),
        ({"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 36}}, r"it crops images to 36 pixels, and the model reads 32 × 32"),
        ({"image_mean": [0.5]}, "image_mean and image_std need 3 numbers each"),
        ({"image_mean": None}, "image_mean and image_std need 3 numbers each"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std=.*not with this value"),
        ({"rescale_factor": 0}, "rescale_factor=0: this field is not supported, or not with this value"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_named(settings, says, tmp_path):
    (tmp_path / FILE).write_text(json.dumps({"size": SQUARE} | MEAN | settings))
    with pytest.raises(UserError, match=rf"{FILE}: {says}") as caught:
        read(tmp_path / FILE, weights(), 32)
    assert str(caught.value).endswith("Correct it, or set data.preprocess, data.mean and data.std in the recipe.")


def test_lengths_change_with_the_pixels_that_training_reads(tmp_path):
    """224 pixels cut out of 256 are 384 of 439."""
    for said, resize in (({"size": 224}, (384, 384)), ({"image_processor_type": "DeiTImageProcessor"}, (439, 439)), ({"image_processor_type": "BitImageProcessor", "size": 256}, 439)):
        (tmp_path / FILE).write_text(json.dumps(MEAN | said))
        assert read(tmp_path / FILE, weights(224), 384)["preprocess"].resize == resize


@pytest.mark.parametrize(
    "how, says",
    [
        (Preprocess(resize=32, center_crop=False), "a.png: 54 × 32 pixels after data.preprocess"),
        (Preprocess(resize=(24, 24), center_crop=False), "a.png: 24 × 24 pixels after data.preprocess"),
        (Preprocess(resize=24), "a.png: 40 × 24 pixels after data.preprocess"),  # no edge is added to what was scaled
        (Preprocess(center_crop=False), "a.png: 17 × 10 pixels after data.preprocess"),
    ],
)  # fmt: skip
def test_a_picture_of_another_size_than_the_model_reads_is_named(how, says):
    with pytest.raises(UserError, match=rf"^{says}.* and the model reads 32 × 32"):
        fit(random_images(1, 3, 10, 17)[0], 32, how, "a.png")


def test_a_picture_that_would_fill_memory_is_named():
    with pytest.raises(UserError, match=r"^a\.png: 60000 × 1 pixels are too narrow to be scaled"):
        fit(np.zeros((3, 1, 60_000), np.uint8), 224, Preprocess(resize=224), "a.png")
