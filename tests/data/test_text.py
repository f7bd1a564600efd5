"""Sources, the cache and the data sets of text, on small files and on real ones."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import lzma
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from gradus import limits
from gradus.data import cache as kept
from gradus.data import corpus as corpora
from gradus.data import tokenizers
from gradus.data.corpus import Corpus, TokenFile, cached_bpe, stdlib_texts
from gradus.data.readers import read_lines, read_rows
from gradus.data.splits import find_pairs, find_split
from gradus.data.text import DocumentsDataset, LabelledDataset, LMDataset, PairsDataset
from gradus.data.tokenizer_files import load
from gradus.data.tokenizers import ByteTokenizer, CharTokenizer
from gradus.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GRADUS_CACHE", str(folder))
    return folder


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


# ---------------------------------------------------------------- reading

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


# ---------------------------------------------------------------- corpora


@pytest.mark.slow
@pytest.mark.shared_data
def test_blocks_of_running_text_have_the_ids_of_the_whole(shared_data, monkeypatch):
    monkeypatch.setattr(corpora, "BLOCK", 3000)  # many borders
    gpt2 = load(shared_data / "tokenizers/gpt2")
    for name in ("wikitext-2/valid.txt.xz", "tinyshakespeare/input.txt"):
        corpus = Corpus.open(shared_data / name)
        whole = "".join(line + "\n" for line in read_lines(shared_data / name))
        assert "".join(corpus) == whole
        assert list(itertools.chain.from_iterable(gpt2.encode_batch(list(corpus)))) == gpt2.encode(whole)
        assert sum(1 for _ in corpus) > 100


def test_running_text_without_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "BLOCK", 100)
    words = "ab  cde " * 4000
    blocks = list(Corpus.open(write(tmp_path / "a.txt", words)))
    assert "".join(blocks) == words and len(blocks) > 10
    assert all(b[0] == " " and b[1] != " " and a[-1] != " " for a, b in itertools.pairwise(blocks))
    solid = "x" * 10_000
    assert "".join(Corpus.open(write(tmp_path / "b.txt", solid))) == solid


def test_a_long_text_is_encoded_in_pieces_and_stays_one_text(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers, "PIECE", 200)
    texts = ["a short one", "the cat  sat on the mat\nand ate " * 40, "x" * 1000, "the end"]
    bpe, longest = tokenizers.train_bpe(texts, 300), 0

    class Watched(type(bpe)):
        def encode_batch(self, texts):
            nonlocal longest
            longest = max(longest, *map(len, texts))
            return super().encode_batch(texts)

    path = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = TokenFile.of(Corpus.open(path), Watched(bpe.rust, bpe.config), eos=True)
    assert longest == 200 and len(made) == 4
    assert [made.text(i).tolist() for i in (0, 1, 3)] == [bpe.encode(texts[i]) + [bpe.eos_id] for i in (0, 1, 3)]
    assert bpe.decode(made.text(2)[:-1]) == texts[2] and made.about["n_lines"] == 40


def test_documents_of_a_text_file(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "\n \none\ntwo\n \n\nthree\n")
    assert list(Corpus.open(path, documents=True)) == ["one\ntwo", "three"]
    assert Corpus.open(path, documents=True).separate and not Corpus.open(path).separate
    assert Corpus.open(path, documents=True).key != Corpus.open(path).key
    monkeypatch.setattr(corpora, "LONGEST", 5)
    assert "data.pack=stream" in error(Corpus.open(path, documents=True).make)


def test_columns_as_documents(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a", "other": 1}\n{"text": "b"}\n')
    assert list(Corpus.open(path)) == ["a", "b"] and Corpus.open(path).separate
    assert "row 2 has no column 'other'" not in error(Corpus.open(path, "other").make)
    assert "row 1: column 'other' holds 1, not text" in error(Corpus.open(path, "other").make)
    assert Corpus.open(path).key != Corpus.open(path, "other").key
    path = write(tmp_path / "b.jsonl", '{"label": 0, "sentence": "a"}\n')
    assert list(Corpus.column(path, None)) == ["a"], "the same column that the samples are taken from"
    path = write(tmp_path / "c.jsonl", '{"text": "abcdef"}\n{"text": "a"}\n')
    assert list(Corpus.column(path, "text", 3)) == ["abc", "a"] and Corpus.column(path, "text", 3).key != Corpus.open(path).key


@pytest.mark.shared_data
def test_split_of_running_text_is_by_characters(shared_data, monkeypatch):
    monkeypatch.setattr(corpora, "BLOCK", 10_000)
    path = shared_data / "tinyshakespeare/input.txt"
    data = path.read_text()
    head, tail = Corpus.open(path).split(0.1)
    assert "".join(head) == data[: int(len(data) * 0.9)] and "".join(tail) == data[int(len(data) * 0.9) :]
    assert head.key != tail.key


def test_split_of_documents(tmp_path):
    corpus = Corpus.open(write(tmp_path / "a.txt", "\n\n".join("abcdefghij")), documents=True)
    head, tail = corpus.split(0.25)
    assert list(head) == list("abcdefg") and list(tail) == list("hij")  # 10 × 0.75 = 7.5, cut to 7
    assert "too little text" in error(Corpus.open(write(tmp_path / "b.txt", "one"), documents=True).split(0.1)[1].make)


@pytest.mark.slow
def test_standard_library():
    texts = list(itertools.islice(stdlib_texts(), 40))
    assert all(isinstance(t, str) for t in texts) and any("import" in t for t in texts)
    corpus = Corpus.stdlib()
    assert corpus.key == Corpus.stdlib().key and corpus.separate
    everything = "".join(corpus)
    assert "def namedtuple(" in everything and len(everything) > 5e6
    assert "class TestCase(" in everything and "class Bdb" in everything and "test_abc" not in [t[:8] for t in corpus]


# ---------------------------------------------------------------- token files


def test_token_file(tmp_path, cache):
    path = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": t}) + "\n" for t in ("ab", "", "ü c\n")))
    tokens = TokenFile.of(Corpus.open(path), ByteTokenizer(), eos=True)
    end = ByteTokenizer().eos_id
    assert tokens.ids.tolist() == [97, 98, end, end, *"ü c\n".encode(), end] and tokens.offsets.tolist() == [0, 3, 4, 10]
    assert tokens.ids.dtype == np.uint16 and isinstance(tokens.ids, np.memmap) and len(tokens) == 3
    assert tokens.text(2).tolist() == [*"ü c\n".encode(), end] and tokens.text(2).dtype == np.int64
    assert (tokens.about["n_bytes"], tokens.about["n_words"], tokens.about["n_lines"]) == (7, 3, 1)
    again = pickle.loads(pickle.dumps(tokens))
    assert isinstance(again.ids, np.memmap) and again.ids.tolist() == tokens.ids.tolist() and len(pickle.dumps(tokens)) < 500
    wide = CharTokenizer([chr(i) for i in range(0x10000, 0x10000 + 70_000)])
    assert build([chr(0x10000 + 69_999)], wide, "k").ids.dtype == np.uint32


def test_second_start_calls_no_tokenizer(tmp_path):
    path = write(tmp_path / "a.txt", "hello\n" * 100)
    first = TokenFile.of(Corpus.open(path), ByteTokenizer())
    os.utime(path, (1, 1))  # another date, the same content
    path = path.rename(tmp_path / "b.txt")  # and another name
    again = TokenFile.of(Corpus.open(path), Untouchable())
    assert again.folder == first.folder and again.ids.tolist() == first.ids.tolist()

    def texts():
        raise AssertionError("the text was read")
        yield

    build(texts(), ByteTokenizer(), Corpus.open(path).key)
    for changed in (
        lambda: TokenFile.of(Corpus.open(path), Untouchable(), eos=True),
        lambda: TokenFile.of(Corpus.open(path, documents=True), Untouchable()),
        lambda: TokenFile.of(Corpus.open(write(tmp_path / "b.txt", "hellO\n" * 100)), Untouchable()),
    ):
        with pytest.raises(AssertionError, match="the tokenizer was called"):
            changed()


def test_data_sets_too_start_from_the_cache(tmp_path):
    table = write(tmp_path / "train.csv", as_csv(ROWS))
    pairs = [Corpus.lines(write(tmp_path / f"train.{s}", f"{s}\n{s}{s}\n")) for s in ("de", "en")]
    for tokenizer in (ByteTokenizer(), Untouchable()):
        assert LabelledDataset(table, tokenizer, 4).labels.tolist() == [1, 0, 1]
        assert PairsDataset(*pairs, tokenizer).lengths.tolist() == [4, 8]


def test_killed_while_writing_leaves_nothing_that_is_used(tmp_path, cache):
    code = """
        import os, signal, sys
        from gradus.data.corpus import Corpus, TokenFile
        from gradus.data.tokenizers import ByteTokenizer

        def texts():
            for i in range(20_000):
                yield "some text to be tokenised " * 4
            os.kill(os.getpid(), signal.SIGKILL)

        TokenFile.of(Corpus(texts, "key", "text", True), ByteTokenizer())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    left = list((cache / "tokens").iterdir())
    assert len(left) == 1 and left[0].name.startswith(".") and (left[0] / "ids.bin").stat().st_size > 1 << 20  # it was well under way
    tokens = build(iter(["whole"]), ByteTokenizer(), "key")
    assert bytes(tokens.ids.astype(np.uint8)) == b"whole"
    assert not left[0].exists()


