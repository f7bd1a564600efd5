"""Text sources and the data sets made of them: read in a stream, tokenised once, kept as memory-mapped files by the hash of their content."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import errno
import functools
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradus import limits
from gradus.data.tokenizers import Tokenizer, load, train_bpe
from gradus.errors import DataError, UserError, did_you_mean, need
from gradus.recipe.text import looked_for

KINDS = {".txt": "txt", ".raw": "txt", ".tokens": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"} | {
    f".{kind}": kind for kind in ("csv", "tsv", "parquet")
}
SPLITS = {"train": ("train", "training"), "valid": ("valid", "val", "validation", "dev"), "test": ("test",)}
TEXT_COLUMNS = ("text", "sentence", "review", "content")
LABEL_COLUMNS = ("label", "labels", "class", "target")
BLOCK = 1 << 16  # characters of running text that are tokenised as one
LONGEST = 1 << 24  # characters of one document between blank lines


# ---------------------------------------------------------------- reading


def _kind(path: Path) -> str:
    """txt, jsonl, csv, tsv or parquet, by the name without .gz or .xz."""
    suffix = _suffix(path)
    if suffix not in KINDS:
        near = did_you_mean(suffix, KINDS) if suffix else f" Known: {', '.join(KINDS)}."
        raise UserError(f"{path}: not a kind of file that is read ({suffix or 'no suffix'}).{near} Each may also end in .gz or .xz.")
    return KINDS[suffix]


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in (".gz", ".xz") else path.suffix


def _open(path: Path) -> io.BufferedIOBase:
    limits.regular(path)
    if path.suffix == ".gz":
        return gzip.open(path, "rb")
    return lzma.open(path, "rb") if path.suffix == ".xz" else open(path, "rb")


@contextlib.contextmanager
def _lines(path: Path, newline: str | None = "\n") -> Iterator[Iterator[str]]:
    """The lines with their ends. Raises UserError for one that does not end: what is no text, or was packed to burst."""
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline=newline) as file:

        def lines() -> Iterator[str]:
            while line := file.readline(limits.LINE):
                if len(line) == limits.LINE:
                    raise UserError(f"{path}: a line of more than {limits.LINE:,} characters. Is it text? Break it into lines.")
                yield line

        yield lines()


def _counted(path: str | Path, rows: Iterable, unit: str = "row") -> Iterator:
    """Pass rows on; say of a failure to read which file it was and after which row. No rows at all is a failure too."""
    n = 0
    try:
        for row in rows:
            n += 1
            yield row
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not UTF-8 text after {unit} {n} (byte 0x{e.object[e.start]:02x}). Convert the file to UTF-8.") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as e:
        raise UserError(f"{path}: truncated or corrupt after {unit} {n} ({e}). Get the file again.") from None
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.{_near(Path(path))}") from None
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror or e}).") from None
    if n == 0:
        raise UserError(f"{path}: empty: there is no {unit} in it. Give a file with some.")


def _near(path: Path) -> str:
    return did_you_mean(path.name, os.listdir(path.parent)) if path.parent.is_dir() else f" There is no folder {path.parent} either."


def read_lines(path: str | Path) -> Iterator[str]:
    """The lines of a text file of any name (also .gz, .xz), without their ends. Raises UserError for one that is empty or unreadable."""
    path = Path(os.path.expanduser(path))

    def lines() -> Iterator[str]:
        with _lines(path) as file:
            for line in file:
                yield line.removesuffix("\n").removesuffix("\r")

    return _counted(path, lines(), "line")


def read_rows(path: str | Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any] | str]:
    """The rows of a file in a stream: lines (str) of .txt; dicts of .jsonl, .csv, .tsv and .parquet; each also .gz or .xz.

    `hf:NAME[:CONFIG][#SPLIT]` is a Hugging Face data set, and so is a folder that `datasets.save_to_disk` wrote. columns: keep only these.
    A .csv is quoted as usual, a .tsv (as GLUE's) never; both begin with the names of their columns.
    Raises UserError, with file and row (counted from 1, without header and blank lines), for a row that is no JSON object, has another number
    of fields, or lacks a column; and for a file that is missing, empty, truncated or of an unknown kind.
    """
    if is_hub(path):
        return _counted(path, _hub_rows(path, columns))
    path = Path(os.path.expanduser(path))
    kind = _kind(path)
    if kind == "txt":
        if columns:
            raise UserError(f"{path}: a text file has no columns, so no {', '.join(columns)}. Use .jsonl, .csv, .tsv or .parquet.")
        return read_lines(path)
    return _counted(path, {"jsonl": _jsonl, "csv": _csv, "tsv": _tsv, "parquet": _parquet}[kind](path, columns))


def _pick(path: str | Path, row: int, record: dict[str, Any], columns: Sequence[str] | None) -> dict[str, Any]:
    if columns is None:
        return record
    try:
        return {c: record[c] for c in columns}
    except KeyError as e:
        raise _no_column(path, row, e.args[0], record) from None


def _no_column(path: str | Path, row: int, column: str, there: Iterable[str]) -> UserError:
    names = ", ".join(map(str, there))
    return UserError(f"{path}: row {row} has no column {column!r}; it has: {names[:200] or 'none'}. Name the one to use.")


def _jsonl(path: Path, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    row = 0
    with _lines(path) as file:
        for line in file:
            if not line.strip():
                continue
            row += 1
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise UserError(f"{path}: row {row} is not valid JSON ({str(e).split(';')[0]}). Each line must be one JSON object.") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}: row {row} is a JSON {type(record).__name__}. Each line must be one JSON object.")
            yield _pick(path, row, record, columns)


def _table(path: Path, records: Iterator[list[str]], columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    header = next(records, [])
    for row, values in enumerate(records, 1):
        if len(values) != len(header):
            raise UserError(f"{path}: row {row} has {len(values)} fields, but the header names {len(header)}: {', '.join(header)[:200]}.")
        yield _pick(path, row, dict(zip(header, values)), columns)


def _csv(path: Path, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)  # the module's own limit, 128 KiB, is less than many documents
    with _lines(path, newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            yield from _table(path, filter(None, reader), columns)
        except csv.Error as e:
            raise UserError(f"{path}: not valid CSV at line {reader.line_num} ({e}). Mend the quotes there.") from None


def _tsv(path: Path, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    with _lines(path) as file:
        lines = (line.removesuffix("\n").removesuffix("\r") for line in file)
        yield from _table(path, (line.split("\t") for line in lines if line), columns)


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    pq = need("pyarrow.parquet", "hf", "A Parquet file", DataError)
    arrow = need("pyarrow", "hf", "A Parquet file")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_open(path))
        if path.suffix in (".gz", ".xz"):  # Parquet is read from its end, so the file must be unpacked first
            packed, file = file, stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(packed, file)
        try:
            table = pq.ParquetFile(file)
            names = table.schema_arrow.names
            for missing in set(columns or ()) - set(names):
                raise _no_column(path, 1, missing, names)
            for batch in table.iter_batches(batch_size=1024, columns=list(columns) if columns else None):
                yield from batch.to_pylist()
        except arrow.ArrowException as e:
            raise UserError(f"{path}: not a whole Parquet file ({str(e).splitlines()[0]}). Get the file again.") from None


# ---------------------------------------------------------------- Hugging Face data sets


def is_hub(path: str | Path) -> bool:
    """`hf:NAME`, or a folder that `save_to_disk` wrote."""
    return str(path).startswith("hf:") or _is_saved(Path(os.path.expanduser(path)))


def _is_saved(folder: Path) -> bool:
    """Did `datasets.save_to_disk` write this folder?"""
    return (folder / "dataset_dict.json").is_file() or ((folder / "dataset_info.json").is_file() and (folder / "state.json").is_file())


@functools.lru_cache(maxsize=4)
def _hub(name: str) -> dict[str, Any]:
    """Splits of `NAME[:CONFIG]` or of a folder of `save_to_disk`."""
    datasets = need("datasets", "hf", f"hf:{name}", DataError)
    folder = Path(os.path.expanduser(name))
    try:
        if _is_saved(folder):
            found = datasets.load_from_disk(str(folder))
        else:
            found = datasets.load_dataset(*name.split(":", 1))
    except Exception as e:  # of many kinds: offline, unknown, gated, no such configuration
        reason = (str(e).strip() or type(e).__name__).splitlines()[0][:200]
        offline = any(os.environ.get(k, "") not in ("", "0") for k in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"))
        help = "Stage it where there is internet (gradus fetch), or give a local folder" if offline else "Check the name and the connection"
        raise DataError(f"hf:{name}: cannot be loaded ({reason}). {help}.") from None
    return dict(found) if isinstance(found, dict) else {"train": found}


def _hub_split(path: str | Path) -> Any:
    name, _, split = str(path).removeprefix("hf:").partition("#")
    splits = _hub(name)
    split = split or "train"
    for alias in (split, *next((names for names in SPLITS.values() if split in names), ())):
        if alias in splits:
            return splits[alias]
    raise UserError(f"hf:{name}: no split {split!r}; there are: {', '.join(splits)}.")


def _hub_rows(path: str | Path, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    data = _hub_split(path)
    for missing in set(columns or ()) - set(data.column_names):
        raise _no_column(path, 1, missing, data.column_names)
    if columns:
        data = data.select_columns(list(columns))
    for batch in data.iter(1000):
        names = list(batch)
        yield from (dict(zip(names, values)) for values in zip(*batch.values()))


# ---------------------------------------------------------------- which file is which split


def find_split(path: str | Path, split: str, explicit: str | None = None, required: bool = True) -> Path | None:
    """The file of a split (train, valid, test) of a folder, by its name: `train.*`, `valid.*`, `val-*`, `validation.*`, `dev.*`, `wiki.test.*` ...

    explicit: the file's name below `path`, where it is not a usual one. A single file is its own train split. `hf:NAME` gives
    `hf:NAME#SPLIT`, which `read_rows` takes. Raises UserError, with what is there, for no file or several; with required=False no file is None.
    """
    if is_hub(path):
        name = str(path).removeprefix("hf:").partition("#")[0]
        there = _hub(name)
        found = next((s for s in ((explicit,) if explicit else SPLITS[split]) if s in there), None)
        if found is None and (required or explicit):
            raise UserError(f"hf:{name}: no split {explicit or split!r}; there are: {', '.join(there)}. Set data.{split}=NAME.")
        return None if found is None else Path(f"hf:{name}#{found}")
    path = Path(os.path.expanduser(path))
    if not path.exists():
        raise DataError(f"{path}: no such file or folder{looked_for(path)}.{_near(path)}")
    if explicit is not None:
        file = (path if path.is_dir() else path.parent) / explicit
        if not file.is_file():
            raise UserError(f"data.{split}={explicit}: no such file in {file.parent}.{_near(file)}")
        return file
    if path.is_file():
        if split == "train" or not required:
            return path if split == "train" else None
        raise UserError(f"{path}: one file, so there is no {split} split. Set data.{split}=NAME (a file beside it), or give a folder.")
    files = _files(path)
    found = _named([f for f in files if _suffix(f) in KINDS], split)
    if len(found) > 1:
        raise UserError(f"{path}: several files for the {split} split: {', '.join(f.name for f in found)}. Set data.{split}=NAME.")
    if not found and required:
        there = ", ".join(f.name for f in files[:20]) or "no files"
        names = ", ".join(f"{alias}.*" for alias in SPLITS[split])
        raise UserError(f"{path}: no file for the {split} split ({names}); there are: {there}. Set data.{split}=NAME.")
    return found[0] if found else None


def _files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_file() and not f.name.startswith("."))


def _named(files: list[Path], split: str) -> list[Path]:
    """Files called after a split: exactly (`train.csv`), else as one part of the name (`train-00000-of-00001.parquet`, `wiki.train.tokens`)."""
    exact = [f for f in files if f.name.split(".")[0] in SPLITS[split]]
    return exact or [f for f in files if set(re.split(r"[-_.]", f.name)) & set(SPLITS[split])]


# ---------------------------------------------------------------- the cache


def cache_dir(cache: str | Path | None = None) -> Path:
    """Where made things are kept: `cache` if given, else $GRADUS_CACHE, else ~/.cache/gradus."""
    return Path(os.path.expanduser(cache or os.environ.get("GRADUS_CACHE") or "~/.cache/gradus"))


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def identity(path: str | Path) -> str:
    """A hash of a source's content, whatever its name or date. That of a large file is remembered as long as size and date stay."""
    if is_hub(path):
        return _digest("hf", _hub_split(path)._fingerprint)
    path = Path(os.path.expanduser(path))
    try:
        with open(limits.regular(path), "rb") as file:
            about = os.fstat(file.fileno())
            stamp = [about.st_size, about.st_mtime_ns]
            memo = cache_dir() / "files" / f"{_digest(str(path.resolve()))}.json"
            large = about.st_size >= 1 << 26
            if large:
                with contextlib.suppress(OSError, ValueError, KeyError):
                    known = json.loads(memo.read_text())
                    if known["stamp"] == stamp:
                        return known["hash"]
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror}).{_near(path) if isinstance(e, FileNotFoundError) else ''}") from None
    if large and time.time() - about.st_mtime > 5:  # a file this young may change again without its date showing it
        with contextlib.suppress(OSError):  # only a convenience
            memo.parent.mkdir(parents=True, exist_ok=True)
            aside = memo.with_suffix(f".{secrets.token_hex(8)}")
            aside.write_text(json.dumps({"stamp": stamp, "hash": found}))
            os.replace(aside, memo)
    return found


