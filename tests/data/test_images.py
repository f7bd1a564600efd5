"""Images: what is read is what was written, what is wrong is said, and what is drawn at random depends on the sample alone."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from gradus.data import images as module
from gradus.data.augment import Augment, resize
from gradus.data.image_sources import find_sources
from gradus.data.images import ArrayImages, FileImages, LazyImages, channel_stats, open_images, read_image
from gradus.data.loader import Loader, Plan
from gradus.data.splits import Part
from gradus.errors import UserError
from gradus.recipe.schema import ImagesData


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("GRADUS_CACHE", str(folder))
    return folder


def random_images(n, channels=3, height=6, width=6, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, channels, height, width), dtype=np.uint8)


def picture(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))


def png(image: np.ndarray | Image.Image) -> bytes:
    out = io.BytesIO()
    (picture(image) if isinstance(image, np.ndarray) else image).save(out, format="PNG")
    return out.getvalue()


def write_parquet(path, files, labels, image="img", names=None, label_type=None):
    cells = pa.array([{"bytes": f, "path": None} for f in files], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    table = pa.table({image: cells, "label": pa.array(labels, label_type or pa.int64())})
    if names:
        features = {image: {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=7)
    return path


def content(dataset):
    return [(d["image"].tolist(), d["label"]) for d in (dataset[i] for i in range(len(dataset)))]


# ---------------------------------------------------------------- reading


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    bunch = load_digits()
    splits = open_images(ImagesData(source="digits"))
    assert sum(map(len, splits.values())) == 1797 and list(splits) == ["train", "valid", "test"]
    assert 0.19 < len(splits["test"]) / 1797 < 0.21
    seen = []
    for split in splits.values():
        assert split.classes == [str(c) for c in range(10)] and split[0]["image"].shape == (1, 8, 8) and split[0]["image"].dtype == np.uint8
        counts = np.bincount(split.labels)
        assert counts.max() - counts.min() <= 0.05 * len(split)  # stratified
        seen += [
            ((np.rint(image[0] / 255 * 16)).tobytes(), label)
            for image, label in ((d["image"], d["label"]) for d in map(split.__getitem__, range(len(split))))
        ]
    assert sorted(seen) == sorted((image.tobytes(), label) for image, label in zip(bunch.images, bunch.target))


def test_parquet_is_decoded_once(tmp_path, monkeypatch, cache):
    train, test = random_images(40), random_images(9, seed=1)
    names = ["cat", "dog"]
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", map(png, train[:30]), [i % 2 for i in range(30)], names=names)
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", map(png, train[30:]), [i % 2 for i in range(10)], names=names)
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", map(png, test), [0] * 9, names=names)
    splits = open_images(ImagesData(path=str(tmp_path)))
    assert splits["train"].classes == ["cat", "dog"]
    assert content(splits["test"]) == [(image.tolist(), 0) for image in test]
    together = content(splits["train"]) + content(splits["valid"])
    assert sorted(together) == sorted((image.tolist(), i % 2) for i, image in enumerate(train))
    assert len(splits["valid"]) == 4 and np.bincount(splits["valid"].labels).tolist() == [2, 2]

    def never(*arguments):
        raise AssertionError("decoded again")

    monkeypatch.setattr(module, "read_image", never)
    again = open_images(ImagesData(path=str(tmp_path)))
    assert content(again["train"]) == content(splits["train"])
    base = again["train"].dataset
    assert isinstance(base, FileImages) and base.folder.parent.parent == cache
    packed = pickle.dumps(again["train"])
    assert len(packed) < 4000 and content(pickle.loads(packed)) == content(again["train"])  # pixels do not travel to workers
    assert not [f for f in (cache / "images").iterdir() if f.name.startswith(".")]  # nothing half done is left
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", map(png, test), [1] * 9, names=names)
    with pytest.raises(AssertionError, match="decoded again"):  # other content is another key
        open_images(ImagesData(path=str(tmp_path)))


def test_limits_are_fixed_choices(tmp_path):
    write_parquet(tmp_path / "train.parquet", map(png, random_images(60)), [i % 3 for i in range(60)])
    whole = open_images(ImagesData(path=str(tmp_path)))
    some = open_images(ImagesData(path=str(tmp_path / "train.parquet"), limit=20, limit_valid=2))
    assert len(some["train"]) == 20 and len(some["valid"]) == 2
    assert len(set(map(str, content(some["train"]))) & set(map(str, content(whole["train"])))) == 20
    assert content(open_images(ImagesData(path=str(tmp_path), limit=20))["train"]) == content(some["train"])
    assert len(set(some["train"].labels)) == 3


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def test_class_folders(tmp_path):
    pictures = random_images(8)
    for i, image in enumerate(pictures):
        save(tmp_path / ("valid" if i == 7 else "train") / ("ant" if i % 2 else "bee") / f"{i}.png", picture(image))
    splits = open_images(ImagesData(path=str(tmp_path)))
    assert list(splits) == ["train", "valid"] and splits["train"].classes == ["ant", "bee"]
    assert content(splits["train"]) == [(pictures[i].tolist(), int(i % 2 == 0)) for i in (1, 3, 5, 0, 2, 4, 6)]
    assert content(splits["valid"]) == [(pictures[7].tolist(), 0)]
    save(tmp_path / "valid" / "beee" / "9.png", picture(pictures[0]))
    with pytest.raises(UserError, match=r"valid/beee: a class that the training set does not have\. Did you mean bee\?"):
        open_images(ImagesData(path=str(tmp_path)))
    (tmp_path / "train" / "ant" / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"notes\.txt: not an image file"):
        open_images(ImagesData(path=str(tmp_path)))


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_images_of_several_sizes_are_scaled_when_asked_for(tmp_path, kind):
    shapes = [(20, 30), (16, 16), (40, 24), (17, 50)] * 5
    smooth = [picture(random_images(1, 3, 3, 3, seed=i)[0]).resize((w, h), Image.Resampling.BICUBIC) for i, (h, w) in enumerate(shapes)]
    pictures = [np.array(image).transpose(2, 0, 1) for image in smooth]
    if kind == "folder":
        for i, image in enumerate(pictures):
            save(tmp_path / "ab"[i % 2] / f"{i:02}.png", picture(image))
        pictures = pictures[::2] + pictures[1::2]
        where = tmp_path
    else:
        where = write_parquet(tmp_path / "train.parquet", map(png, pictures), [i % 2 for i in range(20)])
    with pytest.raises(UserError, match=r"(b/01\.png|a/02\.png|row 1): an image of .*; the first is 30x20"):
        open_images(ImagesData(path=str(where)))
    data = open_images(ImagesData(path=str(where)), image_size=12)["train"].dataset
    assert isinstance(data, LazyImages) and data.shape == (3, 12, 12) and len(data) == 20
    data = pickle.loads(pickle.dumps(data))
    for i in (0, 3, 17):
        expected = resize(torch.from_numpy(pictures[i])[None].float(), 12)[0]
        off = (torch.from_numpy(data[i]["image"]).float() - expected).abs()
        assert data[i]["image"].dtype == np.uint8 and off.mean() < 8  # cut a fraction of a pixel elsewhere at most
    mean, std = channel_stats(data)
    all_pixels = np.stack([data[i]["image"] for i in range(20)]) / 255
    np.testing.assert_allclose(mean, all_pixels.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, all_pixels.std((0, 2, 3)), rtol=1e-12)


def test_modes_of_image_files():
    grey, colour = random_images(1, 1)[0], random_images(1, 3)[0]
    assert np.array_equal(read_image(png(grey), "x"), grey)
    assert np.array_equal(read_image(png(grey), "x", n_channels=3), np.repeat(grey, 3, 0))
    assert np.array_equal(read_image(png(picture(colour).convert("RGBA")), "x"), colour)  # opaque
    assert np.array_equal(read_image(png(picture(grey).convert("LA")), "x"), grey)
    palette = picture(colour).quantize(8)
    assert np.array_equal(read_image(png(palette), "x"), np.asarray(palette.convert("RGB")).transpose(2, 0, 1))
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    picture(colour).save(turned, format="PNG", exif=exif)
    assert np.array_equal(read_image(turned.getvalue(), "x"), np.rot90(colour, 3, (1, 2)))


def half_transparent():
    image = picture(random_images(1)[0]).convert("RGBA")
    image.putalpha(128)
    return png(image)


@pytest.mark.parametrize(
    "file, says",
    [
        (b"GIF? no", r"row 3: not a readable image \(unknown format\)"),
        (png(random_images(1)[0])[:-30], r"row 3: not a readable image \("),
        (png(random_images(1)[0])[:50] + b"\0" * 40, r"row 3: not a readable image \("),
        (png(random_images(1, 3, 7, 6)[0]), r"row 3: an image of 6x7 and 3 channels; the first is 6x6"),
        (png(Image.fromarray(np.zeros((6, 6), np.uint16))), r"row 3: image mode I;16; 8 bits"),
        (half_transparent(), "row 3: a transparent image"),
        (None, "row 3: column img holds no image bytes"),
    ],
)
def test_a_bad_image_is_named(tmp_path, cache, file, says):
    files = [png(image) for image in random_images(20)]
    files[3] = file
    path = write_parquet(tmp_path / "train.parquet", files, [0] * 20)
    with pytest.raises(UserError, match=rf"^{path}, {says}") as caught:
        open_images(ImagesData(path=str(path)))
    assert "\n" not in str(caught.value)
    assert not [f for f in (cache / "images").iterdir() if f.name.startswith(".")]


def test_colour_in_a_grey_set_is_named(tmp_path):
    files = [png(image) for image in random_images(20, 1)]
    path = write_parquet(tmp_path / "train.parquet", [*files, png(random_images(1, 3)[0])], [0] * 21)
    with pytest.raises(UserError, match=r"row 20: 3 channels \(image mode RGB\), expected 1"):
        open_images(ImagesData(path=str(path)))
    write_parquet(path, files, [0] * 20)
    write_parquet(tmp_path / "test.parquet", [png(random_images(1, 3)[0])], [0])
    with pytest.raises(UserError, match=r"test\.parquet: images of 6x6 and 3 channels, but the training images are 6x6 and 1 channels"):
        open_images(ImagesData(path=str(tmp_path)))


def test_labels_may_be_unsigned_numbers_of_64_bits(tmp_path):
    path = write_parquet(tmp_path / "train.parquet", map(png, random_images(40)), [2**63 + i % 2 for i in range(40)], label_type=pa.uint64())
    train = open_images(ImagesData(path=str(path)))["train"]
    assert train.classes == ["9223372036854775808", "9223372036854775809"] and {train[i]["label"] for i in range(len(train))} == {0, 1}


def test_bad_labels_and_columns_are_named(tmp_path):
    path, files = tmp_path / "train.parquet", [png(image) for image in random_images(20)]

    def opened(labels, says, config=None, **options):
        write_parquet(path, files, labels, **options)
        with pytest.raises(UserError, match=says):
            open_images(ImagesData(path=str(path), **(config or {})))

    good = [0] * 20
    opened(good[:11] + [2] + good[12:], rf"{path}, row 11: label 2, but there are 2 classes: 0, 1", names=["a", "b"])
    opened(good[:19] + [-1], "row 19: label -1, but there are 1 classes")
    opened(good[:8] + [None] + good[9:], "row 8: label None is not a whole number")
    opened(["cat"] * 20, "row 0: label 'cat' is not a whole number", label_type=pa.string())
    opened(good, r"no image column \(image, img\); there are: photo, label. Set data.image=NAME", image="photo")
    opened(good, r"no column 'lable'; it has: img, label", config={"label": "lable"})
    write_parquet(path, files, good)
    write_parquet(tmp_path / "test.parquet", files[:3], [0, 1, 0])
    with pytest.raises(UserError, match=r"test\.parquet, row 1: label 1, but there are 1 classes"):
        open_images(ImagesData(path=str(tmp_path)))


def test_numbers_that_do_not_occur_are_no_classes(tmp_path):
    files = [png(image) for image in random_images(20)]
    write_parquet(tmp_path / "train.parquet", files, [1, 4] * 10)
    write_parquet(tmp_path / "test.parquet", files[:2], [4, 1])
    splits = open_images(ImagesData(path=str(tmp_path)))
    assert splits["train"].classes == ["1", "4"] and sorted(set(splits["train"].labels.tolist())) == [0, 1]
    assert splits["test"].labels.tolist() == [1, 0] and splits["test"][0]["label"] == 1


def test_bad_paths_are_named(tmp_path):
    def says(text, **config):
        with pytest.raises(UserError, match=text) as caught:
            open_images(ImagesData(**config))
        assert "\n" not in str(caught.value)

    (tmp_path / "cifar").mkdir()
    says("data.path is missing")
    says("data.path=x has no effect with data.source=digits", path="x", source="digits")
    says("data.label=y has no effect with data.source=digits", label="y", source="digits")
    says(r"no such file or folder. Did you mean cifar\?", path=str(tmp_path / "cifer"))
    says("no parquet file, no class folder and no CIFAR-10 archive", path=str(tmp_path / "cifar"))
    (tmp_path / "train.parquet").write_bytes(b"PAR0")
    says(r"train\.parquet: not a whole Parquet file", path=str(tmp_path / "train.parquet"))
    (tmp_path / "a.zip").write_bytes(b"PK")
    says(r"a\.zip: images come from", path=str(tmp_path / "a.zip"))


def test_two_containers_with_one_disk_keep_out_of_each_others_way(tmp_path, cache, monkeypatch):
    """Process ids say nothing there: both may be 1. While one decodes, the other does so too, from start to end."""
    images = random_images(20)
    path = write_parquet(tmp_path / "train.parquet", [png(i) for i in images], [0, 1] * 10)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    decode, seen = module._decode, []

    def slow(source, aside):
        seen.append(aside)
        (aside / "half").write_text("")
        if len(seen) == 1:
            open_images(ImagesData(path=str(path)))
        assert (aside / "half").exists(), "deleted by the other"
        (aside / "half").unlink()
        decode(source, aside)

    monkeypatch.setattr(module, "_decode", slow)
    data = open_images(ImagesData(path=str(path)))["train"]
    assert len(seen) >= 2 and len(set(seen)) == len(seen)
    assert len(data) == 18 and np.array_equal(data[0]["image"], images[0]) and not list((cache / "images").glob(".*"))


@pytest.mark.parametrize("name", ["about.json", "labels.npy", "images.npy"])
def test_a_damaged_cache_is_made_anew(tmp_path, cache, name):
    images = random_images(20)
    path = write_parquet(tmp_path / "train.parquet", [png(i) for i in images], [0, 1] * 10)
    open_images(ImagesData(path=str(path)))
    next((cache / "images").glob(f"*/{name}")).write_bytes(b"5")
    data = open_images(ImagesData(path=str(path)))["train"]
    assert np.array_equal(data[0]["image"], images[0]) and len(data) == 18


def test_an_unwritable_cache_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "file"))
    path = write_parquet(tmp_path / "train.parquet", [png(random_images(1)[0])], [0])
    with pytest.raises(UserError, match=r"images: cannot write the cache \(.*\)\. Set GRADUS_CACHE to a folder with enough space"):
        open_images(ImagesData(path=str(path)))


# ---------------------------------------------------------------- real ones


@pytest.mark.slow
@pytest.mark.shared_data
def test_cifar_10_training_statistics(shared_data):
    train = open_images(ImagesData(path=str(shared_data / "cifar10" / "train.parquet")))["train"].dataset
    mean, std = channel_stats(train)
    np.testing.assert_allclose(np.array(mean) * 255, [125.3069, 122.9504, 113.8654], atol=5e-5)
    np.testing.assert_allclose(np.array(std) * 255, [62.9932, 62.0887, 66.7049], atol=5e-5)
    assert channel_stats(train) == (mean, std)  # kept


HUB = """
import sys
import tarfile
from gradus.data.images import open_images
from gradus.errors import UserError
from gradus.recipe.schema import ImagesData
splits = open_images(ImagesData(path="hf:" + sys.argv[1]))
print({split: len(d) for split, d in splits.items()}, splits["train"].classes, splits["test"][2]["image"].sum(), splits["test"][2]["label"])
try:
    open_images(ImagesData(path="hf:nobody/nothing"))
