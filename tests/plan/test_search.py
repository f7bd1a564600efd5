"""The search over layouts: what wins fits, is allowed, is what the plan chooses and prints; what loses says why."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradus import hardware
from gradus.errors import UserError
from gradus.hardware import Cluster
from gradus.parallel import check
from gradus.plan.answer import Request, answer, open_recipe
from gradus.plan.case import Case
from gradus.plan.search import (
    DAY,
    HEADROOM,
    Candidate,
    SearchResult,
    Space,
    best_layout,
    fewest_in_time,
    ranked,
    remedy,
    search,
    why_free,
)
from gradus.plan.show import printed
from gradus.recipe.schema import Layout, Recipe
from gradus.rows import read_rows
from gradus.text import duration, size

SMALL = {"model.n_layers": 4}
THREE = {"model.n_layers": 2, "model.n_heads": 3}  # two blocks, and heads that no axis splits, leave less to trace
WORDS = ("batch.samples=16", "model.n_layers=2", "model.n_heads=3")  # as recipe_of has it: what was traced for one question is there for the next
ON = hardware.cluster("2xL4")
EXHAUSTIVE = str(Path(__file__).parents[2] / "benchmarks/search_exhaustive.py")


def recipe_of(name: str, samples: int = 16, **overrides) -> Recipe:
    words = (f"batch.samples={samples}", f"layout.micro_batch={min(8, samples)}", *(f"{k}={v}" for k, v in overrides.items()))
    return open_recipe(Request(name, words, tokens=1e9), [])[0]


def case_of(recipe: Recipe, n: int = 1) -> Case:
    return Case.of(recipe, n, "cuda")


def space_of(recipe: Recipe, cluster: Cluster, stated: tuple[str, ...] = ()) -> Space:
    return Space(case_of(recipe, cluster.n), cluster, stated)


def best_of(recipe: Recipe, cluster: Cluster) -> Candidate:
    return ranked(space_of(recipe, cluster))[0][0]


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(case_of(recipe_of("gpt2-small", **THREE)), ON)


@pytest.mark.slow
def test_memory_that_stays_free_is_explained_by_plans_of_other_layouts():
    """What the note says of less checkpointing is what `gradus plan` says of these layouts."""
    words = ("batch.samples=64", "model.n_layers=2", "model.n_heads=3", "data.max_len=256")
    recipe = open_recipe(Request("gpt2-small", words, tokens=1e9), [])[0]
    chosen = recipe.layout.model_copy(update={"precision": "bf16", "micro_batch": 64, "checkpointing": "full"})
    device = dataclasses.replace(hardware.find("L4"), memory=4e9, usable=1.0)
    text = why_free(space_of(recipe, Cluster(device, 1)), chosen)
    found = re.fullmatch(r"layout\.checkpointing=selective would take (.+) of 4 GB and (.+) per step; with layout\.micro_batch=(\d+) also (.+) of 4 GB and (.+) per step", text)
    assert found, text
    needed, longer, micro, less, seconds = found.groups()

    def planned(micro):
        return answer(Request("gpt2-small", (*words, f"layout.micro_batch={micro}", "layout.checkpointing=selective"), "L4", 1e9))

    same, smaller = planned(64), planned(micro)
    assert size(same.value("memory/device")) == needed and size(smaller.value("memory/device")) == less
    assert (duration(same.value("time/step")), duration(smaller.value("time/step"))) == (longer, seconds)
    assert smaller.value("memory/device") <= HEADROOM * 4e9 < planned(2 * int(micro)).value("memory/device")


def test_the_winners_fit_and_are_allowed(found):
    assert found.fastest and found.fewest
    for c in (found.fastest, found.cheapest, found.fewest):
        assert c.needed <= HEADROOM * c.capacity and c.seconds > 0
        check.validate(found.recipe.model_copy(update={"layout": c.layout}), c.n)
    assert found.fewest.n == 1
    assert all(found.fastest.seconds <= c.seconds for c in found.table)
    charge = functools.partial(found.charge, steps=1000)
    assert all(charge(found.cheapest) <= charge(c) for c in found.table if c.money)


def test_every_loser_says_why(found):
    assert all(bool(c.reason) == (c is not found.fastest) for c in found.table)
    names = {row.conditions["layout"] for row in found.rows()}
    assert found.keys(found.fastest) in names and any("fastest" in line for line in found.lines())


def test_the_best_of_every_number_of_devices_is_in_the_table(found, monkeypatch):
    """Also where so many layouts of all the devices are faster that it is not among the first."""

    def ranked(space, most=1):
        space.n_estimated = 1
        some = [dataclasses.replace(found.fastest, n=space.n, money=None, time=SimpleNamespace(total=10 / space.n + i / 100, parts={"memory": i / 100})) for i in range(20)]
        return some[:most], []

    monkeypatch.setattr("gradus.plan.search.ranked", ranked)
    table = search(case_of(found.recipe), hardware.cluster("32xH100")).table
    assert [c.n for c in table] == [32] * 8 + [16, 8, 4, 2, 1]


def test_a_search_is_printed_in_80_columns_and_its_keys_paste(found):
    lines = list(printed(found.lines()))
    assert max(map(len, lines)) <= 80
    text = " ".join("\n".join(lines).replace("\\\n", " ").split())
    assert all(found.words(c) in text for c in found.table) and all(c.reason in text for c in found.table)


def test_the_keys_make_the_same_layout(found):
    for c in found.table:
        given = dict(pair.removeprefix("layout.").split("=", 1) for pair in c.keys.split())
        assert Layout(**given).model_dump() == c.layout.model_copy(update={"device": "auto"}).model_dump()


def test_the_same_question_has_the_same_answer(found):
    again = search(case_of(found.recipe), found.cluster)
    assert [(c.keys, c.n, c.seconds, c.reason) for c in again.table] == [(c.keys, c.n, c.seconds, c.reason) for c in found.table]


def test_a_second_search_reads_which_layouts_won(tmp_path, monkeypatch):
    """And prices them again; what is torn is not read."""
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))
    recipe = recipe_of("gpt2-small", **THREE)
    first = best_of(recipe, ON)
    (path,) = (tmp_path / "layouts").iterdir()
    monkeypatch.setattr(Space, "walk", lambda space: pytest.fail("looked at all layouts again"))
    assert best_of(recipe, ON) == first
    monkeypatch.undo()
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))
    path.write_text(path.read_text()[:40])
    assert best_of(recipe, ON) == first


@pytest.mark.parametrize("on", ["L4", "2xL4"])
def test_the_plan_chooses_and_prints_the_searchs_first(on):
    """And any other layout of the table is planned as it was ranked, to the last digit."""
    made = answer(Request("gpt2-small", WORDS, on))
    found = search(case_of(open_recipe(Request("gpt2-small", WORDS), [])[0]), made.cluster)
    assert (made.value("time/step"), made.value("memory/device")) == (found.fastest.seconds, found.fastest.needed)
    assert made.recipe.layout == found.fastest.layout
    for c in found.table[1:3]:
        other = answer(Request("gpt2-small", (*WORDS, *found.keys(c).split()), f"{c.n}x{found.cluster.device.name}"))
        assert (other.value("time/step"), other.value("memory/device")) == (c.seconds, c.needed)


@pytest.mark.slow
def test_nothing_fits():
    """And of what does not fit a search says no time and no money."""
    wide = {**THREE, "model.d_ff": 2_000_000}  # 98 GB of states
    large, said = recipe_of("gpt2-small", samples=8, **wide, **{"layout.precision": "bf16", "layout.checkpointing": "full"}), {"precision", "checkpointing"}
    found = search(case_of(large), hardware.cluster("2xA100-40GB"), steps=1000, stated=said)
    assert {row.name for row in found.rows()} == {"search/memory"} and "$" not in "\n".join(found.lines())
    assert found.fastest is None and found.cheapest is None and not any(c.fits for c in found.table)
    assert "does not fit" in found.table[0].reason and "optimizer" in " ".join(c.reason for c in found.table)
    text = "\n".join(found.lines())
    assert "nothing fits" in text
    on = hardware.cluster(text.partition("--on ")[2].split()[0])  # where the batch as it is can be split so
    assert on.n > 2 and ranked(space_of(large, on, stated=said))[0][0].fits


def test_what_does_not_fit_has_a_remedy():
    recipe, on = recipe_of("gpt2-medium", **{"model.n_layers": 36, "layout.micro_batch": 16}), hardware.cluster("RTX-3090")
    assert not space_of(recipe, on).evaluate(recipe.layout).fits
    c = remedy(case_of(recipe), on)
    assert c.fits and c.n == 1 and c.layout.micro_batch < 16 and c.layout.tensor == 1


def test_the_loss_by_chunks_is_offered_before_all_else():
    recipe = recipe_of("gpt2-small", **{"model.n_layers": 24, "layout.micro_batch": 16})
    assert not space_of(recipe, hardware.cluster("L4")).evaluate(recipe.layout).fits
    c = remedy(case_of(recipe), hardware.cluster("L4"))
    assert c.fits and c.layout == recipe.layout.model_copy(update={"loss": "chunked"})
    images = remedy(case_of(recipe_of("vit-l16", samples=512, **{"layout.micro_batch": 512})), hardware.cluster("L4"))
    assert images.fits and images.layout.loss == "whole"


@pytest.mark.slow
def test_a_smaller_micro_batch_is_offered_before_checkpointing():
    recipe = recipe_of("gpt2-small", samples=320, **{**THREE, "layout.micro_batch": 320, "layout.loss": "chunked"})
    space = space_of(recipe, hardware.cluster("L4"))
    assert not space.evaluate(recipe.layout).fits and space.evaluate(recipe.layout.model_copy(update={"checkpointing": "full"})).fits
    c = remedy(case_of(recipe), hardware.cluster("L4"))
    assert c.fits and c.layout.micro_batch < 320 and c.layout.checkpointing == "none"


@pytest.mark.slow
def test_time_falls_with_devices():
    recipe = recipe_of("gpt2-small", samples=512, **THREE)
    seconds = [best_of(recipe, Cluster(hardware.find("H100"), n)).seconds for n in (1, 2, 8)]
    assert all(more < less for less, more in itertools.pairwise(seconds))


def test_a_deadline_takes_the_fewest_in_whole_nodes():
    recipe, h100, stated = recipe_of("gpt2-small", samples=128, **THREE), hardware.cluster("H100"), ("checkpointing",)
    in_time = functools.partial(fewest_in_time, case_of(recipe), h100, 1000, stated=stated)

    def seconds(n: int) -> float:
        return ranked(space_of(recipe, Cluster(h100.device, n), stated))[0][0].seconds

    days = 1000 * seconds(1) / DAY
    assert in_time(1.01 * days).n == 1
    several = in_time(days / 10)
    assert several.n % 8 == 0 and 1000 * several.seconds / 0.89 <= days / 10 * DAY
    fewer = several.n - 8
    assert 1000 * seconds(fewer) / (0.89 if fewer > 8 else 1) > days / 10 * DAY
    with pytest.raises(UserError, match="no number of H100"):
        in_time(days / 1e6)


def test_a_stated_precision_stays():
    layout = best_layout(case_of(recipe_of("gpt2-small", **THREE, **{"layout.precision": "bf16"})), ON).case.layout
    assert layout.precision == "bf16" or layout.param_dtype == "bf16"


def test_what_was_said_of_the_layout_stays():
    words = "batch.samples=16", "model.n_layers=2", "layout.checkpointing=full", "layout.precision=fp32", "layout.tensor=2"
    layout = answer(Request("gpt2-small", words, "2xL4")).recipe.layout
    assert (layout.checkpointing, layout.precision, layout.tensor) == ("full", "fp32", 2)


def test_nodes_have_their_own_size():
    tensors = {split.tensor for split in space_of(recipe_of("gpt3-175b", samples=72), hardware.cluster("64xGB200")).splits()}
    assert 32 in tensors and max(s.tensor for s in space_of(recipe_of("gpt3-175b"), hardware.cluster("64xH100")).splits()) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seq2seq-base", "bert-base-uncased", "t5-small", "vit-b16", "llama3.2-1b", "gpt2-small"])
def test_all_families(name):
    """Whatever a search may choose is allowed: nothing is traced for it."""
    more = {"model.n_experts": 4} if name == "gpt2-small" else {}
    recipe = recipe_of(name, samples=32, **SMALL, **more)
    seen = [layout for _, layout in runpy.run_path(EXHAUSTIVE)["layouts"](space_of(recipe, hardware.cluster("8xA100-80GB")))]
    for layout in seen:
        check.validate(recipe.model_copy(update={"layout": layout}), 8)
    assert max(layout.expert if more else layout.tensor for layout in seen) >= 4 and {layout.shard for layout in seen} == {1, 2, 4, 8}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seq2seq-base", "gpt2-small"])
def test_an_encoder_and_experts_are_searched(name):
    more = {"model.n_experts": 2} if name == "gpt2-small" else {"model.n_decoder_layers": 2, "model.d_model": 384}
    recipe = recipe_of(name, **THREE, **more)
    check.validate(recipe.model_copy(update={"layout": best_layout(case_of(recipe), ON).case.layout}), 2)


def test_an_impossible_number_of_devices():
    with pytest.raises(UserError, match=r"batch\.samples"):
        search(case_of(recipe_of("gpt2-small", samples=1, **SMALL)), hardware.cluster("7xH100"))


ROWS = read_rows(Path(__file__).parents[2] / "benchmarks/results/search-exhaustive.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.everything] * (case != "t5")) for case in dict.fromkeys(row["case"] for row in ROWS)])
def test_the_best_of_all_layouts_are_found(case):
    """The 20 best ways to split of every layout, evaluated exactly (benchmarks/search_exhaustive.py), each as fast within
    0.2 %; fewer are estimated for it."""
    rows = [row for row in ROWS if row["case"] == case]
    space = runpy.run_path(EXHAUSTIVE)["space_of"](case)

    def split(keys: str) -> frozenset[str]:
        return frozenset(re.findall(r"layout\.((?:tensor|pipeline|context|context_method|shard|expert)=\w+)", keys))

    found = {split(c.keys): c.seconds for c in ranked(space, len(rows))[0]}
    assert [found.get(split(row["layout"])) for row in rows] == pytest.approx([row["value"] for row in rows], rel=2e-3)
    assert 0 < space.n_estimated < rows[0]["priced"]
