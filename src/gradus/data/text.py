"""Data sets of text: windows of running text, rows of documents, parallel sentences, texts with a label."""

from __future__ import annotations

import functools
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradus import limits
from gradus.data.cache import digest, identity
from gradus.data.corpus import TEXT_COLUMNS, Corpus, TokenFile, text_of
from gradus.data.readers import Readable, class_names, first_column, kind_of, no_column, no_columns, numbered, read_rows
from gradus.data.tokenizers import Tokenizer
from gradus.errors import UserError

LABEL_COLUMNS = ("label", "labels", "class", "target")


class LMDataset:
    """Windows of running text for a causal language model: item i is {"ids": (seq_len + 1,) int64}, of which the last
    seq_len are predicted.

    The windows tile the text; neighbours share one token. For training, they begin at a phase in [0, seq_len) that is a
    pure function of (seed, epoch), so that tokens are not always cut at the same places; what is left over at both ends
    is less than two windows. With shuffle_phase=False (evaluation) they begin at 0 and the last is shorter: every token
    but the first is predicted exactly once. pack="documents" adds, each (seq_len + 1,): "segments", the number of the
    document in the window from 0, and "positions", from 0 in each document. What crosses a border is neither to be
    attended to nor to be predicted.

    Raises UserError where the text is shorter than a window (training) or than two tokens.
    """

    epoch_aware = True

    def __init__(
        self, tokens: TokenFile, seq_len: int, seed: int = 0, pack: str = "stream", shuffle_phase: bool = True
    ):
        self.tokens, self.seq_len, self.seed, self.shuffle_phase = tokens, seq_len, seed, shuffle_phase
        self.content = tokens.content
        self.documents = pack == "documents"
        n = tokens.n_tokens
        if n < (seq_len + 1 if shuffle_phase else 2):
            few = f"The text has {n} tokens, less than a window of {seq_len} + 1"
            raise UserError(f"{few}. Give more text or a smaller model.seq_len or data.max_len.")
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
        """Tokens that a pass of evaluation predicts: all but the first (in "documents": but the first of each)."""
        if not self.documents:
            return int(self.lengths.sum())
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
        places, offsets = np.arange(start, stop), self.tokens.offsets
        document = np.searchsorted(offsets, places, "right") - 1  # of each token
        segments = np.unique(document, return_inverse=True)[1]
        return {"ids": ids, "segments": segments, "positions": places - np.maximum(start, offsets[document])}


class DocumentsDataset:
    """Rows of at most max_len tokens for masked language models and span corruption: item i is {"ids": (1 .. max_len,)
    int64}.

    A document is cut into consecutive pieces of max_len tokens, the last one shorter (Devlin et al. 2019, appendix A.2,
    without its random short ones). across=True takes texts for paragraphs of one document: a row holds as many whole
    ones as fit, and only a paragraph longer than a row is cut. Every token is in exactly one row.
    """

    def __init__(self, tokens: TokenFile, max_len: int, across: bool = False):
        if max_len < 1:
            few = f"data.max_len leaves {max_len} tokens per row besides the special ones"
            raise UserError(f"{few}. Set a larger data.max_len or model.seq_len.")
        self.tokens, self.content = tokens, tokens.content
        offsets = np.asarray(tokens.offsets)
        if across:
            starts, at = [], 0
            while at < tokens.n_tokens:
                starts.append(at)
                border = int(offsets[np.searchsorted(offsets, at + max_len, "right") - 1])
                at = border if border > at else at + max_len
            self.starts = np.array(starts, dtype=np.int64)
        else:
            pieces = -(-np.diff(offsets) // max_len)  # of each document
            first = np.cumsum(pieces) - pieces  # of each document
            number = np.arange(pieces.sum()) - np.repeat(first, pieces)  # of each piece in its document
            self.starts = np.repeat(offsets[:-1], pieces) + number * max_len
        self.lengths = np.diff(self.starts, append=tokens.n_tokens)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"ids": self.tokens.ids[self.starts[i] : self.starts[i] + self.lengths[i]].astype(np.int64)}


