"""From a recipe to a model that can be trained: open (resolve what only data and weights know), build, lay out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from typing import Any

import torch
from torch import nn

from gradus import limits, models, tasks
from gradus.data.loader import Loader, Plan
from gradus.errors import UserError, did_you_mean
from gradus.models.values import Deferred
from gradus.parallel import check
from gradus.parallel import world as worlds
from gradus.parallel.apply import apply, backend
from gradus.parallel.device import pick_device
from gradus.parallel.engine import Parallel
from gradus.parallel.mesh import DATA, Mesh, needed, single_process, sizes
from gradus.parallel.precision import Precision
from gradus.parallel.world import World
from gradus.recipe.check import with_warmup_below
from gradus.recipe.schema import Layout, Recipe
from gradus.tasks.base import Task
from gradus.text import parameters, say
from gradus.train.schedule import rate_of


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """How the training samples become the steps of a run, and a step the micro-batches of a process."""

    order: Plan
    total: int
    samples: int  # of a step; where batch.tokens limits it, about so many
    micro_batch: int  # samples at most
    accumulation: int

    @classmethod
    def of(cls, recipe: Recipe, order: Plan, processes: int) -> StepPlan:
        """processes: those that see different samples."""
        samples = min(recipe.batch.samples or max(1, round(order.n / order.steps_per_epoch)), order.n)
        share = -(-samples // processes)
        micro = min(recipe.layout.micro_batch or share, share)
        return cls(order, order.total_steps(recipe.train), samples, micro, -(-share // micro))


@dataclasses.dataclass
class Session:
    """A resolved recipe with its task, device, precision, processes and steps."""

    recipe: Recipe
    task: Task
    device: torch.device
    precision: Precision
    mesh: Mesh
    steps: StepPlan

    def deferred(self, values: bool = True) -> Deferred:
        """The model before it has memory, with the values it starts from: the paper's initialisation drawn from the
        recipe's seed, or `model.init`'s weights. values=False: none, since a checkpoint's will be read (with an
        adapter it holds what is trained alone)."""
        config, seed = self.recipe.model, self.recipe.train.seed
        start = models.load_start(config, seed) if values else Deferred(models.build(config, "meta"), None)
        start.model.config = start.model.config.named(getattr(self.recipe.task, "classes", None))
        self.precision.cast(start.model)
        return start

    def build(self) -> nn.Module:
        """The whole model with its values on this process's device, not changed by the layout."""
        torch.manual_seed(self.recipe.train.seed)  # for dropout
        return self.deferred().on(self.device)

    def lay_out(self, start: Deferred | None = None) -> Parallel:
        """The model, this process's part of it, with the layout applied, ready to be trained. Collective."""
        start = start or self.deferred()
        more = {"device": self.device, "values": start.values, "qat": self.recipe.train.qat}
        layout = self.recipe.layout
        if self.mesh.world.newcomer and layout.shard > 1:  # it is laid out with those that it will meet
            return Parallel(start.model, layout, self.mesh)
        more["replicas"] = not layout.elastic or layout.shard > 1  # else they meet when the trainer is there
        parallel = apply(start.model, layout, self.mesh, **more)
        self.mesh.seed_dropout(self.recipe.train.seed)
        parallel.bare.train()
        return parallel

    @functools.cached_property
    def loader(self) -> Loader:
        """Of this process's share of the training samples, as the recipe batches and loads them."""
        r, task = self.recipe, self.task
        micro = self.steps.micro_batch if r.layout.elastic else r.layout.micro_batch  # fewer replicas, as large ones
        place = {"rank": self.mesh.rank(*DATA), "world": self.mesh.size(*DATA), "micro_batch": micro}
        more = {"prepare": task.prepare, "loading": r.data}
        return Loader(task.splits["train"], self.steps.order, task.collate, **more, **place)


def open_session(recipe: Recipe, tokenizers: dict | None = None, world: World = World()) -> Session:
    """Open the data, complete the recipe from it, choose device and precision, and count the steps.

    Collective: the processes of `world` have met. Raises UserError for anything in the recipe that the data, the
    weights, this machine or the number of processes cannot follow.
    """
    device = _open_device(recipe.layout, world)
    with worlds.one_first(world):  # caches of tokens, and what is known of large files, are made once per host
        if recipe.adapter and world.size > 1:
            models.digest(models.base_of(recipe.model))
        task = tasks.open_task(recipe, tokenizers)
    _inherit(task, recipe, world)
    if recipe.evaluate.test and "test" not in task.splits:
        mend = "Give data.test=FILE, or leave out evaluate.test=true (evaluate: --split test)"
        raise UserError(f"these data have no test split. {mend}.")
    best, known = recipe.evaluate.best, [f"valid/{metric}" for metric in task.units]
    if best is not None and best not in known:
        raise UserError(f"evaluate.best={best}: no such metric here.{did_you_mean(best, known)}")
    if recipe.data.workers > (processors := limits.processors()) and world.first:
        say(f"note: data.workers={recipe.data.workers} share {processors} processors")
    resolved = task.resolved(recipe.model_copy(update={"model": task.complete(recipe.model)}))
    check.validate(resolved, world.size)  # once more, now that every size is known
    precision = Precision(recipe.layout.precision, device)
    mesh = Mesh.make(recipe.layout, world, device.type)
    order = task.plan("train", resolved.batch.samples, resolved.batch.tokens)
    steps = StepPlan.of(resolved, order, mesh.size(*DATA))
    warmup, resolved = resolved.schedule.warmup_steps, with_warmup_below(resolved, steps.total)
    if warmup != resolved.schedule.warmup_steps and world.first:
        change = f"schedule.warmup_steps={resolved.schedule.warmup_steps} instead of {warmup}"
        say(f"note: {change}, to fit a run of {steps.total} steps", sys.stderr)
    task.recipe = resolved
    return Session(resolved, task, device, precision, mesh, steps)


