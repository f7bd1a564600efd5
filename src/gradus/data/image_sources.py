"""Where images with a label come from: tables (Parquet files, data sets of the hub), class folders, CIFAR-10."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradus.data.cache import digest, identity
from gradus.data.readers import (
    SPLITS,
    Shards,
    expanded,
    first_column,
    is_hub,
    near,
    no_column,
    open_packed,
    read_rows,
    split_called,
    table_of,
)
from gradus.data.splits import find_split, folders_in
from gradus.data.text import has_labels
from gradus.errors import DataError, UserError, did_you_mean
from gradus.limits import GB
from gradus.recipe.schema import ImagesData
from gradus.recipe.text import looked_for

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
HASHED = GB  # bytes of a folder of images that are read for its hash
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
SYSTEM = ("Thumbs.db", "desktop.ini")  # which Windows writes into folders of images
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # beside images, as the package datasets reads them


class Rows:
    """One split, not yet decoded, in the rows of several `parts`, of which there are `sizes`."""

    paths = None  # of images that are files of their own
    files: list[Path]  # that the rows are in

    @functools.cached_property
    def identities(self) -> list[str]:
        return list(map(identity, self.files))

    def content(self) -> str:
        """A hash of what is read, wherever it lies."""
        return digest(self.identities)

    def where(self, i: int) -> str:
        """File and row of image i."""
        part = int(np.searchsorted(np.cumsum(self.sizes), i, "right"))
        return f"{self.parts[part]}, row {i - sum(self.sizes[:part])}"


class TableSource(Rows):
    """Tables with a column `img` or `image` (struct of bytes and path, or plain bytes) and a column `label`. classes:
    None for as many as there are labels."""

    def __init__(self, tables: list[Path], config: ImagesData):
        self.name = str(tables[0]) if len(tables) == 1 else f"{tables[0]} and {len(tables) - 1} more"
        self.parts, self.files, about = tables, tables, [table_of(table) for table in tables]
        columns, self.sizes = about[0][0], [n for _, n in about]
        self.image = config.image or first_column(self.name, columns, ("image", "img"), "image")
        self.label = config.label or first_column(self.name, columns, ("label", "labels"), "label")
        self.classes = columns.get(self.label)

    def key(self) -> str:
        """What names its content."""
        return digest(self.identities, self.image, self.label)

    def column(self, name: str) -> Iterator[Any]:
        return (row[name] for table in self.parts for row in read_rows(table, [name]))

    def labels(self) -> np.ndarray:
        """(n,) int64, or uint64 where one needs it."""
        labels = list(self.column(self.label))
        for i, label in enumerate(labels):
            if not isinstance(label, int):
                raise UserError(f"{self.where(i)}: label {label!r} is not a whole number. Labels count from 0.")
        return np.array(labels, dtype=np.uint64 if max(labels, default=0) >= 2**63 else np.int64)

    def rows(self) -> Iterator[bytes | Path]:
        """Every image in order: a file's bytes, or a path."""
        for row, cell in enumerate(self.column(self.image)):
            data, path = (cell.get("bytes"), cell.get("path") or "") if isinstance(cell, dict) else (cell, "")
            data = Path(path) if data is None and Path(path).is_absolute() else data
            if not isinstance(data, bytes | Path):
                what = f"column {self.image} holds no image bytes"
                raise UserError(f"{self.where(row)}: {what}. Write the files' content into it")
            yield data


