"""What is measured while a run trains: losses, speed, memory, what travels between processes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch

from gradus.data.loader import Step
from gradus.errors import UserError
from gradus.parallel.replicate import POWERSGD_START
from gradus.parallel.traffic import Traffic
from gradus.rows import Row
from gradus.text import count
from gradus.train.clock import MEASURES, peaks
from gradus.train.loop import Hook, Taken, Trainer

MEND_TRAINING = (
    "Try a smaller optimizer.lr, a longer schedule.warmup_steps, train.clip_norm=1.0, or layout.precision=bf16 or fp32"
)
HOPELESS = 100  # steps in a row that are not finite: skipping more of them will not help
COUNTED_STEP = 2  # of a start, whose traffic between processes is counted: the first one may set things up


class TrafficCount(Hook):
    """Counts what one step of a start sends to other processes; of local updates, whose workers sync every so many
    steps, a step's share of one sync."""

    def __init__(self, at: int = COUNTED_STEP):
        self.at = at
        self.counted: Traffic | None = None

    def around_step(self, trainer: Trainer, step: Step) -> contextlib.AbstractContextManager:
        if not self._due(trainer):
            return contextlib.nullcontext()
        self.counted = Traffic()
        return self.counted

    def _due(self, trainer: Trainer) -> bool:
        parallel, layout, step = trainer.parallel, trainer.recipe.layout, trainer.progress.step + 1
        if parallel.local_updates:
            return parallel.local_updates.due(step)
        at = self.at if layout.compress != "powersgd" else COUNTED_STEP + POWERSGD_START
        return parallel.several and step - trainer.start_step == at and layout.compile == "none"

    def per_step(self, trainer: Trainer) -> dict[str, tuple[float, float]] | None:
        """Collective → (calls, bytes sent) of a step; None where none was counted since the last time."""
        counted, self.counted = self.counted, None
        local = trainer.parallel.local_updates
        steps = local.every if local else 1
        return counted and {kind: (c.calls / steps, c.sent / steps) for kind, c in counted.by_kind.items()}

    def rows(self, trainer: Trainer) -> list[Row]:
        by_kind = self.per_step(trainer)
        if by_kind is None:
            return []
        step = trainer.progress.step
        of = "one step's share of a sync" if trainer.parallel.local_updates else "one step"
        conditions = {"of": of, "counted": "ring algorithms, this process"}
        rows = [
            Row(f"traffic/{kind}", sent, "bytes", step, {**conditions, "calls": calls})
            for kind, (calls, sent) in by_kind.items()
        ]
        return [*rows, Row("traffic/sent", sum(row.value for row in rows), "bytes", step, conditions)]


def so_far(trainer: Trainer) -> dict[str, float]:
    """What the run has seen so far, beside a loss or a metric: tokens, and seconds of training and waiting for data."""
    seconds = trainer.clock.seconds
    return {"tokens": trainer.progress.tokens, "seconds": round(seconds["train"] + seconds["data"], 3)}


