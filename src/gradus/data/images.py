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
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradus import files, limits
from gradus.data.cache import digest, keep
from gradus.data.image_sources import Source, find_sources, no_effect
from gradus.data.splits import Part, hold_out, limited
from gradus.data.text import number_classes
from gradus.errors import DataError, UserError, need
from gradus.recipe.schema import ImagesData

DECODED_LIMIT = 16 * 2**30  # bytes: a larger split is decoded image by image, each time anew
FORMAT = 1  # of the cache


def open_images(
    config: ImagesData, image_size: int | None = None, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """The splits of a data set: `train`, `valid`, and `test` where the data has one.

    `config.path` is a .parquet file, a folder of them (train*.parquet, test*.parquet, ...; Hugging Face's layout), a
    folder of class folders (<class>/*.png, or train/<class>/*.png beside valid/ and test/), cifar-10-binary.tar.gz or
    the folder unpacked from it, or `hf:NAME`. Where there is no valid split, a fixed tenth of the training images of
    every class becomes it. Images of several sizes are decoded each time they are asked for: their shorter side is
    scaled to image_size, and the centre cut out; without image_size they are an error. names: of the classes, where
    the data name none; where class folders are all among them, they are numbered in this order.

    Raises UserError for what is missing or unreadable, for an image of the wrong size or channels, for a label out of
    range; with file and row.
    """
    if config.source == "digits":
        no_effect(config, ("path", "image", "label"), "data.source=digits")
        splits = _digits()
    else:
        splits = {}
        for split, source in find_sources(config, names).items():
            splits[split] = dataset = _open(source, image_size, splits["train"].classes if splits else None, names)
            train = splits["train"].shape
            if dataset.shape[0] != train[0] or (dataset.shape != train and image_size is None):
                sizes = f"images of {_size(dataset.shape)}, but the training images are {_size(train)}"
                raise UserError(f"{dataset.name}: {sizes}")
    if "valid" not in splits:
        splits["train"], splits["valid"] = hold_out(splits["train"], unit="images")
    splits = limited(splits, config.limit, config.limit_valid)
    return {split: splits[split] for split in ("train", "valid", "test") if split in splits}


def _digits() -> dict[str, Any]:
    """scikit-learn's 1,797 handwritten digits, 8 x 8; grey levels 0 to 16 become 0 to 255. A fixed fifth of each class
    is test."""
    bunch = need("sklearn.datasets", "vision", "data.source=digits", DataError).load_digits()
    images = np.rint(bunch.images[:, None] * (255 / 16)).astype(np.uint8)  # (n, 1, 8, 8)
    digits = ArrayImages("digits", images, bunch.target.astype(np.int64), [str(c) for c in range(10)])
    train, test = hold_out(digits, 5, "images")
    return {"train": train, "test": test}


class ArrayImages:
    """Images in one array in memory: (n, channels, height, width)."""

    folder = None

    def __init__(self, name: str, images: np.ndarray, labels: np.ndarray, classes: list[str]):
        self.name, self.images, self.labels, self.classes = name, images, labels, classes

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.images.shape[1:]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": self.images[i], "label": int(self.labels[i])}


class FileImages:
    """Images of one size in `folder`/images.npy, as ArrayImages. Read, not mapped: the pages of what is mapped count as
    this process's memory."""

    def __init__(self, name: str, labels: np.ndarray, classes: list[str], folder: Path, content: str | None = None):
        self.name, self.labels, self.classes, self.folder, self.content = name, labels, classes, folder, content

    @functools.cached_property
    def _opened(self) -> tuple[io.BufferedReader, int, tuple[int, int, int]]:
        """(the file, the byte where the first image begins, the shape of each)"""
        file = open(self.folder / "images.npy", "rb")  # noqa: SIM115  (open as long as this)
        np.lib.format.read_magic(file)
        shape, *_ = np.lib.format.read_array_header_1_0(file)
        return file, file.tell(), shape[1:]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self._opened[2]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        file, start, shape = self._opened
        size = math.prod(shape)
        data = os.pread(file.fileno(), size, start + range(len(self))[i] * size)
        if len(data) < size:
            raise UserError(f"{file.name}: cut short since it was opened. Start again: it is made anew.")
        return {"image": np.frombuffer(data, np.uint8).reshape(shape), "label": int(self.labels[i])}

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_opened"}  # a worker opens it anew


@dataclasses.dataclass
class LazyImages:
    """Images decoded when asked for."""

    name: str
    encoded: Sequence[Path] | EncodedFile  # of each a path, or the bytes of a file
    where: Callable[[int], str]  # what messages call image i
    labels: np.ndarray
    classes: list[str]
    shape: tuple[int, int, int]  # (n_channels, image_size, image_size), of all
    folder: Path
    content: str | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        n_channels, _, image_size = self.shape
        image = read_image(self.encoded[i], self.where(i), n_channels, image_size)
        return {"image": image, "label": int(self.labels[i])}


class EncodedFile:
    """The files of many images in one: `folder`/encoded.bin, of which the i-th is bytes offsets[i] to offsets[i +
    1]."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.offsets = np.load(folder / "offsets.npy")
        self.data = np.memmap(folder / "encoded.bin", mode="r")

    def __getitem__(self, i: int) -> bytes:
        return self.data[self.offsets[i] : self.offsets[i + 1]].tobytes()

    def __reduce__(self):
        return EncodedFile, (self.folder,)


def read_image(
    data: bytes | str | Path, where: str, n_channels: int | None = None, image_size: int | None = None
) -> np.ndarray:
    """One image file (its bytes or its path) as a uint8 array (channels, height, width).

    n_channels: 1 (grey) or 3 (RGB); None: as the file. image_size: scale the shorter side to it and cut out the centre.
    The camera's orientation tag is honoured. Raises UserError, beginning with `where`, for what is no readable image,
    for colour where grey is asked for, for 16-bit and for transparent images.
    """
    if not isinstance(data, bytes):
        limits.regular(data)
    Image, ImageOps = need("PIL.Image", "vision", "reading images"), need("PIL.ImageOps", "vision", "reading images")
    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as picture:
            picture.load()
            ImageOps.exif_transpose(picture, in_place=True)
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as e:  # SyntaxError: a broken PNG
        reason = "unknown format" if isinstance(e, Image.UnidentifiedImageError) else str(e)
        raise UserError(f"{where}: not a readable image ({reason}). Replace or remove it") from None
    if picture.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"):
        kinds = "8 bits per channel, grey or colour, are read"
        raise UserError(f"{where}: image mode {picture.mode}; {kinds}. Convert it first")
    if picture.has_transparency_data and picture.convert("RGBA").getextrema()[3][0] < 255:
        mend = "Flatten it onto a background first: 1 or 3 channels are read, without alpha"
        raise UserError(f"{where}: a transparent image. {mend}")
    grey = picture.mode in ("1", "L", "LA")
    if n_channels == 1 and not grey:
        raise UserError(f"{where}: 3 channels (image mode {picture.mode}), expected 1 (grey)")
    mode = "L" if grey and n_channels != 3 else "RGB"
    if picture.mode != mode:
        picture = picture.convert(mode)
    if image_size is not None:
        picture = ImageOps.fit(picture, (image_size, image_size), Image.Resampling.BILINEAR)
    pixels = np.asarray(picture)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def _size(shape: Sequence[int]) -> str:
    return f"{shape[-1]}x{shape[-2]} and {shape[0]} channels"  # width x height, as pictures are spoken of


# ---------------------------------------------------------------- decoding once


def _known_content(memo: Path) -> str:
    with contextlib.suppress(UserError):  # none, damaged, or a pipe
        return limits.read_text(memo, limits.CONFIG_FILE)
    return ""


def _open(
    source: Source, image_size: int | None, classes: list[str] | None, names: Sequence[str] | None = None
) -> FileImages | LazyImages:
    """Open a split from the cache, after filling it if need be. classes: the training split's; names: of its
    numbers."""
    folder = files.cache_dir() / "images" / digest(FORMAT, source.key())
    keep(folder, lambda aside: _decode(source, aside), "GRADUS_CACHE")
    if not re.fullmatch("[0-9a-f]{40}", content := _known_content(memo := folder / "content")):
        files.write_text(memo, content := source.content())
    about = json.loads((folder / "about.json").read_text())
    labels = np.load(folder / "labels.npy")
    classes, labels = _classes(source, labels, classes, names)
    if about["decoded"]:
        return FileImages(source.name, labels, classes, folder, content)
    if image_size is None:
        if about["other"] is None:
            most = f"{DECODED_LIMIT / 2**30:.0f} GiB"
            raise UserError(f"{source.name}: more than {most} when decoded. Set model.image_size")
        i, size, first = about["other"]
        raise UserError(f"{source.where(i)}: an image of {size}; the first is {first}. Resize all to one size")
    shape = (about["n_channels"], image_size, image_size)
    encoded = source.paths or EncodedFile(folder)
    return LazyImages(source.name, encoded, source.where, labels, classes, shape, folder, content)


def _classes(
    source: Source, labels: np.ndarray, classes: list[str] | None, names: Sequence[str] | None
) -> tuple[list[str], np.ndarray]:
    """(the training split's classes, or this one's where it is that; labels counted among them). Raises UserError for a
    label that is none of them."""
    own = source.classes
    if classes and own and own != classes:
        theirs, ours = ", ".join(own[:5]), ", ".join(classes[:5])
        raise UserError(f"{source.name}: its classes ({theirs}, ...) are not the training set's ({ours}, ...)")
    classes, index = number_classes(labels.tolist(), own, classes or names)
    counted = np.array([index.get(str(label), -1) for label in labels], dtype=np.int64)
    for wrong in np.flatnonzero(counted < 0):
        there = f"there are {len(classes)} classes: {', '.join(list(index)[:10])}"
        raise UserError(f"{source.where(wrong)}: label {labels[wrong]}, but {there}")
    return classes, counted


def _decode(source: Source, folder: Path) -> None:
    """labels.npy, about.json, and: images.npy when all have one size; else the encoded files in one, if they are
    rows."""
    labels = source.labels()
    if len(labels) == 0:
        raise UserError(f"{source.name}: holds no images")
    np.save(folder / "labels.npy", labels)
    n_channels, shape, other, decoded = None, None, None, False
    with open(folder / "images.npy", "wb") as file:  # written on, not mapped: a full disk is then an error, not a death
        for i, data in enumerate(source.rows()):
            image = data if isinstance(data, np.ndarray) else read_image(data, source.where(i), n_channels)
            if shape is None:
                n_channels, shape = image.shape[0], image.shape
                if len(labels) * image.size > DECODED_LIMIT:
                    break
                header = {"descr": "|u1", "fortran_order": False, "shape": (len(labels), *shape)}
                np.lib.format.write_array_header_1_0(file, header)
            if image.shape != shape:
                other = (i, _size(image.shape), _size(shape))
                break
            file.write(image.tobytes())
        else:
            decoded = True
    if not decoded:
        (folder / "images.npy").unlink()
        if source.paths is None:
            offsets = [0]
            with open(folder / "encoded.bin", "wb") as file:
                for data in source.rows():
                    content = data if isinstance(data, bytes) else Path(data).read_bytes()
                    offsets.append(offsets[-1] + file.write(content))
            np.save(folder / "offsets.npy", np.array(offsets))
    about = {"decoded": decoded, "n_channels": n_channels, "other": other}
    (folder / "about.json").write_text(json.dumps(about))


def channel_stats(dataset: Any) -> tuple[list[float], list[float]]:
    """(mean, standard deviation) a channel, of values in 0..1, over all pixels of a data set: one streaming pass, exact
    (counts of the 256 values). Kept beside the decoded images. Raises UserError for a channel without any variation."""
    memo = None
    if dataset.folder is not None:
        part = digest(dataset.indices.tolist())[:16] if isinstance(dataset, Part) else "all"
        memo = dataset.folder / f"stats-{part}-{_size(dataset.shape)}.json"
        with contextlib.suppress(UserError):  # none, damaged, or a pipe
            match limits.read_json(memo, limits.CONFIG_FILE):
                case {"mean": [*mean], "std": [*std]} if len(mean) == len(std) == dataset.shape[0]:
                    if all(isinstance(x, float) and 0 <= x <= 1 for x in mean + std) and all(std):
                        return mean, std
    counts = np.zeros((dataset.shape[0], 256), np.int64)
    for i in range(len(dataset)):
        counts += [np.bincount(channel.ravel(), minlength=256) for channel in dataset[i]["image"]]
    values = np.arange(256) / 255
    mean = counts @ values / counts.sum(1)  # (channels,)
    std = np.sqrt((counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1))
    if not std.all():
        channel = int(np.argmin(std))
        raise UserError(f"{dataset.name}: channel {channel} has one value everywhere. Set data.mean and data.std")
    stats = {"mean": mean.tolist(), "std": std.tolist()}
    if memo is not None:
        files.write_json(memo, stats)
    return stats["mean"], stats["std"]
