"""Tokenizers as they are published, of many kinds: their ids, with what stands around a text, are transformers'; what is
not read is named."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
import tokenizers as package
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.data.tokenizer_files import load
from gradus.errors import UserError

LINES = ["the river and the house", "a green scene of 12345 quickly sung stories", "Ünïcode film, don't plot!", "the music never ends"] * 20
TEXTS = ["the river house", "The Green Scene, 2024!", "don't sing été", "one[tok]two [tok] three", "a house</s>plot", " x", "a <mask> b<mask>",
         "IT'S 123,  été\n\n!"]
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}


def byte_level(specials: list[str]) -> package.Tokenizer:
    rust = package.Tokenizer(package.models.BPE())
    rust.pre_tokenizer, rust.decoder = package.pre_tokenizers.ByteLevel(add_prefix_space=False), package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(vocab_size=320, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    rust.train_from_iterator(LINES, trainer)
    return rust


def wordpiece(more: str) -> package.Tokenizer:
    letters = sorted({c for line in LINES for c in line.lower() if c != " "} | set("abcdefghijklmnopqrstuvwxyz" + more))
    pieces = [*WORDS, *letters, *("##" + c for c in letters), "the", "river", "house", "green", "film"]
    return package.BertWordPieceTokenizer({piece: i for i, piece in enumerate(pieces)})


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, package.Tokenizer]:
    """As of RoBERTa, GPT-2, BERT uncased and cased."""
    bpe, gpt2 = byte_level(SPECIALS), byte_level(["<|endoftext|>"])
    return {"bpe": bpe, "gpt2": gpt2, "wordpiece": wordpiece(""), "cased": wordpiece("TGS")}


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> dict[str, Path]:
    """SentencePiece's models as Llama, T5 and XLM-RoBERTa have them."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("pieces")
    like = {
        "llama": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 340, "remove_extra_whitespaces": False, "normalization_rule_name": "identity"},
        "t5": {"vocab_size": 70, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
        "fairseq": {"vocab_size": 80, "normalization_rule_name": "nmt_nfkc"},
    }  # fmt: skip
    for name, options in like.items():
        train = sentencepiece.SentencePieceTrainer.train
        train(sentence_iterator=iter(LINES), model_prefix=str(folder / name), hard_vocab_limit=False, minloglevel=2, **options)
    return {name: folder / f"{name}.model" for name in like}


@pytest.fixture
def make(vocabularies, pieces, tmp_path):
    """Writes a folder: the vocabulary of a kind, and files beside it as given."""

    def write(kind: str, about: dict | None, post=None, **files):
        rust = package.Tokenizer.from_str(vocabularies.get(kind.split()[0], vocabularies["bpe"]).to_str())
        if kind.endswith("json"):
            if kind == "llama json":
                vocab = {piece: i for i, piece in enumerate([*SPECIALS, "▁", *sorted({c for t in TEXTS for c in t}), "▁t", "he", "▁the"])}
                rust = package.Tokenizer(package.models.BPE(vocab, [("▁", "t"), ("h", "e"), ("▁t", "he")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
                rust.pre_tokenizer = package.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
                rust.add_special_tokens(SPECIALS)
            if kind == "unigram json":
                vocab = [(t, 0.0) for t in ("<pad>", "</s>", "<unk>")] + [("▁", -2.0), ("▁the", -1.0), *((c, -3.0) for c in "abcdefghijklmnopqrstuvwxyz")]
                rust = package.Tokenizer(package.models.Unigram(vocab, unk_id=2))
                rust.pre_tokenizer = package.pre_tokenizers.Sequence([package.pre_tokenizers.WhitespaceSplit(), package.pre_tokenizers.Metaspace()])
                rust.add_special_tokens(["<pad>", "</s>", "<unk>"])
            rust.post_processor = post and post(rust)
            rust.save(str(tmp_path / "tokenizer.json"))
        elif kind in ("wordpiece", "cased"):
            vocab = rust.get_vocab()
            (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.get)) + "\n")
        elif kind in ("bpe", "gpt2"):
            state = json.loads(rust.to_str())["model"]
            (tmp_path / "vocab.json").write_text(json.dumps(state["vocab"]))
            (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(m) + "\n" for m in state["merges"]))
        else:
            shutil.copy(pieces[kind], tmp_path / {"t5": "spiece.model", "fairseq": "sentencepiece.bpe.model"}.get(kind, "tokenizer.model"))
        for name, content in {"tokenizer_config": about, **files}.items():
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return rust.get_vocab_size()

    return write


