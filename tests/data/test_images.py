"""Images: what is read is what was written, what is wrong is said, and what is drawn at random depends on the sample alone."""

from __future__ import annotations

import io
import os
import pickle

import numpy as np
import pyarrow as pa
import pytest
from image_parts import content, kept, noise, picture, png, random_images, save, write_parquet
from PIL import Image

from gradus.data import images as module
from gradus.data.images import FileImages, LazyImages, channel_stats, open_images, read_image
from gradus.data.splits import Part
from gradus.errors import UserError
from gradus.recipe.schema import ImagesData

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
    data = open_images(ImagesData(path=str(where)), image_size=12)["train"].dataset
    assert isinstance(data.dataset, LazyImages) and data.shape == (3, 12, 12) and len(data) == 20
    data = pickle.loads(pickle.dumps(data))
    for i in (0, 3, 17):
        height, width = pictures[i].shape[1:]
        scaled = picture(pictures[i]).resize((12 * width // min(height, width), 12 * height // min(height, width)), Image.Resampling.BILINEAR)
        left, top = (scaled.width - 12) // 2, (scaled.height - 12) // 2
        assert np.array_equal(data[i]["image"].transpose(1, 2, 0), scaled.crop((left, top, left + 12, top + 12)))
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


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_transparent_lies_on_white(n, capsys):
    """By hand: a share of alpha of the image, and of white the rest. It is said once."""
    module._tell_flattened.cache_clear()
    pixels = random_images(1, n)[0]
    alpha = random_images(1, 1)[0]
    layer = picture(pixels).convert("LA" if n == 1 else "RGBA")
    layer.putalpha(picture(alpha))
    share = alpha / 255
    read = [read_image(png(layer), "x", channels) for channels in (None, 3)]
    np.testing.assert_allclose(read[0], pixels * share + 255 * (1 - share), atol=1)
    assert np.array_equal(read[1], np.broadcast_to(read[0], (3, *read[0].shape[1:])))
    assert capsys.readouterr().err == "note: transparent images are laid on white\n"


@pytest.mark.parametrize(
    "file, says",
    [
        (b"GIF? no", r"row 3: not a readable image \(unknown format\)"),
        (png(random_images(1)[0])[:-30], r"row 3: not a readable image \("),
        (png(random_images(1)[0])[:50] + b"\0" * 40, r"row 3: not a readable image \("),
        (png(Image.fromarray(np.zeros((6, 6), np.uint16))), r"row 3: image mode I;16; 8 bits"),
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


@pytest.mark.parametrize("place", [0, 7, 20])
def test_where_one_image_has_colours_all_are_rgb(tmp_path, place):
    images = [*random_images(20, 1)]
    images.insert(place, random_images(1, 3)[0])
    expected = [np.broadcast_to(image, (3, 6, 6)).tolist() for image in images]
    path = write_parquet(tmp_path / "train.parquet", map(png, images), [0] * 21)
    data = open_images(ImagesData(path=str(path)))["train"].dataset
    assert data.shape == (3, 6, 6) and [image for image, _ in content(data)] == expected
    write_parquet(path, map(png, random_images(20, 1)), [0] * 20)
    write_parquet(tmp_path / "test.parquet", [png(random_images(1, 3)[0])], [0])  # of another split
    splits = open_images(ImagesData(path=str(tmp_path)), image_size=6)
    assert all(data.shape == data[0]["image"].shape == (3, 6, 6) for data in splits.values())
    assert np.array_equal(splits["train"][3]["image"], np.broadcast_to(random_images(20, 1)[3], (3, 6, 6)))


@pytest.mark.parametrize("end", [b"", b"\0" * 60, None], ids=["empty", "zeros", "cut short"])
def test_every_file_is_looked_at_before_any_is_used(tmp_path, end):
    """Of several sizes none is decoded before it is asked for; one that is cut short or no picture is found all the same."""
    for i in range(24):
        image = random_images(1, 3, 40 + i, 40)[0]
        save(tmp_path / "ab"[i % 2] / f"{i}.{'png' if i < 12 else 'jpg'}", picture(image))
    path = tmp_path / "b" / "23.jpg"
    whole = path.read_bytes()
    path.write_bytes(whole[:-300] if end is None else end)
    with pytest.raises(UserError, match=rf"^{path}: not a readable image \("):
        open_images(ImagesData(path=str(tmp_path)), image_size=8)
    path.write_bytes(whole + b"more")  # which is read: there is a picture before it
    assert len(open_images(ImagesData(path=str(tmp_path)), image_size=8)["train"]) == 22


def test_orientation_is_seen_without_decoding(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    for i in range(20):
        (tmp_path / "a").mkdir(exist_ok=True)
        image = picture(random_images(1, 3, 6, 9)[0])
        image.rotate(90, expand=True).save(tmp_path / "a" / f"{i}.jpg", exif=exif) if i % 2 else image.save(tmp_path / "a" / f"{i}.png")
    assert open_images(ImagesData(path=str(tmp_path)))["train"].shape == (3, 6, 9)


def test_labels_may_be_unsigned_numbers_of_64_bits(tmp_path):
    path = write_parquet(tmp_path / "train.parquet", map(png, random_images(40)), [2**63 + i % 2 for i in range(40)], label_type=pa.uint64())
    train = open_images(ImagesData(path=str(path)))["train"]
    assert train.classes == ["9223372036854775808", "9223372036854775809"] and {train[i]["label"] for i in range(len(train))} == {0, 1}


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


@pytest.mark.parametrize("name", ["about.json", "labels.npy", "images.bin"])
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


def test_channel_stats_are_exact(tmp_path):
    data = noise(tmp_path)
    mean, std = channel_stats(data)
    np.testing.assert_allclose(mean, (data.images / 255).mean((0, 2, 3)), rtol=1e-13)
    np.testing.assert_allclose(std, (data.images / 255).std((0, 2, 3)), rtol=1e-13)
    part = Part(data, np.array([3, 4]), "two")
    np.testing.assert_allclose(channel_stats(part)[0], (data.images[3:5] / 255).mean((0, 2, 3)), rtol=1e-13)
    with pytest.raises(UserError, match=r"black: channel 0 has one value everywhere"):
        channel_stats(kept(tmp_path, np.zeros((2, 1, 4, 4), np.uint8), 1, "black"))


def test_channel_stats_kept_beside_decoded_images_are_of_that_part(tmp_path, cache):
    images = random_images(20)
    images[10:] //= 2
    path = write_parquet(tmp_path / "train.parquet", map(png, images), [0, 1] * 10)
    whole = open_images(ImagesData(path=str(path)))["train"].dataset
    for part in (whole, Part(whole, np.arange(10), "bright"), Part(whole, np.arange(10, 20), "dark"), whole):
        pixels = np.stack([part[i]["image"] for i in range(len(part))])
        np.testing.assert_allclose(channel_stats(part)[0], (pixels / 255).mean((0, 2, 3)), rtol=1e-13)
