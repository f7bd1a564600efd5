"""Models of which a part is trained: frozen by pattern, adapted, and adapted with a base stored small. The step put together of profiles
against the same step traced whole, and against what is measured on one process and on two that shard."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradus import models
from gradus.errors import UserError
from gradus.layers import LoRALinear
from gradus.parallel import check
from gradus.parallel.mesh import Mesh
from gradus.plan import batches as making
from gradus.plan import engine
from gradus.plan.case import Case
from gradus.recipe.schema import Adapter, Recipe
from gradus.text import size

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import test_engine as whole  # noqa: E402
from distributed import run  # noqa: E402
from test_trace import measured  # noqa: E402
from test_trace import recipe as of_family  # noqa: E402

KINDS = {
    "full": {},
    "frozen": {"freeze": ["all", "-blocks.4", "-blocks.3.feedforward"]},
    "lora": {"adapter": {"rank": 4}},
    "int8": {"adapter": {"rank": 4, "base": "int8"}},
    "nf4": {"adapter": {"rank": 4, "base": "nf4"}},
    "nf4, attention": {"adapter": {"rank": 4, "base": "nf4", "targets": ["attention"]}},
}
HALF = {"precision": "bf16", "micro_batch": 2}
LAYOUTS = {
    "one": (1, {}), "micro-batches": (1, {"micro_batch": 2}), "checkpointing": (1, {"checkpointing": "full", **HALF}),
    "selective": (1, {"checkpointing": "selective", **HALF}), "pure": (1, {"precision": "pure_bf16"}),
    "replicas": (2, {"micro_batch": 1}), "shard": (2, {"shard": 2, "micro_batch": 1}),
    "shard, half": (2, {"shard": 2, "micro_batch": 1, "param_dtype": "bf16"}),
}  # fmt: skip
QUICK = [("llama", "nf4", "micro-batches"), ("gpt", "int8", "shard"), ("llama", "frozen", "one"), ("llama", "nf4, attention", "pure")]


def recipe(family: str, kind: str, layers: int = 5, **layout) -> Recipe:
    adapter, freeze = KINDS[kind].get("adapter"), KINDS[kind].get("freeze")
    adapter = adapter and Adapter(**adapter)
    r = of_family(family, samples=6, layers=layers, seq=16, vocab=96, **layout)
    model = r.model.model_copy(update={"dropout": 0.0}).trained(adapter, freeze)
    train = r.train.model_copy(update={"freeze": freeze})
    return making.complete(r.model_copy(update={"adapter": adapter, "train": train, "model": model}))


def differences(family: str, kind: str, layout: str) -> list[tuple[str, float, float]]:
    n, keys = LAYOUTS[layout]
    r = recipe(family, kind, 4 if family == "t5" else 5, **keys)
    check.validate(r, n)
    case = whole.Case(r, n, "cpu", f"{family} {kind} {layout}")
    bounds = {"memory": 1e-5 if n > 1 else 0, "bytes": 1e-9, "optimizer": 0.01}
    bounds |= {"memory": 0.015, "bytes": 0.04, "optimizer": 0.1} if "param_dtype" in keys else {}
    return [(what, a, b) for _, what, a, b in whole.compared(case) if whole.off(a, b) > bounds.get(what.split()[0], 1e-9)]


@pytest.mark.parametrize("family, kind, layout", QUICK)
def test_composed_as_traced_whole(family, kind, layout):
    assert differences(family, kind, layout) == []


@pytest.mark.slow
@pytest.mark.parametrize("family, kind, layout", [  # every kind, layout and family; of a Llama each kind that is not stored small with both checkpointing and processes
    ("llama", "frozen", "selective"), ("llama", "frozen", "shard"), ("llama", "lora", "selective"), ("llama", "lora", "replicas"),
    ("llama", "nf4, attention", "replicas"), ("llama", "int8", "checkpointing"), ("gpt", "nf4", "shard, half"), ("bert", "int8", "replicas"), ("t5", "nf4", "shard"),
    ("vit", "nf4, attention", "selective"),
])  # fmt: skip
def test_more_of_them(family, kind, layout):
    assert differences(family, kind, layout) == []


@pytest.mark.parametrize("freeze, layout", [
    (["all", "-blocks.1"], {"pipeline": 2}), pytest.param(["all", "-blocks.4"], {"pipeline": 2, "schedule": "gpipe"}, marks=pytest.mark.slow),
    pytest.param(["all", "-head"], {"pipeline": 2, "schedule": "interleaved"}, marks=pytest.mark.slow),
    pytest.param(["all", "-blocks.0"], {"pipeline": 2, "schedule": "zero_bubble"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_stage_that_trains_nothing_is_planned(freeze, layout):
    r = recipe("gpt", "full", layers=5, micro_batch=2, **layout)
    r = r.model_copy(update={"model": r.model.trained(None, freeze), "train": r.train.model_copy(update={"freeze": freeze})})
    for process, what, composed, traced in whole.compared(whole.Case(r, 2, "cpu", str(layout))):
        assert composed == pytest.approx(traced, rel={"memory": 0.06, "optimizer": 0.12}.get(what, 1e-3), abs=64), (process, what)
    if freeze[1] != "-head":  # which the first stage has too, as its embedding
        assert 0 in [int(p.optimizer_bytes) for p in engine.processes(Case.of(r, 2))]


def test_what_a_base_stored_small_takes():
    """By hand, of a Llama: a byte a weight and 4 a row; half a byte a weight, 4 a block of 64, and 256 pairs of values a Linear."""
    state = {kind: engine.plan(Case.of(recipe("llama", kind, layers=3, micro_batch=2))).memory.state for kind in ("lora", "int8", "nf4")}
    config = recipe("llama", "lora", layers=3).model
    base = models.build(config.trained(None), "meta")
    shapes = [tuple(p.shape) for name, p in base.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    elements, rows = sum(out * into for out, into in shapes), sum(out for out, _ in shapes)
    assert state["int8"]["weights"] == state["lora"]["weights"] - 4 * elements + elements + 4 * rows
    assert state["nf4"]["weights"] == state["lora"]["weights"] - 4 * elements + sum(-(-o * i // 64) * 36 for o, i in shapes) + 2048 * len(shapes)
    assert state["nf4"]["optimizer"] == state["lora"]["optimizer"] and state["nf4"]["gradients"] == state["lora"]["gradients"]
    trained = sum(p.numel() for p in models.build(config, "meta").parameters() if p.requires_grad)
    assert state["lora"]["optimizer"] == pytest.approx(8 * trained, rel=0.02) and state["lora"]["gradients"] == 4 * trained


# ---------------------------------------------------------------- measured


@pytest.mark.parametrize("kind", ["frozen", "lora", pytest.param("nf4", marks=pytest.mark.slow)])
def test_selective_checkpointing_takes_less_than_none(kind):
    """What is computed again are products of frozen weights too: a sum alone needs them."""
    layers = 5 if kind == "frozen" else 2
    selective, none = (recipe("gpt", kind, layers, checkpointing=mode) for mode in ("selective", "none"))
    assert engine.plan(Case.of(selective)).memory.allocated < engine.plan(Case.of(none)).memory.allocated
    assert measured(selective)[1] < measured(none)[1]


def test_a_plan_says_that_a_base_stored_small_is_not_split():
    """By hand, of a Llama: half a byte a weight and 4 a block of 64, and 256 pairs of values a Linear, on one process as on two."""
    r = recipe("llama", "nf4", layers=2, shard=2)
    linears = [m for name, m in models.build(r.model.trained(None), "meta").named_modules() if name.startswith("blocks.") and hasattr(m, "in_features")]
    base = sum(-(-m.weight.numel() // 64) * 36 + 2048 for m in linears)
    (note,) = (note for note in engine.plan(Case.of(r, 2)).memory.notes if "base" in note)
    assert f"the base in nf4, {size(base)}, lies whole on every device" in note


def of_processes(world, kinds: list[str], layout: dict) -> dict[str, tuple[dict[str, int], int]]:
    return {kind: measured(recipe("llama", kind, 2, **layout), Mesh.make(recipe("llama", kind, 2, **layout).layout, world)) for kind in kinds}


@pytest.mark.parametrize("kind", ["nf4", pytest.param("frozen", marks=pytest.mark.slow), pytest.param("lora", marks=pytest.mark.slow), pytest.param("int8", marks=pytest.mark.slow)])
def test_planned_as_measured(kind):
    r = recipe("llama", kind)
    planned = engine.plan(Case.of(r)).memory
    held, peak = measured(r)
    adapted = sum(isinstance(m, LoRALinear) for m in models.build(r.model, "meta").modules())  # each keeps its scale, a number of 8 bytes
    assert {name: planned.state[name] for name in held} == held and 0 <= peak - planned.allocated <= 8 * adapted


@pytest.mark.slow
def test_planned_as_measured_on_two_that_shard():
    layout = {"shard": 2, "micro_batch": 1}
    found = run(2, of_processes, ["lora", "nf4"], layout)[0]
    for kind, (held, peak) in found.items():
        planned = engine.plan(Case.of(recipe("llama", kind, 2, **layout), 2)).memory
        assert {name: planned.state[name] for name in held} == held, kind
        assert planned.allocated == pytest.approx(peak, rel=0.02), kind


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("n, layout", [(2, {"tensor": 2}), (2, {"pipeline": 2, "micro_batch": 1}), (2, {"shard": 2, "offload": True})])
def test_what_cannot_be_combined(n, layout):
    with pytest.raises(UserError, match=r"adapter.base: cannot be combined with layout\.(tensor|pipeline|offload)=.*: (?!.*layout.shard).*Set layout\.(tensor=1|pipeline=1|offload=false)"):
        check.validate(recipe("llama", "nf4", **layout), n)
