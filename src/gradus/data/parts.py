"""Some samples of a data set: held out of it, or the first of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradus.errors import UserError


class Part:
    """Some samples of a data set, in the order of `indices`, with what is known of them."""

    def __init__(self, dataset: Any, indices: np.ndarray, name: str | None = None):
        self.dataset, self.indices = dataset, indices
        self.name = name or getattr(dataset, "name", type(dataset).__name__)
        self.epoch_aware = getattr(dataset, "epoch_aware", False)
        for of_each in ("lengths", "labels"):
            if hasattr(dataset, of_each):
                setattr(self, of_each, getattr(dataset, of_each)[indices])
        for of_all in ("classes", "shape", "folder"):
            if hasattr(dataset, of_all):
                setattr(self, of_all, getattr(dataset, of_all))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.dataset[int(self.indices[i])]

    def item(self, i: int, epoch: int) -> dict[str, Any]:
        return self.dataset.item(int(self.indices[i]), epoch)


def hold_out(dataset: Any, every: int = 10, unit: str = "rows") -> tuple[Part, Part]:
    """(the rest, the part held out): of each label every `every`-th sample, a fixed and stratified choice."""
    held = np.zeros(len(dataset), dtype=bool)
    for label in np.unique(dataset.labels):
        held[np.flatnonzero(dataset.labels == label)[every - 1 :: every]] = True
    if not held.any():
        why = f"no class has {every} {unit}, so that none can be held out for validation"
        raise UserError(f"{dataset.name}: {why}. Add a valid split.")
    return Part(dataset, np.flatnonzero(~held)), Part(dataset, np.flatnonzero(held), f"{dataset.name} (held out)")


def limited(splits: dict[str, Any], limit: int | None, limit_valid: int | None) -> dict[str, Any]:
    """The splits, of which train and valid keep the first so many samples of a fixed shuffle."""
    for split, most in (("train", limit), ("valid", limit_valid)):
        if most is not None and split in splits and most < len(splits[split]):
            order = np.random.Generator(np.random.PCG64(0)).permutation(len(splits[split]))
            splits[split] = Part(splits[split], order[:most])
    return splits
