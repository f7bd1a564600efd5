"""A user's hooks, of the protocol of the loop's."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gradus.data.loader import Step
from gradus.rows import Row
from gradus.train.loop import Hook, Taken, Trainer
from gradus.train.signals import Cut


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

    def _each(self, trainer: Trainer, call: Callable[[Hook], Any]) -> list[Any]:
        """What it returns of each hook, up to one that raises."""
        results = []
        with self._calling(trainer) as hooks:
            for hook in hooks:
                results.append(call(hook))
        return results

    def line(self, text: str) -> None:
        if self.trainer:
            self._each(self.trainer, lambda hook: hook.line(text))

    def start(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._each(trainer, lambda hook: hook.start(trainer))

    @contextlib.contextmanager
    def around_step(self, trainer: Trainer, step: Step) -> Iterator[None]:
        with contextlib.ExitStack() as around:
            self._each(trainer, lambda hook: around.enter_context(hook.around_step(trainer, step)))
            yield
            with self._calling(trainer):
                around.pop_all().close()

    def after_step(self, trainer: Trainer, taken: Taken) -> None:
        self._each(trainer, lambda hook: hook.after_step(trainer, taken))

    def rows(self, trainer: Trainer) -> list[Row]:
        return [row for rows in self._each(trainer, lambda hook: list(hook.rows(trainer))) for row in rows]

    def logged(self, trainer: Trainer, rows: list[Row], line: str | None) -> None:
        self._each(trainer, lambda hook: hook.logged(trainer, rows, line))

    def end(self, trainer: Trainer, summary: dict[str, Any]) -> list[str]:
        return [line for lines in self._each(trainer, lambda hook: list(hook.end(trainer, summary))) for line in lines]
