"""One label a text or image (BERT, ViT)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradus import models
from gradus.data import preprocessor
from gradus.data.collate import pad_sequences
from gradus.errors import UserError
from gradus.layers import Targets
from gradus.recipe.schema import ClassificationTask, ModelConfig, Recipe
from gradus.tasks.base import Batch, Task, around, likeliest
from gradus.tasks.kinds import TaskKind
from gradus.tasks.made import Sample, Unopened
from gradus.tasks.sources import open_labelled

SPLIT_NAMES = {"valid": "validation"}  # in notes
UNEVEN = 10  # times as many samples as another class has: a note says so


class Classification(Task):
    """What texts and images share: n_classes, the loss, accuracy."""

    best = "accuracy"
    loss_unit = "nats/sample"
    units = {"loss": "nats/sample", "accuracy": "", "macro_f1": ""}
    classes: list[str]
    weights: list[float] | None = None  # of each class in the loss
    matched = ""  # which of the data's classes are which of the head's, where their names are not the same

    def complete(self, model: ModelConfig) -> ModelConfig:
        """Give the model as many outputs as the data has classes, in the order of the head that it has or starts from,
        by their names. Raises UserError for one class, where the recipe has another number or repeats their names, and
        where the head has others."""
        n, named = len(self.classes), self.recipe.task.classes
        if n == 1:
            path, only = self.recipe.data.path, self.classes[0]
            another = "Put images of another class into a folder beside it, or file_name,label into metadata.csv"
            if self.recipe.data.kind != "images":
                another = "Name another label column (data.label; of gradus new --label or --no-label)"
            raise UserError(f"{path}: every sample is of one class ({only}), so there is nothing to learn. {another}.")
        shown = _shown(self.classes)
        if named is not None and named != self.classes:  # names in place of the data's
            if len(set(named)) != n or len(named) != n:
                raise UserError(
                    f"task.classes={', '.join(named[:10])}: {len(named)} names; the data has {n} classes: {shown}. "
                    "Name each once, in this order, or leave task.classes out."
                )
            self._reorder(named, by_name(self.classes, named) or range(n))
        self._match_head(model)
        if model.n_classes not in (None, n):
            raise UserError(f"model.n_classes={model.n_classes}: the data has {n} classes: {shown}. Leave it out.")
        weights = self.recipe.task.class_weights
        if weights == "balanced":
            counts = np.bincount(self.splits["train"].labels, minlength=n)
            weights = (counts.sum() / np.maximum(1, counts) / n).tolist()
        elif weights and len(weights) != n:
            raise UserError(f"task.class_weights: {len(weights)} numbers for {n} classes: {shown}. Give one for each.")
        self.weights = weights
        return super().complete(model.model_copy(update={"n_classes": n}))

    def _match_head(self, model: ModelConfig) -> None:
        """Give the classes the order of the head. A start for other classes gets a new head, and where the recipe names
        them it learns these from here on; the weights of an evaluation have to have them."""
        head = model
        if model.init is not None and not model.classes:
            with contextlib.suppress(UserError):  # a run that is resumed does without them
                head = models.config_of(model.init)
        ours, theirs, trained = self.classes, list(head.classes), head is not model
        if head.outputs != "softmax" and not (trained and head.n_classes != len(ours)):
            score = head.outputs == "none" or head.n_classes == 1
            what = "a score" if score else "several labels per sample"
            raise UserError(
                f"the weights' head predicts {what} (problem_type, num_labels in config.json), and this task needs one "
                "class per sample. Give other weights, or correct config.json."
            )
        if not theirs:
            return
        if order := by_name(ours, theirs):
            if set(ours) != set(theirs):
                self.matched = f"classes: the data's {_shown(ours)} are the head's {_shown([theirs[i] for i in order])}"
            self._reorder(theirs, order)
        elif not trained or (len(theirs) == len(ours) and self.recipe.task.classes is None):
            learn = f" To train a head for the data's classes: task.classes=[{_shown(ours)}]." if trained else ""
            raise UserError(
                f"the weights' head has the classes {_shown(theirs)}; the data has {_shown(ours)}. If they are the "
                f"same, give the data's the head's names, in the data's order: task.classes=[{_shown(theirs)}].{learn}"
            )

    def _reorder(self, classes: list[str], order: Sequence[int]) -> None:
        """Number the labels by these classes. order: of each of the data's, where it is among these."""
        parts: dict[int, Any] = {}
        for data in self.splits.values():
            while data is not None:
                parts[id(data)], data = data, getattr(data, "dataset", None)
        for part in parts.values():
            part.labels = np.asarray(order, np.int64)[part.labels]
        self.classes = classes

    def resolved(self, recipe: Recipe) -> Recipe:
        return recipe.model_copy(update={"task": recipe.task.model_copy(update={"classes": self.classes})})

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits = self.logits(model, batch)  # (batch, n_classes)
        weights = self.weights and torch.tensor(self.weights).to(logits.device)
        options = {"weight": weights, "label_smoothing": self.recipe.task.label_smoothing}
        each = functools.partial(cross_entropy, logits.float(), reduction="none", **options)
        if "other_labels" not in batch:
            return {"samples": each(batch["labels"]).sum()}
        # mixed images: each has two labels, weighted by their share of it (Zhang et al. 2018; Yun et al. 2019)
        share = batch["share"]
        return {"samples": (share * each(batch["labels"]) + (1 - share) * each(batch["other_labels"])).sum()}

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float | Tensor, int]]:
        labels, logits = batch["labels"], self.logits(model, batch)
        chosen, counts = logits.argmax(-1), torch.zeros(2, len(self.classes), device=labels.device)
        counts[0].index_add_(0, labels, 2.0 * (chosen == labels))
        counts[1].index_add_(0, torch.cat((labels, chosen)), torch.ones(2 * len(labels), device=labels.device))
        return Targets(labels, count_right=True).sums(logits, len(labels)) | {"macro_f1": (counts, len(labels))}

    def metrics(self, means: dict[str, Any], split: str) -> dict[str, float]:
        """macro_f1: the mean F1, 2 right / (predicted + true), over the classes that occur or were predicted."""
        right, of = means["macro_f1"]
        return super().metrics(means | {"macro_f1": float((right[of > 0] / of[of > 0]).mean())}, split)

    def notes(self, *of: str) -> Iterator[str]:
        yield from super().notes(*of)
        if self.matched:
            yield self.matched
        counts = {s: np.bincount(self.splits[s].labels, minlength=len(self.classes)) for s in of or self.splits}
        train = counts.pop("train", np.ones(1))
        for split, evaluated in counts.items():
            if missing := [name for name, n in zip(self.classes, evaluated) if not n]:
                alone = len(missing) == len(evaluated) - 1
                says = ": all are of one class, and an accuracy of 1 says nothing" * alone
                yield f"the {SPLIT_NAMES.get(split, split)} split has no sample of {', '.join(missing[:10])}{says}."
        if train.max() > UNEVEN * train.min():
            few, many = (f"{self.classes[i]} {train[i]:,}" for i in (train.argmin(), train.argmax()))
            how = "" if self.weights else ", and so does task.class_weights=balanced in the loss"
            yield f"uneven classes ({few}, {many}): macro_f1 weighs all classes alike{how}."

    def answers(self, model: Any, samples: list[Sample], top: int) -> Iterator[dict[str, Any]]:
        batch = self.to_device(self.collate(samples), model.device)
        chances = self.logits(model, batch).float().softmax(-1)
        for sample, (_, best) in zip(samples, likeliest(chances, self.classes.__getitem__, top)):
            truth = self.classes[int(sample["label"])]
            yield {**best[0], "top": best, "truth": truth, "right": best[0]["label"] == truth}

    def shown(self, sample: dict[str, Any]) -> str:
        """A sample as a line of `examples` ends."""
        return ""

    def examples(self, model: nn.Module, n: int) -> list[str]:
        data, weight = self.splits["valid"], next(model.parameters())
        chosen = [data[i * len(data) // n] for i in range(min(n, len(data)))]
        batch = self.to_device(self.collate(chosen), weight.device)
        if "images" in batch:
            batch["images"] = batch["images"].to(weight.dtype)  # pure_bf16 and pure_fp16 take no other
        p = self.logits(model, batch).float().softmax(-1)
        return [
            f"{self.classes[int(row.argmax())]} {row.max():.3f} (is {self.classes[s['label']]}){self.shown(s)}"
            for s, row in zip(chosen, p)
        ]


def by_name(ours: list[str], theirs: list[str]) -> list[int] | None:
    """Where each of our classes is among theirs, by its name, or by that in lower case; numbers from 0, which name
    nothing, are places among names that are no numbers. None where one is not, or theirs are more."""
    for key in (str, str.casefold):
        place = {key(name): i for i, name in enumerate(theirs)}
        if len(place) == len(theirs) and place.keys() == set(map(key, ours)):
            return [place[key(name)] for name in ours]
    counted = ours == [str(i) for i in range(len(theirs))] and not any(map(str.isdecimal, theirs))
    return list(range(len(theirs))) if counted else None


def _shown(names: list[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


class TextClassification(Classification):
    """[CLS] text [SEP] → label (Devlin et al. 2019, section 4.1)."""

    def __init__(self, recipe: Recipe, tokenizers: dict | None = None):
        super().__init__(recipe)
        self.max_len = min(recipe.data.max_len or recipe.model.seq_len, recipe.model.seq_len)
        self.tokenizers, self.splits, self.classes = open_labelled(recipe, tokenizers, self.max_len - 2)
        self.before, self.after = around(self.tokenizer, "text classification")

    def complete(self, model: ModelConfig) -> ModelConfig:
        return super().complete(model.model_copy(update={"head": "classification", "pooler": True}))

    def row(self, ids: np.ndarray) -> np.ndarray:
        return np.array([*self.before, *ids[: self.max_len - 2], *self.after])

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        rows = [self.row(s["ids"]) for s in samples]
        to = self.max_len if self.recipe.data.pad == "max_length" else None
        ids, keep = pad_sequences(rows, self.tokenizer.pad_id, to)  # (batch, seq)
        n_tokens = sum(len(r) for r in rows)
        labels = torch.tensor([s["label"] for s in samples])
        batch: Batch = {"ids": ids, "labels": labels, "counts": {"samples": len(samples)}, "n_tokens": n_tokens}
        if n_tokens != ids.numel():
            batch["keep"] = keep
        return batch

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["ids"], keep=batch.get("keep"))

    def shown(self, sample: dict[str, Any]) -> str:
        return f"  {self.tokenizer.decode(sample['ids'][:40].tolist())}"


class ImageClassification(Classification):
    """Image → label. Crops and flips are made per sample, mixtures per batch, on the device."""

    counts_tokens = False

    def __init__(self, recipe: Recipe, tokenizers: dict | None = None):
        from gradus.data.augment import Augment
        from gradus.data.images import open_images

        super().__init__(recipe)
        model, data = recipe.model, recipe.data
        unopened = isinstance(tokenizers, Unopened)
        if not unopened and model.init and not (data.preprocess and data.mean and data.std):
            file = models.locate(model.init) / preprocessor.FILE
            data = preprocessor.as_published(data, file, models.config_of(model.init), model.image_size)
        n_channels = model.n_channels if data.preprocess or unopened else 1  # published weights read grey images as RGB
        if unopened:
            image, half = np.zeros((n_channels, *[model.image_size] * 2), np.uint8), [0.5] * n_channels
            self.splits, self.classes = tokenizers.labelled(lambda i: {"image": image})
            data = data.model_copy(update={"mean": data.mean or half, "std": data.std or half})
        else:
            self.splits = open_images(data, model.image_size, recipe.task.classes, n_channels)
            self.classes = [str(c) for c in self.splits["train"].classes]
        self.augment = Augment(data, model.image_size, self.splits["train"])
        self.prepare = self.augment.prepare
        self.n_patches = (recipe.model.image_size // recipe.model.patch_size) ** 2

    def complete(self, model: ModelConfig) -> ModelConfig:
        channels = self.splits["train"].shape[0]
        if model.n_channels != channels:
            raise UserError(f"model.n_channels={model.n_channels}: the images have {channels}. Set that.")
        return super().complete(model)

    def resolved(self, recipe: Recipe) -> Recipe:
        data = self.augment.config.model_copy(update={"mean": self.augment.mean, "std": self.augment.std})
        return super().resolved(recipe).model_copy(update={"data": data})

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        batch: Batch = self.augment.collate(samples)
        return {**batch, "counts": {"samples": len(samples)}, "n_tokens": len(samples) * self.n_patches}

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        return self.augment.apply(super().to_device(batch, device))

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["images"])


KIND = TaskKind(
    config=ClassificationTask, tasks={"labelled": TextClassification, "images": ImageClassification},
    drafts=("labelled", "images"), comment="The classes and their names come from the data.",
)  # fmt: skip
