"""What the tests of texts share: files of every kind, a tokenizer that must not be called, errors of one line."""

from __future__ import annotations

import csv
import gzip
import lzma
from pathlib import Path

import pytest

from gradus.data.corpus import Corpus, TokenFile
from gradus.data.tokenizers import ByteTokenizer
from gradus.errors import UserError


class Untouchable(ByteTokenizer):
    """Encodes nothing: what must come from the cache."""

    def encode_batch(self, texts):
        raise AssertionError("the tokenizer was called")


Untouchable.__name__ = "ByteTokenizer"  # the fingerprint of the real one


def build(texts, tokenizer, key, eos=False, *, name="text", cache=None):
    return TokenFile.of(Corpus(lambda: iter(texts), key, name, True), tokenizer, eos, cache)


def error(call, *args, **options) -> str:
    with pytest.raises(UserError) as e:
        found = call(*args, **options)
        if not isinstance(found, Path):
            list(found)
    assert "\n" not in str(e.value), e.value
    return str(e.value)


ROWS = [{"text": 'a "quoted", one\nof two lines', "label": 1}, {"text": "Grüße 🙂", "label": 0}, {"text": "", "label": 1}]


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    data = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix, bytes)(data)
    path.write_bytes(data)
    return path


def as_csv(rows) -> str:
    import io

    out = io.StringIO()
    writer = csv.DictWriter(out, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