class PairsDataset:
    """Parallel text: item i is {"source": (n,) int64, "target": (m,) int64}, each of at most max_len tokens.

    `sides`: (n, 2) tokens of source and target; `lengths`: (n,) of both together. Raises UserError where the two sides
    have not equally many lines.
    """

    def __init__(
        self, source: Corpus, target: Corpus, tokenizer: Tokenizer, target_tokenizer: Tokenizer | None = None,
        max_len: int = sys.maxsize, cache: str | Path | None = None,
    ):  # fmt: skip
        self.max_len = max_len
        self.source = TokenFile.of(source, tokenizer, cache=cache)
        self.target = TokenFile.of(target, target_tokenizer or tokenizer, cache=cache)
        if len(self.source) != len(self.target):
            both = f"{source.name} has {len(self.source)} lines, {target.name} has {len(self.target)}"
            raise UserError(f"{both}: parallel text needs equally many lines.")
        self.content = digest(source.content, target.content)
        sides = np.stack([side.lengths() for side in (self.source, self.target)], axis=1)
        self.truncation, self.sides = truncation(source.name, sides.max(axis=1), max_len), np.minimum(sides, max_len)
        self.lengths = self.sides.sum(axis=1)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {"source": self.source.text(i)[: self.max_len], "target": self.target.text(i)[: self.max_len]}


def truncation(name: str, lengths: np.ndarray, most: int) -> str | None:
    """A note on how many texts are longer than `most` tokens, and truncated to it; None where none is."""
    longer = lengths[lengths > most]
    if not len(longer):
        return None
    kept = f"of such a text {np.median(most / longer):.0%} is kept (median)"
    return f"{name}: {len(longer):,} of {len(lengths):,} texts are longer than {most:,} tokens and truncated: {kept}"


class LabelledDataset:
    """The rows of a table: item i is {"ids": (up to max_len,) int64, "label": int}; of a text, limits.FIELD characters
    are read.

    columns: of text and label; None: the first there is of text, sentence, review, content and of label, labels, class,
    target. Labels are whole numbers where all are written as such, else names: 01 is no number, and true and false are
    so called in every kind of file. Those that the training split has are the classes, sorted.
    like: the training split, whose classes the others have. names: of the training split's numbers, where the file does
    not say; where its labels are names, all among these, the classes have this order. n_classes: labels are numbers
    below it. `classes`: the names, or the numbers as text; `lengths`: (n,) tokens, after the cut to max_len.

    Raises UserError with file and row for a missing column, a text that is none, a label that is missing, of another
    kind, out of range, or not among the training split's.
    """

    def __init__(
        self, path: Readable, tokenizer: Tokenizer, max_len: int,
        columns: tuple[str | None, str | None] = (None, None), like: LabelledDataset | None = None,
        names: Sequence[str] | None = None, n_classes: int | None = None, cache: str | Path | None = None,
    ):  # fmt: skip
        self.name, self.max_len = str(path), max_len
        labels: list[int | str] = []
        self.content = identity(path)
        key = digest("labelled", digest(kind_of(path), self.content), *columns, "labels as written")
        texts = Corpus(lambda: self._texts(path, columns, labels), key, self.name, True)
        extra = {"extra": lambda: {"labels": of_one_kind(labels, lambda i: _where(path, i))}}
        self.tokens = TokenFile.of(texts, tokenizer, cache=cache, **extra)
        labels = self.tokens.about.pop("labels")
        if like is not None:
            self.classes, self.index = like.classes, like.index
        else:
            declared = class_names(path, (columns[1],) if columns[1] else LABEL_COLUMNS)
            self.classes, self.index = number_classes(labels, declared, names, n_classes)
        self.labels = np.array([self.index.get(str(x), -1) for x in labels], dtype=np.int64)
        self.lengths = np.minimum(self.tokens.lengths(), max_len)
        self.truncation = truncation(self.name, self.tokens.lengths(), max_len)
        if (self.labels < 0).any():
            i, n = int(np.argmax(self.labels < 0)), len(self.classes)
            there = f"{n} class{'es' * (n > 1)}{f' of {like.name}' if like else ''} ({', '.join(self.classes[:10])})"
            mend = "Correct it, write names for numbers, or list every class in task.classes"
            raise UserError(f"{_where(path, i)}: label {labels[i]!r:.60} is not one of the {there}. {mend}.")

    def _texts(self, path: Readable, columns: tuple[str | None, str | None], labels: list[int | str]) -> Iterator[str]:
        """The texts; their labels are added to `labels` as they come."""
        text, label = columns
        rows = numbered(path, columns if all(columns) else None)
        for file, number, row in rows:
            if isinstance(row, str):
                raise no_columns(file, "label")
            text = text or first_column(str(file), row, TEXT_COLUMNS, "text")
            label = label or first_column(str(file), row, LABEL_COLUMNS, "label")
            if label not in row:
                raise no_column(file, number, label, row)
            if (value := as_label(row[label])) is None:
                n = 1 + sum(as_label(other[label]) is None for *_, other in rows if label in other)
                what = f"label {row[label]!r} is neither a whole number nor a name ({n:,} such row{'s' * (n > 1)})"
                raise UserError(f"{file}: row {number}: {what}. Correct or remove {'them' if n > 1 else 'it'}.")
            labels.append(value)
            yield text_of(file, number, row, text)[: limits.FIELD]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"ids": self.tokens.text(i)[: self.max_len], "label": int(self.labels[i])}


