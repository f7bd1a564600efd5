"""What a user types, and what a user mistypes: one clear line, exit code 2, no traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.cli import main

COPY = ["copy-task", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8",
        "schedule.warmup_steps=2", "batch.samples=16", "train.steps=4", "layout.device=cpu"]  # fmt: skip


def fails(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.startswith("error:")
    return error


def test_help_and_import_load_no_torch():
    code = "import sys, gradus, gradus.cli; gradus.cli.parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_verb_has_help(capsys):
    for verb in ("train", "show", "recipes", "models", "fetch", "tokenizer", "profile", "evaluate", "predict", "generate"):
        with pytest.raises(SystemExit) as e:
            main([verb, "--help"])
        assert e.value.code == 0 and "usage: gradus" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "copy-task", "optimizer.lrr=1"], "optimizer.lrr: unknown key. Did you mean optimizer.lr?"),
        (["train", "copy-tusk"], "Did you mean copy-task?"),
        (["train", "copy-task", "batch.samples=many"], "batch.samples"),
        (["train", "copy-task", "optimizer.lr=nan"], "optimizer.lr: must be a finite number, got nan"),
        (["train", "copy-task", "model.n_heads=3"], "n_heads=3"),
        (["train", "copy-task", "model.seq_len=4", "evaluate.samples=0"], "model.seq_len=4"),
        (["train", "copy-task", "layout.micro_batch=1000"], "layout.micro_batch"),
        (["train", "copy-task", "layout.device=cuda"], "layout.device=cuda"),
        (["train", "shakespeare-char-gpt"], "data.path"),
        (["train", "shakespeare-char-gpt", "data.path=nowhere.txt"], "nowhere.txt: no such file"),
        (["train", "digits-vit", "model.image_size=9"], "image_size=9"),
        (["train", "sst2-bert", "model.init=./nowhere"], "nowhere: no such file or folder"),
        (["frain", "copy-task"], "frain"),
        (["models", "gpt3-175c"], "Did you mean gpt3-175b?"),
        (["train", "copy-task", "--resume", "log.dir=nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, said, capsys, monkeypatch):
    import torch

    if "layout.device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    error = fails(capsys, *arguments)
    assert said in error
    assert len(error.strip().splitlines()) == 1, error


def test_all_problems_are_told_at_once(capsys, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "task: {name: copy}\nmodel: {family: seq2seq, n_layers: 2, d_model: 64, n_heads: 4, d_fff: 128}\ndata: {kind: synthetic}\n"
        "optimizer: {name: adam, lrr: 1.0}\nbatch: {samples: -3}\ntrain: {steps: ten}\n"
    )
    error = fails(capsys, "train", str(recipe))
    for said in ("model.d_fff", "optimizer.lrr", "optimizer.lr", "batch.samples", "train.steps"):
        assert said in error
    assert "pydantic" not in error and "http" not in error


def test_train_show_evaluate_resume(capsys, tmp_path):
    run = tmp_path / "run"
    assert main(["train", *COPY, f"log.dir={run}"]) == 0
    out = capsys.readouterr().out
    for said in ("ten untrained models decode 1 2 3", "micro-batch 16 × accumulation 1", "train_runtime", "train_samples_per_second",
                 "train_steps_per_second", "train_loss", "epoch", "exact match on 8 held-out sequences", "1 2 3 4 5 6 7 8 9 10  →"):  # fmt: skip
        assert said in out
    untrained = out.split("decode 1 2 3 ...:\n")[1].splitlines()[:10]
    assert all(len(line.split()) == 10 for line in untrained) and len(set(untrained)) > 1
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    assert main(["train", str(run), "--resume"]) == 0
    assert "resumed from" in capsys.readouterr().out
    assert main(["evaluate", str(run)]) == 0
    assert "exact_match" in capsys.readouterr().out
    assert "there is a run already" in fails(capsys, "train", *COPY, f"log.dir={run}")
    assert "another run" in fails(capsys, "train", str(run), "--resume", "train.seed=5")


def test_show_prints_what_was_derived(capsys):
    assert main(["show", *COPY, "layout.micro_batch=8"]) == 0
    out = capsys.readouterr().out
    for said in ("steps_an_epoch: 4", "accumulation: 2", "micro_batch: 8", "vocab_size: 11", "schedule_end: 4"):
        assert said in out


def test_models_counts_a_405b_preset(capsys):
    assert main(["models", "llama3.1-405b", "gpt2"]) == 0
    out = capsys.readouterr().out
    assert "405,853,388,800" in out and "124,439,808" in out


def test_json_file_of_the_hands_on(capsys, tmp_path):
    """S2's way in: its keys are mapped, an unknown one is named, and its figures are printed and kept."""
    labelled = tmp_path / "data"
    labelled.mkdir()
    for split in ("train", "test"):
        (labelled / f"{split}.jsonl").write_text(
            "".join(json.dumps({"text": f"a film {i} {'good' if i % 2 else 'bad'}", "label": i % 2}) + "\n" for i in range(64))
        )
    (tmp_path / "config.json").write_text(
        json.dumps({"TrainingArgs": {"output_dir": str(tmp_path / "out"), "evaluation_strategy": "epoch", "num_train_epochs": 2, "per_device_train_batch_size": 16,
                    "per_device_eval_batch_size": 16, "learning_rate": 5e-5, "fp16": False, "logging_strategy": "no", "save_strategy": "no",
                    "report_to": "none", "disable_tqdm": True, "push_to_hub": True}})
    )  # fmt: skip
    small = ["model.init=null", "model.preset=null", "model.family=bert", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.n_classes=2",
             "tokenizer.kind=bpe", "tokenizer.vocab_size=300", f"data.path={labelled}", f"data.cache={tmp_path / 'cache'}", "evaluate.samples=0"]  # fmt: skip
    assert main(["train", "imdb-bert", "--json_file", str(tmp_path / "config.json"), *small]) == 0
    captured = capsys.readouterr()
    assert "push_to_hub" in captured.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for key in ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "epoch"):
        assert key in summary and key in captured.out
    assert summary["epoch"] == 2 and summary["samples"] == 128


def test_library_recipes_are_listed(capsys):
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert "copy-task-s1" in out and "cifar10-vit-G14" in out


def test_tokenizer_train(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    assert main(["tokenizer", "train", str(tmp_path / "text.txt"), "--vocab-size", "280", "--to", str(tmp_path / "bpe")]) == 0
    from gradus.data import tokenizers

    t = tokenizers.load(tmp_path / "bpe")
    assert t.decode(t.encode("the cat sat")) == "the cat sat" and len(t.encode("the cat")) < 7
    assert Path(tmp_path / "bpe" / "tokenizer.json").exists()


def test_a_full_disk_anywhere_is_one_clear_line(capsys, monkeypatch, tmp_path):
    from gradus.rows import RowFile

    def full(self, rows):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr(RowFile, "write", full)
    assert "metrics.jsonl: No space left on device" in fails(capsys, "train", *COPY, f"log.dir={tmp_path / 'run'}")


def test_a_full_device_says_what_to_set(capsys, monkeypatch, tmp_path):
    import torch

    from gradus.train.loop import Trainer

    def full(self, micro_batches, counts=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "step", full)
    assert "layout.micro_batch (it is 16)" in fails(capsys, "train", *COPY, f"log.dir={tmp_path / 'run'}")


def test_a_missing_tracker_leaves_no_run_behind(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "gradus[track]" in fails(capsys, "train", *COPY, f"log.dir={tmp_path / 'run'}", "log.wandb=x")
    assert main(["train", *COPY, f"log.dir={tmp_path / 'run'}"]) == 0
