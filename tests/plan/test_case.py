"""A question of a plan is completed once, and the cases of other layouts are derived from it."""

from __future__ import annotations

import math

import pytest

from gradus import hardware
from gradus import recipe as recipes
from gradus.plan import batches
from gradus.plan.case import Case
from gradus.plan.search import Space
from gradus.recipe.axes import data_parallel_size, sizes, strides
from gradus.recipe.schema import Layout, Recipe

SMALL = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.vocab_size=64", "data.max_len=8", "train.epochs=null", "train.steps=3"]


def small(name: str, *overrides: str) -> Recipe:
    return recipes.load(name, [*SMALL, "batch.samples=8", *overrides])


def test_what_the_task_decides_is_decided_once(monkeypatch):
    recipe, asked = recipes.load("copy-task", ["batch.samples=8", "layout.micro_batch=null"]), []
    monkeypatch.setattr(batches, "complete", lambda recipe, complete=batches.complete: asked.append(1) or complete(recipe))
    case = Case.of(recipe)
    assert recipe.model.vocab_size is None and case.recipe.model.vocab_size == recipe.task.n_symbols
    other = case.at(Layout(shard=2), n=4, samples=16)
    assert other.recipe.model is case.recipe.model and (other.n, other.layout.shard, other.recipe.batch.samples) == (4, 2, 16)
    assert (case.n, case.layout, case.recipe.batch.samples) == (1, recipe.layout, 8)
    assert other.batches.samples == 16 // 4 and case.batches.samples == 8 and other.one_sample.batches.samples == 1
    assert len(asked) == 1


@pytest.mark.parametrize(("n", "axes"), [(1, {}), (8, {"tensor": 2, "shard": 2}), (8, {"pipeline": 2, "context": 2})])
def test_its_axes_are_the_layouts(n, axes):
    case = Case.of(small("wikitext2-gpt", "batch.samples=16"), n).at(Layout(**axes))
    assert (case.shape, case.stride) == (sizes(case.layout, n), strides(case.layout, n))
    assert case.data_parallel == data_parallel_size(case.layout, n) and math.prod(case.shape.values()) == n


def test_a_search_asks_for_micro_batches_of_a_size_once(monkeypatch):
    made = []

    def asked(recipe: Recipe, n: int = 1, *, task=None, make=batches.micro_batches):
        made.append((-(-recipe.batch.samples // data_parallel_size(recipe.layout, n)), recipe.layout.micro_batch))
        return make(recipe, n, task=task)

    monkeypatch.setattr(batches, "micro_batches", asked)
    space = Space(Case.of(small("wikitext2-gpt")), hardware.cluster("8xA100-80GB"))
    sizes_of = [[space.case.at(split.model_copy(update={"micro_batch": k})).batches for k in space.micro_batch_sizes(split)] for split in space.splits()]
    assert sum(map(len, sizes_of)) > 2 * len(made) == 2 * len(set(made))


def test_given_micro_batches_are_taken_in_place_of_the_recipes():
    case = Case.of(small("wikitext2-gpt"))
    given = [case.at(samples=k).batches.full for k in (4, 4, 2)]
    own = Case.of(small("wikitext2-gpt"), given=given).batches
    assert (own.count, own.samples, own.full, own.tail) == (3, 10, given[0], given[2]) and own.parts == pytest.approx(2.5)