def around(single: str):
    """A template of tokens around a text."""

    def post(rust):
        names = [(t, rust.token_to_id(t)) for t in dict.fromkeys(single.split()) if t != "$A"]
        return package.processors.TemplateProcessing(single=single, special_tokens=names)

    return post


def of_class(name: str, **more) -> dict:
    return {"tokenizer_class": name, **more}


FAST, LLAMA = of_class("PreTrainedTokenizerFast", **ROLES), of_class("LlamaTokenizer", legacy=False)
TOKEN = {"content": "[tok]", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
MASK = {**TOKEN, "content": "<mask>", "lstrip": True, "__type": "AddedToken"}

# name → (kind of vocabulary, tokenizer_config.json, post-processor, "added": how one token was added, other files)
FOLDERS = {
    "json: nothing around a text": ("bpe json", FAST, None, {}),
    "json: a begin token": ("bpe json", FAST, around("<s> $A"), {}),
    "json: an end token": ("bpe json", FAST, around("$A </s>"), {}),
    "json: both": ("bpe json", FAST, around("<s> $A </s>"), {}),
    "json: two before, two after": ("bpe json", FAST, around("<s> <mask> $A </s> </s>"), {}),
    "json: BertProcessing": ("bpe json", FAST, lambda r: package.processors.BertProcessing(("</s>", 2), ("<s>", 0)), {}),
    "json: RobertaProcessing": ("bpe json", FAST, lambda r: package.processors.RobertaProcessing(("</s>", 2), ("<s>", 0)), {}),
    "json: ByteLevel alone": ("bpe json", FAST, lambda r: package.processors.ByteLevel(trim_offsets=False), {}),
    "json: a sequence": ("bpe json", FAST, lambda r: package.processors.Sequence([package.processors.ByteLevel(), around("<s> $A")(r)]), {}),
    "json: add_bos_token beside it says nothing": ("bpe json", {**FAST, "add_bos_token": True, "add_eos_token": True}, None, {}),
    "json: add_bos_token=false beside it says nothing": ("bpe json", {**FAST, "add_bos_token": False}, around("<s> $A"), {}),
    "json: added_tokens_decoder has one more": ("bpe json", FAST, around("<s> $A"), {"added": "decoder"}),
    "json: added_tokens.json has one more": ("bpe json", FAST, None, {"added": "file"}),
    "json: a list of added tokens of an earlier vocabulary": ("bpe json", {**FAST, "added_tokens_decoder": {"400": {**TOKEN, "content": "<mask>"}}}, around("<s> $A"), {}),
    "json: additional_special_tokens": ("bpe json", {**FAST, "additional_special_tokens": ["[tok]"]}, None, {}),
    "json: extra_special_tokens": ("bpe json", {**FAST, "extra_special_tokens": ["[tok]"]}, None, {}),
    "json: special_tokens_map.json": ("bpe json", of_class("PreTrainedTokenizerFast"), around("<s> $A"), {"special_tokens_map": ROLES}),
    "json: a token for padding that is not in it": ("gpt2 json", of_class("GPT2Tokenizer", pad_token="[PAD]", additional_special_tokens=["[tok]"]), None, {}),
    "json: a token of its vocabulary becomes special": ("gpt2 json", of_class("PreTrainedTokenizerFast", eos_token="the"), None, {}),
    "json: an added token that is named special too": ("bpe json", {**FAST, "additional_special_tokens": ["[tok]"], "split_special_tokens": False}, None, {"added": "wide"}),
    "json: no class": ("gpt2 json", None, around("$A <|endoftext|>"), {"config": {"model_type": "gpt2"}}),
    "json: GPT2TokenizerFast": ("gpt2 json", of_class("GPT2TokenizerFast"), None, {}),
    "json: RobertaTokenizer's template": ("bpe json", of_class("RobertaTokenizer"), None, {}),
    "json: LlamaTokenizerFast": ("llama json", of_class("LlamaTokenizerFast", **ROLES), around("<s> $A"), {}),
    "json: LlamaTokenizer without a begin token": ("llama json", of_class("LlamaTokenizer", add_bos_token=True, **ROLES), None, {}),
    "json: T5Tokenizer's template": ("unigram json", of_class("T5Tokenizer", extra_ids=0), None, {}),
    "json: T5 with a begin token of its own": ("unigram json", of_class("PreTrainedTokenizerFast"), around("<pad> $A </s>"), {}),
    "json: Unigram": ("unigram json", of_class("PreTrainedTokenizerFast"), None, {}),
    "json: BertTokenizerFast": ("wordpiece json", of_class("BertTokenizerFast", **CLS), around("[CLS] $A [SEP]"), {}),
    "json: BertTokenizer's template": ("wordpiece json", of_class("BertTokenizer"), None, {}),
    "json: WordPiece, an end token alone": ("wordpiece json", of_class("PreTrainedTokenizerFast", **CLS), around("$A [SEP]"), {}),
    "vocab.txt": ("wordpiece", of_class("BertTokenizer"), None, {}),
    "vocab.txt: of a model's type": ("wordpiece", {"do_lower_case": True}, None, {"config": {"model_type": "bert"}}),
    "vocab.txt: cased": ("cased", of_class("BertTokenizer", do_lower_case=False), None, {}),
    "vocab.txt: accents": ("wordpiece", of_class("BertTokenizer", do_lower_case=True, strip_accents=False), None, {}),
    **{f"vocab.txt: {name}Tokenizer": ("wordpiece", of_class(f"{name}Tokenizer"), None, {}) for name in ("Electra", "ConvBert", "MobileBert", "SqueezeBert", "LayoutLM", "Lxmert")},
    "vocab.txt: added_tokens.json": ("wordpiece", of_class("BertTokenizer"), None, {"added": "file"}),
    "vocab.txt: added_tokens_decoder": ("wordpiece", of_class("BertTokenizer"), None, {"added": "decoder"}),
    "vocab.txt: additional_special_tokens": ("wordpiece", of_class("BertTokenizer", additional_special_tokens=["[tok]"]), None, {}),
    "vocab.txt: DistilBertTokenizer": ("wordpiece", of_class("DistilBertTokenizer", do_lower_case=True), None, {}),
    "merges.txt: GPT2Tokenizer": ("gpt2", of_class("GPT2Tokenizer"), None, {}),
    "merges.txt: of a model's type": ("gpt2", None, None, {"config": {"model_type": "gpt2"}}),
    "merges.txt: add_bos_token": ("gpt2", of_class("GPT2Tokenizer", add_bos_token=True), None, {}),
    "merges.txt: add_bos_token and add_eos_token": ("bpe", of_class("GPT2Tokenizer", add_bos_token=True, add_eos_token=True, **ROLES), None, {}),
    "merges.txt: add_prefix_space": ("gpt2", of_class("GPT2Tokenizer", add_prefix_space=True), None, {}),
    "merges.txt: added_tokens.json": ("gpt2", of_class("GPT2Tokenizer"), None, {"added": "file"}),
    "merges.txt: added_tokens_decoder": ("gpt2", of_class("GPT2Tokenizer"), None, {"added": "decoder"}),
    "merges.txt: RobertaTokenizer": ("bpe", of_class("RobertaTokenizer"), None, {}),
    "merges.txt: a mask that takes the space before it": ("bpe", of_class("RobertaTokenizer", mask_token=MASK), None, {}),
    "merges.txt: a class that config.json names": ("gpt2", None, None, {"config": {"model_type": "bert", "tokenizer_class": "GPT2Tokenizer"}}),
    "merges.txt: Qwen2Tokenizer": ("gpt2", of_class("Qwen2Tokenizer"), None, {"added": "decoder"}),
    "merges.txt: Qwen2, of a model's type": ("gpt2", None, None, {"config": {"model_type": "qwen2"}}),
    "pieces: LlamaTokenizer": ("llama", LLAMA | {"add_bos_token": True}, None, {}),
    "pieces: LlamaTokenizer says nothing": ("llama", LLAMA, None, {}),
    "pieces: without a begin token": ("llama", LLAMA | {"add_bos_token": False}, None, {}),
    "pieces: both": ("llama", LLAMA | {"add_bos_token": True, "add_eos_token": True}, None, {}),
    "pieces: added_tokens.json": ("llama", LLAMA | {"add_bos_token": True}, None, {"added": "file"}),
    "pieces: added_tokens_decoder": ("llama", LLAMA | {"add_bos_token": True}, None, {"added": "decoder"}),
    "pieces: an added token takes the spaces beside it": ("llama", LLAMA, None, {"added": "wide"}),
    "vocab.txt: an added token takes the spaces beside it": ("wordpiece", of_class("BertTokenizer"), None, {"added": "wide"}),
    "pieces: legacy": ("llama", of_class("LlamaTokenizer", legacy=True), None, {"added": "decoder"}),
    "pieces: T5Tokenizer": ("t5", of_class("T5Tokenizer"), None, {}),
    "pieces: T5, of a model's type": ("t5", None, None, {"config": {"model_type": "t5"}}),
    "pieces: T5 without sentinels": ("t5", of_class("T5Tokenizer", extra_ids=0), None, {"added": "file"}),
    "pieces: T5 with a token after the sentinels": ("t5", of_class("T5Tokenizer", extra_ids=20), None, {"added": "decoder"}),
    "pieces: XLMRobertaTokenizer": ("fairseq", of_class("XLMRobertaTokenizer"), None, {}),
    "pieces: XLM-RoBERTa, of a model's type": ("fairseq", None, None, {"config": {"model_type": "xlm-roberta"}}),
    "pieces: XLM-RoBERTa with a mask that takes the space before it": ("fairseq", of_class("XLMRobertaTokenizer", mask_token=MASK), None, {}),
    "pieces: XLM-RoBERTa with a token of its own": ("fairseq", of_class("XLMRobertaTokenizerFast"), None, {"added": "decoder"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_transformers(name, make, tmp_path, pieces):
    from transformers import AutoTokenizer

    kind, config, post, files = FOLDERS[name]
    added, files = files.get("added"), {key: value for key, value in files.items() if key != "added"}
    size = make(kind, config, post, **files)
    if added:
        if kind in pieces:
            size = load(tmp_path).vocab_size
        token = TOKEN | ({"lstrip": True, "rstrip": True} if added == "wide" else {})
        make(kind, config | ({"added_tokens_decoder": {str(size): token}} if added != "file" else {}), post, **files,
             **({"added_tokens": {"[tok]": size}} if added == "file" else {}))  # fmt: skip
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs(TEXTS)["input_ids"]
    assert [ours.with_special_tokens(ours.encode(text)) for text in TEXTS] == expected
    assert [ours.with_special_tokens(ids) for ids in ours.encode_batch(TEXTS)] == expected and ours.vocab_size == len(theirs)
    assert theirs.eos_token_id in (None, ours.eos_id) and theirs.pad_token_id in (None, ours.pad_id)


@pytest.mark.parametrize("legacy", [{}, {"legacy": True}, {"legacy": False}, {"legacy": None}], ids=str)
@pytest.mark.parametrize("prefix", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}, {"add_prefix_space": None}], ids=str)
def test_a_llama_puts_a_space_in_front_as_transformers_does(legacy, prefix, make, tmp_path):
    """Whatever the text begins with, and what follows a token in it."""
    from transformers import AutoTokenizer

    make("llama", LLAMA)
    config = {**of_class("LlamaTokenizer", add_bos_token=True), "added_tokens_decoder": {str(load(tmp_path).vocab_size): TOKEN}}
    make("llama", config | legacy | prefix)
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ours.save(tmp_path / "saved")
    again = load(tmp_path / "saved")

    @settings(max_examples=25, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.sampled_from([" ", "▁", "the", "[tok]", "</s>", "\n", "\t", "é", "\u3000", "ﬁ", "house", "  "]), max_size=6).map("".join))
    def equal(text):
        expected = theirs(text)["input_ids"]
        for tokenizer in (ours, again):
            assert [tokenizer.with_special_tokens(ids) for ids in (tokenizer.encode(text), *tokenizer.encode_batch([text]))] == [expected] * 2
            assert tokenizer.decode(expected) == theirs.decode(expected, skip_special_tokens=True)

    equal()


@pytest.mark.parametrize("kind", ["llama", "t5", "fairseq", "wordpiece", "gpt2"])
def test_a_saved_one_is_the_same_here_and_in_transformers(kind, make, tmp_path, pieces):
    """Its template, its added tokens, the side it pads on: what train and export write."""
    from transformers import AutoTokenizer

    classes = {"t5": "T5Tokenizer", "fairseq": "XLMRobertaTokenizer", "wordpiece": "BertTokenizer", "gpt2": "GPT2Tokenizer"}
    classes = {"llama": LLAMA, **{key: of_class(name) for key, name in classes.items()}}
    make(kind, classes[kind])
    size = load(tmp_path).vocab_size
    plain = {**TOKEN, "special": False, "normalized": True}
    make(kind, classes[kind] | {"add_bos_token": True, "padding_side": "left", "added_tokens_decoder": {str(size): TOKEN, str(size + 1): plain | {"content": "[word]"}}})
    texts = [*TEXTS, "the [word] of a [tok]"]
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ours.save(tmp_path / "saved")
    again, opened = load(tmp_path / "saved"), AutoTokenizer.from_pretrained(tmp_path / "saved")
    expected = theirs(texts)["input_ids"]
    for tokenizer in (ours, again):
        assert [tokenizer.with_special_tokens(tokenizer.encode(text)) for text in texts] == expected
        assert "[word]" in tokenizer.decode(tokenizer.encode(texts[-1])) and "[tok]" not in tokenizer.decode(tokenizer.encode(texts[-1]))
    assert opened(texts)["input_ids"] == expected and opened.padding_side == "left"
    assert again.fingerprint == ours.fingerprint and again.token(size) == "[tok]"


def test_special_tokens_of_tokenizer_json_alone_are_those_of_its_export(vocabularies, tmp_path):
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"}))
    byte_level([*SPECIALS, "[tok]"]).save(str(tmp_path / "tokenizer.json"))
    texts = TEXTS[:-1]  # the class would split numbers into digits, which the file does not
    theirs = AutoTokenizer.from_pretrained(tmp_path)(texts)["input_ids"]
    (ours := load(tmp_path)).save(tmp_path / "saved")
    assert [ours.with_special_tokens(ids) for ids in ours.encode_batch(texts)] == theirs
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(texts)["input_ids"] == theirs


def test_a_llama_reads_pieces_without_their_normaliser(tmp_path):
    import sentencepiece
    from transformers import AutoTokenizer

    train = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter(LINES), model_prefix=str(tmp_path / "tokenizer"), model_type="bpe", byte_fallback=True, vocab_size=340, hard_vocab_limit=False, minloglevel=2)
    n = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")).get_piece_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[tok]": n}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    texts = [*TEXTS, "two  spaces, a\nline"]
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)(texts)["input_ids"]
    ours.save(tmp_path / "saved")
    for tokenizer in (ours, load(tmp_path / "saved")):
        assert [tokenizer.with_special_tokens(ids) for ids in tokenizer.encode_batch(texts)] == theirs


