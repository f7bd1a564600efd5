"""What is cut from a small whole model is what the engine traces in its place, and other micro-batches are what is traced of them."""

from __future__ import annotations

import pytest

from gradus import hardware
from gradus.plan import engine
from gradus.plan.answer import Request, open_recipe
from gradus.plan.batches import size_of
from gradus.plan.case import Case
from gradus.plan.cut import between
from gradus.plan.peak import peak_of
from gradus.plan.process import Process
from gradus.plan.search import SAMPLES, Space
from gradus.plan.step import step_time

LAYERS = {"t5-base": "model.n_layers=6 model.n_decoder_layers=6", "llama2-7b": "model.n_layers=6"}


def space_of(preset: str, on: str = "8xA100-80GB", *words: str) -> Space:
    layers = LAYERS.get(preset, "model.n_layers=8").split()
    recipe, cluster = open_recipe(Request(preset, ("batch.samples=64", *layers, *words), tokens=1e9), [])[0], hardware.cluster(on)
    return Space(Case.of(recipe, cluster.n, "cuda"), cluster)


def figures(space: Space, processes: list[Process]) -> tuple[float, float]:
    """(seconds of a step, bytes of tensors)."""
    return step_time(engine.work_of(processes), space.cluster).total, engine.memory_of(processes).allocated


@pytest.mark.parametrize(
    ("preset", "keys", "time", "memory"),
    [("gpt2-medium", {"precision": "bf16", "micro_batch": 2}, 0.001, 0.01),
     ("gpt2-medium", {"shard": 8, "param_dtype": "bf16", "micro_batch": 1, "checkpointing": "full"}, 0.001, 0.01),
     ("gpt2-medium", {"precision": "bf16", "tensor": 2, "pipeline": 2, "micro_batch": 2}, 0.08, 0.08),
     ("gpt2-medium", {"precision": "bf16", "pipeline": 4, "micro_batch": 2, "schedule": "interleaved", "checkpointing": "selective"}, 0.08, 0.08),
     pytest.param("llama2-7b", {"shard": 2, "pipeline": 2, "param_dtype": "bf16", "micro_batch": 2}, 0.03, 0.02, marks=pytest.mark.slow),
     pytest.param("t5-base", {"precision": "bf16", "pipeline": 4, "micro_batch": 2}, 0.04, 0.04, marks=pytest.mark.slow),
     pytest.param("bert-base-uncased", {"precision": "bf16", "pipeline": 2, "micro_batch": 16}, 0.05, 0.02, marks=pytest.mark.slow),
     pytest.param("vit-b16", {"precision": "bf16", "pipeline": 4, "micro_batch": 2}, 0.05, 0.03, marks=pytest.mark.slow)],
)  # fmt: skip
def test_a_cut_is_near_what_is_traced_in_its_place(preset, keys, time, memory):
    space = space_of(preset)
    layout = space.base.model_copy(update=keys)
    cut, traced = (figures(space, made) for made in (space.estimated(layout), engine.processes(space.case.at(layout))))
    assert cut[0] == pytest.approx(traced[0], rel=time) and cut[1] == pytest.approx(traced[1], rel=memory)


def test_a_stage_has_the_parameters_of_its_blocks_and_ends():
    """Those of the whole, each once; the head is the embedding, which both ends have."""
    space = space_of("gpt2-medium")
    layout = space.base.model_copy(update={"precision": "bf16", "pipeline": 8, "micro_batch": 1, "schedule": "interleaved", "stages": 1})
    stages = {p.rank: p.stages[0] for p in space.estimated(layout)}
    whole = space.estimated(layout.model_copy(update={"pipeline": 1}))[0].stages[0]
    elements = {s: sum(w.size * n for _, unit, _, n in stage.units for w in unit.values()) for s, stage in (*stages.items(), ("all", whole))}
    names = {s: {name for _, unit, _, _ in stage.units for name in unit if "blocks." not in name} for s, stage in stages.items()}
    assert names == {0: {"token_embedding.weight", "position_embedding.weight"}, 7: {"token_embedding.weight", "norm.weight", "norm.bias"}}
    embedding, position, norm = 50257 * 1024, 1024 * 1024, 2 * 1024
    blocks = (elements["all"] - embedding - position - norm) / 8
    assert elements == {0: embedding + position + blocks, 7: embedding + norm + blocks, "all": elements["all"]}


@pytest.mark.parametrize("preset", ["gpt2-small", pytest.param("t5-base", marks=pytest.mark.slow)])
def test_other_micro_batches_lie_on_a_line(preset):
    """Operations and bytes are those of a trace with as many samples."""
    space = space_of(preset, "A100-80GB", *(["data.max_len=256"] if preset == "gpt2-small" else []))
    layout = space.base.model_copy(update={"precision": "bf16", "micro_batch": 4})
    batches = [space._batch(layout, samples) for samples in (*SAMPLES, 4)]
    size, larger, places = map(size_of, batches)
    few, many, own = (space._traced(layout, batch) for batch in batches)
    on_line = between(few, many, (places - size) / (larger - size))
    totals = []
    for profile in (own, on_line):
        pieces = [piece for run in profile.first.values() for piece in run]
        ops = [(key, n) for piece in pieces for key, n in piece.stretch.ops.items()]
        totals.append([sum(key[at] * n for key, n in ops) for at in (5, 6)] + [sum(piece.stretch.net[:8] for piece in pieces[:3])])
    exact, line = totals
    assert line[:2] == pytest.approx(exact[:2], rel=1e-6) and line[2] == pytest.approx(exact[2], rel=1e-6)


@pytest.mark.parametrize("keys", [{"schedule": "1f1b"}, {"schedule": "interleaved"}, {"shard": 2, "param_dtype": "bf16", "schedule": "1f1b"}])
def test_a_longer_step_needs_more_for_its_inputs_alone(keys):
    """So that a peak is that of its first micro-batches."""
    rest = []
    for samples in (64, 192):
        space = space_of("gpt2-medium", "8xA100-80GB", f"batch.samples={samples}", "layout.micro_batch=1")
        (p, *_) = space.estimated(space.base.model_copy(update={"precision": "fp32", "pipeline": 2, "micro_batch": 1, **keys}))
        inputs = p.stages[0].profile.batch * p.case.batches.parts + p.n_micro_batches * sum(stage.profile.buffers for stage in p.stages)
        rest.append(peak_of(p).bytes - inputs[:8].sum())
    assert rest[1] == pytest.approx(rest[0], abs=2)
