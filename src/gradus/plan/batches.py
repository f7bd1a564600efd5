"""Batches of the right shapes without the data: the task's own collate gets samples as long as the recipe allows."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradus.data.loader import Loader, Plan, sample_rng
from gradus.errors import UserError
from gradus.recipe.axes import data_parallel_size, evaluation_samples
from gradus.recipe.presets import config_of
from gradus.recipe.schema import Recipe
from gradus.tasks.base import Task, fit_head
from gradus.tasks.kinds import task_class

Batch = dict[str, Any]


def complete(recipe: Recipe) -> Recipe:
    """Add to the model what its task decides: the head, and the vocabulary where the task knows it. Opens no data.

    Raises UserError for a vocabulary size or a number of classes that only the data could tell.
    """
    model, task = recipe.model, recipe.task
    update: dict[str, Any] = {}
    if model.vocab_size is None and task.vocabulary:
        update["vocab_size"] = task.vocabulary
    if task.head == "classification" and model.n_classes is None:
        preset = config_of(model.preset) if model.preset else None
        update["n_classes"] = len(task.classes) if task.classes else getattr(preset, "n_classes", None)
    whole = fit_head(model.model_copy(update=update) if update else model, recipe)
    if whole is not model:
        recipe = recipe.model_copy(update={"model": whole})
    for key in missing_keys(recipe):
        raise UserError(f"{key}: not known without the data. Set it, or make the data reachable.")
    return recipe


def missing_keys(recipe: Recipe) -> list[str]:
    """The keys that the model needs for its task and that only the data could tell."""
    model = recipe.model
    needed = {"vocab_size": model.reads == "text", "n_classes": recipe.task.head == "classification"}
    return [f"model.{key}" for key, is_needed in needed.items() if is_needed and getattr(model, key, 0) is None]


def task_without_data(recipe: Recipe, *, seq_len: int | None = None) -> Task:
    """`Task.without_data` of the recipe's task; `recipe` as `complete` returns it."""
    return task_class(recipe).without_data(recipe, seq_len)


# ---------------------------------------------------------------- one step


def micro_batches(recipe: Recipe, n: int = 1, *, task: Task | None = None) -> list[Batch]:
    """The micro-batches of a step on the process with the largest share, as the task's collate makes them, on the CPU.

    n: processes. Without `task` samples have full length (see `task_without_data`); with it they are the run's own: of
    the first epoch the step with the largest micro-batch, padding counted. recipe: as `complete` returns it.
    """
    replicas = data_parallel_size(recipe.layout, n)
    if task is not None:
        every = task.plan("train", samples=recipe.batch.samples, tokens=recipe.batch.tokens)
        return _largest_step(task, "train", every, replicas, recipe.layout.micro_batch)
    task = task_without_data(recipe)

    def batch(k: int) -> Batch:
        return task.collate([_sample(task, recipe, i) for i in range(k)])

    # of a batch stated in tokens as many samples as fit; shared out as the loader does
    samples = recipe.batch.samples or max(1, recipe.batch.tokens // size_of(batch(1)))
    share = -(-samples // replicas)
    micro = min(recipe.layout.micro_batch or share, share)
    full, rest = divmod(share, micro)
    return [batch(micro)] * full + ([batch(rest)] if rest else [])  # equal ones are one object: nothing changes them


def evaluation_batch(recipe: Recipe, n: int, task: Task | None) -> Batch | None:
    """The largest batch of an evaluation on one of `n` processes, as `micro_batches`; None where the task writes its
    answers token by token. recipe: as `complete` returns it."""
    replicas = data_parallel_size(recipe.layout, n)
    samples = evaluation_samples(recipe, replicas)
    task = task or task_without_data(recipe)
    if task.decodes:
        return None
    if "valid" not in task.splits:
        return task.collate([_sample(task, recipe, i) for i in range(samples)])
    every = task.plan("valid", samples=samples * replicas, tokens=None)
    return _largest_step(task, "valid", every, replicas, None)[0]


def size_of(batch: Batch) -> int:
    """Tokens of a batch, padding counted; of images their number. Activations grow with it."""
    if "ids" in batch:
        return batch["ids"].numel()
    if "source" in batch:
        return batch["source"].numel() + batch["target"].numel()
    return len(batch["label"] if "label" in batch else batch["labels"])


def describe_largest(batches: list[Batch]) -> str:
    """The largest of the batches as text: samples × tokens of each side, padding counted; of images their number."""
    batch = max(batches, key=size_of)
    sides = [batch[key].shape for key in ("ids", "source", "target") if key in batch]
    if not sides:
        return f"{size_of(batch)} images"
    return f"{sides[0][0]} × {' + '.join(str(tokens) for _, tokens in sides)} tokens"


def _sample(task: Task, recipe: Recipe, i: int) -> dict[str, Any]:
    sample = task.splits["train"][i]
    return sample if task.prepare is None else task.prepare(sample, sample_rng(recipe.train.seed, 0, i))


def _largest_step(task: Task, split: str, plan: Plan, replicas: int, micro: int | None) -> list[Batch]:
    """The step of the first epoch with the largest micro-batch; any full one where lengths are not known."""
    data, prepare = task.splits[split], task.prepare if split == "train" else task.prepare_evaluation
    lengths, order = getattr(data, "sides", getattr(data, "lengths", None)), plan.epoch(0)
    largest, rank = (len(order) - 1 if len(order[-1]) > len(order[0]) else 0), 0
    if lengths is not None:
        lengths, most = np.asarray(lengths), 0
        for step, samples in enumerate(order):
            for replica, share in enumerate(np.array_split(samples, replicas)):
                for low in range(0, len(share), micro or max(1, len(share))):
                    part = share[low : low + (micro or len(share))]
                    size = len(part) * lengths[part].max(axis=0).sum()
                    if size > most:
                        most, largest, rank = size, step, replica
    loader = Loader(data, plan, task.collate, prepare=prepare, micro_batch=micro, rank=rank, world=replicas)
    return next(loader.steps(0, largest)).micro_batches