@pytest.mark.parametrize("name", ["PegasusTokenizer", "CamembertTokenizer", "MBartTokenizer", "AlbertTokenizer", "GemmaTokenizer"])
def test_pieces_that_a_class_numbers_anew_are_refused_by_its_name(name, make, tmp_path):
    make("t5", of_class(name))
    with pytest.raises(UserError, match=rf"its tokenizer is a {name}, .* needs tokenizer\.json"):
        load(tmp_path)


def test_xlm_robertas_pieces_are_normalised_and_numbered_as_in_transformers(make, tmp_path):
    """What SentencePiece's table changes, what no piece has, and ids back to text; a model of other first pieces is none of them."""
    from transformers import AutoTokenizer

    make("fairseq", of_class("XLMRobertaTokenizer"))
    ours, theirs = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    texts = ["x  y", "ＡＢ ﬁne", "\t the \u3000 river\n", "日本 12345", "", "</s> a", "Ünïcode"]
    expected = theirs(texts)["input_ids"]
    assert [ours.with_special_tokens(ours.encode(text)) for text in texts] == expected and any(ours.unk_id in ids for ids in expected)
    assert [ours.decode(ids) for ids in expected] == [theirs.decode(ids, skip_special_tokens=True) for ids in expected]
    assert [getattr(ours, f"{role}_id") for role in ("bos", "pad", "eos", "unk", "mask", "cls", "sep")] == [0, 1, 2, 3, theirs.mask_token_id, 0, 2]
    make("t5", of_class("XLMRobertaTokenizer"))
    with pytest.raises(UserError, match=r"spiece\.model: .*its first three pieces are not <unk>, <s> and </s>"):
        load(tmp_path)


