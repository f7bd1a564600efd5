"""Samples of a recipe's kind of data without the data: as long as the recipe allows, of random words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gradus.data.tokenizers import Tokenizer
from gradus.recipe.schema import Recipe

Sample = dict[str, Any]


class Vocabulary(Tokenizer):
    """What tasks ask of a tokenizer but its words: special tokens, whose ids do not matter."""

    pad_id, cls_id, sep_id, mask_id, eos_id, bos_id = 0, 1, 2, 3, 1, 0

    def __init__(self, size: int):
        self.vocab_size = size

    def sentinel(self, i: int) -> int:
        return self.vocab_size - 1 - i % self.vocab_size


class Made:
    """A data set of any length, which makes sample i on request."""

    lengths = None  # nobody knows them

    def __init__(self, make: Callable[[int], Sample]):
        self.make = make

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, i: int) -> Sample:
        return self.make(i)


class Unopened(dict[str, Any]):
    """Stands for the tokenizers of a task (by place below a checkpoint) that is to open no data, only to make samples.
    The recipe's model has all its sizes."""

    def __init__(self, recipe: Recipe, tokenizers: dict[str, Any] | None = None):
        super().__init__(tokenizers or {"": Vocabulary(recipe.model.vocab_size)})
        self.recipe = recipe

    def words(self, seed: int, n: int) -> np.ndarray:
        """n random words, at least one."""
        size = self.recipe.model.vocab_size
        return np.random.Generator(np.random.PCG64(seed)).integers(min(4, size - 1), size, size=max(1, n))

    def splits(self, make: Callable[[int], Sample]) -> dict[str, Made]:
        return {"train": Made(make)}

    def labelled(self, sample: Callable[[int], Sample]) -> tuple[dict[str, Made], list[str]]:
        """(splits, names of the classes), which take turns."""
        n = getattr(self.recipe.model, "n_classes", None) or 2
        return self.splits(lambda i: {**sample(i), "label": i % n}), [str(i) for i in range(n)]
