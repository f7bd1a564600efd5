"""Texts in a stream (running text, documents, a column of a table), and their tokens in a memory-mapped file."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradus import files
from gradus.data import readers
from gradus.data.cache import digest, identity, keep
from gradus.data.readers import Readable, Row, Shards, expanded, first_column, kind_of, named, numbered, read_lines
from gradus.data.tokenizer_files import load
from gradus.data.tokenizers import PIECE, Tokenizer, last_border, pieces, train_bpe
from gradus.errors import UserError

TEXT_COLUMNS = ("text", "sentence", "review", "content")
BLOCK = 1 << 16  # characters of running text that are tokenised as one
LONGEST = 1 << 24  # characters of one document between blank lines


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Texts in a stream, as often as wanted: iterate over it. `key` is a hash of the content and of how it is read.

    separate: each text is a document (a row, a paragraph, a file), after which an end-of-text token makes sense; else
    the texts are consecutive pieces of one running text. content: a hash of the content alone, and of which part it is.
    """

    make: Callable[[], Iterator[str]]
    key: str
    name: str
    separate: bool
    content: str | None = None

    def __iter__(self) -> Iterator[str]:
        return self.make()

    @classmethod
    def open(cls, path: Readable, column: str = "text", documents: bool = False) -> Corpus:
        """A .txt is one running text in pieces of about 64 K characters, cut at line ends; with documents=True it is
        cut at blank lines instead. Of every other kind each row's `column` is a document. Several .txt are one text,
        with a line break between."""
        if kind_of(path) != "txt":
            return cls.column(path, column)
        read = _paragraphs if documents else _blocks
        content = identity(path)
        make = functools.partial(_named, read, path.files if isinstance(path, Shards) else [expanded(path)])
        return cls(make, digest(read.__name__, content), str(path), documents, content)

    @classmethod
    def column(cls, path: Readable, column: str | None, most: int | None = None) -> Corpus:
        """One column of a table (None: the first there is of TEXT_COLUMNS); each row is a document, of which at most
        `most` characters are read."""
        content = identity(path)
        key = digest("column", kind_of(path), column, content, *([most] if most else []))
        return cls(functools.partial(_column, path, column, most), key, str(path), True, content)

    @classmethod
    def lines(cls, path: str | Path) -> Corpus:
        """Each line of a text file of any name is a document, the empty ones too: one side of parallel text."""
        content = identity(path)
        return cls(functools.partial(read_lines, path), digest("lines", content), str(path), True, content)

    @classmethod
    def stdlib(cls) -> Corpus:
        """The Python standard library of this machine; each file is a document."""
        content = hashlib.sha256()
        for text in stdlib_texts():
            content.update(text.encode() + b"\0")
        name = f"the standard library of Python {sys.version.split()[0]}"
        return cls(stdlib_texts, digest("stdlib", content.hexdigest()), name, True, content.hexdigest())

    def split(self, fraction: float) -> tuple[Corpus, Corpus]:
        """All but the last `fraction` of the characters, and the rest. A document belongs to where it begins."""
        first = self._derived(f"first {1 - fraction:.0%}", self._part, fraction, False)
        return first, self._derived(f"last {fraction:.0%}", self._part, fraction, True)

    def every(self, n: int) -> tuple[Corpus, Corpus]:
        """All but every n-th text, and the rest."""
        others = self._derived(f"without every {n}th", self._every, n, False)
        return others, self._derived(f"every {n}th", self._every, n, True)

    def _derived(self, share: str, make: Callable, *arguments: Any) -> Corpus:
        key, name = digest(self.key, make.__name__, *arguments), f"{self.name} ({share})"
        content = self.content and digest(self.content, *arguments)
        return dataclasses.replace(
            self, make=functools.partial(make, *arguments), key=key, name=name, content=content
        )

    def _every(self, n: int, held_out: bool) -> Iterator[str]:
        at = 0
        for at, text in enumerate(self, 1):
            if (at % n == 0) == held_out:
                yield text
        if at < n:
            raise UserError(f"{self.name}: {at} lines are too few to hold out every {n}th. Give a valid split.")

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
                first = max(0, cut - begin)
                part = (text[first:] if last else text[:first]) or None
            if part is not None:
                n += 1
                yield part
        if n == 0:
            share = f"{fraction:.0%} of it for validation"
            raise UserError(f"{self.name}: too little text to take {share}. Set data.valid=NAME.")


def _column(path: Readable, column: str | None, most: int | None) -> Iterator[str]:
    for file, number, row in numbered(path):
        if isinstance(row, str):
            raise readers.no_columns(file, column or "text")
        if column not in row and isinstance(row.get("translation"), dict):  # how Hugging Face keeps parallel text
            row = row["translation"]
        column = column or first_column(str(file), row, TEXT_COLUMNS, "text")
        yield text_of(file, number, row, column)[:most]


def text_of(path: str | Path, number: int, row: Row, column: str) -> str:
    """The text in a column. Raises UserError where there is none."""
    if column not in row:
        raise readers.no_column(path, number, column, row)
    if not isinstance(row[column], str):
        raise UserError(f"{path}: row {number}: column {column!r} holds {row[column]!r}, not text.")
    return row[column]


def _named(read: Callable[[Path], Iterator[str]], paths: Sequence[Path]) -> Iterator[str]:
    for i, path in enumerate(paths):
        if i and read is _blocks:
            yield "\n"
        yield from named(path, read(path), read.__name__.strip("_s"))


