"""Which file is which split, and the two sides of parallel text."""

from __future__ import annotations

import gzip
import os

import numpy as np
import pytest
from text_parts import error, write

from gradus.data.corpus import Corpus
from gradus.data.splits import Part, find_pairs, find_split
from gradus.data.text import PairsDataset
from gradus.data.tokenizers import ByteTokenizer, CharTokenizer

# ---------------------------------------------------------------- which file is which split


@pytest.mark.parametrize(
    "train, valid, test",
    [
        ("train.csv", "valid.csv", "test.csv"),
        ("train.jsonl.xz", "val.jsonl.xz", "test.jsonl.xz"),
        ("train-00000-of-00001.parquet", "validation-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
        ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"),
        ("train.tsv.gz", "dev.tsv", "test_2016.tsv"),
    ],
)
def test_splits_by_name(tmp_path, train, valid, test):
    for name in (train, valid, test, "README.md", "train.md", ".hidden-train.csv", "untested.csv"):
        (tmp_path / name).touch()
    assert [find_split(tmp_path, s).name for s in ("train", "valid", "test")] == [train, valid, test]


def test_splits_that_are_not_there(tmp_path):
    for name in ("train.csv", "test-a.csv", "test-b.csv"):
        (tmp_path / name).touch()
    assert "valid.*" in error(find_split, tmp_path, "valid") and "there are: test-a.csv, test-b.csv, train.csv" in error(
        find_split, tmp_path, "valid"
    )
    assert find_split(tmp_path, "valid", required=False) is None
    assert "several files for the test split: test-a.csv, test-b.csv. Set data.test=NAME" in error(find_split, tmp_path, "test")
    assert find_split(tmp_path, "test", "test-a.csv").name == "test-a.csv"
    assert "data.test=test-c.csv: no such file" in error(find_split, tmp_path, "test", "test-c.csv")
    assert find_split(tmp_path / "train.csv", "train").name == "train.csv"
    assert find_split(tmp_path / "train.csv", "test", "test-b.csv").name == "test-b.csv"
    assert find_split(tmp_path / "train.csv", "valid", required=False) is None
    assert "Set data.valid=NAME" in error(find_split, tmp_path / "train.csv", "valid")
    assert "Did you mean train.csv?" in error(find_split, tmp_path / "trian.csv", "train")


# ---------------------------------------------------------------- parallel text


@pytest.mark.shared_data
def test_multi30k(shared_data):
    tokenizer = ByteTokenizer()
    source, target = find_pairs(shared_data / "multi30k", "valid")
    data = PairsDataset(source, target, tokenizer, max_len=60)
    lines = [gzip.decompress((shared_data / f"multi30k/val.{s}.gz").read_bytes()).decode().splitlines() for s in ("de", "en")]
    assert len(data) == 1014 and [list(source), list(target)] == lines
    assert (
        bytes(data[7]["source"].astype(np.uint8)) == lines[0][7].encode()[:60]
        and bytes(data[7]["target"].astype(np.uint8)) == lines[1][7].encode()[:60]
    )
    assert data.lengths.tolist() == [len(data[i]["source"]) + len(data[i]["target"]) for i in range(1014)]
    there = error(find_pairs, shared_data / "multi30k", "test")
    assert "test_2016_flickr, test_2017_flickr. Set data.test=NAME" in there
    assert len(list(find_pairs(shared_data / "multi30k", "test", explicit="test_2016_flickr")[0])) == 1000
    assert "Did you mean test_2016_flickr?" in error(find_pairs, shared_data / "multi30k", "test", explicit="test_2016")
    assert "no train.fr" in error(find_pairs, shared_data / "multi30k", "train", target="fr")
    assert find_pairs(shared_data / "multi30k", "train", "fr", "it", required=False) is None


def test_pairs_of_a_table_and_unequal_files(tmp_path):
    write(tmp_path / "train.jsonl", '{"de": "eins", "en": "one"}\n{"translation": {"de": "zwei", "en": "two"}}\n')
    source, target = find_pairs(tmp_path, "train")
    assert list(source) == ["eins", "zwei"] and list(target) == ["one", "two"]
    data = PairsDataset(source, target, ByteTokenizer(), CharTokenizer("enotw"))
    assert data[1]["target"].tolist() == [3, 4, 2] and data.lengths.tolist() == [7, 7]
    assert find_pairs(tmp_path, "valid", required=False) is None
    write(tmp_path / "dev.de.txt", "a\nb\n\n")
    write(tmp_path / "dev.en.txt.gz", "a\nb\n")
    said = error(lambda: PairsDataset(*find_pairs(tmp_path, "valid"), ByteTokenizer()))
    assert "dev.de.txt has 3 lines" in said and "dev.en.txt.gz has 2" in said


def test_a_split_that_is_no_file_is_not_taken_for_none(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na,0\n")
    (tmp_path / "more").mkdir()
    assert find_split(tmp_path, "train") == tmp_path / "train.csv" and find_split(tmp_path, "valid", required=False) is None
    (tmp_path / "valid.csv").mkdir()
    assert "valid.csv: not a file" in error(find_split, tmp_path, "valid", None, required=False)
    pairs = tmp_path / "more"
    for name in ("train.de", "train.en", "valid.de"):
        (pairs / name).write_text("a\n")
    os.symlink("gone", pairs / "valid.en")
    assert "valid.en: not a file, or a link to none" in error(find_pairs, pairs, "train")
    (pairs / "valid.en").unlink()
    (pairs / "valid.en").mkdir()
    assert "valid.en: not a file" in error(find_pairs, pairs, "train")


# ---------------------------------------------------------------- some of the samples


def test_what_is_known_of_a_part_is_known_of_its_own_samples(tmp_path):
    whole = PairsDataset(*(Corpus.lines(write(tmp_path / f"train.{s}", "".join(f"{s * n}\n" for n in range(1, 9)))) for s in ("a", "bb")), ByteTokenizer())
    part = Part(whole, np.array([6, 1, 4]))
    assert len(part) == 3 and part.lengths.tolist() == [whole.lengths[i] for i in (6, 1, 4)] and len(set(part.lengths)) == 3
    assert part.sides.tolist() == [whole.sides[i].tolist() for i in (6, 1, 4)]
    assert [part[i]["source"].tolist() for i in range(3)] == [whole[i]["source"].tolist() for i in (6, 1, 4)]
