"""Ids against transformers, tokenizers and sentencepiece themselves, on real text."""

from __future__ import annotations

import lzma
import os
import subprocess
import sys

import pytest
from tokenizer_parts import TRAINING, ids_of, made

from gradus.data import tokenizers
from gradus.data.tokenizer_files import load
from gradus.data.tokenizers import SPECIALS, CharTokenizer, WordTokenizer, train_bpe
from gradus.errors import UserError


@pytest.mark.parametrize("kind", ["char", "word", "lower", "byte", "bpe"])
def test_made_ones_round_trip_and_open_in_transformers(tmp_path, kind):
    from transformers import AutoTokenizer

    ours = made()[kind]
    ours.save(tmp_path)
    again = load(tmp_path)
    assert type(again) is type(ours) and again.fingerprint == ours.fingerprint and again.vocab_size == ours.vocab_size
    assert {r: getattr(again, f"{r}_id") for r in tokenizers.ROLES} == {r: getattr(ours, f"{r}_id") for r in tokenizers.ROLES}
    for text in TRAINING[:3]:
        ids = ours.encode(text)
        assert again.encode(text) == ids and ours.encode_batch([text, text]) == [ids, ids]
        assert ours.decode(ids) == {"word": text, "lower": text.lower()}.get(kind, text)
        assert ids_of(AutoTokenizer.from_pretrained(tmp_path), [text]) == [ids]
    if ours.eos_id is not None:
        assert ours.decode([*ours.encode("the cat"), ours.eos_id, ours.vocab_size + 5]) == "the cat"
        assert ours.token(ours.eos_id) == "</s>"


def test_fingerprints_differ():
    prints = [t.fingerprint for t in made().values()]
    prints += [train_bpe(TRAINING, 310).fingerprint, CharTokenizer("ab").fingerprint, CharTokenizer("ba").fingerprint]
    assert len(set(prints)) == len(prints)


def test_bpe_training():
    ours = train_bpe(iter(TRAINING), 300)
    assert [ours.token(i) for i in range(5)] == list(SPECIALS)
    assert (ours.pad_id, ours.bos_id, ours.eos_id, ours.unk_id, ours.mask_id, ours.cls_id, ours.sep_id) == (0, 1, 2, 3, 4, 1, 2)
    assert train_bpe(TRAINING, 300).fingerprint == ours.fingerprint
    assert len(ours.encode("the cat sat on")) < 14 and ours.decode(ours.encode("never seen: ß\t☃")) == "never seen: ß\t☃"
    assert train_bpe(TRAINING, 300, lowercase=True).encode("THE CAT") == train_bpe(TRAINING, 300, lowercase=True).encode("the cat")
    assert train_bpe(TRAINING, 300, specials=["<extra_id_0>"]).sentinel(0) == 5
    with pytest.raises(UserError, match=r"vocab_size=200 is less than the 261"):
        train_bpe(TRAINING, 200)
    with pytest.raises(UserError, match="empty"):
        train_bpe([], 300)


def test_bpe_learns_nothing_longer_than_a_long_word_is_cut_to():
    """Its time would grow with the square of the longest word."""
    trained = train_bpe([*TRAINING, "x" * 30_000, " " * 30_000], 4000)
    longest = max(trained.rust.get_vocab(), key=len)
    assert 500 < len(longest) <= 1000 and trained.decode(trained.encode("x" * 5000)) == "x" * 5000


def test_word_look_up():
    ours = WordTokenizer.from_texts(["Eiffel Tower is in Paris", "Paris is in France\n"], specials=("<unk>",))
    assert ours.encode("Paris is in France\n") == [5, 3, 4, 6, 7] and ours.vocab_size == 8
    assert ours.encode("Tower in Rome") == [2, 4, 0]
    with pytest.raises(UserError, match="'Rome' is not in the vocabulary of 1, which has no <unk>"):
        WordTokenizer(["in"], specials=()).encode("in Rome")


def test_unknown_character():
    with pytest.raises(UserError, match=r"'z' is not in the vocabulary of 3"):
        CharTokenizer("abc").encode("abz")
    assert CharTokenizer("abc", ("<unk>",)).encode("abz") == [1, 2, 0]


@pytest.mark.shared_data
def test_word_level_wikitext2_has_the_published_size(shared_data):
    """Merity et al. 2016, table 1: a vocabulary of 33,278 (a line's end is one), 2,088,628 tokens."""
    with lzma.open(shared_data / "wikitext-2/train.txt.xz", "rt", encoding="utf-8") as file:
        lines = list(file)
    ours = WordTokenizer.from_texts(lines, specials=("<unk>",))
    assert sum(len(ours.encode(line)) for line in lines) == 2_088_628
    assert ours.vocab_size == 33_278


def test_fork_after_parallel_use():
    """The threads of `tokenizers` do not survive a fork: a child must encode without them, and without a warning."""
    code = (
        "import os\nfrom gradus.data.tokenizers import train_bpe\nt = train_bpe(['a b c d'] * 9, 270)\nt.encode_batch(['a b'] * 1000)\n"
        "pid = os.fork()\n"
        "if not pid:\n    assert os.environ['TOKENIZERS_PARALLELISM'] == 'false'\n    t.encode_batch(['a b'] * 1000)\n    os._exit(7)\n"
        "assert os.waitpid(pid, 0)[1] >> 8 == 7\nassert 'TOKENIZERS_PARALLELISM' not in os.environ\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_package_is_light():
    code = "import sys, gradus.data\nassert not {'torch', 'numpy', 'tokenizers', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_long_word_is_learnt_from_in_parts():
    """The time would be the square of its length: 100,000 characters took half a minute."""
    whole, parts = train_bpe(["xyz" * 2000], 300), train_bpe([("xyz" * 2000)[i : i + 1000] for i in range(0, 6000, 1000)], 300)
    assert whole.fingerprint == parts.fingerprint
