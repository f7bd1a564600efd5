"""Local SGD and DiLoCo: workers take steps by themselves and sync now and then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradus.data.loader import Step
from gradus.parallel.replicate import LocalUpdates
from gradus.train.hooks import Hook

if TYPE_CHECKING:
    from gradus.train.loop import Trainer


class LocalSync(Hook):
    """Syncs the workers at every step that is due, and then counts the tokens that all of them saw since the last sync."""

    def __init__(self, updates: LocalUpdates, last_step: int):
        self.updates, self.tokens = updates, 0
        updates.last_step = last_step

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer, step: Step) -> Iterator[None]:
        yield
        p = trainer.progress
        with trainer.clock.count("train"):
            self.tokens += sum(batch["n_tokens"] for batch in step.micro_batches)
            if self.updates.due(p.step + 1):
                trainer.at("the sync of the workers", p.step + 1)
                self.updates.sync()
                (tokens,) = trainer.parallel.all_reduce([self.tokens])
                p.tokens += tokens
                self.tokens = 0
