"""What happens to images between the data set and the model, by hand and as Pillow does it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from image_parts import noise, picture, png, random_images, write_parquet
from PIL import Image

from gradus.data.augment import Augment, resize
from gradus.data.images import open_images
from gradus.data.loader import Loader, Plan
from gradus.errors import UserError
from gradus.recipe.schema import ImagesData


def test_evaluation_only_normalises_and_resizes(tmp_path):
    data = noise(tmp_path)
    augment = Augment(ImagesData(crop=2, flip=True, mixup=0.5, mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7]), None, data)
    batch = augment.apply({**augment.collate([data[i] for i in range(4)]), "n": 4})
    expected = (data.images[:4] / 255 - np.array([0.1, 0.2, 0.3])[:, None, None]) / np.array([0.5, 0.6, 0.7])[:, None, None]
    np.testing.assert_allclose(batch["images"], expected, atol=1e-6)
    assert batch["images"].dtype == torch.float32 and batch["labels"].tolist() == [0, 1, 2, 0] and batch["n"] == 4
    assert set(batch) == {"images", "labels", "n"}
    measured = Augment(ImagesData(), None, data)
    all_of_it = measured.apply(measured.collate([data[i] for i in range(30)]))["images"]
    torch.testing.assert_close(all_of_it.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(all_of_it.var((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_resizing_is_pillows():
    for size, shape in ((20, (8, 8)), (5, (16, 16)), (6, (12, 12))):
        image = random_images(1, 3, *shape)[0]
        pillow = np.asarray(picture(image).resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        ours = resize(torch.from_numpy(image)[None].float(), size)[0].numpy()
        assert np.abs(ours - pillow).max() <= 1.0  # Pillow rounds to whole levels, twice
    wide = torch.arange(48.0).reshape(1, 1, 4, 12)
    assert torch.equal(resize(wide, 4), wide[..., 4:8])  # the centre


def test_crop_and_flip_by_hand(tmp_path):
    data = noise(tmp_path)
    augment = Augment(ImagesData(crop=2, flip=True, mean=[0.0] * 3, std=[1 / 255] * 3), None, data)
    samples = [augment.prepare(data[i], np.random.default_rng(i)) for i in range(30)]
    images = augment.apply(augment.collate(samples))["images"].numpy()
    drawn = []
    for i in range(30):
        padded = np.pad(data.images[i], ((0, 0), (2, 2), (2, 2)))
        moved = {
            (down, right, flip): padded[:, down : down + 8, right : right + 8][:, :, :: 1 - 2 * flip]
            for down in range(5) for right in range(5) for flip in range(2)
        }  # fmt: skip
        drawn += [how for how, image in moved.items() if np.allclose(images[i], image, atol=1e-3)]
    assert len(drawn) == 30 and len({how[:2] for how in drawn}) > 12
    assert 5 < sum(flip for *_, flip in drawn) < 25


def test_mixup_by_hand(tmp_path):
    data = noise(tmp_path)
    augment = Augment(ImagesData(mixup=0.8, mean=[0.0] * 3, std=[1 / 255] * 3), None, data)
    samples = [augment.prepare(data[i], np.random.default_rng(i)) for i in range(30)]
    batch = augment.apply(augment.collate(samples))
    for i, s in enumerate(samples):
        assert any(np.array_equal(s["other_image"], data.images[j]) and s["other_label"] == data.labels[j] for j in range(30))
        expected = s["share"] * data.images[i].astype(float) + (1 - s["share"]) * s["other_image"].astype(float)
        np.testing.assert_allclose(batch["images"][i], expected, atol=1e-3)
    assert batch["labels"].tolist() == data.labels.tolist() and batch["other_labels"].tolist() == [s["other_label"] for s in samples]
    assert batch["share"].dtype == torch.float32 and batch["share"].tolist() == [s["share"] for s in samples]
    assert len({s["share"].item() for s in samples}) == 30  # a sample, not a batch


def test_cutmix_by_hand(tmp_path):
    data = noise(tmp_path, height=10, width=8)
    augment = Augment(ImagesData(cutmix=1.0, mean=[0.0] * 3, std=[1 / 255] * 3), None, data)
    samples = [augment.prepare(data[i], np.random.default_rng(i)) for i in range(30)]
    batch = augment.apply(augment.collate(samples))
    for i, s in enumerate(samples):
        top, bottom, left, right = s["box"]
        expected = data.images[i].copy()
        expected[:, top:bottom, left:right] = s["other_image"][:, top:bottom, left:right]
        np.testing.assert_allclose(batch["images"][i], expected, atol=1e-3)
        assert s["share"] == np.float32(1 - (bottom - top) * (right - left) / 80)
    assert 0.3 < np.mean([s["share"] for s in samples]) < 0.9
    both = Augment(ImagesData(cutmix=1.0, mixup=1.0, mean=[0.0] * 3, std=[1.0] * 3), None, data)
    cut = [both.prepare(data[0], np.random.default_rng(i))["box"].any() for i in range(100)]
    assert 25 < sum(cut) < 75


def test_batches_and_workers_change_no_pixel(tmp_path):
    write_parquet(tmp_path / "train.parquet", map(png, random_images(44)), [i % 2 for i in range(44)])
    train = open_images(ImagesData(path=str(tmp_path)))["train"]
    augment = Augment(ImagesData(crop=1, flip=True, mixup=0.3, cutmix=1.0), 9, train)

    def images(**options):
        loader = Loader(train, Plan(len(train), 1, batch_samples=16), augment.collate, prepare=augment.prepare, **options)
        steps = [[augment.apply(m) for m in s.micro_batches] for s in loader.steps(3)]
        return [
            torch.cat([b[k].flatten(1) if k == "images" else b[k] for b in s for k in [key]])
            for s in steps
            for key in ("images", "labels", "other_labels", "share")
        ]

    whole = images()
    assert len(whole) == 12 and whole[0].shape == (16, 3 * 9 * 9)
    for options in ({"micro_batch": 5}, {"micro_batch": 1}, {"loading": ImagesData(workers=2), "micro_batch": 3}):
        assert all(torch.equal(a, b) for a, b in zip(images(**options), whole))


def test_settings_that_do_not_fit_are_said(tmp_path):
    data = noise(tmp_path)
    with pytest.raises(UserError, match=r"data\.mean has 1 values, but the images have 3 channels"):
        Augment(ImagesData(mean=[0.5]), None, data)
    with pytest.raises(UserError, match=r"data\.std=.*above 0"):
        Augment(ImagesData(std=[0.5, 0.0, 0.5]), None, data)
