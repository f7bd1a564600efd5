"""Rows of text files, tables and Hugging Face data sets, read in a stream."""

from __future__ import annotations

import collections
import contextlib
import csv
import dataclasses
import functools
import gzip
import io
import itertools
import json
import lzma
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradus import hub, limits
from gradus.errors import DataError, UserError, did_you_mean, first_line, need

KINDS = {".txt": "txt", ".raw": "txt", ".tokens": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"} | {
    f".{kind}": kind for kind in ("csv", "tsv", "parquet")
}
# evaluation is a test, as the package datasets has it
SPLITS = {
    "train": ("train", "training"),
    "valid": ("valid", "val", "validation", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shards:
    """Files of one kind that are read one after another, as one. labelled: each is a text, labelled by its folder's
    name."""

    files: tuple[Path, ...]
    labelled: bool = False

    def __str__(self) -> str:
        return f"{self.files[0]} and {len(self.files) - 1} more"


Readable = str | Path | Shards  # hf:NAME, a file, or several


def expanded(path: str | Path) -> Path:
    return Path(os.path.expanduser(path))


def near(path: Path) -> str:
    """What was probably meant by a path that is not there, for the end of an error."""
    if path.is_symlink():
        return f" It is a link to {os.readlink(path)}, which leads nowhere."
    if path.parent.is_dir():
        return did_you_mean(path.name, os.listdir(path.parent))
    return f" There is no folder {path.parent} either."


def suffix(path: Path) -> str:
    """The suffix before .gz or .xz, in small letters."""
    return Path(path.stem if path.suffix in (".gz", ".xz") else path.name).suffix.lower()


def kind_of(path: Readable) -> str:
    """hf, txt, jsonl, csv, tsv, parquet, or texts (one a file). Raises UserError for another kind of file."""
    if isinstance(path, Shards):
        return "texts" if path.labelled else kind_of(path.files[0])
    if is_hub(path):
        return "hf"
    end = suffix(Path(path))
    if end not in KINDS:
        known = did_you_mean(end, KINDS) if end else f" Known: {', '.join(KINDS)}."
        raise UserError(
            f"{path}: unsupported file type ({end or 'no suffix'}).{known} Each may also end in .gz or .xz."
        )
    return KINDS[end]


class _Unpacked(io.RawIOBase):
    """What a packed file holds. Raises UserError where that is far more than any data are packed to."""

    def __init__(self, path: Path, file: io.BufferedIOBase, packed: int):
        self.path, self.file, self.read_bytes, self.most = path, file, 0, max(limits.UNPACKED, limits.RATIO * packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self.file.readinto(buffer)
        self.read_bytes += n
        if self.read_bytes > self.most:
            what = f"unpacks to more than {self.most / limits.MB:,.0f} MB, {limits.RATIO} times its size or more"
            raise UserError(f"{self.path}: {what}. If it really is data, unpack it and give the unpacked file.")
        return n

    def close(self) -> None:
        self.file.close()
        super().close()


def open_packed(path: Path) -> io.BufferedIOBase:
    """A file's content, unpacked where its name ends in .gz, .tgz or .xz."""
    packed = limits.regular(path).stat().st_size
    if path.suffix not in (".gz", ".tgz", ".xz"):
        return open(path, "rb")
    unpack = lzma.open if path.suffix == ".xz" else gzip.open
    return io.BufferedReader(_Unpacked(path, unpack(path, "rb"), packed), 1 << 16)


def whole_lines(path: Path, newline: str | None = "\n") -> Iterator[str]:
    """The lines with their ends. Raises UserError for one that does not end: what is no text, or was packed to
    burst."""
    with io.TextIOWrapper(open_packed(path), encoding="utf-8-sig", newline=newline) as file:
        while line := file.readline(limits.LINE):
            if len(line) == limits.LINE:
                long = f"a line of more than {limits.LINE:,} characters"
                raise UserError(f"{path}: {long}. If it is text, break it into lines.")
            yield line


def _without_ends(lines: Iterable[str]) -> Iterator[str]:
    return (line.removesuffix("\n").removesuffix("\r") for line in lines)


def named(path: Readable, rows: Iterable, unit: str = "row") -> Iterator:
    """Passes rows on; says of a failure to read which file it was and after which row. No rows at all is a failure
    too."""
    n = 0
    try:
        for row in rows:
            n += 1
            yield row
    except UnicodeDecodeError as e:
        if n == 0 and e.object[:4] == b"PK\3\4":
            raise UserError(f"{path}: a packed file, such as Excel's. Save it as .csv, or unpack it.") from None
        byte = f"0x{e.object[e.start]:02x}"
        coding = "utf-16" if n == 0 and e.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "windows-1252"
        how = f"Convert the file to UTF-8, for example: iconv -f {coding} -t utf-8"
        raise UserError(f"{path}: not UTF-8 text after {unit} {n} (byte {byte}). {how}") from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as e:
        raise UserError(f"{path}: truncated or corrupt after {unit} {n} ({e}). Get the file again.") from None
    except FileNotFoundError:
        raise DataError(f"{path}: no such file.{near(Path(path))}") from None
    except OSError as e:
        raise DataError(f"{path}: cannot be read ({e.strerror or e}).") from None
    if n == 0:
        raise UserError(f"{path}: empty: there is no {unit} in it. Give a file with some.")


def read_lines(path: str | Path) -> Iterator[str]:
    """The lines of a text file of any name (also .gz, .xz), without their ends. Raises UserError as `read_rows`."""
    path = expanded(path)
    return named(path, _without_ends(whole_lines(path)), "line")


def numbered(path: Readable, columns: Sequence[str] | None = None) -> Iterator[tuple[str | Path, int, Row | str]]:
    """Every row as (its file, its number in that file from 1, the row), as `read_rows` gives it."""
    for file in path.files if isinstance(path, Shards) else [path]:
        if kind_of(path) == "texts":
            [text] = named(file, ("".join(whole_lines(each, None)) for each in [Path(file)]), "line")
            yield file, 1, {"text": text, "label": Path(file).parent.name}
        else:
            yield from ((file, i, row) for i, row in enumerate(read_rows(file, columns), 1))


def read_rows(path: Readable, columns: Sequence[str] | None = None) -> Iterator[Row | str]:
    """The rows of a file in a stream: lines (str) of .txt; dicts of .jsonl, .json, .csv, .tsv and .parquet; each also
    .gz or .xz.

    `hf:NAME[:CONFIG][#SPLIT]` is a Hugging Face data set, and so is a folder that `datasets.save_to_disk` wrote.
    columns: keep only these. JSON is one object a line, or one list of objects, alone or as the only such field of an
    object. A .csv is quoted as usual, its delimiter a comma, a semicolon, a tab or a bar (the one with which its first
    line has most fields), or that of a first line `sep=;`; of a .tsv it is a tab, and quotes stand around fields where
    the file has them so throughout (as spreadsheets write it, unlike GLUE's). Both begin with the names of columns.
    Raises UserError, with file and row (counted from 1, without header and blank lines), for a row that is no JSON
    object, has another number of fields, or lacks a column; and for a file that is missing, empty, truncated or of an
    unknown kind.
    """
    kind = kind_of(path)
    if isinstance(path, Shards):
        return (row for _, _, row in numbered(path, columns))
    if kind == "hf":
        return named(path, _hub_rows(path, columns))
    path = expanded(path)
    if kind == "txt":
        if columns:
            raise no_columns(path, ", ".join(columns))
        return read_lines(path)
    if kind == "parquet":
        return named(path, _parquet(path, columns))
    rows = {"jsonl": _jsonl, "csv": _csv, "tsv": _tsv}[kind](path)
    return named(path, (_pick(path, i, row, columns) for i, row in enumerate(rows, 1)))


def no_columns(path: str | Path, wanted: str) -> UserError:
    return UserError(f"{path}: a text file has no columns, so no {wanted}. Use .jsonl, .csv, .tsv or .parquet.")


def no_column(path: str | Path, row: int, column: str, there: Iterable[str]) -> UserError:
    names = ", ".join(map(str, there))[:200] or "none"
    return UserError(f"{path}: row {row} has no column {column!r}; it has: {names}. Name the one to use.")


def _pick(path: str | Path, row: int, record: Row, columns: Sequence[str] | None) -> Row:
    try:
        return record if columns is None else {c: record[c] for c in columns}
    except KeyError as e:
        raise no_column(path, row, e.args[0], record) from None


def _jsonl(path: Path) -> Iterator[Row]:
    lines = filter(str.strip, whole_lines(path))
    head = list(itertools.islice(lines, 2))
    lines = itertools.chain(head, lines)
    alone = len(head) == 1 and suffix(path) == ".json"
    if head and (alone or head[0].lstrip().startswith("[") or not head[0].rstrip().endswith("}")):
        lines = _rows_of_one(path, list(lines))
    for row, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if "\\ud" in line or "\\uD" in line:
                json.dumps(record, ensure_ascii=False).encode()  # half a character (a lone surrogate) is a ValueError
        except (ValueError, RecursionError) as e:
            record, why = None, f"is not valid JSON ({str(e).split(';')[0]})"
        else:
            why = f"is a JSON {type(record).__name__}"
        if not isinstance(record, dict):
            raise UserError(f"{path}: row {row} {why}. Each line must be one JSON object, or the file a list.")
        yield record


def _rows_of_one(path: Path, lines: list[str]) -> Iterable[str]:
    """The rows of a file that is one list, or one object of which one field is a list of objects; else its lines.
    Raises UserError for other objects."""
    try:
        content = json.loads("".join(lines))
    except (ValueError, RecursionError) as e:
        if lines[0].lstrip().startswith("["):
            raise UserError(f"{path}: begins as a JSON list, but is not valid JSON ({str(e).split(';')[0]}).") from None
        return lines
    if isinstance(content, dict):
        lists = [x for x in content.values() if isinstance(x, list) and x and all(isinstance(row, dict) for row in x)]
        is_row = len(lines) == 1 and not all(isinstance(x, dict | list) for x in content.values())
        if len(lists) != 1 and not is_row:
            what = f"one JSON object (fields: {', '.join(content)[:200]}), of which {len(lists)} are lists of rows"
            raise UserError(f"{path}: {what}. Give one list of objects, or one object a line.")
        content = lists[0] if len(lists) == 1 else [content]
    return map(json.dumps, content) if isinstance(content, list) else lines


def _table(path: Path, records: Iterator[list[str]]) -> Iterator[Row]:
    header = next(records, [])
    twice = [name for name, n in collections.Counter(header).items() if name and n > 1]
    if twice:
        raise UserError(f"{path}: the header names the column {twice[0]!r} twice. Give each column its own name.")
    for row, values in enumerate(records, 1):
        if len(values) != len(header):
            there = f"the header names {len(header)}: {', '.join(header)[:200]}"
            raise UserError(f"{path}: row {row} has {len(values)} fields, but {there}.")
        yield dict(zip(header, values))


def _csv(path: Path, delimiter: str | None = None) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the module's own limit, 128 KiB, is less than many documents
    lines = whole_lines(path, newline="")
    first = next(filter(str.strip, lines), "")
    if stated := re.fullmatch(r'"?sep=(.)"?\s*', first):  # Excel's
        delimiter, first = stated[1], next(filter(str.strip, lines), "")
    delimiter = delimiter or max(",;\t|", key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
    head = [first, *itertools.islice(lines, 1)]
    spaced = any(f'{delimiter} "' in line for line in head)  # a, "b"
    lines = itertools.chain(head, lines)
    reader = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=spaced)
    try:
        yield from _table(path, filter(None, reader))
    except csv.Error as e:
        raise UserError(f"{path}: not valid CSV at line {reader.line_num} ({e}). Fix the quotes there.") from None


def _tsv(path: Path) -> Iterator[Row]:
    if _is_quoted(path, path.stat().st_size, path.stat().st_mtime_ns):
        yield from _csv(path, "\t")
    else:
        yield from _table(path, (line.split("\t") for line in _without_ends(whole_lines(path)) if line))


@functools.lru_cache(maxsize=64)
def _is_quoted(path: Path, size: int, time: int) -> bool:
    """Whether quotes in a .tsv stand around fields, as all then do: each closes, and those inside are doubled. Looked
    at once, while the file's size and time stay."""
    csv.field_size_limit(2**31 - 1)
    width, quoted, raw = 0, False, []
    lines = (raw.append(line) or line for line in whole_lines(path, newline=""))
    try:
        for fields in csv.reader(lines, delimiter="\t", strict=True):
            marks, inside = "".join(raw).count('"'), "".join(fields).count('"')
            raw.clear()
            width = width or len(fields)
            if (fields and len(fields) != width) or 0 < marks < 2 * inside + 2:
                return False
            quoted |= marks > 0
    except csv.Error:
        return False
    return quoted


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    pq = need("pyarrow.parquet", "hf", "A Parquet file", DataError)
    arrow = need("pyarrow", "hf", "A Parquet file")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_packed(path))
        if path.suffix in (".gz", ".xz"):  # Parquet is read from its end, so the file must be unpacked first
            packed, file = file, stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(packed, file)
        try:
            yield pq.ParquetFile(file)
        except (OSError, arrow.ArrowException) as e:
            raise UserError(f"{path}: not a whole Parquet file ({first_line(e)}). Get the file again.") from None


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    with _parquet_file(path) as table:
        _need_columns(path, columns, table.schema_arrow.names)
        for batch in table.iter_batches(batch_size=256, columns=list(columns) if columns else None):
            yield from batch.to_pylist()


def _need_columns(path: str | Path, columns: Sequence[str] | None, there: Sequence[str]) -> None:
    for missing in set(columns or ()) - set(there):
        raise no_column(path, 1, missing, there)


# ---------------------------------------------------------------- Hugging Face data sets


def is_hub(path: str | Path) -> bool:
    """`hf:NAME`, or a folder that `save_to_disk` wrote."""
    return str(path).startswith("hf:") or hub.is_saved(expanded(path))


@functools.lru_cache(maxsize=4)
def hub_splits(name: str) -> dict[str, Any]:
    """`hub.data_set`, loaded once."""
    return hub.data_set(name, f"hf:{name}")


def hub_split(path: str | Path) -> Any:
    """The table of `hf:NAME[:CONFIG][#SPLIT]`; without a split the training one. Raises UserError where there is
    none."""
    name, _, split = str(path).removeprefix("hf:").partition("#")
    splits, split = hub_splits(name), split or "train"
    if (key := alias_in(splits, split)) is None:
        raise UserError(f"hf:{name}: no split {split!r}; there are: {', '.join(splits)}.")
    return splits[key]


def split_called(name: str) -> str | None:
    """The split that a name, in small or capital letters, is one of."""
    return next((split for split, names in SPLITS.items() if name.casefold() in names), None)


def alias_in(splits: Iterable[str], split: str) -> str | None:
    """The name that a split has among these: itself, else one of the same meaning (validation for valid)."""
    alike = SPLITS.get(split_called(split), ())
    return next((name for name in (split, *alike) if name in splits), None)


def _hub_rows(path: str | Path, columns: Sequence[str] | None) -> Iterator[Row]:
    table = hub_split(path)
    _need_columns(path, columns, table.column_names)
    for batch in (table.select_columns(list(columns)) if columns else table).with_format("arrow").iter(256):
        yield from batch.to_pylist()


def table_of(path: str | Path) -> tuple[dict[str, list[str] | None], int]:
    """({column: what Hugging Face's features call its numbers, None where they say nothing}, rows) of a Parquet file or
    a data set."""
    if is_hub(path):
        table = hub_split(path)
        return {name: getattr(feature, "names", None) for name, feature in table.features.items()}, len(table)
    with _parquet_file(expanded(path)) as table:
        schema = table.schema_arrow
        try:
            features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
            return {name: features.get(name, {}).get("names") for name in schema.names}, table.metadata.num_rows
        except (ValueError, KeyError, TypeError, AttributeError):  # not written by `datasets`
            return dict.fromkeys(schema.names) | _names_in_card(expanded(path)), table.metadata.num_rows


def _names_in_card(path: Path) -> dict[str, list[str] | None]:
    """Column → what the README.md of a data set from the hub calls its numbers."""
    names: dict[str, list[str] | None] = {}
    for folder in itertools.islice(path.absolute().parents, 2):
        match card(folder):
            case {"dataset_info": {"features": [*features]}} | {"dataset_info": [{"features": [*features]}]}:
                for feature in features:
                    match feature:
                        case {"name": str(column), "dtype": {"class_label": {"names": {**called}}}}:
                            names[column] = list(map(str, called.values()))
    return names


def card(folder: Path) -> dict[str, Any]:
    """What stands above README.md, as data sets of the hub have it; {} where nothing does."""
    with contextlib.suppress(UserError, TypeError):  # no such file, no header
        header = re.match(r"---\n(.*?)\n---", limits.read_text(folder / "README.md", limits.CONFIG_FILE), re.DOTALL)
        return limits.parse_yaml(header[1], folder)
    return {}


def class_names(path: Readable, columns: Sequence[str]) -> list[str] | None:
    """What `table_of` says of the first of these columns that there is; None for other kinds of files."""
    if kind_of(path) not in ("hf", "parquet"):
        return None
    names = table_of(path.files[0] if isinstance(path, Shards) else path)[0]
    return names.get(next((c for c in columns if c in names), None))


def first_column(name: str, row: Iterable[str], candidates: Sequence[str], what: str) -> str:
    """The first of the candidates that a row has. Raises UserError where it has none."""
    for column in candidates:
        if column in row:
            return column
    names, there = ", ".join(candidates), ", ".join(row)[:200]
    raise UserError(f"{name}: no {what} column ({names}); there are: {there}. Set data.{what}=NAME.")
