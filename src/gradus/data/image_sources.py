"""Where images with a label come from: tables (Parquet files, data sets of the hub), files that a table names, class
folders, CIFAR-10."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
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
    Readable,
    expanded,
    first_column,
    is_hub,
    kind_of,
    near,
    no_column,
    open_packed,
    read_rows,
    split_called,
    table_of,
)
from gradus.data.splits import (
    by_split,
    class_folders,
    data_files,
    existing,
    find_splits,
    folders_in,
    inner,
    print_left_out,
)
from gradus.data.text import LABEL_COLUMNS, as_label, of_one_kind
from gradus.errors import DataError, UserError, first_line, need
from gradus.limits import GB
from gradus.recipe.schema import ImagesData
from gradus.text import say

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
HASHED = GB  # bytes of a folder of images that are read for its hash
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
SYSTEM = ("Thumbs.db", "desktop.ini")  # which Windows writes into folders of images
ENDS = ("", *SUFFIXES)  # of a file that a table names
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")  # beside images, as the package datasets reads them


class Source:
    """One split, not yet decoded."""

    classes: Sequence[str] | None = None  # as the files name them
    paths: list[Path] | None = None  # of images that are files of their own

    def labels(self) -> np.ndarray:
        """(n,) whole numbers, or names (see `of_one_kind`); -1 of each where none has a label. Raises UserError where
        some have none."""
        cells = list(self.cells())
        labels = list(map(as_label, cells))
        if all(cell in (None, "") for cell in cells):
            return np.full(len(cells), -1)
        for i in [i for i, label in enumerate(labels) if label is None]:
            what = "no label" if cells[i] in (None, "") else f"label {cells[i]!r} is neither a whole number nor a name"
            raise UserError(f"{self.where(i)}: {what}. Correct it")
        array = np.array(labels := of_one_kind(labels, self.where))
        return array if array.dtype.kind in "iuU" else np.array(list(map(str, labels)))  # more than 64 bits


class Rows(Source):
    """One split in the rows of several `parts`, of which there are `sizes`."""

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
    """Tables with a column `img` or `image` (struct of bytes and path, or plain bytes) and one of labels. classes: None
    for as many as there are labels. required: whether there must be labels."""

    def __init__(self, tables: Readable, config: ImagesData, required: bool):
        self.name = str(tables)
        self.parts = self.files = list(getattr(tables, "files", (tables,)))
        about = [table_of(table) for table in self.files]
        columns, self.sizes = about[0][0], [n for _, n in about]
        self.image = config.image or first_column(self.name, columns, ("image", "img"), "image")
        names = (config.label,) if config.label else LABEL_COLUMNS
        has_labels = required or not columns.keys().isdisjoint(names)
        self.label = first_column(self.name, columns, names, "label") if has_labels else None
        self.classes = columns.get(self.label)

    def key(self) -> str:
        """What names its content."""
        return digest(self.identities, self.image, self.label)

    def column(self, name: str) -> Iterator[Any]:
        return (row[name] for table in self.parts for row in read_rows(table, [name]))

    def cells(self) -> Iterator[Any]:
        return self.column(self.label) if self.label else itertools.repeat(None, sum(self.sizes))

    def rows(self) -> Iterator[bytes | Path]:
        """Every image in order: a file's bytes, or a path."""
        for row, cell in enumerate(self.column(self.image)):
            data, path = (cell.get("bytes"), cell.get("path") or "") if isinstance(cell, dict) else (cell, "")
            data = Path(path) if data is None and Path(path).is_absolute() else data
            if not isinstance(data, bytes | Path):
                what = f"column {self.image} holds no image bytes"
                raise UserError(f"{self.where(row)}: {what}. Write the files' content into it")
            yield data


