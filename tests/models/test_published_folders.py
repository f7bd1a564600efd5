"""Folders in the layout of well-known published models, of kinds that no other test has: what transformers says of them, in
ids, logits and answers, or a refusal that names what is not read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers as package
import torch

from gradus import api, models
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.infer import find
from gradus.train.session import open_session

transformers = pytest.importorskip("transformers")

LINES = ["The quick river runs by the old house", "a green scene of 12345 sung stories", "O café não é bom, don't plot!", "the music never ends"] * 20
TEXTS = ["the old river", " The café, 2024!", "don't sing\nit", "x"]
CHAT = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}{% endfor %}"
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 40}
LLAMA = BERT | {"num_key_value_heads": 1, "max_position_embeddings": 64}
T5 = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 2}
LABELS = {"id2label": {0: "neg", 1: "neu", 2: "pos"}, "label2id": {"neg": 0, "neu": 1, "pos": 2}}
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def flagged(content: str, **flags) -> dict:
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True} | flags


def trained(model, trainer, *, normalizer=None, words=None, decoder=None, around: str | None = None, specials: list[str]) -> package.Tokenizer:
    """A tokenizer of the package; `around`: its template of a text."""
    rust = package.Tokenizer(model)
    rust.normalizer, rust.pre_tokenizer = normalizer, words
    if decoder is not None:
        rust.decoder = decoder
    rust.train_from_iterator(LINES, trainer(special_tokens=specials, show_progress=False))
    if around:
        ids = [(name, rust.token_to_id(name)) for name in dict.fromkeys(around.split()) if name != "$A"]
        rust.post_processor = package.processors.TemplateProcessing(single=around, special_tokens=ids)
    return rust


def byte_level(specials: list[str], first=(), around: str | None = None, regex: bool = True, normalizer=None) -> package.Tokenizer:
    alphabet, split = package.pre_tokenizers.ByteLevel.alphabet(), package.pre_tokenizers
    words = split.Sequence([*first, split.ByteLevel(add_prefix_space=False, use_regex=regex)]) if first else split.ByteLevel(add_prefix_space=False)
    trainer = lambda **more: package.trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, **more)  # noqa: E731
    return trained(package.models.BPE(), trainer, words=words, decoder=package.decoders.ByteLevel(), around=around, specials=specials, normalizer=normalizer)


def unigram(specials: list[str], around: str, unk: str) -> package.Tokenizer:
    trainer = lambda **more: package.trainers.UnigramTrainer(vocab_size=90, unk_token=unk, **more)  # noqa: E731
    words = package.pre_tokenizers.Metaspace()
    return trained(package.models.Unigram(), trainer, words=words, decoder=package.decoders.Metaspace(), around=around, specials=specials)


def metaspace(around: str | None) -> package.Tokenizer:
    """As Llama's, with a byte for what is in no piece."""
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = lambda **more: package.trainers.BpeTrainer(vocab_size=330, **more)  # noqa: E731
    words = package.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = package.decoders
    decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    model = package.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    rust = trained(model, trainer, words=words, specials=specials, around=around, decoder=decoder)
    state = json.loads(rust.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # the bytes are pieces
    return package.Tokenizer.from_str(json.dumps(state))


def write(folder: Path, rust: package.Tokenizer | None, config: dict | None, **files) -> int:
    """A tokenizer's files as they are published: tokenizer.json, or a vocabulary; the number of its tokens."""
    state = json.loads(rust.to_str())["model"] if rust else {}
    if files.pop("plain", False):
        rust = None
        (folder / "vocab.json").write_text(json.dumps(state["vocab"]))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in state["merges"]))
    if rust:
        rust.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return len(state.get("vocab", ()))


# ---------------------------------------------------------------- the folders: each makes its tokenizer, and returns (class, configuration)


