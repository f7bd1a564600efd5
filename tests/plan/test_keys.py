"""Every layout that is printed pastes back: `key=value` words after the same command give the same plan."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from gradus.hardware import Cluster, cluster
from gradus.plan.answer import Answer, Request, answer, asked, pinned
from gradus.plan.keys import kind_of, layout_keys, stated_keys
from gradus.plan.search import SearchResult, Space, search
from gradus.plan.show import TIGHT, screen
from gradus.recipe.presets import PRESETS
from gradus.recipe.schema import DiLoCo, Layout, LocalSGD

SMALL = ("model.n_layers=2", "batch.samples=64")
THREE = (*SMALL, "model.n_heads=3")  # heads that no axis splits leave less to trace
GRID = ["1xT4", "1xV100", "1xA100-40GB", "8xV100", "4xA10G", "8xA100-80GB", "64xH100", "8xB200", "72xGB200", "8xMI300X", "1024xA100-80GB"]


def pasted(request: Request, words: str) -> Request:
    """The command with these words after it: the last --on and the last value of a key hold."""
    split = words.split()
    on = split[split.index("--on") + 1] if "--on" in split else request.on
    return dataclasses.replace(request, on=on, overrides=(*request.overrides, *(w for w in split if w.startswith("layout."))))


def replaced(request: Request, words: str) -> Request:
    """The same in place of the command's own layout.* words."""
    return pasted(dataclasses.replace(request, overrides=tuple(o for o in request.overrides if not o.startswith("layout"))), words)


def same(one: Answer, other: Answer) -> None:
    """To the last digit, and as printed."""
    assert one.recipe == other.recipe and (one.n, one.fits) == (other.n, other.fits)
    assert other.layout_keys == " ".join(word for word in one.layout_keys.split() if word.startswith("layout."))
    assert [(r.name, r.value, r.conditions.get("case")) for r in one.rows] == [(r.name, r.value, r.conditions.get("case")) for r in other.rows]
    heads = [itertools.takewhile(lambda line: not line.startswith("layout"), screen(made)) for made in (one, other)]
    assert list(heads[0]) == list(heads[1]), "fits, how long, how much"


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    [
        Request("gpt2-small", (*THREE, "data.max_len=256"), "V100", 1e9),  # a device without bf16
        # sharded weights gathered in bf16: layout.precision is fp32 then
        Request("llama3.2-1b", (*THREE, "model.n_kv_heads=3", "model.d_model=768", "data.max_len=512"), "2xH100", 1e9),
        Request("bert-base-uncased", (*THREE, "layout.checkpointing=full", "layout.precision=fp32"), "2xB200", 1e9),
    ],
    ids=lambda r: f"{r.recipe} on {r.on}",
)
def test_the_layout_of_a_plan_pastes_back(request_):
    made = answer(request_)
    for again in (pasted(request_, made.layout_keys), replaced(request_, made.layout_keys), pinned(request_, made)):
        assert not asked(again, []).choose or made.n == 1, "nothing is left to choose"
    assert (made.recipe.layout.param_dtype == "bf16") == (request_.recipe == "llama3.2-1b")
    same(made, answer(replaced(request_, made.layout_keys)))


@pytest.mark.slow
def test_a_number_of_devices_that_was_found_pastes_back():
    request = Request("gpt2-small", (*THREE, "data.max_len=256"), "A100-80GB", 1e10, 0.15)
    made = answer(request)
    assert made.layout_keys.startswith(f"--on {made.n}xA100-80GB ") and made.n > 1
    same(made, answer(pasted(request, made.layout_keys)))


@pytest.mark.slow
def test_advice_fits_as_it_says():
    """Of a layout that the plan chose itself, and that does not fit: each line of what would."""
    request = Request("gpt2-small", (*THREE, "data.max_len=512", "batch.samples=16", "model.d_ff=800000"), "2xV100-16GB", 1e9)
    made = answer(request)
    assert made.fits is False and len(made.advice) == 2  # on more of them, on others
    for line in made.advice:
        words, _, said = line.partition(": ")
        again = answer(pasted(request, words))
        share = again.value("memory/device") / again.value("memory/capacity")
        assert (again.fits or (again.tight and TIGHT in said)) and f"({share:.0%})" in said, line
    assert not any(row.name.startswith(("time/", "budget/", "energy/")) for row in made.rows)
    text = "\n".join(screen(made))
    assert "NO FIT" in text and not any(word in text for word in ("how long", "how much", "$", "Wh", "CO2", "days", "years"))