@pytest.mark.parametrize("damage", [lambda data: data[:5], lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: b"NaN"], ids=["cut", "a bit", "NaN"])
@pytest.mark.parametrize("name", ["ids.bin", "offsets.bin", "about.json", "made.json"])
def test_a_damaged_cache_is_made_anew(cache, name, damage):
    file = build(["some text", "more"], ByteTokenizer(), "key").folder / name
    file.write_bytes(damage(file.read_bytes()))
    again = build(["some text", "more"], ByteTokenizer(), "key")
    assert again.offsets.tolist() == [0, 9, 13] and bytes(again.ids.astype(np.uint8)) == b"some textmore"
    assert list((cache / "tokens").iterdir()) == [file.parent]


@pytest.mark.parametrize("name", ["about.json", "made.json"])
def test_a_pipe_in_the_cache_is_not_waited_for(cache, name):
    file = build(["some text"], ByteTokenizer(), "key").folder / name
    file.unlink()
    os.mkfifo(file)
    assert bytes(build(["some text"], ByteTokenizer(), "key").ids.astype(np.uint8)) == b"some text"
    assert file.is_file()


def test_two_processes_may_make_the_same(cache):
    def texts():
        build(["same"], ByteTokenizer(), "key")  # another process is faster
        yield "same"

    assert len(build(texts(), ByteTokenizer(), "key").ids) == 4
    assert len(list((cache / "tokens").iterdir())) == 1