def keep(
    folder: Path, write: Callable[[Path], None], whole: Callable[[Path], bool], setting: str = "data.cache"
) -> None:
    """Make a folder by `write`, aside and then renamed, so that it is there whole or not at all, whenever the process is killed.

    Others may do the same at the same time, in other containers and on other hosts that share the disk: each has a folder
    aside of its own. Raises UserError where the cache cannot be written or the disk is full; `setting` names it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed
            if time.time() - _touched(left) > 86400:
                shutil.rmtree(left, ignore_errors=True)
        aside = folder.parent / f".{folder.name}.{secrets.token_hex(8)}"
        aside.mkdir()
        try:
            write(aside)
            if folder.exists() and not whole(folder):
                os.rename(folder, aside / "damaged")
            try:
                os.rename(aside, folder)
            except OSError as e:  # another process made it first
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            shutil.rmtree(folder / "damaged", ignore_errors=True)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as e:
        why = f"cannot write the cache ({e.strerror or e})"
        raise UserError(f"{folder.parent}: {why}. Set {setting} to a folder with room.") from None


def _touched(folder: Path) -> float:
    """When a folder or anything in it last changed, in seconds since the epoch. A file that grows leaves its folder's time."""
    times = []
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):  # renamed by now
            times.append(path.stat().st_mtime)
    return max(times, default=time.time())


