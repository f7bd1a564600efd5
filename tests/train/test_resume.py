"""Killed at any instant, a run goes on to bitwise the same weights."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.rows import read_rows
from gradus.train.session import train

# dropout is on: the generator's state must be part of what is saved
TINY = [
    "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.dropout=0.1", "data.n_train=256", "data.n_valid=32",
    "schedule.warmup_steps=5", "batch.samples=16", "layout.micro_batch=8", "layout.device=cpu", "layout.threads=1", "train.steps=40",
    "train.checkpoint_every=3", "evaluate.every=7", "evaluate.batch=16", "evaluate.samples=0", "log.every=1",
]  # fmt: skip


def digest(run: Path) -> str:
    """Of the final weights and optimizer state."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert last.name == "step-00000040"
    return "".join(hashlib.sha256((last / name).read_bytes()).hexdigest() for name in ("model.safetensors", "training.safetensors"))


def losses(run: Path) -> dict[int, float]:
    rows = [r for r in read_rows(run / "metrics.jsonl") if r["name"] == "train/loss"]
    assert len({r["step"] for r in rows}) == len(rows), "a step stands twice in metrics.jsonl"
    return {r["step"]: r["value"] for r in rows}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    torch.set_num_threads(1)
    train(recipes.load("copy-task", [*TINY, f"log.dir={folder}"]))
    return folder


def test_the_same_run_twice_is_bitwise_the_same(undisturbed, tmp_path):
    train(recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'run'}"]))
    assert digest(tmp_path / "run") == digest(undisturbed)


def test_a_run_folder_holds_what_it_should_and_nothing_else(undisturbed):
    assert {p.name for p in undisturbed.iterdir()} == {"recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", "checkpoints"}
    kept = sorted(p.name for p in (undisturbed / "checkpoints").iterdir())
    assert kept[0] == "best" and kept[1].startswith("best-step-") and kept[2:] == ["step-00000039", "step-00000040"]
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["steps"] == 40 and summary["samples"] == 640 and summary["hours_per_epoch"] > 0
    assert summary["train_samples_per_second"] == pytest.approx(640 / summary["train_runtime"], rel=0.01)
    assert summary["train_runtime"] == pytest.approx(summary["seconds"]["train"] + summary["seconds"]["data"], abs=0.01)
    assert summary["train_loss"] == pytest.approx(sum(losses(undisturbed).values()) / 40, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kill_9_at_any_instant(seed, undisturbed, tmp_path):
    """SIGKILL at random moments, writing included, until it gets through: the same weights, every step once in the rows."""
    run, rng, kills = tmp_path / "run", random.Random(seed), 0
    command = [sys.executable, "-m", "gradus.cli", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    while True:
        arguments = [str(run), "--resume"] if (run / "recipe.yaml").exists() else ["copy-task", *TINY, f"log.dir={run}"]
        process = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
        rows = run / "metrics.jsonl"
        before = rows.stat().st_size if rows.exists() else 0
        while process.poll() is None and (not rows.exists() or rows.stat().st_size <= before):
            time.sleep(0.005)  # until it takes steps
        if kills < 3:
            time.sleep(rng.uniform(0.0, 0.35))
            process.send_signal(signal.SIGKILL)
            kills += 1
        error = process.communicate()[1].decode()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, error
    assert kills
    assert digest(run) == digest(undisturbed)
    assert losses(run) == losses(undisturbed)


def test_sigterm_saves_and_says_how_to_go_on(undisturbed, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "gradus.cli", "train", "copy-task", *TINY, f"log.dir={run}", "train.checkpoint_every=null"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True)
    while process.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out = process.communicate()[0]
    if process.returncode == 0:
        pytest.skip("the run ended before the signal came")
    assert process.returncode == 128 + signal.SIGTERM
    assert f"gradus train {run} --resume" in out
    assert list((run / "checkpoints").glob("step-*"))
    from gradus.cli import main

    assert main(["train", str(run), "--resume"]) == 0
    assert digest(run) == digest(undisturbed)


def test_half_a_checkpoint_is_never_taken_for_a_whole_one(undisturbed, tmp_path):
    """What a kill while writing leaves (a folder aside, cut files in it) is not seen."""
    import shutil

    from gradus.train.checkpoint import Checkpoints

    copy = tmp_path / "checkpoints"
    shutil.copytree(undisturbed / "checkpoints", copy, symlinks=True)
    aside = copy / ".writing-step-00000050"
    shutil.copytree(copy / "step-00000040", aside)
    (aside / "model.safetensors").write_bytes((aside / "model.safetensors").read_bytes()[:100])
    assert Checkpoints(copy, keep=2).latest().name == "step-00000040"


def test_resume_refuses_another_mathematics(undisturbed):
    with pytest.raises(UserError, match=r"optimizer\.lr was .* another run"):
        train(recipes.load(undisturbed, ["optimizer.lr=0.123"]), resume=undisturbed)


def test_a_run_folder_is_not_overwritten(undisturbed):
    with pytest.raises(UserError, match="--resume"):
        train(recipes.load("copy-task", [*TINY, f"log.dir={undisturbed}"]))


def test_a_full_disk_is_one_clear_line_and_loses_nothing(tmp_path, monkeypatch):
    from gradus.train import checkpoint

    run = tmp_path / "run"
    real, calls = checkpoint.save_file, []

    def full(tensors, path, **kwargs):
        calls.append(path)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return real(tensors, path, **kwargs)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="the disk is full") as e:
        train(recipes.load("copy-task", [*TINY, f"log.dir={run}"]))
    assert "\n" not in str(e.value) and "--resume" in str(e.value)
    assert sorted(p.name for p in (run / "checkpoints").glob("*step-*") if "best" not in p.name) == ["step-00000003", "step-00000006"]


def test_a_nonfinite_loss_stops_with_step_checkpoint_and_advice(tmp_path):
    recipe = recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'run'}", "optimizer.name=sgd", "optimizer.lr=1e30", "schedule.name=constant"])
    with pytest.raises(UserError, match=r"step \d+: the (loss|gradient norm) is (nan|inf)") as e:
        train(recipe)
    assert "optimizer.lr" in str(e.value) and "checkpoint" in str(e.value)


