"""Which batch a plan takes for the largest."""

from __future__ import annotations

import random

from gradus import recipe as recipes
from gradus.data.loader import Loader
from gradus.plan.batches import micro_batches, size_of
from gradus.train.session import open_session


def test_of_parallel_text_the_largest_batch_is_the_one_with_the_most_padding(tmp_path):
    """Pairs with as many tokens on both sides together may have one long side each: against every batch of the epoch."""
    pick = random.Random(0)
    lengths = [(n := pick.randint(1, 11), 12 - n) for _ in range(120)] + [(6, 7)] * 8  # the last: the longest together
    for side, name in enumerate(("de", "en")):
        for split in ("train", "valid"):
            (tmp_path / f"{split}.{name}").write_text("".join(" ".join("a" * pair[side]) + "\n" for pair in lengths))
    recipe = recipes.load(
        "multi30k-seq2seq",
        **{"data.path": str(tmp_path), "data.test": None, "tokenizer": {"kind": "word"}, "model.d_model": 16, "model.n_heads": 2, "model.d_ff": 16,
           "model.n_layers": 1, "batch.tokens": None, "batch.samples": 8, "evaluate.test": False},
    )  # fmt: skip
    task = open_session(recipe).task
    plan = task.plan("train", samples=8, tokens=None)
    every = [step.micro_batches[0] for step, _ in zip(Loader(task.splits["train"], plan, task.collate).steps(0, 0), plan.epoch(0))]
    largest = max(map(size_of, every))
    assert largest > 8 * 13 and size_of(micro_batches(recipe, task=task)[0]) == largest
