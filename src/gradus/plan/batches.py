"""Batches of the right shapes without the data: made by the task's own collate, of samples that are as long as the recipe allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gradus.data.loader import Loader, sample_rng
from gradus.errors import UserError
from gradus.parallel.mesh import DATA, sizes
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
    """The recipe with what the task makes of the model (its head, its vocabulary where the task knows it), without its data.

    Raises UserError where only the data could tell: the size of the vocabulary, the number of classes.
    """
    model, task = recipe.model, recipe.task
    update: dict[str, Any] = {}
    if task.name == "copy" and model.vocab_size is None:
        update["vocab_size"] = task.n_symbols
    headless = getattr(model, "head", None) == "none"
    if headless and task.name == "masked_lm":
        update |= {"head": "pretraining" if task.next_sentence else "masked_lm", "pooler": task.next_sentence}
    elif headless and task.name == "classification":
        update |= {"head": "classification", "pooler": True}
    if task.name == "classification" and model.n_classes is None:
        published = getattr(config_of(model.preset), "n_classes", None) if model.preset else None  # where only the data would know better
        update["n_classes"] = len(task.classes) if task.classes else published
    model = model.model_copy(update=update)
    recipe = recipe.model_copy(update={"model": model}) if update else recipe
    for key in not_known(recipe):
        raise UserError(f"{key}: not known without the data. Set it, or make the data reachable.")
    return recipe


def not_known(recipe: Recipe) -> list[str]:
    """The keys of the model that its task needs and only the data could tell."""
    needed = {"vocab_size": recipe.model.reads == "text", "n_classes": recipe.task.name == "classification"}
    return [f"model.{key}" for key, wanted in needed.items() if wanted and getattr(recipe.model, key, 0) is None]


class _Vocabulary:
    """What tasks ask of a tokenizer: the special tokens, whose numbers are of no matter here."""

    pad_id, cls_id, sep_id, mask_id, eos_id, bos_id = 0, 1, 2, 3, 1, 0

    def __init__(self, size: int):
        self.vocab_size = size

    def sentinel(self, i: int) -> int:
        return self.vocab_size - 1 - i % self.vocab_size


class _Samples:
    """A data set of any length: sample i is made when it is asked for."""

    def __init__(self, make: Callable[[int], dict[str, Any]]):
        self.make = make

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.make(i)


def task_without_data(recipe: Recipe, *, seq_len: int | None = None) -> Task:
    """The recipe's task over samples of full length with tokens of no meaning; `recipe` as `complete` gives it.

    seq_len: tokens of a sequence as the model sees it (None: data.max_len, else model.seq_len). Raises UserError for a length that the
    model cannot take.
    """
    model, config = recipe.model, recipe.task
    if model.reads == "images":
        return _images(recipe)
    length = seq_len or (config.length if config.name == "copy" else getattr(recipe.data, "max_len", None) or model.seq_len)
    if model.longest is not None and length > model.longest:
        raise UserError(f"a sequence of {length} tokens is longer than model.seq_len={model.seq_len}: shorten it, or raise model.seq_len")
    words = _Vocabulary(model.vocab_size)
    around, smoothing = {"cls": words.cls_id, "sep": words.sep_id}, getattr(config, "label_smoothing", 0.0)

    def ids(i: int, n: int) -> np.ndarray:
        low = min(4, model.vocab_size - 1)
        return np.random.Generator(np.random.PCG64(i)).integers(low, model.vocab_size, size=max(1, n))

    if config.name == "causal_lm":
        packed = getattr(recipe.data, "pack", "stream") == "documents"
        more = {"segments": np.ones(length + 1, np.int64), "positions": np.arange(length + 1)} if packed else {}
        task = _blank(CausalLM, recipe, lambda i: {"ids": ids(i, length + 1), **more}, seq_len=length, label_smoothing=smoothing)
    elif config.name == "masked_lm":
        room = length - (3 if config.next_sentence else 2)
        make = lambda i: {"ids": ids(i, room), "split": "train", "at": i}  # noqa: E731
        task = _blank(MaskedLM, recipe, make, next_sentence=config.next_sentence, **around)
    elif config.name == "classification":
        classes = [str(i) for i in range(model.n_classes)]
        make = lambda i: {"ids": ids(i, length - 2), "label": i % model.n_classes}  # noqa: E731
        task = _blank(TextClassification, recipe, make, max_len=length, classes=classes, **around)
    elif config.name == "span_corruption":
        task = _blank(SpanCorruption, recipe, lambda i: {"ids": ids(i, length - 1)}, pad_id=words.pad_id)
    else:
        both = {"label_smoothing": smoothing, "sequences": lambda sample: (sample["source"], sample["target"], sample["target"])}
        kind = Copy if config.name == "copy" else Translation
        task = _blank(kind, recipe, lambda i: {"source": ids(i, length), "target": ids(i + 1, length)}, **both)
    task.tokenizers = {"": words}
    return task


def _images(recipe: Recipe) -> Task:
    from gradus.data.augment import Augment

    model = recipe.model
    image = np.zeros((model.n_channels, model.image_size, model.image_size), np.uint8)
    half = [0.5] * model.n_channels
    data = recipe.data.model_copy(update={"mean": recipe.data.mean or half, "std": recipe.data.std or half})
    task = _blank(ImageClassification, recipe, lambda i: {"image": image, "label": i % model.n_classes})
    task.augment = Augment(data, model.image_size, task.splits["train"])
    task.prepare, task.n_patches = task.augment.prepare, (model.image_size // model.patch_size) ** 2
    task.classes = [str(i) for i in range(model.n_classes)]
    return task


def _blank(kind: type[Task], recipe: Recipe, make: Callable[[int], dict[str, Any]], **attributes: Any) -> Task:
    """A task whose data was not opened."""
    task = kind.__new__(kind)
    Task.__init__(task, recipe)
    vars(task).update(attributes, splits={"train": _Samples(make)})
    return task


# ---------------------------------------------------------------- one step


def micro_batches(recipe: Recipe, n: int = 1, *, task: Task | None = None) -> list[Batch]:
    """What the process with the largest share of a step is given: batches as the task's collate makes them, on the CPU, with values.

    Without `task` samples have full length (see `task_without_data`); with it they are the run's own: of the first epoch the step whose
    micro-batch is the largest, padding counted. Raises UserError where the model's configuration is not complete.
    """
    ways = math.prod(sizes(recipe.layout, n)[axis] for axis in DATA)
    if task is not None:
        return _largest(recipe, ways, task)
    recipe = complete(recipe)
    task = task_without_data(recipe)

    def batch(k: int) -> Batch:
        return task.collate([_sample(task, recipe, i) for i in range(k)])

    # over all devices; of a batch in tokens as many as fit. As the loader deals them out
    share = -(-(recipe.batch.samples or max(1, recipe.batch.tokens // size_of(batch(1)))) // ways)
    micro = min(recipe.layout.micro_batch or share, share)
    full, rest = divmod(share, micro)
    return [batch(micro)] * full + ([batch(rest)] if rest else [])  # equal ones are made once: nothing is changed in them


def size_of(batch: Batch) -> int:
    """Places of a batch, padding counted: what its activations grow with."""
    if "ids" in batch:
        return batch["ids"].numel()
    if "source" in batch:
        return batch["source"].numel() + batch["target"].numel()
    return len(batch["label"] if "label" in batch else batch["labels"])


def described(batches: list[Batch]) -> str:
    """The largest of them: samples × tokens of each side, padding counted; of images their number."""
    batch = max(batches, key=size_of)
    sides = [batch[key].shape for key in ("ids", "source", "target") if key in batch]
    if not sides:
        return f"{size_of(batch)} images"
    return f"{sides[0][0]} × {' + '.join(str(tokens) for _, tokens in sides)} tokens"


def _sample(task: Task, recipe: Recipe, i: int) -> dict[str, Any]:
    sample = task.splits["train"][i]
    return sample if task.prepare is None else task.prepare(sample, sample_rng(recipe.train.seed, 0, i))


def _largest(recipe: Recipe, ways: int, task: Task) -> list[Batch]:
    """The step of the first epoch with the largest micro-batch. Where no lengths are known all samples have one."""
    data, micro = task.splits["train"], recipe.layout.micro_batch
    plan = task.plan("train", samples=recipe.batch.samples, tokens=recipe.batch.tokens)
    lengths, order = getattr(data, "sides", getattr(data, "lengths", None)), plan.epoch(0)
    best, rank = (len(order) - 1 if len(order[-1]) > len(order[0]) else 0), 0
    if lengths is not None:
        lengths, most = np.asarray(lengths), 0
        for step, samples in enumerate(order):
            for at, share in enumerate(np.array_split(samples, ways)):
                for lo in range(0, len(share), micro or max(1, len(share))):
                    part = share[lo : lo + (micro or len(share))]
                    cost = len(part) * lengths[part].max(axis=0).sum()
                    if cost > most:
                        most, best, rank = cost, step, at
    loader = Loader(data, plan, task.collate, prepare=task.prepare, micro_batch=micro, rank=rank, world=ways)
    return next(loader.steps(0, best)).micro_batches
