"""SentencePiece's models."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus import files
from gradus.data.tokenizers import ROLES, Tokenizer, content_of

# behind a model's bytes: its normalizer_spec with an empty precompiled_charsmap, and with add_dummy_prefix and
# remove_extra_whitespaces false
PLAIN = b"\x1a\x06\x12\x00\x18\x00\x20\x00"


class SentencePieceTokenizer(Tokenizer):
    """Wraps a SentencePiece `.model` (its bytes).

    config: what tokenizer_config.json holds. Of it count `extra_ids`, the sentinels that follow the pieces, the first
    of them last, as T5 has it; `added_tokens_decoder`, tokens beside the pieces, each of which is one token in a text;
    and which tokens are special (`split_special_tokens`: but not in a text). plain: a text is normalised as
    transformers' Llama does it, whatever the model says: a space in front where there is none (not with
    add_prefix_space=false; with legacy after an added token too), no more. Raises RuntimeError or ValueError for a
    model that the package cannot read.
    """

    def __init__(self, model: bytes, config: Mapping[str, Any], plain: bool):
        from sentencepiece import SentencePieceProcessor

        self.config, self.model = dict(config), model + PLAIN * plain
        self.sp = sp = SentencePieceProcessor(model_proto=self.model)
        self.plain, self.n_pieces = self.model.endswith(PLAIN), sp.get_piece_size()
        self.prefix = self.config.get("add_prefix_space") is not False
        # T5's files (padding 0, end 1, no begin) lack the 100 sentinels that its tokenizer puts after the pieces
        self.like_t5 = (sp.pad_id(), sp.eos_id(), sp.bos_id()) == (0, 1, -1)
        n = self.config["extra_ids"] = self.config.get("extra_ids", 100 if self.like_t5 else 0) or 0
        added = {self.n_pieces + i: {"content": f"<extra_id_{n - 1 - i}>", "special": True} for i in range(n)}
        if not self.config.get("split_special_tokens"):
            own = (i for i in range(self.n_pieces) if sp.is_control(i) or sp.is_unknown(i))
            added |= {i: {"content": sp.id_to_piece(i), "special": True} for i in own}
        added |= config["added_tokens_decoder"]
        self.added, self.names = added, {token["content"]: i for i, token in added.items()}
        self.vocab_size = max(self.n_pieces - 1, *added, -1) + 1
        for role in ROLES:
            name = content_of(self.config.get(f"{role}_token")) or ""
            i = self.names.get(name, sp.piece_to_id(name))
            i = getattr(sp, f"{role}_id", lambda: -1)() if i == sp.unk_id() else i
            setattr(self, f"{role}_id", None if i < 0 else i)
            self.config[f"{role}_token"] = None if i < 0 else self.token(i)
        longest_first = sorted(added.values(), key=lambda token: -len(token["content"]))
        forms = (
            r"\s*" * t.get("lstrip", 0) + r"(?<!\w)" * (alone := t.get("single_word", 0)) + re.escape(t["content"])
            + r"(?!\w)" * alone + r"\s*" * t.get("rstrip", 0) for t in longest_first
        )  # fmt: skip
        self.split = re.compile(f"({'|'.join(forms) or '(?!)'})")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self.split.split(text)):
            if i % 2:
                ids.append(self.names[part if part in self.names else part.strip()])
            else:
                ids += self.sp.encode(self._spaced(part, i == 0))
        return ids

    def _spaced(self, text: str, first: bool = True) -> str:
        """A text, or what follows an added token, with the space in front that its pieces begin with."""
        if not self.plain:
            return text if first else text.removeprefix(" ")
        lacks = self.prefix and (first or self.config.get("legacy")) and text and text[0] not in " ▁"
        return " " + text if lacks else text

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any(map(self.split.search, texts)):
            return super().encode_batch(texts)
        return self.sp.encode(list(map(self._spaced, texts)))

    def decode(self, ids: Iterable[int]) -> str:
        text, known = "", (int(i) for i in ids if i in self.added or (0 <= i < self.n_pieces and i != self.unk_id))
        for is_added, group in itertools.groupby(known, self.added.__contains__):
            run = list(group)
            if is_added:
                text += "".join(self.token(i) for i in run if not self.added[i].get("special"))
            else:
                run = [i for i in run if not self.sp.is_control(i)]
                begins_word = not self.plain and text and run and self.token(run[0])[0] == "▁"
                text += " " * bool(begins_word) + self.sp.decode(run)
        return text.removeprefix(" " * (self.plain and self.prefix))

    def token(self, i: int) -> str:
        if i in self.added:
            return self.added[int(i)]["content"]
        return self.sp.id_to_piece(int(i)) if 0 <= i < self.n_pieces else f"<{i}>"

    def sentinel(self, i: int) -> int:
        return self.names.get(f"<extra_id_{i}>") or super().sentinel(i)

    def _content(self) -> bytes:
        return self.model + json.dumps([self.names, self.config.get("legacy"), self.prefix]).encode()

    def save(self, folder: str | Path) -> None:
        """Write the model under the name that Hugging Face's T5 or Llama tokenizer looks for, and its settings."""
        super().save(folder)
        folder = Path(folder)
        name, kind = ("spiece.model", "T5Tokenizer") if self.like_t5 else ("tokenizer.model", "LlamaTokenizer")
        (folder / name).write_bytes(self.model)
        around = {"add_bos_token": bool(self.before), "add_eos_token": bool(self.after)}
        files.write_json(folder / "tokenizer_config.json", {"tokenizer_class": kind, **self.config, **around})


def whole_model(data: bytes) -> bool:
    """Is this a whole ModelProto of sentencepiece_model.proto? A file cut between two pieces still parses, but lacks
    what comes after them: field 2, how it was trained, and field 3, how text is normalised."""
    try:
        fields = {field for field, _ in _fields(data)}
    except IndexError:
        return False
    # Every field is a message, written with its length: 8 times its number, and 2.
    return fields >= {0x0A, 0x12, 0x1A} and all(field & 7 == 2 for field in fields)


def charsmap(model: bytes) -> bytes:
    """How a whole model normalises characters: precompiled_charsmap, empty where it does not."""
    return dict(_fields(dict(_fields(model))[0x1A])).get(0x12, b"")


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(8 times its number and its type, content) of each field of a message whose fields are numbers, of which the
    content is empty, or have their length written. Raises IndexError where it is cut."""
    at = 0
    while at < len(data):
        field, number = data[at], 0
        for place in range(10):  # seven bits a byte, the lowest first
            byte, at = data[at + 1], at + 1
            number |= (byte & 127) << 7 * place
            if byte < 128:
                break
        start = at + 1
        at = start + (number if field & 7 == 2 else 0)
        if at > len(data):
            raise IndexError("cut within a field")
        yield field, data[start:at]
