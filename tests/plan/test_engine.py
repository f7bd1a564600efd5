"""A step put together from profiles of its parts (plan.engine) against the same step traced whole (plan.trace).

What a layout can ask for, over all families of models: the peak of memory, what is held, what is sent, and the
operations. A layout is given a precision, a checkpointing and a device by turns. A bound that is not met names its
cases, with both numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import shutil
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradus import hardware
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.layers import word_loss
from gradus.parallel import check
from gradus.plan import batches as making
from gradus.plan import case as plan_case
from gradus.plan import engine, peak, profiles, search, store, tracing
from gradus.plan.process import Memory
from gradus.plan.store import digest_of
from gradus.plan.trace import trace_recipe
from gradus.recipe import schema
from gradus.recipe.schema import Recipe
from gradus.torch_private import schedule_of
from gradus.train import machine

sys.path[:0] = [str(Path(__file__).parent)]

from test_trace import FAMILIES, recipe  # noqa: E402

PRECISION, CHECKPOINTING = ("fp32", "bf16", "pure_bf16"), ("none", "attention", "selective", "full")
WAYS = list(itertools.product(PRECISION, CHECKPOINTING, ("cpu", "cuda")))
OPTIMIZERS = {"adamw": schema.AdamW(lr=1e-3), "sgd": schema.SGD(lr=1e-3), "momentum": schema.SGD(lr=1e-3, momentum=0.9)}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


def setting(n=1, own=2, layers=4, experts: int | None = None, optimizer: str = "adamw", **layout) -> dict:
    """own: samples of a process; two in a micro-batch, so that settings share what is traced."""
    return {"n": n, "own": own, "layers": layers, "experts": experts, "optimizer": optimizer, "layout": layout}


SEVERAL = {"own": 6, "micro_batch": 2}
UNEVEN = {"own": 5, "micro_batch": 2}  # the last micro-batch is smaller
HALF = {"param_dtype": "bf16"}
ALONE = [
    setting(),
    setting(**SEVERAL),
    setting(**UNEVEN),
    setting(layers=5, own=7, micro_batch=3),
    setting(optimizer="sgd"),
    setting(optimizer="momentum", **SEVERAL),
    setting(attention="naive"),
    setting(attention="chunked", chunk=8, own=4, micro_batch=2),
    setting(experts=4),
    setting(experts=4, **SEVERAL),
]
REPLICAS = [
    setting(2),
    setting(2, **SEVERAL),
    setting(2, **UNEVEN),
    setting(3, bucket_mb=0.02),
    setting(2, bucket_mb=0.02, compress="bf16", **SEVERAL),
    setting(2, optimizer="sgd"),
    setting(2, shard_optimizer=True),
    setting(2, shard_optimizer=True, **SEVERAL),
    setting(3, shard_optimizer=True, optimizer="momentum"),
    setting(2, replicate="manual"),
    setting(2, replicate="manual", bucket_mb=0.02, **SEVERAL),
    setting(2, replicate="manual", shard_optimizer=True),
    setting(2, replicate="parameter_server"),
    setting(3, replicate="parameter_server", **SEVERAL),
    setting(2, local_sgd={"every": 4}),
    setting(2, local_sgd={"every": 2}, bucket_mb=0.02, **SEVERAL),
    setting(2, diloco={"every": 4}),
    setting(2, diloco={"every": 4}, optimizer="momentum", **SEVERAL),
    setting(2, experts=4),
]
SHARDS = [
    setting(2, shard=2),
    setting(2, shard=2, **SEVERAL),
    setting(2, shard=2, **UNEVEN),
    setting(4, shard=4, layers=5, **SEVERAL),
    setting(2, shard=2, reshard=False),
    setting(2, shard=2, reshard=False, **SEVERAL),
    setting(2, shard=2, **HALF),
    setting(2, shard=2, **HALF, **SEVERAL),
    setting(2, shard=2, reduce_dtype="bf16", **HALF, **SEVERAL),
    setting(2, shard=2, reshard=False, **HALF, **SEVERAL),
    setting(4, shard=2),
    setting(4, shard=2, **SEVERAL),
    setting(4, shard=2, **HALF),
    setting(2, shard=2, optimizer="momentum"),
    setting(2, shard=2, experts=4),
]
TENSOR = [
    setting(2, tensor=2),
    setting(2, tensor=2, **SEVERAL),
    setting(2, tensor=2, **UNEVEN),
    setting(2, tensor=2, sequence_parallel=False),
    setting(2, tensor=2, vocab_parallel=False),
    setting(2, tensor=2, sequence_parallel=False, vocab_parallel=False, **SEVERAL),
    setting(4, tensor=4),
    setting(4, tensor=2),
    setting(4, tensor=2, bucket_mb=0.02, **SEVERAL),
    setting(4, tensor=2, shard=2),
    setting(4, tensor=2, shard=2, **SEVERAL),
    setting(4, tensor=2, shard=2, **HALF, **SEVERAL),
]
CONTEXT = [
    setting(2, context=2),
    setting(2, context=2, context_method="ulysses"),
    setting(2, context=2, **SEVERAL),
    setting(2, context=2, context_method="ulysses", **UNEVEN),
    setting(4, context=2),
    setting(4, context=2, shard=2),
    setting(4, context=2, context_method="ulysses", shard=2, **SEVERAL),
    setting(4, context=2, tensor=2),
]
EXPERTS = [
    setting(2, experts=4, expert=2),
    setting(2, experts=4, expert=2, **SEVERAL),
    setting(4, experts=4, expert=2),
    setting(4, experts=4, expert=2, shard=2),
    setting(4, experts=4, expert=2, shard=2, **SEVERAL),
    setting(4, experts=4, expert=2, shard=2, **HALF),
    setting(4, experts=4, expert=2, bucket_mb=0.02, optimizer="momentum"),
]
PIPELINE = [
    *(setting(2, layers=5, pipeline=2, schedule=s, **SEVERAL) for s in SCHEDULES),
    *(setting(3, layers=6, own=10, micro_batch=2, pipeline=3, schedule=s) for s in SCHEDULES),
    setting(2, pipeline=2, schedule="zero_bubble", stages=1, **SEVERAL),
    setting(3, layers=5, pipeline=3, schedule="zero_bubble", stages=1, **SEVERAL),
    setting(2, pipeline=2, own=8, micro_batch=2, schedule="interleaved", optimizer="sgd"),
    setting(2, pipeline=2, **UNEVEN),
    setting(3, pipeline=3, own=4, micro_batch=2),
    setting(4, pipeline=2, **SEVERAL),
    setting(4, pipeline=2, schedule="interleaved", bucket_mb=0.02, **SEVERAL),
    setting(4, pipeline=2, tensor=2, **SEVERAL),
    setting(4, pipeline=2, tensor=2, schedule="interleaved", **SEVERAL),
    setting(4, pipeline=2, tensor=2, schedule="gpipe", sequence_parallel=False, **SEVERAL),
    setting(4, pipeline=2, shard=2, **SEVERAL),
    setting(4, pipeline=2, shard=2, schedule="gpipe", **HALF, **SEVERAL),
    setting(4, pipeline=2, shard=2, schedule="interleaved", **SEVERAL),
    setting(4, pipeline=2, shard=2, schedule="zero_bubble", **SEVERAL),
    setting(8, pipeline=2, shard=2, tensor=2, own=4, micro_batch=2),
    setting(4, pipeline=2, shard_optimizer=True, replicate="manual", **SEVERAL),
]
BY_CHUNKS = [
    setting(loss="chunked"),
    setting(loss="chunked", **SEVERAL),
    setting(loss="chunked", optimizer="momentum", **UNEVEN),
    setting(loss="chunked", experts=4, **SEVERAL),
    setting(2, loss="chunked", bucket_mb=0.02, **SEVERAL),
    setting(2, loss="chunked", replicate="manual", **UNEVEN),
    setting(2, loss="chunked", shard=2, **SEVERAL),
    setting(2, loss="chunked", shard=2, **HALF, **SEVERAL),
    setting(4, loss="chunked", shard=2, reshard=False, **UNEVEN),
    setting(2, loss="chunked", tensor=2, **SEVERAL),
    setting(4, loss="chunked", tensor=2, shard=2, **SEVERAL),
    setting(2, loss="chunked", context=2, **SEVERAL),
    *(setting(2, layers=5, loss="chunked", pipeline=2, schedule=s, **SEVERAL) for s in SCHEDULES[:3]),
    setting(4, loss="chunked", pipeline=2, tensor=2, **SEVERAL),
    setting(4, loss="chunked", pipeline=2, shard=2, **SEVERAL),
]
PLAIN_OUTER = [setting(2, diloco={"every": 2, "outer_momentum": 0.0})]
SETTINGS = [*ALONE, *REPLICAS, *SHARDS, *TENSOR, *CONTEXT, *EXPERTS, *PIPELINE, *BY_CHUNKS, *PLAIN_OUTER]


@dataclasses.dataclass(frozen=True)
class Case:
    recipe: Recipe
    n: int
    target: str
    name: str

    def __str__(self) -> str:
        return self.name


def case_of(family: str, way: tuple[str, str, str], n, own, layers, experts, optimizer, layout: dict) -> Case | None:
    """None: what does not go together."""
    precision, checkpointing, target = way
    if experts and family not in ("gpt", "llama"):
        return None
    samples = own * n // math.prod(layout.get(axis, 1) for axis in ("tensor", "context", "pipeline"))
    try:
        layout = {"precision": precision, "checkpointing": checkpointing, **layout}
        r = recipe(family, samples=samples, layers=layers, d=32, seq=16, vocab=64, **layout)
        model = r.model.model_copy(update={"n_experts": experts}) if experts else r.model
        r = making.complete(r.model_copy(update={"optimizer": OPTIMIZERS[optimizer], "model": model}))
        check.validate(r, n)
    except (UserError, ValueError):
        return None
    more = {"n": n, "samples": samples, "layers": layers, "experts": experts, "optimizer": optimizer, **layout}
    usual = {"experts": None, "optimizer": "adamw", "precision": precision, "checkpointing": checkpointing}
    said = " ".join(f"{k}={v}" for k, v in more.items() if k not in usual or v != usual[k])
    return Case(r, n, target, f"{family} {precision} {checkpointing} {target} {said}")


def grid(family: str) -> list[Case]:
    """Three of four settings, each in one of eight ways; the families leave out others, and all ways occur."""
    f, found = FAMILIES.index(family), []
    for i, s in enumerate(SETTINGS):
        j = i % 8
        if (i // 8 + i + f) % 4:
            way = PRECISION[j % 3], CHECKPOINTING[(j + f) % 4], ("cpu", "cuda")[(j // 4 + f % 3) % 2]
            found.append(case_of(family, way, **s))
    return [c for c in found if c]


# ---------------------------------------------------------------- what is compared


def flops(ops) -> float:
    return math.fsum(op.flops * op.count for op in ops)


def moved(ops) -> float:
    """Bytes of the operations that are bound by memory."""
    return math.fsum(op.bytes * op.count for op in ops if op.kind == "memory")


def sent(transfers) -> dict[tuple, float]:
    """Bytes by (axis, kind, group), of (axis, kind, group, payload, calls).

    A trace takes what is as short as single numbers for these.
    """
    out: Counter = Counter()
    for axis, kind, group, payload, calls in transfers:
        out["control" if payload <= 64 else axis, kind, group] += payload * calls
    return {key: nbytes for key, nbytes in out.items() if nbytes}


BOUNDS = {"memory": 0.03, "held": 0.0, "flops": 1e-9, "bytes": 0.01, "optimizer": 0.03, "sent": 1e-9}  # relative


def compared(case: Case) -> list[tuple[str, str, float, float]]:
    """(process, what, composed, whole)."""
    out = []
    for p in engine.processes(plan_case.Case.of(case.recipe, case.n, case.target)):
        rank = p.rank * (case.n // case.recipe.layout.pipeline)
        whole = trace_recipe(case.recipe, case.n, rank, target=case.target)
        mine, its, fullest = engine.step_work(p), whole.work, peak.peak_of(p)
        pairs = [
            ("memory", fullest.bytes, whole.peak),
            ("held", engine.state_of(p, fullest)["weights"], whole.state["weights"]),
            ("flops", flops(mine.micro) * mine.micro_batches, flops(its.micro) * its.micro_batches),
            ("bytes", moved(mine.micro) * mine.micro_batches, moved(its.micro) * its.micro_batches),
            ("optimizer", moved(mine.step), moved(its.step)),
        ]
        a = sent((t.axis, t.kind, t.group, t.payload, t.calls) for t in mine.transfers)
        b = sent((key[0], key[1], key[3], key[2], calls) for key, calls in whole.transfers.items())
        pairs += [(f"sent {key}", a.get(key, 0.0), b.get(key, 0.0)) for key in sorted({*a, *b})]
        out += [(f"rank {rank}", *pair) for pair in pairs]
    return out


def off(composed: float, whole: float) -> float:
    return abs(composed - whole) / max(abs(whole), abs(composed), 1e-30) if composed != whole else 0.0


def bound(case: Case, what: str) -> float:
    """Wider where it is known why: under FSDP2's own half weights tables of positions and prepared images stay in fp32, where a model in half
    has them in half; zero_bubble's two stages of one process hand on tensors of which a few live longer when each stage is traced by itself; of one stage a process, a ViT in bf16 is the farthest off."""
    layout = case.recipe.layout
    if what == "memory" and layout.schedule == "zero_bubble" and layout.stages == 1:
        return 0.08
    if what == "memory" and (layout.schedule == "zero_bubble" or (layout.param_dtype and case.recipe.model.family == "vit")):
        return 0.055
    if what == "memory" and case.recipe.model.model_dump().get("n_experts"):
        return 0.005
    if what == "bytes" and layout.param_dtype:
        return 0.06
    if what == "optimizer" and layout.param_dtype and case.recipe.model.family == "vit":
        return 0.1
    return BOUNDS[what]


