"""A tokenizer and its chat templates as GGUF keeps them. llama.cpp has its own code for each kind: what it would split
or spell otherwise is refused."""

from __future__ import annotations

import json
import re
from pathlib import PurePath
from typing import Any

from gradus.data.sentencepiece import SentencePieceTokenizer
from gradus.data.tokenizer_files import QWEN2_WORDS
from gradus.data.tokenizers import TEMPLATE, FastTokenizer, TableTokenizer, Tokenizer
from gradus.errors import UserError
from gradus.infer import ModelSource, end_tokens, note
from gradus.tasks.sources import in_documents

NORMAL, UNKNOWN, CONTROL, ADDED, UNUSED, BYTE = range(1, 7)  # gguf.TokenType
ADDED_SCORE = -1000.0
# (how a text is split into words, whether a word of the vocabulary needs no merges) → tokenizer.ggml.pre
THREE_DIGITS = QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
BYTES, BYTES_OF_WORDS = "ByteLevel False", "ByteLevel True"
PRE = {
    ((BYTES_OF_WORDS,), False): "gpt-2", (("Digits True", BYTES_OF_WORDS), False): "smollm",
    ((QWEN2_WORDS, BYTES), False): "qwen2", ((THREE_DIGITS, BYTES), True): "llama-bpe",
    ((THREE_DIGITS, BYTES), False): "dbrx",
}  # fmt: skip
IDS = {"bos": "bos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}  # GGUF's own spelling
SPACED = "\ufb01  x"  # whose spaces stay, and whose ligature does, where texts are not normalised


def keys(source: ModelSource) -> dict[str, Any]:
    """The keys of the model's tokenizer, whole. Raises UserError for one that llama.cpp does not have."""
    tokenizer = source.tokenizers()[""]
    if isinstance(tokenizer, SentencePieceTokenizer):
        model = of_pieces(tokenizer)
    elif isinstance(tokenizer, FastTokenizer) and not isinstance(tokenizer, TableTokenizer):
        model = of_merges(tokenizer)
    else:
        raise refused(f"of kind {getattr(tokenizer, 'kind', type(tokenizer).__name__)}")
    n, tokens, kinds = source.config.vocab_size, model.pop("tokens"), model.pop("token_type")
    model["tokens"] = [tokens.get(i, f"[PAD{i}]") for i in range(n)]
    model["token_type"] = [kinds.get(i, UNUSED) for i in range(n)]
    if "scores" in model:
        scores = model["scores"]
        model["scores"] = [float(scores.get(i, ADDED_SCORE)) for i in range(n)]
    model |= special(source, tokenizer)
    return {f"tokenizer.ggml.{key}": value for key, value in model.items()} | templates(tokenizer)


def refused(what: str) -> UserError:
    return UserError(f"--as gguf: a tokenizer {what}: llama.cpp has none. Use --as hf, or tokenizer.kind=bpe.")


def special(source: ModelSource, tokenizer: Tokenizer) -> dict[str, Any]:
    """The ids of special tokens, of those that end a text up to three, and which of them stand around a text."""
    found = {f"{name}_token_id": getattr(tokenizer, f"{role}_id") for role, name in IDS.items()}
    ends = sorted(end_tokens(source, tokenizer), key=lambda i: i != tokenizer.eos_id)
    found |= dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), ends))
    if ends[3:]:
        note(f"GGUF has three tokens that end a text; left out: {', '.join(map(tokenizer.token, ends[3:]))}")
    whole = source.recipe is None or in_documents(source.recipe)
    before, after = (list(ids) if whole else [] for ids in (tokenizer.before, tokenizer.after))
    if before not in ([], [tokenizer.bos_id]) or after not in ([], [tokenizer.eos_id]):
        raise refused("that puts others than its begin and end tokens around a text")
    around = {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    return {key: i for key, i in found.items() if i is not None} | around


def templates(tokenizer: Tokenizer) -> dict[str, Any]:
    named = {PurePath(file).stem: text for file, text in tokenizer.beside.items() if file.endswith(".jinja")}
    default = named.pop(PurePath(TEMPLATE).stem, None)
    found: dict[str, Any] = {} if default is None else {"tokenizer.chat_template": default}
    found |= {f"tokenizer.chat_template.{name}": text for name, text in named.items()}
    return found | ({"tokenizer.chat_templates": [*named]} if named else {})


def of_pieces(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    sp = tokenizer.sp
    ids = range(tokenizer.n_pieces)
    scores = {i: sp.get_score(i) for i in ids}
    if any(score != int(score) for score in scores.values()):
        raise refused("of SentencePiece's unigrams")
    kinds = {
        i: UNKNOWN if sp.is_unknown(i) else CONTROL if sp.is_control(i) else UNUSED if sp.is_unused(i)
        else BYTE if sp.is_byte(i) else NORMAL for i in ids
    }  # fmt: skip
    added = {i: token for i, token in tokenizer.added.items() if kinds.get(i) != UNKNOWN}
    tokens = {i: sp.id_to_piece(i) for i in ids} | {i: token["content"] for i, token in added.items()}
    kinds |= {i: CONTROL if token.get("special") else ADDED for i, token in added.items()}
    prefix = before_words(sp.normalize(SPACED)) and tokenizer.prefix
    return with_scores(tokens, kinds, scores | dict.fromkeys(added, ADDED_SCORE), prefix)


def before_words(spaced: str) -> bool:
    """Whether a space is put before a text. spaced: SPACED as a tokenizer prepares it."""
    if spaced.removeprefix("▁") != SPACED.replace(" ", "▁"):
        raise refused("that normalises texts")
    return spaced.startswith("▁")


def with_scores(tokens: dict, kinds: dict, scores: dict, prefix: bool) -> dict[str, Any]:
    own = {"model": "llama", "pre": "default", "add_space_prefix": prefix, "scores": scores}
    return own | {"tokens": tokens, "token_type": kinds}


def of_merges(tokenizer: FastTokenizer) -> dict[str, Any]:
    rust, state = tokenizer.rust, json.loads(tokenizer.rust.to_str())
    model, normalizer = state["model"], state["normalizer"]
    if model["type"] != "BPE" or not model["merges"]:
        raise refused(f"of {model['type']}, or without merges")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    added = {i: (CONTROL if t.special else ADDED) for i, t in rust.get_added_tokens_decoder().items()}
    tokens = {i: token for token, i in rust.get_vocab(with_added_tokens=True).items()}
    kinds = {i: added.get(i, NORMAL) for i in tokens}
    if model["byte_fallback"]:
        text = rust.normalizer.normalize_str(SPACED) if rust.normalizer else SPACED
        if rust.pre_tokenizer:
            text = "".join(word for word, _ in rust.pre_tokenizer.pre_tokenize_str(text))
        kinds |= {i: BYTE for i, token in tokens.items() if re.fullmatch("<0x[0-9A-F]{2}>", token)}
        kinds |= {i: UNKNOWN for i, token in tokens.items() if token == model["unk_token"]}
        rank = {a + b: -place for place, (a, b) in reversed([*enumerate(merges)])}  # of SentencePiece, which merges it
        scores = {i: rank.get(token, -len(merges)) for i, token in tokens.items()}
        return with_scores(tokens, kinds, scores | dict.fromkeys(added, ADDED_SCORE), before_words(text))
    pre = PRE.get((tuple(map(step, steps(state["pre_tokenizer"]))), bool(model.get("ignore_merges"))))
    if pre is None:
        raise refused("that splits texts into words in another way than GPT-2's, Qwen 2's, Llama 3's and SmolLM's")
    if normalizer not in (None, {"type": "NFC"}):
        raise refused("that normalises texts")
    if normalizer:
        note("llama.cpp does not compose characters (NFC): texts with accents apart have other tokens there")
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": list(map(" ".join, merges))}


def steps(state: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [] if state is None else state.get("pretokenizers", [state])


def step(state: dict[str, Any]) -> str:
    """A step of splitting in short, as in PRE; the whole where it is none of these."""
    match state:
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
            return regex
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": words}:
            return f"ByteLevel {words}"
        case {"type": "Digits", "individual_digits": alone}:
            return f"Digits {alone}"
    return json.dumps(state)