def test_token_file_errors(tmp_path, cache, monkeypatch):
    assert "empty" in error(build, ["", ""], ByteTokenizer(), "k", name="a.txt")
    assert "empty" in error(build, [], ByteTokenizer(), "k", name="a.txt")
    assert "no end-of-text token" in error(build, ["a"], CharTokenizer("a"), "k", eos=True)
    assert "half a character" in error(build, ["a", "\ud83d"], ByteTokenizer(), "k", name="a.jsonl")
    assert not list((cache / "tokens").iterdir())  # nothing half-made is left
    (tmp_path / "file").touch()
    assert "data.cache" in error(build, ["a"], ByteTokenizer(), "k", cache=tmp_path / "file")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in error(build, ["a"], ByteTokenizer(), "k")


def test_memory_does_not_grow_with_the_text(tmp_path):
    code = """
        import re, sys
        from gradus.data.corpus import Corpus, TokenFile
        from gradus.data.tokenizers import ByteTokenizer
        n = TokenFile.of(Corpus.open(sys.argv[1]), ByteTokenizer()).n_tokens
        print(n, re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1])  # getrusage would count its parent's
    """
    peaks = []
    for megabytes in (4, 36):
        path = write(tmp_path / f"{megabytes}.txt", ("some words of a line\n" * 50_000)[:1_000_000] * megabytes)
        out = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], capture_output=True, text=True, timeout=120, check=True).stdout
        n, peak = map(int, out.split())
        assert n == megabytes * 1_000_000
        peaks.append(peak / 1024)
    assert peaks[1] - peaks[0] < 20, peaks  # MiB, of 32 MB more text and 64 MB more ids; held as Python numbers they would be 250 and more


