"""Predict masked tokens, and whether a second half follows the first (BERT)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradus.data.collate import pad_sequences
from gradus.errors import UserError
from gradus.layers import Targets, summed_cross_entropy
from gradus.recipe.schema import MaskedLMTask, Recipe
from gradus.tasks.base import Batch, Task, around, likeliest
from gradus.tasks.kinds import TaskKind
from gradus.tasks.sources import open_documents


class _Placed:
    """A split whose samples carry their split and index: a wrong second part is drawn from the other rows of the same
    split."""

    def __init__(self, data: Any, split: str):
        self.data, self.split, self.lengths = data, split, data.lengths

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**self.data[i], "split": self.split, "at": i}


class MaskedLM(Task):
    """Of each sequence `mask_rate` of the tokens are chosen; of these 80 % become [MASK], 10 % a random token, 10 %
    stay (Devlin et al. 2019, section 3.1 and appendix A.1). The choice is a pure function of (seed, epoch, sample)."""

    varies = True  # the rows of the head: as many as there are masks
    units = Task.units | {"next_sentence_accuracy": ""}

    def __init__(self, recipe: Recipe, tokenizers: dict | None = None):
        super().__init__(recipe)
        max_len = min(recipe.data.max_len or recipe.model.seq_len, recipe.model.seq_len)
        self.next_sentence = recipe.task.next_sentence
        self.tokenizers, self.splits = open_documents(recipe, tokenizers, max_len - (3 if self.next_sentence else 2))
        self.before, self.after = around(self.tokenizer, "masked language modelling", mask=self.tokenizer.mask_id)
        if not self.next_sentence:
            self.units = Task.units
            return
        for split, data in self.splits.items():
            if len(data) < 2:
                raise UserError(
                    f"task.next_sentence=true: the {split} split has {len(data)} row of text, and a wrong second part "
                    "is another row's. Give more text, a larger data.limit or task.next_sentence=false."
                )
            self.splits[split] = _Placed(data, split)

    def prepare(self, sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        ids, split = sample["ids"], len(sample["ids"])
        follows = 1
        if self.next_sentence and len(ids) >= 2:
            split = int(rng.integers(1, len(ids)))
            if rng.random() < 0.5:  # half of the time the second part is that of another row
                rows, mine = self.splits[sample["split"]], sample["at"]
                other = rows[(mine + int(rng.integers(1, len(rows)))) % len(rows)]["ids"]
                ids, follows = np.concatenate((ids[:split], other[: len(ids) - split])), 0
        parts = [self.before, ids[:split], self.after] + ([ids[split:], self.after] if self.next_sentence else [])
        row = np.concatenate(parts).astype(np.int64)
        types = (np.arange(len(row)) >= split + 2).astype(np.int64)
        inner = np.flatnonzero(~np.isin(row, [*self.before, *self.after]))
        n = max(1, round(self.recipe.task.mask_rate * len(inner)))
        chosen = np.sort(rng.choice(inner, size=min(n, len(inner)), replace=False))
        masked, roll = row.copy(), rng.random(len(chosen))
        masked[chosen[roll < 0.8]] = self.tokenizer.mask_id
        random = chosen[roll >= 0.9]
        masked[random] = rng.integers(self.tokenizer.vocab_size, size=len(random))
        select = np.zeros(len(row), np.int64)
        select[chosen] = 1
        return {"ids": masked, "select": select, "targets": row[chosen], "types": types, "follows": 1 - follows}

    prepare_evaluation = prepare  # the same masks at every evaluation: its rng depends on (seed, 0, sample) only

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        ids, keep = pad_sequences([s["ids"] for s in samples], self.tokenizer.pad_id)  # (batch, seq)
        select, _ = pad_sequences([s["select"] for s in samples], 0)
        # (n_masked,), in the order of `select`
        targets = torch.from_numpy(np.concatenate([s["targets"] for s in samples]))
        batch: Batch = {"ids": ids, "select": select.bool(), "targets": targets, "counts": {"tokens": len(targets)}}
        batch["n_tokens"] = sum(len(s["ids"]) for s in samples)
        if batch["n_tokens"] != ids.numel():
            batch["keep"] = keep
        if self.next_sentence:
            batch["types"], _ = pad_sequences([s["types"] for s in samples], 0)
            batch["follows"] = torch.tensor([s["follows"] for s in samples])  # 0: it follows, as in BERT
            batch["counts"]["pairs"] = len(samples)
        return batch

    def _predict(self, model: nn.Module, batch: Batch, targets: Targets):
        with targets.given():
            out = model(batch["ids"], token_types=batch.get("types"), keep=batch.get("keep"), select=batch["select"])
        return out if self.next_sentence else (out, None)

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        targets = Targets(batch["targets"])
        words, follows = self._predict(model, batch, targets)  # (n_masked, vocab) or their loss, (batch, 2)
        sums = {"tokens": targets.loss(words)}
        if self.next_sentence:
            sums["pairs"] = summed_cross_entropy(follows, batch["follows"])
        return sums

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float | Tensor, int]]:
        targets = Targets(batch["targets"], count_right=True)
        words, follows = self._predict(model, batch, targets)
        sums: dict[str, tuple[float | Tensor, int]] = {**targets.sums(words, len(batch["targets"]))}
        if self.next_sentence:
            sums["next_sentence_accuracy"] = ((follows.argmax(-1) == batch["follows"]).sum(), len(batch["follows"]))
        return sums

    @torch.no_grad()
    def examples(self, model: nn.Module, n: int) -> list[str]:
        lines, device = [], next(model.parameters()).device
        for i in range(min(n, len(self.splits["valid"]))):
            ids = self.splits["valid"][i]["ids"][:30].tolist()
            place = len(ids) // 2
            masked = [*ids[:place], self.tokenizer.mask_id, *ids[place + 1 :]]
            row = torch.tensor([[*self.before, *masked, *self.after]], device=device)
            out = model(row, select=row == self.tokenizer.mask_id)
            chances = (out[0] if isinstance(out, tuple) else out).float().softmax(-1)  # (1, vocab)
            _, best = next(likeliest(chances, self.tokenizer.token, 3))
            guesses = ", ".join(f"{guess['label']} {guess['probability']:.2f}" for guess in best)
            before, after = self.tokenizer.decode(ids[:place]), self.tokenizer.decode(ids[place + 1 :])
            lines.append(f"{before} [{self.tokenizer.token(ids[place])}] {after}  →  {guesses}")
        return lines


KIND = TaskKind(config=MaskedLMTask, tasks={"text": MaskedLM})
