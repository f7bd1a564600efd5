"""Sequence to sequence: translation of real text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor, nn

from gradus import models
from gradus.data.collate import IGNORE, pad_sequences
from gradus.errors import UserError
from gradus.models.decoding import Encoded, beam_search, complete
from gradus.recipe.schema import ModelConfig, Recipe, TranslationTask
from gradus.tasks.base import Batch, Task, TokenTask, fit_vocabulary, shares
from gradus.tasks.kinds import TaskKind
from gradus.tasks.made import Sample
from gradus.tasks.sources import open_pairs


class SequenceToSequence(TokenTask):
    """Teacher forcing: the decoder sees the target shifted right by one start token (Vaswani et al. 2017, section
    3.1)."""

    pad_id = 0

    def sequences(self, sample: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, target in, target out) ids of one sample."""
        return sample["source"], sample["target_in"], sample["target_out"]

    def collate(self, samples: list[dict[str, Any]]) -> Batch:
        sources, targets_in, targets_out = zip(*(self.sequences(s) for s in samples))
        to = self.recipe.data.max_len if getattr(self.recipe.data, "pad", None) == "max_length" else None
        source, keep = pad_sequences(sources, self.pad_id, to)  # (batch, source), True where real
        target, _ = pad_sequences(targets_in, self.pad_id, to)  # (batch, target)
        labels, _ = pad_sequences(targets_out, IGNORE, to)  # (batch, target)
        n, n_source = (sum(map(len, rows)) for rows in (targets_out, sources))
        batch = {"source": source, "target": target, "labels": labels}
        batch |= {"counts": {"tokens": n}, "n_tokens": n_source + n}
        if n_source != source.numel():
            batch["keep"] = keep
        return batch

    def output(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["source"], batch["target"], source_keep=batch.get("keep"))


def fit_vocabularies(model: ModelConfig, source: int, target: int, separate: bool) -> ModelConfig:
    """As `fit_vocabulary`, both of a model; a target vocabulary is given to it where it is `separate`."""
    if getattr(model, "target_vocab_size", None) is not None or (separate and hasattr(model, "target_vocab_size")):
        model = fit_vocabulary(model, target, "target_vocab_size")
    return fit_vocabulary(model, source)


class Translation(SequenceToSequence):
    """Source text to target text, with one shared vocabulary or two."""

    units = Task.units | {"bleu": "BLEU (sacrebleu)"}

    def __init__(self, recipe: Recipe, tokenizers: dict | None = None):
        super().__init__(recipe)
        if not recipe.evaluate.decode:
            self.units = Task.units
        seq_len, longest = recipe.data.max_len or recipe.model.seq_len, recipe.model.longest
        self.room = min(seq_len, longest or seq_len) - 1
        self.tokenizers, self.splits, self.corpora = open_pairs(recipe, tokenizers, self.room)
        self.target_tokenizer = self.tokenizers.get("target", self.tokenizer)
        if (beams := recipe.evaluate.beams) > (n := self.target_tokenizer.vocab_size):
            raise UserError(f"evaluate.beams={beams}: more than the vocabulary's {n:,} tokens. 4 is usual.")
        self.pad_id = self.tokenizer.pad_id or 0
        t, source_eos = self.target_tokenizer, self.tokenizer.eos_id
        self.eos_id = t.eos_id if t.eos_id is not None else t.sep_id
        if self.eos_id is None:
            raise UserError("tokenizer: no end token, which translation needs. Use tokenizer.kind=bpe or another file.")
        padding = models.lookup(recipe.model.family).decoder_start == "padding"
        self.start_id = (t.pad_id or 0) if padding or t.bos_id is None else t.bos_id
        self.start, self.end = (np.array([i]) for i in (self.start_id, self.eos_id))
        self.tokenizer.around(None, self.eos_id if source_eos is None else source_eos)
        self.source_room = self.room + 1 - len(self.tokenizer.with_special_tokens([]))

    def complete(self, model: ModelConfig) -> ModelConfig:
        sizes = self.tokenizer.vocab_size, self.target_tokenizer.vocab_size
        return fit_vocabularies(model, *sizes, "target" in self.tokenizers)

    def sequences(self, sample):
        source, target = sample["source"][: self.source_room], sample["target"][: self.room]
        target_in, target_out = np.concatenate((self.start, target)), np.concatenate((target, self.end))
        return np.array(self.tokenizer.with_special_tokens(source)), target_in, target_out

    def translate(self, model: nn.Module, sources: list[list[int]], max_new: int | None = None) -> list[str]:
        """Translations of source ids (with their end token): greedy, or with evaluate.beams. max_new: tokens of each
        (None: twice its source's and 10)."""
        room = [min(self.room, max_new or 2 * len(source) + 10) for source in sources]
        options = {"sources": sources, "max_new": room, "eos_id": self.eos_id}
        starts, beams = [[self.start_id]] * len(sources), self.recipe.evaluate.beams
        new = complete(model, starts, **options) if beams == 1 else beam_search(model, starts, beams=beams, **options)
        return [self.target_tokenizer.decode(row) for row in new]

    def answers(self, model: Any, samples: list[Sample], top: int) -> Iterator[dict[str, Any]]:
        rows = [self.sequences(sample)[0].tolist() for sample in samples]
        engine = model.on(Encoded([[self.start_id]] * len(rows), rows, None))
        for sample, answer in zip(samples, self.translate(engine, rows, self.recipe.evaluate.max_new)):
            yield {"answer": answer, "truth": self.target_tokenizer.decode(sample["target"].tolist())}

    def decode_split(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> dict[int, str]:
        """Translations."""
        data, written = self.splits[split], {}
        for part in shares([len(data[i]["source"]) for i in range(len(data))], rank, world):
            rows = [self.sequences(data[i])[0].tolist() for i in part]
            written.update(zip(part, self.translate(model, rows, self.recipe.evaluate.max_new)))
        return written

    def decoded_metrics(self, written: dict[int, str], split: str) -> dict[str, float]:
        """BLEU of the translations by sacrebleu (Post 2018), default tokenisation 13a, case kept."""
        import sacrebleu

        references = list(self.corpora[split][1])
        samples = getattr(self.splits[split], "indices", range(len(written)))  # of a Part: which of the lines they are
        hypotheses = [written[i] for i in range(len(written))]
        return {"bleu": sacrebleu.corpus_bleu(hypotheses, [[references[i] for i in samples]]).score}

    def examples(self, model: nn.Module, n: int) -> list[str]:
        samples = [self.splits["valid"][i] for i in range(min(n, len(self.splits["valid"])))]
        sources = [self.sequences(sample)[0].tolist() for sample in samples]
        lines = []
        for sample, ours in zip(samples, self.translate(model, sources, self.recipe.evaluate.max_new)):
            lines.append(f"source     {self.tokenizer.decode(sample['source'].tolist())}")
            lines.append(f"reference  {self.target_tokenizer.decode(sample['target'].tolist())}")
            lines += [f"ours       {ours}", ""]
        return lines


KIND = TaskKind(config=TranslationTask, tasks={"pairs": Translation}, drafts=("pairs",))
