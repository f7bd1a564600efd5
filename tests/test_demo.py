"""`gradus demo`: the commands that it shows are those that run, up to the first that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gradus import cli
from gradus.demo import demo
from gradus.proof import check

SMALL = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=16", "batch.samples=16", "train.steps=12"]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gradus", "demo"])


def shown(out: str) -> list[str]:
    return [line.split()[2] for line in out.splitlines() if line.startswith("$ gradus ")]


def test_the_journey(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(check, "WAIT", 1.0)  # whether this machine loads data fast enough is another's matter
    for n in (1, 2):  # a second time in the same folder too
        assert demo(cli.run, SMALL) == 0
        out = capsys.readouterr().out
        assert shown(out) == ["plan", "check", "train", "prove", "report"]
        runs = [folder for folder in Path("runs/copy-task").iterdir() if not folder.is_symlink()]
        newest = Path("runs/copy-task/latest").resolve()
        assert len(runs) == n and newest == max(runs).resolve() and f"Everything is in runs/copy-task/{newest.name};" in out
        assert json.loads((newest / "environment.json").read_text())["command"] == " ".join(["gradus train copy-task", *SMALL])
        assert f"$ gradus train copy-task {' '.join(SMALL)}\n" in out and " predicted  measured " in out.split("$ gradus prove")[1]
        assert (newest / "report" / "report.html").is_file()


@pytest.mark.parametrize("failing", ["plan", "check", "train", "prove", "report"])
def test_it_ends_at_the_first_command_that_fails(failing, capsys):
    def gradus(words: list[str]) -> int:
        Path("runs/copy-task/latest").mkdir(parents=True, exist_ok=True)
        return 7 if words[0] == failing else 0

    pytest.importorskip("matplotlib")
    assert demo(gradus) == 7
    out = capsys.readouterr().out
    assert shown(out)[-1] == failing and "What next?" not in out


def test_without_matplotlib_there_is_no_report(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    Path("runs/copy-task/latest").mkdir(parents=True)
    assert demo(lambda words: 0) == 0
    out = capsys.readouterr().out
    assert shown(out) == ["plan", "check", "train", "prove"]
    (note,) = [line for line in out.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: gradus report needs the package matplotlib") and "pip install" in note


def test_an_interrupt_ends_it(monkeypatch, capsys):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "plan", interrupt)
    assert cli.main(["demo"]) == 130
    out, err = capsys.readouterr()
    assert shown(out) == ["plan"] and err == "\nstopped\n"