class _Progress:
    """A line on stderr every 2 s (30 s where there is no terminal), from the third second on."""

    def __init__(self, what: str):
        self.what, self.began, self.next, self.shown = what, time.perf_counter(), 3.0, False
        self.terminal = sys.stderr.isatty()

    def __call__(self, characters: int, tokens: int) -> None:
        spent = time.perf_counter() - self.began
        if spent >= self.next:
            self.next, self.shown = spent + (2.0 if self.terminal else 30.0), True
            self._show(characters, tokens, spent, "" if self.terminal else "\n")

    def end(self, characters: int, tokens: int) -> None:
        if self.shown:
            self._show(characters, tokens, time.perf_counter() - self.began, "\n")

    def _show(self, characters: int, tokens: int, spent: float, end: str) -> None:
        line = f"tokenising {self.what}: {characters / 1e6:,.1f} M characters, {tokens / 1e6:,.1f} M tokens, {tokens / spent / 1e6:.2f} M tokens/s"
        print(f"\r{line}" if self.terminal else line, end=end, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- text that is read again and again


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Texts in a stream, as often as wanted: iterate over it. `key` is a hash of the content and of how it is read.

    separate: each text is a document (a row, a paragraph, a file), after which an end-of-text token makes sense; else the texts are
    consecutive pieces of one running text.
    """

    make: Callable[[], Iterator[str]]
    key: str
    name: str
    separate: bool

    def __iter__(self) -> Iterator[str]:
        return self.make()

    @classmethod
    def open(cls, path: str | Path, column: str = "text", documents: bool = False) -> Corpus:
        """A .txt is one running text in pieces of about 64 K characters, cut at line ends; with documents=True it is cut at blank lines instead.
        Of every other kind each row's `column` is a document."""
        if not is_hub(path) and _kind(Path(path)) == "txt":
            read = _paragraphs if documents else _blocks
            return cls(functools.partial(read, Path(os.path.expanduser(path))), _digest(read.__name__, identity(path)), str(path), documents)
        return cls.column(path, column)

    @classmethod
    def column(cls, path: str | Path, column: str | None) -> Corpus:
        """One column of a table (None: the first there is of TEXT_COLUMNS); each row is a document."""
        kind = "hf" if is_hub(path) else _kind(Path(path))
        return cls(functools.partial(_column, path, column), _digest("column", kind, column, identity(path)), str(path), True)

    @classmethod
    def lines(cls, path: str | Path) -> Corpus:
        """Each line of a text file of any name is a document, the empty ones too: one side of parallel text."""
        return cls(functools.partial(read_lines, path), _digest("lines", identity(path)), str(path), True)

    @classmethod
    def stdlib(cls) -> Corpus:
        """The Python standard library of this machine; each file is a document."""
        found = hashlib.sha256()
        for text in stdlib_texts():
            found.update(text.encode() + b"\0")
        return cls(stdlib_texts, _digest("stdlib", found.hexdigest()), f"the standard library of Python {sys.version.split()[0]}", True)

    def split(self, fraction: float) -> tuple[Corpus, Corpus]:
        """All but the last `fraction` of the characters, and the rest. Documents are not cut: one belongs to where it begins."""
        parts = (
            dataclasses.replace(
                self, make=functools.partial(self._part, fraction, last), key=_digest(self.key, fraction, last), name=f"{self.name} ({share})"
            )
            for last, share in ((False, f"first {1 - fraction:.0%}"), (True, f"last {fraction:.0%}"))
        )
        return tuple(parts)

    def every(self, n: int, held: bool) -> Corpus:
        """Every n-th text (held), or all others."""
        share = f"every {n}th" if held else f"without every {n}th"
        return dataclasses.replace(
            self, make=functools.partial(self._every, n, held), key=_digest(self.key, "every", n, held), name=f"{self.name} ({share})"
        )

    def _every(self, n: int, held: bool) -> Iterator[str]:
        at = 0
        for at, text in enumerate(self, 1):
            if (at % n == 0) == held:
                yield text
        if at < n:
            raise UserError(f"{self.name}: {at} lines are too few to hold out every {n}th for validation. Give a valid split.")

    @functools.cached_property
    def n_characters(self) -> int:
        return sum(map(len, self))

    def _part(self, fraction: float, last: bool) -> Iterator[str]:
        cut, at, n = int(self.n_characters * (1 - fraction)), 0, 0
        for text in self:
            begin, at = at, at + len(text)
            if self.separate:
                part = text if (begin >= cut) == last else None
            else:
                keep = max(0, cut - begin)
                part = (text[keep:] if last else text[:keep]) or None
            if part is not None:
                n += 1
                yield part
        if n == 0:
            raise UserError(f"{self.name}: too little text to take {fraction:.0%} of it for validation. Set data.valid=NAME.")


def _column(path: str | Path, column: str | None) -> Iterator[str]:
    for number, row in enumerate(read_rows(path), 1):
        if isinstance(row, str):
            raise UserError(f"{path}: a text file has no columns, so no {column or 'text'}. Use .jsonl, .csv, .tsv or .parquet.")
        if column not in row and isinstance(row.get("translation"), dict):  # how Hugging Face keeps parallel text
            row = row["translation"]
        column = column or _first(str(path), row, TEXT_COLUMNS, "text")
        yield _text(path, number, row, column)


def _text(path: str | Path, number: int, row: dict[str, Any], column: str) -> str:
    if column not in row:
        raise _no_column(path, number, column, row)
    if not isinstance(row[column], str):
        raise UserError(f"{path}: row {number}: column {column!r} holds {row[column]!r}, not text.")
    return row[column]


def _blocks(path: Path) -> Iterator[str]:
    """Running text in pieces of about BLOCK characters, cut where byte-level BPE and WordPiece have a border in any case: at a line's end, else
    before a space. (SentencePiece sees a word begin at each piece, which may change the token there.)"""

    def blocks() -> Iterator[str]:
        with io.TextIOWrapper(_open(path), encoding="utf-8-sig") as file:
            text = ""
            while more := file.read(BLOCK):
                text += more
                for border in (r"\S\n(?=\S)|\n(?= \S)", r"\S(?= \S)", rf"(?s).{{{16 * BLOCK}}}"):
                    if cut := max((m.end() for m in re.finditer(border, text)), default=0):
                        yield text[:cut]
                        text = text[cut:]
                        break
            if text:
                yield text

    return _counted(path, blocks(), "block")


def _paragraphs(path: Path) -> Iterator[str]:
    """The documents of a text file: what stands between blank lines."""

    def paragraphs() -> Iterator[str]:
        held, size = [], 0
        with _lines(path, newline=None) as file:
            for line in file:
                if line.strip():
                    held.append(line)
                    size += len(line)
                    if size > LONGEST:
                        raise UserError(f"{path}: {size >> 20} M characters without a blank line, which parts documents. Use data.pack=stream.")
                elif held:
                    yield "".join(held).removesuffix("\n")
                    held, size = [], 0
        if held:
            yield "".join(held).removesuffix("\n")

    return _counted(path, paragraphs(), "paragraph")


def stdlib_texts() -> Iterator[str]:
    """The .py files of the running Python's standard library, by name; without site-packages and tests."""
    import sysconfig
    import tokenize

    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(f for f in root.rglob("*.py") if not left_out & set(f.relative_to(root).parts))
    if not files:
        raise UserError(f"{root}: no source files of the standard library here. Give another text (data.path).")
    for file in files:
        with tokenize.open(file) as source:  # minds the encoding that a file declares
            yield source.read()


def cached_bpe(
    texts: Callable[[], Iterator[str]],
    vocab_size: int,
    lowercase: bool = False,
    sentinels: bool = False,
    cache: str | Path | None = None,
    key: str | None = None,
) -> Tokenizer:
    """`train_bpe`, done once: kept in the cache under `key` (`Corpus.key`), or else by the texts' content, for which they are read first.

    sentinels: with T5's 100 `<extra_id_i>`.
    """
    if key is None:
        found = hashlib.sha256()
        for text in texts():
            found.update(text.encode("utf-8", "surrogatepass") + b"\xff")  # a byte that no text has: where one ends matters
        key = found.hexdigest()
    specials = [f"<extra_id_{i}>" for i in range(100)] if sentinels else []
    folder = cache_dir(cache) / "tokenizers" / _digest(1, key, vocab_size, lowercase, specials)
    if not folder.is_dir():
        keep(folder, lambda aside: train_bpe(texts(), vocab_size, lowercase, specials).save(aside), lambda folder: True)
    return load(folder)


# ---------------------------------------------------------------- token files


class TokenFile:
    """Token ids of many texts in one memory-mapped file, with the place where each text begins.

    ids: (n_tokens,) uint16 or uint32. offsets: (n_texts + 1,) int64. `about` holds n_bytes (UTF-8), n_words (between white space) and n_lines
    of the texts. Pickled by its folder, so that workers map the same file.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.about: dict[str, Any] = json.loads((self.folder / "about.json").read_text())
        self.ids = np.memmap(self.folder / "ids.bin", dtype=self.about["dtype"], mode="r")
        self.offsets = np.memmap(self.folder / "offsets.bin", dtype="<i8", mode="r")

    def __reduce__(self):
        return TokenFile, (self.folder,)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    def text(self, i: int) -> np.ndarray:
        """The ids of text i, int64."""
        return self.ids[self.offsets[i] : self.offsets[i + 1]].astype(np.int64)

    def lengths(self) -> np.ndarray:
        """(n_texts,) tokens of each text."""
        return np.diff(self.offsets)

    @classmethod
    def build(
        cls,
        texts: Iterable[str],
        tokenizer: Tokenizer,
        key: str,
        eos: bool = False,
        *,
        name: str = "text",
        cache: str | Path | None = None,
        beside: Callable[[], dict[str, Any]] | None = None,
    ) -> TokenFile:
        """Tokenise texts in a stream into the cache, or open what is there under (key, tokenizer, eos): then `texts` is not touched.

        key: a hash of the texts' content (`identity`, `Corpus.key`). eos: an end-of-text token after each text. beside: called after the last
        text for more to keep in `about`. Raises UserError where there is no text, no end-of-text token, or no room.
        """
        assert getattr(tokenizer, "frozen", True), "freeze a growing tokenizer before its ids are kept"
        if eos and tokenizer.eos_id is None:
            raise UserError("The tokenizer has no end-of-text token, which must stand between documents. Use another, such as tokenizer.kind=bpe.")
        folder = cache_dir(cache) / "tokens" / _digest(1, key, tokenizer.fingerprint, eos)
        if not cls._whole(folder):
            keep(folder, lambda aside: cls._write(aside, texts, tokenizer, eos, name, beside), cls._whole)
        return cls(folder)

    @classmethod
    def of(cls, corpus: Corpus, tokenizer: Tokenizer, eos: bool = False, cache: str | Path | None = None) -> TokenFile:
        """`build` of a corpus."""
        return cls.build(corpus, tokenizer, corpus.key, eos, name=corpus.name, cache=cache)

    @staticmethod
    def _whole(folder: Path) -> bool:
        try:
            about = json.loads((folder / "about.json").read_text())
            sizes = [(folder / name).stat().st_size for name in ("ids.bin", "offsets.bin")]
            return sizes == [about["n_tokens"] * np.dtype(about["dtype"]).itemsize, 8 * (about["n_texts"] + 1)]
        except (OSError, ValueError, KeyError):
            return False

    @staticmethod
    def _write(folder: Path, texts: Iterable[str], tokenizer: Tokenizer, eos: bool, name: str, beside: Callable | None) -> None:
        dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
        about = {"dtype": dtype, "n_tokens": 0, "n_texts": 0, "n_bytes": 0, "n_words": 0, "n_lines": 0, "vocab_size": tokenizer.vocab_size}
        end = [tokenizer.eos_id] if eos else []
        progress, characters = _Progress(name), 0
        with open(folder / "ids.bin", "wb") as ids, open(folder / "offsets.bin", "wb") as offsets:
            offsets.write(np.zeros(1, "<i8").tobytes())
            for batch in _batches(texts):
                try:
                    about["n_bytes"] += sum(len(text.encode()) for text in batch)
                except UnicodeEncodeError as e:
                    first = about["n_texts"] + 1
                    raise UserError(
                        f"{name}: texts {first} to {first + len(batch) - 1}: half a character in one of them ({e.reason}). Mend it."
                    ) from None
                rows = [row + end for row in tokenizer.encode_batch(batch)]
                lengths = np.fromiter(map(len, rows), np.int64, len(rows))
                ids.write(np.fromiter(itertools.chain.from_iterable(rows), dtype, int(lengths.sum())).tobytes())
                offsets.write((np.cumsum(lengths) + about["n_tokens"]).astype("<i8").tobytes())
                about["n_tokens"] += int(lengths.sum())
                about["n_texts"] += len(rows)
                about["n_words"] += sum(len(text.split()) for text in batch)
                about["n_lines"] += sum(text.count("\n") for text in batch)
                characters += sum(map(len, batch))
                progress(characters, about["n_tokens"])
            for file in (ids, offsets):
                file.flush()
                os.fsync(file.fileno())
        progress.end(characters, about["n_tokens"])
        if about["n_tokens"] == 0:
            raise UserError(f"{name}: empty: there is not one token in it.")
        (folder / "about.json").write_text(json.dumps(about | (beside() if beside else {})))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts by the million characters: enough to keep the tokenizer's threads busy, little enough to hold."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= 1 << 20 or len(batch) >= 1 << 13:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# ---------------------------------------------------------------- data sets


def tenths(labels: np.ndarray, name: str, every: int = 10, unit: str = "rows") -> tuple[np.ndarray, np.ndarray]:
    """(the other places, every `every`-th place of each label): a fixed and stratified choice. labels: (n,)."""
    held = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        held[np.flatnonzero(labels == label)[every - 1 :: every]] = True
    if not held.any():
        raise UserError(f"{name}: no class has {every} {unit}, so that none can be held out for validation. Add a valid split.")
    return np.flatnonzero(~held), np.flatnonzero(held)


class LMDataset:
    """Windows of running text for a causal language model: item i is {"ids": (seq_len + 1,) int64}, of which the last seq_len are predicted.

    The windows tile the text; neighbours share one token. For training, they begin at a phase in [0, seq_len) that is a pure function of
    (seed, epoch), so that tokens are not always cut at the same places; what is left over at both ends is less than two windows.
    With shuffle_phase=False (evaluation) they begin at 0 and the last is shorter: every token but the first is predicted exactly once.
    pack="documents" adds, each (seq_len + 1,): "segments", the number of the document in the window from 0, and "positions", from 0 in each
    document. What crosses a border is neither to be attended to nor to be predicted.

    Raises UserError where the text is shorter than a window (training) or than two tokens.
    """

    epoch_aware = True

    def __init__(self, tokens: TokenFile, seq_len: int, seed: int = 0, pack: str = "stream", shuffle_phase: bool = True):
        assert pack in ("stream", "documents"), pack
        self.tokens, self.seq_len, self.seed, self.documents, self.shuffle_phase = tokens, seq_len, seed, pack == "documents", shuffle_phase
        n = tokens.n_tokens
        if n < (seq_len + 1 if shuffle_phase else 2):
            raise UserError(
                f"The text has {n} tokens, less than a window of {seq_len} + 1. Give more text or a smaller model.seq_len or data.max_len."
            )
        if shuffle_phase:
            self.n = max(1, n // seq_len - 1)
            self.n_phases = min(seq_len, n - self.n * seq_len)  # the last window of the last phase just fits
        else:
            self.n, self.n_phases = -(-(n - 1) // seq_len), 1

    def __len__(self) -> int:
        return self.n

    def phase(self, epoch: int) -> int:
        """Where the first window of an epoch begins."""
        return int(np.random.default_rng([self.seed, epoch]).integers(self.n_phases)) if self.shuffle_phase else 0

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """(n,) tokens that each window predicts (in "documents", those across borders counted)."""
        lengths = np.full(self.n, self.seq_len, dtype=np.int64)
        if not self.shuffle_phase:
            lengths[-1] = self.tokens.n_tokens - 1 - (self.n - 1) * self.seq_len
        return lengths

    @property
    def n_targets(self) -> int:
        """Tokens that one pass predicts. Without shuffle_phase: all but the first (in "documents": but the first of each)."""
        if not self.documents:
            return int(self.lengths.sum())
        assert not self.shuffle_phase, "how many borders a pass meets depends on its phase"
        return self.tokens.n_tokens - int(np.count_nonzero(self.tokens.lengths()))

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self.item(i, 0)

    def item(self, i: int, epoch: int) -> dict[str, np.ndarray]:
        """Window i of an epoch."""
        if not 0 <= i < self.n:
            raise IndexError(i)
        start = self.phase(epoch) + i * self.seq_len
        stop = min(start + self.seq_len + 1, self.tokens.n_tokens)
        ids = self.tokens.ids[start:stop].astype(np.int64)
        if not self.documents:
            return {"ids": ids}
        offsets = self.tokens.offsets
        inside = offsets[np.searchsorted(offsets, start, "right") : np.searchsorted(offsets, stop, "left")]
        begins = np.zeros(len(ids), dtype=np.int64)
        begins[inside - start] = 1  # empty documents fall together with the next
        places = np.arange(len(ids))
        return {"ids": ids, "segments": np.cumsum(begins), "positions": places - np.maximum.accumulate(places * begins)}


class DocumentsDataset:
    """Rows of at most max_len tokens for masked language models and span corruption: item i is {"ids": (1 .. max_len,) int64}.

    A document is cut into consecutive pieces of max_len tokens, the last one shorter (Devlin et al. 2019, appendix A.2, without its random
    short ones). across=True takes texts for paragraphs of one document: a row holds as many whole ones as fit, and only a paragraph longer
    than a row is cut. Every token is in exactly one row.
    """

    def __init__(self, tokens: TokenFile, max_len: int, across: bool = False):
        if max_len < 1:
            raise UserError(f"data.max_len leaves {max_len} tokens a row beside the special ones. Set a larger data.max_len or model.seq_len.")
        self.tokens = tokens
        offsets = np.asarray(tokens.offsets)
        if across:
            starts, at, n = [], 0, tokens.n_tokens
            while at < n:
                starts.append(at)
                border = int(offsets[np.searchsorted(offsets, at + max_len, "right") - 1])
                at = border if border > at else at + max_len
            self.starts = np.array(starts, dtype=np.int64)
            self.lengths = np.diff(self.starts, append=n)
        else:
            pieces = -(-np.diff(offsets) // max_len)  # of each document
            number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of each piece in its document
            self.starts = np.repeat(offsets[:-1], pieces) + number * max_len
            self.lengths = np.minimum(max_len, np.repeat(offsets[1:], pieces) - self.starts)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"ids": self.tokens.ids[self.starts[i] : self.starts[i] + self.lengths[i]].astype(np.int64)}


class LabelledDataset:
    """Texts with a label: item i is {"ids": (up to max_len,) int64, "label": int}.

    rows: dicts, read only when the cache does not have them under `key`. text, label: columns; None: the first there is of text, sentence,
    review, content and of label, labels, class, target. Labels are whole numbers from 0, or names.
    like: the training split, whose classes the others have. names: of the training split's numbers; where its labels are names, all among
    these, they are numbered in this order, else in sorted order. n_classes: how many numbers there may be at most. `classes`: the names, or
    the numbers as text; `lengths`: (n,) tokens, after the cut to max_len; `truncated`: how many were cut.

    Raises UserError with file and row for a missing column, a text that is none, a label that is missing, of another kind, out of range, or
    not among the training split's.
    """

    def __init__(
        self,
        rows: Iterable[dict[str, Any]],
        tokenizer: Tokenizer,
        max_len: int,
        key: str,
        *,
        text: str | None = None,
        label: str | None = None,
        name: str = "data",
        like: LabelledDataset | None = None,
        names: Sequence[str] | None = None,
        n_classes: int | None = None,
        cache: str | Path | None = None,
    ):
        self.name, self.max_len = name, max_len
        found: list[int | str] = []

        def texts() -> Iterator[str]:
            text_column, label_column = text, label
            for number, row in enumerate(rows, 1):
                if isinstance(row, str):
                    raise UserError(f"{name}: a text file has no labels. Use .jsonl, .csv, .tsv or .parquet with a text and a label column.")
                text_column = text_column or _first(name, row, TEXT_COLUMNS, "text")
                label_column = label_column or _first(name, row, LABEL_COLUMNS, "label")
                if label_column not in row:
                    raise _no_column(name, number, label_column, row)
                found.append(_label(name, number, row[label_column], found))
                yield _text(name, number, row, text_column)

        def beside() -> dict[str, Any]:
            names = sorted(set(found)) if isinstance(found[0], str) else None
            index = {value: i for i, value in enumerate(names)} if names else None
            return {"classes": names, "labels": [index[value] for value in found] if index else found}

        self.tokens = TokenFile.build(texts(), tokenizer, _digest("labelled", key, text, label), name=name, cache=cache, beside=beside)
        own = self.tokens.about.pop("classes")
        self.labels = np.array(self.tokens.about.pop("labels"), dtype=np.int64)
        self.classes, self.by_name = self._number(own, like, list(names) if names else None, n_classes)
        lengths = self.tokens.lengths()
        self.lengths = np.minimum(lengths, max_len)
        self.truncated = int((lengths > max_len).sum())

    @classmethod
    def open(cls, path: str | Path, tokenizer: Tokenizer, max_len: int, **options: Any) -> LabelledDataset:
        """The data set of a file. options: as of the class."""
        columns = [options["text"], options["label"]] if options.get("text") and options.get("label") else None
        kind = "hf" if is_hub(path) else _kind(Path(path))
        options["names"] = declared_classes(path, options.get("label")) or options.get("names")
        return cls(read_rows(path, columns), tokenizer, max_len, _digest(kind, identity(path)), name=str(path), **options)

    def _number(
        self, own: list[str] | None, like: LabelledDataset | None, names: list[str] | None, n_classes: int | None
    ) -> tuple[list[str], bool]:
        """Check the labels and number them. Returns (the classes, whether the labels are names)."""
        by_name = own is not None if like is None else like.by_name
        if like is not None:
            classes = like.classes
        elif own is None:
            classes = names or [str(i) for i in range(min(int(self.labels.max()) + 1, n_classes or sys.maxsize))]
        else:
            classes = names if names and set(own) <= set(names) else own
        values, places = (own, self.labels) if own is not None else np.unique(self.labels, return_inverse=True)
        if own is None and not by_name:
            numbers = np.where(self.labels < len(classes), self.labels, -1)
        else:
            index = {c: i for i, c in enumerate(classes)}
            numbers = np.array([index.get(str(value), -1) for value in values], dtype=np.int64)[places]
        wrong = np.flatnonzero(numbers < 0)
        if len(wrong):
            value = values[places[wrong[0]]]
            raise UserError(f"{self.name}: row {wrong[0] + 1}: {self._no_class(value, classes, by_name, like, n_classes)}")
        self.labels = numbers
        return classes, by_name

    @staticmethod
    def _no_class(value: int | str, classes: list[str], by_name: bool, like: LabelledDataset | None, n_classes: int | None) -> str:
        if like is not None and (by_name or isinstance(value, str)):
            return f"label {str(value)!r} is not one of the classes of {like.name}.{did_you_mean(str(value), classes)}"
        if not classes:
            return f"label {value} is out of range: labels count from 0. Mend the row, or write names."
        wrong = f"label {value} is out of range: {len(classes)} classes are 0 to {len(classes) - 1}"
        if n_classes is not None and len(classes) == n_classes:
            return f"{wrong} (model.n_classes={n_classes}). Mend the row, or leave model.n_classes out."
        return f"{wrong}{f', as in {like.name}' if like is not None else ''}. Mend the row, or name all classes in task.classes."

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"ids": self.tokens.text(i)[: self.max_len], "label": int(self.labels[i])}


def declared_classes(path: str | Path, label: str | None = None) -> list[str] | None:
    """What Hugging Face's features call the numbers in the label column of a Parquet file or data set; None where they say nothing."""
    if is_hub(path):
        features = {name: getattr(feature, "names", None) for name, feature in _hub_split(path).features.items()}
    elif Path(path).suffix == ".parquet":
        pq, arrow = (need(f"pyarrow{part}", "hf", "A Parquet file") for part in (".parquet", ""))
        try:
            features = features_in(pq.read_schema(Path(os.path.expanduser(path))).metadata)
        except (OSError, arrow.ArrowException):
            return None  # told where the rows are read
    else:
        return None
    column = label or next((c for c in LABEL_COLUMNS if c in features), None)
    return features.get(column)


def features_in(metadata: dict[bytes, bytes] | None) -> dict[str, list[str] | None]:
    """Column → names of its classes, of what `datasets` writes into a Parquet file."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return {name: feature.get("names") for name, feature in features.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _first(name: str, row: dict[str, Any], candidates: Sequence[str], what: str) -> str:
    for column in candidates:
        if column in row:
            return column
    raise UserError(f"{name}: no {what} column ({', '.join(candidates)}); there are: {', '.join(row)[:200]}. Set data.{what}=NAME.")


def _label(name: str, number: int, value: Any, before: list[int | str]) -> int | str:
    """A label as a whole number or a name, of the kind of those before it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        value = int(value)  # True is 1
    elif not isinstance(value, str) or not value.strip():
        raise UserError(f"{name}: row {number}: label {value!r} is neither a whole number nor a name.")
    elif re.fullmatch(r"\s*[+-]?\d{1,4000}\s*", value):  # longer ones are no numbers to Python
        value = int(value)
    if before and isinstance(before[0], str):
        return str(value).strip()
    if isinstance(value, int) and abs(value) >= limits.CLASSES:
        shown = str(value) if abs(value) < 10**30 else f"{str(value)[:30]}..."
        raise UserError(
            f"{name}: row {number}: label {shown} is out of range: classes are numbered from 0, without gaps, up to {limits.CLASSES - 1:,}. "
            "Number them so, or write names."
        )
    if before and isinstance(value, str):
        raise UserError(f"{name}: row {number}: label {value!r} is not a whole number, as those of the rows before are.")
    return value.strip() if isinstance(value, str) else value


class PairsDataset:
    """Parallel text: item i is {"source": (n,) int64, "target": (m,) int64}, each of at most max_len tokens.

    `lengths`: (n,) source and target tokens together; `source_lengths`, `target_lengths`; `truncated`: how many pairs were cut.
    Raises UserError where the two sides have not equally many lines.
    """

    def __init__(
        self,
        source: Corpus,
        target: Corpus,
        tokenizer: Tokenizer,
        target_tokenizer: Tokenizer | None = None,
        max_len: int | None = None,
        cache: str | Path | None = None,
    ):
        self.max_len = max_len
        self.source = TokenFile.of(source, tokenizer, cache=cache)
        self.target = TokenFile.of(target, target_tokenizer or tokenizer, cache=cache)
        if len(self.source) != len(self.target):
            raise UserError(
                f"{source.name} has {len(self.source)} lines, {target.name} has {len(self.target)}: parallel text needs a line for each line."
            )
        lengths = np.stack((self.source.lengths(), self.target.lengths()))  # (2, n)
        self.truncated = 0 if max_len is None else int((lengths > max_len).any(0).sum())
        self.source_lengths, self.target_lengths = lengths if max_len is None else np.minimum(lengths, max_len)
        self.lengths = self.source_lengths + self.target_lengths

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"source": self.source.text(i)[: self.max_len], "target": self.target.text(i)[: self.max_len]}


