"""Local SGD and DiLoCo: workers take steps by themselves and sync now and then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradus.parallel.replicate import LocalUpdates
from gradus.train.hooks import Hook

if TYPE_CHECKING:
    from gradus.data.loader import Step
    from gradus.train.loop import Trainer


class LocalSync(Hook):
    """Syncs the workers at every step that is due, and counts the tokens that all of them saw since the last sync."""

    def __init__(self, updates: LocalUpdates, last_step: int):
        self.updates, self.tokens = updates, 0
        updates.last_step = last_step

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer, step: Step) -> Iterator[None]:
        yield
        number = trainer.progress.step + 1
        self.tokens += sum(batch["n_tokens"] for batch in step.micro_batches)
        if self.updates.due(number):
            with trainer.clock.count("train"):
                trainer.at("the sync of the workers", number)
                self.updates.sync()
                trainer.progress.tokens += trainer.parallel.all_reduce([self.tokens])[0]
            self.tokens = 0
