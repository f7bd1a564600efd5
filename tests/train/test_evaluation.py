"""Evaluations: their metrics, when they are made, how a stop cuts them, and which weights are the best."""

from __future__ import annotations

import json
import math
import os
import signal
import time

import pytest
import step_parts
import torch
from hook_parts import taken
from run_parts import TINY, digest

from gradus import recipe as recipes
from gradus import tasks
from gradus.models.weights import checksums
from gradus.rows import read_rows
from gradus.train.evaluation import Evaluation
from gradus.train.run import train
from gradus.train.signals import Stopped

pytestmark = pytest.mark.usefixtures("no_plan")


def test_an_evaluation_keeps_the_best_and_is_cut_by_a_signal(trainer):
    evaluation, p = Evaluation(), trainer.progress
    p.step = 2
    evaluation.after_step(trainer, taken(2, 1.0))
    assert p.best == p.last_evaluation["valid/loss"] and p.best_step == 2 and not p.evaluation_due
    assert (trainer.folder / "checkpoints" / "best").exists()
    p.last_evaluation, p.step = {}, 4
    trainer.signals.asked.append(signal.SIGTERM)
    evaluation.after_step(trainer, taken(4, 1.0))
    assert p.evaluation_due and not p.last_evaluation, "it is made first when the run goes on"


@pytest.mark.slow
def test_answers_along_a_training_change_nothing_of_it(tmp_path):
    """Losses, metrics and weights are bit-equal with and without; the last lines are those of the final weights."""
    runs = []
    for n in (0, 2):
        words = [*TINY, "data.n_train=64", "train.steps=7", "evaluate.every=3", "evaluate.at_start=true"]  # with dropout
        runs.append(train(recipes.load("copy-task", [*words, f"evaluate.answers={n}", f"log.dir={tmp_path / str(n)}"])))
    (without, answered), names = [read_rows(tmp_path / n / "metrics.jsonl") for n in "02"], ("train/loss", "train/grad_norm", "valid/loss", "valid/exact_match")
    values = [[(row["name"], row["step"], row["value"]) for row in rows if row["name"] in names] for rows in (without, answered)]
    assert values[0] == values[1] and len(values[0]) == 2 * 7 + 2 * 4
    weights = [dict(run.trainer.model.named_parameters()) for run in runs]
    assert all(torch.equal(p, weights[1][name]) for name, p in weights[0].items())
    kept = [row for row in answered if row["name"].startswith("answers/")]
    assert [(row["name"], row["step"]) for row in kept] == [(f"answers/{i}", step) for step in (0, 3, 6, 7) for i in (0, 1)]
    trainer = runs[1].trainer
    assert [row["value"] for row in kept[-2:]] == trainer.task.examples(trainer.model.eval(), 2)
    assert not [row for row in without if row["name"].startswith("answers/")]


def test_of_two_that_are_as_good_the_first_stays_the_best(trainer):
    evaluation, p = Evaluation(), trainer.progress
    for step in (2, 4):  # the same weights
        p.step = step
        evaluation.after_step(trainer, taken(step, 1.0))
    assert p.best == p.last_evaluation["valid/loss"] and p.best_step == 2


@pytest.mark.parametrize("kind", ["char", "byte", "word"])
def test_a_perplexity_of_words_is_of_models_that_are_told_by_words(kind, text, tmp_path):
    """By hand: bits are nats / ln 2; a word is what stands between spaces."""
    more = ["data.limit_valid=null", f"tokenizer={{kind: {kind}}}", f"log.dir={tmp_path / 'run'}"]
    t = step_parts.trainer("shakespeare-char-gpt", text, tmp_path, *more)
    found = Evaluation().evaluate(t)
    assert {name.removeprefix("valid/") for name in found} == set(t.task.units)
    assert ("valid/bits_per_character" in found) == (kind == "char") and ("valid/word_perplexity" in found) == (kind == "word")
    size, loss = t.task.sizes["valid"], found["valid/loss"]
    assert found["valid/perplexity"] == pytest.approx(math.exp(loss))
    assert found["valid/bits_per_byte"] == pytest.approx(loss * size["targets"] / size["bytes"] / math.log(2))
    if kind == "char":
        assert found["valid/bits_per_character"] == pytest.approx(loss / math.log(2))
        t.task.tokenizer.save(tmp_path / "stored")  # as a checkpoint holds it
        assert tasks.open_task(t.recipe, tasks.load_tokenizers(tmp_path / "stored")).units == t.task.units
    if kind == "word":
        assert found["valid/word_perplexity"] == pytest.approx(math.exp(loss * size["targets"] / size["words"]))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_an_evaluation_computes_in_the_precision_of_the_run(precision, dtype, text, tmp_path):
    t = step_parts.trainer("shakespeare-char-gpt", text, tmp_path, f"layout.precision={precision}", f"log.dir={tmp_path / 'run'}")
    computed = set()
    t.parallel.bare.blocks[0].feedforward.register_forward_hook(lambda module, args, out: computed.add(out.dtype))
    Evaluation().evaluate(t)
    assert computed == {dtype}


