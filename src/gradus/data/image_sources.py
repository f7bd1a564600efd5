"""Where images with a label come from: tables, class folders, CIFAR-10's own files."""

from __future__ import annotations

import functools
import hashlib
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradus.data.readers import SPLITS, expanded, features_in, hub_splits
from gradus.errors import DataError, UserError, did_you_mean, need
from gradus.recipe.schema import ImagesData
from gradus.recipe.text import looked_for

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
SPLIT_OF = {alias: split for split, names in SPLITS.items() for alias in names}
CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


class Source:
    """One split, not yet decoded. key(): what names its content; labels(): (n,) int64; rows(): every image in order: a
    file's bytes, a path, or decoded (channels, height, width)."""

    name: str  # what messages call it
    classes: list[str] | None  # None: as many as there are labels
    paths: list[Path] | None = None  # of images that are files of their own
    parts: list[tuple[str, int]]  # what messages call each file of rows, and how many rows it has

    def where(self, i: int) -> str:
        """File and row of image i."""
        for name, n in self.parts:
            if i < n:
                return f"{name}, row {i}"
            i -= n
        raise IndexError(i)


class TableSource(Source):
    """Parquet files, or a split of a Hugging Face data set: columns `img` or `image` (struct of bytes and path, or
    plain bytes) and `label`.

    files: (what messages call it, rows, column name → its Arrow arrays in order) of each. names: of the classes, by
    column. key: what names the content of some columns.
    """

    def __init__(
        self, name: str, files: list[tuple[str, int, Callable[[str], Iterator[Any]]]], config: ImagesData,
        columns: list[str], names: dict[str, list[str] | None], key: Callable[..., str],
    ):  # fmt: skip
        self.name, self.files = name, files
        self.parts = [(file, n) for file, n, _ in files]
        self.image = _column(config.image, ("image", "img"), columns, "data.image", name)
        self.label = _column(config.label, ("label", "labels"), columns, "data.label", name)
        self.classes, self._key = names.get(self.label), key

    def key(self) -> str:
        return self._key(self.image, self.label)

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": self.parts}  # all that `where` needs in a worker

    def labels(self) -> np.ndarray:
        types = need("pyarrow.types", "vision", "reading parquet")
        labels, row = [np.empty(0, np.int64)], 0
        for file, _, arrays in self.files:
            for array in arrays(self.label):
                if not types.is_integer(array.type):
                    raise UserError(f"{file}: column {self.label} holds {array.type}; labels are integers from 0")
                if array.null_count:
                    raise UserError(f"{self.where(row + int(np.argmax(array.is_null().to_numpy(False))))}: no label")
                labels.append(array.to_numpy().astype(np.int64))
                row += len(array)
        return np.concatenate(labels)

    def rows(self) -> Iterator[bytes | Path]:
        cells = (cell for _, _, arrays in self.files for array in arrays(self.image) for cell in array.to_pylist())
        for row, cell in enumerate(cells):
            data = cell.get("bytes") if isinstance(cell, dict) else cell
            if data is None and isinstance(cell, dict) and cell.get("path") and Path(cell["path"]).is_absolute():
                data = Path(cell["path"])
            if not isinstance(data, bytes | Path):
                what = f"column {self.image} holds no image bytes"
                raise UserError(f"{self.where(row)}: {what}. Write the files' content into it")
            yield data


def _parquet(files: list[Path], config: ImagesData) -> TableSource:
    parquet = need("pyarrow.parquet", "vision", "reading parquet", DataError)
    readers = []
    for file in files:
        try:
            readers.append(parquet.ParquetFile(file))
        except (OSError, ValueError) as e:  # pyarrow's ArrowInvalid is a ValueError
            raise UserError(f"{file}: not a readable parquet file ({str(e).splitlines()[0]})") from None
    schema = readers[0].schema_arrow
    for file, reader in zip(files, readers):
        if (names := reader.schema_arrow.names) != schema.names:
            raise UserError(f"{file}: columns {', '.join(names)}, but {files[0]} has {', '.join(schema.names)}")

    def arrays(reader: Any, column: str) -> Iterator[Any]:
        return (batch.column(0) for batch in reader.iter_batches(batch_size=256, columns=[column]))

    name = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
    parts = [(str(f), r.metadata.num_rows, functools.partial(arrays, r)) for f, r in zip(files, readers)]
    key = functools.partial(_hash, files)
    return TableSource(name, parts, config, schema.names, features_in(schema.metadata), key)


