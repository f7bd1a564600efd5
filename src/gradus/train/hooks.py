"""What goes on around the steps of a run are hooks of one protocol: log, evaluations, checkpoints, proof, yours."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradus.data.loader import Step
    from gradus.rows import Row
    from gradus.train.loop import Taken, Trainer


class Hook:
    """Override what you need: here, every method does nothing. The hooks of a run are called one after the other, in
    the same order on every process, so that they may use collectives. A hook that raises ends the run."""

    def start(self, trainer: Trainer) -> None:
        """Before the first step of this start; a run that is resumed stands where it goes on."""

    def around_step(self, trainer: Trainer, step: Step) -> AbstractContextManager:
        """Entered for every step: its passes and its update happen within."""
        return contextlib.nullcontext()

    def after_step(self, trainer: Trainer, taken: Taken) -> None:
        """A step is done, and counted in `trainer.progress`."""

    def rows(self, trainer: Trainer) -> list[Row]:
        """What is logged beside the loss, every log.every steps."""
        return []

    def logged(self, trainer: Trainer, rows: list[Row], line: str | None) -> None:
        """Rows, and a line to print: of the training (`train/loss` first; the device is idle) or of an evaluation."""

    def end(self, trainer: Trainer, summary: dict[str, Any]) -> list[str]:
        """The last step is done, the last evaluation made. Returns lines to print below the summary.

        summary: what goes to summary.json once all hooks have seen it.
        """
        return []
