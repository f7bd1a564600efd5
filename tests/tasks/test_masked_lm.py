"""Masked tokens and next sentences: what an evaluation is made of comes from the split that is evaluated."""

from __future__ import annotations

import numpy as np
import pytest

from gradus import recipe as recipes
from gradus import tasks
from gradus.data.loader import Loader, Plan
from gradus.data.tokenizers import WordTokenizer
from gradus.errors import UserError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = {split: [f"{split}{a}{b}" for a in LETTERS for b in LETTERS] for split in ("train", "other", "valid")}


def text(split: str, n: int = 24) -> str:
    rng = np.random.default_rng(len(split))
    return "\n\n".join(" ".join(rng.choice(WORDS[split], 12)) for _ in range(n)) + "\n"


def opened(tmp_path, train: str = "train", n: int = 24, *more: str):
    folder = tmp_path / train
    folder.mkdir(exist_ok=True)
    (folder / "train.txt").write_text(text(train))
    (folder / "valid.txt").write_text(text("valid", n))
    words = ["task.next_sentence=true", "model.head=pretraining", "model.pooler=true", "data.pack=documents", "evaluate.test=false"]
    words += ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.seq_len=32", "data.max_len=null"]
    recipe = recipes.load("wikitext2-bert", [*words, f"data.path={folder}", f"data.cache={tmp_path / 'cache'}", *more])
    tokenizer = WordTokenizer.from_texts([" ".join(w) for w in WORDS.values()], False)
    return tasks.open_task(recipe, {"": tokenizer})


def evaluated(task, rank: int = 0, world: int = 1, size: int = 4) -> list[dict]:
    data = task.splits["valid"]
    plan = Plan(len(data), 0, batch_samples=size, shuffle=False)
    loader = Loader(data, plan, lambda samples: {"samples": samples}, prepare=task.prepare_evaluation, rank=rank, world=world)
    return [sample for step in loader.steps(0) for batch in step.micro_batches for sample in batch["samples"]]


def whole(sample: dict) -> list[int]:
    """The row before it was masked."""
    row = sample["ids"].copy()
    row[np.flatnonzero(sample["select"])] = sample["targets"]
    return row.tolist()


def test_an_evaluation_sees_no_training_text(tmp_path):
    task = opened(tmp_path)
    samples = evaluated(task)
    valid = {i for row in range(24) for i in task.splits["valid"][row]["ids"].tolist()} | {*task.before, *task.after}
    wrong = [s for s in samples if s["follows"]]
    assert len(samples) == 24 and 4 < len(wrong) < 20, "about half of them"
    assert all(set(whole(s)) <= valid for s in samples)
    rows = [task.splits["valid"][i]["ids"].tolist() for i in range(24)]
    for i, s in enumerate(samples):
        row, second = whole(s), np.asarray(s["types"])
        part = [t for t, kind in zip(row, second) if kind][:-1]
        beginnings = [j for j, other in enumerate(rows) if other[: len(part)] == part]
        assert (not s["follows"] and rows[i][-len(part) :] == part) or (beginnings and beginnings != [i]), "another row's beginning"


def test_it_depends_neither_on_the_training_text_nor_on_the_layout(tmp_path):
    one, other = evaluated(opened(tmp_path)), evaluated(opened(tmp_path, "other"))
    assert [whole(s) for s in one] == [whole(s) for s in other] and [s["follows"] for s in one] == [s["follows"] for s in other]
    task = opened(tmp_path)
    shared = [whole(s) for rank in (0, 1) for s in evaluated(task, rank, 2, 8)]
    assert sorted(shared) == sorted(whole(s) for s in one)


def test_one_row_has_no_other(tmp_path):
    with pytest.raises(UserError, match=r"task\.next_sentence=true: the valid split has 1 row of text, .* Give more text, a larger data\.limit"):
        opened(tmp_path, "train", 1)
    with pytest.raises(UserError, match="the train split has 1 row"):
        opened(tmp_path, "train", 24, "data.limit=1")
