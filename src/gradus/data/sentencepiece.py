"""SentencePiece's models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradus import files
from gradus.data.tokenizers import Tokenizer


class SentencePieceTokenizer(Tokenizer):
    """Wraps a SentencePiece `.model` (its bytes). `extra_ids` sentinels follow the pieces, the first of them last, as
    T5 has it. Raises RuntimeError or ValueError for a model that the package cannot read."""

    def __init__(self, model: bytes, extra_ids: int = 0):
        from sentencepiece import SentencePieceProcessor

        self.model, self.extra_ids = model, extra_ids
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
        known = [int(i) for i in ids if 0 <= i < self.n_pieces and i != self.unk_id]
        return self.sp.decode([i for i in known if not self.sp.is_control(i)])

    def token(self, i: int) -> str:
        if self.n_pieces <= i < self.vocab_size:
            return f"<extra_id_{self.vocab_size - 1 - i}>"
        return self.sp.id_to_piece(int(i)) if 0 <= i < self.n_pieces else f"<{i}>"

    def sentinel(self, i: int) -> int:
        return self.vocab_size - 1 - i if 0 <= i < self.extra_ids else super().sentinel(i)

    def _content(self) -> bytes:
        return self.model + str(self.extra_ids).encode()

    def save(self, folder: str | Path) -> None:
        """Write the model under the name that Hugging Face's T5 or Llama tokenizer looks for, and its settings."""
        super().save(folder)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        name, kind = ("spiece.model", "T5Tokenizer") if self.extra_ids else ("tokenizer.model", "LlamaTokenizer")
        (folder / name).write_bytes(self.model)
        config: dict[str, Any] = {"tokenizer_class": kind, "extra_ids": self.extra_ids}
        for role in ("pad", "bos", "eos", "unk"):
            i = getattr(self, f"{role}_id")
            config[f"{role}_token"] = None if i is None else self.token(i)
        files.write_json(folder / "tokenizer_config.json", config)


def whole_model(data: bytes) -> bool:
    """Is this a whole ModelProto of sentencepiece_model.proto? A file cut between two pieces still parses, but lacks
    what comes after them: field 2, how it was trained, and field 3, how text is normalised."""
    at, fields = 0, set()
    try:
        while at < len(data):
            fields.add(data[at])
            length = 0
            for place in range(10):  # seven bits a byte, the lowest first
                byte, at = data[at + 1], at + 1
                length |= (byte & 127) << 7 * place
                if byte < 128:
                    break
            at += 1 + length
    except IndexError:
        return False
    # Every field is a message, written with its length: 8 times its number, and 2.
    return at == len(data) and fields >= {0x0A, 0x12, 0x1A} and all(field & 7 == 2 for field in fields)
