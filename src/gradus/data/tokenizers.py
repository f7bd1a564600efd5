"""Text to token ids and back: one small protocol over characters, words, bytes, Hugging Face `tokenizers`, SentencePiece and llama2.c files.

`load(path)` reads whatever a checkpoint brings; `train_bpe` makes one from text.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import json
import os
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradus import limits
from gradus.errors import DataError, UserError, did_you_mean

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")
OURS = "gradus_tokenizer.json"
FILES = (
    OURS,
    "tokenizer.json",
    "vocab.txt",
    "encoder.json",
    "vocab.json",
    "spiece.model",
    "tokenizer.model",
    "tokenizer.bin",
)  # looked for in a folder, in this order

# How special tokens are called where no tokenizer_config.json names them.
USUAL = {
    "pad": ("[PAD]", "<pad>"),
    "bos": ("<s>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("[UNK]", "<unk>"),
    "mask": ("[MASK]", "<mask>"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
}


class Tokenizer:
    """What every tokenizer is. Ids of special tokens that it does not have are None."""

    vocab_size: int  # the highest id + 1
    pad_id: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    mask_id: int | None = None
    cls_id: int | None = None
    sep_id: int | None = None

    def encode(self, text: str) -> list[int]:
        """The ids of a text. No special tokens are added."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once; the fast way."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special tokens, and ids that no token has, are left out."""
        raise NotImplementedError

    def token(self, i: int) -> str:
        """How one token is written in the vocabulary; `<i>` for an id that no token has (a vocabulary padded to a round size)."""
        raise NotImplementedError

    def sentinel(self, i: int) -> int:
        """The id of T5's `<extra_id_i>` (Raffel et al. 2020, section 3.1.4). Raises UserError where there is none."""
        raise UserError(f"The tokenizer has no sentinel <extra_id_{i}>, which span corruption needs. Use T5's, or train one with sentinels.")

    def around(self, first: int, last: int) -> None:
        """Let other engines that read the saved files put these tokens around a text, as the model was trained, where the files do not yet say."""

    @property
    def fingerprint(self) -> str:
        """A hash of all that decides the ids: equal fingerprints, equal ids."""
        if "_fingerprint" not in self.__dict__:
            ids = json.dumps({role: getattr(self, f"{role}_id") for role in ROLES})
            self._fingerprint = hashlib.sha256(f"{type(self).__name__} {ids} ".encode() + self._content()).hexdigest()
        return self._fingerprint

    def _content(self) -> bytes:
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        """Write the files from which `load(folder)` gives this tokenizer back."""
        raise NotImplementedError


# ---------------------------------------------------------------- tables: characters, words, bytes


class TableTokenizer(Tokenizer):
    """A look-up from token to id. `specials` come first, or after the 256 bytes."""

    kind: str
    tokens: list[str]
    specials: tuple[str, ...]

    def _index(self) -> None:
        self.table = {token: i for i, token in enumerate(self.tokens)}
        for role in ("pad", "bos", "eos", "unk", "mask"):
            name = next((n for n in USUAL[role] if n in self.specials), None)
            setattr(self, f"{role}_id", self.table[name] if name is not None else None)
        self.cls_id, self.sep_id = self.bos_id, self.eos_id  # as RoBERTa has it
        self.special_ids = frozenset(self.table[s] for s in self.specials)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def token(self, i: int) -> str:
        return self.tokens[i] if 0 <= i < len(self.tokens) else f"<{i}>"

    def sentinel(self, i: int) -> int:
        name = f"<extra_id_{i}>"
        return self.table[name] if name in self.specials else super().sentinel(i)

    def _state(self) -> dict[str, Any]:
        return {"kind": self.kind, "specials": list(self.specials), "tokens": self.tokens}

    def _content(self) -> bytes:
        return json.dumps(self._state()).encode()

    def _rust(self):
        """The same tokenizer as a `tokenizers.Tokenizer`, for other engines."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        """Write our own small JSON, which `load` prefers, and tokenizer.json for other engines."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OURS).write_text(json.dumps(self._state(), ensure_ascii=False), encoding="utf-8")
        FastTokenizer(self._rust(), {f"{role}_token": self._name(role) for role in ROLES}).save(folder)

    def _name(self, role: str) -> str | None:
        i = getattr(self, f"{role}_id")
        return None if i is None else self.tokens[i]