class FileSource(Source):
    """One split in images that are files of their own. labels: the cell that a table has for each."""

    def __init__(self, name: str, labels: dict[Path, Any]):
        self.name, self.paths, self.cells = name, list(labels), labels.values

    def key(self) -> str:
        stats = [(str(path.resolve()), path.stat()) for path in self.paths]
        return digest(self.labels().tolist(), [(name, about.st_size, about.st_mtime_ns) for name, about in stats])

    def content(self) -> str:
        """Of the labels and sizes of all images in their order, and of their bytes; of more than HASHED bytes those of
        images evenly chosen."""
        sizes, bytes_of = [path.stat().st_size for path in self.paths], hashlib.sha256()
        for path in self.paths[:: max(1, -(-sum(sizes) // HASHED))]:
            with open(path, "rb") as file:
                bytes_of.update(hashlib.file_digest(file, "sha256").digest())
        return digest(self.labels().tolist(), sizes, bytes_of.hexdigest())

    def where(self, i: int) -> str:
        return str(self.paths[i])

    def rows(self) -> Iterator[Path]:
        return iter(self.paths)


class FolderSource(FileSource):
    """One split in folder/<class>/<image>. Numbers are names too."""

    def __init__(self, folder: Path):
        self.name, self.paths = str(folder), []
        for each in class_folders(folder):
            files = [f for f in sorted(each.iterdir()) if not f.name.startswith(".") and f.name not in SYSTEM]
            for file in files:
                if not is_image(file):
                    kinds = ", ".join(SUFFIXES)
                    raise UserError(f"{file}: not an image file ({kinds}). Move it out of the class folder")
            if not files:
                raise UserError(f"{each}: a class without images")
            self.paths += files

    def labels(self) -> np.ndarray:
        return np.array([path.parent.name for path in self.paths])


def is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES and file.is_file()


def listings(path: Path, column: str | None = None) -> dict[Path, str]:
    """Table → its column of file names, of each table that gives the images of a folder their labels.

    That is metadata.csv (.jsonl, .parquet) with a column file_name, in the folder or in folders of it, as the package
    datasets reads it; else, where images lie in no folders of classes, the table beside them that names them, or those
    that do and are called after splits. column: in place of file_name, or of the first that names images. Raises
    UserError where several tables do.
    """
    folders = [path, *folders_in(path)]
    if tables := [file for folder in folders for name in METADATA if (file := folder / name).is_file()]:
        return dict.fromkeys(tables, column or "file_name")
    if tables := [file for file in data_files(path) if kind_of(file) != "txt"]:
        folders = [folder for folder in folders if any(map(is_image, folder.iterdir()))]
    if not folders or sum(folder != path and not split_called(folder.name) for folder in folders) > 1:  # classes
        return {}
    found = {table: name for table in tables if (name := _naming(table, [path, *folders], column))}
    if "train" in (named := by_split([*found], path)):
        return {table: found[table] for tables in named.values() for table in tables}
    if len(found) > 1:
        what = f"several tables name the images: {', '.join(table.name for table in found)}"
        raise UserError(f"{path}: {what}. Call the right one metadata.csv, and its column of names file_name")
    return found


def _naming(table: Path, folders: list[Path], column: str | None) -> str | None:
    """The column of a table that names files in these folders, perhaps without their endings."""
    rows: list[dict[str, Any]] = []
    with contextlib.suppress(UserError):  # a JSON file, say, that holds no rows
        rows = list(itertools.islice(read_rows(table), 100))
    if not rows:
        return None
    alike = [name for name in rows[0] if len({str(row.get(name)) for row in rows}) == len(rows)]
    names = [name for name in alike if column in (None, name)]
    return next((name for end in ENDS for name in names if _find(rows[0][name], folders, [end])), None)


def _find(name: Any, folders: list[Path], ends: Sequence[str] = ENDS) -> Path | None:
    return next((f for end in ends for folder in folders if os.path.isfile(f := folder / f"{name}{end}")), None)


def _listed(path: Path, config: ImagesData) -> dict[str, FileSource]:
    """Split → its images, by `listings`; {} where there are none. A split is named by the first folder of its files,
    else by its table. A note says how many images no table names."""
    if not (tables := listings(path, config.image)):
        return {}
    splits: dict[str, dict[Path, Any]] = {split: {} for split in SPLITS}
    for table, column in tables.items():
        own = next(iter(by_split([table], path)), "train")
        beside = [table.parent] if table.name in METADATA else [path, *folders_in(path)]
        folders = sorted(beside, key=lambda folder: split_called(folder.name) != own)
        for i, row in enumerate(read_rows(table), 1):
            if column not in row:
                raise no_column(table, i, column, row)
            name, where = row[column], f"{table}, row {i}: {column} {row[column]}"
            if (file := _find(name, folders)) is None:
                raise UserError(f"{where}: no such file.{near(table.parent / str(name))}")
            labels = splits[split_called(os.path.relpath(file, path).split(os.sep)[0]) or own]
            if file in labels:
                raise UserError(f"{where}: named a second time. An image has one class here: remove a row")
            labels[file] = row.get(config.label or next((c for c in LABEL_COLUMNS if c in row), None))
    if not any(as_label(cell) is not None for cell in splits["train"].values()):
        what = f"no training image has a label (column {config.label or ', '.join(LABEL_COLUMNS)})"
        raise UserError(f"{next(iter(tables))}: {what}. Rename the column of labels, or set data.label=NAME")
    images = set(filter(is_image, path.rglob("*")))
    if n := len(images.difference(*splits.values())):
        named = ", ".join(sorted({table.name for table in tables}))
        say(f"note: {n:,} of {len(images):,} images are not named in {named} and are left out")
    return {split: FileSource(f"{path} ({split})", labels) for split, labels in splits.items() if labels}


class DigitsSource(Source):
    """scikit-learn's 1,797 handwritten digits, 8 x 8; grey levels 0 to 16 become 0 to 255."""

    name, classes = "digits", list("0123456789")

    def key(self) -> str:
        return self.name

    def content(self) -> None:
        """They come with a package."""

    @functools.cached_property
    def bunch(self) -> Any:
        return need("sklearn.datasets", "vision", "data.source=digits", DataError).load_digits()

    def labels(self) -> np.ndarray:
        return self.bunch.target.astype(np.int64)

    def rows(self) -> Iterator[np.ndarray]:
        """Every image, decoded: (1, 8, 8) uint8."""
        return iter(np.rint(self.bunch.images[:, None] * (255 / 16)).astype(np.uint8))


class CifarSource(Rows):
    """One split of the official binary version of CIFAR-10 (Krizhevsky 2009), data_batch_1.bin ... data_batch_5.bin and
    test_batch.bin, or of the archive of them: records of a label byte and 32 × 32 red, green and blue bytes each."""

    classes = CIFAR10
    RECORD = 1 + 3 * 32 * 32

    def __init__(self, path: Path, split: str):
        self.path, self.name = path, f"{path} ({split})"
        self.wanted = re.compile(r"data_batch_\d+\.bin" if split == "train" else r"test_batch\.bin")
        self.files = [path]
        if path.is_dir():
            self.files = [file for file in sorted(path.iterdir()) if self.wanted.fullmatch(file.name)]

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
            why = first_line(e).rstrip(":")
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


def find_sources(config: ImagesData) -> dict[str, Source]:
    """Split → source, the training split first. Raises UserError where there is nothing to read."""
    if config.path is None:
        kinds = "a parquet file, a folder, cifar-10-binary.tar.gz or hf:NAME (or set data.source=digits)"
        raise DataError(f"data.path is missing: {kinds}")
    path = expanded(config.path) if is_hub(config.path) else existing(config.path)
    if cifar := find_cifar(path):
        no_effect(config, ("image", "label"), "CIFAR-10's binary version")
        sources = {split: CifarSource(cifar, split) for split in ("train", "test")}
        return {split: source for split, source in sources.items() if source.files}
    if path.is_dir() and (sources := _listed(inner(path), config)):
        return sources
    if tables := _tables(config.path):
        return {split: TableSource(files, config, split == "train") for split, files in tables.items()}
    no_effect(config, ("image", "label"), f"class folders such as {config.path}")
    folders = folders_in(path := inner(path))
    if not folders:
        raise UserError(f"data.path={config.path}: no parquet file, no class folder and no CIFAR-10 archive in it")
    by_name = {split: folder for split in SPLITS for folder in folders if split_called(folder.name) == split}
    if by_name and ("train" not in by_name or len(by_name) < len(folders)):
        there = ", ".join(d.name for d in folders)
        raise UserError(f"data.path={config.path}: {there}: beside train there may be only valid and test, one of each")
    print_left_out(path)
    return {split: FolderSource(folder) for split, folder in (by_name or {"train": path}).items()}


def no_effect(config: ImagesData, keys: Sequence[str], what: str) -> None:
    """Raises UserError where one of these keys is set."""
    for key in keys:
        if getattr(config, key) is not None:
            raise UserError(f"data.{key}={getattr(config, key)} has no effect with {what}. Leave it out")


def _tables(where: str) -> dict[str, Readable]:
    """Parquet files, or those of the hub, by split; {} where a folder has none."""
    path = expanded(where)
    if path.is_file() and path.suffix != ".parquet":
        kinds = "a .parquet file, a folder or cifar-10-binary.tar.gz"
        raise UserError(f"data.path={path}: images come from {kinds}, not from this")
    there = (file for level in ("*", "*/*", "*/*/*") for file in path.glob(f"{level}.parquet"))
    if not (is_hub(where) or path.is_file() or next(there, None)):
        return {}
    return find_splits(where)