class FolderSource:
    """One split in folder/<class>/<image>. classes: those that there must be; names: whose order they have, where all
    are among these."""

    def __init__(self, folder: Path, classes: list[str] | None = None, names: Sequence[str] | None = None):
        self.name, there = str(folder), folders_in(folder)
        own = [d.name for d in there]
        self.classes = classes or (list(names) if names and set(own) <= set(names) else own)
        self.paths, self.of = [], []
        for each in there:
            if each.name not in self.classes:
                meant = did_you_mean(each.name, self.classes)
                raise UserError(f"{each}: a class that the training set does not have.{meant}")
            files = [f for f in sorted(each.iterdir()) if not f.name.startswith(".") and f.name not in SYSTEM]
            for file in files:
                if file.suffix.lower() not in SUFFIXES or not file.is_file():
                    kinds = ", ".join(SUFFIXES)
                    raise UserError(f"{file}: not an image file ({kinds}). Move it out of the class folder")
            if not files:
                raise UserError(f"{each}: a class without images")
            self.paths += files
            self.of += [self.classes.index(each.name)] * len(files)

    def key(self) -> str:
        stats = [(str(path.resolve()), path.stat()) for path in self.paths]
        return digest(self.classes, self.of, [(name, about.st_size, about.st_mtime_ns) for name, about in stats])

    def content(self) -> str:
        """Of the classes and sizes of all images in their order, and of their bytes; of more than HASHED bytes those of
        images evenly chosen."""
        sizes, bytes_of = [path.stat().st_size for path in self.paths], hashlib.sha256()
        for path in self.paths[:: max(1, -(-sum(sizes) // HASHED))]:
            with open(path, "rb") as file:
                bytes_of.update(hashlib.file_digest(file, "sha256").digest())
        return digest([self.classes[i] if self.classes else i for i in self.of], sizes, bytes_of.hexdigest())

    def where(self, i: int) -> str:
        return str(self.paths[i])

    def labels(self) -> np.ndarray:
        return np.array(self.of)

    def rows(self) -> Iterator[Path]:
        return iter(self.paths)


class MetadataSource(FolderSource):
    """One split in image files and the labels that a table beside them gives. Where all labels are empty, each is -1;
    UserError where only some are."""

    def __init__(self, name: str, labels: dict[Path, str]):
        self.name, self.classes, self.paths = name, None, list(labels)
        of = list(labels.values()) if any(labels.values()) else ["-1"] * len(labels)
        if "" in of:
            raise UserError(f"{self.paths[of.index('')]}: no label in the table beside it")
        self.of = list(map(int, of)) if all(re.fullmatch(r"0|-?[1-9]\d{0,17}", label) for label in of) else of


def find_metadata(path: Path, label: str | None = None) -> dict[str, MetadataSource]:
    """Split → its images, by the columns file_name and `label` of metadata.csv (.jsonl, .parquet) in the folder or in
    folders of it; {} where there is none. A split is named by the first folder of its files."""
    splits: dict[str, dict[Path, str]] = {"train": {}}
    tables = [file for folder in (path, *folders_in(path)) for name in METADATA if (file := folder / name).is_file()]
    for table in tables:
        for i, row in enumerate(read_rows(table), 1):
            if "file_name" not in row:
                raise no_column(table, i, "file_name", row)
            file = table.parent / str(name := row["file_name"])
            if not file.is_file():
                raise UserError(f"{table}, row {i}: file_name {name}: no such file.{near(file)}")
            first = os.path.relpath(file, path).split(os.sep)[0]
            split = split_called(first) or "train"
            value = row.get(label or ("label" if "label" in row else "labels"))
            splits.setdefault(split, {})[file] = "" if value is None else str(value).strip()
    if tables and not any(splits["train"].values()):
        what = f"no training image has a label (column {label or 'label'})"
        raise UserError(f"{tables[0]}: {what}. Rename the column of labels, or set data.label=NAME")
    return {split: MetadataSource(f"{path} ({split})", labels) for split, labels in splits.items() if labels}


class CifarSource(Rows):
    """One split of the official binary version of CIFAR-10 (Krizhevsky 2009), data_batch_1.bin ... data_batch_5.bin and
    test_batch.bin, or of the archive of them: records of a label byte and 32 × 32 red, green and blue bytes each."""

    classes = CIFAR10
    RECORD = 1 + 3 * 32 * 32

    def __init__(self, path: Path, split: str):
        self.path, self.name = path, f"{path} ({split})"
        self.wanted = re.compile(r"data_batch_\d+\.bin" if split == "train" else r"test_batch\.bin")
        inside = [f for f in sorted(path.iterdir()) if self.wanted.fullmatch(f.name)] if path.is_dir() else []
        self.files = [path] if path.is_file() else inside

    def key(self) -> str:
        return digest(self.wanted.pattern, self.identities)

    @functools.cached_property
    def records(self) -> dict[str, np.ndarray]:
        """File → (n, 3073) uint8."""
        by_file = {}
        for name, data in sorted(self._unpacked()):
            if rest := len(data) % self.RECORD:
                what = f"row {len(data) // self.RECORD}: an image of {rest} bytes, not {self.RECORD}"
                raise UserError(f"{name}, {what}. Download the file again")
            by_file[name] = np.frombuffer(data, dtype=np.uint8).reshape(-1, self.RECORD)
        if not by_file:
            raise UserError(f"{self.name}: none of CIFAR-10's files (binary version) in it")
        return by_file

    parts = property(lambda self: list(self.records))
    sizes = property(lambda self: list(map(len, self.records.values())))

    def _unpacked(self) -> Iterator[tuple[str, bytes]]:
        if self.path.is_dir():
            yield from ((str(file), file.read_bytes()) for file in self.files)
            return
        try:
            with open_packed(self.path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
                for member in archive:
                    base = member.name.rsplit("/", 1)[-1]
                    if re.fullmatch(r"data_batch_\d|test_batch", base):
                        raise _pickles(self.path)
                    if self.wanted.fullmatch(base):
                        yield f"{self.path}:{member.name}", archive.extractfile(member).read()
        except (tarfile.TarError, OSError, EOFError) as e:
            why = str(e).splitlines()[0].rstrip(":")
            raise UserError(f"{self.path}: not a readable archive ({why}). Download it again") from None

    def labels(self) -> np.ndarray:
        return np.concatenate([records[:, 0] for records in self.records.values()]).astype(np.int64)

    def rows(self) -> Iterator[np.ndarray]:
        """Every image, decoded: (3, 32, 32) uint8."""
        return (image for records in self.records.values() for image in records[:, 1:].reshape(-1, 3, 32, 32))


def find_cifar(path: Path) -> Path | None:
    """Where CIFAR-10's binary version lies in this folder, or what file of it this is. Raises UserError for pickles."""
    if path.is_file():
        return path if re.search(r"\.(tar|tar\.gz|tgz)$", path.name) else None
    for folder in (path, path / "cifar-10-batches-bin"):
        if (folder / "data_batch_1.bin").exists():
            return folder
    for mark in ("data_batch_1", "cifar-10-batches-py", "cifar-10-python.tar.gz"):
        if (path / mark).exists():
            raise _pickles(path / mark)
    return path / "cifar-10-binary.tar.gz" if (path / "cifar-10-binary.tar.gz").exists() else None


def _pickles(path: Path) -> UserError:
    why = "CIFAR-10's python version holds pickles, which can run any code and are not read"
    return UserError(f"{path}: {why}. Use the binary version, cifar-10-binary.tar.gz")


Source = TableSource | FolderSource | CifarSource


def find_sources(config: ImagesData, names: Sequence[str] | None = None) -> dict[str, Source]:
    """Split → source, the training split first. names: of the classes. Raises UserError where there is nothing to
    read."""
    if config.path is None:
        kinds = "a parquet file, a folder, cifar-10-binary.tar.gz or hf:NAME (or set data.source=digits)"
        raise DataError(f"data.path is missing: {kinds}")
    path = expanded(config.path)
    if not (is_hub(config.path) or path.exists()):
        raise DataError(f"data.path={config.path}: no such file or folder{looked_for(config.path)}.{near(path)}")
    if cifar := find_cifar(path):
        no_effect(config, ("image", "label"), "CIFAR-10's binary version")
        sources = {split: CifarSource(cifar, split) for split in ("train", "test")}
        return {split: source for split, source in sources.items() if source.files}
    if path.is_dir() and (sources := find_metadata(path, config.label)):
        no_effect(config, ("image",), "metadata beside images")
        return sources
    if tables := _tables(config.path):
        for split in [s for s in tables if s != "train" and not has_labels(Shards(tuple(tables[s])), config.label)]:
            what = f"{tables.pop(split)[0]}: no labels (or only -1)"
            print(f"note: {what}, so it is not used as the {split} split", flush=True)
        return {split: TableSource(files, config) for split, files in tables.items()}
    no_effect(config, ("image", "label"), f"class folders such as {config.path}")
    folders = folders_in(path)
    by_split = {split: d for split in SPLITS for d in folders if split_called(d.name) == split}
    if not folders:
        raise UserError(f"data.path={config.path}: no parquet file, no class folder and no CIFAR-10 archive in it")
    if not by_split:
        return {"train": FolderSource(path, names=names)}
    if "train" not in by_split or len(by_split) < len(folders):
        there = ", ".join(d.name for d in folders)
        raise UserError(f"data.path={config.path}: {there}: beside train there may be only valid and test, one of each")
    train = FolderSource(by_split["train"], names=names)
    return {s: train if s == "train" else FolderSource(folder, train.classes) for s, folder in by_split.items()}


def no_effect(config: ImagesData, keys: Sequence[str], what: str) -> None:
    """Raises UserError where one of these keys is set."""
    for key in keys:
        if getattr(config, key) is not None:
            raise UserError(f"data.{key}={getattr(config, key)} has no effect with {what}. Leave it out")


def _tables(where: str) -> dict[str, list[Path]]:
    """Parquet files, or those of the hub, by split; {} where a folder has none."""
    path = expanded(where)
    if path.is_file() and path.suffix != ".parquet":
        kinds = "a .parquet file, a folder or cifar-10-binary.tar.gz"
        raise UserError(f"data.path={path}: images come from {kinds}, not from this")
    there = (file for level in ("*", "*/*", "*/*/*") for file in path.glob(f"{level}.parquet"))
    if not (is_hub(where) or path.is_file() or next(there, None)):
        return {}
    found = {split: find_split(where, split, required=split == "train") for split in SPLITS}
    files = {split: getattr(tables, "files", (tables,)) for split, tables in found.items() if tables}
    return {split: list(tables) for split, tables in files.items()}
