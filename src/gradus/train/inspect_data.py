"""What data are, for `gradus new`: a table and which of its columns, running text, images, or parallel sentences."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus.data import chats
from gradus.data.corpus import TEXT_COLUMNS
from gradus.data.image_sources import SUFFIXES, find_cifar, is_image, listings
from gradus.data.readers import KINDS, SPLITS, Readable, expanded, is_hub, kind_of, near, read_rows
from gradus.data.splits import by_split, find_split, inner, visible_files
from gradus.data.text import LABEL_COLUMNS
from gradus.errors import UserError, did_you_mean, either

WHAT = {"labelled": "texts with a label", "images": "images with a label", "text": "running text",
        "pairs": "parallel sentences", "chats": "chats"}  # fmt: skip
ROWS, CHARACTERS = 1000, 1 << 24  # the rows that columns are judged by: so many at most, and so large in all
TEXT_NAMES = ("body", "comment", "message", "tweet", "document", "abstract")
LABEL_NAMES = ("sentiment", "category", "topic", "rating", "score", "stars", "intent", "emotion", "y")
DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ].*)?")
NOT_READ = "Call them prompt and completion, or write each chat as a list of role and content in a column messages"
QUESTIONS = (  # column names of data to fine-tune assistants with that are not read: what they are called
    ({"instruction", "response"}, "instructions with their answers"), ({"prompt", "response"}, "prompts with answers"),
    ({"completion"}, "completions"), ({"chosen", "rejected"}, "answers that were chosen and rejected"),
    *(({name}, "chats") for name in ("conversation", "dialogue", "dialog", "chat")),
)  # fmt: skip
HOLDS = {"dict": "objects", "list": "lists", "bytes": "bytes"}
PICTURES = (b"\x89PNG", b"\xff\xd8", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")  # how files of images begin
NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)(e[+-]?\d+)?", re.IGNORECASE)


@dataclasses.dataclass
class DataSummary:
    """What the data are. `data`: the recipe's section, with an absolute path. `lines`: what to tell the user."""

    data: dict[str, Any]
    lines: list[str]

    @property
    def kind(self) -> str:
        return self.data["kind"]


def look(
    paths: Sequence[str], text_column: str | None = None, label: str | bool | None = None, form: str | None = None
) -> DataSummary:
    """What kind of data this is. text_column, label: columns of a table; label=False: none. form: of chats.

    Raises UserError for what no reader knows, and for a table where more than one column may be the text or the label.
    """
    if len(paths) > 2:
        mend = "Give one file, one folder, or the two files of parallel text"
        raise UserError(f"--data: {len(paths)} paths. {mend}.")
    path = expanded(paths[0])
    if len(paths) == 2:
        summary = _pair(path, expanded(paths[1]))
    elif stem := _stem(path):
        summary = stem
    elif path.is_dir() and not is_hub(path):
        summary = _folder(path, text_column, label, form)
    elif find_cifar(path):
        summary = _images(path)
    else:
        summary = _table(paths[0], find_split(paths[0], "train"), text_column, label, form)
    if form and summary.kind != "chats":
        raise UserError(f"--form {form}: {paths[0]} holds {WHAT[summary.kind]}. Leave it out.")
    no_label = label is False
    options = {"--text": text_column, "--label": None if no_label else label, "--no-label": no_label or None}
    chosen = [f"{name} {value}".removesuffix(" True") for name, value in options.items() if value is not None]
    if chosen and not {"text", "image"} & set(summary.data):
        raise UserError(f"{chosen[0]}: {paths[0]} has no columns ({WHAT[summary.kind]}). Leave it out.")
    return summary


def _side(file: Path) -> tuple[str, str] | None:
    """(name, language) of one side of parallel text."""
    match = re.fullmatch(r"(.+)\.([A-Za-z]{2,3}([-_]\w+)?)", re.sub(r"(\.txt)?(\.gz|\.xz)?$", "", file.name))
    return (match[1], match[2]) if match and f".{match[2]}" not in KINDS and file.is_file() else None