def wrong(case: Case, found: list[tuple[str, str, float, float]]) -> list[tuple[float, str]]:
    """(how far off, the case in words), where a bound is not met."""
    out = []
    for process, what, composed, whole in found:
        error = off(composed, whole)
        if error > bound(case, what.split()[0]):
            line = f"{error:8.3%} {what}: composed {composed:,.0f}, whole {whole:,.0f} ({case}, {process})"
            out.append((error, line))
    return out


def told(failures: list[tuple[float, str]]) -> str:
    return f"{len(failures)} bounds are not met:\n" + "\n".join(line for _, line in sorted(failures, reverse=True))


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADUS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(engine, "_kept", {})
        patch.setattr(word_loss, "ROWS", 10)  # a micro-batch has some chunks
        yield


# ---------------------------------------------------------------- the grid


def features(case: Case) -> set:
    """What a case is an example of: each setting's value, the axes that are split together, batches."""
    layout, default = case.recipe.layout, schema.Layout()
    axes = {k: getattr(layout, k) for k in ("shard", "tensor", "context", "expert", "pipeline")}
    replicas = case.n // math.prod(axes.values())
    together = tuple(k for k, size in {**axes, "replicas": replicas}.items() if size > 1)
    sizes = "micro_batch", "bucket_mb", "chunk", *axes
    own = {(k, str(v)) for k, v in layout if v != getattr(default, k) and k not in sizes}
    model, optimizer = case.recipe.model, case.recipe.optimizer
    own |= {("schedule", layout.schedule, layout.stages)} if layout.pipeline > 1 else set()
    own |= {("target", case.target), ("family", model.family)}
    batches = replicas > 1, layout.shard > 1, layout.pipeline > 1, bool(layout.micro_batch)
    return own | {together, batches, (optimizer.name, getattr(optimizer, "momentum", 0))}


