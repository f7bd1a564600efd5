"""The plan before the first step: which step, what is refused, and a planner that may be given up."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import signal
import time

import pytest
import torch

from gradus import hardware
from gradus import recipe as recipes
from gradus.cli import main
from gradus.errors import UserError
from gradus.plan import engine
from gradus.plan.case import Case
from gradus.proof import memory_budget, predict
from gradus.proof.memory_budget import changed, suggested_fix
from gradus.proof.predict import Planner
from gradus.proof.step_memory import peak_memory_of
from gradus.recipe.schema import SGD, Energy
from gradus.train import machine
from gradus.train.evaluation import evaluate
from gradus.train.loop import Trainer
from gradus.train.session import open_session

TINY = {"model.n_layers": 2, "model.d_model": 32, "model.n_heads": 2, "model.d_ff": 64, "data.n_train": 64, "data.n_valid": 8,
        "schedule.warmup_steps": 2, "batch.samples": 16, "train.steps": 12, "evaluate.samples": 0, "layout.device": "cpu", "layout.threads": 1}  # fmt: skip


def words(**more) -> list[str]:
    return ["copy-task", *(f"{k}={v}" for k, v in {**TINY, **more}.items())]


SMALL = {"model.n_layers": 1, "batch.samples": 12}


@pytest.mark.slow
def test_what_will_not_fit_is_refused_in_one_line_with_the_fix(tmp_path, capsys, monkeypatch):
    session = open_session(recipes.load("copy-task", **{**TINY, **SMALL}))
    case = dataclasses.replace(predict.case_of(session), step=None, micro_batches=None)
    needs = {k: need(case, k) for k in (7, 8, 12)}
    assert needs[7] < needs[8] < needs[12]
    monkeypatch.setattr(memory_budget, "capacity", lambda device: needs[8] - 1)
    monkeypatch.setattr(machine, "resident", lambda of_files=False: 0 if of_files else case.budget.resident)
    folder = tmp_path / "run"
    arguments = ["train", *words(**{**SMALL, "log.dir": folder})]
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and "Set layout.micro_batch=7, or start anyway with --force." in error
    assert not (folder / "metrics.jsonl").exists(), "refused before anything began"

    assert main([*arguments, "layout.micro_batch=7"]) == 0, "the fix is one"
    monkeypatch.setattr(predict, "refusal_of", lambda *_: "the plan needs more. Set something.")
    assert main(["train", *words(**{**SMALL, "log.dir": tmp_path / "forced"}), "--force"]) == 0
    out = capsys.readouterr().out
    assert "note: --force: the plan needs more" in out and "run folder" in out


def test_the_energy_of_a_step_is_by_the_watts_that_are_stated():
    case = predict.case_of(open_session(recipes.load("copy-task", **{**TINY, **SMALL})))
    device = hardware.cluster("A100").device
    case = dataclasses.replace(case, budget=dataclasses.replace(case.budget, device=device))
    for watts, expected in ((None, device.power), (50.0, 50.0)):
        recipe = case.recipe.model_copy(update={"energy": Energy(watts=watts)})
        rows = {row.name: row.value for row in predict.predict(dataclasses.replace(case, recipe=recipe)).rows}
        assert rows["energy/step"] == pytest.approx(expected * rows["time/step"])


@pytest.mark.parametrize(("processes", "coarse", "timed"), [(1, True, True), (2, True, False), (2, False, True)])
def test_a_coarse_calibration_times_no_processes_that_share_a_cpu(processes, coarse, timed):
    case = predict.case_of(open_session(recipes.load("copy-task", **{**TINY, **SMALL})))
    device = dataclasses.replace(hardware.cluster("A100").device, kind="cpu", measured={"coarse": True} if coarse else {})
    case = dataclasses.replace(case, budget=dataclasses.replace(case.budget, device=device, local_processes=processes))
    assert predict.untimed(case) is not timed
    values = {"time/step": 0.1} if timed else {}
    assert ("run gradus scale" in predict.cost_of_step(case, values)) is not timed


def need(case, k: int) -> int:
    return predict.predict(dataclasses.replace(case, recipe=with_micro(case.recipe, k))).needed


def with_micro(recipe, k: int):
    return recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"micro_batch": k})})


@pytest.mark.parametrize(("steps", "measured"), [(1, None), (2, 2), (3, 3), (9, 3)])
def test_the_measured_step_is_within_the_run(steps, measured):
    session = open_session(recipes.load("copy-task", **{**TINY, "train.steps": steps, "schedule.warmup_steps": 0}))
    number, micro_batches = predict.batches_of(session, (0, 0))
    assert number == measured and (micro_batches is None) == (measured is None)


def test_the_third_step_may_be_in_the_next_epoch():
    session = open_session(recipes.load("copy-task", **TINY))  # four steps per epoch
    (_, a), (_, b), (_, c) = (predict.batches_of(session, position) for position in ((0, 3), (0, 4), (1, 0)))
    assert torch.equal(b[0]["source"], c[0]["source"]), "the end of an epoch is the start of the next"
    assert not torch.equal(a[0]["source"], c[0]["source"])


@pytest.fixture
def case():
    session = open_session(recipes.load("copy-task", **{**TINY, **SMALL, "batch.samples": 2}))
    case = predict.case_of(session)
    return dataclasses.replace(case, budget=dataclasses.replace(case.budget, processes=2, local_processes=2, available=500_000), step=None, micro_batches=None)


def test_what_writes_weights_whole_needs_no_less_without_activations(case):
    recipe = changed(case.recipe, model={"d_model": 128, "d_ff": 512, "n_layers": 6}, layout={"shard": 2})
    for optimizer, writes in ((recipe.optimizer, False), (SGD(lr=0.1), True)):
        found = predict.predict(dataclasses.replace(case, recipe=recipe.model_copy(update={"optimizer": optimizer})))
        assert any("writes the best weights whole" in note for note in found.notes) == (found.least == found.needed) == writes


@pytest.mark.parametrize(("least", "samples"), [(1, 6), (2, 6), (4, 8)])
def test_the_fewest_replicas_take_as_large_micro_batches(case, least, samples):
    """Also where the batch does not divide among them, as it need not."""
    layout = {"elastic": True, "min_replicas": least}
    recipe = changed(case.recipe, layout=layout, batch={"samples": 6})
    all_of_them = dataclasses.replace(case.budget, processes=6)
    few = dataclasses.replace(case.budget, processes=least).need(changed(recipe, layout={"elastic": False, "min_replicas": 1, "micro_batch": 1}, batch={"samples": samples}))
    assert predict.with_fewest(recipe, all_of_them) == few
    assert predict.with_fewest(recipe, dataclasses.replace(all_of_them, processes=least)) is None


@pytest.fixture
def planner():
    with Planner() as planner:
        yield planner
    assert not planner.process.is_alive()


def test_a_refusal_comes_out_of_the_planning_process(case, planner):
    found = planner.plan(case)
    assert "host for each of its 2 processes has 500 kB. Python and its libraries alone take" in found.refusal
    for change, told in (
        ({}, "Python and its libraries alone take"),
        ({"resident": 0}, "Not even one sample fits: use a smaller model or"),
        ({"target": "cuda"}, "Not even one sample fits: set layout.shard=N over N GPUs"),
    ):
        assert suggested_fix(case.recipe, dataclasses.replace(case.budget, **change), least=10**6).startswith(told)


@pytest.mark.slow
def test_a_refusal_does_not_wait_for_its_fix(case, monkeypatch):
    found = predict.predict(case)
    monkeypatch.setattr(predict, "predict", lambda _: found)  # what is waited for is the fix alone
    monkeypatch.setattr(predict, "suggested_fix", lambda *_: time.sleep(60))
    with Planner() as planner:
        assert "Set a smaller layout.micro_batch (gradus fit finds it) or layout.checkpointing=full." in planner.plan(case, 5.0).refusal


def test_what_cannot_be_planned_says_why(case, planner):
    wrong = case.recipe.model_copy(update={"layout": case.recipe.layout.model_copy(update={"transport": "mpi", "replicate": "manual"})})
    with pytest.raises(UserError, match="it cannot be traced"):
        planner.plan(dataclasses.replace(case, recipe=wrong))


def test_a_plan_is_not_waited_for_longer_than_said(case, monkeypatch):
    monkeypatch.setattr(predict, "predict", lambda case: time.sleep(60))
    with Planner() as planner:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"not ready within 0\.2 s"):
            planner.plan(case, 0.2)
        assert time.monotonic() - began < 2.0
    with Planner() as planner:
        os.kill(planner.process.pid, signal.SIGSTOP)  # it does not even read
        with pytest.raises(TimeoutError, match="not ready"):
            planner.plan(dataclasses.replace(case, micro_batches=[{"x": torch.zeros(1_000_000)}]), 0.2)
    with Planner() as planner:
        os.kill(planner.process.pid, signal.SIGKILL)
        with pytest.raises(EOFError, match="the planning process ended"):
            planner.plan(case, 5.0)


# ---------------------------------------------------------------- evaluations


COMMON = {
    "optimizer": {"name": "adamw", "lr": 1e-3}, "tokenizer": {"kind": "byte"}, "train": {"steps": 4},
    "layout": {"device": "cpu", "threads": 1, "micro_batch": 1}, "batch": {"samples": 2},
}  # fmt: skip


def of_text(tmp_path, **layout):
    """A language model that evaluates 24 windows at a time, and computes a step window by window."""
    (tmp_path / "train.txt").write_text("to be or not to be, that is the question. " * 400)
    model = {"family": "gpt", "n_layers": 3, "d_model": 32, "n_heads": 2, "seq_len": 32, "dropout": 0.1, "vocab_size": 2000}
    data = {"kind": "text", "path": str(tmp_path / "train.txt"), "cache": str(tmp_path / "cache")}
    own = {"task": {"name": "causal_lm"}, "model": model, "data": data, "evaluate": {"batch": 24}}
    return open_session(recipes.resolve({**COMMON, **own, "layout": {**COMMON["layout"], **layout}}))


def of_rows(tmp_path, **evaluate):
    """A classifier whose texts are ten times as long in the valid split."""
    for split, times in (("train", 1), ("valid", 10)):
        rows = "".join(f"{'to be ' * (1 + i % 2) * times},{i % 2}\n" for i in range(72))
        (tmp_path / f"{split}.csv").write_text(f"text,label\n{rows}")
    model = {"family": "bert", "n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 64, "seq_len": 128}
    data = {"kind": "labelled", "path": str(tmp_path), "cache": str(tmp_path / "cache")}
    own = {"task": {"name": "classification"}, "model": model, "data": data, "evaluate": evaluate, "batch": {"samples": 32}}
    return open_session(recipes.resolve({**COMMON, **own, "layout": {"device": "cpu", "threads": 1}}))


@pytest.mark.parametrize("made", [of_text, functools.partial(of_text, loss="chunked"), functools.partial(of_rows, batch=60)])
def test_an_evaluation_that_needs_more_than_a_step_is_planned_as_it_is_measured(made, tmp_path):
    session = made(tmp_path)
    trainer = Trainer(session, session.lay_out(), tmp_path / "run")
    for _ in range(2):
        trainer.step(session.loader.look(0, 0).micro_batches)
    with peak_memory_of(session.device, {}) as measured:
        evaluate(trainer.parallel, session.task, "valid", session.precision, session.device)
    planned = engine.plan(Case.of(session.recipe, task=session.task)).memory
    assert planned.at == "evaluation" and planned.state["optimizer"] > planned.state["weights"] > 0
    needed = planned.allocated - planned.state["weights"] - planned.state["optimizer"]
    assert needed == pytest.approx(measured["allocated"], rel=0.05)  # of a chunk's gradient 4 % too much
    small = changed(session.recipe, evaluate={"batch": 1})
    assert engine.plan(Case.of(small, task=session.task)).memory.at != "evaluation"


@pytest.mark.slow
def test_an_evaluation_that_does_not_fit_is_refused_or_a_default_made_smaller(tmp_path):
    case = predict.case_of(of_rows(tmp_path))
    smaller, needed = (case.budget.need(changed(case.recipe, evaluate={"batch": k})) for k in (16, 32))
    assert smaller < needed == case.budget.need(case.recipe)
    case = dataclasses.replace(case, budget=dataclasses.replace(case.budget, available=needed - 1))
    predicted = predict.predict(case)
    assert (predicted.evaluate_batch, predicted.refusal, predicted.needed) == (16, None, smaller)
    assert predicted.notes[0] == "evaluate.batch=16: an evaluation of more samples would not fit"
    with Planner() as planner:
        refused = planner.plan(dataclasses.replace(case, recipe=changed(case.recipe, evaluate={"batch": 32})))
    assert refused.evaluate_batch is None and "Set evaluate.batch=16: an evaluation needs more memory than a step." in refused.refusal
    assert " in an evaluation; " in refused.line


@pytest.mark.slow
def test_a_fix_replaces_a_batch_of_an_evaluation_that_does_not_fit(tmp_path):
    case = predict.case_of(of_rows(tmp_path))
    budget = dataclasses.replace(case.budget, available=case.budget.need(case.recipe) - 1)
    fix = suggested_fix(changed(case.recipe, evaluate={"batch": 32}), budget)
    micro_batch = int(re.fullmatch(r"Set layout\.micro_batch=(\d+) evaluate\.batch=\1", fix)[1])
    fixed = changed(case.recipe, layout={"micro_batch": micro_batch}, evaluate={"batch": micro_batch})
    assert budget.need(fixed) <= budget.available, "what a step and an evaluation need together"
