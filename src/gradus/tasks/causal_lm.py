"""Predict the next token (GPT, Llama)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradus.data.collate import IGNORE, pad_sequences
from gradus.layers import keep_balance
from gradus.models.decoding import complete, sampler
from gradus.recipe.schema import CausalLMTask, Recipe
from gradus.tasks.base import Batch, TokenTask, perplexity
from gradus.tasks.kinds import TaskKind
from gradus.tasks.sources import open_running_text


class CausalLM(TokenTask):
    """Next-token prediction over windows of running text."""

    def __init__(self, recipe: Recipe, tokenizers: dict | None = None):
        super().__init__(recipe)
        self.seq_len = recipe.data.max_len or recipe.model.seq_len
        self.tokenizers, self.splits, self.sizes = open_running_text(recipe, tokenizers, self.seq_len)
        kind = getattr(self.tokenizer, "kind", None)
        self.characters = kind == "char"  # a token is a character
        self.words = kind not in ("char", "byte")  # characters and bytes have no perplexity per word
        sized = "valid" in self.sizes  # data.limit_valid leaves windows whose bytes nobody counted
        self.units = {
            **TokenTask.units,
            **({"bits_per_character": "bits/character"} if self.characters else {}),
            **({"bits_per_byte": "bits/byte"} if sized else {}),
            **({"word_perplexity": ""} if sized and self.words else {}),
        }

    def targets(self, sample: dict[str, Any]) -> np.ndarray:
        """What each token but the last is to predict; nothing across the borders of packed documents."""
        ids, segments = sample["ids"], sample.get("segments")
        return ids[1:] if segments is None else np.where(segments[1:] == segments[:-1], ids[1:], IGNORE)

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        ids = [s["ids"] for s in samples]
        batch = {"ids": pad_sequences([row[:-1] for row in ids], 0)[0]}
        if "segments" in samples[0]:  # packed documents: no attention across their borders
            for key, padding in (("segments", -1), ("positions", 0)):
                batch[key], _ = pad_sequences([s[key][:-1] for s in samples], padding)
        batch["labels"], _ = pad_sequences([self.targets(sample) for sample in samples], IGNORE)
        counts = {"tokens": int((batch["labels"] != IGNORE).sum())}
        if getattr(self.recipe.model, "n_experts", None) is not None:
            counts["balance"] = len(samples)
        return {**batch, "counts": counts, "n_tokens": sum(len(row) - 1 for row in ids)}

    def output(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["ids"], segments=batch.get("segments"), positions=batch.get("positions"))

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        with keep_balance(model) as balance:
            sums = super().losses(model, batch)
        if balance:  # the mean over the layers, of each sequence
            sums["balance"] = self.recipe.model.balance * torch.stack(balance).mean(0).sum()
        return sums

    def metrics(self, means: dict[str, float], split: str) -> dict[str, float]:
        """Add perplexity per token, for a character tokenizer also bits per character; where the text's size is known,
        bits per byte and perplexity per word, which do not depend on the tokenizer."""
        out = super().metrics(means, split)
        if self.characters:
            out["bits_per_character"] = means["loss"] / math.log(2)
        size = self.sizes.get(split)
        if size and size["bytes"]:
            nats = means["loss"] * size["targets"]
            out["bits_per_byte"] = nats / size["bytes"] / math.log(2)
            if self.words:
                out["word_perplexity"] = perplexity(nats / max(1, size["words"]))
        return out

    def examples(self, model: nn.Module, n: int) -> list[str]:
        """Continuations of the first tokens of the validation text, sampled at temperature 0.8."""
        new = self.recipe.evaluate.max_new or 100
        room = self.recipe.model.seq_len
        sample = self.splits["valid"][0]["ids"][: max(1, room // 4)].tolist()
        rows = complete(
            model, [sample] * n, max_new=min(new, room - len(sample)), choose=sampler(0.8, seed=0),
            eos_id=self.tokenizer.eos_id,
        )  # fmt: skip
        start = self.tokenizer.decode(sample)
        return [f"{start}│{self.tokenizer.decode(row)}" for row in rows]


KIND = TaskKind(config=CausalLMTask, tasks={"text": CausalLM}, drafts=("text",))