@functools.cache
def few() -> list[Case]:
    """Of the grid so many that all features occur, greedily."""
    known = [(features(c), c) for family in FAMILIES for c in grid(family)]
    left, out = set().union(*(found for found, _ in known)), []
    while left:
        most, case = max(known, key=lambda pair: len(pair[0] & left))
        out.append(case)
        left -= most
    return out


def test_the_grid_is_large():
    cases = [c for family in FAMILIES for c in grid(family)]
    assert len({str(c) for c in cases}) >= 300
    assert 15 <= len(few()) <= 30


QUICK = {0, 4, 8, 10, 12, 16, 20, 24}  # of tensor, shard and pipeline each two together


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (i not in QUICK), id=str(c)) for i, c in enumerate(few())])
def test_a_few_against_the_whole(case):
    failures = wrong(case, compared(case))
    assert not failures, told(failures)


def over(found: list[Case]) -> list[tuple[float, str]]:
    """Every bound that is not met. Prints how far off the memory is."""
    failures, errors = [], []
    for case in found:
        numbers_of = compared(case)
        failures += wrong(case, numbers_of)
        errors.append(max(off(composed, whole) for _, what, composed, whole in numbers_of if what == "memory"))
    print(f"{len(errors)} cases, memory off by {median(errors):.3%} at the median, {max(errors):.3%} at most")
    return failures


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "t5", "seq2seq", "vit"])  # of which there are one or two above
def test_some_of_the_grid_against_the_whole(family):
    """The whole grid: `python tests/plan/test_engine.py`."""
    failures = over(grid(family)[3::60])
    assert not failures, told(failures)