class Metrics(Hook):
    """Reads the losses from the device now and then (the only place that waits for it), checks and logs them.

    flops_per_token, peak_flops: model operations of a token's step, and operations a second of all devices, for MFU.
    """

    beside: Callable[[], str] = staticmethod(lambda: "")  # what else a line says

    def __init__(self, flops_per_token: float | None = None, peak_flops: float | None = None):
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.pending: list[Taken] = []  # steps whose losses were not read yet
        self.in_a_row = 0  # steps that were not finite, up to now

    def start(self, trainer: Trainer) -> None:
        self.began = self.before = self._now(trainer)

    def after_step(self, trainer: Trainer, taken: Taken) -> None:
        self.pending.append(taken)
        if taken.step % trainer.recipe.log.every == 0 or taken.step == trainer.last_step:
            self.flush(trainer)

    def flush(self, trainer: Trainer) -> None:
        """Read, check and log what is pending."""
        if not self.pending:
            return
        with trainer.clock.count("train"):
            values = torch.stack([torch.stack((t.loss.float(), t.norm.float())) for t in self.pending]).tolist()
        trainer.settle()
        for taken, (loss, norm) in zip(self.pending, values):
            self._count(trainer, taken.step, loss, norm)
        taken, (loss, norm) = self.pending[-1], values[-1]
        self.pending.clear()
        before, self.before = self.before, self._now(trainer)
        elapsed, samples, tokens = (now - then for now, then in zip(self.before[:3], before))
        p, step = trainer.progress, taken.step
        rows = [
            Row("train/loss", loss, trainer.task.loss_unit, step, so_far(trainer)),
            Row("train/lr", taken.rate, "", step),
            Row("train/grad_norm", norm, "", step),
            Row("train/samples", p.samples, "samples", step),
            *(Row(f"train/{name}", p.tokens, "tokens", step) for name in trainer.task.token_names),
            Row("train/samples_per_s", samples / elapsed, "samples/s", step),
            Row("train/tokens_per_s", tokens / elapsed, "tokens/s", step),
            Row("train/data_wait", trainer.clock.seconds["data"], "s", step),
            *(Row(f"memory/{name}", value, "bytes", step) for name, value in peaks(trainer.device).items()),
        ]
        by_tokens = trainer.task.counts_tokens
        speed = f"{count(tokens / elapsed)} tokens/s" if by_tokens else f"{count(samples / elapsed)} samples/s"
        if self.flops_per_token and self.peak_flops:
            mfu = self.flops_per_token * tokens / elapsed / self.peak_flops
            conditions = {"convention": "model FLOPs, full attention, no recompute"}
            rows.append(Row("train/mfu", mfu, "of peak", step, conditions))
            speed += f"  MFU {mfu:.1%}"
        for hook in trainer.hooks:
            rows += hook.rows(trainer)
        if own := trainer.recipe.log.line:
            line = own.format(
                step=step, steps=trainer.last_step, accumulations=p.accumulations, loss=loss, lr=taken.rate,
                grad_norm=norm, samples_per_s=samples / elapsed, tokens_per_s=tokens / elapsed,
            )  # fmt: skip
        else:
            line = self._line(trainer, loss, taken.rate, speed)
        trainer.log(rows, line)

    def unread(self) -> list[tuple[int, float, float, float]]:
        """(step, rate, loss, norm) of what is pending, for a process that is to know it too."""
        return [(t.step, t.rate, float(t.loss), float(t.norm)) for t in self.pending]

    def take_over(self, trainer: Trainer, unread: list[tuple[int, float, float, float]]) -> None:
        values = [torch.tensor(numbers, device=trainer.device) for _, _, *numbers in unread]
        self.pending = [Taken(step, rate, *value) for (step, rate, *_), value in zip(unread, values)]
        self.began = self.before = self._now(trainer)

    def _line(self, trainer: Trainer, loss: float, rate: float, speed: str) -> str:
        p = trainer.progress
        spent, _, _, steps = (now - then for now, then in zip(self.before, self.began))
        left = int((trainer.last_step - p.step) * spent / max(1, steps))
        seen = f"{count(p.tokens)} tokens" if trainer.task.counts_tokens else f"{count(p.samples)} samples"
        memory, n_bytes = next(iter(peaks(trainer.device).items()))
        accumulation = f"  accumulation {p.accumulations}" if p.accumulations != p.step else ""
        return (
            f"step {p.step}/{trainer.last_step}{accumulation}  loss {loss:.4f}  lr {rate:.2e}  {speed}  {seen}"
            f"  {MEASURES[memory]} {n_bytes / 1e9:.2f} GB{self.beside()}  ETA {left // 60}:{left % 60:02d}"
        )

    def _now(self, trainer: Trainer) -> tuple[float, int, int, int]:
        """(seconds of training and waiting for data, samples, tokens, steps) so far."""
        p, seconds = trainer.progress, trainer.clock.seconds
        return seconds["train"] + seconds["data"], p.samples, p.tokens, p.step

    def _count(self, trainer: Trainer, step: int, loss: float, norm: float) -> None:
        """Raises UserError for a loss or a norm that is not finite, where it is to stop the run."""
        p = trainer.progress
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            p.loss_sum += loss
            return
        p.skipped += 1
        self.in_a_row += 1
        scaler_skips = trainer.precision.scaler is not None and math.isfinite(loss)  # it backs off by itself
        if self.in_a_row < HOPELESS and (trainer.recipe.train.on_nonfinite != "stop" or scaler_skips):
            return
        last = trainer.checkpoints.latest()
        good = f"The last good checkpoint is {last}." if last else "There is no checkpoint yet."
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        trainer.log([Row("train/nonfinite", str(loss), "", step)])
        skip = "train.on_nonfinite=skip leaves such steps out and counts them."
        raise UserError(f"step {step}: {what}. {good} {MEND_TRAINING}; {skip}")