def _pair(first: Path, second: Path) -> DataSummary:
    for file in (first, second):
        if not file.is_file():
            raise UserError(f"{file}: no such file.{near(file)}")
    a, b = _side(first), _side(second)
    if not (a and b) or a[0] != b[0] or a[1] == b[1] or first.parent.absolute() != second.parent.absolute():
        both = "parallel text must lie in one folder as NAME.en and NAME.de, say"
        raise UserError(f"{first} and {second}: {both}. To read files one after another, give their folder.")
    return _pairs(first.parent, a[0], a[1], b[1])


def _pairs(folder: Path, name: str, source: str, target: str) -> DataSummary:
    data = {"kind": "pairs", "path": str(folder.absolute()), "source": source, "target": target}
    if name not in SPLITS["train"]:
        data["train"] = name
    line = f"found      {folder / name}.{source} and .{target}: parallel sentences, "
    return DataSummary(data, [f"{line}to translate from {source} to {target} (data.source, data.target)"])


def _stem(path: Path) -> DataSummary | None:
    """short, of short.de and short.en. Raises UserError where there are more languages than two."""
    if path.exists() or is_hub(path) or not path.parent.is_dir():
        return None
    sides = (side for f in sorted(path.parent.iterdir()) if (side := _side(f)) and side[0] == path.name)
    languages = list(dict.fromkeys(language for _, language in sides))
    if len(languages) > 2:
        raise UserError(f"{path}: in {either(languages, 'and')}. Name the two files, the language to translate first.")
    return _pairs(path.parent, path.name, *languages) if len(languages) == 2 else None


def _folder(folder: Path, text_column: str | None, label: str | bool | None, form: str | None) -> DataSummary:
    folder = inner(folder)
    if tables := listings(folder):
        table = by_split([*tables], folder).get("train", [*tables])[0]
        return _table(folder, table, text_column, label, picture=tables[table])
    files = visible_files(folder)
    pictures = (f for pattern in ("*/*", "*/*/*") for f in folder.glob(pattern) if is_image(f))
    if find_cifar(folder) or next(pictures, None):
        return _images(folder)
    if any(map(is_image, files)):
        mend = f"Put them into a folder per class: {folder / 'cat'}, say; or write file_name,label into metadata.csv"
        raise UserError(f"{folder}: images without a class. {mend}.")
    sides = [side for f in files if (side := _side(f)) and side[0] in SPLITS["train"]]
    if len(languages := sorted({language for _, language in sides})) == 2:
        return _pairs(folder, sides[0][0], *languages)
    return _table(folder, find_split(folder, "train"), text_column, label, form)


def _images(path: Path) -> DataSummary:
    return DataSummary({"kind": "images", "path": str(path.absolute())}, [f"found      {path}: images with a label"])


# ---------------------------------------------------------------- the columns of a table