def find_pairs(
    path: str | Path, split: str, source: str = "de", target: str = "en", explicit: str | None = None, required: bool = True
) -> tuple[Corpus, Corpus] | None:
    """The two sides of a split of parallel text: files `train.de`, `train.en` (also .txt, .gz, .xz) of a folder, or two columns of a table.

    explicit: the files' common name (`test_2016_flickr`), or that of the table. Raises UserError as `find_split` does, and where one side is missing.
    """
    folder = Path(os.path.expanduser(path))
    if not is_hub(path) and folder.is_dir():
        sides: dict[str, dict[str, Path]] = {source: {}, target: {}}
        for file in _files(folder):
            if match := re.fullmatch(rf"(.+)\.({re.escape(source)}|{re.escape(target)})(\.txt)?(\.gz|\.xz)?", file.name):
                sides[match[2]][match[1]] = file
        names = sorted(set(sides[source]) | set(sides[target]))
        if explicit is None:
            found = [name.name for name in _named([Path(name) for name in names], split)]
        else:
            found = [name for name in names if name == explicit]
        if len(found) > 1:
            raise UserError(f"{path}: several files for the {split} split: {', '.join(found)}. Set data.{split}=NAME.")
        if found:
            for language, files in sides.items():
                if found[0] not in files:
                    raise UserError(f"{path}: no {found[0]}.{language} to go with the other language. Set data.source and data.target.")
            return Corpus.lines(sides[source][found[0]]), Corpus.lines(sides[target][found[0]])
        if explicit is not None and not (folder / explicit).is_file():
            pair = f"{explicit}.{source} and {explicit}.{target}"
            raise UserError(f"data.{split}={explicit}: {path} has neither this file nor {pair}.{did_you_mean(explicit, names)}")
    file = find_split(path, split, explicit, required)
    return None if file is None else (Corpus.column(file, source), Corpus.column(file, target))
