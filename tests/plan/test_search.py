"""The search over layouts: what wins fits, is allowed and is the same every time; what loses says why."""

from __future__ import annotations

import itertools
import time

import pytest

from gradus import hardware
from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.parallel import check
from gradus.plan import hf
from gradus.plan.answer import Request, open_recipe
from gradus.plan.search import Found, best_candidates, quick_time, search
from gradus.recipe.schema import Layout, Recipe

SMALL = {"model.n_layers": 4}


def recipe_of(name: str, samples: int = 64, **overrides) -> Recipe:
    words = (f"batch.samples={samples}", f"layout.micro_batch={min(8, samples)}", *(f"{k}={v}" for k, v in overrides.items()))
    return open_recipe(Request(name, words, tokens=1e9), [])[0]


@pytest.fixture(scope="module")
def found() -> Found:
    return search(recipe_of("gpt2-small", **SMALL), hardware.cluster("4xH100"))


def test_the_winners_fit_and_are_allowed(found):
    assert found.complete and found.fastest and found.fewest
    for c in (found.fastest, found.cheapest, found.fewest):
        assert c.needed <= c.capacity and c.seconds > 0
        check.validate(found.recipe.model_copy(update={"layout": c.layout}), c.n)
    assert found.fewest.n == 1
    assert all(found.fastest.seconds <= c.seconds for c in found.table if c.seconds)
    assert all(found.cheapest.money <= c.money for c in found.table if c.money)


def test_every_loser_says_why(found):
    assert all(bool(c.reason) == (c is not found.fastest) for c in found.table)
    names = {row.conditions["layout"] for row in found.rows()}
    assert found.keys(found.fastest) in names and any("fastest" in line for line in found.lines())


def test_the_keys_make_the_same_layout(found):
    for c in found.table:
        given = dict(pair.removeprefix("layout.").split("=", 1) for pair in c.keys.split())
        assert Layout(**given).model_dump() == c.layout.model_copy(update={"device": "auto"}).model_dump()


def test_the_same_question_has_the_same_answer(found):
    again = search(found.recipe, found.cluster)
    assert [(c.keys, c.n, c.seconds, c.reason) for c in again.table] == [(c.keys, c.n, c.seconds, c.reason) for c in found.table]


def test_nothing_fits():
    found = search(recipe_of("gpt3-175b", samples=8), hardware.cluster("2xA100-40GB"), limit_s=20)
    assert found.fastest is None and found.cheapest is None and not any(c.fits for c in found.table)
    assert "does not fit" in found.table[0].reason and "optimizer" in " ".join(c.reason for c in found.table)
    text = "\n".join(found.lines())
    assert "nothing fits" in text
    on = hardware.cluster(text.partition("--on ")[2].split()[0])  # where the batch as it is can be split so
    assert on.n > 2 and best_candidates(found.recipe, on)[0].fits


def test_time_falls_with_devices_until_traffic_rules():
    recipe = recipe_of("gpt2-small", samples=512, **SMALL)
    device = hardware.find("H100")
    seconds = [best_candidates(recipe, Cluster(device, n))[0].seconds for n in (1, 2, 4, 8)]
    assert all(more < less for less, more in itertools.pairwise(seconds))
    slow = recipe.model_copy(update={"layout": Layout(precision="bf16", micro_batch=1), "batch": recipe.batch.model_copy(update={"samples": 64})})
    alone = quick_time(slow, Cluster(device, 1))
    many = [quick_time(slow, Cluster(device, n)) * n for n in (8, 64)]
    assert alone < many[0] < many[1]  # devices are wasted: the same traffic for less work each


def test_a_stated_precision_stays():
    for precision in ("fp32", "bf16"):
        layout = best_candidates(recipe_of("gpt2-small", **SMALL, **{"layout.precision": precision}), hardware.cluster("2xH100"))[0].layout
        assert layout.precision == precision or (precision == "bf16" and layout.param_dtype == "bf16")


def test_the_best_is_found_quickly_at_175b_on_1024():
    recipe, cluster = hf.recipe_for("gpt3-175b", tokens=3e11), hardware.cluster("1024xA100-80GB")
    started = time.process_time()
    layout = best_candidates(recipe, cluster)[0].layout
    assert time.process_time() - started < 6  # two seconds of a processor
    check.validate(recipe.model_copy(update={"layout": layout}), 1024)
    assert layout.shard > 1 or layout.tensor * layout.pipeline > 1


def test_all_families():
    for name in ("seq2seq-base", "bert-base-uncased", "t5-small", "vit-b16", "llama3.2-1b", "gpt2-small"):
        more = {"model.n_experts": 4} if name == "gpt2-small" else {}
        recipe = recipe_of(name, samples=32, **SMALL, **more)
        layout = best_candidates(recipe, hardware.cluster("8xA100-80GB"))[0].layout
        check.validate(recipe.model_copy(update={"layout": layout}), 8)


def test_an_impossible_number_of_devices():
    with pytest.raises(UserError, match=r"batch\.samples"):
        search(recipe_of("gpt2-small", samples=1, **SMALL), hardware.cluster("7xH100"), fewer=False)