class CharTokenizer(TableTokenizer):
    """One token a character. Without `<unk>` among the specials, a character that is not in the vocabulary is an error."""

    kind = "char"

    def __init__(self, characters: Iterable[str], specials: Sequence[str] = ()):
        self.specials = tuple(specials)
        self.tokens = [*self.specials, *characters]
        self._index()

    @classmethod
    def from_texts(cls, texts: Iterable[str], specials: Sequence[str] = ()) -> CharTokenizer:
        """The sorted characters of `texts`. Raises UserError where there are none."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        if not characters:
            raise UserError("tokenizer: the text to read the characters off is empty. Give a text that is not.")
        return cls(sorted(characters), specials)

    def encode(self, text: str) -> list[int]:
        if self.unk_id is not None:
            return [self.table.get(c, self.unk_id) for c in text]
        try:
            return list(map(self.table.__getitem__, text))
        except KeyError as e:
            raise UserError(
                f"The character {e.args[0]!r} (U+{ord(e.args[0]):04X}) is not in the vocabulary of {self.vocab_size} characters. "
                "Leave it out, or use a tokenizer that knows every text (tokenizer.kind=byte or bpe)."
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.tokens[i] for i in ids if 0 <= i < len(self.tokens) and i not in self.special_ids)

    def _rust(self):
        package = _tokenizers()
        rust = package.Tokenizer(package.models.BPE(self.table, [], unk_token=self._name("unk")))
        rust.decoder = package.decoders.Fuse()
        return rust


class WordTokenizer(TableTokenizer):
    """One token a word between white space; a line's end is a token of its own. The look-up grows while `frozen` is False."""

    kind = "word"

    def __init__(self, words: Iterable[str] = (), lowercase: bool = False, specials: Sequence[str] = SPECIALS, frozen: bool = False):
        self.specials, self.lowercase, self.frozen = tuple(specials), lowercase, frozen
        self.tokens = [*self.specials, *words]
        self._index()

    @classmethod
    def from_texts(cls, texts: Iterable[str], lowercase: bool = False, specials: Sequence[str] = SPECIALS) -> WordTokenizer:
        """The words of `texts` in the order of their first use, frozen. Raises UserError where there are none."""
        tokenizer = cls(lowercase=lowercase, specials=specials)
        for text in texts:
            tokenizer.encode(text)
        if tokenizer.vocab_size == len(specials):
            raise UserError("tokenizer: the text to read the words off is empty. Give a text that is not.")
        tokenizer.frozen = True
        return tokenizer

    def encode(self, text: str) -> list[int]:
        words = re.findall(r"\n|\S+", text.lower() if self.lowercase else text)
        if not self.frozen:
            for word in words:
                if word not in self.table:
                    self.table[word] = len(self.tokens)
                    self.tokens.append(word)
                    self.__dict__.pop("_fingerprint", None)
            return [self.table[word] for word in words]
        if self.unk_id is not None:
            return [self.table.get(word, self.unk_id) for word in words]
        for word in words:
            if word not in self.table:
                raise UserError(f"The word {word!r} is not in the vocabulary of {self.vocab_size} words, which has no <unk>.")
        return [self.table[word] for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        text = " ".join(self.tokens[i] for i in ids if 0 <= i < len(self.tokens) and i not in self.special_ids)
        return re.sub(r" ?\n ?", "\n", text)

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "lowercase": self.lowercase, "frozen": self.frozen}

    def _rust(self):
        package = _tokenizers()
        rust = package.Tokenizer(package.models.WordLevel(self.table, unk_token=self._name("unk") or ""))
        rust.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(r"\n|\S+"), "removed", invert=True)
        if self.lowercase:
            rust.normalizer = package.normalizers.Lowercase()
        return rust


