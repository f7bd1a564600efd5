"""Checkpoints of a run: written when the recipe says so and before a stop, and taken up again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gradus.text import say
from gradus.train.evaluation import chosen_by
from gradus.train.loop import Hook, Taken, Trainer
from gradus.train.metrics import Metrics
from gradus.train.signals import Stopped
from gradus.train.step import Progress


class Saving(Hook):
    """Saves the run every train.checkpoint_every steps, at its end, and when it is asked to stop."""

    def __init__(self, metrics: Metrics):
        self.metrics = metrics

    def start(self, trainer: Trainer) -> None:
        if stop := trainer.signals.stop:
            raise Stopped(stop, self.save(trainer, wait=True))

    def after_step(self, trainer: Trainer, taken: Taken) -> None:
        p, every = trainer.progress, trainer.recipe.train.checkpoint_every
        if not trainer.synced:
            return
        stop, last = trainer.signals.stop, p.step == trainer.last_step
        if stop or last or (every and p.step % every == 0):
            self.metrics.flush(trainer)  # which may not be done twice
            saved = trainer.together(lambda: self.save(trainer, wait=bool(stop) or last))
            if stop and (not last or p.evaluation_due):
                raise Stopped(stop, saved)

    def save(self, trainer: Trainer, wait: bool = False) -> Path:
        """Write a checkpoint; with several processes in the background, unless `wait`. Collective."""
        self.metrics.flush(trainer)
        p = trainer.progress
        state = {"progress": dataclasses.asdict(p), "seconds": trainer.clock.seconds}
        state["metrics_position"] = trainer.metrics_position
        with trainer.clock.count("checkpoint"):
            trainer.at("the writing of a checkpoint", p.step)
            return trainer.checkpoints.save(
                p.step, trainer.parallel, trainer.task.tokenizers, trainer.optimizer, trainer.precision, state, wait
            )


def resume_run(trainer: Trainer, checkpoint: Path | None) -> None:
    """Go on from a checkpoint (None: from the start) and with the best weights that are kept. Collective."""
    if checkpoint is not None:
        state = trainer.checkpoints.load(
            checkpoint, trainer.parallel, trainer.optimizer, trainer.precision, trainer.recipe.train.seed
        )
        trainer.progress = Progress(**state["progress"])
        trainer.clock.seconds |= state["seconds"]
        trainer.metrics_position = state["metrics_position"]
    p, (metric, higher) = trainer.progress, chosen_by(trainer.task)
    # they may have been kept after the checkpoint, and by another metric: what they were evaluated to stands with them
    best = trainer.checkpoints.best(metric, higher)
    p.best, p.best_step, p.best_metric = (best["value"], best["step"], metric) if best else (None, None, None)
    if trainer.parallel.mesh.world.first:
        say(f"resumed from {checkpoint or 'the start: there is no checkpoint yet'}")
