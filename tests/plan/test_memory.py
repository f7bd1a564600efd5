"""The extension of few layers, stages and micro-batches, against steps that are traced whole."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from gradus.plan import batches as making
from gradus.plan import memory
from gradus.plan.memory import NAMES, Unequal, matched, plan_memory, traced_work
from gradus.plan.trace import trace_recipe
from gradus.recipe import schema
from gradus.recipe.presets import PRESETS

sys.path[:0] = [str(Path(__file__).parent)]

from test_trace import FAMILIES, recipe  # noqa: E402

SMALL = {"layers": 5, "d": 32, "seq": 16, "vocab": 64}


def both(r, n: int, case: memory.Case) -> tuple[memory.Steps, memory.Steps]:
    given = making.micro_batches(r, n)
    if r.layout.pipeline > 1:
        given = [given[0]] * (case.micro_batches + case.more)
    return memory.extended(r, case, []), memory.steps_of(trace_recipe(r, n, case.rank, micro_batches=given))


def peak(steps: memory.Steps) -> int:
    return round(steps.levels[:, : len(NAMES)].sum(1).max())


def summed(counted: dict[tuple, tuple[float, float]], *places: int) -> dict[tuple, tuple[float, float]]:
    out: dict[tuple, tuple[float, float]] = {}
    for key, (count, total) in counted.items():
        to = tuple(key[i] for i in places)
        old = out.get(to, (0, 0))
        out[to] = (old[0] + count, old[1] + total)
    return {key: value for key, value in out.items() if value[0]}


HALF = {"precision": "bf16", "checkpointing": "full"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [*((family, {}) for family in FAMILIES), ("gpt", HALF), ("bert", HALF)], ids=str)
def test_layers(family, layout):
    r = making.complete(recipe(family, **SMALL, **layout))
    (case,) = memory.cases(r, 1, "cpu", None)
    extended, whole = both(r, 1, case)
    assert peak(extended) == peak(whole) and extended.held == whole.held
    assert summed(extended.ops, 0, 1, 2, 3, 4) == summed(whole.ops, 0, 1, 2, 3, 4)
    top = whole.levels[whole.levels[:, : len(NAMES)].sum(1).argmax()]
    assert (extended.levels[extended.levels[:, : len(NAMES)].sum(1).argmax()] == top).all()  # by component


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "layout"), [(1, {"micro_batch": 1}), (2, {}), (4, {"shard": 4, "param_dtype": "bf16", "checkpointing": "full"}), (2, {"tensor": 2})], ids=str
)
def test_layouts(n, layout):
    r = making.complete(recipe("gpt", **SMALL, **layout))
    (case,) = memory.cases(r, n, "cpu", None)
    extended, whole = both(r, n, case)
    assert peak(extended) == peak(whole)
    assert summed(extended.transfers, 0, 1, 5, 6) == summed(whole.transfers, 0, 1, 5, 6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_pipelines(schedule):
    """First stage and last, of four stages and seven micro-batches; the schedule's own indices are a few bytes."""
    r = making.complete(recipe("gpt", samples=7, **SMALL, pipeline=4, micro_batch=1, schedule=schedule))
    for case in memory.cases(r, 4, "cpu", None):
        extended, whole = both(r, 4, case)
        assert abs(peak(extended) - peak(whole)) <= 64
        assert summed(extended.transfers, 0, 1, 5, 6) == summed(whole.transfers, 0, 1, 5, 6)


def test_what_does_not_match_is_told():
    a = [("a", 1), ("b", 2), ("c", 3)]
    assert matched(a, [("a", 1), ("b", 2), ("b", 2), ("c", 3)]) == [(0, 0), (1, 1), (1, 2), (2, 3)]
    with pytest.raises(Unequal):
        matched(a, [("a", 1), ("x", 2), ("y", 3)])


def preset(name: str, samples: int, **layout) -> schema.Recipe:
    model = TypeAdapter(schema.Model).validate_python({"preset": name, **PRESETS[name]})
    return schema.Recipe(
        model=model, task=schema.CausalLMTask(), data=schema.TextData(path="absent", max_len=2048), optimizer=schema.AdamW(lr=1e-4),
        train=schema.Train(steps=9, clip_norm=1.0), batch=schema.Batch(samples=samples), layout=schema.Layout(**layout),
    )  # fmt: skip


@pytest.mark.slow
def test_notes_say_what_was_not_traced():
    m = plan_memory(recipe("gpt", samples=4, **SMALL, shard=2, micro_batch=1, offload=True), 2)
    assert any("offload" in note for note in m.notes) and any("layout.micro_batch" in note for note in m.notes)


@pytest.mark.slow
def test_175b_on_1024():
    r = preset("gpt3-175b", 1024, shard=1024, micro_batch=1, param_dtype="bf16", checkpointing="full")
    began = time.process_time()
    m = plan_memory(r, 1024, target="cuda")
    work = traced_work(r, 1024, target="cuda")
    assert time.process_time() - began < 30
    assert m.parameters == 174_604_259_328  # Brown et al. 2020, with 2,048 positions and 50,257 tokens
    part = m.parameters * 4 / 1024
    assert m.held["weights"] == pytest.approx(part, rel=0.001) and m.held["optimizer"] == pytest.approx(2 * part, rel=0.001)
    assert sum(m.components.values()) == m.allocated <= m.reserved < m.device_total
    tokens = 1024 * 2048
    matrices = m.parameters - 2048 * 12_288 - 96 * 13 * 12_288 - 2 * 12_288  # of matrix products: no positions, biases and norms
    assert work.model_flops == pytest.approx((6 * matrices + 12 * 96 * 12_288 * 2048) * tokens, rel=1e-6)
    assert work.tokens == tokens
