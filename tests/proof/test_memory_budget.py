"""What fits: the largest micro-batch by the plan, what would fit instead, and what this machine has."""

from __future__ import annotations

import dataclasses

import pytest

from gradus import recipe as recipes
from gradus.proof.memory_budget import (
    MemoryBudget,
    budget_of,
    capacity,
    largest_micro_batch,
    local_batch,
    suggested_fix,
    with_micro_batch,
)
from gradus.proof.predict import with_fewest
from gradus.recipe.schema import Batch, Layout
from gradus.train.session import open_session

TINY = {"model.n_layers": 1, "model.d_model": 32, "model.n_heads": 2, "model.d_ff": 64, "data.n_train": 4096, "data.n_valid": 8,
        "schedule.warmup_steps": 2, "batch.samples": 64, "train.steps": 12, "layout.device": "cpu"}  # fmt: skip


@pytest.fixture(scope="module")
def budget():
    recipe = recipes.load("copy-task", **TINY)
    session = open_session(recipe)
    return session.recipe, budget_of(session)


def searched(recipe, memory_budget, need, available: float, limit: int | None = None):
    asked = []
    memory_budget.available = available
    found = largest_micro_batch(recipe, memory_budget, limit, lambda k: asked.append(k) or need(k))
    return found, asked


def test_on_a_line_few_traces_are_enough(budget):
    for available, expected in ((1000 + 7 * 37, 37), (1000 + 7 * 37 + 6, 37), (1000 + 7 * 64, 64), (1000 + 7, 1), (1000, None)):
        found, asked = searched(*budget, lambda k: 1000 + 7 * k, available)
        assert found == expected and len(asked) <= 8 and len(set(asked)) == len(asked), asked


def test_steps_and_bends_are_searched_to_the_end(budget):
    for need in (lambda k: 100 * -(-k // 8), lambda k: k * k, lambda k: 5 if k <= 50 else 10_000, lambda k: 10 * k + (500 if k < 64 else 0)):
        for available in (1, 99, 100, 333, 3000):
            found, _ = searched(*budget, need, available)
            fits = [k for k in range(1, 65) if need(k) <= available]
            assert found == (fits[-1] if fits else None)


def test_micro_batches_and_batches(budget):
    recipe, _ = budget
    assert local_batch(recipe, 1, None) == 64
    small, large = with_micro_batch(recipe, 20, 1, 64), with_micro_batch(recipe, 100, 1, 64)
    assert (small.layout.micro_batch, small.batch.samples) == (20, 64) and (large.layout.micro_batch, large.batch.samples) == (100, 100)
    assert with_micro_batch(recipe, 100, 4, 16).batch.samples == 400, "every process has its 100"


def test_more_samples_need_more_memory(budget):
    recipe, r = budget
    need = [r.need(with_micro_batch(recipe, k, 1, 64)) for k in (32, 64, 128)]
    assert need == sorted(need) and need[2] - need[1] == pytest.approx(2 * (need[1] - need[0]), rel=0.25)
    assert need[0] > r.resident > 5e7


@pytest.mark.slow
def test_what_does_not_fit_says_what_would_fit(budget):
    r = budget[1]
    long = recipes.load("copy-task", **{**TINY, "task.length": 100, "model.seq_len": 128, "model.n_layers": 4, "batch.samples": 2})
    r = dataclasses.replace(r, task=None)
    r.available = r.need(long.model_copy(update={"layout": long.layout.model_copy(update={"micro_batch": 1, "checkpointing": "full"})}))
    said = suggested_fix(long, r)
    again = long.model_copy(update={"layout": recipes.load("copy-task", [word for word in said.split() if "=" in word]).layout})
    assert r.need(again) <= r.available < r.need(with_micro_batch(long, 1, 1, 2)) and said == "Set layout.checkpointing=full layout.micro_batch=1"
    r.available = r.resident + 1
    assert "layout.shard" in suggested_fix(long, r) and "Set " not in suggested_fix(long, r)


def test_the_host_has_a_capacity():
    import torch

    assert 2**28 < capacity(torch.device("cpu")) < 2**50


@pytest.mark.parametrize(("shard", "processes", "micro_batch"), [(1, 2, 16), (2, 4, 16), (4, 8, 16)])
def test_where_few_replicas_are_left_each_has_all_its_processes(shard, processes, micro_batch, budget, monkeypatch):
    """layout.min_replicas=2: micro-batches stay as large as with all 4 × shard processes, and so does a process's part of the weights."""
    layout = {"elastic": True, "min_replicas": 2, "shard": shard, "device": "cpu"}
    recipe = budget[0].model_copy(update={"layout": Layout(**layout), "batch": Batch(samples=64 * shard)})
    monkeypatch.setattr(MemoryBudget, "need", lambda self, recipe: (self.processes, recipe.layout.micro_batch))
    assert with_fewest(recipe, dataclasses.replace(budget[1], processes=4 * shard, task=None)) == (processes, micro_batch)
    assert with_fewest(recipe, dataclasses.replace(budget[1], processes=2 * shard, task=None)) is None