def _hub(config: ImagesData) -> dict[str, Source]:
    where = f"data.path={config.path}"
    tables = hub_splits(config.path.removeprefix("hf:"), where)
    found: dict[str, Source] = {}
    for split, table in tables.items():
        if split in SPLIT_OF:
            names = {column: getattr(feature, "names", None) for column, feature in table.features.items()}
            name, raw = f"{config.path} {split}", table.with_format("arrow")

            def arrays(column: str, raw: Any = raw) -> Iterator[Any]:
                batches = (batch.column(0) for batch in raw.select_columns([column]).iter(256))
                return (array for batch in batches for array in batch.chunks)

            key = lambda *columns, table=table: " ".join((table._fingerprint, *columns))  # noqa: E731
            files = [(name, len(table), arrays)]
            found[SPLIT_OF[split]] = TableSource(name, files, config, table.column_names, names, key)
    if "train" not in found:
        raise UserError(f"{where}: there is no split train, only {', '.join(tables)}")
    return found


def _column(given: str | None, usual: tuple[str, ...], columns: list[str], key: str, name: str) -> str:
    if given is not None and given not in columns:
        raise UserError(f"{name}: no column {given} ({key}).{did_you_mean(given, columns)}")
    column = given or next((c for c in usual if c in columns), None)
    if column is None:
        raise UserError(f"{name}: no column {' or '.join(usual)}. Set {key} to one of {', '.join(columns)}")
    return column


