"""What the loader's tests send to worker processes: it must be importable there."""

from __future__ import annotations

import os
import time

import numpy as np
import torch

from gradus.data.collate import pad_sequences
from gradus.errors import UserError


class Ragged:
    """Sample i holds the number i, i % 7 + 1 times."""

    name = "ragged numbers"

    def __init__(self, n: int, bad: int | None = None, error: type[Exception] = ValueError, seconds: float = 0.0):
        self.n, self.bad, self.error, self.seconds = n, bad, error, seconds
        self.lengths = np.arange(n) % 7 + 1

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i == self.bad:
            raise self.error(f"reviews.csv row {i}: no such column")
        time.sleep(self.seconds)
        return {"ids": np.full(i % 7 + 1, i), "pid": os.getpid()}


class Epochal(Ragged):
    epoch_aware = True

    def item(self, i, epoch):
        return {"ids": np.array([i, epoch]), "pid": 0}


class MyUserError(UserError):
    pass


def draw(sample, rng):
    return {**sample, "drawn": rng.integers(2**62)}


def collate(samples):
    ids, keep = pad_sequences([s["ids"] for s in samples], pad_id=-1)
    work = torch.ones(64, 64) @ torch.ones(64, 64)  # workers use torch's own threads too
    batch = {"ids": ids, "keep": keep, "pid": torch.tensor([s["pid"] for s in samples]), "work": work, "count": len(samples)}
    if "drawn" in samples[0]:
        batch["drawn"] = torch.tensor([int(s["drawn"]) for s in samples])
    return batch


def bad_collate(samples):
    raise KeyError("targets")
