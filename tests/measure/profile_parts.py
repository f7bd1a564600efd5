"""What the tests of a profile share: a small recipe, and its recorded calls."""

from __future__ import annotations

import collections

from gradus import recipe as recipes
from gradus.measure.profile import memory_picture, record
from gradus.train.session import open_session

TINY = {"model.n_layers": 1, "model.d_model": 32, "model.n_heads": 2, "model.d_ff": 64, "data.n_train": 60, "data.n_valid": 5, "batch.samples": 16,
        "layout.device": "cpu"}  # fmt: skip


def tiny(**more):
    return recipes.load("copy-task", **{**TINY, **more})


def times(rows, kind):
    return {row["name"].split("/", 2)[2]: row for row in rows if row["name"].startswith(f"time/{kind}/")}


def calls(tmp_path, **more):
    trainer, steps, _, _ = memory_picture(open_session(tiny(**more)), tmp_path)
    return record(trainer, steps, tmp_path, 1).cycles[0].calls


def shares(tmp_path, kind="category", **more):
    every, found = calls(tmp_path, **more), collections.Counter()
    total = sum(call.own for call in every)
    for call in every:
        found[getattr(call, kind)] += call.own / total
    return found