def test_identity_of_a_large_file_is_remembered(tmp_path, cache, monkeypatch):
    path = tmp_path / "large.txt"
    with open(path, "wb") as file:
        file.write(b"a")
        file.truncate(1 << 26)
    os.utime(path, (1_000_000, 1_000_000))
    first = kept.identity(path)
    monkeypatch.setattr(kept.hashlib, "file_digest", lambda *_: pytest.fail("hashed again"))
    assert kept.identity(path) == first
    monkeypatch.undo()
    monkeypatch.setenv("GRADUS_CACHE", str(cache))
    with open(path, "r+b") as file:
        file.write(b"b")
    os.utime(path, (1_000_001, 1_000_001))
    assert kept.identity(path) != first


def test_bpe_is_trained_once(tmp_path, monkeypatch):
    path = write(tmp_path / "a.txt", "the cat sat on the mat\n" * 3)

    def bpe():
        return cached_bpe([Corpus.open(path)], 400, lowercase=False, sentinels=True)

    first = bpe()
    assert first.sentinel(99) and first.vocab_size > 361
    monkeypatch.setattr(corpora, "train_bpe", lambda *_: pytest.fail("trained again"))
    again = bpe()
    assert again.fingerprint == first.fingerprint and again.encode("the mat") == first.encode("the mat")
    write(path, "the cat sat on the mat\n" * 9)
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        bpe()


# ---------------------------------------------------------------- windows


def counted(n: int, borders=()) -> TokenFile:
    """Tokens 0 .. n-1, in documents that end at `borders`."""

    class Numbers(ByteTokenizer):
        vocab_size, fingerprint = 60_000, f"{n}"

        def encode_batch(self, texts):
            return [list(range(*map(int, t.split()))) for t in texts]

    edges = [0, *borders, n]
    return build([f"{a} {b}" for a, b in itertools.pairwise(edges)], Numbers(), f"{edges}")


@pytest.mark.parametrize("n", [2, 9, 10, 11, 100, 101, 109, 110, 111])
def test_evaluation_predicts_every_token_once(n):
    data = LMDataset(counted(n), 10, shuffle_phase=False)
    rows = [data[i]["ids"] for i in range(len(data))]
    assert np.concatenate([r[1:] for r in rows]).tolist() == list(range(1, n))  # the targets: all but the first, in order
    assert np.concatenate([r[:-1] for r in rows]).tolist() == list(range(n - 1))
    assert all(len(r) == 11 for r in rows[:-1]) and rows[0].dtype == np.int64
    assert data.lengths.tolist() == [len(r) - 1 for r in rows] and data.n_targets == n - 1
    assert data.item(0, 5)["ids"].tolist() == rows[0].tolist()