class ByteTokenizer(TableTokenizer):
    """The 256 bytes of UTF-8, then the special tokens."""

    kind = "byte"

    def __init__(self, specials: Sequence[str] = ("<pad>", "<s>", "</s>", "<mask>")):
        self.specials = tuple(specials)
        self.tokens = [*(f"<0x{i:02X}>" for i in range(256)), *self.specials]
        self._index()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if 0 <= i < 256).decode("utf-8", errors="replace")

    def _rust(self):
        package, letters = _tokenizers(), byte_letters()
        rust = package.Tokenizer(package.models.BPE({letters[i] if i < 256 else t: i for i, t in enumerate(self.tokens)}, []))
        rust.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rust.decoder = package.decoders.ByteLevel()
        return rust


def byte_letters() -> list[str]:
    """The visible letter that byte-level BPE writes for each byte (Radford et al. 2019, section 2.2): printable Latin-1 letters stand
    for themselves, the others for U+0100 and up."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


# ---------------------------------------------------------------- Hugging Face tokenizers


def _tokenizers():
    """The package `tokenizers`, made safe to fork: a child of a process that used its threads encodes on one thread."""
    global _fork_safe
    import tokenizers as package

    if not _fork_safe:
        key, kept = "TOKENIZERS_PARALLELISM", []

        def before() -> None:
            kept.append(os.environ.get(key))
            os.environ[key] = "false"

        def after() -> None:
            value = kept.pop()
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=before, after_in_parent=after)
        _fork_safe = True
    return package


_fork_safe = False


class FastTokenizer(Tokenizer):
    """Wraps a `tokenizers.Tokenizer` (WordPiece, BPE, Unigram).

    `config` is what tokenizer_config.json holds: `pad_token`, `bos_token` ... name the special tokens; where it says nothing of a role,
    the usual names are looked for among the special tokens. `folder`, where it was read from, is named in errors.
    """

    def __init__(self, tokenizer, config: dict[str, Any] | None = None, folder: Path | None = None):
        tokenizer.no_truncation()  # a tokenizer.json may bring both, and would cut and pad in silence
        tokenizer.no_padding()
        self.rust = tokenizer
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise UserError(f"{folder or 'tokenizer'}: a tokenizer without one token. Get the file again.")
        self.vocab_size = max(vocab.values()) + 1
        special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        self.config = dict(config or {})
        for role in ROLES:
            name = self.config.get(f"{role}_token", False)
            if isinstance(name, dict):  # an AddedToken as JSON
                name = name.get("content")
            if not (name is False or name is None or isinstance(name, str)):
                raise UserError(f"{folder or 'tokenizer'}: {role}_token {name!r:.60} is not text.")
            if name is False:
                name = next((n for n in USUAL[role] if n in special), None)
            if name is not None and name not in vocab:
                raise UserError(f"{folder or 'tokenizer'}: {role}_token {name!r} is not in the vocabulary.{did_you_mean(name, special)}")
            setattr(self, f"{role}_id", None if name is None else vocab[name])
            self.config[f"{role}_token"] = name

    def encode(self, text: str) -> list[int]:
        return self.rust.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self.rust.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.rust.decode([int(i) for i in ids], skip_special_tokens=True)

    def token(self, i: int) -> str:
        return self.rust.id_to_token(int(i)) or f"<{i}>"

    def sentinel(self, i: int) -> int:
        found = self.rust.token_to_id(f"<extra_id_{i}>")
        return super().sentinel(i) if found is None else found

    def around(self, first: int, last: int) -> None:
        if self.rust.post_processor is None:
            a, b = self.token(first), self.token(last)
            special = [(a, first), (b, last)]
            template = _tokenizers().processors.TemplateProcessing
            self.rust.post_processor = template(single=f"{a} $A {b}", pair=f"{a} $A {b} $B:1 {b}:1", special_tokens=special)

    def _content(self) -> bytes:
        return self.rust.to_str().encode()

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which Hugging Face's AutoTokenizer reads too."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.rust.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | {k: v for k, v in self.config.items() if v is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def train_bpe(texts: Iterable[str], vocab_size: int, lowercase: bool = False, specials: Sequence[str] = ()) -> FastTokenizer:
    """Byte-level BPE (Sennrich et al. 2016; bytes as in Radford et al. 2019) trained on `texts`, which are streamed.

    The first ids are `<pad> <s> </s> <unk> <mask>` and then `specials`. A small text may not have `vocab_size` tokens in it; the result's
    `vocab_size` is what there is. Raises UserError where `vocab_size` leaves no room for the 256 bytes.
    """
    package = _tokenizers()
    names = [*SPECIALS, *(s for s in specials if s not in SPECIALS)]
    least = 256 + len(names)
    if vocab_size < least:
        raise UserError(f"tokenizer.vocab_size={vocab_size} is less than the {least} of bytes and special tokens. Use {least} or more.")
    rust = package.Tokenizer(package.models.BPE())
    if lowercase:
        rust.normalizer = package.normalizers.Lowercase()
    rust.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    trainer = package.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    rust.train_from_iterator(texts, trainer)
    if rust.get_vocab_size() <= least:
        raise UserError("tokenizer: the text to train on is empty or too small for a single merge. Give more text, or use tokenizer.kind=byte.")
    return FastTokenizer(rust, {f"{role}_token": name for role, name in zip(ROLES, (*SPECIALS, "<s>", "</s>"))})


# ---------------------------------------------------------------- SentencePiece


class SentencePieceTokenizer(Tokenizer):
    """Wraps a SentencePiece `.model` (its bytes). `extra_ids` sentinels follow the pieces, the first of them last, as T5 has it."""

    def __init__(self, model: bytes, extra_ids: int = 0):
        self.model, self.extra_ids = model, extra_ids
        from sentencepiece import SentencePieceProcessor

        self.sp = SentencePieceProcessor(model_proto=model)
        self.n_pieces = self.sp.get_piece_size()
        self.vocab_size = self.n_pieces + extra_ids
        for role in ("pad", "bos", "eos", "unk"):
            i = getattr(self.sp, f"{role}_id")()
            setattr(self, f"{role}_id", None if i < 0 else i)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self.extra_ids and any("<extra_id_" in text for text in texts):
            return [self._with_sentinels(text) for text in texts]
        return self.sp.encode(list(texts))

    def _with_sentinels(self, text: str) -> list[int]:
        parts = re.split(r"<extra_id_(\d+)>", text)
        ids = self.sp.encode(parts[0])
        for number, part in zip(parts[1::2], parts[2::2]):
            ids += [self.sentinel(int(number)), *self.sp.encode(part)]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.sp.decode([int(i) for i in ids if 0 <= i < self.n_pieces and i != self.unk_id and not self.sp.is_control(int(i))])

    def token(self, i: int) -> str:
        if self.n_pieces <= i < self.vocab_size:
            return f"<extra_id_{self.vocab_size - 1 - i}>"
        return self.sp.id_to_piece(int(i)) if 0 <= i < self.n_pieces else f"<{i}>"

    def sentinel(self, i: int) -> int:
        return self.vocab_size - 1 - i if 0 <= i < self.extra_ids else super().sentinel(i)

    def _content(self) -> bytes:
        return self.model + str(self.extra_ids).encode()

    def save(self, folder: str | Path) -> None:
        """Write the model under the name that Hugging Face's T5 or Llama tokenizer looks for, and tokenizer_config.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        name, kind = ("spiece.model", "T5Tokenizer") if self.extra_ids else ("tokenizer.model", "LlamaTokenizer")
        (folder / name).write_bytes(self.model)
        config: dict[str, Any] = {"tokenizer_class": kind, "extra_ids": self.extra_ids}
        for role in ("pad", "bos", "eos", "unk"):
            i = getattr(self, f"{role}_id")
            config[f"{role}_token"] = None if i is None else self.token(i)
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _whole_model(data: bytes) -> bool:
    """Is this a whole SentencePiece ModelProto? A file cut between two pieces still parses, but lacks what comes after them:
    field 2, how it was trained, and field 3, how text is normalised."""
    at, fields = 0, set()

    def number() -> int:
        nonlocal at
        value = shift = 0
        while shift < 64:  # a varint has at most ten bytes
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value
        raise IndexError

    try:
        while at < len(data):
            tag = number()
            if tag & 7 != 2:  # every field of a ModelProto is a message, written with its length
                return False
            length = number()
            at += length
            fields.add(tag >> 3)
    except IndexError:
        return False
    return at == len(data) and fields >= {1, 2, 3}


