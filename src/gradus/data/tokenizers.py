"""Text to token ids and back: one small protocol over characters, words, bytes, and Hugging Face's `tokenizers`.

`tokenizer_files.load(path)` reads whatever a checkpoint brings; `train_bpe` makes one from text.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus import files, limits
from gradus.errors import InputError, UserError, did_you_mean

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
PIECE = 1 << 20  # characters that are encoded as one text
ROLES = ("pad", "bos", "eos", "unk", "mask", "cls", "sep")
OURS = "gradus_tokenizer.json"  # the file that holds a table
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"  # Hugging Face's

# How special tokens are called where no tokenizer_config.json names them.
USUAL = {
    "pad": ("[PAD]", "<pad>"),
    "bos": ("<s>", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<|endoftext|>"),
    "unk": ("[UNK]", "<unk>", "<|endoftext|>"),
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
    # the ids that stand around a text as a model reads it, where the files say so: see `with_special_tokens`
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    # texts that are kept with it, by the names of their files: chat templates, and of a checkpoint's what ends a text
    beside: Mapping[str, str] = {}
    special_in_text = True  # is the name of a special token in a text that token?

    def encode(self, text: str) -> list[int]:
        """The ids of a text. No special tokens are added."""
        raise NotImplementedError

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once; the fast way."""
        return [self.encode(text) for text in texts]

    def with_special_tokens(self, ids: Iterable[int]) -> list[int]:
        """The ids of a text with those that its model reads before and after it, as the tokenizer's own files say
        (transformers' `AutoTokenizer(text)`)."""
        return [*self.before, *ids, *self.after]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids. Special tokens, and ids that no token has, are left out."""
        raise NotImplementedError

    def token(self, i: int) -> str:
        """How one token is written in the vocabulary; `<i>` for an id without one (a vocabulary padded to a round
        size)."""
        raise NotImplementedError

    def sentinel(self, i: int) -> int:
        """The id of T5's `<extra_id_i>` (Raffel et al. 2020, section 3.1.4). Raises UserError where there is none."""
        lacks = f"The tokenizer has no sentinel <extra_id_{i}>, which span corruption needs"
        raise UserError(f"{lacks}. Use T5's, or train one with sentinels.")

    def around(self, first: int | None, last: int | None) -> None:
        """Put these tokens around a text, here and in other engines that read the saved files, where the files say
        none."""
        if not (self.before or self.after):
            self.before, self.after = ([i for i in [one] if i is not None] for one in (first, last))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of all that decides the ids: equal fingerprints, equal ids."""
        ids = json.dumps({role: getattr(self, f"{role}_id") for role in ROLES})
        return hashlib.sha256(f"{type(self).__name__} {ids} ".encode() + self._content()).hexdigest()

    def _content(self) -> bytes:
        raise NotImplementedError

    def save(self, folder: str | Path) -> None:
        """Write the files from which `load(folder)` gives this tokenizer back, and what is kept `beside`. What would be
        taken for this one's is deleted: a table, a chat template."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in (OURS, TEMPLATE):
            (Path(folder) / name).unlink(missing_ok=True)
        for name, text in self.beside.items():
            (file := Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            files.write_text(file, text)


def last_border(text: str, start: int = 0, stop: int = sys.maxsize) -> int:
    """The last place where text[start:stop] can be cut and byte-level BPE and WordPiece give the same tokens: a line's
    end, else before a space; `start` where there is none. (SentencePiece sees a word begin at each piece, which may
    change the token there.)"""
    for border in (r"(?s:.*)(?:\S\n(?=\S)|\n(?= \S))", r"(?s:.*)\S(?= \S)"):
        if match := re.compile(border).match(text, start, stop):
            return match.end()
    return start


def pieces(text: str) -> Iterator[str]:
    """The text in pieces of at most PIECE characters, cut at borders of tokens where there are any."""
    start = 0
    while len(text) - start > PIECE:
        stop = last_border(text, start, start + PIECE)
        stop = stop if stop > start else start + PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


# ---------------------------------------------------------------- Hugging Face tokenizers


@functools.cache
def package_tokenizers():
    """The package `tokenizers`, made safe to fork: a child of a process that used its threads encodes on one thread."""
    import tokenizers as package

    key, before_fork = "TOKENIZERS_PARALLELISM", []

    def before() -> None:
        before_fork.append({key: os.environ[key]} if key in os.environ else {})
        os.environ[key] = "false"

    def after() -> None:
        del os.environ[key]
        os.environ.update(before_fork.pop())

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=after)
    return package


def content_of(token: Any) -> Any:
    """The text of a token that a file names: by itself, or as an AddedToken in JSON."""
    return token.get("content") if isinstance(token, dict) else token


