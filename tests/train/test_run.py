"""A run from its recipe to its summary: what it says, what it writes, what it tells before it begins."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import hook_parts
import new_parts
import pytest
import torch
from new_parts import recipe_of, reviews, table
from run_parts import TINY, losses

from gradus import models
from gradus import recipe as recipes
from gradus.errors import EnvironmentFault, UserError
from gradus.models.weights import LoadReport
from gradus.recipe.schema import BertConfig, ViTConfig
from gradus.train import machine
from gradus.train.run import emulated, train, weights_line
from gradus.train.session import open_session


def test_a_run_folder_holds_what_it_should_and_nothing_else(undisturbed):
    assert {p.name for p in undisturbed.iterdir()} == {"recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", "checkpoints"}
    kept = sorted(p.name for p in (undisturbed / "checkpoints").iterdir())
    assert kept[0] == "best" and kept[1].startswith("best-step-") and kept[2:] == ["step-00000039", "step-00000040"]
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["steps"] == 40 and summary["samples"] == 640 and summary["hours_per_epoch"] > 0
    assert summary["train_samples_per_second"] == pytest.approx(640 / summary["train_runtime"], rel=0.01)
    assert summary["train_runtime"] == pytest.approx(summary["seconds"]["train"] + summary["seconds"]["data"], abs=0.01)
    assert summary["train_loss"] == pytest.approx(sum(losses(undisturbed).values()) / 40, rel=1e-5)


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


def test_a_processor_without_bf16_is_told(monkeypatch):
    def note(device: str = "cpu", **layout) -> str | None:
        return emulated(recipes.load("copy-task", **{f"layout.{k}": v for k, v in layout.items()}).layout, torch.device(device))

    for flags, told in ((["avx2", "avx512f"], True), (["avx512_bf16"], False), ([], False)):
        monkeypatch.setattr(machine, "cpu_flags", lambda flags=flags: flags)
        assert bool(note(precision="bf16")) == bool(note(precision="pure_bf16")) == told
    monkeypatch.setattr(machine, "cpu_flags", lambda: ["avx2"])
    assert note(precision="bf16").endswith("layout.precision=fp32 is faster here.")
    assert note(shard=2, param_dtype="bf16").endswith("layout.param_dtype=null is faster here.")
    assert note() is None and note("cuda", precision="bf16") is None


def test_where_a_peak_cannot_be_counted_anew_a_second_run_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gradus.train.run.begin_run", lambda: False)
    train(recipes.load("copy-task", [*hook_parts.TINY, "train.steps=3", f"log.dir={tmp_path / 'run'}"]))
    assert "note: this process has trained before: its peak of memory may be of then" in capsys.readouterr().out


def test_the_end_says_which_step_was_best_and_by_what(tmp_path, capsys):
    outcome = train(recipes.load("copy-task", [*TINY, "train.steps=12", "evaluate.every=5", f"log.dir={tmp_path / 'run'}"]))
    best = outcome.summary["best"]
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("best "))
    assert line.split(maxsplit=1)[1] == f"{best['metric']} {best['value']:.4f}, at step {best['step']} of 12"


def test_a_head_of_another_size_starts_afresh_and_it_is_said(tmp_path):
    for classes in (2, 3):
        config = BertConfig(vocab_size=300, seq_len=32, head="classification", n_classes=classes, **new_parts.TINY)
        models.save(models.build(config.named(["up", "down", "still"][:classes])), tmp_path / f"w{classes}")
    path = table(tmp_path / "train.csv", reviews(), ("id", "text", "label"))
    session = open_session(recipe_of(tmp_path, path, model={"init": str(tmp_path / "w2")}))
    assert session.recipe.model.n_classes == 3
    model = session.build()
    assert model.classifier.weight.shape[0] == 3 and model.config.classes == ("bad", "fair", "good")
    said = weights_line(session.recipe, model.load_report)
    assert (
        "new: classifier.weight, classifier.bias" in said
        and "a new head for 3 classes: that of the weights has 2" in said
    )
    with pytest.raises(UserError, match=r"head has the classes up, down, still; the data has bad, fair, good\. .*task\.classes="):
        open_session(recipe_of(tmp_path, path, model={"init": str(tmp_path / "w3")}))
    own = {"task": {"classes": ["bad", "fair", "good"]}, "model": {"init": str(tmp_path / "w3")}}
    session = open_session(recipe_of(tmp_path, path, **own))
    assert "its head was trained for up, down, still, and learns bad, fair, good" in weights_line(
        session.recipe, LoadReport(stored=models.config_of(tmp_path / "w3"))
    )


@pytest.mark.parametrize("kind", ["folders", "declared", "numbers"])
def test_pictures_are_numbered_as_the_head_that_they_start_from(kind, tmp_path):
    datasets, names = pytest.importorskip("datasets"), ["cat", "ant", "bee"]
    config = ViTConfig(**new_parts.TINY, image_size=8, patch_size=4, n_classes=3).named(names)
    models.save(models.build(config), tmp_path / "w")
    folder, numbered = new_parts.pictures(tmp_path / "p"), names if kind == "numbers" else ["ant", "bee", "cat"]
    if kind != "folders":
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64") if kind == "numbers" else datasets.ClassLabel(names=numbered)})
        files = sorted(folder.glob("*/*.png"))
        table = {"image": list(map(str, files)), "label": [numbered.index(file.parent.name) for file in files]}
        folder = tmp_path / "t"
        folder.mkdir()
        datasets.Dataset.from_dict(table, features=features).to_parquet(folder / "train.parquet")
    data = {"kind": "images", "path": str(folder)}
    session = open_session(recipe_of(tmp_path, folder, model={"init": str(tmp_path / "w")}, data=data, tokenizer=None))
    task = session.task
    assert task.classes == names == list(session.build().config.classes) == session.recipe.task.classes
    assert bool(task.matched) == (kind == "numbers")
    first = {split: [names[data[i]["label"]] for i in range(len(data))] for split, data in task.splits.items()}
    assert first == {"train": sorted(11 * names), "valid": sorted(names)}


@pytest.mark.slow
def test_a_bad_sample_is_named_and_the_run_ends_in_one_line(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na film\t0\na good film\t7\n")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\na film\t0\n")
    command = [sys.executable, "-m", "gradus", "train", "sst2-bert", "model.init=null", "model.preset=null", "model.family=bert", "model.n_layers=1", "model.d_model=16",
               "model.n_heads=2", "model.d_ff=32", "tokenizer.kind=byte", f"data.path={tmp_path}", f"data.cache={tmp_path / 'cache'}",
               "schedule.warmup_steps=0"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "row 2" in done.stderr and "label 7" in done.stderr
