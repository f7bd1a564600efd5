"""Predict spans that were replaced by sentinels (T5)."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from gradus.data.tokenizers import Tokenizer
from gradus.errors import UserError
from gradus.models.decoding import complete
from gradus.recipe.schema import Recipe, SpanCorruptionTask
from gradus.tasks.kinds import TaskKind
from gradus.tasks.sources import open_documents
from gradus.tasks.translation import SequenceToSequence


def noise_spans(length: int, rate: float, mean_span: float, rng: np.random.Generator) -> np.ndarray:
    """A boolean mask (length,) of which `rate` is True, in spans of `mean_span` tokens on average (Raffel et al. 2020,
    section 3.1.4).

    The length fixes the number of noise tokens and of spans; where they fall is random. The first token is never noise.
    """
    n_noise = min(max(1, round(length * rate)), length - 1)
    n_spans = min(max(1, round(n_noise / mean_span)), length - n_noise)

    # n positive whole numbers that sum to total, every composition equally likely
    def parts(total: int, n: int) -> np.ndarray:
        cuts = np.sort(rng.choice(total - 1, size=n - 1, replace=False)) + 1
        return np.diff(np.concatenate(([0], cuts, [total])))

    kept, noise = parts(length - n_noise, n_spans), parts(n_noise, n_spans)
    return np.repeat(np.tile([False, True], n_spans), np.stack((kept, noise), 1).ravel())


class SpanCorruption(SequenceToSequence):
    """One sentinel replaces each noise span in the source; the target lists the sentinels with what they hide, then the
    end."""

    def __init__(self, recipe: Recipe, tokenizers: dict | None = None):
        super().__init__(recipe)
        room = (recipe.data.max_len or recipe.model.seq_len) - 1
        self.tokenizers, self.splits = open_documents(recipe, tokenizers, room)
        t = self.tokenizer
        if t.eos_id is None or t.pad_id is None:
            raise UserError("tokenizer: it has no padding or end token. Use T5's or tokenizer.kind=bpe.")
        t.sentinel(0)  # raises where there are none
        t.around(None, t.eos_id)
        self.pad_id = t.pad_id

    def prepare(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        ids, end = sample["ids"].astype(np.int64), np.array([self.tokenizer.eos_id])
        if len(ids) < 2:
            return {"source": np.concatenate((ids, end)), "target": end}
        noise = noise_spans(len(ids), self.recipe.task.noise_rate, self.recipe.task.mean_span, rng)
        borders = np.flatnonzero(np.diff(noise, prepend=False, append=False))  # where each span starts and stops
        source, target, at = [], [], 0
        for i, (start, stop) in enumerate(borders.reshape(-1, 2)):
            sentinel = [self.tokenizer.sentinel(i)]
            source += [ids[at:start], sentinel]
            target += [sentinel, ids[start:stop]]
            at = stop
        return {"source": np.concatenate([*source, ids[at:], end]), "target": np.concatenate([*target, end])}

    prepare_evaluation = prepare

    def sequences(self, sample):
        target = sample["target"]
        return sample["source"], np.concatenate(([self.pad_id], target[:-1])), target

    @staticmethod
    def written(tokenizer: Tokenizer, ids: list[int]) -> str:
        return " ".join(tokenizer.token(int(i)) for i in ids)  # decode leaves sentinels out

    def examples(self, model: nn.Module, n: int) -> list[str]:
        lines = []
        for i in range(min(n, len(self.splits["valid"]))):
            sample = self.prepare({"ids": self.splits["valid"][i]["ids"][:40]}, np.random.default_rng(i))
            new = complete(
                model, [[self.pad_id]], sources=[sample["source"].tolist()], max_new=len(sample["target"]) + 10,
                eos_id=self.tokenizer.eos_id,
            )[0]
            shown = (self.written(self.tokenizer, ids) for ids in (sample["source"], sample["target"], new))
            lines += [f"{name}  {text}" for name, text in zip(("source", "hidden", "ours  "), shown)] + [""]
        return lines


KIND = TaskKind(config=SpanCorruptionTask, tasks={"text": SpanCorruption})
