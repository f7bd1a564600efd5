"""Rows of every kind of file, and what is wrong with one in one line with file and row."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys

import pytest
from text_parts import ROWS, as_csv, error, write

from gradus import limits
from gradus.data import cache as kept
from gradus.data.readers import read_rows
from gradus.data.splits import find_split
from gradus.data.text import LabelledDataset
from gradus.data.tokenizers import ByteTokenizer
from gradus.errors import UserError


def as_parquet(rows) -> bytes:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=2)
    return out.getvalue()


@pytest.mark.parametrize("suffix", [".txt.gz", ".csv.xz", ".parquet.gz"])
def test_a_file_packed_to_burst_is_refused(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(limits, "UNPACKED", 100_000)
    path = write(tmp_path / f"bomb{suffix}", "a line\n" * 100_000)
    assert path.stat().st_size * limits.RATIO < 700_000
    with pytest.raises(UserError, match=r"bomb\S+: unpacks to more than 0 MB, 250 times its size or more\. If it really is data, unpack it"):
        list(read_rows(path, ["a line"] if "csv" in suffix else None))
    monkeypatch.setattr(limits, "RATIO", 10_000)
    if "txt" in suffix:
        assert len(list(read_rows(path))) == 100_000


@pytest.mark.parametrize("packed", ["", ".gz", ".xz"])
def test_rows_of_every_kind(tmp_path, packed):
    lines = "\n".join(json.dumps(r) for r in ROWS) + "\n\n"
    assert list(read_rows(write(tmp_path / f"a.jsonl{packed}", lines))) == ROWS
    assert list(read_rows(write(tmp_path / f"a.parquet{packed}", as_parquet(ROWS)))) == ROWS
    assert list(read_rows(write(tmp_path / f"a.csv{packed}", as_csv(ROWS)))) == [{**r, "label": str(r["label"])} for r in ROWS]
    raw = 'sentence\tlabel\nshe said " no\t0\r\n\n"q" \\t \u2028\t1'
    assert list(read_rows(write(tmp_path / f"a.tsv{packed}", raw))) == [
        {"sentence": 'she said " no', "label": "0"},
        {"sentence": '"q" \\t \u2028', "label": "1"},
    ]
    assert list(read_rows(write(tmp_path / f"a.txt{packed}", "\ufeffone\r\n\n two \u2028x\rx"))) == ["one", "", " two \u2028x\rx"]
    for kind in ("jsonl", "parquet", "csv", "tsv"):
        assert next(read_rows(tmp_path / f"a.{kind}{packed}", ["label"])) in ({"label": 1}, {"label": "1"}, {"label": "0"})


def test_a_long_field_of_a_csv(tmp_path):
    assert len(next(read_rows(write(tmp_path / "a.csv", f"text\n{'x' * 300_000}\n")))["text"]) == 300_000


def test_what_is_wrong_with_a_file_is_said(tmp_path):
    def said(name, content, *args):
        return error(read_rows, write(tmp_path / name, content), *args)

    good = '{"a": 1}\n'
    assert "b.jsonl: row 2 is not valid JSON" in said("b.jsonl", good + '\n{"a": \n')
    assert "b.jsonl: row 2 is a JSON list" in said("b.jsonl", good + "[1]\n")
    assert "b.jsonl: row 2 has no column 'a'; it has: b, c." in said("b.jsonl", good + '{"b": 1, "c": 2}\n', ["a"])
    assert "b.csv: row 1 has no column 'text'; it has: a, b." in said("b.csv", "a,b\n1,2\n", ["text"])
    assert "b.csv: row 2 has 3 fields, but the header names 2" in said("b.csv", "a,b\n1,2\n1,2,3\n")
    assert "b.csv: not valid CSV at line 3" in said("b.csv", 'a,b\n1,2\n"1,2\n')
    assert "b.tsv: row 1 has 1 fields" in said("b.tsv", "a\tb\n1\n")
    assert "b.parquet: row 1 has no column 'x'; it has: text, label." in said("b.parquet", as_parquet(ROWS), ["x"])
    assert "not a whole Parquet file" in said("b.parquet", as_parquet(ROWS)[:-100])
    assert "no columns" in said("b.txt", "a\n", ["text"])
    assert "b.txt: not UTF-8 text after line 0 (byte 0xff)" in said("b.txt", b"a\xff\n")
    for name in ("b.txt", "b.jsonl", "b.csv", "b.tsv", "b.txt.gz", "b.jsonl.xz"):
        assert f"{name}: empty" in said(name, "")
    assert "b.csv: empty" in said("b.csv", "a,b\n")
    assert "(.doc)" in said("b.doc", "a") and "no suffix" in said("b", "a")
    assert "Did you mean b.jsonl?" in error(read_rows, tmp_path / "b.json")
    assert "There is no folder" in error(read_rows, tmp_path / "none" / "b.txt")
    noise = "".join(random.Random(0).choices("abcdefghij \n", k=200_000))
    for suffix in (".gz", ".xz"):
        whole = write(tmp_path / f"c.txt{suffix}", noise).read_bytes()
        (tmp_path / f"c.txt{suffix}").write_bytes(whole[: len(whole) // 2])
        assert f"c.txt{suffix}: truncated or corrupt after line" in error(read_rows, tmp_path / f"c.txt{suffix}")
        (tmp_path / f"c.txt{suffix}").write_bytes(b"not packed")
        assert "truncated or corrupt after line 0" in error(read_rows, tmp_path / f"c.txt{suffix}")


@pytest.mark.shared_data
def test_real_files_have_their_published_rows(shared_data):
    train = list(read_rows(shared_data / "sst2/train.tsv.xz"))
    assert len(train) == 67_349 and sum(r["label"] == "1" for r in train) == 37_569
    assert train[0] == {"sentence": "hide new secretions from the parental units ", "label": "0"}
    first = list(itertools.islice(read_rows(shared_data / "imdb/train.jsonl.xz", ["text", "label"]), 50))
    assert {r["label"] for r in first} == {0} and set(first[0]) == {"text", "label"}


def test_hugging_face_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = {name: datasets.Dataset.from_list(ROWS[: n + 1]) for n, name in enumerate(("train", "validation"))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    splits["validation"].save_to_disk(tmp_path / "one")
    for path in (tmp_path / "both", f"hf:{tmp_path / 'both'}"):
        assert list(read_rows(path)) == ROWS[:1]
        valid = find_split(path, "valid")
        assert str(valid) == f"hf:{tmp_path / 'both'}#validation" and list(read_rows(valid)) == ROWS[:2]
        assert list(read_rows(f"hf:{tmp_path / 'both'}#valid", ["label"])) == [{"label": 1}, {"label": 0}]
        assert find_split(path, "test", required=False) is None
        assert "no split 'test'; there are: train, validation" in error(find_split, path, "test")
        assert "no split 'dev2'" in error(find_split, path, "valid", "dev2")
    assert list(read_rows(tmp_path / "one")) == ROWS[:2]
    assert "no column 'txt'; it has: text, label" in error(read_rows, tmp_path / "one", ["txt"])
    assert kept.identity(f"hf:{tmp_path / 'both'}#train") != kept.identity(f"hf:{tmp_path / 'both'}#validation")
    data = LabelledDataset(find_split(tmp_path / "both", "valid"), ByteTokenizer(), 5)
    assert data.labels.tolist() == [1, 0] and data.lengths.tolist() == [5, 5]


def test_hugging_face_offline(tmp_path):
    pytest.importorskip("datasets")
    code = (
        "from gradus.data.readers import read_rows\nfrom gradus.errors import UserError\n"
        "try:\n    list(read_rows('hf:nobody/nothing'))\nexcept UserError as e:\n    print(e)"
    )
    env = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env).stdout
    assert out.startswith("hf:nobody/nothing: cannot be loaded") and "gradus fetch" in out and out.count("\n") == 1, out