def holds(found: SearchResult, request: Request) -> int:
    """How many rows of a search paste back: to the recipe with that layout, on that many devices, with nothing left to choose."""
    for c in found.table:
        words = found.words(c)
        case, on, counted, chosen = asked(pasted(request, words), [])
        assert case.layout == c.layout and (on.n, counted or c.n == found.cluster.n, chosen and c.n > 1) == (c.n, True, False), words
        assert any(words in line for line in found.lines()) and all(" --on" not in f" {w}" or c.n != found.cluster.n for w in [words])
    assert {row.conditions["layout"] for row in found.rows()} == {found.keys(c) for c in found.table}
    return len(found.table)


@pytest.mark.slow
def test_every_row_of_a_search_pastes_back():
    request = Request("gpt2-small", ("model.n_layers=2", "batch.samples=64", "layout.checkpointing=full", "layout.tf32=true"), "2xH100", 1e9)
    case, *_ = asked(request, [])
    assert holds(search(case, cluster("2xH100")), request) >= 5


def test_sections_and_null():
    layout = Layout(local_sgd=LocalSGD(every=4), precision="bf16")
    assert layout_keys(layout) == "layout.precision=bf16 layout.local_sgd.every=4"
    assert layout_keys(Layout(), Layout(micro_batch=8, diloco=DiLoCo(every=2))) == "layout.micro_batch=null layout.diloco=null"
    assert layout_keys(Layout(), Layout(), {"precision"}) == "layout.precision=fp32"
    assert stated_keys(["layout.diloco.every=3", "model.n_layers=2", "layout.tensor=2"]) == {"diloco", "tensor"}
    assert stated_keys(["layout={tensor: 2}"]) == set(Layout.model_fields)
    assert [kind_of(on) for on in ("8xA100-80GB", "H100", "1_024 × H100", "this")] == ["A100-80GB", "H100", "H100", "this"]


def check_pair(preset: str, on: str, layout: Layout) -> None:
    request = Request(preset, (), on)
    own, *_ = asked(request, [])
    words = layout_keys(layout, own.layout, stated_keys(request.overrides))
    again, there, _, chosen = asked(pasted(request, words), [])
    assert again.recipe == own.at(layout).recipe, words
    assert there == cluster(on) and not chosen
    assert len(words) < 400 and words.count("layout.layout") == 0


HALF = {"param_dtype": "bf16", "reduce_dtype": "bf16"}
SAMPLE = {
    ("llama3.2-1b", "8xH100"): Layout(shard=8, **HALF, micro_batch=1, reshard=False),
    ("vit-l16", "1xH100"): Layout(precision="bf16", micro_batch=64, checkpointing="selective"),
    ("t5-small", "8xV100"): Layout(precision="fp16", micro_batch=4),
    ("seq2seq-base", "72xGB200"): Layout(precision="bf16", micro_batch=1, tensor=8, sequence_parallel=True),
    ("bert-base-cased", "8xB200"): Layout(precision="bf16", micro_batch=8, pipeline=2, schedule="interleaved"),
}


@pytest.mark.parametrize(("preset", "on"), SAMPLE)
def test_a_presets_layout_pastes_back(preset, on):
    check_pair(preset, on, SAMPLE[preset, on])


@pytest.mark.slow
def test_presets_layouts_paste_back_on_all_kinds():
    """A plan is a function of the recipe and the hardware: where the words give the very recipe, they give the very plan. Of all that a
    search may choose one in the middle and the last, of every third preset."""
    done, presets = 0, list(PRESETS)[::3]
    for preset, on in zip(presets, itertools.cycle(GRID)):
        own, hardware, *_ = asked(Request(preset, (), on), [])
        space = Space(own, hardware)
        layouts = [layout for split in space.splits() for layout in space.variants(split.model_copy(update={"micro_batch": 1}))]
        for layout in layouts and (layouts[len(layouts) // 2], layouts[-1]):  # of some none: a batch that cannot be split
            check_pair(preset, on, layout)
        done += bool(layouts)
    assert done > 0.9 * len(presets)


@pytest.mark.slow
def test_every_row_of_a_presets_search_pastes_back():
    request = Request("t5-small", ("model.n_layers=2", "model.n_decoder_layers=2", "model.n_heads=3"), "2xV100-32GB")
    case, hardware, *_ = asked(request, [])
    assert holds(search(case, Cluster(hardware.device, 2)), request)
