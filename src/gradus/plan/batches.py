"""Batches of the right shapes without the data: the task's own collate gets samples as long as the recipe allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradus.data.loader import Loader, Plan, sample_rng
from gradus.errors import UserError
from gradus.recipe.axes import data_parallel_size, evaluation_samples
from gradus.recipe.presets import config_of
from gradus.recipe.schema import Recipe
from gradus.tasks.base import Task
from gradus.tasks.causal_lm import CausalLM
from gradus.tasks.classification import ImageClassification, TextClassification
from gradus.tasks.masked_lm import MaskedLM
from gradus.tasks.span_corruption import SpanCorruption
from gradus.tasks.translation import Copy, Translation

Batch = dict[str, Any]


def complete(recipe: Recipe) -> Recipe:
    """Add to the model what its task decides: the head, and the vocabulary where the task knows it. Opens no data.

    Raises UserError for a vocabulary size or a number of classes that only the data could tell.
    """
    model, task = recipe.model, recipe.task
    update: dict[str, Any] = {}
    if task.name == "copy" and model.vocab_size is None:
        update["vocab_size"] = task.n_symbols
    if getattr(model, "head", None) == "none":
        if task.name == "masked_lm":
            head = "pretraining" if task.next_sentence else "masked_lm"
            update |= {"head": head, "pooler": task.next_sentence}
        elif task.name == "classification":
            update |= {"head": "classification", "pooler": True}
    if task.name == "classification" and model.n_classes is None:
        preset = config_of(model.preset) if model.preset else None
        update["n_classes"] = len(task.classes) if task.classes else getattr(preset, "n_classes", None)
    if update:
        recipe = recipe.model_copy(update={"model": model.model_copy(update=update)})
    for key in missing_keys(recipe):
        raise UserError(f"{key}: not known without the data. Set it, or make the data reachable.")
    return recipe


def missing_keys(recipe: Recipe) -> list[str]:
    """The keys that the model needs for its task and that only the data could tell."""
    model = recipe.model
    needed = {"vocab_size": model.reads == "text", "n_classes": recipe.task.name == "classification"}
    return [f"model.{key}" for key, is_needed in needed.items() if is_needed and getattr(model, key, 0) is None]


class _Vocabulary:
    """What tasks ask of a tokenizer: its special tokens, whose ids do not matter here."""

    pad_id, cls_id, sep_id, mask_id, eos_id, bos_id = 0, 1, 2, 3, 1, 0

    def __init__(self, size: int):
        self.vocab_size = size

    def sentinel(self, i: int) -> int:
        return self.vocab_size - 1 - i % self.vocab_size


class _Samples:
    """A data set of any length, which makes sample i on request."""

    def __init__(self, make: Callable[[int], dict[str, Any]]):
        self.make = make

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.make(i)


def task_without_data(recipe: Recipe, *, seq_len: int | None = None) -> Task:
    """The recipe's task over samples of full length with random tokens; `recipe` as `complete` returns it.

    seq_len: tokens of a sequence as the model reads it (None: data.max_len, else model.seq_len). Raises UserError for a
    length that the model cannot take.
    """
    model, config = recipe.model, recipe.task
    if model.reads == "images":
        return _image_task(recipe)
    length = seq_len or (config.length if config.name == "copy" else getattr(recipe.data, "max_len", None))
    length = length or model.seq_len
    if model.longest and length > model.longest:
        limit = f"model.seq_len={model.longest}"
        raise UserError(f"a sequence of {length} tokens is longer than {limit}: shorten it, or raise model.seq_len")
    vocabulary = _Vocabulary(model.vocab_size)
    special = {"before": [vocabulary.cls_id], "after": [vocabulary.sep_id]}
    smoothing = getattr(config, "label_smoothing", 0.0)

    def ids(i: int, n: int) -> np.ndarray:
        low = min(4, model.vocab_size - 1)
        return np.random.Generator(np.random.PCG64(i)).integers(low, model.vocab_size, size=max(1, n))

    if config.name == "causal_lm":
        packed = getattr(recipe.data, "pack", "stream") == "documents"
        more = {"segments": np.ones(length + 1, np.int64), "positions": np.arange(length + 1)} if packed else {}
        sample = lambda i: {"ids": ids(i, length + 1), **more}  # noqa: E731
        task = _task_over(sample, CausalLM, recipe, seq_len=length, label_smoothing=smoothing)
    elif config.name == "masked_lm":
        n_special = 3 if config.next_sentence else 2
        sample = lambda i: {"ids": ids(i, length - n_special), "split": "train", "at": i}  # noqa: E731
        task = _task_over(sample, MaskedLM, recipe, next_sentence=config.next_sentence, **special)
    elif config.name == "classification":
        classes = [str(i) for i in range(model.n_classes)]
        sample = lambda i: {"ids": ids(i, length - 2), "label": i % model.n_classes}  # noqa: E731
        task = _task_over(sample, TextClassification, recipe, max_len=length, classes=classes, **special)
    elif config.name == "span_corruption":
        sample = lambda i: {"ids": ids(i, length - 1)}  # noqa: E731
        task = _task_over(sample, SpanCorruption, recipe, pad_id=vocabulary.pad_id)
    else:
        sample = lambda i: {"source": ids(i, length), "target": ids(i + 1, length)}  # noqa: E731
        sequences = lambda sample: (sample["source"], sample["target"], sample["target"])  # noqa: E731
        kind = Copy if config.name == "copy" else Translation
        task = _task_over(sample, kind, recipe, label_smoothing=smoothing, sequences=sequences)
    task.tokenizers = {"": vocabulary}
    return task


def _image_task(recipe: Recipe) -> Task:
    from gradus.data.augment import Augment

    model = recipe.model
    image = np.zeros((model.n_channels, model.image_size, model.image_size), np.uint8)
    half = [0.5] * model.n_channels
    data = recipe.data.model_copy(update={"mean": recipe.data.mean or half, "std": recipe.data.std or half})
    task = _task_over(lambda i: {"image": image, "label": i % model.n_classes}, ImageClassification, recipe)
    task.augment = Augment(data, model.image_size, task.splits["train"])
    task.prepare, task.n_patches = task.augment.prepare, (model.image_size // model.patch_size) ** 2
    task.classes = [str(i) for i in range(model.n_classes)]
    return task


def _task_over(sample: Callable[[int], dict[str, Any]], kind: type[Task], recipe: Recipe, **attributes: Any) -> Task:
    """A task of this kind over synthetic samples; it opens no data."""
    task = kind.__new__(kind)
    Task.__init__(task, recipe)
    vars(task).update(attributes, splits={"train": _Samples(sample)})
    return task


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
