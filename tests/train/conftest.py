from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gradus import recipe as recipes
from gradus.train.loop import Trainer
from gradus.train.run import train
from gradus.train.session import open_session

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # the *_parts.py, and what all tests share

import hook_parts  # noqa: E402
import run_parts  # noqa: E402
from nvml_parts import FakeNvml  # noqa: E402
from terminals import Terminal  # noqa: E402


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    torch.set_num_threads(1)
    train(recipes.load("copy-task", [*run_parts.TINY, f"log.dir={folder}"]))
    return folder


@pytest.fixture
def trainer(tmp_path) -> Trainer:
    session = open_session(recipes.load("copy-task", [*hook_parts.TINY, f"log.dir={tmp_path / 'run'}"]))
    return Trainer(session, session.lay_out(), tmp_path / "run")


@pytest.fixture
def text(tmp_path):
    """A corpus with lines of unequal length, and labelled rows."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "seven", "black", "crows", "who", "did", "not", "mind"]
    lines = [" ".join(words[i % 7 : i % 7 + 1 + i % 9]) for i in range(120)]
    (tmp_path / "train.txt").write_text("\n\n".join(lines))
    (tmp_path / "valid.txt").write_text("\n\n".join(lines[:20]))
    rows = "\n".join(f"{line}\t{i % 2}" for i, line in enumerate(lines))
    (tmp_path / "labelled").mkdir()
    (tmp_path / "labelled" / "train.tsv").write_text("sentence\tlabel\n" + rows + "\n")
    (tmp_path / "labelled" / "dev.tsv").write_text("sentence\tlabel\n" + rows + "\n")
    return tmp_path


@pytest.fixture
def pairs(tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"{split}.de").write_text("eins zwei drei vier\nzwei\n" * 8)
        (tmp_path / f"{split}.en").write_text("one two three four\ntwo\n" * 8)
    more = [
        "layout.device=cpu",
        "layout.precision=fp32",
        "evaluate.test=false",
        "data.test=null",
        "optimizer.lr=1",
        f"data.cache={tmp_path / 'cache'}",
    ]
    size = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.seq_len=16", "tokenizer.kind=word", "batch.tokens=64"]
    return [f"data.path={tmp_path}", *size, *more]


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output a terminal; the value gives what it was told, and ends it."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def make(columns: int) -> Terminal:
        made = Terminal(columns)
        monkeypatch.setattr(sys, "stdout", made.out)
        return made

    return make


@pytest.fixture
def fake(monkeypatch):
    def install(figures: dict, start: Exception | None = None) -> FakeNvml:
        module = FakeNvml(figures, start)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return install


@pytest.fixture
def here(tmp_path, monkeypatch):
    """In a folder of its own."""
    monkeypatch.chdir(tmp_path)
