"""A tokenizer and its chat templates as GGUF keeps them. llama.cpp has its own code for each kind: what it would split
or spell otherwise is refused."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any

from gradus.data.tokenizer_files import QWEN2_WORDS
from gradus.data.tokenizers import TEMPLATE, FastTokenizer, Tokenizer
from gradus.errors import UserError
from gradus.infer import ModelSource, end_tokens, note
from gradus.models.weights.gguf import SENTENCEPIECE
from gradus.tasks.sources import in_documents

NORMAL, UNKNOWN, CONTROL, ADDED, UNUSED, BYTE = range(1, 7)  # gguf.TokenType
LAST = -1e9  # score of what is never merged
THREE_DIGITS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# how a text is split into words, and whether a word of the vocabulary needs no merges → tokenizer.ggml.pre
PRE = {
    "bytes of words, False": "gpt-2", "digits, bytes of words, False": "smollm",
    f"{QWEN2_WORDS}, bytes, False": "qwen2", f"{THREE_DIGITS}, bytes, True": "llama-bpe",
    f"{THREE_DIGITS}, bytes, False": "dbrx",
}  # fmt: skip
# as GGUF spells them; none that separates texts: llama-cpp-python would put it behind every prompt
IDS = {"bos": "bos", "unk": "unknown", "pad": "padding", "mask": "mask"}
SPACES = "\ufb01  Xe\u0301\u00e9"  # of which every character stays where a text is not normalised


def keys(source: ModelSource) -> dict[str, Any]:
    """All keys of the model's tokenizer. Raises UserError for one that llama.cpp does not have."""
    tokenizer = source.tokenizers()[""]
    if type(tokenizer) is not FastTokenizer:
        raise refused(f"of kind {getattr(tokenizer, 'kind', 'SentencePiece without tokenizer.json')}")
    model, tokens = of_merges(tokenizer)
    rows = (tokens.get(i, (f"[PAD{i}]", UNUSED, LAST)) for i in range(source.config.vocab_size))
    model |= zip(("tokens", "token_type", "scores")[: 2 if "merges" in model else 3], map(list, zip(*rows)))
    return {f"tokenizer.ggml.{key}": value for key, value in (model | special(source, tokenizer)).items()}


def chat_templates(source: ModelSource) -> list[dict[str, str]]:
    """Those beside the model's tokenizer, each with its name, as gguf's writer takes them."""
    files = [(PurePath(file), text) for file, text in source.tokenizers()[""].beside.items() if file.endswith(".jinja")]
    return [{"name": "default" if file.name == TEMPLATE else file.stem, "template": text} for file, text in files]


def refused(what: str) -> UserError:
    return UserError(f"--as gguf: llama.cpp has no tokenizer {what}. Use --as hf, or train with tokenizer.kind=bpe.")


def special(source: ModelSource, tokenizer: Tokenizer) -> dict[str, Any]:
    """The ids of special tokens, of those that end a text up to three, and which of them stand around a text."""
    found = {f"{name}_token_id": getattr(tokenizer, f"{role}_id") for role, name in IDS.items()}
    ends = sorted(end_tokens(source, tokenizer), key=lambda i: i != tokenizer.eos_id)
    if not ends:  # it would take an ordinary one for it, by a number of its own
        raise refused("without a token that ends a text")
    found |= zip(("eos_token_id", "eot_token_id", "eom_token_id"), ends)
    if ends[3:]:
        note(f"GGUF has three tokens that end a text; left out: {', '.join(map(tokenizer.token, ends[3:]))}")
    whole = source.recipe is None or in_documents(source.recipe)
    for name, ids in (("bos", tokenizer.before), ("eos", tokenizer.after)):
        if {*ids} - {getattr(tokenizer, f"{name}_id")}:
            raise refused("that puts others than its begin and end tokens around a text")
        found[f"add_{name}_token"] = whole and bool(ids)
    return {key: value for key, value in found.items() if value is not None}


def of_merges(tokenizer: FastTokenizer) -> tuple[dict[str, Any], dict[int, tuple[str, int, float]]]:
    """Keys, and by id how a token is written, its kind, and the score by which llama.cpp merges SentencePiece's."""
    rust = tokenizer.rust
    model, normalizer, splits = map(json.loads(rust.to_str()).get, ("model", "normalizer", "pre_tokenizer"))
    if model["type"] != "BPE" or not model["merges"]:
        raise refused("of another kind than BPE with merges")
    kinds = {token.content: CONTROL if token.special else ADDED for token in rust.get_added_tokens_decoder().values()}
    if model["byte_fallback"]:  # SentencePiece's
        text = rust.normalizer.normalize_str(SPACES) if normalizer else SPACES
        if splits:
            text = "".join(word for word, _ in rust.pre_tokenizer.pre_tokenize_str(text))
        how = {"model": SENTENCEPIECE, "pre": "default", "add_space_prefix": text[0] == "▁"}
        known = text.removeprefix("▁") == SPACES.replace(" ", "▁")
        kinds |= {f"<0x{byte:02X}>": BYTE for byte in range(256)} | {tokenizer.config["unk_token"]: UNKNOWN}
    else:
        said = [*map(split, (splits or {}).get("pretokenizers", [splits])), model.get("ignore_merges") or False]
        how = {"model": "gpt2", "pre": PRE.get(", ".join(map(str, said))), "merges": [*map(" ".join, model["merges"])]}
        known = how["pre"] and normalizer in (None, {"type": "NFC"})
    if not known:
        raise refused("that splits or normalises a text as this one does")
    if normalizer == {"type": "NFC"}:
        note("llama.cpp does not compose characters (NFC): letters with accents apart have other tokens there")
    rank = {"".join(pair): -float(place) for place, pair in reversed([*enumerate(model["merges"])])}
    # runs of spaces are no added tokens: those are printed as they are written, with ▁
    return how, {
        i: (token, kinds.get(token.strip("▁") and token, NORMAL), rank.get(token, LAST))
        for token, i in rust.get_vocab().items()
    }


def split(step: dict[str, Any] | None) -> str:
    """A step of splitting in short, as in PRE; the whole where it is none of these."""
    match step:
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
            return regex
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": words}:
            return "bytes" + " of words" * words
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
    return json.dumps(step)
