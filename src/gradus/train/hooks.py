"""What goes on around the steps of a run are hooks of one protocol: log, evaluations, checkpoints, proof, yours."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from gradus.train.signals import Cut

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

    def line(self, text: str) -> None:
        """A line of the run to print, on the first process."""

    def end(self, trainer: Trainer, summary: dict[str, Any]) -> list[str]:
        """The last step is done, the last evaluation made. Returns lines to print below the summary.

        summary: what goes to summary.json once all hooks have seen it.
        """
        return []


class UserHooks(Hook):
    """A user's hooks. What one of them raises, whatever it is, asks the run to stop as SIGTERM would: the step is
    finished and all processes save. It is kept as `raised` for whoever started the run, and no hook is called again."""

    def __init__(self, hooks: Sequence[Hook]):
        self.hooks = hooks
        self.trainer: Trainer | None = None  # from the start on
        self.raised: BaseException | None = None

    @contextlib.contextmanager
    def _calling(self, trainer: Trainer) -> Iterator[Sequence[Hook]]:
        try:
            yield self.hooks if self.raised is None else ()
        except BaseException as e:
            second = isinstance(e, KeyboardInterrupt) and trainer.signals.asked  # Ctrl-C, which does not wait
            if second or isinstance(e, Cut):
                raise
            self.raised = e
            trainer.signals.asked.append(signal.SIGTERM)

    def line(self, text: str) -> None:
        if self.trainer:
            with self._calling(self.trainer) as hooks:
                for hook in hooks:
                    hook.line(text)

    def start(self, trainer: Trainer) -> None:
        self.trainer = trainer
        with self._calling(trainer) as hooks:
            for hook in hooks:
                hook.start(trainer)

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer, step: Step) -> Iterator[None]:
        with contextlib.ExitStack() as around:
            with self._calling(trainer) as hooks:
                for hook in hooks:
                    around.enter_context(hook.around_step(trainer, step))
            yield
            with self._calling(trainer):
                around.pop_all().close()

    def after_step(self, trainer: Trainer, taken: Taken) -> None:
        with self._calling(trainer) as hooks:
            for hook in hooks:
                hook.after_step(trainer, taken)

    def rows(self, trainer: Trainer) -> list[Row]:
        rows: list[Row] = []
        with self._calling(trainer) as hooks:
            for hook in hooks:
                rows += hook.rows(trainer)
        return rows

    def logged(self, trainer: Trainer, rows: list[Row], line: str | None) -> None:
        with self._calling(trainer) as hooks:
            for hook in hooks:
                hook.logged(trainer, rows, line)

    def end(self, trainer: Trainer, summary: dict[str, Any]) -> list[str]:
        lines: list[str] = []
        with self._calling(trainer) as hooks:
            for hook in hooks:
                lines += hook.end(trainer, summary)
        return lines
