"""Texts in a stream, and their tokens in the cache: made once, whole or not at all."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from text_parts import Untouchable, build, error, write

from gradus.data import cache as kept
from gradus.data import corpus as corpora
from gradus.data import tokenizers
from gradus.data.corpus import Corpus, TokenFile, cached_bpe, stdlib_texts
from gradus.data.readers import read_lines
from gradus.data.tokenizer_files import load
from gradus.data.tokenizers import ByteTokenizer, CharTokenizer

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
        return cached_bpe([Corpus.open(path)], 400, lowercase=False, specials=[f"<extra_id_{i}>" for i in range(100)])

    first = bpe()
    assert first.sentinel(99) and first.vocab_size > 361
    monkeypatch.setattr(corpora, "train_bpe", lambda *_: pytest.fail("trained again"))
    again = bpe()
    assert again.fingerprint == first.fingerprint and again.encode("the mat") == first.encode("the mat")
    write(path, "the cat sat on the mat\n" * 9)
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        bpe()
