"""What the tests of tokenizers share."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma

import pytest

from gradus.data.tokenizers import ByteTokenizer, CharTokenizer, WordTokenizer, train_bpe

ODD = [
    "", " ", "  a  b\n\n c\t", "naïve café Ünïcode 日本語テキスト 🙂👩‍👩‍👧", "x" * 150, "a [MASK] b", "▁ ▁x", "\u200b\ufeff\u00a0q", "\x00\x01",
    "aaaaaaaa" + " " * 40 + "b", "don't we'll  1234567 $#@!", "E\u0301 e\u0301 ﬁ Ⅷ", "line\r\nend",
]  # fmt: skip


@pytest.fixture(scope="module")
def texts(shared_data) -> list[str]:
    """Encyclopedia, reviews with markup, German with umlauts, and odd ones."""
    with lzma.open(shared_data / "wikitext-2/valid.txt.xz", "rt", encoding="utf-8") as file:
        wiki = list(itertools.islice(file, 300))
    with lzma.open(shared_data / "imdb/train.jsonl.xz", "rt", encoding="utf-8") as file:
        reviews = [json.loads(line)["text"] for line in itertools.islice(file, 100)]
    with gzip.open(shared_data / "multi30k/train.de.gz", "rt", encoding="utf-8") as file:
        german = list(itertools.islice(file, 200))
    return wiki + reviews + german + ODD


def ids_of(theirs, texts) -> list[list[int]]:
    return theirs(texts, add_special_tokens=False)["input_ids"]


TRAINING = ["the cat sat on the mat\n", "the dog sat on the log\n", "Ünïcode 日本 🙂 too\n"] * 5


def made():
    return {
        "char": CharTokenizer.from_texts(TRAINING),
        "word": WordTokenizer.from_texts(TRAINING),
        "lower": WordTokenizer.from_texts(TRAINING, lowercase=True),
        "byte": ByteTokenizer(),
        "bpe": train_bpe(TRAINING, 300, specials=["<extra_id_0>"]),
    }