def test_skipping_ends_when_it_does_not_help(tmp_path, monkeypatch):
    from gradus.train import loop

    monkeypatch.setattr(loop, "HOPELESS", 5)
    more = ["optimizer.name=sgd", "optimizer.lr=1e30", "schedule.name=constant", "train.on_nonfinite=skip", "train.checkpoint_every=null"]
    with pytest.raises(UserError, match=r"the (loss|gradient norm) is"):
        train(recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'run'}", *more]))


def test_nonfinite_steps_are_skipped_and_counted_when_asked(tmp_path):
    more = ["optimizer.name=sgd", "optimizer.lr=1e30", "schedule.name=constant", "train.on_nonfinite=skip", "train.steps=12"]
    outcome = train(recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'run'}", *more]))
    assert 0 < outcome.summary["skipped_steps"] < 12
    assert all(torch.isfinite(p).all() for p in outcome.trainer.model.parameters())


def test_a_stop_during_an_evaluation_does_not_wait_for_it(undisturbed, tmp_path, monkeypatch):
    """The evaluation is cut, the run saved; when it goes on, the evaluation is made first: the same weights, rows and best."""
    from gradus.tasks.translation import Copy
    from gradus.train.loop import Stopped

    run, real, calls = tmp_path / "run", Copy.evaluate, []

    def interrupted(self, model, batch):
        calls.append(batch)
        if len(calls) == 3:  # 32 held-out sequences in batches of 16: within the evaluation at step 14
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
            calls.append("too late")
        return real(self, model, batch)

    monkeypatch.setattr(Copy, "evaluate", interrupted)
    recipe = recipes.load("copy-task", [*TINY, f"log.dir={run}"])
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


def test_a_stop_during_the_first_and_the_last_evaluation(tmp_path, monkeypatch):
    from gradus.tasks.translation import Copy
    from gradus.train.loop import Stopped

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


def test_what_changes_no_update_may_change_on_resume(undisturbed, tmp_path):
    import shutil

    from gradus.cli import main

    run = tmp_path / "run"
    shutil.copytree(undisturbed, run, symlinks=True)
    (run / "checkpoints" / ".writing-step-00000050").mkdir()
    assert main(["train", str(run), "--resume", "train.on_nonfinite=skip", "train.keep=5", "train.checkpoint_every=9"]) == 0
    assert not list((run / "checkpoints").glob(".writing-*")), "what a kill left behind is cleared away"
    assert main(["train", str(run), "--resume", "train.steps=50"]) == 2
    assert main(["train", str(run), "--resume", f"log.dir={tmp_path / 'other'}"]) == 2


def test_resume_finds_the_folder_that_a_recipe_file_names(tmp_path, monkeypatch, capsys):
    from gradus.cli import main

    monkeypatch.chdir(tmp_path)
    recipe = recipes.dump(recipes.load("copy-task", [*TINY, "train.steps=6", "name=mine"]))
    Path("file.yaml").write_text(recipe)
    assert main(["train", "file.yaml"]) == 0 and main(["train", "file.yaml", "--resume"]) == 0
    assert len(list(Path("runs/mine").iterdir())) == 1
    Path("there.yaml").write_text(recipe.replace("log:\n", "log:\n  dir: there\n") if "log:\n" in recipe else recipe + "log: {dir: there}\n")
    assert main(["train", "there.yaml"]) == 0 and main(["train", "there.yaml", "--resume"]) == 0
    assert "run folder: there" in capsys.readouterr().out


def test_another_best_metric_on_resume_starts_from_nothing(tmp_path):
    """Values of two metrics have no order: a loss of 2.6 must not keep an accuracy of 0.1 from being the best."""
    from gradus.train.loop import Progress

    run = tmp_path / "run"
    few = [*TINY, f"log.dir={run}", "train.steps=7", "evaluate.every=7"]
    train(recipes.load("copy-task", [*few, "evaluate.best=valid/loss"]))
    path = run / "checkpoints" / "step-00000007" / "training.json"
    state = json.loads(path.read_text())
    assert Progress(**state["progress"]).best_metric == "valid/loss"
    state["progress"]["evaluation_due"] = True
    path.write_text(json.dumps(state))
    outcome = train(recipes.load(run, ["evaluate.best=valid/accuracy"]), resume=run)
    assert outcome.summary["best"] == {"metric": "valid/accuracy", "value": outcome.summary["metrics"]["valid/accuracy"], "step": 7}