@pytest.mark.parametrize("n", [11, 15, 20, 21, 29, 30, 31, 105])
def test_training_windows_tile_at_a_phase_of_seed_and_epoch(n):
    data = LMDataset(counted(n), 10, seed=3)
    phases = set()
    for epoch in range(60):
        rows = [data.item(i, epoch)["ids"] for i in range(len(data))]
        start = rows[0][0]
        assert [r.tolist() for r in rows] == [list(range(start + 10 * i, start + 10 * i + 11)) for i in range(len(data))]
        assert start < 10 and n - 1 - rows[-1][-1] < 20
        phases.add(int(start))
    assert phases == set(range(min(10, n - 10 * len(data))))
    again = LMDataset(counted(n), 10, seed=3)
    assert [again.phase(e) for e in range(20)] == [data.phase(e) for e in range(20)]
    if n >= 30:
        assert [LMDataset(counted(n), 10, seed=4).phase(e) for e in range(20)] != [data.phase(e) for e in range(20)]
    assert data.epoch_aware and data.lengths.tolist() == [10] * len(data)


def test_packed_documents():
    borders = [3, 3, 12, 13, 30]  # one of them empty
    data = LMDataset(counted(40, borders), 10, pack="documents", shuffle_phase=False)
    number = np.searchsorted(borders, np.arange(40), side="right")
    begin = np.array([0, *borders])[number]
    predicted = 0
    for i in range(len(data)):
        item = data[i]
        ids, segments, positions = item["ids"], item["segments"], item["positions"]
        assert segments[0] == 0 and ids.tolist() == list(range(10 * i, min(40, 10 * i + 11)))
        same = segments[:, None] == segments
        assert (same == (number[ids][:, None] == number[ids])).all()
        assert positions.tolist() == (ids - np.maximum(begin[ids], ids[0])).tolist()
        assert set(np.diff(segments)) <= {0, 1}
        predicted += int((segments[1:] == segments[:-1]).sum())
    assert predicted == data.n_targets == 40 - 5
    moved = LMDataset(counted(40, borders), 10, seed=1, pack="documents")
    epoch = next(e for e in range(50) if moved.phase(e) == 2)
    assert moved.item(0, epoch)["segments"].tolist() == [0, *[1] * 9, 2] and moved.item(0, epoch)["positions"].tolist() == [0, *range(9), 0]


def test_text_shorter_than_a_window():
    assert "has 10 tokens, less than a window of 10 + 1" in error(LMDataset, counted(10), 10)
    assert len(LMDataset(counted(10), 10, shuffle_phase=False)) == 1
    with pytest.raises(IndexError):
        LMDataset(counted(100), 10)[9]


def test_loader_gives_the_epoch(tmp_path):
    from gradus.data.loader import Loader, Plan

    data = LMDataset(counted(105), 10, seed=3)
    plan = Plan(len(data), 0, batch_samples=4)
    loader = Loader(data, plan, lambda samples: {"ids": np.stack([s["ids"] for s in samples])})
    for epoch in range(3):
        first = np.concatenate([np.asarray(b["ids"])[:, 0] for step in loader.steps(epoch) for b in step.micro_batches])
        assert sorted(first.tolist()) == [data.phase(epoch) + 10 * i for i in range(len(data))]


# ---------------------------------------------------------------- documents


@pytest.mark.parametrize("across", [False, True])
def test_rows_of_documents_hold_every_token_once(across):
    borders = [3, 3, 12, 13, 30, 52, 55]
    data = DocumentsDataset(counted(70, borders), 10, across=across)
    rows = [data[i]["ids"].tolist() for i in range(len(data))]
    assert list(itertools.chain(*rows)) == list(range(70)) and data.lengths.tolist() == [len(r) for r in rows] and max(data.lengths) == 10
    if across:  # whole paragraphs while they fit
        assert [r[0] for r in rows] == [0, 3, 13, 23, 30, 40, 50, 55, 65]
    else:
        edges = [0, *borders, 70]
        assert [r[0] for r in rows] == [s for a, b in itertools.pairwise(edges) for s in range(a, b, 10)]
    assert "leaves 0 tokens" in error(DocumentsDataset, counted(70, borders), 0)


# ---------------------------------------------------------------- labels


def labelled(tmp_path, rows, name="train.jsonl", **options) -> LabelledDataset:
    return LabelledDataset(write(tmp_path / name, "".join(json.dumps(r) + "\n" for r in rows)), ByteTokenizer(), 5, **options)


