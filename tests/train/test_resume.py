"""Killed at any instant, a run goes on to bitwise the same weights."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from gradus import models
from gradus import recipe as recipes
from gradus.errors import EnvironmentFault, UserError
from gradus.models.weights import checksums
from gradus.recipe.schema import Log
from gradus.rows import read_rows
from gradus.train import checkpoint, evaluation, log, loop, metrics
from gradus.train.checkpoint import Checkpoints
from gradus.train.run import train
from gradus.train.schedule import too_high

pytestmark = pytest.mark.usefixtures("no_plan")
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


@pytest.mark.slow
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
def test_kill_9_at_any_instant(undisturbed, tmp_path):
    """SIGKILL at random moments, writing included, until it gets through: the same weights, every step once in the rows."""
    run, rng, kills = tmp_path / "run", random.Random(1), 0
    command = [sys.executable, "-m", "gradus", "train"]
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
    command = [sys.executable, "-m", "gradus", "train", "copy-task", *TINY, f"log.dir={run}", "train.checkpoint_every=null"]
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
    copy = tmp_path / "checkpoints"
    shutil.copytree(undisturbed / "checkpoints", copy, symlinks=True)
    aside = copy / ".writing-step-00000050"
    shutil.copytree(copy / "step-00000040", aside)
    (aside / "model.safetensors").write_bytes((aside / "model.safetensors").read_bytes()[:100])
    assert Checkpoints(copy, keep=2).latest().name == "step-00000040"


def test_checkpoints_come_in_the_order_of_their_steps_also_past_eight_digits(undisturbed, tmp_path):
    folder = tmp_path / "checkpoints"
    for name in ("step-99999999", "step-100000000", "step-99999999.bak"):
        (folder / name).mkdir(parents=True)
    shutil.copy(undisturbed / "checkpoints" / "step-00000040" / "config.json", folder / "step-100000000")
    assert [p.name for p in Checkpoints(folder, keep=1).steps()] == ["step-99999999", "step-100000000"]
    assert models.locate(tmp_path).name == "step-100000000"
    Checkpoints(folder, keep=1)._remove_old()
    assert [p.name for p in Checkpoints(folder, keep=1).steps()] == ["step-100000000"]


def test_resume_refuses_another_mathematics(undisturbed):
    with pytest.raises(UserError, match=r"optimizer\.lr was .* another run"):
        train(recipes.load(undisturbed, ["optimizer.lr=0.123"]), resume=undisturbed)


def test_a_warm_up_longer_than_the_run_and_a_rate_too_high_for_trained_weights_are_told_before_the_first_step(undisturbed, tmp_path, capsys):
    words = [word for word in TINY if not word.startswith(("train.steps", "schedule.", "evaluate.samples"))]
    words += ["evaluate.samples=1", "train.epochs=1", "schedule.warmup_steps=500", f"log.dir={tmp_path / 'run'}", f"model.init={undisturbed}", "optimizer.lr=0.02"]
    train(recipes.load("copy-task", words))
    told = capsys.readouterr()
    assert told.err.startswith("note: schedule.warmup_steps=1 instead of 500, to fit a run of 16 steps\n")
    warning = next(line for line in told.out.partition("step 1/16")[0].splitlines() if line.startswith("note:"))
    assert warning.startswith("note: a learning rate of 2.0e-02 is for training from scratch; the weights of model.init=")
    assert warning.endswith(" may lose what they have learned. Set optimizer.lr=6e-04, say.")
    assert "\n\nsamples after training:\n1 2 3 4 5 6 7 8 9 10  →  " in told.out
    hours = json.loads((tmp_path / "run" / "summary.json").read_text())["hours_per_epoch"]
    assert hours == float(f"{hours:.2e}") and f"hours_per_epoch            {hours:.6g}\n" in told.out, "three digits, however short"
    assert recipes.load(tmp_path / "run").schedule.warmup_steps == 1
    usual = recipes.load("copy-task", [*words, "optimizer.lr=1e-3"])
    noam = recipes.load("copy-task", [*words, "optimizer.lr=1", "schedule.name=noam", "schedule.warmup_steps=4"])
    assert too_high(usual, 16) is None and "optimizer.lr=6e-04 schedule.name=linear" in too_high(noam, 16)
    assert too_high(recipes.load("copy-task", ["optimizer.lr=0.02"]), 16) is None, "new weights"


def test_a_run_folder_is_not_overwritten(undisturbed):
    with pytest.raises(UserError, match="--resume"):
        train(recipes.load("copy-task", [*TINY, f"log.dir={undisturbed}"]))


def test_a_full_disk_is_one_clear_line_and_loses_nothing(tmp_path, monkeypatch):
    run = tmp_path / "run"
    real, calls = checkpoint.save_file, []

    def full(tensors, path, **kwargs):
        calls.append(path)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return real(tensors, path, **kwargs)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(EnvironmentFault, match="the disk is full") as e:
        train(recipes.load("copy-task", [*TINY, f"log.dir={run}"]))
    assert "\n" not in str(e.value) and "--resume" in str(e.value)
    assert sorted(p.name for p in (run / "checkpoints").glob("*step-*") if "best" not in p.name) == ["step-00000003", "step-00000006"]


def test_a_nonfinite_loss_stops_with_step_checkpoint_and_advice(tmp_path):
    recipe = recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'run'}", "optimizer.name=sgd", "optimizer.lr=1e30", "schedule.name=constant"])
    with pytest.raises(UserError, match=r"step \d+: the (loss|gradient norm) is (nan|inf)") as e:
        train(recipe)
    assert "optimizer.lr" in str(e.value) and "checkpoint" in str(e.value)


def test_skipping_ends_when_it_does_not_help(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "HOPELESS", 5)
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
    from gradus.train.signals import Stopped

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


@pytest.mark.slow
def test_a_stop_during_the_first_and_the_last_evaluation(tmp_path, monkeypatch):
    from gradus.tasks.translation import Copy
    from gradus.train.signals import Stopped

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
    from gradus.cli import main

    run = tmp_path / "run"
    shutil.copytree(undisturbed, run, symlinks=True)
    (run / "checkpoints" / ".writing-step-00000050").mkdir()
    assert main(["train", str(run), "--resume", "train.on_nonfinite=skip", "train.keep=5", "train.checkpoint_every=9"]) == 0
    assert not list((run / "checkpoints").glob(".writing-*")), "what a kill left behind is cleared away"
    assert main(["train", str(run), "--resume", "train.seed=1"]) == 2
    assert main(["train", str(run), "--resume", f"log.dir={tmp_path / 'other'}"]) == 2


@pytest.mark.slow
def test_resume_finds_the_folder_that_a_recipe_file_names(tmp_path, monkeypatch, capsys):
    from gradus.cli import main

    monkeypatch.chdir(tmp_path)
    recipe = recipes.dump(recipes.load("copy-task", [*TINY, "train.steps=6", "name=mine"]))
    Path("file.yaml").write_text(recipe)
    assert main(["train", "file.yaml"]) == 0 and main(["train", "file.yaml", "--resume"]) == 0
    assert len([run for run in Path("runs/mine").iterdir() if not run.is_symlink()]) == 1
    Path("there.yaml").write_text(recipe.replace("log:\n", "log:\n  dir: there\n") if "log:\n" in recipe else recipe + "log: {dir: there}\n")
    assert main(["train", "there.yaml"]) == 0 and main(["train", "there.yaml", "--resume"]) == 0
    assert "run folder: there" in capsys.readouterr().out


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


# ---------------------------------------------------------------- the run folder has one owner


class OneSecond:
    """A clock that stands still: all names by the time are alike."""

    class datetime:
        @staticmethod
        def now():
            import datetime

            return datetime.datetime(2026, 1, 2, 3, 4, 5)


def test_runs_of_one_second_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log, "datetime", OneSecond)
    together, found = threading.Barrier(8), []

    def start() -> None:
        together.wait()
        with log.run_folder(Log(), "mine") as folder:
            found.append(folder)
            (folder / "recipe.yaml").touch()
            together.wait()

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8 and {f.name for f in found} == {"20260102-030405", *(f"20260102-030405-{n}" for n in range(1, 8))}


@pytest.mark.slow
def test_two_processes_of_one_second_write_two_runs(tmp_path):
    program = (
        "import sys, datetime; from gradus.train import log; from gradus.cli import main; now = datetime.datetime(2026, 1, 2, 3, 4, 5)\n"
        "log.datetime = type('d', (), {'datetime': type('c', (), {'now': staticmethod(lambda: now)})}); sys.exit(main(sys.argv[1:]))"
    )
    words = [[sys.executable, "-c", program, "train", "copy-task", *TINY, "train.steps=12", f"train.seed={seed}"] for seed in (0, 1)]
    started = [subprocess.Popen(w, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for w in words]
    assert [p.communicate()[1] and p.returncode for p in started] in ([0, 0], [b"", b""])
    runs = sorted(run for run in (tmp_path / "runs" / "copy-task").iterdir() if not run.is_symlink())
    assert [f.name for f in runs] == ["20260102-030405", "20260102-030405-1"]
    assert {recipes.load(f).train.seed for f in runs} == {0, 1}
    assert all(set(losses(f)) == set(range(1, 13)) for f in runs)


def test_a_run_folder_has_one_owner_until_its_process_ends(tmp_path):
    """The owner is another process, and is killed: nothing that it leaves stands in the way."""
    run = tmp_path / "a" / "run"
    ready, wrote = os.pipe()
    child = os.fork()
    if not child:
        with log.run_folder(Log(dir=str(run)), "mine"):
            os.write(wrote, b"x")
            time.sleep(60)
        os._exit(0)
    try:
        os.read(ready, 1)
        for resume in (None, run):
            with pytest.raises(UserError, match=rf"{run}: another run writes there \(process {child} on "), log.run_folder(Log(dir=str(run)), "mine", resume):
                pass
        with pytest.raises(UserError, match="another run writes there"):
            train(recipes.load("copy-task", [*TINY, f"log.dir={run}"]))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [p.name for p in run.iterdir()] == [log.LOCK]
    with log.run_folder(Log(dir=str(run)), "mine") as folder:
        assert folder == run
        (folder / "recipe.yaml").touch()
    assert [p.name for p in run.iterdir()] == ["recipe.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_a_run_that_comes_to_nothing_leaves_nothing(tmp_path, monkeypatch, there):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    if there:
        (tmp_path / "a" / "run").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for more in ([], ["log.dir=a/run"], ["log.dir=a/b/c"]):
        with pytest.raises(UserError, match="valid/nothing"):
            train(recipes.load("copy-task", [*TINY, *more, "evaluate.best=valid/nothing"]))
        assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"log\.dir=file/x: cannot write there"):
        train(recipes.load("copy-task", [*TINY, "log.dir=file/x"]))


# ---------------------------------------------------------------- what is called best is what was evaluated


class Killed(BaseException):
    pass


def scripted(monkeypatch, losses_told: dict[int, float], seen: dict, accuracies: dict[int, float] | None = None) -> None:
    """Evaluations say these losses, by step; the weights that they were asked about are noted in `seen`, by loss."""
    real = evaluation.Evaluation.evaluate

    def noted(self, trainer, split="valid"):
        def told(parallel, *rest):
            loss = losses_told.get(trainer.progress.step, 9.0)
            seen[loss] = {k: v.clone() for k, v in parallel.bare.state_dict().items()}
            return {"loss": loss, "accuracy": (accuracies or {}).get(trainer.progress.step, 0.0)}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evaluation, "evaluate", told)
            return real(self, trainer, split)

    monkeypatch.setattr(evaluation.Evaluation, "evaluate", noted)


@pytest.fixture(scope="module", params=["after the best", "before its name"])
def killed_once(request, tmp_path_factory) -> tuple[Path, dict]:
    """A run killed when the best weights, of step 14, were written and no checkpoint knows of them; and what was evaluated."""
    run, seen = tmp_path_factory.mktemp("killed") / "run", {}

    def kill(*_):
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, {7: 2.6, 14: 2.5}, seen, {7: 0.2, 14: 0.1})
        real_save, real_call = Checkpoints.save, Checkpoints._call_best
        patch.setattr(Checkpoints, "save", lambda self, step, *a: real_save(self, step, *a) if step < 12 else kill())
        if request.param == "before its name":
            patch.setattr(Checkpoints, "_call_best", lambda self, target, metric: kill() if "14" in target.name else real_call(self, target, metric))
        with pytest.raises(Killed):
            train(recipes.load("copy-task", [*TINY, f"log.dir={run}", "train.steps=20", "train.checkpoint_every=10"]))
    assert [p.name for p in (run / "checkpoints").glob("step-*")] == ["step-00000010"]
    return run, seen


@pytest.fixture
def killed_after_best(killed_once, tmp_path) -> tuple[Path, dict]:
    run, seen = killed_once
    return shutil.copytree(run, tmp_path / "run", symlinks=True), dict(seen)


@pytest.mark.parametrize(
    ("overrides", "told", "best"),
    [
        ([], {14: 2.5}, (2.5, 14)),
        (["layout.precision=bf16"], {14: 2.55}, (2.5, 14)),
        (["layout.precision=bf16"], {14: 2.45}, (2.45, 14)),  # the same step again, other weights
        (["evaluate.every=5"], {15: 2.55, 20: 2.58}, (2.5, 14)),
        (["evaluate.every=5"], {15: 2.55, 20: 2.4}, (2.4, 20)),
        (["evaluate.best=valid/accuracy", "evaluate.every=20"], {20: 2.3}, (0.1, 14)),  # by its own metrics, though it was not chosen by this one
    ],
)
def test_best_after_a_kill_is_what_was_evaluated(killed_after_best, monkeypatch, overrides, told, best):
    from gradus import models

    run, seen = killed_after_best
    metric = "valid/accuracy" if "accuracy" in str(overrides) else "valid/loss"
    scripted(monkeypatch, told, seen)
    if metric == "valid/accuracy" and (run / "checkpoints" / "best-step-00000007").exists():
        best = (0.2, 7)  # killed before the one of step 14 took its place
    outcome = train(recipes.load(run, overrides), resume=run)
    assert outcome.summary["best"] == {"metric": metric, "value": best[0], "step": best[1]}
    stored = json.loads((run / "checkpoints" / "best" / "best.json").read_text())
    assert stored["metrics"][metric] == best[0] and stored["step"] == best[1]
    weights = models.load(run / "checkpoints" / "best").state_dict()
    evaluated = seen[stored["metrics"]["valid/loss"]]
    assert all(torch.equal(weights[k], evaluated[k].float()) for k in evaluated), "other weights than those that were evaluated"
    assert len(list((run / "checkpoints").glob("best-step-*"))) == 1


def test_damaged_best_weights_are_named_and_not_the_best(undisturbed, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run, symlinks=True)
    best = run / "checkpoints" / "best"
    (best / "model.safetensors").write_bytes(b"")
    assert train(recipes.load(run), resume=run).summary["best"] is None
    assert "is damaged: model.safetensors has 0 bytes" in capsys.readouterr().out and not best.is_symlink()


# ---------------------------------------------------------------- the mean loss


def test_the_mean_loss_is_of_the_steps_that_were_taken(tmp_path, monkeypatch):
    run, real, bad = tmp_path / "run", loop.Trainer.step, {2: (1000.0, torch.inf), 5: (torch.nan, torch.nan), 8: (3000.0, torch.nan)}

    def step(self, *arguments):
        loss, norm = real(self, *arguments)
        return tuple(map(torch.tensor, bad.get(self.progress.step + 1, (float(loss), float(norm)))))

    monkeypatch.setattr(loop.Trainer, "step", step)
    train(recipes.load("copy-task", [*TINY, f"log.dir={run}", "train.steps=6", "train.on_nonfinite=skip"]))
    summary = train(recipes.load(run, ["train.steps=9"]), resume=run).summary
    taken = [value for at, value in losses(run).items() if at not in bad]
    assert summary["skipped_steps"] == 3 and len(taken) == 6
    assert summary["train_loss"] == pytest.approx(sum(taken) / 6, rel=1e-12)


# ---------------------------------------------------------------- damaged checkpoints


def garble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


DAMAGE = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-7]),
    "garbled": garble,
    "longer": lambda file: file.write_bytes(file.read_bytes() + b" "),
    "another": lambda file: file.write_text("{}"),
}
FILES = ("training.json", "training.safetensors", "model.safetensors", "config.json", "tokenizer.json", checksums.FILE)


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(file, how, undisturbed, tmp_path, capsys):
    if (file, how) == (checksums.FILE, "longer"):
        pytest.skip("a space after JSON changes nothing")
    copy = tmp_path / "checkpoints"
    shutil.copytree(undisturbed / "checkpoints", copy, symlinks=True)
    (copy / "step-00000040" / "tokenizer.json").write_text('{"model": {"vocab": ["a", "b"]}}')
    checksums.write(copy / "step-00000040")
    DAMAGE[how](copy / "step-00000040" / file)
    assert Checkpoints(copy, keep=2).newest_whole().name == "step-00000039"
    (told,) = capsys.readouterr().out.splitlines()
    assert f"{copy / 'step-00000040'} is damaged: " in told and "step-00000039 is used instead" in told
    assert file == checksums.FILE or file in told
    assert sorted(p.name for p in copy.glob("*step-*") if "best" not in p.name) == ["damaged-step-00000040", "step-00000039"]


def test_a_run_goes_on_from_the_checkpoint_before_the_damaged_one(undisturbed, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run, symlinks=True)
    (run / "checkpoints" / "step-00000040" / "training.json").unlink()
    outcome = train(recipes.load(run), resume=run)
    assert outcome.trainer.start_step == 39
    assert digest(run) == digest(undisturbed) and losses(run) == losses(undisturbed)


def test_where_no_checkpoint_is_whole_nothing_starts_again(undisturbed, tmp_path, capsys):
    from gradus.cli import main

    run = tmp_path / "run"
    shutil.copytree(undisturbed, run, symlinks=True)
    for n in (39, 40):
        (run / "checkpoints" / f"step-000000{n}" / "training.json").unlink()
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    assert main(["train", str(run), "--resume"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert "no checkpoint here is whole: step-00000040 (training.json is missing), step-00000039 (training.json is missing)" in told
    after = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    assert after.keys() == before.keys() and all(after[p] == before[p] for p in before if p.is_file())


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_damaged_weights_are_told_to_who_reads_them(file, undisturbed, tmp_path, capsys):
    from gradus.cli import main

    run = tmp_path / "run"
    shutil.copytree(undisturbed, run, symlinks=True)
    garble(run / "checkpoints" / "best" / file)
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: ") and f"{file} is not what was written (its checksum differs)" in told


# ---------------------------------------------------------------- a longer run


def test_a_finished_run_that_is_made_longer_is_the_long_run(undisturbed, tmp_path, capsys):
    from gradus.cli import main

    run = tmp_path / "run"
    train(recipes.load("copy-task", [*TINY, f"log.dir={run}", "train.steps=20", "schedule.end_step=40"]))
    capsys.readouterr()
    for steps, told in ((20, "the run is finished"), (12, "20 steps have been taken already")):
        assert main(["train", str(run), "--resume", f"train.steps={steps}"]) == 2
        assert told in (error := capsys.readouterr().err) and "train.steps=40" in error
    train(recipes.load(run, ["train.steps=40"]), resume=run)
    said = capsys.readouterr().out
    assert "20 steps become 40, 20 of them taken; the schedule (cosine) does not change: it ends at step 40; the learning" in said
    assert said.index("become 40") < said.index("step 21/40")
    assert digest(run) == digest(undisturbed) and losses(run) == losses(undisturbed)
    assert recipes.load(run).train.steps == 40
    train(recipes.load(run), resume=run)
    assert "become" not in capsys.readouterr().out
    assert json.loads((run / "summary.json").read_text())["steps"] == 40


@pytest.mark.slow
def test_what_a_longer_run_does_to_the_schedule_is_said(tmp_path, capsys):
    from gradus.train.schedule import learning_rate

    rates = {}
    for name, more in (("moves", []), ("stays", ["schedule.end_step=8"])):
        run = tmp_path / name
        schedule = ["schedule.name=linear", "schedule.final=0.1", "schedule.warmup_steps=2", "optimizer.lr=1e-3", *more]
        train(recipes.load("copy-task", [*TINY, *schedule, f"log.dir={run}", "train.steps=8", "evaluate.every=8"]))
        capsys.readouterr()
        train(recipes.load(run, ["train.epochs=1"]), resume=run)  # 16 steps
        rates[name] = next(line for line in capsys.readouterr().out.splitlines() if "become" in line)
        of_rows = {r["step"]: r["value"] for r in read_rows(run / "metrics.jsonl") if r["name"] == "train/lr"}
        r = recipes.load(run)
        assert r.train.steps is None and r.train.epochs == 1
        assert of_rows[9] == learning_rate(r.schedule, r.optimizer.lr, 9, 16, 16)
    assert "8 steps become 16, 8 of them taken; the schedule (linear) now ends at step 16" in rates["moves"]
    assert "goes from 1.00e-04 (step 8) to 5.50e-04 (step 9)" in rates["moves"]  # 0.1 + 0.9 · (1 - 7/14), of 1e-3
    assert "does not change: it ends at step 8; the learning rate goes from 1.00e-04 (step 8) to 1.00e-04 (step 9)" in rates["stays"]


@pytest.mark.parametrize(("there", "seen"), [(False, "a run that this process does not see"), (True, "no run, and this process sees one")])
def test_processes_that_see_different_runs_do_not_begin(there, seen, undisturbed, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    if there:
        shutil.copytree(undisturbed, folder, symlinks=True)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr("gradus.train.run.worlds.from_first", lambda value: (*value[:2], not value[2]))
    with pytest.raises(EnvironmentFault, match=f"rank 0 found {seen}. Let all hosts share log.dir, and start again"):
        train(recipes.load(folder) if there else recipes.load("copy-task", [*TINY, f"log.dir={folder}"]), resume=folder if there else None)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before and folder.exists() == there