@pytest.mark.parametrize("kind, name", [("gpt2", "CLIPTokenizer"), ("gpt2", "WhisperTokenizer"), ("wordpiece", "BertJapaneseTokenizer"), ("wordpiece", "MPNetTokenizer"), ("wordpiece", "PreTrainedTokenizerFast")])
def test_words_that_a_class_makes_in_another_way_are_refused_by_its_name(kind, name, make, tmp_path):
    make(kind, of_class(name))
    with pytest.raises(UserError, match=rf"its tokenizer is a {name}, .* needs tokenizer\.json"):
        load(tmp_path)


def test_a_models_type_names_a_tokenizer_too(make, pieces, tmp_path):
    make("t5", None, config={"model_type": "pegasus"})
    with pytest.raises(UserError, match="its tokenizer is a pegasusTokenizer"):
        load(tmp_path)
    (tmp_path / "spiece.model").rename(tmp_path / "source.spm")
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UserError, match="its tokenizer is a MarianTokenizer"):
        load(tmp_path)


def test_what_llama_3_has_in_metas_layout_is_named(tmp_path):
    (tmp_path / "tokenizer.model").write_text("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)))
    with pytest.raises(UserError, match=r"a vocabulary of tiktoken.*Llama 3.*tokenizer.json"):
        load(tmp_path)


def test_an_added_token_that_does_not_follow_the_vocabulary_is_refused(make, tmp_path):
    n = make("gpt2", of_class("GPT2Tokenizer"), added_tokens={"[tok]": 400})
    with pytest.raises(UserError, match=rf"the added token '\[tok\]' has id 400, but the next free id is {n}"):
        load(tmp_path)
    for wrong in ({"x": TOKEN}, {"-1": TOKEN}, {"999999999999": TOKEN}, {"320": TOKEN | {"content": ""}}, {"320": 7}, {"320": {"word": "x"}}, [TOKEN]):
        make("gpt2", of_class("GPT2Tokenizer", added_tokens_decoder=wrong))
        with pytest.raises(UserError, match="added tokens are not a table"):
            load(tmp_path)


def test_qwen2s_words_are_not_split_again(tmp_path):
    """A piece may hold the mark before a word, which GPT-2's pattern would part from it."""
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*alphabet, "(h", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("( h\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = load(tmp_path).encode("said(hello) 12")
    assert ids == theirs("said(hello) 12")["input_ids"] and vocab["(h"] in ids
