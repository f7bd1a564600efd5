"""Data made from a seed."""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import numpy as np


class CopyDataset:
    """Sequences of symbols 1 .. n_symbols-1 that are to be copied; 0 is padding and start.

    Items: dict of int64 arrays `source` (length,), `target_in` and `target_out`. start="zero": the decoder starts from
    symbol 0: target_in = [0] + data[:-1], target_out = data, both (length,). start="first": place 0 always holds symbol
    1, which starts the decoder (the annotated Transformer's copy task): target_in = data[:-1], target_out = data[1:].

    Item i is a pure function of (seed, split, i). A seeded permutation divides the possible sequences: a tenth of them
    belongs to split="valid", the rest to split="train", so a held-out sequence is never in the training set.
    """

    def __init__(
        self,
        n: int,
        n_symbols: int,
        length: int,
        seed: int,
        start: Literal["zero", "first"] = "zero",
        split: Literal["train", "valid"] = "train",
    ):
        assert n_symbols >= 3 and length >= 2 and start in ("zero", "first") and split in ("train", "valid")
        self.n, self.n_symbols, self.length = n, n_symbols, length
        self.seed, self.start, self.split = seed, start, split
        self.name = f"copy/{split}"
        self.base, self.drawn = n_symbols - 1, length - (start == "first")
        self.total = self.base**self.drawn  # possible sequences, at least 2
        held_out = max(1, self.total // 10)
        self.low, self.high = (0, held_out) if split == "valid" else (held_out, self.total)
        # x → (multiplier · x + offset) mod total permutes 0 .. total-1, as multiplier and total have no common divisor.
        self.multiplier = self._random("multiplier", self.total) or 1
        while math.gcd(self.multiplier, self.total) != 1:
            self.multiplier += 1
        self.offset = self._random("offset", self.total)

    def _random(self, what: str, below: int) -> int:
        """A number in [0, below) that depends on (seed, what) alone; SHAKE is the counter-based generator of any width.
        64 bits more than needed make the remainder uniform to 2^-64."""
        digest = hashlib.shake_256(f"copy {self.seed} {what}".encode()).digest(below.bit_length() // 8 + 9)
        return int.from_bytes(digest, "little") % below

    @property
    def lengths(self) -> np.ndarray:
        return np.full(self.n, self.length)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < self.n:
            raise IndexError(i)
        chosen = self.low + self._random(f"{self.split} {i}", self.high - self.low)
        code = (self.multiplier * chosen + self.offset) % self.total
        data = np.ones(self.length, dtype=np.int64)
        for place in range(self.length - self.drawn, self.length):
            code, digit = divmod(code, self.base)
            data[place] = digit + 1
        if self.start == "first":
            return {"source": data, "target_in": data[:-1], "target_out": data[1:]}
        return {"source": data, "target_in": np.concatenate(([0], data[:-1])), "target_out": data}
