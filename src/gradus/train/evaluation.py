"""Evaluations: a task's metrics over a whole split, and the hook that makes them during a run."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus.data.loader import Loader
from gradus.models.finite import NotFinite
from gradus.parallel.engine import Parallel
from gradus.parallel.mesh import DATA
from gradus.parallel.precision import Precision
from gradus.parallel.world import gathered
from gradus.recipe.axes import evaluation_samples
from gradus.rows import Row
from gradus.tasks.base import Task
from gradus.train import machine
from gradus.train.checkpoint import is_finite
from gradus.train.loop import Hook, Taken, Trainer
from gradus.train.metrics import so_far
from gradus.train.signals import Cut


class Evaluation(Hook):
    """Evaluates when the recipe says so, and keeps the best weights. A stop does not wait for an evaluation, which may
    take minutes: it is cut, and done first when the run goes on."""

    def start(self, trainer: Trainer) -> None:
        p = trainer.progress
        p.evaluation_due |= trainer.recipe.evaluate.at_start and p.step == 0 and not p.last_evaluation
        self._evaluate_if_due(trainer)

    def after_step(self, trainer: Trainer, taken: Taken) -> None:
        p, every = trainer.progress, trainer.recipe.evaluate.every
        if "valid" in trainer.task.splits:
            at_step = p.step % every == 0 if every else p.epoch_step == trainer.epoch_steps
            p.evaluation_due |= at_step or p.step == trainer.last_step
        if trainer.synced:
            self._evaluate_if_due(trainer)

    def _evaluate_if_due(self, trainer: Trainer) -> None:
        if trainer.progress.evaluation_due:
            trainer.together(functools.partial(self._evaluate_or_stop, trainer))
        p, patience = trainer.progress, trainer.recipe.train.patience
        if patience and p.not_better >= patience and p.step < trainer.last_step:
            trainer.last_step = p.step
            worse = f"{p.not_better} evaluation{'s' * (p.not_better > 1)} in a row without a better one"
            trainer.say(f"stopped: {worse} (train.patience)")

    def _evaluate_or_stop(self, trainer: Trainer) -> None:
        with contextlib.suppress(Cut):
            self.evaluate(trainer)

    @torch.no_grad()
    def evaluate(self, trainer: Trainer, split: str = "valid") -> dict[str, float]:
        """Every sample of the split exactly once; metrics are sums divided by counts. Collective.

        Of `valid` the best weights are kept, and a signal cuts it.
        """
        p, task, parallel = trainer.progress, trainer.task, trainer.parallel
        with trainer.clock.count("train", wait=True):
            pass  # what the device still has to do of the steps is training time
        trainer.settle()
        conditions = so_far(trainer)
        stops = split == "valid"
        with trainer.clock.count("evaluate"), trainer.signals.cutting() if stops else contextlib.nullcontext():
            between = functools.partial(self._cut_together, trainer) if stops and parallel.several else None
            if trainer.device.type == "cpu":
                machine.release_freed_memory()
            values = evaluate(parallel, task, split, trainer.precision, trainer.device, between)
        metrics = {f"{split}/{name}": value for name, value in values.items()}
        units = task.units
        rows = [Row(f"{split}/{name}", x, units.get(name, ""), p.step, conditions) for name, x in values.items()]
        line = f"step {p.step}  " + "  ".join(f"{row.name} {row.value:.4f}" for row in rows)
        shown = examples(trainer, trainer.recipe.evaluate.answers) if stops else []
        rows += [Row(f"answers/{i}", answer, step=p.step) for i, answer in enumerate(filter(None, shown))]
        trainer.log(rows, "\n  ".join([line, *filter(None, shown)]))
        if split == "valid":
            p.last_evaluation, p.evaluation_due = metrics, False
            self._keep_best(trainer)
        return metrics

    def _keep_best(self, trainer: Trainer) -> None:
        p = trainer.progress
        name, higher = chosen_by(trainer.task)
        value, sign = p.last_evaluation[name], 1 if higher else -1
        p.not_better += p.step > 0
        if p.step and is_finite(p.last_evaluation, name) and (p.best is None or sign * value > sign * p.best):
            p.best, p.best_step, p.best_metric, p.not_better = value, p.step, name, 0
            with trainer.clock.count("checkpoint"):
                trainer.at("the gathering of the best weights", p.step)
                evaluated = {"step": p.step, "metric": name, "value": value, "metrics": p.last_evaluation}
                trainer.checkpoints.save_best(trainer.parallel, trainer.task.tokenizers, evaluated)

    def _cut_together(self, trainer: Trainer) -> None:
        """Between two batches of an evaluation: raises Cut on every process once any of them was asked to stop."""
        trainer.at("the evaluation", trainer.progress.step)
        trainer.agree(trainer.parallel.all_reduce(trainer.signals.flags()))
        if trainer.signals.agreed:
            raise Cut


@torch.no_grad()
def examples(trainer: Trainer, n: int) -> list[str]:
    """Lines of what the model does on n validation samples, on the first process; elsewhere none. Collective."""
    parallel, lines = trainer.parallel, []
    if n:
        with (
            trainer.clock.count("evaluate"), trainer.precision.autocast(), parallel.whole() as model,
            contextlib.suppress(NotFinite),
        ):  # fmt: skip
            if parallel.mesh.world.first:
                lines = trainer.task.examples(model.eval(), n)
        parallel.bare.train()
    return lines


def chosen_by(task: Task) -> tuple[str, bool]:
    """(the metric that makes the best checkpoint, whether higher is better)."""
    name = task.recipe.evaluate.best or f"valid/{task.best}"
    return name, task.higher_is_better(name.split("/")[1])


@torch.no_grad()
def evaluate(
    parallel: Parallel, task: Task, split: str, precision: Precision, device: torch.device,
    between: Callable[[], None] | None = None, instead: Any = None, each: list[dict] | None = None,
) -> dict[str, float]:  # fmt: skip
    """The task's metrics over a whole split, each sample once, in evaluation mode; the model's mode is put back.

    Collective: processes take shares of every batch and sum their results; for decoding each has the whole model, and
    its own share. Where the loss, or a logit that decides a token, is not finite, all metrics are nan: what argmax
    makes of nan is no accuracy. between: called before every batch, on all alike. instead: what is called in the
    model's place (of one process). each: is given every batch's sums, metric -> (sum, count), and
    its samples.
    """
    r, mesh, model = task.recipe, parallel.mesh, parallel.bare
    writes = r.evaluate.decode and type(task).decoded_metrics is not Task.decoded_metrics
    own: dict[int, str] | None = None  # what this process writes
    was_training = model.training
    model.eval()
    totals: dict[str, list[float]] = {}
    try:
        alone = contextlib.nullcontext(instead)
        with parallel.whole() if instead is None and (task.decodes or writes) else alone as whole:
            for step in _loader(parallel, task, split).steps(0):
                if between:
                    between()
                for batch in step.micro_batches:
                    batch = precision.cast_batch(task.to_device(batch, device))
                    batch_sums = _evaluate_batch(parallel, task, batch, precision, whole if task.decodes else instead)
                    _add(totals, batch_sums)
                    if each is not None:
                        each.append({"samples": step.indices, **batch_sums})
            sums: dict[str, list[float]] = {}
            for of_process in gathered(totals):
                _add(sums, of_process)
            if not math.isfinite(sums.get("loss", [0.0])[0]):
                return dict.fromkeys(task.units, math.nan)
            metrics = task.metrics({name: total / max(1, count) for name, (total, count) in sums.items()}, split)
            if writes:
                with precision.autocast(), contextlib.suppress(NotFinite):
                    own = task.decode_split(whole, split, mesh.world.rank, mesh.world.size)
                parts = gathered(own)
                if None in parts:
                    return dict.fromkeys(task.units, math.nan)
                metrics |= task.decoded_metrics({i: text for part in parts for i, text in part.items()}, split)
    finally:
        model.train(was_training)
    return metrics


def _loader(parallel: Parallel, task: Task, split: str) -> Loader:
    r, mesh = task.recipe, parallel.mesh
    rank, world = (mesh.world.rank, mesh.world.size) if task.decodes else (mesh.rank(*DATA), mesh.size(*DATA))
    plan = task.plan(split, samples=evaluation_samples(r, world) * world, tokens=None)
    return Loader(task.splits[split], plan, task.collate, prepare=task.prepare_evaluation, rank=rank, world=world)


def _add(totals: dict[str, list[float]], sums: dict[str, tuple[float, int]]) -> None:
    for name, (value, count) in sums.items():
        total = totals.setdefault(name, [0.0, 0])
        total[0] = total[0] + value
        total[1] += count


def _on_host(value: float | Tensor) -> Any:
    """A number, or an array of several."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.double().cpu().numpy() if isinstance(value, Tensor) and value.dim() else float(value)


def _evaluate_batch(
    parallel: Parallel, task: Task, batch: dict, precision: Precision, whole: Any
) -> dict[str, tuple[float, int]]:
    """What this process adds to the metrics' (sum, count): each target once over all processes."""

    def run(model: nn.Module, batch: dict) -> dict:
        sums: dict[str, Any] = {"loss": (math.nan, 1)}
        with precision.autocast(), contextlib.suppress(NotFinite):
            sums = task.evaluate(model, batch)
        return {name: (_on_host(value), n) for name, (value, n) in sums.items()}

    context, mesh = parallel.context, parallel.mesh
    if whole is not None:
        sums = run(whole, batch)
    else:
        (batch,) = parallel.prepared([batch])
        sums = parallel.pipeline.forward(batch, run) if parallel.pipeline else run(parallel.bare, batch)
        if sums is None or mesh.rank("tensor") or (context and context.redundant and mesh.rank("context")):
            return {}
        if context and mesh.rank("context"):  # its part of the sequences; whose targets are counted once
            sums = {name: (value, 0) for name, (value, _) in sums.items()}
    return {} if "idle" in batch else sums