except UserError as e:
    print(e)
"""


@pytest.mark.slow
def test_hugging_face_data_sets(tmp_path):
    images = random_images(24)
    write_parquet(tmp_path / "d" / "train-00000-of-00001.parquet", map(png, images[:20]), [i % 2 for i in range(20)], names=["a", "b"])
    write_parquet(tmp_path / "d" / "test-00000-of-00001.parquet", map(png, images[20:]), [0, 0, 1, 0], names=["a", "b"])
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    out = subprocess.run([sys.executable, "-c", HUB, tmp_path / "d"], env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[-2] == f"{{'train': 18, 'valid': 2, 'test': 4}} ['a', 'b'] {images[22].astype(int).sum()} 1"
    assert out[-1].startswith("hf:nobody/nothing: cannot be loaded (") and out[-1].endswith("stage it first: gradus fetch")


# ---------------------------------------------------------------- augmentation


def in_memory(n=30, channels=3, height=8, width=8, classes=3):
    return ArrayImages("noise", random_images(n, channels, height, width), np.arange(n) % classes, [str(c) for c in range(classes)])


def test_channel_stats_are_exact():
    data = in_memory()
    mean, std = channel_stats(data)
    np.testing.assert_allclose(mean, (data.images / 255).mean((0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(std, (data.images / 255).std((0, 2, 3)), rtol=1e-13)
    part = Part(data, np.array([3, 4]), "two")
    np.testing.assert_allclose(channel_stats(part)[0], (data.images[3:5] / 255).mean((0, 2, 3)), rtol=1e-13)
    with pytest.raises(UserError, match=r"black: channel 0 has one value everywhere"):
        channel_stats(ArrayImages("black", np.zeros((2, 1, 4, 4), np.uint8), np.zeros(2, int), ["a"]))


def test_evaluation_only_normalises_and_resizes():
    data = in_memory()
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


def test_crop_and_flip_by_hand():
    data = in_memory()
    augment = Augment(ImagesData(crop=2, flip=True, mean=[0.0] * 3, std=[1 / 255] * 3), None, data)
    samples = [augment.prepare(data[i], np.random.default_rng(i)) for i in range(30)]
    images = augment.apply(augment.collate(samples))["images"].numpy()
    for i, sample in enumerate(samples):
        down, right = sample["offset"]
        assert 0 <= down <= 4 and 0 <= right <= 4
        expected = np.pad(data.images[i], ((0, 0), (2, 2), (2, 2)))[:, down : down + 8, right : right + 8]
        np.testing.assert_allclose(images[i], expected[:, :, ::-1] if sample["flip"] else expected, atol=1e-3)
    assert len({tuple(s["offset"]) for s in samples}) > 12
    assert 5 < sum(s["flip"] for s in samples) < 25


def test_mixup_by_hand():
    data = in_memory()
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


def test_cutmix_by_hand():
    data = in_memory(height=10, width=8)
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


def test_settings_that_do_not_fit_are_said():
    data = in_memory()
    with pytest.raises(UserError, match=r"data\.mean has 1 values, but the images have 3 channels"):
        Augment(ImagesData(mean=[0.5]), None, data)
    with pytest.raises(UserError, match=r"data\.std=.*above 0"):
        Augment(ImagesData(std=[0.5, 0.0, 0.5]), None, data)


# ---------------------------------------------------------------- CIFAR-10's own files


def records(images, labels):
    return b"".join(bytes([label]) + image[0].tobytes() + image[1].tobytes() + image[2].tobytes() for image, label in zip(images, labels))


def test_cifar_archive_and_folder(tmp_path):
    images, labels = random_images(60, 3, 32, 32), [i % 10 for i in range(60)]
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for k in range(5):
        (folder / f"data_batch_{k + 1}.bin").write_bytes(records(images[10 * k : 10 * k + 10], labels[10 * k : 10 * k + 10]))
    (folder / "test_batch.bin").write_bytes(records(images[50:], labels[50:]))
    (folder / "batches.meta.txt").write_text("airplane\n")
    archive = tmp_path / "packed" / "cifar-10-binary.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname="cifar-10-batches-bin")
    for path in (folder, tmp_path, archive, archive.parent):
        config = ImagesData(path=str(path))
        with pytest.raises(UserError, match="no class has 10 images"):
            open_images(config)
        train = module._open(find_sources(config)["train"], None, None)
        assert train.classes[3] == "cat" and content(train) == [(image.tolist(), label) for image, label in zip(images[:50], labels)]
        assert content(module._open(find_sources(config)["test"], None, None)) == [
            (image.tolist(), label) for image, label in zip(images[50:], labels[50:])
        ]


def test_cifar_errors(tmp_path):
    images = random_images(20, 3, 32, 32)
    file = tmp_path / "data_batch_1.bin"
    file.write_bytes(records(images, [0] * 20)[:-100])
    with pytest.raises(UserError, match=r"data_batch_1\.bin, row 19: an image of 2973 bytes, not 3073"):
        open_images(ImagesData(path=str(tmp_path)))
    file.write_bytes(records(images, [0] * 4 + [77] + [0] * 15))
    with pytest.raises(UserError, match=r"data_batch_1\.bin, row 4: label 77, but there are 10 classes"):
        open_images(ImagesData(path=str(tmp_path)))
    file.rename(tmp_path / "data_batch_1")
    with pytest.raises(UserError, match=r"pickles.*cifar-10-binary\.tar\.gz"):
        open_images(ImagesData(path=str(tmp_path)))
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "data_batch_1", arcname="cifar-10-batches-py/data_batch_1")
    with pytest.raises(UserError, match=r"pickles.*cifar-10-binary\.tar\.gz"):
        open_images(ImagesData(path=str(archive)))