# ---------------------------------------------------------------- llama2.c


class Llama2cTokenizer(Tokenizer):
    """The `.bin` of llama2.c: `int32 longest piece`, then for each token `float32 score, int32 length, bytes`.

    Ids 0, 1, 2 are `<unk>`, `<s>`, `</s>`; 3 to 258 are the bytes; the rest are pieces, joined by score as SentencePiece's BPE does: of all
    neighbours that together are a piece, those of the highest score first, the leftmost of equals. What is no piece then falls to bytes.
    The file does not say how many tokens it has: one cut exactly between two is told from a whole one only by the longest that it lacks.
    """

    bos_id, eos_id, unk_id = 1, 2, 0

    def __init__(self, data: bytes, name: str = "tokenizer.bin"):
        self.data = data
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        try:
            (longest,) = struct.unpack_from("<i", data)
            at = 4
            while at < len(data):
                score, length = struct.unpack_from("<fi", data, at)
                at += 8 + length
                if length < 0 or at > len(data):
                    raise ValueError
                self.pieces.append(data[at - length : at])
                self.scores.append(score)
            whole = max(map(len, self.pieces)) == longest and self.pieces[3] == b"<0x00>" and self.pieces[258] == b"<0xFF>"
            self.table = {piece.decode(): i for i, piece in enumerate(self.pieces) if i > 258}
            if not whole:
                raise ValueError
        except (struct.error, ValueError, IndexError):
            raise UserError(f"{name}: not a whole llama2.c tokenizer (truncated, or of another kind). Get the file again.") from None
        self.vocab_size = len(self.pieces)
        # Where no piece goes on after a space, text falls into words that can be joined one by one, and each only once.
        parted = not any(" " in piece.lstrip(" ") for piece in self.table if piece.strip(" "))
        self.split = re.compile(r" *[^ ]+| +" if parted else r"(?s).+").findall
        self.known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        if not text:
            return []
        ids: list[int] = []
        for word in self.split(" " + text.replace("▁", " ")):  # SentencePiece writes a space as ▁, so the two are one to it
            if word not in self.known:
                if len(self.known) >= 1 << 17:
                    self.known.clear()
                self.known[word] = self._join(word)
            ids += self.known[word]
        return ids

    def _join(self, word: str) -> list[int]:
        parts, n = list(word), len(word)
        after, before = list(range(1, n + 1)), list(range(-1, n - 1))
        queue: list[tuple[float, int, str]] = []

        def consider(left: int) -> None:
            if left >= 0 and after[left] < n:
                piece = parts[left] + parts[after[left]]
                if piece in self.table:
                    heapq.heappush(queue, (-self.scores[self.table[piece]], left, piece))

        for left in range(n - 1):
            consider(left)
        while queue:
            _, left, piece = heapq.heappop(queue)
            right = after[left]
            if not parts[left] or right >= n or parts[left] + parts[right] != piece:
                continue  # one of the two has been joined to another since
            parts[left], parts[right], after[left] = piece, "", after[right]
            if after[right] < n:
                before[after[right]] = left
            consider(before[left])
            consider(left)
        ids: list[int] = []
        for part in filter(None, parts):
            i = self.table.get(part)
            ids += [b + 3 for b in part.encode("utf-8")] if i is None else [i]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        parts, first = [], True  # the first piece, at the start or after <s>, has a space that the text has not
        for i in ids:
            if 2 < i < self.vocab_size:
                part = bytes([i - 3]) if i < 259 else self.pieces[i]
                parts.append(part.removeprefix(b" ") if first else part)
            first = i == self.bos_id or (first and i <= 2)
        return b"".join(parts).decode("utf-8", errors="replace")

    def token(self, i: int) -> str:
        return self.pieces[i].decode("utf-8", errors="replace").strip("\n") or "\n" if 0 <= i < self.vocab_size else f"<{i}>"

    def _content(self) -> bytes:
        return self.data

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.bin (llama2.c's own form; Hugging Face has none for it)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.bin").write_bytes(self.data)


# ---------------------------------------------------------------- load

KINDS = "tokenizer.json, vocab.txt, encoder.json + vocab.bpe, vocab.json + merges.txt, a SentencePiece .model or a llama2.c .bin"


def load(path: str | Path) -> Tokenizer:
    """The tokenizer of a folder or a file: tokenizer.json, vocab.txt (BERT's WordPiece), encoder.json + vocab.bpe or vocab.json + merges.txt
    (byte-level BPE), SentencePiece `.model`, llama2.c `.bin`, or what `save` wrote.

    Raises UserError where there is none, or where a file is of an unknown kind, truncated or corrupt.
    """
    path = Path(os.path.expanduser(path))
    if not path.exists():
        near = did_you_mean(path.name, os.listdir(path.parent)) if path.parent.is_dir() else f" There is no folder {path.parent} either."
        raise DataError(f"{path}: no such file or folder to read a tokenizer from.{near}")
    file = _find(path) if path.is_dir() else path
    read = _reader(file)
    try:
        return read(limits.regular(file, limits.TOKENIZER_FILE))
    except OSError as e:
        raise DataError(f"{file}: cannot be read ({e.strerror}).") from None


def _find(folder: Path) -> Path:
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    others = sorted(p for p in folder.iterdir() if p.suffix == ".model" or (p.suffix == ".bin" and p.name.startswith("tok")))
    if len(others) == 1:
        return others[0]
    if others:
        raise UserError(f"{folder}: several tokenizers ({', '.join(p.name for p in others)}). Name the one to use.")
    there = ", ".join(sorted(p.name for p in folder.iterdir())[:10]) or "nothing"
    raise UserError(f"{folder}: no tokenizer in this folder, only {there}. A tokenizer is {KINDS}.")


def _reader(file: Path):
    name = file.name
    if name == OURS:
        return _read_ours
    if name in ("encoder.json", "vocab.json", "vocab.bpe", "merges.txt"):
        return _read_byte_bpe
    if name == "tokenizer_config.json":
        raise UserError(f"{file}: this names a tokenizer's settings, not its tokens. Give the folder.")
    if file.suffix in (".json", ".txt", ".model", ".bin"):
        return {".json": _read_json, ".txt": _read_wordpiece, ".model": _read_sentencepiece, ".bin": _read_llama2c}[file.suffix]
    raise UserError(f"{file}: not a kind of tokenizer that is known. Use {KINDS}.")


def _json(file: Path) -> dict[str, Any]:
    try:
        found = limits.read_json(file, limits.TOKENIZER_FILE)
    except UserError as e:
        raise UserError(f"{e} Truncated or corrupt: get the file again.") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: holds a {type(found).__name__}, not an object. Use {KINDS}.")
    return found


def _config(folder: Path) -> dict[str, Any]:
    """What the files beside a tokenizer say of it."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            config |= _json(folder / name)
    more, extra = config.get("additional_special_tokens") or [], config.get("extra_ids") or 0
    config["additional_special_tokens"] = [t.get("content") if isinstance(t, dict) else t for t in more] if isinstance(more, list) else [None]
    if not all(isinstance(t, str) for t in config["additional_special_tokens"]):
        raise UserError(f"{folder}: additional_special_tokens {more!r:.60} is not a list of texts.")
    if isinstance(extra, bool) or not isinstance(extra, int) or not 0 <= extra <= limits.TOKEN_IDS:
        raise UserError(f"{folder}: extra_ids {extra!r:.60} is not a whole number from 0 to {limits.TOKEN_IDS:,}.")
    return config if more else {k: v for k, v in config.items() if k != "additional_special_tokens"}


def _read_ours(file: Path) -> Tokenizer:
    state = _json(file)
    try:
        specials = state["specials"]
        if not all(isinstance(x, list) and all(isinstance(t, str) for t in x) for x in (specials, state["tokens"])):
            raise TypeError("a list of texts")
        tokens = state["tokens"][len(specials) :]
        if state["kind"] == "char":
            return CharTokenizer(tokens, specials)
        if state["kind"] == "word":
            return WordTokenizer(tokens, state["lowercase"], specials, state["frozen"])
        if state["kind"] == "byte":
            return ByteTokenizer(specials)
        raise UserError(f"{file}: kind {state['kind']!r} is not known.{did_you_mean(state['kind'], ('char', 'word', 'byte'))}")
    except (KeyError, TypeError) as e:
        raise UserError(f"{file}: {e} is missing or of the wrong type: not a file that Gradus wrote. Get the file again.") from None


def _read_json(file: Path) -> Tokenizer:
    state = _json(file)
    if "model" not in state:
        raise UserError(f"{file}: JSON without a `model`, so not a tokenizer.json. Use {KINDS}.")
    _numbers_one_could_mean(state, file)
    package = _tokenizers()
    try:
        rust = package.Tokenizer.from_str(json.dumps(state | {"truncation": None, "padding": None}))
    except BaseException as e:  # the package raises plain Exception, and where it panics a BaseException of its own
        if isinstance(e, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(f"{file}: not a readable tokenizer.json ({_first_line(e)}). Get the file again.") from None
    tokenizer = FastTokenizer(rust, _config(file.parent), file.parent)
    try:
        tokenizer.decode(tokenizer.encode("A word, 1 more."))
    except BaseException as e:  # a panic of the package: better here than in the middle of the data
        if isinstance(e, KeyboardInterrupt | SystemExit):
            raise
        raise UserError(f"{file}: a tokenizer that cannot encode a text ({_first_line(e)}). Get the file again.") from None
    return tokenizer


def _numbers_one_could_mean(state: Any, file: Path) -> None:
    """Raises UserError for an id, or any other number, that the package would reserve memory for without looking."""
    left = [state]
    while left:
        node = left.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, dict | list):
                left.append(value)
            elif isinstance(value, int) and abs(value) > limits.TOKEN_IDS:
                raise UserError(f"{file}: {key!r}: {value}: more than {limits.TOKEN_IDS:,}, so no id of a token. Get the file again.")
            elif key == "precompiled_charsmap" and not _whole_charsmap(value):
                raise UserError(f"{file}: precompiled_charsmap: not a whole one. Get the file again.")
            elif key == "length" and value == 0:
                raise UserError(f"{file}: a pre_tokenizer of length 0. Get the file again.")


def _whole_charsmap(text: Any) -> bool:
    """Is this SentencePiece's table of normalised characters: in base64 the size of a trie in bytes, the trie, the characters? null is none."""
    try:
        data = base64.b64decode(text or "", validate=True)
    except (ValueError, TypeError):
        return False
    size = int.from_bytes(data[:4], "little")
    return not text or (len(data) > 4 and size % 4 == 0 and 0 < size <= len(data) - 4)


def _read_wordpiece(file: Path) -> Tokenizer:
    """BERT's WordPiece (Devlin et al. 2019). Cased or not: tokenizer_config.json beside it says so; else a vocabulary with upper-case
    pieces is cased."""
    package = _tokenizers()
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{file}: not text, so not a WordPiece vocabulary. Use {KINDS}.") from None
    vocab = {line.rstrip("\r"): i for i, line in enumerate(lines) if line or i < len(lines) - 1}
    missing = [s for s in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if s not in vocab]
    if missing:
        raise UserError(f"{file}: no {', '.join(missing)} in it, so not a whole WordPiece vocabulary (one piece a line). Use {KINDS}.")
    config = _config(file.parent)
    upper = any(piece != piece.lower() for piece in vocab if not piece.startswith("["))
    lowercase = bool(config.get("do_lower_case", not upper))
    rust = package.Tokenizer(package.models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    rust.normalizer = package.normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True)),
        strip_accents=config.get("strip_accents"),
        lowercase=lowercase,
    )
    rust.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    rust.decoder = package.decoders.WordPiece(prefix="##")
    rust.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    rust.post_processor = package.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[(s, vocab[s]) for s in ("[CLS]", "[SEP]")]
    )
    return FastTokenizer(rust, {"tokenizer_class": "BertTokenizer", **config, "do_lower_case": lowercase}, file.parent)


