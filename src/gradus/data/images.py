"""Images with a label, decoded once and kept as a memory-mapped array.

A data set here is map-style: `dataset[i]` is {"image": uint8 array (channels, height, width), "label": int}; it has
`classes`, `labels` (n,) and `name`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradus import files, limits
from gradus.data.cache import digest, keep
from gradus.data.image_sources import DigitsSource, Source, find_sources, no_effect
from gradus.data.splits import Part, hold_out, limited
from gradus.data.text import number_classes
from gradus.errors import UserError, need
from gradus.recipe.schema import ImagesData, Preprocess
from gradus.text import say

DECODED_LIMIT = 16 * 2**30  # bytes: a larger split is decoded image by image, each time anew
FORMAT = 3  # of the cache
GREY = ("1", "L", "LA")  # Pillow's modes


def open_images(
    config: ImagesData, image_size: int | None = None, names: Sequence[str] | None = None, n_channels: int = 1
) -> dict[str, Any]:
    """The splits of a data set: `train`, `valid`, and `test` where the data has one with labels.

    `config.path` is a .parquet file, a folder of them (train*.parquet, test*.parquet, ...; Hugging Face's layout), a
    folder of class folders (<class>/*.png, or train/<class>/*.png beside valid/ and test/) or of images beside a table
    that names them (see `listings`), cifar-10-binary.tar.gz or the folder unpacked from it, or `hf:NAME`. Where there
    is no valid split, a fixed tenth of the training images of every class becomes it. Where one image has colours, or
    the model has n_channels=3, all are RGB. Images of several sizes, and all where config.preprocess says how, are made
    image_size × image_size each time they are asked for (see `fit`); None: as they are. Images of one size are resized
    by `Augment`. names: of the classes, where the data name none; where class folders are all among them, in this
    order.

    Raises UserError for what is missing or unreadable, for an image of a kind that is not read, for a label out of
    range; with file and row.
    """
    if config.source == "digits":
        no_effect(config, ("path", "image", "label"), "data.source=digits")
        train, test = hold_out(_open(DigitsSource()), 5, "images")
        splits = {"train": train, "test": test}
    else:
        splits = {}
        for split, source in find_sources(config).items():
            if split != "train" and set(source.labels().tolist()) <= {-1}:
                what = f"no labels (or only -1), so it is not used as the {split} split"
                say(f"note: {source.name}: {what}")
                continue
            splits[split] = _open(source, splits.get("train"), names)
    shape = max(n_channels, *(dataset.shape[0] for dataset in splits.values())), image_size, image_size
    usual = Preprocess(resize=image_size)  # which `Augment` does too: on the device, a batch at a time
    for split, dataset in splits.items() if image_size else ():
        how, plain = config.preprocess or usual, (dataset.shape[0], len(dataset.shape)) == (shape[0], 3)
        if not (plain and how == usual):
            splits[split] = FittedImages(dataset, shape, how)
    if "valid" not in splits:
        splits["train"], splits["valid"] = hold_out(splits["train"], unit="images")
    splits = limited(splits, config)
    return {split: splits[split] for split in ("train", "valid", "test") if split in splits}


@dataclasses.dataclass
class FileImages:
    """Images of one shape, one after another in `folder`/images.bin. Read, not mapped: the pages of what is mapped
    count as this process's memory."""

    name: str
    labels: np.ndarray
    classes: list[str]
    index: dict[str, int]  # label as text → its class
    shape: tuple[int, ...]
    folder: Path
    content: str | None

    FILE = "images.bin"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": self.image(i), "label": int(self.labels[i])}

    def image(self, i: int) -> np.ndarray:
        size = math.prod(self.shape)
        return np.frombuffer(self.read(range(len(self))[i] * size, size), np.uint8).reshape(self.shape)

    @functools.cached_property
    def file(self) -> io.BufferedReader:
        return open(self.folder / self.FILE, "rb")  # open as long as this

    def read(self, start: int, size: int) -> bytes:
        data = os.pread(self.file.fileno(), size, start)
        if len(data) < size:
            raise UserError(f"{self.file.name}: cut short since it was opened. Start again: it is made anew.")
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("file", "offsets")}  # a worker opens them anew


@dataclasses.dataclass
class LazyImages(FileImages):
    """Images of several sizes, decoded when asked for: files of their own, or of which the i-th is bytes offsets[i] to
    offsets[i + 1] of `folder`/encoded.bin. shape: (n_channels,), of all."""

    paths: Sequence[Path] | None
    where: Callable[[int], str]  # what messages call image i

    FILE = "encoded.bin"

    @functools.cached_property
    def offsets(self) -> list[int]:
        return np.load(self.folder / "offsets.npy").tolist()

    def image(self, i: int) -> np.ndarray:
        data = self.paths[i] if self.paths else self.read(self.offsets[i], self.offsets[i + 1] - self.offsets[i])
        return read_image(data, self.where(i), *self.shape)


class FittedImages(Part):
    """The images of another data set, each resized and cropped to one shape (n_channels, image_size, image_size)."""

    def __init__(self, dataset: Any, shape: tuple[int, int, int], preprocess: Preprocess):
        super().__init__(dataset, np.arange(len(dataset)))
        self.shape, self.as_read, self.preprocess = shape, dataset.shape, preprocess

    def __getitem__(self, i: int) -> dict[str, Any]:
        sample, (n_channels, size, _) = super().__getitem__(i), self.shape
        image = np.broadcast_to(image := sample["image"], (n_channels, *image.shape[1:]))
        return {**sample, "image": fit(image, size, self.preprocess, f"{self.name}, image {i}")}


@contextlib.contextmanager
def _opened(data: bytes | str | Path, where: str) -> Iterator[Any]:
    """An image file, opened by Pillow. Raises UserError where Pillow cannot read it, here or in the block."""
    Image = need("PIL.Image", "vision", "reading images")
    try:
        if not isinstance(data, bytes):
            limits.regular(data)
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as picture:
            yield picture
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as e:  # SyntaxError: a broken PNG
        reason = "unknown format" if isinstance(e, Image.UnidentifiedImageError) else str(e)
        raise UserError(f"{where}: not a readable image ({reason}). Replace or remove it") from None


def read_image(data: bytes | str | Path, where: str, n_channels: int | None = None) -> np.ndarray:
    """One image file (its bytes or its path) as a uint8 array (channels, height, width).

    n_channels: 1 (grey) or 3 (RGB); None: as the file. The camera's orientation tag is honoured, and what is
    transparent lies on white. Raises UserError, beginning with `where`, for what is no readable image, for colour where
    grey is asked for, and for 16-bit images.
    """
    with _opened(data, where) as picture:
        picture.load()
        need("PIL.ImageOps", "vision", "reading images").exif_transpose(picture, in_place=True)
    if picture.mode not in (*GREY, "P", "RGB", "RGBA", "CMYK", "YCbCr"):
        kinds = "8 bits per channel, grey or colour, are read"
        raise UserError(f"{where}: image mode {picture.mode}; {kinds}. Convert it first")
    grey = picture.mode in GREY
    if n_channels == 1 and not grey:
        raise UserError(f"{where}: 3 channels (image mode {picture.mode}), expected 1 (grey)")
    if picture.has_transparency_data and (layer := picture.convert("RGBA")).getextrema()[3][0] < 255:
        _tell_flattened()
        Image = need("PIL.Image", "vision", "reading images")
        picture = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return _pixels(picture.convert("L" if grey and n_channels != 3 else "RGB"))


@functools.cache
def _tell_flattened() -> None:
    """Once in a process."""
    say("note: transparent images are laid on white", sys.stderr)


def _pixels(picture: Any) -> np.ndarray:
    pixels = np.asarray(picture)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def shape_of(data: bytes | str | Path, where: str) -> tuple[int, ...]:
    """(channels, height, width) of an image file. Of a JPEG only the header is read, if its last bytes show that it is
    whole; any other file is decoded. Raises UserError as `read_image`."""
    with _opened(data, where) as picture:
        if picture.format == "JPEG" and picture.mode in ("L", "RGB"):
            picture.fp.seek(-2, os.SEEK_END)
            if picture.fp.read() == b"\xff\xd9":
                turned = picture.getexif().get(0x0112, 1) > 4
                return len(picture.getbands()), *(picture.size if turned else picture.size[::-1])
    return read_image(data, where).shape


def fit(image: np.ndarray, size: int, how: Preprocess, where: str) -> np.ndarray:
    """An image (channels, height, width) of uint8 as (channels, size, size): resized and cropped by Pillow as
    transformers' image processors do it.

    Raises UserError, beginning with `where`, where `how` gives another size.
    """
    Image = need("PIL.Image", "vision", "reading images")
    picture = Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))
    sides = how.resize
    if isinstance(sides, int):
        sides = [sides * side // min(picture.size) for side in image.shape[1:]]
    if sides is not None:
        if math.prod(sides) > Image.MAX_IMAGE_PIXELS:
            raise UserError(f"{where}: {picture.width} × {picture.height} pixels are too narrow to be scaled. Crop it")
        picture = picture.resize(sides[::-1], Image.Resampling[how.resample.upper()])
    if how.center_crop and (sides is None or min(sides) >= size):
        left, top = ((side - size) // 2 for side in picture.size)
        picture = picture.crop((left, top, left + size, top + size))  # beyond the edges it is black
    if picture.size != (size, size):
        made = f"{picture.width} × {picture.height} pixels after data.preprocess or preprocessor_config.json"
        raise UserError(f"{where}: {made} ({how}), and the model reads {size} × {size}. Correct either")
    return _pixels(picture)


# ---------------------------------------------------------------- decoding once


def _open(source: Source, like: FileImages | None = None, names: Sequence[str] | None = None) -> FileImages:
    """Open a split from the cache, after filling it if need be. like: the training split, whose classes the others
    have; names: of its numbers. Raises UserError for a label that is none of them."""
    folder = files.cache_dir() / "images" / digest(FORMAT, source.key())
    keep(folder, lambda aside: _decode(source, aside), "GRADUS_CACHE")
    shape, content = json.loads((folder / "about.json").read_text())
    labels, own = np.load(folder / "labels.npy").tolist(), source.classes
    if like and own and own != like.classes:
        theirs, ours = ", ".join(own[:5]), ", ".join(like.classes[:5])
        raise UserError(f"{source.name}: its classes ({theirs}, ...) are not the training set's ({ours}, ...)")
    classes, index = (like.classes, like.index) if like else number_classes(labels, own, names)
    counted = np.array([index.get(str(label), -1) for label in labels], dtype=np.int64)
    for wrong in np.flatnonzero(counted < 0):
        there = f"there are {len(classes)} classes: {', '.join(list(index)[:10])}"
        raise UserError(f"{source.where(wrong)}: label {labels[wrong]}, but {there}")
    about = source.name, counted, classes, index, tuple(shape), folder, content
    if len(shape) > 1:
        return FileImages(*about)
    return LazyImages(*about, source.paths, source.where)


def _decode(source: Source, folder: Path) -> None:
    """labels.npy, about.json, and: images.bin when all have one size; else the encoded files in one, if they are
    rows."""
    labels = source.labels()
    if len(labels) == 0:
        raise UserError(f"{source.name}: holds no images with a label")
    np.save(folder / "labels.npy", labels)
    shapes = _write_images(source, folder / "images.bin", len(labels))
    n_channels, sizes = max(shape[0] for shape in shapes), {shape[1:] for shape in shapes}
    if len(shapes) > 1 and len(sizes) == 1:  # grey and coloured ones
        shapes = _write_images(source, folder / "images.bin", len(labels), n_channels)
    shape = next(iter(shapes))
    if len(shapes) > 1 or len(labels) * math.prod(shape) > DECODED_LIMIT:
        (folder / "images.bin").unlink()
        shape = (n_channels,)
        if source.paths is None:
            offsets = [0]
            with open(folder / "encoded.bin", "wb") as file:
                for data in source.rows():
                    content = data if isinstance(data, bytes) else Path(data).read_bytes()
                    offsets.append(offsets[-1] + file.write(content))
            np.save(folder / "offsets.npy", np.array(offsets))
    (folder / "about.json").write_text(json.dumps([shape, source.content()]))


def _write_images(source: Source, to: Path, n: int, n_channels: int | None = None) -> set[tuple[int, ...]]:
    """Write the n images, decoded, one after another while they are of one shape; returns the shapes that there are."""
    shapes: set[tuple[int, ...]] = set()
    with open(to, "wb") as file:  # written on, not mapped: a full disk is an error, not a death
        for i, data in enumerate(source.rows()):
            if len(shapes) > 1 or n * math.prod(next(iter(shapes), ())) > DECODED_LIMIT:
                shapes.add(shape_of(data, source.where(i)))
                continue
            image = data if isinstance(data, np.ndarray) else read_image(data, source.where(i), n_channels)
            shapes.add(image.shape)
            file.write(image.tobytes())
    return shapes


def channel_stats(dataset: Any) -> tuple[list[float], list[float]]:
    """(mean, standard deviation) a channel, of values in 0..1, over all pixels of a data set: one streaming pass, exact
    (counts of the 256 values). Kept beside the decoded images. Raises UserError for a channel without any variation."""
    part = "all"
    if isinstance(dataset, Part):
        part = digest(dataset.indices.tolist(), str(getattr(dataset, "preprocess", None)))[:16]
    folder = dataset.folder / f"stats-{part}-{'x'.join(map(str, dataset.shape))}"
    keep(folder, lambda aside: files.write_json(aside / "stats.json", _measure(dataset)), "GRADUS_CACHE")
    return tuple(json.loads((folder / "stats.json").read_text()))


def _measure(dataset: Any) -> tuple[list[float], list[float]]:
    counts = np.zeros((dataset.shape[0], 256), np.int64)
    for i in range(len(dataset)):
        counts += [np.bincount(channel.ravel(), minlength=256) for channel in dataset[i]["image"]]
    values = np.arange(256) / 255
    mean = counts @ values / counts.sum(1)  # (channels,)
    std = np.sqrt((counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1))
    if not std.all():
        channel = int(np.argmin(std))
        raise UserError(f"{dataset.name}: channel {channel} has one value everywhere. Set data.mean and data.std")
    return mean.tolist(), std.tolist()