def test_labels_as_numbers_and_names(tmp_path):
    data = labelled(tmp_path, [{"review": "abcdefg", "class": 2}, {"review": "", "class": "0"}, {"review": "xy", "class": 1.0}])
    assert data.labels.tolist() == [2, 0, 1] and data.classes == ["0", "1", "2"]
    assert data.lengths.tolist() == [5, 0, 2] and len(data) == 3
    assert bytes(data[0]["ids"].astype(np.uint8)) == b"abcde" and data[0]["label"] == 2 and data[1]["ids"].shape == (0,)
    data = labelled(tmp_path, [{"text": "a", "label": "pos"}, {"text": "b", "label": "neg"}, {"text": "b", "label": "pos"}])
    assert data.labels.tolist() == [1, 0, 1] and data.classes == ["neg", "pos"]
    valid = labelled(tmp_path, [{"text": "a", "label": "pos"}], "valid.jsonl", like=data)
    assert valid.labels.tolist() == [1] and valid.classes == ["neg", "pos"]
    named = labelled(tmp_path, [{"text": "a", "label": 0}], "named.jsonl", names=["neg", "pos"])
    assert named.labels.tolist() == [0] and named.classes == ["neg", "pos"]
    chosen = labelled(tmp_path, [{"text": "a", "label": 0, "b": "text", "c": 3}], "chosen.jsonl", columns=("b", "c"))
    assert chosen.labels.tolist() == [0] and chosen.classes == ["3"] and len(chosen[0]["ids"]) == 4
    assert labelled(tmp_path, [{"text": "a", "label": True}], "bool.jsonl", names=["a", "b", "c"]).classes == ["a", "b", "c"]


def test_the_order_of_names_that_the_labels_have_is_the_given_one(tmp_path):
    rows = [{"text": "a", "label": "good"}, {"text": "b", "label": "bad"}]
    data = labelled(tmp_path, rows, names=["good", "fair", "bad"])
    assert data.labels.tolist() == [0, 2] and data.classes == ["good", "fair", "bad"]
    assert labelled(tmp_path, rows, names=["positive", "negative"]).classes == ["bad", "good"]  # names of something else


def test_numbers_that_do_not_occur_are_no_classes(tmp_path):
    stars = labelled(tmp_path, [{"text": "a", "label": i % 5 + 1} for i in range(10)])
    assert stars.classes == ["1", "2", "3", "4", "5"] and stars.labels.tolist() == [0, 1, 2, 3, 4] * 2
    valid = labelled(tmp_path, [{"text": "a", "label": 5}], "valid.jsonl", like=stars)
    assert valid.labels.tolist() == [4]
    again = labelled(tmp_path, [{"text": "a", "label": 2}], "again.jsonl", names=stars.classes)  # of a resolved recipe
    assert again.labels.tolist() == [1] and again.classes == stars.classes
    earlier = labelled(tmp_path, [{"text": "a", "label": 5}], "earlier.jsonl", n_classes=6)
    assert earlier.labels.tolist() == [5] and earlier.classes == ["0", "1", "2", "3", "4", "5"]
    told = error(labelled, tmp_path, [{"text": "a", "label": 0}], "valid.jsonl", like=stars)
    assert "label 0 is not one of the 5 classes of" in told and "(1, 2, 3, 4, 5)" in told and "task.classes" in told