# ---------------------------------------------------------------- any layout


@st.composite
def cases(draw) -> Case | None:
    family = draw(st.sampled_from(FAMILIES))
    axes = {k: draw(st.sampled_from([1, 1, 1, 2])) for k in ("shard", "tensor", "pipeline", "context", "expert")}
    ranks = draw(st.sampled_from([1, 1, 2])) * axes["shard"] * axes["expert"]
    own = draw(st.integers(1, 4))
    layout = {**axes, "micro_batch": draw(st.sampled_from([None, *range(1, own + 1)]))}
    experts = 4 if axes["expert"] > 1 or (family in ("gpt", "llama") and draw(st.booleans())) else None
    if axes["shard"] > 1:
        layout |= {"reshard": draw(st.booleans()), "param_dtype": draw(st.sampled_from([None, "bf16"]))}
    if axes["tensor"] > 1:
        layout |= {"sequence_parallel": draw(st.booleans()), "vocab_parallel": draw(st.booleans())}
    if axes["context"] > 1:
        layout["context_method"] = draw(st.sampled_from(["ring", "ulysses"]))
    if axes["pipeline"] > 1:
        layout["schedule"] = draw(st.sampled_from(SCHEDULES))
    way, optimizer = draw(st.sampled_from(WAYS)), draw(st.sampled_from(list(OPTIMIZERS)))
    n = ranks * axes["tensor"] * axes["pipeline"] * axes["context"]
    return case_of(family, way, n, own, draw(st.integers(4, 6)), experts, optimizer, layout)


