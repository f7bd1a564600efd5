"""Tokenizers of files: whatever a checkpoint brings, and what `save` wrote."""

from __future__ import annotations

import base64
import itertools
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradus import limits
from gradus.data.readers import expanded, near
from gradus.data.sentencepiece import SentencePieceTokenizer, charsmap, whole_model
from gradus.data.tokenizers import (
    MORE_TEMPLATES,
    OURS,
    ROLES,
    SPECIALS,
    TEMPLATE,
    USUAL,
    ByteTokenizer,
    CharTokenizer,
    FastTokenizer,
    Tokenizer,
    WordTokenizer,
    content_of,
    package_tokenizers,
)
from gradus.errors import DataError, UserError, first_line

Config = dict[str, Any]  # what the files beside a tokenizer say of it
# Tokenizers of transformers whose files are read here, by class or model type: the kind of file, and the roles of the
# tokens before and after a text; without a role, add_bos_token and add_eos_token decide
WORDPIECE, BYTE_BPE, PIECES = ("WordPiece", "cls", "sep"), ("byte-level BPE", "", ""), ("SentencePiece", "", "")
LIKE_BERT = ("Bert", "ConvBert", "DistilBert", "Electra", "LayoutLM", "Lxmert", "MobileBert", "SqueezeBert")
CLASSES = {
    **{f"{name.lower()}tokenizer": WORDPIECE for name in LIKE_BERT},
    "gpt2tokenizer": BYTE_BPE, "qwen2tokenizer": BYTE_BPE, "robertatokenizer": ("byte-level BPE", "bos", "eos"),
    "llamatokenizer": PIECES, "t5tokenizer": ("SentencePiece", "", "eos"),
    "xlmrobertatokenizer": ("SentencePiece", "bos", "eos"),
}  # fmt: skip
BYTE_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
END = "<|endoftext|>"
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# looked for in a folder, in this order
FILES = (OURS, "tokenizer.json", "vocab.txt", "encoder.json", "vocab.json", "spiece.model", "tokenizer.model",
         "tokenizer.bin")  # fmt: skip
KINDS = (
    "tokenizer.json, vocab.txt, encoder.json + vocab.bpe, vocab.json + merges.txt, "
    "a SentencePiece .model or a llama2.c .bin"
)


def load(path: str | Path) -> Tokenizer:
    """The tokenizer of a folder or a file: tokenizer.json, vocab.txt (BERT's WordPiece), encoder.json + vocab.bpe or
    vocab.json + merges.txt (byte-level BPE), SentencePiece `.model`, llama2.c `.bin`, or what `save` wrote.

    Raises UserError where there is none, or where a file is of an unknown kind, truncated or corrupt.
    """
    path = expanded(path)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder to read a tokenizer from.{near(path)}")
    file = _find(path) if path.is_dir() else path
    kind, read = READERS.get(file.name) or READERS.get(file.suffix) or ("", None)
    if read is None or file.name == "tokenizer_config.json":
        raise UserError(f"{file}: unknown tokenizer format. Give a folder, or {KINDS}.")
    config = _config(file.parent)
    name = _class(file.parent, kind, config)
    try:
        tokenizer = read(limits.regular(file, limits.TOKENIZER_FILE), config, name)
    except OSError as e:
        raise DataError(f"{file}: cannot be read ({e.strerror}).") from None
    except _Damaged as e:
        raise UserError(f"{file}: truncated, corrupt or of another kind ({e}). Get the file again.") from None
    tokenizer.beside, ids = chat_templates(file.parent), []
    for role, own in zip(CLASSES.get(name, PIECES)[1:], ("bos", "eos")):
        role = own if not role and kind and config.get(f"add_{own}_token") else role
        ids.append(getattr(tokenizer, f"{role}_id", None))
    tokenizer.around(*ids)
    return tokenizer