def _blocks(path: Path) -> Iterator[str]:
    """Running text in pieces of about BLOCK characters, cut at borders of tokens where there are any."""
    with io.TextIOWrapper(readers.open_packed(path), encoding="utf-8-sig") as file:
        text = ""
        while more := file.read(BLOCK):
            seen = max(0, len(text) - 2)  # there is no border in it, unless at its end
            text += more
            cut = last_border(text, seen)
            if cut == seen:
                cut = len(text) if len(text) >= PIECE else 0
            if cut:
                yield text[:cut]
                text = text[cut:]
        if text:
            yield text


def _paragraphs(path: Path) -> Iterator[str]:
    """The documents of a text file: what stands between blank lines."""
    lines, size = [], 0
    for line in itertools.chain(readers.whole_lines(path, newline=None), [""]):
        if line.strip():
            lines.append(line)
            size += len(line)
            if size > LONGEST:
                many = f"{size >> 20} M characters without a blank line, which separates documents"
                raise UserError(f"{path}: {many}. Use data.pack=stream.")
        elif lines:
            yield "".join(lines).removesuffix("\n")
            lines, size = [], 0


def stdlib_texts() -> Iterator[str]:
    """The .py files of the running Python's standard library, by name; without site-packages and tests."""
    import sysconfig
    import tokenize

    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    sources = sorted(f for f in root.rglob("*.py") if not left_out & set(f.relative_to(root).parts))
    if not sources:
        raise UserError(f"{root}: no source files of the standard library here. Give another text (data.path).")
    for source in sources:
        with tokenize.open(source) as file:  # minds the encoding that a file declares
            yield file.read()


def cached_bpe(
    corpora: Sequence[Corpus], vocab_size: int, lowercase: bool, specials: list[str], cache: str | Path | None = None
) -> Tokenizer:
    """`train_bpe` of these texts, done once and kept in the cache."""
    key = digest(1, "".join(corpus.key for corpus in corpora), vocab_size, lowercase, specials)

    def write(aside: Path) -> None:
        train_bpe((text for corpus in corpora for text in corpus), vocab_size, lowercase, specials).save(aside)

    return load(keep(files.cache_dir(cache) / "tokenizers" / key, write))


# ---------------------------------------------------------------- tokenised once


class TokenFile:
    """Token ids of many texts in one memory-mapped file, with the place where each text begins.

    ids: (n_tokens,) uint16 or uint32. offsets: (n_texts + 1,) int64. `about` holds n_bytes (UTF-8), n_words (between
    white space) and n_lines of the texts. content: of the corpus. Pickled by its folder, so that workers map the same
    file.
    """

    content: str | None = None

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
    def of(
        cls, corpus: Corpus, tokenizer: Tokenizer, eos: bool = False, cache: str | Path | None = None,
        extra: Callable[[], dict[str, Any]] = dict, begin: Sequence[int] = (),
    ) -> TokenFile:  # fmt: skip
        """Tokenise texts in a stream into the cache, or open what is there under (their key, tokenizer, eos): then they
        are not read.

        eos: an end-of-text token after each text. extra: called after the last text for more to keep in `about`. begin:
        tokens before each text.
        Raises UserError where there is no text, no end-of-text token, or no room.
        """
        if eos and tokenizer.eos_id is None:
            lacks = "The tokenizer has no end-of-text token, which must separate documents"
            raise UserError(f"{lacks}. Use another, such as tokenizer.kind=bpe.")
        folder = files.cache_dir(cache) / "tokens" / digest(1, corpus.key, tokenizer.fingerprint, *begin, eos)
        end = [tokenizer.eos_id] if eos else []
        tokens = cls(keep(folder, lambda aside: _write(aside, corpus, tokenizer, [*begin], end, extra)))
        tokens.content = corpus.content
        return tokens


def _write(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, begin: list[int], end: list[int], extra: Callable
) -> None:
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    about, n_texts, n_tokens = dict.fromkeys(("n_bytes", "n_words", "n_lines"), 0), 0, 0
    shown, starts = time.monotonic(), True
    with open(folder / "ids.bin", "wb") as ids, open(folder / "offsets.bin", "wb") as offsets:
        offsets.write(np.zeros(1, "<i8").tobytes())
        for batch in _batches(corpus):
            texts, last = zip(*batch)
            try:
                about["n_bytes"] += len("".join(texts).encode())
            except UnicodeEncodeError as e:
                where = f"one of the texts {n_texts + 1} to {n_texts + len(batch)}"
                raise UserError(f"{corpus.name}: half a character in {where} ({e.reason}). Fix it.") from None
            first, starts = (starts, *last[:-1]), last[-1]
            rows = [begin * a + row + end * b for a, row, b in zip(first, tokenizer.encode_batch(texts), last)]
            ends = np.cumsum([len(row) for row in rows], dtype="<i8") + n_tokens
            ids.write(np.fromiter(itertools.chain.from_iterable(rows), dtype).tobytes())
            offsets.write(ends[list(last)].tobytes())
            n_texts, n_tokens = n_texts + sum(last), int(ends[-1])
            about["n_words"] += sum(len(text.split()) for text in texts)
            about["n_lines"] += sum(text.count("\n") for text in texts)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                done = f"{about['n_bytes'] / 1e6:,.1f} MB, {n_tokens / 1e6:,.1f} M tokens"
                print(f"tokenising {corpus.name}: {done}", file=sys.stderr, flush=True)
    if n_tokens == 0:
        raise UserError(f"{corpus.name}: empty: it contains no tokens.")
    about |= {"dtype": dtype, **extra()}
    (folder / "about.json").write_text(json.dumps(about))


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """(piece of a text, whether it is its last) by the million characters: enough to keep the tokenizer's threads busy,
    little enough to hold."""
    batch, size = [], 0
    for text in texts:
        *others, last = pieces(text)
        for piece, is_last in (*((piece, False) for piece in others), (last, True)):
            batch.append((piece, is_last))
            size += len(piece)
            if size >= PIECE or len(batch) >= 1 << 13:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