def test_names_that_look_like_numbers_stay_names_in_every_split(tmp_path):
    train = labelled(tmp_path, [{"text": "a", "label": "none"}, {"text": "b", "label": "7"}])
    valid = labelled(tmp_path, [{"text": "a", "label": "7"}], "valid.jsonl", like=train)
    assert train.classes == valid.classes == ["7", "none"] and valid.labels.tolist() == [0]
    assert "test.jsonl: row 2: label 1 is not one of the 2 classes of" in error(
        labelled, tmp_path, [{"text": "a", "label": 7}, {"text": "a", "label": 1}], "test.jsonl", like=train
    )


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_numbers_have_the_names_of_hugging_faces_features(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    if kind == "parquet":
        table.to_parquet(str(tmp_path / "train.parquet"))
    else:
        datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "all"))
    path = tmp_path / "train.parquet" if kind == "parquet" else find_split(tmp_path / "all", "train")
    data = LabelledDataset(path, ByteTokenizer(), 5)
    assert data.classes == ["bad", "good"] and data.labels.tolist() == [1, 0]


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"text": "a", "label": 7}, "row 3: label 7 is not one of the 2 classes (0, 1)"),
        ({"text": "a", "label": -1}, "row 3: label -1 is not one of the 2 classes (0, 1)"),
        ({"text": "a", "label": "x"}, "row 3: label 'x' is not a whole number"),
        ({"text": "a", "label": 0.5}, "row 3: label 0.5 is neither"),
        ({"text": "a", "label": None}, "row 3: label None is neither"),
        ({"text": "a", "label": ""}, "row 3: label '' is neither"),
        ({"text": "a"}, "row 3 has no column 'label'; it has: text."),
        ({"label": 1}, "row 3 has no column 'text'; it has: label."),
        ({"text": 5, "label": 1}, "row 3: column 'text' holds 5, not text."),
    ],
)
def test_a_bad_row_is_named(tmp_path, bad, words):
    good = {"text": "a", "label": 1}
    for _ in range(2):  # the second time from the cache, where the row could be kept
        assert f"train.jsonl: {words}" in error(labelled, tmp_path, [good, good, bad], n_classes=2)


def test_other_label_errors(tmp_path):
    names = [{"text": "a", "label": "pos"}, {"text": "b", "label": "neutral"}]
    train = labelled(tmp_path, [{"text": "a", "label": "pos"}, {"text": "b", "label": "neg"}])
    told = error(labelled, tmp_path, names, "valid.jsonl", like=train)
    assert "valid.jsonl: row 2: label 'neutral' is not one of the 2 classes of" in told and "train.jsonl (neg, pos)" in told
    numbers = labelled(tmp_path, [{"text": "a", "label": 0}, {"text": "b", "label": 1}], "numbers.jsonl")
    told = error(labelled, tmp_path, [{"text": "a", "label": 2}], "valid.jsonl", like=numbers)
    assert "valid.jsonl: row 1: label 2 is not one of the 2 classes of" in told and "numbers.jsonl (0, 1)" in told
    assert "no text column (text, sentence, review, content); there are: a, label. Set data.text=NAME" in error(
        labelled, tmp_path, [{"a": "b", "label": 1}]
    )
    assert "no label column" in error(labelled, tmp_path, [{"text": "b", "lable": 1}])
    path = write(tmp_path / "train.txt", "a\n")
    assert "a text file has no columns, so no label" in error(LabelledDataset, path, ByteTokenizer(), 5)


@pytest.mark.shared_data
def test_sst2_ids_equal_transformers(shared_data):
    from transformers import BertTokenizerFast

    folder = shared_data / "tokenizers/bert-base-uncased"
    data = LabelledDataset(find_split(shared_data / "sst2", "valid"), load(folder), 20)
    rows = list(read_rows(shared_data / "sst2/dev.tsv.xz"))
    theirs = BertTokenizerFast.from_pretrained(folder, do_lower_case=True)([r["sentence"] for r in rows], add_special_tokens=False)["input_ids"]
    assert len(data) == 872 and int(data.labels.sum()) == 444 and data.classes == ["0", "1"]
    assert [data[i]["ids"].tolist() for i in range(872)] == [ids[:20] for ids in theirs]


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


def test_of_a_labelled_text_so_many_characters_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "FIELD", 8)
    path = write(tmp_path / "a.jsonl", json.dumps({"text": "x" * 50, "label": 0}) + "\n" + json.dumps({"text": "abc", "label": 1}) + "\n")
    assert LabelledDataset(path, ByteTokenizer(), 20).lengths.tolist() == [8, 3]


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
