"""Checkpoints are whole or named as damaged, and what is called best is what was evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from run_parts import TINY, digest, garble, losses

from gradus import models
from gradus import recipe as recipes
from gradus.errors import EnvironmentFault, UserError
from gradus.models.weights import checksums
from gradus.train import checkpoint, evaluation
from gradus.train.checkpoint import Checkpoints
from gradus.train.run import train

pytestmark = pytest.mark.usefixtures("no_plan")


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
    for lost in ("best", "best-step-00000007"):  # as a copy without links, or with half of them, leaves it
        (folder / lost).symlink_to("nowhere")
        with pytest.raises(UserError, match=rf"checkpoints/best: the run's best weights are not there, and others do not stand for them \({lost}\)"):
            models.locate(tmp_path)
        (folder / lost).unlink()
    shutil.copytree(undisturbed / "checkpoints", tmp_path / "other", symlinks=True)
    (folder / "best").symlink_to(tmp_path / "other" / "best")
    with pytest.raises(UserError, match=r"checkpoints/best: a link to .*other/best-step-\d+, outside of the run\. Give that folder itself"):
        models.locate(tmp_path)
    (folder / "best").unlink()
    Checkpoints(folder, keep=1)._remove_old()
    assert [p.name for p in Checkpoints(folder, keep=1).steps()] == ["step-100000000"]


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
    """A run killed when the best weights, of step 4, were written and no checkpoint knows of them; and what was evaluated."""
    run, seen = tmp_path_factory.mktemp("killed") / "run", {}

    def kill(*_):
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        scripted(patch, {2: 2.6, 4: 2.5}, seen, {2: 0.2, 4: 0.1})
        real_save, real_call = Checkpoints.save, Checkpoints._call_best
        patch.setattr(Checkpoints, "save", lambda self, step, *a: real_save(self, step, *a) if step < 4 else kill())
        if request.param == "before its name":
            patch.setattr(Checkpoints, "_call_best", lambda self, target, metric: kill() if target.name.endswith("4") else real_call(self, target, metric))
        with pytest.raises(Killed):
            train(recipes.load("copy-task", [*TINY, f"log.dir={run}", "schedule.warmup_steps=2", "train.steps=6", "evaluate.every=2"]))
    assert [p.name for p in (run / "checkpoints").glob("step-*")] == ["step-00000003"]
    return run, seen


@pytest.fixture
def killed_after_best(killed_once, tmp_path) -> tuple[Path, dict]:
    run, seen = killed_once
    return shutil.copytree(run, tmp_path / "run", symlinks=True), dict(seen)


@pytest.mark.parametrize(
    ("overrides", "told", "best"),
    [
        ([], {4: 2.5}, (2.5, 4)),
        (["layout.precision=bf16"], {4: 2.55}, (2.5, 4)),
        (["layout.precision=bf16"], {4: 2.45}, (2.45, 4)),  # the same step again, other weights
        (["evaluate.every=5"], {5: 2.55, 6: 2.58}, (2.5, 4)),
        (["evaluate.every=5"], {5: 2.55, 6: 2.4}, (2.4, 6)),
        (["evaluate.best=valid/accuracy", "evaluate.every=6"], {6: 2.3}, (0.1, 4)),  # by its own metrics, though it was not chosen by this one
    ],
)
def test_best_after_a_kill_is_what_was_evaluated(killed_after_best, monkeypatch, overrides, told, best):
    from gradus import models

    run, seen = killed_after_best
    metric = "valid/accuracy" if "accuracy" in str(overrides) else "valid/loss"
    scripted(monkeypatch, told, seen)
    if metric == "valid/accuracy" and (run / "checkpoints" / "best-step-00000002").exists():
        best = (0.2, 2)  # killed before the one of step 4 took its place
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