class FastTokenizer(Tokenizer):
    """Wraps a `tokenizers.Tokenizer` (WordPiece, BPE, Unigram).

    `config` is what tokenizer_config.json holds: `pad_token`, `bos_token` ... name the special tokens; where it says
    nothing of a role, the usual names are looked for among the special tokens. `folder`, where it was read from, is
    named in errors.
    """

    def __init__(self, tokenizer, config: dict[str, Any] | None = None, folder: Path | None = None):
        where = folder or "tokenizer"
        tokenizer.no_truncation()  # a tokenizer.json may bring both, and would cut and pad in silence
        tokenizer.no_padding()
        self.rust = tokenizer
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        if not vocab:
            raise UserError(f"{where}: a tokenizer without any token. Get the file again.")
        self.vocab_size = max(vocab.values()) + 1
        special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        self.config = dict(config or {})
        tokenizer.encode_special_tokens = bool(self.config.get("split_special_tokens"))
        self.special_in_text = not tokenizer.encode_special_tokens
        for role in ROLES:
            name = content_of(self.config.get(f"{role}_token", next((n for n in USUAL[role] if n in special), None)))
            if name is not None and (not isinstance(name, str) or name not in vocab):
                meant = did_you_mean(str(name)[:60], special)
                raise UserError(f"{where}: {role}_token {name!r:.60} is not in the vocabulary.{meant}")
            setattr(self, f"{role}_id", vocab.get(name))
            self.config[f"{role}_token"] = name
        self.use_post_processor(tokenizer.post_processor)

    def use_post_processor(self, post_processor: Any) -> None:
        """Put the same tokens around a text as this post-processor of the package does."""
        self.rust.post_processor = post_processor
        for probe in ("a", *self.rust.get_vocab()) if post_processor else ():
            encoding = self.rust.encode(probe)
            if inside := [i for i, text in enumerate(encoding.sequence_ids) if text is not None]:
                self.before, self.after = encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]
                break

    def encode(self, text: str) -> list[int]:
        return self.rust.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self.rust.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        return self.rust.decode([int(i) for i in ids], skip_special_tokens=True)

    def token(self, i: int) -> str:
        return self.rust.id_to_token(int(i)) or f"<{i}>"

    def sentinel(self, i: int) -> int:
        place = self.rust.token_to_id(f"<extra_id_{i}>")
        return super().sentinel(i) if place is None else place

    def around(self, first: int | None, last: int | None) -> None:
        if self.before or self.after or first is last is None:
            return
        super().around(first, last)
        a, b = ([self.token(i) for i in ids] for ids in (self.before, self.after))
        self.rust.post_processor = package_tokenizers().processors.TemplateProcessing(
            single=[*a, "$A", *b], pair=[*a, "$A", *b, "$B:1", *(f"{name}:1" for name in b)],
            special_tokens=[(self.token(i), i) for i in {*self.before, *self.after}],
        )  # fmt: skip

    def _content(self) -> bytes:
        return self.rust.to_str().encode() + b" split" * self.rust.encode_special_tokens

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which Hugging Face's AutoTokenizer reads too."""
        super().save(folder)
        folder = Path(folder)
        files.write_text(folder / "tokenizer.json", self.rust.to_str(pretty=True))
        # transformers takes an empty added_tokens_decoder for the whole, and reads no token of tokenizer.json
        settings = {k: v for k, v in self.config.items() if v not in (None, [], {})}
        files.write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"} | settings)


# ---------------------------------------------------------------- tables: characters, words, bytes


class TableTokenizer(FastTokenizer):
    """A look-up from token to id. `specials` come first, or after the 256 bytes. Without `<unk>` among them, what is
    not in the vocabulary is an error."""

    kind: str

    def __init__(self, rust, tokens: list[str], specials: Sequence[str]):
        if len(tokens) == len(specials):
            raise UserError(f"tokenizer: no {self.kind} in the text to build the vocabulary from. Give a longer text.")
        rust.add_special_tokens(list(specials))
        self.tokens, self.specials = tokens, tuple(specials)
        as_roberta = {"cls_token": "<s>", "sep_token": "</s>"} if {"<s>", "</s>"} <= {*specials} else {}
        super().__init__(rust, {"split_special_tokens": True, **as_roberta})
        self.table = dict(zip(tokens, range(len(tokens))))

    def parts(self, text: str) -> Sequence[str]:
        """What a text is made of."""
        return text

    def encode(self, text: str) -> list[int]:
        ids = [self.table.get(part, self.unk_id) for part in self.parts(text)]
        if None in ids:
            lacks = f"The {self.kind} {self.parts(text)[ids.index(None)]!r} is not in the vocabulary"
            mend = "Use one that covers every text (tokenizer.kind=byte or bpe)"
            raise InputError(f"{lacks} of {self.vocab_size}, which has no <unk>. {mend}.")
        return ids

    encode_batch = Tokenizer.encode_batch

    def _state(self) -> dict[str, Any]:
        return {"kind": self.kind, "specials": list(self.specials), "tokens": self.tokens}

    def save(self, folder: str | Path) -> None:
        """Write our own small JSON, which `load` prefers, and tokenizer.json for other engines."""
        super().save(folder)
        files.write_text(Path(folder) / OURS, json.dumps(self._state(), ensure_ascii=False))


