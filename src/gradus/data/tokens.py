"""Texts tokenised once: ids of many texts in a memory-mapped file, kept by the hash of their content."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gradus.data.cache import digest, keep
from gradus.data.corpus import Corpus
from gradus.data.tokenizers import Tokenizer
from gradus.errors import UserError
from gradus.files import cache_dir


class TokenFile:
    """Token ids of many texts in one memory-mapped file, with the place where each text begins.

    ids: (n_tokens,) uint16 or uint32. offsets: (n_texts + 1,) int64. `about` holds n_bytes (UTF-8), n_words (between
    white space) and n_lines of the texts. Pickled by its folder, so that workers map the same file.
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
    def of(cls, corpus: Corpus, tokenizer: Tokenizer, eos: bool = False, cache: str | Path | None = None) -> TokenFile:
        """`build` of a corpus."""
        return cls.build(corpus, tokenizer, corpus.key, eos, name=corpus.name, cache=cache)

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
        beside: Callable[[], dict[str, Any]] = dict,
    ) -> TokenFile:
        """Tokenise texts in a stream into the cache, or open what is there under (key, tokenizer, eos): then `texts` is
        not touched.

        key: a hash of the texts' content (`identity`, `Corpus.key`). eos: an end-of-text token after each text. beside:
        called after the last text for more to keep in `about`. Raises UserError where there is no text, no end-of-text
        token, or no room.
        """
        if eos and tokenizer.eos_id is None:
            raise UserError(
                "The tokenizer has no end-of-text token, which must stand between documents. "
                "Use another, such as tokenizer.kind=bpe."
            )
        folder = cache_dir(cache) / "tokens" / digest(1, key, tokenizer.fingerprint, eos)
        end = [tokenizer.eos_id] if eos else []
        return cls(keep(folder, lambda aside: _write(aside, texts, tokenizer, end, name, beside), _whole))


def _whole(folder: Path) -> bool:
    try:
        about = json.loads((folder / "about.json").read_text())
        sizes = [(folder / name).stat().st_size for name in ("ids.bin", "offsets.bin")]
        return sizes == [about["n_tokens"] * np.dtype(about["dtype"]).itemsize, 8 * (about["n_texts"] + 1)]
    except (OSError, ValueError, KeyError):
        return False


def _write(
    folder: Path, texts: Iterable[str], tokenizer: Tokenizer, end: list[int], name: str, beside: Callable
) -> None:
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    about = dict.fromkeys(("n_tokens", "n_texts", "n_bytes", "n_words", "n_lines"), 0)
    progress = _Progress(name)
    with open(folder / "ids.bin", "wb") as ids, open(folder / "offsets.bin", "wb") as offsets:
        offsets.write(np.zeros(1, "<i8").tobytes())
        for batch in _batches(texts):
            try:
                about["n_bytes"] += sum(len(text.encode()) for text in batch)
            except UnicodeEncodeError as e:
                first, last = about["n_texts"] + 1, about["n_texts"] + len(batch)
                half = f"half a character in one of them ({e.reason})"
                raise UserError(f"{name}: texts {first} to {last}: {half}. Mend it.") from None
            rows = [row + end for row in tokenizer.encode_batch(batch)]
            lengths = np.fromiter(map(len, rows), np.int64, len(rows))
            ids.write(np.fromiter(itertools.chain.from_iterable(rows), dtype, int(lengths.sum())).tobytes())
            offsets.write((np.cumsum(lengths) + about["n_tokens"]).astype("<i8").tobytes())
            about["n_tokens"] += int(lengths.sum())
            about["n_texts"] += len(rows)
            about["n_words"] += sum(len(text.split()) for text in batch)
            about["n_lines"] += sum(text.count("\n") for text in batch)
            progress.add(sum(map(len, batch)), int(lengths.sum()))
    progress.end()
    if about["n_tokens"] == 0:
        raise UserError(f"{name}: empty: there is not one token in it.")
    about |= {"dtype": dtype, "vocab_size": tokenizer.vocab_size, **beside()}
    (folder / "about.json").write_text(json.dumps(about))


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


class _Progress:
    """A line on stderr every 2 s (30 s where there is no terminal), from the third second on."""

    def __init__(self, what: str):
        self.what, self.began, self.next = what, time.perf_counter(), 3.0
        self.characters = self.tokens = 0
        self.every, self.before, self.after = (2.0, "\r", "") if sys.stderr.isatty() else (30.0, "", "\n")

    def add(self, characters: int, tokens: int) -> None:
        self.characters, self.tokens = self.characters + characters, self.tokens + tokens
        spent = time.perf_counter() - self.began
        if spent >= self.next:
            self.next = spent + self.every
            self._show(spent, self.after)

    def end(self) -> None:
        if self.next > 3.0:
            self._show(time.perf_counter() - self.began, "\n")

    def _show(self, spent: float, end: str) -> None:
        done = f"{self.characters / 1e6:,.1f} M characters, {self.tokens / 1e6:,.1f} M tokens"
        speed = f"{self.tokens / spent / 1e6:.2f} M tokens/s"
        print(f"{self.before}tokenising {self.what}: {done}, {speed}", end=end, file=sys.stderr, flush=True)
