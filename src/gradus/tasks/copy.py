"""Copy a sequence of numbers: the first task of the Annotated Transformer."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from gradus import models
from gradus.data.synthetic import CopyDataset
from gradus.errors import InputError
from gradus.models.decoding import Encoded, complete
from gradus.recipe.schema import CopyTask, ModelConfig, Recipe
from gradus.tasks.base import Task
from gradus.tasks.kinds import TaskKind
from gradus.tasks.made import Sample, Unopened
from gradus.tasks.translation import SequenceToSequence, fit_vocabularies
from gradus.text import say, short


class Copy(SequenceToSequence):
    """Copy symbols 1 .. n_symbols-1; 0 is padding and, with start=zero, the decoder's first symbol."""

    decodes = True
    units = Task.units | {"exact_match": ""}

    def __init__(self, recipe: Recipe, tokenizers: dict | None = None):
        super().__init__(recipe)
        task, data, seed = recipe.task, recipe.data, recipe.train.seed
        self.task = task
        if isinstance(tokenizers, Unopened):
            sides = {"source": 0, "target_in": 1, "target_out": 1}
            words = tokenizers.words
            self.splits = tokenizers.splits(lambda i: {side: words(i + n, task.length) for side, n in sides.items()})
            return
        self.splits = {
            split: CopyDataset(n, task.n_symbols, task.length, seed, start=task.start, split=split)
            for split, n in (("train", data.n_train), ("valid", data.n_valid))
        }

    def complete(self, model: ModelConfig) -> ModelConfig:
        return fit_vocabularies(model, self.task.n_symbols, self.task.n_symbols, False)

    @staticmethod
    def of_length(recipe: Recipe, n: int) -> Recipe:
        return recipe.model_copy(update={"task": recipe.task.model_copy(update={"length": n})})

    def starts(self, sources: list[list[int]]) -> list[list[int]]:
        """What the decoder reads first."""
        return [[s[0]] if self.task.start == "first" else [0] for s in sources]

    def decoder_reads(self, source: list[int], copy: list[int]) -> list[int]:
        """What the decoder has read when it has written this."""
        return self.starts([source])[0] + (copy[1:] if self.task.start == "first" else copy[:-1])

    def decode(self, model: nn.Module, sources: list[list[int]]) -> list[list[int]]:
        """Greedy copies of `sources`, as long as they are."""
        first, starts = self.task.start == "first", self.starts(sources)
        new = complete(model, starts, sources=sources, max_new=[len(s) - first for s in sources])
        return [(starts[i] if first else []) + row for i, row in enumerate(new)]

    def evaluate(self, model, batch):
        sums, sources = super().evaluate(model, batch), batch["source"].tolist()
        exact = sum(copy == source for copy, source in zip(self.decode(model, sources), sources))
        return {**sums, "exact_match": (exact, len(sources))}

    def examples(self, model: nn.Module, n: int) -> list[str]:
        sources = [list(range(1, self.task.n_symbols))[: self.task.length]]  # 1 2 3 ... first, then held-out ones
        valid = self.splits["valid"]
        sources += [valid[i]["source"].tolist() for i in range(min(n - 1, len(valid)))]
        copies = self.decode(model, sources)
        return [f"{' '.join(map(str, s))}  →  {' '.join(map(str, c))}" for s, c in zip(sources, copies)]

    def closing(self, model: nn.Module, metrics: Mapping[str, float]) -> list[str]:
        exact = metrics.get("valid/exact_match")
        line = f"exact match on {self.recipe.data.n_valid:,} held-out sequences: {exact:.4f}"
        return [line, *self.examples(model.eval(), 1)]

    def read(self, text: str, longest: int) -> Sample:
        words, n, length = text.split(), self.task.n_symbols, min(longest, self.task.length)
        if not words or not all(w.isdecimal() and len(w) <= len(str(n)) and 0 < int(w) < n for w in words):
            raise InputError(f"{short(text, 40)!r}: this model copies numbers from 1 to {n - 1}, such as '1 2 3'.")
        if len(words) != length:
            trained = f"where the model was trained on sequences of {length}"
            say(f"note: {len(words)} numbers, {trained}: {short(text, 40)}", sys.stderr)
        return {"source": np.array([int(w) for w in words])}

    def answers(self, model: Any, samples: list[Sample], top: int) -> Iterator[dict[str, Any]]:
        for sample in samples:
            row = sample["source"].tolist()
            copy = self.decode(model.on(Encoded(self.starts([row]), [row], None)), [row])[0]
            truth, answer = (" ".join(map(str, numbers)) for numbers in (row, copy))
            yield {"input": truth, "answer": answer, "truth": truth, "right": copy == row}

    def untrained(self) -> list[str]:
        """Greedy decodes of 1 2 3 ... from symbol 0 by ten untrained models, each from its own seed."""
        source, lines = list(range(1, self.task.n_symbols))[: self.task.length], []
        for seed in range(10):
            torch.manual_seed(seed)
            model = models.build(self.recipe.model).eval()
            lines.append(" ".join(map(str, complete(model, [[0]], sources=[source], max_new=len(source))[0])))
        return lines


KIND = TaskKind(config=CopyTask, tasks={"synthetic": Copy})