def bertimbau(folder):
    """A cased BERT of another language."""
    letters = sorted({c for line in LINES for c in line if c != " "})
    pieces = ["[PAD]", "[unused1]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + c for c in letters), "the", "The", "river", "café"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    named = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
    write(folder, None, {"do_lower_case": False, "model_max_length": 512}, special_tokens_map=named, added_tokens={})
    about = {"directionality": "bidi", "pooler_type": "first_token_transform", "pooler_fc_size": 768, "output_past": True}
    return "BertForMaskedLM", transformers.BertConfig(vocab_size=len(pieces), pad_token_id=0, **BERT, **about)


def xlm_roberta(folder):
    rust = unigram(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], "<s> $A </s>", "<unk>")
    (folder / "sentencepiece.bpe.model").write_bytes(b"beside tokenizer.json it is not read")
    n = write(folder, rust, {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": "<mask>", "pad_token": "<pad>"})
    about = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    return "XLMRobertaForSequenceClassification", transformers.XLMRobertaConfig(vocab_size=n, **BERT, **about, **LABELS)


def camembert(folder):
    rust = unigram(["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<s>", "</s>", "<mask>"], "<s> $A </s>", "<unk>")
    about = {"mask_token": flagged("<mask>", lstrip=True, __type="AddedToken"), "pad_token": "<pad>", "additional_special_tokens": ["<s>NOTUSED", "</s>NOTUSED"]}
    n = write(folder, rust, {"tokenizer_class": "PreTrainedTokenizerFast", **about})
    about = {"pad_token_id": 1, "bos_token_id": 4, "eos_token_id": 5, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    return "CamembertForMaskedLM", transformers.CamembertConfig(vocab_size=n, **BERT, **about)


def twitter_roberta(folder):
    """A classifier of RoBERTa's two files, with no tokenizer_config.json."""
    n = write(folder, byte_level(ROBERTA), {}, plain=True, special_tokens_map={"mask_token": flagged("<mask>", lstrip=True, __type="AddedToken")})
    (folder / "tokenizer_config.json").unlink()
    about = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "gradient_checkpointing": False}
    return "RobertaForSequenceClassification", transformers.RobertaConfig(vocab_size=n, **BERT, **about, **LABELS)


def distilbert_of_electras_vocabulary(folder):
    """vocab.txt of a class that shares BERT's."""
    bertimbau(folder)
    write(folder, None, {"tokenizer_class": "ElectraTokenizer", "do_lower_case": True, "strip_accents": None})
    n = len((folder / "vocab.txt").read_text().splitlines())
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 40}
    return "DistilBertForSequenceClassification", transformers.DistilBertConfig(vocab_size=n, **sizes, **LABELS)


def modernbert(folder):
    rust = byte_level(["[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK]"], around="[CLS] $A [SEP]")
    n = write(folder, rust, {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": "[MASK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"})
    ids = {"pad_token_id": 2, "cls_token_id": 0, "sep_token_id": 1, "bos_token_id": 0, "eos_token_id": 1}
    return "ModernBertForMaskedLM", transformers.ModernBertConfig(vocab_size=n, **BERT, **ids, local_attention=8, global_attn_every_n_layers=2)


def gpt2_with_padding(folder):
    """A small GPT-2 to which a padding token was added after its vocabulary."""
    rust = byte_level(["<|endoftext|>"])
    n = write(folder, rust, {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024, "pad_token": "[PAD]"}, plain=True,
              special_tokens_map={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "[PAD]"})  # fmt: skip
    (folder / "added_tokens.json").write_text(json.dumps({"[PAD]": n}))
    sizes = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": n}
    return "GPT2LMHeadModel", transformers.GPT2Config(vocab_size=n + 1, **sizes)


def gpt2_without_a_row_for_padding(folder):
    """Its padding token is named, and the embedding was not made larger for it."""
    _, config = gpt2_with_padding(folder)
    (folder / "added_tokens.json").unlink()
    config.vocab_size, config.pad_token_id = config.vocab_size - 1, None
    return "GPT2LMHeadModel", config


def mistral(folder):
    n = write(folder, metaspace("<s> $A"), {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True, "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": None})
    return "MistralForCausalLM", transformers.MistralConfig(vocab_size=n, **LLAMA, sliding_window=4096, rope_theta=10000.0, bos_token_id=1, eos_token_id=2)


def tinyllama_chat(folder):
    about = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>", "padding_side": "right", "chat_template": CHAT}
    n = write(folder, metaspace("<s> $A"), about)
    return "LlamaForCausalLM", transformers.LlamaConfig(vocab_size=n, **LLAMA, bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-5, pretraining_tp=1)


def smollm2(folder):
    """Digits apart, tied embeddings, no token around a text."""
    rust = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], first=[package.pre_tokenizers.Digits(individual_digits=True)])
    about = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>", "add_prefix_space": False}
    n = write(folder, rust, {"tokenizer_class": "PreTrainedTokenizerFast", **about, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    more = {"tie_word_embeddings": True, "is_llama_config": True, "rope_interleaved": False, "rope_theta": 130000, "bos_token_id": 1, "eos_token_id": 2}
    return "LlamaForCausalLM", transformers.LlamaConfig(vocab_size=n, **LLAMA, **more)


def qwen2_instruct(folder):
    """Its two files, without tokenizer.json; a vocabulary that is padded."""
    rust = byte_level([])
    n = len(json.loads(rust.to_str())["model"]["vocab"])
    added = {str(n + i): flagged(name) for i, name in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}
    about = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None, "errors": "replace", "chat_template": CHAT}
    write(folder, rust, {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "added_tokens_decoder": added, **about}, plain=True)
    more = {"tie_word_embeddings": True, "use_sliding_window": False, "max_window_layers": 21, "rope_theta": 1e6, "bos_token_id": n, "eos_token_id": n + 2}
    return "Qwen2ForCausalLM", transformers.Qwen2Config(vocab_size=n + 21, **LLAMA, **more)


def yi(folder):
    n = write(folder, metaspace(None), {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": False, "legacy": True, "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>", "unk_token": "<unk>"})
    return "LlamaForCausalLM", transformers.LlamaConfig(vocab_size=n, **LLAMA, rope_theta=5e6, bos_token_id=1, eos_token_id=2)


def llama3(folder):
    """tiktoken's words, and a rotary scaling."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = package.pre_tokenizers.Split(package.Regex(words), "isolated")
    rust = byte_level(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], first=[split], around="<|begin_of_text|> $A", regex=False)
    state = json.loads(rust.to_str())
    state["model"]["ignore_merges"] = True
    n = write(folder, package.Tokenizer.from_str(json.dumps(state)), {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": True})
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500000.0}
    return "LlamaForCausalLM", transformers.LlamaConfig(vocab_size=n, **LLAMA, rope_parameters=scaling, bos_token_id=0, eos_token_id=[1, 2])


def flan_t5(folder):
    rust = unigram(["<pad>", "</s>", "<unk>"], "$A </s>", "<unk>")
    n = write(folder, rust, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    about = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0, "n_positions": 512, "output_past": True}
    return "T5ForConditionalGeneration", transformers.T5Config(vocab_size=n + 12, **T5, **about)


READ = (bertimbau, xlm_roberta, camembert, twitter_roberta, distilbert_of_electras_vocabulary, modernbert, gpt2_with_padding, gpt2_without_a_row_for_padding, mistral,
        tinyllama_chat, smollm2, qwen2_instruct, yi, llama3, flan_t5)  # fmt: skip


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.__name__)
def test_a_published_folder_answers_as_in_transformers(kind, tmp_path):
    torch.manual_seed(0)
    name, config = kind(tmp_path)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    model.save_pretrained(tmp_path)
    theirs, source = transformers.AutoTokenizer.from_pretrained(tmp_path), find(str(tmp_path))
    ours = source.tokenizers()[""]
    ids = [ours.with_special_tokens(ours.encode(text)) for text in TEXTS]
    assert ids == theirs(TEXTS)["input_ids"]
    loaded, start = source.load(), torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        for text, row in zip(TEXTS, map(torch.tensor, ids)):
            inputs = {"decoder_input_ids": start} if config.is_encoder_decoder else {}
            expected = model(input_ids=row[None], **inputs).logits
            torch.testing.assert_close(loaded(row[None], *inputs.values()), expected, atol=2e-4, rtol=1e-4)
            if "SequenceClassification" in name:
                record = api.predict(tmp_path, text)[0]
                assert record["label"] == config.id2label[int(expected.argmax())]
                assert record["probability"] == pytest.approx(float(expected.softmax(-1).max()), abs=1e-4)
    if "MaskedLM" in name:
        text = f"the old {theirs.mask_token} house"
        row = torch.tensor([theirs(text)["input_ids"]])
        with torch.no_grad():
            best = model(input_ids=row).logits[row == theirs.mask_token_id][0].softmax(-1).max()
        assert api.predict(tmp_path, text)[0]["masks"][0][0]["probability"] == pytest.approx(float(best), abs=1e-4)
    elif "SequenceClassification" not in name:
        prompt = TEXTS[0]
        inputs = {"input_ids": torch.tensor([theirs(prompt)["input_ids"]])}
        made = model.generate(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]), max_new_tokens=8, do_sample=False, pad_token_id=config.pad_token_id or 0)
        assert api.generate(tmp_path, prompt, max_new=8) == theirs.decode(made[0], skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["pieces", "bytes"])
def test_a_roberta_and_its_tokenizer_go_there_and_back(kind, tmp_path):
    """XLM-R's SentencePiece model as transformers writes it (`tokenizer.json`), RoBERTa's byte-level BPE; what Gradus saves of both, transformers reads."""
    (folder := tmp_path / "theirs").mkdir()
    if kind == "pieces":
        sentencepiece = pytest.importorskip("sentencepiece")
        prefix = str(tmp_path / "sentencepiece.bpe")
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_prefix=prefix, vocab_size=80, hard_vocab_limit=False, minloglevel=2)
        tokenizer, name = transformers.XLMRobertaTokenizer.from_pretrained(tmp_path), "XLMRoberta"
        tokenizer.save_pretrained(folder)
    else:
        twitter_roberta(folder)
        tokenizer, name = transformers.RobertaTokenizer.from_pretrained(folder), "Roberta"
    about = {"vocab_size": len(tokenizer), "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    model = getattr(transformers, f"{name}ForMaskedLM")(getattr(transformers, f"{name}Config")(**BERT, **about)).eval()
    model.save_pretrained(folder)
    texts = [*TEXTS, "x  y", "ＡＢ ﬁne"]  # what SentencePiece normalises
    ours, expected = find(str(folder)).tokenizers()[""], tokenizer(texts)["input_ids"]
    assert [ours.with_special_tokens(ours.encode(text)) for text in texts] == expected
    models.save(models.load(folder), tmp_path / "ours")
    ours.save(tmp_path / "ours")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")(texts)["input_ids"] == expected
    again, ids = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").eval(), torch.tensor(expected[:1])
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [xlm_roberta, twitter_roberta], ids=lambda kind: kind.__name__)
def test_training_reads_a_published_folder_as_transformers_does(kind, tmp_path):
    """What `train` with model.init and `evaluate` compute of it: texts with what stands around them, classes by their names."""
    torch.manual_seed(0)
    (folder := tmp_path / "published").mkdir()
    name, config = kind(folder)
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(folder)
    texts = dict(zip(LABELS["label2id"], TEXTS[1:]))
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for label, text in texts.items()) * 10)
    recipe = {"task": {"name": "classification"}, "data": {"kind": "labelled", "path": str(tmp_path / "t.jsonl"), "max_len": 32, "cache": str(tmp_path / "cache")},
              "model": {"init": str(folder)}, "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 4}, "train": {"steps": 1}, "layout": {"device": "cpu"}}  # fmt: skip
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    task = open_session(recipes.load(tmp_path / "r.yaml")).task
    batch = task.collate([task.splits["train"][i] for i in range(3)])
    expected = theirs(list(texts.values()), padding=True)
    assert batch["ids"].tolist() == expected["input_ids"] and batch["labels"].tolist() == [0, 1, 2]
    with torch.no_grad():
        logits = torch.cat([model(input_ids=torch.tensor([theirs(text)["input_ids"]])).logits for text in texts.values()])
    sizes = {"family": "bert", "n_layers": 1, "d_model": 8, "n_heads": 1, "d_ff": 8}  # those of the weights count
    (tmp_path / "r.yaml").write_text(json.dumps(recipe | {"model": sizes, "tokenizer": {"path": str(folder)}}))
    found = api.evaluate(tmp_path / "r.yaml", split="train", checkpoint=folder)["train/loss"]
    assert found == pytest.approx(float(torch.nn.functional.cross_entropy(logits, torch.arange(3))), abs=1e-4)


def test_a_published_vit_with_the_newer_processor_answers_as_in_transformers(tmp_path):
    """`ViTImageProcessorFast`, as newer folders name it."""
    from PIL import Image

    torch.manual_seed(0)
    names = {0: "cat", 1: "dog", 2: "bird"}
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=32, patch_size=8, id2label=names, label2id={v: k for k, v in names.items()})
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    about = processor.to_dict() | {"image_processor_type": "ViTImageProcessorFast", "data_format": "channels_first", "device": None, "disable_grouping": None}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(about))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 70, 3), dtype=np.uint8))
    with torch.no_grad():
        expected = model(**processor(picture, return_tensors="pt")).logits.softmax(-1)[0]
    record = api.predict(tmp_path, picture)[0]
    assert {guess["label"]: guess["probability"] for guess in record["top"]} == pytest.approx(dict(zip(names.values(), expected.tolist())), abs=1e-4)


# model_type → (fields, what the refusal says)
REFUSED = {
    "albert": (BERT | {"embedding_size": 8}, "num_hidden_groups: its layers share their weights"),
    "electra": (BERT | {"embedding_size": 8}, "embedding_size: its embeddings are projected"),
    "mpnet": (BERT, "is not one of Gradus's families"),
    "opt": ({"hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2}, "can be planned, not trained"),
    "gpt_neox": (BERT, "rotary_pct: rotary positions with biases"),
    "phi": (BERT, "partial_rotary_factor: biases and one norm per layer"),
    "gemma": (LLAMA, "can be planned, not trained"),
    "mt5": (T5, "model_type=mt5"),
    "umt5": (T5, "relative_attention_num_buckets: every layer has a relative bias of its own"),
    "deit": (BERT, "a second token and position"),
    "beit": (BERT, "is not one of Gradus's families"),
    "deberta-v2": (BERT, "relative_attention"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_published_folder_of_another_architecture_is_refused_by_name(kind, tmp_path):
    fields, why = REFUSED[kind]
    transformers.AutoConfig.for_model(kind, **fields).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError) as error:
        api.predict(tmp_path, "a")
    assert f"model_type={kind}" in str(error.value) and why in str(error.value) and "\n" not in str(error.value)


BYTES = {"ByT5Tokenizer": "spiece.model", "AlbertTokenizer": "spiece.model",
         "MBartTokenizer": "sentencepiece.bpe.model", "CamembertTokenizer": "sentencepiece.bpe.model", "CodeGenTokenizer": "vocab.json"}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_a_tokenizer_of_another_class_beside_a_model_that_is_read_is_refused_by_name(name, tmp_path):
    _, config = gpt2_with_padding(tmp_path)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    if BYTES[name] != "vocab.json":
        (tmp_path / "vocab.json").unlink()
        (tmp_path / "merges.txt").unlink()
        (tmp_path / BYTES[name]).write_bytes(b"pieces")
    with pytest.raises(UserError, match=f"its tokenizer is a {name}, .* needs tokenizer.json"):
        api.generate(tmp_path, "a", max_new=2)
