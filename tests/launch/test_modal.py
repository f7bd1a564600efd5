"""The app that is written for Modal: read as text, imported by Modal's own package, and run on this machine."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.cli import main

TINY = ["model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.n_layers=1", "data.n_train=64", "data.n_valid=8", "batch.samples=8"]


def write(tmp_path: Path, *words: str) -> str:
    """The app's text."""
    assert main(["launch", "modal", *words, "--to", str(tmp_path / "app.py")]) == 0
    return (tmp_path / "app.py").read_text()


def load(file: Path):
    """The app as Modal imports it."""
    pytest.importorskip("modal", reason="no modal here: the extra cloud brings it")
    spec = importlib.util.spec_from_file_location("app", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_app_has(tmp_path, monkeypatch, capsys):
    """An image with packages and local files, a volume, a secret, a GPU, a class with enter and method, a function, two entrypoints."""
    monkeypatch.chdir(tmp_path)
    text = write(tmp_path, "copy-task", *TINY, "train.steps=3", "schedule.warmup_steps=0", "--gpu", "H100:2", "--secret", "hub", "log.dir=runs/a")  # fmt: skip
    tree = ast.parse(text)
    found = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert set(found) == {"at", "train", "main", "Model", "generate"}
    assert "modal.enter" in found["Model"] and "modal.method" in found["Model"] and "modal.parameter" in found["Model"]
    assert "app.function" in found["train"] and "local_entrypoint" in found["main"]
    assert all(f"{name}.local" in found[entry] and f"{name}.remote" in found[entry] for name, entry in (("train", "main"), ("method", "generate")))
    of = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    given = {name: ast.literal_eval(value) for name, value in of.items() if name.isupper()}
    assert given["WORDS"] == ["train", "copy-task", *TINY, "train.steps=3", "schedule.warmup_steps=0", "--auto-resume", "--processes", "2"]
    assert given["GPU"] == "H100:2" and given["SECRETS"] == ["hub"] and given["VOLUME"] == "gradus" and given["SECONDS"] == 86_400
    assert any(re.match(r"torch[\d<,.]*>=2\.11", package) for package in given["PACKAGES"])
    assert given["FOLDERS"] == {"/root/gradus": str(Path(sys.modules["gradus"].__file__).parent)} and given["FILES"] == {}
    assert f"modal run {tmp_path}/app.py::main  # train" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*executing locally")
def test_it_imports_builds_and_trains(tmp_path, monkeypatch):
    """With Modal's package, and without an account: its objects are made, and the function that it would run there runs here."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(Path(sys.modules["gradus"].__file__).with_name("recipe").joinpath("library", "copy-task.yaml").read_text())
    write(tmp_path, str(recipe), *TINY, "train.steps=3", "schedule.warmup_steps=0", "evaluate.every=3", "--gpu", "none", "log.dir=runs/a")
    app = load(tmp_path / "app.py")
    import modal

    assert isinstance(app.app, modal.App) and isinstance(app.image, modal.Image) and isinstance(app.volume, modal.Volume)
    assert isinstance(app.train, modal.Function) and isinstance(app.Model, modal.cls.Cls)
    assert app.FILES["/root/inputs/mine.yaml"] == str(recipe)
    summary = json.loads(app.train.local())
    assert summary["metrics"]
    assert (tmp_path / "runs" / "a" / "checkpoints").is_dir()
    run = subprocess.run(
        [sys.executable, "-m", "modal", "run", "app.py::main", "--help"], capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "100"}
    )
    assert run.returncode == 0 and "--here" in run.stdout, run.stderr


@pytest.mark.filterwarnings("ignore:.*executing locally")
def test_it_generates(tmp_path, monkeypatch, capsys):
    """The class loads once and its method continues a text, as `gradus generate` does."""
    from gradus import models
    from gradus.data import tokenizers
    from gradus.recipe.schema import GPTConfig

    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizers.train_bpe(["to be or not to be, that is the question "] * 4, 300)
    folder = tmp_path / "tiny model"
    model = models.build(GPTConfig(vocab_size=tokenizer.vocab_size, n_layers=1, d_model=16, n_heads=2, d_ff=32, seq_len=64))
    models.save(model, str(folder))
    tokenizer.save(folder)
    text = write(tmp_path, "--model", str(folder), "--gpu", "none", "--precision", "fp32")
    assert "PRECISION = 'fp32'" in text and "def train" not in text and "volume get" not in text
    app = load(tmp_path / "app.py")
    out = app.Model().generate.local("to be", max_new=8, temperature=0.0)
    assert out.startswith("to be") and len(tokenizer.encode(out)) > len(tokenizer.encode("to be"))
    capsys.readouterr()
    assert main(["generate", str(folder), "to be", "--max-new", "8"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["copy-task", "--gpu", "A200"], "--gpu=A200: Modal has no A200. Did you mean"),
        (["copy-task", "--gpu", "A100:9"], "--gpu=A100:9: give TYPE or TYPE:N with N from 1 to 8"),
        (["copy-task", "--secret", "a b"], "--secret=a b: give a name of letters"),
        ([], "nothing to do. Give a RECIPE to train, or --model MODEL to generate from."),
        (["copy-task", "log.dir=/runs"], "log.dir=/runs: the run folder has the same path here and there."),
        (["copy-task", "train.stepz=1"], "Did you mean train.steps?"),
        (["copy-task", "--to", "my-app.txt"], "--to=my-app.txt: Modal imports it. Give a file name like app.py."),
    ],
)
def test_mistakes(tmp_path, capsys, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "modal", *(["--to", "app.py"] if "--to" not in words else []), *words]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", [["slurm", "--dry-run"], ["modal"]])
def test_no_writing_waits_for_the_reader_of_a_pipe(tmp_path, capsys, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("app.py")
    assert main(["launch", *where, "copy-task", "--to", "app.py"]) == 2
    assert "app.py: not a file. Give another name." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["app.py"]