def _class(folder: Path, kind: str, config: Config) -> str:
    """The name in CLASSES of what a folder's files are for: the tokenizer's class, else that of the model's type; for
    neither "nonetokenizer". Raises UserError for one that reads files of this kind in another way."""
    file = folder / "config.json"
    model = limits.read_object(file) if file.is_file() else {}
    model_type = "Marian" if (folder / "source.spm").is_file() else model.get("model_type")
    whose = str(config.get("tokenizer_class") or model.get("tokenizer_class") or f"{model_type}Tokenizer")
    name = re.sub("fast$|[-_]", "", whose.lower())
    if kind and kind != CLASSES.get(name, ("",))[0] and whose != "NoneTokenizer":
        own = f"its tokenizer is a {whose:.40}, which reads these files differently from plain {kind}"
        made = "For most, transformers writes it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        raise UserError(f"{folder}: {own}, so it needs tokenizer.json here. {made}.")
    return name


def chat_templates(folder: Path) -> dict[str, str]:
    """How a conversation becomes a text, by the names of the files in which transformers keeps it; of an older one,
    which keeps it in tokenizer_config.json, by those of a newer one."""
    paths = [folder / TEMPLATE, *sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]
    kept = {str(p.relative_to(folder)): limits.read_text(p, limits.TOKENIZER_FILE) for p in paths if p.is_file()}
    if not kept and (folder / "tokenizer_config.json").is_file():
        stated = _json(folder / "tokenizer_config.json").get("chat_template")
        for one in stated if isinstance(stated, list) else [{"name": "default", "template": stated}]:
            match one:
                case {"name": str(name), "template": str(text)} if re.fullmatch(r"\w[\w.-]*", name):
                    kept[TEMPLATE if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja"] = text
    return kept


class _Damaged(Exception):
    """What is wrong with a file of a tokenizer, in a few words."""


def _find(folder: Path) -> Path:
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.iterdir())
    others = [p for p in files if p.suffix == ".model" or (p.suffix == ".bin" and p.name.startswith("tok"))]
    if len(others) == 1:
        return others[0]
    there = ", ".join(p.name for p in files[:10]) or "nothing"
    raise UserError(f"{folder}: need one tokenizer in this folder; found {there}. A tokenizer is {KINDS}.")


def _json(file: Path) -> dict[str, Any]:
    content = limits.read_json(file, limits.TOKENIZER_FILE)
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds a {type(content).__name__}, not an object. Use {KINDS}.")
    return content