def _inherit(task: Task, recipe: Recipe, world: World) -> None:
    """Keep with the run what lies beside the weights of model.init: where the model stops, how it is spoken to."""
    place = None
    with contextlib.suppress(UserError):  # a run that is resumed does without them
        place = recipe.model.init and models.locate(recipe.model.init)
    if place and place.is_dir() and (lost := tasks.inherit(task.tokenizers, place)) and world.first:
        say(f"note: {' and '.join(lost)} of model.init left out: its tokenizer is another", sys.stderr)


def _open_device(layout: Layout, world: World) -> torch.device:
    """This process's device, with the threads and the arithmetic that the layout asks for."""
    local, allowed = world.local_size, limits.processors()  # srun and mpirun may bind each process
    processors = int(min(os.cpu_count() or 1, limits.cpu_quota())) if local > 1 else allowed
    if layout.threads:
        limits.start_threads(layout.threads, f"layout.threads={layout.threads}")
        torch.set_num_threads(layout.threads)
        if world.first and layout.threads * local > processors:
            threads = f"layout.threads={layout.threads}" + f" in each of {local} processes" * (local > 1)
            limit = f"{processors} processor{'s' * (processors > 1)} allowed here"
            waits = f"more than the {limit}, so threads wait for each other"
            say(f"note: {threads}: {waits}. Use {max(1, processors // local)}.", sys.stderr)
    elif world.size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(allowed, processors // local)))
    device = pick_device(layout.device)
    if device.type == "cuda":
        # a launcher may show each process one GPU only
        device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.backends.cudnn.allow_tf32 = layout.tf32  # true by default: ViT's patches would not be fp32
    if layout.tf32:
        torch.set_float32_matmul_precision("high")
    return device


def open_for(recipe: Recipe, n: int | None = None) -> Session:
    """The session of one of `n` processes (None: as many as the layout's axes need), opened by this one alone, to look
    at and not to train."""
    n = n or needed(recipe.layout)
    check.validate(recipe, n)
    one = open_session(recipe.model_copy(update={"layout": single_process(recipe.layout)}))
    recipe = one.recipe.model_copy(update={"layout": recipe.layout})
    mesh = Mesh(World(size=n), sizes(recipe.layout, n))
    steps = StepPlan.of(recipe, one.steps.order, mesh.size(*DATA))
    return dataclasses.replace(one, recipe=recipe, mesh=mesh, steps=steps)


def derive(session: Session) -> dict[str, Any]:
    """What follows from the recipe: parameters, steps, tokens, micro-batch, accumulation, the schedule's end."""
    r, task, mesh, steps = session.recipe, session.task, session.mesh, session.steps
    rate = [rate_of(r, step, steps.total) for step in (1, steps.total)]
    counts = models.count(r.model)
    simple = r.layout.shard_with == "simple"
    of_all = Loader(task.splits["train"], steps.order, task.collate, prepare=task.prepare)
    return {
        "parameters": counts["total"],
        "trained_parameters": models.trainable(r.model),
        "parameters_by_component": {k: v for k, v in counts.items() if k != "total" and v},
        "train_samples": steps.order.n,
        "valid_samples": len(task.splits["valid"]) if "valid" in task.splits else None,
        "steps_per_epoch": steps.order.steps_per_epoch,
        "steps": steps.total,
        "epochs": round(steps.total / steps.order.steps_per_epoch, 3),
        "samples_per_step": steps.samples if r.batch.samples else f"about {steps.samples}",
        "tokens_first_step": sum(b["n_tokens"] for b in of_all.look(0, 0).micro_batches),  # without padding
        "micro_batch": steps.micro_batch,
        "accumulation": steps.accumulation,
        "processes": mesh.world.size,
        "layout": mesh.describe() + (f", SimpleFSDP by {backend(session.device)}" if simple else ""),
        "learning_rate": {"first_step": rate[0], "last_step": rate[1]},
        "schedule_end": r.schedule.end_step or steps.total,
        "device": str(session.device),
        "precision": r.layout.precision,
    }


def describe(derived: dict[str, Any]) -> str:
    """The lines printed before step 0."""
    d = derived

    def count(n: float, unit: str) -> str:
        number = f"{n:g}" if isinstance(n, float) else f"{n:,}"
        return f"{number} {unit}" if n == 1 else f"{number} {unit}s"

    rate, several = d["learning_rate"], f"; {d['processes']} processes: {d['layout']}" if d["processes"] > 1 else ""
    return (
        f"{parameters(d['parameters'], d['trained_parameters'])}; {count(d['train_samples'], 'training sample')}, "
        f"{count(d['steps_per_epoch'], 'step')} per epoch\n"
        f"{count(d['steps'], 'step')} ({count(d['epochs'], 'epoch')}) of {d['samples_per_step']} samples "
        f"({count(d['tokens_first_step'], 'token')} in the first); micro-batch {d['micro_batch']} × accumulation "
        f"{d['accumulation']}; {d['precision']} on {d['device']}{several}\n"
        f"learning rate {rate['first_step']:.2e} at the first step, {rate['last_step']:.2e} at the last"
    )
