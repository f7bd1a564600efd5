"""Batches of the right shapes without the data: made by the task's own collate, of samples that are as long as the recipe allows."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradus.data.loader import Plan, sample_rng
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
    if model.family == "bert" and model.head == "none":
        if task.name == "masked_lm":
            update |= {"head": "pretraining" if task.next_sentence else "masked_lm", "pooler": task.next_sentence}
        elif task.name == "classification":
            update |= {"head": "classification", "pooler": True}
    if task.name == "classification" and model.n_classes is None and task.classes:
        update["n_classes"] = len(task.classes)
    elif task.name == "classification" and model.n_classes is None and model.preset:
        update["n_classes"] = getattr(config_of(model.preset), "n_classes", None)  # as published, where only the data would know better
    model = model.model_copy(update=update)
    if model.family != "vit" and model.vocab_size is None:
        raise UserError("model.vocab_size: not known without the data. Set it, or make the data reachable.")
    if task.name == "classification" and model.n_classes is None:
        raise UserError("model.n_classes: not known without the data. Set it, or make the data reachable.")
    return recipe.model_copy(update={"model": model}) if update else recipe


class _Vocabulary:
    """What tasks ask of a tokenizer: the special tokens, whose numbers are of no matter here."""

    pad_id, cls_id, sep_id, mask_id, eos_id, bos_id = 0, 1, 2, 3, 1, 0

    def __init__(self, size: int):
        self.vocab_size = size

    def sentinel(self, i: int) -> int:
        return self.vocab_size - 1 - i % self.vocab_size


class _Samples:
    """A data set of any length: sample i is made when it is asked for."""

    def __init__(self, make: Any):
        self.make = make

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.make(i)


def task_without_data(recipe: Recipe, *, seq_len: int | None = None, target_len: int | None = None) -> Task:
    """The recipe's task over samples of full length with tokens of no meaning; `recipe` as `complete` gives it.

    seq_len: tokens of a sequence as the model sees it (None: data.max_len, else model.seq_len). target_len: of a translation's target
    (None: seq_len). Raises UserError for a length that the model cannot take.
    """
    model, config = recipe.model, recipe.task
    if model.family == "vit":
        return _images(recipe)
    limit = model.seq_len
    length = seq_len or getattr(recipe.data, "max_len", None) or limit
    if config.name == "copy":
        length = seq_len or config.length
    if model.family != "t5" and max(length, target_len or 0) > limit:
        raise UserError(f"a sequence of {max(length, target_len or 0)} tokens is longer than model.seq_len={limit}: shorten it, or raise it")

    def ids(i: int, n: int) -> np.ndarray:
        low = min(4, model.vocab_size - 1)
        return np.random.Generator(np.random.PCG64(i)).integers(low, model.vocab_size, size=max(1, n))

    vocabulary = _Vocabulary(model.vocab_size)
    if config.name == "causal_lm":
        task = _blank(CausalLM, recipe)
        task.seq_len, task.label_smoothing = length, config.label_smoothing
        packed = getattr(recipe.data, "pack", "stream") == "documents"

        def make(i: int) -> dict[str, Any]:
            more = {"segments": np.ones(length + 1, np.int64), "positions": np.arange(length + 1)} if packed else {}
            return {"ids": ids(i, length + 1), **more}

    elif config.name == "masked_lm":
        task = _blank(MaskedLM, recipe)
        task.next_sentence = config.next_sentence
        task.cls, task.sep = vocabulary.cls_id, vocabulary.sep_id
        room = length - (3 if config.next_sentence else 2)
        make = lambda i: {"ids": ids(i, room), "split": "train", "at": i}  # noqa: E731
    elif config.name == "classification":
        task = _blank(TextClassification, recipe)
        task.max_len, task.classes = length, [str(i) for i in range(model.n_classes)]
        task.cls, task.sep = vocabulary.cls_id, vocabulary.sep_id
        make = lambda i: {"ids": ids(i, length - 2), "label": i % model.n_classes}  # noqa: E731
    elif config.name == "span_corruption":
        task = _blank(SpanCorruption, recipe)
        task.pad_id = vocabulary.pad_id
        make = lambda i: {"ids": ids(i, length - 1)}  # noqa: E731
    else:
        task = _blank(Copy if config.name == "copy" else Translation, recipe)
        task.label_smoothing = getattr(config, "label_smoothing", 0.0)
        task.sequences = lambda sample: (sample["source"], sample["target"], sample["target"])

        def make(i: int) -> dict[str, Any]:
            return {"source": ids(i, length), "target": ids(i + 1, target_len or length)}

    task.tokenizers = {"": vocabulary}
    task.splits = {"train": _Samples(make)}
    return task


def _images(recipe: Recipe) -> Task:
    from gradus.data.augment import Augment

    model = recipe.model
    shape = (model.n_channels, model.image_size, model.image_size)
    samples = _Samples(lambda i: {"image": np.zeros(shape, np.uint8), "label": i % model.n_classes})
    half = [0.5] * model.n_channels
    data = recipe.data.model_copy(update={"mean": recipe.data.mean or half, "std": recipe.data.std or half})
    task = _blank(ImageClassification, recipe)
    task.classes = [str(i) for i in range(model.n_classes)]
    task.augment = Augment(data, model.image_size, samples)
    task.prepare = task.augment.prepare
    task.n_patches = (model.image_size // model.patch_size) ** 2
    task.splits = {"train": samples}
    return task


def _blank(kind: type[Task], recipe: Recipe) -> Task:
    """A task whose data was not opened."""
    task = kind.__new__(kind)
    Task.__init__(task, recipe)
    return task


# ---------------------------------------------------------------- one step


def samples_a_step(recipe: Recipe, seq_len: int) -> int:
    """Over all devices; of a batch in tokens as many as fit."""
    return recipe.batch.samples or max(1, recipe.batch.tokens // seq_len)


def shares(recipe: Recipe, n: int, samples: int) -> tuple[int, int, int]:
    """(samples of the process that has most, samples of its micro-batches, how many micro-batches). As the loader deals them out."""
    size = sizes(recipe.layout, n)
    share = -(-samples // int(np.prod([size[axis] for axis in DATA])))
    micro = min(recipe.layout.micro_batch or share, share)
    return share, micro, -(-share // micro)


def micro_batches(
    recipe: Recipe, n: int = 1, *, samples: int | None = None, seq_len: int | None = None, target_len: int | None = None, task: Task | None = None
) -> list[Batch]:
    """What the process with the largest share of a step is given: batches as the task's collate makes them, on the CPU, with values.

    samples: of the step, over all devices (None: the recipe's). Without `task` samples have full length (see `task_without_data`);
    with it they are the run's own: of the first epoch the step whose micro-batch is the largest, padding counted.
    Raises UserError where the model's configuration is not complete.
    """
    if task is not None:
        return _largest(recipe, n, task)
    recipe = complete(recipe)
    task = task_without_data(recipe, seq_len=seq_len, target_len=target_len)
    first = _sample(task, recipe, 0)
    share, micro, count = shares(recipe, n, samples or samples_a_step(recipe, size_of(task.collate([first]))))
    batches: dict[int, Batch] = {}  # equal ones are made once: nothing is changed in them
    out = []
    for i in range(count):
        k = min(micro, share - i * micro)
        if k not in batches:
            batches[k] = task.collate([_sample(task, recipe, j) for j in range(k)])
        out.append(batches[k])
    return out


def size_of(batch: Batch) -> int:
    """Places of a batch, padding counted: what its activations grow with."""
    if "ids" in batch:
        return batch["ids"].numel()
    if "source" in batch:
        return batch["source"].numel() + batch["target"].numel()
    return len(batch["label"] if "label" in batch else batch["labels"])


def _sample(task: Task, recipe: Recipe, i: int) -> dict[str, Any]:
    sample = task.splits["train"][i]
    return sample if task.prepare is None else task.prepare(sample, sample_rng(recipe.train.seed, 0, i))


def _largest(recipe: Recipe, n: int, task: Task) -> list[Batch]:
    """The step of the first epoch with the largest micro-batch. Where no lengths are known all samples have one."""
    from gradus.data.loader import Loader

    plan: Plan = task.plan("train", samples=recipe.batch.samples, tokens=recipe.batch.tokens)
    size = sizes(recipe.layout, n)
    world = int(np.prod([size[axis] for axis in DATA]))
    order = plan.epoch(0)
    lengths = getattr(task.splits["train"], "lengths", None)
    micro = recipe.layout.micro_batch

    def cost(step: int) -> tuple[float, int]:
        found = (0.0, 0)
        for rank, share in enumerate(np.array_split(order[step], world)):
            each = micro or max(1, len(share))
            for lo in range(0, len(share), each):
                part = share[lo : lo + each]
                long = np.asarray(lengths)[part].max(axis=0).sum() if lengths is not None else 1
                found = max(found, (float(len(part) * long), rank), key=lambda f: f[0])
        return found

    best, rank = 0, 0
    if lengths is not None:
        costs = [cost(step) for step in range(len(order))]
        best = max(range(len(order)), key=lambda step: costs[step][0])
        rank = costs[best][1]
    elif len(order) > 1 and len(order[-1]) > len(order[0]):
        best = len(order) - 1
    loader = Loader(
        task.splits["train"], plan, task.collate, prepare=task.prepare, micro_batch=micro, rank=rank, world=world
    )
    return next(loader.steps(0, best)).micro_batches
