"""One label a text or image (BERT, ViT)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradus.data.collate import pad_sequences
from gradus.errors import UserError
from gradus.layers import Targets, summed_cross_entropy
from gradus.recipe.schema import ModelConfig, Recipe
from gradus.tasks.base import Batch, Task, around
from gradus.tasks.sources import open_labelled


class Classification(Task):
    """What texts and images share: n_classes, the loss, accuracy."""

    best = "accuracy"
    loss_unit = "nats/sample"
    units = {"loss": "nats/sample", "accuracy": ""}
    classes: list[str]

    def complete(self, model: ModelConfig) -> ModelConfig:
        """Give the model as many outputs as the data has classes. Raises UserError for one class, and where the recipe
        has another number, or repeats or reorders their names."""
        n, named = len(self.classes), self.recipe.task.classes
        if n == 1:
            path, only = self.recipe.data.path, self.classes[0]
            another = "Put images of another class into a folder beside it"
            if self.recipe.data.kind != "images":
                another = "Name another label column (data.label; of gradus new --label or --no-label)"
            raise UserError(f"{path}: every sample is of one class ({only}), so there is nothing to learn. {another}.")
        shown = ", ".join(self.classes[:10]) + (", ..." if n > 10 else "")
        if named is not None and named != self.classes:  # names in place of the data's
            if set(named) == set(self.classes) or len(set(named)) != n or len(named) != n:
                raise UserError(
                    f"task.classes={', '.join(named[:10])}: {len(named)} names; the data has {n} classes: {shown}. "
                    "Name each once, in this order, or leave task.classes out."
                )
            self.classes = named
        if model.n_classes not in (None, n):
            raise UserError(f"model.n_classes={model.n_classes}: the data has {n} classes: {shown}. Leave it out.")
        return super().complete(model.model_copy(update={"n_classes": n}))

    def resolved(self, recipe: Recipe) -> Recipe:
        return recipe.model_copy(update={"task": recipe.task.model_copy(update={"classes": self.classes})})

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits = self.logits(model, batch)  # (batch, n_classes)
        smoothing = self.recipe.task.label_smoothing
        if "other_labels" not in batch:
            return {"samples": summed_cross_entropy(logits, batch["labels"], smoothing)}
        # mixed images: each has two labels, weighted by their share of it (Zhang et al. 2018; Yun et al. 2019)
        each = [
            nn.functional.cross_entropy(logits.float(), batch[k], reduction="none", label_smoothing=smoothing)
            for k in ("labels", "other_labels")
        ]
        return {"samples": (batch["share"] * each[0] + (1 - batch["share"]) * each[1]).sum()}

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float | Tensor, int]]:
        labels = batch["labels"]
        return Targets(labels, count_right=True).sums(self.logits(model, batch), len(labels))

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
    """Image → label; augmentation is drawn per sample and applied per batch, on the device."""

    counts_tokens = False

    def __init__(self, recipe: Recipe, tokenizers: dict | None = None):
        from gradus.data.augment import Augment
        from gradus.data.images import open_images

        super().__init__(recipe)
        self.splits = open_images(recipe.data, recipe.model.image_size, recipe.task.classes)
        self.classes = [str(c) for c in self.splits["train"].classes]
        self.augment = Augment(recipe.data, recipe.model.image_size, self.splits["train"])
        self.prepare = self.augment.prepare
        self.n_patches = (recipe.model.image_size // recipe.model.patch_size) ** 2

    def complete(self, model: ModelConfig) -> ModelConfig:
        channels = self.splits["train"][0]["image"].shape[0]
        if model.n_channels != channels:
            raise UserError(f"model.n_channels={model.n_channels}: the images have {channels}. Set that.")
        return super().complete(model)

    def resolved(self, recipe: Recipe) -> Recipe:
        data = recipe.data.model_copy(update={"mean": self.augment.mean, "std": self.augment.std})
        return super().resolved(recipe).model_copy(update={"data": data})

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        batch: Batch = self.augment.collate(samples)
        return {**batch, "counts": {"samples": len(samples)}, "n_tokens": len(samples) * self.n_patches}

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        return self.augment.apply(super().to_device(batch, device))

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["images"])
