"""Small models of each architecture that GGUF files are written of, and tokenizers of each kind."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pydantic import TypeAdapter

from gradus import models
from gradus.cli import main
from gradus.data.tokenizers import FastTokenizer, package_tokenizers
from gradus.recipe.schema import Model

TEXT = ["It's 1234 steps up the hill, and 56 down.\n\n  The rain in Spain's plain: naïve, déjà vu!", "We'll see; they've seen (100 %) of it.  "] * 40
LLAMA3_SPLIT = (  # of Llama 3's tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")
SIZES = {"vocab_size": 416, "n_layers": 2, "d_model": 64, "n_heads": 4, "d_ff": 96, "seq_len": 96}
QWEN3 = {"family": "llama", "n_kv_heads": 2, "qk_norm": True, "d_head": 32}
CASES = {
    "llama": {"family": "llama", "n_kv_heads": 2},
    "qwen2": {"family": "llama", "n_kv_heads": 2, "qkv_bias": True, "tie_output": True},
    "qwen3": {**QWEN3, "tie_output": True},
    "qwen3moe": {**QWEN3, "n_experts": 4, "top_k": 2, "d_expert": 32},
    "gemma3": {"family": "gemma", "n_kv_heads": 2, "d_head": 32, "window": 8, "full_every": 2},
    "gpt2": {"family": "gpt"},
}  # fmt: skip
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def bpe(pattern: str, whole_words: bool = False, texts: list[str] = TEXT, size: int = 400) -> FastTokenizer:
    """Byte-level BPE that splits a text by a pattern, with tokens of a chat."""
    package = package_tokenizers()
    rust = package.Tokenizer(package.models.BPE(ignore_merges=whole_words))
    split, alphabet = package.pre_tokenizers.Split(package.Regex(pattern), "isolated"), package.pre_tokenizers.ByteLevel.alphabet()
    rust.pre_tokenizer = package.pre_tokenizers.Sequence([split, package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    rust.decoder = package.decoders.ByteLevel()
    named = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = package.trainers.BpeTrainer(vocab_size=size, special_tokens=named, initial_alphabet=alphabet, show_progress=False)
    rust.train_from_iterator(texts, trainer)
    tokenizer = FastTokenizer(rust, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
    tokenizer.beside = {"chat_template.jinja": CHAT}
    return tokenizer


def saved(folder: Path, tokenizer=None, alpha: float = 0.03, **config) -> torch.nn.Module:
    model = models.build(TypeAdapter(Model).validate_python(SIZES | config), seed=1)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=draw), alpha=alpha)
    models.save(model, folder)
    (tokenizer or bpe(QWEN_SPLIT)).save(folder)
    return model.eval()


def write(folder: Path, to: Path, *words: str) -> tuple[dict, dict]:
    """(keys, tensors) of what is exported."""
    assert main(["export", str(folder), "--to", str(to), "--as", "gguf", *words]) == 0
    import gguf

    reader = gguf.GGUFReader(to / "model.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return keys, {tensor.name: tensor for tensor in reader.tensors}


def pieces(folder: Path, **settings) -> Path:
    """Make a folder's tokenizer SentencePiece's merges, as transformers keeps Llama 2's in tokenizer.json. Returns the file of SentencePiece."""
    import sentencepiece
    from transformers import LlamaTokenizer

    options = {"model_type": "bpe", "vocab_size": 330, "byte_fallback": True, "minloglevel": 2, "normalization_rule_name": "identity"}
    options |= {"remove_extra_whitespaces": False, "num_threads": 1, "hard_vocab_limit": False}
    lines = (line for text in TEXT for line in text.split("\n"))
    (made := folder / "pieces").mkdir()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_prefix=str(made / "tokenizer"), **options | settings)
    (made / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    LlamaTokenizer.from_pretrained(made).save_pretrained(folder)
    return made / "tokenizer.model"


def spaced(*normalizers) -> FastTokenizer:
    """SentencePiece's merges as Gemma's tokenizer.json has them: runs of spaces are added tokens too, which match no text before it is normalised."""
    package, runs = package_tokenizers(), ["▁" * n for n in (2, 3, 4)]
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab", *runs, "▁a"]
    merges = [("▁", "▁"), ("▁▁", "▁"), ("▁", "▁▁"), ("▁▁", "▁▁"), ("▁", "a")]
    model = package.models.BPE(dict(zip(tokens, range(len(tokens)))), merges, unk_token="<unk>", byte_fallback=True)
    rust = package.Tokenizer(model)
    rust.normalizer = package.normalizers.Sequence([*normalizers, package.normalizers.Replace(" ", "▁")])
    rust.decoder = package.decoders.Sequence([package.decoders.Replace("▁", " "), package.decoders.ByteFallback(), package.decoders.Fuse()])
    rust.add_special_tokens(["<unk>", "</s>"])
    rust.add_tokens([package.AddedToken(run, normalized=False) for run in runs])
    return FastTokenizer(rust, {"unk_token": "<unk>", "eos_token": "</s>"})