def as_label(value: Any) -> int | str | None:
    """A cell as a label: a whole number, or a name without the space around it; None for neither."""
    if type(value) is int or (isinstance(value, float) and value.is_integer()):
        return int(value)
    text = str(value).strip() if isinstance(value, bool | str) else ""
    return (text.lower() if text.lower() in ("true", "false") else text) or None


def has_labels(path: Readable, column: str | None) -> bool:
    """Whether any row has a label. The test split of a competition has no such column, or -1 in each row."""
    first = next(read_rows(path))
    if isinstance(first, str):
        return True
    label = column or next((name for name in LABEL_COLUMNS if name in first), "")
    return label in first and any(as_label(row[label]) not in (None, -1, "-1") for row in read_rows(path, [label]))


def _where(path: Readable, i: int) -> str:
    file, number, _ = next(itertools.islice(numbered(path), i, None))
    return f"{file}: row {number}"


def of_one_kind(labels: list[int | str], where: Callable[[int], str]) -> list[int | str]:
    """The labels as whole numbers, where each that is a text is written as its number is (not 01, +1, 1.0); else the
    texts. Raises UserError where there are both; where: what it calls the i-th."""
    is_text = [isinstance(label, str) and not re.fullmatch(r"0|-?[1-9]\d{0,3999}", label) for label in labels]
    if not any(is_text):
        return list(map(int, labels))
    if not all(isinstance(label, str) for label in labels):
        i = is_text.index(True)
        what = f"label {labels[i]!r} is not a whole number, as others are. Use one kind"
        raise UserError(f"{where(i)}: {what}.")
    return labels


def number_classes(
    labels: Sequence[int | str], declared: Sequence[str] | None = None, names: Sequence[str] | None = None,
    n_classes: int | None = None,
) -> tuple[list[str], dict[str, int]]:  # fmt: skip
    """(classes of a training split, {label as text: its class}), for arguments as LabelledDataset has them.

    Without names, numbers are their own names, and only those that occur are classes: stars from 1 to 5 make five, and
    -1, 0, 1 three. declared: by the file, whose labels then count from 0; so they do among `names` that are no numbers,
    and so do false and true among other names.
    """
    occur = set(labels)
    if isinstance(next(iter(occur)), str):
        if names and occur <= {"false", "true"} and not occur <= set(names):
            return list(names), {"false": 0, "true": 1}
        classes = list(names) if names and occur <= set(names) else sorted(occur)
    elif not (classes := list(declared or names or ())):
        own = range(min(max(occur) + 1, n_classes)) if n_classes and min(occur) >= 0 else sorted(occur)
        classes = [str(x) for x in own]
    elif declared or not all(re.fullmatch(r"-?\d+", name) for name in classes):
        return classes, {str(i): i for i in range(len(classes))}
    return classes, {name: i for i, name in enumerate(classes)}
