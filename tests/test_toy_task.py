"""A task that lives in this file alone: no line of the package knows it.

A cloze (Schick & Schütze 2021): [CLS] text [MASK] [SEP], and the class is the word that BERT's head over words puts in the place of the mask.
`gradus new` writes it for texts with labels, it is planned, trained, tuned by an adapter, cut over two processes, evaluated, asked and reported.
The pytest process itself never registers it, so that no other test sees it: everything runs in processes of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradus.data.collate import pad_sequences
from gradus.recipe.schema import Recipe, TaskConfig
from gradus.tasks import kinds
from gradus.tasks.base import Batch, TokenTask, around, likeliest
from gradus.tasks.kinds import TaskKind
from gradus.tasks.made import Sample
from gradus.tasks.sources import open_labelled

sys.path.insert(0, str(Path(__file__).parent))

from distributed import run

# ---------------------------------------------------------------- the task


class ClozeTask(TaskConfig):
    """The class of a text as the word behind it."""

    heads = {"masked_lm": {}}
    name: Literal["cloze"] = "cloze"
    classes: list[str] | None = None  # names of the classes; from the data when not given


class Cloze(TokenTask):
    best = "accuracy"

    def __init__(self, recipe: Recipe, tokenizers: dict | None = None):
        super().__init__(recipe)
        self.room = min(recipe.data.max_len or recipe.model.seq_len, recipe.model.seq_len) - 3
        self.tokenizers, self.splits, classes = open_labelled(recipe, tokenizers, self.room)
        self.classes = recipe.task.classes or classes
        self.before, self.after = around(self.tokenizer, "a cloze", mask=self.tokenizer.mask_id)
        last = self.tokenizer.vocab_size - 1
        self.words = torch.arange(last, last - len(self.classes), -1)  # a word for each class: the last of the vocabulary

    def resolved(self, recipe: Recipe) -> Recipe:
        return recipe.model_copy(update={"task": recipe.task.model_copy(update={"classes": self.classes})})

    def collate(self, samples: list[Sample]) -> Batch:
        rows = [np.array([*self.before, *s["ids"][: self.room], self.tokenizer.mask_id, *self.after]) for s in samples]
        ids, keep = pad_sequences(rows, self.tokenizer.pad_id)  # (batch, seq)
        labels = self.words[[s.get("label", 0) for s in samples]]  # (batch,)
        select = ids == self.tokenizer.mask_id
        return {"ids": ids, "keep": keep, "select": select, "labels": labels, "counts": {"tokens": len(rows)}, "n_tokens": sum(map(len, rows))}

    def output(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["ids"], keep=batch["keep"], select=batch["select"])  # (batch, vocab)

    def read(self, text: str, longest: int) -> Sample:
        return {"ids": np.array(self.tokenizer.encode(text)[: self.room])}

    def answers(self, model: Any, samples: list[Sample], top: int) -> Iterator[dict[str, Any]]:
        logits = self.output(model, self.to_device(self.collate(samples), model.device))
        chances = logits[:, self.words].float().softmax(-1)  # (batch, classes)
        for sample, (_, best) in zip(samples, likeliest(chances, self.classes.__getitem__, top)):
            truth = {} if "label" not in sample else {"truth": self.classes[sample["label"]]}
            yield {**best[0], "top": best, **truth, **({"right": truth["truth"] == best[0]["label"]} if truth else {})}


KIND = TaskKind(
    config=ClozeTask, tasks={"labelled": Cloze}, learners={"bert": "labelled"}, drafts=("labelled",),
    comment="A class is the word in the place of a mask.",
)  # fmt: skip

# ---------------------------------------------------------------- what the processes do

SMALL = ["model.d_model=32", "model.d_ff=64", "model.n_heads=4", "model.seq_len=16", "model.dropout=0", "tokenizer.vocab_size=300", "layout.device=cpu"]
SHORT = ["train.steps=80", "evaluate.every=40", "batch.samples=8", "optimizer.lr=1e-2", "log.every=1", "layout.threads=1", "evaluate.samples=0"]


def said(*words: str) -> str:
    """What a command prints, of which nothing may fail."""
    from gradus.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        code = main(list(words))
    assert code == 0, out.getvalue()
    return out.getvalue()


def train(world, folder: Path, runs: dict[str, list[str]]) -> None:
    kinds.register(KIND)
    from gradus import recipe as recipes
    from gradus.train import run

    for name, overrides in runs.items():
        where = [f"data.cache={folder / 'cache'}", f"log.dir={folder / name}"]
        with contextlib.redirect_stdout(io.StringIO()):
            run.train(recipes.load(folder / "cloze.yaml", [*where, *SHORT, *overrides]), world=world)


def everything(world, folder: Path) -> dict[str, str]:
    kinds.register(KIND)
    file, one, lora = (str(folder / name) for name in ("cloze.yaml", "one", "lora"))
    found = {"new": said("new", file, "--data", str(folder / "texts.csv")), "recipe": Path(file).read_text()}
    train(world, folder, {"one": SMALL})
    train(world, folder, {"lora": [f"model.init={one}", "tokenizer.path=null", "tokenizer.kind=file", "adapter.rank=4", "train.steps=4", "evaluate.every=4"]})
    sized = [*SMALL, "model.vocab_size=300"]
    found["plan"] = said("plan", file, "--on", "2xA100-80GB", *sized, "layout.pipeline=2", "layout.micro_batch=4", "data.path=absent.csv")
    found["evaluate"] = said("evaluate", one, "--report", str(folder / "page"))
    found["predict"] = said("predict", one, "a dreadful book, number 3", "a splendid film, number 4", "--top", "1")
    found["lora"] = said("predict", lora, "a splendid film, number 4")
    found["split"] = said("predict", one, "--split", "valid", "--n", "6", "--to", str(folder / "said.jsonl"))
    return found


def losses(run: Path) -> dict[tuple[str, int], float]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {(row["name"], row["step"]): row["value"] for row in found if row["name"].split("/")[-1] in ("loss", "grad_norm", "accuracy")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cloze")
    good, bad, things = ("a splendid", "a lovely"), ("a dreadful", "a dull"), ("film", "book", "play")
    lines = [f'"{(good, bad)[i % 2][i // 2 % 2]} {things[i % 3]}, number {i}",{("good", "bad")[i % 2]}' for i in range(120)]
    (folder / "texts.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    return folder


@pytest.fixture(scope="module")
def done(folder) -> dict[str, str]:
    return run(1, everything, folder, environment={"GRADUS_CACHE": str(folder / "cache"), "COLUMNS": "120"})[0]


def test_new_writes_it(done):
    assert "classes    2: bad 60, good 60" in done["new"]
    assert "name: cloze" in done["recipe"] and "# What the model learns. A class is the word in the place of a mask.\n" in done["recipe"]


def test_it_learns_and_is_evaluated(folder, done):
    found = losses(folder / "one")
    assert found["valid/accuracy", 80] == 1.0 and found["train/loss", 80] < 0.2 < found["train/loss", 1]
    assert re.search(r"valid/accuracy +1\b", done["evaluate"]), done["evaluate"]
    tuned = losses(folder / "lora")
    assert tuned["train/loss", 1] < 0.2 and tuned["valid/accuracy", 4] == 1.0


def test_it_is_planned(done):
    flat = " ".join(done["plan"].split())
    assert "on 2 × A100-80GB (pipeline 2, fp32)" in flat and "GB per device" in flat and "planned for samples of full length" in flat


def test_a_model_that_learned_it_is_asked(folder, done):
    first, second = done["predict"].splitlines()[-2:]
    assert first.startswith("bad 0.") and "dreadful" in first and second.startswith("good 0.") and "splendid" in second
    assert "good 0." in done["lora"].splitlines()[-1]
    assert "6 of 6 right" in done["split"]
    kept = [json.loads(line) for line in (folder / "said.jsonl").read_text().splitlines()]
    assert all(row["right"] and row["truth"] == row["label"] and "number" in row["input"] for row in kept) and len(kept) == 6


def test_it_is_reported(folder, done):
    page = (folder / "page/report.html").read_text()
    assert "1 run of cloze" in page and "validation accuracy" in page and "most often taken for" in page


@pytest.mark.slow
def test_two_stages_give_the_same_curve(folder, done):
    run(2, train, folder, {"stages": [*SMALL, "layout.pipeline=2", "layout.micro_batch=4", "train.steps=3", "schedule.warmup_ratio=0"]})
    run(1, train, folder, {"whole": [*SMALL, "layout.micro_batch=4", "train.steps=3", "schedule.warmup_ratio=0"]})
    whole, stages = losses(folder / "whole"), losses(folder / "stages")
    assert whole.keys() == stages.keys() and len(whole) > 6
    for key, value in whole.items():
        assert stages[key] == pytest.approx(value, rel=1e-5), key
