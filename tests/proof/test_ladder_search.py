"""What the ladder keeps, and why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradus import recipe as recipes
from gradus.proof import optimizations
from gradus.proof.ladder_search import Trial, climb
from gradus.proof.optimizations import OPTIMIZATIONS, Optimization, words

sys.path[:0] = [str(Path(__file__).parent)]

from proof_cases import KERNEL, NAIVE, context  # noqa: E402

HALF = Optimization("half", lambda *_: [{"layout.precision": "bf16"}, "fp16: for GPUs"])


def measure(**of: dict):
    """A measure that finds what `of` says of a value, and keeps what it was asked."""

    def measured(name, best, options, compare):
        measured.asked.append((name, best.layout.attention, [words(keys) for keys in options], compare))
        found = []
        for keys in options:
            told = {"ratio": 1.0, "saved": 0.0, "tensors": 100.0, **of.get(str(*keys.values()), {})}
            found.append(Trial(name, keys, 10.0, low=told.get("low", told["ratio"]), **{k: v for k, v in told.items() if k != "low"}))
        return found

    measured.asked = []
    return measured


def verdicts(found: list[Trial]) -> dict[str, str]:
    return {words(f.keys): f.verdict for f in found if f.keys}


def test_a_rung_that_pays_is_kept_and_the_next_is_measured_beside_it():
    told = measure(sdpa={"ratio": 1.5}, chunked={"ratio": 1.2}, bf16={"ratio": 0.5, "saved": 0.2})
    climbed = climb([KERNEL, HALF], NAIVE, context(), told)
    best = climbed.best
    assert climbed.keys == {"layout.attention": "sdpa"} and best.layout.attention == "sdpa" and best.layout.precision == "fp32"
    assert [asked[:2] for asked in told.asked] == [("01-kernel", "naive"), ("02-half", "sdpa")]
    assert verdicts(climbed.trials) == {
        "layout.attention=sdpa": "faster", "layout.attention=chunked": "faster; another is better", "layout.precision=bf16": "slower and smaller",
    }  # fmt: skip
    assert [f.verdict for f in climbed.trials if not f.keys] == ["left out: fp16: for GPUs"]


@pytest.mark.parametrize(
    ("goal", "told", "kept"),
    [
        ("speed", {"ratio": 1.01, "low": 1.005}, False),  # within the margin
        ("speed", {"ratio": 1.2, "low": 0.97}, False),  # within the spread
        ("speed", {"ratio": 1.2, "saved": 0.2, "wall_clock": [0.31, 0.67]}, False),  # slower as it ran, in most rounds
        ("speed", {"ratio": 1.2, "wall_clock": [0.9, 1.1, 1.2]}, True),
        ("speed", {"ratio": 1.2, "loss": 0.01}, False),  # not the same loss
        ("speed", {"ratio": 1.2, "loss": float("nan")}, False),
        ("speed", {"ratio": 1.2, "failed": "no memory"}, False),
        ("speed", {"ratio": 0.99, "saved": 0.3}, True),  # as fast, and smaller
        ("memory", {"ratio": 0.8, "saved": 0.3}, True),
        ("memory", {"ratio": 0.5, "saved": 0.3}, False),  # too slow
        ("memory", {"ratio": 1.2, "saved": 0.0}, True),  # as small, and faster
        ("memory", {"ratio": 1.2, "saved": -0.1}, False),
    ],
)
def test_what_pays(goal, told, kept):
    climbed = climb([KERNEL], NAIVE, context(goal), measure(sdpa={"loss": 1e-6, **told}, chunked={"ratio": 0.4}))
    assert bool(climbed.keys) == kept


def test_for_memory_the_smallest_is_best():
    told = measure(sdpa={"ratio": 1.5, "saved": 0.2, "tensors": 80.0}, chunked={"ratio": 0.9, "saved": 0.4, "tensors": 60.0})
    assert climb([KERNEL], NAIVE, context("memory"), told).keys == {"layout.attention": "chunked"}
    assert climb([KERNEL], NAIVE, context("speed"), told).keys == {"layout.attention": "sdpa"}


def test_what_makes_no_difference_is_kept_where_the_recipe_has_it():
    original = optimizations.with_keys(NAIVE, {"layout.attention": "sdpa"})
    climbed = climb([KERNEL], NAIVE, context(original=original), measure())
    assert climbed.keys == {"layout.attention": "sdpa"} and climbed.trials[0].verdict == "no difference: as in the recipe"
    assert climb([KERNEL], NAIVE, context(original=original), measure(sdpa={"ratio": 0.95})).keys == {}


def test_bf16_may_differ_by_more():
    told = {"ratio": 2.0, "loss": 0.02}
    assert climb([HALF], NAIVE, context(), measure(bf16=told)).keys == {"layout.precision": "bf16"}


def test_what_changes_the_recipe_is_named_and_what_is_not_ours_is_not_kept():
    bert = recipes.load("sst2-bert", ["model.init=null", "data.path=nowhere", "tokenizer.path=nowhere"])
    told = measure(bucket={"ratio": 2.0}, longest={"ratio": 1.5}, **{"64": {"ratio": 1.4}})
    start = optimizations.with_keys(bert, optimizations.first_rung(bert))
    climbed = climb([r for r in OPTIMIZATIONS if r.changes or "padding" in r.name], start, context(), told)
    assert climbed.keys == {"data.pad": "bucket"} and climbed.best.data.max_len == 128
    assert [compare for *_, compare in told.asked] == [True, False, False]
    assert verdicts(climbed.trials)["data.pad=bucket"] == "faster (the same samples in other batches)"
    assert "not kept: yours to decide" in verdicts(climbed.trials)["data.max_len=64"]


@pytest.mark.parametrize("data", ["chats, path: chats.jsonl", "labelled, path: texts, max_len: 32", "text, source: stdlib"])
def test_it_tries_what_a_recipe_can_say(data, tmp_path):
    """Chats have no data.pad: it was tried all the same, found nothing, and was named to be trained with."""
    task = {"chats": "{name: chat, template: chatml}", "labelled": "{name: classification}", "text": "{name: causal_lm}"}[data.split(",")[0]]
    family = "{family: bert, head: classification" if "labelled" in data else "{family: gpt"
    (tmp_path / "some.yaml").write_text(f"task: {task}\nmodel: {family}, n_layers: 1, d_model: 16, n_heads: 2, d_ff: 32, seq_len: 32}}\n"
                                        f"data: {{kind: {data}}}\ntokenizer: {{kind: bpe, vocab_size: 300}}\noptimizer: {{name: adamw, lr: 0.001}}\nbatch: {{samples: 4}}\ntrain: {{steps: 9}}\n")  # fmt: skip
    recipe = recipes.load(tmp_path / "some.yaml", [])
    tried = [optimizations.first_rung(recipe)]
    start = optimizations.with_keys(recipe, tried[0])
    told = measure()
    climb([o for o in OPTIMIZATIONS if o.name not in ("micro-batch", "compile")], start, context(), told)
    tried += [dict(word.split("=") for word in option.split()) for *_, options, _ in told.asked for option in options]
    assert len(tried) > 6
    for keys in tried:
        recipes.load(tmp_path / "some.yaml", words(keys).split())
    assert any("data.pad" in keys for keys in tried) == ("labelled" in data)
