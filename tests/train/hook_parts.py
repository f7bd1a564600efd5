"""A run of five steps for hooks, and what one of them keeps."""

from __future__ import annotations

import torch

from gradus.rows import Row
from gradus.train.hooks import Hook
from gradus.train.loop import Taken

TINY = [
    "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.dropout=0.0", "data.n_train=48", "data.n_valid=8",
    "schedule.warmup_steps=2", "batch.samples=16", "layout.device=cpu", "layout.threads=1", "train.steps=5", "train.checkpoint_every=3",
    "evaluate.every=2", "evaluate.samples=0", "log.every=2",
]  # fmt: skip


class Kept(Hook):
    def __init__(self):
        self.rows_logged: list[Row] = []

    def logged(self, trainer, rows, line):
        self.rows_logged += rows


def taken(step: int, loss: float, norm: float = 1.0) -> Taken:
    return Taken(step, 1e-3, torch.tensor(loss), torch.tensor(norm))