@pytest.mark.slow
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(cases().filter(lambda case: case is not None))
def test_any_against_the_whole(case):
    failures = wrong(case, compared(case))
    assert not failures, told(failures)


# ---------------------------------------------------------------- the profiles that are kept


def refuse(*args, **kwargs):
    raise AssertionError("it is traced again")


def numbers(case: Case) -> list[tuple]:
    found = [(engine.step_work(p), peak.peak_of(p), p) for p in engine.processes(plan_case.Case.of(case.recipe, case.n))]
    return [(fullest.bytes, engine.state_of(p, fullest), flops(work.micro), moved(work.step)) for work, fullest, p in found]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_the_interleaved_schedule_is_pytorchs(processes, stages):
    counts = [m for m in range(processes, 5 * processes) if m % (m // processes) == 0]
    for micro, rank in itertools.product(counts, range(processes)):
        theirs = list(schedule_of("interleaved", processes, stages, micro, rank))
        own = sorted({stage for _, stage, _ in theirs})
        assert [(kind, own.index(stage), i) for kind, stage, i in theirs] == list(peak.interleaved(processes, stages, micro, rank))


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of an empty cache; nothing in memory."""
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(engine, "_kept", {})
    return tmp_path / "cache" / "profiles"


@pytest.fixture
def plain() -> Case:
    return case_of("gpt", ("fp32", "none", "cpu"), 1, 2, 2, None, "adamw", {})


@pytest.mark.slow
def test_what_a_layout_does_not_split_is_a_note():
    def notes(n: int, optimizer: str = "adamw", experts: int | None = None, **layout) -> list[str]:
        r = recipe("gpt", samples=4, layers=4 if "schedule" in layout else 1, d=32, seq=16, vocab=64, **layout)
        model = r.model.model_copy(update={"n_experts": experts})
        return engine.plan(plan_case.Case.of(r.model_copy(update={"optimizer": OPTIMIZERS[optimizer], "model": model}), n)).memory.notes

    (state,) = notes(4, tensor=2)
    assert "all 2 replicas keep the same optimizer state" in state and "ZeRO-1" in state and "layout.tensor. layout.shard=2 splits it" in state
    assert "layout.shard=2, with layout.schedule=1f1b, splits it" in notes(4, pipeline=2, schedule="interleaved", micro_batch=1)[0]
    assert not notes(2, tensor=2) and not notes(4, tensor=2, shard=2) and not notes(2) and not notes(4, "sgd", tensor=2)
    assert "equal shares of the tokens" in notes(1, experts=4)[0]


@pytest.mark.slow
def test_a_ring_on_gpus_says_what_is_faster():
    def notes(target: str, method: str) -> str:
        r = recipe("gpt", samples=2, layers=1, d=32, seq=16, vocab=64, context=2, context_method=method)
        return " ".join(engine.plan(plan_case.Case.of(r, 2, target)).memory.notes)

    assert "ulysses keeps the fused kernel" in notes("cuda", "ring")
    assert "ulysses" not in notes("cuda", "ulysses") + notes("cpu", "ring")


def test_of_replicas_that_step_a_part_each_that_which_steps_most_is_planned():
    """An embedding that is larger than all other parameters is the first replica's, alone."""
    r = making.complete(recipe("gpt", samples=4, layers=2, d=32, seq=16, vocab=2048, shard_optimizer=True))
    (p,), whole = engine.processes(plan_case.Case.of(r, 4)), trace_recipe(r, 4, 0)
    assert p.optimizer_bytes == pytest.approx(8 * 2048 * 32, rel=1e-3)
    assert peak.peak_of(p).bytes == pytest.approx(whole.peak, rel=1e-3) and moved(engine.step_work(p).step) == pytest.approx(moved(whole.work.step), rel=1e-3)


def test_the_first_process_on_a_cpu_writes_the_best_weights_whole():
    """It holds its part of the weights and of the optimizer's state and, beside them, the file's."""

    def memory(n: int, **layout) -> Memory:
        r = recipe("gpt", samples=8, layers=16, d=64, seq=8, vocab=64, **layout)
        return engine.plan(plan_case.Case.of(r.model_copy(update={"optimizer": OPTIMIZERS["sgd"]}), n), resident=10**8).memory

    alone, split = memory(1), memory(8, shard=8)
    given, whole = split.outside[1], 4 * split.parameters
    assert alone.outside[0] == engine.STEP and split.outside[0] == engine.WRITING
    assert split.device_total == 10**8 + given["libraries"] + split.state["weights"] + whole and split.state["weights"] < whole / 4
    assert "writes the best weights whole" in split.notes[-1] and not alone.notes


@pytest.mark.skipif(not machine.has_glibc(), reason="another allocator keeps nothing")
def test_what_a_process_keeps_of_freed_memory_is_planned_by_what_makes_it(monkeypatch):
    gpt, bert, sst2 = "wikitext2-gpt", "wikitext2-bert", "sst2-bert"

    def made(name: str, *overrides: str) -> Recipe:
        return making.complete(recipes.load(name, ["model.n_layers=1", "model.vocab_size=8192", "train.epochs=null", "train.steps=3", *overrides]))

    planned = engine.plan(plan_case.Case.of(made(gpt)), resident=10**8).memory

    def kept(name: str, *overrides: str) -> tuple[float, list[str]]:
        memory = engine.with_process(dataclasses.replace(planned, framework=0, notes=[]), 10**8, made(name, *overrides))
        factor = memory.outside[1]["kept of what is freed"]
        assert memory.device_total == pytest.approx(10**8 + engine.LIBRARIES + (1 + factor) * memory.allocated)
        return factor, [note for note in memory.notes if "other shapes from step to step" in note]

    assert planned.outside[1]["kept of what is freed"] == 0.4 and planned.device_total == pytest.approx(10**8 + engine.LIBRARIES + 1.4 * planned.allocated)
    assert kept(gpt) == (0.4, []) and kept(gpt, "layout.shard=2") == (0.2, []) and kept(gpt, "layout.tensor=2") == (1.0, [])
    (masked, note), (classes, other) = kept(bert), kept(sst2, "model.n_classes=2")
    assert (masked, classes) == (0.5, 0.4) and len(note) == len(other) == 1
    assert not kept(sst2, "model.n_classes=2", "data.pad=max_length")[1]
    monkeypatch.setattr(machine, "has_glibc", lambda: False)
    assert engine.kept_share(recipes.load(bert)) == 0


def test_a_process_that_has_computed_is_planned_as_a_new_one(monkeypatch):
    monkeypatch.setattr(machine, "resident", lambda of_files=False: 10**8 if of_files else 5 * 10**9)
    assert engine.resident_at_start.__wrapped__() == 10**8 + engine.OWN
    monkeypatch.setattr(machine, "resident", lambda of_files=False: 10**8 if of_files else 3 * 10**8)
    assert engine.resident_at_start.__wrapped__() == 3 * 10**8


def test_a_second_plan_is_read_from_disk(kept, plain, monkeypatch):
    first = numbers(plain)
    assert list(kept.glob("*.json"))
    engine._kept.clear()
    monkeypatch.setattr(tracing, "profile", refuse)
    assert numbers(plain) == first
    for path in kept.glob("*.json"):
        path.unlink()
    assert numbers(plain) == first  # from memory


def test_a_profile_is_of_one_kind_of_device_and_of_one_loss(plain):
    part, batch = profiles.Part.whole(profiles.block_kinds(plain.recipe.model)), making.micro_batches(plain.recipe, 1)[0]
    cases = {target: plan_case.Case.of(plain.recipe, 1, target) for target in ("cpu", "cuda")}
    keys = {digest_of(engine._question(cases[target], part, batch, *about)) for target, *about in (("cpu", False, 2), ("cuda", False, 2), ("cpu", True, 2), ("cpu", False, 1))}
    assert len(keys) == 4


def test_a_profile_is_of_the_code_that_made_it(plain, tmp_path, monkeypatch):
    """Whatever source is edited, also in a folder of a folder; a layout that was searched also of what says what steps take."""
    source = Path(store.__file__).parents[1]
    shutil.copytree(source, tmp_path / "gradus", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(store, "__file__", str(tmp_path / "gradus" / "plan" / "store.py"))

    def key() -> str:
        store.code.cache_clear()
        part, batch = profiles.Part.whole(profiles.block_kinds(plain.recipe.model)), making.micro_batches(plain.recipe, 1)[0]
        return digest_of(engine._question(plan_case.Case.of(plain.recipe), part, batch))

    def layouts() -> str:
        store.code.cache_clear()
        space = types.SimpleNamespace(recipe=plain.recipe, n=1, stated=(), cluster=hardware.Cluster(hardware.find("H100"), 1))
        return digest_of(search._question(space, 1))

    def edit(name: str) -> None:
        file = tmp_path / "gradus" / name
        file.write_text(file.read_text() + "# edited\n")

    names = "recipe/axes.py", "recipe/schema.py", "patch.py", "models/llama.py", "layers/small.py", "models/weights/names.yaml", "recipe/names.yaml"
    keys = [key()]
    assert key() == keys[0]
    for name in names:
        edit(name)
        keys.append(key())
    assert len(set(keys)) == 1 + len(names)
    searched = [layouts()]
    for name in ("plan/fitted.yaml", "plan/kernels.yaml", "hardware/links.yaml"):
        edit(name)
        assert key() == keys[-1]
        searched.append(layouts())
    assert len(set(searched)) == 4
    monkeypatch.undo()
    store.code.cache_clear()


TRACES = """
import sys
from gradus import recipe as recipes
from gradus.plan import batches, case, engine, serving, store, tracing
from gradus.recipe.presets import config_of
made = case.Case.of(batches.complete(recipes.load("copy-task", ["model.n_layers=1"])), 1, "cuda")
store.code(False)
sys.addaudithook(lambda event, about: event == "open" and str(about[0]).endswith(".yaml") and print("read", about[0]))
engine.profile_of(made, engine.Part.whole(made.kinds), made.batches.full)
serving.usage_of(config_of("gpt2-small").changed(n_layers=1), 1, 64)
print("traced", store.progress.traced)
"""


@pytest.mark.slow
def test_no_trace_reads_what_its_digest_leaves_out(tmp_path):
    """In a process of its own, where no file was read before."""
    env = {**os.environ, "GRADUS_CACHE": str(tmp_path)}
    lines = subprocess.run([sys.executable, "-c", TRACES], env=env, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()
    assert lines[-1] == "traced 2"
    assert lines[:-1] and not [line for line in lines[:-1] if Path(line.split()[1]).parent.name in store.UNTRACED]


def test_a_torn_or_changed_profile_is_traced_anew(kept, plain, monkeypatch):
    traced, trace = [], tracing.profile
    monkeypatch.setattr(tracing, "profile", lambda *args, **kwargs: traced.append(trace(*args, **kwargs)) or traced[-1])
    first = numbers(plain)
    path = next(kept.glob("*.json"))
    whole = path.read_bytes()
    again = []
    monkeypatch.setattr(tracing, "profile", lambda *args, **kwargs: again.append(args) or traced[0])
    changed = whole.replace(b"0.0", b"7.0", 1)  # of numbers of the same form
    for torn in (whole[: len(whole) // 2], b"", b"null", b'{"first": 3}', b"\xff", changed):
        path.write_bytes(torn)
        engine._kept.clear()
        again.clear()
        assert numbers(plain) == first and len(again) == 1
        assert path.read_bytes() == whole
    engine._kept.clear()
    monkeypatch.setattr(tracing, "profile", refuse)
    assert numbers(plain) == first


def test_a_cache_that_cannot_be_written_is_no_error(kept, plain):
    kept.parent.write_text("a file where the folder should be")
    first = numbers(plain)
    engine._kept.clear()
    assert numbers(plain) == first


if __name__ == "__main__":
    for name in sys.argv[1:] or FAMILIES:
        print(name, told(over(grid(name))), flush=True)