class CharTokenizer(TableTokenizer):
    """One token a character."""

    kind = "char"

    def __init__(self, characters: Iterable[str], specials: Sequence[str] = ()):
        package, tokens = package_tokenizers(), [*specials, *characters]
        unknown = "<unk>" if "<unk>" in specials else None
        rust = package.Tokenizer(package.models.BPE(dict(zip(tokens, range(len(tokens)))), [], unk_token=unknown))
        rust.decoder = package.decoders.Fuse()
        super().__init__(rust, tokens, specials)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> CharTokenizer:
        """The sorted characters of `texts`. Raises UserError where there are none."""
        return cls(sorted(set(itertools.chain.from_iterable(texts))))


class WordTokenizer(TableTokenizer):
    """One token a word between white space; a line's end is a token of its own."""

    kind = "word"

    def __init__(self, words: Iterable[str], lowercase: bool = False, specials: Sequence[str] = SPECIALS):
        package, tokens, self.lowercase = package_tokenizers(), [*specials, *words], lowercase
        unknown, table = "<unk>" if "<unk>" in specials else "", dict(zip(tokens, range(len(tokens))))
        rust = package.Tokenizer(package.models.WordLevel(table, unknown))
        rust.pre_tokenizer = package.pre_tokenizers.Split(package.Regex(r"\n|\S+"), "removed", invert=True)
        if lowercase:
            rust.normalizer = package.normalizers.Lowercase()
        super().__init__(rust, tokens, specials)

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], lowercase: bool = False, specials: Sequence[str] = SPECIALS
    ) -> WordTokenizer:
        """The words of `texts` in the order of their first use. Raises UserError where there are none."""
        words = (word for text in texts for word in re.findall(r"\n|\S+", text.lower() if lowercase else text))
        return cls(list(dict.fromkeys((*specials, *words)))[len(specials) :], lowercase, specials)

    def parts(self, text: str) -> list[str]:
        return re.findall(r"\n|\S+", text.lower() if self.lowercase else text)

    def decode(self, ids: Iterable[int]) -> str:
        return re.sub(r" ?\n ?", "\n", super().decode(ids))

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "lowercase": self.lowercase}


class ByteTokenizer(TableTokenizer):
    """The 256 bytes of UTF-8, then the special tokens."""

    kind = "byte"

    def __init__(self, specials: Sequence[str] = ("<pad>", "<s>", "</s>", "<mask>")):
        package = package_tokenizers()
        # The visible letter of each byte (Radford et al. 2019, section 2.2): itself, or the next one from U+0100 on.
        alphabet = set(package.pre_tokenizers.ByteLevel.alphabet())
        others = iter(sorted(letter for letter in alphabet if ord(letter) > 255))
        letters = [chr(b) if chr(b) in alphabet else next(others) for b in range(256)]
        rust = package.Tokenizer(package.models.BPE(dict(zip([*letters, *specials], range(256 + len(specials)))), []))
        rust.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        rust.decoder = package.decoders.ByteLevel()
        super().__init__(rust, [*(f"<0x{i:02X}>" for i in range(256)), *specials], specials)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))


def train_bpe(
    texts: Iterable[str], vocab_size: int, lowercase: bool = False, specials: Sequence[str] = ()
) -> FastTokenizer:
    """Byte-level BPE (Sennrich et al. 2016; bytes as in Radford et al. 2019) trained on `texts`, which are streamed.

    The first ids are `<pad> <s> </s> <unk> <mask>` and then `specials`. A small text may not have `vocab_size` tokens
    in it; the result's `vocab_size` is what there is. Raises UserError where `vocab_size` leaves no room for the 256
    bytes.
    """
    package = package_tokenizers()
    names = [*SPECIALS, *(s for s in specials if s not in SPECIALS)]
    least = 256 + len(names)
    if vocab_size < least:
        raise UserError(f"tokenizer.vocab_size={vocab_size} is less than the {least} of bytes and special tokens.")
    rust = package.Tokenizer(package.models.BPE())
    if lowercase:
        rust.normalizer = package.normalizers.Lowercase()
    words = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    long = "|".join(rf"{kind}{{{limits.WORD}}}" for kind in (r"\p{L}", r"\p{N}", r"[^\s\p{L}\p{N}]", r"\s"))
    split = package.pre_tokenizers.Split(package.Regex(long), "isolated")
    rust.pre_tokenizer = package.pre_tokenizers.Sequence([split, words])
    rust.decoder = package.decoders.ByteLevel()
    alphabet = package.pre_tokenizers.ByteLevel.alphabet()
    added = [package.AddedToken(name, lstrip=name == "<mask>", special=True) for name in names]
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=added, initial_alphabet=alphabet, show_progress=False
    )
    rust.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    rust.pre_tokenizer = words
    if rust.get_vocab_size() <= least:
        raise UserError("tokenizer: the text to train on is empty or too small for a merge. Use tokenizer.kind=byte.")
    return FastTokenizer(rust, {f"{role}_token": name for role, name in zip(ROLES, (*SPECIALS, "<s>", "</s>"))})
