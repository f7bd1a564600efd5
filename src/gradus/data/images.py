"""Images with a label: reading them, changing them by chance on the device, and showing them.

A data set here is map-style: `dataset[i]` is {"image": uint8 array (channels, height, width), "label": int}; it has `classes`,
`labels` (n,) and `name`.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import json
import math
import os
import re
import secrets
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gradus import limits
from gradus.data.collate import stack
from gradus.data.text import cache_dir, features_in, keep, tenths
from gradus.errors import DataError, UserError, did_you_mean, need
from gradus.recipe.schema import ImagesData
from gradus.recipe.text import looked_for

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
SPLITS = {"train": "train", "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "test": "test"}
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
DECODED_LIMIT = 16 * 2**30  # bytes: a larger split is decoded image by image, each time anew
FORMAT = 1  # of the cache


# ---------------------------------------------------------------- opening


def open_images(config: ImagesData, image_size: int | None = None, names: Sequence[str] | None = None) -> dict[str, Any]:
    """The splits of a data set: `train`, `valid`, and `test` where the data has one.

    `config.path` is a .parquet file, a folder of them (train*.parquet, test*.parquet, ...; Hugging Face's layout), a folder of
    class folders (<class>/*.png, or train/<class>/*.png beside valid/ and test/), cifar-10-binary.tar.gz or the folder unpacked
    from it, or `hf:NAME`. Where there is no valid split, a fixed tenth of the training images of every class becomes it.
    `config.limit` and `limit_valid` then leave the first n of a fixed shuffle.

    Images are decoded once into a memory-mapped array below $GRADUS_CACHE (default ~/.cache/gradus), named after the content's
    hash (of class folders: after every file's name, size and time). Images of several sizes are decoded each time they are
    asked for: their shorter side is scaled to image_size, and the centre cut out; without image_size they are an error.

    names: of the classes, where the data name none; where class folders are all among them, they are numbered in this order.

    Raises UserError for what is missing or unreadable, for an image of the wrong size or channels, for a label out of range; with
    file and row.
    """
    if config.source == "digits":
        if config.path is not None:
            raise UserError(f"data.path={config.path} has no effect with data.source=digits. Leave one of them out")
        _no_columns(config, "digits")
        splits = _digits()
    else:
        splits = {}
        for split, source in _find(config, names).items():
            splits[split] = _open(source, image_size, splits["train"].classes if "train" in splits else None, names)
        for split in splits.values():
            shape, train = split.shape, splits["train"].shape
            if shape[0] != train[0]:
                raise UserError(f"{split.name}: {shape[0]} channels, but the training images have {train[0]}")
            if shape != train and image_size is None:
                raise UserError(f"{split.name}: images of {_size(shape)}, but the training images are {_size(train)}")
    if "valid" not in splits:
        splits["train"], splits["valid"] = hold_out(splits["train"], 10)
    for split, limit in (("train", config.limit), ("valid", config.limit_valid)):
        if limit is not None and limit < len(splits[split]):
            chosen = np.random.Generator(np.random.PCG64(0)).permutation(len(splits[split]))[:limit]
            splits[split] = Part(splits[split], chosen, splits[split].name)
    return {split: splits[split] for split in ("train", "valid", "test") if split in splits}


def hold_out(dataset: Any, every: int) -> tuple[Part, Part]:
    """(the rest, the part held out): of each class every `every`-th image, a fixed and stratified choice."""
    rest, held = tenths(dataset.labels, dataset.name, every, "images")
    return Part(dataset, rest, dataset.name), Part(dataset, held, f"{dataset.name} (held out)")


class ArrayImages:
    """Images in one array (n, channels, height, width), in memory or mapped from `folder`/images.npy."""

    def __init__(self, name: str, images: np.ndarray | None, labels: np.ndarray, classes: list[str], folder: Path | None = None):
        self.name, self.labels, self.classes, self.folder = name, labels, classes, folder
        self.images = self._mapped() if images is None else images

    def _mapped(self) -> np.ndarray:
        return np.asarray(np.load(self.folder / "images.npy", mmap_mode="r"))  # a plain view: np.memmap itself is slow to index

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.images.shape[1:]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": self.images[i], "label": int(self.labels[i])}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({"images": None} if self.folder is not None else {})  # a worker maps the file itself

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.images is None:
            self.images = self._mapped()


class LazyImages:
    """Images decoded when asked for. encoded[i] is a path or the bytes of a file; all come out as (n_channels, image_size,
    image_size)."""

    def __init__(
        self,
        name: str,
        encoded: Sequence[Path] | EncodedFile,
        where: Callable[[int], str],
        labels: np.ndarray,
        classes: list[str],
        n_channels: int,
        image_size: int,
        folder: Path,
    ):
        self.name, self.encoded, self.where, self.labels, self.classes = name, encoded, where, labels, classes
        self.n_channels, self.image_size, self.folder = n_channels, image_size, folder
        self.shape = (n_channels, image_size, image_size)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        image = read_image(self.encoded[i], self.where(i), self.n_channels, self.image_size)
        return {"image": image, "label": int(self.labels[i])}


class EncodedFile:
    """The files of many images in one: `folder`/encoded.bin, of which the i-th is bytes offsets[i] to offsets[i + 1]."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.offsets = np.load(folder / "offsets.npy")
        self.data = np.memmap(folder / "encoded.bin", mode="r")

    def __getitem__(self, i: int) -> bytes:
        return self.data[self.offsets[i] : self.offsets[i + 1]].tobytes()

    def __reduce__(self):
        return EncodedFile, (self.folder,)


class Part:
    """Some images of a data set, in the order of `indices`."""

    def __init__(self, dataset: Any, indices: np.ndarray, name: str):
        self.dataset, self.indices, self.name = dataset, indices, name
        self.labels, self.classes, self.shape, self.folder = dataset.labels[indices], dataset.classes, dataset.shape, dataset.folder

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.dataset[int(self.indices[i])]


def read_image(data: bytes | str | Path, where: str, n_channels: int | None = None, image_size: int | None = None) -> np.ndarray:
    """One image file (its bytes or its path) as a uint8 array (channels, height, width).

    n_channels: 1 (grey) or 3 (RGB); None: as the file. image_size: scale the shorter side to it and cut out the centre.
    The camera's orientation tag is honoured. Raises UserError, beginning with `where`, for what is no readable image, for colour
    where grey is asked for, for 16-bit and for transparent images.
    """
    if not isinstance(data, bytes):
        limits.regular(data)
    Image, ImageOps = need("PIL.Image", "vision", "reading images"), need("PIL.ImageOps", "vision", "reading images")
    try:
        with Image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as picture:
            picture.load()
            ImageOps.exif_transpose(picture, in_place=True)
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as e:  # Pillow raises SyntaxError for a broken PNG
        reason = "unknown format" if isinstance(e, Image.UnidentifiedImageError) else str(e)
        raise UserError(f"{where}: not a readable image ({reason}). Replace it or take it out") from None
    if picture.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"):
        raise UserError(f"{where}: image mode {picture.mode}; 8 bits a channel, grey or colour, are read. Convert it first")
    if picture.has_transparency_data and picture.convert("RGBA").getextrema()[3][0] < 255:
        raise UserError(f"{where}: a transparent image. Paint it onto a background first: 1 or 3 channels are read, without alpha")
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
    return f"{shape[-1]}x{shape[-2]}"  # width x height, as pictures are spoken of


def _digits() -> dict[str, Any]:
    """scikit-learn's 1,797 handwritten digits, 8 x 8; grey levels 0 to 16 become 0 to 255. A fixed fifth of each class is test."""
    bunch = need("sklearn.datasets", "vision", "data.source=digits", DataError).load_digits()
    images = np.rint(bunch.images[:, None] * (255 / 16)).astype(np.uint8)  # (n, 1, 8, 8)
    train, test = hold_out(ArrayImages("digits", images, bunch.target.astype(np.int64), [str(c) for c in range(10)]), 5)
    return {"train": train, "test": test}


# ---------------------------------------------------------------- where images come from


class Source:
    """One split, not yet decoded."""

    name: str  # what messages call it
    classes: list[str] | None  # None: as many as there are labels

    def key(self) -> str:
        """What names the content."""
        raise NotImplementedError

    def where(self, i: int) -> str:
        """File and row of image i."""
        raise NotImplementedError

    def labels(self) -> np.ndarray:
        """(n,) int64."""
        raise NotImplementedError

    def rows(self) -> Iterator[bytes | Path | np.ndarray]:
        """Every image in order: a file's bytes, a path, or decoded (channels, height, width)."""
        raise NotImplementedError


class ParquetSource(Source):
    """The rows of one or more files, with columns `img` or `image` (struct of bytes and path, or plain bytes) and `label`."""

    def __init__(self, files: list[Path], image: str | None, label: str | None):
        parquet = need("pyarrow.parquet", "vision", "reading parquet", DataError)
        self.files, self.name = files, str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        self.readers = []
        for file in files:
            try:
                self.readers.append(parquet.ParquetFile(file))
            except (OSError, ValueError) as e:  # pyarrow's ArrowInvalid is a ValueError
                raise UserError(f"{file}: not a readable parquet file ({str(e).splitlines()[0]})") from None
        self.counts = [r.metadata.num_rows for r in self.readers]
        schema = self.readers[0].schema_arrow
        self.image = _column(image, ("image", "img"), schema.names, "data.image", self.name)
        self.label = _column(label, ("label", "labels"), schema.names, "data.label", self.name)
        for file, reader in zip(files, self.readers):
            if reader.schema_arrow.names != schema.names:
                raise UserError(f"{file}: columns {', '.join(reader.schema_arrow.names)}, but {files[0]} has {', '.join(schema.names)}")
        self.classes = features_in(schema.metadata).get(self.label)

    def key(self) -> str:
        return _hash(self.files, self.image, self.label)

    def where(self, i: int) -> str:
        ends = np.cumsum(self.counts).tolist()
        file = bisect.bisect_right(ends, i)
        return f"{self.files[file]}, row {i - (ends[file] - self.counts[file])}"

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "counts": self.counts}  # all that `where` needs in a worker

    def labels(self) -> np.ndarray:
        types = need("pyarrow.types", "vision", "reading parquet")
        parts = []
        for file, reader in zip(self.files, self.readers):
            column = reader.read(columns=[self.label])[self.label]
            if not types.is_integer(column.type):
                raise UserError(f"{file}: column {self.label} holds {column.type}; labels are integers from 0")
            if column.null_count:
                raise UserError(f"{file}, row {int(np.argmax(column.is_null().to_numpy()))}: no label")
            parts.append(column.to_numpy().astype(np.int64))
        return np.concatenate(parts)

    def rows(self) -> Iterator[bytes]:
        row = 0
        for reader in self.readers:
            for batch in reader.iter_batches(batch_size=256, columns=[self.image]):
                for cell in batch.column(0).to_pylist():
                    data = cell.get("bytes") if isinstance(cell, dict) else cell
                    if not isinstance(data, bytes):
                        raise UserError(f"{self.where(row)}: column {self.image} holds no image bytes. Write the files' content into it")
                    yield data
                    row += 1


class HubSource(Source):
    """A split of a Hugging Face data set."""

    def __init__(self, name: str, split: str, table: Any, image: str | None, label: str | None):
        self.name, self.table = f"hf:{name} {split}", table
        self.image = _column(image, ("image", "img"), table.column_names, "data.image", self.name)
        self.label = _column(label, ("label", "labels"), table.column_names, "data.label", self.name)
        self.classes = getattr(table.features[self.label], "names", None)

    def key(self) -> str:
        return f"{self.table._fingerprint} {self.image} {self.label}"

    def where(self, i: int) -> str:
        return f"{self.name}, row {i}"

    def labels(self) -> np.ndarray:
        labels = self.table[self.label]
        for i, label in enumerate(labels):
            if not isinstance(label, int):
                raise UserError(f"{self.where(i)}: column {self.label} holds {label!r}; labels are integers from 0")
        return np.array(labels, dtype=np.int64)

    def rows(self) -> Iterator[bytes | Path]:
        raw = self.table.select_columns([self.image]).cast_column(self.image, need("datasets", "hf", "hf: data sets").Image(decode=False))
        for row in raw:
            cell = row[self.image]
            yield cell["bytes"] if cell["bytes"] is not None else Path(cell["path"])

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name}  # all that `where` needs in a worker


class FolderSource(Source):
    """folder/<class>/<image>."""

    def __init__(self, folder: Path, classes: list[str] | None = None, names: Sequence[str] | None = None):
        self.name = str(folder)
        found = [d.name for d in sorted(folder.iterdir()) if d.is_dir() and not d.name.startswith(".")]
        self.classes = classes or (list(names) if names and set(found) <= set(names) else found)
        self.paths: list[Path] = []
        self.of: list[int] = []
        for name in found:
            if name not in self.classes:
                raise UserError(f"{folder / name}: a class that the training set does not have.{did_you_mean(name, self.classes)}")
            files = [f for f in sorted((folder / name).iterdir()) if not f.name.startswith(".")]
            for file in files:
                if file.suffix.lower() not in SUFFIXES or not file.is_file():
                    raise UserError(f"{file}: not an image file ({', '.join(SUFFIXES)}). Move it out of the class folder")
            if not files:
                raise UserError(f"{folder / name}: a class without images")
            self.paths += files
            self.of += [self.classes.index(name)] * len(files)

    def key(self) -> str:
        digest = hashlib.sha256("\0".join(self.classes).encode())
        for path in self.paths:
            stat = path.stat()
            digest.update(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def where(self, i: int) -> str:
        return str(self.paths[i])

    def labels(self) -> np.ndarray:
        return np.array(self.of, dtype=np.int64)

    def rows(self) -> Iterator[Path]:
        return iter(self.paths)


class CifarSource(Source):
    """The official binary version of CIFAR-10: records of a label byte and 32 x 32 red, green and blue bytes each (Krizhevsky
    2009), in data_batch_1.bin ... data_batch_5.bin and test_batch.bin, or in the archive of them."""

    RECORD = 1 + 3 * 32 * 32
    classes = CIFAR10

    def __init__(self, path: Path, split: str):
        self.path, self.split, self.name = path, split, f"{path} ({split})"
        self.wanted = re.compile(r"data_batch_\d+\.bin" if split == "train" else r"test_batch\.bin")
        self.records: np.ndarray | None = None
        self.names: list[str] = []

    def files(self) -> list[Path]:
        return sorted(f for f in self.path.iterdir() if self.wanted.fullmatch(f.name))

    def key(self) -> str:
        return _hash(self.files() if self.path.is_dir() else [self.path], self.split)

    def where(self, i: int) -> str:
        return self.names[i]

    def read(self) -> np.ndarray:
        """(n, 3073) uint8."""
        if self.records is None:
            parts = []
            for name, data in sorted(self.unpacked()):
                if len(data) % self.RECORD:
                    raise UserError(
                        f"{name}, row {len(data) // self.RECORD}: an image of the wrong size, {len(data) % self.RECORD} bytes, not "
                        f"{self.RECORD}. The file is cut short or not CIFAR-10's; load it again"
                    )
                parts.append(np.frombuffer(data, dtype=np.uint8).reshape(-1, self.RECORD))
                self.names += [f"{name}, row {r}" for r in range(len(parts[-1]))]
            if not parts:
                raise UserError(f"{self.path}: not CIFAR-10's binary version, it holds no {self.split} records")
            self.records = np.concatenate(parts)
        return self.records

    def unpacked(self) -> Iterator[tuple[str, bytes]]:
        if self.path.is_dir():
            yield from ((str(file), file.read_bytes()) for file in self.files())
            return
        try:
            with tarfile.open(self.path, "r:*") as archive:
                for member in archive:
                    base = member.name.rsplit("/", 1)[-1]
                    if re.fullmatch(r"data_batch_\d|test_batch", base):
                        raise UserError(_pickles(self.path))
                    if self.wanted.fullmatch(base):
                        yield f"{self.path}:{member.name}", archive.extractfile(member).read()
        except (tarfile.TarError, OSError, EOFError) as e:
            raise UserError(f"{self.path}: not a readable archive ({str(e).splitlines()[0].rstrip(':')}). Load it again") from None

    def labels(self) -> np.ndarray:
        return self.read()[:, 0].astype(np.int64)

    def rows(self) -> Iterator[np.ndarray]:
        return iter(self.read()[:, 1:].reshape(-1, 3, 32, 32))


def _hash(files: list[Path], *words: str) -> str:
    """Of the files' content."""
    digest = hashlib.sha256("\0".join(words).encode())
    for file in files:
        with open(file, "rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()


def _pickles(path: Path) -> str:
    return f"{path}: CIFAR-10's python version holds pickles, which can run any code and are not read. Use the binary version, cifar-10-binary.tar.gz"


def _column(given: str | None, usual: tuple[str, ...], columns: list[str], key: str, name: str) -> str:
    if given is not None:
        if given not in columns:
            raise UserError(f"{name}: no column {given} ({key}).{did_you_mean(given, columns)}")
        return given
    for column in usual:
        if column in columns:
            return column
    raise UserError(f"{name}: no column {' or '.join(usual)}. Set {key} to one of {', '.join(columns)}")


def _no_columns(config: ImagesData, what: str) -> None:
    for key in ("image", "label"):
        if getattr(config, key) is not None:
            raise UserError(f"data.{key}={getattr(config, key)} has no effect with {what}, which has no columns. Leave it out")


def _find(config: ImagesData, names: Sequence[str] | None = None) -> dict[str, Source]:
    """Split → source, the training split first."""
    if config.path is None:
        raise DataError("data.path is missing: a parquet file, a folder, cifar-10-binary.tar.gz or hf:NAME (or set data.source=digits)")
    if config.path.startswith("hf:"):
        return _hub(config.path[3:], config.image, config.label)
    path = Path(os.path.expanduser(config.path))
    if not path.exists():
        beside = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = did_you_mean(str(path), beside) if beside else ""
        raise DataError(f"data.path={config.path}: there is no such file or folder{looked_for(config.path)}.{near}")
    if path.is_file() and path.suffix == ".parquet":
        return {"train": ParquetSource([path], config.image, config.label)}
    if path.is_dir():
        files = sorted(path.glob("*.parquet")) or sorted(path.glob("*/*.parquet"))
        if files:
            return {split: ParquetSource(of, config.image, config.label) for split, of in _by_split(files).items()}
    _no_columns(config, config.path)
    if path.is_file():
        if not re.search(r"\.(tar|tar\.gz|tgz)$", path.name):
            raise UserError(f"data.path={config.path}: images come from a .parquet file, a folder or cifar-10-binary.tar.gz, not from this")
        return {split: CifarSource(path, split) for split in ("train", "test")}
    for folder in (path, path / "cifar-10-batches-bin"):
        if (folder / "data_batch_1.bin").exists():
            return {split: CifarSource(folder, split) for split in ("train", "test") if CifarSource(folder, split).files()}
    if (path / "cifar-10-binary.tar.gz").exists():
        return {split: CifarSource(path / "cifar-10-binary.tar.gz", split) for split in ("train", "test")}
    for mark in ("data_batch_1", "cifar-10-batches-py", "cifar-10-python.tar.gz"):
        if (path / mark).exists():
            raise UserError(_pickles(path / mark))
    folders = [d for d in sorted(path.iterdir()) if d.is_dir() and not d.name.startswith(".")]
    if not folders:
        raise UserError(f"data.path={config.path}: no parquet file, no class folder and no CIFAR-10 archive in it")
    if not any(d.name in SPLITS for d in folders):
        return {"train": FolderSource(path, names=names)}
    named: dict[str, Path] = {}
    for folder in folders:
        if folder.name not in SPLITS:
            raise UserError(f"{folder}: neither train, valid nor test, which lie beside it. Move it out")
        if SPLITS[folder.name] in named:
            raise UserError(f"{folder}: there already is {named[SPLITS[folder.name]].name}. Keep one of them")
        named[SPLITS[folder.name]] = folder
    if "train" not in named:
        raise UserError(f"data.path={config.path}: there is no train folder, only {', '.join(d.name for d in folders)}")
    train = FolderSource(named["train"], names=names)
    return {"train": train} | {s: FolderSource(named[s], train.classes) for s in ("valid", "test") if s in named}


def _by_split(files: list[Path]) -> dict[str, list[Path]]:
    """train-00000-of-00002.parquet and the like → its split; the training split first."""
    found: dict[str, list[Path]] = {}
    for file in files:
        word = re.split(r"[^a-z]", file.stem.lower())[0]
        if word not in SPLITS and len(files) > 1:
            raise UserError(f"{file}: which split is it? Its name begins with none of {', '.join(SPLITS)}")
        found.setdefault(SPLITS.get(word, "train"), []).append(file)
    return {split: found[split] for split in ("train", "valid", "test") if split in found}


def _hub(name: str, image: str | None, label: str | None) -> dict[str, Source]:
    datasets = need("datasets", "hf", f"data.path=hf:{name}", DataError)
    try:
        tables = datasets.load_dataset(name)
    except Exception as e:  # the hub's libraries raise a dozen kinds
        lines = str(e).strip().splitlines() or [type(e).__name__]
        raise DataError(f"data.path=hf:{name}: cannot be loaded ({lines[0]}). Without internet, stage it first: gradus fetch") from None
    found: dict[str, Source] = {}
    for split, table in tables.items():
        if split in SPLITS:
            found[SPLITS[split]] = HubSource(name, split, table, image, label)
    if "train" not in found:
        raise UserError(f"data.path=hf:{name}: there is no split train, only {', '.join(tables)}")
    return {split: found[split] for split in ("train", "valid", "test") if split in found}


# ---------------------------------------------------------------- decoding once


def _open(source: Source, image_size: int | None, classes: list[str] | None, names: Sequence[str] | None = None) -> ArrayImages | LazyImages:
    """Open a split from the cache, after filling it if need be. classes: the training split's; names: of its numbers."""
    folder = cache_dir() / "images" / hashlib.sha256(f"{FORMAT} {source.key()}".encode()).hexdigest()[:32]
    if not (folder / "about.json").exists():
        whole = lambda folder: (folder / "about.json").exists()  # noqa: E731
        keep(folder, lambda aside: _decode(source, aside), whole, "GRADUS_CACHE")
    about = json.loads((folder / "about.json").read_text())
    labels = np.load(folder / "labels.npy")
    if source.classes is None and labels.max() >= limits.CLASSES:
        i = int(labels.argmax())
        most = f"{limits.CLASSES - 1:,}"
        raise UserError(f"{source.where(i)}: label {labels[i]}: classes are numbered from 0, without gaps, up to {most}. Number them so")
    own = source.classes or list(names or (str(c) for c in range(int(labels.max()) + 1)))
    if classes is not None and source.classes is not None and own != classes:
        raise UserError(f"{source.name}: its classes ({', '.join(own[:5])}, ...) are not the training set's ({', '.join(classes[:5])}, ...)")
    classes = own if classes is None else classes
    wrong = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(wrong):
        if isinstance(source, CifarSource):
            source.read()  # the names of the rows
        raise UserError(f"{source.where(wrong[0])}: label {labels[wrong[0]]}, but there are {len(classes)} classes: 0 to {len(classes) - 1}")
    if about["decoded"]:
        return ArrayImages(source.name, None, labels, classes, folder)
    if image_size is None:
        if about["other"] is None:
            raise UserError(f"{source.name}: more than {DECODED_LIMIT / 2**30:.0f} GiB when decoded; its images have to be scaled to an image_size")
        i, size, first = about["other"]
        raise UserError(f"{source.where(i)}: an image of the wrong size, {size}; the first is {first}. Bring all images to one size")
    encoded = source.paths if isinstance(source, FolderSource) else EncodedFile(folder)
    return LazyImages(source.name, encoded, source.where, labels, classes, about["n_channels"], image_size, folder)


def _decode(source: Source, folder: Path) -> None:
    """labels.npy, about.json, and: images.npy when all images have one size; else the encoded files in one, if they are rows."""
    labels = source.labels()
    if len(labels) == 0:
        raise UserError(f"{source.name}: holds no images")
    np.save(folder / "labels.npy", labels)
    n_channels, shape, other, decoded = None, None, None, False
    with open(folder / "images.npy", "wb") as file:  # written on, not mapped: a full disk is then an error, not a dead process
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
        if not isinstance(source, FolderSource):
            offsets = [0]
            with open(folder / "encoded.bin", "wb") as file:
                for data in source.rows():
                    offsets.append(offsets[-1] + file.write(data if isinstance(data, bytes) else Path(data).read_bytes()))
            np.save(folder / "offsets.npy", np.array(offsets))
    (folder / "about.json").write_text(json.dumps({"decoded": decoded, "n_channels": n_channels, "other": other}))


def channel_stats(dataset: Any) -> tuple[list[float], list[float]]:
    """(mean, standard deviation) a channel, of values in 0..1, over all pixels of a data set: one streaming pass, exact
    (counts of the 256 values). Kept beside the decoded images. Raises UserError for a channel without any variation."""
    kept = None
    if dataset.folder is not None:
        part = hashlib.sha256(dataset.indices.tobytes()).hexdigest()[:16] if isinstance(dataset, Part) else "all"
        kept = dataset.folder / f"stats-{part}-{_size(dataset.shape)}.json"
        if kept.exists():
            stats = json.loads(kept.read_text())
            return stats["mean"], stats["std"]
    counts: np.ndarray | None = None
    for images in _chunks(dataset):
        per_channel = np.stack([np.bincount(channel.ravel(), minlength=256) for channel in images.swapaxes(0, 1)])
        counts = per_channel if counts is None else counts + per_channel
    values = np.arange(256) / 255
    mean = counts @ values / counts.sum(1)  # (channels,)
    std = np.sqrt((counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1))
    if not std.all():
        raise UserError(f"{dataset.name}: channel {int(np.argmin(std))} has one value everywhere. Set data.mean and data.std")
    stats = {"mean": mean.tolist(), "std": std.tolist()}
    if kept is not None:
        aside = kept.with_suffix(f".{secrets.token_hex(8)}")
        aside.write_text(json.dumps(stats))
        os.replace(aside, kept)
    return stats["mean"], stats["std"]


def _chunks(dataset: Any, size: int = 1024) -> Iterator[np.ndarray]:
    """(some, channels, height, width) arrays that together are the data set."""
    array, indices = dataset, np.arange(len(dataset))
    while isinstance(array, Part):
        array, indices = array.dataset, array.indices[indices]
    if isinstance(array, ArrayImages):
        yield from (array.images[indices[lo : lo + size]] for lo in range(0, len(indices), size))
    else:
        yield from (array[int(i)]["image"][None] for i in indices)


# ---------------------------------------------------------------- augmentation


class Augment:
    """What happens to images between the data set and the model.

    All that is random is drawn a sample, in `prepare`, from the sample's own generator: offsets of the crop, the flip, and for mixup
    and cutmix the weight and the partner, which is any training image with a crop and flip of its own. `apply` then works on
    whole batches, on the device. So neither micro-batches nor workers change a pixel.

    Random crop after padding with black by `crop` pixels, and horizontal flip with probability 1/2; mixup (Zhang et al. 2018):
    share ~ Beta(mixup, mixup), image = share · own + (1 - share) · partner; cutmix (Yun et al. 2019): a box of the partner, share = what
    is left of the own image; with both set, each sample takes one of them with probability 1/2. Then resizing (bilinear,
    antialiased, shorter side to image_size, centre cut out), and (x / 255 - mean) / std.

    train: the data set that partners, and mean and std where not given, come from. Raises UserError when mean or std do not fit.
    """

    collate = staticmethod(stack)

    def __init__(self, config: ImagesData, image_size: int | None, train: Any):
        self.config, self.image_size, self.train = config, image_size, train
        n_channels = train[0]["image"].shape[0]
        for key in ("mean", "std"):
            given = getattr(config, key)
            if given is not None and len(given) != n_channels:
                raise UserError(f"data.{key} has {len(given)} values, but the images have {n_channels} channels")
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
        """`image`, `label` and what `prepare` drew become `images` (batch, channels, image_size, image_size) float32 and `labels`
        (batch,); when mixed also `other_labels` (batch,) and `share` (batch,), the weight of `labels`. Without draws (evaluation)
        images are only resized and normalised. Other keys stay."""
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

    def _moved(self, batch: dict[str, Any], which: str) -> torch.Tensor:
        images = batch.pop(which + "image")
        offset, flip = batch.pop(which + "offset", None), batch.pop(which + "flip", None)
        return images if offset is None and flip is None else crop_and_flip(images, offset, flip, self.config.crop)


def crop_and_flip(images: torch.Tensor, offset: torch.Tensor | None, flip: torch.Tensor | None, pad: int) -> torch.Tensor:
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


def resize(images: torch.Tensor, size: int) -> torch.Tensor:
    """Scale the shorter side to `size` (bilinear, antialiased) and cut out the centre. images (batch, channels, height, width) float."""
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    scale = size / min(height, width)
    images = F.interpolate(images, (round(height * scale), round(width * scale)), mode="bilinear", antialias=True)
    top, left = (images.shape[-2] - size) // 2, (images.shape[-1] - size) // 2
    return images[..., top : top + size, left : left + size]


def normalise(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Values 0..255 → (x / 255 - mean) / std, float32, mean and std a channel. images (batch, channels, height, width)."""
    mean, std = (torch.tensor(v, dtype=torch.float32, device=images.device)[:, None, None] for v in (mean, std))
    return (images.float() / 255 - mean) / std


# ---------------------------------------------------------------- showing


def picture_grid(images: Sequence[np.ndarray], titles: Sequence[str], colours: Sequence[str], path: str | Path) -> None:
    """Write a PNG of images with titles above them, about as many rows as columns.

    images: uint8 (channels, height, width), 1 or 3 channels, of any sizes; small ones are enlarged to be seen, large ones reduced.
    colours: of the titles, by name ("green", "red") or #rrggbb. The file is written aside and renamed.
    """
    what = "a picture of images"
    Image, ImageDraw, ImageFont = (need(f"PIL.{m}", "vision", what) for m in ("Image", "ImageDraw", "ImageFont"))
    assert len(images) == len(titles) == len(colours) > 0
    tile, gap, font = 128, 12, ImageFont.load_default(size=15)
    band = 2 + sum(font.getmetrics())
    titles = [t if len(t) <= 48 else t[:47] + "…" for t in titles]
    width = max([tile] + [math.ceil(font.getlength(t)) for t in titles])
    columns = math.ceil(math.sqrt(len(images)))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (gap + columns * (width + gap), gap + rows * (band + tile + gap)), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (image, title, colour) in enumerate(zip(images, titles, colours)):
        left, top = gap + i % columns * (width + gap), gap + i // columns * (band + tile + gap)
        draw.text((left, top), title, fill=colour, font=font)
        picture = Image.fromarray(np.ascontiguousarray(image[0] if image.shape[0] == 1 else image.transpose(1, 2, 0)))
        scale = tile / max(picture.size)
        smooth = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS  # single pixels stay visible
        sheet.paste(picture.resize([max(1, round(side * scale)) for side in picture.size], smooth), (left, top + band))
    path = Path(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    sheet.save(aside, format="PNG")
    os.replace(aside, path)