def _hash(files: list[Path], *words: str) -> str:
    """Of the files' content."""
    digest = hashlib.sha256("\0".join(words).encode())
    for file in files:
        with open(file, "rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()


class FolderSource(Source):
    """folder/<class>/<image>. classes: those that there must be; names: whose order they have, where all are among
    these."""

    def __init__(self, folder: Path, classes: list[str] | None = None, names: Sequence[str] | None = None):
        self.name = str(folder)
        there = [d.name for d in sorted(folder.iterdir()) if d.is_dir() and not d.name.startswith(".")]
        self.classes = classes or (list(names) if names and set(there) <= set(names) else there)
        self.paths, self.of = [], []
        for name in there:
            if name not in self.classes:
                meant = did_you_mean(name, self.classes)
                raise UserError(f"{folder / name}: a class that the training set does not have.{meant}")
            files = [f for f in sorted((folder / name).iterdir()) if not f.name.startswith(".")]
            for file in files:
                if file.suffix.lower() not in SUFFIXES or not file.is_file():
                    kinds = ", ".join(SUFFIXES)
                    raise UserError(f"{file}: not an image file ({kinds}). Move it out of the class folder")
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
    """The official binary version of CIFAR-10: records of a label byte and 32 x 32 red, green and blue bytes each
    (Krizhevsky 2009), in data_batch_1.bin ... data_batch_5.bin and test_batch.bin, or in the archive of them."""

    RECORD = 1 + 3 * 32 * 32
    classes = CIFAR10

    def __init__(self, path: Path, split: str):
        self.path, self.split, self.name = path, split, f"{path} ({split})"
        self.wanted = re.compile(r"data_batch_\d+\.bin" if split == "train" else r"test_batch\.bin")

    def files(self) -> list[Path]:
        return sorted(f for f in self.path.iterdir() if self.wanted.fullmatch(f.name))

    def key(self) -> str:
        return _hash(self.files() if self.path.is_dir() else [self.path], self.split)

    @property
    def parts(self) -> list[tuple[str, int]]:
        return [(name, len(records)) for name, records in self.records]

    @functools.cached_property
    def records(self) -> list[tuple[str, np.ndarray]]:
        """(file, (n, 3073) uint8) of each."""
        files = sorted(self._unpacked())
        for name, data in files:
            if rest := len(data) % self.RECORD:
                raise UserError(
                    f"{name}, row {len(data) // self.RECORD}: an image of the wrong size, {rest} bytes, not "
                    f"{self.RECORD}. The file is cut short or not CIFAR-10's; load it again"
                )
        if not files:
            raise UserError(f"{self.path}: not CIFAR-10's binary version, it holds no {self.split} records")
        return [(name, np.frombuffer(data, dtype=np.uint8).reshape(-1, self.RECORD)) for name, data in files]

    def _unpacked(self) -> Iterator[tuple[str, bytes]]:
        if self.path.is_dir():
            yield from ((str(file), file.read_bytes()) for file in self.files())
            return
        try:
            with tarfile.open(self.path, "r:*") as archive:
                for member in archive:
                    base = member.name.rsplit("/", 1)[-1]
                    if re.fullmatch(r"data_batch_\d|test_batch", base):
                        raise _pickles(self.path)
                    if self.wanted.fullmatch(base):
                        yield f"{self.path}:{member.name}", archive.extractfile(member).read()
        except (tarfile.TarError, OSError, EOFError) as e:
            why = str(e).splitlines()[0].rstrip(":")
            raise UserError(f"{self.path}: not a readable archive ({why}). Load it again") from None

    def labels(self) -> np.ndarray:
        return np.concatenate([records[:, 0] for _, records in self.records]).astype(np.int64)

    def rows(self) -> Iterator[np.ndarray]:
        return (image for _, records in self.records for image in records[:, 1:].reshape(-1, 3, 32, 32))


def _pickles(path: Path) -> UserError:
    why = "CIFAR-10's python version holds pickles, which can run any code and are not read"
    return UserError(f"{path}: {why}. Use the binary version, cifar-10-binary.tar.gz")


# ---------------------------------------------------------------- which there are


def find_sources(config: ImagesData, names: Sequence[str] | None = None) -> dict[str, Source]:
    """Split → source, the training split first. names: of the classes. Raises UserError where there is nothing to
    read."""
    if config.path is None:
        kinds = "a parquet file, a folder, cifar-10-binary.tar.gz or hf:NAME (or set data.source=digits)"
        raise DataError(f"data.path is missing: {kinds}")
    if config.path.startswith("hf:"):
        return _in_order(_hub(config))
    path = expanded(config.path)
    if not path.exists():
        beside = [str(p) for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = did_you_mean(str(path), beside) if beside else ""
        raise DataError(f"data.path={config.path}: there is no such file or folder{looked_for(config.path)}.{near}")
    shards = [path] if path.is_file() and path.suffix == ".parquet" else []
    if path.is_dir():
        shards = sorted(path.glob("*.parquet")) or sorted(path.glob("*/*.parquet"))
    if shards:
        by_split = {"train": shards} if path.is_file() else _by_split(shards)
        return _in_order({split: _parquet(files, config) for split, files in by_split.items()})
    no_columns(config, config.path)
    if path.is_file():
        if not re.search(r"\.(tar|tar\.gz|tgz)$", path.name):
            kinds = "a .parquet file, a folder or cifar-10-binary.tar.gz"
            raise UserError(f"data.path={config.path}: images come from {kinds}, not from this")
        return {split: CifarSource(path, split) for split in ("train", "test")}
    return _cifar(path) or _in_order(_folders(config, path, names))


def no_columns(config: ImagesData, what: str) -> None:
    """Raises UserError where columns are named that there cannot be."""
    for key in ("image", "label"):
        if getattr(config, key) is not None:
            no_effect = f"data.{key}={getattr(config, key)} has no effect with {what}"
            raise UserError(f"{no_effect}, which has no columns. Leave it out")


def _in_order(found: dict[str, Source]) -> dict[str, Source]:
    return {split: found[split] for split in SPLITS if split in found}


def _by_split(files: list[Path]) -> dict[str, list[Path]]:
    """train-00000-of-00002.parquet and the like, by split."""
    found: dict[str, list[Path]] = {}
    for file in files:
        word = re.split(r"[^a-z]", file.stem.lower())[0]
        if word not in SPLIT_OF and len(files) > 1:
            raise UserError(f"{file}: which split is it? Its name begins with none of {', '.join(SPLIT_OF)}")
        found.setdefault(SPLIT_OF.get(word, "train"), []).append(file)
    return found


def _cifar(path: Path) -> dict[str, Source]:
    """{} where there is no CIFAR-10 in this folder."""
    for folder in (path, path / "cifar-10-batches-bin"):
        if (folder / "data_batch_1.bin").exists():
            sources = {split: CifarSource(folder, split) for split in ("train", "test")}
            return {split: source for split, source in sources.items() if source.files()}
    if (path / "cifar-10-binary.tar.gz").exists():
        return {split: CifarSource(path / "cifar-10-binary.tar.gz", split) for split in ("train", "test")}
    for mark in ("data_batch_1", "cifar-10-batches-py", "cifar-10-python.tar.gz"):
        if (path / mark).exists():
            raise _pickles(path / mark)
    return {}


def _folders(config: ImagesData, path: Path, names: Sequence[str] | None) -> dict[str, Source]:
    folders = [d for d in sorted(path.iterdir()) if d.is_dir() and not d.name.startswith(".")]
    if not folders:
        raise UserError(f"data.path={config.path}: no parquet file, no class folder and no CIFAR-10 archive in it")
    if not any(d.name in SPLIT_OF for d in folders):
        return {"train": FolderSource(path, names=names)}
    by_split: dict[str, Path] = {}
    for folder in folders:
        if folder.name not in SPLIT_OF:
            raise UserError(f"{folder}: neither train, valid nor test, which lie beside it. Move it out")
        first = by_split.setdefault(SPLIT_OF[folder.name], folder)
        if first != folder:
            raise UserError(f"{folder}: there already is {first.name}. Keep one of them")
    if "train" not in by_split:
        there = ", ".join(d.name for d in folders)
        raise UserError(f"data.path={config.path}: there is no train folder, only {there}")
    train = FolderSource(by_split.pop("train"), names=names)
    return {"train": train} | {split: FolderSource(folder, train.classes) for split, folder in by_split.items()}