def test_a_stop_during_an_evaluation_does_not_wait_for_it(undisturbed, tmp_path, monkeypatch):
    """The evaluation is cut, the run saved; when it goes on, the evaluation is made first: the same weights, rows and best."""
    from gradus.tasks.copy import Copy

    run, real, calls = tmp_path / "run", Copy.evaluate, []

    def interrupted(self, model, batch):
        calls.append(batch)
        if len(calls) == 3:  # 32 held-out sequences in batches of 16: within the evaluation at step 14
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            calls.append("too late")
        return real(self, model, batch)

    monkeypatch.setattr(Copy, "evaluate", interrupted)
    recipe = recipes.load("copy-task", [*TINY, f"log.dir={run}", "train.checkpoint_every=null"])
    with pytest.raises(Stopped) as stop:
        train(recipe)
    assert stop.value.checkpoint.name == "step-00000014" and "too late" not in calls
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    train(recipes.load(run), resume=run)
    assert digest(run) == digest(undisturbed)
    evaluations = [
        [(r["name"], r["step"], r["value"]) for r in read_rows(f / "metrics.jsonl") if r["name"].startswith("valid/")] for f in (run, undisturbed)
    ]
    assert evaluations[0] == evaluations[1]
    assert os.readlink(run / "checkpoints" / "best") == os.readlink(undisturbed / "checkpoints" / "best")


@pytest.mark.slow
def test_a_stop_during_the_first_and_the_last_evaluation(tmp_path, monkeypatch):
    from gradus.tasks.copy import Copy

    run, real, calls = tmp_path / "run", Copy.evaluate, []

    def interrupted(self, model, batch):
        calls.append(batch)
        if len(calls) in (1, 5):  # two batches an evaluation: 1 (cut) | 2 3 | 4 5 (cut) | 6 7
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, model, batch)

    monkeypatch.setattr(Copy, "evaluate", interrupted)
    recipe = recipes.load("copy-task", [*TINY, f"log.dir={run}", "train.steps=6", "evaluate.at_start=true"])
    for resume, step in ((None, 0), (run, 6)):
        with pytest.raises(Stopped) as stop:
            train(recipe if resume is None else recipes.load(run), resume=resume)
        assert stop.value.checkpoint.name == f"step-{step:08d}"
    train(recipes.load(run), resume=run)
    assert [r["step"] for r in read_rows(run / "metrics.jsonl") if r["name"] == "valid/loss"] == [0, 6]
    assert json.loads((run / "summary.json").read_text())["best"]["step"] == 6


def test_another_best_metric_on_resume_is_read_by_that_metric(tmp_path):
    """Values of two metrics have no order: a loss of 2.6 must not keep an accuracy of 0.1 from being the best."""
    from gradus.train.step import Progress

    run = tmp_path / "run"
    few = [*TINY, f"log.dir={run}", "train.steps=7", "evaluate.every=7"]
    train(recipes.load("copy-task", [*few, "evaluate.best=valid/loss"]))
    path = run / "checkpoints" / "step-00000007" / "training.json"
    state = json.loads(path.read_text())
    assert Progress(**state["progress"]).best_metric == "valid/loss"
    state["progress"]["evaluation_due"] = True
    path.write_text(json.dumps(state))
    checksums.write(path.parent)
    outcome = train(recipes.load(run, ["evaluate.best=valid/accuracy"]), resume=run)
    assert outcome.summary["best"] == {"metric": "valid/accuracy", "value": outcome.summary["metrics"]["valid/accuracy"], "step": 7}


def test_a_run_without_a_better_evaluation_stops_and_stays_stopped(tmp_path, capsys):
    run, more = tmp_path / "run", ["schedule.name=constant", "schedule.warmup_steps=0", "optimizer.lr=1e-12", "evaluate.best=valid/accuracy"]
    recipe = recipes.load("copy-task", [*TINY, *more, "train.patience=2", f"log.dir={run}"])
    assert train(recipe).trainer.progress.step == 21, "the best is of step 7"
    assert "stopped: 2 evaluations in a row without a better one (train.patience)" in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["best"]["step"] == 7
    assert (run / "checkpoints" / "best" / "model.safetensors").exists() and (run / "checkpoints" / "step-00000021").exists()
    assert train(recipes.load(run), resume=run).trainer.progress.step == 21


def test_the_evaluation_before_the_first_step_costs_no_patience(tmp_path):
    more = ["schedule.name=constant", "schedule.warmup_steps=0", "optimizer.lr=1e-12", "evaluate.best=valid/accuracy"]
    recipe = recipes.load("copy-task", [*TINY, *more, "train.patience=1", "evaluate.at_start=true", f"log.dir={tmp_path / 'run'}"])
    assert train(recipe).trainer.progress.step == 14, "the best is of step 7"


def test_patience_is_counted_through_a_stop(tmp_path, monkeypatch):
    from gradus.tasks.copy import Copy

    real, steps = Copy.evaluate, [0]

    def evaluate(self, model, batch):
        steps[0] += 1
        if steps[0] == 3:  # two batches an evaluation: during the second
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, model, batch)

    run, more = tmp_path / "run", ["schedule.name=constant", "schedule.warmup_steps=0", "optimizer.lr=1e-12"]
    recipe = recipes.load("copy-task", [*TINY, *more, "train.patience=2", f"log.dir={run}"])
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(Copy, "evaluate", evaluate)
        train(recipe)
    assert train(recipes.load(run), resume=run).trainer.progress.step == 21