class Column:
    """A column of a table, as its first rows show it."""

    def __init__(self, name: str, cells: list[Any]):
        self.name, self.cells = name, [x for x in cells if x is not None and x != ""]
        self.n_rows = len(cells)
        self.is_scalar = all(isinstance(x, str | int | float) for x in self.cells)
        self.distinct = {str(x).strip() for x in self.cells} - {""} if self.is_scalar else set()
        self.is_number = bool(self.distinct) and all(NUMBER.fullmatch(x) for x in self.distinct)
        self.is_whole = self.is_number and all(float(x.replace(",", ".")).is_integer() for x in self.distinct)

    @property
    def is_image(self) -> bool:
        first = next(iter(self.cells), None)
        return (isinstance(first, dict) and "bytes" in first) or (
            isinstance(first, bytes) and first.startswith(PICTURES)
        )

    @property
    def is_string(self) -> bool:
        return bool(self.distinct) and not self.is_number and all(isinstance(x, str) for x in self.cells)

    @property
    def is_words(self) -> bool:
        """Whether most cells have several words (of a script without spaces: several characters)."""
        if not self.is_string:
            return False
        words = (sum(bool(re.search(r"[^\W\d_]", word)) for word in x[:200].split()) for x in self.cells)
        without_spaces = (re.search("[\u0e00-\u0e7f\u3040-\u30ff\u4e00-\u9fff]{4}", x[:200]) for x in self.cells)
        return 2 * sum(n > 1 or bool(match) for n, match in zip(words, without_spaces)) > len(self.cells)

    @property
    def is_few(self) -> bool:
        """Whether so few values could be classes."""
        few = 1 <= len(self.distinct) <= max(2, min(100, self.n_rows // 3))
        return few and (self.is_whole or not self.is_number) and not all(map(DATE.fullmatch, self.distinct))

    @property
    def several(self) -> str | None:
        """A value that looks like several classes in one cell (a;b), whose parts stand in other cells too."""
        for mark in ";|,":
            parts = {value: {part.strip() for part in value.split(mark)} for value in sorted(self.distinct)}
            times = collections.Counter(itertools.chain(*parts.values()))
            for value, own in parts.items():
                if len(own) > 1 and any(times[part] > 1 for part in own):
                    return value
        return None

    def names_among(self, others: Iterable[Column]) -> str | None:
        """The column, if any, of names that go one to one with these numbers."""
        for other in others if self.is_whole else ():
            pairs = set(zip(map(str, self.cells), map(str, other.cells)))
            alike = 1 < len(pairs) == len(self.distinct) == len(other.distinct) < len(other.cells) == len(self.cells)
            if other.is_string and alike:
                return other.name
        return None

    @property
    def is_score(self) -> bool:
        """Whether these are numbers that are neither classes nor those of the rows."""
        return self.is_number and not self.is_few and not (self.is_whole and len(self.distinct) == self.n_rows)


def _first_rows(file: Readable) -> list[dict[str, Any]]:
    rows, size = [], 0
    for row in itertools.islice(read_rows(file), ROWS):
        rows.append(row)
        cells = (cell.get("bytes") if isinstance(cell, dict) else cell for cell in row.values())
        size += sum(len(cell) + 1 if isinstance(cell, str | bytes) else 1 for cell in cells)
        if size > CHARACTERS:
            break
    return rows


def _table(
    path: str | Path, file: Readable, text: str | None, label: str | bool | None, form: str | None = None,
    picture: str | None = None,
) -> DataSummary:  # fmt: skip
    """picture: the column of names of image files."""
    where = str(path) if str(path).startswith("hf:") else str(expanded(path).absolute())
    if kind_of(file) == "txt":
        line = f"found      {file}: running text, for a model that predicts the next token"
        return DataSummary({"kind": "text", "path": where}, [line])
    rows = _first_rows(file)
    forms, has_text = chats.forms_of(rows[0]), _named(rows[0], TEXT_COLUMNS)
    if not picture and (form or (forms and not text and not has_text)):
        return _chats(where, file, rows[0], form)
    names = dict.fromkeys(itertools.chain(*rows))  # of JSON, a row may lack some
    columns = {name: Column(name, [row.get(name) for row in rows]) for name in names}
    for option, name in (("--text", text), ("--label", label)):
        if isinstance(name, str) and name not in columns:
            raise UserError(f"{option} {name}: {file} has no such column.{did_you_mean(name, columns)}")
    if text is not None and text == label:
        raise UserError(f"--text {text} --label {label}: one column cannot be both. Name two.")
    if kind_of(file) in ("csv", "tsv") and not (text or label):
        _need_header(file, columns)
    if text is None and not _named(columns, TEXT_COLUMNS):
        _refuse_questions(file, columns)
    what = "names" if picture else "holds"
    if picture := picture or next((name for name, column in columns.items() if column.is_image), None):
        if text is not None:
            raise UserError(f"--text {text}: {file} {what} images (column {picture!r}). Leave it out.")
        input_line = f"image      column {picture!r}: it {what} images"
    else:
        text, why = (text, "--text") if text is not None else _choose_text(file, columns, label)
        if columns[text].is_string and all(cell.lower().endswith(SUFFIXES) for cell in columns[text].cells):
            mend = "Call the table metadata.csv, the columns file_name and label, and give its folder"
            raise UserError(f"{file}: column {text!r} holds names of image files. {mend}.")
        input_line = f"text       column {text!r}: {why}"
    others = {name: column for name, column in columns.items() if name not in (text, picture)}
    label, why = _choose_label(file, others, label, bool(picture))
    if label is None and picture:
        raise UserError(f"{file}: no column looks like a label; there are: {_names(columns)}. Name it: --label COLUMN.")
    label_line = f"label      {f'column {label!r}: {why}' if label else why}"
    lines = [f"found      {file}: a table with columns {_names(columns)}", input_line, label_line]
    if forms:
        lines.append(f"note       it has chats too: --form {forms[0]} learns what the assistant says alone")
    if kind_of(file) == "texts":
        lines = [f"found      {file}: texts, each in the folder of its class"]
    n, all_of = len(getattr(file, "files", "1")), re.search(r"-of-(\d+)", str(file))
    if all_of and int(all_of[1]) != n:
        lines.append(f"note       only {n} of {int(all_of[1])} parts of {file} {'is' if n == 1 else 'are'} there")
    if label and (several := others[label].several):
        text_of = f"{several!r} is a class by itself: a text has one class here, not several"
        lines.append(f"note       column {label!r}: {text_of}; for one of them, write a column with yes and no")
    if picture:
        return DataSummary({"kind": "images", "path": where, "image": picture, "label": label}, lines)
    data = {"kind": "labelled" if label else "text", "path": where, "text": text}
    return DataSummary(data | ({"label": label} if label else {}), lines)


def _chats(where: str, file: Readable, row: dict[str, Any], form: str | None) -> DataSummary:
    """Of a file whose rows, as the first is, are chats."""
    found = chats.form_of(str(file), row, form, "--form")
    columns = chats.FORMS[found]
    lines = [f"found      {file}: chats, by the column{'s' * (len(columns) > 1)} {' and '.join(columns)}"]
    lines.append("learns     what the assistant says, and where it stops; gradus check shows a chat token by token")
    read = {*columns, *{"messages": (), "alpaca": ("input", "system", "history")}.get(found, ("system",))}
    if left := [name for name in row if name not in read]:
        lines.append(f"note       not read: {_names(dict.fromkeys(left))} (a column of weights: data.weight=COLUMN)")
    return DataSummary({"kind": "chats", "path": where, **({"form": form} if form else {})}, lines)


def _names(columns: Mapping[str, Any]) -> str:
    shown = ", ".join([*columns][:20])
    return shown + (f", ... ({len(columns):,} in all)" if len(columns) > 20 else "")


def _refuse_questions(file: Path, columns: dict[str, Column]) -> None:
    """Raises UserError for data of assistants, of which no single column says what is to be learned."""
    by_name = {name.strip().casefold(): name for name in columns}
    for names, what in QUESTIONS:
        if names <= by_name.keys():
            shown = either([repr(name) for key, name in by_name.items() if key in names | {"input", "system"}], "and")
            what += f" (column{'s' * (' and ' in shown)} {shown})"
            raise UserError(f"{file}: {what}, which are not read so. {NOT_READ}.")


def _need_header(file: Path, columns: dict[str, Column]) -> None:
    """Raises UserError where the first row looks like data, and not like the names of columns."""
    is_tsv = kind_of(file) == "tsv"
    if len(columns) == 1 and (mark := re.search("[,;|]" if is_tsv else r"(?<=\w)[:^~](?=\w)", *columns)):
        lacks, mend = ("no tab", "Name the file .csv, or use tabs") if is_tsv else ("no comma", "Use commas or tabs")
        raise UserError(f"{file}: the first line has {lacks}, but {mark[0]!r}. {mend}.")
    for name, column in columns.items():
        lengths = sorted(len(str(x)) for x in column.cells)
        sentence = len(name.split()) > 3 and column.is_words and len(name) >= lengths[len(lengths) // 2] / 2
        if NUMBER.fullmatch(name.strip()) or name.strip() in column.distinct or sentence:
            row = ", ".join(f"{x[:30]}..." if len(x) > 30 else x for x in [*columns][:5])
            what = f"the first row ({row}) looks like data, not like the names of columns"
            mend = "Put a row of names above it, such as text,label. If these are the names: --text COLUMN"
            raise UserError(f"{file}: {what}. {mend}.")


def _named(columns: Iterable[str], *names: Sequence[str]) -> list[str]:
    """The columns with one of the first of these lists of names, in which there is any."""
    for some in names:
        if matches := [name for name in columns if name.strip().casefold() in some]:
            return matches
    return []


def _choose_text(file: Path, columns: dict[str, Column], label: str | bool | None) -> tuple[str, str]:
    """(the column of texts, why). Raises UserError where there is none, or more than one that may be meant."""
    strings = {name: column for name, column in columns.items() if name != label and column.is_string}
    words = [name for name, column in strings.items() if column.is_words]
    named = _named(strings, TEXT_COLUMNS, TEXT_NAMES)
    alike = [name for name in words if named and name != named[0] and name.casefold().startswith(named[0].casefold())]
    if len(named) == 1 and not alike:
        return named[0], "by its name; another with --text COLUMN"
    many = [name for name in strings if not columns[name].is_few]
    kinds = ([name for name in many if name in words], words, many, list(strings))
    likely = [*named, *alike] or next(filter(None, kinds), [])
    other = {n: type(c.cells[0]).__name__ for n, c in columns.items() if not c.is_scalar and n not in likely}
    if not likely or (other and _named(likely, LABEL_COLUMNS, LABEL_NAMES) == likely):
        kind = "".join(f" Column {name!r} holds {HOLDS.get(k, k)}." for name, k in itertools.islice(other.items(), 3))
        there = f"no column holds text; there are: {_names(columns)}"
        raise UserError(f"{file}: {there}.{kind} Name one: --text COLUMN, or write the texts into one.")
    if len(likely) > 1:
        both = either(map(repr, likely[:5]), "and")
        mend = f"Name one, such as --text {likely[0]}; to learn from both, join them in one column"
        mend += "; to translate, write them as two files, NAME.en and NAME.de, say"
        raise UserError(f"{file}: which column is the text? {both} hold text. {mend}.")
    return likely[0], "the only one that holds text"


def _choose_label(
    file: Path, columns: dict[str, Column], label: str | bool | None, many: bool
) -> tuple[str | None, str]:
    """(the column of labels or None, why). many: also one of many values, by its name. Raises UserError where more than
    one may be meant, and for numbers that are no classes."""
    alone = "the model learns the text alone and predicts the next token"
    if label is False:
        return None, f"none (--no-label): {alone}"
    likely, why = [label] if label else _named(columns, LABEL_COLUMNS, LABEL_NAMES), "by its name"
    if not likely:
        likely = [name for name, column in columns.items() if column.is_few and len(column.distinct) > 1]
        why = "the only one with few values"
    names = {number: name for number in likely if (name := columns[number].names_among(columns.values()))}
    likely = list(dict.fromkeys(likely if label else (names.get(name, name) for name in likely)))
    if len(likely) > 1:
        each = either((f"{name!r} ({len(columns[name].distinct):,} values)" for name in likely[:5]), "or")
        mend = f"Name it, such as --label {likely[0]}, or learn the text alone: --no-label"
        raise UserError(f"{file}: which column is the label, {each}? {mend}.")
    if not likely:
        for column in columns.values():
            if column.is_score:
                raise _no_classes(file, column)
        return None, f"none found: {alone}; name one with --label COLUMN"
    column = columns[likely[0]]
    n, rows = len(column.distinct), f"in the first {column.n_rows:,} rows"
    if not n:
        what = "lists, and a text has one class here, not several" if not column.is_scalar else f"no label {rows}"
        raise UserError(f"{file}: column {column.name!r} holds {what}. Name another: --label COLUMN.")
    if column.is_number and not column.is_few and not ((label or many) and column.is_whole):
        raise _no_classes(file, column)
    if label:
        return column.name, "--label" + (f"; {names[label]!r} has the names of its numbers" if label in names else "")
    if column.name in names.values():
        why = f"the names of the numbers in {next(number for number in names)!r}"
    if not (column.is_few or many):
        mend = f"If each is a class: --label {column.name}. To learn the text alone: --no-label"
        raise UserError(f"{file}: column {column.name!r} holds {n:,} different values {rows}. {mend}.")
    return column.name, f"{why}; {n} value{'s' if n > 1 else ''} {rows}; another with --label COLUMN"


def _no_classes(file: Path, column: Column) -> UserError:
    example, mend = max(map(str, column.cells), key=len), "To learn the text alone: --no-label"
    what = f"column {column.name!r} holds {len(column.distinct):,} different numbers, such as {example}"
    if column.is_whole:
        ask = f"Is it a score? Only classes can be learned. If each number is a class: --label {column.name}"
    else:
        ask = "It is a score, and only classes can be learned: write low and high, say, in a column for --label"
    return UserError(f"{file}: {what}. {ask}. {mend}.")
