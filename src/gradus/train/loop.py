"""The loop: batches become steps. What else goes on in a run are hooks of one protocol: log, evaluations, checkpoints,
proof, yours."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from gradus.data.loader import Step
from gradus.parallel.engine import Parallel
from gradus.parallel.replicate import LocalUpdates
from gradus.rows import Row
from gradus.train import machine
from gradus.train.checkpoint import Checkpoints
from gradus.train.clock import Clock
from gradus.train.schedule import rate_of
from gradus.train.signals import StopSignals
from gradus.train.step import Progress, Stepper

if TYPE_CHECKING:
    from gradus.train.session import Session

T = TypeVar("T")


@dataclasses.dataclass
class Taken:
    """One step of a run."""

    step: int  # of the run, from 1 on
    rate: float  # of learning
    loss: Tensor  # over the global batch; a scalar that stays on the device
    norm: Tensor  # of the gradient before it was clipped, likewise


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


def elements(batch: dict[str, Tensor]) -> int:
    """Of all its tensors."""
    return sum(x.numel() for x in batch.values() if isinstance(x, Tensor))


class Trainer(Stepper):
    """Trains one model on one task as a recipe says. `model` is on its device, with its layout applied: a module that
    this process has for itself, or what `Session.lay_out` made. Every process has a Trainer and calls the same methods.
    """

    def __init__(self, session: Session, model: nn.Module | Parallel, folder: Path, hooks: Sequence[Hook] = ()):
        recipe, task, device = session.recipe, session.task, session.device
        self.freed = machine.FreedMemory() if device.type == "cpu" else None
        if self.freed:
            machine.tune_memory()
        super().__init__(recipe, task, model, device, session.precision)
        self.folder = folder
        self.clock, self.signals = Clock(device), StopSignals(not self.parallel.several)
        self.checkpoints = Checkpoints(folder / "checkpoints", recipe.train.keep)
        self.loader = session.loader
        self.last_step = session.steps.total
        self.start_step = 0  # where this start began
        self.epoch_steps = 0  # of the epoch under way
        self.metrics_position = 0  # bytes of metrics.jsonl: written, or that the checkpoint of a resumed run knows of
        self.hooks = [*hooks]
        self.session = session
        self.elastic = None  # train.elastic.Elastic
        self.unsynced_tokens = 0  # of this worker, since the workers synced
        if self.parallel.local_updates:
            self.parallel.local_updates.last_step = self.last_step

    @property
    def model(self) -> nn.Module:
        """With the parameters' own names."""
        return self.parallel.bare

    def run(self) -> Progress:
        """Train to the last step. Raises Stopped after a signal that `signals` has noted, UserError on a loss that is
        not finite."""
        p = self.progress
        self.start_step = p.step
        with contextlib.closing(self.loader):
            for hook in [*self.hooks]:
                hook.start(self)
            while p.step < self.last_step:
                self.epoch_steps = len(self.loader.plan.epoch(p.epoch))
                for step in self._steps():
                    taken = self.elastic.take(step) if self.elastic else self.take(step)
                    if taken is None:
                        break
                    for hook in [*self.hooks]:  # a replica that becomes rank 0 gets one more
                        hook.after_step(self, taken)
                    if p.step == self.last_step:
                        return p
                    if self.elastic and self.elastic.between():
                        break
                else:
                    p.epoch, p.epoch_step = p.epoch + 1, 0
        return p

    def _steps(self) -> Iterator[Step]:
        """The loader's steps from where the run stands, with the time spent waiting for each counted."""
        steps = iter(self.loader.steps(self.progress.epoch, self.progress.epoch_step))
        while True:
            with self.clock.count("data"):
                step = next(steps, None)
            if step is None:
                return
            yield step

    def take(self, step: Step) -> Taken:
        """One step of a run, and the count of it in `progress`."""
        p = self.progress
        rate = rate_of(self.recipe, p.step + 1, self.last_step)
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = rate
        with self.clock.count("train"):
            self.at("the all-reduce of counts", p.step + 1)
            totals = self.totals(step.micro_batches, [*self.signals.flags(), self.checkpoints.saved()])
            if self.freed:
                self.freed.before_step(max(elements(batch) for batch in step.micro_batches))
        with contextlib.ExitStack() as around:
            for hook in self.hooks:
                around.enter_context(hook.around_step(self, step))
            with self.clock.count("train"):
                loss, norm = self.step(step.micro_batches, totals.counts)
            if self.parallel.local_updates:
                self._sync(step, self.parallel.local_updates)
        self.at("reading data", p.step + 2)
        self._know(totals.tokens, *totals.flags)
        p.step, p.epoch_step = p.step + 1, step.step + 1
        p.accumulations += len(step.micro_batches)
        p.samples += step.samples
        return Taken(p.step, rate, loss, norm)

    def _sync(self, step: Step, updates: LocalUpdates) -> None:
        """The workers of local SGD and DiLoCo sync at every step that is due, and count the tokens that all saw."""
        number = self.progress.step + 1
        self.unsynced_tokens += sum(batch["n_tokens"] for batch in step.micro_batches)
        if updates.due(number):
            with self.clock.count("train"):
                self.at("the sync of the workers", number)
                updates.sync()
                self.progress.tokens += self.parallel.all_reduce([self.unsynced_tokens])[0]
            self.unsynced_tokens = 0

    def commit(self) -> None:
        if self.elastic:
            self.elastic.commit()

    def together(self, work: Callable[[], T]) -> T:
        """What all processes do between two steps. Of replicas that come and go: again where one dies meanwhile."""
        return self.elastic.together(work) if self.elastic else work()

    def settle(self) -> None:
        """Read the totals of the latest step over all processes, once the device has been waited for. Collective."""
        if totals := self.read_totals():
            self._know(*totals)

    def _know(self, tokens: int, *flags: int) -> None:
        """Take in sums over all processes: the tokens seen, how many got each signal, and how many have a checkpoint's
        part on disk."""
        *signals, saved = flags
        self.progress.tokens += tokens
        self.agree(signals)
        if saved == self.parallel.mesh.world.size:
            self.checkpoints.finish(self.parallel)

    def agree(self, signals: Sequence[int]) -> None:
        """How many processes each signal came to. Of replicas that come and go one alone may be asked to end, by its
        host; where all are, the run is."""
        everybody = self.parallel.mesh.world.size if self.elastic else 1
        self.signals.agree([n // everybody for n in signals])

    @property
    def synced(self) -> bool:
        """Whether the weights are the run's; between two syncs of local SGD or DiLoCo they are one worker's."""
        local = self.parallel.local_updates
        return local is None or local.due(self.progress.step)

    def say(self, text: str) -> None:
        """Print a line of the run, on a terminal above the live one."""
        for hook in self.hooks:
            hook.line(text)

    def log(self, rows: list[Row], line: str | None = None) -> None:
        """Give rows, and a line to print, to the hooks, the log among them."""
        for hook in self.hooks:
            hook.logged(self, rows, line)
