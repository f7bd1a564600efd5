"""Killed at any instant, a run goes on to bitwise the same weights."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from run_parts import TINY, begun, digest, gradus, losses

from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.rows import read_rows
from gradus.train.run import train
from gradus.train.schedule import unusual

pytestmark = pytest.mark.usefixtures("no_plan")


@pytest.mark.slow
def test_the_same_run_twice_is_bitwise_the_same(undisturbed, tmp_path):
    train(recipes.load("copy-task", [*TINY, f"log.dir={tmp_path / 'run'}"]))
    assert digest(tmp_path / "run") == digest(undisturbed)


@pytest.mark.slow
def test_kill_9_at_any_instant(undisturbed, tmp_path):
    """SIGKILL at random moments, writing included, until it gets through: the same weights, every step once in the rows."""
    run, rng, kills = tmp_path / "run", random.Random(1), 0
    while True:
        arguments = [str(run), "--resume"] if (run / "recipe.yaml").exists() else ["copy-task", *TINY, f"log.dir={run}"]
        process = begun(tmp_path / "out", gradus, "train", *arguments)
        rows = run / "metrics.jsonl"
        before = rows.stat().st_size if rows.exists() else 0
        while process.is_alive() and (not rows.exists() or rows.stat().st_size <= before):
            time.sleep(0.005)  # until it takes steps
        if kills < 3:
            time.sleep(rng.uniform(0.0, 0.35))
            process.kill()
            kills += 1
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, (tmp_path / "out").read_text()
    assert kills
    assert digest(run) == digest(undisturbed)
    assert losses(run) == losses(undisturbed)


@pytest.mark.slow
def test_sigterm_saves_and_says_how_to_go_on(undisturbed, tmp_path):
    run = tmp_path / "run"
    process = begun(tmp_path / "out", gradus, "train", "copy-task", *TINY, f"log.dir={run}", "train.checkpoint_every=null")
    while process.is_alive() and not (run / "metrics.jsonl").exists():
        time.sleep(0.005)
    process.terminate()
    process.join()
    if process.exitcode == 0:
        pytest.skip("the run ended before the signal came")
    assert process.exitcode == 128 + signal.SIGTERM
    assert f"gradus train {run} --resume" in (tmp_path / "out").read_text()
    assert list((run / "checkpoints").glob("step-*"))
    from gradus.cli import main

    assert main(["train", str(run), "--resume"]) == 0
    assert digest(run) == digest(undisturbed)


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
    assert unusual(usual, 16) is None and "optimizer.lr=6e-04 schedule.name=linear" in unusual(noam, 16)
    assert unusual(recipes.load("copy-task", ["optimizer.lr=0.02"]), 16) is None, "new weights"


def test_a_run_folder_is_not_overwritten(undisturbed):
    with pytest.raises(UserError, match="--resume"):
        train(recipes.load("copy-task", [*TINY, f"log.dir={undisturbed}"]))


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


# ---------------------------------------------------------------- a longer run


def test_a_finished_run_that_is_made_longer_is_the_long_run(undisturbed, tmp_path, capsys):
    from gradus.cli import main

    run = tmp_path / "run"
    train(recipes.load("copy-task", [*TINY, f"log.dir={run}", "train.steps=20", "schedule.end_step=40", "train.checkpoint_every=null", "evaluate.every=20"]))
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


SMALL = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=16", "model.seq_len=16", "batch.samples=4", "data.limit=16"]
SMALL += ["data.limit_valid=8", "evaluate.samples=0", "evaluate.every=null", "schedule={name: constant}", "layout.device=cpu", "layout.threads=1"]


def test_a_resume_with_other_data_is_refused_or_told(tmp_path, capsys, monkeypatch):
    """Other content at the old path, or another path; a moved file is the same data, and an older run has kept nothing."""
    from gradus.cli import main

    monkeypatch.chdir(tmp_path)
    text = "To be, or not to be, that is the question.\n" * 60
    (tmp_path / "a.txt").write_text(text)
    assert main(["train", "shakespeare-char-gpt", *SMALL, "data.path=a.txt", "train.steps=2", "log.dir=run"]) == 0
    shutil.copytree("run", "older", symlinks=True)
    (tmp_path / "older/data.json").unlink()
    (tmp_path / "moved").mkdir()
    shutil.move("a.txt", "moved/b.txt")
    assert main(["train", "run", "--resume", "train.steps=3", "data.path=moved/b.txt"]) == 0
    (tmp_path / "a.txt").write_text(text[::-1])
    capsys.readouterr()
    assert main(["train", "run", "--resume", "train.steps=4"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --resume: train and valid of data.path=") and error.count("\n") == 1 and "--data-changed" in error
    assert main(["evaluate", "run"]) == 0 and "note: valid: other data than run has read" in capsys.readouterr().err
    assert main(["train", "run", "--resume", "train.steps=4", "--data-changed"]) == 0
    assert "note: --data-changed: other data from step 4 on (train and valid of" in capsys.readouterr().out
    assert main(["train", "run", "--resume", "train.steps=5"]) == 0 and main(["evaluate", "run"]) == 0
    assert main(["train", "older", "--resume", "train.steps=3"]) == 0
    told = capsys.readouterr()
    assert "other data" not in told.out + told.err
    assert main(["train", "run", "--data-changed"]) == 2 and "no effect without --resume" in capsys.readouterr().err


def _texts(folder: Path, valid: str) -> None:
    (folder / "train.txt").write_text("To be, or not to be.\n\n" * 40)
    (folder / "valid.txt").write_text(f"{valid} and so on.\n\n" * 40)


def _table(folder: Path, valid: str) -> None:
    for split, text in (("train", "good"), ("valid", valid)):
        (folder / f"{split}.csv").write_text("text,label\n" + f"{text},a\nbad,b\n" * 8)


def _parallel(folder: Path, valid: str) -> None:
    for split, text in (("train", "one"), ("valid", valid)):
        (folder / f"{split}.de").write_text("eins zwei\n" * 20)
        (folder / f"{split}.en").write_text(f"{text} two\n" * 20)


def _images(folder: Path, valid: str) -> None:
    from PIL import Image

    for split, shade in (("train", 9), ("valid", len(valid))):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for i in range(3):
                Image.new("L", (8, 8), shade + 20 * i).save(folder / split / name / f"{i}.png")


def _parquet(folder: Path, valid: str) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split, text in (("train", "good"), ("valid", valid)):
        pq.write_table(pa.table({"text": [text, "bad"] * 8, "label": [0, 1] * 8}), folder / f"{split}.parquet")


def _saved(folder: Path, valid: str) -> None:
    datasets = pytest.importorskip("datasets")
    tables = {split: {"text": [text, "bad"] * 8, "label": [0, 1] * 8} for split, text in (("train", "good"), ("valid", valid))}
    datasets.DatasetDict({split: datasets.Dataset.from_dict(table) for split, table in tables.items()}).save_to_disk(folder)


@pytest.mark.parametrize(
    ("write", "recipe", "words"),
    [
        (_texts, "shakespeare-char-gpt", []),
        (_texts, "wikitext2-t5", ["tokenizer={kind: bpe, vocab_size: 400}", "model.seq_len=16", "data.max_len=16"]),
        (_table, "sst2-bert", ["tokenizer={kind: bpe, vocab_size: 300}"]),
        (_parquet, "sst2-bert", ["tokenizer={kind: bpe, vocab_size: 300}"]),
        (_saved, "sst2-bert", ["tokenizer={kind: bpe, vocab_size: 300}"]),
        (_parallel, "multi30k-seq2seq", ["tokenizer.vocab_size=300", "data.test=null"]),
        (_images, "digits-vit", ["data.source=path"]),
    ],
)
def test_what_was_read_is_known_by_its_content_in_every_kind_of_data(write, recipe, words, tmp_path, monkeypatch):
    """Of each split by itself: in another folder it is the same, and other validation data leave the training data as they were."""
    from gradus.tasks import open_task

    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path / "cache"))
    contents = []
    for name, valid in (("a", "fine"), ("moved", "fine"), ("other", "fair-or-foul")):
        (tmp_path / name).mkdir()
        write(tmp_path / name, valid)
        opened = open_task(recipes.load(recipe, [*words, "evaluate.test=false", f"data.path={tmp_path / name}"], configure=None))
        contents.append(opened.content())
    first, moved, other = contents
    assert first == moved and set(first) == {"train", "valid"}
    assert other["train"] == first["train"] and other["valid"] != first["valid"]


@pytest.mark.parametrize("recipe", ["copy-task", "digits-vit"])
def test_data_that_are_made_or_packaged_have_no_content_to_compare(recipe):
    from gradus.tasks import open_task

    pytest.importorskip("sklearn")
    assert open_task(recipes.load(recipe, ["data.n_train=8"] if recipe == "copy-task" else [])).content() == {}