def _read_byte_bpe(file: Path) -> Tokenizer:
    """GPT-2's byte-level BPE (Radford et al. 2019, section 2.2) of two files."""
    package = _tokenizers()
    names = ("encoder.json", "vocab.bpe") if file.name in ("encoder.json", "vocab.bpe") else ("vocab.json", "merges.txt")
    table, rules = (file.parent / name for name in names)
    for one, other in ((table, rules), (rules, table)):
        if not one.is_file():
            raise UserError(f"{other}: it needs {one.name} beside it, which is not there. Byte-level BPE is two files.")
    vocab = _json(table)
    try:
        lines = rules.read_text(encoding="utf-8").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{rules}: not text, so not a list of merges. Get the file again.") from None
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    bad = next((i for i, m in enumerate(merges) if len(m) != 2 or m[0] + m[1] not in vocab), None)
    if bad is not None:
        raise UserError(f"{rules}: merge {bad + 1} ({' '.join(merges[bad])!r}) is not one of {table.name}: truncated, or of another tokenizer.")
    longer = sum(len(token) > 1 for token in vocab)
    if len(merges) < 0.9 * longer - 100:  # every longer token comes from a merge; a hundred or so are special
        raise UserError(f"{rules}: {len(merges)} merges for the {longer} longer tokens of {table.name}: truncated. Get the file again.")
    try:
        rust = package.Tokenizer(package.models.BPE(vocab, merges))
    except Exception as e:
        raise UserError(f"{table}: not a vocabulary of byte-level BPE ({_first_line(e)}).") from None
    config = _config(file.parent)
    rust.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space", False)))
    rust.decoder = package.decoders.ByteLevel()
    special = [t for t in (*config.get("additional_special_tokens", []), *(s for names in USUAL.values() for s in names)) if t in vocab]
    rust.add_special_tokens(list(dict.fromkeys(special)))
    if "unk_token" not in config and "<|endoftext|>" in vocab:
        config["unk_token"] = "<|endoftext|>"
    return FastTokenizer(rust, {"tokenizer_class": "GPT2Tokenizer", **config}, file.parent)


def _read_sentencepiece(file: Path) -> Tokenizer:
    data = file.read_bytes()
    if not _whole_model(data):
        raise UserError(f"{file}: not a whole SentencePiece model (truncated, corrupt or of another kind). Get the file again.")
    try:
        tokenizer = SentencePieceTokenizer(data)
    except (RuntimeError, ValueError) as e:
        raise UserError(f"{file}: not a readable SentencePiece model ({_first_line(e)}). Get the file again.") from None
    # T5's files (padding 0, end 1, no begin) do not hold the 100 sentinels that its tokenizer puts after the pieces.
    like_t5 = (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id) == (0, 1, None)
    extra_ids = _config(file.parent).get("extra_ids", 100 if like_t5 else 0)
    return SentencePieceTokenizer(data, int(extra_ids)) if extra_ids else tokenizer


def _read_llama2c(file: Path) -> Tokenizer:
    return Llama2cTokenizer(file.read_bytes(), str(file))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