def _text(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise _Damaged(f"{file.name} is not text") from None


def _added(token: Any) -> Any:
    """An added token of the package, from a text or from what JSON holds of one."""
    stated = {"content": token, "special": True} if isinstance(token, str) else dict(token)
    stated.pop("__type", None)
    return package_tokenizers().AddedToken(**stated)


def _config(folder: Path) -> Config:
    """What the files beside a tokenizer say of it."""
    config: Config = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= _json(folder / name)
    extra = config.get("extra_ids") or 0
    if type(extra) is not int or not 0 <= extra <= limits.TOKEN_IDS:
        raise UserError(f"{folder}: extra_ids {extra!r:.60} is not a whole number from 0 to {limits.TOKEN_IDS:,}.")
    more = config.get("additional_special_tokens") or config.pop("extra_special_tokens", None) or []
    added, file = config.get("added_tokens_decoder"), folder / "added_tokens.json"
    try:
        names = [_added(token).content for token in (more.values() if isinstance(more, dict) else more)]
        roles = [_added(token).content for role in ROLES if (token := config.get(f"{role}_token")) is not None]
        if added is None and file.is_file():
            special = {*names, *roles}
            added = {i: token if token in special else {"content": token} for token, i in _json(file).items()}
        added = {int(i): _added(token) for i, token in (added or {}).items()}
        if not all(0 <= i <= limits.TOKEN_IDS and token.content for i, token in added.items()):
            raise ValueError("an id out of range, or an empty token")
    except (TypeError, ValueError, AttributeError) as e:
        what = "its added tokens are not a table of ids and tokens, or its special tokens no texts"
        raise UserError(f"{folder}: {what} ({e}). Get it again.") from None
    states = {i: added[i].__getstate__() for i in sorted(added)}
    return config | {"additional_special_tokens": names, "added_tokens_decoder": states}


def _with_added(rust: Any, config: Config, folder: Path) -> FastTokenizer:
    """The tokenizer with the tokens that were added to its vocabulary: those of a role that are in it become special,
    and one for padding, which no model reads, may be new: where the model has no row for it there is none."""
    there = {i: token.__getstate__() for i, token in rust.get_added_tokens_decoder().items()}
    for i, state in config["added_tokens_decoder"].items():
        if there.get(i) == state:  # tokenizer.json mostly has them, and adding one takes 1 ms
            continue
        before, add = rust.get_vocab_size(), rust.add_special_tokens if state["special"] else rust.add_tokens
        add([_added(state)])
        if rust.get_vocab_size() > before and rust.token_to_id(state["content"]) != i:
            wrong = f"the added token {state['content']!r:.40} has id {i}, but the next free id is {before}"
            raise UserError(f"{folder}: {wrong}: the files are of two tokenizers. Get them again.")
    pad, model = content_of(config.get("pad_token")), folder / "config.json"
    rows = limits.read_object(model).get("vocab_size") if model.is_file() else None
    if pad and rust.token_to_id(pad) is None and isinstance(rows, int) and rust.get_vocab_size() >= rows:
        config = {**config, "pad_token": None}
    own = {token.content for token in rust.get_added_tokens_decoder().values()}
    new = [*config["additional_special_tokens"], content_of(config.get("pad_token"))]
    for token in (*(config.get(f"{role}_token") for role in ROLES), *config["additional_special_tokens"]):
        name = content_of(token)
        if isinstance(name, str) and name not in own and (name in new or rust.token_to_id(name) is not None):
            rust.add_special_tokens([_added(token)])
    return FastTokenizer(rust, config, folder)


def _read_ours(file: Path, config: Config, name: str) -> Tokenizer:
    state = _json(file)
    try:
        specials, tokens = state["specials"], state["tokens"]
        if not all(isinstance(x, list) and all(isinstance(t, str) for t in x) for x in (specials, tokens)):
            raise TypeError("a list of texts")
        tokens = tokens[len(specials) :]
        kinds: dict[str, Callable[[], FastTokenizer]] = {
            "char": lambda: CharTokenizer(tokens, specials), "byte": lambda: ByteTokenizer(specials),
            "word": lambda: WordTokenizer(tokens, state["lowercase"], specials),
        }  # fmt: skip
        tokenizer = kinds[state["kind"]]()
    except (KeyError, TypeError) as e:
        raise _Damaged(f"{e} is missing or of the wrong type") from None
    if (whole := file.with_name("tokenizer.json")).is_file():
        tokenizer.use_post_processor(_rust(whole).post_processor)
    return tokenizer


def _read_json(file: Path, config: Config, name: str) -> Tokenizer:
    return _with_added(_rust(file), config, file.parent)


def _rust(file: Path) -> Any:
    state = _json(file)
    if "model" not in state:
        raise UserError(f"{file}: JSON without a `model`, so not a tokenizer.json. Use {KINDS}.")
    _numbers_one_could_mean(state)
    content = json.dumps(state | {"truncation": None, "padding": None})
    return _tried("tokenizer.json", lambda: package_tokenizers().Tokenizer.from_str(content))


def _tried(what: str, make: Callable[[], Any]) -> Any:
    """The package's tokenizer that `make` gives. Raises _Damaged where the package cannot make or use it."""
    try:
        rust = make()
        rust.decode(rust.encode("A word, 1 more.").ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the package raises plain Exception, and where it panics a BaseException of its own
        raise _Damaged(f"not a readable {what}: {first_line(e)[:200]}") from None
    return rust


def _numbers_one_could_mean(state: Any) -> None:
    """Raises _Damaged for an id, or any other number, that the package would reserve memory for without looking."""
    left = [state]
    while left:
        node = left.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, dict | list):
                left.append(value)
            elif isinstance(value, int) and abs(value) > limits.TOKEN_IDS:
                raise _Damaged(f"{key!r}: {value}: more than {limits.TOKEN_IDS:,}, which no number of a tokenizer is")
            elif (key == "precompiled_charsmap" and not _whole_charsmap(value)) or (key == "length" and value == 0):
                raise _Damaged(f"{key}: {value!r:.60}")


def _whole_charsmap(text: Any) -> bool:
    """Is this SentencePiece's table of normalised characters: in base64 the size of a trie in bytes, the trie, the
    characters? null is none."""
    try:
        data = base64.b64decode(text or "", validate=True)
    except (ValueError, TypeError):
        return False
    size = int.from_bytes(data[:4], "little")
    return not text or (len(data) > 4 and size % 4 == 0 and 0 < size <= len(data) - 4)


def _read_wordpiece(file: Path, config: Config, name: str) -> Tokenizer:
    """BERT's WordPiece (Devlin et al. 2019). Cased or not: tokenizer_config.json beside it says so; else a vocabulary
    with upper-case pieces is cased."""
    lines, special = _text(file), ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {line: i for i, line in enumerate(lines) if line or i < len(lines) - 1}
    if missing := ", ".join(s for s in special if s not in vocab):
        raise _Damaged(f"no {missing} in it, so not a WordPiece vocabulary with one piece a line")
    upper = any(piece != piece.lower() for piece in vocab if not piece.startswith("["))
    lowercase = bool(config.get("do_lower_case", not upper))
    chinese = bool(config.get("tokenize_chinese_chars", True))
    package, options = package_tokenizers(), {"strip_accents": config.get("strip_accents"), "lowercase": lowercase}
    made = lambda: package.BertWordPieceTokenizer(vocab, handle_chinese_chars=chinese, **options).to_str()  # noqa: E731
    rust = _tried("vocabulary of WordPiece", lambda: package.Tokenizer.from_str(made()))
    rust.add_special_tokens(special)
    return _with_added(rust, {"tokenizer_class": "BertTokenizer", **config, "do_lower_case": lowercase}, file.parent)


def _read_byte_bpe(file: Path, config: Config, name: str) -> Tokenizer:
    """GPT-2's byte-level BPE (Radford et al. 2019, section 2.2) of two files."""
    package = package_tokenizers()
    table, rules = (file.with_name(name) for name in next(pair for pair in BYTE_FILES if file.name in pair))
    for one in (table, rules):
        if not one.is_file():
            raise UserError(f"{file}: it needs {one.name} beside it, which is not there. Byte-level BPE is two files.")
    vocab = _json(table)
    merges = [tuple(line.split(" ")) for line in _text(rules) if line and not line.startswith("#version")]
    wrong = next((i for i, m in enumerate(merges) if len(m) != 2 or m[0] + m[1] not in vocab), None)
    if wrong is not None:
        raise _Damaged(f"merge {wrong + 1} of {rules.name}, {' '.join(merges[wrong])!r}, is not one of {table.name}")
    longer = sum(len(token) > 1 for token in vocab)
    if len(merges) < 0.9 * longer - 100:  # every longer token comes from a merge; a hundred or so are special
        raise _Damaged(f"{len(merges)} merges in {rules.name} for the {longer} longer tokens of {table.name}")
    rust = _tried("vocabulary of byte-level BPE", lambda: package.Tokenizer(package.models.BPE(vocab, merges)))
    split = package.pre_tokenizers
    rust.pre_tokenizer = split.ByteLevel(bool(config.get("add_prefix_space")), use_regex=name != "qwen2tokenizer")
    if name == "qwen2tokenizer":
        config = {"bos_token": None, "pad_token": END, **config}
        words = split.Split(package.Regex(QWEN2_WORDS), "isolated")
        rust.normalizer, rust.pre_tokenizer = package.normalizers.NFC(), split.Sequence([words, rust.pre_tokenizer])
    rust.decoder = package.decoders.ByteLevel()
    known = {END} & vocab.keys() if name in ("gpt2tokenizer", "qwen2tokenizer") else vocab
    usual = {f"{role}_token": token for role, tokens in USUAL.items() for token in reversed(tokens) if token in known}
    return _with_added(rust, {"tokenizer_class": "GPT2Tokenizer", **usual, **config}, file.parent)


def _read_sentencepiece(file: Path, config: Config, name: str) -> Tokenizer:
    data = file.read_bytes()
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\n", data):
        kind = "a vocabulary of tiktoken, as beside Llama 3's weights in Meta's layout, which is not read"
        raise UserError(f"{file}: {kind}. Get the model in Hugging Face's layout, with tokenizer.json.")
    if not whole_model(data):
        raise _Damaged("not a whole SentencePiece model")
    if name == "xlmrobertatokenizer":
        rust = _tried("SentencePiece model of XLM-RoBERTa", lambda: _of_fairseq(data))
        names = {f"{role}_token": token for role, token in zip(ROLES, (*SPECIALS, "<s>", "</s>"))}
        return _with_added(rust, names | config, file.parent)
    try:
        if "tokenizer_class" not in config:  # as Meta's own code does
            alone = not file.with_name("config.json").is_file()
            config |= {"add_bos_token": True, "split_special_tokens": alone} | config
        # Files that `save` wrote (extra_ids) are as read
        tokenizer = SentencePieceTokenizer(data, config, name == "llamatokenizer" and "extra_ids" not in config)
    except (RuntimeError, ValueError) as e:
        raise _Damaged(f"not a readable SentencePiece model: {first_line(e)[:200]}") from None
    if tokenizer.like_t5:
        tokenizer.around(None, tokenizer.eos_id)
    return tokenizer


def _of_fairseq(model: bytes) -> Any:
    """XLM-RoBERTa's numbers of a SentencePiece model: fairseq's four tokens stand for the model's first three, and
    <mask> is the last (Conneau et al. 2020, its published code)."""
    from sentencepiece import SentencePieceProcessor

    sp, package = SentencePieceProcessor(model_proto=model), package_tokenizers()
    if (sp.unk_id(), sp.bos_id(), sp.eos_id(), sp.pad_id()) != (0, 1, 2, -1):
        raise ValueError("its first three pieces are not <unk>, <s> and </s>")
    pieces = [(sp.id_to_piece(i), sp.get_score(i)) for i in range(3, sp.get_piece_size())]
    first, mask = (("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)), ("<mask>", 0.0)
    rust = package.Tokenizer(package.models.Unigram([*first, *pieces, mask], unk_id=3))
    if table := charsmap(model):
        rust.normalizer = package.normalizers.Precompiled(table)
    words = package.pre_tokenizers
    rust.pre_tokenizer = words.Sequence([words.WhitespaceSplit(), words.Metaspace()])
    rust.decoder = package.decoders.Metaspace()
    # the package's JSON gives some scores back with another last bit, and these again to the bit
    return package.Tokenizer.from_str(rust.to_str())


def _read_llama2c(file: Path, config: Config, name: str) -> Tokenizer:
    """llama2.c's `.bin`: `int32 longest piece`, then for each token `float32 score, int32 length, bytes`.

    Ids 0, 1, 2 are `<unk>`, `<s>`, `</s>`; 3 to 258 are the bytes; the rest are pieces with the scores of
    SentencePiece's BPE: of two pieces that could be merged the one of the higher score is. The file does not say how
    many tokens it has: one cut exactly between two is told from a whole one only by the longest that it lacks.
    """
    data, scores, pieces, at = file.read_bytes(), [], [], 4
    try:
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            pieces += struct.unpack_from(f"{length}s", data, at + 8)
            scores.append(score)
            at += 8 + length
        names = ["<unk>", "<s>", "</s>", *(piece.decode().replace(" ", "▁") for piece in pieces[3:])]
        longest = max(map(len, pieces))
        whole = struct.unpack_from("<i", data)[0] == longest and (names[3], names[258]) == ("<0x00>", "<0xFF>")
    except (struct.error, IndexError, ValueError):
        whole = False
    if not whole:
        raise _Damaged("not a whole llama2.c tokenizer")
    package, vocab = package_tokenizers(), {name: i for i, name in enumerate(names)}
    order = sorted(names[259:], key=lambda name: -scores[vocab[name]])
    halves = ((name[:cut], name[cut:]) for name in order for cut in range(1, len(name)))
    merges = [(a, b) for a, b in halves if a in vocab and b in vocab]
    rust = package.Tokenizer(package.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    rust.normalizer = package.normalizers.Sequence(
        [package.normalizers.Prepend("▁"), package.normalizers.Replace(" ", "▁")]
    )
    steps = package.decoders
    rust.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)])
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = FastTokenizer(rust, {"split_special_tokens": True}, file.parent)
    tokenizer.around(tokenizer.bos_id, None)
    return tokenizer


READERS: dict[str, tuple[str, Callable[[Path, Config, str], Tokenizer]]] = {
    OURS: ("", _read_ours), ".json": ("", _read_json), ".txt": ("WordPiece", _read_wordpiece),
    ".model": ("SentencePiece", _read_sentencepiece), ".bin": ("", _read_llama2c),
    **dict.fromkeys(itertools.chain(*BYTE_FILES), ("byte-level BPE", _read_byte_bpe)),
}  # fmt: skip
